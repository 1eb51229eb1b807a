"""What each method would have done to the tokens of a dump."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from rlstab.core.compose import compose
from rlstab.core.objective import State, TokenObjective, no_fit_warnings
from rlstab.core.plan import make_plan
from rlstab.errors import RlstabError
from rlstab.presets import PRESETS
from rlstab.replay.host_loss import coefficients_of, formula_of
from rlstab.replay.steps import Step
from rlstab.trace.effects import trace
from rlstab.zoo import METHODS

#: Tokens of which touched ones are counted at once.
CHUNK = 1 << 16


@dataclass(frozen=True, eq=False)
class Effect:
    """What one objective would have done in one optimizer step, of ``n`` tokens.

    Attributes:
        actions: ``(n,)`` bool by action (:data:`rlstab.trace.effects.ACTIONS`), the tokens.
        weight: ``(n,)``, product of its methods' weights.
        coefficients: ``(n,)`` float64, minus the derivative of its loss by the log-prob of each token.
        shares: by action, the share of the tokens.
        touched: share of the tokens with any action.
        norm: of the gradient, in logits where their probabilities are known and in coefficients else, as a share of
            that of the plain loss.
        cosine: of its coefficients to those of the run; NaN where one of them is all zero.
        entropy: what it adds to the mean entropy to first order, per unit of learning rate and token, nats; NaN where
            entropies are not known.
    """

    actions: Mapping[str, Tensor]
    weight: Tensor
    coefficients: Tensor
    shares: Mapping[str, float]
    touched: float
    norm: float
    cosine: float
    entropy: float


@dataclass(frozen=True, eq=False)
class Effects:
    """What every objective would have done.

    Attributes:
        by_name: by the name of the method or preset, an effect per step, of the first tokens.
        overlap: Jaccard by two names: tokens that both touch, of those that either does; NaN where neither touches any.
        left_out: by name, why nothing can be said.
    """

    by_name: Mapping[str, Sequence[Effect]]
    overlap: Mapping[tuple[str, str], float]
    left_out: Mapping[str, str] = field(default_factory=dict)


def every_objective(length: int) -> dict[str, TokenObjective]:
    """Every method at its defaults, alone, and every preset.

    Args:
        length: tokens of the longest response, for the methods that have to be told.
    """
    made: dict[str, TokenObjective] = {}
    for name in METHODS.names():
        cls = METHODS.get(name)
        method = cls(length=length) if "length" in {setting.name for setting in fields(cls)} else cls()
        made[name] = compose(method)
    return made | {f"preset:{name}": recipe.objective for name, recipe in PRESETS.items()}


def effects_of(steps: Sequence[Step], objectives: Mapping[str, TokenObjective], shown: int = 0) -> Effects:
    """Replay objectives over the optimizer steps of a dump, each with its own state.

    Args:
        steps: in their order.
        objectives: by name; see :func:`every_objective`.
        shown: tokens of each step of which every objective's actions are kept.
    """
    by_name: dict[str, list[Effect]] = {name: [] for name in objectives}
    states: dict[str, State | None] = dict.fromkeys(objectives)
    left_out: dict[str, str] = {}
    names = list(objectives)
    both = torch.zeros(len(names), len(names), dtype=torch.float64)
    for step in steps:
        run, touched = run_coefficients(step), torch.zeros(len(names), len(step.batch), dtype=torch.bool)
        for row, (name, objective) in enumerate(objectives.items()):
            if name in left_out:
                continue
            try:
                effect, states[name] = effect_of(step, objective, states[name], run)
            except RlstabError as error:
                left_out[name] = _why(error, objective, step)
                continue
            touched[row] = _any(effect.actions, len(step.batch))
            first = {action: tokens[:shown].clone() for action, tokens in effect.actions.items()}
            by_name[name].append(replace(effect, actions=first, weight=effect.weight[:0], coefficients=run[:0]))
        for chunk in touched.split(CHUNK, 1):
            both += chunk.float() @ chunk.float().T
    own = both.diag()
    shares = both / (own + own[:, None] - both)
    overlap = {(a, b): float(shares[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)}
    return Effects({name: made for name, made in by_name.items() if name not in left_out}, overlap, left_out)


def _any(actions: Mapping[str, Tensor], count: int) -> Tensor:
    return torch.stack([torch.zeros(count, dtype=torch.bool), *actions.values()]).any(0)


def _why(error: RlstabError, objective: TokenObjective, step: Step) -> str:
    absent = sorted(name for name in objective.needs if getattr(step.batch, name, None) is None)
    return f"reads {', '.join(absent)}, not in the dump" if absent else str(error).splitlines()[0]


def run_coefficients(step: Step) -> Tensor:
    """``(n,)`` float64, minus the coefficients of the run's own loss: recorded, of its formula, or plain ones."""
    formula = formula_of(step)
    if "coefficients" in step.tensors:
        return -step.tensors["coefficients"][step.mask].double()
    return _plain(step) if formula is None else -coefficients_of(step, formula)[step.mask]


def effect_of(step: Step, objective: TokenObjective, state: State | None, run: Tensor) -> tuple[Effect, State]:
    """Replay an objective over one optimizer step; also its next state.

    Args:
        step: of a dump.
        objective: usually a composition.
        state: None is the initial one.
        run: ``(n,)`` minus the coefficients of the run's own loss.
    """
    batch, live = step.batch, step.live
    with no_fit_warnings():
        plan = make_plan(objective, [batch], state)
    loss = plan.loss(0, live).loss
    slope = torch.autograd.grad(loss, live.logprobs, allow_unused=True)[0] if loss.requires_grad else None
    pull = torch.zeros(len(batch), dtype=torch.float64) if slope is None else -slope.double()
    traced = trace(plan, batch, live)
    actions: dict[str, Tensor] = {}
    for method in traced.methods.values():
        for action, tokens in method.actions.items():
            actions[action] = actions[action] | tokens if action in actions else tokens
    whole, size = _norm(step, _plain(step)), float(pull.norm() * run.norm())
    effect = Effect(
        actions=actions,
        weight=traced.weight,
        coefficients=pull,
        shares={action: float(tokens.double().mean()) for action, tokens in actions.items()} if len(batch) else {},
        touched=float(_any(actions, len(batch)).double().mean()) if len(batch) else 0.0,
        norm=_norm(step, pull) / whole if whole else math.nan,
        cosine=float(pull @ run) / size if size else math.nan,
        entropy=_entropy(step, pull),
    )
    return effect, plan.state


def _plain(step: Step) -> Tensor:
    """``(n,)`` minus the coefficients of REINFORCE with a mean over tokens: nothing clipped, nothing dropped."""
    return step.batch.advantages.double() / max(len(step.batch), 1)


def _norm(step: Step, coefficients: Tensor) -> float:
    """Of the gradient in the logits, ``|c| |e - p|`` by token, where the probabilities are known; else of ``c``."""
    squares, mass = coefficients.square(), step.batch.sum_p_sq
    if mass is not None:
        squares = squares * (1 - 2 * step.batch.logprobs.double().exp() + mass.double()).clamp(min=0)
    return float(squares.sum().sqrt())


def _entropy(step: Step, pull: Tensor) -> float:
    """Minus the covariance of pull and log-prob (arXiv 2505.22617, section 4.1), with each token's own entropy as mean.

    A token that is likelier than its distribution's mean log-prob loses entropy when it is pulled up.
    """
    entropies = step.batch.entropies
    if entropies is None:
        return math.nan
    return -float((pull * (step.batch.logprobs + entropies).double()).sum())
