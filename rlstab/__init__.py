"""Token-level stability methods for RL with verifiable rewards, as small exact modules that compose into one loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstab import errors
from rlstab.core.batch import TokenBatch
from rlstab.core.comm import TorchComm
from rlstab.core.compose import Composition, compose, within
from rlstab.core.loss import LossOutput
from rlstab.core.objective import State, TokenObjective
from rlstab.core.observe import observe
from rlstab.core.plan import Plan, make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.settings import Range
from rlstab.core.stats import NOTHING, Grouped, Mean, Pool, Settled, Stat, Threshold
from rlstab.core.terms import Bounds, Gate, Held, Penalty, Pull, Terms
from rlstab.presets import preset
from rlstab.signals import token_signals
from rlstab.zoo import METHODS
from rlstab.zoo.adaptive_entropy import AdaptiveEntropy
from rlstab.zoo.ar import AR
from rlstab.zoo.aspo import ASPO
from rlstab.zoo.block_mean import BlockMean
from rlstab.zoo.ce_gppo import CEGPPO
from rlstab.zoo.cispo import CISPO
from rlstab.zoo.clip_cov import ClipCov
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.constant_length import ConstantLength
from rlstab.zoo.cppo import CPPO
from rlstab.zoo.dcpo_clip import DCPOClip
from rlstab.zoo.dppo import DPPO
from rlstab.zoo.drpo import DRPO
from rlstab.zoo.entropy_bonus import EntropyBonus
from rlstab.zoo.entropy_shaping import EntropyShaping
from rlstab.zoo.ess_scale import ESSScale
from rlstab.zoo.fipo import FIPO
from rlstab.zoo.gmpo import GMPO
from rlstab.zoo.gspo import GSPO
from rlstab.zoo.holder_mean import HolderMean
from rlstab.zoo.importance_correction import ImportanceCorrection
from rlstab.zoo.kl import KLPenalty
from rlstab.zoo.kl_cov import KLCov
from rlstab.zoo.lp_reg import LpReg
from rlstab.zoo.m2po import M2PO
from rlstab.zoo.maspo import MASPO
from rlstab.zoo.mismatch import Mismatch
from rlstab.zoo.off_policy_mask import OffPolicyMask
from rlstab.zoo.random_mask import RandomMask
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.sapo import SAPO
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.sign_weights import SignWeights
from rlstab.zoo.stare import STARE
from rlstab.zoo.steer import STEER
from rlstab.zoo.stream_weight import StreamWeight
from rlstab.zoo.token_mean import TokenMean
from rlstab.zoo.top_entropy import TopEntropyMask
from rlstab.zoo.truncated_mask import TruncatedMask
from rlstab.zoo.vespo import VESPO
from rlstab.zoo.wapo import WAPO

__version__ = "0.2.0"

__all__ = [
    "AR",
    "ASPO",
    "CEGPPO",
    "CISPO",
    "CPPO",
    "DPPO",
    "DRPO",
    "FIPO",
    "GMPO",
    "GSPO",
    "M2PO",
    "MASPO",
    "NOTHING",
    "SAPO",
    "STARE",
    "STEER",
    "VESPO",
    "WAPO",
    "AdaptiveEntropy",
    "BlockMean",
    "Bounds",
    "ClipCov",
    "ClipHigher",
    "Composition",
    "ConstantLength",
    "DCPOClip",
    "ESSScale",
    "EntropyBonus",
    "EntropyShaping",
    "Gate",
    "Grouped",
    "Held",
    "HolderMean",
    "ImportanceCorrection",
    "KLCov",
    "KLPenalty",
    "LossOutput",
    "LpReg",
    "Mean",
    "Mismatch",
    "OffPolicyMask",
    "Penalty",
    "Plan",
    "PolicyOutputs",
    "Pool",
    "Pull",
    "RandomMask",
    "Range",
    "S2TMask",
    "SequenceMean",
    "Settled",
    "SignWeights",
    "Stat",
    "State",
    "StreamWeight",
    "Terms",
    "Threshold",
    "TokenBatch",
    "TokenMean",
    "TokenObjective",
    "TopEntropyMask",
    "TorchComm",
    "TruncatedMask",
    "available",
    "compose",
    "errors",
    "load_objective",
    "make_plan",
    "observe",
    "preset",
    "register",
    "token_signals",
    "within",
]

#: Decorator: give a method of your own its name in YAML. See :meth:`rlstab.core.registry.Registry.register`.
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
