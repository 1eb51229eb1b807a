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
    KLCov,
    KLPenalty,
    LpReg,
    S2TMask,
    SequenceMean,
    TopEntropyMask,
    compose,
    make_plan,
    observe,
    within,
)
from rlstab.core.compose import walk
from rlstab.core.objective import active_methods
from rlstab.core.plan import member_terms
from tests.core.methods import CappedGate, CentredGate, DropPunished, Exempt, Noise, Scale
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
    "composition": compose(S2TMask(max_prob=0.02), TopEntropyMask(share=0.5), KLCov(share=0.2), SAPO()),
    "within": within(DropPunished(), compose(STARE(target_entropy=0.8), CappedGate())),
}
BESIDE = (Noise(), KLPenalty(coefficient=0.1), SequenceMean(), ClipHigher(), Scale(lr=0.25))


def steps(objective, count=3):
    """Losses, gradients, learning-rate scales and states of some steps in a row."""
    state, outs = objective.init_state(), []
    for seed in range(count):
        rows = random_rows(seed, [3, 5, 0, 7, 4, 9])
        batch = batch_of(rows, range(6))
        policy, leaves = live_of(batch, rows)
        out = objective(batch, policy, state=state)
        out.loss.backward()
        state = out.state
        outs.append((out, [out.loss.detach(), *gradients(batch, leaves).values()]))
    return outs


@pytest.mark.parametrize("watched", WATCHED)
def test_what_is_observed_changes_no_bit_and_has_the_state_and_metrics_that_it_would_have(watched):
    method = WATCHED[watched]
    alone, beside = steps(compose(*BESIDE)), steps(compose(*BESIDE, observe(method)))
    for (out, bits), (watching, same) in zip(alone, beside, strict=True):
        assert all(map(torch.equal, bits, same))
        assert watching.lr_scale == out.lr_scale
        assert watching.report.keys() > out.report.keys()
        assert all(float(watching.report[name].total) == float(mean.total) for name, mean in out.report.items())
        assert all(watching.state[key] == state for key, state in out.state.items())
    if watched in ("weights with state", "penalty of a controller"):
        for (acting, _), (watching, _) in zip(steps(compose(method)), beside, strict=True):
            assert watching.state[f"observe_{method.name}"] == acting.state[method.name] != method.init_state()
            own = {name: mean.value for name, mean in acting.report.items() if name.startswith(f"{method.name}/")}
            own.pop(f"{method.name}/value", None)  # of a penalty: its function is not called
            assert own
            assert own == {name: watching.report[f"observe_{name}"].value for name in own}


def report(*methods):
    return run_parts(compose(*methods), ROWS, [[0, 1, 2, 3, 4, 5]])[1]


def terms(method):
    batch = batch_of(ROWS)
    return make_plan(compose(method), [batch]).terms(batch)


def share(where):
    return float(where.double().mean())


@pytest.mark.parametrize(
    ("method", "metric", "did"),
    [
        (WATCHED["mask"], "drop", lambda did: share(~did.keep)),
        (WATCHED["weights with state"], "boost", lambda did: share(did.weight > 1)),
        (WATCHED["weights with state"], "damp", lambda did: share(did.weight < 1)),
        (WATCHED["penalty with a mask"], "penalise", lambda did: share(did.penalties["lp_reg"].where)),
        (EntropyBonus(), "penalise", lambda did: 1.0),
        (Scale(bonus=0.3), "add", lambda did: float(did.bonus.mean())),
        (Scale(lr=0.5), "scale_lr", lambda did: 0.5),
        (Exempt(), "unclip", lambda did: 1.0),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_it_would_do_is_what_the_acting_method_did(method, metric, did):
    mean = report(observe(method), TopEntropyMask(share=0.5))[f"observe_{method.name}/would_{metric}"]
    assert mean.value == pytest.approx(did(terms(method)), rel=1e-14)
    assert mean.value > 0
    assert mean.count == (1 if metric == "scale_lr" else len(batch_of(ROWS)))


def test_what_a_trust_region_would_stop_is_what_it_stops():
    clip = WATCHED["trust region"]
    acted, seen = report(clip), report(observe(clip), ClipHigher(low=0.4, high=0.4))
    stopped = seen["observe_clip_higher/clip/stopped"]
    clipped = sum(float(acted[f"ratio/clipped_{side}"].total) for side in ("high", "low", "dual"))
    assert 0 < float(stopped.total) == clipped
    assert stopped.count == (batch_of(ROWS).advantages != 0).sum()
    assert seen["observe_clip_higher/clip/gate"].value == pytest.approx(1 - stopped.value, rel=1e-15)
    assert float(seen["ratio/clipped_high"].total) < float(acted["ratio/clipped_high"].total)
    acted, seen = report(WATCHED["surrogate"]), report(observe(WATCHED["surrogate"]), ClipHigher())
    stopped = seen["observe_dppo/surrogate/stopped"]
    assert 0 < stopped.value == acted["ratio/stopped"].value < 1
    assert stopped.count == acted["ratio/stopped"].count
    assert "ratio/stopped" not in seen
    assert "observe_kl/would_penalise" not in report(observe(KLPenalty(coefficient=0.0)))


def test_a_gate_of_whole_sequences_that_is_observed_has_the_rows_that_it_reads():
    """Its metrics read them; where nothing pulls they stay away."""
    batch = batch_of(ROWS)
    alone, observed, acting = (
        make_plan(compose(Noise(), *more), [batch]).live_rows(batch)["logprobs"]
        for more in ((), (observe(CPPO()),), (CPPO(),))
    )
    assert torch.equal(observed, acting)
    assert alone.sum() < observed.sum() < len(batch)


def test_of_a_composition_every_member_is_observed_by_itself():
    objective = observe(compose(S2TMask(), observe(STARE()), ClipHigher()))
    assert list(objective.keyed) == ["observe_clip_higher", "observe_s2t", "observe_stare"]
    assert observe(objective) == objective
    assert observe(observe(S2TMask())) == observe(S2TMask())
    assert repr(compose(observe(S2TMask()))) == f"compose(observe({S2TMask()!r}))"
    numbered = compose(observe(KLPenalty()), observe(KLPenalty(estimator="k1")))
    assert list(numbered.keyed) == ["observe_kl_1", "observe_kl_2"]
    # two trust regions fit where one of them only watches
    assert compose(ClipHigher(), observe(ClipHigher(high=0.5))).writes == {"bounds", "gates"}
    batch = batch_of(ROWS)
    members = member_terms(make_plan(objective, [batch]), batch)
    assert list(members) == list(objective.keyed)
    assert members["observe_s2t"].terms.filled() == frozenset()


def test_what_it_declares():
    watching = observe(LpReg())
    assert (watching.needs, watching.signal_options) == (LpReg().needs, LpReg().signal_options)
    assert watching.live_needs == watching.writes == frozenset()
    assert (observe(ClipHigher()).writes, observe(ClipHigher()).reads_drift) == ({"gates"}, {"live"})
    assert list(active_methods(watching)) == []
    assert [leaf.name for leaf in walk(compose(watching, S2TMask()))] == ["observe_lp_reg", "s2t"]
    assert [leaf.name for leaf in walk(compose(watching, S2TMask()), observed=True)] == ["lp_reg", "s2t"]
