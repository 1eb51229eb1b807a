"""The metrics of a log of any trainer under rlstab's names, by ``metric_aliases.yaml``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlstab.signs import TOTALS

_TABLE: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
#: Names of other trainers by rlstab's name, in the order of preference.
ALIASES: Mapping[str, list[str]] = _TABLE["names"]
#: Names whose value is one minus that of rlstab.
COMPLEMENTS: list[str] = _TABLE["complements"]
#: Metrics of rlstab that are sums of other rlstab metrics.
SUMS: Mapping[str, list[str]] = _TABLE["sums"]
#: Names of the loss of an optimizer step.
LOSSES: list[str] = _TABLE["losses"]

#: Names of a run's cost, by unit: seconds and tokens (with those of prompts) of a step, and tokens since the start.
SPENT: Mapping[str, tuple[str, ...]] = {
    "seconds": ("step_time", "timing_s/step", "perf/time_per_step"),
    "tokens": ("perf/total_num_tokens",),
}
TOKENS_SO_FAR = ("num_tokens", "progress/total_tokens")

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

#: Prefixes that trackers add to a name.
_PREFIX = re.compile(r"^(train|trainer|metrics?|Train)/")


def _bare(row: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    """By name without the prefix of a tracker or a notebook's spaces, the name in the log and the value."""
    return {_PREFIX.sub("", name.replace(" / ", "/")): (name, value) for name, value in row.items()}


def our_metrics(row: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    """One row of a log under rlstab's names: for each the name in the log, and the value as rlstab would log it.

    The held-out score is left out: see :func:`scores_in`.

    Args:
        row: values by the names of the log, including NaN and Inf.
    """
    bare = _bare(row)
    metrics: dict[str, tuple[str, float]] = {}
    for ours, others in ALIASES.items():
        name = next((name for name in (ours, *others) if name in bare), None)
        if name is not None and ours != SCORE:
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
    for name in bare:
        if (part := PART.fullmatch(name)) and (ours := f"reward/{part[1] or part[2] or part[3]}") not in TOTALS:
            metrics[ours] = bare[name]
    metrics |= {name: bare[name] for name in _TABLE["alone"] if name in bare}
    computed = [metrics["gradient/norm"]] if "gradient/norm" in metrics else []
    computed += [bare[name] for name in LOSSES if name in bare]
    if computed and "optimizer_steps/refused" not in metrics:
        name, value = min(computed, key=lambda logged: math.isfinite(logged[1]))
        metrics["optimizer_steps/refused"] = name, float(not math.isfinite(value))
    return metrics


def scores_in(row: Mapping[str, float]) -> dict[str, float]:
    """The held-out scores of a row by their names in the log, of which a run may have several."""
    return {name: value for bare, (name, value) in _bare(row).items() if bare in _SCORES or HELD_OUT.fullmatch(bare)}


def preference(score: str) -> tuple[int, str]:
    """The order of held-out scores that a log has equally often: those of known names, then by name."""
    bare = _PREFIX.sub("", score)
    return _SCORES.index(bare) if bare in _SCORES else len(_SCORES), score


def _no_spread(bare: Mapping[str, tuple[str, float]]) -> dict[str, tuple[str, float]]:
    """A lower bound of the share of groups with equal rewards: 1 if all rewards of the step are equal, else 0."""
    high, low = map(bare.get, EXTREMES)
    if high and low:
        return {"reward/zero_std_groups": (f"{high[0]} = {low[0]}", float(high[1] == low[1]))}
    if spread := next((bare[name] for name in SPREADS if name in bare), None):
        return {"reward/zero_std_groups": (f"{spread[0]} = 0", float(spread[1] == 0))}
    return {}


def spent(row: Mapping[str, float], names: Iterable[str]) -> float | None:
    """The first of some names that a row has, without a tracker's prefix."""
    bare = _bare(row)
    return next((bare[name][1] for name in names if name in bare), None)


def known(names: Iterable[str]) -> bool:
    """Whether a log with these names has a known metric of the training."""
    return bool(our_metrics(dict.fromkeys(names, 0.5)).keys() - BESIDE)
