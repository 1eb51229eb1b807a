"""Known errors of a trainer's loss: what trainers were seen to do instead of what they say, each a change to it."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstab.record import Step
from rlstab.stages.group_relative import grpo

#: Changes to fields of a formula or to tensors of a step, by name, and a factor of the whole, ``scale``. Each is a
#: value, the name of another field or tensor, or a function of the step and the name; what this lacks stays as it is.
Edit = Mapping[str, Any]


def _ends(step: Step) -> Tensor:
    """``(N,)`` bool, the last token of each response."""
    return torch.cat([step.row.diff() != 0, torch.ones(1, dtype=torch.bool)])[: len(step.row)]


def advantage_of(step: Step) -> Tensor:
    """``(S,)`` float64, the advantage of each response."""
    zeros = torch.zeros(len(step.tensors["lengths"]), dtype=torch.float64)
    return zeros.scatter(0, step.row, step.tensors["advantages"].double())


def _shifted(step: Step, name: str, by: int) -> Tensor | None:
    """A tensor shifted within each response; at the edge of a response the value stays."""
    values = step.tensors.get(name)
    return None if values is None else torch.where(step.row.roll(by) == step.row, values.roll(by), values)


def _rounded(step: Step, name: str, kind: torch.dtype) -> Tensor | None:
    return step.tensors[name].to(kind).float() if name in step.tensors else None


def counts_of(step: Step, _: str = "") -> Tensor:
    """``(S,)`` the tokens of each response that count in the loss."""
    return step.by_response(step.mask)


def _padded(step: Step, _: str = "") -> Tensor:
    """``(S,)`` the width of the micro-batch of each response."""
    lengths, part = step.tensors["lengths"].double(), step.tensors["parts"]
    return torch.zeros(len(step.ranks), dtype=torch.float64).scatter_reduce(0, part, lengths, "amax")[part]


#: Tensors of log-probs of the policy.
_READ = ("logprobs", "live_logprobs", "old_logprobs")
#: Errors in which tokens count in the loss, each with the mask ``(N,)`` that it leads to.
_MASKS: Mapping[str, Callable[[Step, str], Tensor | None]] = {
    "tokens outside the response mask count": lambda step, _: torch.ones_like(step.row),
    "the last token of each response, its end, does not count": lambda step, _: step.mask & ~_ends(step),
    "the first token of each response does not count": lambda step, _: step.mask & ~_ends(step).roll(1),
    "responses that were cut off do not count": lambda step, _: (
        step.mask & (step.tensors.get("truncated", torch.zeros(())) == 0)
    ),
    "the mask is shifted back by one token": partial(_shifted, by=1),
    "the mask is shifted ahead by one token": partial(_shifted, by=-1),
}
_UNSEEN = ", and its denominator counts as if it were right"

#: What trainers were seen to do instead of what they say: to the size of the loss, to what it reads, to the tokens that
#: count, to what it is divided by, and to its terms. Factors of single terms are found by `_fitted`.
CHANGES: Mapping[str, Edit] = {
    "it was divided by the gradient accumulation twice": {"scale": lambda step, _: 1 / step.accumulation},
    "it was not divided by the gradient accumulation": {"scale": lambda step, _: step.accumulation},
    "it was divided by the number of processes once too often": {"scale": lambda step, _: 1 / step.header.ranks},
    "it was multiplied by the number of processes": {"scale": lambda step, _: step.header.ranks},
    "the ratio has the sampler's log-probs instead of the trainer's": {"old_logprobs": "rollout_logprobs"},
    "the ratio is 1, as if the policy had not moved": {"old_logprobs": lambda step, _: step.live_logprobs},
    "the log-probs in the denominator are shifted back by one token": {"old_logprobs": partial(_shifted, by=1)},
    "the log-probs in the denominator are shifted ahead by one token": {"old_logprobs": partial(_shifted, by=-1)},
    "log-probs are rounded to float16 before the ratio": dict.fromkeys(_READ, partial(_rounded, kind=torch.float16)),
    "log-probs are rounded to bfloat16 before the ratio": dict.fromkeys(_READ, partial(_rounded, kind=torch.bfloat16)),
    "advantages have the opposite sign": {"advantages": lambda step, _: -step.tensors["advantages"]},
    "advantages are normalised again in each micro-batch": {
        "advantages": lambda step, _: grpo(advantage_of(step), step.tensors["parts"], epsilon=1e-8)[step.row]
    },
    "advantages are normalised again over the tokens of the optimizer step": {
        "advantages": lambda step, _: grpo(step.tensors["advantages"], step.mask.long(), epsilon=1e-8)
    },
    **{text: {"mask": mask} for text, mask in _MASKS.items()},
    **{f"{text}{_UNSEEN}": {"mask": mask, "counts": counts_of} for text, mask in _MASKS.items()},
    "it is a mean over the tokens of each micro-batch": {"mean": "part", "tokens": 0.0},
    "it is divided by the tokens of each rank instead of those of all ranks": {"mean": "rank", "tokens": 0.0},
    "it is a mean over each response, then over the responses of each micro-batch": {"mean": "response", "tokens": 0.0},
    "it is a mean over the tokens of the optimizer step": {"mean": "step", "tokens": 0.0},
    "it is divided by a constant length": {"mean": "constant", "tokens": 0.0},
    "it is a sum over the tokens of each response": {"mean": "constant", "length": 1.0},
    "it is divided by the width of each micro-batch, padding included": {"mean": "constant", "length": _padded},
    "each response counts by its length over the width of its micro-batch": {
        **{"mean": "constant", "length": lambda step, _: _padded(step) / counts_of(step)}
    },
    "the weights outside its formula do not count": {"weights": lambda step, _: torch.ones(len(step.row))},
    "the weights outside its formula count twice": {
        "weights": lambda step, _: step.tensors["weights"] ** 2 if "weights" in step.tensors else None
    },
    "tokens outside the response mask count in its denominator": {"counts": "lengths", "tokens": 0.0},
    "prompts count in its denominator": {
        **{"counts": lambda step, _: counts_of(step) + step.tensors.get("prompt_lengths", 0), "tokens": 0.0}
    },
    "padding counts in its denominator": {"counts": _padded, "tokens": 0.0},
    "the ratio is that of the sequence": {"sequence": True},
    "the ratio is the product over the sequence, not its geometric mean": {"sequence": "product"},
    "the ratio of the sequence counts tokens outside the response mask": {"sequence": "unmasked"},
    "the ratio is that of the token": {"sequence": False},
    "its weights have a gradient": {"is_held": False},
    "nothing is clipped": dict.fromkeys(("low", "high", "cap"), math.inf),
    "the clip has no lower bound": {"low": math.inf},
    "the clip has no upper bound": {"high": math.inf},
    "the clip makes the loss smaller instead of larger": {"bound": "smaller"},
    "the clipped loss counts even where the other is larger": {"bound": "clipped"},
    "the upper clip range is the lower one": {"high": "low"},
    "the clip ranges are exchanged": {"low": "high", "high": "low"},
    "the ratio has no cap": {"cap": math.inf},
    **{f"its KL term is {kind}": {"estimator": kind} for kind in ("k1", "k2", "k3")},
    **{f"its KL term is {kind} times the ratio": {"estimator": f"{kind}_unbiased"} for kind in ("k1", "k2", "k3")},
    "its KL term is taken to the old policy, not to the reference": {"ref_logprobs": "old_logprobs"},
    "its KL term has the two policies exchanged": {"is_exchanged": True},
}
