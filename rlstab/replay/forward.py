"""Runs a model over the tokens of a dump, for what the dump lacks: entropies, largest log-probs, squared masses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from rlstab.models.policy import Policy, Sequences, load_policy
from rlstab.record import Dump, Step

#: What one forward gives, and methods read. The first stands in only where the dump has none.
ADDED = frozenset({"logprobs", "entropies", "max_logprobs", "sum_p_sq"})
#: Responses in a forward.
ROWS = 8
#: Mean difference of log-probs, nats, from which on a note says that the model is another one than that of the dump.
OTHER = 0.05


@torch.no_grad()
def completed(dump: Dump, model: str | Path, console: Console) -> Dump:
    """The same dump with what it lacks; what it has stays as it is.

    Args:
        dump: with prompts.
        model: folder or shipped name of the model whose weights the dumped steps began with.
        console: shows the progress.

    Raises:
        ModelError: the model cannot be loaded.
    """
    policy = load_policy(str(model))
    notes, steps = list(dump.notes), []
    for step in track(dump.steps, description=f"forwards of {model}", console=console, transient=True):
        if not all(map(len, step.prompts)):
            notes.append(f"step {step.number}: the dump has no prompts, so the model cannot be run over it.")
            steps.append(step)
            continue
        added = _evidence(policy, step)
        known = step.tensors["logprobs"]
        there = step.mask & known.isfinite()
        apart = float((added["logprobs"] - known)[there].abs().mean()) if bool(there.any()) else 0.0
        if apart > OTHER:
            notes.append(
                f"step {step.number}: log-probs of {model} are {apart:.3g} nats from those of the dump in the mean. "
                f"The step began with other weights, or its log-probs are at another temperature."
            )
        kept = torch.where(known.isfinite(), known, added["logprobs"])
        steps.append(replace(step, tensors={**added, **step.tensors, "logprobs": kept}))
    return Dump(steps, notes)


def _evidence(policy: Policy, step: Step) -> dict[str, Tensor]:
    """``(N,)`` signals of all tokens of the responses."""
    responses = step.tensors["ids"].split(step.tensors["lengths"].tolist())
    rows = [
        Sequences(*(ids for part in pair for ids in (part[None], torch.ones_like(part[None], dtype=torch.bool))))
        for pair in zip(step.prompts, responses, strict=True)
    ]
    sequences = Sequences.joined(rows, policy.pad_id)
    signals = policy.evidence(sequences, ADDED, ROWS, temperature=step.header.temperature or 1.0)
    return {name: values[sequences.response_mask].cpu() for name, values in signals.items()}
