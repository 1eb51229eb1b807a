"""Responses to one prompt forward it once: the same signals, gradients and weights from fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlstab.train import shared_prompts
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy, load_policy
from rlstab.train.row_order import in_parts
from rlstab.train.shared_prompts import SharedPrompts
from tests.tolerances import depth, rounding
from tests.train.runs import go, small, weights
from tests.train.test_vocabulary_head import SIZE

GROUP, PROMPTS, WIDTH, LENGTH = 3, 2, 5, 4


@pytest.fixture(scope="module")
def tokens() -> Policy:
    return load_policy("countdown-tiny")


def groups(group: int = GROUP, width: int = WIDTH, length: int = LENGTH) -> Sequences:
    """Two prompts of different lengths with a group of responses of different lengths each."""
    draw = torch.Generator().manual_seed(1)
    of = torch.arange(PROMPTS).repeat_interleave(group)
    prompts = torch.randint(3, 29, (PROMPTS, width), generator=draw)
    there = torch.arange(width) >= torch.tensor([[2], [0]])
    responses = torch.randint(3, 29, (len(of), length), generator=draw)
    lengths = 1 + torch.arange(len(of)) % length
    lengths[0] = length
    return Sequences(prompts[of], there[of], responses, torch.arange(length) < lengths[:, None])


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZE, "num_attention_heads": 4})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE)),
    "positions learnt": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=29, n_embd=16, n_layer=2, n_head=2)),
}


@pytest.mark.parametrize("head", ["hidden states", "logits"])
@pytest.mark.parametrize("name", MODELS)
def test_signals_and_gradients_are_those_of_whole_rows(name: str, head: str, tokens: Policy) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for one in model.parameters():
        one.data.mul_(4.0 if one.ndim > 1 else 1.0)  # tokens depend on each other
    policy = replace(tokens, model=model)
    assert policy.head is not None
    if head == "logits":
        policy.__dict__["head"] = None
    sequences = groups()
    index = sequences.response_mask.reshape(-1).nonzero().squeeze(-1)
    shared = policy.shared_prompts(sequences)
    assert shared is not None
    seen: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: seen.append(given[0].numel())
    )

    def found(shared: SharedPrompts | None) -> tuple[Tensor, list[Tensor]]:
        asked: dict[str, Any] = {"temperature": 0.7, "needs": {"logprobs", "entropies"}, "options": {}}
        signals = policy.signals(sequences, index, **asked, shared=shared)
        both = torch.stack([one for one in (signals.logprobs, signals.entropies) if one is not None])
        loss = (both * torch.linspace(-1, 2, both.numel()).view_as(both)).sum()
        model.zero_grad()
        loss.backward()
        return both.detach(), [one.grad for one in model.parameters() if one.grad is not None]

    whole, gradients = found(None)
    once, same = found(shared)
    handle.remove()
    rows = GROUP * PROMPTS
    assert seen == [rows * (WIDTH + LENGTH), PROMPTS * WIDTH, rows * LENGTH], "each prompt was forwarded once"
    terms = depth(model, WIDTH + LENGTH) if name != "positions learnt" else 500
    torch.testing.assert_close(once, whole, rtol=0, atol=rounding(torch.float32, 16.0, terms))
    for one, other in zip(same, gradients, strict=True):
        size = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=rounding(torch.float32, max(size, 1.0), 4 * terms))


def test_equal_prompts_share_whatever_stands_in_their_padding() -> None:
    sequences = groups()
    noisy = replace(
        sequences,
        prompt_ids=torch.where(sequences.prompt_mask, sequences.prompt_ids, torch.arange(6)[:, None]),
    )
    shared = SharedPrompts.among(noisy)
    assert shared is not None
    assert sorted(shared.rows.tolist()) == [0, 3]
    assert shared.rows[shared.of].tolist() == [0, 0, 0, 3, 3, 3]


def test_a_prompt_that_continues_another_is_its_own() -> None:
    sequences = groups()
    ids, there = sequences.prompt_ids.clone(), sequences.prompt_mask.clone()
    there[1, 1] = True  # of the prompt that leaves room
    shared = SharedPrompts.among(replace(sequences, prompt_ids=ids, prompt_mask=there))
    assert shared is not None
    assert shared.rows[shared.of].tolist() == [0, 1, 0, 3, 3, 3]


@pytest.mark.parametrize(("group", "width", "length"), [(1, 5, 4), (3, 5, 60)], ids=["single", "short prompts"])
def test_few_saved_tokens_are_not_worth_a_second_forward(group: int, width: int, length: int) -> None:
    assert SharedPrompts.among(groups(group, width, length)) is None
    assert SharedPrompts.among(groups(3, 5, 4)) is not None


@pytest.mark.parametrize("kind", ["windows", "convolutions", "checkpointing"])
def test_models_that_keep_more_than_keys_and_values_forward_whole_rows(kind: str, tokens: Policy) -> None:
    model: PreTrainedModel
    if kind == "windows":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, sliding_window=4, query_pre_attn_scalar=8))
    elif kind == "convolutions":
        model = Lfm2ForCausalLM(Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZE))
    policy = replace(tokens, model=model)
    assert (policy.shared_prompts(groups()) is not None) == (kind == "checkpointing")
    if kind == "checkpointing":
        policy.checkpoint_gradients()
        assert policy.shared_prompts(groups()) is None


def test_bfloat16_is_as_exact_as_with_whole_rows(tokens: Policy) -> None:
    sequences = groups()
    index = sequences.response_mask.reshape(-1).nonzero().squeeze(-1)
    narrow, shared = replace(tokens, precision="bf16"), tokens.shared_prompts(sequences)

    def found(policy: Policy, shared: SharedPrompts | None) -> tuple[Tensor, Tensor]:
        asked: dict[str, Any] = {"temperature": 1.0, "needs": {"logprobs"}, "options": {}}
        policy.model.zero_grad()
        logprobs = policy.signals(sequences, index, **asked, shared=shared).logprobs
        assert logprobs is not None
        logprobs.mean().backward()
        gradient = torch.cat([one.grad.flatten() for one in policy.model.parameters() if one.grad is not None])
        policy.model.zero_grad()
        return logprobs.detach(), gradient

    exact, whole, once = found(tokens, None), found(narrow, None), found(narrow, shared)
    for one, other, reference in zip(once, whole, exact, strict=True):
        assert 0 < (one - reference).norm() < 1.5 * (other - reference).norm()


def test_no_gradient_waits_for_that_of_the_prompts(tokens: Policy) -> None:
    """In one graph autograd would add up what responses and prompts give to a weight, beside the gradient it has."""
    sequences = groups()
    index = sequences.response_mask.reshape(-1).nonzero().squeeze(-1)
    asked: dict[str, Any] = {"temperature": 1.0, "needs": {"logprobs"}, "options": {}}
    layer = dict(tokens.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    times: list[Tensor] = []
    handle = layer.register_post_accumulate_grad_hook(lambda weight: times.append(weight.grad.clone()))
    for shared in (None, tokens.shared_prompts(sequences)):
        logprobs = tokens.signals(sequences, index, **asked, shared=shared).logprobs
        assert logprobs is not None
        tokens.model.zero_grad()
        logprobs.sum().backward()
    handle.remove()
    tokens.model.zero_grad()
    assert len(times) == 1 + 2
    assert not torch.equal(times[1], times[2])


def test_a_run_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of `countdown` are as long as their answers, so that sharing pays; parts cut groups apart."""
    saved: list[int] = []
    forward = shared_prompts.forward_shared

    def spied(*given: Any) -> Tensor:
        saved.append(len(given[-1].of) - len(given[-1].rows))
        return forward(*given)

    monkeypatch.setattr("rlstab.train.policy.forward_shared", spied)
    changes = {"optimisation__micro_batch_size": 6, "optimisation__eps": 1e-4}
    go(small(tmp_path / "shared", ["clip_higher", "s2t"], **changes))
    assert min(saved, default=0) > 0
    monkeypatch.setattr(Policy, "shared_prompts", lambda self, sequences: None)
    count = len(saved)
    go(small(tmp_path / "whole", ["clip_higher", "s2t"], **changes))
    assert len(saved) == count
    one, other = weights(tmp_path / "shared"), weights(tmp_path / "whole")
    start = load_policy("countdown-tiny").model.state_dict()
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 1e-3
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-5


def rows_of(prompt: list[int], response: list[int]) -> Sequences:
    """Rows of which only the lengths matter."""
    width, length = max(prompt), max(response)
    there = torch.arange(width) >= width - torch.tensor(prompt)[:, None]
    answered = torch.arange(length) < torch.tensor(response)[:, None]
    return Sequences(torch.zeros_like(there).long(), there, torch.zeros_like(answered).long(), answered)


@pytest.mark.parametrize(
    ("prompt", "order"),
    [(2, [1, 3, 5, 0, 2, 4]), (40, [1, 0, 3, 2, 5, 4])],
    ids=["short prompts: by length", "long prompts: by group"],
)
def test_rows_are_ordered_for_the_fewest_tokens(prompt: int, order: list[int]) -> None:
    group_ids = torch.tensor([7, 7, 3, 3, 5, 5])
    response = [3, 30, 2, 29, 1, 28]
    sequences = rows_of([prompt] * 6, response)
    rows = torch.arange(6)
    found = in_parts(sequences, torch.ones(6), group_ids, rows, 2)
    assert found.tolist() == order
    assert in_parts(sequences, torch.ones(6), group_ids, rows, 6).tolist() == [1, 3, 5, 0, 2, 4], "one part: no choice"
    assert in_parts(sequences, torch.ones(6), group_ids, rows[:0], 2).tolist() == []
    without = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    assert set(in_parts(sequences, without, group_ids, rows, 2)[-2:].tolist()) == {0, 1}, "no advantage: last"
