"""What a run is judged by: one number per run, each with its definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlstab.errors import ReportError, did_you_mean
from rlstab.report.bins import binned, weights
from rlstab.report.model import RunRecord

#: After the name of a metric: its mean over all rollouts.
AREA = "/area"


@dataclass(frozen=True)
class Outcome:
    """One number of a run.

    Attributes:
        name: such as ``eval/mean`` or ``reward/area``.
        title: for headings.
        text: its definition.
        unit: such as ``nats``; empty for rewards and shares.
    """

    name: str
    title: str
    text: str
    unit: str = ""


def known_outcomes(runs: Iterable[RunRecord]) -> list[Outcome]:
    """Those that at least one of the runs can have, the main one first."""
    runs = list(runs)
    evaluated = {name for run in runs for one in run.evaluations for name in one}
    ks = sorted(int(name.rpartition("@")[2]) for name in evaluated if re.fullmatch(r"eval/pass@\d+", name))
    found = [
        Outcome(
            "eval/mean",
            "held-out reward",
            "mean reward of sampled responses to held-out prompts, last evaluation",
        ),
        *(
            Outcome(
                f"eval/pass@{k}",
                f"held-out pass@{k}",
                f"share of held-out prompts that at least one of {k} samples solves in the last evaluation",
            )
            for k in ks
        ),
        Outcome(
            "eval/greedy",
            "held-out reward, greedy",
            "mean reward of greedy responses to held-out prompts, last evaluation",
        ),
        Outcome(
            "eval/entropy",
            "held-out entropy",
            "mean token entropy of sampled responses to held-out prompts, last evaluation",
            "nats",
        ),
        Outcome("reward/area", "training reward, whole run", "mean of reward/mean over all rollouts"),
        Outcome(
            "reward/best",
            "training reward, best",
            "highest mean of reward/mean over ten rollouts; noise alone raises it",
        ),
        Outcome(
            "reward/last",
            "training reward, last tenth",
            "mean of reward/mean over the last tenth of the rollouts, in whole tens",
        ),
    ]
    trained = any("reward/mean" in run.metrics for run in runs)
    if any("reward/true" in run.metrics for run in runs):
        text = "mean of reward/true over all rollouts, which is reward/mean before a flaky grader lost scores"
        found.insert(-3, Outcome("reward/true/area", "training reward before the flaky grader, whole run", text))
    return [one for one in found if (trained if one.name.startswith("reward/") else one.name in evaluated)]


def chosen_outcomes(runs: Iterable[RunRecord], names: Sequence[str]) -> list[Outcome]:
    """The named ones; a metric of ``metrics.jsonl`` stands for its mean over the last tenth of the rollouts.

    With ``/area`` after it, a metric stands for its mean over all rollouts.

    Raises:
        ReportError: no run has it.
    """
    runs = list(runs)
    known = {one.name: one for one in known_outcomes(runs)}
    if not names:
        return list(known.values())
    metrics = {name for run in runs for name in run.metrics}
    evaluated = {name for run in runs for one in run.evaluations for name in one if name != "rollout"}
    found = []
    for name in dict.fromkeys(names):
        if name in known:
            found.append(known[name])
        elif name in evaluated:
            found.append(Outcome(name, name, f"{name} in the last evaluation"))
        elif name in metrics:
            found.append(Outcome(name, name, f"mean of {name} over the last tenth of the rollouts, in whole tens"))
        elif name.removesuffix(AREA) in metrics:
            found.append(Outcome(name, name, f"mean of {name.removesuffix(AREA)} over all rollouts"))
        else:
            known_names = {*known, *metrics, *evaluated, *(f"{one}{AREA}" for one in metrics)}
            raise ReportError(f"--metric {name}: no run has it. {did_you_mean(name, known_names)}")
    return found


def outcome_of(run: RunRecord, name: str) -> float | None:
    """The number of a finished run; None if it was not measured, or the run did not end."""
    if run.status != "finished":
        return None
    if name in DERIVED:
        return DERIVED[name](run)
    if name.startswith("eval/"):
        # an evaluation before the end is not that of the end
        last = run.evaluations[-1] if run.evaluations else {}
        return last.get(name) if last.get("rollout") == run.rollouts else None
    if name not in run.metrics and name.endswith(AREA):
        return _area(run, name.removesuffix(AREA))
    return last_tenth(run, name)


def last_tenth(run: RunRecord, name: str) -> float | None:
    """Mean of a metric over the last tenth of the rollouts, rounded up to whole bins of ten."""
    ends, values = binned(run, name)
    if not len(values):
        return None
    inside = ends > run.rollouts - max(1, run.rollouts // 10)
    if not inside.any():
        return None
    return float(np.average(values[inside], weights=weights(run, ends)[inside]))


def _area(run: RunRecord, name: str = "reward/mean") -> float | None:
    ends, values = binned(run, name)
    return float(np.average(values, weights=weights(run, ends))) if len(values) else None


def _best(run: RunRecord) -> float | None:
    ends, values = binned(run, "reward/mean")
    # the last bin may hold a few rollouts only, whose mean is noisier
    whole = weights(run, ends) == weights(run, ends).max() if len(values) else values
    return float(values[whole].max()) if len(values) else None


DERIVED: dict[str, Callable[[RunRecord], float | None]] = {
    "reward/area": _area,
    "reward/best": _best,
    "reward/last": lambda run: last_tenth(run, "reward/mean"),
}
