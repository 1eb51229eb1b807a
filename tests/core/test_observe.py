"""What is only observed measures, remembers and reports, and changes nothing."""

import pytest
import torch

from rlstab import (
    CPPO,
    DPPO,
    SAPO,
    STARE,
    AdaptiveEntropy,
    ClipHigher,
    EntropyBonus,
    KLPenalty,
    LpReg,
    Mean,
    RandomMask,
    S2TMask,
    SequenceMean,
    Terms,
    TokenObjective,
    TopEntropyMask,
    compose,
    make_plan,
    observe,
    within,
)
from rlstab.core.compose import walk
from rlstab.core.objective import active_methods
from rlstab.core.plan import member_terms
from rlstab.testing import check_objective
from tests.core.gate_methods import CISPO, VESPO
from tests.core.measuring_methods import CentredGate, CovarianceThreshold
from tests.core.methods import DropPunished, Exempt, Noise, Scale
from tests.core.steps import batch_of, gradients, live_of, random_rows, run_parts

ROWS = random_rows(11, [3, 5, 0, 7, 4, 9])
#: What is observed, each with something to do on these rows.
WATCHED = {
    "mask": S2TMask(max_prob=0.02),
    "weights with state": STARE(target_entropy=0.8, variant="C2", share=0.3, increment=0.05),
    "penalty with a mask": LpReg(share=0.4),
    "penalty of a controller": AdaptiveEntropy(target_entropy=0.8, initial=0.1, high=0.2),
    "trust region": ClipHigher(low=0.1, high=0.1, dual_clip=1.5),
    "gate": CPPO(delta=0.02),
    "surrogate": DPPO(high=0.02, low=0.02),
    "gate after two rounds": CentredGate(),
    "bonus, weight and learning rate": Scale(weight=2.0, bonus=0.3, lr=0.5),
    "exemption": Exempt(),
    "composition": compose(S2TMask(max_prob=0.02), TopEntropyMask(share=0.5), CovarianceThreshold(), SAPO()),
    "within": within(DropPunished(), compose(STARE(target_entropy=0.8), CISPO())),
}
#: What acts beside it.
ACTING = {
    "nothing": (),
    "clip": (ClipHigher(),),
    "stack": (Noise(), KLPenalty(coefficient=0.1), SequenceMean(), SAPO(), Scale(lr=0.25)),
}


def steps(objective, count=3):
    """Losses, gradients, learning-rate scales and states of some steps in a row."""
    state, found = objective.init_state(), []
    for seed in range(count):
        rows = random_rows(seed, [3, 5, 0, 7, 4, 9])
        batch = batch_of(rows, range(6))
        policy, leaves = live_of(batch, rows)
        out = objective(batch, policy, state=state)
        out.loss.backward()
        state = out.state
        found.append((out, [out.loss.detach(), *gradients(batch, leaves).values()]))
    return found


@pytest.mark.parametrize("acting", ACTING)
@pytest.mark.parametrize("watched", WATCHED)
def test_what_is_observed_changes_no_bit(watched, acting):
    own = ACTING[acting]
    alone, beside = steps(compose(*own)), steps(compose(*own, observe(WATCHED[watched])))
    acted = steps(compose(*own, WATCHED[watched])) if not _two_regions(own, WATCHED[watched]) else None
    for (out, bits), (watching, same) in zip(alone, beside, strict=True):
        assert all(map(torch.equal, bits, same))
        assert watching.lr_scale == out.lr_scale
        assert watching.report.keys() > out.report.keys()
        for name, one in out.report.items():
            assert float(watching.report[name].total) == float(one.total), name
        for key, state in out.state.items():
            assert watching.state[key] == state
    if acted is not None and watched != "exemption":
        assert any(
            not torch.equal(a, b)
            for (_, one), (_, other) in zip(alone, acted, strict=True)
            for a, b in zip(one, other, strict=True)
        )


def _two_regions(acting, watched):
    return all(one.writes & {"bounds", "surrogate"} for one in (watched, compose(*acting)))


@pytest.mark.parametrize("watched", ["weights with state", "penalty of a controller"])
def test_its_state_is_that_which_it_would_have(watched):
    method = WATCHED[watched]
    acting, seen = steps(compose(method)), steps(compose(observe(method), ClipHigher()))
    states = [out.state[f"observe_{method.name}"] for out, _ in seen]
    assert states == [out.state[method.name] for out, _ in acting]
    assert len({str(state) for state in states}) > 1


def report(objective, rows=ROWS, parts=((0, 1, 2, 3, 4, 5),)):
    return run_parts(objective, rows, [list(part) for part in parts])[1]


def under(found, prefix):
    return {
        name.removeprefix(f"{prefix}/"): (float(one.total), float(one.count))
        for name, one in found.items()
        if name.startswith(f"{prefix}/")
    }


@pytest.mark.parametrize(
    "name", ["mask", "weights with state", "penalty of a controller", "gate", "gate after two rounds"]
)
def test_its_metrics_are_those_that_it_would_report(name):
    method = WATCHED[name]
    acting = under(report(compose(method)), method.name)
    observed = under(report(compose(observe(method))), f"observe_{method.name}")
    acting.pop("value", None)  # of a penalty: its function is not called
    assert acting
    assert {key: observed[key] for key in acting} == acting
    assert all(key.startswith("would_") for key in observed.keys() - acting.keys())


def test_what_it_would_do_is_what_the_acting_method_did():
    batch = batch_of(ROWS)

    def pair(method):
        return make_plan(compose(method), [batch]).terms(batch), report(compose(observe(method)))

    mask = WATCHED["mask"]
    assert 0 < report(compose(mask))["tokens/kept"].value < 1
    would = report(compose(observe(mask), TopEntropyMask(share=0.5)))["observe_s2t/would_drop"]
    assert would.value == pytest.approx(1 - report(compose(mask))["tokens/kept"].value, abs=1e-15)
    assert would.count == len(batch)

    terms, found = pair(WATCHED["weights with state"])
    assert found["observe_stare/would_boost"].value == float((terms.weight > 1).double().mean()) > 0
    assert found["observe_stare/would_damp"].value == float((terms.weight < 1).double().mean()) > 0

    terms, found = pair(WATCHED["penalty with a mask"])
    share = float(terms.penalties["lp_reg"].where.double().mean())
    assert found["observe_lp_reg/would_penalise"].value == share > 0

    _, found = pair(WATCHED["bonus, weight and learning rate"])
    assert found["observe_scale/would_add"].value == pytest.approx(0.3, rel=1e-14)
    assert found["observe_scale/would_scale_lr"].value == 0.5
    assert pair(Exempt())[1]["observe_exempt/would_unclip"].value == 1.0
    assert pair(EntropyBonus())[1]["observe_entropy_bonus/would_penalise"].value == 1.0
    assert "observe_kl/would_penalise" not in pair(KLPenalty(coefficient=0.0))[1]


def test_what_a_trust_region_would_stop_is_what_it_clips():
    clip = ClipHigher(low=0.1, high=0.1, dual_clip=1.5)
    acted, seen = report(compose(clip)), report(compose(observe(clip)))
    stopped = seen["observe_clip_higher/clip/stopped"]
    clipped = sum(float(acted[f"ratio/clipped_{side}"].total) for side in ("high", "low", "dual"))
    assert 0 < float(stopped.total) == clipped
    assert stopped.count == (batch_of(ROWS).advantages != 0).sum()
    assert seen["observe_clip_higher/clip/gate"].value == pytest.approx(1 - stopped.value, rel=1e-15)
    beside = report(compose(observe(clip), ClipHigher(low=0.4, high=0.4)))
    assert float(beside["observe_clip_higher/clip/stopped"].total) == clipped
    assert float(beside["ratio/clipped_high"].total) < float(acted["ratio/clipped_high"].total)


def test_what_a_pull_would_stop_is_what_it_stops():
    method = WATCHED["surrogate"]
    acted, seen = report(compose(method)), report(compose(observe(method), ClipHigher()))
    stopped = seen["observe_dppo/surrogate/stopped"]
    assert 0 < stopped.value == acted["ratio/stopped"].value < 1
    assert stopped.count == acted["ratio/stopped"].count
    assert "ratio/stopped" not in seen


@pytest.mark.parametrize(
    "objective",
    [
        observe(S2TMask(max_prob=0.02)),
        observe(STARE(target_entropy=0.8)),
        compose(observe(ClipHigher()), observe(VESPO()), SAPO(), LpReg(share=0.3)),
        compose(
            ClipHigher(), observe(compose(CovarianceThreshold(), RandomMask(share=0.3), within(S2TMask(), STARE())))
        ),
    ],
    ids=["mask", "state", "gates", "composition"],
)
def test_it_obeys_every_law(objective):
    found = check_objective(objective, examples=3)
    assert found.ok, str(found)


def test_a_gate_of_whole_sequences_that_is_observed_has_the_rows_that_it_reads():
    """Its metrics read them; where nothing pulls they stay away."""
    batch = batch_of(ROWS)
    alone, beside = (
        make_plan(compose(Noise(), *more), [batch]).live_rows(batch)["logprobs"] for more in ((), (observe(VESPO()),))
    )
    assert torch.equal(beside, make_plan(compose(Noise(), VESPO()), [batch]).live_rows(batch)["logprobs"])
    assert alone.sum() < beside.sum() < len(batch)


def test_of_a_composition_every_member_is_observed_by_itself():
    objective = observe(compose(S2TMask(), observe(STARE()), ClipHigher()))
    assert list(objective.keyed) == ["observe_clip_higher", "observe_s2t", "observe_stare"]
    assert observe(objective) == objective
    assert observe(observe(S2TMask())) == observe(S2TMask())
    assert repr(compose(observe(S2TMask()))) == f"compose(observe({S2TMask()!r}))"
    assert list(compose(observe(KLPenalty()), observe(KLPenalty(estimator="k1"))).keyed) == [
        "observe_kl_1",
        "observe_kl_2",
    ]
    # two trust regions fit where one of them only watches
    assert compose(ClipHigher(), observe(ClipHigher(high=0.5))).writes == {"bounds", "gates"}


def test_what_it_declares():
    one = observe(LpReg())
    assert one.needs == LpReg().needs
    assert one.live_needs == one.writes == frozenset()
    assert one.signal_options == LpReg().signal_options
    assert observe(ClipHigher()).writes == {"gates"}
    assert observe(ClipHigher()).reads_drift == {"live"}
    assert list(active_methods(one)) == []
    assert [leaf.name for leaf in walk(compose(one, S2TMask()))] == ["observe_lp_reg", "s2t"]
    assert [leaf.name for leaf in walk(compose(one, S2TMask()), observed=True)] == ["lp_reg", "s2t"]


def test_a_plan_in_which_nothing_acts_is_silent():
    batch = batch_of([[{**one, "A": 0.0} for one in row] for row in ROWS])
    assert make_plan(compose(observe(KLPenalty(coefficient=0.5)), observe(EntropyBonus())), [batch]).has_no_gradient
    assert not make_plan(compose(KLPenalty(coefficient=0.5)), [batch]).has_no_gradient


class Reporting(TokenObjective):
    """Report the mean advantage."""

    name = "reporting"
    bins: int = 3

    def terms(self, batch, stat, state):
        return Terms(report={"advantage": Mean.of(batch.advantages)})


def test_a_method_may_write_nothing_and_only_report():
    assert Reporting().in_words() == {"report": "Report the mean advantage. (bins = 3)"}
    batch = batch_of(ROWS)
    losses = [compose(*methods)(batch, live_of(batch, ROWS)[0]) for methods in ((), (Reporting(),))]
    assert torch.equal(*(one.loss for one in losses))
    assert losses[1].metrics()["reporting/advantage"] == pytest.approx(batch.advantages.mean().item())
    assert check_objective(Reporting(), examples=3).ok


def test_each_method_of_a_plan_is_there_by_its_name():
    batch = batch_of(ROWS)
    found = member_terms(make_plan(compose(observe(S2TMask()), ClipHigher()), [batch]), batch)
    assert list(found) == ["clip_higher", "observe_s2t"]
    assert found["observe_s2t"].terms.filled() == frozenset()
