"""Scorers, which compare an answer with the right one: small objects that a worker process gets without their task.

Neither this module nor what it imports may import torch, since workers do not.
"""

import importlib
import inspect
import math
import numbers
import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from rlstab.errors import DataError, ScorerError, did_you_mean
from rlstab.extras import require
from rlstab.files import checksum, in_one_line, load_module

#: The arguments of a reward function, in this order; their names are free.
ARGUMENTS = ("prompt", "completion", "answer")


class Scorer(Protocol):
    """Scores a completion against its example."""

    def prepare(self) -> None:
        """Import and build what the first score needs.

        A worker calls it once, outside the time limit of a completion.
        """
        ...

    def score(self, prompt: str, completion: str, answer: Any) -> float:
        """The score. May raise, hang or exhaust memory: it runs in a worker process."""
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


def find_answer(pattern: str | None, text: str) -> str | None:
    """The answer in a text, without surrounding blanks: all of it, or group 1 of the last match; None without a match.

    It is the last match because a model that corrects itself means its last answer.
    """
    if pattern is None:
        return text.strip()
    answers = [match[1] for match in re.finditer(pattern, text)]
    return answers[-1].strip() if answers and answers[-1] is not None else None


class TextScorer:
    """Compares the answer in a completion with the right one, as text or as mathematics.

    Args:
        compare: `exact` or `math_verify`.
        pattern: finds the answer, see :func:`find_answer`.

    Raises:
        MissingPackage: if math-verify is asked for and not installed.
    """

    def __init__(self, compare: str, pattern: str | None) -> None:
        if compare == "math_verify":
            require("tasks", "The scorer math_verify", "math_verify")
        self.compare, self.pattern = compare, pattern

    def prepare(self) -> None:
        if self.compare == "math_verify":
            _same_mathematics("1", "$1$")  # its parser loads what it needs at the first call

    def score(self, prompt: str, completion: str, answer: str) -> float:
        found_text = find_answer(self.pattern, completion)
        if found_text is None:
            return 0.0
        return float(answer.strip() == found_text if self.compare == "exact" else _same_mathematics(answer, found_text))


def as_mathematics(answer: str) -> str:
    r"""An answer marked as mathematics: bare LaTeX is read in part (`2\pi` as 2) or not at all (`\sqrt{2}`)."""
    return answer if any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${answer}$"


def _same_mathematics(right: str, answer: str) -> bool:
    from math_verify import parse, verify

    # its time limits are switched off: they are alarm signals, which do not interrupt a long product
    gold = parse(as_mathematics(right), parsing_timeout=None)
    if not gold:
        raise DataError(
            f"math-verify cannot read the right answer {right!r}. Write a number or LaTeX, or set `scorer: exact`."
        )
    equal: bool = verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None)
    return equal


class GymScorer:
    """The scorer of a reasoning-gym data set, which need not be the data set that made the example.

    Attributes:
        made: a data set of one example, made by :meth:`prepare`.

    Args:
        dataset: the name of the data set.
        options: the settings of the data set.
        pattern: finds the answer, see :func:`find_answer`.
        threshold: a score of at least this is 1, any other 0; None leaves scores as they are.
    """

    def __init__(self, dataset: str, options: Mapping[str, Any], pattern: str | None, threshold: float | None) -> None:
        self.dataset, self.options, self.pattern, self.threshold = dataset, options, pattern, threshold

    def prepare(self) -> None:
        from reasoning_gym import factory

        self.made = factory.create_dataset(self.dataset, seed=0, size=1, **self.options)

    def score(self, prompt: str, completion: str, answer: Mapping[str, Any]) -> float:
        found_answer = find_answer(self.pattern, completion)
        if found_answer is None:
            return 0.0
        score = float(self.made.score_answer(answer=found_answer, entry=answer))
        return score if self.threshold is None else float(score >= self.threshold)


class RewardFunction:
    """Scores completions by a user-defined function with the arguments (prompt, completion, answer).

    Args:
        module: absolute path of a .py file, or the name of a module.
        function: the name of the function in the module, with dots if it is in a class.
    """

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function

    def __str__(self) -> str:
        path, name = Path(self.module), f"{self.module}:{self.function}"
        return name if path.suffix != ".py" else f"{name} (sha256 {checksum(path.read_bytes())}...)"

    def prepare(self) -> None:
        """Load the function.

        Raises:
            ScorerError: it cannot be loaded, or takes other arguments.
        """
        path = Path(self.module)
        try:
            module = load_module(path) if path.suffix == ".py" else importlib.import_module(self.module)
        except Exception as error:
            raise ScorerError(f"{self.module} cannot be loaded: {in_one_line(error, path)}. Correct it.") from error
        label = f"'{self.function}' in {self.module}"
        try:
            self._call = attrgetter(self.function)(module)
            inspect.signature(self._call).bind(*ARGUMENTS)
        except AttributeError:
            functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            hint = did_you_mean(self.function, functions) if functions else "Define it."
            raise ScorerError(f"there is no {label}: def {self.function}({', '.join(ARGUMENTS)}). {hint}") from None
        except TypeError as error:
            raise ScorerError(f"{label} must take ({', '.join(ARGUMENTS)}): {error}. Change it.") from error
        except ValueError:  # a C function without a signature
            pass

    def score(self, prompt: str, completion: str, answer: Any) -> float:
        """The value that the function returns.

        Raises:
            ScorerError: it raised.
        """
        try:
            score: float = self._call(prompt, completion, answer)  # a worker checks what it returns
        except Exception as error:
            raise ScorerError(in_one_line(error, Path(self.module))) from error
        return score
