"""What each method would have done to the tokens of a dump."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from rlstab.core.compose import compose
from rlstab.core.objective import State, TokenObjective, no_fit_warnings
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.errors import RlstabError
from rlstab.presets import PRESETS
from rlstab.replay.steps import Step
from rlstab.trace.effects import ACTIONS, Trace, trace
from rlstab.zoo import METHODS


@dataclass(frozen=True, eq=False)
class Effect:
    """What one objective would have done in one optimizer step, of ``n`` tokens.

    Attributes:
        shares: by action (:data:`rlstab.trace.effects.ACTIONS`), the share of the tokens.
        coefficients: ``(n,)`` float64, minus the derivative of its loss by the log-prob of each token.
        norm: of the gradient, in logits where their probabilities are known and in coefficients else, as a share of
            that of the plain loss.
        cosine: of its coefficients to those of the run; NaN where one of them is all zero.
        entropy: what it adds to the mean entropy to first order, per unit of learning rate and token, nats; NaN where
            entropies are not known.
        touched: ``(n,)`` bool, tokens with any action.
        trace: by token.
    """

    shares: Mapping[str, float]
    coefficients: Tensor
    norm: float
    cosine: float
    entropy: float
    touched: Tensor
    trace: Trace


@dataclass(frozen=True, eq=False)
class Effects:
    """What every objective would have done.

    Attributes:
        steps: numbers of the optimizer steps.
        by_name: an effect per step, by the name of the method or preset.
        left_out: by name, why nothing can be said.
    """

    steps: Sequence[int]
    by_name: Mapping[str, Sequence[Effect]]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def overlap(self, one: str, other: str) -> float:
        """Jaccard: tokens that both touch, of those that either does; NaN where neither touches any."""
        both = either = 0
        for a, b in zip(self.by_name[one], self.by_name[other], strict=True):
            both, either = both + int((a.touched & b.touched).sum()), either + int((a.touched | b.touched).sum())
        return both / either if either else math.nan


def every_objective(length: int) -> dict[str, TokenObjective]:
    """Every method at its defaults, with those that it requires, and every preset.

    Args:
        length: tokens of the longest response, for the methods that have to be told.
    """
    made: dict[str, TokenObjective] = {}
    for name in METHODS.names():
        cls = METHODS.get(name)
        told = {"length": length} if "length" in {setting.name for setting in fields(cls) if _required(setting)} else {}
        method = cls(**told)
        made[name] = compose(method, *(METHODS.get(other)() for other in method.requires if other in METHODS.names()))
    return made | {f"preset:{name}": recipe.objective for name, recipe in PRESETS.items()}


def _required(setting: Field[Any]) -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def effects_of(steps: Sequence[Step], objectives: Mapping[str, TokenObjective], run: Sequence[Tensor]) -> Effects:
    """Replay objectives over the optimizer steps of a dump, each with its own state.

    Args:
        steps: in their order.
        objectives: by name; see :func:`every_objective`.
        run: by step, ``(n,)`` coefficients of the run's own loss.
    """
    by_name: dict[str, list[Effect]] = {}
    left_out: dict[str, str] = {}
    plain = [_norm(step, _plain(step)) for step in steps]
    for name, objective in objectives.items():
        try:
            by_name[name] = list(_replayed(steps, objective, run, plain))
        except RlstabError as error:
            left_out[name] = _why(error, objective, steps)
    return Effects([step.number for step in steps], by_name, left_out)


def _why(error: RlstabError, objective: TokenObjective, steps: Sequence[Step]) -> str:
    absent = sorted({name for step in steps for name in objective.needs if getattr(step.batch, name, None) is None})
    return f"reads {', '.join(absent)}, not in the dump" if absent else str(error).splitlines()[0]


def _replayed(
    steps: Sequence[Step], objective: TokenObjective, run: Sequence[Tensor], plain: Sequence[float]
) -> Iterable[Effect]:
    state: State | None = None
    for step, own, whole in zip(steps, run, plain, strict=True):
        batch = step.batch
        with no_fit_warnings():
            plan = make_plan(objective, [batch], state)
        state = plan.state
        live = {"logprobs": batch.logprobs} | {
            name: batch.signal(name) for name in objective.live_needs if name != "logprobs"
        }
        held = {name: values.clone().requires_grad_() for name, values in live.items()}
        policy = PolicyOutputs(**held)
        slopes = _slopes(plan.loss(0, policy).loss, held)
        traced = trace(plan, batch, policy)
        actions = {action: torch.zeros_like(traced.kept) for action in ACTIONS}
        for method in traced.methods.values():
            for action, tokens in method.actions.items():
                actions[action] |= tokens
        actions["dropped"] |= ~traced.kept
        pull = -slopes
        yield Effect(
            shares={action: float(tokens.double().mean()) if len(batch) else 0.0 for action, tokens in actions.items()},
            coefficients=pull,
            norm=_norm(step, pull) / whole if whole else math.nan,
            cosine=_cosine(pull, -own.double()),
            entropy=_entropy(step, pull),
            touched=torch.stack(list(actions.values())).any(0),
            trace=traced,
        )


def _slopes(loss: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """``(n,)`` float64 derivatives by the log-probs; a loss without any has zeros."""
    logprobs = held["logprobs"]
    if not loss.requires_grad:
        return torch.zeros_like(logprobs, dtype=torch.float64)
    (slope,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return torch.zeros_like(logprobs, dtype=torch.float64) if slope is None else slope.double()


def _plain(step: Step) -> Tensor:
    """``(n,)`` minus the coefficients of REINFORCE with a mean over tokens: nothing clipped, nothing dropped."""
    return step.batch.advantages.double() / max(len(step.batch), 1)


def _norm(step: Step, coefficients: Tensor) -> float:
    """Of the gradient in the logits, ``|c| |e - p|`` by token, where the probabilities are known; else of ``c``."""
    squares, mass = coefficients.square(), step.batch.sum_p_sq
    if mass is not None:
        squares = squares * (1 - 2 * step.batch.logprobs.double().exp() + mass.double()).clamp(min=0)
    return float(squares.sum().sqrt())


def _cosine(one: Tensor, other: Tensor) -> float:
    size = float(one.norm() * other.norm())
    return float(one @ other) / size if size else math.nan


def _entropy(step: Step, pull: Tensor) -> float:
    """Minus the covariance of pull and log-prob (arXiv 2505.22617, section 4.1), with each token's own entropy as mean.

    A token that is likelier than its distribution's mean log-prob loses entropy when it is pulled up.
    """
    entropies = step.batch.entropies
    if entropies is None:
        return math.nan
    return -float((pull * (step.batch.logprobs + entropies).double()).sum())


def overlaps(effects: Effects, names: Sequence[str]) -> dict[tuple[str, str], float]:
    """Jaccard of every two that touch a token."""
    acting = [name for name in names if any(bool(effect.touched.any()) for effect in effects.by_name[name])]
    return {pair: effects.overlap(*pair) for pair in combinations(acting, 2)}
