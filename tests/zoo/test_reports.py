"""What each method reports."""

from rlstab.zoo import METHODS
from tests.core.steps import batch_of, live_of, random_rows

ROWS = random_rows(11, [3, 5, 0, 7, 4])
#: Of a composition with nothing but this method, beyond what every loss reports.
REPORTED = {
    "adaptive_entropy": {"coefficient", "value"},
    "cispo": set(),
    "aspo": {"high_entropy"},
    "ce_gppo": set(),
    "ar": {"weight"},
    "block_mean": {"without"},
    "clip_cov": {"candidates", "hit"},
    "clip_higher": set(),
    "constant_length": set(),
    "cppo": {"gate", "stopped"},
    "dcpo_clip": set(),
    "dppo": set(),
    "drpo": {"gate", "stopped"},
    "entropy_bonus": {"value"},
    "gmpo": set(),
    "gspo": set(),
    "ess_scale": {"ess", "lr_scale"},
    "importance_correction": {"weight"},
    "holder_mean": {"power"},
    "entropy_shaping": {"bonus"},
    "fipo": {"gate", "stopped"},
    "kl": {"value"},
    "kl_cov": {"threshold", "selected", "value"},
    "lp_reg": {"threshold", "selected", "value"},
    "mismatch": {"k1", "k3", "chi2", "ess", "log_ppl_diff", "max_abs_log_ratio"},
    "maspo": {"gate", "stopped"},
    "m2po": {"threshold", "harmful", "dropped"},
    "off_policy_mask": {"gate", "stopped"},
    "random_mask": {"dropped"},
    "s2t": {"threshold", "candidates", "dropped"},
    "sapo": {"gate", "stopped"},
    "sequence_mean": set(),
    "sign_weights": {"weight"},
    "stare": {"gate", "boost", "threshold", "boosted", "damped"},
    "steer": {"smallest", "largest", "weight"},
    "stream_weight": {"branches", "weight"},
    "token_mean": set(),
    "top_entropy": {"share", "threshold"},
    "vespo": set(),
    "truncated_mask": {"dropped"},
    "wapo": {"winners", "groups"},
}
CHOSEN = {
    "adaptive_entropy": {"target_entropy": 9.0, "initial": 0.001},
    "constant_length": {"length": 7},
    "stare": {"target_entropy": 9.0, "variant": "C2"},
    "wapo": {"length": 7},
}


def test_metrics_have_the_name_of_their_method():
    batch = batch_of(ROWS)
    for name in METHODS.names():
        method = METHODS.get(name)(**CHOSEN.get(name, {}))
        out = method(batch, live_of(batch, ROWS)[0], state=method.init_state())
        own = {metric for metric in out.report if not metric.startswith(("ratio/", "tokens/"))}
        assert own == {f"{name}/{metric}" for metric in REPORTED[name]}
