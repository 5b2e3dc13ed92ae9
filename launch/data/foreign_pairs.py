"""Preferences of other systems as pairs of ours: two responses or two pictures, and which is better.

No rule guesses a side: a number says nothing without --preferred_is, and a text that names no side is
an error."""

import hashlib
import json
import re
from typing import Any

from common.ground.files import UserError
from launch.data.accounts import read_side
from launch.data.foreign_messages import (
    PROMPTS,
    Reading,
    as_messages,
    as_one_text,
    read_messages,
    take_media,
    take_prompt,
    target_text,
    text_of,
    write_messages,
)
from launch.data.pictures import IMAGE_KEYS, is_picture

SWAPPED = {"A": "B", "B": "A", "tie": "tie"}


def split_pairs(rest: dict) -> list[dict]:
    """A row with several rejected responses as a row for each; any other row as it is."""
    rejected = rest.get("rejected")
    if not isinstance(rejected, list) or not all(isinstance(text, str) for text in rejected):
        return [rest]
    if not rejected:
        raise UserError("rejected is an empty list: a pair has two responses")
    return [rest | {"rejected": text} for text in rejected]


def is_pair(rest: dict) -> bool:
    """Whether a row says which of two responses is better."""
    if {"chosen", "rejected"} <= rest.keys() or {"response", "human_ranking"} <= rest.keys():
        return True
    return "preferred" in rest


def convert_pair(reading: Reading) -> dict:
    """The prompt, images, videos, responses and verdict of a pair; of a pair of pictures, no
    responses."""
    rest, images = reading.rest, reading.images
    if "preferred" in rest:
        return convert_named(reading)
    preferred = "A"
    if "human_ranking" in rest:
        prompt, responses = take_sides(reading, rest.pop("response"))
        ranks = rest.pop("human_ranking")
        if not len(responses) == len(ranks) == 2:
            raise UserError("a pair has two responses")
        preferred = "tie" if ranks[0] == ranks[1] else "A" if ranks[0] < ranks[1] else "B"
    else:
        prompt, responses = take_sides(reading, [rest.pop("chosen"), rest.pop("rejected")])
    converted, prompt = take_media(reading), as_one_text(prompt)
    if images.embedded:
        if converted["images"]:
            raise UserError("images of a pair come with its messages or in a column, not both")
        converted["images"] = images.embedded
    pictures = [find_picture(response) for response in responses]
    if any(pictures):
        sides = write_sides(pictures, prompt, converted, reading)
        key = [images.digest(side) for side in sides]
    else:
        key = sides = [side_text(response) for response in responses]
    text = json.dumps([prompt, *key])
    if hashlib.sha256(text.encode()).digest()[0] % 2:  # of half of all pairs, in any file
        sides = sides[::-1]
        preferred = SWAPPED[preferred]
    column = "images" if any(pictures) else "responses"
    return converted | {"prompt": prompt, column: sides, "preferred": preferred}


def convert_named(reading: Reading) -> dict:
    """A pair whose column preferred names the better one of responses or, without these, of two images."""
    preferred, responses = preferred_side(reading), []
    if "responses" in reading.rest:
        prompt, responses = take_sides(reading, reading.rest.pop("responses"))
    else:
        prompt = take_prompt(reading)
    converted = {"prompt": as_one_text(prompt)} | take_media(reading)
    if responses:
        converted["responses"] = [side_text(side) for side in responses]
    sides = converted.get("responses", converted["images"])
    if len(sides) != 2:
        raise UserError(
            f"a pair has two responses or, without responses, two images, not {len(sides)}"
        )
    return converted | {"preferred": preferred}


def preferred_side(reading: Reading) -> str:
    """What the column preferred says: A, the first response, B or tie. Raises UserError: it does not say."""
    value, names = reading.rest.pop("preferred"), side_names(reading.how.columns)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return side_of_number(value, names, reading.how.preferred_is)
    if isinstance(value, str):
        if value in names:
            return "AB"[names.index(value)]
        side = read_side(value)
        if side:
            return side
    raise UserError(
        f"preferred is {value!r:.80}, which names neither side (A, B, model_a, A>B, tie, the name of its "
        "column): write it by --map"
    )


def side_names(columns: dict[str, str]) -> list[str]:
    """The columns that --columns names as responses."""
    names = columns.get("responses", "").split("+")
    return names if len(names) == 2 else ["A", "B"]


def side_of_number(value: float, names: list[str], how: str) -> str:
    """The side that a number prefers. Raises UserError: --preferred_is does not say how, or it is no such
    number."""
    if how == "sign":
        return "A" if value < 0 else "B" if value > 0 else "tie"
    ends = [re.sub(r".*?(\d*)\Z", r"\1", name) for name in names]
    if how == "number":
        if f"{value:g}" not in ends:
            raise UserError(
                f"preferred is {value:g}, which ends the name of none of {', '.join(names)}"
            )
        return "AB"[ends.index(f"{value:g}")]
    raise UserError(
        f"preferred is a number, {value:g}: --preferred_is sign if below 0 the first response is better "
        f"({names[0]}) and above 0 the second; --preferred_is number if it is the number at the end of the "
        "better one's column"
    )


def take_sides(reading: Reading, sides: list) -> tuple[str | list, list]:
    """The prompt, and two responses, each a text, messages or a picture. What both conversations begin with
    belongs to the prompt, or is it. Raises UserError: they part before their last message."""
    drop = reading.how.drop
    sides = [side if is_picture(side) else read_messages(side, drop) for side in sides]
    has_prompt = bool({*PROMPTS, "instruction"} & reading.rest.keys())
    beginnings = [side[:-1] for side in sides if isinstance(side, list)]
    if not has_prompt:  # an answer alone is to what the other conversation asks
        beginnings = [messages for messages in beginnings if messages] or beginnings
    if len(beginnings) == 2 and beginnings[0] != beginnings[1]:
        raise UserError(
            "both sides of a pair must begin with the same messages, and differ in the last one alone"
        )
    beginning = beginnings[0] if beginnings else []
    if not has_prompt:
        reading.rest["prompt"] = beginning or None
        return take_prompt(reading), sides
    prompt = take_prompt(reading)
    if not beginning:
        return prompt, sides
    texts = [text_of(message) for message in beginning]
    if text_of(as_messages(prompt)[-1]).strip() in "\n".join(texts):
        return write_messages(reading, beginning), sides  # the conversation repeats the prompt
    return [*as_messages(prompt), *write_messages(reading, beginning)], sides


def side_text(response: Any) -> str:
    """The text of a response that is a text, or the last message of a conversation."""
    return response if isinstance(response, str) else target_text(response[-1])


def find_picture(response: Any) -> Any:
    """The picture that is a response: <image> if it is in a column, None if the response is text. Raises
    UserError: it is both."""
    if is_picture(response):
        return response
    content = response if isinstance(response, str) else response[-1]["content"]
    if isinstance(content, str):
        return "<image>" if content.strip() == "<image>" else None
    parts = [part for part in content if part["type"] != "text" or part["text"].strip()]
    if all(part["type"] == "text" for part in parts):
        return None
    if len(parts) > 1 or parts[0]["type"] not in ("image", "image_url"):
        raise UserError(f"a response of a pair is a text or one picture, not {content!r:.80}")
    return parts[0] if any(parts[0].get(key) for key in IMAGE_KEYS) else "<image>"


def write_sides(pictures: list, prompt: str, converted: dict, reading: Reading) -> list[str]:
    """The paths of both pictures of a pair. Raises UserError: there are not two, or more."""
    if not all(pictures):
        raise UserError("one response of the pair is a picture, the other a text")
    written = [reading.images.write(picture) for picture in pictures if picture != "<image>"]
    sides = written + converted["images"]
    if len(sides) != 2 or len(written) == 1 or "<image>" in prompt or converted.get("videos"):
        raise UserError("a pair of pictures has two images, and none in its question")
    return sides
