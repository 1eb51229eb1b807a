"""What cannot go together is refused when it is made: settings of a method, and methods."""

from __future__ import annotations

import pytest

from rlstab import (
    CISPO,
    DPPO,
    GSPO,
    MASPO,
    STARE,
    VESPO,
    AdaptiveEntropy,
    ClipCov,
    ClipHigher,
    ImportanceCorrection,
    Mismatch,
    compose,
)
from rlstab.core.settings import settings_of
from rlstab.errors import Conflict, OutOfRange
from rlstab.zoo import METHODS

#: Settings without which a method cannot be made.
CHOSEN = {
    "adaptive_entropy": {"target_entropy": 9.0},
    "constant_length": {"length": 7},
    "stare": {"target_entropy": 9.0},
    "wapo": {"length": 7},
}


def test_every_setting_is_checked() -> None:
    for name in METHODS.names():
        cls = METHODS.get(name)
        for setting in settings_of(cls):
            with pytest.raises(OutOfRange, match=f"'{name}': {setting.name} = 'wrong', expected "):
                cls(**(CHOSEN.get(name, {}) | {setting.name: "wrong"}))


def test_settings_that_contradict_each_other() -> None:
    for cls, given, named in (
        (AdaptiveEntropy, {"low": 0.01, "high": 0.001}, "low"),
        (AdaptiveEntropy, {"initial": 0.1}, "initial"),
        (ImportanceCorrection, {"min_weight": 3.0}, "min_weight"),
        (ImportanceCorrection, {"keep_low": 2.0, "keep_high": 0.5}, "keep_low"),
        (Mismatch, {"to": "old_logprobs"}, "of and to"),
        (MASPO, {"sigma": 11.0}, "max_sigma"),
        (MASPO, {"min_scale": 2.0, "max_scale": 1.0}, "min_scale"),
        (STARE, {"increment": 0.1, "boost": 2.0}, "boost"),
        (STARE, {"increment": 0.1, "damp": 0.2}, "damp"),
        (ClipCov, {"low": 6.0}, "low"),
        (CISPO, {"cap": 0.2}, "cap"),
    ):
        with pytest.raises(OutOfRange, match=f"'{cls.name}': .*{named}"):
            cls(**given)
    assert STARE(boost=2.0, damp=0.2).increment == 0  # gains that never move have no bounds


def test_methods_that_would_do_one_thing_twice() -> None:
    for method, other in (
        (DPPO(), GSPO()),
        (DPPO(), ClipHigher()),
        (DPPO(), ImportanceCorrection()),
        (VESPO(), GSPO()),
        (VESPO(), ImportanceCorrection()),
    ):
        with pytest.raises(Conflict, match=f"'{method.name}' and '{other.name}' exclude each other"):
            compose(method, other)
    assert compose(DPPO(anchor="old"), ImportanceCorrection())
