"""What other trainers hand to a loss that is not theirs, as the adapters that ship find it: facts.

The adapters check themselves against them when a trainer is made; ``rlstab check --host``, ``rlstab explain`` and
``rlstab doctor`` read the same facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.comm import LocalComm
from rlstab.core.compose import Composition, Observe, walk
from rlstab.core.method import measure_all
from rlstab.core.objective import TokenObjective, require_signals, terms_of
from rlstab.core.terms import Bounds
from rlstab.errors import ConfigError, UnknownName, did_you_mean
from rlstab.signals import SIGNAL_NAMES

#: What no mask and no advantages can say, by the field of Terms that a method fills with it.
REFUSED: Mapping[str, str] = {
    "penalties": "a penalty, a term of the loss with a gradient of its own",
    "gates": "a trust region other than one clip of the ratio",
    "surrogate": "a replacement for the ratio",
    "ratio": "another ratio",
    "unclipped": "tokens without a trust region",
    "lr_scale": "another learning rate",
}


#: TRL's correction for the sampler, on by default; it acts where vLLM generates.
CORRECTION_SETTING = "vllm_importance_sampling_correction"


@dataclass(frozen=True)
class HostSetting:
    """What a setting of a host has to be beside an objective.

    Attributes:
        value: to write.
        fits: whether another value does as well.
        why: the end of a sentence, for an error.
    """

    value: Any
    fits: Callable[[Any], bool]
    why: str


@dataclass(frozen=True)
class Host:
    """A trainer for which an adapter ships.

    Attributes:
        key: by which ``rlstab check --host`` knows it; of its package too, unless it is ``data_level``.
        name: of the trainer.
        gives: signals of the evidence beyond log-probs, their old values and advantages.
        live: outputs of the live policy that can be differentiated beyond the log-probs.
        release: the one that the adapter takes.
        how: signals that it gives only where something is set, with what to set.
        otherwise: what to do about a signal that no setting gives, other than to remove the method; ``{name}`` is it.
        spared: where the evidence of a step costs no forward though a method reads it.
        section: the host's name of the settings that an objective asks for.
        settings: those of an objective, by name.
        deterministic: its setting with which a GPU adds in a fixed order; an adapter does not set it.
        data_level: its own loss stays, and an objective reaches it through a mask and advantages.
    """

    key: str
    name: str
    gives: frozenset[str]
    live: frozenset[str] = frozenset()
    release: str = ""
    how: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = "use a host that provides it"
    spared: str = ""
    section: str = ""
    settings: Callable[[TokenObjective], Mapping[str, HostSetting]] = lambda objective: {}
    deterministic: str = ""
    data_level: bool = False

    @property
    def adapter(self) -> str:
        """The module that a user imports."""
        return f"rlstab.adapters.{self.key}"

    @property
    def titled(self) -> str:
        """Its name, and the release that the adapter takes."""
        return f"{self.name} {self.release}".strip()

    def cure(self, name: str) -> str:
        """What to do about a signal that it lacks, other than to remove the method."""
        return self.how.get(name, self.otherwise.format(name=name))

    def lacks(self, objective: TokenObjective) -> list[str]:
        """What an objective needs and this host cannot give; empty where nothing is missing."""
        missing = [f"`{name}`" for name in sorted(objective.needs - self.gives - BASICS)]
        missing += [f"live `{name}`" for name in sorted(objective.live_needs - self.live)]
        if self.data_level:
            asks = {what: leaf.name for leaf in walk(objective) if (what := refusal(leaf.method)) is not None}
            missing += [f"a place for what `{name}` asks for: {what}" for what, name in asks.items()]
        return missing

    def require(self, objective: Composition) -> None:
        """Refuse what the host cannot give.

        Raises:
            MissingSignal: names the method, what it reads, and what to change.
            ConfigError: see :func:`require_data_level`.
        """
        if self.data_level:
            require_data_level(objective)
        require_signals(objective, provides=self.gives, live=self.live, host=self.titled, cure=self.cure)


def kl_settings(objective: TokenObjective, name: str) -> list[Any]:
    """The values of a setting of every ``kl`` to the reference in the objective, without 0 and None."""
    methods = (leaf.method for leaf in walk(objective))
    values = {getattr(kl, name, None) for kl in methods if kl.name == "kl" and "ref_logprobs" in kl.needs}
    return sorted(value for value in values if value)


def own_correction(objective: TokenObjective) -> tuple[str, str] | None:
    """A method beside which no correction for the sampler can act, and why; None where one can."""
    for leaf in walk(objective):
        why = leaf.method.excludes.get("importance_correction")
        if why is not None:
            return leaf.name, why
        # a penalty towards the sampler, or a gate, changes no weight of the policy term
        if leaf.method.writes - {"lr_scale", "penalties", "gates"} and "rollout_logprobs" in leaf.method.needs:
            return leaf.name, "both correct for the sampler."
    return None


def trl_settings(objective: TokenObjective) -> dict[str, HostSetting]:
    """What ``GRPOConfig`` has to say beside an objective, where that is not its default alone."""
    readers = [leaf.name for leaf in walk(objective, observed=True) if "ref_logprobs" in leaf.method.needs]
    coefficients, estimators = kl_settings(objective, "coefficient"), kl_settings(objective, "estimator")
    if not readers:
        beta = HostSetting(0.0, lambda value: not value, "no method of the objective reads the reference model")
    else:
        why = f"'{readers[0]}' reads 'ref_logprobs'" + (f" with the coefficient {coefficients[0]}" * bool(coefficients))
        wanted = coefficients[0] if coefficients else 0.001
        beta = HostSetting(wanted, lambda value: value in coefficients if coefficients else bool(value), why)
    unbiased = [estimator == "k3_unbiased" for estimator in estimators] or [True]
    why = f"the objective decides: its 'kl' has estimator {estimators[0]}" if estimators else "it acts on 'kl' alone"
    settings = {"beta": beta, "use_bias_correction_kl": HostSetting(unbiased[0], lambda value: value in unbiased, why)}
    own = own_correction(objective)
    if own is not None:
        settings[CORRECTION_SETTING] = HostSetting(
            False, lambda value: not value, f"'{own[0]}' excludes it: {own[1].rstrip('.')}"
        )
    return settings


_GIVEN = SIGNAL_NAMES - {"logprobs"} | {"ref_logprobs", "rollout_logprobs", "truncated", "branch"}
_LIVE = frozenset({"entropies", "log_kept_mass"})
_LOGITS = ("max_logprobs", "log_kept_mass", "sum_p_sq")

#: A response is truncated where its last token, which TRL and verl hand over, is no EOS; neither grows branches.
HOSTS: Mapping[str, Host] = {
    host.key: host
    for host in (
        Host(
            "trl",
            "TRL",
            _GIVEN,
            _LIVE,
            release="1.16",
            how={
                "ref_logprobs": "set GRPOConfig.beta above 0, which loads the reference model",
                "rollout_logprobs": "generate with vLLM (use_vllm=True), or with a rollout_func that returns logprobs",
                **dict.fromkeys(_LOGITS, "write head='rlstab'"),
            },
            otherwise="give the trainer signals={{'{name}': function}}, (B, T) values from its batch",
            spared="where an optimizer step is one micro-batch",
            section="GRPOConfig",
            settings=trl_settings,
            deterministic="GRPOConfig(full_determinism=True)",
        ),
        Host(
            "verl",
            "verl",
            _GIVEN,
            _LIVE,
            release="0.9.1",
            how={
                "ref_logprobs": "set actor_rollout_ref.actor.use_kl_loss=true, which loads the reference model",
                "rollout_logprobs": "set actor_rollout_ref.rollout.calculate_log_probs=true",
                **dict.fromkeys(
                    _LOGITS,
                    "leave actor_rollout_ref.model.use_fused_kernels at false: fused kernels form no logits",
                ),
            },
            deterministic="actor_rollout_ref.actor.fsdp_config.full_determinism=true",
        ),
        Host("data", "the data level", frozenset(SIGNALS), data_level=True),
    )
}


def adapted(key: str) -> Host:
    """The host that an adapter ships for.

    Raises:
        UnknownName: there is none of this name.
    """
    if key not in HOSTS:
        raise UnknownName(f"no adapter is called '{key}'. {did_you_mean(key, HOSTS)}")
    return HOSTS[key]


def measures(method: TokenObjective) -> bool:
    """Whether it decides by statistics of the whole optimizer step."""
    if isinstance(method, Observe):
        return any(measures(leaf.method) for leaf in walk(method, observed=True))
    return type(method).measure is not TokenObjective.measure


def refusal(method: TokenObjective) -> str | None:
    """What a method asks for that a mask and advantages cannot say; None where they can say all of it."""
    for leaf in walk(method):
        if isinstance(leaf.method, Observe):
            continue
        for name, what in REFUSED.items():
            if name in leaf.method.writes:
                return what
        bounds = own_bounds(leaf.method)
        if bounds is not None and (isinstance(bounds.low, Tensor) or isinstance(bounds.high, Tensor)):
            return "a separate clip for each token"
    return None


def require_data_level(objective: Composition) -> None:
    """Refuse what no mask and no advantages can say.

    Raises:
        ConfigError: names the method, what it asks for, and what to change.
    """
    for key, method in objective.keyed.items():
        what = refusal(method)
        if what is not None:
            raise ConfigError(
                f"'{key}' asks for {what}: no mask and no advantages can say it. Remove it, or use rlstab.adapters.trl."
            )


def own_bounds(objective: TokenObjective) -> Bounds | None:
    """The trust region that an objective asks for, from a part without tokens."""
    if "bounds" not in objective.writes:
        return None
    empty = objective._empty_part()
    with torch.no_grad():
        stat, state = measure_all(objective, [empty], objective.init_state(), LocalComm())
        return terms_of(objective, empty, stat, state).bounds
