"""The report as one HTML file, which holds everything it needs, loads nothing, and runs nothing that a run wrote."""

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import yaml
from plotly.offline import get_plotlyjs

from rlstab.bins import WIDTH
from rlstab.console import counted
from rlstab.page.render import digest, packed, rendered, safe_json
from rlstab.report.comparison import Comparison, Table
from rlstab.report.cost import UNITS
from rlstab.report.curves import (
    DARK,
    LIGHT,
    curve_data,
    curve_of,
    lead_curve,
    lead_sweep,
    line_styles,
    metrics_of,
)
from rlstab.report.findings import findings
from rlstab.report.formatting import METRICS, axis, in_order, listed, own_title
from rlstab.report.runs import curve, grouped
from rlstab.report.statistics import p_value
from rlstab.report.sweeps import Sweep
from rlstab.report.tables import TableRow, about_runs, rows_of
from rlstab.safe_read import plain
from rlstab.signs import COUNTED

#: Panels of learning curves below the opening picture.
LEARNING = 4


def page(comparison: Comparison, command: str = "", source: str = "") -> str:
    """The HTML of a report.

    Args:
        comparison: the results that it shows.
        command: makes the report again.
        source: names what it is a report of; see :func:`rlstab.report.build.make_report`.
    """
    plotly, drawn, runs, looks = get_plotlyjs(), data(comparison), comparison.loaded.runs, line_styles(comparison)
    colours = " ".join(
        f"--m{index}: light-dark({light}, {dark});" for index, (light, dark) in enumerate(zip(LIGHT, DARK, strict=True))
    )
    settings = {entry["key"]: entry["name"] for entry in drawn["settings"]}
    tables = dict(zip(settings, comparison.tables, strict=True))
    metrics, lead = in_order(metrics_of(runs)), lead_curve(comparison)
    of_methods = [name for name in metrics if "/" in name and not name.startswith(tuple(METRICS["general"]))]
    # the largest k tells most about what the policy can still find
    largest = [name for name in metrics if name.startswith("eval/pass@")][-1:]
    usual = [name for stem in METRICS["learning"] for name in (largest if stem == "eval/pass@" else [stem])]
    benches = dict.fromkeys(table.bench for table in comparison.tables if table.bench)
    context = {
        **vars(comparison),
        **{"axis": axis, "own_title": own_title, "p_value": p_value, "rows_of": rows_of, "remarks_of": remarks_of},
        "lost_at": lambda sweep: [[f"lost at {label}"] for label in sweep.labels],
        "numbers": {"data": packed(safe_json(plain(drawn))), "plotly": packed(plotly)},
        "source": source,
        "checks": comparison.checks,
        "title": ": ".join(filter(None, (", ".join(benches), _compared(comparison, looks)))),
        "what": _what(comparison, len(looks)),
        "findings": findings(comparison),
        "first_sweep": lead_sweep(comparison),
        "first_metric": lead,
        "outcome_titles": [(outcome.name, outcome.title) for outcome in comparison.outcomes],
        "unit": UNITS.get(comparison.by),
        "settings": settings,
        "looks": looks,
        "width": WIDTH,
        "choices": [name for name in metrics if name not in METRICS["aside"]],
        "learning": [name for name in usual if name in metrics and name != lead][:LEARNING],
        "gradients": [name for name in METRICS["gradients"] if name in metrics],
        "shares": {
            name: any(curve(run, name)[1].any() for run in runs) for name in METRICS["shares"] if name in metrics
        },
        "by_method": grouped(of_methods, lambda name: name.rpartition("/")[0]),
        "by_setting": tables,
        "loses": any(counts.rate.hits for table in tables.values() for counts in table.losses.values()),
        "signs": COUNTED,
        "about": about_runs(runs),
        "benches": {run.bench or "": run.bench_command for run in runs if run.bench_command},
        "command": command,
        "configs": {key: [_config(table, name) for name in table.methods] for key, table in tables.items()},
    }
    return rendered("report/page.html", context, style=f":root {{ {colours} }}", libraries=[digest(plotly)])


# -- texts -------------------------------------------------------------------------------------------------------------


def _compared(comparison: Comparison, looks: Mapping[str, Any]) -> str:
    """The methods, and what all of them are compared with."""
    baselines = {table.baseline for table in comparison.tables}
    compared = [name for name in looks if name not in baselines]
    against = f" against {next(iter(baselines))}" if len(baselines) == 1 and compared and None not in baselines else ""
    names = compared if against else looks
    return (listed(names) if len(names) <= 3 else counted(len(names), "method")) + against


def _what(comparison: Comparison, methods: int) -> str:
    """How much was compared."""
    runs, unit = comparison.loaded.runs, UNITS.get(comparison.by)
    counts = Counter[str](run.status for run in runs) + Counter({"not begun": comparison.loaded.not_begun})
    states = (
        f"{counts[state]} {state}" for state in ("finished", "unfinished", "failed", "not begun") if counts[state]
    )
    benches = len({run.bench for run in runs})
    lengths = [run.planned or run.rollouts for run in runs]
    ends = dict.fromkeys((min(lengths), max(lengths)))
    parts = [
        counted(methods, "method"),
        f"{benches} benches" if benches > 1 else "",
        counted(len(comparison.tables), "setting"),
        counted(len({run.seed for run in runs}), "seed"),
        f"{counted(len(runs), 'run')} ({', '.join(states)})",
        f"{' to '.join(map(str, ends))} rollouts per run",
        f"compared by {unit}" if unit else "",
    ]
    return " · ".join(filter(None, parts))


# -- configurations ----------------------------------------------------------------------------------------------------


def _config(table: Table, name: str) -> dict[str, Any]:
    """The configuration of a method, as a unified diff from the baseline's if they differ."""
    lines, baseline = (
        next((_yaml(run.config) for run in table.runs.get(method or "", ()) if run.config), [])
        for method in (name, table.baseline)
    )
    hashes = dict.fromkeys(
        str(run.about["objective_hash"]) for run in table.runs[name] if "objective_hash" in run.about
    )
    about = [f"objective {', '.join(hashes)}"] if hashes else []
    if not lines:
        about.append("its configuration was not found")
    elif name == table.baseline:
        about.append("the baseline")
    elif baseline:
        changes = list(difflib.unified_diff(baseline, lines, n=len(baseline)))[3:]
        changed = sum(not line.startswith(" ") for line in changes)
        about.append(f"{counted(changed, 'line')} differ{'s' * (changed == 1)} from {table.baseline}")
        lines = changes or lines
    return {"name": name, "about": "; ".join(about), "lines": lines}


def _yaml(config: Mapping[str, Any]) -> list[str]:
    """The lines of a configuration without its seed and its folder, which only name the run."""
    shown = {key: value for key, value in config.items() if key != "seed"}
    if isinstance(tracking := shown.get("tracking"), Mapping):
        shown["tracking"] = {key: value for key, value in tracking.items() if key != "out"}
    return yaml.safe_dump(plain(shown), sort_keys=False, allow_unicode=True, width=100).splitlines()


# -- tables ------------------------------------------------------------------------------------------------------------


def remarks_of(rows: Sequence[TableRow]) -> list[str]:
    """Each remark on the rows of a table, after the methods that it is about."""
    groups = grouped([row for row in rows if row.remark], attrgetter("remark"))
    return [f"{', '.join(row.method for row in group)}: {remark}." for remark, group in groups.items()]


# -- numbers -----------------------------------------------------------------------------------------------------------


def data(comparison: Comparison) -> dict[str, Any]:
    """The data that ``page.js`` draws."""
    looks, runs = line_styles(comparison), comparison.loaded.runs
    tables = {f"s{index}": table for index, table in enumerate(comparison.tables)}
    keys = {name: f"m{index}" for index, name in enumerate(looks)}
    is_single = len({table.bench for table in comparison.tables}) == 1
    drawn = curve_data({key: {keys[name]: runs for name, runs in table.runs.items()} for key, table in tables.items()})
    for key, table in tables.items():
        for name, losses in table.losses.items():
            survival = dict(zip(("x", "mean", "low", "high"), losses.survival, strict=True))
            drawn["curves"][key][keys[name]]["survival"] = {**survival, "seeds": [], "lost": []}
    return {
        "methods": [{"key": keys[name], "name": name, **look} for name, look in looks.items()],
        "settings": [
            {"key": key, "name": (table.setting if is_single else table.title) or "all runs"}
            for key, table in tables.items()
        ],
        "outcomes": {
            outcome.name: {"title": outcome.title, "curve": curve_of(comparison, outcome.name)}
            for outcome in comparison.outcomes
        },
        "metrics": {name: asdict(axis(name)) for name in (*metrics_of(runs), "survival")},
        "sweeps": [_sweep_data(comparison, sweep, keys) for sweep in comparison.sweeps],
        **drawn,
    }


def _sweep_data(comparison: Comparison, sweep: Sweep, keys: Mapping[str, str]) -> dict[str, Any]:
    tables = {(table.bench or "", table.setting): table for table in comparison.tables}
    methods: dict[str, Any] = {}
    for name, points in sweep.by_method.items():
        cells = [tables[sweep.bench, point.setting].cells for point in points.values()]
        methods[keys[name]] = {
            "x": list(points),
            "stable": [point.stable for point in points.values()],
            "collapsed": [f"{point.collapsed} of {point.runs}" for point in points.values()],
            "highest": sweep.highest[name],
            "outcomes": {
                outcome.name: [sorted(of_point[name, outcome.name].every) for of_point in cells]
                for outcome in comparison.outcomes
            },
        }
    return {
        "key": sweep.key,
        "values": sweep.values,
        "labels": sweep.labels,
        "log": sweep.is_logarithmic,
        "methods": methods,
    }
