"""What is said of each cause: where it comes from, what to look at, which methods act on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlstab.core.metadata import SOURCES
from rlstab.diagnose import evidence
from rlstab.diagnose.evidence import Figure
from rlstab.zoo import METHODS

FILE = Path(__file__).with_name("remedies.yaml")


@dataclass(frozen=True)
class Remedy:
    """One cause.

    Attributes:
        cause: its name, a value of :data:`rlstab.diagnose.causes.CAUSES`.
        title: for headings.
        looks: what it looks like in the metrics.
        likely: what usually is behind it.
        first: what to try before any method.
        settings: of each trainer, those to look at.
        sources: of instability, keys of :data:`rlstab.core.metadata.SOURCES`.
        methods: those against it, the nearest first, then all others whose class names one of the sources.
        stages: those against it.
        evidence: what was compared here: name in the bench and figures.
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
    """The file as it stands."""
    data: Mapping[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return data


@cache
def remedies() -> Mapping[str, Remedy]:
    """Every cause by name."""
    return {cause: _remedy(cause, one) for cause, one in table().items()}


def _remedy(cause: str, one: Mapping[str, Any]) -> Remedy:
    others = [
        name
        for name in METHODS.names()
        if set(one["sources"]) & METHODS.get(name).about.addresses and name not in one["methods"]
    ]
    return Remedy(
        cause=cause,
        title=one["title"],
        looks=one["looks"],
        likely=tuple(one["likely"]),
        first=one["first"],
        settings={host: tuple(names) for host, names in one["settings"].items()},
        sources=tuple(source for source in SOURCES if source in one["sources"]),
        methods=(*one["methods"], *others),
        stages=tuple(one["stages"]),
        evidence=tuple((method, tuple(found)) for method, found in evidence.of(one["evidence"])),
    )
