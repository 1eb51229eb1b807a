"""Lp-Reg's form 'paper' is the divergence that the paper takes over the whole vocabulary."""

import math

import torch
from torch import Tensor

from rlstab import LpReg, PolicyOutputs, TokenBatch, compose
from rlstab.signals import token_signals_from_logits
from tests.tolerances import rounding

TOKENS, VOCABULARY, SCALE = 4000, 200, 2.0
METHOD = LpReg(share=0.5, min_p=0.02, ratio_cap=10.0)


def drawn(drift: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of the policy that made the data, logits that drifted from them, tokens of the first, advantages."""
    rng = torch.Generator().manual_seed(seed)
    old = SCALE * torch.randn(TOKENS, VOCABULARY, generator=rng, dtype=torch.float64)
    live = old + drift * torch.randn(TOKENS, VOCABULARY, generator=rng, dtype=torch.float64)
    tokens = torch.multinomial(old.softmax(-1), 1, generator=rng).squeeze(-1)
    return old, live.requires_grad_(), tokens, torch.where(torch.rand(TOKENS, generator=rng) < 0.5, 1.0, -1.0).double()


def ours(old: Tensor, live: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """The loss of the library."""
    needs = {"logprobs", "max_logprobs"}, {"logprobs", "log_kept_mass"}
    before = token_signals_from_logits(old, tokens, needs=needs[0])
    after = token_signals_from_logits(live, tokens, needs=needs[1], min_p=METHOD.min_p)
    evidence, outputs = (
        {name: getattr(signals, name)[None] for name in names}
        for signals, names in zip((before, after), needs, strict=True)
    )
    evidence["old_logprobs"] = evidence.pop("logprobs")
    batch = TokenBatch.from_padded(response_mask=torch.ones(1, TOKENS), advantages=advantages[None], **evidence)
    return compose(METHOD)(batch, PolicyOutputs.from_padded(batch, **outputs)).loss


def published(old: Tensor, live: Tensor, tokens: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Policy term and penalty of eq. 6: the forward KL from the filtered policy that made the data, term by term."""
    p, now = old.softmax(-1), live.log_softmax(-1)
    kept = p >= METHOD.min_p * p.amax(-1, keepdim=True)
    proxy = torch.where(kept, p, 0.0)
    proxy = proxy / proxy.sum(-1, keepdim=True)
    divergence = (torch.special.xlogy(proxy, proxy) - proxy * now).sum(-1)
    each = torch.arange(TOKENS)
    lowest = p[each, tokens] <= p[each, tokens].sort().values[math.ceil(METHOD.share * TOKENS) - 1]
    selected = lowest & kept[each, tokens] & (advantages < 0)
    ratio = (now[each, tokens] - p[each, tokens].log()).exp()
    assert METHOD.ratio_cap is not None
    return -(ratio.clamp(max=METHOD.ratio_cap) * advantages).mean(), (divergence * selected).mean()


def gradient(loss: Tensor, live: Tensor) -> Tensor:
    return torch.autograd.grad(loss, live, retain_graph=True)[0]


def test_on_policy_it_is_the_divergence_over_the_whole_vocabulary() -> None:
    old, live, tokens, advantages = drawn(0.0, 0)
    policy_term, penalty = published(old, live, tokens, advantages)
    loss = ours(old, live, tokens, advantages)
    # sums over the vocabulary of logits of up to 12, and over the tokens
    close = rounding(torch.float64, 12.0, VOCABULARY + TOKENS + 8)
    assert float((loss - policy_term - penalty).detach().abs()) < close
    assert float((gradient(loss, live) - gradient(policy_term + penalty, live)).abs().max()) < close
    assert float(penalty.detach()) > 0.001, "so many tokens are under the penalty that the comparison says something"
