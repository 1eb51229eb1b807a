"""What holds for every advantage estimator: any cut, any order, edges, and what its card says of it."""

from __future__ import annotations

import doctest
import re
import sys

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.core.metadata import docstring
from rlstab.core.method import measure_all
from rlstab.core.settings import settings_of
from rlstab.stages import STAGES
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import advantages, batch, drawn, parted

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
        *("blockwise", "bnpo", "dr_grpo", "grpo", "max_rl", "opo", "opob", "opob_proxy", "reinforce_pp", "rloo"),
    }


@every
@pytest.mark.parametrize("seed", range(8))
def test_the_cut_into_parts_does_not_matter(estimator: AdvantageEstimator, seed: int) -> None:
    whole = drawn(seed, graded=seed % 2 == 0)
    expected = advantages(estimator, whole)[0]
    parts = parted(whole, seed)
    for (places, _), found in zip(parts, advantages(estimator, *(one for _, one in parts)), strict=True):
        torch.testing.assert_close(found, expected[places], rtol=0, atol=REORDERED)


@every
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_the_responses_does_not_matter(estimator: AdvantageEstimator, seed: int) -> None:
    whole = drawn(seed)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    expected = advantages(estimator, whole)[0][order]
    torch.testing.assert_close(advantages(estimator, whole.select(order))[0], expected, rtol=0, atol=REORDERED)


@every
@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_finite_float64_of_the_right_shape(estimator: AdvantageEstimator, seed: int) -> None:
    whole = drawn(seed)
    before = {name: one.clone() for name, one in whole.extra.items()} | {"rewards": whole.rewards.clone()}
    (found,) = advantages(estimator, whole)
    assert found.dtype == torch.float64
    assert found.shape in {whole.rewards.shape, whole.extra["block_ids"].shape}
    assert bool(found.isfinite().all())
    for name, one in before.items():
        assert torch.equal(whole.rewards if name == "rewards" else whole.extra[name], one), name


@every
def test_no_responses(estimator: AdvantageEstimator) -> None:
    (found,) = advantages(estimator, ResponseBatch.empty(estimator.needs))
    assert found.shape[0] == found.numel() == 0
    stat, state = measure_all(estimator, [], {}, LocalComm())
    assert dict(estimator.report(ResponseBatch.empty(estimator.needs), stat, state)).keys() <= reported(estimator)


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


@pytest.mark.parametrize("estimator", [one for one in BY_REWARD if one.name != "reinforce_pp"], ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_a_group_of_equal_rewards_has_exactly_nothing(estimator: AdvantageEstimator, seed: int) -> None:
    whole = drawn(seed)
    assert bool(whole.even.any())
    assert advantages(estimator, whole)[0][whole.even].count_nonzero() == 0


@pytest.mark.parametrize("estimator", BY_REWARD, ids=repr)
def test_one_response(estimator: AdvantageEstimator) -> None:
    lone = drawn(0).select(torch.tensor([0]))
    assert advantages(estimator, lone)[0].tolist() == [0.0]


@every_class
def test_the_card_has_its_sections_in_order(cls: type[AdvantageEstimator]) -> None:
    text = docstring(cls)
    assert re.findall(r"^([A-Z]\w+):$", text, flags=re.MULTILINE) == SECTIONS
    assert "PRICE" not in text
    assert "TRACKING" not in text


@every_class
def test_the_card_says_which_settings_there_are(cls: type[AdvantageEstimator]) -> None:
    section = re.search(r"^Parameters:\n(.*?)^State:", docstring(cls), flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    said = " ".join(section[1].split())
    assert re.findall(r"- ``(\w+)``", said) == [one.name for one in settings_of(cls)]
    for one in settings_of(cls):
        assert re.search(rf"``{one.name}``( \(\w\))?: {re.escape(f'{one}, default {one.default!r}. ')}\w", said), one
    assert said == "none" or settings_of(cls)


@every_class
def test_the_card_names_the_evidence_that_it_needs(cls: type[AdvantageEstimator]) -> None:
    section = re.search(r"^Reads:\n(.*?)^Gives:", docstring(cls), flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    read = set(re.findall(r"- ``(\w+)``", section[1]))
    assert cls().needs == read - {"rewards", "lengths", "group_ids"}


@every_class
def test_the_example_on_the_card_runs(cls: type[AdvantageEstimator]) -> None:
    module = sys.modules[cls.__module__]
    (example,) = [one for one in doctest.DocTestFinder(recurse=False).find(cls, cls.__name__, module) if one.examples]
    printed: list[str] = []
    assert doctest.DocTestRunner().run(example, out=printed.append).failed == 0, "".join(printed)


@every
def test_it_is_told_in_one_sentence(estimator: AdvantageEstimator) -> None:
    said = estimator.in_words()
    assert said.endswith(".")
    assert "\n" not in said


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
