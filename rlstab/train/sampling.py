"""Sampling: responses in batches with a KV cache that yields the signals from the logits that it has anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor
from transformers import DynamicCache

from rlstab.config.settings import RolloutSettings
from rlstab.core.random import uniform
from rlstab.signals import token_signals_from_logits
from rlstab.tasks import Prompt
from rlstab.train.padded_rows import Sequences, position_ids
from rlstab.train.policy import Policy


@dataclass(frozen=True)
class Sampled:
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


#: Finished responses leave the batch when at most this share of it is still growing.
RETIRE = 0.75


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    sequence_ids: Tensor,
    settings: RolloutSettings,
    *,
    given: Sequence[Sequence[int]] | None = None,
    seed: int,
    needs: Set[str] = frozenset(),
    options: Mapping[str, float] | None = None,
    greedy: bool = False,
    skip_special_tokens: bool = True,
    on_texts: Callable[[int, list[str]], None] | None = None,
) -> Sampled:
    """Sample one response to each prompt from the whole distribution.

    Each token is drawn by inverting the distribution function at a number that depends on ``(seed, sequence id,
    position)`` alone, so a response does not depend on the batch or the rank in which it is sampled. A prompt that
    occurs several times in a batch is read once.

    Args:
        policy: the model to sample from.
        prompts: one per response, a text or a chat; repeat a prompt for a group.
        sequence_ids: ``(R,)`` int64, identities of the responses.
        settings: length, temperature, batch size, stop text.
        given: for each response, the tokens that its answer begins with, which become a part of its prompt; the answer
            as a whole has ``settings.max_new_tokens``, and its text begins with theirs.
        seed: of the run or of the evaluation.
        needs: signals to return.
        options: numbers that define signals, such as ``min_p``.
        greedy: take the likeliest token instead.
        skip_special_tokens: leave special tokens, EOS among them, out of the texts.
        on_texts: called after each batch with the place of its first response and the texts, so that they can be
            scored while the next batch is sampled.

    Raises:
        DataError: a prompt is too long for the context.
    """
    begun = [tuple(one) for one in given] if given is not None else [()] * len(prompts)
    rows = list(zip(prompts, begun, strict=True))
    different = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    ids, mask = policy.encode(
        [text for text, _ in different],
        settings.max_new_tokens,
        chat=settings.chat,
        given=[one for _, one in different],
    )
    prompt = torch.tensor([different[one] for one in rows], dtype=torch.int64)
    room = settings.max_new_tokens - torch.tensor([len(one) for one in begun], dtype=torch.int64)
    draws = _Draws(policy, settings, seed, sorted(needs | {"logprobs"}), options or {}, greedy)
    parts: list[_Drawn] = []
    texts: list[str] = []
    for start in range(0, len(prompts), settings.batch_size):
        span = slice(start, start + settings.batch_size)
        part = draws.batch(ids, mask, prompt[span], sequence_ids[span], room[span])
        parts.append(part)
        lengths = part.mask.sum(-1).tolist()
        fresh = [
            policy.decode([*first, *row[:length]], skip_special_tokens=skip_special_tokens)
            for first, row, length in zip(begun[span], part.tokens.tolist(), lengths, strict=True)
        ]
        texts += fresh
        if on_texts is not None:
            on_texts(start, fresh)
    width = max((one.tokens.shape[1] for one in parts), default=0)

    def join(values: list[Tensor], fill: float = 0) -> Tensor:
        padded = [torch.nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in values]
        return torch.cat(padded) if padded else torch.zeros((0, 0), device=policy.device)

    of = prompt.to(policy.device)
    sequences = Sequences(
        ids[of],
        mask[of],
        join([one.tokens for one in parts], policy.pad_id).long(),
        join([one.mask for one in parts]).bool(),
    )
    signals = {name: join([one.signals[name] for one in parts]) for name in draws.names}
    ended = torch.cat([one.ended for one in parts]) if parts else torch.zeros(0, dtype=torch.bool)
    return Sampled(sequences, signals, texts, ended.cpu())


@dataclass(frozen=True)
class _Drawn:
    """``(R, T)`` tokens, which of them count, and signals; ``(R,)`` which responses ended by themselves."""

    tokens: Tensor
    mask: Tensor
    signals: dict[str, Tensor]
    ended: Tensor


@dataclass(frozen=True)
class _Draws:
    policy: Policy
    settings: RolloutSettings
    seed: int
    names: list[str]
    options: Mapping[str, float]
    greedy: bool

    def batch(
        self, prompt_ids: Tensor, prompt_mask: Tensor, prompt: Tensor, sequence_ids: Tensor, room: Tensor
    ) -> _Drawn:
        """One response of at most ``room`` tokens for each entry of ``prompt``, the row of its prompt."""
        policy, settings = self.policy, self.settings
        device, count, most = policy.device, prompt.numel(), int(room.max()) if room.numel() else 0
        room = room.to(device)
        once, of = (one.to(device) for one in prompt.unique(return_inverse=True))
        sequence_ids = sequence_ids.to(device)
        ends = torch.tensor(sorted(policy.eos_ids), device=device)
        out = _Drawn(
            torch.full((count, most), policy.pad_id, dtype=torch.int64, device=device),
            torch.zeros((count, most), dtype=torch.bool, device=device),
            {name: torch.zeros((count, most), device=device) for name in self.names},
            torch.zeros(count, dtype=torch.bool, device=device),
        )
        # reading a number off a GPU makes it wait, so there finished rows are looked for now and then
        look = 8 if device.type == "cuda" else 1
        cache = DynamicCache(config=policy.model.config)
        tokens, mask = prompt_ids[once], prompt_mask[once]
        positions = position_ids(mask)
        rows = torch.arange(count, device=device)
        numbers = uniform(self.seed, sequence_ids.unsqueeze(-1), torch.arange(most, device=device))
        with policy.autocast():
            for place in range(most):
                logits = policy.next_logits(
                    input_ids=tokens, attention_mask=mask.long(), position_ids=positions, past_key_values=cache
                ).logits[:, -1]
                if place == 0:  # each prompt was read once; from here on every response has a row
                    cache.reorder_cache(of)
                    logits, mask, positions = logits[of], mask[of], positions[of]
                growing = ~out.ended[rows] & (place < room[rows])
                chosen = self._token(logits.float(), numbers[rows, place], place, out, rows, growing)
                out.ended[rows] = out.ended[rows] | (growing & torch.isin(chosen, ends))
                if settings.stop is not None:
                    out.ended[rows] |= growing & _stopped(policy, out.tokens[rows, : place + 1], settings.stop)
                tokens, positions = chosen.unsqueeze(-1), positions[:, -1:] + 1
                mask = torch.cat([mask, growing.unsqueeze(-1)], dim=1)
                if (place + 1) % look == 0:
                    left = (~out.ended[rows] & (place + 1 < room[rows])).nonzero().squeeze(-1)
                    if left.numel() == 0:
                        break
                    if left.numel() <= RETIRE * rows.numel():
                        cache.reorder_cache(left)  # type: ignore[arg-type]  # it asks for the LongTensor of old
                        rows, tokens, positions, mask = rows[left], tokens[left], positions[left], mask[left]
        length = int(out.mask.any(0).sum())
        return _Drawn(
            out.tokens[:, :length],
            out.mask[:, :length],
            {name: one[:, :length] for name, one in out.signals.items()},
            out.ended,
        )

    def _token(self, logits: Tensor, number: Tensor, place: int, out: _Drawn, rows: Tensor, growing: Tensor) -> Tensor:
        """Draw the token at ``place`` of some rows, and write it and its signals down where a row still grows."""
        temperature = self.settings.temperature
        if self.greedy:
            chosen = logits.argmax(-1)
        else:
            chosen = _invert(torch.softmax(logits / temperature, dim=-1), number)
        signals = token_signals_from_logits(
            logits,
            chosen,
            temperature=temperature,
            needs=set(self.names),
            min_p=self.options.get("min_p"),
            check_ids=False,  # drawn from these logits
        )
        out.mask[rows, place] = growing
        out.tokens[rows, place] = torch.where(growing, chosen, self.policy.pad_id)
        for name in self.names:
            out.signals[name][rows, place] = torch.where(growing, getattr(signals, name), 0.0)
        return chosen


#: Columns of the vocabulary that are summed first, when a token is drawn.
BLOCK = 256


def _invert(probabilities: Tensor, draw: Tensor) -> Tensor:
    """The first token at which the distribution function exceeds the draw: never one of probability 0.

    Sums of blocks find the block, then the tokens of that block alone are summed one by one.
    """
    vocab = probabilities.shape[-1]
    width = min(BLOCK, vocab)
    padded = torch.nn.functional.pad(probabilities, (0, -vocab % width))
    blocks = rearrange(padded, "r (b w) -> r b w", w=width)
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = draw.unsqueeze(-1) * edges[:, -1:]
    block = torch.searchsorted(edges, target, right=True).clamp(max=edges.shape[-1] - 1)
    before = torch.where(block > 0, edges.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(len(blocks), device=block.device), block.squeeze(-1)].double().cumsum(-1) + before
    # the sum of a block may round below its edge: then its last token of positive probability is meant
    last = (inside < inside[:, -1:]).sum(-1, keepdim=True)
    token = torch.minimum(torch.searchsorted(inside, target, right=True), last)
    return (block * width + token).squeeze(-1).clamp(max=vocab - 1)


def _stopped(policy: Policy, tokens: Tensor, stop: str) -> Tensor:
    """Rows whose last tokens complete the stop text; a stop text of c characters spans at most c tokens."""
    texts = policy.tokenizer.batch_decode(tokens[:, -len(stop) :].cpu(), skip_special_tokens=True)
    return torch.tensor([stop in text for text in texts], device=tokens.device)


def grouped(prompts: Sequence[Prompt], group: int) -> list[Prompt]:
    """Each prompt ``group`` times in a row."""
    order = repeat(torch.arange(len(prompts)), "p -> (p g)", g=group)
    return [prompts[int(index)] for index in order]
