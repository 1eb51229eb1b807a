"""The estimated pass rate of each prompt of a pool: a Beta posterior that forgets.

The evidence of a prompt is how much reward its responses had (``right``) and how much they missed (``wrong``); from a
uniform prior, its pass rate p has the density Beta(1 + right, 1 + wrong). The evidence of a prompt fades when it is
answered again, because the policy has changed, above all on the prompts that it is shown.
"""

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from rlstab import Grouped, Mean, Range, Settled, Stat, State
from rlstab.errors import OutOfRange
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.slots import best_first, filled, pool_of
from rlstab.stages.stage import Offer, PromptSelector

#: Evidence that :func:`observed` reads.
NEEDS = frozenset({"raw_rewards"})
#: Rewards are rounded to a multiple of 1 / GRID: their sums are then exact, and the same for any split.
GRID = 2.0**20


def observed(responses: ResponseBatch) -> Grouped:
    """Rewards of the scorer by prompt, in [0, 1].

    Branches are not counted: a branch says nothing about the pass rate, because it begins with a chosen answer.
    """
    rewards = (responses.evidence("raw_rewards").double().clamp(0, 1) * GRID).round() / GRID
    return Grouped.of(responses.prompt_ids, rewards, responses.given == 0)


def spread(rate: Tensor) -> Tensor:
    """``(n,)`` standard deviation ``sqrt(p (1 - p))`` of a reward that is 1 at the ``(n,)`` rate p and else 0."""
    return (rate * (1 - rate)).clamp(min=0).sqrt()


class PassRateSelector(PromptSelector):
    """Base of a selector that counts for each prompt of a pool.

    Its state is ``right`` and ``wrong``, (pool,) float64: the evidence of each prompt.
    """

    needs = NEEDS

    pool: Annotated[int, Range(ge=1)]
    discount: Annotated[float, Range(ge=0, le=1)] = 0.5
    random_share: Annotated[float, Range(ge=0, le=1)] = 0.2

    def init_state(self) -> State:
        return {name: torch.zeros(self.pool, dtype=torch.float64) for name in ("right", "wrong")}

    def measure(self, part: ResponseBatch) -> Stat:
        return {"seen": observed(part)}

    def advance(self, state: State, stat: Settled) -> State:
        """Add the new evidence, and let that of the answered prompts fade.

        Raises:
            OutOfRange: a prompt outside of the pool was answered.
        """
        answered = stat.grouped("seen")
        if answered.keys.numel() and not 0 <= int(answered.keys[0]) <= int(answered.keys[-1]) < self.pool:
            raise OutOfRange(
                f"'{self.name}': pool = {self.pool}, and the prompt {int(answered.keys[-1])} was answered. Raise "
                f"`pool`, or answer the prompts that the stage selects."
            )
        fresh = {"right": answered.totals, "wrong": answered.counts - answered.totals}
        discounted = {name: state[name][answered.keys] * self.discount for name in fresh}
        return {name: state[name].index_copy(0, answered.keys, discounted[name] + fresh[name]) for name in fresh}

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """The known share of the pool, and the mean pass rate of the chosen prompts, expected and observed."""
        rewards = responses.evidence("raw_rewards").double().clamp(0, 1)
        rates = responses.group_mean(rewards, weight=responses.given == 0)
        first = responses.first[~rates[responses.first].isnan()]
        known_share = (state["right"] + state["wrong"] > 0).double().mean()
        return {
            "known": Mean.scalar(float(known_share)),
            "expected_pass_rate": Mean.of(expected_rate(state)[responses.prompt_ids[first]]),
            "pass_rate": Mean.of(rates[first]),
        }

    def _filled(self, offer: Offer, values: Tensor) -> Tensor:
        """``(count,)`` prompts of the pool, those of the largest values first, and some at random."""
        pool_of(self.name, self.pool, offer)
        return filled(offer, best_first(offer, values), self.random_share)


def expected_rate(state: State) -> Tensor:
    """``(pool,)`` E[p]."""
    right, wrong = torch.add(state["right"], 1), torch.add(state["wrong"], 1)
    return right / (right + wrong)


def expected_spread(state: State) -> Tensor:
    """``(pool,)`` E[sqrt(p (1 - p))]: B(a + 1/2, b + 1/2) / B(a, b) of the posterior Beta(a, b)."""
    right, wrong = torch.add(state["right"], 1), torch.add(state["wrong"], 1)
    return (_log_beta(right + 0.5, wrong + 0.5) - _log_beta(right, wrong)).exp()


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
