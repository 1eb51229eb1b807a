"""A comparison as what the page shows: texts for the template, numbers for the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstab.report import payload
from rlstab.report.collapse import DEFINITIONS, TITLES
from rlstab.report.comparison import Comparison, Table
from rlstab.report.differences import lines
from rlstab.report.findings import findings, listed
from rlstab.report.metric_names import axis, own_title
from rlstab.report.model import WIDTH, RunRecord
from rlstab.report.numbers import NOTHING, counted, setting
from rlstab.report.opening import curve_of, opening
from rlstab.report.palette import Look, looks
from rlstab.report.panels import panels_of
from rlstab.report.samples import MOST_RUNS, Samples, samples_of
from rlstab.report.tables import about, collapse_table, overlap_table, result_table, sweep_table

HOW_TABLES = (
    "How to read the table. The interquartile mean leaves out the lowest and the highest quarter of the seeds; its "
    "interval is a BCa bootstrap over seeds. Differences are paired by seed: the table shows their mean with Student's "
    "t interval. P(higher) is the share of seeds in which the method ends above the baseline. Each interval covers one "
    "comparison at 95 %; the verdicts are corrected for all methods of a table (Holm), but not across tables. No "
    "visible difference does not mean no difference: the interval shows how large a difference may have gone unseen. "
    "Higher does not mean better."
)
HOW_CURVES = (
    "Curves are means over seeds. Once some runs have stopped, the mean is over those that go on; it ends where fewer "
    "than half are left. Each point of a training metric is a mean over {width} rollouts; evaluations are shown as "
    "measured."
)
#: Units of :attr:`RunRecord.spent` as axes.
SPENT = {"tokens": "tokens sampled", "seconds": "training time"}
HOW_SPENT = {
    "tokens": "Tokens are those sampled for training.",
    "seconds": (
        "Training time counts sampling, scoring and learning; evaluations and the time between a stop and a resume do "
        "not count."
    ),
}
#: Panels of learning curves below the opening picture.
LEARNING = 4
HOW_OVERLAP = (
    "1 means that two methods touched exactly the same tokens, 0 that they had none in common. In parentheses: how "
    "many tokens each touched. Counted in the token traces of the runs."
)


def looks_of(comparison: Comparison) -> dict[str, Look]:
    """Every compared method with its look, in the order of the tables, a baseline first."""
    methods = list(dict.fromkeys(method for table in comparison.tables for method in table.methods))
    baselines = [table.baseline for table in comparison.tables if table.baseline is not None]
    # with several baselines no one of them is the neutral one of all figures, so the most usual is
    baseline = max(baselines, key=baselines.count) if baselines else None
    return looks(sorted(methods, key=lambda one: one != baseline), baseline)


def contents(comparison: Comparison, command: str | None = None, folder: Path | None = None) -> dict[str, Any]:
    """The context of ``page.html``.

    Args:
        comparison: what it tells.
        command: makes the report again.
        folder: of the page, from which its links go; None is the working directory.
    """
    look_of = looks_of(comparison)
    tables = _tables(comparison)
    panels = panels_of(comparison.loaded.runs)
    first = opening(comparison)
    told = findings(comparison)
    learning = [name for name in panels.learning if name != first.metric][:LEARNING]
    samples = samples_of(comparison.loaded.runs)
    baseline = next((name for name, look in look_of.items() if look.colour == 0), None)
    several = len({run.bench for run in comparison.loaded.runs}) > 1
    found = {
        "title": _title(comparison, list(look_of), baseline),
        "what": _what(comparison, len(look_of)),
        "lead": told[0],
        "findings": told[1:],
        "first": first,
        "first_title": "" if first.metric is None else axis(first.metric).title,
        "spent": _spent(comparison.loaded.runs),
        "settings": _settings(tables),
        "methods": [
            {"key": f"m{index}", "name": name, "look": look, "baseline": name == baseline}
            for index, (name, look) in enumerate(look_of.items())
        ],
        "outcomes": [{"name": one.name, "title": one.title} for one in comparison.outcomes],
        "tables": [
            {"setting": key, **result_table(table, outcome, look_of, alone=len(tables) == 1)}
            for key, table in tables.items()
            for outcome in comparison.outcomes
        ],
        "how_tables": HOW_TABLES,
        "how_curves": HOW_CURVES.format(width=WIDTH),
        "how_spent": _how_spent(comparison.loaded.runs),
        "same": [{"setting": key, "text": text} for key, table in tables.items() if (text := _same(table))],
        "how_overlap": HOW_OVERLAP,
        "choices": [{"name": name, "title": axis(name).title} for name in panels.choices],
        "panels": {
            "learning": learning,
            "trajectory": panels.trajectory,
            "gradients": _titled(panels.gradients),
            "shares": _titled(panels.shares),
            "own": [{"name": name, "metrics": _own(name, metrics)} for name, metrics in panels.own.items()],
        },
        "samples": _samples(samples, tables, look_of, folder or Path()),
        "how_samples": _how_samples(samples, comparison.loaded.runs),
        "idle": _idle(comparison, tables),
        "sweeps": [sweep_table(one, look_of) for one in comparison.sweeps],
        "overlaps": [
            {"setting": _place(tables, one.bench, one.setting), **overlap_table(one)} for one in comparison.overlaps
        ],
        "collapses": [
            {"setting": key, **collapse_table(table, look_of, alone=len(tables) == 1)} for key, table in tables.items()
        ],
        "definitions": [
            ("collapsed", "the reward fell (below), or the run ended because of NaN or Inf"),
            *((TITLES[name], text) for name, text in DEFINITIONS.items()),
        ],
        "left_out": [{"path": one.path, "why": one.why} for one in comparison.loaded.left_out],
        "notes": comparison.notes,
        "about": about(comparison),
        "commands": _commands(comparison.loaded.runs, command),
        "configs": [{"setting": key, "methods": _configs(table, look_of)} for key, table in tables.items()],
        "runs": [
            {
                "setting": f"{run.bench or NOTHING}, {run.setting}" if several else run.setting,
                "method": run.method,
                "seed": run.seed,
                "status": run.status,
                "hash": str(run.about.get("run_hash", NOTHING)),
                "minutes": NOTHING if run.seconds is None else f"{run.seconds / 60:.1f}",
                "command": run.command or "",
            }
            for run in comparison.loaded.runs
        ],
    }
    shown = {
        "curves": "Learning curves" if learning else "",
        "trajectory": "Entropy against reward" if panels.trajectory else "",
        "gradients": "Gradient norms" if panels.gradients else "",
        "sweep": "Sweep" if comparison.sweeps else "",
        "touched": "What each method touched",
        "overlap": "Overlap" if comparison.overlaps else "",
        "collapse": "Collapse",
        "samples": "Samples" if samples else "",
        "left-out": "Left out, notes" if comparison.loaded.left_out or comparison.notes else "",
        "again": "How to reproduce it",
    }
    return {**found, "contents": [(id, name) for id, name in shown.items() if name]}


def data(comparison: Comparison) -> dict[str, Any]:
    """What ``page.js`` draws."""
    look_of = looks_of(comparison)
    keys = {name: f"m{index}" for index, name in enumerate(look_of)}
    tables = _tables(comparison)
    panels = panels_of(comparison.loaded.runs)
    groups = {key: {keys[name]: table.runs[name] for name in table.methods} for key, table in tables.items()}
    curves = [curve_of(comparison, one.name) for one in comparison.outcomes]
    used = dict.fromkeys([*panels.choices, *(name for some in panels.own.values() for name in some), *curves])
    return {
        "methods": [
            {
                "key": keys[name],
                "name": name,
                "baseline": look.colour == 0,
                "colour": look.colour,
                "dash": look.dash,
                "mark": look.marker,
            }
            for name, look in look_of.items()
        ],
        "settings": _settings(tables),
        "outcomes": {
            one.name: {"title": one.title, "curve": curve_of(comparison, one.name)} for one in comparison.outcomes
        },
        "metrics": {name: {"title": axis(name).title, "zero": axis(name).zero} for name in used},
        "sweeps": _sweeps(comparison, keys),
        "clocks": payload.clocks(groups),
        **payload.curves(groups),
    }


def _spent(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """What the curves can be drawn over besides rollouts."""
    known = {unit for run in runs for unit in run.spent}
    return [{"unit": unit, "name": name} for unit, name in SPENT.items() if unit in known]


def _how_spent(runs: Sequence[RunRecord]) -> str:
    known = [unit for unit in SPENT if any(unit in run.spent for run in runs)]
    if not known:
        return ""
    parts = [HOW_SPENT[unit] for unit in known]
    parts.append("Over either, single seeds stand at their own cost and means at the mean cost of their seeds.")
    if any(unit not in run.spent for run in runs for unit in known):
        parts.append("Runs that did not record it are not drawn there.")
    return " ".join(parts)


def _samples(
    samples: Sequence[Samples], tables: Mapping[str, Table], look_of: Mapping[str, Look], folder: Path
) -> list[dict[str, Any]]:
    """One entry per run, the first seed of each method apart from the others."""
    found = []
    seen: set[tuple[str, str]] = set()
    keys = {one: _place(tables, one.run.bench, one.run.setting) for one in samples}
    order = list(tables)
    for one in sorted(
        samples, key=lambda one: (order.index(keys[one]), tables[keys[one]].methods.index(one.run.method), one.run.seed)
    ):
        run, key = one.run, keys[one]
        found.append(
            {
                "setting": key,
                "where": next(named["name"] for named in _settings(tables) if named["key"] == key),
                "method": run.method,
                "seed": run.seed,
                "look": look_of[run.method],
                "open": (key, run.method) not in seen,
                "link": one.link(folder),
                "command": one.command,
                "rollouts": [
                    {
                        "number": number,
                        "responses": [
                            {
                                "prompt": response.prompt,
                                "text": response.text,
                                "reward": NOTHING if response.reward is None else f"{response.reward:g}",
                                "right": response.reward is not None and response.reward > 0,
                            }
                            for response in responses
                        ],
                    }
                    for number, responses in one.rollouts.items()
                ],
            }
        )
        seen.add((key, run.method))
    return found


def _how_samples(samples: Sequence[Samples], runs: Sequence[RunRecord]) -> str:
    parts = ["The first responses that each run recorded of its first and its last rollout; nothing is selected."]
    if any(one.command for one in samples):
        parts.append("For traced runs, the token viewer shows what each method did to each token.")
    if len(samples) == MOST_RUNS < len(runs):
        parts.append(f"Only the {MOST_RUNS} runs with the lowest seeds are shown.")
    return " ".join(parts)


def _tables(comparison: Comparison) -> dict[str, Table]:
    """The settings by their key on the page; those of a sweep in the order of its values."""
    values = {(one.bench, point.setting): point.value for one in comparison.sweeps for point in one.points}
    benches = list(dict.fromkeys(table.bench for table in comparison.tables))
    ordered = sorted(
        comparison.tables,
        key=lambda table: (benches.index(table.bench), values.get((table.bench or "", table.setting), 0.0)),
    )
    return {f"s{index}": table for index, table in enumerate(ordered)}


def _settings(tables: Mapping[str, Table]) -> list[dict[str, str]]:
    one_bench = len({table.bench for table in tables.values()}) == 1
    return [
        {"key": key, "name": (table.setting if one_bench else table.title) or "all runs"}
        for key, table in tables.items()
    ]


def _title(comparison: Comparison, methods: Sequence[str], baseline: str | None) -> str:
    benches = list(dict.fromkeys(table.bench for table in comparison.tables if table.bench))
    head = f"{listed(benches)}: " if benches else ""
    others = [name for name in methods if name != baseline]
    if len({table.baseline for table in comparison.tables}) > 1:  # no one of them is the baseline of all
        return f"{head}{listed(methods) if len(methods) <= 3 else counted(len(methods), 'method')}"
    if not others or baseline is None:
        return f"{head}{listed(methods)}"
    return f"{head}{listed(others) if len(others) <= 3 else f'{len(others)} methods'} against {baseline}"


def _what(comparison: Comparison, methods: int) -> str:
    runs = comparison.loaded.runs
    seeds = sorted({run.seed for run in runs})
    counts = [
        f"{count} {status}"
        for status in ("finished", "unfinished", "failed")
        if (count := sum(run.status == status for run in runs))
    ]
    if comparison.loaded.not_begun:
        counts.append(f"{comparison.loaded.not_begun} not begun")
    benches = len({run.bench for run in runs})
    rollouts = {run.planned or run.rollouts for run in runs}
    length = f"{min(rollouts)} to {max(rollouts)}" if len(rollouts) > 1 else f"{min(rollouts)}"
    parts = [
        counted(methods, "method"),
        *([f"{benches} benches"] if benches > 1 else []),
        counted(len(comparison.tables), "setting"),
        counted(len(seeds), "seed"),
        f"{counted(len(runs), 'run')} ({', '.join(counts)})",
        f"{length} rollouts per run",
    ]
    return " · ".join(parts)


def _same(table: Table) -> str:
    """Which methods gave the very runs of the baseline: their curves lie on its curve and cannot be seen."""
    names = [
        name
        for name in table.methods
        if (paired := [cell.paired for (own, _), cell in table.cells.items() if own == name])
        and all(one is not None and one.verdict == "identical" for one in paired)
    ]
    verb = "gives" if len(names) == 1 else "give"
    return f"{listed(names)} {verb} exactly the values of {table.baseline}, so their curves coincide." if names else ""


def _commands(runs: Sequence[RunRecord], report: str | None) -> list[tuple[str, str]]:
    """What to type to make everything again: each bench, and the report."""
    benches = dict.fromkeys((run.bench or "", run.bench_command) for run in runs if run.bench_command)
    found = [(f"bench {name}", command) for name, command in benches if command]
    return [*found, *([("this report", report)] if report else [])]


def _titled(metrics: Sequence[str]) -> list[dict[str, str]]:
    return [{"name": name, "title": axis(name).title} for name in metrics]


def _own(method: str, metrics: Sequence[str]) -> list[dict[str, str]]:
    return [{"name": name, "title": own_title(name, method)} for name in metrics]


def _idle(comparison: Comparison, tables: Mapping[str, Table]) -> list[dict[str, str]]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in comparison.idle:
        some = "" if len(one.seeds) == one.runs else f" ({len(one.seeds)} of {one.runs} runs)"
        key = _place(tables, one.bench, one.setting)
        found.setdefault((key, one.part, one.why), []).append(one.method + some)
    return [
        {"setting": key, "part": part, "methods": listed(methods), "why": why}
        for (key, part, why), methods in found.items()
    ]


def _place(tables: Mapping[str, Table], bench: str | None, setting: str) -> str:
    return next(key for key, table in tables.items() if (table.bench, table.setting) == (bench, setting))


def _configs(table: Table, look_of: Mapping[str, Look]) -> list[dict[str, Any]]:
    configs = {name: next((run.config for run in table.runs[name] if run.config), None) for name in table.methods}
    baseline = configs.get(table.baseline) if table.baseline is not None else None
    found = []
    for name, config in configs.items():
        hashes = dict.fromkeys(
            str(run.about["objective_hash"]) for run in table.runs[name] if "objective_hash" in run.about
        )
        parts = [f"objective {', '.join(hashes)}"] if hashes else []
        marked = [] if config is None else lines(config, config if baseline is None else baseline)
        changed = sum(line.kind != "same" for line in marked)
        if config is None:
            parts.append("its configuration was not found")
        elif name == table.baseline:
            parts.append("the baseline")
        elif baseline is not None:
            parts.append(f"{counted(changed, 'line')} differ{'s' * (changed == 1)} from {table.baseline}")
        found.append({"name": name, "look": look_of[name], "about": "; ".join(parts), "lines": marked})
    return found


def _sweeps(comparison: Comparison, keys: Mapping[str, str]) -> list[dict[str, Any]]:
    tables = {(table.bench or "", table.setting): table for table in comparison.tables}
    found = []
    for one in comparison.sweeps:
        methods: dict[str, Any] = {}
        for name, highest in one.highest.items():
            points = [point for point in one.points if point.method == name]
            cells = [tables[one.bench, point.setting].cells for point in points]
            methods[keys[name]] = {
                "x": [point.value for point in points],
                "stable": [point.stable for point in points],
                "collapsed": [f"{point.collapsed} of {point.runs}" for point in points],
                "highest": highest,
                "outcomes": {
                    outcome.name: [
                        [(summary := some[name, outcome.name].summary).value, summary.low, summary.high]
                        for some in cells
                    ]
                    for outcome in comparison.outcomes
                },
            }
        values = one.values
        # a range of more than a factor of four, or steps that grow: rates are tried by factors
        log = values[0] > 0 and values[-1] / values[0] >= 4
        labels = [setting(value) for value in values]
        found.append(
            {
                "key": one.key,
                "values": values,
                "labels": labels,
                "log": log,
                "span": values[-1] - values[0],
                "methods": methods,
            }
        )
    return found
