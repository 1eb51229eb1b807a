"""An objective as the loss of GRPO in axolotl, from the key ``rlstab`` of its YAML, which a plugin adds."""

from typing import Any, Literal

from pydantic import BaseModel

from rlstab.config import load_objective
from rlstab.errors import ConfigError
from rlstab.extras import require

require("axolotl", "rlstab.adapters.axolotl")

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer  # noqa: E402  # after the check
from axolotl.integrations.base import BasePlugin, PluginManager  # noqa: E402  # after the check

from rlstab.adapters.trl.trainer import RLStabGRPOTrainer  # noqa: E402  # after the check


class Arguments(BaseModel, extra="forbid"):
    """Arguments of :class:`~rlstab.adapters.trl.RLStabGRPOTrainer` that YAML can hold."""

    objective: str | dict[str, Any] | list[Any] | None = None
    base: Literal["config"] | None = None
    head: Literal["auto", "trl", "rlstab"] = "auto"


class InputArgs(BaseModel):
    """What the plugin adds to axolotl's YAML."""

    rlstab: Arguments | None = None


class RLStabPlugin(BasePlugin):  # type: ignore[misc]  # mypy cannot resolve axolotl
    """Reads the key ``rlstab``, and sets ``trainer_cls`` to :class:`RLStabAxolotlTrainer`."""

    def get_input_args(self) -> str:
        return f"{__name__}.{InputArgs.__name__}"

    def register(self, cfg: dict[str, Any]) -> None:
        """Refuse settings that select another trainer of axolotl, and objectives that cannot be read, before all else.

        Raises:
            ConfigError: names the setting, and what to write instead, or what is wrong with the objective.
        """
        trainer, trl = f"{__name__}.{RLStabAxolotlTrainer.__name__}", cfg.get("trl") or {}
        wrong = [
            (cfg.get("rl") not in ("grpo", "gdpo"), "rl", "grpo"),
            (cfg.get("trainer_cls") not in (None, trainer), "trainer_cls", trainer),
            ((cfg.get("context_parallel_size") or 1) > 1, "context_parallel_size", 1),
            *((bool(trl.get(name)), f"trl.{name}", "false") for name in ("async_prefetch", "use_data_producer")),
        ]
        messages = [f"Write {name}: {value}" for holds, name, value in wrong if holds]
        if messages:
            raise ConfigError(
                f"the plugin of rlstab works only with axolotl's GRPO trainer. {', and '.join(messages)}."
            )
        objective = Arguments(**cfg.get("rlstab") or {}).objective
        if objective is not None:
            load_objective(objective)
        cfg["trainer_cls"] = trainer


class RLStabAxolotlTrainer(AxolotlGRPOTrainer, RLStabGRPOTrainer):  # type: ignore[misc]  # nor axolotl's trainer
    """axolotl's GRPO trainer whose loss is an objective: the given one, or what the settings under ``trl`` describe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        manager = PluginManager.get_instance()
        if not any(isinstance(plugin, RLStabPlugin) for plugin in manager.plugins.values()):
            raise ConfigError(f"axolotl ignores the key rlstab. Write plugins: [{__name__}.{RLStabPlugin.__name__}].")
        arguments = Arguments(**manager.cfg.to_dict().get("rlstab") or {})
        super().__init__(*args, **dict(arguments), **kwargs)
