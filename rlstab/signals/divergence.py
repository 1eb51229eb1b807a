"""The divergence of the policy from a teacher: over the whole vocabulary, or over the teacher's likeliest tokens.

With p the policy, q the teacher, m = (1 - beta) p + beta q:

    D = KL(q || p)                                      beta = 0, forward
      = KL(p || q)                                      beta = 1, reverse
      = beta KL(q || m) + (1 - beta) KL(p || m)         between; 1/2 is Jensen-Shannon

Source: R. Agarwal et al., "On-Policy Distillation of Language Models", 2023, arXiv 2306.13649 (eq. 1), with p and q in
their places. As in an entropy, a log-prob below -1e4 counts as -1e4.

With c_v = dD / dp_v, dD / dx_v = p_v (c_v - centre), where the centre is the mean of c under p. The forward keeps a few
numbers per row, from which the backward makes the gradient of any tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from rlstab.core.batch import widened
from rlstab.signals.support import members
from rlstab.signals.tile import FLOOR, Buffers, Target, spans
from rlstab.signals.tiled_head import Head, multiplied

#: Logits of a teacher that are held while its likeliest tokens are found; chosen, not measured.
LOGITS = 1 << 22


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's hidden states and vocabulary head, read by tiles as the policy's are. Nothing in it gets a gradient.

    Attributes:
        hidden: ``(N, d')``, of the same rows as the policy's.
        weight: ``(V', d')``, where V' is at least the policy's V. A larger one is cut and the teacher renormalised over
            the first V tokens: models with one tokenizer often pad their vocabularies to different sizes.
        bias: ``(V',)``, or None.
        logit_scale, softcap: what changes its logits, as in :func:`rlstab.signals.token_signals`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    def target(self, beta: float, vocab: int, temperature: float | Tensor, columns: int) -> _FromHead:
        """What a pass compares the policy with."""
        bias = None if self.bias is None else self.bias.detach()[:vocab]
        head = Head(self.weight.detach()[:vocab], bias, temperature, self.logit_scale, self.softcap)
        return _FromHead(beta, multiplied(self.hidden.detach()), head, columns)


@dataclass(frozen=True, eq=False)
class TopK:
    """A teacher's likeliest tokens, as a server or a file gives them. All other tokens together count as one outcome.

    The divergence over these ``k + 1`` outcomes is at most that over the vocabulary, and equal to it at ``k = V``.

    Attributes:
        ids: ``(N, k)`` int64, different tokens in each row.
        logprobs: ``(N, k)``, nats, at the temperature of the policy; -inf for an entry that is absent, whatever its id.
    """

    ids: Tensor
    logprobs: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, teacher: Teacher, k: int, vocab: int, temperature: float) -> TopK:
        """The ``k`` likeliest tokens of a teacher, for each of its rows."""
        height = max(1, LOGITS // vocab)
        target, buffers = teacher.target(0.0, vocab, temperature, LOGITS // height), Buffers(teacher.hidden, LOGITS)
        rows = list(spans(teacher.hidden.shape[0], height)) or [slice(0)]
        best = [target.logprobs(span, buffers)[0].topk(min(k, vocab)) for span in rows]
        return cls(torch.cat([tile.indices for tile in best]), torch.cat([tile.values for tile in best]))

    def target(self, beta: float, vocab: int, temperature: float | Tensor, columns: int) -> _FromTopK:
        """What a pass compares the policy with."""
        logprobs = widened(self.logprobs.detach())
        mass = logprobs.exp().sum(-1, keepdim=True)
        if self.ids.shape[1] < vocab:  # what is left is not known below the rounding of the sum
            rest = torch.log1p(-mass.clamp(max=1.0 - torch.finfo(mass.dtype).eps))
        else:
            rest = torch.full_like(mass, -torch.inf)
        return _FromTopK(beta, self.ids, torch.cat([logprobs, rest], dim=-1))


#: Where the distribution of a teacher comes from.
Source: TypeAlias = Teacher | TopK


@dataclass(frozen=True, eq=False)
class _FromHead(Target):
    """Keeps of each row the log of the teacher's sum, and the centre."""

    beta: float
    hidden: Tensor
    head: Head
    columns: int
    kept: int = 2

    def logprobs(self, span: slice, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """``(n, V)`` log-probs in a buffer, and the ``(n, 1)`` log of the sum that they were divided by."""
        logits = self.head.whole(self.hidden, span, self.columns, buffers)
        log_sum = logits.logsumexp(-1, keepdim=True)
        return logits.sub_(log_sum), log_sum

    def measure(self, policy: Tensor, span: slice, buffers: Buffers) -> tuple[Tensor, Tensor]:
        teacher, log_sum = self.logprobs(span, buffers)
        value, centre = divergence(policy, teacher, self.beta)
        return value, torch.cat([log_sum, centre.unsqueeze(1)], dim=1)

    def pull(self, policy: Tensor, kept: Tensor, span: slice, columns: slice, buffers: Buffers) -> Tensor:
        teacher = self.head.logits(self.hidden, span, columns, buffers).sub_(kept[:, :1])
        return _slope(policy, teacher, kept[:, 1], self.beta)

    def pick(self, index: Tensor) -> _FromHead:
        return replace(self, hidden=self.hidden[index], head=self.head.pick(index))


@dataclass(frozen=True, eq=False)
class _FromTopK(Target):
    """Keeps the policy's log-probs of the ``k + 1`` outcomes; ``logprobs`` are those of the teacher."""

    beta: float
    ids: Tensor
    logprobs: Tensor

    @property
    def kept(self) -> int:
        return self.logprobs.shape[1]

    def measure(self, policy: Tensor, span: slice, buffers: Buffers) -> tuple[Tensor, Tensor]:
        ids, teacher = self.ids[span], self.logprobs[span].to(policy.dtype)
        absent = teacher[:, :-1] == -torch.inf
        outcomes = policy.gather(1, ids).masked_fill(absent, -torch.inf)
        listed = torch.zeros_like(policy).scatter_add_(1, ids, (~absent).to(policy.dtype))
        rest = policy.masked_fill_(listed > 0, -torch.inf).logsumexp(-1, keepdim=True)
        outcomes = torch.cat([outcomes, rest], dim=1)
        return divergence(outcomes.clone(), teacher.clone(), self.beta)[0], outcomes

    def pull(self, policy: Tensor, kept: Tensor, span: slice, columns: slice, buffers: Buffers) -> Tensor:
        teacher = self.logprobs[span].to(policy.dtype)
        _, centre = divergence(kept.clone(), teacher.clone(), self.beta)
        slope = _slope(kept.clone(), teacher.clone(), centre, self.beta)
        # the rest moves as one: each of its tokens has its share of the slope, which the listed ones then replace
        p = kept.exp()
        rest = (slope / p.clamp(min=torch.finfo(p.dtype).tiny))[:, -1:]
        gradient = policy.exp_().mul_(rest)
        column, in_tile = members(self.ids[span], columns.start, policy.shape[1])
        return gradient.scatter_add_(1, column, torch.where(in_tile, (slope - p * rest)[:, :-1], 0.0))

    def pick(self, index: Tensor) -> _FromTopK:
        return replace(self, ids=self.ids[index], logprobs=self.logprobs[index])


def divergence(policy: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``(n,)`` divergence and centre from ``(n, m)`` log-probs of all outcomes, nats; spoils both."""
    policy.clamp_(min=FLOOR)
    gap = teacher.clamp_(min=FLOOR) - policy
    if beta == 0:
        return teacher.exp_().mul_(gap).sum(-1), -torch.ones_like(gap[:, 0])
    change = _change(gap, beta)
    centre = policy.exp_().mul_(change).sum(-1)
    if beta == 1:
        return centre, centre
    # ln q / m is the gap less ln m / p, which is -change / (1 - beta)
    return centre + beta * teacher.exp_().mul_(gap.add_(change, alpha=1 / (1 - beta))).sum(-1), centre


def _change(gap: Tensor, beta: float) -> Tensor:
    """What dD / dp is up to a constant, for beta above 0, from the gap ln q / p: ln p / q or (1 - beta) ln p / m."""
    if beta == 1:
        return -gap
    return torch.logaddexp(gap + math.log(beta), gap.new_tensor(math.log1p(-beta))).mul_(beta - 1)


def _slope(policy: Tensor, teacher: Tensor, centre: Tensor, beta: float) -> Tensor:
    """``(n, m)`` gradient with respect to the policy's logits, from log-probs; spoils both."""
    policy.clamp_(min=FLOOR)
    teacher.clamp_(min=FLOOR)
    if beta == 0:
        return policy.exp_().sub_(teacher.exp_())
    return _change(teacher.sub_(policy), beta).sub_(centre.unsqueeze(1)).mul_(policy.exp_())
