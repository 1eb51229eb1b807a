"""A sampler of fewer bits: what rounding does to a weight, which weights are rounded, how far the sampler is off."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from rlstab.config.settings import RolloutSettings
from rlstab.tasks import Countdown
from rlstab.train.policy import Policy, load_policy
from rlstab.train.sampler_weights import LARGEST, Sampler, rounded
from rlstab.train.sampling import grouped, sample
from rlstab.train.step import forward_signals

PRECISIONS = ("bf16", "fp8", "int8", "int4")
every = pytest.mark.parametrize("precision", PRECISIONS)
EPS = torch.finfo(torch.float32).eps


def matrix(seed: int = 0, rows: int = 40, width: int = 64) -> Tensor:
    """Rows of different size, one of zeros, one with an outlier, one of tiny numbers."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=draw) * torch.logspace(-6, 3, rows).unsqueeze(1)
    weight[3] = 0
    weight[5, 7] = 1e4
    weight[6] = 1e-30 * torch.randn(width, generator=draw)
    return weight


# -- one weight -------------------------------------------------------------------------------------------------------


def by_hand(row: list[float], precision: str) -> list[float]:
    """The nearest of all numbers of the format, one number after another."""
    if precision == "fp8":
        sizes = [(1 + part / 8) * 2.0**power for power in range(-6, 9) for part in range(8)]
        numbers = [part / 8 * 2.0**-6 for part in range(8)] + [one for one in sizes if one <= 448]
    else:
        numbers = [float(one) for one in range(2 ** (int(precision[3:]) - 1))]
    largest = max(map(abs, row))
    if largest == 0:
        return row
    scale = largest / max(numbers)
    return [math.copysign(min(numbers, key=lambda n: abs(n - abs(one) / scale)) * scale, one) for one in row]


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_it_is_the_nearest_number_of_the_format(precision: str) -> None:
    weight = matrix(1, rows=12, width=16)
    found = rounded(weight, precision)
    expected = torch.tensor([by_hand(row, precision) for row in weight.double().tolist()], dtype=torch.float64)
    # a number in the middle of two, up to the rounding of the scale, may go either way: here none is
    torch.testing.assert_close(found.double(), expected, rtol=4 * EPS, atol=0)


@every
def test_error_bounds(precision: str) -> None:
    weight = matrix()
    error = (rounded(weight, precision).double() - weight.double()).abs()
    largest = weight.double().abs().amax(-1, keepdim=True)
    bound = {
        "bf16": weight.double().abs() * 2.0**-8,  # 8 significant bits: half of the last one
        # 4 significant bits; below 2^-6 of the scaled row, steps of 2^-9
        "fp8": torch.maximum(weight.double().abs() * 2.0**-4, largest / LARGEST["fp8"] * 2.0**-10),
        "int8": largest / 127 / 2,
        "int4": largest / 7 / 2,
    }[precision]
    normal = largest.squeeze(-1) > 1e-20
    assert (error <= bound * (1 + 4 * EPS))[normal].all()
    assert error[normal].max() > 0


@every
def test_rounding_again_changes_nothing(precision: str) -> None:
    """But for the last bit: the scale of the second time is a quotient that was rounded."""
    once = rounded(matrix(), precision)
    torch.testing.assert_close(rounded(once, precision), once, rtol=2 * EPS, atol=0)


@every
def test_fewer_bits_are_further_off(precision: str) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    errors = [float((rounded(weight, one) - weight).norm() / weight.norm()) for one in PRECISIONS]
    place = PRECISIONS.index(precision)
    # int8 beats fp8 on normal weights: it has 7 bits of a row's range, fp8 4 of each number
    expected = {"bf16": (0, 0.003), "fp8": (0.02, 0.04), "int8": (0.004, 0.02), "int4": (0.08, 0.25)}[precision]
    assert expected[0] < errors[place] < expected[1]


@every
def test_zeros_signs_and_largest_of_a_row_stay(precision: str) -> None:
    weight = matrix()
    found = rounded(weight, precision)
    assert not found[3].any()
    assert torch.equal(rounded(-weight, precision), -found)
    assert (found * weight >= 0).all()
    kept = found.abs().amax(-1) / weight.abs().amax(-1)
    assert ((kept - 1).abs()[weight.any(-1)] <= 2.0**-8).all()
    assert torch.isfinite(found).all()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype_shape_and_argument_stay(precision: str, dtype: torch.dtype) -> None:
    weight = matrix(2).to(dtype).reshape(2, 20, 64).requires_grad_()
    before = weight.detach().clone()
    found = rounded(weight, precision)
    assert (found.dtype, found.shape, found.requires_grad) == (dtype, weight.shape, False)
    assert torch.equal(weight, before)
    assert torch.equal(found[1, 3], rounded(weight[1, 3:4], precision)[0])  # a row has its own scale


# -- whose weights ----------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
MODELS = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2)),
}


def of(model: nn.Module) -> Policy:
    return Policy(model.eval(), None, 0, frozenset({1}), "fp32")  # type: ignore[arg-type]  # nothing is decoded


def steps_of(weight: Tensor) -> int:
    """The most different magnitudes in a row."""
    return max(len(row.abs().unique()) for row in weight.reshape(-1, weight.shape[-1]))


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_narrow_and_the_rest_is_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    policy = of(MODELS[name]())
    own = Sampler("int4").refreshed(policy)
    for key, weight in own.model.named_parameters():
        theirs = policy.model.get_parameter(key)
        wide = weight.ndim < 2 or any(one in key for one in ("embed", "lm_head", "wte", "wpe"))
        assert torch.equal(weight, rounded(theirs, "bf16" if wide else "int4")), key
        assert wide or steps_of(weight) <= 8
    assert sum(one.ndim >= 2 for one in own.model.parameters()) > 4


def test_a_tied_head_stays_tied() -> None:
    policy = of(MODELS["tied"]())
    own = Sampler("int8").refreshed(policy)
    head, embeddings = own.model.get_output_embeddings(), own.model.get_input_embeddings()
    assert head.weight is embeddings.weight
    assert head.weight is not policy.model.get_input_embeddings().weight
    assert torch.equal(head.weight, rounded(policy.model.get_input_embeddings().weight, "bf16"))


@every
def test_the_weights_of_the_trainer_are_only_read(precision: str) -> None:
    torch.manual_seed(0)
    policy = of(MODELS["untied"]())
    ids = torch.arange(12).view(2, 6)
    policy.model(input_ids=ids).logits.square().mean().backward()
    before = {key: (one.detach().clone(), one.grad.clone()) for key, one in policy.model.named_parameters()}
    own = Sampler(precision).refreshed(policy)
    assert not any(one.requires_grad or one.grad is not None for one in own.model.parameters())
    for key, one in policy.model.named_parameters():
        assert one.requires_grad
        assert torch.equal(one, before[key][0])
        assert torch.equal(one.grad, before[key][1])
    shared = {one.data_ptr() for one in policy.model.parameters()} & {one.data_ptr() for one in own.model.parameters()}
    assert not shared


def test_it_follows_the_trainer() -> None:
    torch.manual_seed(0)
    policy, sampler = of(MODELS["untied"]()), Sampler("fp8")
    first = sampler.refreshed(policy)
    with torch.no_grad():
        for one in policy.model.parameters():
            one.add_(0.1 * torch.randn_like(one))
    after = sampler.refreshed(policy)
    assert after is first
    fresh = Sampler("fp8").refreshed(policy)
    assert all(
        torch.equal(one, other) for one, other in zip(after.model.parameters(), fresh.model.parameters(), strict=True)
    )


def test_without_a_precision_it_is_the_policy_itself() -> None:
    policy = of(MODELS["tied"]())
    assert Sampler(None).refreshed(policy) is policy


# -- how far off ------------------------------------------------------------------------------------------------------


def gap(policy: Policy, sampler: Policy) -> float:
    """Mean absolute difference of the log-probs of 256 responses, as the sampler reports them and the trainer's."""
    task = Countdown()
    texts = grouped([task.example("train", index).prompt for index in range(32)], 8)
    settings = RolloutSettings(max_new_tokens=24)
    drawn = sample(sampler, texts, torch.arange(256), settings, seed=5, needs={"logprobs"})
    again = forward_signals(policy, drawn.sequences, torch.arange(256), 1.0, {"logprobs"}, {})["logprobs"]
    mask = drawn.sequences.response_mask
    return float((drawn.signals["logprobs"] - again)[mask].abs().mean())


def test_the_gap_grows_as_bits_fall() -> None:
    """On the model that ships. Without rounding the gap is that of float32; int8 has more bits in a row than fp8."""
    policy = load_policy("countdown-tiny")
    found = {one: gap(policy, Sampler(one).refreshed(policy)) for one in (None, *PRECISIONS)}
    in_order = [found[one] for one in (None, "bf16", "int8", "fp8", "int4")]
    assert in_order[0] < 1e-5
    assert all(1.4 * one < other for one, other in itertools.pairwise(in_order))
