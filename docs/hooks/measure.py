"""What a method makes of tokens, by differentiating the real loss: no picture has its own formula.

Every method is measured on one optimizer step that is the same for all, a cloud of tokens with the statistics of a
real one, and on a single token that is moved while the method judges it by the statistics of that step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.loss import Part, held_ratio, loss_of_part
from rlstab.core.method import measure_all
from rlstab.core.method_checks import LIVE
from rlstab.core.objective import State, TokenObjective, terms_of
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import Totals

#: Responses per prompt, and the limit of their length in tokens: a response of that length was cut off.
GROUP, LIMIT = 4, 64
#: How many responses of each prompt are right.
RIGHT = (1, 2, 3, 2, 1, 3, 2, 2)
#: Tokens of the vocabulary; the share that is drawn from the tail, evenly over log-probs down to that of the rarest.
VOCABULARY, RARE, RAREST = 1000, 0.15, 1e-5
#: Quantiles of what the likeliest token leaves to the others: half of the entropies are below about 0.01 nats and a
#: fifth above 0.67, as counted in arXiv 2506.01939.
LEFT = ((0.0, 0.5, 0.8, 1.0), (1e-5, 1.2e-3, 0.2, 0.5))
#: Exponents of the Zipf distributions of the others, from the flattest to the steepest.
EXPONENTS = (1.0, 3.5)
#: Standard deviations of log-ratios on a rare token: what the policy moved since the rollout, and what the sampler
#: reported otherwise. On a token of probability p they are about (1 - p) times as large.
DRIFT, MISMATCH = 0.25, 0.6
#: Share of the largest probability below which a min-p filter removes a token, where no method says otherwise.
MIN_P = 0.02
#: Divides by nothing, so that gradients are those of single tokens.
ONE = Totals(1.0, 1.0)


@functools.cache
def cloud(min_p: float = MIN_P) -> TokenBatch:
    """The step, in float64: 32 responses, whose rare tokens are far more frequent than in practice.

    At each place the likeliest token has what is not left to the others, and the 999 others share it as a Zipf
    distribution, so that probability, entropy and all signals belong together.
    """
    rng = torch.Generator().manual_seed(2)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=rng, dtype=torch.float64)

    right = torch.tensor([[number < count for number in range(GROUP)] for count in RIGHT]).double()
    advantages = ((right - right.mean(1, keepdim=True)) / right.std(1, correction=0, keepdim=True)).reshape(-1)
    rows = torch.arange(advantages.numel())
    lengths = (16 + 72 * uniform(len(rows)).square()).clamp(max=LIMIT).long()
    sequence = torch.repeat_interleave(rows, lengths)
    position = torch.cat([torch.arange(int(length)) for length in lengths])
    tokens = len(sequence)

    logits = _distributions(uniform(tokens), uniform(tokens))
    token = torch.searchsorted(logits.exp().cumsum(1), uniform(tokens).unsqueeze(1)).squeeze(1)
    rare = (logits >= (math.log(RAREST) * uniform(tokens)).unsqueeze(1)).sum(1) - 1
    token = torch.where(uniform(tokens) < RARE, rare, token).clamp(0, VOCABULARY - 1)
    logprobs = logits.gather(1, token.unsqueeze(1)).squeeze(1)

    def moved(start: Tensor, scale: float) -> Tensor:
        noise = torch.special.ndtri(uniform(tokens).clamp(min=1e-9))
        return (start - scale * (1.01 - logprobs.exp()) * noise).clamp(max=-1e-6)

    old = moved(logprobs, DRIFT)
    kept = logits >= logits[:, :1] + math.log(min_p)
    blocks = (position >= 4 + (lengths[sequence] - 4) / 3).double()  # four tokens of no block, a third, and the rest
    return TokenBatch(
        old_logprobs=old,
        logprobs=logprobs,
        advantages=advantages[sequence],
        sequence=sequence,
        position=position,
        sequence_ids=rows,
        group_ids=rows // GROUP,
        entropies=-(logits.exp() * logits).sum(1),
        ref_logprobs=moved(logprobs, DRIFT),
        rollout_logprobs=moved(old, MISMATCH),
        max_logprobs=logits[:, 0],
        log_kept_mass=torch.where(kept, logits, -torch.inf).logsumexp(1),
        log_support_mass=torch.maximum(logprobs, torch.full_like(logprobs, 0.8).log()),
        sum_p_sq=(2 * logits).exp().sum(1),
        truncated=(lengths == LIMIT).double()[sequence],
        branch=(rows // GROUP % 4 == 3).double()[sequence],
        teacher_logprobs=moved(old, DRIFT),
        lag=(rows // GROUP % 4).double()[sequence] * 4,
        block_ids=torch.where(position < 4, -1.0, blocks),
        turn=blocks.clamp(min=0),
        turn_reward=(7 * sequence + 3 * blocks.clamp(min=0)) % 4,
    )


def _distributions(share: Tensor, steep: Tensor) -> Tensor:
    """``(n, V)`` log-probs, the largest first, by two uniform numbers for each place."""
    quantiles, values = (torch.tensor(row, dtype=torch.float64) for row in LEFT)
    place = torch.searchsorted(quantiles, share).clamp(1, len(quantiles) - 1)
    part = (share - quantiles[place - 1]) / (quantiles[place] - quantiles[place - 1])
    left = torch.lerp(values.log()[place - 1], values.log()[place], part)
    ranks = torch.arange(1, VOCABULARY, dtype=torch.float64).log()
    exponent = EXPONENTS[0] + (EXPONENTS[1] - EXPONENTS[0]) * steep
    others = torch.log_softmax(-exponent.unsqueeze(1) * ranks, 1) + left.unsqueeze(1)
    logits = torch.cat([(-left.exp()).log1p().unsqueeze(1), others], 1)
    return logits.sort(dim=1, descending=True, stable=True).values


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

        No plan is made, so that a method that requires another one can be measured alone.
        """
        settled, state = measure_all(method, [batch], method.init_state() if state is None else state, LocalComm())
        for _ in range(steps - 1):
            state = method.advance(state, settled)
        return cls(method, batch, settled, state)

    @classmethod
    def on_cloud(cls, method: TokenObjective, steps: int = 1) -> Decided:
        """On the cloud, with signals as the method defines them."""
        return cls.on(method, cloud(method.signal_options.get("min_p", MIN_P)), steps)

    def part(self, batch: TokenBatch | None = None) -> Part:
        """What the method asks for on some tokens; without them, on those of the step."""
        batch = self.batch if batch is None else batch
        with torch.no_grad():
            return Part.of(batch, self.settled, terms_of(self.method, batch, self.settled, self.state))


def live(batch: TokenBatch) -> PolicyOutputs:
    """The policy at the start of the step."""
    assert batch.logprobs is not None
    return PolicyOutputs(batch.logprobs, batch.entropies, batch.log_kept_mass, batch.log_support_mass)


def coefficients(part: Part, policy: PolicyOutputs) -> Tensor:
    """``(n,)`` what stands before the gradient of each token's log-prob: the ratio times the advantage, if untouched.

    Without penalties and without the divisor.
    """
    bare = replace(part, terms=replace(part.terms, penalties={}, aggregate=None))
    return -_slopes(bare, policy)["logprobs"]


def factors(part: Part, policy: PolicyOutputs) -> Tensor:
    """``(n,)`` coefficients relative to those of an untouched token; NaN where the advantage is 0."""
    untouched = held_ratio(
        replace(part, terms=replace(part.terms, keep=None, ratio=None, support=None)), policy.constant()
    )
    return coefficients(part, policy) / (untouched * part.batch.advantages)


def penalties(part: Part, policy: PolicyOutputs) -> dict[str, Tensor]:
    """What the penalties put before the gradient of each live output, ``(n,)`` by its name; without the divisor."""
    nothing = torch.zeros_like(part.has_gradient)
    only = replace(part.terms, keep=nothing, weight=None, aggregate=None, gates={}, surrogate=None, ratio=None)
    return {name: -slope for name, slope in _slopes(replace(part, terms=only, has_gradient=nothing), policy).items()}


def divisors(part: Part) -> Tensor:
    """``(n,)`` what the method weighs each token by, its weight included, times the tokens that count."""
    batch, terms = part.batch, part.terms
    counted = part.kept
    assert terms.aggregate is not None
    tokens, sequences = float(counted.sum()), float((batch.sequence_total(counted) > 0).sum())
    weights = tokens * terms.aggregate(batch.sequence, counted, batch.num_sequences, Totals(tokens, sequences))
    return weights if terms.weight is None else weights * terms.weight


def _slopes(part: Part, policy: PolicyOutputs) -> dict[str, Tensor]:
    leaves = {
        name: values.detach().clone().requires_grad_()
        for name in ("logprobs", *LIVE)
        if (values := getattr(policy, name)) is not None
    }
    loss = loss_of_part(part, PolicyOutputs(**leaves), None, ONE, ONE).loss
    if not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
    }


# -- a single token that is moved --------------------------------------------------------------------------------------

#: Tokens of its response, and its place.
LENGTH, PLACE = 16, 8
#: The ratios, even on a logarithmic scale.
RATIOS = torch.linspace(-2.0, 2.0, 193, dtype=torch.float64).exp2()
#: Optimizer steps after which a method with state is looked at again.
LATER = 500
#: Coefficients that differ by less cannot be told apart in a picture from -4 to 4.
SAME = 0.01


@dataclass(frozen=True)
class Case:
    """What holds besides the ratio: the token's old probability and entropy, who moves with it, and when."""

    probability: float = 0.1
    entropy: float = 0.3
    together: bool = False
    later: bool = False


BASE = Case()
#: By what may matter besides the ratio: the cases that are compared, the first of them :data:`BASE`.
MATTERS: Mapping[str, Mapping[str, Case]] = {
    "By what the rest of its response does": {"it alone": BASE, "all of its response": Case(together=True)},
    "By its old probability p": {"p = 0.1": BASE, "p = 0.5": Case(probability=0.5), "p = 0.01": Case(probability=0.01)},
    "By its entropy": {"0.3 nats": BASE, "0.01 nats": Case(entropy=0.01), "2 nats": Case(entropy=2.0)},
    "By the optimizer step": {"step 1": BASE, f"step {LATER}": Case(later=True)},
}


def over_ratios(method: TokenObjective, moved: str) -> dict[Case, Tensor]:
    """Coefficients ``(2, ratios)`` of a rewarded and of a punished token in each case; NaN where there is none.

    Args:
        method: alone.
        moved: ``live`` is live over old; ``sampler`` old over rollout; ``reference`` live over reference, where the
            advantage is 0 and the coefficient is that of the penalties.
    """
    first = Decided.on_cloud(method)
    later = Decided.on_cloud(method, LATER) if first.state else None
    cases = dict.fromkeys(case for cases in MATTERS.values() for case in cases.values())
    return {
        case: torch.stack([_coefficients_of(decided, case, moved, sign) for sign in (1.0, -1.0)])
        for case in cases
        if (decided := later if case.later else first) is not None
    }


def untouched(moved: str) -> Tensor:
    """The same of an untouched token."""
    rewarded = RATIOS if moved == "live" else torch.ones_like(RATIOS)
    return torch.stack([rewarded, -rewarded])


def differ(values: Tensor, others: Tensor) -> bool:
    """Two lines where both are there; rounding may decide on which side of a bound a single ratio is."""
    return int(((values - others).abs() > SAME).sum(-1).max()) > 1


def what_matters(curves: Mapping[Case, Tensor]) -> list[str]:
    """Keys of :data:`MATTERS` by which the coefficient differs at the same ratio."""
    return [
        key
        for key, cases in MATTERS.items()
        if any(case in curves and differ(curves[case], curves[BASE]) for case in cases.values())
    ]


def _coefficients_of(decided: Decided, case: Case, moved: str, sign: float) -> Tensor:
    batch, policy = _responses(case, moved, 0.0 if moved == "reference" else sign)
    part = decided.part(batch)
    values = penalties(part, policy)["logprobs"] if moved == "reference" else coefficients(part, policy)
    largest = case.probability * RATIOS if moved == "live" else case.probability / RATIOS
    return torch.where(largest <= 1, values.view(-1, LENGTH)[:, PLACE], torch.nan)  # no probability is above 1


def _responses(case: Case, moved: str, advantage: float) -> tuple[TokenBatch, PolicyOutputs]:
    """One response for each ratio, of a prompt of the cloud."""
    rows = RATIOS.numel()
    sequence = torch.arange(rows).repeat_interleave(LENGTH)
    position = torch.arange(LENGTH).repeat(rows)
    here = position == PLACE
    old = torch.where(here, case.probability, torch.full((), 0.2, dtype=torch.float64)).log()
    rest = torch.linspace(0.05, 1.0, LENGTH, dtype=torch.float64).repeat(rows)
    shift = torch.where(here | torch.tensor(case.together), RATIOS.log()[sequence], 0.0)
    batch = TokenBatch(
        old_logprobs=old,
        logprobs=old,
        advantages=torch.full_like(old, advantage),
        sequence=sequence,
        position=position,
        sequence_ids=10_000 + torch.arange(rows),
        group_ids=torch.zeros(rows, dtype=torch.int64),
        entropies=torch.where(here, case.entropy, rest),
        ref_logprobs=old - shift if moved == "reference" else old,
        rollout_logprobs=old - shift if moved == "sampler" else old,
        max_logprobs=torch.maximum(old, torch.full_like(old, 0.6).log()),
        log_kept_mass=torch.full_like(old, 0.95).log(),
        log_support_mass=torch.full_like(old, 0.8).log(),
        sum_p_sq=torch.full_like(old, 0.4),
        truncated=torch.zeros_like(old),
        branch=torch.zeros_like(old),
        teacher_logprobs=old - shift if moved == "teacher" else old,
        lag=torch.zeros_like(old),
        block_ids=(position // 8).double(),
        turn=(position // 8).double(),
        turn_reward=(position // 8 % 2).double(),
    )
    moving = old + shift if moved == "live" else old
    return batch, PolicyOutputs(moving, batch.entropies, batch.log_kept_mass, batch.log_support_mass)
