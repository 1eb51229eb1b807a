"""Deliberately broken methods, each with the laws that must see it and what they must say.

Each does one thing that published or careful-looking code does, and is sensible otherwise. A law that no broken method
can break would prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlstab.core.objective import TokenObjective
from rlstab.testing.objective_check import Oracle
from tests.testing import broken_agreement as cut
from tests.testing import broken_loss as loss

LOSS, GRADIENT = "the loss is ", "the gradient of "
MOVED = f"{LOSS}|{GRADIENT}"

#: Each broken method with exactly the laws that it breaks, and a pattern of what each of them says.
BROKEN: Mapping[TokenObjective, Mapping[str, str]] = {
    cut.LocalQuantile(): {"split": MOVED},
}

#: Oracles of those that break the law *oracle*.
ORACLES: Mapping[str, Oracle] = {
    "reversed_clip": loss.clip,
    "strict_share": loss.top_share,
    "strict_setting": loss.at_least_a_level,
    "strict_literal": loss.at_least_a_fifth,
    "open_trust_region": loss.up_to_a_bound,
    "zero_is_rewarded": loss.rewarded_only,
    "sign_of_the_punished": loss.raised_by_size,
    "forgets_the_minimum": loss.pessimist,
}
