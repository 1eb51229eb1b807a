"""What holds for every advantage estimator: any cut, any order, edges, and what its card says of it."""

from __future__ import annotations

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages import STAGES
from rlstab.stages.stage import AdvantageEstimator
from tests.stages.estimating import advantages, batch, drawn

SECTIONS = "Problem Equation Reads Gives Parameters State Deviations Interacts Limits Example Source".split()
CLASSES = [one for one in map(STAGES.get, STAGES.names()) if issubclass(one, AdvantageEstimator)]
VARIANTS = {
    "grpo": [{"std": False}, {"ddof": 0}],
    "reinforce_pp": [{"baseline": True}],
    "opob": [{"norm_by_std": False}],
    "opob_proxy": [{"norm_by_std": False}],
    "blockwise": [{"shrink": 2.0}],
    "bnpo": [{"low": -1.0, "high": 2.0}],
}
INSTANCES = [cls(**one) for cls in CLASSES for one in [{}, *VARIANTS.get(cls.name, [])]]
#: Blocks have rewards of their own.
BY_REWARD = [one for one in INSTANCES if one.name != "blockwise"]
every = pytest.mark.parametrize("estimator", INSTANCES, ids=repr)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)


def test_all_are_here() -> None:
    assert {cls.name for cls in CLASSES} >= {
        *("blockwise", "bnpo", "dr_grpo", "grpo", "max_rl", "opo", "opob", "opob_proxy", "reinforce_pp", "rloo")
    }


def reported(estimator: AdvantageEstimator) -> set[str]:
    whole = drawn(0)
    stat, state = measure_all(estimator, [whole], {}, LocalComm())
    found = estimator.report(whole, stat, state)
    assert all(torch.isfinite(one.total) for one in found.values()), found
    return set(found)


@pytest.mark.parametrize("estimator", BY_REWARD, ids=repr)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_everywhere_give_exactly_nothing(estimator: AdvantageEstimator, value: float) -> None:
    seven = drawn(1)
    same = seven.reshaped(torch.full_like(seven.rewards, value))
    assert advantages(estimator, same)[0].tolist() == [0.0] * len(same)


@pytest.mark.parametrize("estimator", BY_REWARD, ids=repr)
def test_one_response(estimator: AdvantageEstimator) -> None:
    lone = drawn(0).select(torch.tensor([0]))
    assert advantages(estimator, lone)[0].tolist() == [0.0]


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
    found = advantages(STAGES.get("opob")(norm_by_std=False), far)[0]  # type: ignore[arg-type]
    # weights of e^2800, whose logarithm float64 holds to 1e-13
    assert found.tolist() == pytest.approx([0.25, -0.75, -0.75], abs=1e-12)
    assert bool(advantages(STAGES.get("opob_proxy")(), far)[0].isfinite().all())  # type: ignore[arg-type]
