"""What a selector refuses: a pool that does not fit, and answers from outside of it."""

from __future__ import annotations

import pytest

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.goldilocks_teacher import GoldilocksTeacher
from rlstab.stages.paced import Paced
from rlstab.stages.uniform import Uniform
from tests.core.says import says
from tests.stages.selections import offer, responses


@pytest.mark.parametrize(
    ("selector", "asked", "text"),
    [
        (Uniform(), offer(16),
         "'uniform' draws from a finite pool, and the task makes prompts without end. Set its `pool`, for example "
         "pool: 256."),
        (Uniform(pool=12), offer(16),
         "'uniform' was asked for 16 different prompts, and its pool has 12. Raise `pool`, or lower rollout.prompts to "
         "at most 12."),
        (Uniform(), offer(16, size=12),
         "'uniform' was asked for 16 different prompts, and the task has 12. Lower rollout.prompts to at most 12."),
        (Uniform(pool=30), offer(16, size=20),
         "'uniform': pool = 30, and the task has 20 training prompts. Set `pool` to at most 20."),
        (Goldilocks(pool=12), offer(16), "'goldilocks' was asked for 16 different prompts, and its pool has 12. ..."),
        (Paced(pool=30), offer(16, size=20), "'paced': pool = 30, and the task has 20 training prompts. ..."),
        (GoldilocksTeacher(pool=12), offer(16), "'goldilocks_teacher' was asked for 16 different prompts, and its ...")
    ]
)  # fmt: skip
def test_a_pool_that_does_not_fit_is_refused(selector, asked, text):
    with says(ValueError, text):
        selector.select(asked, selector.init_state())


@pytest.mark.parametrize("cls", [Goldilocks, Paced])
def test_a_prompt_outside_of_the_pool_is_refused(cls):
    selector = cls(pool=4)
    with says(ValueError, f"'{cls.name}': pool = 4, and the prompt 4 was answered. Raise `pool`, or answer the prompts "
              "that the stage selects."):  # fmt: skip
        measure_all(selector, [responses([(0, 0, 1.0, 0), (4, 1, 1.0, 0)])], selector.init_state(), LocalComm())
