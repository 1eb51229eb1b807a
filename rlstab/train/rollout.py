"""A rollout that was made and is to be learnt from, and where the making of rollouts stands between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad

from rlstab.core.method import State
from rlstab.stages.response_batch import PADDING, ResponseBatch
from rlstab.train.padded_rows import Sequences

#: Where the ids of branches begin; those of responses to prompts count from 0.
BRANCHES = 2**50


@dataclass(frozen=True, eq=False)
class Rollout:
    """Responses of this rank, in the order of their sequence ids.

    Attributes:
        sequences: ids and masks; the tokens that a branch was given are a part of its prompt.
        signals: ``(R, T)`` float32 by name, as the sampler and providers of the user's own made them.
        responses: what stages see; rewards are shaped, and ``raw_rewards`` are not.
        timed_out: ``(R,)`` bool, the scorer took too long.
        advantages: ``(R,)`` or ``(R, T)`` of the user's own; None where the estimator makes them.
        refused: rewards of all ranks that are NaN or Inf; then nothing is learnt from it.
    """

    sequences: Sequences
    signals: Mapping[str, Tensor]
    responses: ResponseBatch
    timed_out: Tensor
    advantages: Tensor | None
    refused: int

    def answers(self) -> list[list[int]]:
        """The tokens of each answer, those that a branch was given included."""
        prompts, prompt_mask = self.sequences.prompt_ids.tolist(), self.sequences.prompt_mask.tolist()
        found = []
        for row, given in enumerate(self.responses.given.tolist()):
            prompt = [one for one, kept in zip(prompts[row], prompt_mask[row], strict=True) if kept]
            sampled = self.sequences.response_ids[row][self.sequences.response_mask[row]].tolist()
            found.append(prompt[len(prompt) - given :] + sampled)
        return found

    def as_tensors(self) -> dict[str, Tensor]:
        """Everything in it, on the CPU."""
        own = {f"sequences/{one.name}": getattr(self.sequences, one.name) for one in fields(self.sequences)}
        own |= {f"signals/{name}": values for name, values in self.signals.items()}
        own |= {f"responses/{name}": values for name, values in self.responses.tensors().items()}
        own |= {"timed_out": self.timed_out, "refused": torch.tensor(self.refused)}
        own |= {} if self.advantages is None else {"advantages": self.advantages}
        return {name: values.cpu() for name, values in own.items()}

    @classmethod
    def from_tensors(cls, found: Mapping[str, Tensor], limit: int, device: torch.device) -> Rollout:
        """What :meth:`as_tensors` gave; sequences and signals on a device."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)}

        return cls(
            Sequences(**{name: one.to(device) for name, one in under("sequences/").items()}),
            {name: one.to(device) for name, one in under("signals/").items()},
            ResponseBatch.from_tensors(under("responses/"), limit),
            found["timed_out"],
            found.get("advantages"),
            int(found["refused"]),
        )


@dataclass(frozen=True)
class Standing:
    """How far the making of rollouts has come, and what it goes on from. Saved with every checkpoint.

    Attributes:
        made: rollouts made so far; those that are not learnt from yet wait in the queue.
        drawn: prompts chosen so far.
        states: of the stages, by name.
        queue: rollouts that wait, the oldest first.
    """

    made: int
    drawn: int
    states: Mapping[str, State]
    queue: tuple[Rollout, ...] = field(default=(), repr=False)

    def saved(self) -> dict[str, Any]:
        """Plain numbers and tensors of all ranks; every rank calls it, and the first gets it all."""
        queue = {str(place): joined(gather_object([one.as_tensors()])) for place, one in enumerate(self.queue)}
        return {"made": self.made, "drawn": self.drawn, "states": dict(self.states), "queue": queue}


def joined(ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One rollout from those of all ranks, in the order of the sequence ids."""
    order = torch.cat([one["responses/sequence_ids"] for one in ranks]).argsort()
    whole = {"refused": ranks[0]["refused"]}
    for name in ranks[0].keys() - whole.keys():
        values = [one[name] for one in ranks]
        if values[0].ndim == 2:
            width = max(one.shape[1] for one in values)
            left = name.startswith("sequences/prompt")  # prompts are padded on the left
            sides = [(width - one.shape[1], 0) if left else (0, width - one.shape[1]) for one in values]
            fill = PADDING.get(name.removeprefix("responses/"), 0)
            values = [pad(one, side, value=fill) for one, side in zip(values, sides, strict=True)]
        whole[name] = torch.cat(values)[order]
    return whole


def of_rank(whole: Mapping[str, Tensor], rank: int, world: int, *, slots: int, group: int) -> dict[str, Tensor]:
    """The rows of one rank: whole groups go where the prompt in the same place of a rollout is sampled.

    Args:
        whole: of all ranks.
        rank: which rank.
        world: of how many.
        slots: group ids that a rollout has for responses to prompts.
        group: responses per prompt.
    """
    ids = whole["responses/group_ids"]
    own = torch.where(ids < BRANCHES, ids, torch.div(ids - BRANCHES, group, rounding_mode="floor"))
    mine = own % slots % world == rank
    return {name: one if name == "refused" else one[mine] for name, one in whole.items()}
