"""All methods at a glance: their small pictures by kind, each a link to its page."""

from __future__ import annotations

from collections.abc import Sequence

from rlstab.atlas.panel import Picture
from rlstab.atlas.views import KINDS
from rlstab.explain.card_page import MARK
from rlstab.explain.markdown_text import table

#: Pictures side by side: at 256 pixels each they fill 800.
_COLUMNS = 3
_HEAD = """# Gallery

What each method does to tokens, made by running it: curves by differentiating its loss, clouds by what it asks for on
one optimizer step that is the same for all. Within a group all pictures have one scale, unless the text says otherwise.
A picture leads to the page of the method, where it is larger, with a legend and with the settings."""


def gallery(pictures: Sequence[Picture]) -> str:
    """The page."""
    pieces = [f"{MARK}es. -->", _HEAD]
    for kind, (title, about) in KINDS.items():
        cells = [
            f"[![{one.name}](pictures/{one.name}-small.svg)]({one.name}.md)" for one in pictures if one.kind == kind
        ]
        if cells:
            rows = [cells[first : first + _COLUMNS] for first in range(0, len(cells), _COLUMNS)]
            rows[-1] += [""] * (_COLUMNS - len(rows[-1]))
            pieces += [f"## {title}", about, table([""] * _COLUMNS, rows)]
    return "\n\n".join(pieces) + "\n"
