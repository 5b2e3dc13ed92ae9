"""Columns that hold a prompt, a response, or messages of both, as messages and texts of ours.

take_prompt      the prompt of a row, as text or messages
take_media       its images and videos
read_messages    a value that may be messages
target_text      the text of a message to imitate or to judge
as_one_text      a prompt as one text
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from common.ground.files import UserError, number_as_text, parse_json
from launch.data.accounts import Account, Row
from launch.data.pictures import Images

PROMPTS = "prompt messages conversations conversation message query question problem input".split()
MESSAGES = r'\s*\[\s*\{\s*"(role|content|from|value)"'  # as text
ROLE_NAMES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLE_NAMES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "developer": "system"}
ROLE_NAMES |= {"function_call": "assistant", "observation": "tool"}
# Keys of a message that chat templates read, and those by which train_grm_vl.py leaves one out.
TEMPLATE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"}
LOSS_KEYS = {"loss", "weight"}


@dataclass(frozen=True)
class Options:
    """How rows are read: see --help of launch/data/convert.py."""

    columns: dict[str, str] = field(default_factory=dict)
    label: str = ""
    boxes: str = ""
    space: str = "file"
    choices: str = ""
    turns: str = "last"
    preferred_is: str = ""
    keep: Collection[str] = ()
    drop: Collection[str] = ()


@dataclass
class Reading:
    """A row that is being read."""

    rest: dict  # its columns that nothing has read
    images: Images
    how: Options
    account: Account
    split: str
    known: dict = field(default_factory=dict)  # columns that were read, and stay in the row

    def take(self, *columns: str) -> Any:
        """Take out the first of these columns that is there; None if there is none."""
        return next((self.rest.pop(name) for name in columns if name in self.rest), None)


def take_prompt(reading: Reading) -> str | list:
    """The prompt as text, or as messages whose images are written."""
    rest = reading.rest
    columns = ", ".join(rest)
    if isinstance(rest.get("instruction"), str) and "prompt" not in rest:
        rest["prompt"] = f"{rest.pop('instruction')}\n{as_text(rest.pop('input', ''))}".strip()
    prompt = read_messages(reading.take(*PROMPTS), reading.how.drop)
    if prompt is None:
        raise UserError(f"no column {', '.join(PROMPTS)}; the row has {columns:.400}")
    if re.search("<img>.+</img>", f"{prompt}"):
        raise UserError(
            "<img>path</img> in a text: give the path in images, and write <image> in its place"
        )
    turns = [("system", rest.pop("system", ""))]
    if isinstance(rest.get("history"), list):
        for question, answer in rest.pop("history"):
            turns += [("user", question), ("assistant", answer)]
    messages = [{"role": role, "content": text} for role, text in turns if text]
    if isinstance(prompt, str) and not messages:
        return prompt
    return messages + write_messages(reading, prompt)


def take_media(reading: Reading) -> dict:
    """The columns of images and videos: files, absolute paths, lists of frames."""
    rest, images = reading.rest, reading.images
    if "image" in rest and "images" in rest:
        raise UserError(
            "columns 'image' and 'images': choose one by --columns images=image or image=images"
        )
    pictures = as_list(reading.take("image", "images", "image_urls"))
    converted: dict[str, list] = {"images": [images.write(image) for image in pictures]}
    clips = as_list(reading.take("video", "videos"))
    if clips:
        converted["videos"] = [images.find_clip(clip) for clip in clips]
    return converted


def write_messages(reading: Reading, prompt: str | list) -> list[dict]:
    """A prompt as messages whose images are written. Their keys that nothing reads are entered."""
    messages = []
    read = TEMPLATE_KEYS | (LOSS_KEYS if reading.how.turns == "all" else set())
    for message in as_messages(prompt):
        content = message["content"]
        if not isinstance(content, str):
            content = [reading.images.write_part(part) for part in content]
        for key in message.keys() - read:
            reading.account.enter(f"messages.{key}", message[key], Row(reading.split))
        messages.append(message | {"content": content})
    return messages


def as_messages(prompt: str | list) -> list[dict]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def read_messages(value: Any, drop: Collection[str] = ()) -> Any:
    """A message, a list or JSON of them, as messages with role and content, without keys that are null or
    dropped; anything else as it is."""
    if isinstance(value, str) and re.match(MESSAGES, value):
        value = parse_json(value, "messages")
    if not isinstance(value, dict | list):
        return value
    messages = []
    for turn in value if isinstance(value, list) else [value]:
        message = {
            key: part
            for key, part in turn.items()
            if part is not None and f"messages.{key}" not in drop
        }
        role = message.pop("role", None) or message.pop("from", None)
        if role is None:
            raise UserError(
                f"a message has role and content, or from and value, unlike {turn!r:.80}"
            )
        if role not in ROLE_NAMES:
            raise UserError(f"role {role!r:.80} is not one of {', '.join(ROLE_NAMES)}")
        content = message.pop("content", None) or message.pop("value", None) or ""
        messages.append({"role": ROLE_NAMES[role], "content": content} | message)
    return messages


def target_text(message: dict) -> str:
    """The text of a message to imitate or to judge. Raises UserError: it is not the assistant's, or
    holds more than a text."""
    if message["role"] != "assistant":
        raise UserError("the last message of a response must be the assistant's")
    further = sorted(message.keys() - {"role", "content"})
    if further:
        drop = ",".join(f"messages.{key}" for key in further)
        raise UserError(
            f"the message to imitate holds more than a text, {', '.join(further)}: keep messages whole by "
            f"--turns all (for train_grm_vl.py), or leave that out by --drop {drop}"
        )
    content = message["content"]
    if not isinstance(content, str) and any(part["type"] != "text" for part in content):
        raise UserError(f"a message to imitate is a text, without images: {content!r:.80}")
    return text_of(message)


def as_one_text(prompt: str | list) -> str:
    """A prompt as one string with <image> for each image, as the prompt of a pair must be. Raises
    UserError: its messages hold more than that."""
    if isinstance(prompt, str):
        return prompt
    further = sorted({key for message in prompt for key in message} - {"role", "content"})
    if further:
        drop = ",".join(f"messages.{key}" for key in further)
        raise UserError(
            f"the prompt of a pair is one text, without {', '.join(further)} of its messages: leave that out "
            f"by --drop {drop}"
        )
    if len(prompt) == 1:
        return text_of(prompt[0])
    return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in prompt)


def text_of(message: dict) -> str:
    """The text of a message, with <image> and <video> where its parts have them."""
    content = message["content"]
    if isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if part["type"] == "text":
            # of a part, it is only text
            text = part.get("text") or part.get("value", "")
            pieces.append(re.sub("<(image|video)>", " ", text))
        else:
            pieces.append(f"<{part['type']}>")
    return "".join(pieces)


def as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value] if value else []


def as_text(value: Any) -> str:
    text = number_as_text(value)
    if not isinstance(text, str):
        raise UserError(f"answer and label must be a string or a finite number, not {value!r:.80}")
    return text


def read_json_text(text: Any) -> Any:
    """A list or object that is a text in JSON, perhaps in a fence; None: it is none."""
    if not isinstance(text, str):
        return None
    text = re.sub(r"\A\s*```\w*\n|\n```\s*\Z", "", text)
    if text[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
