"""Every value of a preset has a source, and is the value of that source."""

from __future__ import annotations

import pytest
import yaml

from rlstab.config import dump_objective, load_objective, load_run
from rlstab.core.compose import Within, walk
from rlstab.core.settings import settings_of
from rlstab.errors import UnknownName
from rlstab.presets import PRESETS, preset

#: Published values, written down by hand; where a source says nothing, the neutral setting.
S2T = {"s2t.max_prob": 0.002, "s2t.quantile": 0.75, "s2t.population": "candidates"}
STARE = {
    "stare.target_entropy": 0.3,
    "stare.variant": "O1",
    "stare.share": 0.1,
    "stare.boost": 1.1,
    "stare.damp": 0.9,
    "stare.increment": 0.0,
    "stare.max_boost": 1.5,
    "stare.min_damp": 0.5,
}

#: Goldilocks and DEEP-GRPO: arXiv 2602.14169 and the configuration of AgentCombo/DEEP-GRPO.
STREAMS = {
    "stream_weight.coefficient": 1.0,
    "goldilocks.pool": 256,
    "goldilocks.discount": 0.5,
    "goldilocks.random_share": 0.2,
    "deep_grpo.branches": 8,
    "deep_grpo.gamma": 2.0,
    "deep_grpo.threshold": 0.0,
    "deep_grpo.groups": "all",
    "deep_grpo.max_parents": None,
    "deep_grpo.window": 10000,
    "deep_grpo.warmup": 10,
}


def clip(low: float, high: float, dual: float | None) -> dict[str, float | None]:
    return {"clip_higher.low": low, "clip_higher.high": high, "clip_higher.dual_clip": dual}


def corrected(**given: object) -> dict[str, object]:
    settings = dict.fromkeys(("min_weight", "max_weight", "keep_low", "keep_high", "veto"))
    every = {"level": "token", **settings, "normalize": False, "denominator": "all", **given}
    return {f"importance_correction.{key}": value for key, value in every.items()}


PUBLISHED = {
    # arXiv 2402.03300: KL k3 with 0.04 in the loss, mean per response; it never says its clip, 0.2 is PPO's
    "grpo": {**clip(0.2, 0.2, None), "kl.coefficient": 0.04, "kl.estimator": "k3", "kl.cap": None},
    # arXiv 2503.14476
    "dapo": clip(0.2, 0.28, None),
    # arXiv 2503.20783 and sail-sg/understand-r1-zero: generate_max_length
    "dr_grpo": {**clip(0.2, 0.2, None), "constant_length.length": 3000},
    # the model card of DeepCoder-14B-Preview, and the script of rllm-org/rllm for 16k
    "grpo_plus": {**clip(0.2, 0.28, None), "truncated_mask.denominator": "kept"},
    # arXiv 2512.16649 and the script of thunlp/JustRL
    "justrl": clip(0.2, 0.28, 10.0),
    # arXiv 2506.01939 eq. 6: the fifth of the tokens, divided by those selected, on top of DAPO
    "20_entropy": {**clip(0.2, 0.28, None), "top_entropy.share": 0.2, "top_entropy.denominator": "kept"},
    # arXiv 2510.03222, 14B: beta 1.0, kappa 0.02, rho 1 %, U = 10
    "lp_reg": {
        "lp_reg.share": 0.01,
        "lp_reg.min_p": 0.02,
        "lp_reg.coefficient": 1.0,
        "lp_reg.form": "paper",
        "lp_reg.ratio_cap": 10.0,
    },
    # arXiv 2606.19236, 7B, and the script of hp-luo/STARE
    "stare": {**clip(0.2, 0.28, 10.0), **STARE},
    # arXiv 2602.15620 v4-v5 on top of JustRL
    "stapo": {**clip(0.2, 0.28, 10.0), **S2T},
    # PRIME-RL/Entropy-Mechanism-of-RL 7b_clip_cov.sh: clip 1 and 1, clip_cov_ratio 0.0002, bounds 1.0 and 5.0
    "clip_cov": {
        **clip(1.0, 1.0, None),
        "clip_cov.share": 0.0002,
        "clip_cov.low": 1.0,
        "clip_cov.high": 5.0,
        "clip_cov.clip_low": 1.0,
        "clip_cov.clip_high": 1.0,
        "clip_cov.seed": 0,
    },
    # PRIME-RL/Entropy-Mechanism-of-RL 7b_kl_cov.sh: k_percent 0.2, ppo_kl_coef 1, and a loss without a clip
    "kl_cov": {"kl_cov.share": 0.002, "kl_cov.coefficient": 1.0},
    # zz-haooo/STEER run_exp.sh
    "steer": {**clip(0.2, 0.28, 10.0), "steer.high": 1.0, "steer.low": 0.8, "steer.form": "exponential"},
    # Henrymachiyu/FIPO run_fipo_qwen2.5_32b.sh: decay_rate 32, clip ratio 0.2 upwards only, safety_thresh 10
    "fipo": {
        **clip(0.2, 0.28, 10.0),
        "fipo.half_life": 32.0,
        "fipo.low": 1.0,
        "fipo.high": 1.2,
        "fipo.max_ratio": 10.0,
        "fipo.safe_ratio": 10.0,
    },
    # zhyang2226/AR-Lopti train_kklogic_AR_4x80GB.sh
    "ar": {**clip(0.2, 0.24, 10.0), "ar.alpha": 0.2, "kl.coefficient": 0.001, "kl.estimator": "k3", "kl.cap": 10.0},
    # layer6ai-labs/wapo numina_lean_math.toml: clip_eps 9, max_seq_len 8192
    "wapo": {**clip(1.0, 9.0, None), "wapo.length": 8192},
    # arXiv 2506.13585 without a number; arXiv 2510.13786: clipped to [0, 5]
    "cispo": {"cispo.cap": 5.0, "cispo.floor": None},
    # arXiv 2507.18071 section 5.1
    "gspo": clip(3e-4, 4e-4, None),
    # callsys/GMPO qwen2.5-math-7b-gmpo.sh: CLIPRANGE
    "gmpo": {"gmpo.low": 0.4, "gmpo.high": 0.4},
    # YihangChen9/HolderPO qwen2.5-math-7b-holder.sh: linear_dec over 500 steps
    "holder_mean": {
        **clip(0.2, 0.2, None),
        "holder_mean.power": 2.0,
        "holder_mean.final_power": -2.0,
        "holder_mean.steps": 500,
    },
    # arXiv 2511.20347
    "sapo": {"sapo.positive": 1.0, "sapo.negative": 1.05},
    # FlyTune/MASPO-RL run_deepseek-r1-distill-qwen-7b.sh
    "maspo": {
        "maspo.sigma": 1.0,
        "maspo.alpha": 0.3,
        "maspo.positive": 0.03,
        "maspo.negative": 0.03,
        "maspo.max_sigma": 10.0,
        "maspo.min_scale": 0.1,
        "maspo.max_scale": 10.0,
        "maspo.cap": None,
    },
    # Kwai-Klear/CE-GPPO, the script for 7B: clip 0.2 and 0.2, beta 0.75 and 1, clip_ratio_c 10
    "ce_gppo": {
        "ce_gppo.low": 0.2,
        "ce_gppo.high": 0.2,
        "ce_gppo.pull_low": 0.75,
        "ce_gppo.pull_high": 1.0,
        "ce_gppo.dual_clip": 10.0,
    },
    # wizard-III/Archer2.0, the script for mathematics
    "aspo": {"aspo.room": 0.2, "aspo.room_high_entropy": 0.4, "aspo.share": 0.2, "aspo.cap": 3.0},
    # FloyedShen/VESPO recipe/vespo/run: K_POS, LAMBDA_POS, K_NEG, LAMBDA_NEG
    "vespo": {
        "vespo.positive_power": 2.0,
        "vespo.positive_decay": 3.0,
        "vespo.negative_power": 3.0,
        "vespo.negative_decay": 2.0,
        "vespo.anchor": "old",
    },
    # verl-project/verl run_qwen30b_dppo.sh
    "dppo": {
        "dppo.divergence": "tv",
        "dppo.high": 0.15,
        "dppo.low": 0.15,
        "dppo.cap": 10000.0,
        "dppo.anchor": "rollout",
        "constant_length.length": 8192,
    },
    # Tencent-Hunyuan/UniRL CPPO: delta of dense models
    "cppo": {
        "cppo.delta": 0.15,
        "cppo.min_weight": 0.8,
        "cppo.min_budget": 0.02,
        "cppo.quantile": 0.9,
        "cppo.anchor": "rollout",
        "constant_length.length": 16384,
    },
    # Tencent-Hunyuan/UniRL DRPO
    "drpo": {"drpo.delta": 12.5, "drpo.anchor": "rollout", "constant_length.length": 8192},
    # Infini-AI-Lab/M2PO: M2_budget
    "m2po": {"m2po.budget": 0.04},
    # yaof20/verl run_dapo_qwen2.5_32b_tis.sh
    "tis": {**clip(0.2, 0.28, 10.0), **corrected(max_weight=2.0)},
    # arXiv 2510.18855; the clip is PPO's
    "icepop": {**clip(0.2, 0.2, None), **corrected(keep_low=0.5, keep_high=5.0)},
    # mit-han-lab/vcpo vcpo_k=10.sh: rollout_is sequence, threshold 8; ESS rule sqrt, base 1
    "vcpo": {
        **corrected(level="sequence", max_weight=8.0),
        "ess_scale.base": 1.0,
        "ess_scale.power": 0.5,
        "ess_scale.anchor": "rollout",
    },
    # a method for each place
    "stack": {**clip(0.2, 0.28, None), **S2T, **STREAMS},
    "stack_stale": {
        **clip(0.2, 0.28, None),
        **S2T,
        **STREAMS,
        **corrected(level="sequence", max_weight=8.0),
        "ess_scale.base": 1.0,
        "ess_scale.power": 0.5,
        "ess_scale.anchor": "rollout",
    },
    # our own: JustRL, S2T, and STARE among the tokens that S2T leaves
    "recommended": {**clip(0.2, 0.28, 10.0), **S2T, **STARE},
}
AVERAGE = {
    **dict.fromkeys(("grpo", "gspo", "gmpo", "holder_mean", "sapo", "icepop", "vcpo"), "sequence_mean"),
    **dict.fromkeys(("dr_grpo", "dppo", "cppo", "drpo"), "constant_length"),
    "wapo": "wapo",
}
ESTIMATOR = {
    **dict.fromkeys(("dr_grpo", "dppo", "cppo", "drpo", "wapo"), "dr_grpo"),
    **dict.fromkeys(("vcpo", "stack_stale"), "opob"),
}

every = pytest.mark.parametrize("name", sorted(PRESETS))


def settings(name: str) -> dict[str, object]:
    """``method.setting`` to value, those inside ``within`` and those of stages too."""
    methods = [leaf.method for leaf in walk(PRESETS[name].objective)]
    return {
        f"{one.name}.{setting.name}": getattr(one, setting.name)
        for one in (*methods, *PRESETS[name].stages)
        for setting in settings_of(type(one))
    }


def test_every_preset_has_its_published_values_written_here():
    assert PUBLISHED.keys() == PRESETS.keys()


@every
def test_its_values_are_the_published_ones(name):
    assert settings(name) == PUBLISHED[name]


@every
def test_it_averages_and_normalises_as_published(name):
    one = PRESETS[name]
    averages = [leaf.name for leaf in walk(one.objective) if "aggregate" in leaf.method.writes]
    assert averages == [AVERAGE.get(name, "token_mean")]
    assert one.estimator == ESTIMATOR.get(name, "grpo")


@every
def test_every_setting_has_a_source_and_no_source_is_stale(name):
    assert PRESETS[name].sources.keys() == settings(name).keys()
    assert all(source.strip() for source in PRESETS[name].sources.values())


@every
def test_a_number_in_a_source_is_the_number_of_the_preset(name):
    found = settings(name)
    for key, source in PRESETS[name].sources.items():
        last = source.rpartition(": ")[2].split(" ")[0]
        if last.replace(".", "", 1).isdigit():
            assert float(last) in (found[key], 100 * float(found[key]))


@every
def test_it_survives_yaml(name):
    objective = PRESETS[name].objective
    assert load_objective(yaml.safe_load(yaml.safe_dump(dump_objective(objective)))) == objective
    assert load_objective({"preset": name}) == objective


@every
def test_it_makes_a_run(name):
    run = load_run({"objective": {"preset": name}})
    assert run.composition == PRESETS[name].objective
    assert set(PRESETS[name].stages) <= set(run.pipeline)
    assert run.pipeline.estimator.name == PRESETS[name].estimator


def test_the_recommended_one_boosts_among_the_tokens_that_are_left():
    (inside,) = (one for one in PRESETS["recommended"].objective.members if isinstance(one, Within))
    assert (inside.outer.name, inside.inner.name) == ("s2t", "stare")


def test_what_it_is_fits_on_a_line():
    assert all(one.about.endswith(".") and len(one.about) < 100 for one in PRESETS.values())


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownName) as caught:
        preset("stpo")
    assert str(caught.value) == "no preset is called 'stpo'. Did you mean 'stapo'?"
    assert preset("stapo") is PRESETS["stapo"]
