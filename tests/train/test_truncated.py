"""The trainer tells a method which responses were cut off at the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstab import Terms, TokenObjective, TruncatedMask, compose
from rlstab.train import Rollout
from rlstab.train.policy import load_policy
from tests.train.runs import go, small, weights

#: Some responses end before this many tokens, and some do not; two optimizer steps, in parts, on fresh evidence.
CUT = {
    "rollout__max_new_tokens": 12,
    "optimisation__rollouts": 1,
    "optimisation__mini_batches": 2,
    "optimisation__micro_batch_size": 3,
    "optimisation__refresh": "step",
}


class DropEndless(TokenObjective):
    """Drop responses without an end."""

    name = "drop_endless"
    needs = {"endless"}
    writes = {"keep"}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        return Terms(keep=batch.signal("endless") == 0)


def endless(responses: Rollout) -> Tensor:
    ends = torch.tensor(sorted(load_policy("countdown-tiny").eos_ids))
    ended = (torch.isin(responses.response_ids, ends) & responses.response_mask).any(-1)
    return (~ended).float().unsqueeze(-1).expand(responses.response_mask.shape).clone()


def test_a_response_without_an_end_is_dropped(tmp_path: Path) -> None:
    masks = {"truncated": TruncatedMask(), "endless": DropEndless(), "none": None}
    for name, method in masks.items():
        run = small(tmp_path / name, **CUT)
        run._composition = compose(*(one for one in (method,) if one is not None))
        (record,) = go(run, signals={"endless": endless}).records
        if name == "truncated":
            assert 0 < record["truncated_mask/dropped"] < 1
            assert record["tokens/kept"] == 1 - record["truncated_mask/dropped"]
    told, found, without = (weights(tmp_path / name) for name in masks)
    assert all(torch.equal(told[name], found[name]) for name in told | found)
    assert any(not torch.equal(told[name], without[name]) for name in told)
