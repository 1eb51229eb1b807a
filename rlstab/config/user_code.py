"""External files that a YAML file refers to: user-defined classes and functions, by ``path/to/file.py:Name``, and data.

::

    objective:
      - {name: methods.py:SpareForks, share: 0.2}
    stages:
      - {name: stages.py:Thirds}
    task: {name: jsonl, path: problems.jsonl}

A relative path is looked up next to the YAML file, then in the current folder; in the resolved run it is absolute.
Nothing here runs the code: :mod:`rlstab.config.user_classes` does.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from rlstab.config.document import MAX_DEPTH, Document, Keys
from rlstab.files import checksum, checksum_of_file, exists, from_home, is_dir, is_file

_IN_FILE = re.compile(r"(?P<file>[^\n]*[^\n/\\]\.py):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")

#: Settings that may be the path of a file or folder.
_PATHS = re.compile(r"(^|.*\.)(model\.(name|adapter|reference|teacher)|adapter\.path|task\.(path|eval_path))")


#: By file of code: itself and the files that it imports or would import, as they were when it was searched.
_IMPORTS: dict[Path, dict[Path, tuple[int, int] | None]] = {}


def is_user_code(name: object) -> bool:
    """Whether a text names an object in a .py file."""
    return isinstance(name, str) and _IN_FILE.fullmatch(name) is not None


def _changed(
    data: Any, code: Callable[[str, str, Keys], str], path: Callable[[str, Keys], str], keys: Keys = ()
) -> Any:
    """The data with every file and name of user code changed, and every setting that may be a path."""
    if len(keys) > MAX_DEPTH:  # refused when it is read
        return data
    if isinstance(data, Mapping):
        return {key: _changed(value, code, path, (*keys, key)) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_changed(value, code, path, (*keys, index)) for index, value in enumerate(data)]
    if not isinstance(data, str):
        return data
    if user := _IN_FILE.fullmatch(data):
        return code(user["file"], user["name"], keys)
    return path(data, keys) if _PATHS.fullmatch(".".join(map(str, keys))) else data


# -- paths -------------------------------------------------------------------------------------------------------------


_DATA = Path(__file__).parent.parent / "data"
#: The folders of the models that ship with the package, by their names, which are not paths.
SHIPPED_MODELS = {config.parent.name: config.parent for config in sorted(_DATA.glob("*/config.json"))}


def located(document: Document) -> Document:
    """The document with absolute paths for files and folders that exist."""

    def path(text: str, keys: Keys) -> str:
        return text if text in SHIPPED_MODELS else str(find(document, text, keys) or text)

    data = _changed(document.data, lambda file, name, keys: f"{path(file, keys)}:{name}", path)
    return Document(data, document.name, document.marks)


def find(document: Document, path: str, keys: Keys) -> Path | None:
    """The file or folder that a path of a document means; None if it does not exist."""
    return next((candidate for candidate in candidates(document, path, keys) if exists(candidate)), None)


def candidates(document: Document, path: str, keys: Keys) -> list[Path]:
    """Where to look for a path: next to the YAML file first, then in the current folder."""
    mark, _, line = document.where(keys).rpartition(":")
    relative = from_home(path)
    next_to_file = [Path(mark).absolute().parent / relative] if line.isdigit() else []
    return list(dict.fromkeys(Path(*candidate.parts) for candidate in (*next_to_file, relative.absolute())))


# -- what a run says of them -------------------------------------------------------------------------------------------


def checksums(run: Any) -> dict[str, str]:
    """Checksums of the files that a resolved run names: code by ``file.py:Name``, data by their names.

    The checksum of code includes the files that it imports from its folder; that of a folder of data covers all files
    but hidden ones and caches. A file that is gone has an empty checksum.
    """
    sums: dict[str, str] = {}

    def path(text: str, keys: Keys, name: str = "") -> str:
        if not name and keys[0] == "task" and is_dir(text):
            sums[Path(text).name] = _sum_of_folder(Path(text))
        elif name or (keys[0] == "task" and is_file(text)):
            files = [Path(text), *(_imported(Path(text)) if name else ())] if is_file(text) else []
            sums[f"{Path(text).name}{name}"] = checksum(b"".join(file.read_bytes() for file in files)) if files else ""
        return text

    _changed(run, lambda file, name, keys: path(file, keys, f":{name}"), path)
    return dict(sorted(sums.items()))


def _sum_of_folder(folder: Path) -> str:
    files = {path.relative_to(folder): path for path in folder.rglob("*") if is_file(path)}
    counted = {name: files[name] for name in files if not any(part.startswith((".", "cache-")) for part in name.parts)}
    stats = {name: path.stat() for name, path in sorted(counted.items())}
    sums = [f"{name} {_sum_of_file(counted[name], stat.st_size, stat.st_mtime_ns)}" for name, stat in stats.items()]
    return checksum("\n".join(sums).encode())


@lru_cache(1024)
def _sum_of_file(path: Path, size: int, modified: int) -> str:
    """The checksum of a file, cached until it is modified: data may be large, and a run asks at each checkpoint."""
    return checksum_of_file(path)


def _imported(path: Path) -> list[Path]:
    """Files in its folder that a file of code imports, directly or not; in a clone, rlstab itself does not count."""
    before = _IMPORTS.get(path)  # to search takes longer than a small step, and a run asks at each checkpoint
    if before is None or before != {file: _modified(file) for file in before}:
        finder = ModuleFinder([str(path.parent)], excludes=["rlstab"])
        with suppress(SyntaxError, ValueError, OSError):  # reported when the file is loaded
            finder.run_script(str(path))
        imported = (getattr(module, "__file__", None) for module in finder.modules.values())
        modules = (name.replace(".", "/") for name in finder.badmodules if name != "rlstab")  # not there yet
        missing = (path.parent / f"{name}{end}" for name in modules for end in (".py", "/__init__.py"))
        files = path, *(Path(file) for file in imported if file), *missing
        _IMPORTS[path] = {file: _modified(file) for file in files}
    return sorted(file for file, modified in _IMPORTS[path].items() if modified and file != path)


def _modified(path: Path) -> tuple[int, int] | None:
    """Size and time of a file, or None without one."""
    stat = path.stat() if is_file(path) else None
    return stat and (stat.st_size, stat.st_mtime_ns)


def portable(data: Any) -> Any:
    """Settings as they would be on another machine: code by file name, other paths by their last two parts."""

    def path(text: str, keys: Keys) -> str:
        return "/".join(Path(text).parts[-2:]) if Path(text).is_absolute() else text

    return _changed(data, lambda file, name, keys: f"{Path(file).name}:{name}", path)


def code_in(data: Any) -> list[str]:
    """The names of user code in data, as they are written there."""
    names: list[str] = []

    def code(file: str, name: str, keys: Keys) -> str:
        names.append(f"{file}:{name}")
        return names[-1]

    _changed(data, code, lambda text, keys: text, ())
    return names


def relocated(data: Any, files: Sequence[str]) -> Any:
    """Data whose user code is in these files: each takes the place of a file of the same name."""
    homes = {Path(file).name: file for file in files}
    return _changed(
        data, lambda file, name, keys: f"{homes.get(Path(file).name, file)}:{name}", lambda text, keys: text, ()
    )


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each file that has changed since a run was started."""
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield f"{name} has changed since the run was last started"
