"""A reward function of the user's own, as a worker process holds it: by name, loaded where it is called."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import numbers
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from rlstab.errors import ScorerError, did_you_mean

#: How a function is called; the names are not prescribed, the places are.
ARGUMENTS = ("prompt", "completion", "answer")


def packed(prompt: str, answer: Any) -> bytes:
    """What a worker gets beside a completion. Raises whatever pickle does with an answer that is no plain data."""
    return pickle.dumps((prompt, answer))


class RewardFunction:
    """Scores completions by a function with the arguments (prompt, completion, answer) that returns a number.

    Args:
        module: absolute path of a .py file, or the name of a module.
        function: its name there, with dots where it is in a class.
    """

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function

    def prepare(self) -> None:
        """Load the function.

        Raises:
            ScorerError: it cannot be loaded, or cannot be called so.
        """
        _ = self._loaded

    def score(self, answer: bytes, completion: str) -> float:
        """What the function returns; ``answer`` is :func:`packed`.

        Raises:
            ScorerError: it raised, or returned no number.
        """
        try:
            prompt, right = pickle.loads(answer)
        except Exception as error:
            raise ScorerError(
                f"the answer cannot be read where completions are scored: {type(error).__name__}: {error}. Define its "
                f"class in a module that can be imported, or make it plain data"
            ) from error
        try:
            value = self._loaded(prompt, completion, right)
        except Exception as error:
            raise ScorerError(self._told(error)) from error
        return _number(value)

    @cached_property
    def _loaded(self) -> Callable[[str, str, Any], Any]:
        found: Any = self._module()
        for part in self.function.split("."):
            if not hasattr(found, part):
                known = [name for name, one in vars(found).items() if callable(one) and not name.startswith("_")]
                hint = did_you_mean(part, known) if known else f"Define it: def {part}({', '.join(ARGUMENTS)})."
                raise ScorerError(f"{self.module} has no function '{self.function}'. {hint}")
            found = getattr(found, part)
        if not callable(found):
            raise ScorerError(
                f"'{self.function}' in {self.module} is of type {type(found).__name__}, which cannot be called. Name a "
                f"function."
            )
        self._require_arguments(found)
        return found  # type: ignore[no-any-return]  # it is callable

    def _module(self) -> ModuleType:
        try:
            if not self.module.endswith(".py"):
                return importlib.import_module(self.module)
            path = Path(self.module)
            sys.path.append(str(path.parent))  # it may import what lies beside it; at the end, so that it hides nothing
            spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up there
            spec.loader.exec_module(module)
        except Exception as error:
            raise ScorerError(f"{self.module} cannot be loaded: {self._told(error)}. Mend it.") from error
        return module

    def _require_arguments(self, found: Callable[..., Any]) -> None:
        try:
            inspect.signature(found).bind(*ARGUMENTS)
        except ValueError:  # a function of C that does not say
            return
        except TypeError as error:
            raise ScorerError(
                f"'{self.function}' in {self.module} cannot be called with ({', '.join(ARGUMENTS)}): {error}. Let it "
                f"take these three."
            ) from error

    def _told(self, error: Exception) -> str:
        """An error with the last line of the user's own file that it came from."""
        lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == self.module]
        where = f" ({Path(self.module).name}, line {lines[-1]})" if lines else ""
        return f"{type(error).__name__}: {error}{where}"


def _number(value: Any) -> float:
    if isinstance(value, numbers.Real) or (hasattr(value, "__float__") and not isinstance(value, str)):
        number = float(value)
        if math.isfinite(number):
            return number
        raise ScorerError(f"it returned {number}, expected a finite number")
    raise ScorerError(f"it returned {value!r:.60} of type {type(value).__name__}, expected a number")
