"""Advantage estimators: each against sums by hand, edges that all have, and what single ones refuse and report."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlstab.config import load_run
from rlstab.core.stats import Mean, Settled
from rlstab.errors import ConfigError, Conflict, OutOfRange, ShapeError
from rlstab.stages import group_relative as plain
from rlstab.stages.blockwise import Blockwise
from rlstab.stages.bnpo import BNPO
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.dynamic_sampling import DynamicSampling
from rlstab.stages.gdpo import GDPO
from rlstab.stages.gigpo import GiGPO
from rlstab.stages.grpo import GRPO
from rlstab.stages.max_rl import MaxRL
from rlstab.stages.opo import OPO
from rlstab.stages.opob import OPOB
from rlstab.stages.opob_proxy import OPOBProxy, logit_squares
from rlstab.stages.optimal_token_baseline import OptimalTokenBaseline
from rlstab.stages.overlong import Overlong
from rlstab.stages.pipeline import Pipeline, check_exclusions
from rlstab.stages.reinforce_pp import ReinforcePP
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.rloo import RLOO
from rlstab.stages.stage import AdvantageEstimator, RewardShaper
from tests.examples import STAGE_EXAMPLES
from tests.stages.responses import BLOCKS, WIDTH, advantages, batch, by_group, drawn, settled, values_of

Group = list[float]


def less_the_mean(rewards: Group) -> Group:
    return [reward - statistics.fmean(rewards) for reward in rewards]


def over_the_deviation(rewards: Group, ddof: int = 1, epsilon: float = 1e-4) -> Group:
    gaps = less_the_mean(rewards)
    spread = (sum(gap * gap for gap in gaps) / max(len(rewards) - ddof, 1)) ** 0.5
    return [gap / (spread + epsilon) if max(rewards) > min(rewards) else 0.0 for gap in gaps]


def less_the_others(rewards: Group) -> Group:
    count = len(rewards)
    return [(reward - (sum(rewards) - reward) / (count - 1)) if count > 1 else 0.0 for reward in rewards]


def over_the_mean(rewards: Group) -> Group:
    return [reward / statistics.fmean(rewards) - 1 if max(rewards) > min(rewards) else 0.0 for reward in rewards]


#: By the rewards of a group alone.
BY_REWARDS: list[tuple[AdvantageEstimator, Callable[[Group], Group]]] = [
    (DrGRPO(), less_the_mean),
    (GRPO(std=False), less_the_mean),
    (GRPO(), over_the_deviation),
    (GRPO(ddof=0, epsilon=0.5), lambda rewards: over_the_deviation(rewards, 0, 0.5)),
    (RLOO(), less_the_others),
    (MaxRL(), over_the_mean),
]


@pytest.mark.parametrize(
    ("estimator", "expected"), BY_REWARDS, ids=lambda value: getattr(value, "__name__", None) or repr(value)
)
def test_by_the_rewards_of_a_group(estimator: AdvantageEstimator, expected: Callable[[Group], Group]) -> None:
    for seed in range(2):
        whole = drawn(seed, graded=True)
        (given,) = advantages(estimator, whole)
        for places in by_group(whole):
            assert given[places].tolist() == pytest.approx(expected(whole.rewards[places].tolist()), abs=1e-11)


def weights_of(whole: ResponseBatch, squares: list[float]) -> list[float]:
    now, then = whole.extra["logprobs"].tolist(), whole.extra["rollout_logprobs"].tolist()
    return [math.exp(sum(a) - sum(b)) ** 2 * square for a, b, square in zip(now, then, squares, strict=True)]


def proxies(whole: ResponseBatch) -> list[float]:
    rows = zip(whole.extra["logprobs"].tolist(), whole.extra["sum_p_sq"].tolist(), strict=True)
    return [sum(1 - 2 * math.exp(now) + square for now, square in zip(*row, strict=True) if square) for row in rows]


@pytest.mark.parametrize(
    ("cls", "weigh"),
    [
        (OPO, lambda whole: whole.lengths.tolist()),
        (OPOB, lambda whole: weights_of(whole, whole.extra["squared_gradient"].tolist())),
        (OPOBProxy, lambda whole: weights_of(whole, proxies(whole))),
    ],
)
@pytest.mark.parametrize("norm_by_std", [False, True])
def test_by_a_weighted_baseline(cls, weigh, norm_by_std: bool) -> None:
    estimator = cls() if cls is OPO else cls(norm_by_std=norm_by_std)
    for seed in range(2):
        whole = drawn(seed, graded=True)
        weights, (given,) = weigh(whole), advantages(estimator, whole)
        for places in by_group(whole):
            rewards, some = whole.rewards[places].tolist(), [weights[place] for place in places]
            baseline = sum(w * reward for w, reward in zip(some, rewards, strict=True)) / sum(some)
            spread = statistics.pstdev(rewards)
            scale = spread if cls is not OPO and norm_by_std and spread > 1e-8 else 1.0
            expected = [(reward - baseline) / scale for reward in rewards]
            assert given[places].tolist() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("zero_tail", [False, True])
def test_by_a_baseline_for_each_token(zero_tail: bool) -> None:
    alone = 0
    for seed in range(2):
        whole = drawn(seed, graded=True)
        (given,) = advantages(OptimalTokenBaseline(zero_tail=zero_tail), whole)
        logprobs, sums = whole.extra["logprobs"].tolist(), whole.extra["sum_p_sq"].tolist()
        rewards, lengths = whole.rewards.tolist(), whole.lengths.tolist()
        for places in by_group(whole):
            energy = dict.fromkeys(places, 0.0)
            for token in range(WIDTH):
                there = [place for place in places if token < lengths[place]]
                for place in there:
                    energy[place] += 1 - 2 * math.exp(logprobs[place][token]) + sums[place][token]
                total = sum(energy[place] for place in there)
                baseline = sum(energy[place] * rewards[place] for place in there) / (total or 1.0)
                if len(there) == 1 and zero_tail:
                    baseline = 0.0
                even = len({rewards[place] for place in places}) == 1
                alone += len(there) == 1 and not even
                for place in places:
                    expected = rewards[place] - baseline if place in there and not even else 0.0
                    assert float(given[place, token]) == pytest.approx(expected, abs=1e-11)
    assert alone


@pytest.mark.parametrize("whiten", [False, True])
def test_by_each_reward_alone(whiten: bool) -> None:
    for seed in range(2):
        whole = drawn(seed)
        parts, weights = whole.extra["reward_parts"].tolist(), whole.extra["reward_weights"][0].tolist()
        summed = [0.0] * len(whole)
        for places in by_group(whole):
            for number, weight in enumerate(weights):
                values = over_the_deviation([parts[place][number] for place in places])
                for place, value in zip(places, values, strict=True):
                    summed[place] += weight * value
        scale = (sum(value * value for value in summed) / (len(summed) - 1)) ** 0.5 + 1e-4 if whiten else 1.0
        (given,) = advantages(GDPO(whiten=whiten), whole)
        assert given.tolist() == pytest.approx([value / scale for value in summed], abs=1e-11)


@pytest.mark.parametrize("baseline", [False, True])
def test_whitened_over_tokens(baseline: bool) -> None:
    for seed in range(2):
        whole = drawn(seed, graded=True)
        values = whole.rewards.tolist()
        for places in by_group(whole) if baseline else []:
            for place, value in zip(places, less_the_mean([values[place] for place in places]), strict=True):
                values[place] = value
        tokens = torch.tensor(values, dtype=torch.float64).repeat_interleave(whole.lengths.long()).tolist()
        scale = (statistics.variance(tokens) + 1e-8) ** 0.5
        expected = [(value - statistics.fmean(tokens)) / scale for value in values]
        assert advantages(ReinforcePP(baseline=baseline), whole)[0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("std", "gamma", "weight"), [(True, 0.95, 1.0), (False, 1.0, 0.5)])
def test_by_episodes_and_by_turns_from_the_same_state(std: bool, gamma: float, weight: float) -> None:
    """Equations 3, 6, 7 and 8 of the paper, by loops; a turn whose state no other turn began in gets nothing."""
    shared = 0
    for seed in range(2):
        whole = drawn(seed, graded=True)
        (given,) = advantages(GiGPO(std=std, gamma=gamma, weight=weight), whole)
        rewards, states, turns = (whole.extra[name].tolist() for name in ("turn_rewards", "turn_states", "turn"))

        def norm(values: list[float]) -> list[float]:
            return over_the_deviation(values, epsilon=1e-6) if std else less_the_mean(values)

        for places in by_group(whole):
            episodes = dict(zip(places, norm([float(whole.rewards[place]) for place in places]), strict=True))
            anchors: dict[int, list[tuple[int, int]]] = {}
            for place in places:
                for turn, state in enumerate(states[place]):
                    if state:
                        anchors.setdefault(state, []).append((place, turn))
            steps = {}
            for began in anchors.values():
                shared += len(began) > 1
                returns = [
                    sum(gamma ** (later - turn) * rewards[place][later] for later in range(turn, BLOCKS))
                    for place, turn in began
                ]
                steps |= dict(zip(began, norm(returns), strict=True))
            for place in places:
                for token, turn in enumerate(turns[place]):
                    expected = episodes[place] + weight * steps[place, int(turn)]
                    assert float(given[place, token]) == pytest.approx(expected, abs=1e-11)
    assert shared > 5


def test_equal_rewards_or_one_response_give_exactly_nothing() -> None:
    whole, lone = drawn(1), drawn(0).select(torch.tensor([0]))
    for stage in itertools.chain.from_iterable(STAGE_EXAMPLES.values()):
        if isinstance(stage, AdvantageEstimator) and stage.name not in (
            "blockwise",
            "gdpo",
            "gigpo",
        ):  # they read other rewards
            for value in (0.0, 1.0, 0.1, 1 / 3):
                same = whole.reshaped(torch.full_like(whole.rewards, value))
                assert not advantages(stage, same)[0].any(), stage
            assert not advantages(stage, lone)[0].any(), stage


#: Pairs that are equal but for the rounding of a sum of weighted rewards, and pairs that are not.
ROUNDED = [
    (0.1 + 0.2, 0.3),
    (0.7 + 0.1, 0.8),
    (0.1 + 0.2 - 0.3, 0.0),
    (1.1 + 2.2 - 3.3, 0.0),
    (1e6 + 0.1 + 0.2, 1e6 + 0.3),
]
ROUNDED += [(0.30000001192092896, 0.3), (-0.3, -0.1 - 0.2), (1 / 3 + 1 / 3 + 1 / 3, 1.0), (3e-9 + 6e-9, 9e-9)]
DIFFERENT = [(1.0, 1.00001), (1e-6, 2e-6), (1e6, 1e6 + 1), (0.0, 1e-9), (-1e-12, 1e-12), (0.3, -0.3)]


def test_rewards_equal_but_for_rounding_are_equal_to_every_stage_and_to_the_plain_functions() -> None:
    whole = drawn(1)
    for pairs, equal in ((ROUNDED, True), (DIFFERENT, False)):
        for pair in pairs:
            rewards = torch.tensor(pair, dtype=torch.float64)[torch.arange(len(whole)) % 2]
            same = whole.reshaped(rewards)
            two = batch([*pair, *pair], extra={"raw_rewards": [*pair, *pair]})
            for stage in (DynamicSampling(), DynamicSampling(rewards="raw")):
                drop = stage.expand(two, *settled(stage, two), seed=0).drop
                assert drop.tolist() == [equal] * 4
            for estimator in (plain.grpo, plain.dr_grpo, plain.rloo):
                assert bool(estimator(two.rewards, two.group_ids).any()) != equal
            assert bool(two.even.all()) == equal
            if equal:
                for stage in itertools.chain.from_iterable(STAGE_EXAMPLES.values()):
                    if isinstance(stage, AdvantageEstimator) and stage.name not in (
                        "blockwise",
                        "gdpo",
                        "gigpo",
                        "bnpo",
                        "max_rl",
                    ):
                        assert not advantages(stage, same)[0].any(), (stage, pair)
    third = torch.tensor([0.1, 0.3]) + torch.tensor([0.2, 0.0])  # float32: 0.3 and what 0.1 + 0.2 is there
    assert not plain.rloo(third.repeat(2), torch.zeros(4)).any()
    blocks = {"block_rewards": [[0.1 + 0.2], [0.3]], "block_outcomes": [[1], [1]], "block_ids": [[0] * WIDTH] * 2}
    assert not advantages(Blockwise(), batch([0.3, 0.3], extra=blocks))[0].any()
    parts = {"reward_parts": [[0.1 + 0.2, 1.0], [0.3, 1.0]], "reward_weights": [[1.0, 1.0]] * 2}
    assert not advantages(GDPO(), batch([1.3, 1.3], extra=parts))[0].any()
    rates = batch([0.1 + 0.2, 0.1 + 0.2, 0.3, 0.3, 0.2, 0.4], [0, 0, 1, 1, 2, 2])
    assert values_of(BNPO().report(rates, *settled(BNPO(), rates)))["alpha"] == 1.0


def evidence(squares: list[float]) -> dict[str, object]:
    return {
        "logprobs": [[-1.0, 0.0]] * len(squares),
        "rollout_logprobs": [[-1.0, 0.0]] * len(squares),
        "squared_gradient": squares,
    }


def test_large_importance_weights_do_not_overflow() -> None:
    far = batch(
        [1.0, 0.0, 0.0],
        extra={
            "logprobs": [[0.0, 0.0], [-600.0, -600.0], [0.0, 0.0]],
            "rollout_logprobs": [[-700.0, -700.0], [0.0, 0.0], [-700.0, -700.0]],
            "squared_gradient": [3.0, 1.0, 1.0],
            "sum_p_sq": [[0.5, 0.5]] * 3,
        },
    )
    # weights of e^2800, whose logarithm float64 holds to 1e-13
    assert advantages(OPOB(norm_by_std=False), far)[0].tolist() == pytest.approx([0.25, -0.75, -0.75], abs=1e-12)
    assert bool(advantages(OPOBProxy(), far)[0].isfinite().all())


def test_without_any_weight_the_mean_is_plain() -> None:
    given = batch([1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], extra=evidence([0.0, 0.0, 0.0, 3.0]))
    assert advantages(OPOB(norm_by_std=False), given)[0].tolist() == [0.5, -0.5, -1.0, 0.0]
    assert advantages(OPO(), batch([1.0, 0.0], lengths=[0.0, 0.0]))[0].tolist() == [0.0, 0.0]


def test_the_proxy_of_opob_is_the_squared_gradient_by_the_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    chosen = torch.randint(7, (3, 5))
    logprobs = logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    (gradient,) = torch.autograd.grad(logprobs[mask].sum(), logits)
    sum_p_sq = logits.detach().softmax(-1).square().sum(-1)
    squares = torch.where(mask, logit_squares(logprobs.detach(), sum_p_sq), 0.0)
    torch.testing.assert_close(squares, gradient.square().sum(-1))
    sure = logit_squares(torch.tensor([0.0, -1e-8, 0.0]), torch.tensor([1.0, 1 - 2e-8, 1 - 1e-7]))
    assert sure.tolist() == pytest.approx([0.0] * 3, abs=1e-7)
    assert (sure >= 0).all()


def test_negative_rewards_are_refused_by_max_rl() -> None:
    with pytest.raises(OutOfRange, match="'max_rl': a reward is"):
        advantages(MaxRL(), batch([1.0, -0.5]))
    with pytest.raises(Conflict, match="'max_rl' and the stage 'overlong'"):
        check_exclusions([MaxRL()], {"overlong": "stage"})


def test_gdpo_refuses_every_shaper() -> None:
    class Bonus(RewardShaper):
        name = "bonus"

        def shape(self, responses: ResponseBatch, stat: Any, state: Any) -> torch.Tensor:
            return torch.ones_like(responses.rewards)

    for shaper in (Bonus(), Overlong(buffer=2)):
        with pytest.raises(Conflict, match=f"'gdpo' and the stage '{shaper.name}' exclude each other"):
            Pipeline.of(shaper, GDPO())


def test_reports() -> None:
    opo = OPO().report(batch([1.0, 0.0, 1.0], [0, 0, 1], [3.0, 1.0, 5.0]), Settled(), {})["baseline_shift"]
    assert (opo.value, float(opo.count)) == (0.25, 2)  # 3 / 4 less 1 / 2; the lone response is not counted
    given = batch([1.0, 0.0, 1.0], [0, 0, 1], extra=evidence([3.0, 1.0, 1.0]))
    opob = OPOB().report(given, Settled(), {})
    assert opob["baseline_shift"].value == pytest.approx(0.25)
    assert opob["effective_share"].value == pytest.approx(16 / (2 * 10))  # (3 + 1)^2 / (2 (9 + 1))
    assert float(opob["effective_share"].count) == 2
    halves = {"logprobs": [[math.log(0.5)] * 2] * 3, "sum_p_sq": [[0.5, 0.5], [1.5, 0.5], [0.5, 0.5]]}
    given = batch([1.0, 0.0, 1.0], [0, 0, 1], [2.0, 1.0, 2.0], halves)
    token = OptimalTokenBaseline().report(given, Settled(), {})
    assert token["baseline_shift"].value == pytest.approx(0.5 / 2 - 0.5)  # at the first token: 0.5 and 1.5
    assert (float(token["baseline_shift"].count), token["alone"].value) == (2, pytest.approx(1 / 3))
    apart = batch([0.0] * 4, [0, 0, 1, 1], extra={"reward_parts": [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]})
    spread = Settled({"square": Mean(torch.tensor(12.0), torch.tensor(4.0))})
    assert values_of(GDPO().report(apart, spread, {})) == {"deviation": 2.0, "all_differ": 0.5}
    whitened, given = ReinforcePP(), batch([0.0, 1.0], lengths=[1.0, 3.0])
    assert values_of(whitened.report(given, *settled(whitened, given))) == {"mean": 0.75, "deviation": 0.5}


@pytest.mark.parametrize("estimator", [plain.grpo, plain.dr_grpo, plain.rloo])
def test_plain_rewards_are_whole_numbers_or_of_any_precision_and_one_for_each_group_id(estimator) -> None:
    rewards, groups = torch.tensor([1, 0, 0, 1]), torch.tensor([4, 4, -1, 4])
    expected = estimator(rewards.double(), groups)
    assert expected.dtype == torch.float64
    assert expected[2] == 0 != expected[0]
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        assert torch.equal(estimator(rewards.to(dtype), groups), expected)
    for shapes in (((3,), (2,)), ((2, 2), (2, 2))):
        with pytest.raises(ShapeError, match=r"rewards are .* and group_ids .*; expected"):
            estimator(*map(torch.zeros, shapes))


def test_a_group_of_one_is_refused_for_every_estimator_that_compares(tmp_path) -> None:
    """Those of a user that derive from one of them, too."""
    file = tmp_path / "mine.py"
    file.write_text("from rlstab.stages.rloo import RLOO\n\n\nclass Mine(RLOO):\n    name = 'mine'\n")
    whole = drawn(1)
    for several in STAGE_EXAMPLES.values():
        for stage in several:
            if isinstance(stage, AdvantageEstimator) and stage.name not in ("blockwise", "gigpo"):
                ones = whole.select(whole.first)
                assert stage.compares == (not advantages(stage, ones)[0].any()), stage
    for name in ("rloo", f"{file}:Mine"):
        with pytest.raises(ConfigError, match="needs at least two"):
            load_run({"objective": ["clip_higher"], "stages": [name], "rollout": {"group": 1}})
