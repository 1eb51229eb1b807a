"""Shared by masks whose dropped tokens leave the divisor or still count in it."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from rlstab import Mean, Terms, TokenBatch


class DividedMask:
    """Base of a mask with a setting ``denominator``."""

    denominator: Literal["kept", "all"]

    @property
    def writes(self) -> frozenset[str]:
        """The field that removes tokens: from the divisor too, or from the gradient alone."""
        return frozenset({"keep" if self.denominator == "kept" else "weight"})

    def keeping(self, batch: TokenBatch, keep: Tensor, report: Mapping[str, Mean]) -> Terms:
        """The terms that drop all tokens but those where the ``(n,)`` bool is True."""
        if self.denominator == "kept":
            return Terms(keep=keep, report=report)
        return Terms(weight=keep.to(batch.logprobs.dtype), report=report)
