"""What no oracle sees: metrics of a whole step, groups that are torn apart, float32, tokens drawn."""

import math
from dataclasses import replace

import pytest
import torch

from rlstab import (
    M2PO,
    WAPO,
    ClipCov,
    ClipHigher,
    ESSScale,
    Mismatch,
    RandomMask,
    S2TMask,
    TokenBatch,
    compose,
    make_plan,
)
from rlstab.testing.run import joined, run_ranks, run_whole
from rlstab.testing.run import run_parts as run_step
from rlstab.testing.steps import make_step
from rlstab.testing.tolerances import REORDERED
from tests.core.steps import EVIDENCE, random_rows, run_parts, token


def moved(*gaps: float) -> list[dict[str, float]]:
    """A response whose tokens are this many nats above what the sampler reported."""
    return [token(sampled=-gap) for gap in gaps]


def test_the_budget_of_m2po_is_of_the_whole_step() -> None:
    rows = [moved(0.1, 0.2), moved(0.6), moved(0.1, 0.3)]
    # alone, the second would keep its token, and the third lose one; together only 0.36 goes: mean 0.0375 of the rest
    whole = {"m2po/dropped": 1 / 5, "m2po/harmful": 1.0, "m2po/threshold": 0.36}
    for parts in ([[0, 1, 2]], [[0], [1], [2]], [[2], [], [1, 0]]):
        _, report = run_parts(compose(M2PO()), rows, parts)
        assert {name: report[name].value for name in whole} == pytest.approx(whole, rel=1e-13)


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


@pytest.mark.parametrize("of_to", [("old_logprobs", "rollout_logprobs"), ("logprobs", "old_logprobs")])
def test_mismatch_reports_what_sums_by_hand_give(of_to: tuple[str, str]) -> None:
    rows = random_rows(3, [4, 0, 7, 1, 5])
    of, to = (EVIDENCE[name] for name in of_to)
    gaps = [[token[of] - token[to] for token in row] for row in rows if row]
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
    """Of weights ``e^900`` and ``2 e^900``, and one that is 0: 9 / (3 * 5)."""
    rows = [[token(now=0.0, sampled=sampled)] for sampled in (-900.0, -900.0 - math.log(2), 800.0)]
    _, report = run_parts(compose(Mismatch(), ESSScale()), rows, [[2], [0], [1]])
    assert [report[f"{name}/ess"].value for name in ("mismatch", "ess_scale")] == [pytest.approx(9 / 15)] * 2
    assert report["mismatch/max_abs_log_ratio"].value == pytest.approx(900 + math.log(2))
    assert all(math.isfinite(mean.value) for mean in report.values() if float(mean.count))


#: Groups of 2, 3, 1 and 3 responses; the last has no winner, and the lone response wins.
GROUPS = [0, 0, 1, 1, 1, 2, 5, 5, 5]
ADVANTAGES = [0.5, -0.5, -0.25, 0.75, 0.25, 1.0, 0.0, -0.1, 0.0]


def test_the_loss_of_wapo_over_parts_and_ranks_that_tear_groups_apart() -> None:
    """Scalar loops: sum the tokens of winners in a group, over G L, then over the groups that have one."""
    made = make_step("mixed", [3, 5, 2, 4, 1, 6, 2, 4, 3], 1, 1, ())
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[made.sequence]
    now = made.evidence["old_logprobs"] + 2 * (made.live["logprobs"] - made.evidence["logprobs"])
    step = replace(made.given(advantages=advantages, live_logprobs=now), group_ids=torch.tensor(GROUPS))
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


STEP = make_step("mixed", [17, 40, 8, 31, 25, 12, 36, 31], 2, 5, ())


def test_each_candidate_is_hit_as_often_as_any_other_and_not_as_a_random_mask_draws() -> None:
    batch, times, draws = STEP.batch(), torch.zeros(200), 100
    A, now = STEP.evidence["advantages"], STEP.evidence["logprobs"]
    covariances = (A - A.mean()) * (now - now.mean())
    candidates = (covariances > -0.5) & (covariances < 9.0)
    for seed in range(draws):
        method = ClipCov(share=0.05, low=-0.5, high=9.0, seed=seed)
        times += make_plan(method, [batch]).terms(batch).weight == 0
    chance = 10 / float(candidates.sum())
    assert times.sum() == 10 * draws == times[candidates].sum()
    # five standard deviations of a binomial, and the sum of squares within five of chi squared
    scores = (times[candidates] - draws * chance) / (draws * chance * (1 - chance)) ** 0.5
    assert scores.abs().max() < 5
    assert abs(float(scores.square().mean()) - 1) < 5 * (2 / len(scores)) ** 0.5
    masked = ~make_plan(RandomMask(share=0.5, sign="all"), [batch]).terms(batch).keep
    hit = make_plan(ClipCov(share=0.5, low=-99.0, high=99.0), [batch]).terms(batch).weight == 0
    assert 30 < int((masked & hit).sum()) < 70
