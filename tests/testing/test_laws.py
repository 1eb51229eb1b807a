"""Every method and stage obeys every law; broken ones break the laws that are named with them.

The default run takes one setting of each and few optimizer steps; the slow run takes all settings, presets and many.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import rlstab as r
from rlstab.core.compose import Composition
from rlstab.core.metadata import About
from rlstab.errors import Conflict, UnknownName
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.stages.stage import RewardShaper
from rlstab.testing import LAWS, STAGE_LAWS, BrokenLaw, check_objective, check_stage, parametrize_laws
from rlstab.testing.edges import draw_step, sharpened
from rlstab.testing.steps import make_step
from tests.examples import EXAMPLES, STAGE_EXAMPLES, random_compositions
from tests.testing import broken_stages
from tests.testing.broken_methods import BROKEN, ORACLES

STARE_HERE = r.STARE(target_entropy=0.8)
#: What no random composition has: a method inside of another, an observed one, an owner of each aggregate.
NESTED = [
    r.compose(r.ClipHigher(), r.within(r.S2TMask(max_prob=0.05), STARE_HERE), r.SequenceMean()),
    r.within(
        r.TopEntropyMask(share=0.6),
        r.compose(r.LpReg(share=0.4), r.AdaptiveEntropy(target_entropy=0.8, initial=0.002), r.KLPenalty()),
    ),
    r.compose(
        r.within(r.within(r.TopEntropyMask(share=0.6), r.S2TMask(max_prob=0.05)), STARE_HERE),
        r.ConstantLength(length=9),
    ),
    r.compose(
        *(r.ClipHigher(), r.SAPO(), STARE_HERE, r.observe(r.ClipHigher(low=0.1)), r.observe(r.CPPO())),
        r.observe(r.compose(r.KLCov(share=0.2), r.RandomMask(share=0.3), r.within(r.S2TMask(), STARE_HERE))),
    ),
]


def named(name: str) -> Any:
    return next(method for method in BROKEN if method.name == name)


def obeys(report: Any) -> None:
    assert report.ok, str(report)


def test_every_method_and_stage_has_example_settings() -> None:
    assert sorted(EXAMPLES) == r.available()
    assert sorted(STAGE_EXAMPLES) == STAGES.names()


#: Laws that a method breaks in the company of others as well as alone; a composition is checked once for all of them.
TOGETHER = {"process", "pure", "ids"}
#: Laws of each method alone. Its gradient is compared with an oracle on many more steps: tests/zoo/test_oracles.py.
ALONE = {law.name for law in LAWS} - TOGETHER - {"gradcheck"}


def packed(most: int) -> list[Composition]:
    """The first settings of all methods, in few compositions of at most so many."""
    compositions: list[Composition] = []
    for method, *_ in EXAMPLES.values():
        for index, composition in enumerate(compositions):
            with suppress(Conflict):
                if len(composition.members) < most:
                    compositions[index] = r.compose(composition, method)
                    break
        else:
            compositions.append(r.compose(method))
    return compositions


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_method_obeys(name: str) -> None:
    obeys(check_objective(EXAMPLES[name][0], examples=1, laws=ALONE))


def test_methods_obey_together() -> None:
    compositions = packed(most=7)
    assert sum(len(each.members) for each in compositions) == len(EXAMPLES)
    for each in compositions:
        assert r.make_plan(each, [draw_step(0, (), ()).batch()]).live_tokens > 3
        obeys(check_objective(each, examples=1, laws=TOGETHER))


@pytest.mark.parametrize("name", STAGE_EXAMPLES)
def test_a_stage_obeys(name: str) -> None:
    obeys(check_stage(STAGE_EXAMPLES[name][0], examples=1))


def test_compositions_obey() -> None:
    for objective in NESTED:
        obeys(check_objective(objective, examples=1))


EVERY = [method for several in EXAMPLES.values() for method in several]
MANY = [*EVERY, *NESTED, *random_compositions(60, seed=2), *(preset.objective for preset in PRESETS.values())]


@pytest.mark.slow
@pytest.mark.parametrize("objective", MANY, ids=repr)
def test_every_setting_and_many_compositions_obey(objective: r.TokenObjective) -> None:
    obeys(check_objective(objective, examples=30))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for several in STAGE_EXAMPLES.values() for stage in several], ids=repr)
def test_every_setting_of_a_stage_obeys(stage: Any) -> None:
    obeys(check_stage(stage, examples=60))


@pytest.fixture
def restored() -> Iterator[None]:
    """What some of them set for the whole process is as it was, for the tests after them."""
    numpy, environment, level = np.geterr(), dict(os.environ), logging.root.level
    yield
    np.seterr(**numpy)
    logging.root.setLevel(level)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    torch.autograd.set_detect_anomaly(False)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


@pytest.mark.parametrize("method", BROKEN, ids=lambda method: method.name)
@pytest.mark.usefixtures("restored")
def test_a_broken_method_is_caught(method: r.TokenObjective) -> None:
    laws = BROKEN[method]
    for examples in (1, 4):  # most are seen at once; from 4 on, there is a large step and a long run
        report = check_objective(method, oracle=ORACLES.get(method.name), examples=examples, laws=laws)
        if laws <= report.failed:
            break
    assert laws <= report.failed, str(report)
    for law in laws:
        assert len(report[law].detail) > 20


@pytest.mark.parametrize("stage", broken_stages.BROKEN, ids=lambda stage: stage.name)
@pytest.mark.usefixtures("restored")
def test_a_broken_stage_is_caught(stage: Any) -> None:
    laws = broken_stages.BROKEN[stage]
    for examples in (1, 4) if laws else (1,):
        report = check_stage(stage, examples=examples, laws=laws or None)
        if report.failed == laws:
            break
    assert report.failed == laws, str(report)


def test_every_law_has_a_method_or_stage_that_breaks_it() -> None:
    for laws, broken, least in ((LAWS, BROKEN, 45), (STAGE_LAWS, broken_stages.BROKEN, 22)):
        print(f"{len(broken)} broken, {len(laws)} laws")
        assert len({method.name for method in broken}) == len(broken) >= least
        assert {law.name for law in laws} <= frozenset().union(*broken.values())


def test_the_signals_of_a_sharp_step_are_what_they_can_be() -> None:
    edges = [{name: value} for name in ("entropies", "logprobs") for value in (-1.0, 1.0)]
    evidence = draw_step(0, (), edges).evidence
    assert (float(evidence["entropies"].min()), float(evidence["logprobs"].max())) == (0.0, 0.0)
    empty = make_step("mixed", [0, 0], 1, 0)
    assert sharpened(empty, 3, edges).lengths.tolist() == [0, 0]


@parametrize_laws(named("wrong_shape"), named("local_mean"), broken_stages.local_baseline(), examples=1)
def test_each_law_is_a_test_of_pytest(check: Any, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    if name in ("wrong_shape-runs", "local_mean1-split", "local_baseline2-split", "local_baseline2-identity"):
        with pytest.raises(BrokenLaw, match=name.partition("-")[2]):
            check()
    elif name.startswith("wrong_shape"):
        with pytest.raises(pytest.skip.Exception):
            check()
    else:
        check()


def test_a_report_is_readable() -> None:
    text, again = (str(check_objective(named("local_mean"), examples=3, laws=["split", "ids"])) for _ in range(2))
    assert text == again  # the same draws each time
    assert "broken: split" in text
    assert "Step(row lengths [" in text
    assert str(check_objective(r.ClipHigher(), examples=1, laws=["ids"])).rstrip().endswith("every law holds")


def test_where_it_does_not_run_that_is_all_that_is_told_with_the_cause_last() -> None:
    for report in (check_objective(Odd("raise", here=True), examples=2), check_stage(raises(), examples=2)):
        assert str(report).rstrip().endswith("ValueError: nothing left to weigh"), str(report)
        assert report.failed == {"runs"}
        assert "skipped" not in str(report)


def test_some_laws_alone() -> None:
    report = check_objective(named("local_mean"), examples=2, laws=["split", "ids"])
    seen = {result.law: result.outcome for result in report.results}
    assert seen == {"runs": "passed", "split": "failed", "ids": "passed"}
    assert check_objective(r.ClipHigher(), examples=1, laws=["oracle"])["oracle"].outcome == "silent"
    with pytest.raises(UnknownName, match="splitt"):
        check_objective(r.ClipHigher(), laws=["splitt"])
    with pytest.raises(UnknownName, match="pur"):
        check_stage(broken_stages.random_by_id(), laws=["pur"])
    assert check_stage(broken_stages.random_by_id(), examples=1)["selection"].outcome == "silent"


def test_an_exception_is_declared_with_its_reason() -> None:
    excepted = type("excepted", (type(named("local_mean")),), {"about": About(exceptions={"split": "published so"})})
    result = check_objective(excepted(), examples=1)["split"]
    assert result.outcome == "excepted"
    assert "published so" in result.detail
    stage = type("excepted", (broken_stages.local_baseline,), {"about": About(exceptions={"split": "published so"})})
    assert check_stage(stage(), examples=1)["split"].outcome == "excepted"


def test_the_limits_of_each_method_in_a_composition_are_held_to() -> None:
    inside = r.compose(r.S2TMask(), r.within(r.TopEntropyMask(), named("false_limit")))
    assert check_objective(inside, examples=2, laws=["limits"]).failed == {"limits"}
    assert check_objective(r.SequenceMean(), examples=1)["limits"].outcome == "silent"


HERE = os.getpid()


class Odd(r.TokenObjective):
    """Does something in another process that it does not do here."""

    name = "odd"
    does: str
    here: bool = False

    def terms(self, batch: Any, stat: Any, state: Any) -> r.Terms:
        if (self.here or os.getpid() != HERE) and self.does == "raise":
            raise ValueError("nothing left to weigh")
        if os.getpid() != HERE and self.does == "die":
            os._exit(3)
        return r.Terms()


class raises(RewardShaper):
    name = "raises"

    def shape(self, responses: Any, stat: Any, state: Any) -> Any:
        raise ValueError("nothing left to weigh")


def test_what_goes_wrong_there_breaks_the_law_and_the_next_method_is_checked() -> None:
    for does, seen in (("raise", "ValueError: nothing left to weigh"), ("die", "it died")):
        assert seen in check_objective(Odd(does), examples=1, laws=["process"])["process"].detail
        obeys(check_objective(r.ClipHigher(), examples=1, laws=["process"]))


def test_a_class_that_cannot_be_imported_is_not_checked_and_says_so() -> None:
    local = type("Local", (Odd,), {})("nothing")
    result = check_objective(local, examples=1, laws=["process"])["process"]
    assert result.outcome == "silent"
    assert "not checked" in result.detail
