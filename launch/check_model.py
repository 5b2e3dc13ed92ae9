"""Does this checkpoint compute here what it computes in transformers?

    python launch/check_model.py FOLDER [--data rows.jsonl]

On one process, on a GPU or a CPU: what the trainers make of the first rows of --data, or of pictures
that are drawn here, against the checkpoint's own processor and transformers' own model, which reads
one sample at a time. A line for each comparison, with the largest difference relative to the largest
number, and the bound for the compute type; then PASS or FAIL, which is also the exit code. The model
is held twice, at the end three times."""

import copy
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import tool  # puts the project's folder on the path
from chat import Chat

# isort: split
import train_ppo_vl as ppo
from common import distributed
from common.data.loader import PromptLoader, batches_in_order, load_pixels
from common.data.rows import Prompt, load_prompts, make_prompt
from common.files import say
from common.model import fsdp, vlm, weights
from common.model.attention import PackedAttention
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
    models = ppo.build_models(args, processor, ranks.device)
    ppo.load_models(args, models.by_role(), ranks)
    actor, sampling = models.actor, ppo.sampling_of(args, processor, ranks.device)
    theirs.setup = actor.model.setup
    bound, ties = BOUNDS[theirs.setup.dtype]

    prompts = load_prompts(data, processor, args.data)[:ROWS] if data else draw(chat, scratch)
    others = list(other_ids(chat, prompts))
    if others:
        yield "prompt ids", sum(others), 0.0
    with PromptLoader(processor, args.data, batches_in_order(prompts, ROWS)) as loader:
        samples = ppo.rollout(actor, loader.take(), replace(sampling, greedy=True), 2)
    for k, ours in samples.features.items():
        features = vlm.image_features(theirs, *load_pixels(prompts[k], processor))
        yield f"image features of prompt {k}", difference(ours, features), bound
    with fsdp.unsharded(actor):
        error, name = max(module_errors(chat, actor.model, prompts[-1]), default=(0.0, "none"))
    yield f"replaced modules, the worst: {name}", error, bound
    packed, tokens = logprobs_of(actor, samples), samples.split(samples.tokens)
    pairs = zip(samples.prompt_index.tolist(), tokens)
    expected = torch.cat([logprobs(chat, prompts[k], response) for k, response in pairs])
    yield "log-probs of packs", difference(packed, expected), bound
    yield "log-probs of the sampler", difference(samples.logprobs, packed), bound
    written = [chat.generate(prompt, TOKENS).tolist() for prompt in prompts]
    others = [a.tolist() != b for a, b in zip(tokens[::2], written)]
    yield "greedy samples", sum(others) / len(others), ties
    problem = weights.export(actor, processor, scratch / "export")
    if problem:
        raise ValueError(problem)
    again = Chat(str(scratch / "export"), theirs.device).model.state_dict()
    pairs = ((again[name], weight) for name, weight in theirs.state_dict().items())
    yield "weights of an export", sum(not torch.equal(*pair) for pair in pairs), 0.0


def draw(chat: Chat, folder: Path) -> list[Prompt]:
    """Prompts with no picture, one and two; with none, for a model of text."""
    pictures, prompts = [], []
    for size in ((90, 300), (320, 100), (64, 48)):
        prompts.append(make_prompt(chat.processor, "What is this?", pictures))
        path = folder / f"{len(prompts)}.png"
        Image.effect_noise(size, 90).convert("RGB").save(path)
        if chat.family.media:
            pictures.append(str(path))
    return prompts


def other_ids(chat: Chat, prompts: list[Prompt]) -> Iterator[bool]:
    """Whether prompts have other ids by the checkpoint's own processor, which models of text lack.
    Where it cannot be used here, as without torchvision, this is said."""
    if not chat.family.media:
        return
    try:
        processor = transformers.AutoProcessor.from_pretrained(chat.processor.folder)
        if not hasattr(processor, "image_processor"):
            raise ValueError("AutoProcessor gives a tokenizer alone")
        for prompt in prompts:
            messages, images = copy.deepcopy(prompt.messages), iter(prompt.images)
            for part in (part for message in messages for part in message["content"]):
                if part["type"] == "image":
                    part["path"] = next(images)
            options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
            ids = processor.apply_chat_template(messages, **options)["input_ids"]
            yield torch.as_tensor(ids).flatten().tolist() != prompt.input_ids.tolist()
    except Exception as error:  # templates and missing packages raise anything
        say(f"prompt ids are not compared, as its own processor fails here: {error!r:.150}")


def module_errors(chat: Chat, model: vlm.Model, prompt: Prompt) -> list[tuple[float, str]]:
    """Of the modules in the place of transformers' own, and of those that mix tokens by our attention,
    given the inputs of theirs in a forward pass."""
    errors, ours, hooks = [], dict(model.named_modules()), []
    index = torch.isin(prompt.input_ids, chat.family.visual_token_ids()).nonzero()[:, 0]
    whole = [(0, len(prompt.input_ids) + 1, 0, 0)]  # a pack with one segment
    segments = chat.family.attention_segments(whole, index)
    setup = model.setup
    attention = PackedAttention(segments, setup.backend, setup.device)
    for name, module in chat.model.named_modules():
        mine = ours.get(name, module)
        # FSDP makes subclasses of those that it gathers
        is_another = type(mine) is not type(module) and not isinstance(mine, FSDPModule)
        mixes = hasattr(mine, "slot_layer")
        if is_another or mixes:
            more = {"attention": attention, "attention_mask": None} if mixes else {}

            def compare_output(_, args, options, out, name=name, more=more):
                # LLaVA-OneVision hands it down to its layers, and nothing there reads it
                options.pop("logits_to_keep", None)
                ours_out = ours[name](*args, **options | more)
                if isinstance(out, tuple):  # attention returns its weights, too
                    ours_out, out = ours_out[0], out[0]
                errors.append((difference(ours_out, out), name))

            hooks.append(module.register_forward_hook(compare_output, with_kwargs=True))
    logprobs(chat, prompt, prompt.input_ids[:1])
    for hook in hooks:
        hook.remove()
    return errors


def logprobs(chat: Chat, prompt: Prompt, tokens: Tensor) -> Tensor:
    """(n,) of a response's tokens (n,), by a forward pass of transformers."""
    whole = replace(prompt, input_ids=torch.cat([prompt.input_ids, tokens]))
    logits = chat.model(**chat.inputs(whole), use_cache=False).logits[0].float().cpu()
    logits[:, list(chat.processor.banned_ids)] = -torch.inf
    return -F.cross_entropy(logits[-1 - len(tokens) : -1], tokens, reduction="none")


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest number of theirs; infinite if it is not finite."""
    ours, theirs = (x.float().flatten().cpu() for x in (ours, theirs))
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)
    return float(error.nan_to_num(torch.inf))


def lacks(family) -> str:
    """What is not possible with a family."""
    able = {"images": "image" in family.media, "clips": "video" in family.media}
    able["replies with pictures"] = family.replies_show_images
    return ", ".join(name for name in able if not able[name]) or "nothing"


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
    say(f"not for this family: {lacks(chat.family)}")
    say("PASS" if passed else "FAIL")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
