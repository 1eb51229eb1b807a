"""Every error that rlstab raises on purpose: one tree, each also a standard exception.

A message names who raises it, what is wrong and who is involved, and ends with what to do.
"""

import difflib
import signal
from collections.abc import Iterable
from typing import Any

#: Names that are at least this alike may have been confused.
NEAR = 0.62


class RlstabError(Exception):
    """Root of the tree: ``except RlstabError`` catches everything that rlstab raises on purpose."""


class Conflict(RlstabError, ValueError):
    """Two methods of one composition contradict each other."""


class FitWarning(UserWarning):
    """A method is composed without something that its source combines it with."""


class MissingSignal(RlstabError, KeyError):
    """A method reads a signal that nothing provides."""

    __str__ = Exception.__str__  # that of a KeyError puts the message in quotes


class MethodError(RlstabError, TypeError):
    """A class is not a method, or a method returns something other than the interface asks for."""


class OutOfRange(RlstabError, ValueError):
    """A setting or an argument has a type or value outside what is allowed."""


class ShapeError(RlstabError, ValueError):
    """Tensors that belong together disagree in shape, dtype or device."""


class NonFinite(RlstabError, FloatingPointError):
    """NaN or Inf arrived where a number was needed; the optimizer step was refused."""


class UnknownName(RlstabError, LookupError):
    """No method, preset, task or setting has this name."""


class ConfigError(RlstabError, ValueError):
    """A configuration file cannot be used."""


class DataError(RlstabError, ValueError):
    """A data set cannot be used."""


class ScorerError(RlstabError, RuntimeError):
    """A scorer raised, took too long or cannot run."""


class ModelError(RlstabError, ValueError):
    """A model or tokenizer cannot be used."""


class CheckpointError(RlstabError, RuntimeError):
    """A checkpoint is missing, damaged or of another run."""


class ReportError(RlstabError, ValueError):
    """The runs that a report is asked for do not exist, or none of them can be used."""


class ProcessError(RlstabError, RuntimeError):
    """A process that checks a method died, hangs or cannot be reached."""


class HostError(RlstabError, RuntimeError):
    """A foreign trainer is not what its adapter was written for."""


class MissingPackage(RlstabError, ImportError):
    """An optional package is needed for what was asked."""


def plain(name: str) -> str:
    """A name independent of how it was typed: upper case, ``-`` or a blank for ``_``."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def likeness(name: str, other: str) -> float:
    """Similarity of two names, about 0 to 1: swapped letters cost little, and a common prefix counts."""
    short, long = sorted((plain(name), plain(other)), key=len)
    ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in ((short, long), (sorted(short), sorted(long)))]
    return sum(ratios) / 2 + (0.2 if len(short) >= 3 and long.startswith(short) else 0)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, or all of them."""
    names = sorted(names)
    close = max(names, key=lambda other: likeness(name, other), default="")
    return f"Did you mean '{close}'?" if likeness(name, close) >= NEAR else f"Known: {', '.join(names)}."


def kind_of(value: Any) -> str:
    """The type of a value in an error: ``None``, ``an int``, ``a Tensor``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def reason(error: Exception) -> str:
    """The message of the system or of Python about a file, in one line; the class of the error if it has none."""
    system = getattr(error, "strerror", None)
    return str(system).lower() if system else str(error).partition("\n")[0] or type(error).__name__


def how_ended(code: int) -> str:
    """How a process ended, by its exit code: ``ended with code 1``, ``was ended by SIGKILL``."""
    names = {number.value: number.name for number in signal.Signals}
    return f"ended with code {code}" if code >= 0 else f"was ended by {names.get(-code, f'signal {-code}')}"
