"""The YAML files of ``examples/`` by name: the same in a clone and in an installed package, which has them as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rlstab.config.document import Document
from rlstab.errors import UnknownName, did_you_mean

#: What a file describes.
Kind: TypeAlias = Literal["run", "bench", "objective"]

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Example:
    """One file.

    Attributes:
        path: of the file.
        kind: what it describes.
        about: the first sentence of the comment at its top.
        data: what it holds.
    """

    path: Path
    kind: Kind
    about: str
    data: Mapping[str, Any]


@cache
def examples() -> Mapping[str, Example]:
    """The examples that run anywhere: none that names a file beside it or a model to download."""
    inside = _PACKAGE / "data" / "examples"  # where the wheel has them; see pyproject.toml
    folder = inside if inside.is_dir() else _PACKAGE.parent / "examples"
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.yaml"))}
    return {name: one for name, one in found.items() if one is not None and not any(_places(one.data))}


def example(name: str, *kinds: Kind) -> Example:
    """The example of a name.

    Args:
        name: of the file, without its ending.
        kinds: of which it has to be one; any if none is given.

    Raises:
        UnknownName: with the nearest known name.
    """
    known = {key: one for key, one in examples().items() if not kinds or one.kind in kinds}
    if name not in known:
        what = f" ({' or '.join(kinds)})" if kinds else ""
        raise UnknownName(f"no example{what} is called '{name}'. {did_you_mean(name, known)}")
    return known[name]


def _read(path: Path) -> Example | None:
    data = Document.read(path).data
    if not isinstance(data, Mapping):
        return None
    kind: Kind = "bench" if "base" in data else "run" if data.keys() & {"model", "task"} else "objective"
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    sentence, stop, _ = " ".join(comment).partition(". ")
    return Example(path, kind, (sentence + stop).strip().rstrip(".") + ".", data)


def _places(data: Any) -> Iterator[str]:
    """Texts that name a file or a model of the hub; where a run is stored is not one of them."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key not in ("out", "tracking"):
                yield from _places(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _places(value)
    elif isinstance(data, str) and "/" in data:
        yield data
