"""Dumps of optimizer steps as a trainer makes them: two ranks of four micro-batches, padded, in float32, by autograd.

The losses here are written as trainers write them, and share no code with the judge's; each error of :data:`ERRORS` is
one that a trainer had or could have.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlstab.replay.steps import Step, joined, rank_of
from rlstab.trace.dump import Header, HostLoss, write_dump

BOTH: dict[str, JsonValue] = {"low": 0.2, "high": 0.28, "beta": 0.05}
SETTINGS = BOTH | {"cap": 1.35, "estimator": "k3_unbiased", "length": 12}
VERL = BOTH | {"dual": 1.2, "estimator": "k3", "entropy": 0.01}
RANKS, PARTS, ROWS = 2, 4, 2


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
        "ref_logprobs": around(old, 0.3),
        "entropies": 2 * torch.rand(count, generator=draw),
        "prompt_lengths": torch.full((8,), 2) + torch.arange(8) % 3,
    }
    tensors["prompt_ids"] = torch.arange(int(tensors["prompt_lengths"].sum())) % 9 + 1
    told = HostLoss(name=loss, settings=SETTINGS if loss.startswith("trl") else VERL)
    header = Header(host="made up", step=step, rank=number, ranks=RANKS, parts=PARTS, first=first, loss=told)
    return rank_of(header, tensors)


def micro_loss(loss: str, part: dict[str, Tensor], whole: dict[str, float], error: str) -> Tensor:
    """What a trainer backpropagates of one padded micro-batch, ``(B, T)``."""
    live, mask, adv = part["logprobs"], part["mask"].float(), part["advantages"]
    old = part["rollout_logprobs"] if error == "sampler" else part["old_logprobs"]
    place = torch.arange(mask.shape[1])
    last = place == part["lengths"][:, None] - 1
    tokens, beta, low, high, verl = whole["tokens"], 0.05, 0.2, 0.28, loss.startswith("verl")
    match error:
        case "mask ignored":
            mask = (place < part["lengths"][:, None]).float()
        case "no end":
            mask = mask * ~last
        case "no end, and its denominator":
            mask, tokens = mask * ~last, tokens - 16
        case "no first":
            mask = mask * (place > 0)
        case "cut off":
            mask = mask * (part["truncated"] == 0)
        case "mask shifted":
            mask = torch.where(place > 0, mask.roll(1, 1), mask)
        case "old shifted":
            old = torch.where(last, old, old.roll(-1, 1))
        case "float16":
            live, old = live + (live.half().float() - live).detach(), old.half().float()
        case "high none":
            high = 1e9
        case "low none":
            low = 1e9
        case "exchanged":
            low, high = high, low
        case "low for both":
            high = low
        case "beta a third":
            beta = 0.05 / 3
        case "no kl":
            beta = 0.0
        case "normalised":
            own = adv[:, 0]
            adv = ((own - own.mean()) / (own.std() + 1e-8))[:, None].expand_as(adv)
        case "advantage sign":
            adv = -adv
        case "one response":
            adv = torch.where(part["sequence_ids"][:, None] == 5, 2 * adv, adv)
        case "prompts in the denominator":
            tokens = tokens + whole["prompts"]
        case "padding in the denominator":
            tokens = whole["padded"]
        case "own rank":
            tokens = whole["own"] * RANKS
        case "own micro-batch":
            tokens = float(mask.sum()) * PARTS * RANKS
    log_ratio = live - old
    if error == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1))[:, None].expand_as(live)
    ratio = log_ratio.exp()
    if error == "ratio bfloat16":
        ratio = ratio + (ratio.bfloat16().float() - ratio).detach()
    free = ratio if verl or error in ("no cap", "no clip") else ratio.clamp(max=1.35)
    clipped = ratio if error == "no clip" else ratio.clamp(1 - low, 1 + high)
    per_token = -torch.min(free * adv, clipped * adv)
    if verl:
        per_token = torch.where(adv < 0, torch.min(per_token, -adv * 1.2), per_token)
    gap = part["ref_logprobs"] - live
    gap = -gap if error == "kl exchanged" else gap
    kl = {"k1": -gap, "k2": gap**2 / 2}.get(error, gap.exp() - gap - 1)
    kl = kl if verl or error in ("k1", "k2", "k3") else kl * ratio
    per_token = per_token + beta * kl
    if loss == "verl/vanilla":
        sign = {"entropy sign": -1.0, "no entropy": 0.0}.get(error, 1.0)
        per_token = per_token - sign * 0.01 * part["entropies"]
    name = f"trl/{error[3:]}" if error.startswith("as ") else loss
    summed = per_token * mask
    value = {
        "trl/grpo": lambda: (summed.sum(1) / mask.sum(1).clamp(min=1)).mean() / PARTS,
        "trl/bnpo": lambda: summed.sum() / mask.sum().clamp(min=1) / PARTS,
        "trl/dr_grpo": lambda: summed.sum() / (len(mask) * 12) / PARTS,
        "trl/luspo": lambda: summed.sum(1).mean() / PARTS,
    }.get(name, lambda: summed.sum() / tokens * RANKS)()
    factor = {"twice": 1 / PARTS, "not divided": PARTS, "world": RANKS, "by world": 1 / RANKS, "sign": -1, "odd": 0.37}
    return value * factor.get(error, 1.0)


def step(number: int, *, loss: str = "trl/dapo", error: str = "", first: bool = False) -> Step:
    """An optimizer step of a trainer that says it has a loss, and has that one but for an error."""
    ranks = [rank(place, number, loss=loss, first=first) for place in range(RANKS)]
    lengths = [own.tensors["lengths"].view(PARTS, ROWS) for own in ranks]
    counts = [float(own.tensors["mask"].sum()) for own in ranks]
    prompts = sum(float(own.tensors["prompt_lengths"].sum()) for own in ranks)
    padded = sum(float(ROWS * own.amax(1).sum()) for own in lengths)
    for own, count in zip(ranks, counts, strict=True):
        live = own.tensors["logprobs"].clone().requires_grad_()
        whole = {"tokens": sum(counts), "prompts": prompts, "padded": padded, "own": count}
        sizes, by_row = own.tensors["lengths"].tolist(), ("lengths", "sequence_ids")
        by_token = {name: values for name, values in own.tensors.items() if values.shape == live.shape}
        split = {name: values.split(sizes) for name, values in {**by_token, "logprobs": live}.items()}
        values = []
        for part in range(PARTS):
            chosen = range(part * ROWS, (part + 1) * ROWS)
            padded_part = {name: pad_sequence([own[row] for row in chosen], True) for name, own in split.items()}
            padded_part |= {name: own.tensors[name][list(chosen)] for name in by_row}
            values.append(micro_loss(loss, padded_part, whole, error))
        (slope,) = torch.autograd.grad(torch.stack(values).sum(), live)
        told = own.header.loss
        assert told is not None
        told = told.model_copy(update={"values": torch.stack(values).tolist()})
        header = own.header.model_copy(update={"loss": told})
        ranks[header.rank] = replace(own.having({"coefficients": slope}), header=header)
    return joined(ranks)


def without_coefficients(given: Step) -> Step:
    return replace(given, tensors={name: values for name, values in given.tensors.items() if name != "coefficients"})


def write(folder: Path, steps: int = 2, **options: Any) -> Path:
    """A dump on disk."""
    for number in range(1, steps + 1):
        whole = step(number, **options)
        told, tokens = whole.header.loss, 0
        assert told is not None
        for place in range(RANKS):
            own = rank(place, number)
            count = own.tensors["ids"].numel()
            slopes = whole.tensors["coefficients"][tokens : tokens + count]
            tokens += count
            loss = told.model_copy(update={"values": told.values[PARTS * place : PARTS * (place + 1)]})
            header = own.header.model_copy(update={"loss": loss})
            write_dump(folder, header, {**own.tensors, "coefficients": slopes})
    return folder
