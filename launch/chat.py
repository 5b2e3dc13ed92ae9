"""Talk to a model: an export of a run, or any checkpoint of a family that the trainers know.

    python launch/chat.py runs/NAME/export/latest picture.png "How many triangles are there?"
    python launch/chat.py runs/NAME/export/latest "And without a picture?"
    python launch/chat.py runs/NAME/export/latest picture.png    asks for questions, until an empty one

Arguments that name a file are pictures, shown in this order; the other one is the question. Prompts are
written as in training, answers by transformers' own `generate`, greedily. A GPU is used if there is
one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions

versions.check()


import argparse
import itertools
import os
from typing import Any

import torch
import transformers

from common import distributed
from common.data.loader import load_pixels
from common.data.processor import Processor
from common.data.rows import make_prompt
from common.flags import DataArgs
from common.ground.files import UserError, printable
from common.model.weights import resolve_folder
from launch import tool

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # no question ends like this


class Chat:
    """A model and the conversation so far."""

    def __init__(self, folder: str, device: torch.device, system_prompt: str = ""):
        """Raises UserError: no such checkpoint, one of an unknown family, or one whose weights have
        names that transformers does not know."""
        path = resolve_folder(folder)
        self.processor = Processor(path, DataArgs())
        self.family = self.processor.family
        kind: Any = transformers.AutoModelForCausalLM
        if self.family.media:
            kind = transformers.AutoModelForImageTextToText
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        try:
            model, report = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
        except Exception as error:  # damaged files raise anything
            raise UserError(
                f"checkpoint {folder}: transformers cannot load it: {error!r}"
            ) from error
        missing, unread = (sorted(report[f"{what}_keys"]) for what in ("missing", "unexpected"))
        if missing:  # tied weights are not
            raise UserError(
                f"checkpoint {folder}: transformers finds no {', '.join(missing[:3])} in the files, "
                f"{len(missing)} weights, and would draw them at random; not read of the files: "
                f"{unread[:3]}. Rename these, or try a newer transformers"
            )
        self.model = model.to(device).eval()
        # Without the checkpoint's repetition penalty, top_p or top_k, which no rollout applies.
        self.model.generation_config = transformers.GenerationConfig()
        self.system_prompt = system_prompt
        self.messages = []
        self.pictures = []

    @torch.no_grad()
    def ask(self, question: str, pictures: list[str], max_new_tokens: int) -> str:
        """The answer to a question about new pictures and everything said before.

        Raises UserError: a picture that cannot be read, or a family without pictures.
        """
        content = [*[{"type": "image"}] * len(pictures), {"type": "text", "text": question}]
        turns = [*self.messages, {"role": "user", "content": content}]
        all_pictures = [*self.pictures, *map(os.path.abspath, pictures)]
        prompt = make_prompt(self.processor, turns, all_pictures, system_prompt=self.system_prompt)
        answer = self.processor.decode([self.generate(prompt, max_new_tokens)])[0].strip()
        turn = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        self.messages, self.pictures = [*turns, turn], all_pictures
        return answer

    def generate(self, prompt, max_new_tokens: int) -> torch.Tensor:
        """(n,) what transformers' own `generate` writes, greedily."""
        tokens = self.model.generate(
            **self.inputs(prompt),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.processor.stop_ids),
            pad_token_id=self.processor.stop_ids[0],
            suppress_tokens=list(self.processor.banned_ids),
            do_sample=False,
        )
        return tokens[0, len(prompt.input_ids) :]

    def inputs(self, prompt) -> dict[str, torch.Tensor]:
        """What the model's own forward takes."""
        ids = prompt.input_ids[None]  # (1, P)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs |= self.family.token_types(ids)
        pixels = load_pixels(prompt, self.processor)
        if pixels is not None:
            inputs |= self.family.vision_inputs(pixels, prompt.patch_grids)
        return {name: value.to(self.model.device) for name, value in inputs.items()}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = tool.parser(__doc__)
    parser.add_argument("folder", help="checkpoint in Hugging Face format, or <out>/export/latest")
    parser.add_argument("words", nargs="*", metavar="picture or question")
    parser.add_argument("--max_new_tokens", type=tool.between(1, 2**20), default=512)
    parser.add_argument("--system_prompt", default="")
    args = parser.parse_args(argv)
    args.pictures = list(filter(os.path.isfile, args.words))
    questions = list(itertools.filterfalse(os.path.isfile, args.words))
    if len(questions) > 1:
        parser.error(f"one question, please; no file has the name of any of {questions}")
    if questions and Path(questions[0]).suffix.lower() in PICTURES:
        parser.error(f"{questions[0]}: no such picture")
    args.questions = questions or iter(lambda: input("> ").strip(), "")
    return args


@tool.one_message()
def main(argv: list[str] | None = None) -> None:
    """Answer the question, or questions from the terminal. Exits with 2 after a mistake."""
    args = parse_args(argv)
    transformers.logging.disable_progress_bar()
    chat = Chat(args.folder, distributed.choose_device(), args.system_prompt)
    try:
        for question in args.questions:
            answer = chat.ask(question, args.pictures, args.max_new_tokens)
            print(printable(answer, keep="\n\t"), flush=True)
            args.pictures = []  # they are part of the conversation now
    except EOFError:
        print()


if __name__ == "__main__":
    main()
