"""Where rlstab differs from published code on purpose: the rows of ``deviations.yaml``, one number of each side.

``read`` says what of a result is the number: ``loss``; ``[gradient, row, place]``; ``selected`` tokens, and ``common``
those selected on both sides; tokens that are ``still``, without a gradient; ``[advantage, row]``; or a function of
this file that gives both numbers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlstab import Pool
from rlstab.stages import group_relative as estimators
from rlstab.zoo import METHODS
from tests.conformance.agreements import advantages_of, composed, entropy_of_the_gate, gains, held_by_lp_reg, rows
from tests.conformance.inputs import load, tensors
from tests.conformance.recorded import Result, theirs


@dataclass(frozen=True)
class Deviation:
    """One difference, which the words ``says`` name in the card of the method (by default ``source``).

    ``expected`` is theirs and ours, derived or measured once; ``here`` is methods, settings of :func:`composed`, those
    of Lp-Reg, or an estimator with its settings.
    """

    says: str
    source: str
    number: str
    expected: tuple[float, float]
    card: str
    read: str | Sequence[Any] = "loss"
    case: str = ""
    here: Any = None

    def measured(self) -> tuple[float, float]:
        """The number of theirs, as stored, and ours."""
        if isinstance(self.read, str) and self.read in BOTH:
            return BOTH[self.read]()
        if self.read[0] == "advantage":
            stored, row = load(self.source)["advantages"][self.case], self.read[1]
            return stored["advantages"][row], float(advantages_of(stored["rewards"], **self.here)[row])
        there, here = theirs(self.source, self.case), self._ours()
        return self._number(there, there), self._number(here, there)

    def documented(self) -> str:
        """The text that names it."""
        if self.card == "advantages":
            return " ".join((inspect.getdoc(estimators) or "").split())
        text = " ".join((inspect.getdoc(METHODS.get(self.card)) or "").split())
        return text.partition(" Deviations: ")[2].partition(" Pitfalls: ")[0]

    def _ours(self) -> Result:
        if isinstance(self.here, list):
            return composed(self.source, self.case, self.here)
        settings = dict(self.here)
        result = held_by_lp_reg if settings.pop("check", "") else composed
        return result(self.source, self.case, **settings)

    def _number(self, result: Result, there: Mapping[str, Any]) -> float:
        if isinstance(self.read, str):
            return float(READ[self.read](result, there))
        _, row, place = self.read
        return float(result["gradient"][row, place])


#: Numbers of a result, and of the published one, by ``read``.
READ: Mapping[str, Callable[[Result, Mapping[str, Any]], Any]] = {
    "loss": lambda result, there: result["loss"],
    "still": lambda result, there: (tensors("ratios")["mask"].bool() & (result["gradient"] == 0)).sum(),
    "selected": lambda result, there: result["selected"].sum(),
    "common": lambda result, there: (result["selected"] & there["selected"]).sum(),
}


#: What has no stored case: both numbers, by ``read``.
BOTH: Mapping[Any, Callable[[], tuple[float, float]]] = {
    "first_boost": lambda: (
        load("stare")["controllers"]["adaptive"]["steps"][0]["boost"],
        gains("adaptive")[0]["boost"],
    ),
    "mean_entropy": lambda: (load("stare")["mean_entropy"]["seq-mean-token-mean"], entropy_of_the_gate()),
    "floor_of_a_share": lambda: (
        int(100 * 0.29),
        Pool.top(torch.arange(100.0), 0.29, rounding="floor").threshold().nominal,
    ),
}
DEVIATIONS = tuple(Deviation(**{"card": row["source"], **row}) for row in rows("deviations.yaml"))
