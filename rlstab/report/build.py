"""``rlstab report``: read runs, compare them, write what was asked for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rlstab.console import Terminal
from rlstab.errors import ReportError
from rlstab.paths import is_strange
from rlstab.report.comparison import Comparison, compare
from rlstab.report.markdown import markdown
from rlstab.report.numbers import counted
from rlstab.report.records import load_runs
from rlstab.report.results import export_results


def make_report(
    paths: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    export: str | Path | None = None,
    markdown_file: str | Path | None = None,
    metrics: Sequence[str] = (),
    baseline: str | None = None,
    console: Console | None = None,
) -> Comparison:
    """Compare runs and write the report.

    Args:
        paths: bench folders, run folders, results files.
        out: folder for ``report.html``, ``report.md`` and ``figures/``; ``report`` if nothing else is asked for either.
        export: results file to write.
        markdown_file: Markdown page to write.
        metrics: outcomes to compare; all known ones if empty.
        baseline: method to compare with; each bench's own if None.
        console: where to say what was written and left out; standard error if None.

    Raises:
        ReportError: nothing usable, an unknown metric or method, or a file cannot be written.
    """
    console = console or Terminal(stderr=True)
    loaded = load_runs(*paths)
    comparison = compare(loaded, baseline=baseline, metrics=metrics)
    if out is None and export is None and markdown_file is None:
        out = "report"
    written = []
    if export is not None:
        written.append(export_results(loaded, export))
    if markdown_file is not None:
        again = _command(paths, metrics, baseline, f"--markdown {shlex.quote(str(markdown_file))}")
        written.append(_write(Path(markdown_file), markdown(comparison, title="Results", command=again), "--markdown"))
    if out is not None:
        from rlstab.report import figures, html  # Markdown and export do without plotly and matplotlib

        folder = Path(out)
        again = _command(paths, metrics, baseline, f"--out {shlex.quote(str(out))}")
        _refuse_strange(folder / "report.html", html.MARK, "--out")  # before anything is written
        written.append(_write(folder / "report.md", markdown(comparison, command=again), "--out"))
        saved = figures.write(comparison, folder)
        written.append(html.write(comparison, folder, again, saved))
        if saved:
            written.append(saved[0].path.parent)
    _say(console, comparison, written)
    return comparison


def _command(paths: Sequence[str | Path], metrics: Sequence[str], baseline: str | None, target: str) -> str:
    parts = ["rlstab report", *(shlex.quote(str(path)) for path in paths)]
    parts += [f"--metric {shlex.quote(name)}" for name in metrics]
    parts += [f"--baseline {shlex.quote(baseline)}"] if baseline is not None else []
    return " ".join([*parts, target])


def _refuse_strange(path: Path, mark: bytes, option: str) -> None:
    try:
        strange = is_strange(path, mark)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}. Give {option} another place.") from error
    if strange:
        raise ReportError(f"{path} exists, is no report of ours, and stays as it is. Give {option} another place.")


def _write(path: Path, text: str, option: str) -> Path:
    try:
        _refuse_strange(path, b"rlstab report ", option)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}. Give {option} another place.") from error
    return path


def _say(console: Console, comparison: Comparison, written: Sequence[Path]) -> None:
    # paths, names and errors are data: brackets in them are no markup
    for one in comparison.loaded.left_out:
        console.print(f"[yellow]left out:[/] {escape(one.path)}: {escape(one.why)}", highlight=False, soft_wrap=True)
    for note in comparison.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)
    runs = comparison.loaded.runs
    methods = len({run.method for run in runs})
    told = (counted(len(runs), "run"), counted(methods, "method"), counted(len(comparison.tables), "setting"))
    console.print(", ".join(told), highlight=False)
    for path in written:
        console.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)
