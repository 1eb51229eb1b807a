"""The heads that are compared, each called as its project calls it, and the inputs that they share."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import SEED, assert_agree, error
from rlstab.signals import token_signals

ENTROPY_PRICE = 0.01


@dataclass(frozen=True)
class Problem:
    """``tokens`` x ``width`` hidden states and ``vocab`` x ``width`` weights."""

    tokens: int
    width: int
    vocab: int
    dtype: torch.dtype

    @property
    def shape(self) -> list[int]:
        """As a record holds it."""
        return [self.tokens, self.width, self.vocab]


@dataclass(frozen=True)
class Inputs:
    """Of a head: hidden states and weight with a gradient (a frozen weight without), and token ids."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor

    @property
    def trained(self) -> list[Tensor]:
        """What is differentiated."""
        return [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]

    def rows(self, count: int) -> Inputs:
        """Only the first rows."""
        return Inputs(self.hidden.detach()[:count].requires_grad_(), self.weight, self.ids[:count])

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        hidden, weight = (
            tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) for tensor in (self.hidden, self.weight)
        )
        return Inputs(hidden, weight, self.ids)


@dataclass(frozen=True)
class Step:
    """What a forward and backward gave; a head that returns only a loss gives no signals."""

    logprobs: Tensor | None
    entropies: Tensor | None
    gradients: tuple[Tensor, ...]


#: ``(inputs, row weights, entropy in the loss?)`` to ``(loss, log-probs, entropies)``.
Law = Callable[[Inputs, Tensor, bool], tuple[Tensor, Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class Head:
    """A competitor.

    Attributes:
        load: imports it and gives its law.
        package: what must be installed, or None.
        handicap: what a reader of its figures has to know.
        entropy: whether it has entropies at all.
        slack: how many times the plain log-softmax's error it may have outside of float32.
    """

    load: Callable[[], Law]
    package: str | None
    handicap: str
    entropy: bool = True
    slack: float = 2.0

    @property
    def installed(self) -> bool:
        """Whether it can take part."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def inputs(problem: Problem, *, frozen: bool = False) -> Inputs:
    """Of a mean entropy of 3 to 4 nats."""
    draw = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(problem.tokens, problem.width, generator=draw) * 4 / math.sqrt(problem.width)
    weight = torch.randn(problem.vocab, problem.width, generator=draw)
    ids = torch.randint(problem.vocab, (problem.tokens,), generator=draw)
    return Inputs(hidden.to(problem.dtype).requires_grad_(), weight.to(problem.dtype).requires_grad_(not frozen), ids)


def weights_of(problem: Problem, live: float, *, block: bool = False) -> Tensor:
    """``(N,)`` of 0 and 1: a share of rows has a loss, drawn at random or the first ones."""
    order = torch.randperm(problem.tokens, generator=torch.Generator().manual_seed(SEED + 1))
    position = torch.arange(problem.tokens) if block else order
    return (position < round(live * problem.tokens)).float()


def loss_of(weights: Tensor, logprobs: Tensor, entropies: Tensor | None) -> Tensor:
    """Mean over live rows of minus the log-prob, and minus a price times the entropy."""
    count = weights.sum().clamp(min=1.0)
    loss = -(weights * logprobs).sum() / count
    return loss if entropies is None else loss - ENTROPY_PRICE * (weights * entropies).sum() / count


def step(law: Law, given: Inputs, weights: Tensor, *, entropy: bool = False) -> Step:
    """A forward and backward."""
    loss, logprobs, entropies = law(given, weights, entropy)
    gradients = torch.autograd.grad(loss, given.trained)
    return Step(logprobs, entropies, gradients)


# -- ours, and others ------------------------------------------------------------------------------------------------


def _ours() -> Law:
    def law(given: Inputs, weights: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        signals = token_signals(given.hidden, given.weight, given.ids)
        assert signals.logprobs is not None
        assert signals.entropies is not None
        return (
            loss_of(weights, signals.logprobs, signals.entropies if entropy else None),
            signals.logprobs,
            signals.entropies,
        )

    return law


def _naive() -> Law:
    def law(given: Inputs, weights: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logprobs = (given.hidden @ given.weight.T).to(torch.promote_types(given.hidden.dtype, torch.float32))
        logprobs = logprobs.log_softmax(-1)
        held = logprobs if entropy else logprobs.detach()
        entropies = -(held.exp() * held).sum(-1)
        chosen = logprobs.gather(-1, given.ids.unsqueeze(-1)).squeeze(-1)
        return loss_of(weights, chosen, entropies if entropy else None), chosen, entropies

    return law


def _trl() -> Law:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    def law(given: Inputs, weights: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        chosen, entropies, *_ = ChunkedLogProbFunction.apply(
            given.hidden,
            given.weight,
            None,
            given.ids,
            1.0,
            _CHUNKED_LOGPROB_CHUNK_SIZE,
            None,
            1.0,
            ("entropy",),
        )
        return loss_of(weights, chosen, entropies if entropy else None), chosen, entropies

    return law


def _trl_logits() -> Law:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def law(given: Inputs, weights: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = given.hidden @ given.weight.T
        chosen = selective_log_softmax(logits, given.ids)
        with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
            entropies = entropy_from_logits(logits)
        return loss_of(weights, chosen, entropies if entropy else None), chosen, entropies

    return law


#: Tokens of a response in Liger's ``(B, T, d)``; it takes one response at a time.
RESPONSE = 512


def _liger() -> Law:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")

    def law(given: Inputs, weights: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tokens = given.ids.numel()
        length = RESPONSE if tokens % RESPONSE == 0 else tokens
        rows = tokens // length
        # with a ratio of 1 and an advantage of 1 the loss is minus the masked mean, and its gradient that of loss_of
        loss, _ = head(
            given.hidden.view(rows, length, -1),
            given.weight,
            given.ids.view(rows, length),
            weights.view(rows, length),
            torch.ones(rows),
        )
        return loss, None, None

    return law


class _LiveRows(torch.autograd.Function):
    """Log-probs from kept logits, with a backward pass of only the rows that have a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T
        exact = logits.float()
        peak = exact.amax(-1, keepdim=True)
        powers = (exact - peak).exp_()
        mass = powers.sum(-1)
        total = peak.squeeze(-1) + mass.log()
        entropies = total - torch.linalg.vecdot(powers, exact) / mass
        ctx.save_for_backward(hidden, weight, ids, logits, total)
        ctx.mark_non_differentiable(entropies)
        return exact.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - total, entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, ids, logits, total = ctx.saved_tensors
        live = gradient.nonzero().squeeze(-1)
        pull = gradient[live].unsqueeze(-1)
        of_logits = (logits[live].float() - total[live].unsqueeze(-1)).exp_().mul_(-pull)
        of_logits.scatter_add_(-1, ids[live].unsqueeze(-1), pull)
        of_logits = of_logits.to(hidden.dtype)
        of_hidden = torch.zeros_like(hidden).index_copy_(0, live, of_logits @ weight)
        return of_hidden, of_logits.T @ hidden[live], None


def _live_logits() -> Law:
    def law(given: Inputs, weights: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        chosen, entropies = _LiveRows.apply(given.hidden, given.weight, given.ids)  # type: ignore[no-untyped-call]  # torch's own
        return loss_of(weights, chosen, None), chosen, entropies

    return law


HEADS: dict[str, Head] = {
    "rlstab": Head(_ours, None, ""),
    "naive": Head(_naive, None, "keeps (N, V) log-probs"),
    "trl": Head(_trl, "trl", "its kernels are Triton; on a CPU it runs an untuned fallback"),
    "trl-logits": Head(
        _trl_logits, "trl", "keeps (N, V) logits; its log-softmax in bfloat16 is up to 4x less exact", slack=4.0
    ),
    "live-logits": Head(
        _live_logits, None, "keeps (N, V) logits; no gradient of the entropy", entropy=False, slack=4.0
    ),
    "liger": Head(_liger, "liger_kernel", "returns only a loss, no entropy; not compiled", entropy=False),
}

#: Rows on which agreement is asserted: a float64 reference of all rows would not fit in memory at large shapes.
AGREE_ROWS = 256


def assert_heads_agree(laws: dict[str, Law], given: Inputs, *, entropy: bool = False) -> None:
    """Signals and gradients of every head against float64, at all rows live and at a fifth.

    Float32 within 1e-4: signals absolutely, gradients by relative L2. Other dtypes within twice the error of the plain
    log-softmax of the same inputs; a head that rounds more has its own slack, and it is among its handicaps.

    Raises:
        Disagreement: naming the head and what differs.
    """
    some = given.rows(min(AGREE_ROWS, given.ids.numel()))
    problem = Problem(some.ids.numel(), some.hidden.shape[1], some.weight.shape[0], some.hidden.dtype)
    naive, exact = _naive(), some.to(torch.float64)
    for live in (1.0, 0.2):
        weights = weights_of(problem, live)
        truth = step(naive, exact, weights.double(), entropy=entropy)
        plain = step(naive, some, weights, entropy=entropy)

        def allowed(name: str, values: Tensor | None, reference: Tensor, relative: bool) -> float:
            assert values is not None
            plainly = error(values, reference, relative=relative)
            return 1e-4 if some.hidden.dtype == torch.float32 else HEADS[name].slack * plainly

        for name, law in laws.items():
            if entropy and not HEADS[name].entropy:
                continue
            mine = step(law, some, weights, entropy=entropy)
            for what in ("logprobs", "entropies"):
                values, reference = getattr(mine, what), getattr(truth, what)
                if values is not None:
                    limit = allowed(name, getattr(plain, what), reference, False)
                    assert_agree(f"{name}, {what}", values, reference, allowed=limit, relative=False)
            pairs = zip(mine.gradients, truth.gradients, plain.gradients, strict=True)
            for number, (gradient, reference, other) in enumerate(pairs):
                who = f"{name}, gradient {number} at {live:g} live"
                assert_agree(who, gradient, reference, allowed=allowed(name, other, reference, True), relative=True)


def installed(names: list[str], say: Callable[[str], Any]) -> dict[str, Law]:
    """Laws of those that are installed; the others are named.

    Raises:
        SystemExit: an unknown name.
    """
    laws = {}
    for name in names:
        if name not in HEADS:
            raise SystemExit(f"no head is called '{name}'. Known: {', '.join(HEADS)}.")
        if HEADS[name].installed:
            laws[name] = HEADS[name].load()
        else:
            say(f"skipped: {name} ({HEADS[name].package} is not installed; see benchmarks/README.md)")
    return laws
