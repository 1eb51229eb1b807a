"""Whether a model decodes as the sampler asks it to: tried once, before anything is sampled."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from rlstab.errors import ModelError
from rlstab.train.padded_rows import position_ids
from rlstab.train.policy import Policy

#: Log-probs agree to this share of the largest logit. Sound caches miss by roundings, others by about the logits.
AGREEMENT = 0.003

#: Tokens of the two prompts, and of each response.
PROMPTS, RESPONSE = (2, 5), 4

_TAKE = "Take a model with attention over a cache that transformers' DynamicCache holds, such as Llama, Qwen or Gemma."


@torch.no_grad()
def require_decoding(policy: Policy, name: str) -> None:
    """Decode as :func:`rlstab.train.sampling.sample` does and compare with one forward over each row alone.

    Prompts of two lengths, a prompt read once for two responses, a response that leaves the batch. A model that keeps
    its state elsewhere than in the cache, or reads padding, would sample from another policy than it learns.

    Raises:
        ModelError: the model cannot decode so, or its log-probs are others.
    """
    embeddings = policy.model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    vocab = embeddings.shape[0]
    sizes = [PROMPTS[0], RESPONSE, PROMPTS[1], RESPONSE]
    ids = torch.split(torch.arange(sum(sizes), device=policy.device) % vocab, sizes)
    try:
        expected = [
            policy.model(input_ids=torch.cat(one).unsqueeze(0), use_cache=False).logits[0, -RESPONSE:]
            for one in (ids[:2], ids[2:])
        ]
        found = _decoded(policy, ids)
    except Exception as error:  # models refuse arguments that they do not know in every way
        reason = str(error).strip().partition("\n")[0].rstrip(" .") or type(error).__name__
        raise ModelError(f"'{name}' cannot decode with a cache of keys and values: {reason}. {_TAKE}") from error
    gap = max(float((_log(one) - _log(two)).abs().max()) for one, two in zip(found, expected, strict=True))
    largest = max(float(one.float().abs().max()) for one in expected)
    if gap > AGREEMENT * largest:  # NaN weights pass: the first step refuses them by their name
        raise ModelError(
            f"'{name}' gives other log-probs when it decodes with a cache of keys and values and padded prompts than "
            f"in one forward over a response alone, by up to {gap:.3g} nats: it would sample from another policy than "
            f"it learns. {_TAKE}"
        )


def _decoded(policy: Policy, ids: tuple[Tensor, ...]) -> list[Tensor]:
    """``(RESPONSE, V)`` logits of each of the two responses, the one of the longer prompt last."""
    short, long = ids[0], ids[2]
    pad = torch.full((len(long) - len(short),), policy.pad_id, device=policy.device)
    tokens = torch.stack([torch.cat([pad, short]), long])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, : len(pad)] = False
    positions, cache = position_ids(mask), DynamicCache(config=policy.model.config)
    rows = [0, 1]
    steps: list[tuple[Tensor, Tensor]] = []
    for place in range(RESPONSE + 1):
        logits = policy.next_logits(
            input_ids=tokens, attention_mask=mask.long(), position_ids=positions, past_key_values=cache
        ).logits[:, -1]
        if place:
            steps.append((logits[0], logits[-1]))
        chosen = {0: [0, 1, 1], 2: [0, 2]}.get(place)
        if chosen:
            index = torch.tensor(chosen, device=policy.device)
            cache.reorder_cache(index)  # type: ignore[arg-type]  # it asks for the LongTensor of old
            rows, mask, positions = [rows[one] for one in chosen], mask[index], positions[index]
        if place < RESPONSE:
            tokens = torch.stack([ids[1 + 2 * row][place : place + 1] for row in rows])
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
    return [torch.stack(one) for one in zip(*steps, strict=True)]


def _log(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1)
