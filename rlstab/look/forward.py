"""Runs a model over the tokens of a dump: for the signals that the dump lacks, and for the slopes of the entropy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlstab.models.policy import Policy, Sequences, load_policy
from rlstab.models.shared_prompts import position_ids
from rlstab.record import Dump, Step

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
        dump: with prompts.
        model: folder or shipped name of the model with whose weights the dumped steps began.
        console: shows the progress.

    Raises:
        ModelError: the model cannot be loaded.
    """
    policy = load_policy(str(model), device=torch.accelerator.current_accelerator(check_available=True) or "cpu")
    vocabulary: int = getattr(policy.model.get_input_embeddings(), "num_embeddings", 2**32)
    notes, steps = list(dump.notes), []
    for step in track(dump.steps, description=f"forwards of {model}", console=console, transient=True):
        if not all(map(len, step.prompts)):
            notes.append(f"step {step.number}: the dump has no prompts, so the model cannot be run over it.")
            steps.append(step)
            continue
        if int(max(ids.max() for ids in (*step.prompts, step.tensors["ids"]))) >= vocabulary:
            notes.append(
                f"step {step.number}: it has token ids beyond the vocabulary of {model}, {vocabulary:,} tokens."
            )
            steps.append(step)
            continue
        sequences = sequences_of(policy, step)
        added = _evidence(policy, step, sequences)
        added["entropy_slopes"] = entropy_slopes(policy, step, sequences)
        known = step.tensors["logprobs"]
        there = step.mask & known.isfinite()
        apart = float((added["logprobs"] - known)[there].abs().mean()) if bool(there.any()) else 0.0
        if apart > OTHER:
            notes.append(
                f"step {step.number}: log-probs of {model} are {apart:.3g} nats from those of the dump on average. "
                f"The step began with other weights, or its log-probs were taken at another temperature."
            )
        kept = torch.where(known.isfinite(), known, added["logprobs"])
        steps.append(replace(step, tensors={**added, **step.tensors, "logprobs": kept}))
    return Dump(steps, notes)


def sequences_of(policy: Policy, step: Step) -> Sequences:
    """The prompts and responses of a step, in its order."""
    responses = step.tensors["ids"].split(step.tensors["lengths"].tolist())
    rows = [
        Sequences(*(ids for part in pair for ids in (part[None], torch.ones_like(part[None], dtype=torch.bool))))
        for pair in zip(step.prompts, responses, strict=True)
    ]
    return Sequences.joined(rows, policy.pad_id)


def _evidence(policy: Policy, step: Step, sequences: Sequences) -> dict[str, Tensor]:
    """``(N,)`` signals of all tokens of the responses."""
    signals = policy.evidence(sequences, ADDED, ROWS, temperature=step.header.temperature or 1.0)
    return {name: values[sequences.response_mask] for name, values in signals.items()}


def entropy_slopes(policy: Policy, step: Step, sequences: Sequences) -> Tensor:
    """``(N,)`` the rise in the mean entropy of the tokens in the loss per unit of pull on the log-prob of each token.

    Exact to first order, for a step of plain gradient ascent with learning rate 1, through all weights of the model:
    the derivative of the log-prob along the gradient of the mean entropy, one backward pass and one in forward mode.
    """
    model, temperature = policy.model, step.header.temperature or 1.0
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    along = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    counts = torch.zeros_like(sequences.response_mask)
    counts[sequences.response_mask] = step.mask
    parts = [sequences.rows(rows) for rows in torch.arange(len(counts)).split(ROWS)]

    def logprobs(part: Sequences, values: Mapping[str, Tensor]) -> Tensor:
        """``(R, T, V)``, in which every token of the vocabulary has its log-prob."""
        pairs = zip((part.prompt_ids, part.prompt_mask), (part.response_ids, part.response_mask), strict=True)
        ids, mask = (torch.cat(pair, dim=1).to(policy.device) for pair in pairs)
        inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": position_ids(mask)}
        logits = functional_call(model, dict(values), (), {**inputs, "use_cache": False}).logits
        logits = logits[:, -part.response_ids.shape[1] - 1 : -1]
        return torch.log_softmax(logits.float() / temperature, -1)

    with sdpa_kernel(SDPBackend.MATH):  # the others have no forward mode
        for part, counted in zip(parts, counts.split(ROWS), strict=True):
            with torch.enable_grad():
                of_all = logprobs(part, weights)
                mean = (
                    -(of_all.exp() * of_all).sum(-1)[counted[:, : of_all.shape[1]].to(policy.device)].sum()
                    / step.mask.sum()
                )
                slopes = torch.autograd.grad(mean, list(weights.values()), allow_unused=True)
            for total, slope in zip(along.values(), slopes, strict=True):
                total += 0 if slope is None else slope
        found = []
        for part in parts:
            with warnings.catch_warnings():  # torch's rules for the forward mode use torch's own deprecated compiler
                warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
                slopes_of_all = jvp(partial(logprobs, part), (weights,), (along,))[1]
            of_tokens = slopes_of_all.gather(2, part.response_ids.to(policy.device)[..., None])[..., 0]
            found.append(of_tokens[part.response_mask.to(policy.device)])
    return torch.cat(found).detach().cpu()
