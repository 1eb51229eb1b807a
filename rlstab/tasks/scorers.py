"""What is asked for the score of a completion: small objects that a worker gets, without the task around them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from rlstab.errors import DataError, OutOfRange
from rlstab.extras import require
from rlstab.tasks.answer_pattern import AnswerPattern


class Scorer(Protocol):
    """Scores a completion against the answer of its example."""

    def prepare(self) -> None:
        """Import and build what the first score needs. A worker calls it once; its time belongs to no completion."""
        ...

    def score(self, answer: Any, completion: str) -> float:
        """The score. May raise, hang and take all memory: a worker bears that."""
        ...


class TextScorer:
    """Compares the answer in a completion with the right one, as text or as mathematics.

    Args:
        compare: `exact` or `math_verify`.
        pattern: finds the answer.

    Raises:
        MissingPackage: if math-verify is asked for and not installed.
        OutOfRange: if there is no such comparison.
    """

    def __init__(self, compare: str, pattern: AnswerPattern) -> None:
        if compare not in ("exact", "math_verify"):
            raise OutOfRange(f"`scorer` is {compare!r}. Set it to 'exact' or 'math_verify'.")
        if compare == "math_verify":
            require("tasks", "The scorer math_verify", "math_verify")
        self.compare, self.pattern = compare, pattern

    def prepare(self) -> None:
        if self.compare == "math_verify":
            _same_mathematics("1", "$1$")  # what its parser needs is loaded by the first one that it reads

    def score(self, answer: str, completion: str) -> float:
        found = self.pattern.find(completion)
        if found is None:
            return 0.0
        if self.compare == "exact":
            return float(answer.strip() == found.strip())
        return float(_same_mathematics(answer, found))


def _same_mathematics(right: str, answer: str) -> bool:
    from math_verify import parse, verify

    # bare LaTeX is read only in part (`2\pi` as 2) or not at all (`\sqrt{2}`) unless it is marked as mathematics
    marked = any(mark in right for mark in ("$", "\\boxed", "\\(", "\\["))
    # its own limits on time are switched off: they are alarm signals, which do not interrupt a long product
    gold = parse(right if marked else f"${right}$", parsing_timeout=None)
    if not gold:
        raise DataError(
            f"math-verify cannot read the right answer {right!r}. Write mathematics alone there (a number or "
            "LaTeX), or set `scorer: exact`."
        )
    equal: bool = verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None)
    return equal


class GymScorer:
    """The scorer of a reasoning-gym data set, which need not be the one that made the example.

    Args:
        dataset: its name.
        options: its settings.
        pattern: finds the answer.
        threshold: a score of at least this is 1, any other 0; None leaves scores as they are.
    """

    def __init__(
        self, dataset: str, options: Mapping[str, Any], pattern: AnswerPattern, threshold: float | None
    ) -> None:
        self.dataset, self.options, self.pattern, self.threshold = dataset, options, pattern, threshold

    def prepare(self) -> None:
        _ = self._made

    def score(self, answer: Mapping[str, Any], completion: str) -> float:
        found = self.pattern.find(completion)
        if found is None:
            return 0.0
        score = float(self._made.score_answer(answer=found, entry=answer))
        return score if self.threshold is None else float(score >= self.threshold)

    @cached_property
    def _made(self) -> Any:
        from reasoning_gym import factory

        return factory.create_dataset(self.dataset, seed=0, size=1, **self.options)
