"""WAPO: the published loss of groups, wherever their responses lie."""

from __future__ import annotations

import pytest
import torch

from rlstab import WAPO, ClipHigher, compose
from rlstab.testing.run import joined, run_parts, run_ranks, run_whole
from rlstab.testing.steps import Step, make_step

CLIP = ClipHigher(low=1.0, high=9.0)
LENGTHS = [3, 5, 2, 4, 1, 6, 2, 4, 3]
#: Groups of 2, 3, 1 and 3 responses; the last has no winner, and the lone response wins.
GROUPS = [0, 0, 1, 1, 1, 2, 5, 5, 5]
ADVANTAGES = [0.5, -0.5, -0.25, 0.75, 0.25, 1.0, 0.0, -0.1, 0.0]


def step() -> Step:
    made = make_step("mixed", LENGTHS, 1, 7, ())
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[made.sequence]
    moved = {"logprobs": (made.evidence["old_logprobs"] + 2 * (made.live["logprobs"] - made.evidence["logprobs"]))}
    return Step(
        {**made.evidence, "advantages": advantages},
        {**made.live, **moved},
        made.sequence,
        made.position,
        made.sequence_ids,
        torch.tensor(GROUPS),
    )


def published(step: Step, length: int) -> float:
    """Scalar loops: sum the tokens of winners in a group, over G L, then over the groups that have one."""
    ratios = (step.live["logprobs"] - step.evidence["old_logprobs"]).exp().tolist()
    total, groups = 0.0, set()
    for token, row in enumerate(step.sequence.tolist()):
        if ADVANTAGES[row] > 0:
            groups.add(GROUPS[row])
            total -= min(ratios[token], 10.0) * ADVANTAGES[row] / (GROUPS.count(GROUPS[row]) * length)
    return total / len(groups)


@pytest.mark.parametrize("length", [4, 1000])
def test_the_published_loss_over_parts_and_ranks_that_tear_groups_apart(length: int) -> None:
    objective = compose(WAPO(length=length), CLIP)
    found = [
        run_whole(objective, step()),
        run_parts(objective, step(), [[0, 2], [1], [], [8, 4, 3], [7, 5], [6]]),
        joined(run_ranks(objective, step(), [[[0, 2, 6], [5]], [[1], [3, 4, 7, 8]]])),
        joined(run_ranks(objective, step(), [[], [list(range(9))]])),
    ]
    for one in found:
        assert one.loss == pytest.approx(published(step(), length), rel=1e-13)
        assert one.report["wapo/winners"].value == 4 / 9
        assert one.report["wapo/groups"].value == 3 / 4
