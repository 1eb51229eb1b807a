"""Writes ``tokens.jsonl``: one line per traced response and optimizer step, for ``rlstab view``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlstab.config.settings import TrackingSettings
from rlstab.core.batch import TokenBatch, layout_of
from rlstab.core.plan import Plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.trace.effects import MethodTrace, trace
from rlstab.trace.token_texts import token_texts

FORMAT = 2


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
        self._traced: dict[int, dict[str, Any]] = {}  # what is known of a response beyond its tokens

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
                known = {"prompt": prompt(place), "reward": _rounded(reward), "advantage": _rounded(advantage)}
                self._traced[sequence] = known

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
        response_ids = response_ids.reshape(-1)[layout_of(batch).index]
        columns = {
            "logprobs": batch.old_logprobs,
            "entropies": batch.entropies,
            "ratio": torch.where(computed, traced.ratio, torch.nan),
            **{name: getattr(traced, name) for name in ("weight", "kept", "bonus", "unclipped", "clipped", "gate")},
        }
        # inside `within` the key says where a method stands, and not which one it is
        named = {
            key: method.name for key, method in traced.methods.items() if key.rpartition("/")[2] in ("outer", "inner")
        }
        for row in rows:
            where, sequence = batch.sequence == row, int(batch.sequence_ids[row])
            ids = response_ids[where].tolist()
            line = {
                "format": FORMAT,
                "rollout": self._rollout,
                "optimizer_step": optimizer_step,
                "sequence_id": sequence,
                "group_id": int(batch.group_ids[row]),
                **self._traced[sequence],
                "tokens": token_texts(self.decode, ids),
                "ids": ids,
                **{name: _numbers(values[where]) for name, values in columns.items() if values is not None},
                "methods": {key: _method(method, where) for key, method in traced.methods.items()},
                **({"names": named} if named else {}),
            }
            self.append(json.dumps(line, allow_nan=False) + "\n")


def _method(method: MethodTrace, where: Tensor) -> dict[str, Any]:
    touched = {action: _places(tokens[where]) for action, tokens in method.actions.items()}
    line: dict[str, Any] = {action: places for action, places in touched.items() if places}
    for name, values, identity in (("weight", method.weight, 1), ("bonus", method.bonus, 0), ("gate", method.gate, 1)):
        own = None if values is None else values[where]
        if own is not None and (places := _places(own != identity)):
            line[name] = [[place, _rounded(float(own[place]))] for place in places]
    return line


def _places(tokens: Tensor) -> list[int]:
    places: list[int] = torch.nonzero(tokens).squeeze(-1).tolist()
    return places


def _numbers(values: Tensor) -> list[float | bool | None]:
    return [value if isinstance(value, bool) else _rounded(value) for value in values.tolist()]


def _rounded(value: float) -> float | None:
    """Five significant digits; JSON has no NaN and no Inf."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
