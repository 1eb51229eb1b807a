"""The methods, one per file; each is imported only when it is asked for."""

from __future__ import annotations

from rlstab.core.registry import Registry

#: The static table of what ships. A method missing here does not exist for YAML.
METHODS = Registry(
    {
        "adaptive_entropy": "rlstab.zoo.adaptive_entropy:AdaptiveEntropy",
        "ar": "rlstab.zoo.ar:AR",
        "clip_cov": "rlstab.zoo.clip_cov:ClipCov",
        "clip_higher": "rlstab.zoo.clip_higher:ClipHigher",
        "constant_length": "rlstab.zoo.constant_length:ConstantLength",
        "entropy_bonus": "rlstab.zoo.entropy_bonus:EntropyBonus",
        "entropy_shaping": "rlstab.zoo.entropy_shaping:EntropyShaping",
        "fipo": "rlstab.zoo.fipo:FIPO",
        "kl": "rlstab.zoo.kl:KLPenalty",
        "kl_cov": "rlstab.zoo.kl_cov:KLCov",
        "lp_reg": "rlstab.zoo.lp_reg:LpReg",
        "random_mask": "rlstab.zoo.random_mask:RandomMask",
        "s2t": "rlstab.zoo.s2t:S2TMask",
        "sequence_mean": "rlstab.zoo.sequence_mean:SequenceMean",
        "sign_weights": "rlstab.zoo.sign_weights:SignWeights",
        "stare": "rlstab.zoo.stare:STARE",
        "steer": "rlstab.zoo.steer:STEER",
        "token_mean": "rlstab.zoo.token_mean:TokenMean",
        "top_entropy": "rlstab.zoo.top_entropy:TopEntropyMask",
        "wapo": "rlstab.zoo.wapo:WAPO",
    }
)
