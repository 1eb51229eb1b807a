"""Which tokens several methods touched: Jaccard overlap, from the token traces of run folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rlstab.errors import ReportError
from rlstab.report.model import RunRecord
from rlstab.report.numbers import counted
from rlstab.report.tokens import Sample, read_tokens

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
