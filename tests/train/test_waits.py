"""In an optimizer step the host runs ahead of the device: where it waits for it, and why, is counted and told here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from rlstab.config import RunConfig
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.plan import make_plan
from rlstab.trace.writer import Tracer
from rlstab.train.engines import Engine, OneProcess
from rlstab.train.metrics import Metrics
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import load_policy
from rlstab.train.step import Experience, Learner
from tests.train.crews import Crew
from tests.train.runs import file_of, small
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


def waits_of(run: RunConfig, engine: Engine, accelerator: Accelerator, comm: Comm) -> Waits:
    """Those of one optimizer step in two parts, by phase.

    ``before`` and after the ``plan``, in a ``part``, ``between`` two of them, ``after`` the last backward.
    """
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

    learner = Learner(engine, run.composition, run.optimisation, 1.0, accelerator, comm, run.seed)
    learner.tracer = Tracer(pytest.fail, run.tracking, 3, str)  # of a rollout that is not traced
    with engine.whole() as policy:
        _ = policy.head  # found once in a run
    given = experience(engine.policy.model.config.vocab_size, waits)
    rows = torch.arange(ROWS)
    waits.keep(rows)
    learner.optimizer_steps = 1
    with pytest.MonkeyPatch.context() as patched, waits():
        patched.setattr(engine, "rounds", phased)
        patched.setattr(engine, "backward", ended)
        patched.setattr("rlstab.train.step.make_plan", planned)
        patched.setattr(learner.optimizer, "step", lambda: None)  # torch's own, which on a CPU does other things
        learner._step(given, rows, Metrics(), first=True)
    assert backwards == 2
    return waits


PARTS = {"optimisation__micro_batch_size": 4}

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
    objective: Any, plan: dict[str, int], part: dict[str, int], tmp_path: Path
) -> None:
    """From the forward of a part to the end of its backward there are those that nobody can know before."""
    run = small(tmp_path, objective, **PARTS)
    waits = waits_of(run, OneProcess(load_policy("countdown-tiny")), Accelerator(cpu=True), LocalComm())
    # in each forward of a part, over prompts and responses: may the mask be left out, which allows a faster kernel?
    assert waits.seen["part"].pop("transformers: _local_scalar_dense", 0) <= 4
    assert waits.seen == {
        "before": Counter(BEFORE),
        "plan": Counter({**PLAN, **plan}),
        "part": Counter({**PART, **part}),
        "after": Counter(AFTER),
    }


# -- several processes -----------------------------------------------------------------------------------------------

#: What a collective of the plan costs: the host has what it is given, and needs what comes of it.
BOTH_WAYS = ("comm.py sum: sent", "comm.py sum: returned")
#: A gather, of which the lengths are read first, one for each process.
GATHER = {"comm.py gather: sent": 1, "comm.py <listcomp>: _local_scalar_dense": 2}
#: An order statistic over processes takes the largest and the smallest value, two histograms and few values.
TOGETHER = {
    **GATHER,
    "select.py _keys: _local_scalar_dense": 2,
    "select.py _histogram: bincount": 2,
    "select.py _histogram: cpu": 2,
}
#: By engine: what comes in the place of a wait of one process, or beside it.
BEFORE_OF = {
    "ddp": BEFORE,
    "fsdp2": {
        **{name: count for name, count in BEFORE.items() if not name.startswith("shared_prompts.py")},
        **GATHER,  # how many forwards the others have
        "comm.py gather: returned": 1,
    },
}
AFTER_OF = {
    "ddp": AFTER | dict.fromkeys(BOTH_WAYS, 1),  # the loss of all
    "fsdp2": {
        **{name: count for name, count in AFTER.items() if not name.startswith("whole_weights.py")},
        **dict.fromkeys(BOTH_WAYS, 2),  # and the norm of all shards,
        "fsdp2.py clip: cpu": 1,  # of which this is the own one's
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("objective", "plan", "sums"),
    [
        ("clip_higher", {}, 2),
        (
            [CLIP, "s2t", "stare", "kl", "entropy_bonus", "sequence_mean"],
            {**POOLS, **TOGETHER, "stats.py _plus: sent": 2, "stats.py settle: cpu": 1},
            5,
        ),
    ],
    ids=["clip", "masks, weights, penalties"],
)
def test_all_waits_of_an_optimizer_step_in_two_processes(
    engine: str, objective: Any, plan: dict[str, int], sums: int, crew: Crew, tmp_path: Path
) -> None:
    """In a part there are those of one process and no others: gradients and shards travel without the host."""
    done = crew.does(file_of(small(tmp_path / "run", objective, engine=engine, **PARTS)), 2, "waiting")
    for text in done.said:
        found = json.loads(text.rpartition("waited: ")[2])
        assert found["processes"] == 2
        assert found["seen"]["part"].pop("transformers: _local_scalar_dense", 0) <= 4
        assert found["seen"] == {
            "before": BEFORE_OF[engine],
            "plan": {**PLAN, **plan, **dict.fromkeys(BOTH_WAYS, sums)},
            "part": PART,
            "after": AFTER_OF[engine],
        }
