"""A small writer of SVG: plain numbers, so that the same data give the same bytes with any library on any machine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

FONT = "Helvetica, Arial, sans-serif"
#: What stands between tags; numbers within them, except in colours.
_WORDS, _NUMBER = re.compile(r">[^<]*<"), re.compile(r"(?<![#0-9a-f.])-?\d+(?:\.\d+)?")
Points = Sequence[tuple[float, float]]


def number(value: float) -> str:
    """To a tenth of a pixel."""
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


class Drawing:
    """Shapes on a light page, in the order in which they were added. Text stays text."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height = width, height
        self._title = title
        self._shapes: list[str] = []

    def add(self, shape: str) -> None:
        """A shape as SVG."""
        self._shapes.append(shape)

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        """With its upper left corner."""
        self.add(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def line(self, points: Points, stroke: str, width: float = 1.0, dash: str = "") -> None:
        """Through the points that are finite, broken where one is not."""
        pieces: list[list[tuple[float, float]]] = [[]]
        for x, y in points:
            if math.isfinite(x) and math.isfinite(y):
                pieces[-1].append((x, y))
            elif pieces[-1]:
                pieces.append([])
        data = "".join(f"M{_joined(piece)}" for piece in map(simplified, pieces) if len(piece) > 1)
        if data:
            dashes = f' stroke-dasharray="{dash}"' if dash else ""
            self.add(
                f'<path d="{data}" fill="none" stroke="{stroke}" stroke-width="{number(width)}"{dashes} '
                f'stroke-linejoin="round"/>'
            )

    def dots(self, points: Points, fill: str, diameter: float) -> None:
        """Filled discs of one size, as one path."""
        if points:
            data = "".join(f"M{number(x)} {number(y)}h0" for x, y in points)
            width = number(diameter)
            self.add(f'<path d="{data}" fill="none" stroke="{fill}" stroke-width="{width}" stroke-linecap="round"/>')

    def text(
        self, x: float, y: float, text: str, *, size: float = 12, fill: str = "#333", anchor: str = "start",
        bold: bool = False, turned: bool = False,
    ) -> None:  # fmt: skip
        """One line, its baseline at ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.add(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" fill="{fill}"{where}{weight}{turn}>'
            f"{escape(text)}</text>"
        )

    def svg(self, note: str = "") -> str:
        """The file; ``note`` is a comment for whoever opens it."""
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(self.width)} {number(self.height)}" {size} '
            f'font-family="{FONT}" role="img">'
        )
        page = f'<rect {size} fill="#fff" rx="4"/>'
        comment = [f"<!-- {note} -->"] if note else []
        return "\n".join([head, *comment, f"<title>{escape(self._title)}</title>", page, *self._shapes, "</svg>", ""])


def simplified(points: Points, tolerance: float = 0.12) -> list[tuple[float, float]]:
    """Ramer, Douglas and Peucker: the points without which the line would move by more than the tolerance."""
    if len(points) < 3:
        return list(points)
    (x0, y0), (x1, y1) = points[0], points[-1]
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    away = [abs((x1 - x0) * (y0 - y) - (x0 - x) * (y1 - y0)) / length for x, y in points]
    farthest = max(range(len(points)), key=away.__getitem__)
    if away[farthest] <= tolerance:
        return [points[0], points[-1]]
    return [*simplified(points[: farthest + 1], tolerance)[:-1], *simplified(points[farthest:], tolerance)]


def _joined(points: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{number(x)} {number(y)}" for x, y in points)


def same_drawing(one: str, other: str, tolerance: float = 0.25) -> bool:
    """The same words and shapes, at places that differ by no more than the tolerance, in pixels."""
    if _WORDS.findall(one) != _WORDS.findall(other):
        return False
    shapes = [_WORDS.sub("><", text) for text in (one, other)]
    first, second = (_NUMBER.findall(text) for text in shapes)
    return _NUMBER.sub("", shapes[0]) == _NUMBER.sub("", shapes[1]) and all(
        abs(float(here) - float(there)) <= tolerance for here, there in zip(first, second, strict=True)
    )
