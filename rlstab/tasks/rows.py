"""Rows of a JSON Lines file or of a data set, each with the words by which errors refer to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from rlstab import hub
from rlstab.errors import DataError, did_you_mean, kind_of
from rlstab.extras import require
from rlstab.files import from_home, is_file
from rlstab.safe_read import parse_json

if TYPE_CHECKING:  # workers import this room without pydantic
    from rlstab.config.settings import DatasetSettings, JsonlSettings

#: Where each row is, and its fields.
Rows: TypeAlias = Iterable[tuple[str, Mapping[str, Any]]]

#: What to do about a line that is none.
WRITE = 'Write one JSON object per line, such as {"prompt": "2+3=", "answer": "5"}.'


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
