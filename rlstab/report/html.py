"""The report as one HTML file: it holds everything it needs, asks for nothing, and runs nothing that a run wrote."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from rlstab.errors import ReportError
from rlstab.report import palette
from rlstab.report.comparison import Comparison
from rlstab.report.contents import contents, data
from rlstab.report.figures import Saved
from rlstab.report.payload import safe_json
from rlstab.visible import visible

#: How a page of ours begins, before its title.
MARK = b'<html lang="en" data-theme="light">\n<head>\n<meta charset="utf-8">\n<meta http-equiv='

#: Settings whose figures the page holds as images: with all of them, a page of many settings would double.
MOST_STILLS = 12


def write(comparison: Comparison, out: Path, command: str | None = None, figures: Sequence[Saved] = ()) -> Path:
    """Write ``out/report.html`` and return its path.

    Args:
        comparison: what it shows.
        out: folder.
        command: what makes it again.
        figures: shown to a reader without JavaScript.

    Raises:
        ReportError: it cannot be written.
    """
    path = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        context = contents(comparison, command, out) | _stills(comparison, figures)
        path.write_text(render(context, data(comparison)), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}. Give --out another folder.") from error
    return path


def _stills(comparison: Comparison, figures: Sequence[Saved]) -> dict[str, Any]:
    """The figures as images, by section: the page stays one file, and a script in them could not run."""
    first = [table.title for table in comparison.tables[:MOST_STILLS]]
    stills: dict[str, list[dict[str, str]]] = defaultdict(list)
    for figure in figures:
        if figure.path.suffix == ".svg" and (not figure.setting or figure.setting in first):
            source = f"data:image/svg+xml;base64,{base64.b64encode(figure.path.read_bytes()).decode()}"
            stills[figure.section].append({"alt": " ".join((figure.section, figure.setting)), "src": source})
    return {"stills": stills, "still_settings": min(len(comparison.tables), MOST_STILLS)}


def render(context: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """The page.

    Args:
        context: what ``page.html`` shows as text; every string in it is escaped.
        figures: what ``page.js`` draws.
    """
    folder = resources.files("rlstab.report")
    parts = ("page.css", "page.js", "without_script.css")
    style, script, without_script = ((folder / name).read_text(encoding="utf-8") for name in parts)
    plotly = get_plotlyjs()
    # scripts run by their digest alone: one that came in with the data has none. Plotly writes styles as it draws.
    policy = (
        f"default-src 'none'; script-src {_digest(plotly)} {_digest(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_visible)
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    return template.render(
        **context,
        policy=Markup(policy),
        style=Markup(f"{palette.variables()}\n{style}"),
        without_script=Markup(without_script),
        script=Markup(script),
        plotly=Markup(plotly),
        data=Markup(safe_json(figures)),
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _visible(value: Any) -> Any:
    """Characters of data that would steer the page or hide in it are shown; the page's own parts are Markup."""
    return visible(value, spaces=False) if isinstance(value, str) and not isinstance(value, Markup) else value
