"""What the methods did: those that never acted, by their own metrics, and the tokens that several of them touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rlstab.errors import ReportError
from rlstab.report.formatting import counted
from rlstab.report.runs import RunRecord, binned, objective_names, setting_of
from rlstab.report.token_traces import Sample, read_tokens

#: Last parts of metrics that are shares of the tokens which a method touched.
SHARES = ("dropped", "selected", "boosted", "damped")
#: By method, the metrics that are 0 where it never acted, and why.
ZERO: dict[str, tuple[tuple[str, str], ...]] = {
    "s2t": (
        ("candidates", "no token with positive advantage had a probability below {max_prob}"),
        ("dropped", "no candidate had an entropy below the threshold"),
    ),
    "stare": (("gate", "its gate never opened, the mean entropy stayed at or above {target_entropy} nats"),),
    "adaptive_entropy": (("coefficient", "its price was 0 throughout"),),
}


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
    why = _reason(run, item, place)
    shown = place if place.rpartition("/")[2].startswith(name) else f"{place} ({name})"
    return [(shown, why)] if why else []


def _reason(run: RunRecord, item: Mapping[str, Any], place: str) -> str | None:
    name = item.get("name")
    if name in ("kl", "entropy_bonus"):
        return "its coefficient is 0" if item.get("coefficient") == 0 else None
    if name == "clip_higher":
        return _unclipped(run)
    if name == "top_entropy":
        _, values = binned(run, f"{place}/share")
        return "every token counted" if len(values) and values.min() >= 1 else None
    if name == "adaptive_entropy" and {f"{place}/coefficient", f"{place}/value"} & run.metrics.keys():
        if f"{place}/value" not in run.metrics:
            return f"the mean entropy never fell below {item.get('target_entropy')} nats"
    for metric, why in ZERO.get(str(name), ()):
        if _highest(run, f"{place}/{metric}") == 0:
            return why.format(**item)
    shares = [share for metric in SHARES if (share := _highest(run, f"{place}/{metric}")) is not None]
    return "it touched no token" if shares and max(shares) == 0 else None


def _unclipped(run: RunRecord) -> str | None:
    shares = [_highest(run, f"ratio/clipped_{side}") for side in ("high", "low", "dual")]
    if all(share is None for share in shares) or any(shares):
        return None
    epochs, parts = (setting_of(run.config, f"optimisation.{name}") for name in ("epochs", "mini_batches"))
    return "on-policy, the ratio is 1" if epochs == parts == 1 else "no ratio left its bounds"


def _highest(run: RunRecord, name: str) -> float | None:
    _, values = binned(run, name)
    return float(np.max(values)) if len(values) else None


# -- overlap -----------------------------------------------------------------------------------------------------------

#: Names one token: where it was sampled, and its place there.
Token: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class Overlap:
    """Methods against methods.

    Attributes:
        bench: name of the bench, or None.
        setting: name of the setting.
        names: of rows and columns.
        touched: tokens that each of them touched.
        matrix: Jaccard overlap, tokens of both over tokens of either; None where neither touched one.
        compared: what was, in words.
    """

    bench: str | None
    setting: str
    names: list[str]
    touched: list[int]
    matrix: list[list[float | None]]
    compared: str

    @property
    def where(self) -> str:
        """Bench and setting."""
        return ", ".join(filter(None, (self.bench, self.setting)))


def overlaps_of(runs: Sequence[RunRecord]) -> tuple[list[Overlap], list[str]]:
    """All overlaps that the traces next to the runs allow, and notes on traces that could not be read.

    Within the runs of one method all traced tokens are compared. Between methods only tokens of the first rollout that
    were sampled alike: after the first optimizer step the weights differ, and with them the samples.
    """
    notes: list[str] = []
    groups: dict[tuple[str | None, str], list[tuple[RunRecord, list[Sample]]]] = {}
    for run in runs:
        file = Path(run.path) / "tokens.jsonl"
        if not file.is_file():
            continue
        try:
            read = read_tokens(file)
        except ReportError as error:
            notes.append(f"{run.title}: its token traces cannot be read: {error}")
            continue
        groups.setdefault((run.bench, run.setting), []).append((run, read.samples))
    found = []
    for (bench, setting), traced in groups.items():
        for method in dict.fromkeys(run.method for run, _ in traced):
            mine = [(run, samples) for run, samples in traced if run.method == method]
            inside = within_runs(mine)
            if len(inside) > 1:
                rollouts = {(run.seed, one.rollout) for run, samples in mine for one in samples}
                text = (
                    f"all traced tokens of {method}: {counted(len(mine), 'run')}, "
                    f"{counted(len(rollouts), 'rollout')}{_idle(traced_by(mine), inside)}"
                )
                found.append(_overlap(bench, setting, inside, text))
        between, responses = between_runs(traced)
        if len(between) > 1:
            named = {_between(run.method, key) for run, samples in traced for one in samples for key in one.methods}
            text = (
                f"between methods: {counted(responses, 'response')} of the first rollout, the same in every "
                f"method{_idle(named, between)}"
            )
            found.append(_overlap(bench, setting, between, text))
    return found, notes


def traced_by(traced: Iterable[tuple[RunRecord, Sequence[Sample]]]) -> set[str]:
    """The methods that the traces know, whether they touched a token or not."""
    return {key for _, samples in traced for one in samples for key in one.methods}


def _idle(known: Iterable[str], found: Mapping[str, set[Token]]) -> str:
    """Who has no row because it touched nothing there: by its own name alone where it did so in every objective."""
    acted = {name.rpartition(": ")[2] for name in found}
    absent = sorted(
        {part if (part := one.rpartition(": ")[2]) not in acted else one for one in set(known) - set(found)}
    )
    return f"; {', '.join(absent)} touched none of these tokens" if absent else ""


def _between(method: str, key: str) -> str:
    return method if method == key else f"{method}: {key}"


def within_runs(traced: Iterable[tuple[RunRecord, Sequence[Sample]]]) -> dict[str, set[Token]]:
    """Tokens touched by each method of one objective that touched any, over optimizer steps and runs."""
    found: dict[str, set[Token]] = {}
    for run, samples in traced:
        for one in samples:
            for key, places in _touched(one).items():
                token = (run.seed, one.rollout, one.optimizer_step, one.response)
                found.setdefault(key, set()).update((*token, place) for place in places)
    return found


def between_runs(traced: Sequence[tuple[RunRecord, Sequence[Sample]]]) -> tuple[dict[str, set[Token]], int]:
    """Tokens touched in the first rollout by each method of each objective, and how many responses were compared.

    A response takes part if every compared method has it for this seed with the same token ids.
    """
    methods = list(dict.fromkeys(run.method for run, _ in traced))
    ids: dict[tuple[int, str], dict[str, tuple[int, ...]]] = {}
    for run, samples in traced:
        for one in samples:
            if one.rollout == 1 and one.ids:
                ids.setdefault((run.seed, one.response), {})[run.method] = tuple(one.ids)
    alike = {key for key, own in ids.items() if len(own) == len(methods) > 1 and len(set(own.values())) == 1}
    found: dict[str, set[Token]] = {}
    for run, samples in traced:
        for one in samples:
            if one.rollout == 1 and (run.seed, one.response) in alike:
                for key, places in _touched(one).items():
                    mine = found.setdefault(_between(run.method, key), set())
                    mine.update((run.seed, one.response, place) for place in places)
    return found, len(alike)


def jaccard(one: set[Token], other: set[Token]) -> float | None:
    """Tokens of both over tokens of either; None if both are empty."""
    either = len(one | other)
    return len(one & other) / either if either else None


def _touched(sample: Sample) -> dict[str, set[int]]:
    found = {key: {place for places in one.actions.values() for place in places} for key, one in sample.methods.items()}
    return {key: places for key, places in found.items() if places}


def _overlap(bench: str | None, setting: str, touched: Mapping[str, set[Token]], compared: str) -> Overlap:
    names = sorted(touched)
    matrix = [[jaccard(touched[one], touched[other]) for other in names] for one in names]
    return Overlap(bench, setting, names, [len(touched[name]) for name in names], matrix, compared)
