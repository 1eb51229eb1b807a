"""The rollouts that stages are checked on could be drawn in a run, and have what each kind is named after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlstab.testing.rollouts import KINDS, LIMIT, PROMPTS, Rollout, make_rollout


def drawn(kind: str, count: int = 30, **more: Any) -> list[Rollout]:
    return [make_rollout(kind, [3, 1, 5, 2], seed, **more) for seed in range(count)]


def test_a_rollout_could_be_drawn_in_a_run() -> None:
    for rollout in (rollout for kind in KINDS for rollout in drawn(kind)):
        whole = rollout.responses
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
        assert set(rollout.whole().extra) == set(whole.extra)
        sampled = torch.arange(LIMIT) < whole.lengths.unsqueeze(-1)
        assert bool((whole.extra["block_ids"][~sampled] == -1).all())


SAYS: dict[str, Callable[[Any], Any]] = {
    "even": lambda whole: whole.even.all(),
    "graded": lambda whole: len(whole.rewards.unique()) == 11,
    "shaped": lambda whole: (whole.rewards < whole.extra["raw_rewards"]).all(),
    "mixed": lambda whole: (whole.rewards == whole.extra["raw_rewards"]).all(),
    "tied": lambda whole: len(whole.rewards.unique()) <= 3,
    "groups of one": lambda whole: whole.groups == len(whole) == 4,
    "one response": lambda whole: len(whole) == 1,
    "nothing": lambda whole: len(whole) == 0,
    "cut off": lambda whole: (~whole.ended).any(),
    "prompt twice": lambda whole: whole.groups == 4 and len(whole.prompt_ids.unique()) == 2,
    "all right": lambda whole: (whole.rewards == 1).all(),
    "all wrong": lambda whole: (whole.rewards == 0).all(),
}


def test_each_kind_is_what_its_name_says() -> None:
    assert SAYS.keys() == set(KINDS) - {"branches"}
    assert {
        kind for kind, says in SAYS.items() if not all(bool(says(rollout.responses)) for rollout in drawn(kind))
    } == set()
    assert sum(bool((rollout.responses.given > 0).any()) for rollout in drawn("branches")) > 24
    assert max(rollout.responses.rewards.abs().max() for rollout in drawn("mixed", extreme=1e6)) > 1e5


def test_a_part_is_whole_groups_as_wide_as_they_need() -> None:
    rollout = make_rollout("mixed", [2, 3, 1], 1, ["my_signal"])
    part = rollout.part([0, 2])
    assert sorted(part.group_ids.unique().tolist()) == sorted(rollout.responses.group_ids.unique()[[0, 2]].tolist())
    assert part.extra["my_signal"].shape == (len(part), int(part.lengths.max()))
    assert part.extra["block_rewards"].shape == (len(part), 3)
    part.rewards.fill_(9)
    assert not bool((rollout.responses.rewards == 9).any())
    assert [len(rollout.part([])), rollout.part([]).extra["my_signal"].shape] == [0, (0, 0)]


def test_a_selector_is_asked_for_the_prompts_that_are_answered() -> None:
    rollout = make_rollout("prompt twice", [2, 3, 1], 1)
    chosen = torch.tensor([20, 7])
    part = rollout.whole(chosen)
    assert part.prompt_ids.unique().tolist() == [7, 20]
    assert part.extra["prompt_features"].shape == (6, 4)
    assert torch.equal(part.extra["prompt_features"], rollout.offer.features(part.prompt_ids))


def test_extreme_rewards_of_a_stage_that_takes_shares_alone() -> None:
    rewards = torch.cat([rollout.responses.rewards for rollout in drawn("mixed", extreme=1.0)])
    assert bool(((rewards >= 0) & (rewards <= 1)).all())
    near = (rewards - 0.1).abs()
    assert bool(((near < 1e-12) & (near > 0)).any())
