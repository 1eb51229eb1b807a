"""The kinds of stages, which act outside the loss: choose prompts, shape rewards, estimate advantages, add responses.

A stage is a method without terms: settings, evidence that it needs, summaries of the responses of a rollout, a state
in the checkpoint; and one thing that it does. A rollout runs through them in this order::

    select prompts -> sample -> score -> shape rewards -> expand (sample more, or drop) -> estimate advantages -> learn

What a stage does reads the state before the rollout; the state then advances once, by all responses of the rollout,
dropped ones included. An estimator sees what is learnt from, and advances when that is learnt.

A part is any set of whole groups, so a stage must not depend on how groups are dealt out to parts and
ranks: information about other groups comes from the settled statistics. Randomness is by identity
(:func:`rlstab.core.random.uniform`), and states are equal bit for bit on all ranks.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstab import Mean, Settled, State
from rlstab.core.method import Method
from rlstab.errors import MethodError
from rlstab.stages.response_batch import ResponseBatch


class Stage(Method[ResponseBatch]):
    """Settings, needs and state; each kind of stage adds its action.

    Attributes:
        kind: the kind of stage, in plain words.
        excludes: stages by name or kind, and methods of the loss by name, that it cannot be combined with, each with
            the reason.
    """

    kind: ClassVar[str]
    excludes = {}

    def _empty_part(self) -> ResponseBatch:
        """A batch without responses."""
        return ResponseBatch.empty(self.needs)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """Metrics of one part, by name; they are logged under ``<name of the stage>/<name>``."""
        return {}

    def in_words(self) -> str:
        """What it does, one sentence with the settings filled in."""
        return self._summary()

    def unread_settings(self) -> Mapping[str, str]:
        """Settings that have no effect at the values of the others, each with the reason."""
        return {}


@dataclass(frozen=True)
class Offer:
    """The offer from which a selector chooses.

    Attributes:
        rollout: the number of the rollout, from 0.
        first: number of prompts of this rollout that are already chosen; a refill continues from there.
        count: number of prompts to choose.
        drawn: number of prompts that the run chose before these.
        size: number of different training prompts of the task, numbered from 0; None if unlimited.
        seed: the seed of the run.
        features: a function from ``(n,)`` numbers of prompts to ``(n, width)`` float64, for a selector that needs
            ``prompt_features``: the mean of the policy's input embeddings over the tokens of a prompt.
    """

    rollout: int
    first: int
    count: int
    drawn: int
    size: int | None
    seed: int
    features: Callable[[Tensor], Tensor]


class PromptSelector(Stage):
    """Chooses the prompts of a rollout. Each run has one; the default is ``in_order``."""

    kind = "prompts"
    _acts_by = "select"

    @abstractmethod
    def select(self, offer: Offer, state: State) -> Tensor:
        """``(count,)`` int64 numbers of prompts, a function of the offer and the state: the same on every rank."""


class RewardShaper(Stage):
    """Adds to the rewards. A run has any number; each sees the rewards of the scorer, and what they give is summed."""

    kind = "rewards"
    _acts_by = "shape"

    @abstractmethod
    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        """``(S,)`` float64, to be added to the rewards. ``stat`` is that of the responses sampled at a time."""


class AdvantageEstimator(Stage):
    """Turns rewards into advantages. Each run has one; the default is ``grpo``.

    Attributes:
        per: what each advantage belongs to: a response, a block of it, or a token.
    """

    kind = "advantages"
    _acts_by = "advantages"
    per: ClassVar[str] = "response"

    @property
    def compares(self) -> bool:
        """Whether it compares the responses to one prompt, so that one alone has the advantage 0."""
        return False

    @abstractmethod
    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        """``(S,)`` or ``(S, T)`` float64 advantages; 0 in a group that has nothing to compare with."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """What else to sample, and what not to learn from.

    Attributes:
        drop: ``(S,)`` bool, responses to leave out of learning, in whole groups; None for none.
        fresh: number of further prompts to answer, over all ranks: the same number on every rank.
        parents: ``(b,)`` int64 indices of responses to branch from, each at most once in a run.
        pivots: ``(b,)`` int64, number of their tokens that a branch keeps, at least 1 but not all.
        branches: number of responses that continue each.
    """

    drop: Tensor | None = None
    fresh: int = 0
    parents: Tensor | None = None
    pivots: Tensor | None = None
    branches: int = 0

    def require(self, name: str, responses: ResponseBatch) -> None:
        """Refuse what does not fit the responses.

        Args:
            name: the name of the stage.
            responses: those that it was given.

        Raises:
            MethodError: says what does not fit.
        """
        count = len(responses)
        if self.drop is not None and (self.drop.dtype != torch.bool or self.drop.shape != (count,)):
            raise MethodError(
                f"'{name}': expand returned `drop` as {self.drop.dtype} of {tuple(self.drop.shape)}, expected bool of "
                f"({count},). Return one for each response that it was given."
            )
        if (self.parents is None) != (self.pivots is None) or (self.parents is not None and self.branches < 1):
            raise MethodError(
                f"'{name}': expand returned parents, pivots and branches of which some are missing. Return all three."
            )
        if self.parents is not None and self.pivots is not None and self.parents.numel():
            in_range = int(self.parents.min()) >= 0 and int(self.parents.max()) < count
            fits = in_range and bool(((self.pivots >= 1) & (self.pivots < responses.lengths[self.parents])).all())
            if self.parents.shape != self.pivots.shape or not fits or bool((responses.given[self.parents] > 0).any()):
                raise MethodError(
                    f"'{name}': expand returned parents or pivots that do not fit: a pivot is at least 1 and below the "
                    f"length of its parent, and the parent is not a branch itself."
                )


class RolloutExpander(Stage):
    """Adds responses to a rollout, or drops some. A run has any number, asked in the order of the list.

    Attributes:
        rounds: most times that it is asked in one rollout, while it asks for more. Fresh prompts are sampled only
            if a round is left, so that it sees everything that it asked for.
    """

    kind = "rollouts"
    _acts_by = "expand"

    @property
    def rounds(self) -> int:
        """The most times that it is asked in one rollout, as long as it asks for fresh prompts."""
        return 1

    @abstractmethod
    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        """What to add or drop, given the responses to learn from so far; ``stat`` is theirs."""


def no_features(prompt_ids: Tensor) -> Tensor:
    """The features in offers to selectors that need none."""
    return torch.zeros((len(prompt_ids), 0), dtype=torch.float64)
