"""The soft overlong punishment against loops over lists."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rlstab.core.stats import Settled
from rlstab.errors import OutOfRange
from rlstab.stages.overlong import Overlong
from tests.stages.shaped import Answer, answers, batch_of


def shaped(stage: Overlong, found: list[Answer], limit: int) -> list[float]:
    return stage.shape(batch_of(found, limit), Settled(), {}).tolist()


def independent(found: list[Answer], limit: int, buffer: int, penalty: float) -> list[float]:
    """The three cases of the paper, in exact arithmetic."""
    values = []
    for one in found:
        length = one.sampled + one.given
        if length <= limit - buffer:
            part = Fraction(0)
        elif length <= limit:
            part = Fraction((limit - buffer) - length, buffer)
        else:
            part = Fraction(-1)
        values.append(float(part * Fraction(penalty)))
    return values


@pytest.mark.parametrize(("buffer", "penalty"), [(1, 1.0), (7, 1.0), (30, 0.25), (40, 2.5)])
def test_the_three_cases_of_the_paper(buffer: int, penalty: float) -> None:
    found = answers(200, 40, seed=buffer)
    expected = independent(found, 40, buffer, penalty)
    assert shaped(Overlong(buffer=buffer, penalty=penalty), found, 40) == pytest.approx(expected, abs=1e-12)
    assert min(expected) < 0 == max(expected) or buffer == 40


def test_a_buffer_beyond_the_limit_is_refused() -> None:
    with pytest.raises(OutOfRange) as caught:
        shaped(Overlong(buffer=4096), [Answer(0.0, 20, 0, False, 0)], 24)
    assert str(caught.value) == (
        "'overlong': buffer = 4096 is more than the 24 tokens that an answer may have, so that even an empty answer "
        "would be punished. Set it to at most rollout.max_new_tokens; a fifth of that is 4."
    )
    assert Overlong(buffer=4096).shape(batch_of([], 1), Settled(), {}).shape == (0,)  # a rank without responses


def test_report() -> None:
    found = answers(60, 40, seed=4)
    expected = independent(found, 40, 10, 1.0)
    report = Overlong(buffer=10).report(batch_of(found, 40), Settled(), {})
    assert report["penalty"].value == pytest.approx(-sum(expected) / 60, abs=1e-12)
    assert report["share"].value == pytest.approx(sum(one < 0 for one in expected) / 60, abs=1e-12)
    empty = Overlong(buffer=10).report(batch_of([], 40), Settled(), {})
    assert all(float(one.count) == 0 for one in empty.values())
