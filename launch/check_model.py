"""Does this checkpoint compute here what it computes in transformers?

    python launch/check_model.py FOLDER [--data rows.jsonl]

On one process, on a GPU or a CPU: what the trainers make of the first rows of --data, or of pictures
that are drawn here, against the checkpoint's own processor and transformers' own model, which reads
one sample at a time. A line for each comparison, with the largest difference relative to the largest
number, and the bound for the compute type; then PASS or FAIL, which is also the exit code. Of all
modules, the first one that is wrong is named, or else the one that differs most. The model is held
twice, at the end three times."""

import copy
import sys
import tempfile
from collections.abc import Iterator
from contextvars import Context
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

import tool  # puts the project's folder on the path
from chat import Chat

# isort: split
import train_ppo_vl as ppo
from common import distributed
from common.buffers import Batch, Pack
from common.data.loader import load_pixels
from common.data.rows import Prompt, load_prompts, make_prompt
from common.files import say
from common.model import fsdp, vlm, weights
from common.model.packs import make_packs
from common.model.policy import logprobs_of

# By compute type: of numbers, and of the share of greedy samples, which near ties decide in bfloat16.
BOUNDS = {torch.float32: (1e-4, 0.0), torch.bfloat16: (0.05, 0.5)}
ROWS, TOKENS = 6, 8  # rows of the data, and tokens of a sample, at most
# Rows and a reward have to be named; they are read here, and it is never computed.
FLAGS = f"--data rows --reward {__file__}:no_reward --advantage grpo --max_new_tokens {TOKENS}"


@torch.no_grad()
def compare(chat: Chat, data: str, scratch: Path) -> Iterator[tuple[str, float, float]]:
    """(what is compared, largest difference, its bound)."""
    theirs, processor = chat.model, chat.processor
    args = ppo.parse_args(["--model", str(processor.folder), *FLAGS.split()])
    ranks = distributed.start(args.run.timeout, args.run.hsdp)
    actor = ppo.build_models(args, processor, ranks.device).actor
    ppo.load_models(args, {"actor": actor}, ranks)
    theirs.setup = actor.model.setup
    bound, ties = BOUNDS[theirs.setup.dtype]

    prompts = load_prompts(data, processor, args.data)[:ROWS] if data else draw(chat, scratch)
    if chat.family.media:
        try:
            ids = ids_of(chat, prompts)
            others = [a != b.input_ids.tolist() for a, b in zip(ids, prompts)]
            yield "prompt ids", sum(others), 0.0
        except Exception as error:  # templates and missing packages raise anything
            say(f"prompt ids are not compared, as its own processor fails here: {error!r:.150}")
    images = {k: load_pixels(prompt, processor) for k, prompt in enumerate(prompts) if prompt.grids}
    count = len(prompts)
    batch = Batch(prompts, [*range(count)], [0] * count, patches=dict(images))
    sampling = replace(ppo.sampling_of(args, processor, ranks.device), greedy=True)
    samples = ppo.rollout(actor, batch, sampling, 2)
    for k, pixels in images.items():
        error = difference(samples.features[k], vlm.image_features(theirs, *pixels))
        yield f"image features of prompt {k}", error, bound
    longest = max(range(count), key=lambda k: prompts[k].image_tokens)
    (pack,) = make_packs(actor.model, samples.select(torch.tensor([2 * longest])))
    with fsdp.unsharded(actor):
        errors = module_errors(chat, actor.model, prompts[longest], pack)
    error, name = next((pair for pair in errors if pair[0] > bound), max(errors))
    yield f"module by module, {name}", error, bound
    packed, tokens = logprobs_of(actor, samples), samples.split(samples.tokens)
    pairs = zip(samples.prompt_index.tolist(), tokens)
    expected = torch.cat([logprobs(chat, prompts[k], response) for k, response in pairs])
    yield "log-probs of packs", difference(packed, expected), bound
    yield "log-probs of the sampler", difference(samples.logprobs, packed), bound
    pairs = zip(prompts, tokens[::2])  # of two alike
    others = [chat.generate(prompt, TOKENS).tolist() != ours.tolist() for prompt, ours in pairs]
    yield "greedy samples", sum(others) / count, ties
    problem = weights.export(actor, processor, scratch / "export")
    if problem:
        raise ValueError(problem)
    again = Chat(str(scratch / "export"), theirs.device).model.state_dict()
    same = map(torch.equal, again.values(), theirs.state_dict().values())
    yield "weights of an export", len(again) - sum(same), 0.0


def draw(chat: Chat, folder: Path) -> list[Prompt]:
    """Prompts with no picture, one and two; with none, for a model of text."""
    paths, prompts = [], []
    for size in ((90, 300), (320, 100), (0, 0)):
        prompts.append(make_prompt(chat.processor, "What is this?", paths))
        if chat.family.media and any(size):
            paths.append(str(folder / f"{len(paths)}.png"))
            Image.effect_noise(size, 90).save(paths[-1])
    return prompts


def ids_of(chat: Chat, prompts: list[Prompt]) -> Iterator[list[int]]:
    """By the checkpoint's own processor."""
    processor = transformers.AutoProcessor.from_pretrained(chat.processor.folder)
    if not hasattr(processor, "image_processor"):
        raise ValueError("AutoProcessor gives a tokenizer alone")
    for prompt in prompts:
        messages, paths = copy.deepcopy(prompt.messages), iter(prompt.images)
        for part in (part for message in messages for part in message["content"]):
            if part["type"] == "image":
                part["path"] = next(paths)
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        ids = processor.apply_chat_template(messages, **options)["input_ids"]
        yield torch.as_tensor(ids).flatten().tolist()


def module_errors(
    chat: Chat, model: vlm.Model, prompt: Prompt, pack: Pack
) -> list[tuple[float, str]]:
    """Of each module, given the inputs of transformers' own in a forward pass of the one sample of a pack,
    in the order in which they end there. Layers mix tokens by the attention of the pack."""
    errors, ours = [], dict(model.named_modules())
    names = {module: name for name, module in chat.model.named_modules() if name in ours}
    # LLaVA-OneVision hands the last one down to its layers, and nothing there reads it
    packed = {"attention": pack.attention, "attention_mask": None, "logits_to_keep": None}

    def run_ours(module, args, options, out) -> None:
        if module in names and not isinstance(module, transformers.PreTrainedModel):
            mine = ours[names[module]]
            if any(hasattr(part, "slot_layer") for part in mine.modules()):
                options = options | packed
            # what transformers collects in a context are outputs of its own modules
            error = difference(Context().run(mine, *args, **options), out)
            errors.append((error, names[module]))

    hook = register_module_forward_hook(run_ours, with_kwargs=True)
    logprobs(chat, prompt, pack.targets.cpu())
    hook.remove()
    return errors


def logprobs(chat: Chat, prompt: Prompt, tokens: Tensor) -> Tensor:
    """(n,) of a response's tokens (n,), by a forward pass of transformers."""
    whole = replace(prompt, input_ids=torch.cat([prompt.input_ids, tokens]))
    logits = chat.model(**chat.inputs(whole), use_cache=False).logits[0].float().cpu()
    logits[:, list(chat.processor.banned_ids)] = -torch.inf
    return -F.cross_entropy(logits[-1 - len(tokens) : -1], tokens, reduction="none")


def difference(ours, theirs) -> float:
    """The largest difference relative to the largest number of theirs, of the first tensor that each holds;
    infinite if it is not finite."""
    ours, theirs = (tree_leaves(x)[0].float().flatten().cpu() for x in (ours, theirs))
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)
    return float(error.nan_to_num(torch.inf))


@tool.one_message()
def main(argv: list[str] | None = None) -> int:
    parser = tool.parser(__doc__)
    parser.add_argument("folder", help="checkpoint in Hugging Face format, or a name on the hub")
    parser.add_argument("--data", default="", help="rows as of train_ppo_vl.py")
    args = parser.parse_args(argv)
    transformers.logging.disable_progress_bar()
    chat, passed = Chat(args.folder, distributed.choose_device()), True
    with tempfile.TemporaryDirectory() as scratch:
        for name, error, bound in compare(chat, args.data, Path(scratch)):
            passed &= error <= bound
            word = "ok  " if error <= bound else "FAIL"
            say(f"{word} {name}: {error:.2g}, at most {bound:g}")
    able = {"images": "image" in chat.family.media, "clips": "video" in chat.family.media}
    able["replies with pictures"] = chat.family.replies_show_images
    lacks = [what for what in able if not able[what]]
    say(f"not for this family: {', '.join(lacks) or 'nothing'}")
    say("PASS" if passed else "FAIL")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
