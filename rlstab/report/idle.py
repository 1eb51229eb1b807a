"""Methods that never acted, by their own metrics."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rlstab.bins import binned
from rlstab.core.metadata import IdleEvidence, idle_evidence
from rlstab.report.formatting import listed
from rlstab.report.runs import RunRecord, objective_names

#: Last parts of metrics that are shares of the tokens that a method touched.
SHARES = ("dropped", "selected", "boosted", "damped")


@dataclass(frozen=True)
class Idle:
    """A part of objectives that changed nothing.

    Attributes:
        bench: name of the bench, or None.
        setting: name of the setting.
        part: the method in its objective that did not act.
        why: the reason, in words.
        methods: the compared methods that have it, in words; with the number of runs if it acted in some.
    """

    bench: str | None
    setting: str
    part: str
    why: str
    methods: str


def idle_methods(runs: Sequence[RunRecord]) -> list[Idle]:
    """One entry per part and reason, over the runs of a setting."""
    total = Counter((run.bench, run.setting, run.method) for run in runs)
    idle: dict[tuple[str | None, str, str, str], Counter[str]] = defaultdict(Counter)
    for run in runs:
        for part, reason in idle_parts(run):
            idle[run.bench, run.setting, part, reason][run.method] += 1

    def told(bench: str | None, setting: str, method: str, count: int) -> str:
        runs_of_method = total[bench, setting, method]
        return method if count == runs_of_method else f"{method} ({count} of {runs_of_method} runs)"

    return [
        Idle(*key, listed(told(*key[:2], method, count) for method, count in counts.items()))
        for key, counts in idle.items()
    ]


def idle_parts(run: RunRecord) -> list[tuple[str, str]]:
    """Methods of the objective that never acted in this run, with the reason, as far as metrics show."""
    if not run.rollouts:
        return []
    reasons = ((prefix, item, _reason(run, item, prefix)) for prefix, item in _parts(run.config.get("objective"), ""))
    return [
        (
            prefix if prefix.rpartition("/")[2].startswith(name := str(item.get("name"))) else f"{prefix} ({name})",
            reason,
        )
        for prefix, item, reason in reasons
        if reason
    ]


def _parts(items: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Methods by the prefix of their metrics."""
    items = items if isinstance(items, list) else []
    for key, item in zip(objective_names({"objective": items}), items, strict=False):
        if item["name"] == "within":
            for side in ("outer", "inner"):
                members = item.get(side)
                # one method reports under its side, several under their own names below it
                if isinstance(members, Mapping):
                    yield f"{prefix}{key}/{side}", members
                else:
                    yield from _parts(members, f"{prefix}{key}/{side}/")
        elif item["name"] != "observe":  # which does nothing by design
            yield f"{prefix}{key}", item


def _reason(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    evidence = _evidence(run, str(item.get("name")))
    for settings in evidence.identities:
        if all(item.get(name, ...) == value for name, value in settings.items()):
            return " and ".join(f"its {name} is {value or 0}" for name, value in settings.items())
    if evidence.bounds:
        return _unclipped(run)
    for sign in evidence.signs:
        _, values = binned(run, f"{place}/{sign.metric}")
        if len(values) and (np.max(values) == 0 if sign.at == 0 else np.min(values) >= 1):
            return re.sub(r"\{(\w+)\}", lambda setting: str(item.get(setting[1])), sign.why)
    shares = [share for metric in SHARES if (share := _highest(run, f"{place}/{metric}")) is not None]
    return "it touched no token" if shares and max(shares) == 0 else None


_EVIDENCE = TypeAdapter(IdleEvidence)


def _evidence(run: RunRecord, name: str) -> IdleEvidence:
    """Evidence that a method did nothing, as the run records it, else as the installed method does."""
    if "idle" in run.about:
        try:
            return _EVIDENCE.validate_python(run.about["idle"].get(name, {}))
        except (AttributeError, ValidationError):  # damaged
            return IdleEvidence()
    from rlstab.zoo import METHODS  # needs torch; only runs of earlier releases lack it

    method = METHODS.known(name)
    return idle_evidence(method) if method else IdleEvidence()


def _unclipped(run: RunRecord) -> str | None:
    shares = [_highest(run, f"ratio/clipped_{side}") for side in ("high", "low", "dual")]
    if all(share is None for share in shares) or any(shares):
        return None
    epochs, parts = (run.setting_at(f"optimisation.{name}") for name in ("epochs", "mini_batches"))
    return "on-policy, the ratio is 1" if epochs == parts == 1 else "no ratio left its bounds"


def _highest(run: RunRecord, name: str) -> float | None:
    _, values = binned(run, name)
    return float(np.max(values)) if len(values) else None
