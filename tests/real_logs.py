"""Logs of real runs that other people published: figures by step, and what became of the reward.

``tests/data/real_logs/sources.json`` names each log, its repository, its license, and its outcome. The figures are
not in the repository. They are read from ``logs.json.gz`` in the folder of ``RLSTAB_REAL_LOGS``, or in
``tests/data/real_logs``; where there is none, :func:`real_logs` yields nothing and a test that needs them skips.

The repositories are split in two by a hash of their names, before any verdict on their logs was looked at: thresholds
may be chosen on ``seen``, and are tried on ``kept_aside`` afterwards.
"""

import functools
import gzip
import hashlib
import json
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "tests" / "data" / "real_logs" / "sources.json"
#: File of the figures: columns by the name of a log.
FIGURES = "logs.json.gz"
SPLITS = ("seen", "kept_aside")
#: Repositories whose logs could be looked at before the others were collected.
OPEN = ("Sunshine535/nips-grpo-dynamics", "qhy991/GRPO-Clean-2", "Rusheel86/Chaos-Economy")
#: The first salt with about half of the logs, of the repositories, and of the runs that lost reward on either side.
SALT = 51
#: Names of the reward of a line, the first that a log has.
REWARDS = ("reward", "critic/score/mean")

Row = Mapping[str, float]


def split_of(repository: str, path: str) -> str:
    """The side of a log: that of its repository; consoles of the open repositories came last and are kept aside."""
    if repository in OPEN:
        return "kept_aside" if path.endswith((".log", ".txt")) else "seen"
    digest = hashlib.sha256(f"{SALT}/{repository}".encode()).hexdigest()
    return "kept_aside" if int(digest, 16) % 2 else "seen"


@dataclass(frozen=True, kw_only=True)
class RealLog:
    """One published run.

    Attributes:
        name: of the log.
        split: ``seen`` or ``kept_aside``.
        repository: that published it.
        outcome: of the reward, see :func:`outcome`.
        ended: ``died`` or ``nan`` where the log shows it.
        last_over_best: see :func:`last_over_best`.
        source: all that ``sources.json`` says.
        rows: one for each logged step, under the names of the trainer.
    """

    name: str
    split: str
    repository: str
    outcome: str
    ended: str | None
    last_over_best: float
    source: Mapping[str, Any]
    rows: Sequence[Row]

    def write(self, folder: Path) -> Path:
        """Write it as JSON lines, as TRL, verl and loggers of JSON lines do."""
        return write_rows(self.rows, folder / f"{self.name.replace('/', '-')}.jsonl")

    def shuffled(self, seed: int) -> list[Row]:
        """Its lines in random order, each under the step of the line whose place it takes."""
        order = random.Random(seed).sample(range(len(self.rows)), len(self.rows))
        return [{**self.rows[line], "step": row["step"]} for line, row in zip(order, self.rows, strict=True)]


def write_rows(rows: Sequence[Row], path: Path) -> Path:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def rewards_of(rows: Sequence[Row]) -> list[float]:
    """The finite rewards of a log, by line."""
    name = next((name for name in REWARDS if sum(name in row for row in rows) >= 6), REWARDS[0])
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _quarters(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the first, last and best quarter: from 0, or from the lowest reward if the first is not above 0."""
    lines, length = len(rewards), max(1, len(rewards) // 4)
    first, last = (sum(part) / length for part in (rewards[:length], rewards[-length:]))
    parts = (rewards[i * lines // 4 : (i + 1) * lines // 4] for i in range(4))
    best = max(sum(part) / len(part) for part in parts if part)
    lowest = min(rewards) if first <= 0 else 0.0
    return first - lowest, last - lowest, best - lowest


def outcome(rewards: Sequence[float]) -> str:
    """What became of the reward from the first to the last quarter of a log.

    Returns:
        ``lost`` (below half), ``fell`` (below 0.85), ``rose`` (above 1 / 0.85) or ``kept``.
    """
    first, last, _ = _quarters(rewards)
    if first <= 0:
        return "rose" if last > 0 else "kept"
    share = last / first
    return "lost" if share < 0.5 else "fell" if share < 0.85 else "kept" if share <= 1 / 0.85 else "rose"


def last_over_best(rewards: Sequence[float]) -> float:
    """The mean reward of the last quarter of a log over that of its best quarter."""
    _, last, best = _quarters(rewards)
    return last / best if best > 0 else 1.0


def sources() -> list[dict[str, Any]]:
    """What is known of each log without its figures."""
    loaded: list[dict[str, Any]] = json.loads(SOURCES.read_text())
    return loaded


def figures() -> Mapping[str, Sequence[Row]]:
    """The rows of every log that is at hand, by name."""
    return _figures(os.environ.get("RLSTAB_REAL_LOGS"))


@functools.cache
def _figures(folder: str | None) -> Mapping[str, Sequence[Row]]:
    path = (Path(folder) if folder else SOURCES.parent) / FIGURES
    loaded = json.loads(gzip.decompress(path.read_bytes())) if path.is_file() else {}
    return {name: _rows(columns) for name, columns in loaded.items()}


def _rows(columns: Mapping[str, Sequence[float | None]]) -> list[Row]:
    names = tuple(columns)
    lines = zip(*columns.values(), strict=True)
    return [{name: value for name, value in zip(names, line, strict=True) if value is not None} for line in lines]


def real_logs(split: str | None = None) -> Iterator[RealLog]:
    """Every log whose figures are at hand.

    Args:
        split: ``seen`` or ``kept_aside``; None for both.
    """
    rows = figures()
    for source in sources():
        name = source["name"]
        if name in rows and split in (None, source["split"]):
            known = {key: source[key] for key in ("split", "repository", "outcome", "ended", "last_over_best")}
            yield RealLog(name=name, source=source, rows=rows[name], **known)
