"""How far a run is, read from the end of its metrics while it writes them."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

#: Rollouts over which what is shown is averaged; one alone says little.
WIDTH = 10


class Follower:
    """Reads the new lines of a ``metrics.jsonl`` at each look.

    Attributes:
        rollout: rollouts completed.
        evaluation: the last evaluation's mean, or None.
        pace: wall seconds per rollout, evaluations included, in those that were seen; None before the first.
    """

    def __init__(self, folder: Path) -> None:
        self.rollout, self.evaluation, self.pace = 0, None, None
        self._path, self._offset = folder / "metrics.jsonl", 0
        self._rest = b""
        self._seconds, self._seen = 0.0, 0
        self._last: dict[str, deque[float]] = {}

    rollout: int
    evaluation: float | None
    pace: float | None

    def look(self) -> None:
        """Read what came since the last look."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:  # the run has not begun to write
            return
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except ValueError:  # a continued run may have cut the file under our eyes
                continue

    def mean(self, name: str) -> float | None:
        """A metric over the last ten rollouts."""
        values = self._last.get(name)
        return sum(values) / len(values) if values else None

    def _take(self, values: dict[str, Any]) -> None:
        self.rollout = max(self.rollout, int(values["rollout"]))
        self.evaluation = values.get("eval/mean", self.evaluation)
        self._seconds += values.get("seconds/rollout", 0.0) + values.get("seconds/evaluate", 0.0)
        for name in ("reward/mean", "tokens/entropy"):
            if name in values:
                self._last.setdefault(name, deque(maxlen=WIDTH)).append(values[name])
        if "seconds/rollout" in values:
            self._seen += 1
            self.pace = self._seconds / self._seen
