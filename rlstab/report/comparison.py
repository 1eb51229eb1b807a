"""Everything a report says, computed once: HTML and Markdown print the same numbers.

A run is judged by outcomes: one number per run, each with its definition.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeAlias

import numpy as np

from rlstab.bins import binned, last_tenth
from rlstab.core.method_settings import check_choices
from rlstab.errors import ReportError, did_you_mean
from rlstab.report.checks import checked, repeated
from rlstab.report.collapse import Losses, collapsed, losses_of, nan_share
from rlstab.report.cost import UNITS, budget_of, costs_of, up_to, weights_of
from rlstab.report.formatting import METRICS, natural
from rlstab.report.idle import Idle, idle_methods
from rlstab.report.names import settings_between, shown
from rlstab.report.runs import Loaded, RunRecord, best_bin, grouped
from rlstab.report.statistics import Estimate, Paired, against_baseline, summary
from rlstab.report.sweeps import Sweep, sweeps_of

#: After the name of a metric: its mean over all rollouts.
AREA = "/area"
#: What every method of a table spends the same amount of.
By: TypeAlias = Literal["rollouts", "tokens", "seconds"]


@dataclass(frozen=True)
class Outcome:
    """One number of a run.

    Attributes:
        name: such as ``eval/mean`` or ``reward/area``.
        title: the heading.
        text: its definition.
        unit: such as ``nats``; empty for rewards and shares.
    """

    name: str
    title: str
    text: str
    unit: str = ""


def known_outcomes(runs: Iterable[RunRecord]) -> list[Outcome]:
    """The outcomes that at least one of the runs can have, the main one first."""
    measured = {name for run in runs for names in ([*run.metrics], *map(list, run.evaluations)) for name in names}
    ks = sorted(int(name[10:]) for name in measured if re.fullmatch(r"eval/pass@\d+", name))
    outcomes = []
    for outcome in METRICS["outcomes"]:
        metric, about = outcome["of"], {key: text for key, text in outcome.items() if key != "of"}
        if metric == "eval/pass@K":
            outcomes += [Outcome(**{key: re.sub(r"\bK\b", str(k), text) for key, text in about.items()}) for k in ks]
        elif metric in measured:
            outcomes.append(Outcome(**about))
    return outcomes


def chosen_outcomes(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Outcome]:
    """The named outcomes; a metric of ``metrics.jsonl`` stands for its mean over the last tenth of the rollouts.

    With ``/area`` after it, a metric stands for its mean over all rollouts.

    Raises:
        ReportError: no run has it.
    """
    outcomes = {outcome.name: outcome for outcome in known_outcomes(runs)}
    if not names:
        return list(outcomes.values())
    metrics = {name for run in runs for name in run.metrics}
    evaluated = {name for run in runs for record in run.evaluations for name in record if name != "rollout"}
    texts = {
        **{f"{name}{AREA}": f"mean of {name} over all rollouts" for name in metrics},
        **{name: f"mean of {name} over the last tenth of the rollouts, in whole tens" for name in metrics},
        **{name: f"{name} in the last evaluation" for name in evaluated},
    }
    for name in names:
        if name not in outcomes and name not in texts:
            raise ReportError(f"--metric {name}: no run has it. {did_you_mean(name, {*outcomes, *texts})}")
    return [outcomes.get(name) or Outcome(name, name, texts[name]) for name in dict.fromkeys(names)]


def outcome_of(run: RunRecord, name: str) -> float | None:
    """The value of an outcome for a finished run; None if it was not measured, or the run did not end."""
    if run.status != "finished":
        return None
    if name in DERIVED:
        return DERIVED[name](run)
    if name.startswith("eval/"):
        # an earlier evaluation is not the one at the end
        last = run.evaluations[-1] if run.evaluations else {}
        return last.get(name) if last.get("rollout") == run.rollouts else None
    if name not in run.metrics and name.endswith(AREA):
        return _area(run, name.removesuffix(AREA))
    return last_tenth(run, name)


def _area(run: RunRecord, name: str = "reward/mean") -> float | None:
    ends, values = binned(run, name)
    return float(np.average(values, weights=weights_of(run, ends))) if len(values) else None


DERIVED: dict[str, Callable[[RunRecord], float | None]] = {
    "reward/area": _area,
    "reward/best": lambda run: best[0] if (best := best_bin(run)) else None,
    "reward/last": lambda run: last_tenth(run, "reward/mean"),
}


@dataclass(frozen=True)
class Cell:
    """One method in one outcome.

    Attributes:
        values: the outcome of finished runs that were not lost, or of all where none survived, by seed.
        summary: mean over these seeds.
        every: values of all finished runs, lost ones too.
        paired: against the baseline; None for the baseline itself, and without a baseline.
    """

    values: dict[int, float]
    summary: Estimate
    paired: Paired | None
    every: tuple[float, ...]


@dataclass(frozen=True)
class Table:
    """The methods of one setting of one bench.

    Attributes:
        bench: its name; None for runs made by ``rlstab train``.
        setting: its name.
        title: bench and setting, without uninformative parts.
        baseline: method that the others are compared with; None if it is missing.
        methods: the baseline first, the others by name, m2 before m10.
        runs: the runs that the curves are drawn from, by method.
        cells: the values of a method in an outcome, by both.
        losses: the lost runs and the signs of each method.
        costs: what a rollout costs, in words, by method.
        budget: the cost at which the methods are compared, in words; empty if at the end of the runs.
        differs: the settings, by method and path, besides objective and stages in which it differs from the baseline,
            in words.
        checks: what is wrong with its runs, in sentences.
        notes: what is missing in this table, and why; what differs in it in addition to the methods.
    """

    bench: str | None
    setting: str
    title: str
    baseline: str | None
    methods: list[str]
    runs: dict[str, list[RunRecord]]
    cells: dict[tuple[str, str], Cell]
    losses: dict[str, Losses]
    costs: dict[str, str]
    budget: str
    differs: dict[str, dict[str, str]]
    checks: list[str]
    notes: list[str]

    @property
    def about(self) -> str:
        """What the bench asks and what to know about its figures, or empty."""
        return next((run.bench_about for runs in self.runs.values() for run in runs if run.bench_about), "")


@dataclass(frozen=True)
class Comparison:
    """What a report is made of.

    Attributes:
        loaded: runs, what was left out, and notes from reading.
        outcomes: the columns, the main one first.
        tables: one per setting of a bench, swept settings by their value.
        idle: methods that never acted.
        sweeps: benches whose settings differ in one number.
        notes: remarks on reading, and on what is missing in the tables.
        by: ``rollouts``, ``tokens`` or ``seconds``: the cost at which methods are compared.
    """

    loaded: Loaded
    outcomes: list[Outcome]
    tables: list[Table]
    idle: list[Idle]
    sweeps: list[Sweep]
    notes: list[str]
    by: str = "rollouts"

    @property
    def checks(self) -> list[str]:
        """What is wrong with the runs, in sentences; each begins with its setting where there are several."""
        is_named = len(self.tables) > 1
        return [f"{table.title}: " * is_named + text for table in self.tables for text in table.checks]


def compare(
    loaded: Loaded, *, baseline: str | None = None, metrics: Sequence[str] = (), by: By = "rollouts"
) -> Comparison:
    """Compute everything.

    Args:
        loaded: the result of :func:`rlstab.report.load.load_runs`.
        baseline: method to compare with; None takes each bench's baseline, else ``grpo``, else the first by name.
        metrics: outcomes instead of those of :func:`known_outcomes`; any metric can be one.
        by: ``rollouts``, ``tokens`` or ``seconds``: what every method of a table spends the same amount of.

    Raises:
        ReportError: no run has this method or metric, or recorded what it spent.
        OutOfRange: there is no such ``by``.
    """
    check_choices(compare, by=by)
    methods = {run.method for run in loaded.runs}
    if baseline is not None and baseline not in methods:
        raise ReportError(f"--baseline {baseline}: no run has this method. {did_you_mean(baseline, methods)}")
    if by in UNITS and not any(by in run.spent for run in loaded.runs):
        raise ReportError(f"--by {by}: no run recorded its {UNITS[by]} in every rollout. Compare by rollouts.")
    outcomes = chosen_outcomes(loaded.runs, metrics)
    groups = grouped(loaded.runs, lambda run: (run.bench or "", run.setting))
    sweeps = sweeps_of(loaded.runs)
    swept = {(sweep.bench, point.setting): point.value for sweep in sweeps for point in sweep.points}
    order = sorted(
        groups,
        key=lambda group: (group[0], swept.get(group, 0.0), loaded.order.get(group, len(groups)), natural(group[1])),
    )
    repeats = repeated(loaded.runs)
    tables = [_table(groups[group], baseline, outcomes, by, repeats.pop(group, {})) for group in order]
    sentences = [text for by_seed in repeats.values() for text in by_seed.values()]
    notes = [*loaded.notes, *sentences, *(note for table in tables for note in table.notes)]
    return Comparison(loaded, outcomes, tables, idle_methods(loaded.runs), sweeps, notes, by)


def _table(
    runs: Sequence[RunRecord], asked: str | None, outcomes: Sequence[Outcome], by: str, twice: Mapping[int, str]
) -> Table:
    runs, checks = checked(runs)
    baseline = _baseline(runs, asked)
    runs_of = grouped(runs, attrgetter("method"))
    by_method = {name: runs_of[name] for name in sorted(runs_of, key=lambda name: (name != baseline, natural(name)))}
    methods = list(by_method)
    bench, setting = runs[0].bench, runs[0].setting
    where = ", ".join(filter(None, (bench, setting if setting != "default" or not bench else "")))
    cells: dict[tuple[str, str], Cell] = {}
    notes = _absent(where, runs, asked, baseline)
    ended = {method: [run for run in group if run.status == "finished"] for method, group in by_method.items()}
    # if no run of a method is left, all with a reward to the end count: they are no mixture
    judged = {
        method: [run for run in group if not collapsed(run)] or [run for run in group if not nan_share(run)]
        for method, group in ended.items()
    }
    finished = [run for group in judged.values() for run in group]
    budget = budget_of(finished, by)
    if budget is not None:
        cut = {run: up_to(run, by, budget) for run in finished}
        judged = {method: [part for run in group if (part := cut.get(run))] for method, group in judged.items()}
        if left_out := ", ".join(f"{run.method} seed {run.seed}" for run, part in cut.items() if part is None):
            reason = f"their {UNITS[by]} are not recorded, or ten rollouts take more than all have"
            notes.append(f"{where}: left out of the comparison by {by}: {left_out}: {reason}.")
        finished = [part for group in judged.values() for part in group]
    missing: dict[tuple[RunRecord, ...], list[str]] = defaultdict(list)
    for outcome in outcomes:
        values = {method: _values(judged[method], outcome.name) for method in methods}
        compared = {method: by_seed for method, by_seed in values.items() if method != baseline}
        paired = against_baseline(compared, values[baseline]) if baseline is not None else {}
        for method in methods:
            finished_values = tuple(_values(ended[method], outcome.name).values())
            cells[method, outcome.name] = Cell(
                values[method], summary(values[method]), paired.get(method), finished_values
            )
        lacking = tuple(run for run in finished if run.seed not in values[run.method])
        if lacking:
            missing[lacking].append(outcome.name)
    for lacking, names in missing.items():
        which = ", ".join(f"{run.method} seed {run.seed}" for run in lacking)
        which = "every finished run" if len(lacking) == len(finished) else f"{which}, left out there"
        notes.append(f"{where}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} missing in {which}.")
    seeds = {method: {run.seed for run in group} for method, group in ended.items()}
    unpaired = [
        f"{method} {', '.join(map(str, single))}"
        for method in (methods if baseline else ())
        if (single := sorted((seeds[method] ^ seeds[baseline or ""]) - twice.keys()))
    ]
    if unpaired:
        which = ", ".join(unpaired)
        notes.append(
            f"{where}: differences are paired by seed; only one of method and {baseline} finished these seeds: {which}."
        )
    differs = _differs(by_method, baseline)
    notes += [
        f"{where}: {method} differs from {baseline} in more than its method: {', '.join(words.values())}. "
        "The difference is that of both."
        for method, words in differs.items()
    ]
    losses = losses_of(by_method, baseline)
    equal = "" if budget is None else f"at {budget:,.0f} {UNITS[by]} for each run"
    costs = costs_of(by_method, baseline)
    checks += twice.values()
    return Table(
        bench, setting, where, baseline, methods, by_method, cells, losses, costs, equal, differs, checks, notes
    )


def _differs(runs: Mapping[str, Sequence[RunRecord]], baseline: str | None) -> dict[str, dict[str, str]]:
    """By method and path, ``optimisation.lr 0.001 (grpo 0.0001)``: where its settings differ from the baseline's."""
    differs: dict[str, dict[str, str]] = {}
    if baseline is None:
        return differs
    for method, group in runs.items():
        pair = [next((run for run in group_of if run.config), None) for group_of in (group, runs[baseline])]
        if method != baseline and pair[0] is not None and pair[1] is not None:
            between = settings_between([pair[0], pair[1]])
            words = {
                path: f"{path} {shown(value)} ({baseline} {shown(other)})" for path, (value, other) in between.items()
            }
            differs |= {method: words} if words else {}
    return differs


def _baseline(runs: Sequence[RunRecord], asked: str | None) -> str | None:
    methods = sorted({run.method for run in runs})
    if asked is not None:
        return asked if asked in methods else None
    named = sorted({run.baseline for run in runs if run.baseline is not None})
    return next((name for name in [*named, "grpo"] if name in methods), methods[0])


def _absent(where: str, runs: Sequence[RunRecord], asked: str | None, baseline: str | None) -> list[str]:
    """Sentences about runs that are left out of the outcomes; a run may have failed because of its method."""
    notes = []
    if asked is not None and baseline is None:
        notes.append(f"{where}: has no run of {asked}, so nothing is compared there.")
    elif baseline is not None and runs[0].baseline not in (None, baseline) and asked is None:
        notes.append(f"{where}: its baseline {runs[0].baseline} has no run; {baseline} is used instead.")
    out = [f"{run.method} seed {run.seed} ({run.status})" for run in runs if run.status != "finished"]
    if out:
        notes.append(
            f"{where}: outcomes cover finished runs only and leave out {', '.join(out)}; the collapse counts include "
            f"them. A run may fail because of its method, so read both together."
        )
    return notes


def _values(runs: Sequence[RunRecord], name: str) -> dict[int, float]:
    values = {run.seed: outcome_of(run, name) for run in runs}
    return {seed: value for seed, value in sorted(values.items()) if value is not None}
