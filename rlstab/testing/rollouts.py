"""Rollouts for tests of stages: ragged groups, ties, branches, cut-off responses, and empty ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstab.core.batch import SIGNALS
from rlstab.core.random import uniform
from rlstab.stages.response_batch import EVIDENCE, ResponseBatch
from rlstab.stages.stage import Offer
from rlstab.testing.steps import make_step, other_values

#: Number of different prompts of the task; a selector is also offered unlimited ones.
PROMPTS = 24
#: Most tokens of an answer in a small rollout.
LIMIT = 12
#: Number of blocks, turns and rewards of a response, and the width of a prompt's features.
BLOCKS, WIDTH = 3, 4


@dataclass(frozen=True, eq=False)
class Rollout:
    """One rollout: its responses, and the offer from which its prompts are chosen.

    Attributes:
        responses: all of them, with all evidence; the prompts are those of a run without a tested selector.
        offer: the offer to a selector.
    """

    responses: ResponseBatch
    offer: Offer

    def __repr__(self) -> str:
        responses = self.responses
        if len(responses) > 100:
            return f"Rollout({self.offer.rollout}, {len(responses)} responses in {responses.groups} groups)"
        rewards = [responses.rewards[responses.group == group].round(decimals=3).tolist() for group in self.units]
        return f"Rollout({self.offer.rollout}, rewards by group {rewards})"

    @property
    def units(self) -> range:
        """Numbers of what is never cut: its groups, see :attr:`ResponseBatch.group`."""
        return range(self.responses.groups)

    def part(self, groups: Sequence[int], chosen: Tensor | None = None) -> ResponseBatch:
        """Some of the groups in fresh memory, with token evidence as wide as they need.

        Args:
            groups: the numbers of the groups.
            chosen: the prompts that a selector chose.
        """
        where = self._indices(groups)
        picked = self.responses.select(where)  # in fresh memory
        width = int(picked.lengths.max()) if len(picked) else 0
        extra = {name: rows[:, :width].clone() if of_tokens(name) else rows for name, rows in picked.extra.items()}
        if chosen is not None:
            slots = self.responses.prompt_ids.unique(return_inverse=True)[1]
            picked = replace(picked, prompt_ids=chosen[slots[where]])
            extra["prompt_features"] = features(picked.prompt_ids)
        return replace(picked, extra=extra)

    def laid(self, groups: Sequence[int], lengths: Tensor, values: Tensor) -> Tensor:
        """``(S, T)`` float64: values of the responses of some groups, or of their tokens, and 0 for all others."""
        rows, limit = values.double(), self.responses.limit
        rows = pad(rows, (0, limit - rows.shape[1])) if rows.ndim == 2 else rows.unsqueeze(-1).expand(-1, limit)
        rows = torch.where(torch.arange(limit) < lengths.unsqueeze(-1), rows, 0.0)
        zeros = torch.zeros((len(self.responses), limit), dtype=torch.float64)
        return zeros.index_copy(0, self._indices(groups), rows)

    def _indices(self, groups: Sequence[int]) -> Tensor:
        return torch.isin(self.responses.group, torch.tensor(list(groups), dtype=torch.int64)).nonzero().squeeze(-1)

    def batch(self, chosen: Tensor | None = None) -> ResponseBatch:
        """All groups, see :meth:`part`."""
        return self.part(self.units, chosen)

    def laid_out(self, seed: int) -> Rollout:
        """The same rollout: responses have one layout."""
        return self

    def shuffled(self, seed: int) -> tuple[Rollout, Tensor]:
        """The responses in another order, both groups and members, and the ``(S,)`` order."""
        order = torch.randperm(len(self.responses), generator=torch.Generator().manual_seed(seed))
        return replace(self, responses=self.responses.select(order)), order

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """``(S,)`` those of responses, and those of groups."""
        return self.responses.sequence_ids, self.responses.group_ids

    def relabelled(self, sequence_ids: Tensor, group_ids: Tensor) -> Rollout:
        """The same responses under other ids, and of prompts in the opposite order."""
        prompt_ids = PROMPTS - 1 - self.responses.prompt_ids
        return self._with(prompt_ids=prompt_ids, group_ids=group_ids, sequence_ids=sequence_ids)

    def evened(self) -> Rollout:
        """Every second group with one reward for all members, and without evidence that distinguishes them."""
        responses = self.responses
        first, even = responses.first[responses.group], responses.group % 2 == 0
        alike = torch.where(even, first, torch.arange(len(responses)))
        extra = {name: values[alike] for name, values in responses.extra.items()}
        return self._with(rewards=responses.rewards[alike], extra=extra)

    def padded(self, fill: float) -> Rollout:
        """The same responses with other numbers in the padding after their ends."""
        after = torch.arange(self.responses.limit) >= self.responses.lengths.unsqueeze(-1)
        fills = dict.fromkeys(filter(of_tokens, self.columns), fill) | {"block_ids": fill % BLOCKS}
        filled = {
            name: values.masked_fill(after, fills[name]) for name, values in self.columns.items() if name in fills
        }
        return self._with(extra={**self.columns, **filled})

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """The evidence of the responses by name."""
        return self.responses.extra

    def only(self, names: Collection[str]) -> Rollout:
        """The same rollout with only the evidence of these names."""
        return self._with(extra={name: values for name, values in self.columns.items() if name in names})

    def varied(self, name: str) -> tuple[Rollout, Rollout]:
        """The rollout, and with other values of one kind of evidence."""
        return self, self._with(extra={**self.columns, name: other_values(name, self.columns[name])})

    def rolled(self) -> Rollout:
        """Each response with the reward of the previous one: the same shapes, other numbers."""
        return self._with(rewards=self.responses.rewards.roll(1))

    def _with(self, **changes: Any) -> Rollout:
        return replace(self, responses=replace(self.responses, **changes))


def of_tokens(name: str) -> bool:
    """Whether evidence of this name is ``(S, T)``."""
    return name in ("block_ids", "logprobs") or name not in EVIDENCE


def features(prompt_ids: Tensor) -> Tensor:
    """``(n, WIDTH)`` float64 features of prompts, a pure function of their numbers."""
    return uniform(17, prompt_ids.unsqueeze(-1), torch.arange(WIDTH)) - 0.5


@functools.lru_cache(maxsize=128)  # all stages without signals of their own are checked on the same ones
def draw_run(
    number: int, needs: tuple[str, ...] = (), groups: int = 6, *, extreme: bool = False, large: bool = False
) -> tuple[Rollout, ...]:
    """Three rollouts of one run in a row, the same for the same number.

    Args:
        number: the number of the run.
        needs: names of token signals of your own, to fill with random numbers.
        groups: most groups in a rollout; never more than 6.
        extreme: rewards that differ by a rounding, and in half of the runs rewards of a million.
        large: 20 groups of up to 6 responses of up to 1,000 tokens, instead of up to 5 responses of up to 12.
    """
    draw = random.Random(number)
    largest, limit = (6, 1000) if large else (5, LIMIT)
    run: dict[str, Any] = {"size": draw.choice([PROMPTS, None]), "seed": draw.randrange(2**31), "limit": limit}
    run["extreme"] = draw.choice([1.0, 1e6]) if extreme else None
    rollouts = []
    for which in range(3):
        # a group of two is enough to break most laws
        sizes = [2, *(draw.randint(1, largest) for _ in range(19 if large else draw.randint(1, min(6, groups) - 1)))]
        sizes = sizes if large else draw.choice([sizes, sizes, sizes, sizes, [1] * len(sizes), [1], []])
        shaped = draw.random() < 0.1
        rollouts.append(make_rollout(sizes, draw.randrange(2**32), needs, number=which, shaped=shaped, **run))
    return tuple(rollouts)


def make_rollout(
    sizes: Sequence[int],
    draw: int,
    needs: Sequence[str] = (),
    *,
    number: int = 0,
    size: int | None = None,
    seed: int = 0,
    extreme: float | None = None,
    limit: int = LIMIT,
    shaped: bool = False,
) -> Rollout:
    """One rollout with groups of some sizes, each of a kind of its own; a pure function of its arguments.

    Rewards of a group are graded, tied, right or wrong, or equal; it may be a branch, often cut off, or another group
    of the same prompt. Evidence about tokens is in float32, with zeros after the end.

    Args:
        sizes: the sizes of its groups.
        draw: seed of its numbers.
        needs: names of token signals of your own.
        number: the number of the rollout.
        size: number of different prompts of the task; None if unlimited.
        seed: the seed of the run.
        extreme: the largest reward, if rewards differ little or much; None for ordinary ones.
        limit: most tokens of an answer.
        shaped: whether rewards are less than the scorer gave, perhaps below 0, which some stages refuse.
    """
    rng = torch.Generator().manual_seed(draw)
    groups, rows = len(sizes), sum(sizes)
    group = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    def whole(low: int, high: Tensor) -> Tensor:
        """Random numbers from ``low`` to ``high``, both included."""
        return low + (numbers(*high.shape) * (high - low + 1)).long()

    def graded(*shape: int) -> Tensor:
        """Rewards of 0, a half and 1."""
        return (3 * numbers(*shape)).floor() / 2

    by_response, shared = numbers(rows), numbers(groups)[group]
    rewards = [by_response, graded(rows), by_response.round(), shared, shared.round()]
    if extreme is not None:
        rewards += [by_response if extreme <= 1 else extreme * (by_response - 0.5), 0.1 + 1e-13 * by_response]
    raw = torch.stack(rewards)[torch.randint(len(rewards), (groups,), generator=rng)[group], torch.arange(rows)]

    parent = whole(2, torch.full((groups,), limit))
    prefixes = torch.where(numbers(groups) < 0.2, whole(1, parent - 1), 0)
    room = limit - prefixes[group]
    full = numbers(rows) < numbers(groups)[group].square()
    lengths = torch.where(full, room, whole(1, room))
    ended = ~full | (numbers(rows) < 0.2)  # some end with their last token

    signals = [name for name in needs if of_tokens(name) and name not in SIGNALS]
    step = make_step("mixed", lengths.tolist(), 1, int(torch.randint(2**31, (), generator=rng)), signals)
    sampled = torch.arange(limit) < lengths.unsqueeze(-1)
    block = torch.arange(limit) * BLOCKS // limit * sampled
    blocks = torch.arange(BLOCKS) <= block.amax(-1, keepdim=True)
    evidence = {
        "raw_rewards": raw,
        **{
            name: torch.zeros(sampled.shape).masked_scatter(sampled, values.float())
            for name, values in step.evidence.items()
        },
        "truncated": (~ended).unsqueeze(-1) * sampled.float(),
        "turn": block.float(),
        "block_ids": torch.where(sampled & (torch.arange(limit) % 5 < 4), block, -1),
        "turn_rewards": torch.where(blocks, graded(rows, BLOCKS), 0.0),
        "turn_states": whole(1, torch.full((rows, BLOCKS), 2)) * blocks,
        "block_rewards": graded(rows, BLOCKS),
        "block_outcomes": whole(0, torch.full((rows, BLOCKS), 2)),
        "squared_gradient": 0.1 + numbers(rows),
        "reward_parts": graded(rows, BLOCKS),
        "reward_weights": torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64).expand(rows, BLOCKS).clone(),
    }
    prompts = torch.randperm(PROMPTS, generator=rng)[(numbers(groups) > 0.2).cumsum(0)]
    responses = ResponseBatch.of(
        raw - 0.4 * numbers(rows) * shaped,
        1000 * (1 + number) + torch.randperm(200, generator=rng)[:groups][group],
        limit=limit,
        extra=evidence,
        lengths=lengths,
        ended=ended,
        prompt_ids=prompts[group],
        sequence_ids=10_000 * number + 3 * torch.arange(rows),
        given=prefixes[group],
        pivot=(prefixes / parent.double())[group],
    )
    first = number % 2
    offer = Offer(number, first, max(1, len(prompts.unique())), 8 * number + first, size, seed, features)
    return Rollout(responses, offer).shuffled(draw)[0]
