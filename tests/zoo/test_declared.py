"""What a class declares is what its method does, seen by watching what is read and filled."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlstab import EntropyBonus, KLPenalty, Penalty, PolicyOutputs, S2TMask, Settled, Terms, TokenBatch, TokenMean
from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.comm import LocalComm
from rlstab.core.objective import TokenObjective
from rlstab.core.stats import settle
from rlstab.zoo import METHODS
from tests.zoo.watch import evidence, examples, live


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
    tensors = evidence()
    # where the live policy is its own denominator: the old log-probs of the ratio are not meant
    batch = WatchedBatch.from_padded(live_ratio=True, **tensors)
    policy = WatchedPolicy.from_padded(batch, **live(tensors))
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


def test_every_method_reads_and_fills_what_it_declares() -> None:
    for cls in map(METHODS.get, METHODS.names()):
        for method in examples(cls):
            assert misdeclared(method) == set(), method


def test_what_is_wrong_is_found() -> None:
    class NeedsMore(S2TMask):
        needs = {"logprobs", "entropies", "max_logprobs"}

    class NeedsLess(S2TMask):
        needs = {"entropies"}

    class DifferentiatesMore(KLPenalty):
        live_needs = {"entropies"}

    class DifferentiatesLess(EntropyBonus):
        live_needs = set[str]()

    class WritesMore(S2TMask):
        writes = {"keep", "weight"}

    class FillsMore(TokenMean):
        def terms(self, batch: TokenBatch, stat: Settled, state: object) -> Terms:
            return Terms(weight=torch.ones_like(batch.advantages))

    class PenaltyReadsMore(EntropyBonus):
        def terms(self, batch: TokenBatch, stat: Settled, state: object) -> Terms:
            return Terms(penalties={"": Penalty(-0.1, lambda policy, anchor: policy.logprobs, reads={"entropies"})})

    assert misdeclared(NeedsMore()) == {"max_logprobs"}
    assert misdeclared(NeedsLess()) == {"logprobs"}
    assert misdeclared(DifferentiatesMore()) == misdeclared(DifferentiatesLess()) == {"entropies"}
    assert misdeclared(WritesMore()) == {"weight"}
    assert misdeclared(FillsMore()) == {"weight", "aggregate"}
    try:
        misdeclared(PenaltyReadsMore())
    except AssertionError:
        return
    raise AssertionError("a penalty whose `reads` names too much was not found")
