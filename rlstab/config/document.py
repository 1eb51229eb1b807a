"""A YAML file with the line of every value, so that an error can point at it."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, JsonValue, ValidationError

from rlstab.config.renamed import SETTINGS
from rlstab.errors import ConfigError, did_you_mean

Place = tuple[str | int, ...]

#: More nodes than any run file has; stops aliases that unfold exponentially.
MAX_NODES = 100_000

#: Nested deeper than any run file is; stops aliases that contain themselves.
MAX_DEPTH = 100

#: Bytes; more than any run file has.
MAX_BYTES = 16_000_000

#: What to do about an error of the parser, by what is in its text.
_HINTS = {
    "'\\t'": "Indent with spaces.",
    "another document": "Keep one of them, without the line `---`.",
    "undefined alias": "Put text that begins with `*` in quotes.",
    "',' or ']'": "Close the list with `]`.",
    "',' or '}'": "Close the mapping with `}`.",
    "quoted scalar": "Close the text with its quotation mark.",
    "for merging": "Write a mapping after `<<`.",
}

#: YAML 1.2 knows ``1e-3`` as a number; PyYAML, which reads YAML 1.1, takes it for text.
_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_BREAK = re.compile("[\x85\u2028\u2029\ufeff]")
_STR = "tag:yaml.org,2002:str"
_FLOAT = "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))


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
        return self.represent_scalar(_STR, text, style='"' if _BREAK.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_str)
for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


@dataclass(frozen=True)
class Document:
    """Plain data, and where each part of it stood.

    Attributes:
        data: mappings, lists and scalars.
        name: the file, or empty for data that came from Python.
        marks: ``file:line`` by place.
    """

    data: Any
    name: str
    marks: Mapping[Place, str]

    @classmethod
    def read(cls, path: str | Path) -> Document:
        """Read a file: plain data only, each key once.

        Raises:
            ConfigError: no such file, not YAML, a repeated key, a tag that would build an object.
        """
        try:
            text = _content(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"{path}: cannot be read: {reason}. Give the path of a YAML file.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from error
        except ValueError as error:  # a path with a null character
            raise ConfigError(f"{str(path)!r} is not a path: {error}. Give the path of a YAML file.") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> Document:
        """The document of a YAML text; see :meth:`read`."""
        try:
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
                marks = {} if node is None else {place: f"{name}:{line}" for place, line in _lines(loader, node, name)}
                data = None if node is None else loader.construct_document(node)
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = f"{name}:{mark.line + 1}" if mark else name
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            hint = next((fix for found, fix in _HINTS.items() if found in reason), "Mend it there or just before.")
            raise ConfigError(f"{where}: not valid YAML: {reason}. {hint}") from error
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            reason = f"the character {chr(error.character)!r} is not allowed"
            hint = "Remove it, or write it as an escape in double quotes."
            raise ConfigError(f"{name}:{line}: not valid YAML: {reason}. {hint}") from error
        except RecursionError as error:
            raise ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels. Write fewer.") from error
        return cls(data, name, marks)

    @classmethod
    def of(cls, data: Any) -> Document:
        """Data that came from Python."""
        return cls(data, "", {})

    def under(self, key: str) -> Document:
        """The same data as the value of ``key``."""
        return Document({key: self.data}, self.name, {(key, *place): mark for place, mark in self.marks.items()})

    def replaced(self, path: str, value: Any) -> Document:
        """With another value at a dotted path; errors about it name the path.

        Raises:
            ConfigError: there is no mapping to set it in.
        """
        place = tuple(path.split("."))
        option = f"--set {path}"

        def put(data: Any, depth: int) -> dict[Any, Any]:
            if not isinstance(data, Mapping):
                raise ConfigError(f"{option}: {'.'.join(place[:depth]) or 'the file'} is not a mapping.")
            head = place[depth]
            below = value if depth + 1 == len(place) else put(data.get(head, {}), depth + 1)
            return {**data, head: below}

        marks = {one: mark for one, mark in self.marks.items() if one[: len(place)] != place}
        return Document(put(self.data, 0), self.name, {**marks, place: option})

    def where(self, place: Place) -> str:
        """``file:line`` of the nearest known part around ``place``."""
        while place and place not in self.marks:
            place = place[:-1]
        return self.marks.get(place, self.name)

    def text(self, place: Place, text: str) -> str:
        """A text about ``place``, after file, line and path."""
        where, path = self.where(place), ".".join(map(str, place))
        return ": ".join(part for part in (where, "" if where == f"--set {path}" else path, text) if part)

    def error(self, place: Place, text: str) -> ConfigError:
        """An error that points at ``place``."""
        return ConfigError(self.text(place, text))

    def validate(self, model: type[BaseModel], data: Any, place: Place = ()) -> BaseModel:
        """Validate a part of the document.

        Raises:
            ConfigError: one line per mistake, each with file and line, unknown keys with a did-you-mean.
        """
        try:
            return model.model_validate(data)
        except ValidationError as error:
            texts = [self._translate(model, one, place) for one in error.errors()]
            raise ConfigError("\n".join(texts)) from None

    def _translate(self, model: type[BaseModel], error: Mapping[str, Any], place: Place) -> str:
        known, found = _walk(model, error["loc"])
        kind, context, last = error["type"], error.get("ctx", {}), error["loc"][-1] if error["loc"] else ""
        if kind == "extra_forbidden":
            owner = found[-2] if len(found) > 1 else getattr(model.model_fields.get("name"), "default", "")
            if now := SETTINGS.get(f"{owner}.{last}"):
                return self.text(place + found, f"'{last}' is called '{now}' now. Rename it.")
            return self.text(place + found, f"unknown key '{last}'. {did_you_mean(str(last), known)}")
        if kind == "union_tag_invalid":
            tags = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
            hint = did_you_mean(str(context["tag"]), tags)
            return self.text((*place, *found, "name"), f"no {last} is called '{context['tag']}'. {hint}")
        if kind == "union_tag_not_found":
            return self.text(place + found, f"a {last} needs its `name`.")
        if kind == "missing":
            what = f"the setting `{last}` is missing; it has no default" if isinstance(last, str) else "too few values"
            return self.text(place + found[:-1], f"{what}.")
        if kind == "invalid_key" or last == "[key]":
            return self.text(place + found[:-1], f"the key {shown(error['input'])} is not text. Put it in quotes.")
        if kind == "unfit":
            return self.text(place + context["place"], context["text"])
        wanted = _EXPECTED.get(kind)
        if wanted is None:
            return self.text(place + found, error["msg"][:1].lower() + error["msg"][1:] + ".")
        return self.text(place + found, f"expected {wanted.format(**context)}, not {shown(error['input'])}.")


#: What pydantic wanted, by the type of its error.
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "string_unicode", "string_sub_type"), "text"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "too_long": "a list of at most {max_length}",
    "invalid-json-value": "plain data",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "literal_error": "{expected}",
}


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
    """The same on one line."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def _content(path: str | Path) -> bytes:
    """The bytes of a file, or of a pipe into which somebody writes, as of a shell's ``<(...)``.

    Raises:
        OSError: it cannot be read, or is a device, more than a run file can be, or a pipe without a writer.
    """
    if stat.S_ISCHR(Path(path).stat().st_mode) and str(Path(path).resolve()) != os.devnull:
        raise OSError("is a device, which may never end")
    # without O_NONBLOCK the call waits for a writer of a pipe, who may never come
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        found = file.read(1)  # None: the writer has not written yet
        os.set_blocking(file.fileno(), True)
        if is_pipe and found == b"":
            raise OSError("is a pipe into which nobody writes")
        parts = [found or b""]
        size = len(parts[0])
        while part := file.read(1 << 20):
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise OSError(f"has more than {MAX_BYTES} bytes")
    return b"".join(parts)


def _lines(loader: _Loader, root: yaml.Node, name: str) -> Iterator[tuple[Place, int]]:
    """Place and line of every node: a value in a mapping is on the line of its key."""
    stack: list[tuple[Place, yaml.Node, int]] = [((), root, root.start_mark.line + 1)]
    count = 0
    while stack:
        place, node, line = stack.pop()
        count += 1
        if count > MAX_NODES or len(place) > MAX_DEPTH:
            limit = f"more than {MAX_NODES} values" if count > MAX_NODES else f"nested deeper than {MAX_DEPTH} levels"
            raise ConfigError(f"{name}: {limit}. An alias may repeat without end.")
        yield place, line
        _check(loader, node, name)
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                label, line = str(key.value), key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    raise ConfigError(f"{name}:{line}: a list or mapping is used as a key. Write text.")
                _check(loader, key, name, _PLAIN | {_MERGE})
                if label in seen:
                    raise ConfigError(f"{name}:{line}: the key '{label}' appears twice. Remove one of them.")
                seen.add(label)
                stack.append(((*place, label), value, line))
        elif isinstance(node, yaml.SequenceNode):
            stack.extend(((*place, index), value, value.start_mark.line + 1) for index, value in enumerate(node.value))


def _check(loader: _Loader, node: yaml.Node, name: str, tags: Set[str] = _PLAIN) -> None:
    where = f"{name}:{node.start_mark.line + 1}"
    if node.tag not in tags:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise ConfigError(f"{where}: the tag {tag} is refused. Write plain values, lists and mappings.")
    if isinstance(node, yaml.ScalarNode) and node.tag != _MERGE:
        try:
            loader.construct_object(node)
        except (ValueError, LookupError) as error:
            kind = node.tag.rpartition(":")[2]
            raise ConfigError(
                f"{where}: not valid YAML: {shown(node.value)} cannot be read as {kind}. Put text in quotes."
            ) from error


def _walk(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], Place]:
    """Keys allowed beside the last step of ``loc``, and ``loc`` as the file has it: without the tags of unions."""
    place: list[str | int] = []
    known: list[str] = []
    current: Any = model
    for index, step in enumerate(loc):
        if current == dict[str, JsonValue]:  # here pydantic names the type of every value on the way
            return known, (*place, *(one for one in loc[index::2] if one != "[key]"))
        options = [one for one in getattr(current, "__args__", ()) if hasattr(one, "model_fields")]
        tagged = [one for one in options if getattr(one.model_fields.get("name"), "default", None) == step]
        if len(options) == 1 and not tagged:  # a model or null
            current = options[0]
        if tagged:
            current = tagged[0]
        elif step != "[key]":
            place.append(step)
            fields = getattr(current, "model_fields", {})
            known = list(fields)
            current = fields[step].annotation if step in fields else _item(current) if isinstance(step, int) else None
    return known, tuple(place)


def _item(annotation: Any) -> Any:
    """The model of the items where an annotation is of a list of them, or None."""
    for one in get_args(annotation):
        found = one if hasattr(one, "model_fields") else _item(one)
        if found is not None:
            return found
    return None
