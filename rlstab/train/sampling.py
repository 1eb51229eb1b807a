"""Sampling: responses in batches with a KV cache that yields the signals from the logits that it has anyway."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from rlstab.config.settings import Precision, RolloutSettings
from rlstab.core.random import uniform
from rlstab.errors import DataError, ModelError
from rlstab.hub import first_line
from rlstab.models.loading import is_of_adapter
from rlstab.models.policy import Policy, Sequences
from rlstab.models.shared_prompts import position_ids
from rlstab.signals import token_signals_from_logits
from rlstab.tasks import Prompt
from rlstab.train.rollout import Rollout

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
) -> Rollout:
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

    Returns:
        sequences, signals at the sampling temperature, texts and which responses ended; nothing is scored yet.

    Raises:
        DataError: a prompt is too long for the context.
    """
    begun = [tuple(tokens) for tokens in given] if given is not None else [()] * len(prompts)
    rows = list(zip(prompts, begun, strict=True))
    different = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    ids, mask = policy.encode(
        [prompt for prompt, _ in different],
        settings.max_new_tokens,
        chat=settings.chat,
        given=[tokens for _, tokens in different],
    )
    prompt = torch.tensor([different[row] for row in rows], dtype=torch.int64)
    room = settings.max_new_tokens - torch.tensor([len(tokens) for tokens in begun], dtype=torch.int64)
    decoder = _Decoder(policy, settings, seed, sorted(needs | {"logprobs"}), options or {}, greedy)
    batches: list[_Decoded] = []
    texts: list[str] = []
    for start in range(0, len(prompts), settings.batch_size):
        span = slice(start, start + settings.batch_size)
        batch = decoder.batch(ids, mask, prompt[span], sequence_ids[span], room[span])
        batches.append(batch)
        lengths = batch.mask.sum(-1).tolist()
        fresh = [
            policy.decode([*first, *row[:length]], skip_special_tokens=skip_special_tokens)
            for first, row, length in zip(begun[span], batch.tokens.tolist(), lengths, strict=True)
        ]
        texts += fresh
        if on_texts is not None:
            on_texts(start, fresh)
    width = max((batch.tokens.shape[1] for batch in batches), default=0)

    def join(values: list[Tensor], fill: float = 0) -> Tensor:
        padded = [pad(value, (0, width - value.shape[1]), value=fill) for value in values]
        return torch.cat(padded) if padded else torch.zeros((0, 0), device=policy.device)

    of = prompt.to(policy.device)
    sequences = Sequences(
        ids[of],
        mask[of],
        join([batch.tokens for batch in batches], policy.pad_id).long(),
        join([batch.mask for batch in batches]).bool(),
    )
    signals = {name: join([batch.signals[name] for batch in batches]) for name in decoder.names}
    ended = torch.cat([batch.ended for batch in batches]) if batches else torch.zeros(0, dtype=torch.bool)
    return Rollout(sequences, signals, texts, ended.cpu())


@dataclass(frozen=True)
class _Decoded:
    """``(R, T)`` tokens, which of them count, and signals; ``(R,)`` which responses ended by themselves."""

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
        self, prompt_ids: Tensor, prompt_mask: Tensor, prompt: Tensor, sequence_ids: Tensor, room: Tensor
    ) -> _Decoded:
        """One response of at most ``room`` tokens for each entry of ``prompt``, the row of its prompt."""
        policy, settings = self.policy, self.settings
        device, count, most = policy.device, prompt.numel(), int(room.max()) if room.numel() else 0
        room = room.to(device)
        once, of = (rows.to(device) for rows in prompt.unique(return_inverse=True))
        sequence_ids = sequence_ids.to(device)
        ends = torch.tensor(sorted(policy.eos_ids), device=device)
        out = _Decoded(
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
        return _Decoded(
            out.tokens[:, :length],
            out.mask[:, :length],
            {name: values[:, :length] for name, values in out.signals.items()},
            out.ended,
        )

    def _token(
        self, logits: Tensor, number: Tensor, place: int, out: _Decoded, rows: Tensor, growing: Tensor
    ) -> Tensor:
        """Draw the token at ``place`` of some rows, and write it and its signals down where a row still grows."""
        temperature = self.settings.temperature
        chosen = logits.argmax(-1) if self.greedy else _invert(torch.softmax(logits / temperature, dim=-1), number)
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
    blocks = rearrange(pad(probabilities, (0, -vocab % width)), "r (b w) -> r b w", w=width)
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


# -- a sampler with rounded weights ----------------------------------------------------------------------------------

#: The largest number of each narrow format: that of a row is mapped to it. Integers are symmetric around 0.
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int3": 3.0, "int2": 1.0}


@torch.no_grad()
def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """The nearest weights that a format holds, in the dtype of ``weight``.

    Args:
        weight: ``(..., in)``, one row for each output.
        precision: ``bf16`` has 8 significant bits. ``fp8`` is e4m3, 4 significant bits; ``int8`` to ``int2`` are
            steps of one size. All but ``bf16`` have one float32 scale for each row, which maps its largest magnitude
            to the largest number of the format.
    """
    weight = weight.detach()
    if precision == "bf16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    largest, wide = LARGEST[precision], weight.float()
    scale = wide.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    steps = wide / scale
    if precision == "fp8":
        steps = steps.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
    else:
        steps = steps.round().clamp(-largest, largest)
    return (steps * scale).to(weight.dtype)


class Sampler:
    """The policy that samples: the trainer's own, or a copy with weights of fewer bits, as sampling engines hold them.

    Weights may carry noise instead, or as well: a gap that can be as wide as one likes.

    Weights are rounded to the numbers that the narrow format holds, and products are taken as before: the gap between
    sampler and trainer is that of the weights alone. Linear layers and experts are rounded to ``fp8`` or
    integers; the vocabulary head, embeddings, norms, biases and LoRA adapters are bfloat16, as engines keep them
    (vLLM's online quantisation takes all linear layers but the head, and its adapters have the dtype of the model).

    Args:
        precision: see :func:`rounded`; None keeps the trainer's weights.
        weight_noise: standard deviation of what is added to each matrix but those of adapters, the head and embeddings
            included, as a share of that of its weights. It is the same whenever the weights are refreshed.
        seed: of the noise.
    """

    def __init__(self, precision: Precision | None, weight_noise: float = 0.0, seed: int = 0) -> None:
        self.precision, self.weight_noise, self.seed = precision, weight_noise, seed
        self._copy: Policy | None = None

    @property
    def differs(self) -> bool:
        """Whether it is a copy; else the trainer's own policy samples."""
        return self.precision is not None or self.weight_noise > 0

    @torch.no_grad()
    def refreshed(self, policy: Policy) -> Policy:
        """The policy to sample from, by the weights that the trainer's has now. Its own weights are only read."""
        if not self.differs:
            return policy
        if self._copy is None:
            model = copy.deepcopy(policy.model)
            model.requires_grad_(False)
            model.zero_grad(set_to_none=True)  # gradients would be copied too
            self._copy = replace(policy, model=model)
        narrow, weights = _narrow(policy.model), dict(policy.model.named_parameters())
        for name, weight in self._copy.model.named_parameters():
            if self.precision is None:
                weight.copy_(weights[name])
            else:
                weight.copy_(rounded(weights[name], self.precision if name in narrow else "bf16"))
            if self.weight_noise and weight.ndim >= 2 and not is_of_adapter(name):
                weight.add_(self.weight_noise * weights[name].std() * self._noise(name, weight))
        for mine, buffer in zip(self._copy.model.buffers(), policy.model.buffers(), strict=True):
            mine.copy_(buffer)
        return self._copy

    def _noise(self, name: str, weight: Tensor) -> Tensor:
        """Standard normal numbers by the seed and the name: those of another weight, or another time, do not matter."""
        generator = torch.Generator().manual_seed(crc32(f"{self.seed} {name}".encode()))  # it takes 32 bits
        return torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)


def _narrow(model: PreTrainedModel) -> set[str]:
    """Names of the matrices that engines quantise: those of layers. A head that is tied is an embedding."""
    kept: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.Conv1d)]
    head = model.get_output_embeddings()
    wide = {id(weight) for module in [*kept, *([] if head is None else [head])] for weight in module.parameters()}
    matrices = {name for name, weight in model.named_parameters() if weight.ndim >= 2 and id(weight) not in wide}
    return {name for name in matrices if not is_of_adapter(name)}


# -- whether a model decodes as it is asked to -----------------------------------------------------------------------

#: Log-probs agree to this share of the largest logit. Sound caches miss by roundings, others by about the logits.
AGREEMENT = 0.003

_TAKE = "Take a model with attention over a cache that transformers' DynamicCache holds, such as Llama, Qwen or Gemma."


@torch.no_grad()
def require_decoding(policy: Policy, name: str, prompt: Prompt, settings: RolloutSettings) -> None:
    """Sample a few tokens and compare with one forward over each response alone, before a run begins.

    Prompts of two lengths, a prompt that is read once for two responses, a response that leaves the batch. A model that
    keeps its state elsewhere than in the cache, or reads padding, would sample from another policy than it learns.

    Raises:
        ModelError: the model cannot decode so, or its log-probs are others.
    """
    policy, length = replace(policy, precision="fp32"), min(8, settings.max_new_tokens)
    given, rows = [[], [], list(range(1, 1 + length // 2))], torch.arange(3)
    few = settings.model_copy(update={"max_new_tokens": length, "stop": None, "batch_size": len(rows)})
    try:
        rollout = sample(policy, [prompt] * len(rows), rows, few, given=given, seed=0)
        forward = policy.evidence(rollout.sequences, {"logprobs"}, 1, temperature=settings.temperature)
        largest = float(policy.model(input_ids=rollout.sequences.prompt_ids[-1:], use_cache=False).logits.abs().max())
    except DataError:
        raise
    except Exception as error:  # models refuse arguments that they do not know in every way
        raise ModelError(
            f"'{name}' cannot decode with a cache of keys and values: {first_line(error)}. {_TAKE}"
        ) from error
    gap = float((rollout.signals["logprobs"] - forward["logprobs"]).abs().max())
    if gap * settings.temperature > AGREEMENT * largest:  # NaN weights pass: the first step refuses them by their name
        raise ModelError(
            f"'{name}' gives other log-probs when it decodes with a cache and padded prompts than in one forward, by "
            f"up to {gap:.3g} nats: it would sample from another policy than it learns. {_TAKE}"
        )
