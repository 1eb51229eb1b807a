"""What each method would have done to the tokens of a dump."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlstab.config import load_objective
from rlstab.config.objectives import at_defaults
from rlstab.core.compose import Composition
from rlstab.core.objective import State, TokenObjective, no_fit_warnings
from rlstab.core.plan import make_plan
from rlstab.errors import RlstabError
from rlstab.presets import PRESETS
from rlstab.record import ACTIONS, Step, trace
from rlstab.replay.host_loss import formula_of, terms_of
from rlstab.safe_read import plain
from rlstab.zoo import METHODS

#: What is measured of an objective in each step, besides the share of the tokens by action.
MEASURES = ("touched", "norm", "cosine", "entropy")
#: Tokens whose overlaps are counted at a time.
CHUNK = 1 << 16


@dataclass(frozen=True, eq=False)
class Effect:
    """What one objective would have done in one optimizer step, of ``n`` tokens.

    Attributes:
        actions: ``(n,)`` bool by action (:data:`rlstab.record.ACTIONS`), the tokens.
        weight: ``(n,)``, product of its methods' weights.
        coefficients: ``(n,)`` float64, minus the derivative of its loss by the log-prob of each token.
        numbers: by action the share of the tokens, and the :data:`MEASURES`; None where one is unknown. ``touched`` is
            the share of the tokens with any action. ``norm`` is the norm of the gradient, in logits where their
            probabilities are known and otherwise in coefficients, as a share of that of the plain loss. ``cosine``
            compares its coefficients with those of the run. ``entropy`` is what the objective adds to the mean entropy
            of the tokens, nats per unit of learning rate; None without a model.
    """

    actions: Mapping[str, Tensor]
    weight: Tensor
    coefficients: Tensor
    numbers: Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class Effects:
    """What every objective would have done.

    Attributes:
        rows: by objective ``name``, the numbers of :class:`Effect` as means over steps, and under ``steps`` by step.
            Objectives that touch most tokens come first.
        actions: by the name of the method or preset and by step, see :class:`Effect`; of the first tokens.
        overlap: by two names, tokens that both touch as a share of those that either touches; NaN if neither touches
            any.
        left_out: by name, why the objective could not be replayed.
    """

    rows: Sequence[Mapping[str, Any]]
    actions: Mapping[str, Sequence[Mapping[str, Tensor]]]
    overlap: Mapping[tuple[str, str], float]
    left_out: Mapping[str, str]


def every_objective(length: int) -> dict[str, Composition]:
    """Every method at its defaults, alone, and every preset.

    Args:
        length: tokens of the longest response, for methods that need one as a setting.
    """
    made = {name: load_objective(at_defaults(name, length)) for name in METHODS.names()}
    return made | {f"preset:{name}": recipe.objective for name, recipe in PRESETS.items()}


def effects_of(steps: Sequence[Step], objectives: Mapping[str, TokenObjective], shown: int = 0) -> Effects:
    """Replay objectives over the optimizer steps of a dump, each with its own state.

    Args:
        steps: in their order.
        objectives: by name; see :func:`every_objective`.
        shown: how many tokens of each step keep their actions, for every objective.
    """
    names, left_out = list(objectives), dict[str, str]()
    actions: dict[str, list[Mapping[str, Tensor]]] = {name: [] for name in names}
    numbers: dict[str, list[Mapping[str, float | None]]] = {name: [] for name in names}
    states: dict[str, State | None] = dict.fromkeys(names)
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
            touched[row] = _any(effect.actions.values(), step)
            numbers[name].append(effect.numbers)
            actions[name].append({action: tokens[:shown].clone() for action, tokens in effect.actions.items()})
        for chunk in touched.split(CHUNK, 1):
            both += chunk.float() @ chunk.float().T
    touched_by = both.diag()
    shares = both / (touched_by + touched_by[:, None] - both)
    overlap = {(a, b): float(shares[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)}
    rows = [_row(name, numbers[name]) for name in names if name not in left_out]
    return Effects(sorted(rows, key=lambda row: (-row["touched"], row["name"])), actions, overlap, left_out)


def _row(name: str, numbers: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    steps = {column: [of_step[column] for of_step in numbers] for column in (*ACTIONS, *MEASURES)}
    known = {column: [value for value in values if value is not None] for column, values in steps.items()}
    return {
        "name": name,
        **{column: fmean(values) if values else None for column, values in known.items()},
        "steps": steps,
    }


def _any(actions: Iterable[Tensor], step: Step) -> Tensor:
    """``(n,)`` bool, the tokens with any of the actions."""
    return torch.stack([torch.zeros(len(step.batch), dtype=torch.bool), *actions]).any(0)


def _why(error: RlstabError, objective: TokenObjective, step: Step) -> str:
    absent = sorted(name for name in objective.needs if getattr(step.batch, name, None) is None)
    return f"reads {', '.join(absent)}, not in the dump" if absent else str(error).splitlines()[0]


def run_coefficients(step: Step) -> Tensor:
    """``(n,)`` float64, minus the coefficients of the run's loss: as recorded, by its formula, or those of a plain
    loss.
    """
    formula = formula_of(step)
    if "coefficients" in step.tensors:
        return -step.tensors["coefficients"][step.mask].double()
    return _plain(step) if formula is None else -terms_of(formula, step, "gradient").sum(1)[step.mask]


def effect_of(step: Step, objective: TokenObjective, state: State | None, run: Tensor) -> tuple[Effect, State]:
    """Replay an objective over one optimizer step; also its next state.

    Args:
        step: of a dump.
        objective: usually a composition.
        state: None is the initial one.
        run: ``(n,)`` minus the coefficients of the run's loss.
    """
    batch, live = step.batch, step.live
    with no_fit_warnings():
        plan = make_plan(objective, [batch], state)
    loss = plan.loss(0, live).loss
    slope = torch.autograd.grad(loss, live.logprobs, allow_unused=True)[0] if loss.requires_grad else None
    pull = torch.zeros(len(batch), dtype=torch.float64) if slope is None else -slope.double()
    traced = trace(plan, batch, live)
    methods = [method.actions for method in traced.methods.values()]
    actions = {action: _any([taken[action] for taken in methods if action in taken], step) for action in ACTIONS}
    shares = {**actions, "touched": _any(actions.values(), step)}
    whole, size = _norm(step, _plain(step)), float(pull.norm() * run.norm())
    numbers = {
        **{name: float(tokens.sum()) / max(len(batch), 1) for name, tokens in shares.items()},
        "norm": _norm(step, pull) / whole if whole else math.nan,
        "cosine": float(pull @ run) / size if size else math.nan,
        "entropy": _entropy(step, pull),
    }
    return Effect(actions, traced.weight, pull, plain(numbers)), plan.state


def _plain(step: Step) -> Tensor:
    """``(n,)`` minus the coefficients of REINFORCE with a mean over tokens: nothing clipped, nothing dropped."""
    return step.batch.advantages.double() / max(len(step.batch), 1)


def _norm(step: Step, coefficients: Tensor) -> float:
    """The norm of the gradient in the logits, ``|c| |e - p|`` by token; of ``c`` if probabilities are unknown."""
    squares, mass = coefficients.square(), step.batch.sum_p_sq
    if mass is not None:
        squares = squares * (1 - 2 * step.batch.logprobs.double().exp() + mass.double()).clamp(min=0)
    return float(squares.sum().sqrt())


def _entropy(step: Step, pull: Tensor) -> float:
    slopes = step.tensors.get("entropy_slopes")  # of a model: see rlstab.replay.forward
    return math.nan if slopes is None else float(pull @ slopes[step.mask].double())
