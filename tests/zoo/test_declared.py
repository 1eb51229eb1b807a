"""What a class declares is what its method reads, fills, reports and refuses."""

import dataclasses
import random
from typing import ClassVar

import pytest

import rlstab as r
from rlstab import PolicyOutputs, TokenBatch
from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.comm import LocalComm
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import settings_of
from rlstab.core.stats import Settled, settle
from rlstab.errors import Conflict, OutOfRange
from tests.examples import EXAMPLES
from tests.zoo.watch import SHIPPED, STEP, instances


class WatchedBatch(TokenBatch):
    """Remembers which of its tensors were looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> object:
        if name in BASICS or name in SIGNALS:
            WatchedBatch.seen.add(name)
        return super().__getattribute__(name)


class WatchedPolicy(PolicyOutputs):
    """Remembers which of its tensors were looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> object:
        if name in ("entropies", "log_kept_mass"):
            WatchedPolicy.seen.add(name)
        return super().__getattribute__(name)


def misdeclared(method: TokenObjective) -> set[str]:
    """Names that are declared and not used in two steps, or used and not declared."""
    # where the live policy is its own denominator: the old log-probs of the ratio are not meant
    whole = dataclasses.replace(STEP.batch(), live_ratio=True)
    batch, policy = WatchedBatch(**vars(whole)), WatchedPolicy(**STEP.leaves())
    state, wrote, penalties = method.init_state(), set[str](), set[str]()
    WatchedBatch.seen.clear()
    for _ in range(2):
        # not by measure_all, which would refuse a batch without tokens that lacks an undeclared signal
        first = settle([method.measure(batch)], LocalComm())
        stat = Settled({**first, **settle([method.measure_again(batch, first)], LocalComm())})
        state = method.advance(state, stat)
        terms = method.terms(batch, stat, state)
        wrote |= terms.filled()
        for penalty in terms.penalties.values():
            WatchedPolicy.seen.clear()
            penalty.fn(policy, policy)
            assert WatchedPolicy.seen == penalty.reads, method
            penalties |= WatchedPolicy.seen
    return (WatchedBatch.seen ^ method.needs) | (penalties ^ method.live_needs) | (wrote ^ method.writes)


@pytest.mark.parametrize("most", [300, pytest.param(10**6, marks=pytest.mark.slow)])
def test_every_method_reads_and_fills_what_it_declares(most: int) -> None:
    for cls in SHIPPED:
        several = instances(cls)
        for method in random.Random(0).sample(several, min(most, len(several))):
            assert misdeclared(method) == set(), method


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
    "value": "entropy_bonus kl sdar",
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
