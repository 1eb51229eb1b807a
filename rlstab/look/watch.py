"""The signs of a run while it goes on: those that a look at its log so far would tell."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstab.diagnose.readers import read_logs
from rlstab.diagnose.run_log import log_of
from rlstab.errors import ConfigError, ReportError
from rlstab.logs.log import Rows
from rlstab.safe_read import as_number
from rlstab.signs import SIGNS, Sign, signs

if TYPE_CHECKING:
    from transformers import TrainerCallback as _Callback
else:
    try:
        from transformers import TrainerCallback as _Callback
    except ImportError:
        _Callback = object


def check_names(names: Collection[str], option: str) -> None:
    """Refuse what is not the name of a sign.

    Raises:
        ConfigError: names one that is not.
    """
    if unknown := sorted(set(names) - SIGNS.keys()):
        raise ConfigError(f"{option}: {', '.join(unknown)} is not a sign. The signs are {', '.join(SIGNS)}.")


class Watch:
    """The signs of a log that grows.

    Args:
        unit: what a step is: ``rollout`` or ``step``.
    """

    def __init__(self, unit: str = "step") -> None:
        self.unit = unit
        self.rows = Rows()
        self.seen: dict[str, Sign] = {}

    def log(self, step: int, values: Mapping[str, Any]) -> list[Sign]:
        """Add a line of the log.

        Returns:
            signs that are there now and were not before.
        """
        numbers = {name: math.nan if value is None else as_number(value) for name, value in values.items()}
        self.rows.log(step, {name: number for name, number in numbers.items() if number is not None})
        return self._new(signs(log_of(self.rows, title="", writer="", unit=self.unit)))

    def _new(self, every: Sequence[Sign]) -> list[Sign]:
        there = {sign.name: sign for sign in every if sign.fired}
        new = [sign for name, sign in there.items() if name not in self.seen]
        self.seen = there
        return new


class WatchCallback(_Callback):
    """Tells the signs of a run of any trainer of transformers while it trains: ``callbacks=[WatchCallback()]``.

    A sign that appears is printed, and logged to wandb as ``rlstab/sign/NAME`` with an alert where a run is on. Every
    process reads the same log, so all of them stop together.

    Args:
        stop_at: names of signs (:data:`rlstab.signs.SIGNS`) at which training stops, after a checkpoint was saved.

    Raises:
        ConfigError: a name is not that of a sign.
    """

    def __init__(self, stop_at: Collection[str] = ()) -> None:
        check_names(stop_at, "WatchCallback.stop_at")
        self.stop_at, self.watch = frozenset(stop_at), Watch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """A line was logged."""
        if not logs:
            return
        for sign in self.watch.log(state.global_step, logs):
            text = told(sign, self.watch.unit)
            if state.is_world_process_zero:
                print(f"rlstab: {text}")
                _to_wandb(sign, text)
            if sign.name in self.stop_at:
                control.should_save = control.should_training_stop = True


def told(sign: Sign, unit: str) -> str:
    """A sign in one line."""
    return f"{SIGNS[sign.name].title}, from {unit} {sign.step} on: {sign.text}"


def _to_wandb(sign: Sign, text: str) -> None:
    try:
        import wandb
    except ImportError:
        return
    if wandb.run is not None:
        wandb.run.log({f"rlstab/sign/{sign.name}": sign.step}, commit=False)
        wandb.run.alert(title=SIGNS[sign.name].title, text=text)


def follow(
    path: Path,
    tell: Callable[[str], None],
    *,
    stop_at: Collection[str] = (),
    every: float = 10.0,
    goes_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Read a log again and again, and tell each new sign.

    Args:
        path: of one run; it may not be there yet.
        tell: is given a line.
        stop_at: names of signs at which to stop.
        every: seconds between two readings.
        goes_on: asked after each reading.

    Returns:
        whether a sign of ``stop_at`` is there.

    Raises:
        ReportError: several runs are logged there.
    """
    watch = Watch()
    while True:
        try:
            logs = read_logs(path)
        except ReportError:  # nothing there so far, or half a line
            logs = []
        if len(logs) > 1:
            raise ReportError(f"{path}: {len(logs)} runs are logged there. Give the path of one of them.")
        for log in logs:
            for sign in watch._new(signs(log)):
                tell(told(sign, log.unit))
        if set(stop_at) & watch.seen.keys():
            return True
        if not goes_on():
            return False
        time.sleep(every)
