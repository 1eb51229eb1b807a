"""The YAML files of ``examples/`` by name, from a clone or from an installed package, which holds them as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlstab.config.document import Document, Kind, flat, kind_of_file
from rlstab.errors import UnknownName, did_you_mean

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class BundledExample:
    """One file.

    Attributes:
        path: the path of the file.
        kind: what it describes.
        about: the first sentence of the comment at its top.
        data: what it holds.
    """

    path: Path
    kind: Kind
    about: str
    data: Mapping[str, Any]


@cache
def examples() -> Mapping[str, BundledExample]:
    """The examples that run anywhere, because they need neither a file next to them nor a model to download."""
    bundled = _PACKAGE / "data" / "examples"  # where the wheel has them; see pyproject.toml
    folder = bundled if bundled.is_dir() else _PACKAGE.parent / "examples"
    read = dict[str, BundledExample]()
    for path in sorted(folder.glob("*.yaml")):
        data = Document.read(path).data
        # text that names a file or a model on the hub; the folder in which a run is stored does not count
        named = {key for key, value in flat(data).items() if isinstance(value, str) and "/" in value}
        if all({"out", "tracking"} & {*key.split(".")} for key in named):
            kind: Kind = "objective" if data.keys() == {"objective"} else kind_of_file(data)
            comment = path.read_text(encoding="utf-8").partition("\n\n")[0].replace("\n# ", " ").removeprefix("# ")
            sentence = comment.partition("\n")[0].partition(". ")[0]
            read[path.stem] = BundledExample(path, kind, sentence.strip().rstrip(".") + ".", data)
    return read


def example(name: str, *kinds: Kind) -> BundledExample:
    """The example of a name.

    Args:
        name: the name of the file, without its ending.
        kinds: the kinds that are accepted; any if none is given.

    Raises:
        UnknownName: with the nearest known name.
    """
    candidates = {key: value for key, value in examples().items() if not kinds or value.kind in kinds}
    if name not in candidates:
        expected = f" ({' or '.join(kinds)})" if kinds else ""
        raise UnknownName(f"no example{expected} is called '{name}'. {did_you_mean(name, candidates)}")
    return candidates[name]
