"""The batch that stages see: whole responses in complete groups, once they are scored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlstab.core.padding import joined_rows
from rlstab.errors import MissingSignal, ShapeError, did_you_mean
from rlstab.stages.group_relative import equal_within

#: Evidence beyond the basic fields that a stage may need, by name: how many dimensions it has, and what it is. Other
#: names are signals of tokens, ``(S, T)``.
EVIDENCE: Mapping[str, tuple[int, str]] = {
    "rewards": (1, "rewards as the stages before have shaped them; always there"),
    "raw_rewards": (1, "rewards as the scorer gave them; always there"),
    "reward_parts": (2, "each of the run's rewards, before its weight, in the order of `reward`, `(S, K)`"),
    "reward_weights": (2, "the weight of each of these rewards, the same in every row, `(S, K)`"),
    "squared_gradient": (
        1,
        "squared norm of the gradient of the log-prob of the whole response; 0 in groups of equal rewards",
    ),
    "logprobs": (2, "log-prob of each token under the policy that learns, nats, `(S, T)`"),
    "prompt_features": (2, "mean input embedding of the tokens of each prompt, `(S, width)`"),
    "block_rewards": (2, "reward of each block of the response, `(S, K)`"),
    "block_outcomes": (2, "int64 outcome, from 1, of the answer up to and with each block, and 0 for none, `(S, K)`"),
    "turn_rewards": (2, "reward of each turn of the response, 0 where there is none, `(S, K)`"),
    "turn_states": (2, "int64 state that each turn began in, from 1, and 0 where there is no turn, `(S, K)`"),
    "block_ids": (2, "the block that a token belongs to, from 0, and -1 for none, `(S, T)`"),
}

#: Evidence that only one kind of stage can read, because it is known when that kind acts: :attr:`Stage.kind` by name.
ONLY_FOR: Mapping[str, str] = {
    "logprobs": "advantages",
    "squared_gradient": "advantages",
    "prompt_features": "prompts",
}

#: The dtypes of the fields of a response; int64 for the others.
DTYPES = {"lengths": torch.float64, "ended": torch.bool, "pivot": torch.float64}

#: The fill value where a response has no token, by the name in :meth:`ResponseBatch.tensors`; 0 for the others.
PADDING = {"extra/block_ids": -1}


@dataclass(frozen=True, eq=False)
class ResponseBatch:
    """``S`` responses of one rank, complete groups in any order. All of it is on the CPU.

    Attributes:
        rewards: ``(S,)`` float64, as shaped by earlier stages.
        lengths: ``(S,)`` float64, sampled tokens, the end included.
        ended: ``(S,)`` bool, False where the response was cut off.
        prompt_ids: ``(S,)`` int64, the number of the prompt in its task, the same whenever it is asked again.
        group_ids: ``(S,)`` int64, one for each time that a prompt is answered, unique over the run.
        sequence_ids: ``(S,)`` int64, unique over the run.
        given: ``(S,)`` int64, tokens of the answer that were not sampled: where a branch starts, else 0.
        pivot: ``(S,)`` float64, ``given`` as a share of the length of the answer that was branched from; else 0.
        limit: the most tokens of an answer, including the given ones.
        extra: evidence by name, see :data:`EVIDENCE`.
    """

    rewards: Tensor
    lengths: Tensor
    ended: Tensor
    prompt_ids: Tensor
    group_ids: Tensor
    sequence_ids: Tensor
    given: Tensor
    pivot: Tensor
    limit: int
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.rewards.shape[0]
        for name, values in self.tensors().items():
            if values.shape[:1] != (count,):
                description = f"{name.removeprefix('extra/')} is {tuple(values.shape)}"
                raise ShapeError(f"ResponseBatch: {description}, expected {count} responses as rewards.")

    def __len__(self) -> int:
        return self.rewards.shape[0]

    @classmethod
    def of(
        cls,
        rewards: Any,
        group_ids: Any = 0,
        *,
        limit: int | None = None,
        extra: Mapping[str, Tensor] | None = None,
        **fields: Any,
    ) -> ResponseBatch:
        """Responses by their rewards and groups; every field is a sequence, or one value for all responses.

        Args:
            rewards: ``(S,)`` numbers.
            group_ids: ``(S,)`` ids of groups.
            limit: most tokens of an answer; None is the length of the longest.
            extra: evidence by name.
            fields: other fields. Without them a response has one token and ended, answers the prompt with the number of
                its group, is no branch, and has its index as id.
        """
        values = torch.as_tensor(rewards, dtype=torch.float64)
        fields = {
            "lengths": 1.0,
            "ended": True,
            "prompt_ids": group_ids,
            "sequence_ids": range(len(values)),
            "given": 0,
            "pivot": 0.0,
            **fields,
            "group_ids": group_ids,
        }
        columns = {
            name: torch.as_tensor(field, dtype=DTYPES.get(name, torch.int64)).expand(len(values)).clone()
            for name, field in fields.items()
        }
        if limit is None:
            limit = int((columns["given"] + columns["lengths"]).max()) if len(values) else 1
        return cls(rewards=values, limit=limit, extra=extra or {}, **columns)

    @classmethod
    def empty(cls, needs: Iterable[str] = ()) -> ResponseBatch:
        """No responses, with all evidence of ``needs``: what a rank without responses measures."""
        dims = {name: EVIDENCE.get(name, (1 if name.startswith("reward/") else 2, ""))[0] for name in needs}
        return cls.of([], extra={name: torch.zeros((0,) * count, dtype=torch.float64) for name, count in dims.items()})

    def evidence(self, name: str) -> Tensor:
        """The evidence of this name.

        Raises:
            MissingSignal: the batch was made without it.
        """
        if name == "rewards":
            return self.rewards
        if name not in self.extra:
            hint = did_you_mean(name, self.extra) if self.extra else ""
            raise MissingSignal(f"the evidence '{name}' was read and is missing. Name it in `needs`. {hint}".rstrip())
        return self.extra[name]

    def select(self, where: Tensor | slice) -> ResponseBatch:
        """Some of the responses, by a bool or by their indices."""
        if isinstance(where, Tensor) and where.dtype == torch.bool:
            where = where.nonzero().squeeze(-1)  # once, not for each tensor
        return self.from_tensors({name: values[where] for name, values in self.tensors().items()}, self.limit)

    def reshaped(self, rewards: Tensor) -> ResponseBatch:
        """The same responses with other rewards."""
        return replace(self, rewards=rewards)

    # -- groups ----------------------------------------------------------------------------------------------------

    @cached_property
    def group(self) -> Tensor:
        """``(S,)`` int64 number of each response's group, 0 to ``groups`` - 1 in the order of their ids."""
        number: Tensor = torch.unique(self.group_ids, return_inverse=True)[1]
        return number

    @property
    def groups(self) -> int:
        """The number of groups."""
        return int(self.group.max()) + 1 if len(self) else 0

    @cached_property
    def first(self) -> Tensor:
        """``(G,)`` index of the first response of each group, from which values of the group are read."""
        start = torch.full((self.groups,), len(self), dtype=torch.int64)
        return start.scatter_reduce(0, self.group, torch.arange(len(self)), "amin")

    def group_sum(self, values: Tensor) -> Tensor:
        """``(S,)`` or ``(S, T)`` float64 sum of such values over the group of each response."""
        zeros = torch.zeros((self.groups, *values.shape[1:]), dtype=torch.float64)
        return zeros.index_add(0, self.group, values.double())[self.group]

    def group_mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        """``(S,)`` float64 mean over the group of each response, weighted; NaN where all weights are 0."""
        weight = torch.ones_like(self.rewards) if weight is None else weight.double()
        return self.group_sum(weight * values.double()) / self.group_sum(weight)

    @cached_property
    def even(self) -> Tensor:
        """``(S,)`` bool, True where the rewards of the group are equal but for rounding: nothing to compare with."""
        return equal_within(self.rewards, self.group)

    def knowing(self, extra: Mapping[str, Tensor]) -> ResponseBatch:
        """The same responses with more evidence."""
        return replace(self, extra={**self.extra, **extra})

    # -- moving it -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; evidence under ``extra/<name>``."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        columns = {name: values for name, values in columns.items() if isinstance(values, Tensor)}
        return columns | {f"extra/{name}": values for name, values in self.extra.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], limit: int) -> ResponseBatch:
        """The batch from the result of :meth:`tensors`."""
        extra = {name.removeprefix("extra/"): values for name, values in tensors.items() if name.startswith("extra/")}
        columns: dict[str, Any] = {name: values for name, values in tensors.items() if not name.startswith("extra/")}
        return cls(**columns, limit=limit, extra=extra)

    @classmethod
    def joined(cls, batches: Sequence[ResponseBatch]) -> ResponseBatch:
        """The responses of all batches; evidence that some of them lack is left out."""
        tensors_of_batches = [batch.tensors() for batch in batches]
        joined: dict[str, Tensor] = {}
        for name in set[str].intersection(*map(set, tensors_of_batches)):
            joined[name] = joined_rows([tensors[name] for tensors in tensors_of_batches], PADDING.get(name, 0))
        return cls.from_tensors(joined, batches[0].limit)
