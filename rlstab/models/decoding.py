"""Decoding: tokens drawn batch by batch with a KV cache, and signals from the same logits as the tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from rlstab.models.loading import vocabulary_size
from rlstab.models.policy import Policy, Sequences
from rlstab.models.shared_prompts import position_ids
from rlstab.signals import token_signals_from_logits
from rlstab.signals.support import drawn_from, only
from rlstab.tasks.task import Example

#: To find a stop text, this many more tokens are decoded than it has bytes.
SPARE = 4

#: Finished responses leave the batch once at most this share of it is unfinished.
RETIRE = 0.75


@dataclass(frozen=True)
class Decoded:
    """A batch of ``R`` responses.

    Attributes:
        sequences: their responses are on the device while they are decoded, then all is on the CPU.
        signals: ``(R, T)`` by name, 0 in the padding.
        ended: ``(R,)`` bool, True where an EOS or a stop text ended the response.
        supports: the tokens kept at each step, ``(R, K)`` int32, where ``log_support_mass`` is a signal.
    """

    sequences: Sequences
    signals: dict[str, Tensor]
    ended: Tensor
    supports: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Decoder:
    """Decodes batches of responses.

    Attributes:
        policy: the model to sample from.
        settings: temperature and stop texts.
        seed: the seed of the random numbers.
        names: names of the signals, log-probs among them: those of the tokens that top-p and top-k keep.
        options: numbers that define signals, such as ``min_p``; ``sampler_k`` is how many log-probs of each token's
            distribution are kept.
        greedy: take the most probable token instead.
    """

    policy: Policy
    settings: RolloutSettings
    seed: int
    names: list[str]
    options: Mapping[str, float] = field(default_factory=dict)
    greedy: bool = False

    def batch(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        prompt: Tensor,
        sequence_ids: Tensor,
        room: Tensor,
        begun: Sequence[Sequence[int]],
    ) -> Decoded:
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
        prompts = prompt_ids[prompt], prompt_mask[prompt]
        tokens = torch.full((count, longest), policy.pad_id, dtype=torch.int64, device=device)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        k = min(int(self.options.get("sampler_k", 0)), vocabulary_size(policy.model.config))
        listed = torch.zeros((count, longest, k), device=device)
        out = Decoded(
            Sequences(*prompts, tokens, mask, sampler_ids=listed.int(), sampler_logprobs=listed),
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
                ends = torch.isin(chosen, end_ids) | self._stops(step, out, rows, begun)
                out.ended[rows] |= growing & ends
                tokens, positions = chosen.unsqueeze(-1), positions[:, -1:] + 1
                mask = torch.cat([mask, growing.unsqueeze(-1)], dim=1)
                if (step + 1) % interval == 0:
                    left = (~out.ended[rows] & (step + 1 < room[rows])).nonzero().squeeze(-1)
                    if left.numel() == 0:
                        break
                    if left.numel() <= RETIRE * rows.numel():
                        cache.reorder_cache(left)  # type: ignore[arg-type]  # its annotation is the legacy LongTensor
                        rows, tokens, positions, mask = rows[left], tokens[left], positions[left], mask[left]
        sequences = out.sequences
        sampled = [sequences.response_mask, sequences.response_ids, sequences.sampler_ids, sequences.sampler_logprobs]
        mask, tokens, ids, logprobs, ended, *signals = on_cpu([*sampled, out.ended, *out.signals.values()])
        length = int(mask.any(0).sum())
        cut = {name: values[:, :length] for name, values in zip(out.signals, signals, strict=True)}
        width = max((step.shape[1] for step in out.supports), default=0)
        padded = [pad(step, (0, width - step.shape[1]), value=-1) for step in on_cpu(out.supports)]
        support = torch.stack(padded[:length], 1) if length and width else tokens.new_zeros((count, length, 0)).int()
        sequences = Sequences(*prompts, tokens, mask, sampler_ids=ids, sampler_logprobs=logprobs).cut(length)
        return Decoded(replace(sequences, support=support), cut, ended)

    def _token(self, logits: Tensor, draw: Tensor, step: int, out: Decoded, rows: Tensor, growing: Tensor) -> Tensor:
        """Draw a token for some rows, and write it, its signals and its support where the row is unfinished."""
        settings, temperature = self.settings, self.settings.temperature
        support, rest = rows.new_zeros((len(rows), 0)), logits
        if settings.cut:
            support = drawn_from(logits / temperature, settings.top_p, settings.top_k)
            rest = only(logits, support)
        if k := out.sequences.sampler_ids.shape[2]:
            best = (logits / temperature).log_softmax(-1).topk(k)
            out.sequences.sampler_ids[rows, step] = best.indices.int()
            out.sequences.sampler_logprobs[rows, step] = best.values
        chosen = logits.argmax(-1) if self.greedy else _invert(torch.softmax(rest / temperature, dim=-1), draw)
        signals = token_signals_from_logits(
            logits,
            chosen,
            temperature=temperature,
            needs={*self.names, *(["log_support_mass"] * settings.cut)},
            min_p=self.options.get("min_p"),
            support=support,
            check_ids=False,  # drawn from these logits
        )
        out.sequences.response_mask[rows, step] = growing
        out.sequences.response_ids[rows, step] = torch.where(growing, chosen, self.policy.pad_id)
        if signals.logprobs is not None and signals.log_support_mass is not None:
            signals = replace(signals, logprobs=signals.logprobs - signals.log_support_mass)
        for name in self.names:
            out.signals[name][rows, step] = torch.where(growing, getattr(signals, name), 0.0)
        if "log_support_mass" in self.names and settings.cut:
            support = torch.where(growing.unsqueeze(1), support, -1)
            padded = support.new_full((len(out.ended), support.shape[1]), -1)
            out.supports.append(padded.index_copy(0, rows, support).int())
        return chosen

    def _stops(self, step: int, out: Decoded, rows: Tensor, begun: Sequence[Sequence[int]]) -> Tensor:
        """``(len(rows),)`` bool, whether the latest token of a row completes a stop text.

        A stop text may begin inside a token, or in the tokens that the answer was given, and it may contain special
        tokens. All but a few tokens have at least one byte; an exception is a space that a decoder strips at the start.
        """
        stops = self.settings.stop
        if stops is None:
            return torch.zeros_like(out.ended[rows])
        window = max(len(stop.encode()) for stop in stops) + SPARE
        tails = out.sequences.response_ids[rows, max(0, step + 1 - window) : step + 1].tolist()
        ends = [[*begun[row], *tail][-window:] for row, tail in zip(rows.tolist(), tails, strict=True)]
        texts = self.policy.tokenizer.batch_decode(ends, skip_special_tokens=False)
        return torch.tensor([any(stop in text for stop in stops) for text in texts], device=rows.device)


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
    cumulative = blocks[torch.arange(len(blocks), device=block.device), block.squeeze(-1)].double().cumsum(-1) + before
    # rounding may put the sum of a block below its edge: then take its last token of positive probability
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    token = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return (block * width + token).squeeze(-1).clamp(max=vocab - 1).to(device)


# -- whether log-probs depend on how they are computed ----------------------------------------------------------------

#: Log-probs of decoding must agree to this share of the largest logit. A correct cache differs by rounding error; a
#: wrong one by about the size of the logits.
AGREEMENT = 0.003

_TAKE = "Use a model with attention over a cache that transformers' DynamicCache holds, such as Llama, Qwen or Gemma."


@torch.no_grad()
def require_decoding(
    policy: Policy, name: str, examples: Sequence[Example], settings: RolloutSettings
) -> tuple[Sequences, Sequences]:
    """Sample a few tokens before a run begins, and compare their log-probs with a forward over each response.

    The batch has prompts of two lengths, one of them shared by two responses, and a response that leaves early. A model
    that keeps state outside the cache, or reads padding, would sample from another policy than the one that learns.

    Args:
        policy: the one that samples and learns.
        name: the model in errors.
        examples: the shortest prompt and the longest.
        settings: how responses are sampled.

    Returns:
        what :func:`require_batches` compares, which the policy has passed: a response to each of the two prompts, and
        the same with the second one as long as the longest that the run may sample.

    Raises:
        ModelError: the model cannot decode with a cache, or its log-probs differ, or see :func:`require_batches`.
    """
    policy, length = replace(policy, precision="fp32"), min(4, settings.max_new_tokens)
    begun, prompt = [[], list(range(1, 1 + length // 2))], torch.tensor([0, 0, 1])
    short = settings.model_copy(update={"max_new_tokens": length, "stop": None, "top_p": 1.0, "top_k": 0})
    try:
        ids, mask = policy.encode(examples, short, begun)
        decoder, prefixes = Decoder(policy, short, 0, ["logprobs"]), [begun[row] for row in prompt.tolist()]
        room = torch.tensor([length - len(tokens) for tokens in prefixes])
        out = decoder.batch(ids, mask, prompt, torch.arange(len(room)), room, prefixes)
        forward = policy.evidence(out.sequences, {"logprobs"}, 1, temperature=settings.temperature)
    except DataError:
        raise
    except Exception as error:  # models raise errors of many types for unknown arguments
        raise ModelError(
            f"'{name}' cannot decode with a cache of keys and values: {first_line(error)}. {_TAKE}"
        ) from error
    pair, longest = out.sequences.rows(torch.tensor([0, 2])), settings.max_new_tokens - length // 2
    padding = 0, max(0, longest - pair.response_ids.shape[1])
    tokens, mask = pad(pair.response_ids, padding, value=int(pair.prompt_ids[1, -1])), pad(pair.response_mask, padding)
    mask[1, :longest] = True
    trial = pair, replace(pair, response_ids=tokens, response_mask=mask)
    largest = require_batches(policy, name, trial, settings.temperature)
    gap = float((out.signals["logprobs"] - forward["logprobs"]).abs().max())
    if gap * settings.temperature > AGREEMENT * largest:  # NaN weights pass: the first step names them
        raise ModelError(
            f"'{name}' gives other log-probs when it decodes with a cache and padded prompts than in one forward, by "
            f"up to {gap:.3g} nats: it would sample from a policy other than the one that learns. {_TAKE}"
        )
    return trial


@torch.no_grad()
def require_batches(policy: Policy, name: str, trial: tuple[Sequences, Sequences], temperature: float) -> float:
    """Compare the log-probs of two responses alone with those in one batch, and beside the end of a longer response.

    A model that reads the length of other rows, or of what follows, would learn from another policy than the one that
    sampled, and batch sizes would change the result. This takes four forwards without gradient, one of them at the
    full length, in float32: the rounding of bfloat16 is 65,536 times as large, and hides such differences.

    The tolerance is of rounding alone: after n roundings to 24 bits on the way to a logit of size m, two computations
    differ by less than ``4 sqrt(n) 2^-24 m``, five standard deviations. A layer has about 8 sums over its width and
    one over the length. The bits are fewer where torch's precision of float32 products is below "highest".

    Args:
        policy: any, such as a reference.
        name: the model in errors.
        trial: see :func:`require_decoding`.
        temperature: the number by which logits are divided before the log-probs.

    Returns:
        the largest logit.

    Raises:
        ModelError: the log-probs differ; names the kind of the model.
    """
    policy, (pair, full) = replace(policy, precision="fp32"), trial
    single, paired, padded = (
        policy.evidence(sequences, {"logprobs"}, size, temperature=temperature)["logprobs"]
        for sequences, size in ((pair, 1), (pair, 2), (full, 2))
    )
    last, config = sent(pair.prompt_ids[-1:, -8:], policy.device), policy.model.config.get_text_config()
    largest = float(policy.model(input_ids=last, use_cache=False).logits.abs().max())
    gaps = torch.stack([paired, padded[:, : pair.response_ids.shape[1]]]) - single
    gap = float((gaps * pair.response_mask).abs().max())
    length = sum(part.shape[1] for part in (full.prompt_ids, full.response_ids))
    roundings = config.num_hidden_layers * (8 * config.hidden_size + length)
    bits = {"highest": 24, "high": 11}.get(torch.get_float32_matmul_precision(), 8)
    tolerance = 4 * roundings**0.5 * 2.0**-bits * largest / temperature
    if gap > tolerance:
        raise ModelError(
            f"'{name}' (model_type {config.model_type!r}) gives a response other log-probs beside a longer one than "
            f"alone, by up to {gap:.3g} nats, where rounding explains {tolerance:.1g}: batch sizes would change the "
            f"result. Take another model, or shorten prompts and rollout.max_new_tokens, now {length} together."
        )
    return largest
