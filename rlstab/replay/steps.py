"""An optimizer step of a dump as evidence about its tokens: what one rank wrote, or all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.trace.dump import BY_RESPONSE, BY_TOKEN, LIVE, REQUIRED, Header

#: Tensors that are whole numbers; all others are floats.
_WHOLE = frozenset({"lengths", "prompt_lengths", "sequence_ids", "group_ids", "parts", "ids", "prompt_ids", "mask"})


class Damaged(Exception):
    """A file does not hold what it should."""


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step: ``S`` responses of ``N`` tokens, of which ``n`` count in the loss.

    Attributes:
        header: of one rank; or of all together, with the values of ``loss`` and the parts one rank after another.
        tensors: by name, see :data:`rlstab.trace.dump.BY_TOKEN`; micro-batches are numbered over all ranks.
        ranks: by micro-batch, the rank that it was on.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    ranks: Sequence[int]

    @property
    def number(self) -> int:
        """Of the optimizer step."""
        return self.header.step

    @property
    def mask(self) -> Tensor:
        """``(N,)`` bool, the tokens that count in the loss."""
        return self.tensors["mask"].bool()

    @cached_property
    def row(self) -> Tensor:
        """``(N,)`` int64, the response of each token."""
        return torch.arange(len(self.tensors["lengths"])).repeat_interleave(self.tensors["lengths"])

    @property
    def groups(self) -> Tensor:
        """``(S,)`` int64, the prompts in the order of their identities; a response without one is its own."""
        groups: Tensor = self.batch.group_ids.unique(return_inverse=True)[1]
        return groups

    @property
    def accumulation(self) -> int:
        """Micro-batches of the step on one rank."""
        return max(map(self.ranks.count, self.ranks), default=1)

    @property
    def prompts(self) -> Sequence[Tensor]:
        """The token ids of the prompt of each response, none where they are not known."""
        count, lengths, ids = self.tensors["lengths"], *map(self.tensors.get, ("prompt_lengths", "prompt_ids"))
        return ids.split(lengths.tolist()) if ids is not None and lengths is not None else [count[:0]] * len(count)

    @cached_property
    def batch(self) -> TokenBatch:
        """The evidence about the ``n`` tokens."""
        tensors, sequence = self.tensors, self.row[self.mask]
        token = {name: tensors[name][self.mask] for name in BY_TOKEN if name in tensors}
        counts = torch.bincount(sequence, minlength=len(tensors["lengths"]))
        signals: dict[str, Any] = {name: token[name] for name in SIGNALS if name in token}
        return TokenBatch(
            old_logprobs=token.get("old_logprobs", token["logprobs"]),
            logprobs=token["logprobs"],
            advantages=token["advantages"],
            sequence=sequence,
            position=torch.arange(sequence.numel()) - (counts.cumsum(0) - counts)[sequence],
            sequence_ids=tensors["sequence_ids"],
            group_ids=tensors.get("group_ids", tensors["sequence_ids"]),
            live_ratio="old_logprobs" not in token,
            _grouped="group_ids" in tensors,
            **signals,
        )

    @property
    def live_logprobs(self) -> Tensor:
        """``(N,)`` float64, those that the loss was made of."""
        return self.tensors.get("live_logprobs", self.tensors["logprobs"]).to(torch.float64, copy=True)

    @property
    def live(self) -> PolicyOutputs:
        """What the loss was made of, of the ``n`` tokens: new leaves with gradient."""
        known = {name: self.tensors.get(f"live_{name}", self.tensors.get(name)) for name in LIVE}
        return PolicyOutputs(
            **{name: values[self.mask].requires_grad_() for name, values in known.items() if values is not None}
        )

    def having(self, tensors: Mapping[str, Tensor]) -> Step:
        """With other tensors of these names."""
        return replace(self, tensors={**self.tensors, **tensors})

    def only(self, chosen: Tensor) -> Step:
        """With some responses, ``(S,)`` bool, and without prompts."""
        of_all = {**dict.fromkeys(BY_RESPONSE, chosen), **dict.fromkeys(BY_TOKEN, chosen[self.row])}
        known = self.tensors.keys() & of_all.keys()
        return replace(self, tensors={name: self.tensors[name][of_all[name]] for name in known})


def rank_of(header: Header, given: Mapping[str, Tensor]) -> Step:
    """What one rank wrote, if its tensors fit together; in int64 and float32.

    Raises:
        Damaged: they do not.
    """
    tensors = dict(given)
    for name in REQUIRED:
        if name not in tensors:
            raise Damaged(f"it has no tensor '{name}'")
    count, total = tensors["lengths"].numel(), tensors["ids"].numel()
    for name, values in tensors.items():
        size = count if name in BY_RESPONSE else total if name in BY_TOKEN else values.numel()
        if values.shape != (size,):
            raise Damaged(f"'{name}' has shape {tuple(values.shape)}, expected ({size},)")
        if (name in _WHOLE) == values.is_floating_point():
            raise Damaged(f"'{name}' is {values.dtype}")
        tensors[name] = values.long() if name in _WHOLE else values.float()
    lengths = {"lengths": tensors["ids"]}
    if {"prompt_lengths", "prompt_ids"} <= tensors.keys():
        lengths["prompt_lengths"] = tensors["prompt_ids"]
    for name, ids in lengths.items():
        if bool((tensors[name] < 0).any()) or int(tensors[name].sum()) != ids.numel():
            raise Damaged(f"'{name}' does not add up to {ids.numel()} tokens")
    part = tensors.setdefault("parts", torch.zeros(count, dtype=torch.int64))
    if count and not 0 <= int(part.min()) <= int(part.max()) < header.parts:
        raise Damaged(f"a response is in a micro-batch beyond its {header.parts}")
    return Step(header, tensors, [header.rank] * header.parts)


def joined(ranks: Sequence[Step]) -> Step:
    """The step that all its ranks, in their order, wrote down."""
    firsts = accumulate((len(rank.ranks) for rank in ranks[:-1]), initial=0)
    placed = [rank.having({"parts": rank.tensors["parts"] + first}) for rank, first in zip(ranks, firsts, strict=True)]
    full = [rank for rank in placed if rank.tensors["ids"].numel()] or placed
    names = set.intersection(*(set(rank.tensors) for rank in full))
    tensors = {name: torch.cat([rank.tensors[name] for rank in full]) for name in names}
    tensors.setdefault("sequence_ids", torch.arange(len(tensors["lengths"])))
    losses = [rank.header.loss for rank in ranks if rank.header.loss is not None]
    values = [value for own in losses for value in own.values]
    loss = losses[0].model_copy(update={"values": values}) if len(losses) == len(ranks) else None
    told = {"loss": loss, "ranks": len(ranks), "first": all(rank.header.first for rank in ranks)}
    every = [place for rank in ranks for place in rank.ranks]
    return Step(ranks[0].header.model_copy(update={**told, "parts": len(every)}), tensors, every)
