"""How everything here is timed: cases take turns in one process, and are judged by CPU-seconds and ratios.

A shared machine is noisy. So all cases of a comparison run in one process, in an order that rotates each repetition,
with a bare matrix product of the same shape between them; the least CPU-seconds of the repetitions count, and a time
over that of the product (its G) means much the same on machines of one kind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "performance.jsonl"
SEED = 0

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        run: what is timed; takes what ``prepare`` made.
        prepare: what it needs and is not timed, such as the forward of a backward.
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = field(default=lambda: None)


@dataclass
class Times:
    """Seconds of one case, an entry per repetition."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def ratio_to(self, other: Times) -> float:
        """Median over repetitions of how many times longer the other one took in the same repetition."""
        return statistics.median(b / a for a, b in zip(self.cpu, other.cpu, strict=True))


def rotated(names: list[str], turn: int) -> list[str]:
    """Each repetition begins with another case, since a case inherits the caches of the one before it."""
    start = turn % len(names)
    return names[start:] + names[:start]


def interleave(
    cases: Mapping[str, Case],
    repeat: int,
    unit: Callable[[], Any] | None = None,
    *,
    cpu_clock: Callable[[], float] = time.process_time,
    wall_clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Times], Times]:
    """Time every case ``repeat`` times, in turns; second, the unit, which runs before each of them."""
    times, units, names = {name: Times() for name in cases}, Times(), list(cases)

    def clock(case: Case, into: Times) -> None:
        ready = case.prepare()
        wall, cpu = wall_clock(), cpu_clock()
        case.run(ready)
        into.cpu.append(cpu_clock() - cpu)
        into.wall.append(wall_clock() - wall)

    if unit is not None:
        unit()
    for turn in range(repeat):
        for name in rotated(names, turn):
            if unit is not None:
                clock(Case(lambda _: unit()), units)
            clock(cases[name], times[name])
    return times, units


def measured(times: Mapping[str, Times], units: Times) -> dict[str, Record]:
    """What a record says of each case: least CPU-seconds, median wall seconds, G units, paired ratios to the others."""
    gemm = min(units.cpu, default=0.0)
    return {
        name: {
            "cpu_s": min(timed.cpu),
            "wall_s": statistics.median(timed.wall),
            "g_units": min(timed.cpu) / gemm if gemm else None,
            "ratio_to": {other: timed.ratio_to(theirs) for other, theirs in times.items() if other != name},
            "repeat": len(timed.cpu),
        }
        for name, timed in times.items()
    }


class Disagreement(AssertionError):
    """Two cases do not compute the same thing, so timing them against each other would mean nothing."""


def assert_agree(who: str, values: Tensor, reference: Tensor, *, allowed: float, relative: bool) -> float:
    """The error of ``found``: largest absolute difference, or relative L2 distance.

    Raises:
        Disagreement: it is above ``allowed``, or NaN.
    """
    distance = error(values, reference, relative=relative)
    if not distance <= allowed:
        raise Disagreement(f"{who}: {'relative' if relative else 'absolute'} error {distance:.1e} > {allowed:.1e}")
    return distance


def error(values: Tensor, reference: Tensor, *, relative: bool) -> float:
    """Largest absolute difference, or L2 distance relative to the reference (absolute where that is 0)."""
    difference = values.detach().double() - reference.detach().double()
    if not relative:
        return float(difference.abs().max()) if difference.numel() else 0.0
    size = float(reference.detach().double().norm())
    return float(difference.norm()) / (size or 1.0)


# -- where and with what ---------------------------------------------------------------------------------------------


def cpu_model() -> str:
    """As the kernel names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what takes part in a comparison, if it is there."""
    versions = {"python": platform.python_version()}
    for name in ("rlstab", "torch", "transformers", "trl", "liger-kernel", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str:
    """The commit of this clone, marked where the tree differs from it; empty outside of a clone."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip()


def surroundings() -> Record:
    """What a figure cannot be compared without."""
    return {
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT", ""),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "commit": commit(),
        "seed": SEED,
    }


class Run:
    """One run of a benchmark: its records, which share an identity, and where they are kept.

    Args:
        benchmark: its name.
        keep: the JSONL file to append to, or None.
    """

    def __init__(self, benchmark: str, keep: Path | None) -> None:
        self.benchmark, self.keep, self.console = benchmark, keep, Console()
        self.records: list[Record] = []
        now = datetime.now(UTC)
        self._shared: Record = {
            "benchmark": benchmark,
            "run": f"{now:%Y%m%dT%H%M%S}-{os.getpid()}",
            "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            **surroundings(),
        }

    def say(self) -> None:
        """The line above a table."""
        said = self._shared
        of = ", ".join(f"{name} {version}" for name, version in said["versions"].items())
        self.console.print(
            f"{self.benchmark}: {said['machine']}; {said['threads']} thread(s), OMP_WAIT_POLICY="
            f"{said['omp_wait_policy'] or '-'}, GOMP_SPINCOUNT={said['gomp_spincount'] or '-'}, load "
            f"{said['load']:.1f}; {of}; commit {said['commit']}; seed {said['seed']}",
            highlight=False,
        )

    def add(self, case: str, **values: Any) -> Record:
        """Record a case, and keep it at once: a long run that is interrupted keeps what it has."""
        record = {**self._shared, "case": case, **values}
        self.records.append(record)
        if self.keep is not None:
            append([record], self.keep)
        return record


def append(records: Iterable[Record], path: Path) -> None:
    """One line a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(path: Path) -> list[Record]:
    """All records of a file, oldest first; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# -- options that all share ------------------------------------------------------------------------------------------


def parser(about: str | None, *, repeat: int) -> argparse.ArgumentParser:
    """With the options of every benchmark."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeat", type=int, default=repeat, help=f"repetitions of each case (default: {repeat})")
    made.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    made.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=RESULTS,
        help=f"append a line per case to this file (without a name: {RESULTS.relative_to(ROOT)})",
    )
    return made


def listed(text: str) -> list[str]:
    """Comma-separated words."""
    return [part.strip() for part in text.split(",") if part.strip()]


def child(module: str, arguments: Mapping[str, Any], *, timeout: float = 3600) -> Any:
    """What a fresh process of this interpreter prints as its last line, in JSON, when given arguments in JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {json.dumps(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
