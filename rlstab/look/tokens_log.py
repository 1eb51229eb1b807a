"""What recorded optimizer steps say of their tokens, as the lines of a log."""

import torch

from rlstab.bins import Run
from rlstab.logs.log import Rows
from rlstab.record import Dump
from rlstab.record.step import DID


def tokens_log(dump: Dump, path: str) -> Run:
    """What each recorded step says of its tokens, as the lines of a log."""
    rows = Rows()
    for step in dump.steps:
        batch = step.batch
        gaps = (batch.logprobs - batch.old_logprobs).double()  # log of new over old
        values = {
            "tokens/entropy": batch.entropies,
            "response/length": step.tensors["lengths"],
            "reward/mean": step.tensors.get("rewards"),
            "ratio/clipped": step.tensors.get(f"{DID}trust_region/clipped"),
            "mismatch/k3": None if batch.live_ratio else torch.expm1(gaps) - gaps,
            "sampler/gap": None if batch.live_ratio else gaps.abs(),
        }
        finite = {name: column[column.isfinite()] for name, column in values.items() if column is not None}
        rows.log(step.number, {name: column.double().mean().item() for name, column in finite.items() if len(column)})
    return rows.run(path, "a dump", dump.notes)
