"""Responses for a page or a terminal: the text of each token, its numbers, and what methods did to it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlstab.errors import ReportError, RlstabError
from rlstab.extras import missing
from rlstab.files import is_file
from rlstab.record.effects import ACTIONS, Trace, traces_of
from rlstab.record.reader import folder_of, read_dump
from rlstab.record.step import Step
from rlstab.record.token_texts import Decode, decoder, token_texts

#: Values by token: None where one is unknown, empty if all are.
Numbers = list[float | None]


#: Values by token that a method may have, each with the value that does nothing.
IDENTITY = {"weight": 1.0, "bonus": 0.0, "gate": 1.0}


@dataclass(frozen=True)
class MethodMarks:
    """What one method did to the tokens of a response.

    Attributes:
        name: of the method; its key is the prefix of its metrics.
        actions: by action (see :data:`rlstab.record.ACTIONS`) the indices of the tokens, ascending.
        values: by name in :data:`IDENTITY` and by index, other than the value that does nothing.
    """

    name: str
    actions: Mapping[str, list[int]]
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ResponseTrace:
    """One response of ``T`` tokens in one optimizer step.

    Attributes:
        step: number of the optimizer step.
        response: identifies the response in its step.
        group: identifies its prompt, or None.
        prompt: its text, or its number of tokens.
        reward: None if it is unknown.
        tokens: ``T`` texts, all empty without a tokenizer.
        ids: of the tokens.
        values: by ``surprisal`` (minus the log-prob under the policy that sampled, nats), ``entropy`` (nats),
            ``advantage``, ``ratio``, ``weight``, ``bonus`` and ``gate`` (:class:`rlstab.record.Trace`), ``T`` numbers.
        influence: ``T`` numbers, by how much the methods changed the pull of each token; see :func:`influence_of`.
        methods: by key.
    """

    step: int
    response: str
    tokens: list[str]
    ids: list[int] = field(default_factory=list)
    group: str | None = None
    prompt: str = ""
    reward: float | None = None
    values: Mapping[str, Numbers] = field(default_factory=dict)
    influence: list[float] = field(default_factory=list)
    methods: Mapping[str, MethodMarks] = field(default_factory=dict)


@dataclass(frozen=True)
class ResponseTraces:
    """Responses to show.

    Attributes:
        responses: in the order of their steps.
        notes: what was left out and why, and what a reader should know about the source.
    """

    responses: list[ResponseTrace]
    notes: list[str] = field(default_factory=list)


def influence_of(step: Step, seen: Trace) -> Tensor:
    """``(n,)`` by how much the methods changed the pull of each token: ``|w g k c (A + b) r - A r|``.

    w is the weight, g the gate, k is 0 if the token is dropped and c is 0 if it is clipped (else 1), b the bonus, r the
    ratio, A the advantage; unknown values count as the identity. Penalties pull separately and are not in it.
    """
    advantages, ratio = step.batch.advantages, seen.ratio.nan_to_num(1.0)
    factor = seen.weight * seen.kept * ~seen.clipped * (1.0 if seen.gate is None else seen.gate)
    moved = advantages if seen.bonus is None else advantages + seen.bonus
    return (factor * moved * ratio - advantages * ratio).abs().nan_to_num(0.0)


def read_responses(
    path: str | Path, tokenizer: str | Path | None = None, *, step: int | None = None, limit: int
) -> ResponseTraces:
    """The responses of a dump with what the loss of its trainer did: those of the largest influence, in the order of
    the dump.

    Args:
        path: see :func:`rlstab.record.read_dump`.
        tokenizer: folder of a tokenizer, or its ``tokenizer.json``; None takes that of the dump, if it has one.
        step: only this optimizer step.
        limit: the most responses.

    Raises:
        ReportError: there is nothing to show, or the tokenizer cannot be read.
    """
    if limit < 1:
        raise ReportError(f"--limit {limit}: expected a number of at least 1.")
    dump, decode = read_dump(path), decoder_of(path, tokenizer)
    numbers = [recorded.number for recorded in dump.steps]
    if step is not None and step not in numbers:
        raise ReportError(f"optimizer step {step} was not recorded. Give one of {', '.join(map(str, numbers))}.")
    traced, notes = list[tuple[Step, Trace]](), list(dump.notes)
    for recorded in dump.steps:
        if step in (None, recorded.number):
            traced += _traced(recorded, notes)
    return choose(traced, decode, limit, notes)


def decoder_of(path: str | Path, tokenizer: str | Path | None) -> Decode | None:
    """The decoder of token ids: by a given tokenizer, or that of the dump; None if the dump has none."""
    recorded = folder_of(path) / "tokenizer.json"
    if tokenizer is None and (not is_file(recorded) or missing("train", "tokenizers")):
        return None
    return decoder(recorded if tokenizer is None else Path(tokenizer))


def _traced(step: Step, notes: list[str]) -> list[tuple[Step, Trace]]:
    try:
        return list(traces_of(step))
    except RlstabError as error:
        notes.append(f"step {step.number}: what its methods did is unknown: {str(error).splitlines()[0]}")
        return [(step, Trace(torch.full_like(step.batch.advantages, math.nan), {}))]


def choose(
    traced: Sequence[tuple[Step, Trace]], decode: Decode | None, limit: int, notes: Sequence[str]
) -> ResponseTraces:
    """At most ``limit`` of some responses, those of the largest influence, in the given order."""
    notes, known = list(notes), list[tuple[float, int, int]]()
    for index, (step, seen) in enumerate(traced):
        total = torch.zeros(len(step.tensors["lengths"])).index_add(0, step.batch.sequence, influence_of(step, seen))
        known += [(-value, index, row) for row, value in enumerate(total.tolist())]
    if len(known) > limit:
        notes.append(
            f"{len(known)} responses were read; these are the {limit} of the largest influence. --limit changes that."
        )
    rows: dict[int, list[int]] = {}
    for _, index, row in sorted(heapq.nsmallest(limit, known), key=lambda one: one[1:]):
        rows.setdefault(index, []).append(row)
    responses = [response for index in rows for response in _shown(*traced[index], decode, rows[index])]
    if decode is None:
        notes.append("The dump has token ids but no text. Give the folder of its tokenizer with --tokenizer.")
    return ResponseTraces(responses, notes)


def _shown(step: Step, seen: Trace, decode: Decode | None, rows: Iterable[int]) -> Iterator[ResponseTrace]:
    """Some responses of a step with all of their tokens; ``loss_mask`` drops those outside the loss."""
    tensors, batch, mask = step.tensors, step.batch, step.mask
    lengths = tensors["lengths"].tolist()

    def columns(values: Tensor, fill: float = math.nan) -> Sequence[Tensor]:
        of_all: Sequence[Tensor] = torch.full(mask.shape, fill).masked_scatter(mask, values.float()).split(lengths)
        return of_all

    sampled = batch.old_logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
    given = {"surprisal": 0.0 - sampled, "entropy": batch.entropies, "advantage": batch.advantages, "ratio": seen.ratio}
    given |= {"influence": influence_of(step, seen), **{name: getattr(seen, name) for name in IDENTITY}}
    split = {name: columns(values) for name, values in given.items() if values is not None}
    ids, outside, prompts = tensors["ids"].split(lengths), (~mask).split(lengths), step.prompts
    touched = {
        key: {action: columns(where, 0.0) for action, where in method.actions.items()}
        for key, method in seen.methods.items()
    }
    moved = {
        key: {
            name: columns(values, alike)
            for name, alike in IDENTITY.items()
            if (values := getattr(method, name)) is not None
        }
        for key, method in seen.methods.items()
    }
    for row in rows:
        values = {name: _numbers(column[row]) for name, column in split.items()}
        marks = {}
        for key, method in seen.methods.items():
            actions = {name: where for name in ACTIONS if (where := _indices(touched[key].get(name), row))}
            changes = {name: _except(column[row], IDENTITY[name]) for name, column in moved[key].items()}
            marks[key] = MethodMarks(method.name, actions, {name: each for name, each in changes.items() if each})
        if dropped := _indices(outside, row):
            marks["loss_mask"] = MethodMarks("loss_mask", {"dropped": dropped})
        tokens, prompt, reward = ids[row].tolist(), prompts[row].tolist(), tensors.get("rewards")
        if tokens:
            yield ResponseTrace(
                step=step.number,
                response=str(int(batch.sequence_ids[row])),
                group=str(int(batch.group_ids[row])) if "group_ids" in tensors else None,
                prompt="" if not prompt else f"({len(prompt)} tokens)" if decode is None else decode(prompt),
                reward=None if reward is None else _numbers(reward[row : row + 1])[0],
                tokens=[""] * len(tokens) if decode is None else token_texts(decode, tokens),
                ids=tokens,
                influence=[value or 0.0 for value in values.pop("influence")],
                values={name: numbers for name, numbers in values.items() if any(one is not None for one in numbers)},
                methods=marks,
            )


def _indices(column: Sequence[Tensor] | None, row: int) -> list[int]:
    indices: list[int] = [] if column is None else column[row].nonzero().squeeze(-1).tolist()
    return indices


def _except(values: Tensor, identity: float) -> dict[int, float]:
    numbers = enumerate(_numbers(values))
    return {index: value for index, value in numbers if value is not None and value != identity}


def _numbers(values: Tensor) -> Numbers:
    """Five significant digits; JSON has no NaN and no Inf."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
