"""The methods, one per file; each is imported only when it is used."""

from rlstab.core.objective import TokenObjective
from rlstab.core.registry import Registry

#: The table of shipped methods. YAML does not know a method that is missing here.
METHODS: Registry[TokenObjective] = Registry(
    {
        "adaptive_entropy": "rlstab.zoo.adaptive_entropy:AdaptiveEntropy",
        "ar": "rlstab.zoo.ar:AR",
        "aspo": "rlstab.zoo.aspo:ASPO",
        "block_mean": "rlstab.zoo.block_mean:BlockMean",
        "ce_gppo": "rlstab.zoo.ce_gppo:CEGPPO",
        "cispo": "rlstab.zoo.cispo:CISPO",
        "clip_cov": "rlstab.zoo.clip_cov:ClipCov",
        "clip_higher": "rlstab.zoo.clip_higher:ClipHigher",
        "constant_length": "rlstab.zoo.constant_length:ConstantLength",
        "cppo": "rlstab.zoo.cppo:CPPO",
        "dcpo_clip": "rlstab.zoo.dcpo_clip:DCPOClip",
        "distill": "rlstab.zoo.distill:Distill",
        "dppo": "rlstab.zoo.dppo:DPPO",
        "drpo": "rlstab.zoo.drpo:DRPO",
        "entropy_bonus": "rlstab.zoo.entropy_bonus:EntropyBonus",
        "entropy_shaping": "rlstab.zoo.entropy_shaping:EntropyShaping",
        "ess_scale": "rlstab.zoo.ess_scale:ESSScale",
        "fipo": "rlstab.zoo.fipo:FIPO",
        "gmpo": "rlstab.zoo.gmpo:GMPO",
        "gspo": "rlstab.zoo.gspo:GSPO",
        "holder_mean": "rlstab.zoo.holder_mean:HolderMean",
        "importance_correction": "rlstab.zoo.importance_correction:ImportanceCorrection",
        "iw_opd": "rlstab.zoo.iw_opd:IWOPD",
        "kl": "rlstab.zoo.kl:KLPenalty",
        "kl_cov": "rlstab.zoo.kl_cov:KLCov",
        "lp_reg": "rlstab.zoo.lp_reg:LpReg",
        "m2po": "rlstab.zoo.m2po:M2PO",
        "maspo": "rlstab.zoo.maspo:MASPO",
        "max_lag": "rlstab.zoo.max_lag:MaxLag",
        "mismatch": "rlstab.zoo.mismatch:Mismatch",
        "off_policy_mask": "rlstab.zoo.off_policy_mask:OffPolicyMask",
        "opd": "rlstab.zoo.opd:OPD",
        "random_mask": "rlstab.zoo.random_mask:RandomMask",
        "rlsd": "rlstab.zoo.rlsd:RLSD",
        "s2t": "rlstab.zoo.s2t:S2TMask",
        "sapo": "rlstab.zoo.sapo:SAPO",
        "sdar": "rlstab.zoo.sdar:SDAR",
        "sequence_mean": "rlstab.zoo.sequence_mean:SequenceMean",
        "sign_weights": "rlstab.zoo.sign_weights:SignWeights",
        "stare": "rlstab.zoo.stare:STARE",
        "steer": "rlstab.zoo.steer:STEER",
        "stream_weight": "rlstab.zoo.stream_weight:StreamWeight",
        "support_replay": "rlstab.zoo.support_replay:SupportReplay",
        "token_mean": "rlstab.zoo.token_mean:TokenMean",
        "top_entropy": "rlstab.zoo.top_entropy:TopEntropyMask",
        "truncated_mask": "rlstab.zoo.truncated_mask:TruncatedMask",
        "turn_credit": "rlstab.zoo.turn_credit:TurnCredit",
        "vespo": "rlstab.zoo.vespo:VESPO",
        "wapo": "rlstab.zoo.wapo:WAPO",
    }
)
#: The names that `rlstab` exports.
register, available = METHODS.register, METHODS.names
