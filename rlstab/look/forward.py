"""Runs a model over the tokens of a dump: for the signals that the dump lacks, and for the slopes of the entropy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
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
        reason = ""
        if not all(map(len, step.prompts)):
            reason = "the dump has no prompts, so the model cannot be run over it."
        elif int(max(ids.max() for ids in (*step.prompts, step.tensors["ids"]))) >= vocabulary:
            reason = f"it has token ids beyond the vocabulary of {model}, {vocabulary:,} tokens."
        if reason:
            notes.append(f"step {step.number}: {reason}")
            steps.append(step)
            continue
        sequences = sequences_of(policy, step)
        added = _evidence(policy, step, sequences)
        added["entropy_slopes"] = entropy_slopes(policy, step, sequences)
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
    the derivative of the log-prob along the gradient of the mean entropy. A backward pass of the log-probs is linear in
    what is passed back, so the derivative is that of its product with that gradient. Forward mode would give the same,
    on fewer devices.
    """
    model, temperature = policy.model, step.header.temperature or 1.0
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    counts = torch.zeros_like(sequences.response_mask)
    counts[sequences.response_mask] = step.mask
    parts = [(sequences.rows(rows), counts[rows]) for rows in torch.arange(len(counts)).split(ROWS)]

    def logprobs(part: Sequences) -> Tensor:
        """``(R, T, V)``, in which every token of the vocabulary has its log-prob."""
        pairs = zip((part.prompt_ids, part.prompt_mask), (part.response_ids, part.response_mask), strict=True)
        ids, mask = (torch.cat(pair, dim=1).to(policy.device) for pair in pairs)
        inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": position_ids(mask)}
        logits = model(**inputs, use_cache=False).logits[:, -part.response_ids.shape[1] - 1 : -1]
        return torch.log_softmax(logits.float() / temperature, -1)

    def gradients(of: Tensor, passed: Tensor | None = None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(of, weights, passed, create_graph=passed is not None, materialize_grads=True)

    along, slopes = [torch.zeros_like(weight) for weight in weights], list[Tensor]()
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():  # the others have no second derivative
        for part, counted in parts:
            of_all = logprobs(part)
            entropies = -(of_all.exp() * of_all).sum(-1)[counted[:, : of_all.shape[1]].to(policy.device)]
            torch._foreach_add_(along, gradients(entropies.sum() / step.mask.sum()))
        for part, _ in parts:
            of_tokens = logprobs(part).gather(2, part.response_ids.to(policy.device)[..., None])[..., 0]
            of_tokens = of_tokens[part.response_mask.to(policy.device)]
            passed = torch.zeros_like(of_tokens, requires_grad=True)
            pairs = zip(gradients(of_tokens, passed), along, strict=True)
            product = torch.stack([(gradient * direction).sum() for gradient, direction in pairs]).sum()
            slopes += torch.autograd.grad(product, passed)
    return torch.cat(slopes).cpu()
