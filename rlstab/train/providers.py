"""Signals and advantages of the user's own: functions of what a rollout holds, checked at the door."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlstab.errors import ConfigError, NonFinite, ShapeError
from rlstab.signals import TRAINER_SIGNALS
from rlstab.tasks import Example


@dataclass(frozen=True)
class Responses:
    """The ``R`` responses of this rank in one rollout, whole groups of them. The tensors are copies.

    Attributes:
        examples: ``R``, the prompt and answer of each response.
        texts: ``R``, the responses decoded.
        response_ids: ``(R, T)`` int64, on the device of the policy.
        response_mask: ``(R, T)`` bool, True up to and including the end.
        signals: ``(R, T)`` float32 by name, what is known of the tokens already: ``rollout_logprobs``, ``entropies``
            and what else the objective reads; 0 where there is no token.
        rewards: ``(R,)`` float64, on the CPU as are the ids.
        sequence_ids, group_ids: ``(R,)`` int64, unique over the run and over all ranks.
    """

    examples: tuple[Example, ...]
    texts: tuple[str, ...]
    response_ids: Tensor
    response_mask: Tensor
    signals: Mapping[str, Tensor]
    rewards: Tensor
    sequence_ids: Tensor
    group_ids: Tensor

    def copy(self) -> Responses:
        """With tensors of its own: what a function of the user's does to them in place changes nothing else."""
        return Responses(
            self.examples,
            self.texts,
            self.response_ids.clone(),
            self.response_mask.clone(),
            {name: values.clone() for name, values in self.signals.items()},
            self.rewards.clone(),
            self.sequence_ids.clone(),
            self.group_ids.clone(),
        )


#: ``(R, T)`` float values of a signal. A pure function of the responses, or a resumed run would differ.
SignalProvider: TypeAlias = Callable[[Responses], Tensor]
#: ``(R,)`` or ``(R, T)`` float advantages, in place of the configured estimator. Pure as well.
AdvantageProvider: TypeAlias = Callable[[Responses], Tensor]


@dataclass(frozen=True)
class Providers:
    """What a run was given beside its configuration.

    Attributes:
        signals: by the name that a method reads it under.
        advantages: None takes the configured estimator.
    """

    signals: Mapping[str, SignalProvider]
    advantages: AdvantageProvider | None = None

    def __post_init__(self) -> None:
        for name in sorted(self.signals.keys() & (TRAINER_SIGNALS | {"old_logprobs", "advantages"})):
            raise ConfigError(
                f"signals: '{name}' is a signal of rlstab's own, which the trainer makes. Call yours by another name."
            )

    def __bool__(self) -> bool:
        return bool(self.signals) or self.advantages is not None

    def in_words(self) -> dict[str, Any]:
        """Their names, for ``run.json``."""
        return {
            "signals": {name: _name(one) for name, one in sorted(self.signals.items())},
            "advantages": None if self.advantages is None else _name(self.advantages),
        }

    def signals_of(self, responses: Responses, needs: frozenset[str]) -> dict[str, Tensor]:
        """``(R, T)`` values of the signals that the objective needs; on the device of the policy.

        Raises:
            ShapeError, NonFinite: what a provider returned is no such tensor.
        """
        found = {}
        for name in sorted(self.signals.keys() & needs):
            values = torch.zeros(responses.response_mask.shape)
            if len(responses.texts):  # a rank without responses has nothing to ask about
                values = _checked(self.signals[name](responses.copy()), f"signals['{name}']", responses, per_token=True)
            found[name] = values.to(responses.response_mask.device)
        return found

    def advantages_of(self, responses: Responses) -> Tensor | None:
        """``(R,)`` or ``(R, T)`` float32 advantages on the CPU, None where the estimator makes them.

        Raises:
            ShapeError, NonFinite: what the provider returned is no such tensor.
        """
        if self.advantages is None:
            return None
        if not len(responses.texts):
            return torch.zeros(0)
        return _checked(self.advantages(responses.copy()), "advantages", responses, per_token=False).float().cpu()


def _checked(values: object, name: str, responses: Responses, *, per_token: bool) -> Tensor:
    """Detached, and 0 where there is no token."""
    mask = responses.response_mask
    allowed = [tuple(mask.shape)] if per_token else [tuple(mask.shape[:1]), tuple(mask.shape)]
    if not isinstance(values, Tensor) or not values.is_floating_point() or tuple(values.shape) not in allowed:
        what = f"{values.dtype} of {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        wanted = " or ".join(map(str, allowed))
        raise ShapeError(f"{name} returned {what}, expected a floating point tensor of {wanted}. Change its function.")
    values = values.detach().to(mask.device)
    if values.ndim == 2:
        values = torch.where(mask, values, 0.0)
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise NonFinite(f"{name} returned {bad} values that are NaN or Inf on response tokens. Change its function.")
    return values


def _name(provider: Callable[..., Any]) -> str:
    named = provider if hasattr(provider, "__qualname__") else type(provider)
    return f"{named.__module__}.{named.__qualname__}"
