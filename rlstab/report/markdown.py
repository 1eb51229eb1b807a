"""A comparison as Markdown: for terminals, issues, and the pages of a project. Every number comes from the runs."""

import re
from collections.abc import Sequence

from rlstab.page.render import text_of
from rlstab.report.comparison import Comparison, Table
from rlstab.report.findings import findings
from rlstab.report.formatting import METRICS, NOTHING, paragraphs, setting
from rlstab.report.statistics import MIN_SEEDS, p_value
from rlstab.report.tables import about_runs, rows_of
from rlstab.signs import COUNTED
from rlstab.visible import visible


def markdown(comparison: Comparison, *, title: str = "Comparison", command: str = "", source: str = "") -> str:
    """The whole page.

    Args:
        comparison: the result of :func:`rlstab.report.comparison.compare`.
        title: first heading.
        command: the command that makes the page again.
        source: names what it is a report of; see :func:`rlstab.report.build.make_report`.
    """
    runs = comparison.loaded.runs
    is_named = len({run.bench for run in runs}) > 1
    benches = dict.fromkeys(run.bench_command for run in runs if run.bench_command)
    commands = [*benches, *(run.command for run in runs if run.command and not run.bench_command)]
    hashes = {
        ((run.bench or NOTHING,) * is_named + (run.method, str(run.about.get("objective_hash", NOTHING)))): None
        for run in runs
    }
    context = {
        **vars(comparison),
        "title": title,
        "command": command,
        "source": source,
        "least": MIN_SEEDS,
        "paragraphs": paragraphs,
        "frame": _frame,
        "rows_of": rows_of,
        "commands": commands,
        "versions": about_runs(runs),
        "several": is_named,
        "hashes": list(hashes),
        "signs": COUNTED,
        "findings": findings(comparison),
        "p_value": p_value,
        "head": _head,
    }
    # Markdown is not escaped like HTML: the filter `text` does it
    page = text_of("report/page.md", context, text=_text, fence=_fenced, setting=setting)
    return visible(page.rstrip() + "\n", spaces=False)


def _frame(table: Table) -> str:
    """The settings that all runs of a setting share."""
    runs = [run for runs in table.runs.values() for run in runs]
    shared = []
    for path, words in METRICS["frame"].items():
        values = {str(run.setting_at(path)) for run in runs if run.config}
        if len(values) == 1 and values != {"None"}:
            shared.append(f"{words} {_text(values.pop())}")
    seeds = sorted({run.seed for run in runs})
    return f"In all runs: {', '.join(shared)}. Seeds {', '.join(map(str, seeds))}." if shared else ""


def _head(heads: Sequence[str]) -> str:
    """The first lines of a table."""
    return f"| {' | '.join(map(_text, heads))} |\n{'| --- ' * len(heads)}|"


def _fenced(command: str) -> str:
    return re.sub(r"\s+", " ", command).replace("```", "")


def _text(data: str) -> str:
    """Escape names, paths and errors: nothing in them makes markup, ends a cell or begins a line.

    A bracket is harmless without an address after it, and intervals are easier to read without a backslash.
    """
    plain = re.sub(r"\s+", " ", data).strip()
    interval = re.fullmatch(r"[\d.,+\u2212\u2013\s]+\[[\d.,+\u2212\s]+\]", plain)
    return plain if interval else re.sub(r"([\\|<>`*\[\]])", r"\\\1", plain)
