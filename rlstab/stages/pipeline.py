"""The stages of a run: one selector, one estimator, any number of reward shapers and expanders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlstab import State
from rlstab.core.method_checks import check_declared
from rlstab.core.objective import unmet_in
from rlstab.errors import Conflict
from rlstab.stages.grpo import GRPO
from rlstab.stages.in_order import InOrder
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, RewardShaper, RolloutExpander, Stage


@dataclass(frozen=True)
class Pipeline:
    """The stages of a run, in the order in which a rollout passes through them.

    Attributes:
        selector: chooses the prompts.
        shapers: add to the rewards.
        expanders: sample more, or drop; asked in this order.
        estimator: makes the advantages.
    """

    selector: PromptSelector = InOrder()  # noqa: RUF009  # frozen
    shapers: tuple[RewardShaper, ...] = ()
    expanders: tuple[RolloutExpander, ...] = ()
    estimator: AdvantageEstimator = GRPO()  # noqa: RUF009  # frozen

    @classmethod
    def of(cls, *stages: Stage) -> Pipeline:
        """The pipeline of some stages in any order; ``in_order`` and ``grpo`` are the defaults.

        Raises:
            Conflict: two stages of a kind that a run has once, one stage twice, or two that exclude each other.
        """
        for stage in stages:
            check_declared(type(stage).__qualname__, "needs", stage.needs)
        names = [stage.name for stage in stages]
        for name in names:
            if names.count(name) > 1:
                raise Conflict(f"the stage '{name}' is listed twice. Remove one of them.")
        check_exclusions(stages, {name: "stage" for name in names})
        selectors = [stage for stage in stages if isinstance(stage, PromptSelector)]
        estimators = [stage for stage in stages if isinstance(stage, AdvantageEstimator)]
        for named, does in ((selectors, "choose the prompts"), (estimators, "estimate the advantages")):
            if len(named) > 1:
                first, second = named[:2]
                raise Conflict(
                    f"'{first.name}' and '{second.name}' both {does}, and one stage can. Remove one of them; if "
                    f"presets bring them, list one under `stages`."
                )
        return cls(
            selectors[0] if selectors else InOrder(),
            tuple(stage for stage in stages if isinstance(stage, RewardShaper)),
            tuple(stage for stage in stages if isinstance(stage, RolloutExpander)),
            estimators[0] if estimators else GRPO(),
        )

    def __iter__(self) -> Iterator[Stage]:
        yield from (self.selector, *self.shapers, *self.expanders, self.estimator)

    @property
    def needs(self) -> frozenset[str]:
        """Evidence that some stage reads."""
        return frozenset[str]().union(*(stage.needs for stage in self))

    def init_state(self) -> dict[str, State]:
        """The state of each stage before the first rollout, by its name."""
        return {stage.name: stage.init_state() for stage in self}


def unmet(pipeline: Pipeline, methods: Iterable[str]) -> list[str]:
    """A sentence for each stage that lacks something it was published with.

    Args:
        pipeline: the stages of a run.
        methods: names of the methods in its objective.
    """
    return unmet_in(pipeline, {stage.name for stage in pipeline} | set(methods))


def check_exclusions(stages: Sequence[Stage], nouns: Mapping[str, str]) -> None:
    """Refuse stages and methods that cannot act together.

    Args:
        stages: their ``excludes`` are asked.
        nouns: names of the stages and methods that are present, with the kind of each.

    Raises:
        Conflict: names the two parties and the reason.
    """
    kinds = {stage.name: stage.kind for stage in stages}
    for stage in stages:
        for name, noun in sorted(nouns.items()):
            reason = stage.excludes.get(name) or stage.excludes.get(kinds.get(name, ""))
            if reason is not None:
                raise Conflict(
                    f"the stage '{stage.name}' and the {noun} '{name}' exclude each other: {reason} Remove one of them."
                )
