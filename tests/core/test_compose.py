import itertools
import random

import torch

from rlstab import (
    STARE,
    ClipHigher,
    EntropyBonus,
    KLPenalty,
    LpReg,
    S2TMask,
    SequenceMean,
    TokenObjective,
    TopEntropyMask,
    compose,
    make_plan,
    within,
)
from rlstab.core.compose import walk
from tests.core.methods import DropPunished, Exempt, Noise, Scale, Unweighted
from tests.core.steps import batch_of, live_of, random_rows

ROWS = random_rows(11, [3, 5, 0, 7, 4])


def run(objective, rows=ROWS):
    """Loss and gradients, for comparison bit for bit."""
    batch = batch_of(rows)
    policy, leaves = live_of(batch, rows)
    loss = objective(batch, policy, state=objective.init_state()).loss
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]


def same(mine, theirs):
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


#: With settings at which each of them selects something in `ROWS`.
METHODS = [
    ClipHigher(),
    S2TMask(),
    TopEntropyMask(share=0.6),
    LpReg(share=0.4),
    STARE(target_entropy=0.5),
    KLPenalty(coefficient=0.1),
    Scale(weight=0.3, bonus=0.1),
]


def test_order_and_grouping_change_no_bit():
    expected = run(compose(*METHODS))
    for seed in range(5):
        first, *others = random.Random(seed).sample(METHODS, len(METHODS))
        some, rest = compose(*others[: seed % 7]), others[seed % 7 :]
        objective = compose(some, compose(first, compose()), *rest)
        assert objective == compose(objective) == compose(*METHODS)
        assert hash(objective) == hash(compose(*METHODS))
        assert [method.name for method in objective.members] == sorted(method.name for method in METHODS)
        assert same(run(objective), expected)


def test_equal_names_get_numbers_and_hide_no_method_of_that_name():
    namesake = type("Namesake", (TokenObjective,), {**vars(Exempt), "name": "kl_1"})()
    for methods in itertools.permutations([KLPenalty(estimator="k1"), KLPenalty(estimator="k2"), namesake]):
        keyed = compose(*methods, S2TMask()).keyed
        assert {key: method.name for key, method in keyed.items()} == {
            "kl_1": "kl_1",
            "kl_2": "kl",
            "kl_3": "kl",
            "s2t": "s2t",
        }
        assert [keyed[key].estimator for key in ("kl_2", "kl_3")] == ["k1", "k2"]


def test_composition_declares_what_its_members_do():
    objective = compose(LpReg(min_p=0.05), EntropyBonus(), S2TMask(), SequenceMean(), Scale(lr=0.5, reads="mine"))
    assert objective.needs == {"logprobs", "max_logprobs", "entropies", "mine"}
    assert objective.live_needs == {"log_kept_mass", "entropies"}
    assert objective.writes == {"penalties", "keep", "aggregate", "weight", "bonus", "lr_scale"}
    assert objective.signal_options == {"min_p": 0.05}
    assert objective.reads_drift == frozenset()
    assert compose(Unweighted()).reads_drift == {"live"}
    for declared in ("needs", "live_needs", "writes", "signal_options"):
        assert getattr(within(S2TMask(), LpReg()), declared) == getattr(compose(S2TMask(), LpReg()), declared)


def test_state_is_kept_by_key():
    objective = compose(Noise(seed=1), Noise(seed=2), within(S2TMask(), Noise(seed=3)))
    batch = batch_of(ROWS)
    state = make_plan(objective, [batch]).state
    assert state == {"noise_1": {"steps": 1}, "noise_2": {"steps": 1}, "within": {"outer": {}, "inner": {"steps": 1}}}
    assert make_plan(objective, [batch], state).state["within"]["inner"] == {"steps": 2}


SMALL = TopEntropyMask(share=0.25)


def test_within_measures_and_touches_only_what_the_outer_method_keeps():
    batch = batch_of([[{**own, "H": own["H"] * (own["A"] >= 0)} for own in row] for row in ROWS])
    nested = compose(within(DropPunished(), compose(SMALL, KLPenalty(), Scale(weight=3.0, bonus=0.5))))
    terms = make_plan(nested, [batch]).terms(batch)
    left = batch.advantages >= 0
    alone = batch.select(left)
    assert torch.equal(terms.keep[left], make_plan(compose(SMALL), [alone]).terms(alone).keep)
    assert not terms.keep[~left].any()
    assert torch.equal(terms.weight, torch.where(left, 3.0, 1.0).double())
    assert torch.equal(terms.bonus, torch.where(left, 0.5, 0.0).double())
    (penalty,) = terms.penalties.values()
    assert torch.equal(penalty.where, left)
    assert set(terms.penalties) == {"within/inner/kl"}

    beside = make_plan(compose(DropPunished(), SMALL), [batch]).terms(batch)
    assert not torch.equal(terms.keep, beside.keep)


def test_a_penalty_within_counts_only_what_the_outer_method_keeps():
    batch = batch_of(ROWS)
    policy, _ = live_of(batch, ROWS)
    nested = compose(
        within(DropPunished(), LpReg(share=1.0, coefficient=0.3)), within(TopEntropyMask(share=0.5), LpReg(share=1.0))
    )
    plan = make_plan(nested, [batch])
    terms = plan.terms(batch)
    kept = make_plan(compose(TopEntropyMask(share=0.5)), [batch]).terms(batch).keep
    chosen = terms.penalties["within_2/inner"].where
    assert chosen.any()
    assert not (chosen & ~kept).any()
    assert not terms.penalties["within_1/inner"].where.any()  # it looks at punished tokens, of which none is left
    assert plan.penalised == int(chosen.sum()) == int(plan.loss(batch, policy).report["within_2/inner/value"].count)


def test_each_field_is_joined_by_its_law():
    batch, some = batch_of(ROWS), LpReg(share=0.4, form="code")

    def plan(*methods):
        return make_plan(compose(*methods), [batch])

    scaled = plan(Scale(2.0, 0.5, 0.5), Scale(3.0, 0.25, 0.1), DropPunished())
    terms = scaled.terms(batch)
    assert (set(terms.weight.tolist()), set(terms.bonus.tolist()), scaled.lr_scale) == ({6.0}, {0.75}, 0.05)
    assert terms.filled() == {"keep", "weight", "bonus", "lr_scale"}
    drop, forking, both = (
        plan(*masks).terms(batch).keep for masks in ([DropPunished()], [SMALL], [DropPunished(), SMALL])
    )
    assert torch.equal(both, drop & forking)
    assert plan(some, Exempt()).terms(batch).unclipped.all()
    assert not plan(some).terms(batch).unclipped.all()


def places(objective):
    return [(leaf.name, [outer.name for outer in leaf.around]) for leaf in walk(objective)]


def test_leaves_stand_in_the_order_of_the_composition_with_what_is_around_them():
    inner = compose(STARE(), within(TopEntropyMask(), KLPenalty()))
    assert places(compose(within(S2TMask(), inner), ClipHigher())) == [
        ("clip_higher", []),
        ("s2t", []),
        ("stare", ["s2t"]),
        ("top_entropy", ["s2t"]),
        ("kl", ["s2t", "top_entropy"]),
    ]
    assert places(within(within(S2TMask(), TopEntropyMask()), STARE()))[2] == ("stare", ["s2t", "top_entropy"])
