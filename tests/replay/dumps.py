"""Dumps of optimizer steps as a trainer makes them: two ranks of four micro-batches, padded, in float32, by autograd.

The losses here are written as trainers write them, and share no code with the judge's; each error of :data:`ERRORS` is
one that a trainer had or could have.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlstab.record import Header, HostLoss, write_dump
from rlstab.record.step import Step, joined, rank_of

BOTH: dict[str, JsonValue] = {"low": 0.2, "high": 0.28, "beta": 0.05}
SETTINGS = BOTH | {"cap": 1.35, "estimator": "k3_unbiased", "length": 12}
CISPO = SETTINGS | {"high": 1.2}
VERL: dict[str, JsonValue] = {
    **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.2, "entropy_coeff": 0.01},
    **{"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3"},
}
OF_LOSS = {"trl/cispo": CISPO, "verl/vanilla": VERL, "trl/bnpo": SETTINGS | {"entropy": 0.01}}
RANKS, PARTS, ROWS = 2, 4, 2


def put(**values: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda part: values


def normalised(part: Any) -> dict[str, Any]:
    own = part.advantages[:, 0]
    return {"advantages": ((own - own.mean()) / (own.std() + 1e-8))[:, None].expand_as(part.advantages)}


def half(values: Tensor) -> Tensor:
    return values + (values.half().float() - values).detach()


#: Of `trl/dapo` or of the loss named: words of what is said, and what the trainer does otherwise in a micro-batch.
ERRORS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "twice": ("accumulation twice", put(factor=1 / PARTS)),
    "not divided": ("not divided by the gradient accumulation", put(factor=PARTS)),
    "world": ("multiplied by the number of processes", put(factor=RANKS)),
    "by world": ("divided by the number of processes once too often", put(factor=1 / RANKS)),
    "sign": ("policy term is -1 times what it should be.", put(factor=-1)),
    "odd": ("policy term is 0.37 times", put(factor=0.37)),
    "as bnpo": ("tokens of each micro-batch", put(mean="trl/bnpo")),
    "as grpo": ("mean over each response", put(mean="trl/grpo")),
    "as dr_grpo": ("constant length", put(mean="trl/dr_grpo")),
    "trl/bnpo as dapo": ("tokens of the optimizer step", put(mean="trl/dapo")),
    "own micro-batch": ("tokens of each micro-batch", lambda p: {"tokens": float(p.mask.sum()) * PARTS * RANKS}),
    "own rank": ("tokens of each rank", lambda p: {"tokens": p.own * RANKS}),
    "prompts in the denominator": ("prompts count", lambda p: {"tokens": p.tokens + p.prompts}),
    "masked in the denominator": ("outside the response mask count in its", lambda p: {"tokens": p.lasting}),
    "padding in the denominator": ("padding counts", lambda p: {"tokens": p.padded}),
    "sampler": ("sampler's log-probs", lambda p: {"old_logprobs": p.rollout_logprobs}),
    "live": ("ratio is 1", lambda p: {"old_logprobs": p.logprobs.detach()}),
    "old shifted": (
        "denominator are shifted ahead",
        lambda p: {"old_logprobs": torch.where(p.last, p.old_logprobs, p.old_logprobs.roll(-1, 1))},
    ),
    "mask shifted": ("mask is shifted back", lambda p: {"mask": torch.where(p.first, p.mask, p.mask.roll(1, 1))}),
    "mask ignored": ("outside the response mask count", lambda p: {"mask": p.inside.float()}),
    "no end": ("last token of each response, its end, does not count, and", lambda p: {"mask": p.mask * ~p.last}),
    "no end, and its denominator": (
        "last token of each response, its end, does not count.",
        lambda p: {"mask": p.mask * ~p.last, "tokens": p.tokens - 16},
    ),
    "no first": ("first token", lambda p: {"mask": p.mask * ~p.first}),
    "cut off": ("cut off do not count", lambda p: {"mask": p.mask * (p.truncated == 0)}),
    "float16": ("float16", lambda p: {"logprobs": half(p.logprobs), "old_logprobs": half(p.old_logprobs)}),
    "sequence": ("ratio is that of the sequence", put(sequence=True)),
    "product": ("not its geometric mean", put(sequence="product")),
    "no clip": ("nothing is clipped", put(low=1e9, high=1e9, cap=1e9)),
    "high none": ("no upper bound", put(high=1e9)),
    "low none": ("no lower bound", put(low=1e9)),
    "optimistic": ("smaller instead of larger", put(bound=torch.max)),
    "clipped alone": ("clipped loss counts", put(bound=lambda _, clipped: clipped)),
    "exchanged": ("ranges are exchanged", put(low=0.28, high=0.2)),
    "low for both": ("upper clip range is the lower one", put(high=0.2)),
    "no weights": ("weights outside its formula", put(weights=1)),
    "weights twice": ("weights outside its formula count twice", lambda p: {"weights": p.weights**2}),
    "no cap": ("no cap", put(cap=1e9)),
    "no kl": ("kl term 0 times", put(beta=0.0)),
    "beta a third": ("kl term 0.3333 times", put(beta=0.05 / 3)),
    "kl to old": ("to the old policy", lambda p: {"ref_logprobs": p.old_logprobs}),
    "kl exchanged": ("two policies exchanged", put(gap=-1)),
    "k1": ("kl term is k1", put(estimator="k1")),
    "k2": ("kl term is k2", put(estimator="k2")),
    "k3": ("kl term is k3.", put(estimator="k3")),
    "k1, corrected": ("kl term is k1 times the ratio", put(estimator="k1 unbiased")),
    "k2, corrected": ("kl term is k2 times the ratio", put(estimator="k2 unbiased")),
    "normalised": ("normalised again in each micro-batch", normalised),
    "whitened": (
        "normalised again over the tokens",
        lambda p: {"advantages": (p.advantages - p.mean_advantage) / (p.spread + 1e-8)},
    ),
    "advantage sign": ("advantages have the opposite sign", lambda p: {"advantages": -p.advantages}),
    # TRL 1.9.0, with three optimizer steps a generation
    "generation": ("policy term is 0.3333 times", lambda p: {"tokens": 3 * p.tokens}),
    # TRL before 1.10: the mean over the padded micro-batch of a loss times the length of its response
    "trl/luspo padding": ("its length over the width", put(mean="padded luspo")),
    # verl's seq-mean-token-sum-norm without a factor
    "trl/dr_grpo width": ("divided by the width", put(mean="width")),
    "sequence of tools": ("counts tokens outside the response mask", put(sequence="unmasked")),
    "trl/bnpo entropy sign": ("entropy bonus -1 times", put(entropy=-0.01)),
    "trl/bnpo no entropy": ("entropy bonus 0 times", put(entropy=0.0)),
    "verl/vanilla twice": ("accumulation twice", put(factor=1 / PARTS)),
}
#: Errors that no change explains, and one that only the gradient shows.
UNKNOWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "one response": lambda p: {"advantages": p.advantages * (1.0 + (p.sequence_ids[:, None] == 5))},
    "ratio bfloat16": put(rounded=torch.bfloat16),
    "trl/cispo live": put(held=lambda weight: weight),
}


def rank(number: int, step: int, *, loss: str = "trl/dapo", first: bool = False) -> Step:
    """Eight responses of 3 to 12 tokens, off-policy, some tokens outside the mask, two responses cut off."""
    draw = torch.Generator().manual_seed(100 * step + number)
    lengths = torch.randint(3, 13, (PARTS * ROWS,), generator=draw)
    count = int(lengths.sum())

    def around(values: Tensor, spread: float) -> Tensor:
        return (values + spread * torch.randn(count, generator=draw)).clamp(max=-1e-4)

    sampled = -4 * torch.rand(count, generator=draw)
    mask = (torch.rand(count, generator=draw) > 0.15).long()
    mask[lengths.cumsum(0) - 1] = 1
    old = around(sampled, 0.05)
    tensors = {
        "lengths": lengths,
        "parts": torch.arange(PARTS * ROWS) // ROWS,
        "sequence_ids": 8 * number + torch.arange(8),
        "group_ids": torch.arange(8) // 4 + 2 * number,
        "ids": torch.randint(1, 28, (count,), generator=draw),
        "mask": mask,
        "advantages": torch.randn(8, generator=draw).repeat_interleave(lengths),
        "truncated": (torch.arange(8) % 4 == 1).float().repeat_interleave(lengths),
        "old_logprobs": old,
        "logprobs": old.clone() if first else around(old, 0.25),
        "rollout_logprobs": sampled,
        "weights": 0.5 + torch.rand(count, generator=draw),
        "ref_logprobs": around(old, 0.3),
        "entropies": 2 * torch.rand(count, generator=draw),
        "prompt_lengths": torch.full((8,), 2) + torch.arange(8) % 3,
    }
    tensors["prompt_ids"] = torch.arange(int(tensors["prompt_lengths"].sum())) % 9 + 1
    told = HostLoss(name=loss, settings=OF_LOSS.get(loss, SETTINGS))
    header = Header(host="made up", step=step, rank=number, ranks=RANKS, parts=PARTS, first=first, loss=told)
    return rank_of(header, tensors)


def micro_loss(loss: str, part: dict[str, Any], change: Callable[[Any], dict[str, Any]]) -> Tensor:
    """What a trainer backpropagates of one padded micro-batch, ``(B, T)``."""
    verl, place, lengths = loss.startswith("verl"), torch.arange(part["mask"].shape[1]), part["lengths"][:, None]
    p = SimpleNamespace(**part, **{"low": 0.2, "high": 0.28, "beta": 0.05, "factor": 1, "gap": 1, "mean": loss})
    p.cap, p.dual, p.entropy, p.estimator = (1e9, 1.2, 0.01, "k3") if verl else (1.35, 1e9, 0.0, "unbiased")
    p.first, p.last, p.inside, p.mask = place == 0, place == lengths - 1, place < lengths, p.mask.float()
    p.sequence, p.rounded, p.bound, p.held = False, torch.float32, torch.min, Tensor.detach
    p.high, p.entropy = 1.2 if loss == "trl/cispo" else p.high, 0.01 if loss == "trl/bnpo" else p.entropy
    vars(p).update(change(p))
    log_ratio, adv, mask = p.logprobs - p.old_logprobs, p.advantages, p.mask
    if p.sequence:
        read = p.inside.float() if p.sequence == "unmasked" else mask
        count = 1 if p.sequence == "product" else read.sum(1)
        log_ratio = ((log_ratio * read).sum(1) / count)[:, None].expand_as(log_ratio)
    ratio = log_ratio.exp()
    ratio = ratio + (ratio.to(p.rounded).float() - ratio).detach()
    per_token = -p.bound(ratio.clamp(max=p.cap) * adv, ratio.clamp(1 - p.low, 1 + p.high) * adv)
    per_token = torch.where(adv < 0, torch.min(per_token, -adv * p.dual), per_token)
    per_token = -p.held(ratio.clamp(max=p.high)) * adv * p.logprobs if loss == "trl/cispo" else per_token
    gap = p.gap * (p.ref_logprobs - p.logprobs)
    kl = {"k1": -gap, "k2": gap**2 / 2}.get(p.estimator[:2], gap.exp() - gap - 1)
    kl = kl * ratio if "unbiased" in p.estimator else kl
    bonus = p.entropy * p.entropies
    summed = (per_token * p.weights + p.beta * kl - (bonus if verl else 0)) * mask
    value: Tensor = {
        "trl/grpo": lambda: (summed.sum(1) / mask.sum(1).clamp(min=1)).mean() / PARTS,
        "trl/bnpo": lambda: summed.sum() / mask.sum().clamp(min=1) / PARTS,
        "trl/dr_grpo": lambda: summed.sum() / (len(mask) * 12) / PARTS,
        "trl/luspo": lambda: summed.sum(1).mean() / PARTS,
        "padded luspo": lambda: (summed * mask.sum(1, keepdim=True)).mean() / PARTS,
        "width": lambda: summed.sum(1).mean() / mask.shape[1] / PARTS,
    }.get(p.mean, lambda: summed.sum() / p.tokens * RANKS)()
    value = value if verl else value - (bonus * mask).sum() / mask.sum().clamp(min=1) / PARTS
    return value * float(p.factor)


def ranks_of(number: int, *, error: str = "", loss: str = "trl/dapo", first: bool = False) -> list[Step]:
    """What the ranks of a trainer write that says it has a loss, and has that one but for an error."""
    loss = error.partition(" ")[0] if "/" in error else loss
    change = UNKNOWN.get(error) or (ERRORS[error][1] if error else put())
    ranks = [rank(place, number, loss=loss, first=first) for place in range(RANKS)]
    counts = [float(own.mask.sum()) for own in ranks]
    advantages = torch.cat([own.tensors["advantages"][own.mask] for own in ranks])
    whole = {
        "tokens": sum(counts),
        "lasting": float(sum(own.tensors["lengths"].sum() for own in ranks)),
        "mean_advantage": advantages.mean(),
        "spread": advantages.std(),
        "prompts": sum(float(own.tensors["prompt_lengths"].sum()) for own in ranks),
        "padded": sum(float(ROWS * own.tensors["lengths"].view(PARTS, ROWS).amax(1).sum()) for own in ranks),
    }
    for place, (own, count) in enumerate(zip(ranks, counts, strict=True)):
        live = own.tensors["logprobs"].clone().requires_grad_()
        by_token = {name: values for name, values in own.tensors.items() if values.shape == live.shape}
        values = []
        for part in range(PARTS):
            only = own.having({"logprobs": live}).only(own.tensors["parts"] == part)
            sizes = only.tensors["lengths"].tolist()
            padded = {name: pad_sequence(only.tensors[name].split(sizes), True) for name in by_token}
            values.append(micro_loss(loss, {**only.tensors, **padded, **whole, "own": count}, change))
        (slope,) = torch.autograd.grad(torch.stack(values).sum(), live)
        ranks[place] = told(own, values=torch.stack(values).tolist()).having({"coefficients": slope})
    return ranks


def step(number: int, **options: Any) -> Step:
    """The optimizer step; see :func:`ranks_of`."""
    return joined(ranks_of(number, **options))


def told(given: Step, **changes: Any) -> Step:
    """With other words on its loss."""
    assert given.header.loss is not None
    header = given.header.model_copy(update={"loss": given.header.loss.model_copy(update=changes)})
    return replace(given, header=header)


def without_coefficients(given: Step) -> Step:
    return replace(given, tensors={name: values for name, values in given.tensors.items() if name != "coefficients"})


def write(folder: Path, steps: int = 2) -> Path:
    """A dump on disk."""
    for own in (own for number in range(1, steps + 1) for own in ranks_of(number)):
        write_dump(folder, own.header, own.tensors)
    return folder
