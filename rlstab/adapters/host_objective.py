"""The loss that settings of TRL and verl describe, as an objective. Neither has to be installed."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from rlstab.config.document import Document, flow
from rlstab.config.objectives import load_objective
from rlstab.errors import ConfigError, RlstabError, did_you_mean
from rlstab.hosts import CORRECTION_SETTING, HOSTS, facts

#: An objective as a list that YAML holds.
Methods: TypeAlias = list[dict[str, Any]]

#: Settings of ``GRPOConfig`` that decide TRL's loss and that an objective replaces, with their defaults; and settings
#: that affect it and stay in effect; and what an optimizer step holds.
TRL_LOSS, TRL_OTHER, TRL_STEPS = facts("trl")["loss"], facts("trl")["kept"], facts("trl")["steps"]
#: All values of those settings of ``GRPOConfig`` that are text.
TRL_VALUES = facts("trl")["values"]
#: Settings of ``actor_rollout_ref.actor`` and its ``policy_loss`` that decide verl's loss, with their defaults.
VERL_LOSS = facts("verl")["loss"]
#: Losses of TRL that are means over tokens; its entropy bonus always is.
OVER_TOKENS = ("dapo", "cispo", "vespo", "bnpo")
#: Losses of verl that average over responses, whatever ``loss_agg_mode`` is.
_OVER_RESPONSES = ("sapo", "geo_mean")


def settings_of_trl(given: Mapping[str, Any]) -> SimpleNamespace:
    """The part of ``GRPOConfig`` that an adapter reads, completed as TRL completes it for one process, without TRL."""
    config = SimpleNamespace(**{**TRL_LOSS, **TRL_OTHER, **TRL_STEPS, **given}, world_size=1)
    size, whole = config.per_device_train_batch_size, config.generation_batch_size
    if config.steps_per_generation is None:
        config.steps_per_generation = whole // size if whole else config.gradient_accumulation_steps
    config.generation_batch_size = whole or size * config.steps_per_generation
    return config


def check_trl_values(config: Any) -> None:
    """Refuse values that TRL refuses, or would not know, and values that only a later TRL knows.

    Raises:
        ConfigError: names the setting and the nearest value.
    """
    for name, default in {**TRL_LOSS, **TRL_OTHER}.items():
        if not isinstance(default, bool):  # any value is true or false
            check_value("trl", name, getattr(config, name, default), f"GRPOConfig.{name}")


def objective_of(config: Any) -> Methods:
    """The objective that is TRL's loss with these settings; see :func:`deviations_of`.

    Args:
        config: a ``GRPOConfig``, or an object with its attributes.

    Raises:
        ConfigError: no objective is that loss; names the nearest setting for which one is.
    """
    check_trl_values(config)
    methods = methods_of(config)
    if methods[0].get("cap", 1) < 1:
        raise ConfigError(
            f"GRPOConfig.epsilon_high = {methods[0]['cap']} is the largest ratio of loss_type='cispo', which must be "
            f"at least 1 in an objective. The nearest is epsilon_high=1.0; ScaleRL has 5.0."
        )
    return _loadable(methods)


def methods_of(config: Any) -> Methods:
    """The methods that TRL's loss is made of, even if a setting is out of the range that the method takes.

    Raises:
        ConfigError: there are none.
    """
    kind, high = config.loss_type, config.epsilon if config.epsilon_high is None else config.epsilon_high
    vespo = {
        **{"positive_power": config.vespo_k_pos, "positive_decay": config.vespo_lambda_pos},
        **{"negative_power": config.vespo_k_neg, "negative_decay": config.vespo_lambda_neg},
        **({"anchor": "rollout"} if config.use_vllm and getattr(config, CORRECTION_SETTING) else {}),
    }
    sapo = {"positive": config.sapo_temperature_pos, "negative": config.sapo_temperature_neg}
    first = {"cispo": {"cap": high}, "sapo": sapo, "vespo": vespo}
    methods: Methods = [{"name": kind, **first[kind]} if kind in first else _clip(config, high)]
    if config.importance_sampling_level == "sequence" and kind != "vespo":
        methods.append({"name": "gspo"})
    if kind in ("grpo", "sapo"):
        methods.append({"name": "sequence_mean"})
    if kind in ("dr_grpo", "luspo"):
        length = config.max_completion_length if kind == "dr_grpo" else 1
        methods.append({"name": "constant_length", "length": length})
    if config.top_entropy_quantile < 1:
        methods.append({"name": "top_entropy", "share": config.top_entropy_quantile, "denominator": "all"})
    if config.off_policy_mask_threshold is not None:
        anchor = "rollout" if config.use_vllm else "old"
        methods.append({"name": "off_policy_mask", "max_gap": config.off_policy_mask_threshold, "anchor": anchor})
    over = {} if kind in OVER_TOKENS else {"aggregate": "token_mean"}
    if config.use_adaptive_entropy:
        price = {"initial": config.entropy_coef, "increment": config.entropy_coef_delta}
        price |= {"low": config.entropy_coef_min, "high": config.entropy_coef_max}
        methods.append({"name": "adaptive_entropy", "target_entropy": config.entropy_target, **price, **over})
    elif config.entropy_coef:
        methods.append({"name": "entropy_bonus", "coefficient": config.entropy_coef, **over})
    if config.beta:
        estimator = "k3_unbiased" if config.use_bias_correction_kl else "k3"
        methods.append({"name": "kl", "coefficient": config.beta, "estimator": estimator, "cap": None})
    return methods


def _clip(config: Any, high: float) -> dict[str, Any]:
    """TRL's ``delta`` bounds the ratio before the clip, for both signs of the advantage."""
    clip, delta = {"name": "clip_higher", "low": config.epsilon, "high": high}, config.delta
    if delta is None:
        return clip
    if delta <= 1:
        raise ConfigError(
            f"GRPOConfig.delta = {delta} bounds ratios below 1, and 'clip_higher' cannot. The nearest is delta=1.01."
        )
    return {**clip, "high": min(high, delta - 1), "dual_clip": max(delta, 1 + high)}


def deviations_of(config: Any) -> list[str]:
    """A sentence for each way in which :func:`objective_of` differs from TRL's loss; empty if it is exact.

    Args:
        config: a ``GRPOConfig``, or an object with its attributes.

    Raises:
        ConfigError: see :func:`objective_of`.
    """
    check_trl_values(config)
    weighted = any(method["name"] == "vespo" and method.get("anchor") for method in methods_of(config))
    kind, quantile = config.loss_type, config.top_entropy_quantile < 1
    cut = config.gradient_accumulation_steps > 1 or config.world_size > 1
    every = config.steps_per_generation > config.gradient_accumulation_steps and kind in ("dapo", "cispo", "vespo")
    bonus, sequence = config.entropy_coef or config.use_adaptive_entropy, config.importance_sampling_level == "sequence"
    unbiased = config.beta and config.use_bias_correction_kl
    shared = sequence and kind not in ("cispo", "vespo")  # each token of a response has the gradient of all
    corrected = config.use_vllm and getattr(config, CORRECTION_SETTING)
    by_token = corrected and "token" in config.vllm_importance_sampling_mode
    found = [
        (kind == "bnpo" and cut, "bnpo: TRL takes the mean of each micro-batch, the objective that of the step."),
        (every, "tokens: TRL divides by those of the generation, scaled; the objective by the step's."),
        (quantile and cut, "top_entropy: TRL takes the quantile of a micro-batch, the objective that of the step."),
        (bonus and cut, "entropy: TRL takes the mean of each micro-batch, the objective that of the step."),
        (bonus and quantile, "entropy: TRL pays for the tokens of its top-entropy mask, the objective for all."),
        (config.use_adaptive_entropy, "adaptive_entropy: TRL judges a step by the entropy of the one before."),
        (unbiased and sequence, "kl: TRL multiplies it by the ratio of the response, the objective by the token's."),
        (shared and quantile, "gspo: TRL's top-entropy mask scales a response, the objective's drops its tokens."),
        (shared and by_token, "gspo: TRL's weight of a token acts on its response, the objective's on the token."),
        (weighted, "vespo: TRL puts bounded ratios to the sampler into its kernel, the objective the ratios."),
    ]
    return [sentence for holds, sentence in found if holds]


def verl_objective_of(actor: Mapping[str, Any]) -> Methods:
    """The objective that is verl's loss with these settings; see :func:`verl_deviations_of`.

    Args:
        actor: ``actor_rollout_ref.actor`` together with the settings of its ``policy_loss``; a missing setting has
            verl's default.

    Raises:
        ConfigError: no objective is that loss; names the nearest setting for which one is.
    """
    get = {**VERL_LOSS, **actor}
    for bound in ("clip_ratio_low", "clip_ratio_high"):
        get[bound] = get["clip_ratio"] if get[bound] is None else get[bound]
    low, high = get["clip_ratio_low"], get["clip_ratio_high"]
    get |= {"largest_ratio": 1 + high, "smallest_ratio": 1 - low if low < 1 else None}
    methods = _chosen(get, "loss_mode", "policy_loss.loss_mode = {!r}: no objective is this loss.")
    mean = _chosen(get, "loss_agg_mode", "loss_agg_mode = {!r}: no objective averages like that.")
    if get["loss_agg_mode"] == "seq-mean-token-sum-norm" and not get["loss_scale_factor"]:
        raise ConfigError(
            "loss_agg_mode = 'seq-mean-token-sum-norm' without loss_scale_factor divides by the padded width of a "
            "micro-batch, which no objective does. Set loss_scale_factor, for example to the longest response."
        )
    if get["loss_mode"] not in _OVER_RESPONSES:
        methods = [*methods, *mean]
    methods = [{key: get.get(value, value) for key, value in method.items()} for method in methods]
    methods = [{key: value for key, value in method.items() if value is not None} for method in methods]
    if get["entropy_coeff"]:
        methods.append({"name": "entropy_bonus", "coefficient": get["entropy_coeff"]})
    if get["use_kl_loss"] and get["kl_loss_coef"]:
        estimator = _chosen(get, "kl_loss_type", "kl_loss_type = {!r} is not an estimator of 'kl'.")
        methods.append({"name": "kl", "coefficient": get["kl_loss_coef"], "estimator": estimator})
    return _loadable(methods)


def _chosen(settings: Mapping[str, Any], name: str, message: str) -> Any:
    """What verl's loss is by the value of a setting.

    Raises:
        ConfigError: the message and the nearest value.
    """
    table = facts("verl")["objective"][name]
    if settings[name] not in table:
        raise ConfigError(f"{message.format(settings[name])} {did_you_mean(settings[name], table)}")
    return table[settings[name]]


def verl_deviations_of(actor: Mapping[str, Any]) -> list[str]:
    """A sentence for each way in which :func:`verl_objective_of` differs from verl's loss; empty if it is exact."""
    get = {**VERL_LOSS, **actor}
    kind, mode = get["loss_mode"], get["loss_agg_mode"]
    added = get["entropy_coeff"] or get["use_kl_loss"]
    told = [
        (kind in ("clip_cov", "kl_cov"), f"{kind}: verl selects in each micro-batch, the objective in the step."),
        (kind == "geo_mean", "geo_mean: verl takes the mean of each micro-batch, the objective that of the step."),
        (
            kind in _OVER_RESPONSES and mode != "seq-mean-token-mean" and added,
            f"{kind}: verl averages entropy and KL as loss_agg_mode = {mode!r} says, the objective over responses.",
        ),
    ]
    return [sentence for holds, sentence in told if holds]


def settings_of_verl(data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the actor and its policy loss that an adapter reads, from verl's configuration or part of it."""
    for key in ("actor_rollout_ref", "actor"):
        data = data[key] if isinstance(data.get(key), Mapping) else data
    loss = data.get("policy_loss")
    parts = data, loss if isinstance(loss, Mapping) else {}
    return {name: part[name] for part in parts for name in (*VERL_LOSS, *facts("verl")["kept"]) if name in part}


def read_settings(host: str, path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file of a host that its loss and an objective depend on.

    Args:
        host: ``trl`` or ``verl``.
        path: settings of ``GRPOConfig``, or verl's configuration, or only its ``actor_rollout_ref`` or ``actor``. Other
            settings are ignored.

    Raises:
        ConfigError: it is not such a file, a value has another type, or the host has no file of settings.
    """
    if host not in ("trl", "verl"):
        raise ConfigError(f"{path}: rlstab reads settings of trl and verl, not of {host}.")
    document, defaults = Document.read(path), defaults_of(host)
    if not isinstance(document.data, Mapping):
        raise ConfigError(f"{path}: expected settings of {HOSTS[host].name} by name.")
    data = settings_of_verl(document.data) if host == "verl" else document.data
    given = {name: value for name, value in data.items() if name in defaults}
    below = [name for name, part in data.items() if isinstance(part, Mapping) and part.keys() & defaults.keys()]
    if below and not given:
        raise ConfigError(f"{path}: the settings are below '{below[0]}'. Put them into a separate file.")
    for name, value in given.items():
        check_value(host, name, value, f"{path}: {name}")
    return given


def objective_file(host: str, path: str | Path) -> str:
    """The file of an objective, from a YAML file with the settings of a host: ``rlstab init --from-trl FILE``.

    Raises:
        ConfigError: see :func:`read_settings`, or no objective is that loss, or a setting is out of range in it.
    """
    given, defaults = read_settings(host, path), defaults_of(host)
    if host == "trl":
        config = settings_of_trl(given)
        methods, told = objective_of(config), deviations_of(config)
    else:
        methods, told = verl_objective_of(given), verl_deviations_of(given)
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    read = flow(changed) if changed else "its default settings"
    lines = [f"# {HOSTS[host].titled} with {read}", *(f"# nearly: {sentence}" for sentence in told)]
    return "\n".join([*lines, "objective:", *(f"  - {flow(method)}" for method in methods)]) + "\n"


def _loadable(methods: Methods) -> Methods:
    """The same methods, if an objective can have their settings."""
    try:
        load_objective(methods)
    except RlstabError as error:
        raise ConfigError(f"no objective has these settings: {flow(methods)}. {error}") from error
    return methods


def defaults_of(host: str) -> dict[str, Any]:
    """The settings of TRL or verl that an adapter reads, with their defaults."""
    known = facts(host)
    return {**known["loss"], **known["kept"], **known.get("steps", {})}


def check_value(host: str, name: str, value: Any, where: str) -> None:
    """Refuse a text that TRL does not accept, a value of another type than its default, and counts below 1.

    Args:
        host: ``trl`` or ``verl``.
        name: of the setting.
        value: that it was given; None stands for a number.
        where: the setting, in errors.

    Raises:
        ConfigError: says what is expected.
    """
    if host == "trl" and name in TRL_VALUES:
        if value not in TRL_VALUES[name]:
            nearest = did_you_mean(str(value), map(str, TRL_VALUES[name]))
            raise ConfigError(f"{where} = {value!r} is not a value that {HOSTS['trl'].titled} accepts. {nearest}")
        return
    kinds: Mapping[type, tuple[tuple[type, ...], str]] = {bool: ((bool,), "true or false"), str: ((str,), "text")}
    defaults = {**defaults_of(host), **facts(host).get("recorded", {})}
    if name not in defaults:
        raise ConfigError(f"{where} is not a setting that decides the loss of {HOSTS[host].name}.")
    default = defaults[name]
    allowed, called = kinds.get(type(default), ((numbers.Real,), "a number"))
    if value is None and (default is None or name in ("clip_ratio_low", "clip_ratio_high", "max_completion_length")):
        return
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{where} = {value!r}, expected {called}.")
    if name in facts(host).get("steps", {}) and (value < 1 if isinstance(value, int) else isinstance(value, float)):
        raise ConfigError(f"{where} = {value!r}, expected a whole number of at least 1.")
