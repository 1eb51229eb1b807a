"""Runs a model over the tokens of a dump, for the signals that the dump lacks."""

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from rlstab.models.policy import Sequences, load_policy
from rlstab.record import Dump

#: Signals that one forward gives and methods read. Its log-probs are used only if the dump has none.
ADDED = frozenset({"logprobs", "entropies", "max_logprobs", "sum_p_sq"})
#: Responses in a forward.
ROWS = 8
#: If the log-probs of model and dump differ by more than this on average, nats, a note says that the models differ.
OTHER = 0.05


@torch.no_grad()
def completed(dump: Dump, model: str | Path, console: Console) -> Dump:
    """The dump with the signals that it lacks; those that it has stay unchanged.

    Args:
        dump: a dump that has prompts.
        model: folder or shipped name of the model with whose weights the dumped steps began.
        console: shows the progress.

    Raises:
        ModelError: the model cannot be loaded.
    """
    policy = load_policy(str(model), device=torch.accelerator.current_accelerator(check_available=True) or "cpu")
    vocabulary: int = getattr(policy.model.get_input_embeddings(), "num_embeddings", 2**32)
    notes, steps = list(dump.notes), []
    for step in track(dump.steps, description=f"forwards of {model}", console=console, transient=True):
        reason = ""
        if not all(map(len, step.prompts)):
            reason = "the dump has no prompts, so the model cannot be run over it."
        elif int(max(ids.max() for ids in (*step.prompts, step.tensors["ids"]))) >= vocabulary:
            reason = f"it has token ids beyond the vocabulary of {model}, {vocabulary:,} tokens."
        if reason:
            notes.append(f"step {step.number}: {reason}")
            steps.append(step)
            continue
        responses = step.tensors["ids"].split(step.tensors["lengths"].tolist())
        rows = [
            Sequences(*(ids for part in pair for ids in (part[None], torch.ones_like(part[None], dtype=torch.bool))))
            for pair in zip(step.prompts, responses, strict=True)
        ]
        sequences = Sequences.joined(rows, policy.pad_id)
        signals = policy.evidence(sequences, ADDED, ROWS, temperature=step.header.temperature or 1.0)
        added = {name: values[sequences.response_mask] for name, values in signals.items()}
        recorded = step.tensors["logprobs"]
        mask = step.mask & recorded.isfinite()
        difference = float((added["logprobs"] - recorded)[mask].abs().mean()) if bool(mask.any()) else 0.0
        if difference > OTHER:
            notes.append(
                f"step {step.number}: log-probs of {model} are {difference:.3g} nats from those of the dump on "
                f"average. The step began with other weights, or its log-probs were taken at another temperature."
            )
        logprobs = torch.where(recorded.isfinite(), recorded, added["logprobs"])
        steps.append(replace(step, tensors={**added, **step.tensors, "logprobs": logprobs}))
    return Dump(steps, notes)
