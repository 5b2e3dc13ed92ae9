"""Does this checkpoint compute the same here as in transformers?

    python launch/check_model.py FOLDER [--data rows.jsonl]

Runs in one process, on a GPU or a CPU, with the first rows of --data, or with pictures drawn here. The
checkpoint's own processor and transformers' own model, which reads one sample at a time, are the
reference. Prints a line for each comparison: the largest difference relative to the largest number, and
its bound for the compute dtype; then PASS (exit code 0) or FAIL (1). Of the modules it names the first
one that is wrong, or else the one that differs most. Two copies of the model are in memory, at the end
three."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions

versions.check()


import copy
import tempfile
from collections.abc import Iterator
from contextvars import Context
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

import train_ppo_vl as ppo
from common import distributed
from common.buffers import Batch, Pack
from common.data.loader import load_pixels
from common.data.rows import Prompt, load_prompts, make_prompt
from common.ground.files import UserError, say
from common.model import fsdp, packs, vlm, weights
from common.model.policy import logprobs_of
from launch import tool
from launch.chat import Chat

# By compute dtype: bounds of differences, and of the share of greedy samples that differ, as near ties
# may decide them in bfloat16.
BOUNDS = {torch.float32: (1e-4, 0.0), torch.bfloat16: (0.05, 0.5)}
ROWS, TOKENS = 6, 8  # most rows of the data, and tokens of a sample
# The flags must name rows and a reward, which are not used here.
FLAGS = f"--data rows --reward exact --advantage grpo --max_new_tokens {TOKENS}"


@torch.no_grad()
def compare(chat: Chat, data: str, scratch: Path) -> Iterator[tuple[str, float, float]]:
    """Yields (what is compared, largest difference, its bound)."""
    processor = chat.processor
    args = ppo.parse_args(["--model", str(processor.folder), *FLAGS.split()])
    ranks = distributed.start(args.timeout, args.hsdp)
    actor = ppo.build_models(args, processor, ranks.device).actor
    ppo.load_models(args, {"actor": actor}, ranks)
    bound, ties = BOUNDS[actor.model.setup.dtype]

    prompts = load_prompts(data, processor, args)[:ROWS] if data else draw(chat, scratch)
    if chat.family.media:
        try:
            yield "prompt ids", wrong_ids(chat, prompts), 0.0
        except Exception as error:  # templates and missing packages may raise anything
            say(f"prompt ids are not compared, as its own processor fails here: {error!r:.150}")

    pixels: dict[int, Any] = {
        k: load_pixels(prompt, processor) for k, prompt in enumerate(prompts) if prompt.grids
    }
    count = len(prompts)
    batch = Batch(prompts, [*range(count)], [0] * count, patches=dict(pixels))
    sampling = replace(ppo.sampling_of(args, processor, ranks.device), greedy=True)
    samples = ppo.rollout(actor, batch, sampling, 2)  # two of a prompt share it in a pack
    chat.model.setup = actor.model.setup
    for k in pixels:
        features = vlm.image_features(chat.model, pixels[k], prompts[k].patch_grids)
        yield f"image features of prompt {k}", difference(samples.features[k], features), bound

    longest = max(range(count), key=lambda k: prompts[k].image_tokens)
    (pack,) = packs.of_batch(actor.model, samples.select(torch.tensor([2 * longest])))
    with fsdp.unsharded(actor):
        errors = module_errors(chat, actor.model, prompts[longest], pack)
    error, name = next((pair for pair in errors if pair[0] > bound), max(errors))
    yield f"module by module, {name}", error, bound

    packed, responses = logprobs_of(actor, samples), samples.split(samples.tokens)
    pairs = zip(samples.prompt_index.tolist(), responses)
    alone = torch.cat([logprobs(chat, prompts[k], response) for k, response in pairs])
    yield "log-probs of packs", difference(packed, alone), bound
    yield "log-probs of the sampler", difference(samples.logprobs, packed), bound
    pairs = zip(prompts, responses[::2])  # of two alike
    others = [chat.generate(prompt, TOKENS).tolist() != ours.tolist() for prompt, ours in pairs]
    yield "greedy samples", sum(others) / count, ties

    problem = weights.export(actor, processor.save, scratch / "export")
    if problem:
        raise UserError(problem)
    again = Chat(str(scratch / "export"), chat.model.device).model.state_dict()
    same = map(torch.equal, again.values(), chat.model.state_dict().values())
    yield "weights of an export", len(again) - sum(same), 0.0


def draw(chat: Chat, folder: Path) -> list[Prompt]:
    """Three prompts, with no picture, one and two; for a text-only model all without."""
    paths = []
    if chat.family.media:
        paths = [str(folder / "tall.png"), str(folder / "wide.png")]
        for path, size in zip(paths, ((90, 300), (320, 100))):
            Image.effect_noise(size, 90).save(path)
    return [make_prompt(chat.processor, "What is this?", paths[:count]) for count in range(3)]


def wrong_ids(chat: Chat, prompts: list[Prompt]) -> int:
    """How many prompts the checkpoint's own processor encodes differently."""
    processor = transformers.AutoProcessor.from_pretrained(chat.processor.folder)
    if not hasattr(processor, "image_processor"):
        raise ValueError("AutoProcessor gives a tokenizer alone")
    wrong, options = 0, {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    for prompt in prompts:
        messages, paths = copy.deepcopy(prompt.messages), iter(prompt.images)
        for message in messages:
            for part in message["content"]:
                if part["type"] == "image":
                    part["path"] = next(paths)
        batch = processor.apply_chat_template(messages, add_generation_prompt=True, **options)
        wrong += not torch.equal(batch["input_ids"][0], prompt.input_ids)
    return wrong


def module_errors(
    chat: Chat, model: vlm.Model, prompt: Prompt, pack: Pack
) -> list[tuple[float, str]]:
    """(error, name) of each module, given the inputs of its counterpart in a forward pass by transformers
    of the pack's one sample, in the order in which those end. Layers use the pack's attention."""
    errors, ours = [], dict(model.named_modules())
    names = {module: name for name, module in chat.model.named_modules() if name in ours}
    # LLaVA-OneVision hands logits_to_keep down to its layers, where nothing reads it
    packed = {"attention": pack.attention, "attention_mask": None, "logits_to_keep": None}

    def run_ours(module, args, options, out) -> None:
        if module in names and not isinstance(module, transformers.PreTrainedModel):
            mine = ours[names[module]]
            if any(hasattr(part, "slot_layer") for part in mine.modules()):
                options = options | packed
            # in a new context, as transformers collects outputs of its own modules in the current one
            error = difference(Context().run(mine, *args, **options), out)
            errors.append((error, names[module]))

    hook = register_module_forward_hook(run_ours, with_kwargs=True)
    logprobs(chat, prompt, pack.targets.cpu())
    hook.remove()
    return errors


def logprobs(chat: Chat, prompt: Prompt, tokens: Tensor) -> Tensor:
    """Log-probs (n,) of a response's tokens (n,), by a forward pass of transformers."""
    whole = replace(prompt, input_ids=torch.cat([prompt.input_ids, tokens]))
    logits = chat.model(**chat.inputs(whole), use_cache=False).logits[0].float().cpu()
    logits[:, list(chat.processor.banned_ids)] = -torch.inf
    return -F.cross_entropy(logits[-1 - len(tokens) : -1], tokens, reduction="none")


def difference(ours, theirs) -> float:
    """The largest difference between the first tensors of both, relative to the largest number of theirs;
    infinite if it is not finite."""
    ours, theirs = (tree_leaves(x)[0].float().flatten().cpu() for x in (ours, theirs))
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)
    return float(error.nan_to_num(torch.inf))


@tool.one_message()
def main(argv: list[str] | None = None) -> int:
    parser = tool.parser(__doc__)
    parser.add_argument("folder", help="checkpoint in Hugging Face format, or a name on the hub")
    parser.add_argument("--data", default="", help="rows as train_ppo_vl.py reads them")
    args = parser.parse_args(argv)
    transformers.logging.disable_progress_bar()
    chat, passed = Chat(args.folder, distributed.choose_device()), True
    with tempfile.TemporaryDirectory() as scratch:
        for name, error, bound in compare(chat, args.data, Path(scratch)):
            passed &= error <= bound
            word = "ok  " if error <= bound else "FAIL"
            say(f"{word} {name}: {error:.2g}, at most {bound:g}")
    media, replies = chat.family.media, chat.family.replies_show_images
    able = {"images": "image" in media, "clips": "video" in media, "replies with pictures": replies}
    lacks = [what for what in able if not able[what]]
    say(f"not for this family: {', '.join(lacks) or 'nothing'}")
    say("PASS" if passed else "FAIL")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
