"""Settings that contradict each other are refused when the method is made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlstab import MASPO, STARE, AdaptiveEntropy, ImportanceCorrection, Mismatch, TokenObjective
from rlstab.errors import OutOfRange


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: AdaptiveEntropy(low=0.01, high=0.001),
            "'adaptive_entropy': low = 0.01, initial = 0.0, high = 0.001, expected low <= initial <= high.",
        ),
        (
            lambda: AdaptiveEntropy(initial=0.1),
            "'adaptive_entropy': low = 0.0, initial = 0.1, high = 0.005, expected low <= initial <= high.",
        ),
        (
            lambda: ImportanceCorrection(min_weight=3.0),
            "'importance_correction': min_weight = 3.0 and max_weight = 2.0, expected min_weight <= max_weight.",
        ),
        (
            lambda: ImportanceCorrection(keep_low=2.0, keep_high=0.5),
            "'importance_correction': keep_low = 2.0 and keep_high = 0.5, expected keep_low <= keep_high.",
        ),
        (
            lambda: Mismatch(to="old_logprobs"),
            "'mismatch': of and to are both 'old_logprobs', expected two policies.",
        ),
        (
            lambda: MASPO(sigma=11.0),
            "'maspo': sigma = 11.0 and min_scale = 0.1, expected sigma <= max_sigma = 10.0 and min_scale <= max_scale "
            "= 10.0.",
        ),
        (
            lambda: MASPO(min_scale=2.0, max_scale=1.0),
            "'maspo': sigma = 1.0 and min_scale = 2.0, expected sigma <= max_sigma = 10.0 and min_scale <= max_scale "
            "= 1.0.",
        ),
        (
            lambda: STARE(increment=0.1, boost=2.0),
            "'stare': boost = 2.0 and damp = 0.9, expected boost <= max_boost = 1.5 and damp >= min_damp = 0.5 when "
            "increment > 0.",
        ),
        (
            lambda: STARE(increment=0.1, damp=0.2),
            "'stare': boost = 1.1 and damp = 0.2, expected boost <= max_boost = 1.5 and damp >= min_damp = 0.5 when "
            "increment > 0.",
        ),
    ],
)
def test_settings_that_contradict_each_other(make: Callable[[], TokenObjective], text: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        make()
    assert str(caught.value) == text


def test_gains_that_never_move_have_no_bounds() -> None:
    assert STARE(boost=2.0, damp=0.2).increment == 0
