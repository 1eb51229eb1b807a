"""The task of a JSON Lines file or a data set: its rows, each with the words by which errors refer to it, and how a row
becomes an example.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from rlstab import hub
from rlstab.core.method_settings import check_choices
from rlstab.errors import DataError, did_you_mean, kind_of
from rlstab.extras import require
from rlstab.files import from_home, is_file
from rlstab.safe_read import parse_json
from rlstab.tasks.scorers import TextScorer, find_answer
from rlstab.tasks.task import Example, Message, Split
from rlstab.tasks.workers import Workers

if TYPE_CHECKING:  # workers import this room without pydantic
    from rlstab.config.settings import DatasetSettings, JsonlSettings, TextSettings

#: Where each row is, and its fields.
Rows: TypeAlias = Iterable[tuple[str, Mapping[str, Any]]]

#: What to do about a line that is none.
WRITE = 'Write one JSON object per line, such as {"prompt": "2+3=", "answer": "5"}.'

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


# -- rows --------------------------------------------------------------------------------------------------------------


def read_rows(settings: JsonlSettings | DatasetSettings) -> tuple[Rows, Rows]:
    """The rows to train on, and the held-out rows that the settings name, if any.

    Raises:
        DataError: there are no rows, or they cannot be read.
        MissingPackage: the package datasets is needed and not installed.
    """
    if settings.name == "dataset":
        return _data_set_rows(settings)
    return _jsonl_rows(settings.path), () if settings.eval_path is None else _jsonl_rows(settings.eval_path)


def _jsonl_rows(path: str) -> Rows:
    """The rows of a file with one JSON object per line; blank lines do not count."""
    if not is_file(path):  # a device or a pipe may never end
        raise DataError(f"{path}: there is no such file. Check task.path and task.eval_path.")
    empty = True
    try:
        with Path(path).open("rb") as file:  # bytes: lines end only at \n, and each has its own encoding error
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                empty, where = False, f"{path}, line {number}"
                try:
                    # utf-8-sig: some editors put a byte order mark before the first line
                    row = parse_json(line.decode("utf-8-sig"), _no_constant)
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: is not UTF-8 ({error.reason}). Save the file in UTF-8.") from error
                except ValueError as error:
                    raise DataError(f"{where}: is not valid JSON ({error}). {WRITE}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{where}: is {kind_of(row)}, not an object. {WRITE}")
                yield where, row
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    if empty:
        raise DataError(f"{path}: has no examples. {WRITE}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _data_set_rows(settings: DatasetSettings) -> tuple[Rows, Rows]:
    """Rows from the hub, by name; from a folder of `Dataset.save_to_disk`; or from a folder of data files.

    No code of a data set is run.
    """
    require("datasets", "The task dataset")
    import datasets

    folder = from_home(settings.path)
    local, label = folder.is_dir(), f"the data set '{settings.path}'"
    if not local and settings.path.startswith((".", "/", "~")):
        raise DataError(f"there is no folder '{folder}'. Set task.path to one, or to a name on the hub.")
    offline = "" if local else hub.why_offline()
    requested = [split for split in (settings.split, settings.eval_split) if split is not None]
    with hub.quiet(datasets), _only_cache(bool(offline)):
        try:
            if local and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
                saved = datasets.load_from_disk(str(folder))
                splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
                available = [*splits]
            else:
                source = str(folder) if local else settings.path, settings.subset
                available = datasets.get_dataset_split_names(*source, revision=settings.revision)
                splits = {
                    name: datasets.load_dataset(*source, split=name, revision=settings.revision)
                    for name in {*requested} & {*available}
                }
        except Exception as error:  # the package may raise anything
            raise DataError(
                f"{label} cannot be loaded: {offline or hub.first_line(error)}. Give a folder, or a name on the hub or "
                f"in the cache, with task.subset where it has several."
            ) from error
    for name in requested:
        if name not in splits:
            raise DataError(f"{label} has no split '{name}'. {did_you_mean(name, available)}")
    train, *held_out = (_named(f"{label}, split '{name}'", splits[name], settings) for name in requested)
    return train, held_out[0] if held_out else ()


def _named(where: str, table: Any, settings: DatasetSettings) -> Rows:
    """The rows with only the columns that are read, since others may be large; with all columns if one is missing."""
    fields, column_names = (settings.prompt_field, settings.answer_field), {*table.column_names}
    columns = {field if field in column_names else field.partition(".")[0] for field in fields}
    for number, row in enumerate(table.select_columns(sorted(columns)) if columns <= column_names else table):
        yield f"{where}, row {number}", row


@contextmanager
def _only_cache(offline: bool) -> Iterator[None]:
    """Where the hub cannot be reached, only the cache is asked, which saves minutes."""
    import datasets
    import huggingface_hub

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before
