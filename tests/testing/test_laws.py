"""Every method and random compositions obey every law; broken ones break exactly the law named beside them.

The default run takes few drawn steps of each; the runs marked slow take the many that a user's check takes, or more.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any

import pytest

import rlstab
from rlstab import (
    STARE,
    AdaptiveEntropy,
    ClipHigher,
    ConstantLength,
    KLPenalty,
    LpReg,
    S2TMask,
    SequenceMean,
    TopEntropyMask,
    compose,
    within,
)
from rlstab.core.compose import observe
from rlstab.errors import MissingPackage, UnknownName
from rlstab.presets import PRESETS
from rlstab.testing import LAWS, BrokenLaw, check_objective, parametrize_laws
from rlstab.testing.examples import EXAMPLES, random_compositions
from tests.testing import broken_agreement, broken_loss, broken_purity
from tests.testing.broken import ALSO, BROKEN, ORACLES


def test_every_method_has_example_settings() -> None:
    assert sorted(EXAMPLES) == rlstab.available()
    for name, several in EXAMPLES.items():
        assert {one.name for one in several} == {name}


def _broken(name: str) -> rlstab.TokenObjective:
    return next(one for one in BROKEN if one.name == name)


METHODS = [one for several in EXAMPLES.values() for one in several]
STARE_HERE = STARE(target_entropy=0.8)
#: What no random composition has: a method inside of another, an observed one, an owner of each aggregate.
NESTED = {
    "within": compose(ClipHigher(), within(S2TMask(max_prob=0.05), STARE_HERE), SequenceMean()),
    "penalties within": within(
        TopEntropyMask(share=0.6),
        compose(LpReg(share=0.4), AdaptiveEntropy(target_entropy=0.8, initial=0.002), KLPenalty()),
    ),
    "nested within": compose(
        within(within(TopEntropyMask(share=0.6), S2TMask(max_prob=0.05)), STARE_HERE), ConstantLength(length=9)
    ),
    "observed": compose(ClipHigher(), STARE_HERE, observe(TopEntropyMask())),
}


def obeys(objective: rlstab.TokenObjective, examples: int) -> None:
    report = check_objective(objective, examples=examples)
    assert report.ok, str(report)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_obeys(method: rlstab.TokenObjective) -> None:
    obeys(method, examples=4)


@pytest.mark.parametrize("objective", NESTED.values(), ids=NESTED)
def test_methods_within_others_obey(objective: rlstab.TokenObjective) -> None:
    obeys(objective, examples=3)


@pytest.mark.parametrize("objective", random_compositions(12, seed=1), ids=lambda one: "+".join(one.keyed))
def test_random_compositions_of_two_and_three_obey(objective: rlstab.Composition) -> None:
    obeys(objective, examples=3)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [*METHODS, *NESTED.values(), *random_compositions(60, seed=2)], ids=repr)
def test_methods_and_many_random_compositions_obey(objective: rlstab.TokenObjective) -> None:
    obeys(objective, examples=30)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_obeys(name: str) -> None:
    obeys(PRESETS[name].objective, examples=2)


def bitten(method: rlstab.TokenObjective, laws: Iterable[str] | None, examples: int) -> None:
    oracle = ORACLES.get(method.name)
    report = check_objective(method, oracle=oracle, examples=examples, shrink=False, laws=laws and tuple(laws))
    assert report.failed - ALSO.get(method.name, frozenset()) == BROKEN[method].keys(), str(report)
    for one in report.results:
        if one.law in BROKEN[method]:
            assert re.search(BROKEN[method][one.law], one.detail, re.DOTALL), one.detail


@pytest.mark.parametrize("method", BROKEN, ids=lambda method: method.name)
def test_the_laws_bite(method: rlstab.TokenObjective) -> None:
    bitten(method, BROKEN[method], examples=4)


@pytest.mark.slow
@pytest.mark.parametrize("method", BROKEN, ids=lambda method: method.name)
def test_no_other_law_is_broken(method: rlstab.TokenObjective) -> None:
    bitten(method, None, examples=4)


def test_there_are_many_broken_methods_and_none_of_them_passes() -> None:
    print(f"{len(BROKEN)} broken methods")
    assert len(BROKEN) >= 60
    assert all(BROKEN.values())
    written = {
        cls
        for module in (broken_agreement, broken_loss, broken_purity)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, rlstab.TokenObjective) and cls.__module__ == module.__name__
    }
    assert {type(one) for one in BROKEN} == {cls for cls in written if not inspect.isabstract(cls)}
    assert len({one.name for one in BROKEN}) == len(BROKEN)


def test_every_law_has_a_method_that_breaks_it() -> None:
    broken = {name for laws in BROKEN.values() for name in laws}
    # the order in which methods are listed is settled by `compose` itself: only what is random breaks that law
    assert {law.name for law in LAWS} <= broken


def test_what_does_not_run_is_told_once() -> None:
    report = check_objective(_broken("wrong_shape"), examples=2)
    assert report.failed == {"runs"}
    first, *others = report.results
    assert first.law == "runs"
    assert "Give one value per token of the batch." in first.detail
    assert {(one.outcome, one.detail) for one in others} == {
        ("skipped", "not checked: 'runs' is broken, mend that first")
    }


@parametrize_laws(_broken("wrong_shape"), examples=2)
def test_what_does_not_run_is_one_failure_under_pytest(check: Any, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.id == "wrong_shape-runs":
        with pytest.raises(BrokenLaw, match="breaks the law 'runs'"):
            check()
    else:
        with pytest.raises(pytest.skip.Exception, match="'runs' is broken"):
            check()


def test_an_oracle_alone_says_on_which_side_of_a_threshold_a_token_is() -> None:
    silent = check_objective(_broken("strict_setting"), examples=3)
    (oracle,) = [one for one in silent.results if one.law == "oracle"]
    assert silent.ok
    assert oracle.outcome == "silent"
    assert "no oracle was given" in oracle.detail


@parametrize_laws(ClipHigher(), _broken("local_mean"), examples=3)
def test_each_law_is_a_test_of_pytest(check: Any, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.id == "local_mean1-split":
        with pytest.raises(BrokenLaw, match="breaks the law 'split'"):
            check()
    else:
        check()


def test_a_report_is_readable() -> None:
    text = re.sub(r"[\s│]+", " ", str(check_objective(_broken("local_mean"), examples=3, shrink=False)))
    assert text.startswith("LocalMean()")
    assert "broken: split" in text
    assert "failed" in text
    assert "the loss is" in text
    assert "Seen on Step(row lengths [" in text
    assert "every law holds" in str(check_objective(ClipHigher(), examples=2))


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("rlstab.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(MissingPackage, match=re.escape("'.[testing]'")):
        importlib.import_module("rlstab.testing")


def test_one_law_can_be_asked_for_alone() -> None:
    report = check_objective(_broken("local_mean"), examples=2, shrink=False, laws=["split", "packed"])
    assert [(one.law, one.outcome) for one in report.results] == [
        ("runs", "passed"),
        ("split", "failed"),
        ("packed", "passed"),
    ]
    with pytest.raises(UnknownName, match=r"no law 'splitt' to check\. Did you mean 'split'"):
        check_objective(ClipHigher(), laws=["splitt"])
    with pytest.raises(UnknownName, match="Give the oracle, too"):
        check_objective(ClipHigher(), laws=["oracle"])


def test_an_exception_is_declared_with_its_reason() -> None:
    report = check_objective(_excepted(), examples=3)
    result = next(one for one in report.results if one.law == "split")
    assert (result.outcome, result.detail) == ("excepted", "local_mean: reproduces published code")
    assert report.ok


def _excepted() -> rlstab.TokenObjective:
    return type("LocalMean", (type(_broken("local_mean")),), {"exceptions": {"split": "reproduces published code"}})()


def test_the_limits_of_each_method_in_a_composition_are_held_to() -> None:
    inside = compose(S2TMask(), within(TopEntropyMask(), _broken("false_limit")))
    assert check_objective(inside, examples=4, shrink=False).failed == {"limits"}
    result = next(one for one in check_objective(SequenceMean(), examples=2).results if one.law == "limits")
    assert (result.outcome, result.detail) == ("silent", "it declares no settings at which it is the identity")
