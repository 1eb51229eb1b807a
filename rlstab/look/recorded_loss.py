"""The loss that a dump says its trainer minimises: as an objective, and as a formula that known errors change."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlstab.adapters.host_correction import HostCorrection
from rlstab.adapters.host_objective import (
    OVER_TOKENS,
    Methods,
    check_value,
    deviations_of,
    methods_of,
    settings_of_trl,
    verl_deviations_of,
    verl_objective_of,
)
from rlstab.adapters.training import with_empty_responses
from rlstab.config import load_objective
from rlstab.config.user_code import code_in, portable
from rlstab.core.batch import BASICS, TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.compose import Composition, compose
from rlstab.core.objective import State, no_fit_warnings
from rlstab.core.plan import Plan, Scope, make_plan
from rlstab.errors import ConfigError, RlstabError
from rlstab.hosts import facts, own_correction
from rlstab.record import Step
from rlstab.record.effects import objective_of


@dataclass(frozen=True)
class Formula:
    """TRL's clipped policy-gradient loss, by what trainers were seen to get wrong.

    Attributes:
        mean: what the sum of a micro-batch is divided by: tokens of the optimizer step over all ranks (``step``), those
            of its rank (``rank``), tokens of the micro-batch (``part``), the tokens of each response and then responses
            (``response``), or responses times ``length`` (``constant``). All but ``step`` and ``rank`` are averaged
            over the micro-batches of a rank.
        low, high: the clip range is from ``1 - low`` to ``1 + high``.
        cap: the ratio is never above it, before the clip (TRL's ``delta``).
        bound: the ``larger`` of the losses with and without the clip counts, the ``smaller``, or the ``clipped`` one.
        weight: the clipped ratio is a weight of the log-prob (CISPO).
        is_held: whether that weight is a constant, without a gradient.
        beta: coefficient of the KL term.
        estimator: how the KL term is estimated, ``k1``, ``k2``, ``k3`` or ``k3_unbiased``.
        is_exchanged: the two policies of the KL term are exchanged.
        entropy: coefficient of the entropy bonus, a mean over the tokens of each micro-batch.
        sequence: the ratio is the geometric mean over the response; ``product``, the product; ``unmasked``, the
            geometric mean over all of its tokens, including those that do not count in the loss.
        length: the constant of ``constant``.
        tokens: denominator of ``step``; 0 counts the tokens of the step.
    """

    mean: Literal["step", "rank", "part", "response", "constant"] = "step"
    low: float = 0.2
    high: float = 0.2
    cap: float = math.inf
    bound: Literal["larger", "smaller", "clipped"] = "larger"
    weight: bool = False
    is_held: bool = True
    beta: float = 0.0
    estimator: str = "k3"
    is_exchanged: bool = False
    entropy: float = 0.0
    sequence: bool | Literal["product", "unmasked"] = False
    length: float = 1.0
    tokens: float = 0.0


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss that a trainer says it minimises.

    Attributes:
        objective: its methods; None if no methods have its settings.
        formula: the host's, which is the loss exactly; None if the objective is evaluated instead.
        state, scope: what the objective is planned with.
        scale: the loss is this multiple of the formula, or of the objective.
        by_gradient: only the gradient of the objective is that of the loss, not its value.
        nearly: a sentence for each way in which the objective differs from the loss.
        unloaded: user-defined methods for which what they did stands in.
        settings: the host's, by its names.
        with_empty: whether responses without tokens count in a mean over responses, as in TRL.
    """

    objective: Composition | None
    formula: Formula | None = None
    state: State | None = None
    scope: Scope = "step"
    scale: float = 1.0
    by_gradient: bool = False
    nearly: Sequence[str] = ()
    unloaded: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    with_empty: bool = False

    def plan(self, parts: Sequence[TokenBatch]) -> Plan:
        """The decisions of the objective in an optimizer step of these parts."""
        assert self.objective is not None
        with no_fit_warnings(), warnings.catch_warnings(action="ignore"):
            plan = make_plan(self.objective, parts, self.state, scope=self.scope)
        return with_empty_responses(plan, parts, LocalComm()) if self.with_empty else plan


def loss_of(step: Step) -> Loss | None:
    """The loss that the trainer of a step says it minimises; None if it is unknown here."""
    loss = step.header.loss
    if loss is None:
        return None
    host, _, kind = loss.name.partition("/")
    readers = {"trl": _of_trl, "verl": _of_verl, "rlstab": _of_objective, "prime-rl": _of_objective}
    try:
        claim = readers[host](kind, loss.settings, step) if host in readers else None
    except RlstabError:
        return None
    return claim and replace(claim, with_empty=step.header.host.startswith("trl"))


def with_code(step: Step, files: Sequence[str | Path]) -> Step:
    """The step with files from which the user-defined methods of its loss are loaded: their code is run.

    Raises:
        ConfigError: the loss has no method in a file of this name.
    """
    names = [] if step.header.loss is None else code_in(portable(step.header.loss.settings))
    for file in files:
        if not any(name.startswith(f"{Path(file).name}:") for name in names):
            location = ", ".join(names) or "no file"
            raise ConfigError(f"--code {file}: no method of the loss is in a file of this name. It is in {location}.")
    step = replace(step, code=[str(file) for file in files])
    objective_of(step)  # errors of the code are the user's to read
    return step


def _of_objective(kind: str, settings: Mapping[str, Any], step: Step) -> Loss:
    methods, unloaded = objective_of(step)
    objective, state = _corrected(methods, step), settings.get("state")
    if isinstance(state, Mapping):  # a method that is not loaded keeps none, and the host's correction has none
        initial = objective.init_state()
        state = {**initial, **{key: state[key] for key in state if key in initial or not code_in(settings)}}
    scope = settings.get("scope", "step")
    return Loss(objective, state=state, scope=scope, by_gradient=bool(unloaded), unloaded=unloaded)


def _corrected(objective: Composition, step: Step) -> Composition:
    """With the weights by which the host corrects for the sampler, unless the objective has them."""
    weighs = "weights" in step.tensors and own_correction(objective) is None
    return compose(objective, HostCorrection()) if weighs else objective


# -- hosts -------------------------------------------------------------------------------------------------------------


def _of_trl(kind: str, recorded: Mapping[str, Any], step: Step) -> Loss:
    kind, _, masks = kind.partition(" with ")  # of earlier dumps, which lack the masks and the adaptive entropy
    settings = host_settings("trl", recorded)
    config = settings_of_trl({"gradient_accumulation_steps": step.accumulation, **settings, "loss_type": kind})
    config.world_size = step.header.ranks
    generations = step.accumulation / max(1, config.steps_per_generation)
    config.steps_per_generation = step.accumulation  # TRL's count of tokens is a factor of every token
    methods, deviations = methods_of(config), deviations_of(config)
    if masks or (kind in ("sapo", "vespo") and "low" in recorded):
        deviations.append("The dump lacks settings of TRL's loss: its defaults stand for them.")
    is_counted = kind in OVER_TOKENS and kind != "bnpo"  # TRL counts the tokens of a generation
    tokens = (settings.get("num_items_in_batch") or 0.0) * generations if is_counted else 0.0
    formula = None if masks else _formula(methods, config, tokens)
    if methods[0].get("cap", 1) < 1:
        deviations.append(f"cispo: TRL's largest ratio is {methods[0]['cap']:g}, that of the objective 1.")
        methods[0]["cap"] = 1.0
    loss = _of_methods(methods, deviations, formula, step)
    # TRL's quantile is of a micro-batch over all processes
    local = config.top_entropy_quantile < 1 and config.world_size == 1
    scale = float(step.mask.sum()) / tokens if formula is None and tokens else 1.0
    return replace(loss, scope="microbatch" if local else "step", scale=scale, settings=settings)


def _of_verl(kind: str, recorded: Mapping[str, Any], step: Step) -> Loss:
    settings = host_settings("verl", recorded) | {"loss_mode": kind}
    loss = _of_methods(verl_objective_of(settings), verl_deviations_of(settings), None, step)
    return replace(loss, by_gradient=kind != "vanilla", settings=settings)


def host_settings(host: str, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a host that a dump has; dumps of earlier commits have other words for those of TRL.

    Raises:
        ConfigError: one is not a setting of the host, or has a value of another type.
    """
    words, settings = facts(host).get("words", {}), dict[str, Any]()
    for name, value in recorded.items():
        settings |= words.get(f"{name} {value}", {words.get(name, name): value})
    for name, value in settings.items():
        check_value(host, name, value, f"{host}: {name}")
    return settings


#: By the name of a method, the field of a formula that each of its settings is, and fields that it sets itself.
_FIELDS: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
    "clip_higher": ({"low": "low", "high": "high"}, {}),
    "cispo": ({"cap": "high"}, {"weight": True}),
    "gspo": ({}, {"sequence": True}),
    "sequence_mean": ({}, {"mean": "response"}),
    "constant_length": ({"length": "length"}, {"mean": "constant"}),
    "entropy_bonus": ({"coefficient": "entropy"}, {}),
    "kl": ({"coefficient": "beta", "estimator": "estimator"}, {}),
}


def _formula(methods: Methods, config: Any, tokens: float) -> Formula | None:
    """The formula of the methods that TRL's loss is made of; None if it lacks one of them, or a method a setting."""
    values: dict[str, Any] = {"mean": "part" if config.loss_type == "bnpo" else "step", "tokens": tokens}
    values["length"] = config.max_completion_length or math.nan
    for method in methods:
        names, constants = _FIELDS.get(method["name"], ({"": ""}, {}))
        if names.keys() - method.keys():
            return None
        values |= {**constants, **{field: method[name] for name, field in names.items()}}
    if "dual_clip" in methods[0]:  # a clip has TRL's delta in its bounds, where no error can leave it out
        values |= {"high": config.epsilon if config.epsilon_high is None else config.epsilon_high, "cap": config.delta}
    return Formula(**values)


def _of_methods(methods: Methods, deviations: Sequence[str], formula: Formula | None, step: Step) -> Loss:
    """The loss of a host: by its formula, or by its methods if it has none.

    Args:
        methods: those that it is made of.
        deviations: how it differs from these.
        formula: the formula that it is exactly.
        step: the step that it belongs to.

    Raises:
        RlstabError: neither formula nor methods have its settings.
    """
    if not any(method["name"] in ("sequence_mean", "constant_length") for method in methods):
        methods = [*methods, {"name": "token_mean"}]
    try:
        with no_fit_warnings():
            members = load_objective(methods).members
    except RlstabError:
        if formula is None:
            raise
        return Loss(None, formula)
    lacks = {member: (member.needs | member.live_needs) - BASICS - step.tensors.keys() for member in members}
    objective = compose(*(member for member, signals in lacks.items() if not signals))
    absent = {member.name: ", ".join(sorted(signals)) for member, signals in lacks.items() if signals}
    missing = [f"'{name}' reads {signals}, not in the dump." for name, signals in absent.items()]
    return Loss(_corrected(objective, step), formula, by_gradient=formula is None, nearly=[*deviations, *missing])
