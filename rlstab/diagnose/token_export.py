"""Token exports of prime-rl, and our own traces: what each step says of its tokens becomes a row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from rlstab.diagnose.run_log import RunLog, log_of
from rlstab.report.token_traces import Sample, read_tokens

#: Where prime-rl exports tokens, below a folder.
EXPORTS = ("rank_*.jsonl", "step_*/rank_*.jsonl", "token_exports/step_*/rank_*.jsonl")


def read_token_export(path: Path) -> RunLog:
    """The run that was traced: mean entropy and length, share clipped, divergence of sampler and trainer, reward.

    Raises:
        ReportError: see :func:`rlstab.report.token_traces.read_tokens`.
    """
    tokens = read_tokens(path)
    steps: dict[int, list[Sample]] = {}
    for sample in tokens.samples:
        steps.setdefault(sample.rollout, []).append(sample)
    # prime-rl counts its steps from 0
    shift = 1 if 0 in steps else 0
    rows = {step + shift: _row(samples) for step, samples in steps.items()}
    notes = [one for one in tokens.notes if "tokenizer" not in one]
    if shift:
        notes.append("its steps begin at 0 and are counted from 1 here")
    return log_of(rows, title=str(path), writer="a token trace", remarks=tuple(notes))


def _row(samples: list[Sample]) -> dict[str, float]:
    # log of new over old; the ratio is missing where the trainer did not export it
    gaps = [math.log(one) for sample in samples for one in sample.ratio if one is not None and one > 0]
    found = {
        "tokens/entropy": _mean(one for sample in samples for one in sample.entropies if one is not None),
        "response/length": _mean(float(len(sample.tokens)) for sample in samples),
        "reward/mean": _mean(sample.reward for sample in samples if sample.reward is not None),
        "ratio/clipped": _mean(float(one) for sample in samples for one in sample.clipped),
        "mismatch/k3": _mean(math.expm1(gap) - gap for gap in gaps),
        "sampler/gap": _mean(map(abs, gaps)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None
