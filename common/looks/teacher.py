"""Another model that scores the policy's tokens: a teacher.

Teacher              a frozen model, and the batch as this model sees it: `Teacher.view`
with_prompts         a batch with other prompts, such as prompts in a template
update_ema_teacher   a teacher that is the running average of the policy
"""

import functools
import re
import string
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from common import distributed
from common.buffers import Batch
from common.data.processor import Processor
from common.data.rows import Prompt, columns_of, make_prompt
from common.flags import flag
from common.ground.files import UserError
from common.looks.image_changes import reread_images
from common.model.adapters import without_adapters
from common.model.fsdp import Trainable, copy_weights, on_device
from common.model.policy import Policy
from common.model.vlm import compute_features_unless_trained, tower_parameters

# of --teacher_prompt: text, in which a brace is written twice, and names of columns
HINT = re.compile(r"(?:[^{}]|\{\{|\}\}|\{[^\W\d][^{}.\[\]:!]*\})*")


def check_teacher_prompt(template: str) -> None:
    """Raises UserError: not a template of --teacher_prompt. That is a Python format string of plain
    names: a format specification could take gigabytes, and an attribute could read more than the row."""
    if not HINT.fullmatch(template):
        raise UserError(
            f"{template}: braces hold the name of a column and nothing else, as in {{answer}} (a brace "
            "of the text is written twice)"
        )
    names = [name for _, name, *_ in string.Formatter().parse(template)]
    if template and not names.count("prompt") == template.count("{prompt}") == 1:
        raise UserError(f"{template} must contain {{prompt}}, the place of the row's prompt, once")


@dataclass(frozen=True)
class TeacherArgs:
    """teacher"""

    teacher_model: str = flag(
        "",
        "frozen model that also scores the sampled tokens, and from which the policy learns: a checkpoint "
        "of any size that has the policy's tokens and reads rows by its own processor; self: the "
        "initial weights (with adapters, the base model); ema: the average of --ema_beta; empty: none",
        paths=True,
    )
    teacher_in: str = flag(
        "advantage",
        "advantage: add --teacher_coef * (the teacher's log-prob - the policy's) to each token's advantage; "
        "loss: add --teacher_coef * the exact KL(policy | teacher) over the vocabulary, which costs a "
        "forward pass of the teacher per update",
        choices=("advantage", "loss"),
    )
    teacher_coef: float = flag(1.0, "weight of the teacher")
    teacher_prompt: str = flag(
        "",
        "template of what the teacher reads in place of a prompt; braces take columns of the row: "
        "'{prompt} (The answer is {answer}.)'; empty: the prompt",
        check=check_teacher_prompt,
    )

    @property
    def teacher_in_loss(self) -> bool:
        return self.teacher_model != "" and self.teacher_in == "loss"


# -------------------------------------------------------------------------------------------------
# Other prompts
# -------------------------------------------------------------------------------------------------


def with_prompts(batch: Batch, processor: Processor, template: str = "") -> Batch:
    """The batch with all prompts as `read_prompt` returns them. A processor other than the batch's own
    may cut images into other grids: `reread_images` must follow."""
    prompts = [read_prompt(prompt, processor, template) for prompt in batch.prompts]
    return replace(batch, prompts=prompts, positions={})


@functools.cache  # each row is read once in a run
def read_prompt(prompt: Prompt, processor: Processor, template: str) -> Prompt:
    """A row's prompt in the template, if there is one, as a processor reads it. Raises UserError:
    a column that the row lacks, images that the family does not take, too many tokens."""
    try:
        messages = with_hint(prompt, template) if template else prompt.messages
        return make_prompt(processor, messages, prompt.images, processor.args)
    except UserError as error:
        raise UserError(f"{prompt.source}: {error}") from error


def with_hint(prompt: Prompt, template: str) -> list[dict]:
    """A prompt's messages, the last one wrapped in a template (see --teacher_prompt): {prompt} stands
    for its text, other names for columns of the row. Raises UserError: the row lacks one of them."""
    columns = prompt.row | {"answer": prompt.reference}
    columns = {name: value for name, value in columns.items() if value is not None}
    try:
        before, after = (text.format_map(columns) for text in template.split("{prompt}"))
    except KeyError as error:
        raise UserError(f"--teacher_prompt: no {error}; {columns_of(prompt.row)}") from error
    *earlier, last = prompt.messages
    content = last["content"]
    texts = [k for k, part in enumerate(content) if part["type"] == "text"]
    first = texts[0] if texts else len(content)  # images that lead the prompt stay in front
    hint = {"type": "text", "text": before}
    parts = [*content[:first], hint, *content[first:], {"type": "text", "text": after}]
    return [*earlier, last | {"content": [part for part in parts if part.get("text") != ""]}]


# -------------------------------------------------------------------------------------------------
# Another model
# -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Teacher:
    """A frozen model that scores the policy's tokens, and how it sees them: with its own
    processor and tower if it has them, at prompts in a template."""

    policy: Policy
    actor: Policy
    args: TeacherArgs
    offload: str  # of --offload

    @contextmanager
    def in_use(self):
        """Within the block, its module is on its device and without adapters."""
        policy = self.policy
        with on_device(self.offload, policy), without_adapters(policy.model):
            yield policy

    @property
    def own_tower(self) -> bool:
        """Whether it needs image features of its own."""
        model = self.policy.model
        return not (
            self.policy is self.actor or model.setup.trains_vision or not tower_parameters(model)
        )

    def view(self, batch: Batch) -> Batch:
        """The batch, with or without samples, as the teacher sees it."""
        actor, processor, template = self.actor, self.policy.processor, self.args.teacher_prompt
        compute_features_unless_trained(actor.model, batch)
        if batch.conversations:
            return batch
        if template or processor is not actor.processor:
            batch = with_prompts(batch, processor, template)
        if self.own_tower:
            batch = reread_images(batch, self.policy.model, processor)
        return batch

    def check_rows(self, rows: list[Prompt], with_env: bool) -> None:
        """Raises UserError, on every rank: it lacks tokens of the policy, cannot read a row, or does not
        fit an environment."""
        student, processor = self.actor.processor, self.policy.processor
        template = self.args.teacher_prompt
        tokens, others = student.tokenizer.get_vocab(), processor.tokenizer.get_vocab()
        lacking = tokens.items() - others.items()
        with distributed.raise_on_all_ranks(f"--teacher_model {self.args.teacher_model}: "):
            if lacking:
                raise UserError(
                    f"another tokenizer, which lacks {len(lacking)} of the policy's {len(tokens)} "
                    f"tokens or has them under other ids, such as {min(lacking)}"
                )
            same_media = processor.family.media == student.family.media
            if with_env and (self.own_tower or not same_media):
                raise UserError("with --env it must have the vision tower of the policy")
            if template or processor is not student:
                with ThreadPoolExecutor(8) as pool:  # image headers wait for the file system
                    list(pool.map(lambda row: read_prompt(row, processor, template), rows))


def update_ema_teacher(teacher: Teacher | None, trained: Trainable) -> None:
    """Copy the averaged weights of the actor into a teacher `ema`."""
    if teacher is not None and teacher.args.teacher_model == "ema":
        with trained.averaged():
            copy_weights(trained.module, teacher.policy)
