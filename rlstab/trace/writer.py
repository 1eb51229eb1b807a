"""Writes ``tokens.jsonl``: one line per traced response and optimizer step, for ``rlstab view``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstab.config.settings import TrackingSettings
from rlstab.core.batch import TokenBatch, layout_of
from rlstab.core.plan import Plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.trace.effects import MethodTrace, Trace, trace
from rlstab.trace.token_texts import token_texts

FORMAT = 2


@dataclass(frozen=True)
class Traced:
    """What is known of a traced response beyond its tokens."""

    prompt: str
    reward: float
    advantage: float


class Tracer:
    """Traces some responses of some rollouts of this rank: the first whole groups of each traced rollout.

    Args:
        append: writes lines of the file.
        settings: how often, and how many responses.
        rollouts: of the whole run; the last is traced too.
        decode: of the tokenizer, special tokens included.
    """

    def __init__(
        self,
        append: Callable[[str], None],
        settings: TrackingSettings,
        rollouts: int,
        decode: Callable[[list[int]], str],
    ) -> None:
        self.append, self.settings, self.rollouts, self.decode = append, settings, rollouts, decode
        self._rollout = 0
        self._traced: dict[int, Traced] = {}

    def begin(
        self,
        rollout: int,
        prompt: Callable[[int], str],
        sequence_ids: Tensor,
        group_ids: Tensor,
        rewards: Tensor,
        advantages: Tensor,
    ) -> None:
        """Choose what is traced of a rollout: the first whole groups, at least one.

        Args:
            rollout: its number, from 1.
            prompt: that of a response, by its place.
            sequence_ids: ``(R,)`` of this rank.
            group_ids: ``(R,)``, the responses of a group in a row.
            rewards: ``(R,)``.
            advantages: ``(R,)``.
        """
        self._rollout, self._traced = rollout, {}
        every, most = self.settings.trace_every, self.settings.trace_responses
        if every and (rollout in (1, self.rollouts) or rollout % every == 0) and len(sequence_ids):
            ends = torch.unique_consecutive(group_ids, return_counts=True)[1].cumsum(0).tolist()
            count = max([end for end in ends if end <= most], default=ends[0])
            rows = zip(sequence_ids.tolist(), rewards.tolist(), advantages.tolist(), strict=True)
            for place, (sequence, reward, advantage) in enumerate(list(rows)[:count]):
                self._traced[sequence] = Traced(prompt(place), reward, advantage)

    def part(
        self,
        plan: Plan,
        batch: TokenBatch,
        policy: PolicyOutputs,
        computed: Tensor,
        response_ids: Tensor,
        optimizer_step: int,
    ) -> None:
        """Write the traced responses of one micro-batch, if it has any.

        Args:
            plan: of the optimizer step.
            batch: one of its parts, built from padded tensors.
            policy: live outputs for its tokens.
            computed: ``(n,)`` bool, the tokens that they were computed for; the others have no ratio in the file.
            response_ids: ``(B, T)`` int64, the tokens of the batch's rows.
            optimizer_step: its number, from 1.
        """
        if not self._traced:  # most rollouts: the ids are not even read
            return
        rows = [row for row, sequence in enumerate(batch.sequence_ids.tolist()) if sequence in self._traced]
        if not rows:
            return
        traced = trace(plan, batch, policy)
        ids = response_ids.reshape(-1)[layout_of(batch).index]
        ratio = torch.where(computed, traced.ratio, torch.nan)
        for row in rows:
            where = batch.sequence == row
            line = {"format": FORMAT, "rollout": self._rollout, "optimizer_step": optimizer_step}
            line |= self._line(batch, traced, ratio, row, where, ids[where].tolist())
            self.append(json.dumps(line, allow_nan=False) + "\n")

    def _line(
        self, batch: TokenBatch, traced: Trace, ratio: Tensor, row: int, where: Tensor, ids: list[int]
    ) -> dict[str, Any]:
        sequence = int(batch.sequence_ids[row])
        known = self._traced[sequence]
        line: dict[str, Any] = {
            "sequence_id": sequence,
            "group_id": int(batch.group_ids[row]),
            "prompt": known.prompt,
            "reward": _rounded(known.reward),
            "advantage": _rounded(known.advantage),
            "tokens": token_texts(self.decode, ids),
            "ids": ids,
            "logprobs": _numbers(batch.old_logprobs[where]),
        }
        if batch.entropies is not None:
            line["entropies"] = _numbers(batch.entropies[where])
        line |= {"ratio": _numbers(ratio[where]), "weight": _numbers(traced.weight[where])}
        line["kept"] = traced.kept[where].tolist()
        if traced.bonus is not None:
            line["bonus"] = _numbers(traced.bonus[where])
        if traced.unclipped is not None:
            line["unclipped"] = traced.unclipped[where].tolist()
        line["clipped"] = traced.clipped[where].tolist()
        if traced.gate is not None:
            line["gate"] = _numbers(traced.gate[where])
        line["methods"] = {key: _method(method, where) for key, method in traced.methods.items()}
        # inside `within` the key says where a method stands, and not which one it is
        named = {
            key: method.name for key, method in traced.methods.items() if key.rpartition("/")[2] in ("outer", "inner")
        }
        return line | ({"names": named} if named else {})


def _method(method: MethodTrace, where: Tensor) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for action, tokens in method.actions.items():
        if bool(tokens[where].any()):
            line[action] = _places(tokens[where])
    for name, values, identity in (
        ("weight", method.weight, 1.0),
        ("bonus", method.bonus, 0.0),
        ("gate", method.gate, 1.0),
    ):
        if values is not None and bool((values[where] != identity).any()):
            own = values[where]
            line[name] = [[place, _rounded(float(own[place]))] for place in _places(own != identity)]
    return line


def _places(tokens: Tensor) -> list[int]:
    return [int(place) for place in torch.nonzero(tokens).squeeze(-1).tolist()]


def _numbers(values: Tensor) -> list[float | None]:
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: float) -> float | None:
    """Five significant digits; JSON has no NaN and no Inf."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
