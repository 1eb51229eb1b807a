"""Token-level stability methods for RL with verifiable rewards, as small exact modules that compose into one loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstab import errors as errors
from rlstab.core.batch import TokenBatch as TokenBatch
from rlstab.core.batch import to_padded as to_padded
from rlstab.core.comm import TorchComm as TorchComm
from rlstab.core.compose import Composition as Composition
from rlstab.core.compose import compose as compose
from rlstab.core.compose import observe as observe
from rlstab.core.compose import within as within
from rlstab.core.loss import LossOutput as LossOutput
from rlstab.core.metadata import About as About
from rlstab.core.metadata import Interaction as Interaction
from rlstab.core.metadata import NoOpAt as NoOpAt
from rlstab.core.objective import State as State
from rlstab.core.objective import TokenObjective as TokenObjective
from rlstab.core.plan import Plan as Plan
from rlstab.core.plan import make_plan as make_plan
from rlstab.core.policy_outputs import PolicyOutputs as PolicyOutputs
from rlstab.core.settings import Range as Range
from rlstab.core.stats import NOTHING as NOTHING
from rlstab.core.stats import Grouped as Grouped
from rlstab.core.stats import Mean as Mean
from rlstab.core.stats import Pool as Pool
from rlstab.core.stats import Settled as Settled
from rlstab.core.stats import Stat as Stat
from rlstab.core.stats import Threshold as Threshold
from rlstab.core.terms import Bounds as Bounds
from rlstab.core.terms import Constants as Constants
from rlstab.core.terms import Gate as Gate
from rlstab.core.terms import Penalty as Penalty
from rlstab.core.terms import Surrogate as Surrogate
from rlstab.core.terms import Terms as Terms
from rlstab.presets import preset as preset
from rlstab.signals import token_signals as token_signals
from rlstab.zoo import *  # noqa: F403  # every method; the list is there
from rlstab.zoo import METHODS

__version__ = "0.2.0"

#: Decorator: make a method known by its name, in YAML too. See :meth:`rlstab.core.registry.Registry.register`.
register = METHODS.register


def available() -> list[str]:
    """Names of all methods: those that ship, those of installed packages, and those registered by hand."""
    return METHODS.names()


def load_objective(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Composition:
    """An objective from YAML.

    Args:
        source: path of a YAML file, or what such a file holds: a list of methods, a mapping with the key
            ``objective`` (a run file: the rest is left alone), or the mapping of a single method.

    Raises:
        ConfigError: with file and line: unknown name, value out of range, no such file, not YAML.
        Conflict: the methods do not fit together.
    """
    from rlstab.config import load_objective as load  # pydantic stays out of `import rlstab`

    return load(source)
