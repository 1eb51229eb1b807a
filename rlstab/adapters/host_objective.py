"""The loss that settings of TRL and verl describe, as an objective. Neither has to be installed."""

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
#: Settings of ``actor_rollout_ref.actor`` and its ``policy_loss`` that decide verl's loss, with their defaults.
VERL_LOSS = facts("verl")["loss"]
#: Losses of TRL that are means over tokens; its entropy bonus always is.
OVER_TOKENS = ("dapo", "cispo", "vespo", "bnpo")
#: Losses of TRL whose trust region is a clip.
_CLIPPED = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo")
#: Losses of verl that average over responses, whatever ``loss_agg_mode`` is.
_OVER_RESPONSES = ("sapo", "geo_mean")


def settings_of_trl(changed: Mapping[str, Any]) -> SimpleNamespace:
    """The part of ``GRPOConfig`` that an adapter reads, completed as TRL completes it for one process, without TRL."""
    config = SimpleNamespace(**{**TRL_LOSS, **TRL_OTHER, **TRL_STEPS, **changed}, world_size=1)
    size, rows = config.per_device_train_batch_size, config.generation_batch_size
    if config.steps_per_generation is None:
        config.steps_per_generation = rows // size if rows else config.gradient_accumulation_steps
    config.generation_batch_size = rows or size * config.steps_per_generation
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
    settings = {name: getattr(config, name, default) for name, default in {**TRL_LOSS, **TRL_OTHER}.items()}
    kind, delta, sampled = settings["loss_type"], settings["delta"], settings["use_vllm"]
    high = settings["epsilon"] if settings["epsilon_high"] is None else settings["epsilon_high"]
    if delta is not None and kind in _CLIPPED and delta <= 1:
        raise ConfigError(
            f"GRPOConfig.delta = {delta} bounds ratios below 1, and 'clip_higher' cannot. The nearest is delta=1.01."
        )
    settings |= {
        # TRL's delta bounds the ratio before the clip, for both signs of the advantage
        "clip_high": high if delta is None else min(high, delta - 1),
        "dual_clip": None if delta is None else max(delta, 1 + high),
        "largest_ratio": high,
        "importance_sampling_level": "token" if kind == "vespo" else settings["importance_sampling_level"],
        "mean": kind,
        "is_masked_by_entropy": settings["top_entropy_quantile"] < 1,
        "is_masked_by_gap": settings["off_policy_mask_threshold"] is not None,
        "has_bonus": settings["entropy_coef"] and not settings["use_adaptive_entropy"],
        "correction_anchor": "rollout" if sampled and settings[CORRECTION_SETTING] else None,
        "mask_anchor": "rollout" if sampled else "old",
        "bonus_mean": None if kind in OVER_TOKENS else "token_mean",
        "estimator": "k3_unbiased" if settings["use_bias_correction_kl"] else "k3",
    }
    return _methods("trl", settings)


def _methods(host: str, settings: Mapping[str, Any]) -> Methods:
    """The methods that a host's loss is made of, by the table ``objective`` of ``hosts.yaml``.

    Args:
        host: ``trl`` or ``verl``.
        settings: those of the host, and those that the table has in addition.

    Raises:
        ConfigError: no method has the value of a setting.
    """
    methods: Methods = []
    for name, table in facts(host)["objective"].items():
        value = settings[name]
        if isinstance(table, list):
            methods += table if value else []
        elif value in table:
            methods += table[value]
        else:
            raise ConfigError(f"{name} = {value!r}: no objective is this loss. {did_you_mean(str(value), table)}")
    unset = {word for word, value in settings.items() if value is None}
    return [{key: settings.get(word, word) for key, word in method.items() if word not in unset} for method in methods]


def deviations_of(config: Any) -> list[str]:
    """A sentence for each way in which :func:`objective_of` differs from TRL's loss; empty if it is exact.

    Args:
        config: a ``GRPOConfig``, or an object with its attributes.

    Raises:
        ConfigError: see :func:`check_trl_values`.
    """
    check_trl_values(config)
    kind, quantile = config.loss_type, config.top_entropy_quantile < 1
    cut = config.gradient_accumulation_steps > 1 or config.world_size > 1
    ahead = config.steps_per_generation > config.gradient_accumulation_steps and kind in ("dapo", "cispo", "vespo")
    bonus, sequence = config.entropy_coef or config.use_adaptive_entropy, config.importance_sampling_level == "sequence"
    unbiased = config.beta and config.use_bias_correction_kl
    shared = sequence and kind not in ("cispo", "vespo")  # each token of a response has the gradient of all
    corrected = config.use_vllm and getattr(config, CORRECTION_SETTING)
    by_token = corrected and "token" in config.vllm_importance_sampling_mode
    in_kernel = corrected and kind == "vespo"
    deviations = [
        (kind == "bnpo" and cut, "bnpo: TRL takes the mean of each micro-batch, the objective that of the step."),
        (ahead, "tokens: TRL divides by those of the generation, scaled; the objective by the step's."),
        (quantile and cut, "top_entropy: TRL takes the quantile of a micro-batch, the objective that of the step."),
        (bonus and cut, "entropy: TRL takes the mean of each micro-batch, the objective that of the step."),
        (bonus and quantile, "entropy: TRL pays for the tokens of its top-entropy mask, the objective for all."),
        (config.use_adaptive_entropy, "adaptive_entropy: TRL judges a step by the entropy of the one before."),
        (unbiased and sequence, "kl: TRL multiplies it by the ratio of the response, the objective by the token's."),
        (shared and quantile, "gspo: TRL's top-entropy mask scales a response, the objective's drops its tokens."),
        (shared and by_token, "gspo: TRL's weight of a token acts on its response, the objective's on the token."),
        (in_kernel, "vespo: TRL puts bounded ratios to the sampler into its kernel, the objective the ratios."),
    ]
    return [sentence for holds, sentence in deviations if holds]


def verl_objective_of(actor: Mapping[str, Any]) -> Methods:
    """The objective that is verl's loss with these settings; see :func:`verl_deviations_of`.

    Args:
        actor: ``actor_rollout_ref.actor`` together with the settings of its ``policy_loss``; a missing setting has
            verl's default.

    Raises:
        ConfigError: no objective is that loss; names the nearest setting for which one is.
    """
    settings = {**VERL_LOSS, **actor}
    for bound in ("clip_ratio_low", "clip_ratio_high"):
        settings[bound] = settings["clip_ratio"] if settings[bound] is None else settings[bound]
    low, high, estimators = settings["clip_ratio_low"], settings["clip_ratio_high"], facts("verl")["estimators"]
    if settings["loss_agg_mode"] == "seq-mean-token-sum-norm" and not settings["loss_scale_factor"]:
        raise ConfigError(
            "loss_agg_mode = 'seq-mean-token-sum-norm' without loss_scale_factor divides by the padded width of a "
            "micro-batch, which no objective does. Set loss_scale_factor, for example to the longest response."
        )
    kl, kind = bool(settings["use_kl_loss"] and settings["kl_loss_coef"]), settings["kl_loss_type"]
    if kl and kind not in estimators:
        raise ConfigError(f"kl_loss_type = {kind!r} is not an estimator of 'kl'. {did_you_mean(kind, estimators)}")
    settings |= {"largest_ratio": 1 + high, "smallest_ratio": 1 - low if low < 1 else None}
    settings |= {"has_kl": kl, "estimator": estimators.get(kind)}
    if settings["loss_mode"] in _OVER_RESPONSES:
        settings["loss_agg_mode"] = "token-mean"  # which adds no method
    return _loadable(_methods("verl", settings))


def verl_deviations_of(actor: Mapping[str, Any]) -> list[str]:
    """A sentence for each way in which :func:`verl_objective_of` differs from verl's loss; empty if it is exact."""
    settings = {**VERL_LOSS, **actor}
    kind, mode = settings["loss_mode"], settings["loss_agg_mode"]
    added = settings["entropy_coeff"] or settings["use_kl_loss"]
    deviations = [
        (kind in ("clip_cov", "kl_cov"), f"{kind}: verl selects in each micro-batch, the objective in the step."),
        (kind == "geo_mean", "geo_mean: verl takes the mean of each micro-batch, the objective that of the step."),
        (
            kind in _OVER_RESPONSES and mode != "seq-mean-token-mean" and added,
            f"{kind}: verl averages entropy and KL as loss_agg_mode = {mode!r} says, the objective over responses.",
        ),
    ]
    return [sentence for holds, sentence in deviations if holds]


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
    settings = {name: value for name, value in data.items() if name in defaults}
    sections = [name for name, part in data.items() if isinstance(part, Mapping) and part.keys() & defaults.keys()]
    if sections and not settings:
        raise ConfigError(f"{path}: the settings are below '{sections[0]}'. Put them into a separate file.")
    for name, value in settings.items():
        check_value(host, name, value, f"{path}: {name}")
    return settings


def objective_file(host: str, path: str | Path) -> str:
    """The file of an objective, from a YAML file with the settings of a host: ``rlstab init --from-trl FILE``.

    Raises:
        ConfigError: see :func:`read_settings`, or no objective is that loss, or a setting is out of range in it.
    """
    settings, defaults = read_settings(host, path), defaults_of(host)
    if host == "trl":
        config = settings_of_trl(settings)
        methods, deviations = objective_of(config), deviations_of(config)
    else:
        methods, deviations = verl_objective_of(settings), verl_deviations_of(settings)
    changed = {name: value for name, value in settings.items() if value != defaults[name]}
    title = f"# {HOSTS[host].titled} with {flow(changed) if changed else 'its default settings'}"
    lines = [title, *(f"# nearly: {sentence}" for sentence in deviations)]
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
    host_facts = facts(host)
    return {**host_facts["loss"], **host_facts["kept"], **host_facts.get("steps", {})}


def check_value(host: str, name: str, value: Any, where: str) -> None:
    """Refuse a text that TRL does not accept, a value of another type than its default, and counts below 1.

    Args:
        host: ``trl`` or ``verl``.
        name: the name of the setting.
        value: its value; None stands for a number.
        where: the setting, in errors.

    Raises:
        ConfigError: says what is expected.
    """
    host_facts = facts(host)
    texts = host_facts.get("values", {}).get(name)
    if texts is not None:
        if value not in texts:
            nearest = did_you_mean(str(value), map(str, texts))
            raise ConfigError(f"{where} = {value!r} is not a value that {HOSTS[host].titled} accepts. {nearest}")
        return
    defaults = {**defaults_of(host), **host_facts.get("recorded", {})}
    if name not in defaults:
        raise ConfigError(f"{where} is not a setting that decides the loss of {HOSTS[host].name}.")
    default = defaults[name]
    if value is None and (default is None or name in ("clip_ratio_low", "clip_ratio_high", "max_completion_length")):
        return
    kinds: Mapping[type, tuple[type, str]] = {bool: (bool, "true or false"), str: (str, "text")}
    kind, title = kinds.get(type(default), (numbers.Real, "a number"))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where} = {value!r}, expected {title}.")
    if name in host_facts.get("steps", {}) and (value < 1 if isinstance(value, int) else isinstance(value, float)):
        raise ConfigError(f"{where} = {value!r}, expected a whole number of at least 1.")
