"""What other trainers call the metrics of rlstab, and what has to be done to a value to make it ours.

Sources: `trl/trainer/grpo_trainer.py` of TRL 1.16 (`self._metrics`), and `Trainer.log` of transformers for the norm and
the learning rate; ms-swift 3 for `entropy/mean`; verl 0.9 at 1dda039 (`verl/trainer/ppo/metric_utils.py`,
`core_algos.py`, `rollout_corr_helper.py`, `verl/utils/debug/metrics.py`); prime-rl at 559b447 (`docs/training.md`);
the loss functions of slime and of NeMo-RL. Names of older releases and of recorders stand after them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from rlstab.signs import TOTALS

#: From a value in a log to the value of the rlstab metric.
Turn = Callable[[float], float]


def _same(value: float) -> float:
    return value


def _other_share(value: float) -> float:
    return 1.0 - value


#: By our name, the foreign ones in the order in which they are preferred. Ours stands for itself before them.
_NAMES: Mapping[str, str] = {
    "reward/mean": "reward critic/score/mean critic/rewards/mean reward/all/mean rollout/raw_reward reward_mean",
    "reward/zero_std_groups": "frac_reward_zero_std zero_variance_group_frac",
    "tokens/entropy": """entropy entropy/mean actor/entropy actor/entropy_loss entropy/all/mean approx_entropy
        entropy_loss entropy_mean""",
    "gradient/norm": "grad_norm actor/grad_norm optim/grad_norm",
    "response/ended": """completions/clipped_ratio response_length/clip_ratio is_truncated/all/mean
        rollout/truncated_ratio truncation_rate""",
    "response/length": """completions/mean_length completion_length response_length/mean seq_len/all/mean
        rollout/response_len/mean mean_gen_tokens_per_sample completion_len_mean""",
    "response/repetition": "rollout/repetition_frac repetition_frac repetition_rate",
    "ratio/clipped": """clip_ratio/region_mean clip_ratio cispo_clip_ratio actor/pg_clipfrac pg_clipfrac
        clip_fraction""",
    "sampler/gap": "sampling/sampling_logp_difference/mean train_rollout_logprob_abs_diff",
    "mismatch/k3": "rollout_corr/k3_kl mismatch_kl/all/mean gen_kl_error",
    "sampler/probability_gap": "training/rollout_probs_diff_mean",
    "correction/weight": """importance_correction/weight sampling/importance_sampling_ratio/mean
        rollout_corr/rollout_is_mean""",
    "kl/value": "kl actor/kl_loss actor/reward_kl_penalty kl_loss kl_penalty kl_mean kl_divergence",
    "advantage/std": "critic/advantages/std advantages/std advantage_std adv_std",
    "eval/mean": """eval_reward eval/reward eval/accuracy eval_accuracy eval/score eval_score validation/accuracy
        val/accuracy""",
    "lr": "learning_rate actor/lr optim/lr",
}
#: The same, each with what makes its value ours: others log the share of responses that are cut off.
ALIASES: Mapping[str, Mapping[str, Turn]] = {
    ours: dict.fromkeys(names.split(), _other_share if ours == "response/ended" else _same)
    for ours, names in _NAMES.items()
}

#: Metrics of rlstab that are sums of other rlstab metrics; its own logs have all of these.
SUMS: Mapping[str, tuple[str, ...]] = {
    "ratio/clipped": ("ratio/clipped_high", "ratio/clipped_low", "ratio/clipped_dual"),
}

#: Metrics of rlstab that stand in for another that is missing: the same quantity, over fewer tokens.
STAND_INS: Mapping[str, str] = {"sampler/gap": "sampler/gap_live"}

#: Ours that only rlstab logs.
OURS_ALONE = ("gradient/largest_norm", "optimizer_steps/refused")

#: verl's largest and smallest reward of a step. Where they are equal no group has a gradient.
EXTREMES = ("critic/score/max", "critic/score/min")
#: TRL's standard deviation of all rewards of a step; 0 says the same.
SPREAD = "reward_std"

#: Names with a part that is the user's: held-out scores of verl, of a data set, and of prime-rl, of an environment.
HELD_OUT = re.compile(r"val-core/.+/(acc|reward|score)/mean@\d+|val/test_score/.+|eval/[^/]+/avg@\d+")
#: Metrics that do not tell that something was trained.
BESIDE = {"lr", "eval/mean"}
#: One of several rewards: ours, and that of TRL and ms-swift. A total may have a name of the kind.
PART = re.compile(r"reward/([^/]+)|rewards/(.+)/mean|rewards/([^/]+)")

#: What trackers put before a name.
_PREFIX = re.compile(r"^(train|trainer|metrics?|Train)/")


def our_metrics(row: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    """One row of a log under our names: each with the name that it had there, and our value.

    Args:
        row: values by the names of the log, NaN and Inf among them.
    """
    bare = {_PREFIX.sub("", name): (name, value) for name, value in row.items()}
    metrics: dict[str, tuple[str, float]] = {}
    for ours, foreign in ALIASES.items():
        for name, turn in {ours: _same, **foreign}.items():
            if name in bare:
                metrics[ours] = bare[name][0], turn(bare[name][1])
                break
    for ours, parts in SUMS.items():
        there = [part for part in parts if part in bare]
        if ours not in metrics and there:
            metrics[ours] = " + ".join(bare[part][0] for part in there), sum(bare[part][1] for part in there)
    for ours, other in STAND_INS.items():
        if ours not in metrics and other in bare:
            metrics[ours] = bare[other]
    if "reward/zero_std_groups" not in metrics:
        metrics |= _no_spread(bare)
    if "eval/mean" not in metrics and (held_out := sorted(filter(HELD_OUT.fullmatch, bare))):
        metrics["eval/mean"] = bare[held_out[0]]
    for name in bare:
        if (part := PART.fullmatch(name)) and (ours := f"reward/{part[1] or part[2] or part[3]}") not in TOTALS:
            metrics[ours] = bare[name]
    return metrics | {name: bare[name] for name in OURS_ALONE if name in bare}


def _no_spread(bare: Mapping[str, tuple[str, float]]) -> dict[str, tuple[str, float]]:
    """Whether all rewards of the step are equal, and so those of each group: 1 or 0, a lower bound of the share."""
    high, low = map(bare.get, EXTREMES)
    if high and low:
        return {"reward/zero_std_groups": (f"{high[0]} = {low[0]}", float(high[1] == low[1]))}
    if spread := bare.get(SPREAD):
        return {"reward/zero_std_groups": (f"{spread[0]} = 0", float(spread[1] == 0))}
    return {}


def known(names: Iterable[str]) -> bool:
    """Whether a log with such names has a metric of the training to look at."""
    return bool(our_metrics(dict.fromkeys(names, 0.5)).keys() - BESIDE)
