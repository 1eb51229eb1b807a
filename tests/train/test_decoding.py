"""A model that the sampler cannot decode with is refused before it samples from another policy than it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PreTrainedModel,
)

from rlstab.config.settings import RolloutSettings
from rlstab.errors import ModelError
from rlstab.train.decoding import require_decoding
from rlstab.train.policy import Policy, load_policy
from rlstab.train.sampling import sample
from rlstab.train.step import forward_signals
from tests.tolerances import depth, rounding
from tests.train.test_vocabulary_head import SIZE as HEAD_SIZE

SIZE = {**HEAD_SIZE, "eos_token_id": 19}  # that of the tokenizer


@pytest.fixture(scope="module")
def tokens() -> Policy:
    return load_policy("countdown-tiny")


def peaked(model: PreTrainedModel) -> PreTrainedModel:
    """Weights that make each token matter."""
    draw = torch.Generator().manual_seed(0)
    for one in model.parameters():
        if one.ndim >= 2:
            one.data.copy_(torch.randn(one.shape, generator=draw) * 0.35)
    return model.eval()


@pytest.mark.parametrize("kind", ["windows", "convolutions"])
def test_rows_leave_every_cache_that_is_accepted(kind: str, tokens: Policy) -> None:
    model = (
        Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, sliding_window=4, query_pre_attn_scalar=8))
        if kind == "windows"
        else Lfm2ForCausalLM(Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]))
    )
    policy = replace(tokens, model=peaked(model))
    require_decoding(policy, "x")
    texts = [text for text in ("1,2>3", "12,3,4,5>6", "7") for _ in range(4)]
    rollout = sample(policy, texts, torch.arange(12), RolloutSettings(max_new_tokens=24), seed=1)
    lengths = rollout.sequences.response_mask.sum(-1)
    assert kind == "windows" or lengths.min() < lengths.max(), "some leave before others"
    again = forward_signals(policy, rollout.sequences, torch.arange(12), 1.0, {"logprobs"}, {})
    close = rounding(torch.float32, 8.0, depth(policy.model, 34))  # the logits are below 8
    torch.testing.assert_close(rollout.signals["logprobs"], again["logprobs"], atol=close, rtol=0)


def test_a_state_that_is_not_in_the_cache_is_refused(tokens: Policy) -> None:
    config = Mamba2Config(
        vocab_size=29, hidden_size=16, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=8, n_groups=1
    )
    policy = replace(tokens, model=peaked(Mamba2ForCausalLM(config)))
    with pytest.raises(ModelError, match=r"^'x' gives other log-probs when it decodes .* by up to \d.* nats: it would"):
        require_decoding(policy, "x")


def test_a_model_that_wants_a_cache_of_its_own_is_refused(tokens: Policy) -> None:
    policy = replace(tokens, model=MiniMaxForCausalLM(MiniMaxConfig(**SIZE, num_local_experts=2)).eval())
    with pytest.raises(ModelError, match=r"^'x' cannot decode with a cache of keys and values: MiniMax uses cache of"):
        require_decoding(policy, "x")
