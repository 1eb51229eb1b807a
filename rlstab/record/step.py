"""The record of an optimizer step: what the loss of a trainer saw of its tokens, on one rank or on all together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.batch_checks import MOST, impossible
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.turns import turns_of

#: Outputs of the live policy, from which a loss is made.
LIVE = ("logprobs", "entropies", "log_kept_mass", "log_support_mass", "teacher_divergence")
#: Tensors by response, ``(S,)``; every dump has those in `REQUIRED`.
BY_RESPONSE: dict[str, str] = {
    "lengths": "tokens of the response, int64",
    "prompt_lengths": "tokens of its prompt, int64",
    "sequence_ids": "stable identity, int64",
    "group_ids": "identity of its prompt, int64",
    "parts": "number of its micro-batch on this rank, int64",
    "rewards": "reward of the response",
}
#: Tensors by token, ``(n,)``, one response after another. Log-probs and entropies are in nats.
BY_TOKEN: dict[str, str] = {
    "ids": "the token, int64",
    "mask": "1 where the token counts in the loss, else 0 (what a tool answered), uint8",
    "versions": "optimizer steps before the weights that sampled the token, int32",
    "advantages": "advantage",
    "logprobs": "log-prob under the policy at the start of the optimizer step, which decisions are made from",
    "old_logprobs": "log-prob under the policy that the ratio divides by; missing where that is the live one",
    **SIGNALS,
    **{f"live_{name}": f"`{name}` in the forward of the loss, where they differ from `{name}`" for name in LIVE},
    "support": "ids of the tokens that the sampler kept, `(n, 64)`, padded with -1; -2 where it kept more, int32",
    "weights": "factor of the policy term that the trainer applies outside its formula",
    "coefficients": "derivative of what the trainer backpropagated by the log-prob of the token",
}
#: Prefix of what a method did: ``did/s2t/dropped``, ``(n,)``, is 1 on the tokens that s2t dropped; ``weight``,
#: ``bonus`` and ``gate`` are its factors. Recorded where the methods cannot be planned again from the dump.
DID = "did/"
#: The signal of the evidence that holds ``weights``.
CORRECTION = "importance_sampling_ratio"
#: Tensors that a dump must have. ``prompt_ids``, ``(m,)`` int64, holds the tokens of all prompts.
REQUIRED = ("lengths", "ids", "mask", "advantages", "logprobs")
#: Tensors of whole numbers; all others are floats.
_WHOLE = {name for name, text in (BY_RESPONSE | BY_TOKEN).items() if re.search(r"\bu?int\d", text)} | {"prompt_ids"}
#: The most ids of a support that a record has for each token.
MOST_KEPT = 64
#: Upper bounds of the micro-batches of a rank in one optimizer step, and of token ids.
MOST_PARTS, MOST_IDS = 10**6, 2**32

_Name = Annotated[str, Field(max_length=200)]


class Damaged(Exception):
    """The content of a file is not what it should be."""


class HostLoss(BaseModel):
    """The loss that a trainer says it minimises.

    Attributes:
        name: the trainer and its loss, such as ``trl/dapo`` or ``verl/vanilla``; ``rlstab`` is an objective.
        settings: what decides the loss, by the names that the trainer has for them (``hosts.yaml``); of ``rlstab``,
            ``objective`` and the ``state`` before the step.
        values: the number that each micro-batch of this rank backpropagated; None where it was not finite.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    name: _Name
    settings: dict[str, JsonValue] = {}
    values: list[float | None] = []


class Header(BaseModel):
    """The content of ``step-N.rank-R.json``.

    Attributes:
        host: the trainer and its version.
        step: number of the optimizer step, from 1.
        rank: the number of the process that wrote the file.
        ranks: number of processes; the gradient is the mean over them.
        parts: micro-batches of this rank in this optimizer step.
        first: no weight has changed since the responses were sampled, so every ratio is 1.
        learning_rate: the rate of this optimizer step.
        temperature: what divided the logits before the log-probs.
        top_p, top_k: mass and number of the tokens that the sampler draws from; 1.0 and 0 draw from all.
        logprobs_mode: what the sampler's log-probs are, by vLLM's names: ``processed_logprobs`` are those that it drew
            from, at the temperature and over the tokens that top-p and top-k leave; ``raw_logprobs`` are before both.
        loss: what the trainer says it minimises, or None.
        sha256: the hash of the file of tensors, hexadecimal.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    format: Literal[1] = 1
    host: _Name
    step: Annotated[int, Field(ge=0)]
    rank: Annotated[int, Field(ge=0)] = 0
    ranks: Annotated[int, Field(ge=1)] = 1
    parts: Annotated[int, Field(ge=0, le=MOST_PARTS)] = 1
    first: bool = False
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] | None = None
    loss: HostLoss | None = None
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step: ``S`` responses of ``N`` tokens, of which ``n`` count in the loss.

    Attributes:
        header: the header of one rank, or of all ranks: values of ``loss`` and parts one rank after another.
        tensors: the tensors by name, see :data:`BY_TOKEN`; micro-batches are numbered over all ranks.
        ranks: the rank that each micro-batch was on.
        code: files that the user named, whose user-defined methods may be loaded.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    ranks: Sequence[int]
    code: Sequence[str] = ()

    @property
    def number(self) -> int:
        """The number of the optimizer step."""
        return self.header.step

    @property
    def mask(self) -> Tensor:
        """``(N,)`` bool, the tokens that count in the loss."""
        return self.tensors["mask"].bool()

    @cached_property
    def row(self) -> Tensor:
        """``(N,)`` int64, the response of each token."""
        return torch.arange(len(self.tensors["lengths"])).repeat_interleave(self.tensors["lengths"])

    @cached_property
    def turns(self) -> Tensor:
        """``(n,)`` int64, the turn of each token that counts in the loss, as recorded or by the masked tokens."""
        if "turn" in self.tensors:
            return self.tensors["turn"][self.mask].long()
        if bool(self.mask.all()):
            return torch.zeros_like(self.row)
        mask = pad_sequence(self.mask.split(self.tensors["lengths"].tolist()), batch_first=True)
        return turns_of(mask)[mask]

    @property
    def groups(self) -> Tensor:
        """``(S,)`` int64, the prompts in the order of their identities; a response without one counts as a prompt."""
        groups: Tensor = self.batch.group_ids.unique(return_inverse=True)[1]
        return groups

    def by_response(self, values: Tensor) -> Tensor:
        """``(S,)`` float64 sums of ``(N,)`` values over the tokens of each response that count in the loss."""
        zeros = torch.zeros(len(self.tensors["lengths"]), dtype=torch.float64)
        return zeros.index_add(0, self.row, (values * self.mask).double())

    @property
    def accumulation(self) -> int:
        """Micro-batches of the step on one rank."""
        return max(Counter(self.ranks).values(), default=1)

    @property
    def prompts(self) -> Sequence[Tensor]:
        """The token ids of the prompt of each response; empty if they are unknown."""
        count, lengths, ids = self.tensors["lengths"], *map(self.tensors.get, ("prompt_lengths", "prompt_ids"))
        return ids.split(lengths.tolist()) if ids is not None and lengths is not None else [count[:0]] * len(count)

    @cached_property
    def batch(self) -> TokenBatch:
        """The evidence about the ``n`` tokens; extra signals are :data:`CORRECTION` and what methods did."""
        tensors, sequence = self.tensors, self.row[self.mask]
        token = {name: tensors[name][self.mask] for name in BY_TOKEN if name in tensors}
        counts = torch.bincount(sequence, minlength=len(tensors["lengths"]))
        signals: dict[str, Any] = {name: token[name] for name in SIGNALS if name in token}
        if "versions" in token:
            signals.setdefault("lag", (self.number - 1 - token["versions"]).clamp(min=0).float())
        if bool(self.turns.any()):
            signals.setdefault("turn", self.turns.float())
        extra = {name: values[self.mask] for name, values in tensors.items() if name.startswith(DID)}
        extra |= {CORRECTION: token["weights"]} if "weights" in token else {}
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
            extra=extra,
            **signals,
        )

    @property
    def live_logprobs(self) -> Tensor:
        """``(N,)`` float64, the log-probs from which the loss was made."""
        return self.tensors.get("live_logprobs", self.tensors["logprobs"]).to(torch.float64, copy=True)

    @property
    def live(self) -> PolicyOutputs:
        """The outputs for the ``n`` tokens from which the loss was made, as new leaves with gradient."""
        recorded = {name: self.tensors.get(f"live_{name}", self.tensors.get(name)) for name in LIVE}
        return PolicyOutputs(
            **{name: values[self.mask].requires_grad_() for name, values in recorded.items() if values is not None}
        )

    def having(self, tensors: Mapping[str, Tensor]) -> Step:
        """A copy with other tensors of these names."""
        return replace(self, tensors={**self.tensors, **tensors})

    def micro_batches(self) -> Iterator[tuple[int, Tensor]]:
        """The micro-batches that have responses: the number of each, and ``(s,)`` int64 its responses."""
        numbers, sizes = self.tensors["parts"].unique(return_counts=True)
        responses = self.tensors["parts"].argsort(stable=True).split(sizes.tolist())
        yield from zip(numbers.tolist(), responses, strict=True)

    def only(self, responses: Tensor) -> Step:
        """A copy with some responses, ``(s,)`` int64 or ``(S,)`` bool, in time that depends only on these."""
        responses = responses.nonzero().squeeze(-1) if responses.dtype == torch.bool else responses
        tokens, of_all = self._spans("lengths", responses), dict.fromkeys(BY_RESPONSE, responses)
        if "prompt_lengths" in self.tensors:
            of_all["prompt_ids"] = self._spans("prompt_lengths", responses)
        chosen = {name: values[of_all.get(name, tokens)] for name, values in self.tensors.items()}
        return replace(self, tensors=chosen)

    def _spans(self, name: str, responses: Tensor) -> Tensor:
        """``(t,)`` int64, the indices of the tokens of some responses, or of their prompts, among all tokens."""
        lengths = self.tensors[name][responses]
        behind = lengths.cumsum(0)
        shift = self._ends[name][responses] - behind
        return torch.arange(int(behind[-1]) if len(behind) else 0) + shift.repeat_interleave(lengths)

    @cached_property
    def _ends(self) -> Mapping[str, Tensor]:
        names = ("lengths", "prompt_lengths")
        return {name: self.tensors[name].cumsum(0) for name in names if name in self.tensors}

    def usable(self) -> tuple[Step, int]:
        """The step without responses that no loss can be made of because a value is NaN, infinite or impossible.

        Returns:
            the step, which is unchanged if all responses can be used; and the number of responses left out.
        """
        wrong = torch.zeros_like(self.mask)
        for name, values in self.tensors.items():
            signal = name.removeprefix("live_")
            if name in _READ:
                wrong |= ~values.isfinite() | (impossible(signal, values) if signal in MOST else False)
        damaged = self.row[wrong & self.mask].unique()
        if not len(damaged):
            return self, 0
        usable = torch.ones(len(self.tensors["lengths"]), dtype=torch.bool).index_fill(0, damaged, value=False)
        return self.only(usable), len(damaged)


#: Tensors by token that every loss reads.
_READ = ("advantages", "logprobs", "old_logprobs", "live_logprobs", "weights")


def rank_of(header: Header, given: Mapping[str, Tensor]) -> Step:
    """What one rank wrote, in int64 and float32, if its tensors fit together.

    Raises:
        Damaged: they do not.
    """
    names = {*BY_RESPONSE, *BY_TOKEN, "prompt_ids"}
    tensors = {name: values for name, values in given.items() if name in names or name.startswith(DID)}
    for name in REQUIRED:
        if name not in tensors:
            raise Damaged(f"it has no tensor '{name}'")
    count, total = tensors["lengths"].numel(), tensors["ids"].numel()
    for name, values in tensors.items():
        by_token = name in BY_TOKEN or name.startswith(DID)
        size = count if name in BY_RESPONSE else total if by_token else values.numel()
        shape = (size, MOST_KEPT) if name == "support" else (size,)
        if values.shape != shape:
            raise Damaged(f"'{name}' has shape {tuple(values.shape)}, expected {shape}")
        if (name in _WHOLE) == values.is_floating_point():
            raise Damaged(f"'{name}' is {values.dtype}")
        tensors[name] = values.long() if name in _WHOLE else values.float()
    if total and not 0 <= int(tensors["ids"].min()) <= int(tensors["ids"].max()) < MOST_IDS:
        raise Damaged(f"'ids' has an id below 0 or above {MOST_IDS:,}")
    lengths = {"lengths": tensors["ids"]}
    if {"prompt_lengths", "prompt_ids"} <= tensors.keys():
        lengths["prompt_lengths"] = tensors["prompt_ids"]
    else:
        tensors.pop("prompt_ids", None)
    for name, ids in lengths.items():
        if bool((tensors[name] < 0).any()) or int(tensors[name].sum()) != ids.numel():
            raise Damaged(f"'{name}' does not add up to {ids.numel()} tokens")
    part = tensors.setdefault("parts", torch.zeros(count, dtype=torch.int64))
    if count and not 0 <= int(part.min()) <= int(part.max()) < header.parts:
        raise Damaged(f"a response is in a micro-batch beyond its {header.parts}")
    return Step(header, tensors, [header.rank] * header.parts)


def together(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that all micro-batches or ranks have, one after another.

    A live output is recorded only where it differs from the evidence, which otherwise stands in for it.
    """
    columns = {
        name: [part.get(name, part.get(name.removeprefix("live_"))) for part in parts] for name in set().union(*parts)
    }
    full = {name: [values for values in column if values is not None] for name, column in columns.items()}
    return {name: torch.cat(column) for name, column in full.items() if len(column) == len(parts)}


def joined(ranks: Sequence[Step]) -> Step:
    """The step that its ranks wrote together, given in their order."""
    firsts = accumulate((len(rank.ranks) for rank in ranks[:-1]), initial=0)
    parts = [rank.having({"parts": rank.tensors["parts"] + first}) for rank, first in zip(ranks, firsts, strict=True)]
    full = [rank for rank in parts if rank.tensors["ids"].numel()] or parts
    tensors = together([rank.tensors for rank in full])
    tensors.setdefault("sequence_ids", torch.arange(len(tensors["lengths"])))
    losses = [rank.header.loss for rank in ranks if rank.header.loss is not None]
    values = [value for loss in losses for value in loss.values]
    loss = losses[0].model_copy(update={"values": values}) if len(losses) == len(ranks) else None
    numbers = [number for rank in ranks for number in rank.ranks]
    first = all(rank.header.first for rank in ranks)
    fields = {"loss": loss, "ranks": len(ranks), "first": first, "parts": len(numbers)}
    return Step(ranks[0].header.model_copy(update=fields), tensors, numbers)
