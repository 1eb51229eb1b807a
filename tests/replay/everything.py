"""A method that reads all that can be known of a token, so that a dump has it, and does nothing with it."""

from __future__ import annotations

import rlstab
from rlstab.core.batch import SIGNALS


class Everything(rlstab.TokenObjective):
    """Does nothing."""

    name = "everything"
    needs = set(SIGNALS)

    def terms(self, batch: rlstab.TokenBatch, stat: object, state: object) -> rlstab.Terms:
        return rlstab.Terms()
