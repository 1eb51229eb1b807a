"""The text about each cause: its usual reasons, what to check, and which methods address it."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from rlstab.report.formatting import estimate, size

FILE = Path(__file__).with_name("remedies.yaml")
#: Comparisons of the benches whose results are kept; written by ``python -m benchmarks evidence``.
EVIDENCE = Path(__file__).with_name("evidence.json")


@dataclass(frozen=True)
class Figure:
    """One method against its baseline in one outcome of one bench.

    Attributes:
        bench, setting, method, baseline: their names.
        outcome: what is compared, such as ``eval/entropy``.
        unit: such as ``nats``; empty for rewards and shares.
        seeds: the number of seeds in both.
        difference, low, high: mean of method minus baseline with its 95 % interval; None if too few seeds have it.
        verdict: the words of the page; ``higher`` does not mean better.
        task: the task on which the bench trains.
        command: the command that repeats the bench.
        page: the path of the page with the whole comparison, from the root of the repository.
    """

    bench: str
    setting: str
    method: str
    baseline: str
    outcome: str
    unit: str
    seeds: int
    difference: float | None
    low: float | None
    high: float | None
    verdict: str
    task: str
    command: str
    page: str

    @property
    def told(self) -> str:
        """``eval/entropy higher by 0.078 [0.053, 0.103] nats``."""
        if self.difference is None or self.verdict == "identical":
            return f"{self.outcome} {self.verdict}"
        if self.verdict in ("higher", "lower"):
            return f"{self.outcome} {self.verdict} by {size(self.difference, self.low, self.high, self.unit)}"
        difference = estimate(self.difference, self.low, self.high) + (f" {self.unit}" if self.unit else "")
        return f"{self.outcome} {self.verdict} ({difference})"


@cache
def figures() -> Mapping[str, tuple[Figure, ...]]:
    """Figures by the key of a comparison: see :func:`key`."""
    return TypeAdapter(Mapping[str, tuple[Figure, ...]]).validate_json(EVIDENCE.read_bytes())


def key(comparison: Mapping[str, Any]) -> str:
    """The key of a comparison, an entry of ``evidence`` in remedies.yaml."""
    return f"{comparison['file']}, {comparison['setting']}"


def _evidence(comparisons: list[Mapping[str, Any]]) -> Iterator[tuple[str, list[Figure]]]:
    """The methods in some comparisons, each with its figures in the order of the outcomes."""
    for comparison in comparisons:
        results = {(figure.method, figure.outcome): figure for figure in figures()[key(comparison)]}
        for method in comparison["methods"]:
            yield method, [results[method, outcome] for outcome in comparison["outcomes"]]


@dataclass(frozen=True)
class Remedy:
    """One cause.

    Attributes:
        cause: its name, a value of :data:`CAUSES`.
        title: the heading.
        looks: what it looks like in the metrics.
        likely: its usual reasons.
        first: what to try before any method.
        settings: the settings to check, by trainer.
        sources: what makes training unstable, keys of :data:`rlstab.core.metadata.SOURCES`.
        methods: the methods that address the cause, the closest first, then all others that address one of the sources.
        stages: the stages that address the cause.
        evidence: comparisons: name in the bench, and figures.
    """

    cause: str
    title: str
    looks: str
    likely: tuple[str, ...]
    first: str
    settings: Mapping[str, tuple[str, ...]]
    sources: tuple[str, ...]
    methods: tuple[str, ...]
    stages: tuple[str, ...]
    evidence: tuple[tuple[str, tuple[Figure, ...]], ...]


@cache
def table() -> Mapping[str, Any]:
    """The content of the file."""
    data: Mapping[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return data


#: By sign, the cause that it indicates if it is the first.
CAUSES: Mapping[str, str] = {sign: cause for cause, entry in table().items() for sign in entry["signs"]}


@cache
def remedies() -> Mapping[str, Remedy]:
    """Every cause by name."""
    return {
        cause: Remedy(
            cause=cause,
            **entry  # pydantic leaves out what is not a field
            | {"methods": [*entry["methods"], *entry["others"]], "evidence": list(_evidence(entry["evidence"]))},
        )
        for cause, entry in table().items()
    }
