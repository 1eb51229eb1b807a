"""What each method would have done, added to the objective of the run or in place of what it excludes."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from rlstab.adapters.host_correction import CORRECTION, HostCorrection
from rlstab.config import load_objective
from rlstab.config.objectives import at_defaults
from rlstab.core.compose import Composition, compose
from rlstab.core.objective import State, TokenObjective, no_fit_warnings
from rlstab.core.plan import make_plan
from rlstab.errors import Conflict, RlstabError
from rlstab.files import is_file
from rlstab.look.gradient import pulls
from rlstab.look.host_loss import summed
from rlstab.look.recorded_loss import loss_of
from rlstab.presets import PRESETS
from rlstab.record import Step, Trace, trace
from rlstab.report.formatting import listed
from rlstab.zoo import METHODS

#: Limits of tokens and optimizer steps on which methods are tried; from a longer dump, steps at equal distances.
MOST_TOKENS, MOST_STEPS = 1_000_000, 24
#: Number of responses whose tokens are shown, for each alternative.
RESPONSES = 8
#: A method has not acted if it turns the gradient by less than the first, in degrees, and changes its length by less
#: than the second, a share.
TURN, LENGTH = 2.0, 0.02
#: What a method acts on, determined by the first of these fields of Terms that it writes, in the order of the page.
ACTS_ON = {
    "correction": "The sampler's weight",
    "tokens": "Which tokens count, and how much",
    "mean": "The mean",
    "region": "The trust region",
    "penalty": "A penalty",
    "rate": "The learning rate",
}
#: Corrections in use, as settings of `importance_correction`; see its docstring.
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "token, cap 2 (TIS)": {"max_weight": 2.0},
    "token, mask .5 to 5 (IcePop)": {"max_weight": None, "keep_low": 0.5, "keep_high": 5.0},
    "sequence, cap 2": {"level": "sequence", "max_weight": 2.0},
    "sequence, mask 3 (TRL)": {"level": "sequence", "max_weight": None, "keep_high": 3.0},
    "geometric, .999 to 1.001": {
        **{"level": "geometric", "min_weight": 1.0, "max_weight": 1.0},
        **{"keep_low": 0.999, "keep_high": 1.001},
    },
}


@dataclass(frozen=True)
class Objective:
    """What the trainer of a dump minimises, as far as methods can express it.

    Attributes:
        members: methods.
        told: what is not exact about it; may be empty.
    """

    members: tuple[TokenObjective, ...]
    told: str


@dataclass(frozen=True)
class Top:
    """A response with a large share of the gradient under one objective.

    Attributes:
        step, response: index of the step in the dump and of the response in its step.
        share: the part of the gradient that the response has.
        tokens: ``T`` signed shares; 0 on tokens that do not count in the loss.
        did: the tokens that each action affected, by action such as ``s2t: dropped``.
        ratio, weight: ``T`` each, of the loss; None on tokens that do not count, or whose ratio is unknown.
    """

    step: int
    response: int
    share: float
    tokens: list[float]
    did: Mapping[str, list[int]]
    ratio: list[float | None]
    weight: list[float | None]


@dataclass
class Alternative:
    """What one change of the objective would have done to the gradient of some steps.

    Attributes:
        objective: after the change.
        name: what the method, correction or preset is called.
        acts_on: a key of :data:`ACTS_ON`, ``preset`` or ``run``.
        joins: ``added``, or ``in place of`` what it excludes.
        keys: the keys of the added methods in the composition.
        turn: mean angle to the gradient of the run, degrees.
        length: median length of the gradient, where that of the run is 1.
        actions: the mean share of the tokens that each action of :data:`rlstab.record.ACTIONS` affected.
        top: the :data:`RESPONSES` responses with the largest shares of the gradient.
    """

    objective: TokenObjective
    name: str
    acts_on: str
    joins: str
    keys: frozenset[str] = frozenset()
    turn: float = 0.0
    length: float = 1.0
    actions: Mapping[str, float] = field(default_factory=dict)
    top: Sequence[Top] = ()

    @property
    def acts(self) -> bool:
        """Whether it changes the gradient visibly."""
        return self.turn >= TURN or abs(self.length - 1) >= LENGTH


@dataclass(frozen=True)
class Alternatives:
    """What every change would have done.

    Attributes:
        own: the objective of the run, with its largest responses.
        rows: those of methods, by group and turn.
        presets: whole objectives in place of the run's own, the nearest first.
        left_out: why an alternative could not be tried, by name.
        numbers: the numbers of the optimizer steps that were examined.
        told: what is not exact about the objective of the run.
        members: its methods.
    """

    own: Alternative
    rows: Sequence[Alternative]
    presets: Sequence[Alternative]
    left_out: Mapping[str, str]
    numbers: Sequence[int]
    told: str
    members: Sequence[str]


def alternatives_of(steps: Sequence[Step], asked: Mapping[str, TokenObjective] | None = None) -> Alternatives:
    """Try every method and preset on the tokens of a dump.

    Args:
        steps: usable ones, in their order.
        asked: objectives by name instead of all; each is added like a method.
    """
    run, sizes = own_objective(steps), [len(step.batch) for step in steps]
    stride = max(1, math.ceil(sum(sizes) / MOST_TOKENS), math.ceil(len(steps) / MOST_STEPS))
    chosen_steps = {index: steps[index] for index in range(0, len(steps), stride) if sizes[index]}
    left_out: dict[str, str] = {}
    with no_fit_warnings():
        current = Alternative(compose(*run.members), "this run\u2019s objective", "run", "")
        longest = max((int(step.tensors["lengths"].max()) for step in chosen_steps.values()), default=1)
        methods = {name: (_acts_on(method), method) for name, method in (asked or {}).items()}
        alternatives = list(_joined(run, _every(run, longest) if asked is None else methods, left_out))
        if asked is None:
            alternatives += [Alternative(recipe.objective, name, "preset", "") for name, recipe in PRESETS.items()]
    gradients = _try(current, chosen_steps)
    for alternative in alternatives:
        if alternative.name in left_out:  # a preset may be named as a method
            continue
        try:
            _try(alternative, chosen_steps, gradients)
        except RlstabError as error:
            left_out[alternative.name] = why(error, alternative.objective, chosen_steps.values())
    tried = [alternative for alternative in alternatives if alternative.name not in left_out]
    order = list(ACTS_ON)
    rows = [row for row in tried if row.acts_on in ACTS_ON]
    return Alternatives(
        own=current,
        rows=sorted(rows, key=lambda row: (order.index(row.acts_on), -row.turn, -abs(row.length - 1))),
        presets=sorted((row for row in tried if row.acts_on == "preset"), key=lambda row: row.turn),
        left_out=left_out,
        numbers=[step.number for step in chosen_steps.values()],
        told=run.told,
        members=[repr(member) for member in run.members],
    )


# -- the objective of the run ------------------------------------------------------------------------------------------


def own_objective(steps: Sequence[Step]) -> Objective:
    """What the trainer of a dump minimises, as methods.

    An unknown loss becomes a clip at 0.2 and a mean over tokens; ``told`` says so.
    """
    losses = filter(None, map(loss_of, steps))
    loss = next((loss for loss in losses if loss.objective is not None), None)
    with no_fit_warnings():
        if loss is not None and loss.objective is not None:
            recorded = [f"What {name} did, whose code is not loaded, is as the dump has it." for name in loss.unloaded]
            return Objective(loss.objective.members, " ".join([*loss.nearly, *recorded]))
        correction = [HostCorrection()] if any("weights" in step.tensors for step in steps) else []
        remark = "No methods are known for the loss of the dump. A clip at 0.2 and a mean over tokens stand for it."
        return Objective(compose(*load_objective(["clip_higher", "token_mean"]).members, *correction).members, remark)


def chosen(names: Sequence[str], length: int) -> Mapping[str, TokenObjective]:
    """Objectives by the name of a method or preset, the path of a file, or ``file.py:Class``; all if no name is given.

    Args:
        names: the names of objectives.
        length: tokens of the longest response, for methods that need one as a setting.
    """
    objectives: dict[str, TokenObjective] = {}
    with no_fit_warnings():  # methods stand alone, without what they were published with
        for name in names:
            preset = PRESETS.get(name.removeprefix("preset:"))
            if name in METHODS.names():
                objectives[name] = load_objective(at_defaults(name, length))
            elif preset is not None:
                objectives[name] = preset.objective
            else:
                objectives[name] = load_objective(name if is_file(name) else {"name": name})
    return objectives


# -- changes of it -----------------------------------------------------------------------------------------------------


def _every(own: Objective, longest: int) -> dict[str, tuple[str, TokenObjective | None]]:
    """By name, what each method acts on and the method; None removes the correction of the run."""
    changes: dict[str, tuple[str, TokenObjective | None]] = {}
    for name, settings in CORRECTIONS.items():
        changes[name] = "correction", load_objective([{"name": "importance_correction", **settings}])
    if any(_acts_on(member) == "correction" for member in own.members):
        changes["no correction"] = "correction", None
    methods = every_method(longest).items()
    return changes | {name: (_acts_on(method), method) for name, method in methods if name != "importance_correction"}


def every_method(length: int) -> dict[str, Composition]:
    """Every method at its defaults; ``length`` is that of the longest response, for methods that need it."""
    return {name: load_objective(at_defaults(name, length)) for name in METHODS.names()}


def _acts_on(method: TokenObjective) -> str:
    """A key of :data:`ACTS_ON`."""
    writes = method.writes
    if writes <= {"weight", "keep"} and {"rollout_logprobs", CORRECTION} & method.needs:
        return "correction"
    if "aggregate" in writes:
        return "mean"
    if writes & {"bounds", "gates", "ratio", "surrogate", "unclipped"}:
        return "region"
    if writes & {"keep", "weight", "bonus"}:
        return "tokens"
    return "penalty" if "penalties" in writes else "rate"


def _joined(
    run: Objective, changes: Mapping[str, tuple[str, TokenObjective | None]], left_out: dict[str, str]
) -> Iterator[Alternative]:
    """The objective with each change: added, or in place of the fewest members that it cannot be combined with."""
    for name, (acts_on, method) in changes.items():
        added = () if method is None else method.members if isinstance(method, Composition) else (method,)
        if absent := sorted(set().union(*(member.live_needs for member in added)) - {"logprobs"}):
            left_out[name] = f"its gradient runs through the live {listed(absent)}, and a dump has that of log-probs"
            continue
        names = {member.name for member in added}
        replaced = [
            member
            for member in run.members
            if member.name in names or (acts_on == "correction" and _acts_on(member) == "correction")
        ]
        rest, refusal = [member for member in run.members if member not in replaced], ""
        for gone in itertools.chain(*(itertools.combinations(rest, size) for size in range(len(rest) + 1))):
            try:
                objective = compose(*(member for member in rest if member not in gone), *added)
            except Conflict as conflict:
                refusal = refusal or str(conflict).splitlines()[0]
                continue
            out = ["the correction" if _acts_on(x) == "correction" else x.name for x in (*replaced, *gone)]
            keys = frozenset(key for key, member in objective.keyed.items() if any(member is x for x in added))
            yield Alternative(objective, name, acts_on, f"in place of {listed(out)}" if out else "added", keys)
            break
        else:
            left_out[name] = refusal


# -- the comparison ----------------------------------------------------------------------------------------------------


def effect_of(step: Step, objective: TokenObjective, state: State | None) -> tuple[Tensor, Trace, State]:
    """What an objective would have done in one optimizer step of ``n`` tokens.

    Args:
        step: a step of a dump.
        objective: usually a composition.
        state: None is the initial one.

    Returns:
        ``(n,)`` float64, minus the derivative of its loss by the log-prob of each token; what each of its methods did;
        its next state.
    """
    batch, live = step.batch, step.live
    with no_fit_warnings():
        plan = make_plan(objective, [batch], state)
    loss = plan.loss(0, live).loss
    slope = torch.autograd.grad(loss, live.logprobs, allow_unused=True)[0] if loss.requires_grad else None
    coefficients = torch.zeros(len(batch), dtype=torch.float64) if slope is None else -slope.double()
    return coefficients, trace(plan, batch, live), plan.state


def why(error: RlstabError, objective: TokenObjective, steps: Iterable[Step]) -> str:
    """Why an objective could not be tried."""
    batches = [step.batch for step in steps]
    absent = sorted(
        name
        for name in objective.needs
        if any(name not in batch.extra and getattr(batch, name, None) is None for batch in batches)
    )
    return f"reads {', '.join(absent)}, not in the dump" if absent else str(error).splitlines()[0]


def _try(alternative: Alternative, steps: Mapping[int, Step], of_run: Sequence[Tensor] = ()) -> list[Tensor]:
    """Fill in what an objective would have done.

    Args:
        alternative: without figures.
        steps: the steps of a dump, by index.
        of_run: the gradient of the run, by step; empty for the run itself.

    Returns:
        by step, ``(n,)`` the gradient of the objective in the logits.

    Raises:
        RlstabError: it cannot be planned for a step.
    """
    state: dict[str, Any] = {**alternative.objective.init_state()}
    shares: dict[str, float] = {}
    turns, lengths, gradients, tops, total = list[float](), list[float](), list[Tensor](), list[Top](), 0.0
    for index, step in steps.items():
        batch, loss_of_run = step.batch, step.header.loss
        recorded: Any = {} if loss_of_run is None else loss_of_run.settings.get("state") or {}
        state |= {key: value for key, value in recorded.items() if key in state}
        coefficients, traced, next_state = effect_of(step, alternative.objective, state)
        state = {**alternative.objective.init_state(), **next_state}
        for key in alternative.keys:
            for action, mask in traced.methods[key].actions.items():
                shares[action] = shares.get(action, 0.0) + float(mask.double().mean())
        pulled = gradient = pulls(step, coefficients)
        if batch.sum_p_sq is not None:
            distance = 1 - 2 * batch.logprobs.double().exp() + batch.sum_p_sq.double()
            gradient = coefficients * distance.clamp(min=0).sqrt()
        gradients.append(gradient)
        if of_run and (length_of_run := float(of_run[len(gradients) - 1].norm())):
            length = float(gradient.norm())
            cosine = float(of_run[len(gradients) - 1] @ gradient) / (length_of_run * length) if length else 0.0
            turns.append(math.degrees(math.acos(min(1.0, max(-1.0, cosine)))))
            lengths.append(length / length_of_run)
        if alternative.acts_on != "preset":
            sums = summed(pulled.abs(), step.row[step.mask], len(step.tensors["lengths"]))
            total += float(sums.sum())
            least = tops[-1].share if len(tops) == RESPONSES else -1.0
            for response in sums.topk(min(RESPONSES, len(sums))).indices.tolist():
                # the run is read where it has no gradient, too
                if sums[response] > least and (sums[response] > 0 or alternative.acts_on == "run"):
                    tops.append(_top(step, index, response, float(sums[response]), pulled, traced))
            tops = sorted(tops, key=lambda top: -top.share)[:RESPONSES]
    if turns:
        alternative.turn, alternative.length = fmean(turns), median(lengths)
    alternative.actions = {action: share / len(steps) for action, share in shares.items() if share}
    scale = total or 1.0
    alternative.top = [
        replace(top, share=top.share / scale, tokens=[value / scale for value in top.tokens]) for top in tops
    ]
    return gradients


def _top(step: Step, index: int, response: int, share: float, pulled: Tensor, traced: Trace) -> Top:
    """A response: the gradient, what methods did, the ratio and the weight, by token."""

    def of_response(values: Tensor, absent: float) -> Tensor:
        tokens = torch.full((len(step.mask),), absent, dtype=values.dtype)
        return tokens.masked_scatter(step.mask, values)[step.row == response]

    affected = {
        f"{method.name}: {action}": tokens
        for method in traced.methods.values()
        for action, mask in method.actions.items()
        if (tokens := of_response(mask, False).nonzero().flatten().tolist())
    }
    ratio, weight = (
        [value if math.isfinite(value) else None for value in of_response(values, math.nan).tolist()]
        for values in (traced.ratio, traced.weight)
    )
    return Top(index, response, share, of_response(pulled, 0.0).tolist(), affected, ratio, weight)
