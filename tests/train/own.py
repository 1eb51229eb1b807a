"""User-defined tasks, methods and functions, which runs of the tests name by `own.py:Name`."""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rlstab
from rlstab.core.stats import Mean
from rlstab.core.terms import Penalty
from rlstab.stages.group_relative import dr_grpo
from rlstab.stages.grpo import GRPO
from rlstab.stages.stage import AdvantageEstimator, RewardShaper
from rlstab.tasks import Countdown, Example
from rlstab.train import Rollout


class Graded(Countdown):
    """Countdown whose rewards differ, so that every rollout teaches something."""

    def score(self, example: Example, completion: str) -> float:
        return (len(completion) + sum(map(ord, completion))) % 7 / 6


class Seldom(Countdown):
    """A third of the completions are right, so that some groups have nothing to compare."""

    def score(self, example: Example, completion: str) -> float:
        return float(sum(map(ord, completion)) % 3 == 0)


class Flawed(Graded):
    """It raises on completions that end in an even digit, and returns NaN on those that end in an odd one."""

    def score(self, example: Example, completion: str) -> float:
        if completion[-1:] in ("0", "2", "4", "6", "8"):
            raise ValueError("no score for [this]")
        return float("nan") if completion[-1:].isdigit() else super().score(example, completion)


class Wordy(Graded):
    """Prompts that are several times as long as the answers, so that it pays to forward each once."""

    def example(self, split: Any, index: int) -> Example:
        given = super().example(split, index)
        return replace(given, prompt=given.prompt * (3 + index % 3))


class Corrected(Graded):
    """One of the held out examples may be another: as of a data set on a hub that somebody corrected."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def example(self, split: Any, index: int) -> Example:
        return super().example(split, index + self.shift if (split, index) == ("eval", 5) else index)


class Talking(Graded):
    """Two replies, of one and of two tokens; a turn earns by its number and by the length of what was said."""

    def reply(self, example: Example, completion: str) -> str | None:
        if sum(map(ord, completion)) % 5 == 0:
            raise ValueError("no reply to [this]")
        return {1: "+", 2: "12"}.get(completion.count("=") + completion.count("$"))

    def turn_rewards(self, example: Example, completion: str) -> list[float]:
        return [len(completion) % (2 + turn) for turn in range(3)]


class Silent(Talking):
    """Its turns have no rewards."""

    turn_rewards = None  # type: ignore[assignment]  # as if it had none


class Lossy(Talking):
    """It loses a share of its scores."""

    flaky = 0.5


class Blocky(Talking):
    """It has blocks too."""

    def blocks(self, example: Example, completion: str) -> list[Any]:
        return []


class Equal(Countdown):
    """Every completion gets the same reward."""

    def score(self, example: Example, completion: str) -> float:
        return 1.0


class Noting(Graded):
    """It keeps the problem and the completion of every score."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def score(self, example: Example, completion: str) -> float:
        self.seen.append((str(example.prompt), completion))
        return super().score(example, completion)


class Slow(Graded):
    """Each score takes a while, so that a kill finds the run at work."""

    def score(self, example: Example, completion: str) -> float:
        time.sleep(0.01)
        return super().score(example, completion)


class Poisoned(rlstab.TokenObjective):
    """The live value that it pays for is NaN where :func:`poison` says so."""

    name = "poisoned"
    needs = frozenset({"entropies", "poison"})
    live_needs = frozenset({"entropies"})
    writes = frozenset({"penalties"})

    def terms(self, batch: rlstab.TokenBatch, stat: Any, state: Any) -> rlstab.Terms:
        factor = torch.where(batch.signal("poison") > 0, torch.nan, 1.0)

        def paid(policy: Any, anchor: Any) -> Tensor:
            return policy.signal("entropies") * factor

        return rlstab.Terms(penalties={"": Penalty(-0.01, paid, reads=frozenset({"entropies"}))})


def poison(responses: Rollout) -> Tensor:
    """``(R, T)``: 1 for the responses to the third prompt of a run, else 0."""
    return (responses.group_ids == 2).float().unsqueeze(-1).expand(responses.response_mask.shape)


class WeighPlaces(rlstab.TokenObjective):
    """Weight by position in the response over its mean over the step; a named signal gives the position."""

    name = "weigh_places"
    writes = frozenset({"weight"})
    signal: str = ""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.signal} - {""})

    def place(self, batch: rlstab.TokenBatch) -> Tensor:
        return batch.signal(self.signal) if self.signal else batch.position.float() + 1

    def measure(self, batch: rlstab.TokenBatch) -> Any:
        return {"mean": Mean.of(self.place(batch))}

    def terms(self, batch: rlstab.TokenBatch, stat: Any, state: Any) -> rlstab.Terms:
        return rlstab.Terms(weight=self.place(batch) / stat["mean"].value)


class Compare(rlstab.TokenObjective):
    """Report how far signals are from each other: rewards from those that a function gives, and one from another."""

    name = "compare"
    pairs = {
        "shaped": ("rewards", "mine"),
        "scored": ("reward/graded", "mine graded"),
        "apart": ("rewards", "reward/graded"),
    }
    needs = frozenset({"rewards", "reward/graded", "mine", "mine graded"})

    def terms(self, batch: rlstab.TokenBatch, stat: Any, state: Any) -> rlstab.Terms:
        gaps = {name: batch.signal(one) - batch.signal(other) for name, (one, other) in self.pairs.items()}
        return rlstab.Terms(report={name: Mean.of(values.abs()) for name, values in gaps.items()})


class Halved(RewardShaper):
    """Take half of each reward away, by what it reads of them."""

    name = "halved"
    needs = frozenset({"rewards", "reward/graded"})

    def shape(self, responses: Any, stat: Any, state: Any) -> Tensor:
        assert (responses.evidence("reward/graded") <= responses.evidence("rewards")).all()
        return -0.5 * responses.evidence("rewards")


def places(responses: Rollout) -> Tensor:
    """``(R, T)``: the position of each token in its response, from 1; NaN where there is none."""
    return responses.response_mask.cumsum(-1).float().where(responses.response_mask, torch.nan)


class Fading(AdvantageEstimator):
    """``(S, T)``: Dr. GRPO, less the later a token stands."""

    name = "fading"
    per = "token"
    needs = frozenset({"rollout_logprobs"})

    def advantages(self, responses: Any, stat: Any, state: Any) -> Tensor:
        position = torch.arange(responses.evidence("rollout_logprobs").shape[1])
        return dr_grpo(responses.rewards, responses.group_ids).unsqueeze(-1) / (position + 1)


class OfTokens(GRPO):
    """``(S, T)``: the advantages of GRPO on each token."""

    name = "of_tokens"
    needs = frozenset({"rollout_logprobs"})

    def advantages(self, responses: Any, stat: Any, state: Any) -> Tensor:
        each = super().advantages(responses, stat, state).unsqueeze(-1)
        return each.expand_as(responses.evidence("rollout_logprobs")).clone()
