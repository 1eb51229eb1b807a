"""What a class declares is what its method reads, fills, reports and refuses."""

import dataclasses

import pytest

import rlstab as r
from rlstab import PolicyOutputs
from rlstab.core.metadata import card
from rlstab.core.method_settings import settings_of
from rlstab.errors import Conflict, OutOfRange
from tests.examples import EXAMPLES
from tests.zoo.watch import SHIPPED, STEP

#: Metrics by the methods that report them, beyond what every loss reports; the other methods report nothing.
REPORTED = {
    "coefficient value": "adaptive_entropy",
    "rejected weight": "importance_correction",
    "gap": "opd",
    "gap weight": "iw_opd",
    "dropped lag": "max_lag",
    "weight": "ar rlsd sign_weights",
    "high_entropy": "aspo",
    "without": "block_mean",
    "candidates hit": "clip_cov",
    "gate stopped": "cppo drpo fipo maspo off_policy_mask sapo",
    "value": "distill entropy_bonus kl sdar",
    "bonus": "entropy_shaping",
    "ess lr_scale": "ess_scale",
    "power": "holder_mean",
    "threshold selected value": "kl_cov lp_reg",
    "threshold harmful dropped": "m2po",
    "k1 k3 chi2 ess log_ppl_diff max_abs_log_ratio": "mismatch",
    "dropped": "random_mask truncated_mask",
    "threshold candidates dropped": "s2t",
    "gate boost threshold boosted damped": "stare",
    "smallest largest weight": "steer",
    "branches weight": "stream_weight",
    "share threshold": "top_entropy",
    "credit": "turn_credit",
    "winners groups": "wapo",
}
METRICS = {name: metrics.split() for metrics, names in REPORTED.items() for name in names.split()}


def test_metrics_have_the_name_of_their_method() -> None:
    batch = STEP.batch()
    for name, methods in EXAMPLES.items():
        own = set[str]()
        for method in methods:
            report = method(batch, PolicyOutputs(**STEP.leaves()), state=method.init_state()).report
            own |= {metric for metric in report if not metric.startswith(("ratio/", "tokens/"))}
        assert own == {f"{name}/{metric}" for metric in METRICS.get(name, [])}


def test_every_setting_is_checked() -> None:
    for cls in SHIPPED:
        for setting in settings_of(cls):
            with pytest.raises(OutOfRange, match=f"'{cls.name}': {setting.name} = 'wrong', expected "):
                dataclasses.replace(EXAMPLES[cls.name][0], **{setting.name: "wrong"})


def test_a_limit_is_reached_at_its_settings_alone() -> None:
    for methods in EXAMPLES.values():
        assert methods[0].about.no_op_at or "Limits" in card(type(methods[0])).sections
        for limit in methods[0].about.no_op_at:
            assert limit.reached(limit.at(methods[0]))


def test_settings_that_contradict_each_other() -> None:
    for cls, given, named in (
        (r.AdaptiveEntropy, {"low": 0.01, "high": 0.001}, "low"),
        (r.AdaptiveEntropy, {"initial": 0.1}, "initial"),
        (r.ImportanceCorrection, {"min_weight": 3.0}, "min_weight"),
        (r.ImportanceCorrection, {"keep_low": 2.0, "keep_high": 0.5}, "keep_low"),
        (r.Mismatch, {"to": "old_logprobs"}, "of and to"),
        (r.MASPO, {"sigma": 11.0}, "max_sigma"),
        (r.MASPO, {"min_scale": 2.0, "max_scale": 1.0}, "min_scale"),
        (r.STARE, {"increment": 0.1, "boost": 2.0}, "boost"),
        (r.STARE, {"increment": 0.1, "damp": 0.2}, "damp"),
        (r.ClipCov, {"low": 6.0}, "low"),
        (r.CISPO, {"cap": 0.2}, "cap"),
    ):
        with pytest.raises(OutOfRange, match=f"'{cls.name}': .*{named}"):
            cls(**given)
    assert r.STARE(boost=2.0, damp=0.2).increment == 0  # gains that never move have no bounds
    assert r.ImportanceCorrection(max_weight=None, keep_low=2.0, keep_high=None).keep_low == 2.0  # None is no bound


def test_methods_that_would_do_one_thing_twice() -> None:
    for method, other in (
        (r.DPPO(), r.GSPO()),
        (r.DPPO(), r.ClipHigher()),
        (r.DPPO(), r.ImportanceCorrection()),
        (r.VESPO(), r.GSPO()),
        (r.VESPO(), r.ImportanceCorrection()),
    ):
        with pytest.raises(Conflict, match=f"'{method.name}' and '{other.name}' exclude each other"):
            r.compose(method, other)
    assert r.compose(r.DPPO(anchor="old"), r.ImportanceCorrection())
