"""What the methods did: those that never acted, by their own metrics, and the tokens that several of them touched."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rlstab.errors import ReportError
from rlstab.report.formatting import counted, listed
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
    """A part of objectives that changed nothing.

    Attributes:
        bench: name of the bench, or None.
        setting: name of the setting.
        part: the method in its objective that did not act.
        why: in words.
        methods: what is compared and has it, in words; with the number of runs where it acted in some.
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
        for part, why in idle_parts(run):
            idle[run.bench, run.setting, part, why][run.method] += 1

    def told(bench: str | None, setting: str, method: str, count: int) -> str:
        every = total[bench, setting, method]
        return method if count == every else f"{method} ({count} of {every} runs)"

    return [
        Idle(*key, listed(told(*key[:2], method, count) for method, count in counts.items()))
        for key, counts in idle.items()
    ]


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

#: A run and a response that it traced.
Traced: TypeAlias = tuple[RunRecord, Sample]


@dataclass(frozen=True)
class Overlap:
    """Methods against methods.

    Attributes:
        bench: name of the bench, or None.
        setting: name of the setting.
        names: of rows and columns.
        touched: tokens that each of them touched.
        matrix: Jaccard overlap, tokens of both over tokens of either.
        compared: what was, in words.
    """

    bench: str | None
    setting: str
    names: list[str]
    touched: list[int]
    matrix: list[list[float]]
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
    groups: dict[tuple[str | None, str], dict[str, list[Traced]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        file = Path(run.path) / "tokens.jsonl"
        if file.is_file():
            try:
                groups[run.bench, run.setting][run.method] += [(run, sample) for sample in read_tokens(file).samples]
            except ReportError as error:
                notes.append(f"{run.title}: its token traces cannot be read: {error}")
    overlaps = []
    for (bench, setting), by_method in groups.items():
        for method, traced in by_method.items():
            several = len({run.path for run, _ in traced}), len({(run.seed, sample.rollout) for run, sample in traced})
            what = ", ".join(map(counted, several, ("run", "rollout")))
            overlaps.append(_overlap(bench, setting, traced, traced, _within, f"all traced tokens of {method}: {what}"))
        traced = [pair for pairs in by_method.values() for pair in pairs]
        alike = sampled_alike(traced)
        responses = counted(len({(run.seed, sample.response) for run, sample in alike}), "response")
        what = f"between methods: {responses} of the first rollout, the same in every method"
        overlaps.append(_overlap(bench, setting, alike, traced, _between, what))
    return [overlap for overlap in overlaps if len(overlap.names) > 1], notes


def _within(run: RunRecord, sample: Sample, key: str) -> tuple[str, Token]:
    """What a method of one objective is called, and its response in one optimizer step."""
    return key, (run.seed, sample.rollout, sample.optimizer_step, sample.response)


def _between(run: RunRecord, sample: Sample, key: str) -> tuple[str, Token]:
    """What a method of one of several objectives is called, and its response."""
    return run.method if run.method == key else f"{run.method}: {key}", (run.seed, sample.response)


def sampled_alike(traced: Sequence[Traced]) -> list[Traced]:
    """Responses of the first rollout that every method has for their seed with the same token ids."""
    methods = {run.method for run, _ in traced}
    first = [(run, sample) for run, sample in traced if sample.rollout == 1]
    ids: dict[tuple[int, str], dict[str, tuple[int, ...]]] = defaultdict(dict)
    for run, sample in first:
        if sample.ids:
            ids[run.seed, sample.response][run.method] = tuple(sample.ids)
    alike = {key for key, own in ids.items() if len(own) == len(methods) > 1 and len(set(own.values())) == 1}
    return [(run, sample) for run, sample in first if (run.seed, sample.response) in alike]


def _overlap(
    bench: str | None,
    setting: str,
    compared: Iterable[Traced],
    traced: Iterable[Traced],
    place: Callable[[RunRecord, Sample, str], tuple[str, Token]],
    text: str,
) -> Overlap:
    """Of the tokens of some responses; who touched none of them, and has no row, is told."""
    touched: dict[str, set[Token]] = defaultdict(set)
    for run, sample in compared:
        for key, method in sample.methods.items():
            name, response = place(run, sample, key)
            touched[name] |= {(*response, token) for token in set().union(*method.actions.values())}
    acted = {name.rpartition(": ")[2] for name, tokens in touched.items() if tokens}
    known = {place(run, sample, key)[0] for run, sample in traced for key in sample.methods}
    idle = {name: name.rpartition(": ")[2] for name in known if not touched.get(name)}
    # by its own name alone where it did so in every objective
    absent = sorted({name if part in acted else part for name, part in idle.items()})
    names = sorted(name for name, tokens in touched.items() if tokens)
    matrix = [[len(touched[a] & touched[b]) / len(touched[a] | touched[b]) for b in names] for a in names]
    text += f"; {', '.join(absent)} touched none of these tokens" if absent else ""
    return Overlap(bench, setting, names, [len(touched[name]) for name in names], matrix, text)
