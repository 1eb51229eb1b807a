"""Read a JSON Lines file of prompts and answers, or say which line is wrong and how to put it right."""

import json
from pathlib import Path
from typing import Any, NoReturn

from rlstab.errors import DataError
from rlstab.tasks.prompt_template import PromptTemplate
from rlstab.tasks.task import Example


def read_examples(path: Path, prompt_field: str, answer_field: str, template: PromptTemplate) -> list[Example]:
    """Return the examples of a file, in its order; blank lines do not count.

    Raises:
        DataError: for a file that cannot be opened or has no examples, and for the first line that cannot be used.
    """
    examples = []
    if path.is_char_device() or path.is_block_device():
        raise DataError(f"{path}: is a device, which may never end. Set `path` and `eval_path` to files.")
    try:
        # bytes: lines end at \n alone, and a wrong encoding is found in its own line
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    examples.append(_example(f"{path}, line {number}", line, prompt_field, answer_field, template))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be opened ({error.strerror}). Check `path` and `eval_path`; a relative path starts at the "
            "current folder."
        ) from error
    if not examples:
        raise DataError(
            f"{path}: has no examples. Write one JSON object per line, such as {_sample(prompt_field, answer_field)}."
        )
    return examples


def _example(where: str, line: bytes, prompt_field: str, answer_field: str, template: PromptTemplate) -> Example:
    sample = _sample(prompt_field, answer_field)
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
    for field, setting in ((prompt_field, "prompt_field"), (answer_field, "answer_field")):
        if field not in row:
            has = ", ".join(map(repr, row)) or "none"
            raise DataError(
                f"{where}: has no field {field!r}; its fields: {has}. Add the field, or set `{setting}` to the one "
                "that is meant."
            )
    prompt, answer = row[prompt_field], row[answer_field]
    if not isinstance(prompt, str):
        raise DataError(
            f"{where}: the field {prompt_field!r} is a JSON {_kind(prompt)}, not a string. Write the prompt as one "
            "string in double quotes."
        )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{where}: the field {answer_field!r} is a JSON {_kind(answer)}, neither a string nor a number. Write the "
            "right answer as one string in double quotes."
        )
    return Example(template.fill(prompt), str(answer))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _sample(prompt_field: str, answer_field: str) -> str:
    return json.dumps({prompt_field: "2+3=", answer_field: "5"})
