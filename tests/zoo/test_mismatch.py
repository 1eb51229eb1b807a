"""What is reported of two policies equals sums over plain numbers, however the optimizer step is cut."""

from __future__ import annotations

import math

import pytest

from rlstab import Mismatch, compose
from rlstab.testing.tolerances import REORDERED
from tests.core.steps import random_rows, run_parts, token

ROWS = random_rows(3, [4, 0, 7, 1, 5])
FIELDS = {"old_logprobs": "old", "logprobs": "now", "rollout_logprobs": "rollout"}


def by_hand(rows: list[list[dict[str, float]]], of: str, to: str) -> dict[str, float]:
    gaps = [[one[FIELDS[of]] - one[FIELDS[to]] for one in row] for row in rows if row]
    flat = [one for row in gaps for one in row]
    weights = [math.exp(math.fsum(row)) for row in gaps]
    return {
        "k1": -math.fsum(flat) / len(flat),
        "k3": math.fsum(math.exp(one) - one - 1 for one in flat) / len(flat),
        "chi2": math.fsum(math.exp(one) ** 2 for one in flat) / len(flat) - 1,
        "log_ppl_diff": -math.fsum(math.fsum(row) / len(row) for row in gaps) / len(gaps),
        "ess": math.fsum(weights) ** 2 / (len(gaps) * math.fsum(one * one for one in weights)),
        "max_abs_log_ratio": max(map(abs, flat)),
    }


@pytest.mark.parametrize(
    "method", [Mismatch(), Mismatch(of="logprobs"), Mismatch(of="logprobs", to="old_logprobs")], ids=repr
)
def test_it_reports_what_sums_by_hand_give(method: Mismatch) -> None:
    expected = {f"mismatch/{name}": one for name, one in by_hand(ROWS, method.of, method.to).items()}
    for parts in ([[0, 1, 2, 3, 4]], [[4, 0], [1], [3, 2]]):
        _, report = run_parts(compose(method), ROWS, parts)
        found = {name: one.value for name, one in report.items() if name in expected}
        assert found == pytest.approx(expected, rel=REORDERED, abs=1e-13)


def test_effective_sample_size_of_weights_that_no_float_holds() -> None:
    """Of weights ``e^900`` and ``2 e^900``, with one that is 0 beside them: 9 / (3 * 5)."""
    rows = [
        [token(now=-950.0, sampled=-900.0)],
        [token(now=-950.0, sampled=-900.0 - math.log(2))],
        [token(sampled=800)],
    ]
    _, report = run_parts(compose(Mismatch()), rows, [[2], [0], [1]])
    assert report["mismatch/ess"].value == pytest.approx(9 / 15)
    assert report["mismatch/max_abs_log_ratio"].value == pytest.approx(900 + math.log(2))
    assert all(math.isfinite(one.value) for one in report.values() if float(one.count))
