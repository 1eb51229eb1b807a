"""The head is found by configuration and confirmed by the logits; what is more than a product falls back to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from rlstab.signals.vocabulary_head import find_head
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy, load_policy
from tests.tolerances import rounding

SIZE = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SIZE)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=True)),
    "capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZE, final_logit_softcapping=0.5)),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SIZE, logit_scale=0.25)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZE, logits_scaling=4.0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=29, n_embd=16, n_layer=2, n_head=2)),
}


@pytest.fixture(scope="module")
def tokens() -> Policy:
    return load_policy("countdown-tiny")


@pytest.mark.parametrize("name", MODELS)
def test_signals_from_hidden_states_equal_those_from_logits(name: str, tokens: Policy) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for one in model.parameters():
        one.data.mul_(8.0)  # peaked distributions: a cap or a scale that is missed shows
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones((3, 4), dtype=torch.bool)
    sequences = Sequences(
        torch.randint(3, 29, (3, 5), generator=draw),
        torch.ones((3, 5), dtype=torch.bool),
        torch.randint(3, 29, (3, 4), generator=draw),
        mask,
    )
    found = {}
    for kind in ("hidden", "logits"):
        policy = replace(tokens, model=model)
        assert policy.head is not None
        if kind == "logits":
            policy.__dict__["head"] = None
        model.zero_grad()
        signals = policy.signals(
            sequences, torch.arange(12), temperature=0.7, needs={"logprobs", "entropies"}, options={}
        )
        (signals.logprobs.sum() + signals.entropies.square().sum()).backward()
        found[kind] = signals, [one.grad.clone() for one in model.parameters() if one.grad is not None]
    # logits of at most 20, each a sum over the width, and the softmax over the vocabulary
    close = rounding(torch.float32, 20 / 0.7, SIZE["hidden_size"] + SIZE["vocab_size"] + 8)
    for field in ("logprobs", "entropies"):
        one, other = (getattr(found[kind][0], field) for kind in ("hidden", "logits"))
        torch.testing.assert_close(one, other, rtol=0, atol=close)
    assert len(found["hidden"][1]) == len(found["logits"][1])
    for one, other in zip(found["hidden"][1], found["logits"][1], strict=True):
        assert (one - other).norm() <= close * other.norm()  # the error of a probability is relative


@pytest.mark.parametrize("name", ["capped", "divided"])
def test_autocast_does_not_hide_a_head(name: str, tokens: Policy) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for one in model.parameters():
        one.data.mul_(8.0)
    model.config.logits_scaling = 13.0 if name == "divided" else None  # bfloat16 rounds this quotient
    assert find_head(model) is not None
    with replace(tokens, precision="bf16").autocast():
        assert find_head(model) is not None


def test_a_head_that_does_more_than_a_product_falls_back_to_logits() -> None:
    torch.manual_seed(0)
    hooked = MODELS["plain"]()
    hooked.get_output_embeddings().register_forward_hook(lambda module, args, out: out * 2)
    assert find_head(hooked) is None

    replaced = MODELS["plain"]()
    head = replaced.get_output_embeddings()
    product = head.forward
    head.forward = lambda hidden: product(hidden) * 2
    assert find_head(replaced) is None

    shifted = MODELS["plain"]()
    forward = shifted.forward
    shifted.forward = lambda *args, **options: _shifted(forward(*args, **options))
    assert find_head(shifted) is None

    wrapped = MODELS["plain"]()
    wrapped.set_output_embeddings(Doubled(16, 29))
    assert find_head(wrapped) is None


class Doubled(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def _shifted(out):
    out.logits = out.logits + torch.arange(29.0)
    return out


def test_gradient_checkpointing_brings_no_dropout_back(tokens: Policy) -> None:
    torch.manual_seed(0)
    size = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "ffn_dim": 32,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
    }
    model = OPTForCausalLM(OPTConfig(vocab_size=29, max_position_embeddings=32, dropout=0.5, layerdrop=0.5, **size))
    policy = replace(tokens, model=model.eval())
    ids = torch.arange(3, 11).view(1, 8)
    rows = Sequences(ids, ids > 0, ids, ids > 0)
    found = []
    for _ in range(2):
        model.zero_grad()
        policy.signals(rows, torch.arange(8), temperature=1.0, needs={"logprobs"}, options={}).logprobs.sum().backward()
        found.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
        policy.checkpoint_gradients()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient() -> None:
    found = []
    for checkpointed in (False, True):
        policy = load_policy("countdown-tiny")
        assert policy.head is not None  # its probe runs the layers too
        calls = []
        layer = policy.model.base_model.layers[0]
        layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointed:
            policy.checkpoint_gradients()
        ids = torch.arange(3, 11).view(1, 8)
        mask = torch.ones_like(ids, dtype=torch.bool)
        signals = policy.signals(
            Sequences(ids, mask, ids, mask), torch.arange(8), temperature=1.0, needs={"logprobs"}, options={}
        )
        forward = len(calls)
        signals.logprobs.sum().backward()
        assert (forward, len(calls)) == (1, 2 if checkpointed else 1)
        assert not policy.model.training
        assert not layer.training
        found.append([one.grad for one in policy.model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
