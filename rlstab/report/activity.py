"""What the methods did: those that never acted, by their own metrics, and the tokens that several of them touched."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def idle_methods(runs: Sequence[RunRecord]) -> list[Idle]:
    """One entry per method and reason, over the runs of a setting."""
    seeds: dict[tuple[str | None, str, str, str, str], list[int]] = defaultdict(list)
    counts = Counter((run.bench, run.setting, run.method) for run in runs)
    for run in runs:
        for part, why in idle_parts(run):
            seeds[run.bench, run.setting, run.method, part, why].append(run.seed)
    return [Idle(*key, tuple(some), counts[key[:3]]) for key, some in seeds.items()]


def idle_parts(run: RunRecord) -> list[tuple[str, str]]:
    """Methods of the objective that never acted in this run, with the reason; not those of which no metric tells."""
    if not run.rollouts:
        return []
    reasons = ((place, item, _reason(run, item, place)) for place, item in _parts(run.config.get("objective"), ""))
    return [(_named(place, str(item.get("name"))), why) for place, item, why in reasons if why]


def _named(place: str, name: str) -> str:
    return place if place.rpartition("/")[2].startswith(name) else f"{place} ({name})"


def _parts(items: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Methods by the prefix of their metrics."""
    items = items if isinstance(items, list) else []
    for key, item in zip(objective_names({"objective": items}), items, strict=False):
        if item["name"] == "within":
            for side in ("outer", "inner"):
                inside = item.get(side)
                # one method reports under its side, several under their own names below it
                if isinstance(inside, Mapping):
                    yield f"{prefix}{key}/{side}", inside
                else:
                    yield from _parts(inside, f"{prefix}{key}/{side}/")
        elif item["name"] != "observe":  # that is there to do nothing
            yield f"{prefix}{key}", item


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

#: A run and the responses that it traced.
Traced: TypeAlias = tuple[RunRecord, Sequence[Sample]]


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
    groups: dict[tuple[str | None, str], list[Traced]] = defaultdict(list)
    for run in runs:
        file = Path(run.path) / "tokens.jsonl"
        if file.is_file():
            try:
                groups[run.bench, run.setting].append((run, read_tokens(file).samples))
            except ReportError as error:
                notes.append(f"{run.title}: its token traces cannot be read: {error}")
    overlaps = []
    for (bench, setting), traced in groups.items():
        for method in dict.fromkeys(run.method for run, _ in traced):
            mine = [(run, samples) for run, samples in traced if run.method == method]
            inside = within_runs(mine)
            rollouts = {(run.seed, sample.rollout) for run, samples in mine for sample in samples}
            text = f"all traced tokens of {method}: {counted(len(mine), 'run')}, {counted(len(rollouts), 'rollout')}"
            known = {key for _, samples in mine for sample in samples for key in sample.methods}
            overlaps.append(_overlap(bench, setting, inside, text + _idle(known, inside)))
        between, responses = between_runs(traced)
        known = {_between(run.method, key) for run, samples in traced for one in samples for key in one.methods}
        text = f"between methods: {counted(responses, 'response')} of the first rollout, the same in every method"
        overlaps.append(_overlap(bench, setting, between, text + _idle(known, between)))
    return [overlap for overlap in overlaps if len(overlap.names) > 1], notes


def _idle(known: set[str], touched: Mapping[str, set[Token]]) -> str:
    """Who has no row because it touched nothing there: by its own name alone where it did so in every objective."""
    acted = {name.rpartition(": ")[2] for name in touched}
    parts = {name: name.rpartition(": ")[2] for name in known - touched.keys()}
    absent = sorted({name if part in acted else part for name, part in parts.items()})
    return f"; {', '.join(absent)} touched none of these tokens" if absent else ""


def _between(method: str, key: str) -> str:
    return method if method == key else f"{method}: {key}"


def within_runs(traced: Iterable[Traced]) -> dict[str, set[Token]]:
    """Tokens touched by each method of one objective that touched any, over optimizer steps and runs."""
    touched: dict[str, set[Token]] = defaultdict(set)
    for run, samples in traced:
        for sample in samples:
            token = (run.seed, sample.rollout, sample.optimizer_step, sample.response)
            for key, places in _touched(sample).items():
                touched[key] |= {(*token, place) for place in places}
    return touched


def between_runs(traced: Sequence[Traced]) -> tuple[dict[str, set[Token]], int]:
    """Tokens touched in the first rollout by each method of each objective, and how many responses were compared.

    A response takes part if every compared method has it for this seed with the same token ids.
    """
    methods = {run.method for run, _ in traced}
    first = [(run, sample) for run, samples in traced for sample in samples if sample.rollout == 1]
    ids: dict[tuple[int, str], dict[str, tuple[int, ...]]] = defaultdict(dict)
    for run, sample in first:
        if sample.ids:
            ids[run.seed, sample.response][run.method] = tuple(sample.ids)
    alike = {key for key, own in ids.items() if len(own) == len(methods) > 1 and len(set(own.values())) == 1}
    touched: dict[str, set[Token]] = defaultdict(set)
    for run, sample in first:
        if (run.seed, sample.response) in alike:
            for key, places in _touched(sample).items():
                touched[_between(run.method, key)] |= {(run.seed, sample.response, place) for place in places}
    return touched, len(alike)


def jaccard(first: set[Token], second: set[Token]) -> float | None:
    """Tokens of both over tokens of either; None if both are empty."""
    either = len(first | second)
    return len(first & second) / either if either else None


def _touched(sample: Sample) -> dict[str, set[int]]:
    touched = {key: set().union(*method.actions.values()) for key, method in sample.methods.items()}
    return {key: places for key, places in touched.items() if places}


def _overlap(bench: str | None, setting: str, touched: Mapping[str, set[Token]], compared: str) -> Overlap:
    names = sorted(touched)
    matrix = [[jaccard(touched[row], touched[column]) for column in names] for row in names]
    return Overlap(bench, setting, names, [len(touched[name]) for name in names], matrix, compared)
