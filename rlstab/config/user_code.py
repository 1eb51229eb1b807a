"""External files that a YAML file refers to: user-defined classes and functions, by ``path/to/file.py:Name``, and data.

::

    objective:
      - {name: methods.py:SpareForks, share: 0.2}
    stages:
      - {name: stages.py:Thirds}
    task: {name: jsonl, path: problems.jsonl}

A relative path is looked up next to the YAML file, then in the current folder; in the resolved run it is absolute.
Naming
a file of code runs it in the process that reads the YAML: :func:`load_class` is called for files that the user gave to
    a
command, never for those in a run folder that a report or a viewer reads.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, TypeVar

from rlstab.config.document import MAX_DEPTH, Document, Keys
from rlstab.core.comm import LocalComm
from rlstab.core.method import Method, State, measure_all
from rlstab.core.registry import Registry
from rlstab.core.saved_state import dump_state
from rlstab.core.validate import DECLARED, check_mapping
from rlstab.errors import ConfigError, MethodError, RlstabError, did_you_mean, kind_of
from rlstab.files import checksum, exists, in_one_line, is_dir, is_file, load_module

Kind = TypeVar("Kind", bound=Method[Any])

_IN_FILE = re.compile(r"(?P<file>[^\n]*[^\n/\\]\.py):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")

#: Settings that may be the path of a file or folder.
_PATHS = re.compile(r"(^|.*\.)(model\.(name|adapter|reference)|adapter\.path|task\.(path|eval_path))")

_files_of: dict[type, str] = {}
_imports: dict[Path, tuple[dict[Path, tuple[int, int]], list[Path]]] = {}


def is_user_code(name: object) -> bool:
    """Whether a text names something in a .py file."""
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
#: Names of the models that ship with the package, which are not paths.
SHIPPED_MODELS = tuple(sorted(config.parent.name for config in _DATA.glob("*/config.json")))


def located(document: Document) -> Document:
    """The document with absolute paths for files and folders that exist."""

    def path(text: str, keys: Keys) -> str:
        return text if text in SHIPPED_MODELS else str(_find(document, text, keys) or text)

    data = _changed(document.data, lambda file, name, keys: f"{path(file, keys)}:{name}", path)
    return Document(data, document.name, document.marks)


def _find(document: Document, path: str, keys: Keys) -> Path | None:
    return next((candidate for candidate in _candidates(document, path, keys) if exists(candidate)), None)


def _candidates(document: Document, path: str, keys: Keys) -> list[Path]:
    """Where to look for a path: next to the YAML file first, then in the current folder."""
    mark, _, line = document.where(keys).rpartition(":")
    given = Path(path).expanduser()
    next_to_file = [Path(mark).absolute().parent / given] if line.isdigit() else []
    return list(dict.fromkeys(Path(*candidate.parts) for candidate in (*next_to_file, given.absolute())))


# -- classes -----------------------------------------------------------------------------------------------------------


def load_class(document: Document, text: str, keys: Keys, wanted: str, fix: str) -> type:
    """The class that a text names.

    Args:
        document: for the file and line in errors; its paths are :func:`located`.
        text: ``path/to/file.py:Name``.
        keys: of the text.
        wanted: what the class should be, in errors: ``a method``.
        fix: what to do if it is something else.

    Raises:
        ConfigError: there is no such file or name, the file cannot be loaded, or it is not a class.
    """
    file, _, name = text.rpartition(":")
    path = _find(document, file, keys)
    if path is None or not is_file(path):
        looked = " or ".join(map(str, _candidates(document, file, keys)))
        raise document.error(keys, f"there is no file {looked}. Correct the path, or create the file.")
    try:
        module = load_module(path)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise document.error(keys, f"{path} cannot be loaded: {in_one_line(error, path)}. Correct it.") from error
    try:
        cls = operator.attrgetter(name)(module)
    except AttributeError as error:
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        defined = [cls.__name__ for cls in classes if cls.__module__ == module.__name__]
        known = [name for name in defined if not name.startswith("_")]
        hint = did_you_mean(name, known) if known else f"Define it: {fix}"
        raise document.error(keys, f"{path} has no class '{name}'. {hint}") from error
    if not inspect.isclass(cls):
        raise document.error(keys, f"'{name}' in {path} is {kind_of(cls)}, not {wanted}. {fix}")
    _files_of[cls] = f"{path}:{name}"
    return cls


def load_method(document: Document, text: str, keys: Keys, registry: Registry[Kind]) -> type[Kind]:
    """The method or stage that a text names.

    Raises:
        ConfigError: see :func:`load_class`; the class is not a method, or has the name of another one.
    """
    noun, base = registry.noun, registry.base
    fix = f"Name a class that inherits from {base.__module__}.{base.__name__}."
    cls = load_class(document, text, keys, f"a {noun}", fix)
    where = f"'{cls.__qualname__}' in {_files_of[cls].rpartition(':')[0]}"
    if not issubclass(cls, base):
        raise document.error(keys, f"{where} is not a {noun}. {fix}")
    if inspect.isabstract(cls):
        raise document.error(keys, f"{where} lacks {', '.join(sorted(cls.__abstractmethods__))}. Define it there.")
    if cls.name in registry.names() and registry.get(cls.name) is not cls:
        text = f"{where} has the name '{cls.name}' of another {noun}. Give the class another `name`."
        raise document.error(keys, text)
    return cls


def name_in_yaml(method: Method[Any]) -> str:
    """What YAML calls a method or a stage."""
    return _files_of.get(type(method), method.name)


@contextmanager
def blamed(what: str, fix: str, path: Path | None = None) -> Iterator[None]:
    """Run user code, and report whatever it raises in one line; errors of rlstab are not changed.

    Raises:
        ConfigError: says that ``what`` raised, with the last line of the user's file, and the fix.
    """
    try:
        yield
    except RlstabError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised {in_one_line(error, path)}. {fix}.") from error


def make(cls: type[Kind], settings: Mapping[str, Any]) -> Kind:
    """A method or stage. Of a user-defined one, the declared properties and the first states are tried.

    Raises:
        ConfigError: user code raises.
        MethodError: a checkpoint cannot hold a state.
    """
    if cls.__module__.startswith("rlstab."):
        return cls(**settings)
    file, fix = _files_of.get(cls, "").rpartition(":")[0], "Correct the class"
    path = Path(file) if file else None
    with blamed(f"'{cls.name}': __init__", fix, path):
        method = cls(**settings)
    for name in DECLARED:
        with blamed(f"'{cls.name}': {name}", fix, path):
            getattr(method, name, None)
    with blamed(f"'{cls.name}': init_state", fix, path):
        state = method.init_state()
    check_mapping(cls.name, "init_state", state)
    require_storable(cls.name, "init_state", state)
    with suppress(Exception):  # its result without tokens is tried when a rank has none
        state = measure_all(method, [], state, LocalComm())[1]
    require_storable(cls.name, "advance", state)
    return method


def require_storable(who: str, method: str, state: State) -> None:
    """Refuse a state that JSON and safetensors do not restore exactly.

    Raises:
        MethodError: names the function that returned it, and the key.
    """
    for key, value in state.items():
        try:
            plain = dump_state({key: value})[0]
            back = json.loads(json.dumps(plain))
            same = back == plain or repr(back) == repr(plain)  # NaN is not equal to itself
            why = "" if same else "JSON gives it back as something else"
        except Exception as error:  # objects of any kind
            why = in_one_line(error)
        if why:
            raise MethodError(
                f"'{who}': {method} returned a state whose {key!r} is {kind_of(value)}, which a checkpoint cannot "
                f"hold: {why}. Make it a number, a bool, a text, a tensor, or a dict of them with texts as keys."
            )


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
    kept = {name: files[name] for name in files if not any(part.startswith((".", "cache-")) for part in name.parts)}
    stats = {name: path.stat() for name, path in sorted(kept.items())}
    sums = [f"{name} {_sum_of_file(kept[name], stat.st_size, stat.st_mtime_ns)}" for name, stat in stats.items()]
    return checksum("\n".join(sums).encode())


@lru_cache(1024)
def _sum_of_file(path: Path, size: int, modified: int) -> str:
    """The checksum of a file, cached until it is modified: data may be large, and a run asks at each checkpoint."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _imported(path: Path) -> list[Path]:
    """Files in its folder that a file of code imports, directly or not; in a clone, rlstab itself does not count.

    They are looked for again where one of the files, or of the folders that hold them, was modified.
    """
    stamps, files = _imports.get(path, ({}, []))
    if not stamps or stamps != {near: _stamp(near) for near in stamps}:
        finder = ModuleFinder([str(path.parent)], excludes=["rlstab"])
        with suppress(SyntaxError, ValueError, OSError):  # reported when the file is loaded
            finder.run_script(str(path))
        found = (getattr(module, "__file__", None) for module in finder.modules.values())
        files = sorted(Path(file) for file in found if file and Path(file) != path)
        _imports[path] = {near: _stamp(near) for file in (path, *files) for near in (file, file.parent)}, files
    return files


def _stamp(path: Path) -> tuple[int, int]:
    """When it was last modified, and its size; zeros where it is gone."""
    stat = path.stat() if exists(path) else None
    return (stat.st_mtime_ns, stat.st_size) if stat else (0, 0)


def portable(data: Any) -> Any:
    """Settings as they would be on another machine: code by file name, other paths by their last two parts."""

    def path(text: str, keys: Keys) -> str:
        return "/".join(Path(text).parts[-2:]) if Path(text).is_absolute() else text

    return _changed(data, lambda file, name, keys: f"{Path(file).name}:{name}", path)


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each file that has changed since a run was started."""
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            yield f"{name} has changed since the run was last started"
