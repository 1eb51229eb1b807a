import itertools

import pytest
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
from rlstab.testing.tolerances import REORDERED
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


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


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


@pytest.mark.parametrize(
    "chosen", list(itertools.combinations(METHODS, 3)), ids=lambda chosen: "+".join(m.name for m in chosen)
)
def test_order_and_grouping_change_no_bit(chosen):
    a, b, c = chosen
    expected = run(compose(a, b, c))
    for other in (compose(c, a, b), compose(b, c, a), compose(compose(a, b), c), compose(a, compose(c, b))):
        assert same(run(other), expected)
        assert other == compose(a, b, c)
        assert hash(other) == hash(compose(a, b, c))


def test_composition_is_closed_and_flat():
    objective = compose(compose(S2TMask()), compose(compose(), compose(KLPenalty(), ClipHigher())))
    assert [one.name for one in objective.members] == ["clip_higher", "kl", "s2t"]
    assert compose(objective) == objective
    assert list(objective.keyed) == ["clip_higher", "kl", "s2t"]


def test_composition_of_nothing_is_the_plain_policy_gradient():
    assert compose().members == ()
    batch = batch_of(ROWS)
    policy, _ = live_of(batch, ROWS)
    expected = -(batch.advantages * (policy.logprobs - batch.old_logprobs).exp()).mean()
    torch.testing.assert_close(compose()(batch, policy).loss, expected, rtol=REORDERED, atol=0)


def test_equal_names_get_numbers():
    objective = compose(KLPenalty(estimator="k2"), S2TMask(), KLPenalty(estimator="k1"), Noise())
    assert list(objective.keyed) == ["kl_1", "kl_2", "noise", "s2t"]
    assert [objective.keyed[key].estimator for key in ("kl_1", "kl_2")] == ["k1", "k2"]
    batch = batch_of(ROWS)
    assert set(make_plan(objective, [batch]).terms(batch).penalties) == {"kl_1", "kl_2"}


def test_a_numbered_key_hides_no_method_of_that_name():
    namesake = replace_name(Exempt, "kl_1")()
    for methods in itertools.permutations([KLPenalty(estimator="k1"), KLPenalty(estimator="k2"), namesake]):
        assert {key: one.name for key, one in compose(*methods).keyed.items()} == {
            "kl_1": "kl_1",
            "kl_2": "kl",
            "kl_3": "kl",
        }


def replace_name(cls, name):
    return type(cls.__name__, (TokenObjective,), {**vars(cls), "name": name})


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


def test_exempt_tokens_pass_every_gate():
    objective = compose(Unweighted(), ClipHigher(low=0.0, high=0.0), Exempt())
    for one, other in zip(run(objective), run(compose(Exempt())), strict=True):
        assert torch.equal(one, other)


def test_within_measures_and_touches_only_what_the_outer_method_keeps():
    batch = batch_of([[{**one, "H": one["H"] * (one["A"] >= 0)} for one in row] for row in ROWS])
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


def test_within_is_compose_where_the_outer_method_keeps_all():
    rewarded = [[{**one, "A": 1.0} for one in row] for row in ROWS]
    assert same(
        run(compose(within(DropPunished(), SMALL), ClipHigher()), rewarded), run(compose(SMALL, ClipHigher()), rewarded)
    )


def test_weights_multiply_and_bonuses_add():
    batch = batch_of(ROWS)
    plan = make_plan(compose(Scale(2.0, 0.5, 0.5), Scale(3.0, 0.25, 0.1), DropPunished()), [batch])
    terms = plan.terms(batch)
    assert set(terms.weight.tolist()) == {6.0}
    assert set(terms.bonus.tolist()) == {0.75}
    assert plan.lr_scale == 0.05
    assert terms.filled() == {"keep", "weight", "bonus", "lr_scale"}


def test_masks_meet_and_exemptions_join():
    batch = batch_of(ROWS)

    def merged(*methods):
        return make_plan(compose(*methods), [batch]).terms(batch)

    drop, forking = (merged(one).keep for one in (DropPunished(), SMALL))
    assert torch.equal(merged(DropPunished(), SMALL).keep, drop & forking)
    some = LpReg(share=0.4, form="code")
    assert merged(some, Exempt()).unclipped.all()
    assert not merged(some).unclipped.all()
