"""A YAML file with the line of every value, so that an error can point to it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic_core import PydanticCustomError

from rlstab.errors import ConfigError, Conflict, RlstabError, reason
from rlstab.safe_read import open_file

#: The keys and indices that lead to a value in nested data.
Keys = tuple[str | int, ...]

#: What a file describes.
Kind: TypeAlias = Literal["run", "bench", "objective"]

#: More nodes than any run file has; stops aliases that unfold exponentially.
MAX_NODES = 100_000

#: Deeper nesting than in any run file; stops aliases that contain themselves.
MAX_DEPTH = 100

#: Bytes; no run file is larger.
MAX_BYTES = 2**24

#: YAML 1.2 knows ``1e-3`` as a number; PyYAML, which reads YAML 1.1, takes it for text.
_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_BREAK = re.compile("[\x85\u2028\u2029\ufeff]")
_TAG = "tag:yaml.org,2002:"
_PLAIN = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map"))


class _Loader(yaml.SafeLoader):
    """Plain data only: dates and ``=`` stay text, ``1e-3`` is a number."""

    yaml_implicit_resolvers = {  # the name and the type are PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":value"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes text that :class:`_Loader` would read as something else."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """Text with a Unicode line break needs double quotes, or PyYAML writes what it cannot read."""
        return self.represent_scalar(f"{_TAG}str", text, style='"' if _BREAK.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))


@dataclass(frozen=True)
class Document:
    """Plain data, and where each part of it stood.

    Attributes:
        data: mappings, lists and scalars.
        name: the file, or empty for data that came from Python.
        marks: ``file:line`` by the keys that lead to each value.
    """

    data: Any
    name: str = ""
    marks: Mapping[Keys, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Document:
        """Read a file: plain data only, each key once.

        Raises:
            ConfigError: there is no such file, it is not YAML, it repeats a key, or a tag in it would build an object.
        """
        try:
            with open_file(path) as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from error
        except (OSError, ValueError) as error:  # a path with a null character
            files = Path(path).parent.glob("*.y*ml") if isinstance(error, FileNotFoundError) else ()
            matches = get_close_matches(str(path), map(str, files), 1)
            hint = f"Did you mean '{matches[0]}'?" if matches else "Give the path of a YAML file, or --example NAME."
            raise ConfigError(f"{path}: cannot be read: {reason(error)}. {hint}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> Document:
        """The document of a YAML text; see :meth:`read`."""
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            if node is None:
                return cls(None, name)
            marks = {keys: f"{name}:{line}" for keys, line in _lines(loader, node, name)}
            return cls(loader.construct_document(node), name, marks)
        except yaml.YAMLError as error:
            where, reason = _parser_error(error, text)
            raise ConfigError(f"{name}{where}: not valid YAML: {reason}. Correct it there or just before.") from error
        except RecursionError as error:
            raise ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels. Write fewer.") from error

    @classmethod
    def joined(cls, parts: Sequence[Document]) -> Document:
        """A list of the parts; a part that is a list contributes its items."""
        items: list[Document] = []
        for document in parts:
            is_list = isinstance(document.data, list | tuple)
            items += [document.part((index,)) for index in range(len(document.data))] if is_list else [document]
        marks = {(index, *path): mark for index, item in enumerate(items) for path, mark in item.marks.items()}
        return cls([item.data for item in items], marks=marks)

    def part(self, path: Keys) -> Document:
        """The value at a position as a separate document."""
        depth = len(path)
        marks = {key[depth:]: mark for key, mark in self.marks.items() if key[:depth] == path}
        return Document(reduce(getitem, path, self.data), self.name, marks)

    def replaced(self, path: str, value: Document) -> Document:
        """A copy with another value at a dotted path; errors about it point to where that value stood.

        Raises:
            ConfigError: the path leads through something that is not a mapping.
        """
        keys = tuple(path.split("."))
        marks = {mark_keys: mark for mark_keys, mark in self.marks.items() if mark_keys[: len(keys)] != keys}
        copy = Document(None, self.name, marks | {(*keys, *suffix): mark for suffix, mark in value.marks.items()})

        def put(data: Any, depth: int) -> dict[Any, Any]:
            if not isinstance(data, Mapping):
                raise copy.error(keys, f"{'.'.join(keys[:depth]) or 'the file'} is not a mapping.")
            head = keys[depth]
            below = value.data if depth + 1 == len(keys) else put(data.get(head, {}), depth + 1)
            return {**data, head: below}

        return replace(copy, data=put(self.data, 0))

    def where(self, keys: Keys) -> str:
        """``file:line`` of a value, or of the nearest part around it that has one."""
        while keys and keys not in self.marks:
            keys = keys[:-1]
        return self.marks.get(keys, self.name)

    def text(self, keys: Keys, text: str) -> str:
        """A text about a value, after its file, line and path."""
        where, path = self.where(keys), ".".join(map(str, keys))
        return ": ".join(part for part in (where, "" if where == f"--set {path}" else path, text) if part)

    def error(self, keys: Keys, text: str) -> ConfigError:
        """An error that points to a value."""
        return ConfigError(self.text(keys, text))

    @contextmanager
    def at(self, keys: Keys, hint: str = "") -> Iterator[None]:
        """Errors of rlstab that are raised inside point to a value; a conflict remains one and ends with the hint."""
        try:
            yield
        except Conflict as error:
            raise Conflict(self.text(keys, f"{error}{hint}")) from None
        except RlstabError as error:
            raise self.error(keys, str(error)) from error


def misfit(text: str, *keys: str | int) -> PydanticCustomError:
    """The error that a validator raises.

    Args:
        text: what is wrong, and what to do.
        keys: the keys of the mistake, inside the data that is validated.
    """
    # pydantic refuses lone surrogates
    plain = [key if isinstance(key, int) else str(key).encode(errors="backslashreplace").decode() for key in keys]
    message = text.encode(errors="backslashreplace").decode()
    return PydanticCustomError("misfit", "{text}", {"text": message, "keys": plain})


def refuse(wrong: object, path: str, text: str) -> None:
    """Raise :func:`misfit` if something is wrong at a dotted path."""
    if wrong:
        raise misfit(text, *(int(key) if key.isdigit() else key for key in path.split(".") if key))


def kind_of_file(data: Any) -> Kind:
    """What the data of a file describe, judged by their keys."""
    names = data.keys() if isinstance(data, Mapping) else {"name"}
    run = names & {"model", "task", "objective"}
    if "base" in names or (names & {"methods", "stack"} and not run):
        return "bench"
    return "run" if run or not names & {"name", "preset"} else "objective"


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested settings by their dotted path, such as ``objective.0.name``; None is "null"."""
    if isinstance(data, Mapping):
        return {path: value for key, part in data.items() for path, value in flat(part, f"{prefix}{key}.").items()}
    if isinstance(data, list):
        return flat({str(index): part for index, part in enumerate(data)}, prefix)
    return {prefix.rstrip("."): "null" if data is None else data}


def shown(value: Any) -> str:
    """A value as YAML would show it, cut to one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        text = f"this {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def dump(data: Any) -> str:
    """YAML that :meth:`Document.parse` reads back as the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flow(data: Any) -> str:
    """YAML on one line, without document markers."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def _parser_error(error: yaml.YAMLError, text: str) -> tuple[str, str]:
    """``:line`` and reason of an error of PyYAML."""
    if isinstance(error, yaml.reader.ReaderError):
        return f":{text.count(chr(10), 0, error.position) + 1}", f"{chr(error.character)!r} is not allowed"
    assert isinstance(error, yaml.MarkedYAMLError)
    where = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    if error.problem_mark and re.match(r" *\t", re.split("[\n\x85\u2028\u2029]", text)[error.problem_mark.line]):
        return where, "a tab indents this line, and YAML indents with blanks"
    return where, ", ".join(part for part in (error.context, error.problem) if part)


def _lines(loader: _Loader, root: yaml.Node, name: str) -> Iterator[tuple[Keys, int]]:
    """Keys and line of every node: a value in a mapping is on the line of its key."""
    stack: list[tuple[Keys, yaml.Node, int]] = [((), root, root.start_mark.line + 1)]
    count = 0
    while stack:
        keys, node, line = stack.pop()
        count += 1
        if count > MAX_NODES or len(keys) > MAX_DEPTH:
            limit = f"more than {MAX_NODES} values, or nested deeper than {MAX_DEPTH} levels"
            raise ConfigError(f"{name}: {limit}. An alias may repeat without end.")
        yield keys, line
        if node.tag not in _PLAIN:
            tag = node.tag.replace(_TAG, "!!")
            raise ConfigError(f"{name}:{line}: the tag {tag} is refused. Write plain values, lists and mappings.")
        if isinstance(node, yaml.MappingNode):
            keys_here: set[str] = set()
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
                    raise ConfigError(f"{name}:{line}: a key is not text. Put it in quotes.")
                if key.value in keys_here:
                    raise ConfigError(f"{name}:{line}: the key '{key.value}' appears twice. Remove one of them.")
                keys_here.add(key.value)
                stack.append(((*keys, key.value), value, line))
        elif isinstance(node, yaml.SequenceNode):
            stack.extend(((*keys, index), value, value.start_mark.line + 1) for index, value in enumerate(node.value))
        else:
            try:
                loader.construct_object(node)
            except (ValueError, LookupError) as error:
                text = f"{shown(node.value)} cannot be read as {node.tag.removeprefix(_TAG)}. Put text in quotes."
                raise ConfigError(f"{name}:{line}: {text}") from error
