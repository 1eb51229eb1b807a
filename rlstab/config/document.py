"""A YAML file with the line of every value, so that an error can point at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlstab.core.errors import ConfigError, did_you_mean

Place = tuple[str | int, ...]

#: More nodes than any run file has; stops aliases that unfold exponentially.
MAX_NODES = 100_000


@dataclass(frozen=True)
class Document:
    """Plain data, and where each part of it stood.

    Attributes:
        data: mappings, lists and scalars, as ``yaml.safe_load`` gives them.
        name: the file, or what to call the source in errors.
        lines: line (from 1) by place; empty for data that came from Python.
    """

    data: Any
    name: str
    lines: Mapping[Place, int]

    @classmethod
    def read(cls, path: str | Path) -> Document:
        """Read a file with the safe loader: plain data only, each key once.

        Raises:
            ConfigError: no such file, not YAML, a repeated key, a tag that would build an object.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}. Give the path of a YAML file.") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> Document:
        """The document of a YAML text; see :meth:`read`."""
        try:
            loader = yaml.SafeLoader(text)
            try:
                node = loader.get_single_node()
                lines = {place: line for place, line in _lines(node, name)} if node is not None else {}
                data = loader.construct_document(node) if node is not None else None
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = f"{name}:{mark.line + 1}" if mark else name
            raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from error
        except ConfigError:
            raise
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigError(f"{name}: not valid YAML: {error}.") from error
        return cls(data, name, lines)

    @classmethod
    def of(cls, data: Any, name: str = "objective") -> Document:
        """Data that came from Python."""
        return cls(data, name, {})

    def where(self, place: Place) -> str:
        """``file:line`` of the nearest known part around ``place``."""
        while place and place not in self.lines:
            place = place[:-1]
        return f"{self.name}:{self.lines[place]}" if place in self.lines else self.name

    def error(self, place: Place, text: str) -> ConfigError:
        """An error that points at ``place``."""
        path = ".".join(map(str, place))
        return ConfigError(f"{self.where(place)}: {path + ': ' if path else ''}{text}")

    def validate(self, model: type[BaseModel], data: Any, place: Place = ()) -> BaseModel:
        """Validate a part of the document.

        Raises:
            ConfigError: one line a mistake, each with file and line, unknown keys with a did-you-mean.
        """
        try:
            return model.model_validate(data)
        except ValidationError as error:
            texts = [str(self._translate(model, one, place)) for one in error.errors()]
            raise ConfigError("\n".join(texts)) from None

    def _translate(self, model: type[BaseModel], error: Mapping[str, Any], place: Place) -> ConfigError:
        # pydantic puts the tag of a discriminated union into the path; the file does not have it
        known, found = _walk(model, error["loc"])
        if error["type"] == "extra_forbidden":
            key = str(error["loc"][-1])
            return self.error(place + found, f"unknown key '{key}'. {did_you_mean(key, known)}")
        if error["type"] == "union_tag_invalid":
            context = error["ctx"]
            tags = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
            return self.error(place + found, f"no such name: '{context['tag']}'. {did_you_mean(context['tag'], tags)}")
        text = error["msg"].removeprefix("Value error, ")
        got = "" if error["type"] in ("missing", "value_error") else f", not {error['input']!r}"
        return self.error(place + found, text[:1].lower() + text[1:] + got)


def _lines(node: yaml.Node, name: str) -> Iterator[tuple[Place, int]]:
    stack: list[tuple[Place, yaml.Node]] = [((), node)]
    count = 0
    while stack:
        place, one = stack.pop()
        count += 1
        if count > MAX_NODES or len(place) > 100:
            raise ConfigError(
                f"{name}: more than {MAX_NODES} values, or nested too deep. Aliases may repeat endlessly."
            )
        yield place, one.start_mark.line + 1
        if isinstance(one, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in one.value:
                label = str(key.value)
                line = key.start_mark.line + 1
                if label in seen:
                    raise ConfigError(f"{name}:{line}: the key '{label}' stands twice. Remove one of them.")
                seen.add(label)
                stack.append(((*place, label), value))
                yield (*place, label), line
        elif isinstance(one, yaml.SequenceNode):
            stack.extend(((*place, index), value) for index, value in enumerate(one.value))


def _walk(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], Place]:
    """Keys allowed beside the last step of ``loc``, and ``loc`` without the tags of unions."""
    place: list[str | int] = []
    known: list[str] = []
    current: Any = model
    for step in loc:
        options = [one for one in getattr(current, "__args__", ()) if hasattr(one, "model_fields")]
        tagged = [one for one in options if one.model_fields["name"].default == step]
        if tagged:
            current = tagged[0]
            continue
        place.append(step)
        fields = getattr(current, "model_fields", {})
        known = list(fields)
        current = fields[step].annotation if step in fields else None
    return known, tuple(place)
