"""Idle methods: those that never acted in a run, by their own metrics, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlstab.report.bins import binned
from rlstab.report.model import RunRecord, objective_names, setting_of

#: Last parts of metrics that are shares of the tokens which a method touched.
SHARES = ("dropped", "selected", "boosted", "damped")


@dataclass(frozen=True)
class Idle:
    """A method of an objective that changed nothing.

    Attributes:
        bench: name of the bench, or None.
        setting: name of the setting.
        method: what is compared.
        part: the method in its objective that did not act.
        why: in words.
        seeds: in which it did not.
        runs: how many runs of the method there are in this setting.
    """

    bench: str | None
    setting: str
    method: str
    part: str
    why: str
    seeds: tuple[int, ...]
    runs: int

    @property
    def text(self) -> str:
        """One sentence."""
        where = "" if len(self.seeds) == self.runs else f" in {len(self.seeds)} of {self.runs} runs"
        return f"{self.part} never acted{where}: {self.why}"


def idle_methods(runs: Sequence[RunRecord]) -> list[Idle]:
    """One entry per method and reason, over the runs of a setting."""
    found: dict[tuple[str | None, str, str, str, str], list[int]] = {}
    counts: dict[tuple[str | None, str, str], int] = {}
    for run in runs:
        group = (run.bench, run.setting, run.method)
        counts[group] = counts.get(group, 0) + 1
        for part, why in idle_parts(run):
            found.setdefault((*group, part, why), []).append(run.seed)
    return [
        Idle(bench, setting, method, part, why, tuple(seeds), counts[bench, setting, method])
        for (bench, setting, method, part, why), seeds in found.items()
    ]


def idle_parts(run: RunRecord) -> list[tuple[str, str]]:
    """Methods of the objective that never acted in this run, with the reason; not those of which no metric tells."""
    if not run.rollouts:
        return []
    return _parts(run, run.config.get("objective"), "")


def _parts(run: RunRecord, items: Any, prefix: str) -> list[tuple[str, str]]:
    if isinstance(items, Mapping):
        items = [items]
    if not isinstance(items, list):
        return []
    found = []
    for key, item in zip(objective_names({"objective": items}), items, strict=False):
        if item["name"] == "within":
            for side in ("outer", "inner"):
                inside = item.get(side)
                # one method reports under its side, several under their own names below it
                if isinstance(inside, Mapping):
                    found += _one(run, inside, f"{prefix}{key}/{side}")
                else:
                    found += _parts(run, inside, f"{prefix}{key}/{side}/")
        elif item["name"] != "observe":  # that is there to do nothing
            found += _one(run, item, f"{prefix}{key}")
    return found


def _one(run: RunRecord, item: Mapping[str, Any], place: str) -> list[tuple[str, str]]:
    name = str(item.get("name"))
    why = RULES.get(name, _generic)(run, item, place)
    shown = place if place.rpartition("/")[2].startswith(name) else f"{place} ({name})"
    return [(shown, why)] if why else []


def _clip(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    shares = [_highest(run, f"ratio/clipped_{side}") for side in ("high", "low", "dual")]
    known = [one for one in shares if one is not None]
    if not known or max(known) > 0:
        return None
    epochs, parts = (setting_of(run.config, f"optimisation.{one}") for one in ("epochs", "mini_batches"))
    if epochs == 1 and parts == 1:
        return "on-policy, the ratio is 1"
    return "no ratio left its bounds"


def _s2t(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    if _highest(run, f"{place}/dropped") != 0:
        return None
    if _highest(run, f"{place}/candidates") == 0:
        return f"no token with positive advantage had a probability below {item.get('max_prob')}"
    return "no candidate had an entropy below the threshold"


def _top_entropy(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    _, values = binned(run, f"{place}/share")
    return "every token counted" if len(values) and values.min() >= 1 else None


def _stare(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    if _highest(run, f"{place}/gate") == 0:
        return f"its gate never opened, the mean entropy stayed at or above {item.get('target_entropy')} nats"
    return _generic(run, item, place)


def _adaptive(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    if _highest(run, f"{place}/coefficient") is None:
        return None
    if _highest(run, f"{place}/value") is None:
        return f"the mean entropy never fell below {item.get('target_entropy')} nats"
    return "its price was 0 throughout" if _highest(run, f"{place}/coefficient") == 0 else None


def _penalty(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    return "its coefficient is 0" if item.get("coefficient") == 0 else None


def _generic(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    shares = [_highest(run, f"{place}/{share}") for share in SHARES]
    known = [one for one in shares if one is not None]
    return "it touched no token" if known and max(known) == 0 else None


def _highest(run: RunRecord, name: str) -> float | None:
    _, values = binned(run, name)
    return float(np.max(values)) if len(values) else None


RULES: dict[str, Callable[[RunRecord, Mapping[str, Any], str], str | None]] = {
    "clip_higher": _clip,
    "s2t": _s2t,
    "top_entropy": _top_entropy,
    "stare": _stare,
    "adaptive_entropy": _adaptive,
    "kl": _penalty,
    "entropy_bonus": _penalty,
}
