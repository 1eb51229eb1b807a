"""Settings of a host that an objective replaces: refused by every adapter, in the host's words.

The rules for TRL and verl need neither of them, so that ``rlstab check --host NAME --settings FILE`` applies them
anywhere.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlstab.adapters.host_objective import TRL_LOSS, VERL_LOSS, objective_of, read_settings, settings_of_trl
from rlstab.config import load_objective
from rlstab.config.document import flow
from rlstab.core.compose import Composition
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError
from rlstab.hosts import CORRECTION_SETTING, HOSTS, Host, HostSetting, facts, own_correction, verl_settings

#: Engines of verl that the tests run.
ENGINES = ("fsdp", "fsdp2")
_ACTOR = "actor_rollout_ref.actor"
#: Optimizers that step inside the backward pass, where no step can be refused.
_STEPS_EARLY = ("lomo", "layerwise")


def misfits(
    get: Callable[[str], Any], defaults: Mapping[str, Any], wanted: Mapping[str, HostSetting]
) -> dict[str, tuple[str, Any]]:
    """For each setting of a host that does not fit an objective, a sentence and what to write.

    Args:
        get: the value of a setting.
        defaults: the defaults of the settings that the objective replaces.
        wanted: the other settings that it needs.
    """
    wrong = {
        name: (f"{name} = {get(name)!r} has no effect: the objective is the loss", default)
        for name, default in defaults.items()
        if get(name) != default
    }
    for name, setting in wanted.items():
        if not setting.fits(get(name)):
            wrong[name] = f"{name} = {get(name)!r}, and {setting.why}", setting.value
    return wrong


def require_one_correction(objective: TokenObjective, setting: str, off: str) -> None:
    """Refuse an objective that excludes the host's correction for the sampler.

    Args:
        objective: usually a composition.
        setting: the setting of the host that switches the correction on.
        off: the setting that switches it off.

    Raises:
        ConfigError: names the method.
    """
    excluding = own_correction(objective)
    if excluding is not None:
        name, reason = excluding
        raise ConfigError(f"'{name}' and {setting} exclude each other: {reason} Write {off}, or remove '{name}'.")


def check_trl_settings(
    config: Any, objective: Composition, *, derived: bool = False, host: Host = HOSTS["trl"]
) -> None:
    """Refuse settings that the objective replaces or contradicts, and steps that span generations.

    Args:
        config: a ``GRPOConfig``, as TRL completed it, or an object with its attributes.
        objective: the one by which the trainer is to train.
        derived: whether the objective includes what the settings of ``TRL_LOSS`` say.
        host: what it needs, and the class of the config.

    Raises:
        ConfigError: names every such setting, what to write with this objective, and how to train by the settings.
    """
    wrong = _misfits(config, objective, host, derived=derived)
    if not wrong:
        return
    advice = f"Write {_keywords(wrong)}."
    if any(name in (*TRL_LOSS, "beta") for name in wrong):
        try:
            as_set = objective_of(config)
            additions = _keywords(_misfits(config, load_objective(as_set), host))
            advice += (
                f"\n  Or train by these settings: objective={as_set!r}{f', with {additions}' if additions else ''}."
            )
        except ConfigError as error:
            advice += f"\n  No objective is what they say: {error}"
    lines = [f"{host.section}.{sentence}." for sentence, _ in wrong.values() if sentence]
    raise ConfigError("\n  ".join([*lines, advice]))


def _misfits(config: Any, objective: Composition, host: Host, *, derived: bool = False) -> dict[str, tuple[str, Any]]:
    """A sentence for each setting that does not fit, and what to write."""
    settings = dict(host.settings(objective))
    if derived or not config.use_vllm:
        settings.pop(CORRECTION_SETTING, None)  # it acts where vLLM generates
    wrong = misfits(partial(getattr, config), {} if derived else TRL_LOSS, settings) | _windows(config)
    optimizer = str(getattr(config.optim, "value", config.optim))
    if any(word in optimizer for word in _STEPS_EARLY):
        sentence = f"optim = {optimizer!r} steps inside the backward pass: none can be refused"
        wrong["optim"] = sentence, "adamw_torch"
    return wrong


def _keywords(wrong: Mapping[str, tuple[str, Any]]) -> str:
    return ", ".join(f"{name}={value!r}" for name, (_, value) in wrong.items())


def _windows(config: Any) -> dict[str, tuple[str, Any]]:
    """An optimizer step must lie in one generation, so that all of it is known before its first backward pass."""
    count, slices = config.gradient_accumulation_steps, config.steps_per_generation
    if slices * config.num_iterations % count == 0:
        return {}
    rows = config.generation_batch_size // slices
    multiple = count * config.num_generations // math.gcd(count * rows, config.num_generations)
    sentence = (
        f"gradient_accumulation_steps = {count}: a step would span generations, of steps_per_generation={slices} x "
        f"num_iterations={config.num_iterations}"
    )
    return {"steps_per_generation": (sentence, multiple), "generation_batch_size": ("", None)}


def check_windows(config: Any) -> None:
    """Refuse optimizer steps that span generations.

    Raises:
        ConfigError: names the setting, and what to write instead.
    """
    if wrong := _windows(config):
        raise ConfigError(f"GRPOConfig.{wrong['steps_per_generation'][0]}. Write {_keywords(wrong)}.")


def check_verl_settings(actor: Mapping[str, Any], objective: TokenObjective, *, distilled: bool = False) -> None:
    """Refuse settings that the objective replaces, and engines that were not tested.

    Args:
        actor: ``actor_rollout_ref.actor`` together with the settings of its ``policy_loss``; a missing setting has
            verl's default.
        objective: usually a composition.
        distilled: whether verl adds the loss of a teacher.

    Raises:
        ConfigError: names every setting that does not fit, and what to write instead.
    """
    host_facts, lines = facts("verl"), list[str]()
    get: Callable[..., Any] = {**VERL_LOSS, **actor}.get
    for section, replacements, settings in (
        (_ACTOR, host_facts["instead"], verl_settings(objective)),
        (f"{_ACTOR}.policy_loss", host_facts["instead_of_policy_loss"], {}),
    ):
        wrong = misfits(get, {name: VERL_LOSS[name] for name in replacements}, settings)
        for name, (sentence, value) in wrong.items():
            hint = f", and in the objective: {replacements[name]}" if name in replacements else ""
            lines.append(f"{section}.{sentence}. Write {section}.{name}={flow(value)}{hint}.")
    engine = get("strategy", ENGINES[0])
    if engine not in ENGINES:
        lines.append(f"{_ACTOR}.strategy = {engine!r}: the adapter supports only FSDP. Write {_ACTOR}.strategy=fsdp2.")
    if distilled:
        lines.append("distillation.enabled = True adds a loss to the objective. Write distillation.enabled=false.")
    if lines:
        raise ConfigError("\n  ".join(lines))


def check_settings(host: str, path: str | Path, objective: Composition) -> None:
    """Refuse in a file of settings what the adapter refuses: ``rlstab check --host NAME --settings FILE``.

    Args:
        host: ``trl`` or ``verl``.
        path: see :func:`~rlstab.adapters.host_objective.read_settings`.
        objective: the one that the host is to train by.

    Raises:
        ConfigError: the text of the adapter, or the file is not such a file.
    """
    settings = read_settings(host, path)
    if host == "trl":
        check_trl_settings(settings_of_trl(settings), objective)
    else:
        check_verl_settings(settings, objective)
