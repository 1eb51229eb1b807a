"""Every stage obeys every law of stages; broken ones break exactly the laws named beside them.

The default run takes few drawn runs of each; those marked slow take the many that a user's check takes, or more.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch

from rlstab.errors import UnknownName
from rlstab.stages import STAGES
from rlstab.stages.stage import Stage
from rlstab.testing import STAGE_LAWS, BrokenLaw, Processes, check_stage, parametrize_stage_laws
from rlstab.testing.stage_examples import STAGE_EXAMPLES
from rlstab.testing.stage_steps import KINDS, LIMIT, PROMPTS, Rollout, make_rollout
from tests.testing.broken_stages import BROKEN, ByPythonsHash, LocalBaseline, RandomById, StateOfThisRank

STAGES_HERE = [one for several in STAGE_EXAMPLES.values() for one in several]


def test_every_stage_has_example_settings() -> None:
    assert sorted(STAGE_EXAMPLES) == STAGES.names()
    for name, several in STAGE_EXAMPLES.items():
        assert {one.name for one in several} == {name}


@pytest.mark.parametrize("stage", STAGES_HERE, ids=repr)
def test_every_stage_obeys(stage: Stage) -> None:
    report = check_stage(stage, examples=3)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES_HERE, ids=repr)
def test_every_stage_obeys_on_many_runs(stage: Stage) -> None:
    report = check_stage(stage, examples=60)
    assert report.ok, str(report)


@pytest.mark.parametrize("stage", BROKEN, ids=lambda stage: stage.name)
def test_the_laws_bite(stage: Stage) -> None:
    report = check_stage(stage, examples=4, shrink=False)
    assert report.failed == BROKEN[stage], str(report)


def test_every_law_has_a_stage_that_breaks_it() -> None:
    assert {law.name for law in STAGE_LAWS} == frozenset().union(*BROKEN.values())


def _law(report: Any, name: str) -> tuple[str, str]:
    (found,) = [(one.outcome, one.detail) for one in report.results if one.law == name]
    return found


def test_laws_that_have_nothing_to_say() -> None:
    report = check_stage(RandomById(), examples=2)
    assert _law(report, "even group") == ("silent", "it estimates no advantages")
    assert _law(report, "selection") == ("silent", "it chooses no prompts")


def test_some_laws_alone() -> None:
    report = check_stage(RandomById(), examples=2, laws=("pure", "selection"))
    assert [(one.law, one.outcome) for one in report.results] == [("pure", "passed"), ("selection", "silent")]
    with pytest.raises(UnknownName, match=r"there is no law 'pur' of stages\. Did you mean 'pure'"):
        check_stage(RandomById(), laws=("pur",))


def test_an_exception_is_declared_with_its_reason() -> None:
    class Excepted(LocalBaseline):
        exceptions: ClassVar = {"split": "reproduces published code", "identity": "reproduces published code"}

    report = check_stage(Excepted(), examples=2)
    assert _law(report, "split") == ("excepted", "reproduces published code")
    assert report.ok


@parametrize_stage_laws(LocalBaseline(), examples=3)
def test_each_law_is_a_test_of_pytest(check: Any, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.id in ("local_baseline-split", "local_baseline-identity"):
        with pytest.raises(BrokenLaw, match=r"breaks the law '(split|identity)'"):
            check()
    else:
        check()


def test_a_report_is_readable() -> None:
    text = re.sub(r"[\s│]+", " ", str(check_stage(StateOfThisRank(), examples=4)))
    assert text.startswith("StateOfThisRank()")
    assert "broken: split" in text
    assert "the state: state['responses'] is" in text
    assert "Seen on Rollout(0, rewards by group [" in text


# -- ranks as processes: what holds in threads, which share memory, need not hold there -------------------------------


def test_stages_over_real_processes() -> None:
    with Processes(2) as two:
        for stage in STAGES_HERE:
            report = check_stage(stage, examples=2, processes=two, laws=("split",))
            assert _law(report, "split") == ("passed", "over 2 gloo processes")
        assert two.empty_ranks >= 2 * 2 * len(STAGES_HERE)  # two of three rollouts leave a rank out
        report = check_stage(ByPythonsHash(), examples=3, shrink=False, processes=two)
        assert report.failed == {"split"}
        assert "choose different prompts" in _law(report, "split")[1]


@pytest.mark.slow
def test_every_stage_over_three_processes() -> None:
    with Processes(3) as three:
        for stage in STAGES_HERE:
            report = check_stage(stage, examples=10, processes=three, laws=("split",))
            assert report.ok, str(report)


# -- the rollouts that are drawn ---------------------------------------------------------------------------------------


def drawn(kind: str, count: int = 30, **more: Any) -> list[Rollout]:
    return [make_rollout(kind, [3, 1, 5, 2], seed, **more) for seed in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_is_one_that_could_be(kind: str) -> None:
    for one in drawn(kind):
        whole = one.responses
        total = whole.given + whole.lengths.long()
        assert bool(((whole.lengths >= 1) & (total <= LIMIT)).all())
        assert bool((total == LIMIT)[~whole.ended].all())
        assert bool(((whole.prompt_ids >= 0) & (whole.prompt_ids < PROMPTS)).all())
        assert len(whole.sequence_ids.unique()) == len(whole)
        for ids in (whole.prompt_ids, whole.given, whole.pivot):  # a group shares them
            assert torch.equal(ids, ids[whole.first][whole.group])
        branch = whole.given > 0
        assert torch.equal(branch, whole.pivot > 0)
        assert bool((whole.pivot < 1).all())
        assert set(one.whole().extra) == set(whole.extra)
        sampled = torch.arange(LIMIT) < whole.lengths.unsqueeze(-1)
        assert bool((whole.extra["block_ids"][~sampled] == -1).all())


def test_each_kind_is_what_its_name_says() -> None:
    def share(kind: str, has: Any) -> float:
        found = [bool(has(one.responses)) for one in drawn(kind)]
        return sum(found) / len(found)

    assert share("even", lambda whole: whole.even.all()) == 1
    assert share("graded", lambda whole: len(whole.rewards.unique()) == 11) == 1
    assert share("shaped", lambda whole: (whole.rewards < whole.extra["raw_rewards"]).all()) == 1
    assert share("mixed", lambda whole: (whole.rewards == whole.extra["raw_rewards"]).all()) == 1
    assert share("tied", lambda whole: len(whole.rewards.unique()) <= 3) == 1
    assert share("groups of one", lambda whole: whole.groups == len(whole) == 4) == 1
    assert share("one response", lambda whole: len(whole) == 1) == 1
    assert share("nothing", lambda whole: len(whole) == 0) == 1
    assert share("branches", lambda whole: (whole.given > 0).any()) > 0.8
    assert share("mixed", lambda whole: (whole.given > 0).any()) > 0.1
    assert share("cut off", lambda whole: (~whole.ended).any()) == 1
    assert share("prompt twice", lambda whole: whole.groups == 4 and len(whole.prompt_ids.unique()) == 2) == 1
    assert share("all right", lambda whole: (whole.rewards == 1).all()) == 1
    assert share("all wrong", lambda whole: (whole.rewards == 0).all()) == 1
    extreme = [one.responses.rewards.abs().max() for one in drawn("mixed", extreme=1e6)]
    assert max(extreme) > 1e5


def test_a_part_is_whole_groups_as_wide_as_they_need() -> None:
    one = make_rollout("mixed", [2, 3, 1], 1, ["my_signal"])
    part = one.part([0, 2])
    assert sorted(part.group_ids.unique().tolist()) == sorted(one.responses.group_ids.unique()[[0, 2]].tolist())
    assert part.extra["my_signal"].shape == (len(part), int(part.lengths.max()))
    assert part.extra["block_rewards"].shape == (len(part), 3)
    part.rewards.fill_(9)
    assert not bool((one.responses.rewards == 9).any())
    assert [len(one.part([])), one.part([]).extra["my_signal"].shape] == [0, (0, 0)]


def test_a_selector_is_asked_for_the_prompts_that_are_answered() -> None:
    one = make_rollout("prompt twice", [2, 3, 1], 1)
    chosen = torch.tensor([20, 7])
    part = one.whole(chosen)
    assert part.prompt_ids.unique().tolist() == [7, 20]
    assert part.extra["prompt_features"].shape == (6, 4)
    assert torch.equal(part.extra["prompt_features"], one.offer.features(part.prompt_ids))


def test_token_signals_are_those_asked_for() -> None:
    one = make_rollout("mixed", [2], 1, ["my_signal", "squared_gradient", "entropies"]).responses
    assert one.extra["my_signal"].shape == one.extra["entropies"].shape == (2, LIMIT)
    assert one.extra["squared_gradient"].shape == (2,)


def test_extreme_rewards_of_a_stage_that_takes_shares_alone() -> None:
    rewards = torch.cat([one.responses.rewards for one in drawn("mixed", extreme=1.0)])
    assert bool(((rewards >= 0) & (rewards <= 1)).all())
    near = (rewards - 0.1).abs()
    assert bool(((near < 1e-12) & (near > 0)).any())
