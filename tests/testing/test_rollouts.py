"""The rollouts that stages are checked on could be drawn in a run, and their parts are whole groups."""

import torch

from rlstab.testing.relabel import relabellings
from rlstab.testing.rollouts import LIMIT, PROMPTS, Rollout, make_rollout


def test_a_rollout_could_be_drawn_in_a_run() -> None:
    for rollout in (make_rollout(sizes, seed) for sizes in ([3, 1, 5, 2], [1, 1], []) for seed in range(30)):
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
        assert set(rollout.batch().extra) == set(whole.extra)
        sampled = torch.arange(LIMIT) < whole.lengths.unsqueeze(-1)
        assert bool((whole.extra["block_ids"][~sampled] == -1).all())


def test_a_part_is_whole_groups_as_wide_as_they_need_with_the_prompts_that_were_chosen() -> None:
    rollout = make_rollout([2, 3, 1], 2, ["my_signal"])
    part, whole = rollout.part([0, 2]), rollout.batch(torch.tensor([20, 7]))
    assert sorted(part.group_ids.unique().tolist()) == sorted(rollout.responses.group_ids.unique()[[0, 2]].tolist())
    assert part.extra["my_signal"].shape == (len(part), int(part.lengths.max()))
    part.rewards.fill_(9)
    assert not bool((rollout.responses.rewards == 9).any())
    assert [len(rollout.part([])), rollout.part([]).extra["my_signal"].shape] == [0, (0, 0)]
    assert whole.prompt_ids.unique().tolist() == [7, 20]
    assert torch.equal(whole.extra["prompt_features"], rollout.offer.features(whole.prompt_ids))


def test_a_rollout_is_the_same_under_other_ids_even_without_responses() -> None:
    for sizes in ([2, 3, 1], []):
        rollout = make_rollout(sizes, 1)
        for _, other in relabellings(rollout):
            assert [torch.equal(*groups) for groups in zip(_groups(rollout), _groups(other), strict=True)] == [True] * 2
            assert not bool(torch.isin(torch.cat(other.ids), torch.cat(rollout.ids)).any())


def _groups(rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Which responses have one group, and that all ids of responses differ."""
    sequence_ids, group_ids = rollout.ids
    return group_ids == group_ids[:, None], sequence_ids == sequence_ids[:, None]
