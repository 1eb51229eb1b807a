"""For mkdocstrings: `#:` comments document the constant below them, and roles such as :class: become code."""

import re
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([\w.]+)`")


class Comments(griffe.Extension):
    """Give a constant without a docstring the `#:` lines above it, and write roles as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object once all modules are loaded."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for every constant and attribute."""
        if attr.docstring or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        above = attr.lines_collection[attr.filepath][: attr.lineno - 1]
        lines: list[str] = []
        while above and (line := above.pop().strip()).startswith("#:"):
            lines.insert(0, line.removeprefix("#:").strip())
        if lines:
            attr.docstring = griffe.Docstring("\n".join(lines), parent=attr)
