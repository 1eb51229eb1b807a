"""The mini-batch of a rank, as verl holds it, turned into evidence about response tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from rlstab.adapters.evidence import hashes, signals_of
from rlstab.adapters.host_correction import CORRECTION
from rlstab.core.batch import TokenBatch
from rlstab.core.objective import TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.turns import turn_rewards_of, turns_of
from rlstab.hosts import facts
from rlstab.record.writer import tensors_of

#: The column with the index of each row in the mini-batch, by which rows of a micro-batch are found again.
ROW = "rlstab_row"
#: verl's weights against the mismatch between sampler and trainer, if its rollout correction computes them.
WEIGHTS = "rollout_is_weights"
#: verl's rewards, at the last token of each response.
SCORES = "token_level_scores"
#: verl's columns by signal.
COLUMNS: Mapping[str, str] = facts("verl")["columns"]


@dataclass(eq=False)
class MiniBatch:
    """The rows of a rank in one optimizer step, padded to ``(B, T)`` on the device that trains.

    Attributes:
        columns: verl's tensors, by verl's names.
        evidence: ``(B, T)`` signals of the policy at the start of the optimizer step.
        truncated: ``(B,)`` bool, True where the response does not end with an EOS token.
        sequence_ids: ``(B,)`` int64, hashes of the tokens.
        group_ids: ``(B,)`` int64, hashes of the prompt's uid.
        prompts, responses: ``B`` arrays of token ids.
        turn_rewards: what the agent loop of each response earned turn by turn; None if it has no such list.
    """

    columns: Mapping[str, Tensor]
    truncated: Tensor
    sequence_ids: Tensor
    group_ids: Tensor
    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    turn_rewards: list[list[float] | None]
    evidence: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any, device: torch.device | str, ends: Collection[int]) -> MiniBatch:
        """Read verl's TensorDict, whose columns are padded or nested.

        Args:
            data: the data of one rank, for one optimizer step.
            device: the device on which the engine trains.
            ends: the ids of tokens that end a response.
        """
        names = ["response_mask", "old_log_probs", "advantages", WEIGHTS, SCORES]
        names += [*COLUMNS.values()]
        columns = {name: _padded(data[name]).to(device) for name in names if name in data.keys()}
        prompts, responses = _ids(data, "prompts"), _ids(data, "responses")
        sessions = tu.get(data, "session_id", default=[""] * len(prompts))
        uids = tu.get(data, "uid", default=[prompt.tobytes() for prompt in prompts])
        named = zip(prompts, responses, _listed(sessions), strict=True)
        return cls(
            columns=columns,
            truncated=torch.tensor([not len(ids) or int(ids[-1]) not in ends for ids in responses], device=device),
            sequence_ids=hashes([b"|".join((a.tobytes(), b.tobytes(), _bytes(c))) for a, b, c in named], device),
            group_ids=hashes([_bytes(uid) for uid in _listed(uids)], device),
            prompts=prompts,
            responses=responses,
            turn_rewards=_turn_rewards(data, len(prompts)),
        )

    def batch(self, objective: TokenObjective, rows: Tensor | None = None) -> TokenBatch:
        """The evidence about some rows, or all.

        Raises:
            MissingSignal: verl's batch lacks a signal that its configuration promises.
            ShapeError: an agent loop returned another number of rewards than turns.
        """
        needs, names = objective.needs, {**COLUMNS, CORRECTION: WEIGHTS}
        chosen = slice(None) if rows is None else rows
        computed = {"truncated": self.truncated, "turn": turns_of(self.written), **self.evidence}
        if "turn_reward" in needs:
            computed["turn_reward"] = turn_rewards_of(self.turn_rewards, self.written)
        columns = {name: values[chosen] for name, values in self.columns.items()}
        computed = {name: values[chosen] for name, values in computed.items()}
        return TokenBatch.from_padded(
            response_mask=columns["response_mask"].bool(),
            advantages=columns["advantages"],
            sequence_ids=self.sequence_ids[chosen],
            group_ids=self.group_ids[chosen],
            **signals_of(needs, columns, names, columns["old_log_probs"], computed, host="verl"),
        )

    def tensors(self, batch: TokenBatch, live: PolicyOutputs, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of some rows for a dump; ``batch`` is the evidence about them."""
        ids, prompts = torch.zeros(len(rows), self.mask.shape[1], dtype=torch.int64, device=self.mask.device), []
        for index, row in enumerate(rows.tolist()):
            ids[index, : len(self.responses[row])] = torch.as_tensor(self.responses[row])
            prompts.append(torch.as_tensor(self.prompts[row]))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        had = {name: self.columns[column][rows] for name, column in COLUMNS.items() if column in self.columns}
        had["truncated"] = self.truncated[rows, None].expand(ids.shape)
        had["turn"] = turns_of(self.written[rows])
        tensors = {"prompt_ids": torch.cat(prompts), "prompt_lengths": lengths}
        if SCORES in self.columns:
            tensors["rewards"] = self.columns[SCORES][rows].sum(1).float()
        return tensors_of(batch, live, ids, had) | tensors

    @property
    def mask(self) -> Tensor:
        """``(B, T)`` bool, True on tokens that the policy wrote and verl did not reject."""
        return self.columns["response_mask"].bool()

    @property
    def written(self) -> Tensor:
        """``(B, T)`` bool, True on rejected tokens too: only they are masked and have a log-prob of the sampler."""
        sampled = self.columns.get(COLUMNS["rollout_logprobs"])
        return self.mask if sampled is None else self.mask | (sampled != 0)


def _padded(values: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(values, 0) if values.is_nested else values


def _ids(data: Any, name: str) -> list[np.ndarray]:
    """The ids of the tokens of each row, without padding."""
    values = data[name]
    if values.is_nested:
        return [ids.cpu().numpy() for ids in values.unbind()]
    prompt, response = data["prompts"].shape[1], data["responses"].shape[1]
    masks = dict(zip(("prompts", "responses"), data["attention_mask"].bool().split([prompt, response], 1), strict=True))
    return [ids[mask].cpu().numpy() for ids, mask in zip(values, masks[name], strict=True)]


def _turn_rewards(data: Any, rows: int) -> list[list[float] | None]:
    """Rewards of turns by the agent loop, or of tool calls; the newer trainer has them in one column with the rest."""
    extra = tu.get(data, "extra_fields", default=[{}] * rows)
    for name in ("turn_scores", "tool_rewards"):
        rewards = tu.get(data, name, default=[fields.get(name) for fields in extra])
        if any(rewards):
            break
    return list(rewards)


def _listed(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
