"""A run of another trainer: its curves, evaluations and costs under rlstab's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlstab.bins import WIDTH, Curve, rounded
from rlstab.errors import ReportError
from rlstab.logs.log import Log, curves_of
from rlstab.logs.metric_aliases import SCORE, SPENT, TOKENS_SO_FAR, spent
from rlstab.logs.readers import read_file, read_folder, text_at

#: Share of the steps after which the log may stop recording the cost.
ENOUGH = 0.9


@dataclass(frozen=True)
class Logged:
    """A run of another trainer.

    Attributes:
        facts: fields of a record of a report, such as ``metrics`` and ``evaluations``.
        ended: whether it made all steps that it planned; None if the log does not say how many.
        remarks: what was left out.
    """

    facts: dict[str, Any]
    ended: bool | None
    remarks: tuple[str, ...]


def read_foreign(folder: Path, console: Path) -> Logged:
    """The run in the output folder of a trainer, or, if that has no log, in the trainer's printed output.

    Raises:
        ReportError: neither has a known metric.
    """
    try:
        return _logged(read_folder(folder))
    except ReportError:
        if console.is_file():
            with suppress(ReportError):
                return _logged(read_file(console, text_at(console))[0])
        raise


def _logged(log: Log) -> Logged:
    curves = curves_of(log.rows, log.unit)
    last = curves.rollouts
    evaluations = [  # with those at step 0, which no curve has
        {"rollout": min(step, last), SCORE: rounded(score)}
        for step, score in zip(*map(np.ndarray.tolist, curves.scores), strict=True)
    ]
    facts = {
        "metrics": curves.metrics,
        "evaluations": evaluations,
        "spent": _spent(log.rows, curves.shift, last),
        "sparse": True,
    }
    ended = None if log.planned is None else max(log.rows) + curves.shift >= log.planned
    return Logged(facts, ended, (*log.remarks, *curves.changes))


def _spent(rows: Mapping[int, Mapping[str, float]], shift: int, last: int) -> dict[str, Curve]:
    """The cost up to the end of each bin; each line of a log stands for the steps since the previous one."""
    ends = np.unique(np.minimum(np.arange(WIDTH, last + WIDTH, WIDTH), last)).astype(np.int64)
    curves: dict[str, Curve] = {}
    for unit, names in SPENT.items():
        steps, totals = [0], [0.0]
        for step, row in sorted(rows.items()):
            total = spent(row, TOKENS_SO_FAR) if unit == "tokens" else None
            if total is None and (each := spent(row, names)) is not None:
                total = totals[-1] + each * (step + shift - steps[-1])
            if total is not None and math.isfinite(total) and total >= totals[-1]:
                steps.append(step + shift)
                totals.append(total)
        if steps[-1] >= ENOUGH * last > 0:
            steps, totals = [*steps, last], [*totals, totals[-1] * max(1.0, last / steps[-1])]
            curves[unit] = ends, np.array([rounded(float(value)) for value in np.interp(ends, steps, totals)])
    return curves
