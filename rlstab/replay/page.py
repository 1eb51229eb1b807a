"""The page of a replay: the verdict on the loss, what each method would have done, and which of them overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from markupsafe import Markup

from rlstab.console import counted, ranges
from rlstab.record import ACTIONS
from rlstab.replay.effects import MEASURES
from rlstab.report.formatting import MINUS, NOTHING, decimals
from rlstab.report.output import digest, resource
from rlstab.report.template import rendered

#: Marker in the head of a page that rlstab wrote.
MARK = b'<meta name="rlstab-replay"'
#: Objectives in the table of overlaps: those that touch most, but not every token.
MOST_OVERLAPS = 12
#: Width and height of a curve over steps, pixels.
CURVE = (150, 26)


def page(results: Mapping[str, Any], overlap: Mapping[tuple[str, str], float], *, source: str, tokens: str) -> str:
    """The HTML. It loads nothing, and no text from a file is taken for HTML or a script.

    Args:
        results: see :func:`rlstab.replay.replay.results_of`.
        overlap: see :class:`rlstab.replay.effects.Effects`.
        source: names the dump.
        tokens: address of the page of tokens.
    """
    rows, folder = results["methods"], resources.files("rlstab.replay")
    template, script = ((folder / f"replay.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    single = [row for row in rows if not row["name"].startswith("preset:")]
    groups = {"Methods": single, "Presets": [row for row in rows if row not in single]}
    functions = {"counted": counted, "ranges": ranges, "decimals": decimals, "percent": _percent, "figure": _figure}
    context = {
        "policy": Markup(digest(script)),
        "script": Markup(script),
        "style": Markup(resource("page.css")),
        "source": source,
        "results": results,
        "groups": {title: of_kind for title, of_kind in groups.items() if of_kind},
        "measured": (measured := [name for name in MEASURES if any(row[name] is not None for row in rows)]),
        "curves": _curves(rows, measured) if len(results["steps"]) > 1 else {},
        "size": CURVE,
        "actions": actions_in(rows),
        "overlap": overlap,
        "acting": [row["name"] for row in single or rows if 0 < row["touched"] < 1][:MOST_OVERLAPS],
        "tokens": tokens,
    }
    return rendered(template, functions, context)


def actions_in(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The actions that any of the objectives took."""
    return [action for action in ACTIONS if any(row[action] for row in rows)]


def _percent(share: float) -> str:
    return "" if not share else "< 0.1" if share < 0.001 else f"{share:.1%}"[:-1]


def _figure(value: float | None, sign: str = "-") -> str:
    return NOTHING if value is None else f"{value:{sign}#.2g}".rstrip(".").replace("-", MINUS)


def _curves(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, list[str]]:
    """By objective, the points of a line over steps for each metric, on a scale that all objectives share."""
    curves: dict[str, list[str]] = {row["name"]: [] for row in rows}
    for metric in metrics:
        everything = [value for row in rows for value in row["steps"][metric] if value is not None]
        low, high = min(everything, default=0.0), max(everything, default=1.0)
        for row in rows:
            values = row["steps"][metric]
            across, up = (CURVE[0] - 4) / (len(values) - 1), (CURVE[1] - 4) / ((high - low) or 1)
            known = [(index, value) for index, value in enumerate(values) if value is not None]
            points = [f"{2 + index * across:.1f},{2 + (high - value) * up:.1f}" for index, value in known]
            curves[row["name"]].append(" ".join(points))
    return curves
