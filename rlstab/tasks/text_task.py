"""The task of a JSON Lines file or a data set: prompts and answers that are texts, and how a row becomes an example."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstab.core.method_settings import check_choices
from rlstab.errors import DataError, kind_of
from rlstab.tasks.rows import read_rows
from rlstab.tasks.scorers import TextScorer, find_answer
from rlstab.tasks.task import Example, Message, Split
from rlstab.tasks.workers import Workers

if TYPE_CHECKING:  # workers import this room without pydantic
    from rlstab.config.settings import DatasetSettings, JsonlSettings, TextSettings

#: An example of a correct message.
MESSAGE = json.dumps({"role": "user", "content": "2+3="})


class TextTask:
    r"""Prompts and answers in memory, one example for each row.

    Example `index` is row `index`. A prompt is text or a list of messages, objects with `role` and `content`; if one
    prompt is a list, or with `system`, all are chats, and text is a message of the user. An answer is a text or a
    number, where 42.0 means 42. A field `a.b` is `b` of the object `a`. With `scorer: math_verify` the right answer is
    only mathematics, such as `\frac{1}{2}`, and the completion may have text around its answer.

    Attributes:
        too_long: `skip` if rows whose prompt does not fit the model may be left out, else `error`.

    Args:
        settings: the rows, how examples are made of them, and how they are scored.

    Raises:
        DataError: a row cannot be used, or nothing is left to train on; the message has the row and the remedy.
        MissingPackage: a package of the settings is not installed.
    """

    keeps_special_tokens = False

    def __init__(self, settings: JsonlSettings | DatasetSettings) -> None:
        self.name, self.too_long = Path(settings.path).name, settings.too_long
        self._scorer = TextScorer(settings.scorer, settings.answer_pattern)
        cheap = settings.scorer == "exact" and settings.answer_pattern is None  # and cannot hang
        self.workers = None if cheap else Workers.of(self._scorer, settings)
        train, held_out = ([_read(*row, settings) for row in rows] for rows in read_rows(settings))
        if not held_out:
            train, held_out = train[: -settings.eval_size], train[-settings.eval_size :]
        if not train:
            raise DataError(
                f"{settings.path}: of {len(held_out)} examples, holding out {settings.eval_size} leaves none to train "
                f"on. Set a smaller task.eval_size, or name others by task.eval_path or task.eval_split."
            )
        chat = settings.system is not None or any(isinstance(prompt, list) for _, prompt, _ in train + held_out)
        self._examples: dict[Split, list[Example]] = {
            "train": [_example(*row, settings, chat=chat) for row in train],
            "eval": [_example(*row, settings, chat=chat) for row in held_out],
        }
        self.size: dict[Split, int | None] = {split: len(examples) for split, examples in self._examples.items()}

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is a string. Indices beyond the end start again."""
        check_choices(TextTask.example, split=split)
        examples = self._examples[split]
        return examples[index % len(examples)]

    def leave_out(self, split: Split, indices: Collection[int]) -> None:
        """Remove some examples of a split, and renumber the others."""
        examples = self._examples[split]
        self._examples[split] = [example for index, example in enumerate(examples) if index not in indices]
        self.size[split] = len(self._examples[split])

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 if the completion has the right answer, else 0.0.

        Raises:
            ScorerError: if that takes too long, or math-verify cannot read the example's own answer.
        """
        scorer = self._scorer.score if self.workers is None else self.workers.score_one
        return scorer(example.prompt, completion, example.answer)


def _read(where: str, row: Mapping[str, Any], settings: TextSettings) -> tuple[str, Any, str]:
    """The name of a row in errors, its prompt (a text, or a list of messages), and its answer."""
    prompt, answer = (_value(where, row, settings, setting) for setting in ("prompt_field", "answer_field"))
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = f"the field {settings.answer_field!r} is {kind_of(answer)}"
        raise DataError(f"{where}: {kind}, neither a text nor a number. Write the right answer as a text.")
    # a whole float has no decimals, since a column of integers may hold floats
    is_integer = isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53
    pattern, text = getattr(settings, "right_answer_pattern", None), str(int(answer) if is_integer else answer)
    right = text if pattern is None else find_answer(pattern, text)
    if right is None:
        end = text[-60:]
        raise DataError(f"{where}: task.right_answer_pattern finds nothing in the answer {end!r}. Change it.")
    if not isinstance(prompt, str | list):
        kind = f"the field {settings.prompt_field!r} is {kind_of(prompt)}"
        raise DataError(f"{where}: {kind}. Write a text, or a list of messages such as {MESSAGE}.")
    return where, prompt, right


def _value(where: str, row: Mapping[str, Any], settings: TextSettings, setting: str) -> Any:
    field, value = getattr(settings, setting), row
    for key in [field] if field in row else field.split("."):
        if not isinstance(value, Mapping) or key not in value:
            fields = ", ".join(map(repr, value if isinstance(value, Mapping) else ())) or "none"
            raise DataError(f"{where}: has no field {key!r}; its fields: {fields}. Add it, or set task.{setting}.")
        value = value[key]
    return value


def _example(where: str, prompt: Any, answer: str, settings: TextSettings, *, chat: bool) -> Example:
    column = f"{where}: the field {settings.prompt_field!r}"
    if isinstance(prompt, str):
        text = settings.prompt_template.replace("{prompt}", prompt)  # other braces have no meaning
        turns = [Message("user", text)]
        if not chat:
            return Example(text, answer, where=where)
    elif settings.prompt_template == "{prompt}":
        turns = _messages(column, prompt)
    else:
        raise DataError(f"{column} is a list of messages, which `prompt_template` cannot surround. Use `system`.")
    if settings.system is None:
        return Example.chat(turns, answer, where)
    if turns[0].role == "system":
        raise DataError(f"{column} begins with a system message, and so does `system`. Remove one of them.")
    return Example.chat([Message("system", settings.system), *turns], answer, where)


def _messages(where: str, prompt: Iterable[Any]) -> list[Message]:
    turns = []
    for number, turn in enumerate(prompt, start=1):
        # in a data set all messages have the same fields, which may be None
        fields = {key: text for key, text in turn.items() if text is not None} if isinstance(turn, Mapping) else {}
        if {*fields} != {"role", "content"} or not all(isinstance(text, str) for text in fields.values()):
            expected = f"an object with only the texts `role` and `content`. Write it like {MESSAGE}"
            raise DataError(f"{where}: message {number} is not {expected}.")
        turns.append(Message(**fields))
    if not turns or turns[-1].role == "assistant":
        raise DataError(f"{where} leaves the policy nothing to answer. End it with a message such as {MESSAGE}.")
    return turns
