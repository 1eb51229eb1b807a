"""In an optimizer step the host runs ahead of the device: where it waits for it, and why, is counted and told here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from rlstab.core.comm import LocalComm
from rlstab.core.plan import make_plan
from rlstab.trace.writer import Tracer
from rlstab.train.engines import OneProcess
from rlstab.train.metrics import Metrics
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import load_policy
from rlstab.train.step import Experience, Learner
from tests.train.runs import small
from tests.waits import Waits

ROWS, PROMPT, LENGTH = 8, 6, 10
CLIP = {"name": "clip_higher", "dual_clip": 3.0}
#: Two parts, with padding in both.
LENGTHS = [[10], [3], [5], [7], [2], [9], [10], [4]]


def experience(vocabulary: int, waits: Waits) -> Experience:
    """Of a rollout; as in a run, rows, advantages and ids are the host's."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (ROWS, PROMPT + LENGTH), generator=draw)
    there = torch.ones(ROWS, PROMPT, dtype=torch.bool)
    group = torch.arange(ROWS) // 4
    ids[:, :PROMPT] = ids[group * 4, :PROMPT]
    there[:, 0] = group == 0
    logprobs = -torch.rand(ROWS, LENGTH, generator=draw)
    names = ("rollout_logprobs", "logprobs", "old_logprobs", "entropies", "ref_logprobs", "max_logprobs")
    host = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 1.0, -1.0, 0.0]), torch.arange(ROWS), group
    waits.keep(*host)
    return Experience(
        Sequences(ids[:, :PROMPT], there, ids[:, PROMPT:], torch.arange(LENGTH) < torch.tensor(LENGTHS)),
        {name: logprobs for name in names} | {"log_kept_mass": logprobs / 100},
        *host,
    )


def waits_of(objective: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Those of one optimizer step in two parts, by phase.

    ``before`` and after the ``plan``, in a ``part``, ``between`` two of them, ``after`` the last backward.
    """
    run = small(out, objective, optimisation__micro_batch_size=4)
    engine = OneProcess(load_policy("countdown-tiny"))
    waits = Waits("before")
    rounds, backward = engine.rounds, engine.backward
    backwards = 0

    def phased(parts: Any) -> Iterator[Any]:
        for one in rounds(parts):
            waits.phase = "part"
            yield one
        waits.phase = "after"

    def ended(loss: Any) -> None:
        nonlocal backwards
        backwards += 1
        backward(loss)
        waits.phase = "between"

    def planned(*given: Any, **options: Any) -> Any:
        waits.phase = "plan"
        found = make_plan(*given, **options)
        waits.phase = "before"
        return found

    monkeypatch.setattr(engine, "rounds", phased)
    monkeypatch.setattr(engine, "backward", ended)
    monkeypatch.setattr("rlstab.train.step.make_plan", planned)
    learner = Learner(engine, run.composition, run.optimisation, 1.0, Accelerator(cpu=True), LocalComm(), run.seed)
    learner.tracer = Tracer(pytest.fail, run.tracking, 3, str)  # of a rollout that is not traced
    monkeypatch.setattr(learner.optimizer, "step", lambda: None)  # torch's own, which on a CPU does other things
    _ = engine.policy.head  # found once in a run
    given = experience(engine.policy.model.config.vocab_size, waits)
    rows = torch.arange(ROWS)
    waits.keep(rows)
    learner.optimizer_steps = 1
    with waits():
        learner._step(given, rows, Metrics(), first=True)
    assert backwards == 2
    return waits


#: In two parts, so most are two.
BEFORE = {
    "row_order.py in_parts: cpu": 1,  # the lengths, to sort by
    "step.py _part: sent": 4,  # rows and advantages, which the host makes
    "batch.py ids: sent": 4,  # of sequences and groups
    "padded_rows.py rows: tolist": 4,  # the width of a part, and of the rows of it that need a forward
    "batch.py from_padded: nonzero": 2,  # its tokens
    "batch.py _require_in_range: tolist": 2,  # an index out of range would end the process later
    "step.py by: nonzero": 2,  # the tokens that need a forward,
    "step.py by: _unique2": 2,  # their sequences
    "step.py by: _local_scalar_dense": 2,  # and how long these are
    "shared_prompts.py among: unique_dim": 2,  # how many different prompts they have
}
PLAN = {
    "plan.py _refuse_nonfinite: _local_scalar_dense": 2,
    "plan.py make_plan: cpu": 1,  # all counts
}
PART = {
    # the backward of the head: how many rows have a gradient is known when it has arrived
    "tile.py live_rows: nonzero": 2,
}
AFTER = {
    "step.py _step: cpu": 1,  # loss, values that are not finite, live rows
    "whole_weights.py clip: _local_scalar_dense": 1,  # the norm: is the step refused?
    "step.py _report_gap: _local_scalar_dense": 2,  # once in a rollout
}
#: Pools of values, and their exact order statistics.
POOLS = {"compare.py places: numpy": 4, "select.py <genexpr>: _local_scalar_dense": 1}


@pytest.mark.parametrize(
    ("objective", "plan", "part"),
    [
        ("clip_higher", {}, {}),
        (
            [CLIP, "s2t", "stare", "kl", "entropy_bonus", "sequence_mean"],
            {**POOLS, "stats.py _plus: sent": 2, "stats.py settle: cpu": 1},
            {},
        ),
        (
            [CLIP, {"name": "lp_reg", "share": 0.4}],
            {**POOLS, "compare.py places: numpy": 2},
            {"tile.py whole_rows: nonzero": 2},  # a second look at the vocabulary, at the rows that need it
        ),
    ],
    ids=["clip", "masks, weights, penalties", "Lp-Reg"],
)
def test_all_waits_of_an_optimizer_step(
    objective: Any, plan: dict[str, int], part: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the forward of a part to the end of its backward there are those that nobody can know before."""
    waits = waits_of(objective, tmp_path, monkeypatch)
    # in each forward of a part, over prompts and responses: may the mask be left out, which allows a faster kernel?
    assert waits.seen["part"].pop("transformers: _local_scalar_dense", 0) <= 4
    assert waits.seen == {
        "before": Counter(BEFORE),
        "plan": Counter({**PLAN, **plan}),
        "part": Counter({**PART, **part}),
        "after": Counter(AFTER),
    }
