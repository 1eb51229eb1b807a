"""The methods, one per file. One that is missing here does not exist, neither for Python nor for YAML."""

from __future__ import annotations

from rlstab.core.objective import TokenObjective
from rlstab.core.registry import Registry
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
from rlstab.zoo.kl import KLPenalty as KLPenalty
from rlstab.zoo.kl_cov import KLCov as KLCov
from rlstab.zoo.lp_reg import LpReg as LpReg
from rlstab.zoo.m2po import M2PO as M2PO
from rlstab.zoo.maspo import MASPO as MASPO
from rlstab.zoo.mismatch import Mismatch as Mismatch
from rlstab.zoo.off_policy_mask import OffPolicyMask as OffPolicyMask
from rlstab.zoo.random_mask import RandomMask as RandomMask
from rlstab.zoo.s2t import S2TMask as S2TMask
from rlstab.zoo.sapo import SAPO as SAPO
from rlstab.zoo.sequence_mean import SequenceMean as SequenceMean
from rlstab.zoo.sign_weights import SignWeights as SignWeights
from rlstab.zoo.stare import STARE as STARE
from rlstab.zoo.steer import STEER as STEER
from rlstab.zoo.stream_weight import StreamWeight as StreamWeight
from rlstab.zoo.token_mean import TokenMean as TokenMean
from rlstab.zoo.top_entropy import TopEntropyMask as TopEntropyMask
from rlstab.zoo.truncated_mask import TruncatedMask as TruncatedMask
from rlstab.zoo.vespo import VESPO as VESPO
from rlstab.zoo.wapo import WAPO as WAPO

#: Those that ship, by name.
METHODS: Registry[TokenObjective] = Registry(
    {
        cls.name: f"{cls.__module__}:{cls.__name__}"
        for cls in list(globals().values())
        if isinstance(cls, type) and issubclass(cls, TokenObjective) and cls is not TokenObjective
    }
)
