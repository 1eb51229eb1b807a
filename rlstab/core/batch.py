"""Evidence, packed on entry: padding does not exist inside the library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlstab.core.devices import sent
from rlstab.core.random import uniform_in
from rlstab.core.sequences import SequenceArithmetic
from rlstab.errors import MissingSignal, OutOfRange, ShapeError, UnknownName, did_you_mean, kind_of

#: Signals beyond the basic ones that rlstab itself knows how to provide, with what each is.
SIGNALS: Mapping[str, str] = {
    "entropies": "entropy of the full next-token distribution, nats",
    "ref_logprobs": "log-prob of the token under the reference policy, nats",
    "teacher_logprobs": "log-prob of the token under the teacher, nats",
    "rollout_logprobs": "log-prob of the token under the policy that sampled, as the sampler reported it, nats",
    "max_logprobs": "log-prob of the likeliest token, nats",
    "log_kept_mass": "log of the mass that a min-p filter keeps, nats",
    "sum_p_sq": "sum of the squared probabilities of the vocabulary",
    "log_support_mass": "log of the policy's mass on the tokens that the sampler kept (top-p, top-k), nats",
    "truncated": "1 on the tokens of a response that was cut off at the limit of its length, else 0",
    "branch": "1 on the tokens of a branch, a response that goes on from inside another one, else 0",
    "lag": "updates of the policy since the weights that sampled the token",
    "block_ids": "number of the block of its response that the token belongs to, below 0 for none",
    "turn": "turn of the conversation that the token belongs to, from 0",
    "turn_reward": "reward of the turn that the token belongs to",
}
#: Names of log-probs of a token, one for each policy.
LOGPROBS = ("old_logprobs", "logprobs", "ref_logprobs", "teacher_logprobs", "rollout_logprobs", "max_logprobs")
#: Evidence that every batch has but not every method reads. Computing it where no method reads it wastes a forward.
BASICS = frozenset({"logprobs", "old_logprobs"})
#: Signals that mark tokens: of any dtype, and perhaps one for a whole response.
MARKS = ("truncated", "branch", "lag", "block_ids", "turn")


def widened(values: Tensor) -> Tensor:
    """In float32 or wider: half precision never reaches a ratio or a threshold."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def described(values: object) -> str:
    """Describe, for an error, what was given where a tensor is expected."""
    if not isinstance(values, Tensor):
        return kind_of(values)
    grad = " with grad" if values.requires_grad else ""
    return f"{values.dtype} of shape {tuple(values.shape)} on {values.device}{grad}"


#: The fields with one number for each sequence.
_IDS = ("sequence_ids", "group_ids")


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tokens of a batch lie in the padded tensors that it was built from.

    Attributes:
        index: ``(n,)`` int64, index of each token in the flattened tensors.
        shape: ``(B, T)`` of those tensors.
        sequence: ``(n,)`` int64, the rows, if :meth:`TokenBatch.from_padded` counted them.
    """

    index: Tensor
    shape: tuple[int, int]
    sequence: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenBatch(SequenceArithmetic):
    """Evidence about ``n`` response tokens of ``S`` sequences: known before the backward pass, without gradient.

    A batch is one part of an optimizer step (or the whole of it). A sequence is never cut across batches.
    All per-token tensors are ``(n,)``, float32 or float64; log-probs and entropies are in nats, at the training
    temperature. Build one with :meth:`from_padded`.

    Three policies have three names. ``rollout_logprobs`` is the one that sampled, as the sampler reported it;
    ``old_logprobs`` is the one that the ratio divides by; ``logprobs`` is the one at the start of this optimizer step.
    The first two are the same where nothing was recomputed, the last two where a rollout makes one optimizer step.

    Attributes:
        old_logprobs: the policy that the ratio divides by.
        logprobs: policy at the start of this optimizer step.
        advantages: advantage of each token.
        sequence: int64, index of the token's sequence, in ``[0, S)``.
        position: int64, position of the token in its response, from 0.
        sequence_ids: ``(S,)`` int64, stable identity of each sequence: the only source of randomness.
        group_ids: ``(S,)`` int64, the prompt's group.
        live_ratio: True makes the live policy its own denominator: the ratio is exactly 1, its gradient that of
            the log-prob. Right when the whole rollout makes one optimizer step.
    """

    old_logprobs: Tensor
    logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    position: Tensor
    sequence_ids: Tensor
    group_ids: Tensor
    entropies: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    max_logprobs: Tensor | None = None
    log_kept_mass: Tensor | None = None
    sum_p_sq: Tensor | None = None
    log_support_mass: Tensor | None = None
    truncated: Tensor | None = None
    branch: Tensor | None = None
    lag: Tensor | None = None
    block_ids: Tensor | None = None
    turn: Tensor | None = None
    turn_reward: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    live_ratio: bool = False
    _layout: Layout | None = None
    _grouped: bool = True
    _here: TokenBatch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        tokens, device = len(self), self.sequence.device
        numbers = {name: getattr(self, name) for name in ("sequence", "position", *_IDS)}
        for name, values in [*self.per_token(), *numbers.items()]:
            size = self.num_sequences if name in _IDS else tokens
            kind = torch.int64 if name in numbers else values.dtype
            if (values.shape, values.device, values.dtype) != ((size,), device, kind) or values.requires_grad:
                raise ShapeError(
                    f"TokenBatch: '{name}' is {described(values)}, expected {kind} of shape ({size},) on {device} "
                    f"without grad. Use TokenBatch.from_padded; what is differentiated goes into PolicyOutputs."
                )
        padded = self._layout is not None and self._layout.sequence is self.sequence  # and so counted from 0
        if tokens and not padded and not self.sequence.is_meta:  # waits; such an index would end the process later
            low, high = torch.stack(self.sequence.aminmax()).tolist()
            if low < 0 or high >= self.num_sequences:
                raise ShapeError(
                    f"TokenBatch: 'sequence' holds {low} to {high}, of {self.num_sequences} sequence_ids. Count from 0."
                )

    # -- making one ------------------------------------------------------------------------------------------------

    @classmethod
    def from_padded(
        cls,
        *,
        response_mask: Tensor,
        advantages: Tensor,
        old_logprobs: Tensor,
        logprobs: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None,
        sequence_ids: Tensor | None = None,
        group_ids: Tensor | None = None,
        live_ratio: bool = False,
        **signals: Tensor | None,
    ) -> TokenBatch:
        """Pack ``(B, T)`` tensors. Values where the mask is False, even NaN and Inf, are never read.

        Args:
            response_mask: ``(B, T)``, 1 or True on tokens that count (up to and including EOS; tool output is 0). One
                on the CPU spares a wait for the device of the others.
            advantages: ``(B,)`` or ``(B, T)``.
            old_logprobs: ``(B, T)`` log-probs of the policy that the ratio divides by, nats.
            logprobs: ``(B, T)`` log-probs at the start of this optimizer step; None means ``old_logprobs``.
            extra: further ``(B, T)`` signals by name, for your own methods.
            sequence_ids: ``(B,)`` integers, stable identity of each row; None numbers the rows. Give them when an
                optimizer step comes in parts: no two of its sequences may have one id.
            group_ids: ``(B,)`` integers, the prompt of each row. Give them where a method measures by group.
            live_ratio: see the class.
            signals: ``(B, T)`` signals that the objective ``needs``, by the names of :data:`SIGNALS`; ``truncated``,
                ``branch`` and ``lag`` may be ``(B,)``, and these, ``block_ids`` and ``turn`` are of any dtype.

        Raises:
            ShapeError: tensors that belong together disagree in shape, dtype or device.
            UnknownName: no signal has such a name.
            OutOfRange: something is not a tensor, or the mask holds something other than 0 and 1.
        """
        arguments = (*SIGNALS, "logprobs", "sequence_ids", "group_ids", "extra", "live_ratio")
        for name in sorted(signals.keys() - SIGNALS.keys()):
            raise UnknownName(
                f"TokenBatch.from_padded takes no '{name}'. {did_you_mean(name, arguments)} Your own go into extra=."
            )
        optional = {**signals, "logprobs": logprobs, "sequence_ids": sequence_ids, "group_ids": group_ids}
        named = {name: values for name, values in optional.items() if values is not None}
        always = {"response_mask": response_mask, "advantages": advantages, "old_logprobs": old_logprobs}
        for name, values in {**always, **named, **(extra or {})}.items():
            if not isinstance(values, Tensor):
                text = f"'{name}' is {kind_of(values)}, expected a tensor. Write torch.tensor({name})."
                raise OutOfRange(f"TokenBatch.from_padded: {text}")
        if response_mask.ndim != 2:
            text = f"'response_mask' has shape {tuple(response_mask.shape)}, expected (B, T)."
            raise ShapeError(f"TokenBatch.from_padded: {text}")
        rows, width = response_mask.shape
        mask = response_mask.detach().bool()
        if response_mask.dtype != torch.bool:
            odd = response_mask[mask & (response_mask != 1)]
            if odd.numel():
                raise OutOfRange(
                    f"TokenBatch.from_padded: 'response_mask' holds {odd[0]:g}, not 0 or 1. Write labels != -100."
                )
        cpu_mask = mask.cpu()  # one wait for the device; later shapes are then known without one
        device = advantages.device if mask.device.type == "cpu" else mask.device
        cells = cpu_mask.reshape(-1).nonzero().squeeze(-1)
        index = sent(cells, device)

        def pack(name: str, values: Tensor) -> Tensor:
            per_row = name in (*MARKS, "advantages")
            if per_row and values.shape == (rows,):
                values = values.unsqueeze(-1).expand(rows, width)
            floats = values.is_floating_point() or per_row or name in (extra or {})
            if values.shape != mask.shape or not floats:
                raise ShapeError(
                    f"TokenBatch.from_padded: '{name}' is {described(values)}, expected floats of {(rows, width)}"
                    f"{f' or ({rows},)' if per_row else ''}. Cut the prompt off first, and pass no token ids."
                )
            return widened(values.detach()).reshape(-1)[index]

        def ids(name: str, values: Tensor | None) -> Tensor:
            if values is None:
                return torch.arange(rows, device=device)
            if values.shape != (rows,) or values.is_floating_point():
                raise ShapeError(
                    f"TokenBatch.from_padded: '{name}' is {described(values)}, expected ({rows},) integers. Number "
                    f"responses or prompts, for example torch.tensor([0, 0, 1, 1])."
                )
            return sent(values.detach().to(torch.int64), device)

        old, sequence = pack("old_logprobs", old_logprobs), index // max(width, 1)
        packed: dict[str, Any] = {name: pack(name, named[name]) for name in SIGNALS if name in named}
        batch = cls(
            old_logprobs=old,
            logprobs=old if logprobs is None else pack("logprobs", logprobs),
            advantages=pack("advantages", advantages),
            sequence=sequence,
            position=sent((cpu_mask.cumsum(-1) - 1).reshape(-1)[cells], device),
            sequence_ids=ids("sequence_ids", sequence_ids),
            group_ids=ids("group_ids", group_ids),
            extra={name: pack(name, values) for name, values in (extra or {}).items()},
            live_ratio=live_ratio,
            _layout=Layout(index, (rows, width), sequence),
            _grouped=group_ids is not None,
            **packed,
        )
        longest = int(cpu_mask.sum(-1).max()) if cpu_mask.numel() else 0
        vars(batch).update(_longest=longest, _cell=longest * sequence + batch.position)  # packed in this order
        return batch

    @classmethod
    def empty(cls, needs: Iterable[str] = ()) -> TokenBatch:
        """A batch without tokens that has every signal of ``needs``: what a rank without sequences measures."""
        empty, no_ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        needs = frozenset(needs) - BASICS
        signals: dict[str, Any] = dict.fromkeys(needs & SIGNALS.keys(), empty)
        signals["extra"] = dict.fromkeys(needs - SIGNALS.keys(), empty)
        return cls(empty, empty, empty, no_ids, no_ids, no_ids, no_ids, **signals)

    # -- reading it ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.sequence.numel()

    def signal(self, name: str) -> Tensor:
        """The ``(n,)`` signal of this name.

        Raises:
            MissingSignal: the batch was built without it.
        """
        values = getattr(self, name, None) if name in SIGNALS or name in BASICS else self.extra.get(name)
        if values is None:
            hint = f"It is the {SIGNALS[name]}. Pass {name}=" if name in SIGNALS else ""
            hint = hint or f"{did_you_mean(name, [*BASICS, *SIGNALS, *self.extra])} Pass extra={{'{name}': values}}"
            raise MissingSignal(
                f"signal '{name}' was read, and the batch does not have it. {hint} to TokenBatch.from_padded, or let a "
                f"trainer provide what the method's `needs` names."
            )
        return values

    def uniform(self, seed: int) -> Tensor:
        """``(n,)`` float64 uniform numbers in [0, 1) by (seed, sequence id, position)."""
        return uniform_in(seed, self.sequence_ids, self.sequence, self.position)

    @cached_property
    def rewarded(self) -> Tensor:
        """``(n,)`` bool, the advantage is positive."""
        return self.advantages > 0

    @cached_property
    def punished(self) -> Tensor:
        """``(n,)`` bool, the advantage is negative."""
        return self.advantages < 0

    def per_token(self) -> list[tuple[str, Tensor]]:
        """Name and values of every floating point ``(n,)`` tensor that is present."""
        named = [("old_logprobs", self.old_logprobs), ("logprobs", self.logprobs), ("advantages", self.advantages)]
        named += [(name, getattr(self, name)) for name in SIGNALS if getattr(self, name) is not None]
        return named + sorted(self.extra.items())

    def select(self, where: Tensor) -> TokenBatch:
        """The tokens where the ``(n,)`` bool is True; sequences keep their numbers."""
        return self._each(lambda name, values: values if name in _IDS else values[where], None)

    def to(self, device: torch.device) -> TokenBatch:
        """The batch on a device, without waiting for it: checks of its values read this one."""
        if self.sequence.device == device:
            return self
        return self._each(lambda name, values: sent(values, device), self.here)

    def _each(self, change: Callable[[str, Tensor], Tensor], here: TokenBatch | None) -> TokenBatch:
        """A batch of changed tensors, by the names of fields, without the cached values of this one or new checks."""
        attributes = {field.name: vars(self)[field.name] for field in fields(self) if field.name in vars(self)}
        tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        attributes |= {name: change(name, values) for name, values in tensors.items()}
        attributes["extra"] = {name: change("extra", values) for name, values in self.extra.items()}
        if self._layout is not None:
            attributes["_layout"] = Layout(change("_layout", self._layout.index), self._layout.shape)
        batch = object.__new__(type(self))
        vars(batch).update(attributes | {"_here": here})
        return batch

    @property
    def here(self) -> TokenBatch:
        """The batch from which :meth:`to` made this one, or this one: values are read there."""
        return self if self._here is None else self._here

    def evidence(self) -> TokenBatch:
        """What a method sees: without the padded layout, so that no method can depend on it.

        Groups that were not given are left out too: each response would be a group by itself.
        """
        if self._layout is None and self._grouped:
            return self
        bare = copy.copy(self)  # with the cached values, and without new checks
        bare.__dict__["_layout"] = None
        if not self._grouped:
            bare.__dict__.pop("group_ids", None)
        return bare

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "group_ids":
                raise MissingSignal(
                    "'group_ids' were read, and the batch has none. Pass group_ids= to TokenBatch.from_padded."
                )
            raise AttributeError(f"'TokenBatch' object has no attribute '{name}'")

    def __repr__(self) -> str:
        names = [name for name in SIGNALS if getattr(self, name) is not None] + sorted(self.extra)
        signals = "; " * bool(names) + ", ".join(names)
        return f"TokenBatch({self.num_sequences} responses, {len(self)} tokens{signals})"


def layout_of(batch: TokenBatch) -> Layout:
    """Where the tokens of a batch lie in the padded tensors.

    Raises:
        ShapeError: it was not built from any.
    """
    if batch._layout is None:
        raise ShapeError("this TokenBatch was not built by from_padded, so it has no (B, T) shape. Build it by that.")
    return batch._layout


def to_padded(batch: TokenBatch, values: Tensor, fill: float = 0.0) -> Tensor:
    """Lay the ``(n,)`` values of a batch out as ``(B, T)`` again, ``fill`` where there is no token.

    Raises:
        ShapeError: the batch was not built from padded tensors.
    """
    layout = layout_of(batch)
    rows, width = layout.shape
    flat = torch.full((rows * width,), fill, dtype=values.dtype, device=values.device)
    return flat.index_copy(0, layout.index, values).view(layout.shape)
