"""Does this checkpoint compute here what it computes in transformers?

    python launch/check_model.py FOLDER [--data rows.jsonl]

On one process, on a GPU or a CPU: what the trainers make of some rows (of --data, or with pictures
that are drawn here) against the checkpoint's own processor and transformers' own model, which reads
one sample at a time. A line for each comparison, with the largest difference relative to the largest
number, and the bound for the compute type; then PASS or FAIL, which is also the exit code. The model
is held twice."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from PIL import Image
from torch import Tensor

import train_ppo_vl as ppo
from chat import Chat
from common import distributed
from common.data.loader import PromptLoader
from common.files import say
from common.model import fsdp, vlm, weights
from common.model.policy import logprobs_of
from tool import one_message

# By compute type: of numbers, and of the share of greedy tokens; in bfloat16 near ties fall either way.
BOUNDS = {torch.float32: (1e-4, 0.0), torch.bfloat16: (0.05, 0.5)}
ROWS = 6  # at most, of the data
# A reward has to be named, and is never computed: rows need no answers.
FLAGS = f"--advantage grpo --reward {__file__}:no_reward --max_new_tokens 8 --samples_per_prompt 2"
SIZES = ((64, 48), (90, 300), (320, 100))
QUESTIONS = ("Say something.", "What is this?", "What is different here?")


def draw_rows(folder: Path, pictures: bool) -> str:
    """Prompts with no picture, one and two, of several sizes; with none, for a model of text."""
    names, rows = [], []
    for size in SIZES:
        names.append(f"{size[0]}.png")
        Image.effect_noise(size, 90).convert("RGB").save(folder / names[-1])
    for question, images in zip(QUESTIONS, ([], names[:1], names[1:])):
        rows.append(json.dumps({"prompt": question, "images": images if pictures else []}))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


class Check:
    """The actor of a run, and the same checkpoint in transformers."""

    def __init__(self, folder: str, data: str | None, scratch: Path):
        self.chat, self.scratch = Chat(folder, distributed.choose_device()), scratch
        rows = data or draw_rows(scratch, bool(self.chat.family.media))
        line = ["--model", folder, "--data", rows, "--out", str(scratch), *FLAGS.split()]
        args = ppo.parse_args(line)
        ranks = distributed.start(args.run.timeout, args.run.hsdp)
        read = ppo.load_rows(args)
        models = ppo.build_models(args, read.processor, ranks.device)
        ppo.load_models(args, models.by_role(), ranks)
        self.actor, prompts = models.actor, read.train[:ROWS]
        with PromptLoader(read.processor, args.data) as loader:
            self.batch = loader.collect(*loader.submit(prompts, list(range(len(prompts)))))
        self.sampling = ppo.sampling_of(args, read.processor, ranks.device)
        self.theirs, self.bounds = self.chat.model, BOUNDS[self.actor.model.setup.dtype]

    @torch.no_grad()
    def comparisons(self) -> Iterator[tuple[str, float, float]]:
        """(what is compared, largest difference, its bound)."""
        bound, of_tokens = self.bounds
        yield "prompt ids", *self.prompt_ids()
        with fsdp.unsharded(self.actor):
            name, error = self.worst_module()
            yield f"replaced modules, the worst: {name}", error, bound
            self.theirs.setup = self.actor.model.setup
            for index, pixels in self.batch.patches.items():
                both = (vlm.image_features(m, *pixels) for m in (self.actor.model, self.theirs))
                yield f"image features of prompt {index}", difference(*both), bound
        samples = ppo.rollout(self.actor, self.batch, self.sampling, 2)
        packed = logprobs_of(self.actor, samples)
        yield "log-probs of packs", difference(packed, self.logprobs(samples)), bound
        yield "log-probs of the sampler", difference(samples.logprobs, packed), bound
        greedy = ppo.rollout(self.actor, self.batch, replace(self.sampling, greedy=True), 1)
        yield "greedy tokens", self.share_of_others(greedy), of_tokens
        yield "export", self.export(), 0.0

    def prompt_ids(self) -> tuple[float, float]:
        """How many prompts have other ids by the checkpoint's own processor. Where that cannot be
        used here, as without torchvision, this is said."""
        others = 0
        for prompt in self.batch.prompts:
            images = iter(prompt.images)
            messages = [m | {"content": [*m["content"]]} for m in prompt.messages]
            for part in (part for m in messages for part in m["content"]):
                if part["type"] == "image":
                    part["image"] = Image.open(next(images)).convert("RGB")
            try:
                processor = transformers.AutoProcessor.from_pretrained(self.chat.processor.folder)
                if self.chat.family.media and not hasattr(processor, "image_processor"):
                    raise ValueError("AutoProcessor gives a tokenizer alone")
                ids = processor.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=True
                )["input_ids"]
            except Exception as error:  # templates and missing packages raise anything
                reason = " ".join(str(error).split())[:150]
                say(f"prompt ids are not compared, as its own processor fails here: {reason}")
                return 0.0, 0.0
            others += torch.as_tensor(ids).flatten().tolist() != prompt.input_ids.tolist()
        return float(others), 0.0

    def worst_module(self) -> tuple[str, float]:
        """The module in the place of one of transformers whose output differs most, given the same
        input in a forward pass of theirs."""
        errors = {"none": 0.0}

        def compare(name, ours):
            def hook(module, args, options, out):
                mine = ours(*args, **options)
                both = (x if torch.is_tensor(x) else x[0] for x in (mine, out))
                errors[name] = max(errors.get(name, 0.0), difference(*map(torch.flatten, both)))

            return hook

        modules, hooks = dict(self.theirs.named_modules()), []
        for name, ours in self.actor.model.named_modules():
            theirs = modules.get(name)
            if theirs is not None and type(ours).__module__.startswith("common."):
                hook = compare(name, ours)
                hooks.append(theirs.register_forward_hook(hook, with_kwargs=True))
        prompt = max(self.batch.prompts, key=lambda prompt: len(prompt.images))
        self.theirs(**self.chat.inputs(prompt), use_cache=False)
        for hook in hooks:
            hook.remove()
        return max(errors.items(), key=lambda item: item[1])

    def logprobs(self, samples) -> Tensor:
        """Of every token, by a forward pass of transformers for each sample."""
        values = []
        for index, tokens in zip(samples.prompt_index.tolist(), samples.split(samples.tokens)):
            inputs, tokens = self.chat.inputs(samples.prompts[index]), tokens.to(self.theirs.device)
            start = inputs["input_ids"].shape[1] - 1
            inputs["input_ids"] = torch.cat([inputs["input_ids"], tokens[None]], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            for name, types in self.chat.family.token_types(inputs["input_ids"]).items():
                inputs[name] = types
            logits = self.theirs(**inputs, use_cache=False).logits[0, start:-1].float()
            logits[:, list(self.chat.processor.banned_ids)] = -torch.inf
            values.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return torch.cat(values)

    def share_of_others(self, greedy) -> float:
        """The share of greedy tokens that `generate` does not write."""
        others = 0
        for index, tokens in zip(greedy.prompt_index.tolist(), greedy.split(greedy.tokens)):
            inputs = self.chat.inputs(greedy.prompts[index])
            stops = list(self.chat.processor.stop_ids)
            out = self.theirs.generate(
                **inputs,
                max_new_tokens=8,
                eos_token_id=stops,
                pad_token_id=stops[0],
                suppress_tokens=list(self.chat.processor.banned_ids),
                do_sample=False,
            )[0, inputs["input_ids"].shape[1] :]
            mine = torch.full_like(out, -1).cpu()
            mine[: len(tokens)] = tokens[: len(out)]
            others += int((mine != out.cpu()).sum()) + max(0, len(tokens) - len(out))
        return others / len(greedy.tokens)

    def export(self) -> float:
        """How many weights `from_pretrained` misses in an export, or reads as others."""
        folder = self.scratch / "export" / "step-0"
        folder.parent.mkdir()
        problem = weights.export(self.actor, self.actor.processor, folder)
        if problem:
            raise ValueError(problem)
        again, report = type(self.theirs).from_pretrained(
            folder, dtype=self.theirs.dtype, output_loading_info=True
        )
        keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
        wrong = sum(len(report[key]) for key in keys)
        mine = again.state_dict()
        for name, value in self.theirs.state_dict().items():
            wrong += not torch.equal(mine[name], value.cpu())
        return float(wrong)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest number of theirs."""
    if ours.shape != theirs.shape:
        return float("inf")
    ours, theirs = ours.cpu().float(), theirs.cpu().float()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def lacks(family) -> str:
    """What this family cannot do here."""
    absent = {"images": "image" in family.media, "clips": "video" in family.media}
    absent["replies with pictures"] = family.replies_show_images
    absent["--train_vision"] = isinstance(family, ppo.build.Qwen)
    return ", ".join(name for name, is_there in absent.items() if not is_there)


@one_message()
def main(argv: list[str] | None = None) -> int:
    summary = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=summary)
    parser.add_argument("folder", help="checkpoint in Hugging Face format, or a name on the hub")
    parser.add_argument("--data", help="rows as of train_ppo_vl.py")
    args = parser.parse_args(argv)
    transformers.logging.disable_progress_bar()
    passed = True
    with tempfile.TemporaryDirectory() as scratch:
        check = Check(args.folder, args.data and os.path.abspath(args.data), Path(scratch))
        for name, error, bound in check.comparisons():
            is_right = error <= bound  # NaN is not
            passed = passed and is_right
            say(f"{'ok  ' if is_right else 'FAIL'} {name}: {error:.2g}, at most {bound:g}")
    if absent := lacks(check.chat.family):
        say(f"not for this family: {absent}")
    say("PASS" if passed else "FAIL")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
