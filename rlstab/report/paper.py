"""A comparison for a paper: numbers as CSV, the main table in LaTeX, figures as SVG and PDF, and how they were made.

The same runs give the same bytes. A file that rlstab did not write, or that was changed since, stays as it is.
"""

import csv
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlstab import __version__
from rlstab.errors import ReportError
from rlstab.page.render import text_of
from rlstab.report.collapse import collapsed, fate_of
from rlstab.report.comparison import Comparison, Table, outcome_of
from rlstab.report.curves import LIGHT, curve_of, line_styles, seeds_of
from rlstab.report.formatting import MINUS, NOTHING, axis
from rlstab.report.output import refuse_foreign, write_text, writing
from rlstab.report.sweeps import Sweep
from rlstab.report.tables import about_runs, rows_of
from rlstab.safe_read import plain, read_json

#: Inches of a column and of a page of two columns, and entries of a legend side by side.
WIDTHS = {"column": (3.3, 2), "page": (6.9, 5)}
#: The file that describes the others, and how it begins.
ABOUT, MARK = "rlstab-report.json", b'{"command": "rlstab report '

_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MINUS: "$-$", NOTHING: "--"}
_TEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {sign: f"${sign}$" for sign in "<>|"}


def write_paper(comparison: Comparison, folder: Path, command: str, width: str) -> list[Path]:
    """Write everything into a folder.

    Args:
        comparison: the results.
        folder: made if it is missing.
        command: makes the files again.
        width: the width of the figures, a key of :data:`WIDTHS`.

    Raises:
        ReportError: a file is there that rlstab did not write, or that was changed since; or one cannot be written.
    """
    files = {**dict(_texts(comparison)), **dict(_figures(comparison, width))}
    refuse_foreign(folder / ABOUT, [MARK], "of rlstab", "--paper")
    written = read_json(folder / ABOUT).get("files", {})
    for path in (folder / name for name in files):
        with writing(path, "--paper"):
            changed = path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != written.get(path.name)
        if changed:
            raise ReportError(
                f"{path} exists, is not as rlstab wrote it, and stays so. Give another folder by --paper."
            )
    versions = {name: metadata.version(name) for name in ("numpy", "scipy", "matplotlib")}
    about = {
        "command": command,
        "versions": {"rlstab": __version__, **versions},
        "runs": about_runs(comparison.loaded.runs),
        "notes": [*comparison.checks, *comparison.notes],
        "settings": {run.title: run.config for run in comparison.loaded.runs},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    files[ABOUT] = json.dumps(plain(about), ensure_ascii=False).encode()
    return [write_text(folder / name, content, "--paper") for name, content in files.items()]


def _texts(comparison: Comparison) -> Iterator[tuple[str, bytes]]:
    """Every run, every number with its interval, and the table of the main outcome."""
    names, rows = [outcome.name for outcome in comparison.outcomes], list[list[Any]]()
    for run in comparison.loaded.runs:
        facts = [run.bench, run.setting, run.method, run.seed, run.status, fate_of(run).lost, fate_of(run).rollout]
        rows.append([*facts, *(outcome_of(run, name) for name in names)])
    heads = ["bench", "setting", "method", "seed", "status", "lost", "last rollout, or that of the loss", *names]
    yield "runs.csv", _csv(heads, rows)
    heads = ["bench", "setting", "method", "outcome", "number", "value", "low", "high", "seeds", "verdict"]
    yield "numbers.csv", _csv(heads, (row for table in comparison.tables for row in _rows(table, names)))
    if comparison.outcomes:
        tables = [
            (table.title, [(row, table.losses[row.method]) for row in rows_of(table, comparison.outcomes[0])])
            for table in comparison.tables
        ]
        context = {"outcome": comparison.outcomes[0], "tables": tables}
        yield "table.tex", text_of("report/table.tex", context, tex=_tex).encode()


def _rows(table: Table, names: Iterable[str]) -> Iterator[list[Any]]:
    for method in table.methods:
        losses, table_and_method = table.losses[method], [table.bench, table.setting, method]
        verdict, rate = "" if losses.p is None else f"p = {losses.p:.3g} against {table.baseline}", losses.rate
        yield [*table_and_method, "", "rate of lost runs", rate.value, rate.low, rate.high, rate.count, verdict]
        for name in names:
            cell, pair = table.cells[method, name], table.cells[method, name].paired
            shown = [("mean", cell.summary, len(cell.values), "")]
            shown += (
                [(f"difference from {table.baseline}", pair.difference, len(pair.seeds), pair.verdict)] if pair else []
            )
            for number, estimate, seeds, words in shown:
                yield [*table_and_method, name, number, estimate.value, estimate.low, estimate.high, seeds, words]


def _csv(heads: list[str], rows: Iterable[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue().encode()


def _tex(text: str) -> str:
    """A text for LaTeX; what pdflatex cannot print is written by its code."""
    return "".join(_TEX.get(sign, sign if " " <= sign < "\u0180" else f"U+{ord(sign):04X}") for sign in text)


# -- figures -----------------------------------------------------------------------------------------------------------


def _figures(comparison: Comparison, width: str) -> Iterator[tuple[str, bytes]]:
    drawings: dict[str, Callable[[Axes], None]] = {}
    for number, table in enumerate(comparison.tables if comparison.outcomes else [], 1):
        end = f"-{number}" if len(comparison.tables) > 1 else ""
        drawings |= {f"curve{end}": partial(_curve, comparison, table)}
        drawings |= {f"differences{end}": partial(_differences, comparison, table)} if len(table.methods) > 1 else {}
        if any(loss.rate.hits for loss in table.losses.values()):
            drawings[f"survival{end}"] = partial(_survival, comparison, table)
    for number, sweep in enumerate(comparison.sweeps if comparison.outcomes else [], 1):
        drawings[f"sweep-{number}"] = partial(_sweep, comparison, sweep)
    inches, columns = WIDTHS[width]
    look = resources.files("rlstab.report") / "paper.mplstyle"
    for name, draw in drawings.items():
        with style.context(str(look)), warnings.catch_warnings(action="ignore"):  # a font may lack a letter
            figure = Figure(layout="constrained")
            axes = figure.add_subplot()
            draw(axes)
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
            heights = {"differences": 0.8 + 0.2 * len(axes.get_yticks()), "sweep": 2.8}
            rows = heights.get(name.partition("-")[0], 2.1)
            figure.set_size_inches(inches, rows + 0.17 * -(-len(labels) // columns))
            for kind, date in (("svg", "Date"), ("pdf", "CreationDate")):
                content = io.BytesIO()
                figure.savefig(content, format=kind, metadata={date: None})
                yield f"{name}.{kind}", content.getvalue()


def _line(comparison: Comparison, method: str) -> dict[str, Any]:
    look = line_styles(comparison)[method]
    return {"color": LIGHT[look["colour"]], "ls": ("-", "--", "-.")[look["dash"]], "label": method}


def _curve(comparison: Comparison, table: Table, axes: Axes) -> None:
    """Every seed as a thin line, dotted where it was lost, and the mean of the others."""
    metric = curve_of(comparison, comparison.outcomes[0].name)
    for method in table.methods:
        line = _line(comparison, method)
        for run in table.runs[method]:
            if (seed := seeds_of([run], metric)) is not None:
                line_of_seed = {"ls": ":", "lw": 0.9} if collapsed(run) else {"lw": 0.5, "alpha": 0.6}
                axes.plot(seed.rollouts, seed.values[0], **{**line, "label": None, **line_of_seed})
        mean = seeds_of([run for run in table.runs[method] if not collapsed(run)], metric)
        x, y = ([], []) if mean is None else (mean.rollouts.tolist(), mean.means.tolist())
        axes.plot(x, y, **line)
    axes.set(xlabel="rollout", ylabel=axis(metric).title)


def _differences(comparison: Comparison, table: Table, axes: Axes) -> None:
    """The difference of every pair as a stroke, and their mean with its interval."""
    cells = {method: table.cells[method, comparison.outcomes[0].name] for method in table.methods}
    shown = {method: cell.paired for method, cell in cells.items() if cell.paired and cell.paired.seeds}
    for index, (method, pair) in enumerate(shown.items()):
        colour, mean = _line(comparison, method)["color"], pair.difference
        axes.plot(pair.differences, [index] * len(pair.seeds), "|", color=colour, ms=7)
        interval = np.array([mean.low, mean.value, mean.high], float)
        axes.plot(interval, [index] * 3, "o-", color=colour, ms=4, lw=1, markevery=[1])
    axes.axvline(0, color="0.5", lw=0.6, zorder=0)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel(f"{comparison.outcomes[0].title}: difference from {table.baseline}")


def _survival(comparison: Comparison, table: Table, axes: Axes) -> None:
    for method in table.methods:
        line, columns = _line(comparison, method), table.losses[method].survival
        times, shares, low, high = (np.array(column, float) for column in columns)
        axes.step(times, shares, where="post", **line)
        axes.fill_between(times, low, high, step="post", color=line["color"], alpha=0.15, lw=0)
    axes.set(xlabel="rollout", ylabel="share of runs not yet lost", ylim=(0, 1.04))


def _sweep(comparison: Comparison, sweep: Sweep, axes: Axes) -> None:
    """Every finished run as a point, lost ones too, and their medians."""
    tables, outcome = {(table.bench or "", table.setting): table for table in comparison.tables}, comparison.outcomes[0]
    for method, points in sweep.by_method.items():
        cells = [tables[sweep.bench, point.setting].cells[method, outcome.name] for point in points.values()]
        values = [cell.every or (np.nan,) for cell in cells]
        line = _line(comparison, method)
        axes.plot(list(points), list(map(np.median, values)), **line)
        for value, outcomes in zip(points, values, strict=True):
            axes.plot([value] * len(outcomes), outcomes, ".", color=line["color"], ms=3, alpha=0.6)
    axes.set(xlabel=sweep.key, ylabel=outcome.title, xscale="log" if sweep.is_logarithmic else "linear")
    axes.set_xticks(sweep.values, sweep.labels, rotation=45, ha="right")
    axes.minorticks_off()
