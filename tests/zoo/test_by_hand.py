"""Figures worked out by hand, and what no oracle sees: counts over parts and ranks, float32, tokens drawn."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import (
    CISPO,
    M2PO,
    WAPO,
    ClipCov,
    ClipHigher,
    ImportanceCorrection,
    Mismatch,
    RandomMask,
    S2TMask,
    TokenBatch,
    TokenObjective,
    compose,
    make_plan,
)
from rlstab.config import load_run
from rlstab.core.terms import Terms
from rlstab.explain.notes import idle_in_run
from rlstab.testing.run import joined, run_ranks, run_whole
from rlstab.testing.run import run_parts as run_step
from rlstab.testing.steps import Step, make_step
from rlstab.testing.tolerances import REORDERED
from tests.core.steps import batch_of, gradients, live_of, random_rows, run_parts, token


def terms(method: TokenObjective, rows: list[list[dict[str, float]]]) -> Terms:
    batch = batch_of(rows)
    return make_plan(compose(method), [batch]).terms(batch)


# -- importance_correction ---------------------------------------------------------------------------------------------

#: Ratios of the old policy over the sampler in three responses: near, far off in one token, and off by a factor of 3.
RATIOS = [[1.0, 0.9995, 1.001], [8.0, 0.4, 1.0], [2.0, 3.0, 0.5]]
VARIANTS = {
    "TIS": ({}, [1, 0.9995, 1.001, 2, 0.4, 1, 2, 2, 0.5]),
    "TIS, sequence": ({"level": "sequence", "max_weight": 8.0}, [1.0004995] * 3 + [3.2] * 3 + [3.0] * 3),
    "truncated on both sides": ({"min_weight": 0.5, "max_weight": 5.0}, [1, 0.9995, 1.001, 5, 0.5, 1, 2, 3, 0.5]),
    "IcePop": ({"max_weight": None, "keep_low": 0.45, "keep_high": 5.0}, [1, 0.9995, 1.001, 0, 0, 1, 2, 3, 0.5]),
    "masked, sequence": (
        {"level": "sequence", "max_weight": None, "keep_high": 3.1},
        [1.0004995] * 3 + [0] * 3 + [3.0] * 3,
    ),
    "geometric": (
        {"level": "geometric", "min_weight": 1.0, "max_weight": 1.0, "keep_low": 0.999, "keep_high": 1.001},
        [1] * 3 + [0] * 6,
    ),
    "veto": ({"max_weight": None, "veto": 0.45}, [1, 0.9995, 1.001, 0, 0, 0, 2, 3, 0.5]),
    # the distances of the second and third response, worst tokens: k2 2.16 and 0.60; k3 4.92 and 0.90
    "worst token, k2": ({"divergence": "max_k2", "max_divergence": 0.61}, [1, 0.9995, 1.001, 0, 0, 0, 2, 2, 0.5]),
    "worst token, below": ({"divergence": "max_k2", "max_divergence": 0.6}, [1, 0.9995, 1.001, 0, 0, 0, 0, 0, 0]),
    "worst token, k3": ({"divergence": "max_k3", "max_divergence": 0.91}, [1, 0.9995, 1.001, 0, 0, 0, 2, 2, 0.5]),
    # e^|d| is 8, 2.5, 1 and 2, 3, 2: means 3.83 and 2.33
    "mean error": ({"divergence": "mean_error", "max_divergence": 2.34}, [1, 0.9995, 1.001, 0, 0, 0, 2, 2, 0.5]),
    "mean error, below": ({"divergence": "mean_error", "max_divergence": 2.33}, [1, 0.9995, 1.001, 0, 0, 0, 0, 0, 0]),
    "nothing left to normalise by": ({"keep_high": 0.1, "max_weight": None, "normalize": True}, [0] * 9),
}


@pytest.mark.parametrize(("settings", "weights"), VARIANTS.values(), ids=VARIANTS)
def test_weights_of_the_published_variants(settings: dict[str, object], weights: list[float]) -> None:
    rows = [[token(sampled=-math.log(ratio)) for ratio in row] for row in RATIOS]
    assert terms(ImportanceCorrection(**settings), rows).weight.tolist() == pytest.approx(weights)


# -- cispo -------------------------------------------------------------------------------------------------------------


def test_dispo_caps_by_the_sign_of_the_advantage_and_the_side_of_the_ratio() -> None:
    method = CISPO(cap=11.0, floor=0.8, negative_cap=101.0, negative_floor=0.0)
    ratios = [0.5, 0.9, 20.0, 200.0]
    rows = [[token(now=-8.0, drift=math.log(ratio), A=advantage) for ratio in ratios] for advantage in (1.0, -1.0)]
    batch = batch_of(rows)
    policy, leaves = live_of(batch, rows)
    make_plan(compose(method), [batch]).loss(batch, policy).loss.backward()
    assert gradients(batch, leaves)["logp"].tolist() == pytest.approx(
        [-g / 8 for g in (0.8, 0.9, 11, 11)] + [g / 8 for g in (0.5, 0.9, 20, 101)]
    )


# -- m2po --------------------------------------------------------------------------------------------------------------


def moved(*gaps: float, A: float = 1.0) -> list[dict[str, float]]:
    """A response whose tokens are so many nats above what the sampler reported."""
    return [token(sampled=-gap, A=A) for gap in gaps]


@pytest.mark.parametrize(
    ("gaps", "dropped"),
    [
        ((0.1, 0.2, 0.6), [2]),  # squares 0.01, 0.04, 0.36: mean 0.137, then 0.025
        ((0.1, 0.1, 0.3), []),  # mean 0.037
        ((0.1, 0.3, 0.6), [1, 2]),  # mean 0.153, 0.05, 0.01
        ((0.5,), []),  # the smallest stays
        ((0.5, 0.6), [1]),
        ((0.5, 0.5, 0.5, 0.7, 0.7), [3, 4]),  # equal values go, and stay, together
    ],
)
def test_m2po_drops_the_largest_until_the_mean_fits(gaps: tuple[float, ...], dropped: list[int]) -> None:
    for rows in ([moved(*gaps)], [moved(*(-gap for gap in gaps), A=-1.0)]):
        weight = terms(M2PO(), rows).weight
        assert ([] if weight is None else weight.eq(0).nonzero().flatten().tolist()) == dropped


def test_the_budget_of_m2po_is_of_the_whole_step() -> None:
    rows = [moved(0.1, 0.2), moved(0.6), moved(0.1, 0.3)]
    # alone, the second would keep its token, and the third lose one; together only 0.36 goes: mean 0.0375 of the rest
    whole = {"m2po/dropped": 1 / 5, "m2po/harmful": 1.0, "m2po/threshold": 0.36}
    for parts in ([[0, 1, 2]], [[0], [1], [2]], [[2], [], [1, 0]]):
        _, report = run_parts(compose(M2PO()), rows, parts)
        assert {name: report[name].value for name in whole} == pytest.approx(whole, rel=1e-13)


def test_a_run_lets_m2po_act_or_says_that_it_cannot() -> None:
    for optimisation, idle in (({"epochs": 1}, False), ({"epochs": 2}, False), ({"old_logprobs": "rollout"}, True)):
        run = load_run({"objective": ["clip_higher", "m2po"], "optimisation": optimisation})
        assert any(line.startswith("m2po cannot act") for line in idle_in_run(run.composition, run)) == idle


# -- s2t ---------------------------------------------------------------------------------------------------------------


def test_candidates_of_s2t_are_compared_in_float64() -> None:
    sides = set()
    for max_prob in (0.001, 0.002, 0.007, 0.013):
        logprob = torch.tensor([[math.log(max_prob)]])  # rounded to float32, up or down
        below = logprob.item() < math.log(max_prob)
        batch = TokenBatch.from_padded(
            response_mask=torch.ones(1, 1), advantages=torch.ones(1), old_logprobs=logprob, entropies=torch.zeros(1, 1)
        )
        out = make_plan(compose(S2TMask(max_prob=max_prob)), [batch]).terms(batch)
        assert out.report["s2t/candidates"].value == float(below)
        sides.add(below)
    assert sides == {True, False}


# -- mismatch ----------------------------------------------------------------------------------------------------------

FIELDS = {"old_logprobs": "old", "logprobs": "now", "rollout_logprobs": "rollout"}


@pytest.mark.parametrize("of_to", [("old_logprobs", "rollout_logprobs"), ("logprobs", "old_logprobs")])
def test_mismatch_reports_what_sums_by_hand_give(of_to: tuple[str, str]) -> None:
    rows = random_rows(3, [4, 0, 7, 1, 5])
    gaps = [[one[FIELDS[of_to[0]]] - one[FIELDS[of_to[1]]] for one in row] for row in rows if row]
    flat = [gap for row in gaps for gap in row]
    weights = [math.exp(math.fsum(row)) for row in gaps]
    expected = {
        "k1": -math.fsum(flat) / len(flat),
        "k3": math.fsum(math.exp(gap) - gap - 1 for gap in flat) / len(flat),
        "chi2": math.fsum(math.exp(gap) ** 2 for gap in flat) / len(flat) - 1,
        "log_ppl_diff": -math.fsum(math.fsum(row) / len(row) for row in gaps) / len(gaps),
        "ess": math.fsum(weights) ** 2 / (len(gaps) * math.fsum(weight * weight for weight in weights)),
        "max_abs_log_ratio": max(map(abs, flat)),
    }
    for parts in ([[0, 1, 2, 3, 4]], [[4, 0], [1], [3, 2]]):
        _, report = run_parts(compose(Mismatch(*of_to)), rows, parts)
        values = {name: report[f"mismatch/{name}"].value for name in expected}
        assert values == pytest.approx(expected, rel=REORDERED, abs=1e-13)


def test_effective_sample_size_of_weights_that_no_float_holds() -> None:
    """Of weights ``e^900`` and ``2 e^900``, with one that is 0 beside them: 9 / (3 * 5)."""
    rows = [[token(now=-950.0, sampled=sampled)] for sampled in (-900.0, -900.0 - math.log(2), 800.0)]
    _, report = run_parts(compose(Mismatch()), rows, [[2], [0], [1]])
    assert report["mismatch/ess"].value == pytest.approx(9 / 15)
    assert report["mismatch/max_abs_log_ratio"].value == pytest.approx(900 + math.log(2))
    assert all(math.isfinite(one.value) for one in report.values() if float(one.count))


# -- wapo --------------------------------------------------------------------------------------------------------------

#: Groups of 2, 3, 1 and 3 responses; the last has no winner, and the lone response wins.
GROUPS = [0, 0, 1, 1, 1, 2, 5, 5, 5]
ADVANTAGES = [0.5, -0.5, -0.25, 0.75, 0.25, 1.0, 0.0, -0.1, 0.0]


def test_the_loss_of_wapo_over_parts_and_ranks_that_tear_groups_apart() -> None:
    """Scalar loops: sum the tokens of winners in a group, over G L, then over the groups that have one."""
    made = make_step("mixed", [3, 5, 2, 4, 1, 6, 2, 4, 3], 1, 7, ())
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[made.sequence]
    now = made.evidence["old_logprobs"] + 2 * (made.live["logprobs"] - made.evidence["logprobs"])
    step = Step(
        {**made.evidence, "advantages": advantages},
        {**made.live, "logprobs": now},
        made.sequence,
        made.position,
        made.sequence_ids,
        torch.tensor(GROUPS),
    )
    total, ratios = 0.0, (now - made.evidence["old_logprobs"]).exp().tolist()
    for ratio, row in zip(ratios, step.sequence.tolist(), strict=True):
        if ADVANTAGES[row] > 0:
            total -= min(ratio, 10.0) * ADVANTAGES[row] / (GROUPS.count(GROUPS[row]) * 1000)
    objective = compose(WAPO(length=1000), ClipHigher(low=1.0, high=9.0))
    for out in (
        run_whole(objective, step),
        run_step(objective, step, [[0, 2], [1], [], [8, 4, 3], [7, 5], [6]]),
        joined(run_ranks(objective, step, [[[0, 2, 6], [5]], [[1], [3, 4, 7, 8]]])),
    ):
        assert out.loss == pytest.approx(total / 3, rel=1e-13)
        assert (out.report["wapo/winners"].value, out.report["wapo/groups"].value) == (4 / 9, 3 / 4)


# -- clip_cov ----------------------------------------------------------------------------------------------------------

STEP = make_step("mixed", [17, 40, 8, 31, 25, 12, 36, 31], 2, 5, ())


@pytest.mark.parametrize(("share", "seed"), [(1e-4, 0), (0.29, 2)])
def test_as_many_tokens_are_hit_by_clip_cov_as_the_whole_step_says(share: float, seed: int) -> None:
    """One per 1 / share tokens of the step, in parts and over two ranks; parts alone would hit one each."""
    method, count = ClipCov(share=share, low=-0.5, high=9.0, seed=seed), max(1, int(share * 200))
    plain, hits = run_whole(compose(), STEP).gradients["logprobs"], []
    for out in (
        run_whole(method, STEP),
        run_step(method, STEP, [[0], [1, 3], [], [2, 6], [7, 4], [5]]),
        joined(run_ranks(method, STEP, [[[0, 5], [2]], [[7], [], [1, 6, 3], [4]]])),
    ):
        assert (float(out.report["hit"].total), float(out.report["hit"].count)) == (count, 200)
        hits.append(out.gradients["logprobs"] == 0)
        assert torch.equal(torch.where(hits[-1], 0.0, plain), out.gradients["logprobs"])
    assert all(torch.equal(hit, hits[0]) for hit in hits)


def test_each_candidate_is_hit_as_often_as_any_other_and_not_as_a_random_mask_draws() -> None:
    batch, times = STEP.batch(), torch.zeros(200)
    A, now = STEP.evidence["advantages"], STEP.evidence["logprobs"]
    covariances = (A - A.mean()) * (now - now.mean())
    candidates = (covariances > -0.5) & (covariances < 9.0)
    for seed in range(600):
        method = ClipCov(share=0.05, low=-0.5, high=9.0, seed=seed)
        times += make_plan(method, [batch]).terms(batch).weight == 0
    chance = 10 / float(candidates.sum())
    assert times.sum() == 6000 == times[candidates].sum()
    # 600 draws each: five standard deviations of a binomial, and the sum of squares within five of chi squared
    scores = (times[candidates] - 600 * chance) / (600 * chance * (1 - chance)) ** 0.5
    assert scores.abs().max() < 5
    assert abs(float(scores.square().mean()) - 1) < 5 * (2 / len(scores)) ** 0.5
    masked = ~make_plan(RandomMask(share=0.5, sign="all"), [batch]).terms(batch).keep
    hit = make_plan(ClipCov(share=0.5, low=-99.0, high=99.0), [batch]).terms(batch).weight == 0
    assert 30 < int((masked & hit).sum()) < 70
