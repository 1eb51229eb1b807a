"""Settings of each method and stage at which it has something to do on what the laws draw; each has some."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rlstab.core.compose import Composition, compose
from rlstab.core.objective import TokenObjective
from rlstab.core.registry import Registry
from rlstab.errors import Conflict
from rlstab.stages import STAGES
from rlstab.stages.stage import Stage
from rlstab.zoo import METHODS

T = TypeVar("T", TokenObjective, Stage)


def _made(registry: Registry[T], settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> Mapping[str, tuple[T, ...]]:
    """Each method or stage with some settings, at its defaults where none are listed."""
    shipped = registry.shipped_classes()
    names = [name for name in registry.names() if registry.get(name).__name__ in shipped]
    assert settings.keys() <= set(names)
    return {name: tuple(registry.get(name)(**some) for some in settings.get(name, [{}])) for name in names}


EXAMPLES = _made(
    METHODS,
    {
        "adaptive_entropy": [{"target_entropy": 0.8, "initial": 0.002}],
        "ar": [{}, {"alpha": 0.9}],
        "aspo": [{}, {"room": 0.05, "room_high_entropy": 0.3, "share": 0.5, "cap": 1.2}],
        "ce_gppo": [{}, {"low": 0.1, "high": 0.28, "pull_low": 0.5, "pull_high": 0.25, "dual_clip": 1.5}],
        "cispo": [{"cap": 1.1}, {"cap": 1.2, "floor": 0.9}, {"cap": 1.05, "negative_cap": 1.3, "negative_floor": 0.95}],
        "clip_cov": [
            {"share": 0.1, "low": 0.3},
            {"share": 0.3, "low": -1.0, "high": 3.0, "clip_low": 0.1, "clip_high": 0.1, "seed": 3},
        ],
        "clip_higher": [{}, {"low": 0.1, "high": 0.1, "dual_clip": 1.5}],
        "constant_length": [{"length": 7}],
        "cppo": [
            {"delta": 0.05},
            {"delta": 0.1, "min_weight": 0.5, "min_budget": 0.005, "quantile": 0.5, "anchor": "old"},
        ],
        "dcpo_clip": [{}, {"low": 0.02, "high": 0.03, "cap": 1.5, "dual_clip": None}],
        "distill": [{}, {"coefficient": 0.3, "beta": 0.5, "top_k": 8, "alone": True}],
        "dppo": [
            {"high": 0.05, "low": 0.05, "cap": 1.2},
            {"divergence": "kl", "high": 0.01, "low": 0.01},
            {"high": 0.1, "low": 0.05, "cap": 1.5, "anchor": "old"},
            {"high": 0.02, "low": 0.02, "stops": "all"},
        ],
        "drpo": [{}, {"delta": 0.15}, {"delta": 0.1, "anchor": "old"}],
        "entropy_shaping": [{}, {"alpha": 0.1, "kappa": 5.0}],
        "ess_scale": [{}, {"base": 0.9, "power": 1.0, "anchor": "old"}],
        "fipo": [{}, {"half_life": 2.0, "low": 0.8, "high": 1.5, "max_ratio": 1.3, "safe_ratio": 1.1}],
        "gmpo": [{}, {"low": 0.1, "high": 0.2}],
        "holder_mean": [{"steps": 2}, {"power": 0.0, "final_power": 3.0, "steps": 4}],
        "importance_correction": [
            {"max_weight": 1.01},
            {"level": "sequence", "min_weight": 0.98, "max_weight": 1.02, "normalize": True},
            {"max_weight": None, "keep_low": 0.99, "keep_high": 1.01, "normalize": True, "denominator": "kept"},
            {"level": "geometric", "keep_low": 0.995, "veto": 0.98},
            {"level": "sequence", "keep_high": 1.01, "denominator": "kept"},
            {"divergence": "max_k2", "max_divergence": 0.0002, "denominator": "kept"},
            {"divergence": "mean_error", "max_divergence": 1.01},
            {"divergence": "mean_kl", "max_divergence": 2e-5},
        ],
        "iw_opd": [{}, {"gain": 2.0}],
        "kl": [
            {"coefficient": 0.1, "estimator": "k1"},
            {"coefficient": 0.1, "estimator": "k2"},
            {"coefficient": 0.1, "estimator": "k3"},
            {"coefficient": 0.1, "estimator": "k3_unbiased", "cap": None},
            {"estimator": "k3_straight_through"},
            {"coefficient": 0.1, "estimator": "k2", "anchor": "rollout"},
            {"coefficient": 0.1, "anchor": "old"},
        ],
        "kl_cov": [{"share": 0.1}, {"share": 0.3, "coefficient": 0.2}],
        "lp_reg": [{"share": 0.3}, {"share": 0.4, "form": "code"}, {"share": 0.3, "ratio_cap": 1.2}],
        "m2po": [{"budget": 0.0001}],
        "maspo": [{}, {"sigma": 0.2, "alpha": 0.5, "positive": 1.0, "negative": 2.0, "max_sigma": 0.5, "cap": 1.1}],
        "max_lag": [{"updates": 1}, {"updates": 1, "denominator": "all"}],
        "mismatch": [{}, {"of": "logprobs"}, {"of": "logprobs", "to": "old_logprobs"}],
        "off_policy_mask": [{"max_gap": 0.05}, {"max_gap": 0.0, "anchor": "old"}],
        "opd": [{}, {"coefficient": 0.2, "alone": True}],
        "random_mask": [{"share": 0.3}, {"share": 0.5, "sign": "all", "seed": 7}],
        "rlsd": [{}, {"mix": 1.0, "clip": 0.5, "punished_only": True}],
        "s2t": [{"max_prob": 0.02}, {"max_prob": 0.05, "population": "all", "quantile": 0.8}],
        "sapo": [{}, {"positive": 3.0, "negative": 6.0}],
        "sdar": [{}, {"coefficient": 0.5, "sharpness": 1.0}],
        "sign_weights": [{}, {"positive": 0.0}, {"positive": 1.0, "negative": 0.0}],
        "stare": [{"target_entropy": 0.8}, {"target_entropy": 0.8, "variant": "C2", "share": 0.3, "increment": 0.05}],
        "steer": [{}, {"low": 0.5, "form": "linear"}],
        "stream_weight": [{}, {"coefficient": 0.3}],
        "top_entropy": [{}, {"share": 0.5, "denominator": "all"}],
        "truncated_mask": [{}, {"denominator": "all"}],
        "turn_credit": [{}, {"coefficient": 0.5, "normalise": False}, {"epsilon": 0.01}],
        "vespo": [{}, {"positive_power": 1.0, "negative_decay": 0.5, "anchor": "rollout"}],
        "wapo": [{"length": 7}],
    },
)

STAGE_EXAMPLES = _made(
    STAGES,
    {
        "blockwise": [{}, {"shrink": 2.0}],
        "bnpo": [{}, {"low": -1.0, "high": 2.0}],
        "deep_grpo": [
            {},
            {"branches": 3, "gamma": 0.5, "threshold": 0.5, "groups": "failed", "max_parents": 1, "window": 4}
            | {"warmup": 0},
        ],
        "dynamic_sampling": [{}, {"max_refills": 0}, {"rewards": "raw"}],
        "gdpo": [{}, {"whiten": False}, {"epsilon": 1e-06}],
        "gigpo": [{}, {"weight": 0.5, "gamma": 1.0, "std": False}, {"epsilon": 0.01}],
        "goldilocks": [{"pool": 24}, {"pool": 9, "discount": 1.0, "random_share": 0.0}],
        "goldilocks_teacher": [{"pool": 24, "candidates": 3, "window": 8}, {"candidates": 2, "random_share": 0.0}],
        "grpo": [{}, {"std": False}, {"epsilon": 1e-06, "ddof": 0}],
        "in_order": [{}, {"shuffle": False}],
        "laconic": [{"budget": 6.0}, {"budget": 4.0, "step": 0.1, "floor": 0.05, "ceiling": 0.5, "most": 0.2}],
        "opob": [{}, {"norm_by_std": False}],
        "opob_proxy": [{}, {"norm_by_std": False}],
        "optimal_token_baseline": [{}, {"zero_tail": False}],
        "overlong": [{"buffer": 4}, {"buffer": 12, "penalty": 0.5}],
        "paced": [{"pool": 24}, {"pool": 9, "target": 0.25, "discount": 0.0}],
        "reinforce_pp": [{}, {"baseline": True}],
        "uniform": [{}, {"pool": 9}],
    },
)


def random_compositions(count: int, seed: int) -> list[Composition]:
    """Different compositions of two and three methods that do not conflict, drawn by ``seed``."""
    rng = random.Random(seed)
    everything = [method for several in EXAMPLES.values() for method in several]
    chosen: dict[str, Composition] = {}
    for size in itertools.cycle((2, 3)):
        if len(chosen) >= count:
            break
        try:
            composition = compose(*rng.sample(everything, size))
        except Conflict:
            continue
        chosen[repr(composition)] = composition
    return list(chosen.values())
