"""The signs of a run while it goes on: those that a look at its log so far would report."""

from collections.abc import Collection, Mapping
from typing import Any

from rlstab.bins import Run
from rlstab.errors import ConfigError, did_you_mean
from rlstab.logs.log import Rows
from rlstab.signs import SIGNS, Sign, signs


def check_names(names: Collection[str], option: str) -> None:
    """Refuse names that are not signs.

    Raises:
        ConfigError: names one that is not.
    """
    for name in sorted(set(names) - SIGNS.keys()):
        raise ConfigError(f"{option}: {name} is not a sign. {did_you_mean(name, SIGNS)}")


class Watch:
    """The signs of a log that grows.

    Args:
        unit: what a step is, ``rollout`` or ``step``.
    """

    def __init__(self, unit: str = "step") -> None:
        self.unit = unit
        self.rows = Rows(unit=unit)
        self.seen: dict[str, Sign] = {}

    def log(self, step: int, values: Mapping[str, Any]) -> list[Sign]:
        """Add a line of the log.

        Returns:
            signs that are new.
        """
        self.rows.log(step, values)
        return self.new(self.rows.run(watched=True))

    def new(self, run: Run) -> list[Sign]:
        """The signs of a run so far that it had not before; each is reported once, as it was then."""
        new = [sign for sign in signs(run) if sign.fired and sign.name not in self.seen]
        self.seen |= {sign.name: sign for sign in new}
        return new


def told(sign: Sign, unit: str) -> str:
    """A sign in one line."""
    return f"{SIGNS[sign.name].title}, from {unit} {sign.step} on: {sign.text}"
