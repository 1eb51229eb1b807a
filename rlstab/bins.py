"""Curves of a run, and their means over bins of ten rollouts.

Bins of ten rollouts are smooth enough to read, and the same from a run folder and from a results file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Rollouts of one bin. Statistics and signs read bins, so a results file gives the same as the folders of its runs.
WIDTH = 10

#: No run is longer: a rollout beyond it is damage, and would not fit into an array either.
MOST_ROLLOUTS = 10**9

#: Rollouts (int64) and values (float64), of equal length.
Curve: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]

EMPTY: Curve = (np.array([], dtype=np.int64), np.array([], dtype=np.float64))


@dataclass(frozen=True)
class Sign:
    """The judgement of one detector about one run.

    Attributes:
        name: a key of :data:`rlstab.signs.SIGNS`.
        fired: whether the sign is present; None if the curves do not say.
        step: the step at which it begins; None if it is absent.
        text: the values in words, or why it could not be judged.
        share: the remaining share of something that falls: of the reward, of the answers that end.
        harm: whether the run itself was hurt: reward, held-out score or finished answers were lost, values are NaN, or
            nothing can be learnt. Any other sign is an observation.
        from_start: whether it is present in the first line of the log.
    """

    name: str
    fired: bool | None
    step: int | None
    text: str
    share: float | None = None
    harm: bool = False
    from_start: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """One run, finished or not, of any trainer: its curves under rlstab's names.

    Attributes:
        path: its file or folder, with the name of the run in a table; ``FILE:LINE`` of a results file.
        writer: the trainer or tracker that wrote it, such as ``TRL``.
        unit: what a step is, ``rollout`` or ``step``.
        metrics: curves by name, without ``seconds/*``, from step 1 on.
        names: the names in the log, by rlstab's name.
        evaluations: records with ``eval/*`` and ``rollout``, first to last; floats of 6 significant digits.
        bin_width: rollouts behind one value of ``metrics``; 1 where each was read.
        largest: highest value of each bin of 10 rollouts, for metrics that are themselves a largest value.
        spent: the total by unit (``seconds`` or ``tokens``) up to the last rollout of each bin of 10. Seconds are those
            of the rollouts themselves, so that neither evaluations nor a pause before a resume count; tokens are those
            sampled. A unit that some rollout did not record is left out.
        ended: whether it made all steps that it planned; None if that is not known.
        config: the settings of a run of rlstab; empty for others, and if the file is missing or damaged.
        judged: signs by detector, judged on every rollout, of a run that a results file keeps in bins of ten.
        not_finite: metrics of which a reader left out values that were NaN, Inf or null.
        remarks: what could not be read or was changed, and why.
    """

    path: str = ""
    writer: str = "rlstab"
    unit: str = "rollout"
    metrics: dict[str, Curve]
    names: Mapping[str, str] = field(default_factory=dict)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    bin_width: int = 1
    largest: dict[str, Curve] = field(default_factory=dict)
    spent: dict[str, Curve] = field(default_factory=dict)
    ended: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Sign] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    bins: dict[str, Curve] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def rollouts(self) -> int:
        """Last rollout with metrics; 0 without any."""
        return max((int(rollouts[-1]) for rollouts, _ in self.metrics.values() if len(rollouts)), default=0)

    def setting_at(self, path: str) -> Any:
        """The value at a dotted path of the settings; None if there is none."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def planned(self) -> int | None:
        """Rollouts that the settings ask for."""
        planned = self.setting_at("optimisation.rollouts")
        return planned if isinstance(planned, int) else None


@lru_cache(2**16)  # a run that is watched has the same bins at each line
def rounded(value: float) -> float:
    """To the 6 significant digits of a results file."""
    return float(f"{value:.6g}")


def binned(record: Run, name: str) -> Curve:
    """Means of a metric over bins of rollouts; a bin without a finite value is left out.

    Returns:
        ends: last rollout of each bin that the run reached.
        values: means over the rollouts of the bin that have the metric, of 6 significant digits.
    """
    if name not in record.bins:  # asked for again and again
        rollouts, values = record.metrics.get(name, EMPTY)
        finite = np.isfinite(values)
        curve = rollouts[finite], values[finite]
        record.bins[name] = curve if record.bin_width > 1 else in_bins(curve, record.rollouts)
    return record.bins[name]


def evaluated(record: Run, name: str) -> Curve:
    """A metric as it was evaluated, ``eval/...``: rollouts, and values."""
    values = {line["rollout"]: line[name] for line in record.evaluations if {name, "rollout"} <= line.keys()}
    return np.array(list(values), dtype=np.int64), np.array(list(values.values()), dtype=np.float64)


def bin_weights(bin_width: int, ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Number of rollouts in each bin that ends at one of ``ends``; the last may have fewer than the others."""
    width = bin_width if bin_width > 1 else WIDTH
    return ((ends - 1) % width + 1).astype(np.float64)


def last_tenth(record: Run, name: str) -> float | None:
    """Mean of a metric over the last tenth of the rollouts, in whole bins of ten; None if there is no value."""
    ends, values = binned(record, name)
    last = ends > record.rollouts - max(1, record.rollouts // 10)
    return float(np.average(values[last], weights=bin_weights(record.bin_width, ends[last]))) if last.any() else None


def in_bins(curve: Curve, last: int, *, largest: bool = False) -> Curve:
    """The mean, or the largest value, of each bin of ``WIDTH`` rollouts, ``last`` ending the run.

    Only finite values count; empty bins are left out.
    """
    rollouts, values = curve
    finite = np.isfinite(values)
    rollouts, values = rollouts[finite], values[finite]
    if not len(values):
        return EMPTY
    bins = (rollouts - 1) // WIDTH
    starts = np.concatenate(([0], np.flatnonzero(bins[1:] != bins[:-1]) + 1))
    ends = np.minimum((bins[starts] + 1) * WIDTH, last)
    counts = np.concatenate((starts[1:], [len(bins)])) - starts
    summaries = np.maximum.reduceat(values, starts) if largest else np.add.reduceat(values, starts) / counts
    return ends.astype(np.int64), np.array(list(map(rounded, summaries.tolist())), dtype=np.float64)


def running_total(curve: Curve, last: int) -> Curve | None:
    """The sum of a metric up to the end of each bin; None unless each rollout from 1 to ``last`` has a value."""
    rollouts, values = curve
    if not last or len(rollouts) != last or not np.isfinite(values).all():
        return None
    return at_ends(rollouts, np.cumsum(values), last)


def at_ends(rollouts: Any, totals: Any, last: int) -> Curve:
    """Totals up to some rollouts, interpolated to the end of each bin of ``WIDTH``."""
    ends = np.unique(np.minimum(np.arange(WIDTH, last + WIDTH, WIDTH), last)).astype(np.int64)
    return ends, np.array(list(map(rounded, np.interp(ends, rollouts, totals).tolist())), dtype=np.float64)
