"""What scores a completion: small objects that a worker process gets, without the task around them.

This module and what it imports stay without torch, as the workers do.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import pickle
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rlstab.errors import DataError, OutOfRange, ScorerError, did_you_mean
from rlstab.extras import require
from rlstab.files import in_one_line, load_module

#: How a reward function is called; the names are not prescribed, the places are.
ARGUMENTS = ("prompt", "completion", "answer")


class Scorer(Protocol):
    """Scores a completion against the answer of its example."""

    def prepare(self) -> None:
        """Import and build what the first score needs. A worker calls it once; its time belongs to no completion."""
        ...

    def score(self, answer: Any, completion: str) -> float:
        """The score. May raise, hang and take all memory: a worker bears that."""
        ...


def finite(value: Any) -> float:
    """A score as a number.

    Raises:
        ScorerError: it is not a finite number.
    """
    if isinstance(value, numbers.Real) or (hasattr(value, "__float__") and not isinstance(value, str)):
        if math.isfinite(number := float(value)):
            return number
        raise ScorerError(f"it returned {number}, expected a finite number")
    raise ScorerError(f"it returned {value!r:.60} of type {type(value).__name__}, expected a number")


class AnswerPattern:
    """A regular expression whose group 1 is the answer; the last match in a completion counts.

    The last, because a model that corrects itself means its last word.

    Args:
        pattern: the expression, or None: the whole completion is the answer.
        setting: its name, in errors.

    Raises:
        OutOfRange: if the expression is not valid or has no group.
    """

    def __init__(self, pattern: str | None, setting: str = "answer_pattern") -> None:
        example = "`#### (.+)` takes what follows the last `####`"
        try:
            self._regex = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise OutOfRange(
                f"`{setting}` is not a valid regular expression: {pattern!r} ({error}). For example, {example}."
            ) from error
        if self._regex is not None and self._regex.groups < 1:
            raise OutOfRange(f"`{setting}` has no group: {pattern!r}. Put round brackets around the answer: {example}.")

    def find(self, completion: str) -> str | None:
        """Return the answer without surrounding blanks, or None if the expression matches nowhere."""
        answer: str | None = completion if self._regex is None else None
        for match in () if self._regex is None else self._regex.finditer(completion):
            answer = match[1]
        return None if answer is None else answer.strip()


class TextScorer:
    """Compares the answer in a completion with the right one, as text or as mathematics.

    Args:
        compare: `exact` or `math_verify`.
        pattern: finds the answer.

    Raises:
        MissingPackage: if math-verify is asked for and not installed.
    """

    def __init__(self, compare: str, pattern: AnswerPattern) -> None:
        if compare == "math_verify":
            require("tasks", "The scorer math_verify", "math_verify")
        self.compare, self.pattern = compare, pattern

    def prepare(self) -> None:
        if self.compare == "math_verify":
            _same_mathematics("1", "$1$")  # what its parser needs is loaded by the first one that it reads

    def score(self, answer: str, completion: str) -> float:
        given = self.pattern.find(completion)
        if given is None:
            return 0.0
        if self.compare == "exact":
            return float(answer.strip() == given)
        return float(_same_mathematics(answer, given))


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
        given = self.pattern.find(completion)
        if given is None:
            return 0.0
        score = float(self._made.score_answer(answer=given, entry=answer))
        return score if self.threshold is None else float(score >= self.threshold)

    @cached_property
    def _made(self) -> Any:
        from reasoning_gym import factory

        return factory.create_dataset(self.dataset, seed=0, size=1, **self.options)


class RewardFunction:
    """Scores completions by a user-defined function with the arguments (prompt, completion, answer).

    Args:
        module: absolute path of a .py file, or the name of a module.
        function: its name there, with dots where it is in a class.
    """

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function

    @staticmethod
    def pack(prompt: str, answer: Any) -> bytes:
        """What a worker gets beside a completion. Raises whatever pickle does with an answer that is not plain data."""
        return pickle.dumps((prompt, answer))

    def prepare(self) -> None:
        """Load the function.

        Raises:
            ScorerError: it cannot be loaded, or cannot be called so.
        """
        _ = self._loaded

    def score(self, answer: bytes, completion: str) -> float:
        """What the function returns; ``answer`` is by :meth:`pack`.

        Raises:
            ScorerError: it raised, or returned something other than a finite number.
        """
        try:
            prompt, right = pickle.loads(answer)
        except Exception as error:
            raise ScorerError(
                f"the answer cannot be read where completions are scored: {in_one_line(error)}. Define its class in a "
                f"module that can be imported, or make it plain data"
            ) from error
        try:
            value = self._loaded(prompt, completion, right)
        except Exception as error:
            raise ScorerError(in_one_line(error, Path(self.module))) from error
        return finite(value)

    @cached_property
    def _loaded(self) -> Callable[[str, str, Any], Any]:
        path = Path(self.module)
        try:
            value: Any = load_module(path) if path.suffix == ".py" else importlib.import_module(self.module)
        except Exception as error:
            raise ScorerError(f"{self.module} cannot be loaded: {in_one_line(error, path)}. Correct it.") from error
        for part in self.function.split("."):
            if not hasattr(value, part):
                known = [name for name, item in vars(value).items() if callable(item) and not name.startswith("_")]
                hint = did_you_mean(part, known) if known else f"Define it: def {part}({', '.join(ARGUMENTS)})."
                raise ScorerError(f"{self.module} has no function '{self.function}'. {hint}")
            value = getattr(value, part)
        who = f"'{self.function}' in {self.module}"
        if not callable(value):
            raise ScorerError(f"{who} is of type {type(value).__name__}, which cannot be called. Name a function.")
        try:
            inspect.signature(value).bind(*ARGUMENTS)
        except TypeError as error:
            raise ScorerError(f"{who} must take ({', '.join(ARGUMENTS)}): {error}. Change its arguments.") from error
        except ValueError:  # a function of C that does not say
            pass
        return value  # type: ignore[no-any-return]  # it is callable
