"""A checkpoint's tokenizer, chat template and image processor: messages to token ids, and back.

    checkpoint -> config, tokenizer, chat template, image processor            Processor
    template   -> what it writes around an answer, the end of a turn           answer_frame
    messages   -> the template's text, which must contain the messages' texts   Processor.render
               -> token ids, placeholders expanded                             Processor.encode
    token ids  -> the text of a response                                       Processor.decode

Shapes: P prompt tokens, V vocabulary. A user's mistake is a UserError that names the folder or
what is wrong with the text.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common import distributed
from common.data.families import Expansion, family_of, is_clip
from common.data.folder import (
    copy_files,
    read_model_config,
    read_settings,
    read_tokenizer,
    write_word_pattern,
)
from common.flags import DataArgs, parse_template_options
from common.ground.files import UserError, check_form, read_json

UNBOUNDED = DataArgs(max_prompt_tokens=sys.maxsize)
NFC_JOINS = 4  # characters that a normalizing tokenizer may merge into one


class Processor:
    """Tokenizer, chat template and Pillow image processor of a checkpoint folder.

    Not `AutoProcessor`: for the Qwen-VL families it needs torchvision, for its videos; here Pillow
    resizes their frames.

    Attributes:
        args, config, tokenizer, family (a `families.Family`), vocab_size, files (JSON by name).
        space: in which it answers with boxes and points (see `coordinates`), "auto" if that is not known;
        stop_ids: end a response; banned_ids: are never sampled; reserved_tokens: may not be in rows;
        silent_ids: are left out of a response's text; template_options: variables of the template;
        token_characters: the most characters of a text that one token can stand for.
    Raises:
        UserError: files missing or unreadable, an unknown family, no chat template, contradictory
            settings.
    """

    def __init__(self, folder: str | Path, args: DataArgs = DataArgs()):
        self.folder, self.args = folder, args
        self.reserved_tokens = []
        try:
            self.config = read_model_config(folder)
            self.family = family_of(self.config)
            usual = self.family.spaces.get(self.config.model_type, "auto")
            self.space = usual if args.coordinates == "auto" else args.coordinates
            # an args.json may come from a run of another family
            if usual not in ("auto", self.space):
                distributed.say_once(
                    f"--coordinates {self.space}: {self.config.model_type} usually answers in {usual}"
                )
            self.tokenizer = read_tokenizer(folder)
            self.files = read_settings(folder)
            self.vocab_size = self.config.get_text_config().vocab_size
            # Older checkpoints keep the template for images in files that only AutoProcessor reads, in
            # this order of preference.
            template = self.files["processor_config"].get("chat_template")
            template = template or self.files["chat_template"].get("chat_template")
            self.tokenizer.chat_template = template or self.tokenizer.chat_template
            if not self.tokenizer.chat_template:
                raise UserError("no chat template; take that of the instruction-tuned checkpoint")
            if args.template_options:
                options = parse_template_options(args.template_options)
                self.files["judge"]["template_options"] = options
            check_form(self.files["judge"], {"template_options?": dict}, f"{folder}/judge.json")
            self.template_options = self.files["judge"].get("template_options") or {}
            self._set_tokens()
            self.family.prepare(self.files, self.tokenizer, args)
        except (OSError, UserError) as error:
            raise UserError(f"checkpoint {folder}: {error}") from error

    def _set_tokens(self) -> None:
        tokenizer, added = self.tokenizer, self.tokenizer.added_tokens_decoder
        names = ("image", "video", "vision_start", "vision_end", "boi", "eoi")
        visual = {getattr(self.config, f"{name}_token_id", None) for name in names}
        unnamed = re.compile(self.family.unnamed_tokens)
        visual |= {i for i, token in added.items() if unnamed.fullmatch(token.content)}
        # Embeddings are often padded to a round number: these ids stand for no token.
        token_of = tokenizer.backend_tokenizer.id_to_token
        nameless = {i for i in range(self.vocab_size) if token_of(i) is None}
        ends = self._end_ids()
        self.banned_ids, self.stop_ids = self._known(visual | nameless), self._known(ends)
        # Not every special token: rows may write those that the template does not use, such as
        # Qwen2-VL's for boxes.
        for i, token in added.items():
            is_used = i in ends or token.content in str(tokenizer.chat_template)
            if i in visual or (token.special and is_used):
                self.reserved_tokens.append(token.content)
        self.silent_ids = visual | ends | {tokenizer.pad_token_id}
        self.token_characters = NFC_JOINS * max(map(len, tokenizer.get_vocab()))

    def _end_ids(self) -> set[int | None]:
        """The ids that end a response: those of the files, and what the template ends a turn with; an
        export's generation_config.json has all. Rank 0 says where a template does not begin the answer."""
        tokenizer, generation = self.tokenizer, self.files["generation_config"]
        written = generation.get("eos_token_id")
        ends = {tokenizer.eos_token_id, *(written if isinstance(written, list) else [written])}
        try:
            head, before, end, _ = answer_frame(self)
        except UserError:  # a template for prompts alone; training on answers would report it
            return ends
        headers = [token for token in tokenizer.all_special_tokens if token in before]
        if any(token in head for token in headers):
            distributed.say_once(
                f"warning: {self.folder}: the chat template ignores add_generation_prompt: prompts end "
                f"without {before!r}, which it writes before an answer"
            )
        if end not in ends:
            generation["eos_token_id"] = sorted({*ends, end} - {None})
        return ends | {end}

    def _known(self, ids: set[int | None]) -> tuple[int, ...]:
        """The ids that are in the model's vocabulary: a small model may keep default ids of large ones."""
        return tuple(token for token in range(self.vocab_size) if token in ids)

    def check_options(self) -> None:
        """Raises UserError: the template does not use a variable of --template_options."""
        words = set(re.findall(r"\w+", str(self.tokenizer.chat_template)))
        for name in self.template_options:
            if name not in words:
                raise UserError(f"--template_options: the chat template knows no {name!r}")

    def banned_mask(self) -> Tensor:
        """(V,) bool: the ids that are never sampled."""
        banned = torch.zeros(self.vocab_size, dtype=torch.bool)
        banned[list(self.banned_ids)] = True
        return banned

    def decode(self, responses: Sequence[Tensor]) -> list[str]:
        """The texts of token ids (n,), without those that end a turn, pad, or stand for pixels. Other
        special tokens count as text, as a row's answer may contain them."""
        spoken = [[i for i in ids.tolist() if i not in self.silent_ids] for ids in responses]
        return self.tokenizer.batch_decode(spoken, clean_up_tokenization_spaces=False)

    def render(self, messages: list[dict], **options) -> str:
        """Messages as the template's text, which must contain each of theirs.

        Raises UserError: a reserved token in a message, or a template that fails or loses a text.
        """
        problems = []
        for chat in self.as_chats(messages):
            try:
                text = self.tokenizer.apply_chat_template(
                    chat, tokenize=False, **self.template_options, **options
                )
            # A template is a program that came with the checkpoint, and may raise anything.
            except Exception as error:
                problems.append(f"the chat template cannot render this ({error!r})")
                continue
            lost, lost_call = lost_text(text, messages), lost_call_of(text, messages)
            if not lost and not lost_call:
                return text
            if lost:
                problems.append(
                    f"the chat template leaves out what the {lost}, or writes it as Python does"
                )
            if lost_call:
                problems.append(
                    f"the chat template leaves out a call of {lost_call!r:.80}: it knows no tool_calls "
                    "(write them into the text as the model does)"
                )
        where = "the checkpoint's chat_template.jinja or tokenizer_config.json"
        raise UserError(f"{'; '.join(dict.fromkeys(problems))}; see {where}")

    def check_length(self, what: str, text: str, args: DataArgs) -> None:
        """Raises UserError: a text too long for the most tokens. The tokenizer would take sixty times its
        memory to find out."""
        limit = args.max_prompt_tokens
        if len(text) > limit * self.token_characters:
            raise UserError(
                f"{what} too long: {len(text)} characters; the limit is {limit} tokens "
                f"({args.limit_flag})"
            )

    def token_ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. Raises UserError: an id that the model has no embedding for, or half of a
        surrogate pair, which JSON may hold and no tokenizer reads."""
        half = re.search("[\ud800-\udfff]", text)
        if half:
            raise UserError(f"{half[0]!r} is half of a character: JSON writes it as two escapes")
        backend = self.tokenizer.backend_tokenizer
        ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        largest = max(ids, default=-1)
        if largest >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"token {token!r} of the tokenizer has the id {largest}; config.json has a "
                f"vocab_size of {self.vocab_size}"
            )
        return ids

    def encode(
        self, messages: list[dict], grids: tuple, args: DataArgs = UNBOUNDED
    ) -> tuple[str, Tensor, int]:
        """Chat messages as the template's text, as token ids (P,) int64, the placeholder of each
        image and clip expanded, and how many of these are image tokens.

        Raises UserError: a reserved token in a message, a template that fails, not one placeholder
        per image or clip, or more than `--max_prompt_tokens`.
        """
        text = self.render(messages, add_generation_prompt=True)
        self.check_length("prompt", text, args)
        expanded, counts = self.expand(text, grids)
        # The template has written the special tokens, so the tokenizer must not add its own. The
        # exception are families whose processors let it add a BOS that the template lacks.
        has_bos = not self.family.media or text.startswith(self.tokenizer.bos_token or "")
        ids = self.ids_with_images(expanded, counts, add_special_tokens=not has_bos)
        if len(ids) > args.max_prompt_tokens:
            raise UserError(
                f"prompt too long: {len(ids)} tokens, {sum(counts)} of them of images; the limit is "
                f"{args.max_prompt_tokens} ({args.limit_flag})"
            )
        return text, ids, sum(counts)

    def ids_with_images(
        self, text: str, counts: Sequence[int], add_special_tokens: bool = False
    ) -> Tensor:
        """(P,) int64 of a text with image tokens, each of which is repeated as often as ``counts``
        says. Raises UserError: see `encode`."""
        ids = np.array(self.token_ids(text, add_special_tokens), dtype=np.int64)
        is_image = np.isin(ids, self.family.visual_token_ids())
        if is_image.sum() != len(counts):
            raise UserError(f"image-token mismatch: {is_image.sum()} tokens for {len(counts)}")
        repeats = np.ones_like(ids)
        repeats[is_image] = counts
        return torch.from_numpy(ids.repeat(repeats))

    def ids_behind(self, context: str, text: str, counts: Sequence[int] = ()) -> Tensor:
        """(n,) int64 ids of a text that follows another: some tokenizers put a space before the
        beginning of a text. Where the two share a token, the text is encoded alone. Raises
        UserError: see `encode`."""
        before = self.token_ids(context)
        ids = self.ids_with_images(context + text, counts)
        if ids[: len(before)].tolist() == before:
            return ids[len(before) :]
        return self.ids_with_images(text, counts)

    def as_chats(self, messages: list[dict]) -> list[list[dict]]:
        """The forms of messages that a template may expect, in the order in which to try them: content
        as parts, and as a string if it is only text. Raises UserError: a reserved token in them."""
        # As templates join the parts.
        texts = ["".join(part.get("text", "\n") for part in m["content"]) for m in messages]
        written = f"{messages} {texts}"
        for token in self.reserved_tokens:
            if token in written:
                raise UserError(
                    f"special token {token} in the text: the model would take it for the "
                    "template's own"
                )
        as_strings = []
        for message, text in zip(messages, texts):
            is_text = all(part["type"] == "text" for part in message["content"])
            as_strings.append({**message, "content": text} if is_text else message)
        return [messages, as_strings] if self.family.media else [as_strings, messages]

    def expand(self, text: str, grids: tuple) -> Expansion:
        """A rendered prompt with what stands for each image and clip in the placeholders' places."""
        family = self.family
        marks = family.placeholder, family.clip_placeholder
        pattern = "|".join(re.escape(mark) for mark in marks if mark)
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        expected = [marks[is_clip(grid)] for grid in grids]
        if pieces[1::2] != expected:
            raise UserError(
                f"image-token mismatch: placeholders {pieces[1::2]} in the rendered prompt for "
                f"{len(grids)} images and videos (a template for text only?)"
            )
        counts = []
        for k, grid in enumerate(grids):
            pieces[2 * k + 1], repeats = family.expand(grid)
            counts += repeats
        return "".join(pieces), counts

    def save(self, folder: str | Path, judge: dict = {}) -> None:
        """Write the files of the checkpoint besides its weights and config.json into a folder: byte for
        byte as they were, except settings that flags or the template have changed, those of ``judge`` in
        judge.json, and a tokenizer's pattern that was mended."""
        copy_files(Path(self.folder), Path(folder))
        write_word_pattern(self.tokenizer, Path(folder))
        files = self.files | {"judge": self.files["judge"] | judge}
        for name, settings in files.items():
            path = Path(folder, f"{name}.json")
            is_new = settings != (read_json(path) if path.exists() else {})
            if is_new and (name != "judge" or settings.get("verdicts")):
                path.write_text(json.dumps(settings, indent=2), "utf-8")


def lost_text(rendered: str, messages: list[dict]) -> str:
    """Role and text of the first message that a rendered prompt does not contain unchanged; empty if it
    contains all."""
    for message in messages:
        role = message["role"]
        for part in message["content"]:
            if part["type"] != "text":
                continue
            text, as_json = kept_text(role, part), json.dumps(part, ensure_ascii=False)
            is_there = text in rendered
            if role == "tool":  # Llama 3 writes it as JSON
                is_there |= json.dumps(text, ensure_ascii=False)[1:-1] in rendered
            # a template for strings may write the whole part
            if not is_there or str(part) in rendered or as_json in rendered:
                return f"{role} says: {text!r:.80}"
    return ""


def kept_text(role: str, part: dict) -> str:
    """What a template keeps of a part, if it keeps its text: the thoughts of earlier turns are left out of
    prompts."""
    text = part.get("text", "")
    return (text.rpartition("</think>")[2] if role == "assistant" else text).strip()


def called_function(call: dict) -> dict:
    """The name and arguments of an entry of tool_calls, which OpenAI keeps under "function"."""
    return call.get("function") or call


def lost_call_of(rendered: str, messages: list[dict]) -> str:
    """The name of a function that a rendered prompt has no more often than its texts name it, although
    messages call it; empty if all calls are there."""
    calls, texts = Counter(), []
    for message in messages:
        calls.update(called_function(call)["name"] for call in message.get("tool_calls") or ())
        texts += [kept_text(message["role"], part) for part in message["content"]]
    for name, count in calls.items():
        if rendered.count(name) < count + sum(text.count(name) for text in texts):
            return name
    return ""


class AnswerFrame(NamedTuple):
    """What the chat template writes around an answer."""

    head: str  # a question, up to where generation begins
    before: str  # between there and the answer (LLaVA: a space)
    end: int  # the end token after the answer; that of the tokenizer if the template writes none
    after: str  # all that it writes after the answer (ChatML: an end token and a newline)


def answer_frame(processor: Processor) -> AnswerFrame:
    """Raises UserError: the template leaves out the assistant's text."""
    answer, tokenizer = "(the answer)", processor.tokenizer
    chat = [{"role": "user", "content": [{"type": "text", "text": "(a question)"}]}]
    head = processor.render(chat, add_generation_prompt=True)
    chat.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    before, _, tail = processor.render(chat).partition(answer)
    after = tokenizer.encode(tail.strip(), add_special_tokens=False)
    ends = [i for i in after if i in tokenizer.added_tokens_decoder] + [tokenizer.eos_token_id]
    return AnswerFrame(head, before.partition(head)[2], ends[0], tail)
