"""Any data set of reasoning-gym, by name."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlstab.core.method_settings import check_choices
from rlstab.errors import OutOfRange, UnknownName, did_you_mean
from rlstab.extras import require
from rlstab.tasks.scorers import GymScorer
from rlstab.tasks.task import Example, Split
from rlstab.tasks.workers import Workers

if TYPE_CHECKING:  # workers import this room without pydantic
    from rlstab.config.settings import ReasoningGymSettings

#: Data sets of reasoning-gym 0.1.25 whose scorers execute completions as Python.
EXECUTING = frozenset(
    """binary_matrix composite countdown intermediate_integration n_queens polynomial_multiplication puzzle24
    simple_integration spiral_matrix string_insertion""".split()
)

# reasoning-gym makes item i of a data set from the number `seed + i`, and some libraries below it accept at most 32
# bits. So a block of 64 items takes a range of 64 such numbers: training has those in the lower half of the 32 bits,
# evaluation those in the upper half, and none is used twice.
BLOCK = 64
BLOCKS = 2**31 // BLOCK


class ReasoningGym:
    """Unlimited examples of one reasoning-gym data set, and their scores.

    The score is the data set's own `score_answer`. Many give partial credit, some give a little (0.01) to any wrong
    answer, and a few raise on malformed answers. Data sets whose scorer executes completions are refused.

    Train and eval use different random numbers; in a data set with few different problems, both can still have the same
    problem.

    Raises:
        MissingPackage: if reasoning-gym is not installed.
        UnknownName: if there is no such data set, or it has no such setting.
        OutOfRange: if the data set refuses its settings, or executes completions.
    """

    keeps_special_tokens = False

    def __init__(self, settings: ReasoningGymSettings) -> None:
        require("tasks", "The task reasoning_gym", "reasoning_gym")
        from reasoning_gym import factory

        self.name, self._settings, self._factory = settings.dataset, settings, factory
        self.size: dict[Split, int | None] = {"train": None, "eval": settings.eval_size}
        if self.name in EXECUTING:
            raise OutOfRange(
                f"task.dataset: the scorer of {self.name!r} executes completions as Python. Choose another data set."
            )
        if self.name not in factory.DATASETS:
            raise UnknownName(
                f"reasoning-gym has no data set {self.name!r}. {did_you_mean(self.name, factory.DATASETS)}"
            )
        options = {option.name for option in dataclasses.fields(factory.DATASETS[self.name][1])} - {"seed", "size"}
        for name in settings.options.keys() - options:
            raise UnknownName(
                f"task.options: reasoning-gym's {self.name!r} has no setting {name!r} (its seed and size follow from "
                f"task.seed and task.eval_size). {did_you_mean(name, options)}"
            )
        digest = hashlib.sha256(f"{self.name} {settings.seed}".encode()).digest()
        self._first_block = int.from_bytes(digest[:8], "big")
        self._block = lru_cache(2)(self._make_block)  # the newest ones: a run asks for one index after the other
        try:
            self._block("train", 0)
        except Exception as error:  # a data set checks its settings by assertions, and may raise anything
            raise OutOfRange(
                f"task.options: reasoning-gym refused {settings.options} of {self.name!r}: "
                f"{error or type(error).__name__}. Change them."
            ) from error
        scorer = GymScorer(self.name, settings.options, settings.answer_pattern, settings.threshold)
        self.workers = Workers.of(scorer, settings)

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is reasoning-gym's entry (question, answer, metadata)."""
        check_choices(ReasoningGym.example, split=split)
        block, within = self._block(split, index // BLOCK), index % BLOCK
        before = random.getstate()  # `list_functions` draws from Python's global random numbers too
        random.seed(f"{self.name} {self._settings.seed} {split} {index}")
        try:
            entry = block[within]
        finally:
            random.setstate(before)
        return Example(self._settings.prompt_template.replace("{prompt}", entry["question"]), entry)

    def score(self, example: Example, completion: str) -> float:
        """Return the data set's score of the answer in a completion.

        Raises:
            ScorerError: whatever the data set's scorer raises, or it takes too long.
        """
        return self.workers.score_one(example.prompt, completion, example.answer)

    def _make_block(self, split: Split, block: int) -> Any:
        start = (self._first_block + block) % BLOCKS + (BLOCKS if split == "eval" else 0)
        return self._factory.create_dataset(self.name, seed=start * BLOCK, size=BLOCK, **self._settings.options)
