"""Prompts and answers from a data set of the package datasets: by its name on the hub, or from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstab import hub
from rlstab.errors import DataError, did_you_mean
from rlstab.extras import require
from rlstab.tasks.scorers import AnswerPattern
from rlstab.tasks.task import Example
from rlstab.tasks.text_task import TextTask, check_text_settings, example_of

if TYPE_CHECKING:  # workers import this room without pydantic
    from rlstab.config.settings import DatasetSettings


class DataSet(TextTask):
    """Rows with a prompt and its answer; all of them are read into memory. No code of a data set is run.

    `path` is its name on the hub, which is asked once; a folder of `Dataset.save_to_disk`; or a folder of data files.

    Raises:
        DataError: it cannot be found or used; with the columns and splits that are there.
        MissingPackage: datasets, or math-verify where that is asked for, is not installed.
        OutOfRange: if a setting has a value that cannot be used.
    """

    def __init__(self, settings: DatasetSettings) -> None:
        require("datasets", "The task dataset")
        check_text_settings(settings)
        right = AnswerPattern(settings.right_answer_pattern, "right_answer_pattern")
        splits = [settings.split] if settings.eval_split is None else [settings.split, settings.eval_split]
        examples = [_examples(split, rows, settings, right) for split, rows in _loaded(settings, splits)]
        held_out = None if settings.eval_split is None else examples[1]
        super().__init__(settings.path, settings, examples[0], held_out, "eval_split")


def _loaded(settings: DatasetSettings, splits: list[str]) -> list[tuple[str, Any]]:
    """The rows of each split."""
    import datasets

    path, subset, revision = settings.path, settings.subset, settings.revision
    folder = Path(path).expanduser()
    local = folder.is_dir()
    if not local and path.startswith((".", "/", "~")):
        raise DataError(f"there is no folder '{folder}'. Set task.path to one, or to a name on the hub.")
    offline = "" if local else hub.why_offline()
    with _quiet(offline=bool(offline)):
        try:
            if local and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
                whole = datasets.load_from_disk(str(folder))
                rows = dict(whole) if isinstance(whole, datasets.DatasetDict) else {"train": whole}
                known = list(rows)
            else:
                source = str(folder) if local else path
                known = datasets.get_dataset_split_names(source, subset, revision=revision)
                rows = {
                    name: datasets.load_dataset(source, subset, split=name, revision=revision)
                    for name in dict.fromkeys(splits)
                    if name in known
                }
        except Exception as error:  # files of others fail in every way
            why = offline or hub.first_line(error)
            raise DataError(
                f"the data set '{path}' cannot be loaded: {why}. Give a name on the hub, or in the cache, with "
                f"task.subset where it has several; or a folder."
            ) from error
    for name in splits:
        if name not in rows:
            raise DataError(f"the data set '{path}' has no split '{name}'. {did_you_mean(name, known)}")
    return [(name, rows[name]) for name in splits]


def _examples(split: str, rows: Any, settings: DatasetSettings, right: AnswerPattern) -> list[Example]:
    columns = {}
    for setting in ("prompt_field", "answer_field"):
        field = getattr(settings, setting)
        columns[setting] = [field] if field in rows.column_names else field.split(".")
        if columns[setting][0] not in rows.column_names:
            has = ", ".join(map(repr, rows.column_names)) or "none"
            raise DataError(
                f"the data set '{settings.path}' has no column {field!r} in the split '{split}'; its columns: {has}. "
                f"Set task.{setting} to the one that is meant."
            )
    examples = []
    names = sorted({path[0] for path in columns.values()})
    for number, values in enumerate(zip(*(rows[name] for name in names), strict=True)):
        row = dict(zip(names, values, strict=True))
        where = f"the data set '{settings.path}', split '{split}', row {number}"
        prompt, answer = (_value(where, row, path) for path in columns.values())
        if isinstance(prompt, list):  # a column has the same fields in each message, None where one has none
            turns = [turn for turn in prompt if isinstance(turn, Mapping)]
            prompt = [{key: turn[key] for key in turn if turn[key] is not None} for turn in turns] or prompt
        example = example_of(where, (prompt, answer), settings)
        text = right.find(example.answer)
        if text is None:
            raise DataError(
                f"{where}: task.right_answer_pattern finds nothing in the answer {example.answer[-60:]!r}. Change it."
            )
        examples.append(Example(example.prompt, text, example.messages))
    if not examples:
        raise DataError(f"the data set '{settings.path}' has no row in the split '{split}'. Set another one.")
    return examples


def _value(where: str, row: Any, path: list[str]) -> Any:
    value = row
    for place, key in enumerate(path):
        if not isinstance(value, Mapping) or key not in value:
            has = ", ".join(map(repr, value)) if isinstance(value, Mapping) else "none"
            raise DataError(
                f"{where}: there is no field {key!r} in {'.'.join(path[:place])!r}; its fields: {has}. Change "
                f"task.prompt_field or task.answer_field."
            )
        value = value[key]
    return value


@contextmanager
def _quiet(*, offline: bool) -> Iterator[None]:
    """Without progress bars; `offline` asks the cache alone, and not for minutes whether the hub came back."""
    import datasets
    import huggingface_hub

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bar()
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before
        if shown:
            datasets.enable_progress_bar()
