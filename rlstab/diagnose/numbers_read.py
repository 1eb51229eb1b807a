"""Numbers as trainers and trackers write them."""

from __future__ import annotations

import math
from typing import Any

#: What trainers and trackers call the number of a step, the likeliest first: wandb's own count is of calls to its log.
STEPS = ("rollout", "train/global_step", "global_step", "training/global_step", "step", "Step", "_step")


def number(raw: Any) -> float | None:
    """A value of a log; NaN for what was there and not finite, None for what is no number.

    JSON has neither NaN nor Inf, and who writes them as null means them.
    """
    if raw is None:
        return math.nan
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    return float(raw) if isinstance(raw, float) or abs(raw) < 10**300 else None


def written_number(cell: str) -> float | None:
    """A cell of a table; None where it is empty or text."""
    try:
        return float(cell)
    except ValueError:
        return None
