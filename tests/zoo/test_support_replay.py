"""Over the tokens that the sampler kept, both sides of the ratio are what was sampled: by hand and by enumeration."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlstab import ClipHigher, LpReg, PolicyOutputs, SupportReplay, TokenBatch, compose, observe, within
from rlstab.core.objective import TokenObjective
from rlstab.errors import Conflict, MissingSignal
from rlstab.signals import token_signals_from_logits
from rlstab.signals.support import drawn_from

VOCAB, LENGTH = 5, 2


def table(seed: int) -> Tensor:
    """``(VOCAB + 1, VOCAB)`` float64 logits: of the first token, and of the second after each first one."""
    return 1.5 * torch.randn(VOCAB + 1, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(logits: Tensor, kept: Tensor) -> list[float]:
    """The distribution over the tokens that were kept, token by token."""
    weights = [math.exp(x) if token in kept.tolist() else 0.0 for token, x in enumerate(logits.tolist())]
    return [weight / math.fsum(weights) for weight in weights]


def gradient(objective: TokenObjective, live: Tensor, sampler: Tensor, top_p: float, length: int = LENGTH) -> Tensor:
    """The mean gradient of the loss over all responses that the sampler can draw, by enumeration."""
    supports = drawn_from(sampler, top_p, 0)
    drawn = [cut(logits, kept) for logits, kept in zip(sampler, supports, strict=True)]
    responses = [tokens for tokens in itertools.product(range(VOCAB), repeat=length)]
    contexts = torch.tensor([[0, *(token + 1 for token in tokens[:-1])] for tokens in responses])
    ids = torch.tensor(responses)
    chances = torch.tensor(
        [
            [drawn[context][token] for context, token in zip(row, tokens, strict=True)]
            for row, tokens in zip(contexts.tolist(), responses, strict=True)
        ],
        dtype=torch.float64,
    )
    can = chances.prod(1) > 0
    contexts, ids, chances = contexts[can], ids[can], chances[can]
    # the loss is linear in the advantages: each response counts by its probability
    advantages = reward(ids) * chances.prod(1) * len(ids)
    leaf = live.clone().requires_grad_()
    signals = token_signals_from_logits(
        leaf[contexts.flatten()],
        ids.flatten(),
        needs={"logprobs", "log_support_mass"},
        support=supports[contexts.flatten()],
    )
    batch = TokenBatch.from_padded(
        response_mask=torch.ones_like(ids), advantages=advantages, old_logprobs=chances.log()
    )
    outputs = {name: getattr(signals, name).view(ids.shape) for name in ("logprobs", "log_support_mass")}
    objective(batch, PolicyOutputs.from_padded(batch, **outputs)).loss.backward()
    assert leaf.grad is not None
    return -length * leaf.grad


def reward(ids: Tensor) -> Tensor:
    return (ids * torch.tensor([1.0, -0.7][: ids.shape[1]], dtype=torch.float64)).sum(1).cos()


def true_gradient(live: Tensor, sampler: Tensor, top_p: float, length: int = LENGTH) -> Tensor:
    """That of the expected reward of the policy cut to the sampler's supports, which are constant."""
    leaf, supports = live.clone().requires_grad_(), drawn_from(sampler, top_p, 0)
    outside = torch.ones(leaf.shape, dtype=torch.bool)
    for context, kept in enumerate(supports.tolist()):
        outside[context, [token for token in kept if token >= 0]] = False
    chances = leaf.masked_fill(outside, -math.inf).softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=length):
        chance = chances[0, tokens[0]] * (chances[tokens[0] + 1, tokens[1]] if length == 2 else 1.0)
        total = total + chance * reward(torch.tensor([tokens]))[0]
    total.backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("top_p", [0.6, 0.8])
@pytest.mark.parametrize(("length", "moved"), [(2, 0.0), (1, 0.6)], ids=["responses", "a policy that has moved"])
def test_the_gradient_is_that_of_the_policy_over_what_was_kept(top_p: float, length: int, moved: float) -> None:
    sampler = table(1)
    live = sampler + moved * table(2)
    wanted = true_gradient(live, sampler, top_p, length)
    torch.testing.assert_close(
        gradient(compose(SupportReplay()), live, sampler, top_p, length), wanted, rtol=0, atol=1e-12
    )
    without = gradient(compose(), live, sampler, top_p, length)
    assert (without - wanted).norm() > 0.1 * wanted.norm()


def test_a_ratio_is_that_of_the_two_distributions_by_hand() -> None:
    sampler, live = table(3)[0], table(4)[0]
    (kept,) = drawn_from(sampler.unsqueeze(0), 0.8, 0)
    old, new = cut(sampler, kept), cut(live, kept)
    for token in (token for token in kept.tolist() if token >= 0):
        made = token_signals_from_logits(
            live.unsqueeze(0), torch.tensor([token]), needs={"logprobs", "log_support_mass"}, support=kept.unsqueeze(0)
        )
        policy = PolicyOutputs(made.logprobs, log_support_mass=made.log_support_mass)  # type: ignore[arg-type]  # asked for, so not None
        assert policy.over_support().logprobs.item() == pytest.approx(math.log(new[token]), abs=1e-12)
        batch = TokenBatch.from_padded(
            response_mask=torch.ones(1, 1),
            advantages=torch.ones(1, dtype=torch.float64),
            old_logprobs=torch.tensor([[old[token]]], dtype=torch.float64).log(),
        )
        with torch.no_grad():
            report = compose(SupportReplay(), ClipHigher())(batch, policy).metrics()
        assert report["ratio/mean"] == pytest.approx(new[token] / old[token], abs=1e-12)
        mass = math.fsum(live.softmax(0)[token] for token in kept.tolist() if token >= 0)
        assert report["ratio/support_mass"] == pytest.approx(mass, abs=1e-12)


def test_top_k_goes_first_and_the_likeliest_token_is_always_kept() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.9, 0.03, 0.02]]).log()
    assert drawn_from(logits, 0.8, 0).tolist() == [[0, 1], [1, -1]]
    assert drawn_from(logits, 0.81, 0).tolist() == [[0, 1, 2], [1, -1, -1]]
    assert drawn_from(logits, 1.0, 3).tolist() == [[0, 1, 2], [1, 0, 2]]
    assert drawn_from(logits, 0.6, 2).tolist() == [[0], [1]]  # 0.5 is 0.625 of what top-k left
    assert drawn_from(logits[:0], 0.5, 0).shape == (0, 0)


def test_what_is_missing_or_does_not_fit_is_refused() -> None:
    batch = TokenBatch.from_padded(
        response_mask=torch.ones(1, 2), advantages=torch.ones(1), old_logprobs=torch.full((1, 2), -1.0)
    )
    live = torch.full((2,), -1.0, requires_grad=True)
    with pytest.raises(MissingSignal, match=r"'log_support_mass', .* without it\. Pass .*token_signals"):
        compose(SupportReplay())(batch, PolicyOutputs(live))
    for wrong in (0.8, math.nan):  # a probability for its logarithm
        plan = compose(SupportReplay())
        with pytest.raises(Exception, match="NaN, Inf or impossible"):
            plan(batch, PolicyOutputs(live, log_support_mass=torch.full((2,), wrong)))
    with pytest.raises(Conflict, match="support_replay"):
        observe(SupportReplay())
    with pytest.raises(Conflict, match="support_replay"):
        within(LpReg(), SupportReplay())
    with pytest.raises(Conflict, match="whole vocabulary"):
        compose(LpReg(), SupportReplay())
