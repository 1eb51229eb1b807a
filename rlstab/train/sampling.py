"""Sampling: responses in batches, with a KV cache, and signals from the same logits as the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from rlstab.config.settings import RolloutSettings
from rlstab.core.devices import counting_device, on_cpu, sent
from rlstab.core.random import uniform
from rlstab.errors import DataError, ModelError
from rlstab.hub import first_line
from rlstab.models.policy import Policy, Sequences, joined_rows
from rlstab.models.shared_prompts import position_ids
from rlstab.signals import token_signals_from_logits
from rlstab.tasks import Example
from rlstab.train.rollout import Rollout

#: Finished responses leave the batch once at most this share of it is unfinished.
RETIRE = 0.75

#: To find a stop text, this many more tokens are decoded than it has bytes.
SPARE = 4


@torch.no_grad()
def sample(
    policy: Policy,
    examples: Sequence[Example],
    sequence_ids: Tensor,
    settings: RolloutSettings,
    *,
    given: Sequence[Sequence[int]] | None = None,
    seed: int,
    needs: Set[str] = frozenset(),
    options: Mapping[str, float] | None = None,
    greedy: bool = False,
    skip_special_tokens: bool = True,
    on_texts: Callable[[int, list[str], list[str]], None] | None = None,
) -> Rollout:
    """Sample one response to each example from the full distribution.

    Each token is drawn by inverting the distribution function at a random number that depends only on ``(seed, sequence
    id, position)``, so a response does not depend on its batch or rank. A prompt that occurs several times in a batch
    is forwarded once.

    Args:
        policy: the model to sample from.
        examples: one per response; repeat an example for a group.
        sequence_ids: ``(R,)`` int64, ids of the responses.
        settings: length, temperature, batch size, stop texts.
        given: for each response the tokens that its answer begins with, which become part of its prompt. They count
            towards ``settings.max_new_tokens``, and the text of the answer includes them.
        seed: of the run or of the evaluation.
        needs: signals to return.
        options: numbers that define signals, such as ``min_p``.
        greedy: take the most probable token instead.
        skip_special_tokens: leave special tokens, including EOS, out of the texts.
        on_texts: called after each batch with the index of its first response, the texts, and the texts with all
            special tokens, so that they can be scored while the next batch is sampled.

    Returns:
        sequences, signals at the sampling temperature, texts, and which responses ended; without scores.

    Raises:
        DataError: a prompt does not fit the model.
    """
    begun = [tuple(tokens) for tokens in given] if given is not None else [()] * len(examples)
    asked = [(example.messages or example.prompt, tokens) for example, tokens in zip(examples, begun, strict=True)]
    first: dict[Any, int] = {}  # the first response with each prompt
    for row, key in enumerate(asked):
        first.setdefault(key, row)
    number = {key: index for index, key in enumerate(first)}
    ids, mask = policy.encode(
        [examples[row] for row in first.values()], settings, [begun[row] for row in first.values()]
    )
    prompt = torch.tensor([number[key] for key in asked], dtype=torch.int64)
    room = settings.max_new_tokens - torch.tensor([len(tokens) for tokens in begun], dtype=torch.int64)
    decoder = _Decoder(policy, settings, seed, sorted(needs | {"logprobs"}), options or {}, greedy)
    batches: list[_Decoded] = []
    texts: list[str] = []
    for start in range(0, max(1, len(examples)), settings.batch_size):  # a rank may have no example
        span = slice(start, start + settings.batch_size)
        batch = decoder.batch(ids, mask, prompt[span], sequence_ids[span], room[span], begun[span])
        batches.append(batch)
        lengths = batch.mask.sum(-1).tolist()
        answers = [
            [*tokens, *row[:length]]
            for tokens, row, length in zip(begun[span], batch.tokens.tolist(), lengths, strict=True)
        ]
        whole = [policy.decode(answer) for answer in answers]
        fresh = (
            [policy.decode(answer, skip_special_tokens=True) for answer in answers] if skip_special_tokens else whole
        )
        texts += fresh
        if on_texts is not None:
            on_texts(start, fresh, whole)
    sequences = Sequences(
        ids[prompt],
        mask[prompt],
        joined_rows([batch.tokens for batch in batches], policy.pad_id),
        joined_rows([batch.mask for batch in batches]),
    )
    signals = {name: joined_rows([batch.signals[name] for batch in batches]) for name in decoder.names}
    return Rollout(sequences, signals, texts, torch.cat([batch.ended for batch in batches]))


@dataclass(frozen=True)
class _Decoded:
    """``(R, T)`` tokens, their mask and signals; ``(R,)`` which responses ended by an EOS or a stop text.

    On the device while they are decoded, then on the CPU.
    """

    tokens: Tensor
    mask: Tensor
    signals: dict[str, Tensor]
    ended: Tensor


@dataclass(frozen=True)
class _Decoder:
    policy: Policy
    settings: RolloutSettings
    seed: int
    names: list[str]
    options: Mapping[str, float]
    greedy: bool

    def batch(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        prompt: Tensor,
        sequence_ids: Tensor,
        room: Tensor,
        begun: Sequence[Sequence[int]],
    ) -> _Decoded:
        """Decode one response for each entry of ``prompt``, as one batch.

        Args:
            prompt_ids: ``(U, P)`` int64, distinct prompts.
            prompt_mask: ``(U, P)`` bool.
            prompt: ``(R,)`` int64, the row of each response's prompt.
            sequence_ids: ``(R,)`` int64.
            room: ``(R,)`` int64, the maximum number of tokens of each response.
            begun: ``R`` lists, the tokens that the answers begin with.
        """
        policy, device, count = self.policy, self.policy.device, prompt.numel()
        longest, room = int(room.max()) if room.numel() else 0, sent(room, device)
        read, prompt_read = prompt.unique(return_inverse=True)
        prompt_read = sent(prompt_read, device)
        out = _Decoded(
            torch.full((count, longest), policy.pad_id, dtype=torch.int64, device=device),
            torch.zeros((count, longest), dtype=torch.bool, device=device),
            {name: torch.zeros((count, longest), device=device) for name in self.names},
            torch.zeros(count, dtype=torch.bool, device=device),
        )
        # reading a number from an accelerator waits for it, so there finished responses are looked for every few steps
        interval = 1 if device.type == "cpu" else 8
        end_ids = sent(torch.tensor(sorted(policy.eos_ids)), device)
        cache = DynamicCache(config=policy.model.config)
        tokens, mask = sent(prompt_ids[read], device), sent(prompt_mask[read], device)
        positions = position_ids(mask)
        rows = torch.arange(count, device=device)  # responses in the batch, in the order of the cache
        home = counting_device(device)
        draws = uniform(self.seed, sent(sequence_ids, home).unsqueeze(-1), torch.arange(longest, device=home))
        with policy.autocast():
            for step in range(longest):
                logits = policy.next_logits(
                    input_ids=tokens, attention_mask=mask.long(), position_ids=positions, past_key_values=cache
                ).logits[:, -1]
                if step == 0:  # each prompt was forwarded once; now every response gets a row
                    cache.reorder_cache(prompt_read)  # type: ignore[arg-type]  # a LongTensor it is
                    logits, mask, positions = logits[prompt_read], mask[prompt_read], positions[prompt_read]
                growing = ~out.ended[rows] & (step < room[rows])
                chosen = self._token(logits.float(), draws[rows.to(home), step], step, out, rows, growing)
                out.ended[rows] |= growing & self._ends(chosen, end_ids, out.tokens[:, : step + 1], rows, begun)
                tokens, positions = chosen.unsqueeze(-1), positions[:, -1:] + 1
                mask = torch.cat([mask, growing.unsqueeze(-1)], dim=1)
                if (step + 1) % interval == 0:
                    left = (~out.ended[rows] & (step + 1 < room[rows])).nonzero().squeeze(-1)
                    if left.numel() == 0:
                        break
                    if left.numel() <= RETIRE * rows.numel():
                        cache.reorder_cache(left)  # type: ignore[arg-type]  # its annotation is the legacy LongTensor
                        rows, tokens, positions, mask = rows[left], tokens[left], positions[left], mask[left]
        written, ended, *signals = on_cpu([out.mask, out.ended, *out.signals.values(), out.tokens])
        tokens = signals.pop()
        length = int(written.any(0).sum())
        cut = {name: values[:, :length] for name, values in zip(out.signals, signals, strict=True)}
        return _Decoded(tokens[:, :length], written[:, :length], cut, ended)

    def _token(self, logits: Tensor, draw: Tensor, step: int, out: _Decoded, rows: Tensor, growing: Tensor) -> Tensor:
        """Draw a token for some rows, and write it and its signals where the row is unfinished."""
        temperature = self.settings.temperature
        chosen = logits.argmax(-1) if self.greedy else _invert(torch.softmax(logits / temperature, dim=-1), draw)
        signals = token_signals_from_logits(
            logits,
            chosen,
            temperature=temperature,
            needs=set(self.names),
            min_p=self.options.get("min_p"),
            check_ids=False,  # drawn from these logits
        )
        out.mask[rows, step] = growing
        out.tokens[rows, step] = torch.where(growing, chosen, self.policy.pad_id)
        for name in self.names:
            out.signals[name][rows, step] = torch.where(growing, getattr(signals, name), 0.0)
        return chosen

    def _ends(
        self, chosen: Tensor, end_ids: Tensor, sampled: Tensor, rows: Tensor, begun: Sequence[Sequence[int]]
    ) -> Tensor:
        """Which rows end with the chosen token: it is an EOS token, or completes a stop text.

        A stop text may begin inside a token, or in the tokens that the answer was given, and it may contain special
        tokens. All but a few tokens have at least one byte; an exception is a space that a decoder strips at the start.
        """
        ends = torch.isin(chosen, end_ids)
        if self.settings.stop is None:
            return ends
        window = max(len(stop.encode()) for stop in self.settings.stop) + SPARE
        tails = sampled[rows, -window:].tolist()
        tails = [[*begun[row], *tail][-window:] for row, tail in zip(rows.tolist(), tails, strict=True)]
        texts = self.policy.tokenizer.batch_decode(tails, skip_special_tokens=False)
        stopped = [any(stop in text for stop in self.settings.stop) for text in texts]
        return ends | torch.tensor(stopped, device=chosen.device)


#: How many columns of the vocabulary are summed as a block to draw a token.
BLOCK = 256


def _invert(probabilities: Tensor, draw: Tensor) -> Tensor:
    """The first token at which the distribution function exceeds the draw, which never has probability 0.

    Sums of blocks determine the block, and only the tokens of this block are summed one by one.
    """
    device, probabilities = probabilities.device, probabilities.to(draw.device)
    vocab = probabilities.shape[-1]
    width = min(BLOCK, vocab)
    blocks = rearrange(pad(probabilities, (0, -vocab % width)), "r (b w) -> r b w", w=width)
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = draw.unsqueeze(-1) * edges[:, -1:]
    block = torch.searchsorted(edges, target, right=True).clamp(max=edges.shape[-1] - 1)
    before = torch.where(block > 0, edges.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(len(blocks), device=block.device), block.squeeze(-1)].double().cumsum(-1) + before
    # rounding may put the sum of a block below its edge: then take its last token of positive probability
    last = (inside < inside[:, -1:]).sum(-1, keepdim=True)
    token = torch.minimum(torch.searchsorted(inside, target, right=True), last)
    return (block * width + token).squeeze(-1).clamp(max=vocab - 1).to(device)


# -- whether the log-probs of decoding are those of a forward --------------------------------------------------------

#: Log-probs must agree to this share of the largest logit. A correct cache differs by rounding error; a wrong one by
#: about the size of the logits.
AGREEMENT = 0.003

_TAKE = "Use a model with attention over a cache that transformers' DynamicCache holds, such as Llama, Qwen or Gemma."


@torch.no_grad()
def require_decoding(policy: Policy, name: str, example: Example, settings: RolloutSettings) -> None:
    """Sample a few tokens before a run begins, and compare their log-probs with a forward over each response.

    The batch has prompts of two lengths, one of them shared by two responses, and a response that leaves early. A model
    that keeps state outside the cache, or reads padding, would sample from another policy than the one that learns.

    Raises:
        ModelError: the model cannot decode with a cache, or its log-probs differ.
    """
    policy, length = replace(policy, precision="fp32"), min(8, settings.max_new_tokens)
    given, rows = [[], [], list(range(1, 1 + length // 2))], torch.arange(3)
    few = settings.model_copy(update={"max_new_tokens": length, "stop": None, "batch_size": len(rows)})
    try:
        rollout = sample(policy, [example] * len(rows), rows, few, given=given, seed=0)
        forward = policy.evidence(rollout.sequences, {"logprobs"}, 1, temperature=settings.temperature)
        last = sent(rollout.sequences.prompt_ids[-1:], policy.device)
        largest = float(policy.model(input_ids=last, use_cache=False).logits.abs().max())
    except DataError:
        raise
    except Exception as error:  # models raise errors of many types for unknown arguments
        raise ModelError(
            f"'{name}' cannot decode with a cache of keys and values: {first_line(error)}. {_TAKE}"
        ) from error
    gap = float((rollout.signals["logprobs"] - forward["logprobs"]).abs().max())
    if gap * settings.temperature > AGREEMENT * largest:  # NaN weights pass: the first step names them
        raise ModelError(
            f"'{name}' gives other log-probs when it decodes with a cache and padded prompts than in one forward, by "
            f"up to {gap:.3g} nats: it would sample from a policy other than the one that learns. {_TAKE}"
        )
