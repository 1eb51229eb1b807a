"""Every error that rlstab raises on purpose: one tree, each also a standard-library exception.

A message names who, what, the parties, and ends with what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class RlstabError(Exception):
    """Root of the tree: ``except RlstabError`` catches everything that rlstab raises on purpose."""


class Conflict(RlstabError, ValueError):
    """Two methods of one composition cannot both hold."""


class FitWarning(UserWarning):
    """A method is composed without what its source describes it with."""


class MissingSignal(RlstabError, KeyError):
    """A method reads a signal that nobody provides."""

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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known)}."


def kind_of(value: Any) -> str:
    """What a value is, in an error: ``None``, ``an int``, ``a Tensor``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def reason(error: Exception) -> str:
    """What the system or Python says is wrong with a file, in one line; the error's class where it says nothing."""
    system = getattr(error, "strerror", None)
    return str(system).lower() if system else str(error).partition("\n")[0] or type(error).__name__
