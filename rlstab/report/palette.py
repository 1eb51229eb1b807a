"""One look per method over every figure: hues that the colour-blind tell apart (Okabe and Ito), the baseline in grey.

The yellow and the black of that set are left out: one is lost on paper, the other is text. With more methods than hues
the hues come again with another dash, and every method also has its own marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Light and dark, the baseline first. Darker, or lighter, than published: at least 3:1 against the page.
LIGHT = ("#5d5f63", "#0072b2", "#d55e00", "#008f68", "#bb5b94", "#b57d00", "#2f93d2")
DARK = ("#b9b8b3", "#3b92d6", "#f0793a", "#2cbf95", "#e39ac4", "#e6a822", "#8fd3fa")
DASHES = ("solid", "dash", "dot")
MARKERS = ("circle", "square", "diamond", "triangle", "cross")


@dataclass(frozen=True)
class Look:
    """How one method is drawn: places in ``LIGHT`` and ``DARK``, ``DASHES`` and ``MARKERS``."""

    colour: int
    dash: int
    marker: int


def looks(methods: Sequence[str], baseline: str | None) -> dict[str, Look]:
    """The look of each method, by its place in the list; the baseline has the first colour and nobody else has."""
    found, hues = {}, len(LIGHT) - 1
    others = [name for name in methods if name != baseline]
    if baseline in methods:
        found[str(baseline)] = Look(0, 0, 0)
    for index, name in enumerate(others):
        found[name] = Look(1 + index % hues, index // hues % len(DASHES), (index + 1) % len(MARKERS))
    return found


def variables() -> str:
    """The colours as CSS variables ``--m0`` ..., for both themes."""
    themes = ((":root", LIGHT), (':root[data-theme="dark"]', DARK))
    return "\n".join(
        f"{where} {{ {' '.join(f'--m{index}: {one};' for index, one in enumerate(colours))} }}"
        for where, colours in themes
    )
