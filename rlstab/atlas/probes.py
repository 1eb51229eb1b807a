"""Coefficients over a log-ratio: one token of a response is moved, and the loss is differentiated there.

The response has 16 tokens and is judged by the statistics of the cloud. Everything that may matter beside the ratio is
varied too (the probability and the entropy of the token, the rest of its response, how long training has gone on), and
what does not matter is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.atlas.effect import Decided, cloud_of, coefficients, penalties
from rlstab.core.batch import TokenBatch
from rlstab.core.objective import TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs

#: Tokens of the response, and the place of the one that is looked at.
LENGTH, PLACE = 16, 8
#: The ratios, even on a logarithmic scale.
RATIOS = torch.linspace(-4.0, 4.0, 385, dtype=torch.float64).mul(0.5).exp2()
#: Optimizer steps after which a method with state is looked at again.
LATER = 500
#: Coefficients that differ by less cannot be told apart in a picture from -4 to 4.
SAME = 0.01


@dataclass(frozen=True)
class Case:
    """What holds beside the ratio: the token's old probability and entropy, and who moves with it."""

    probability: float = 0.1
    entropy: float = 0.3
    together: bool = False
    later: bool = False


BASE = Case()
#: By what may matter: the cases that are compared, the first of them :data:`BASE`.
MATTERS: Mapping[str, Mapping[str, Case]] = {
    "together": {"it alone": BASE, "all of its response": Case(together=True)},
    "probability": {
        "p = 0.1": BASE,
        "p = 0.5": Case(probability=0.5),
        "p = 0.01": Case(probability=0.01),
    },
    "entropy": {"0.3 nats": BASE, "0.01 nats": Case(entropy=0.01), "2 nats": Case(entropy=2.0)},
    "later": {"step 1": BASE, f"step {LATER}": Case(later=True)},
}


@dataclass(frozen=True, eq=False)
class Measured:
    """One case: over :data:`RATIOS` the coefficient of a rewarded and of a punished token; NaN where there is none.

    Without an advantage there is one coefficient, that of the penalties.
    """

    rewarded: Tensor
    punished: Tensor

    def differs(self, other: Measured) -> bool:
        """One of the two lines does."""
        return differ(self.rewarded, other.rewarded) or differ(self.punished, other.punished)


def differ(one: Tensor, other: Tensor) -> bool:
    """Where both are there, they are not the same; rounding may decide on which side of a bound a single ratio is."""
    return int(((one - other).abs() > SAME).sum()) > 1


def measured(method: TokenObjective, moved: str, *, advantage: float = 1.0) -> dict[Case, Measured]:
    """All cases over one ratio.

    Args:
        method: alone.
        moved: ``live`` is live over old; ``sampler`` old over rollout; ``reference`` live over reference.
        advantage: of the rewarded token; 0 asks for the penalties alone.
    """
    first = Decided.on(method, cloud_of(method))
    later = Decided.on(method, cloud_of(method), LATER) if first.state else None
    cases = dict.fromkeys(case for cases in MATTERS.values() for case in cases.values())
    found = {}
    for case in cases:
        decided = later if case.later else first
        if decided is not None:
            found[case] = Measured(*(_over_ratios(decided, case, moved, sign * advantage) for sign in (1.0, -1.0)))
    return found


def _over_ratios(decided: Decided, case: Case, moved: str, advantage: float) -> Tensor:
    batch, live = _responses(case, moved, advantage)
    part = decided.part(batch)
    found = penalties(part, live)["logprobs"] if advantage == 0 else coefficients(part, live)
    found = found.view(-1, LENGTH)[:, PLACE]
    largest = case.probability / RATIOS if moved in ("sampler", "reference") else case.probability * RATIOS
    return torch.where(largest <= 1, found, torch.nan)  # no token has a probability above 1


def _responses(case: Case, moved: str, advantage: float) -> tuple[TokenBatch, PolicyOutputs]:
    """One response for each ratio, of a prompt of the cloud."""
    rows = RATIOS.numel()
    sequence = torch.arange(rows).repeat_interleave(LENGTH)
    position = torch.arange(LENGTH).repeat(rows)
    here = position == PLACE
    old = torch.where(here, case.probability, torch.tensor(0.2, dtype=torch.float64)).log()
    spread = torch.linspace(0.05, 1.0, LENGTH, dtype=torch.float64).repeat(rows)
    entropies = torch.where(here, case.entropy, spread)
    shift = torch.where(here | torch.tensor(case.together), RATIOS.log()[sequence], 0.0)
    batch = TokenBatch(
        old_logprobs=old,
        logprobs=old,
        advantages=torch.full_like(old, advantage),
        sequence=sequence,
        position=position,
        sequence_ids=10_000 + torch.arange(rows),
        group_ids=torch.zeros(rows, dtype=torch.int64),
        entropies=entropies,
        ref_logprobs=old - shift if moved == "reference" else old,
        rollout_logprobs=old - shift if moved == "sampler" else old,
        max_logprobs=torch.maximum(old, torch.full_like(old, 0.6).log()),
        log_kept_mass=torch.full_like(old, 0.95).log(),
        sum_p_sq=torch.full_like(old, 0.4),
        truncated=torch.zeros_like(old),
        branch=torch.zeros_like(old),
        block_ids=(position // 8).double(),
    )
    live = PolicyOutputs(old + shift if moved == "live" else old, entropies, batch.log_kept_mass)
    return batch, live


def what_matters(found: Mapping[Case, Measured]) -> list[str]:
    """Keys of :data:`MATTERS` by which the coefficient differs at the same ratio."""
    return [
        key
        for key, cases in MATTERS.items()
        if any(case in found and found[case].differs(found[BASE]) for case in cases.values())
    ]


def plain(moved: str) -> Tensor:
    """The coefficient of an untouched rewarded token over :data:`RATIOS`."""
    return RATIOS if moved == "live" else torch.ones_like(RATIOS)


def touched(found: Mapping[Case, Measured], moved: str) -> bool:
    """Some coefficient is not that of an untouched token."""
    one = plain(moved)
    return any(case.differs(Measured(one, -one)) for case in found.values())
