"""Responses that are made from rewards and groups alone."""

import torch

from rlstab.stages.response_batch import ResponseBatch


def test_responses_of_rewards_and_groups_have_every_other_field_of_a_finished_answer():
    batch = ResponseBatch.of([1.0, 0.0, 0.5], [4, 4, 9], lengths=[2, 3, 1], given=[0, 5, 0])
    expected = {
        "rewards": torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64),
        "lengths": torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64),
        "ended": torch.tensor([True, True, True]),
        "prompt_ids": torch.tensor([4, 4, 9]),
        "group_ids": torch.tensor([4, 4, 9]),
        "sequence_ids": torch.tensor([0, 1, 2]),
        "given": torch.tensor([0, 5, 0]),
        "pivot": torch.zeros(3, dtype=torch.float64),
    }
    tensors = batch.tensors()
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert tensors[name].dtype == values.dtype, name
        assert torch.equal(tensors[name], values), name
    assert batch.limit == 8


def test_one_value_stands_for_all_responses_and_none_are_none():
    batch = ResponseBatch.of([1.0, 0.0], ended=False, limit=5)
    assert batch.groups == 1
    assert batch.ended.tolist() == [False, False]
    assert batch.limit == 5
    batch.lengths[0] = 3.0  # not one number for all
    assert batch.lengths.tolist() == [3.0, 1.0]
    assert len(ResponseBatch.empty({"logprobs", "reward/exact"})) == 0
    assert ResponseBatch.empty({"reward/exact"}).extra["reward/exact"].shape == (0,)
