"""``rlstab report``: read runs, compare them, write what was asked for."""

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rich.console import Console

from rlstab.console import Terminal, counted, say
from rlstab.extras import require
from rlstab.files import is_file
from rlstab.report.comparison import By, Comparison, compare
from rlstab.report.findings import findings
from rlstab.report.load import load_runs
from rlstab.report.markdown import markdown
from rlstab.report.output import refuse_foreign, write_text, writing
from rlstab.report.results_file import export_results

#: How a report begins, before what names its runs: as HTML after ``<head>``, as Markdown below its title.
MARKS = b'<meta name="rlstab-runs" content="', b"<!-- rlstab-runs "


def make_report(
    paths: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    export: str | Path | None = None,
    markdown_file: str | Path | None = None,
    paper: str | Path | None = None,
    width: Literal["column", "page"] = "column",
    methods: Mapping[str, str] | None = None,
    metrics: Sequence[str] = (),
    baseline: str | None = None,
    by: By = "rollouts",
    console: Console | None = None,
) -> Comparison:
    """Compare runs and write the report.

    Args:
        paths: bench folders, run folders, results files.
        out: folder for ``report.html`` and ``report.md``. If nothing is asked for, it is ``report``
            inside the folder of the runs, next to a results file, or in the folder that holds several paths.
        export: results file to write.
        markdown_file: Markdown page to write.
        paper: folder for tables and figures of a paper; see :func:`rlstab.report.paper.write_paper`.
        width: the width of these figures.
        methods: a pattern of the folders of its runs for each method; see
            :func:`rlstab.report.load.load_runs`.
        metrics: outcomes to compare; all known ones if empty.
        baseline: method to compare with; each bench's own if None.
        by: ``rollouts``, ``tokens`` or ``seconds``; see :func:`rlstab.report.comparison.compare`.
        console: prints what was written and left out; standard error if None.

    Raises:
        ReportError: nothing usable, an unknown metric or method, a file cannot be written, or the folder holds a report
            of other runs.
    """
    console = console or Terminal(stderr=True)
    methods = methods or {}
    loaded = load_runs(*paths, methods=methods)
    comparison = compare(loaded, baseline=baseline, metrics=metrics, by=by)
    sources = [*map(str, paths), *methods.values()]
    options = [word for name, pattern in methods.items() for word in ("--method", f"{name}={pattern}")]
    options += [word for name in metrics for word in ("--metric", name)]
    options += ["--baseline", baseline] if baseline is not None else []
    options += ["--by", by] if by != "rollouts" else []

    def again(*target: object) -> str:
        """The command that makes the report again."""
        return shlex.join(["rlstab", "report", *map(str, paths), *options, *map(str, target)])

    if out is None and export is None and markdown_file is None and paper is None:
        out = _beside(paths, methods.values())
    written = []
    if export is not None:
        written.append(export_results(loaded, export))
    if paper is not None:
        require("paper", "rlstab report --paper")
        from rlstab.report.paper import write_paper  # only here is matplotlib needed

        written += write_paper(comparison, Path(paper), again("--paper", paper, "--width", width), width)
    if markdown_file is not None:
        file = Path(markdown_file)
        source = _require_ours(sources, [file], "--markdown")
        text = markdown(comparison, title="Results", command=again("--markdown", file), source=source)
        written.append(write_text(file, text, "--markdown"))
    if out is not None:
        from rlstab.report import page  # Markdown and export do without plotly

        folder = Path(out)
        files = folder / "report.html", folder / "report.md"
        about = {"command": again("--out", folder), "source": _require_ours(sources, files, "--out")}
        for file, text in zip(files, (page.page(comparison, **about), markdown(comparison, **about)), strict=True):
            written.append(write_text(file, text, "--out"))
    _say(console, comparison, written)
    return comparison


def _beside(paths: Sequence[str | Path], patterns: Iterable[str]) -> Path:
    paths = [*paths, *(Path(pattern.partition("*")[0] + "_").parent for pattern in patterns)]
    first = Path(paths[0])
    if len(paths) == 1:
        return first.with_name(f"{first.stem}-report") if is_file(first) else first / "report"
    common = Path()
    with suppress(ValueError):  # two drives
        common = Path(os.path.commonpath([os.path.abspath(path) for path in paths]))  # noqa: PTH100  # without ..
    return Path("report") if common == Path(common.anchor) else common / "report"


def _require_ours(paths: Sequence[str | Path], files: Sequence[Path], option: str) -> str:
    """The name of a report's runs, checked before anything is written: only the same runs may replace a report.

    It is the path from the folder of the report to the runs, so that both can move together.

    Raises:
        ReportError: a file is not a report, or is one of other runs.
    """
    with writing(files[0], option):
        folder = os.path.realpath(files[0].parent)
        ways = sorted({os.path.relpath(os.path.realpath(path), folder) for path in paths})
        name = hashlib.sha256("\0".join(ways).encode(errors="surrogateescape")).hexdigest()[:16]
    for file in files:
        refuse_foreign(file, MARKS, "a report", option)
        refuse_foreign(file, [mark + name.encode() for mark in MARKS], "a report of these runs", option)
    return name


def _say(console: Console, comparison: Comparison, written: Sequence[Path]) -> None:
    # paths, names and errors are data: brackets in them are not markup
    for item in comparison.loaded.left_out:
        say(console, f"left out: {item.path}: {item.why}", "yellow")
    for note in [*comparison.checks, *comparison.notes]:
        say(console, f"note: {note}", "yellow")
    say(console, findings(comparison)[0])
    runs = comparison.loaded.runs
    methods = len({run.method for run in runs})
    counts = (counted(len(runs), "run"), counted(methods, "method"), counted(len(comparison.tables), "setting"))
    console.print(", ".join(counts), highlight=False)
    for path in written:
        say(console, f"written: {path}", copied=True)
