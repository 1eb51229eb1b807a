"""The metrics of a log of any trainer under rlstab's names, by ``metric_aliases.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

_TABLE: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
#: By rlstab's name, those of other trainers in the order in which they are preferred.
ALIASES: Mapping[str, list[str]] = _TABLE["names"]
#: Those whose value is one minus that of rlstab.
COMPLEMENTS: list[str] = _TABLE["complements"]
#: Metrics of rlstab that are sums of other rlstab metrics.
SUMS: Mapping[str, list[str]] = _TABLE["sums"]

#: By our name, what trainers call the reward of an evaluation; of the data sets of verl the first counts.
EVALUATIONS: Mapping[str, re.Pattern[str]] = {
    "eval/mean": re.compile(r"eval[_/]reward|val-core/.+/(reward|acc|score)/mean@\d+|val/test_score/.+"),
}

#: What a run has spent, by unit: seconds and tokens (those of prompts too) of a step, and tokens since the start.
SPENT: Mapping[str, tuple[str, ...]] = {
    "seconds": ("step_time", "timing_s/step", "perf/time_per_step"),
    "tokens": ("perf/total_num_tokens",),
}
TOKENS_SO_FAR = ("num_tokens", "progress/total_tokens")

#: verl's largest and smallest reward of a step. Where they are equal no group has a gradient.
EXTREMES = ("critic/score/max", "critic/score/min")
#: TRL's standard deviation of all rewards of a step; 0 says the same.
SPREAD = "reward_std"

#: Prefixes that trackers add to a name.
_PREFIX = re.compile(r"^(train|trainer|metrics?|Train)/")


def our_metrics(row: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    """One row of a log under rlstab's names: for each the name in the log, and the value as rlstab would log it.

    Args:
        row: values by the names of the log, NaN and Inf among them.
    """
    bare = {_PREFIX.sub("", name): (name, value) for name, value in row.items()}
    metrics: dict[str, tuple[str, float]] = {}
    for ours, others in ALIASES.items():
        name = next((name for name in (ours, *others) if name in bare), None)
        if name is not None:
            logged, value = bare[name]
            metrics[ours] = logged, 1.0 - value if name in COMPLEMENTS else value
    for ours, parts in SUMS.items():
        there = [part for part in parts if part in bare]
        if ours not in metrics and there:
            metrics[ours] = " + ".join(bare[part][0] for part in there), sum(bare[part][1] for part in there)
    for ours, other in _TABLE["stand_ins"].items():
        if ours not in metrics and other in bare:
            metrics[ours] = bare[other]
    if "reward/zero_std_groups" not in metrics:
        metrics |= _no_spread(bare)
    return metrics | {name: bare[name] for name in _TABLE["alone"] if name in bare}


def _no_spread(bare: Mapping[str, tuple[str, float]]) -> dict[str, tuple[str, float]]:
    """A lower bound of the share of groups with equal rewards: 1 if all rewards of the step are equal, else 0."""
    high, low = map(bare.get, EXTREMES)
    if high and low:
        return {"reward/zero_std_groups": (f"{high[0]} = {low[0]}", float(high[1] == low[1]))}
    if spread := bare.get(SPREAD):
        return {"reward/zero_std_groups": (f"{spread[0]} = 0", float(spread[1] == 0))}
    return {}


def our_evaluation(row: Mapping[str, float]) -> dict[str, float]:
    """What a row of a log says of an evaluation, under our names."""
    found = ((ours, name) for ours, pattern in EVALUATIONS.items() for name in row if pattern.fullmatch(name))
    return {ours: row[name] for ours, name in reversed(list(found))}


def spent(row: Mapping[str, float], names: Iterable[str]) -> float | None:
    """The first of some names that a row has, whatever a tracker put before it."""
    bare = {_PREFIX.sub("", name): value for name, value in row.items()}
    return next((bare[name] for name in names if name in bare), None)


def known(names: Iterable[str]) -> bool:
    """Whether a log with these names has a known metric."""
    return bool(our_metrics(dict.fromkeys(names, 0.5)).keys() - {"lr"})
