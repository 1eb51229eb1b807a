"""What type checkers and editors see of the package: its names are imported when they are first used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstab import errors as errors
from rlstab.core.batch import TokenBatch as TokenBatch, to_padded as to_padded
from rlstab.core.comm import TorchComm as TorchComm
from rlstab.core.compose import Composition as Composition, compose as compose, observe as observe, within as within
from rlstab.core.loss import LossOutput as LossOutput
from rlstab.core.metadata import About as About, NoOpAt as NoOpAt
from rlstab.core.objective import State as State, TokenObjective as TokenObjective
from rlstab.core.plan import Plan as Plan, make_plan as make_plan
from rlstab.core.policy_outputs import PolicyOutputs as PolicyOutputs
from rlstab.core.method_settings import Range as Range
from rlstab.core.stats import (
    NOTHING as NOTHING,
    Grouped as Grouped,
    Mean as Mean,
    Pool as Pool,
    Settled as Settled,
    Stat as Stat,
    Threshold as Threshold,
)
from rlstab.core.step import OptimizerStep as OptimizerStep
from rlstab.core.terms import (
    Bounds as Bounds,
    Constants as Constants,
    Gate as Gate,
    Penalty as Penalty,
    Surrogate as Surrogate,
    Terms as Terms,
)
from rlstab.presets import preset as preset
from rlstab.signals import token_signals as token_signals
from rlstab.zoo.adaptive_entropy import AdaptiveEntropy as AdaptiveEntropy
from rlstab.zoo.ar import AR as AR
from rlstab.zoo.aspo import ASPO as ASPO
from rlstab.zoo.block_mean import BlockMean as BlockMean
from rlstab.zoo.ce_gppo import CEGPPO as CEGPPO
from rlstab.zoo.cispo import CISPO as CISPO
from rlstab.zoo.clip_cov import ClipCov as ClipCov
from rlstab.zoo.clip_higher import ClipHigher as ClipHigher
from rlstab.zoo.constant_length import ConstantLength as ConstantLength
from rlstab.zoo.cppo import CPPO as CPPO
from rlstab.zoo.dcpo_clip import DCPOClip as DCPOClip
from rlstab.zoo.distill import Distill as Distill
from rlstab.zoo.dppo import DPPO as DPPO
from rlstab.zoo.drpo import DRPO as DRPO
from rlstab.zoo.entropy_bonus import EntropyBonus as EntropyBonus
from rlstab.zoo.entropy_shaping import EntropyShaping as EntropyShaping
from rlstab.zoo.ess_scale import ESSScale as ESSScale
from rlstab.zoo.fipo import FIPO as FIPO
from rlstab.zoo.gmpo import GMPO as GMPO
from rlstab.zoo.gspo import GSPO as GSPO
from rlstab.zoo.holder_mean import HolderMean as HolderMean
from rlstab.zoo.importance_correction import ImportanceCorrection as ImportanceCorrection
from rlstab.zoo.iw_opd import IWOPD as IWOPD
from rlstab.zoo.kl import KLPenalty as KLPenalty
from rlstab.zoo.kl_cov import KLCov as KLCov
from rlstab.zoo.lp_reg import LpReg as LpReg
from rlstab.zoo.m2po import M2PO as M2PO
from rlstab.zoo.maspo import MASPO as MASPO
from rlstab.zoo.max_lag import MaxLag as MaxLag
from rlstab.zoo.mismatch import Mismatch as Mismatch
from rlstab.zoo.off_policy_mask import OffPolicyMask as OffPolicyMask
from rlstab.zoo.opd import OPD as OPD
from rlstab.zoo.random_mask import RandomMask as RandomMask
from rlstab.zoo.rlsd import RLSD as RLSD
from rlstab.zoo.s2t import S2TMask as S2TMask
from rlstab.zoo.sapo import SAPO as SAPO
from rlstab.zoo.sdar import SDAR as SDAR
from rlstab.zoo.sequence_mean import SequenceMean as SequenceMean
from rlstab.zoo.sign_weights import SignWeights as SignWeights
from rlstab.zoo.stare import STARE as STARE
from rlstab.zoo.steer import STEER as STEER
from rlstab.zoo.stream_weight import StreamWeight as StreamWeight
from rlstab.zoo.support_replay import SupportReplay as SupportReplay
from rlstab.zoo.token_mean import TokenMean as TokenMean
from rlstab.zoo.top_entropy import TopEntropyMask as TopEntropyMask
from rlstab.zoo.truncated_mask import TruncatedMask as TruncatedMask
from rlstab.zoo.turn_credit import TurnCredit as TurnCredit
from rlstab.zoo.vespo import VESPO as VESPO
from rlstab.zoo.wapo import WAPO as WAPO

__version__: str

def register(cls: type[TokenObjective]) -> type[TokenObjective]:
    """Decorator: make a user-defined method usable in YAML by its ``name``.

    Raises:
        Conflict: another class has that name.
        MethodError: it is not a method.
    """

def available() -> list[str]:
    """Names of all methods: those that ship, those of installed packages, and those registered by hand."""

def load_objective(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Composition: ...
