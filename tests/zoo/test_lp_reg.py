"""Lp-Reg's form 'paper' is the divergence that the paper takes over the whole vocabulary."""

import math

import torch
from torch import Tensor

from rlstab import LpReg, PolicyOutputs, TokenBatch, compose
from rlstab.signals import token_signals_from_logits
from tests.tolerances import rounding

TOKENS, VOCABULARY = 4000, 200
METHOD = LpReg(share=0.5, min_p=0.02, ratio_cap=10.0)


def ours(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """The loss of the library, on-policy."""
    names = {"logprobs", "max_logprobs", "log_kept_mass"}
    signals = token_signals_from_logits(logits, tokens, needs=names, min_p=METHOD.min_p)
    live = {name: getattr(signals, name)[None] for name in names}
    max_logprobs, old = live.pop("max_logprobs").detach(), live["logprobs"].detach()
    mask = torch.ones(1, TOKENS)
    batch = TokenBatch.from_padded(
        response_mask=mask, advantages=advantages[None], old_logprobs=old, max_logprobs=max_logprobs
    )
    return compose(METHOD)(batch, PolicyOutputs.from_padded(batch, **live)).loss


def published(logits: Tensor, tokens: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Policy term and penalty of eq. 6: the forward KL from the filtered policy that made the data, term by term."""
    p, now = logits.detach().softmax(-1), logits.log_softmax(-1)
    kept = p >= METHOD.min_p * p.amax(-1, keepdim=True)
    proxy = torch.where(kept, p, 0.0)
    proxy = proxy / proxy.sum(-1, keepdim=True)
    divergence = (torch.special.xlogy(proxy, proxy) - proxy * now).sum(-1)
    each = torch.arange(TOKENS)
    lowest = p[each, tokens] <= p[each, tokens].sort().values[math.ceil(METHOD.share * TOKENS) - 1]
    selected = lowest & kept[each, tokens] & (advantages < 0)
    ratio = (now[each, tokens] - p[each, tokens].log()).exp()
    return -(ratio * advantages).mean(), (divergence * selected).mean()


def test_on_policy_it_is_the_divergence_over_the_whole_vocabulary() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(TOKENS, VOCABULARY, generator=rng, dtype=torch.float64)).requires_grad_()
    tokens = torch.multinomial(logits.detach().softmax(-1), 1, generator=rng).squeeze(-1)
    advantages = torch.where(torch.rand(TOKENS, generator=rng) < 0.5, 1.0, -1.0).double()
    policy_term, penalty = published(logits, tokens, advantages)
    loss = ours(logits, tokens, advantages)
    # sums over the vocabulary of logits of up to 12, and over the tokens
    close = rounding(torch.float64, 12.0, VOCABULARY + TOKENS + 8)
    assert float((loss - policy_term - penalty).detach().abs()) < close
    mine, theirs = (torch.autograd.grad(value, logits)[0] for value in (loss, policy_term + penalty))
    assert float((mine - theirs).abs().max()) < close
    assert float(penalty.detach()) > 0.001, "enough tokens are under the penalty for the comparison to mean something"
