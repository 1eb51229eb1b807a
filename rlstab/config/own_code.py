"""Classes of the user's own in YAML, by ``path/to/file.py:Name``: methods, stages and tasks.

::

    objective:
      - {name: methods.py:SpareForks, share: 0.2}
    stages:
      - {name: stages.py:Thirds}
    task: {name: tasks.py:Doubling}

A relative path is looked up beside the YAML file, then in the current folder; in the resolved run it is absolute. To
name a file is to run it, in the process that reads the YAML: :func:`load_class` is called for files that the user gave
to a command, never for those of a run folder that a report or a viewer reads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rlstab.config.document import MAX_DEPTH, Document, Place
from rlstab.core.method import Method
from rlstab.core.registry import Registry
from rlstab.errors import ConfigError, RlstabError, did_you_mean, kind_of
from rlstab.paths import is_file

Kind = TypeVar("Kind", bound=Method[Any])

_OWN = re.compile(r"(?P<file>[^\n]*[^\n/\\]\.py):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


@dataclass(frozen=True)
class Origin:
    """Where a class was loaded from.

    Attributes:
        path: of the file, absolute.
        name: of the class in it.
        checksum: twelve hexadecimal digits of the SHA-256 of the file as it was loaded.
    """

    path: Path
    name: str
    checksum: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


_modules: dict[tuple[Path, str], ModuleType] = {}
_origins: dict[type, Origin] = {}


def is_own(name: object) -> bool:
    """Whether a text names something in a file."""
    return isinstance(name, str) and _OWN.fullmatch(name) is not None


def origin(cls: type) -> Origin | None:
    """Where a class was loaded from, if :func:`load_class` did that."""
    return _origins.get(cls)


# -- paths -------------------------------------------------------------------------------------------------------------


def located(document: Document) -> Document:
    """The document with an absolute path wherever it names something in a file that is there.

    Raises:
        ConfigError: one file of that name lies beside the YAML file, and another one in the current folder.
    """
    return Document(_located(document, document.data, ()), document.name, document.marks)


def _located(document: Document, data: Any, place: Place) -> Any:
    if len(place) > MAX_DEPTH:  # refused with its place by whoever reads it
        return data
    if isinstance(data, Mapping):
        return {key: _located(document, value, (*place, key)) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_located(document, value, (*place, index)) for index, value in enumerate(data)]
    if isinstance(data, str) and (found := _OWN.fullmatch(data)):
        path = _find(document, found["file"], place)
        return data if path is None else f"{path}:{found['name']}"
    return data


def _find(document: Document, file: str, place: Place) -> Path | None:
    given = Path(file).expanduser()
    if given.is_absolute():
        return given
    here = given.absolute()
    mark, _, line = document.where(place).rpartition(":")
    beside = (Path(mark).absolute().parent / given) if line.isdigit() else here
    there = [one for one in dict.fromkeys((beside, here)) if is_file(one)]
    if len(there) > 1 and not there[0].samefile(there[1]) and there[0].read_bytes() != there[1].read_bytes():
        raise document.error(place, f"'{file}' may be {there[0]} or {there[1]}. Write the path that is meant in full.")
    return Path(*there[0].parts) if there else None


# -- classes -----------------------------------------------------------------------------------------------------------


def load_class(document: Document, text: str, place: Place, wanted: str, example: str) -> type:
    """The class that a text names.

    Args:
        document: for the file and line of errors; its paths are :func:`located`.
        text: ``path/to/file.py:Name``.
        place: of the text.
        wanted: what the class is to be, in errors: ``a method``.
        example: how to begin one.

    Raises:
        ConfigError: no such file or name, the file cannot be loaded, or it is no class.
    """
    found = _OWN.fullmatch(text)
    assert found is not None
    path, name = Path(found["file"]).expanduser(), found["name"]
    if not is_file(path):
        looked = [path] if path.is_absolute() else _looked(document, path, place)
        raise document.error(place, f"there is no file {' or '.join(map(str, looked))}. Change the path, or make it.")
    path = path.absolute()
    try:
        source = path.read_bytes()
        module = _module(path, source)
    except (Exception, SystemExit) as error:  # code of others fails in every way
        raise document.error(place, f"{path} cannot be loaded: {_told(error, path)}. Mend it.") from error
    cls: Any = module
    for one in name.split("."):
        if not hasattr(cls, one):
            known = [
                key
                for key, value in vars(cls).items()
                if inspect.isclass(value) and value.__module__ == module.__name__ and not key.startswith("_")
            ]
            hint = did_you_mean(one, known) if known else f"Define it: {example}"
            raise document.error(place, f"{path} has no class '{name}'. {hint}")
        cls = getattr(cls, one)
    if not inspect.isclass(cls):
        raise document.error(place, f"'{name}' in {path} is {kind_of(cls)}, not {wanted}. {example}")
    _origins[cls] = Origin(path, name, _sum(source))
    return cls


def load_method(
    document: Document, text: str, place: Place, registry: Registry[Kind], base: type[Kind], noun: str
) -> type[Kind]:
    """The method or stage that a text names.

    Raises:
        ConfigError: see :func:`load_class`; or the class is none, or has the name of another.
    """
    of = "rlstab.TokenObjective" if noun == "method" else "rlstab.stages.stage.Stage, by one of its kinds"
    fix = f"Name a class that inherits from {of}."
    cls = load_class(document, text, place, f"a {noun}", fix)
    if not issubclass(cls, base):
        raise document.error(place, f"'{cls.__qualname__}' in {_origins[cls].path} is not a {noun}. {fix}")
    if inspect.isabstract(cls):
        raise document.error(
            place, f"'{cls.__qualname__}' lacks {', '.join(sorted(cls.__abstractmethods__))}. Define it in the class."
        )
    if cls.name in registry.names() and registry.get(cls.name) is not cls:
        raise document.error(
            place, f"'{cls.__qualname__}' is named '{cls.name}', as another {noun} is. Give the class another `name`."
        )
    return cls


def classes(file: str) -> list[type]:
    """The methods, stages and tasks that a file defines, in its order.

    Raises:
        ConfigError: there is no such file, it cannot be loaded, or has none.
    """
    path = Path(file).expanduser().absolute()
    if path.suffix != ".py" or not is_file(path):
        raise ConfigError(f"there is no Python file {path}. Give the path of one with methods, stages or tasks.")
    try:
        module = _module(path, path.read_bytes())
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be loaded: {_told(error, path)}. Mend it.") from error
    found = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    found = [one for one in found if (issubclass(one, Method) and not inspect.isabstract(one)) or _is_task(one)]
    if not found:
        raise ConfigError(f"{path} defines no method, stage or task. Give a file that does.")
    return found


def _is_task(cls: type) -> bool:
    return all(callable(getattr(cls, name, None)) for name in ("example", "score"))


def name_in_yaml(method: Method[Any]) -> str:
    """What YAML calls a method or a stage."""
    where = origin(type(method))
    return method.name if where is None else str(where)


def _looked(document: Document, path: Path, place: Place) -> list[Path]:
    mark, _, line = document.where(place).rpartition(":")
    beside = Path(mark).absolute().parent / path if line.isdigit() else path.absolute()
    return list(dict.fromkeys((beside, path.absolute())))


def _module(path: Path, source: bytes) -> ModuleType:
    """The module of a file, loaded once for as long as it does not change."""
    key = path, _sum(source)
    if key not in _modules:
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.append(folder)  # it may import what lies beside it; at the end, so that it hides nothing
        spec = importlib.util.spec_from_file_location(f"own_{path.stem}_{_sum(str(path).encode())}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
        _modules[key] = module
    return _modules[key]


def _told(error: BaseException, path: Path) -> str:
    """An error in one line, with the last line of the file that it came from."""
    if isinstance(error, RlstabError):
        return str(error).rstrip(".")
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    where = f" ({path.name}, line {lines[-1]})" if lines else ""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except (Exception, SystemExit):  # its text is code of others too
        text = "without a text"
    return f"{type(error).__name__}: {' '.join(text.split())}{where}"


# -- what a run says of them ------------------------------------------------------------------------------------------


def files(run: Any) -> dict[str, str]:
    """Checksums of the files that a resolved run names, by ``file.py:Name``; of one that is gone, nothing."""
    found = {}
    for text in _named(run):
        one = _OWN.fullmatch(text)
        assert one is not None
        path = Path(one["file"])
        found[f"{path.name}:{one['name']}"] = _sum(path.read_bytes()) if path.is_file() else ""
    return dict(sorted(found.items()))


def short(data: Any) -> Any:
    """Settings with the names of files in place of their paths, which are others on another machine."""
    if isinstance(data, Mapping):
        return {key: short(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [short(value) for value in data]
    found = _OWN.fullmatch(data) if isinstance(data, str) else None
    return data if found is None else f"{Path(found['file']).name}:{found['name']}"


def _named(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        data = data.values()
    if isinstance(data, str):
        if is_own(data):
            yield data
    elif not isinstance(data, bytes) and hasattr(data, "__iter__"):
        for one in data:
            yield from _named(one)


def _sum(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What to say of files that are not as they were when a run was started."""
    return [
        f"{name} is not as it was when the run was last started: its file has changed"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]
