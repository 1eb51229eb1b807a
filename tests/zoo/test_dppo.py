"""DPPO: what is stopped is what moved too much probability, wherever its ratio is."""

from __future__ import annotations

import math

import pytest

from rlstab import DPPO, GSPO, ClipHigher, TokenObjective, compose
from rlstab.config import load_run
from rlstab.errors import Conflict
from rlstab.explain.notes import idle_in_run
from tests.core.says import says
from tests.core.steps import token
from tests.zoo.coefficients import coefficients


def moved(q: float, p: float, A: float, old: float = 0.3) -> list[list[dict[str, float]]]:
    """One token that the sampler drew with probability q and that has p now."""
    now = math.log(old)
    return [[token(now=now, drift=math.log(p) - now, sampled=math.log(q) - now, A=A)]]


@pytest.mark.parametrize(
    ("q", "p", "A", "expected"),
    [
        (0.5, 0.64, 2.0, 2.56),  # ratio 1.28: what PPO would stop a little later, moved by 0.14
        (0.5, 0.66, 2.0, 0.0),
        (0.5, 0.66, -2.0, -2.64),  # moves against the evidence: pulled back
        (0.5, 0.36, -2.0, -1.44),
        (0.5, 0.34, -2.0, 0.0),
        (0.5, 0.34, 2.0, 1.36),
        (0.001, 0.01, 1.0, 10.0),  # ratio 10 of a rare token
        (0.001, 0.1, 1.0, 20.0),  # ratio 100, capped
        (0.001, 0.00001, -1.0, -0.01),
        (0.99, 0.83, -1.0, 0.0),  # ratio 0.84, which PPO keeps
    ],
)
def test_total_variation(q: float, p: float, A: float, expected: float) -> None:
    assert coefficients(DPPO(), moved(q, p, A)) == pytest.approx([expected], rel=1e-14)


def test_bounds_of_the_two_signs_are_their_own() -> None:
    method = DPPO(high=0.3, low=0.05)
    assert coefficients(method, moved(0.5, 0.79, 1.0)) == pytest.approx([1.58])
    assert coefficients(method, moved(0.5, 0.44, -1.0)) == [0.0]
    assert coefficients(method, moved(0.5, 0.46, -1.0)) == pytest.approx([-0.92])


@pytest.mark.parametrize(
    ("q", "p", "divergence"),
    [(0.5, 0.75, 0.1438), (0.9, 0.5, 0.3681), (0.01, 0.05, 0.0247), (0.999, 0.9999, 0.0014)],
)
def test_binary_kl(q: float, p: float, divergence: float) -> None:
    """Known values of q ln(q/p) + (1-q) ln((1-q)/(1-p)), between a bound just below and one just above."""
    for A in (1.0, -1.0):
        harmful = A * (p - q) > 0
        below, above = (
            coefficients(DPPO("kl", high=divergence + one, low=divergence + one), moved(q, p, A))
            for one in (-1e-4, 1e-4)
        )
        assert above == pytest.approx([A * p / q])
        assert below == ([0.0] if harmful else above)


def test_a_probability_of_one_is_an_infinite_kl_and_no_nan() -> None:
    certain = coefficients(DPPO("kl", high=1e9), moved(0.99, 1.0, 1.0))
    assert certain == [0.0]
    assert coefficients(DPPO("kl"), moved(1.0, 1.0, 1.0)) == [1.0]
    assert coefficients(DPPO("kl"), moved(1.0, 0.9, 1.0)) == pytest.approx([0.9])


@pytest.mark.parametrize("method", [DPPO(), DPPO("kl"), DPPO(anchor="old"), DPPO("kl", anchor="old")], ids=repr)
def test_ratios_of_fifty_nats_are_finite(method: DPPO) -> None:
    far = [[token(now=-60.0, drift=drift, A=A) for drift in (50.0, -50.0)] for A in (1.0, -1.0)]
    assert all(math.isfinite(one) for one in coefficients(method, far))
    assert all(math.isfinite(one) for one in coefficients(method, far, live_ratio=True))


def test_the_anchor_is_the_sampler_and_the_old_policy_has_no_say() -> None:
    for old in (0.05, 0.3, 0.9):
        assert coefficients(DPPO(), moved(0.5, 0.6, 1.0, old)) == pytest.approx([1.2])
        assert coefficients(DPPO(), moved(0.5, 0.6, 1.0, old), live_ratio=True) == pytest.approx([1.2])
    own = DPPO(anchor="old", cap=9.0)
    assert coefficients(own, moved(0.5, 0.6, 1.0, old=0.55)) == pytest.approx([0.6 / 0.55])
    assert coefficients(own, moved(0.5, 0.6, 1.0, old=0.3)) == [0.0]
    assert coefficients(own, moved(0.5, 0.6, 1.0, old=0.3), live_ratio=True) == [1.0]


@pytest.mark.parametrize("old", ["live", "rollout", "recompute"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_against_the_sampler_it_is_never_idle(old: str, epochs: int) -> None:
    """Its kernels are others, so the region can stop a token in the first optimizer step already."""
    if (old, epochs) == ("live", 2):
        return
    for method, told in (({"name": "dppo"}, False), ({"name": "dppo", "anchor": "old"}, epochs == 1)):
        run = load_run({"objective": [method], "optimisation": {"old_logprobs": old, "epochs": epochs}})
        assert any("dppo" in one for one in idle_in_run(run.composition, run)) == (told and old != "rollout")


@pytest.mark.parametrize("other", [GSPO(), ClipHigher()], ids=lambda one: one.name)
def test_it_does_not_share_the_ratio(other: TokenObjective) -> None:
    with pytest.raises(Conflict, match="exclude each other"):
        compose(DPPO(), other)


def test_the_mismatch_counts_once() -> None:
    assert set(DPPO().excludes) == {"ratio", "importance_correction"}
    assert set(DPPO(anchor="old").excludes) == {"ratio"}
    with says(Conflict, "'dppo' and 'gspo' exclude each other: 'dppo' makes its own ratio, that of the token to..."):
        compose(DPPO(), GSPO())
