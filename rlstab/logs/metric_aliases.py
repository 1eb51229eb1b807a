"""The metrics of a log of any trainer under rlstab's names, by ``metric_aliases.yaml``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

#: Prefixes that trackers add to a name.
_PREFIX = re.compile(r"^(train|trainer|metrics?|Train)/")


class Line(NamedTuple):
    """One line of a log under rlstab's names.

    Attributes:
        metrics: by rlstab's name, the name in the log, and the value as rlstab would log it.
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
    if "reward/zero_std_groups" not in metrics:
        metrics |= _no_spread(bare)
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


def known(names: Iterable[str]) -> bool:
    """Whether a log with these names has a known metric of the training."""
    return bool(translated(dict.fromkeys(names, 0.5)).metrics.keys() - BESIDE)
