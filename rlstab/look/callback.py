"""The signs of a run of any trainer of transformers while it trains."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from transformers import TrainerCallback

from rlstab.logs.watch import Watch, check_names, told
from rlstab.signs import SIGNS


class WatchCallback(TrainerCallback):
    """Reports the signs of a run of any trainer of transformers while it trains: ``callbacks=[WatchCallback()]``.

    A sign that appears is printed, and logged to wandb as ``rlstab/sign/NAME`` with an alert if a run is active. Every
    process reads the same log, so all of them stop together.

    Args:
        stop_at: names of signs (:data:`rlstab.signs.SIGNS`) at which training stops, after a checkpoint was saved; None
            stops nothing.

    Raises:
        ConfigError: a name is not that of a sign.
    """

    def __init__(self, stop_at: Collection[str] | None = None) -> None:
        check_names(stop_at or (), "WatchCallback.stop_at")
        self.stop_at, self.watch = frozenset(stop_at or ()), Watch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a resumed run with the signs of its log so far, which do not stop it again."""
        self.watch = Watch()
        for row in state.log_history:
            self.watch.log(row["step"], row)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Judge a line that was logged."""
        if not logs:
            return
        for sign in self.watch.log(state.global_step, logs):
            text = told(sign, self.watch.unit)
            if state.is_world_process_zero:
                print(f"rlstab: {text}")
                with suppress(ImportError):
                    import wandb

                    if wandb.run is not None:
                        wandb.run.log({f"rlstab/sign/{sign.name}": sign.step}, commit=False)
                        wandb.run.alert(title=SIGNS[sign.name].title, text=text)
            if sign.name in self.stop_at:
                control.should_save = control.should_training_stop = True
