"""Which files hold recorded optimizer steps, recognised by their names, before anything is read."""

import re
from pathlib import Path

from rlstab.files import is_dir, is_file
from rlstab.run_files import DUMP

#: The files of a rank; if the writer was stopped, the description may be missing.
_NAME = re.compile(r"step-\d+\.rank-\d+\.(json|safetensors)")
#: Patterns of the files of each trainer in a folder; the first that matches counts.
_FILES = (
    *("rank_*.jsonl", "step_*/rank_*.jsonl", "token_exports/step_*/rank_*.jsonl"),
    *("train_data_step*.jsonl", "*.jsonl", "*.pt"),
)


def folder_of(path: str | Path) -> Path:
    """The folder of the files that :func:`rlstab.record.read_dump` reads; the tokenizer lies in it."""
    path = Path(path)
    folder = path.parent if is_file(path) else path
    return folder / DUMP if not dumped(folder) and dumped(folder / DUMP) else folder


def dumped(path: Path) -> list[Path]:
    """The descriptions of a dump in a folder, or of one file of it; empty if there is no dump."""
    files = [path] if is_file(path) else path.glob("step-*") if is_dir(path) else []
    return sorted({file.with_suffix(".json") for file in files if _NAME.fullmatch(file.name)})


def dump_folders(path: Path) -> list[Path]:
    """Where optimizer steps were recorded: a path or its ``dump``, or folders in it."""
    if dumped(path if is_file(path) else folder_of(path)):
        return [path]
    return [inner for inner in sorted(path.iterdir()) if is_dir(inner) and dumped(inner)] if is_dir(path) else []


def token_files(path: Path) -> list[Path]:
    """Files of another trainer below a folder that hold tokens; empty if there are none."""
    return next(filter(None, (sorted(path.glob(kind)) for kind in _FILES)), [])
