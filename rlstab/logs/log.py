"""The lines of a log of any trainer or tracker, and the run that they make under rlstab's names.

``metric_aliases.yaml`` has the names of other trainers.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from rlstab.bins import EMPTY, MOST_ROLLOUTS, Curve, Run, at_ends, rounded
from rlstab.console import counted, ranges
from rlstab.safe_read import as_number, as_step, gaps
from rlstab.signs import TOTALS

_TABLE: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("metric_aliases.yaml").read_text(encoding="utf-8"))
#: Names of other trainers by rlstab's name, in the order of preference.
ALIASES: Mapping[str, list[str]] = _TABLE["names"]
#: Names whose value is one minus that of rlstab.
COMPLEMENTS: list[str] = _TABLE["complements"]
#: Metrics of rlstab that are sums of other rlstab metrics.
SUMS: Mapping[str, list[str]] = _TABLE["sums"]
#: Names of the loss of an optimizer step.
LOSSES: list[str] = _TABLE["losses"]

#: Names of the number of a step, the likeliest first: wandb's own count is of calls to its log.
STEPS = (
    *("rollout", "train/global_step", "global_step", "training/global_step", "global_step/max_steps"),
    *("trainer/global_step", "iteration", "step", "Step", "_step"),
)

#: Names of a run's cost, by unit: seconds and tokens (with those of prompts) of a step, and tokens since the start.
SPENT: Mapping[str, tuple[str, ...]] = {
    "seconds": ("step_time", "timing_s/step", "perf/time_per_step"),
    "tokens": ("perf/total_num_tokens",),
    "tokens so far": ("num_tokens", "progress/total_tokens"),
}

#: verl's largest and smallest reward of a step. If they are equal, no group has a gradient.
EXTREMES = ("critic/score/max", "critic/score/min")
#: The standard deviation of the rewards of a step in TRL, and of a group in OpenRLHF; 0 says the same.
SPREADS = ("reward_std", "group_reward_std")

#: Held-out scores with a user-defined part in their name: by data set in verl, SkyRL and OpenRLHF, by environment in
#: prime-rl.
HELD_OUT = re.compile(
    r"val-core/.+/(acc|reward|score)/mean@\d+|val/test_score/.+|eval/[^/]+/(avg@\d+|avg_score)|eval_.+_pass1"
)
#: rlstab's name of the held-out score, and the known names.
SCORE = "eval/mean"
_SCORES = [SCORE, *ALIASES[SCORE]]
#: Metrics that do not show that something was trained.
BESIDE = {"lr", "optimizer_steps/refused"}
#: One of several rewards: of rlstab, and of TRL and ms-swift. A total may have such a name, and SkyRL's all are.
PART = re.compile(r"reward/(?!avg_|mean_|num_)([^/]+)|rewards/(.+)/mean|rewards/([^/]+)")

#: Share of the steps after which the log may stop recording the cost.
ENOUGH = 0.9
#: Prefixes that trackers add to a name.
_PREFIX = re.compile(r"^(train|trainer|metrics?|Train)/")


class Line(NamedTuple):
    """One line of a log under rlstab's names.

    Attributes:
        metrics: the name in the log, and the value as rlstab would log it, by rlstab's name.
        scores: held-out scores by their names in the log, of which a run may have several.
        spent: cost by the units of :data:`SPENT`.
    """

    metrics: dict[str, tuple[str, float]]
    scores: dict[str, float]
    spent: dict[str, float]


def translated(row: Mapping[str, float]) -> Line:
    """One line of a log under rlstab's names.

    Args:
        row: values by the names of the log, including NaN and Inf.
    """
    # without the prefix of a tracker or a notebook's spaces
    bare = {_PREFIX.sub("", name.replace(" / ", "/")): (name, value) for name, value in row.items()}
    metrics: dict[str, tuple[str, float]] = {}
    for metric, aliases in ALIASES.items():
        name = next((name for name in (metric, *aliases) if name in bare), None)
        if name is not None and metric != SCORE:
            logged, value = bare[name]
            metrics[metric] = logged, 1.0 - value if name in COMPLEMENTS else value
    for metric, parts in SUMS.items():
        terms = [bare[part] for part in parts if part in bare]
        if metric not in metrics and terms:
            metrics[metric] = " + ".join(name for name, _ in terms), sum(value for _, value in terms)
    for metric, name in _TABLE["stand_ins"].items():
        if metric not in metrics and name in bare:
            metrics[metric] = bare[name]
    if "reward/zero_std_groups" not in metrics:  # a lower bound: 1 if all rewards of the step are equal, else 0
        high, low, *spreads = map(bare.get, (*EXTREMES, *SPREADS))
        if high and low:
            metrics["reward/zero_std_groups"] = f"{high[0]} = {low[0]}", float(high[1] == low[1])
        elif spread := next(filter(None, spreads), None):
            metrics["reward/zero_std_groups"] = f"{spread[0]} = 0", float(spread[1] == 0)
    for name in bare:
        if (part := PART.fullmatch(name)) and (metric := f"reward/{part[1] or part[2] or part[3]}") not in TOTALS:
            metrics[metric] = bare[name]
    metrics |= {name: bare[name] for name in _TABLE["alone"] if name in bare}
    computed = [metrics["gradient/norm"]] if "gradient/norm" in metrics else []
    computed += [bare[name] for name in LOSSES if name in bare]
    if computed and "optimizer_steps/refused" not in metrics:
        name, value = min(computed, key=lambda logged: math.isfinite(logged[1]))
        metrics["optimizer_steps/refused"] = name, float(not math.isfinite(value))
    spent = {unit: [bare[name][1] for name in names if name in bare] for unit, names in SPENT.items()}
    return Line(
        metrics,
        scores={logged: value for name, (logged, value) in bare.items() if name in _SCORES or HELD_OUT.fullmatch(name)},
        spent={unit: values[0] for unit, values in spent.items() if values},
    )


def step_of(row: Mapping[str, Any]) -> int | None:
    """The number of a step: 61, 61.0, ``"61"``, or ``"61/500"`` as ms-swift writes it."""
    values = (row.get(name) for name in STEPS)
    steps = (as_step(value.partition("/")[0] if isinstance(value, str) else value) for value in values)
    return next((step for step in steps if step is not None), None)


def preference(score: str) -> tuple[int, str]:
    """The order of held-out scores that a log has equally often: those of known names, then by name."""
    bare = _PREFIX.sub("", score)
    return _SCORES.index(bare) if bare in _SCORES else len(_SCORES), score


def known(names: Iterable[str]) -> bool:
    """Whether a log with these names has a known metric of the training."""
    return bool(translated(dict.fromkeys(names, 0.5)).metrics.keys() - BESIDE)


# -- the run -----------------------------------------------------------------------------------------------------------


class Rows(dict[int, dict[str, float]]):
    """Values by step and name, added in the order of the log; values that were not finite are NaN.

    A run that is resumed from an older checkpoint logs steps a second time. The later line counts, and what the first
    branch logged from there on is dropped.

    Args:
        rows: the first lines.
        unit: what a step is, ``rollout`` or ``step``.
    """

    def __init__(self, rows: Mapping[int, Mapping[str, float]] | None = None, unit: str = "step") -> None:
        super().__init__()
        self.unit, self.last = unit, 0
        self.abandoned: set[int] = set()
        # a run is looked at after each line: each line is translated once, and adds its points to the curves
        self._lines: dict[int, Line] = {}
        self._points: dict[str, dict[int, float]] = {}
        self._scores: dict[str, dict[int, float]] = {}
        for step, values in sorted((rows or {}).items()):
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the values of a step: numbers, also as text. None, which some writers put for NaN, is NaN."""
        numbers = {name: math.nan if value is None else as_number(value) for name, value in values.items()}
        # a late evaluation of an older step repeats none of the known metrics
        if step < self.last and known(numbers.keys() & self.get(step, {}).keys()):
            branch = {later for later in self if later >= step}
            self.abandoned |= branch
            by_step: list[dict[int, Any]] = [self, self._lines, *self._points.values(), *self._scores.values()]
            for record in by_step:
                for later in branch & record.keys():
                    del record[later]
            self.last = step
        self.setdefault(step, {}).update((name, number) for name, number in numbers.items() if number is not None)
        self.last = max(self.last, step)
        if 0 <= step < MOST_ROLLOUTS:
            self._lines[step] = line = translated(self[step])
            for metric, (_, value) in line.metrics.items():
                self._points.setdefault(metric, {})[step] = value
            for name, score in line.scores.items():
                self._scores.setdefault(name, {})[step] = score

    def run(
        self,
        path: str = "",
        writer: str = "",
        remarks: Sequence[str] = (),
        *,
        planned: int | None = None,
        watched: bool = False,
    ) -> Run:
        """The run so far. If another trainer counts steps from 0, they are counted from 1.

        Args:
            path: see :class:`rlstab.bins.Run`.
            writer: the same.
            remarks: what could not be read.
            planned: number of its last step, if the log gives it.
            watched: whether it is looked at after each line, and needs neither its cost nor remarks.
        """
        # rlstab's record of rollout 0 is an evaluation; another trainer has trained there
        shift = int(self.unit == "step" and 0 in self._lines and bool(self._lines[0].metrics.keys() - BESIDE))
        curves = {metric: _curve(points, shift) for metric, points in self._points.items() if points}
        names = {
            metric: self._lines[int(steps[steps > 0][0]) - shift].metrics[metric][0]
            for metric, (steps, _) in curves.items()
            if steps[-1] > 0
        }
        evaluations = EMPTY
        if scores := {name: _curve(points, shift) for name, points in self._scores.items() if points}:
            # of several data sets, the one with the most scores counts
            name = min(scores, key=lambda score: (-int(np.isfinite(scores[score][1]).sum()), preference(score)))
            curves[SCORE], names[SCORE] = scores[name], name
            finite = np.isfinite(scores[name][1])
            evaluations = scores[name][0][finite], scores[name][1][finite]
        metrics: dict[str, Curve] = {}
        damaged: dict[str, list[int]] = {}
        for metric, (steps, values) in curves.items():
            finite = np.isfinite(values)
            trained = finite & (steps > 0)
            if trained.any():
                metrics[metric] = steps[trained], values[trained]
            missing = steps[~finite & ((steps > 0) | (metric == SCORE))].tolist()
            # a norm has a sign of its own, and a metric may be logged now and then, and be null in most lines
            count = int(trained.sum())
            sparse = 0 < count < len(missing) and int(metrics[metric][0][-1]) > missing[0]
            if missing and metric != "gradient/norm" and not sparse:
                damaged[metric] = missing
        last = max((int(steps[-1]) for steps, _ in metrics.values()), default=0)
        return Run(
            path=path,
            writer=writer,
            unit=self.unit,
            metrics=metrics,
            names={metric: names[metric] for metric in metrics},
            evaluations=[  # with those at step 0, which no curve has
                {"rollout": min(step, last), SCORE: rounded(score)}
                for step, score in zip(*map(np.ndarray.tolist, evaluations), strict=True)
            ],
            spent={} if watched else self._spent(shift, last),
            ended=None if planned is None else max(self) + shift >= planned,
            not_finite=tuple(damaged),
            remarks=() if watched else (*remarks, *self._remarks(metrics, damaged, shift)),
        )

    @property
    def trained(self) -> bool:
        """Whether the run so far has a metric which shows that something was trained."""
        return any(points and metric not in BESIDE for metric, points in self._points.items())

    def _remarks(self, metrics: Mapping[str, Curve], damaged: Mapping[str, Sequence[int]], shift: int) -> Iterator[str]:
        """What was dropped or changed, and what is missing.

        Args:
            metrics: finite values by rlstab's name.
            damaged: the steps whose value is left out, by metric.
            shift: the number by which steps were renumbered.
        """
        if self.abandoned:
            first = f"the run was resumed from an earlier step, and logs step {min(self.abandoned)} again"
            yield f"{first}: left out what it had logged of steps {ranges(self.abandoned)} before"
        if shift:
            yield "its steps begin at 0 and are counted from 1 here"
        if count := len(self) - len(self._lines):
            yield f"left out {counted(count, self.unit)} below 0 or above {MOST_ROLLOUTS:,}"
        if missing := gaps({step for steps, _ in metrics.values() for step in steps.tolist()}):
            yield f"no line for {self.unit} {missing}"
        texts = [
            f"{name} in {counted(len(steps), 'line')} from {self.unit} {steps[0]} on" for name, steps in damaged.items()
        ]
        if texts:
            yield f"left out values that are NaN, Inf or null: {', '.join(texts)}"

    def _spent(self, shift: int, last: int) -> dict[str, Curve]:
        """The cost up to the end of each bin; each line of a log stands for the steps since the previous one."""
        curves: dict[str, Curve] = {}
        for unit in ("seconds", "tokens"):
            steps, totals = [0], [0.0]
            for step, line in sorted(self._lines.items()):
                total = line.spent.get(f"{unit} so far")
                if total is None and (per_step := line.spent.get(unit)) is not None:
                    total = totals[-1] + per_step * (step + shift - steps[-1])
                if total is not None and math.isfinite(total) and total >= totals[-1]:
                    steps.append(step + shift)
                    totals.append(total)
            if steps[-1] >= ENOUGH * last > 0:
                steps, totals = [*steps, last], [*totals, totals[-1] * max(1.0, last / steps[-1])]
                curves[unit] = at_ends(steps, totals, last)
        return curves


def _curve(points: Mapping[int, float], shift: int) -> Curve:
    """Steps in their order, and their values, finite or not."""
    steps, values = np.fromiter(points, np.int64, len(points)), np.fromiter(points.values(), np.float64, len(points))
    if (steps[1:] < steps[:-1]).any():  # a late line about an older step
        order = np.argsort(steps)
        steps, values = steps[order], values[order]
    return steps + shift, values


def logged(
    path: Path | str,
    writer: str,
    steps: Iterable[tuple[int, Mapping[str, Any]]],
    remarks: Sequence[str] = (),
    *,
    unit: str = "step",
    planned: int | None = None,
) -> list[Run]:
    """The run in the steps of a log and their values, in the order of logging; empty if no metric is known."""
    rows = Rows(unit=unit)
    for step, values in steps:
        rows.log(step, values)
    return [rows.run(str(path), writer, remarks, planned=planned)] if rows.trained else []


def left_out(numbers: Sequence[int], what: str) -> tuple[str, ...]:
    """The remark about lines that are left out; empty without any."""
    return (f"left out {counted(len(numbers), what)}: {ranges(numbers)}",) if numbers else ()


def known_part(run: Run, path: str, remarks: Sequence[str] = ()) -> Run:
    """The known metrics of a run of rlstab, with those that other trainers log and rlstab has in parts.

    Args:
        run: the run as it was read.
        path: see :class:`rlstab.bins.Run`.
        remarks: those in addition to the ones of the run.
    """
    rows: dict[int, dict[str, float]] = {}
    for name, (rollouts, values) in run.metrics.items():
        for rollout, value in zip(rollouts.tolist(), values.tolist(), strict=True):
            rows.setdefault(rollout, {})[name] = value
    log = Rows(rows, unit=run.unit).run(path, run.writer, run.remarks)
    fields = {name: getattr(run, name) for name in ("bin_width", "largest", "evaluations", "judged", "config")}
    return replace(log, remarks=(*log.remarks, *remarks), **fields)
