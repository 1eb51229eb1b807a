"""What the trainer has for stages, and what is said where it has not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rlstab.train.stage_evidence import require_evidence
from torch import Tensor

from rlstab.errors import FitWarning, MissingSignal
from rlstab.stages import STAGES
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.stage import RewardShaper
from tests.examples import STAGE_EXAMPLES
from tests.train.runs import go, small


def test_every_stage_that_ships_gets_what_it_needs() -> None:
    checked = [one for several in STAGE_EXAMPLES.values() for one in several]
    assert {one.name for one in checked} == set(STAGES.names())
    for one in checked:
        require_evidence(Pipeline.of(one))


def test_what_a_stage_was_published_with_is_told_where_it_is_missing(tmp_path: Path) -> None:
    missing = small(tmp_path / "run", stages=[{"name": "deep_grpo", "branches": 2}], optimisation__rollouts=1)
    with pytest.warns(FitWarning, match="'deep_grpo' expects 'stream_weight' beside it, which is missing: the loss"):
        go(missing)
    whole = [{"name": "deep_grpo", "branches": 2}]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FitWarning)
        go(small(tmp_path / "whole", ["clip_higher", "stream_weight"], stages=whole, optimisation__rollouts=1))


@pytest.mark.parametrize(
    ("read", "says"),
    [
        ("rollout_logprob", "which the trainer does not have. Did you mean 'rollout_logprobs'?"),
        ("squared_gradient", "which is known only when a rollout is learnt, and only an advantage estimator can read"),
    ],
)
def test_what_is_not_there_is_told_before_anything_runs(read: str, says: str) -> None:
    class Reads(RewardShaper):
        """Read something."""

        name = "reads"
        needs = {read}

        def shape(self, responses: Any, stat: Any, state: Any) -> Tensor:
            return torch.zeros(len(responses))

    with pytest.raises(MissingSignal, match="the stage 'reads' reads ") as caught:
        require_evidence(Pipeline.of(Reads()))
    assert says in str(caught.value)
