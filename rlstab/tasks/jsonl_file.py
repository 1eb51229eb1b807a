"""Read a JSON Lines file of prompts and answers, or say which line is wrong and how to put it right."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rlstab.errors import DataError
from rlstab.tasks.prompt_template import PromptTemplate
from rlstab.tasks.task import Example, Message

#: A message as it should be.
MESSAGE = json.dumps({"role": "user", "content": "2+3="})


@dataclass(frozen=True)
class Fields:
    """How a line becomes an example.

    Attributes:
        prompt: name of the field with the prompt, text or a list of messages.
        answer: name of the field with the right answer.
        template: what surrounds a prompt that is text.
        system: content of a system message before each prompt; None for none.
    """

    prompt: str
    answer: str
    template: PromptTemplate
    system: str | None = None

    @property
    def sample(self) -> str:
        """A line as it should be."""
        return json.dumps({self.prompt: "2+3=", self.answer: "5"})


def read_examples(path: Path, fields: Fields) -> list[Example]:
    """Return the examples of a file, in its order; blank lines do not count.

    Raises:
        DataError: for a file that cannot be opened or has no examples, and for the first line that cannot be used.
    """
    examples = []
    if path.is_char_device() or path.is_block_device():
        raise DataError(f"{path}: is a device, which may never end. Set `path` and `eval_path` to files.")
    if path.is_fifo():
        raise DataError(f"{path}: is a pipe, which may wait for ever. Set `path` and `eval_path` to files.")
    try:
        # bytes: lines end at \n alone, and a wrong encoding is found in its own line
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    examples.append(_example(f"{path}, line {number}", line, fields))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be opened ({error.strerror}). Check `path` and `eval_path`; a relative path starts at the "
            "current folder."
        ) from error
    if not examples:
        raise DataError(f"{path}: has no examples. Write one JSON object per line, such as {fields.sample}.")
    return examples


def _example(where: str, line: bytes, fields: Fields) -> Example:
    sample = fields.sample
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
        raise DataError(
            f"{where}: is a JSON {_kind(row)}, not an object. Each line must be one JSON object, such as {sample}."
        )
    for field, setting in ((fields.prompt, "prompt_field"), (fields.answer, "answer_field")):
        if field not in row:
            has = ", ".join(map(repr, row)) or "none"
            raise DataError(
                f"{where}: has no field {field!r}; its fields: {has}. Add the field, or set `{setting}` to the one "
                "that is meant."
            )
    return example_of(where, row[fields.prompt], row[fields.answer], fields)


def example_of(where: str, prompt: Any, answer: Any, fields: Fields) -> Example:
    """The example that a prompt and its answer make.

    Args:
        where: they are from, for errors.
        prompt: text or a list of messages.
        answer: text or a number.
        fields: how they become one.

    Raises:
        DataError: they are something else.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{where}: the field {fields.answer!r} is a JSON {_kind(answer)}, neither a string nor a number. Write the "
            "right answer as one string in double quotes."
        )
    if isinstance(prompt, list):
        return Example.chat(_messages(f"{where}: the field {fields.prompt!r}", prompt, fields), str(answer))
    if not isinstance(prompt, str):
        raise DataError(
            f"{where}: the field {fields.prompt!r} is a JSON {_kind(prompt)}, not a string. Write the prompt as one "
            "string in double quotes, or as a list of messages."
        )
    text = fields.template.fill(prompt)
    if fields.system is None:
        return Example(text, str(answer))
    return Example.chat([Message("system", fields.system), Message("user", text)], str(answer))


def _messages(where: str, turns: list[Any], fields: Fields) -> list[Message]:
    if not fields.template.plain:
        raise DataError(
            f"{where} is a list of messages, which `prompt_template` cannot surround. Write its text into the "
            "messages, or into `system`, and remove `prompt_template`."
        )
    found = [Message("system", fields.system)] if fields.system is not None else []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or {*turn} != {"role", "content"} or not all(map(_text, turn.values())):
            raise DataError(
                f"{where}: message {number} is not an object with the texts `role` and `content` alone. Write it like "
                f"{MESSAGE}."
            )
        found.append(Message(**turn))
    if not turns:
        raise DataError(f"{where} is an empty list. Put a message into it, such as {MESSAGE}.")
    if fields.system is not None and turns[0]["role"] == "system":
        raise DataError(f"{where} begins with a system message, and so does the setting `system`. Remove one of them.")
    if turns[-1]["role"] == "assistant":
        raise DataError(
            f"{where} ends with a message of the assistant, which is for the policy to write. Remove it, or put it "
            "before the last message of the user."
        )
    return found


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
