"""Facts about other trainers: what each provides to an objective, and which settings an objective needs.

The adapters check these facts when a trainer is made; ``rlstab check --host``, ``rlstab explain`` and ``rlstab doctor``
read them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.comm import LocalComm
from rlstab.core.compose import Composition, Observe, walk
from rlstab.core.method import measure_all
from rlstab.core.objective import TokenObjective, require_signals, terms_of
from rlstab.core.terms import Bounds
from rlstab.errors import ConfigError, UnknownName, did_you_mean
from rlstab.signals import SIGNAL_NAMES


@cache
def facts(key: str) -> dict[str, Any]:
    """The entry of a host in ``hosts.yaml``."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return table[key]


#: TRL's correction for the sampler, on by default; it acts where vLLM generates.
CORRECTION_SETTING = "vllm_importance_sampling_correction"


@dataclass(frozen=True)
class HostSetting:
    """The value that a setting of a host needs with an objective.

    Attributes:
        value: the value to write.
        why: the end of a sentence, for an error.
        allowed: values that are accepted; empty, any is; None, any that is on or off as ``value`` is.
    """

    value: Any
    why: str
    allowed: Sequence[Any] | None = None

    def fits(self, value: Any) -> bool:
        """Whether a value is accepted."""
        return bool(value) == bool(self.value) if self.allowed is None else not self.allowed or value in self.allowed


@dataclass(frozen=True)
class Host:
    """A trainer for which an adapter ships.

    Attributes:
        key: its name in ``rlstab check --host``; also that of its package, unless it is ``data_level``.
        name: what the trainer is called.
        gives: signals of the evidence in addition to log-probs, their old values and advantages.
        live: outputs of the live policy that can be differentiated in addition to the log-probs.
        release: the one that the adapter supports.
        install: how to get the release, where no package index has it.
        how: signals that it gives only with a setting, each with what to set.
        otherwise: what to do about a signal that no setting gives, other than removing the method; ``{name}`` is its
            name.
        spared: says when the evidence of a step costs no forward pass although a method reads it.
        sees: what of an optimizer step a method sees.
        refused: what its loss cannot do, by the field of Terms that a method fills with it; ``step``: decisions and a
            state over the optimizer step.
        refusal: the error for a method that asks for one of these, with ``{name}`` and ``{reason}``.
        mean: the method that takes the mean which the host takes anyway.
        section: the host's name for the settings that an objective needs.
        settings: those that an objective needs, by name.
        deterministic: its setting with which a GPU adds in a fixed order; an adapter does not set it.
        data_level: whether the host keeps its loss, and an objective acts through a mask and advantages.
    """

    key: str
    name: str
    gives: frozenset[str]
    live: frozenset[str] = frozenset()
    release: str = ""
    install: str = ""
    how: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = "use a host that provides it"
    spared: str = ""
    sees: str = "the whole optimizer step, before its first backward pass"
    refused: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    mean: str = ""
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
        """Its name, and the release that the adapter supports."""
        return f"{self.name} {self.release}".strip()

    def cure(self, name: str, live: bool = False) -> str:
        """What to do about a signal or a live output that it lacks, other than removing the method."""
        if live and name == "teacher_divergence":
            return "use rlstab's trainer, which runs the teacher, or 'opd', which reads its log-prob of each token"
        return self.how.get(name, type(self).otherwise if live else self.otherwise.format(name=name))

    def lacks(self, objective: TokenObjective) -> list[str]:
        """What an objective needs and this host cannot give; empty if nothing is missing."""
        missing = [f"`{name}`" for name in sorted(objective.needs - self.gives - BASICS)]
        missing += [f"live `{name}`" for name in sorted(objective.live_needs - self.live)]
        refused = {reason: leaf.name for leaf in walk(objective) if (reason := self.refuses(leaf.method)) is not None}
        return missing + [f"a way to express `{name}`: {reason}" for reason, name in refused.items()]

    def refuses(self, method: TokenObjective) -> str | None:
        """What a method, or one inside it, asks for that the host's loss cannot do; None if it can do all of it."""
        for leaf in walk(method) if self.refused else ():
            fields = set() if isinstance(leaf.method, Observe) or leaf.name == self.mean else set(leaf.method.writes)
            if measures(leaf.method) or leaf.method.init_state():
                fields.add("step")
            bounds = own_bounds(leaf.method) if "bounds" in fields & self.refused.keys() else None
            if bounds is None or not (isinstance(bounds.low, Tensor) or isinstance(bounds.high, Tensor)):
                fields.discard("bounds")  # one clip for all tokens
            reason = next((text for name, text in self.refused.items() if name in fields), None)
            if reason is not None:
                return reason
        return None

    def require(self, objective: Composition) -> None:
        """Refuse what the host cannot give or do.

        Raises:
            MissingSignal: names the method, what it reads, and what to change.
            ConfigError: names the method, what it asks for, and what to change.
        """
        for name, method in objective.keyed.items():
            reason = self.refuses(method)
            if reason is not None:
                raise ConfigError(self.refusal.format(name=name, reason=reason))
        require_signals(objective, provides=self.gives, live=self.live, host=self.titled, cure=self.cure)


def kl_settings(objective: TokenObjective, name: str) -> list[Any]:
    """The values of a setting of every ``kl`` to the reference in the objective, without 0 and None."""
    methods = (leaf.method for leaf in walk(objective))
    values = {getattr(kl, name, None) for kl in methods if kl.name == "kl" and "ref_logprobs" in kl.needs}
    return sorted(value for value in values if value)


def own_correction(objective: TokenObjective) -> tuple[str, str] | None:
    """A method that excludes a correction for the sampler, and why; None if none does."""
    for leaf in walk(objective):
        reason = leaf.method.excludes.get("importance_correction")
        if reason is not None:
            return leaf.name, reason
        if "support" in leaf.method.writes:
            return leaf.name, "its ratio is to the sampler."
        # a penalty towards the sampler, or a gate, does not change the weights of the policy term
        if leaf.method.writes - {"lr_scale", "penalties", "gates"} and "rollout_logprobs" in leaf.method.needs:
            return leaf.name, "both correct for the sampler."
    return None


def trl_settings(objective: TokenObjective) -> dict[str, HostSetting]:
    """The settings that ``GRPOConfig`` needs with an objective, other than those that must stay at their defaults."""
    reads, readers, coefficients, estimators = _reference(objective)
    coefficient = coefficients[0] if coefficients else 0.001 if reads else 0.0
    unbiased = [estimator == "k3_unbiased" for estimator in estimators] or [True]
    reason = f"the objective decides: its 'kl' has estimator {estimators[0]}" if estimators else "it acts only on 'kl'"
    settings = {
        "beta": HostSetting(coefficient, readers, coefficients or None),
        "use_bias_correction_kl": HostSetting(unbiased[0], reason, unbiased),
    }
    excluding = own_correction(objective)
    if excluding is not None:
        reason = f"'{excluding[0]}' excludes it: {excluding[1].rstrip('.')}"
        settings[CORRECTION_SETTING] = HostSetting(False, reason)
    return settings


def verl_settings(objective: TokenObjective) -> dict[str, HostSetting]:
    """The settings that ``actor_rollout_ref.actor`` needs with an objective; see :func:`trl_settings`."""
    reads, readers, coefficients, _ = _reference(objective)
    default = facts("verl")["loss"]["kl_loss_coef"]
    allowed = coefficients if reads else [default]
    return {
        "use_kl_loss": HostSetting(reads, readers),
        "kl_loss_coef": HostSetting(next(iter(allowed), default), readers, allowed),
    }


def skyrl_settings(objective: TokenObjective) -> dict[str, HostSetting]:
    """The settings that ``trainer.algorithm`` needs with an objective, other than those that must stay at defaults."""
    reads, readers, _, _ = _reference(objective)
    added = "SkyRL's term would be added: the coefficient is that of 'kl' in the objective"
    return {
        "policy_loss_type": HostSetting("rlstab", "the objective has another name", ["rlstab"]),
        "use_kl_loss": HostSetting(reads, readers),
        **({"kl_loss_coef": HostSetting(0.0, added)} if reads else {}),
    }


def _reference(objective: TokenObjective) -> tuple[bool, str, list[Any], list[Any]]:
    """Whether an objective needs the reference model, and why; coefficients and estimators of its ``kl``."""
    names = [leaf.name for leaf in walk(objective, observed=True) if "ref_logprobs" in leaf.method.needs]
    coefficients = kl_settings(objective, "coefficient")
    with_coefficient = f" with the coefficient {coefficients[0]}" if coefficients else ""
    reason = "no method of the objective reads the reference model"
    reason = f"'{names[0]}' reads 'ref_logprobs'{with_coefficient}" if names else reason
    return bool(names), reason, coefficients, kl_settings(objective, "estimator")


#: A response is truncated if its last token is not an EOS; no host grows branches; turns follow from the mask of tools.
_GIVES = SIGNAL_NAMES - {"logprobs", "log_support_mass"}
_GIVES |= {"ref_logprobs", "rollout_logprobs", "truncated", "branch", "turn", "turn_reward"}
_LIVE = frozenset({"entropies", "log_kept_mass"})


def _host(key: str, **others: Any) -> Host:
    """A host, with what ``hosts.yaml`` says of it."""
    names = {attribute.name for attribute in fields(Host)}
    return Host(key, **{name: entry for name, entry in facts(key).items() if name in names}, **others)


HOSTS: Mapping[str, Host] = {
    "trl": _host("trl", settings=trl_settings, gives=_GIVES, live=_LIVE | {"log_support_mass"}),
    "axolotl": _host("axolotl", settings=trl_settings, gives=_GIVES, live=_LIVE | {"log_support_mass"}),
    "verl": _host("verl", settings=verl_settings, gives=_GIVES, live=_LIVE),
    "skyrl": _host(
        "skyrl",
        settings=skyrl_settings,
        gives=frozenset({"entropies", "ref_logprobs", "rollout_logprobs", "branch", "turn"}),
    ),
    "tinker": _host("tinker", gives=frozenset(SIGNALS)),
    "prime_rl": _host("prime_rl", gives=frozenset({"ref_logprobs", "rollout_logprobs", "turn"})),
    "data": _host("data", gives=frozenset(SIGNALS), data_level=True),
}


def adapted(key: str) -> Host:
    """The host of this name.

    Raises:
        UnknownName: there is no adapter for such a host.
    """
    if key not in HOSTS:
        raise UnknownName(f"no adapter is called '{key}'. {did_you_mean(key, HOSTS)}")
    return HOSTS[key]


def measures(method: TokenObjective) -> bool:
    """Whether a method decides by statistics of the whole optimizer step."""
    if isinstance(method, Observe):
        return any(measures(leaf.method) for leaf in walk(method, observed=True))
    return type(method).measure is not TokenObjective.measure


def own_bounds(objective: TokenObjective) -> Bounds | None:
    """The trust region of an objective, from a part without tokens."""
    if "bounds" not in objective.writes:
        return None
    empty = objective._empty_part()
    with torch.no_grad():
        stat, state = measure_all(objective, [empty], objective.init_state(), LocalComm())
        return terms_of(objective, empty, stat, state).bounds
