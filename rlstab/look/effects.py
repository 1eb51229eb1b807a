"""What an objective would have done to the tokens of a dump in one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from rlstab.core.objective import State, TokenObjective, no_fit_warnings
from rlstab.core.plan import make_plan
from rlstab.errors import RlstabError
from rlstab.look.host_loss import formula_of, terms_of
from rlstab.record import ACTIONS, Step, Trace, trace


@dataclass(frozen=True, eq=False)
class Effect:
    """What one objective would have done in one optimizer step, of ``n`` tokens.

    Attributes:
        coefficients: ``(n,)`` float64, minus the derivative of its loss by the log-prob of each token.
        trace: what each of its methods did.
    """

    coefficients: Tensor
    trace: Trace

    @property
    def actions(self) -> Mapping[str, Tensor]:
        """``(n,)`` bool by action (:data:`rlstab.record.ACTIONS`), the tokens to which any of its methods did it."""
        none = torch.zeros(len(self.coefficients), dtype=torch.bool)
        every = [method.actions for method in self.trace.methods.values()]
        return {
            action: reduce(torch.logical_or, (taken[action] for taken in every if action in taken), none)
            for action in ACTIONS
        }


def effect_of(step: Step, objective: TokenObjective, state: State | None) -> tuple[Effect, State]:
    """Replay an objective over one optimizer step; also its next state.

    Args:
        step: of a dump.
        objective: usually a composition.
        state: None is the initial one.
    """
    batch, live = step.batch, step.live
    with no_fit_warnings():
        plan = make_plan(objective, [batch], state)
    loss = plan.loss(0, live).loss
    slope = torch.autograd.grad(loss, live.logprobs, allow_unused=True)[0] if loss.requires_grad else None
    coefficients = torch.zeros(len(batch), dtype=torch.float64) if slope is None else -slope.double()
    return Effect(coefficients, trace(plan, batch, live)), plan.state


def why(error: RlstabError, objective: TokenObjective, step: Step) -> str:
    """Why nothing can be said of an objective."""
    there = step.batch.extra
    absent = sorted(name for name in objective.needs if name not in there and getattr(step.batch, name, None) is None)
    return f"reads {', '.join(absent)}, not in the dump" if absent else str(error).splitlines()[0]


def run_coefficients(step: Step) -> Tensor:
    """``(n,)`` float64, minus the coefficients of the run's loss: as recorded, by its formula, or those of a plain
    loss.
    """
    formula = formula_of(step)
    if "coefficients" in step.tensors:
        return -step.tensors["coefficients"][step.mask].double()
    if formula is None:  # REINFORCE with a mean over tokens
        return step.batch.advantages.double() / max(len(step.batch), 1)
    return -terms_of(formula, step, "gradient").sum(1)[step.mask]
