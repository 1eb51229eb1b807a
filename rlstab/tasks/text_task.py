"""Prompts and answers that are texts: how a row becomes an example, and the task of a JSON Lines file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlstab.errors import DataError, OutOfRange
from rlstab.tasks.scorers import AnswerPattern, TextScorer
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Example, Message, Split

if TYPE_CHECKING:  # workers import this room without pydantic
    from rlstab.config.settings import JsonlSettings, TextSettings

#: A message as it should be.
MESSAGE = json.dumps({"role": "user", "content": "2+3="})


def check_template(template: str, placeholder: str) -> None:
    """Raise OutOfRange if a template lacks its placeholder."""
    if f"{{{placeholder}}}" not in template:
        raise OutOfRange(
            f"`prompt_template` has no {{{placeholder}}}, so every prompt would be the same: {template!r}. "
            f"Write {{{placeholder}}} where the text of the example belongs."
        )


def fill(template: str, placeholder: str, text: str) -> str:
    """A template with the text in it. Other braces stand for themselves."""
    return template.replace(f"{{{placeholder}}}", text)


class TextTask:
    """Prompts and answers in memory; where one prompt is a chat, all are.

    Args:
        name: for logs.
        settings: see :class:`rlstab.config.settings.TextSettings`.
        rows: the examples, in their order.
        held_out: those of the eval split; None holds out the last `eval_size` of `rows`.
        eval_setting: the setting that names other held-out examples, in errors.

    Raises:
        DataError: nothing is left to train on.
        MissingPackage: if math-verify is asked for and not installed.
        OutOfRange: if a setting has a value that cannot be used.
    """

    keeps_special_tokens = False

    def __init__(
        self,
        name: str,
        settings: TextSettings,
        rows: list[Example],
        held_out: list[Example] | None,
        eval_setting: str,
    ) -> None:
        self.name = name
        self._scorer = TextScorer(settings.scorer, AnswerPattern(settings.answer_pattern))
        cheap = settings.scorer == "exact" and settings.answer_pattern is None  # and cannot hang
        self.workers = None if cheap else Workers(self._scorer, settings.workers, settings.time_limit)
        size = settings.eval_size
        if held_out is None and size >= len(rows):
            raise DataError(
                f"{name}: has {len(rows)} example{'s' * (len(rows) != 1)}, so holding out the last {size} leaves none "
                f"to train on. Set a smaller task.eval_size, or name a task.{eval_setting}."
            )
        train, held_out = (rows[:-size], rows[-size:]) if held_out is None else (rows, held_out)
        if any(example.messages for example in train + held_out):
            train, held_out = [*map(_as_chat, train)], [*map(_as_chat, held_out)]
        self._rows: dict[Split, list[Example]] = {"train": train, "eval": held_out}
        self.size: dict[Split, int | None] = {"train": len(train), "eval": len(held_out)}

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is a string. Indices beyond the end start again."""
        rows = self._rows[split]
        return rows[index % len(rows)]

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 if the completion has the right answer, else 0.0.

        Raises:
            ScorerError: if that takes too long, or math-verify cannot read the example's own answer.
        """
        if self.workers is None:
            return self._scorer.score(example.answer, completion)
        return self.workers.score_one(example.answer, completion)


class Jsonl(TextTask):
    r"""One JSON object per line, with a prompt and its answer.

    Example `index` is the row `index` of the file, whenever it is asked for. A prompt is text or a list of messages,
    objects with `role` and `content`; where one is, or with `system`, all are chats, and text is a message of the user.
    With `scorer: math_verify` the right answer is mathematics alone, such as `\frac{1}{2}`, and the completion may have
    text around its own.

    Raises:
        DataError: if a file cannot be read or used; the message has the line and the remedy.
        MissingPackage: if math-verify is asked for and not installed.
        OutOfRange: if a setting has a value that cannot be used.
    """

    def __init__(self, settings: JsonlSettings) -> None:
        check_text_settings(settings)
        rows = read_examples(Path(settings.path), settings)
        held_out = None if settings.eval_path is None else read_examples(Path(settings.eval_path), settings)
        super().__init__(Path(settings.path).stem, settings, rows, held_out, "eval_path")


def check_text_settings(settings: TextSettings) -> None:
    """Check what can be checked without the data, of which there may be much.

    Raises:
        MissingPackage: if math-verify is asked for and not installed.
        OutOfRange: a pattern does not compile or has no group, or a template lacks its placeholder.
    """
    TextScorer(settings.scorer, AnswerPattern(settings.answer_pattern))
    check_template(settings.prompt_template, "prompt")


def read_examples(path: Path, settings: TextSettings) -> list[Example]:
    """Return the examples of a file, in its order; blank lines do not count.

    Raises:
        DataError: for a file that cannot be opened or has no examples, and for the first line that cannot be used.
    """
    sample = json.dumps({settings.prompt_field: "2+3=", settings.answer_field: "5"})
    if path.is_char_device() or path.is_block_device() or path.is_fifo():
        raise DataError(f"{path}: is a device or a pipe, which may never end. Name a file.")
    examples = []
    try:
        # bytes: lines end at \n alone, and a wrong encoding is found in its own line
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    examples.append(example_of(where, _row(where, line, sample, settings), settings))
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be opened ({reason}). Check task.path and task.eval_path.") from error
    if not examples:
        raise DataError(f"{path}: has no examples. Write one JSON object per line, such as {sample}.")
    return examples


def _row(where: str, line: bytes, sample: str, settings: TextSettings) -> tuple[Any, Any]:
    """Prompt and answer in a line."""
    try:
        # utf-8-sig: some editors put a byte order mark before the first line
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 ({error.reason}). Save the file in UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: is not valid JSON ({error}). Each line must be one complete JSON object, such as {sample}."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: is {_kind(row)}, not an object. Write one object per line, such as {sample}.")
    for setting in ("prompt_field", "answer_field"):
        if (field := getattr(settings, setting)) not in row:
            has = ", ".join(map(repr, row)) or "none"
            raise DataError(f"{where}: has no field {field!r}; its fields: {has}. Add it, or set task.{setting}.")
    return row[settings.prompt_field], row[settings.answer_field]


def example_of(where: str, row: tuple[Any, Any], settings: TextSettings) -> Example:
    """The example that a prompt (text or a list of messages) and its answer (text or a number) make.

    Raises:
        DataError: they are something else.
    """
    prompt, answer = row
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{where}: the field {settings.answer_field!r} is {_kind(answer)}, neither a string nor a number. Write "
            f"the right answer as one string in double quotes."
        )
    field = f"{where}: the field {settings.prompt_field!r}"
    system = [] if settings.system is None else [Message("system", settings.system)]
    if isinstance(prompt, list):
        if settings.prompt_template != "{prompt}":
            raise DataError(
                f"{field} is a list of messages, which `prompt_template` cannot surround. Write its text into the "
                "messages, or into `system`, and remove `prompt_template`."
            )
        return Example.chat([*system, *_messages(field, prompt, bool(system))], str(answer))
    if not isinstance(prompt, str):
        raise DataError(
            f"{field} is {_kind(prompt)}, not a string. Write the prompt as one string in double quotes, or as a list "
            f"of messages."
        )
    text = fill(settings.prompt_template, "prompt", prompt)
    return Example.chat([*system, Message("user", text)], str(answer)) if system else Example(text, str(answer))


def _messages(field: str, turns: list[Any], system: bool) -> Iterator[Message]:
    for number, turn in enumerate(turns, start=1):
        fits = isinstance(turn, dict) and {*turn} == {"role", "content"}
        if not fits or not all(isinstance(text, str) for text in turn.values()):
            raise DataError(
                f"{field}: message {number} is not an object with the texts `role` and `content` alone. Write it like "
                f"{MESSAGE}."
            )
        yield Message(**turn)
    if not turns:
        raise DataError(f"{field} is an empty list. Put a message into it, such as {MESSAGE}.")
    if system and turns[0]["role"] == "system":
        raise DataError(f"{field} begins with a system message, and so does the setting `system`. Remove one of them.")
    if turns[-1]["role"] == "assistant":
        raise DataError(
            f"{field} ends with a message of the assistant, which is for the policy to write. Remove it, or put it "
            "before the last message of the user."
        )


def _as_chat(example: Example) -> Example:
    return example if example.messages else Example.chat([Message("user", example.prompt)], example.answer)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
