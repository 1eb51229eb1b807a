"""Names that changed. An error tells the new name of an old setting; old runs are read under the new names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: What a setting is called now, by its owner (a section of a run, or a method) and its old name.
SETTINGS = {
    "optimisation.steps": "rollouts",
    "optimisation.warmup_steps": "warmup_optimizer_steps",
    "stare.step": "increment",
    "adaptive_entropy.step": "increment",
}

#: What a key of a record (a line of ``metrics.jsonl``, ``samples.jsonl`` or ``tokens.jsonl``) is called now.
RECORDS = {
    "step": "rollout",
    "steps/refused": "optimizer_steps/refused",
    "steps/skipped": "optimizer_steps/skipped",
    "reward/dead_groups": "reward/zero_std_groups",
}
#: What the last part of such a key is called now; what stands before it is the place of ``s2t`` in the objective.
LAST_PARTS = {"silenced": "dropped"}


def new_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record under its current names."""
    return {_new_key(key): value for key, value in record.items()}


def _new_key(key: str) -> str:
    place, slash, last = key.rpartition("/")
    return f"{place}/{LAST_PARTS[last]}" if slash and last in LAST_PARTS else RECORDS.get(key, key)


def with_stages(config: Any) -> Any:
    """A resolved run of before there were stages, with the one that its ``advantage`` described."""
    if not isinstance(config, Mapping) or "stages" in config or not isinstance(config.get("advantage"), Mapping):
        return config
    advantage = config["advantage"]
    name = advantage.get("estimator")
    settings = {key: advantage[key] for key in ("std", "epsilon", "ddof") if name == "grpo" and key in advantage}
    stages = [{"name": "in_order", "shuffle": True}, {"name": name, **settings}]
    return {"stages" if key == "advantage" else key: stages if key == "advantage" else config[key] for key in config}


def new_settings(config: Any, owner: str = "") -> Any:
    """A resolved run, or a part of one that belongs to ``owner``, under its current names."""
    config = with_stages(config)
    if isinstance(config, list):
        return [new_settings(one, owner) for one in config]
    if not isinstance(config, Mapping):
        return config
    owner = str(config.get("name", owner))
    return {SETTINGS.get(f"{owner}.{key}", key): new_settings(value, str(key)) for key, value in config.items()}


def old_settings(config: Any, owner: str = "", place: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and new name of each setting of a resolved run that is there under its old name."""
    if isinstance(config, list):
        for index, one in enumerate(config):
            yield from old_settings(one, owner, f"{place}{index}.")
    elif isinstance(config, Mapping):
        owner = str(config.get("name", owner))
        for key, value in config.items():
            if f"{owner}.{key}" in SETTINGS:
                yield f"{place}{key}", SETTINGS[f"{owner}.{key}"]
            yield from old_settings(value, str(key), f"{place}{key}.")
