"""Rollouts: batched sampling with a KV cache that yields the signals from the logits that it has anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from einops import repeat
from torch import Tensor
from transformers import DynamicCache

from rlstab.config.run import RolloutSettings
from rlstab.core.random import uniform
from rlstab.signals import token_signals_from_logits
from rlstab.train.policy import Policy, Sequences, position_ids


@dataclass(frozen=True)
class Rollout:
    """Sampled responses of one rank.

    Attributes:
        sequences: ids and masks.
        signals: ``(R, T)`` float32 by name, at the sampling temperature; 0 where there is no token.
        texts: the responses, decoded.
        ended: ``(R,)`` bool, False where the response was cut at ``max_new_tokens``.
    """

    sequences: Sequences
    signals: Mapping[str, Tensor]
    texts: list[str]
    ended: Tensor


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[str],
    sequence_ids: Tensor,
    settings: RolloutSettings,
    *,
    seed: int,
    needs: Set[str] = frozenset(),
    options: Mapping[str, float] | None = None,
    greedy: bool = False,
    skip_special_tokens: bool = True,
) -> Rollout:
    """Sample one response to each prompt from the whole distribution.

    Each token is drawn by inverting the distribution function at a number that depends on ``(seed, sequence id,
    position)`` alone, so a response does not depend on the batch or the rank in which it is sampled.

    Args:
        policy: the model to sample from.
        prompts: one text a response; repeat a prompt for a group.
        sequence_ids: ``(R,)`` int64, identities of the responses.
        settings: length, temperature, batch size, stop text.
        seed: of the run or of the evaluation.
        needs: signals to return.
        options: numbers that define signals, such as ``min_p``.
        greedy: take the likeliest token instead.
        skip_special_tokens: leave special tokens, EOS among them, out of the texts.

    Raises:
        DataError: a prompt is too long for the context.
    """
    ids, mask = policy.encode(list(prompts), settings.max_new_tokens, chat=settings.chat)
    names = sorted(needs | {"logprobs"})
    parts = [
        _sample_batch(policy, ids[span], mask[span], sequence_ids[span], settings, seed, names, options or {}, greedy)
        for start in range(0, len(prompts), settings.batch_size)
        for span in [slice(start, start + settings.batch_size)]
    ]
    width = max((tokens.shape[1] for tokens, _, _, _ in parts), default=0)

    def join(values: list[Tensor], fill: float = 0) -> Tensor:
        padded = [torch.nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in values]
        return torch.cat(padded) if padded else torch.zeros((0, 0), device=policy.device)

    tokens = join([one for one, _, _, _ in parts], policy.pad_id).long()
    response_mask = join([one for _, one, _, _ in parts]).bool()
    signals = {name: join([one[name] for _, _, one, _ in parts]) for name in names}
    ended = torch.cat([one for _, _, _, one in parts]) if parts else torch.zeros(0, dtype=torch.bool)
    rows = [row[keep].tolist() for row, keep in zip(tokens.cpu(), response_mask.cpu(), strict=True)]
    texts = [policy.tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]
    return Rollout(Sequences(ids, mask, tokens, response_mask), signals, texts, ended.cpu())


def _sample_batch(
    policy: Policy,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    sequence_ids: Tensor,
    settings: RolloutSettings,
    seed: int,
    names: list[str],
    options: Mapping[str, float],
    greedy: bool,
) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    rows = prompt_ids.shape[0]
    sequence_ids = sequence_ids.to(policy.device)
    ends = torch.tensor(sorted(policy.eos_ids), device=policy.device)
    done = torch.zeros(rows, dtype=torch.bool, device=policy.device)
    cache = DynamicCache(config=policy.model.config)
    mask, positions, tokens = prompt_mask, position_ids(prompt_mask), prompt_ids
    ids, alive = [], []
    collected: dict[str, list[Tensor]] = {name: [] for name in names}
    with policy.autocast():
        for place in range(settings.max_new_tokens):
            out = policy.next_logits(
                input_ids=tokens, attention_mask=mask.long(), position_ids=positions, past_key_values=cache
            )
            logits = out.logits[:, -1].float()
            if greedy:
                chosen = logits.argmax(-1)
            else:
                draw = uniform(seed, sequence_ids, torch.tensor(place, device=policy.device))
                chosen = _invert(torch.softmax(logits / settings.temperature, dim=-1), draw)
            signals = token_signals_from_logits(
                logits, chosen, temperature=settings.temperature, needs=set(names), min_p=options.get("min_p")
            )
            alive.append(~done)
            ids.append(torch.where(done, policy.pad_id, chosen))
            for name in names:
                collected[name].append(torch.where(done, 0.0, getattr(signals, name)))
            done = done | torch.isin(chosen, ends)
            if settings.stop is not None:
                done = done | _stopped(policy, ids, done, settings.stop)
            if bool(done.all()):
                break
            tokens = ids[-1].unsqueeze(-1)
            mask = torch.cat([mask, alive[-1].unsqueeze(-1)], dim=1)
            positions = positions[:, -1:] + 1
    stacked = {name: torch.stack(values, dim=1) for name, values in collected.items()}
    return torch.stack(ids, dim=1), torch.stack(alive, dim=1), stacked, done


def _invert(probabilities: Tensor, draw: Tensor) -> Tensor:
    """The first token at which the distribution function exceeds the draw: never one of probability 0."""
    cumulative = probabilities.double().cumsum(-1)
    target = draw.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=probabilities.shape[-1] - 1)


def _stopped(policy: Policy, ids: list[Tensor], done: Tensor, stop: str) -> Tensor:
    """Rows whose last tokens complete the stop text; a stop text of c characters spans at most c tokens."""
    recent = torch.stack(ids[-len(stop) :], dim=1)
    texts = policy.tokenizer.batch_decode(recent.cpu(), skip_special_tokens=True)
    return torch.tensor([stop in text for text in texts], device=done.device) & ~done


def grouped(prompts: Sequence[str], group: int) -> list[str]:
    """Each prompt ``group`` times in a row."""
    order = repeat(torch.arange(len(prompts)), "p -> (p g)", g=group)
    return [prompts[int(index)] for index in order]
