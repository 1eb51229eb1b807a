"""What a method makes of tokens, by differentiating the real loss: no picture has a formula of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlstab.atlas.cloud import MIN_P, cloud
from rlstab.core.batch import TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.loss import Part, held_ratio, loss_of_part
from rlstab.core.method import measure_all
from rlstab.core.objective import State, TokenObjective, terms_of
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import Totals

#: Divides by nothing, so that gradients are those of single tokens.
ONE = Totals(1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Decided:
    """A method in one optimizer step: the statistics and the state by which it decides.

    Tokens beyond the step are judged by these: one token more would not move the statistics.
    """

    method: TokenObjective
    batch: TokenBatch
    settled: Settled
    state: State

    @classmethod
    def on(cls, method: TokenObjective, batch: TokenBatch, steps: int = 1, state: State | None = None) -> Decided:
        """After some optimizer steps that were all alike, settled as ``make_plan`` does it.

        No plan is made, so that a method that requires another one can be drawn alone.
        """
        settled, state = measure_all(method, [batch], method.init_state() if state is None else state, LocalComm())
        for _ in range(steps - 1):
            state = method.advance(state, settled)
        return cls(method, batch, settled, state)

    def part(self, batch: TokenBatch) -> Part:
        """What the method asks for on some tokens."""
        with torch.no_grad():
            return Part.of(batch, self.settled, terms_of(self.method, batch, self.settled, self.state))


def cloud_of(method: TokenObjective) -> TokenBatch:
    """The cloud, with signals as the method defines them."""
    return cloud(method.signal_options.get("min_p", MIN_P))


def coefficients(part: Part, live: PolicyOutputs) -> Tensor:
    """``(n,)`` what stands before the gradient of each token's log-prob: the ratio times the advantage, if untouched.

    Without penalties and without the divisor; those have functions of their own.
    """
    bare = replace(part, terms=replace(part.terms, penalties={}, aggregate=None))
    return -_slopes(bare, live)["logprobs"]


def factors(part: Part, live: PolicyOutputs) -> Tensor:
    """``(n,)`` coefficients relative to those of an untouched token; NaN where the advantage is 0."""
    untouched = held_ratio(replace(part, terms=replace(part.terms, keep=None, ratio=None)), live.constant())
    return coefficients(part, live) / (untouched * part.batch.advantages)


def penalties(part: Part, live: PolicyOutputs) -> dict[str, Tensor]:
    """What the penalties put before the gradient of each live output, ``(n,)`` by its name; without the divisor."""
    nothing = torch.zeros_like(part.has_gradient)
    only = replace(part.terms, keep=nothing, weight=None, aggregate=None, gates={}, surrogate=None, ratio=None)
    return {name: -one for name, one in _slopes(replace(part, terms=only, has_gradient=nothing), live).items()}


def divisors(part: Part) -> Tensor:
    """``(n,)`` what the method weighs each token by, its weight included, times the tokens that count."""
    batch, keep = part.batch, part.terms.keep
    counted = torch.ones_like(batch.sequence, dtype=torch.bool) if keep is None else keep
    aggregate = part.terms.aggregate
    assert aggregate is not None
    tokens, sequences = float(counted.sum()), float((batch.sequence_total(counted) > 0).sum())
    found = tokens * aggregate(batch.sequence, counted, batch.num_sequences, Totals(tokens, sequences))
    return found if part.terms.weight is None else found * part.terms.weight


def _slopes(part: Part, live: PolicyOutputs) -> dict[str, Tensor]:
    leaves = {
        name: values.detach().clone().requires_grad_()
        for name in ("logprobs", "entropies", "log_kept_mass")
        if (values := getattr(live, name)) is not None
    }
    loss = loss_of_part(part, PolicyOutputs(**leaves), None, ONE, ONE).loss
    if not loss.requires_grad:
        return {name: torch.zeros_like(one) for name, one in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(leaves.items(), found, strict=True)
    }
