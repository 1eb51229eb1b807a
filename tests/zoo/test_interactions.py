"""What methods declare of each other holds in numbers; that two were published together claims nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlstab import (
    AR,
    ASPO,
    CISPO,
    CPPO,
    DPPO,
    DRPO,
    FIPO,
    GMPO,
    GSPO,
    M2PO,
    MASPO,
    SAPO,
    STARE,
    STEER,
    VESPO,
    WAPO,
    AdaptiveEntropy,
    BlockMean,
    ClipCov,
    ClipHigher,
    ConstantLength,
    EntropyBonus,
    EntropyShaping,
    HolderMean,
    ImportanceCorrection,
    KLCov,
    KLPenalty,
    LpReg,
    PolicyOutputs,
    RandomMask,
    S2TMask,
    SequenceMean,
    SignWeights,
    StreamWeight,
    TokenBatch,
    TokenMean,
    TokenObjective,
    TopEntropyMask,
    compose,
    make_plan,
    within,
)
from rlstab.core.metadata import MASK
from rlstab.core.terms import Terms
from rlstab.explain.notes import interactions
from rlstab.zoo import METHODS


def drawn(seed: int = 0, **changes: Tensor) -> TokenBatch:
    """800 tokens of 20 responses, a tenth of them rare; half of the responses rewarded, mean entropy about 0.25."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(20, 40, generator=rng, dtype=torch.float64)

    rare = uniform(0, 1) < 0.1
    logprobs = torch.where(rare, uniform(-9, -4), uniform(-2, 0))
    signals = {
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(10),
        "old_logprobs": logprobs,
        "entropies": uniform(0, 0.5),
        "ref_logprobs": logprobs - 0.1,
        "max_logprobs": torch.full_like(logprobs, -0.5),
        "log_kept_mass": uniform(-0.1, -0.01),
    }
    return TokenBatch.from_padded(response_mask=torch.ones(20, 40), **{**signals, **changes})


def asked(method: TokenObjective, batch: TokenBatch) -> Terms:
    return make_plan(method, [batch]).terms(batch)


def dropped(method: TokenObjective, batch: TokenBatch) -> Tensor:
    keep = asked(method, batch).keep
    assert keep is not None
    return ~keep


def weights(method: TokenObjective, batch: TokenBatch) -> Tensor:
    weight = asked(method, batch).weight
    assert weight is not None
    return weight


def penalised(method: TokenObjective, batch: TokenBatch) -> Tensor:
    where = asked(method, batch).penalties[""].where
    assert where is not None
    return where


def pulled(batch: TokenBatch, *methods: TokenObjective, advantage: bool = True, at: Tensor | None = None) -> Tensor:
    """The gradient on each live log-prob, of a policy that chooses between two tokens; without ``at`` the old one."""
    logprobs = (batch.old_logprobs if at is None else at).clone().requires_grad_()
    if not advantage:
        batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    entropies = -(logprobs.exp() * logprobs + torch.special.xlog1py(1 - logprobs.exp(), -logprobs.exp()))
    objective = compose(*methods)
    state = objective.init_state()
    objective(batch, PolicyOutputs(logprobs, entropies, logprobs), state=state).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def moved(batch: TokenBatch, size: float) -> tuple[TokenBatch, Tensor]:
    """The batch with room above, and a policy that went up and down by ``size`` nats in turn, and up by a little."""
    room = dataclasses.replace(batch, old_logprobs=batch.old_logprobs - size - 0.05)
    return room, room.old_logprobs + torch.where(batch.position % 2 == 0, size, -size) + 0.02


def a_mean_stays_inside(batch: TokenBatch) -> None:
    room, now = moved(batch, 2.0)
    alone = pulled(room, GSPO(), SequenceMean(), at=now)
    for other in (ClipHigher(), CISPO(), SAPO(), MASPO()):
        beside = pulled(room, GSPO(), SequenceMean(), other, at=now)
        torch.testing.assert_close(beside, alone, rtol=1e-3, atol=0)
        assert not torch.allclose(pulled(room, other, at=now), pulled(room, at=now), rtol=0.1)


def a_clipped_mean_stays_inside(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.5)
    alone = pulled(room, GMPO(), SequenceMean(), at=now)
    assert 0 < (alone == 0).sum() < len(batch)
    assert torch.equal(pulled(room, GMPO(), SequenceMean(), ClipHigher(), at=now), alone)


def what_a_mask_changes(batch: TokenBatch, *own: TokenObjective) -> Tensor:
    """How many times as hard the tokens that a mask keeps pull, because it drops the others."""
    (room, now), mask = moved(batch, 0.3), RandomMask(share=0.3, sign="all")
    left = ~dropped(mask, room)
    return (pulled(room, *own, mask, at=now) / pulled(room, *own, at=now))[left]


def mean_of_what_is_kept(batch: TokenBatch) -> None:
    divisor = what_a_mask_changes(batch)
    torch.testing.assert_close(divisor, divisor[:1].expand_as(divisor))
    for own in (GSPO(), GMPO(), HolderMean()):
        assert what_a_mask_changes(batch, own).std() > 0.01


def weight_of_the_whole(batch: TokenBatch) -> None:
    torch.testing.assert_close(what_a_mask_changes(batch, VESPO()), what_a_mask_changes(batch))


def untouched_where_exempt(batch: TokenBatch) -> None:
    (room, now), lp_reg = moved(batch, 0.5), LpReg(share=0.05, min_p=1e-4, form="code")
    chosen, plain = penalised(lp_reg, room), pulled(room, lp_reg, at=now)
    assert chosen.any()
    for own in (CISPO(cap=1.1), SAPO(), MASPO(), VESPO()):
        found = pulled(room, own, lp_reg, at=now)
        assert torch.equal(found[chosen], plain[chosen])
        assert not torch.allclose(found[~chosen], plain[~chosen])


def clipped_where_exempt(batch: TokenBatch) -> None:
    """Punished tokens that fell by half a nat; without its penalty, to see the policy term alone."""
    (room, now), lp_reg = moved(batch, 0.5), LpReg(share=0.05, min_p=1e-4, coefficient=0.0, form="code")
    fallen = penalised(lp_reg, room) & (now < room.old_logprobs)
    assert fallen.any()
    assert pulled(room, ClipHigher(), lp_reg, at=now)[fallen].all()
    assert not pulled(room, GMPO(), lp_reg, at=now)[fallen].any()


def damped_by_less_than_a_twentieth(batch: TokenBatch) -> None:
    room, _ = moved(batch, 0.5)
    away = room.advantages * (room.position / 80)  # up to half a nat, the way of the advantage
    clipped = pulled(room, ClipHigher(), at=room.old_logprobs + away)
    inside = (clipped != 0) & (away != 0)
    assert inside.any()
    for own in (SAPO(), MASPO()):
        both = pulled(room, own, ClipHigher(), at=room.old_logprobs + away)
        assert not both[clipped == 0].any()
        assert (both[inside] / clipped[inside] > 0.95).all()
        alone = pulled(room, own, at=room.old_logprobs + away) / pulled(room, at=room.old_logprobs + away)
        assert (alone[clipped == 0] < 0.97).any()


def rare_both(batch: TokenBatch) -> None:
    """S2T drops what STARE boosts: all that it drops, as long as the share is not smaller than that of rare tokens."""
    drops, boosts = dropped(S2TMask(), batch), weights(STARE(), batch) > 1
    assert drops.any()
    assert boosts[drops].all()
    inner = weights(within(S2TMask(), STARE()), batch) > 1
    assert not inner[drops].any()
    assert inner.sum() > (boosts & ~drops).sum()


def gate(batch: TokenBatch) -> None:
    assert asked(STARE(), batch).weight is not None
    assert asked(STARE(), drawn(entropies=torch.full((20, 40), 0.31))).weight is None


def opposite_pulls(batch: TokenBatch) -> None:
    """Where a reference is surer than the policy, and the policy prefers the token."""
    surer = drawn(ref_logprobs=torch.full((20, 40), -1e-4))
    preferred = surer.old_logprobs.exp() > 0.5
    held = pulled(surer, KLPenalty(), advantage=False)[preferred]
    paid = pulled(surer, EntropyBonus(), advantage=False)[preferred]
    assert (held < 0).all()
    assert (paid > 0).all()


def fixed(batch: TokenBatch) -> None:
    left = ~dropped(S2TMask(), batch)
    for own in (ConstantLength(length=40), WAPO(length=40)):
        assert torch.equal(pulled(batch, own)[left], pulled(batch, own, S2TMask())[left])
    assert not torch.equal(pulled(batch)[left], pulled(batch, S2TMask())[left])


def sure_places(batch: TokenBatch) -> None:
    boosts = weights(STARE(), batch) > 1
    assert (boosts & dropped(TopEntropyMask(), batch)).any()


def nothing_left(batch: TokenBatch) -> None:
    old = S2TMask(population="all", quantile=0.8, max_prob=0.1)
    assert dropped(old, batch).any()
    assert dropped(TopEntropyMask(), batch)[dropped(old, batch)].all()
    newer = S2TMask(population="all", quantile=0.9, max_prob=0.1)
    assert not dropped(TopEntropyMask(), batch)[dropped(newer, batch)].all()


def below_its_own(batch: TokenBatch) -> None:
    spurious = dropped(S2TMask(quantile=0.95), batch)
    forks = ~dropped(TopEntropyMask(), batch)
    assert (spurious & forks).any()
    assert (spurious & ~forks).any()


def reach(batch: TokenBatch) -> None:
    silent = dropped(S2TMask(), batch)
    assert not pulled(batch, S2TMask())[silent].any()
    assert pulled(batch, S2TMask(), KLPenalty())[silent].all()
    assert not pulled(batch, within(S2TMask(), KLPenalty()))[silent].any()
    for bonus in (EntropyBonus(), ALWAYS_PAYS):
        assert pulled(batch, S2TMask(), bonus)[silent].all()


def damped_and_held(batch: TokenBatch) -> None:
    held = penalised(LpReg(share=0.05, min_p=1e-4), batch)
    assert ((weights(STARE(variant="C2"), batch) < 1) & held).any()


def keeps_its_penalty(batch: TokenBatch) -> None:
    silent = dropped(TopEntropyMask(), batch) & penalised(LpReg(share=0.05, min_p=1e-4), batch)
    assert silent.any()
    assert pulled(batch, TopEntropyMask(), LpReg(share=0.05, min_p=1e-4))[silent].all()


def never_meet(batch: TokenBatch) -> None:
    drops, held = dropped(S2TMask(), batch), penalised(LpReg(share=0.05, min_p=1e-4), batch)
    assert drops.any()
    assert held.any()
    assert not (drops & held).any()


def exempt(batch: TokenBatch) -> None:
    terms = asked(compose(ClipHigher(), LpReg(share=0.05, min_p=1e-4, form="code")), batch)
    assert terms.bounds is not None
    assert terms.unclipped is not None
    assert terms.unclipped.any()


def either(batch: TokenBatch) -> None:
    control = METHODS.get("random_mask")(share=0.5)  # type: ignore[call-arg]
    both = dropped(compose(S2TMask(), control), batch)
    assert torch.equal(both, dropped(S2TMask(), batch) | dropped(control, batch))


def pay_twice(batch: TokenBatch) -> None:
    one, other = (pulled(batch, bonus, advantage=False) for bonus in (ALWAYS_PAYS, EntropyBonus()))
    torch.testing.assert_close(pulled(batch, ALWAYS_PAYS, EntropyBonus(), advantage=False), one + other)


def uneven(batch: TokenBatch) -> TokenBatch:
    """Every second response has ten tokens, the others have forty."""
    return batch.select((batch.position < 10) | (batch.sequence % 2 == 0))


def shrinks(batch: TokenBatch) -> None:
    """The mean length is 40, a tenth of 400."""
    for advantage in (True, False):
        token, fixed = (
            pulled(batch, KLPenalty(), *aggregate, advantage=advantage)
            for aggregate in ([], [ConstantLength(length=400)])
        )
        torch.testing.assert_close(10 * fixed, token)


def per_response(batch: TokenBatch) -> None:
    short = uneven(batch)
    lengths = short.sequence.bincount()[short.sequence]
    for penalty in (KLPenalty(), EntropyBonus(), LpReg(share=0.05, min_p=1e-4), ALWAYS_PAYS):
        token = pulled(short, penalty) - pulled(short)
        response = pulled(short, penalty, SequenceMean()) - pulled(short, SequenceMean())
        torch.testing.assert_close(20 * lengths * response, len(short) * token)
        assert not torch.allclose(response, token)


def same_measure(batch: TokenBatch) -> None:
    short = uneven(batch)
    states = [make_plan(compose(ALWAYS_PAYS, *one), [short]).state for one in ([], [SequenceMean()])]
    assert states[0]["adaptive_entropy"] == states[1]["adaptive_entropy"]
    per_response(batch)


def alone(batch: TokenBatch) -> None:
    """Of the first response only the first token is left; it has the weight of a response, a twentieth."""
    entropies = torch.where(batch.sequence == 0, 0.0, 0.5 + batch.position / 100.0)
    lone = dataclasses.replace(batch, entropies=torch.where(batch.position == 0, 9.0, entropies))
    assert (~dropped(TopEntropyMask(), lone))[lone.sequence == 0].sum() == 1
    pull = pulled(lone, TopEntropyMask(), SequenceMean())
    assert pull[0].item() == pytest.approx(-1 / 20)


def stays_stopped(batch: TokenBatch) -> None:
    boosted = weights(STARE(), batch) > 1
    far = (batch.old_logprobs + 0.5).requires_grad_()  # a ratio of 1.65
    objective = compose(STARE(), ClipHigher())
    objective(batch, PolicyOutputs(far), state=objective.init_state()).loss.backward()
    assert boosted.any()
    assert far.grad is not None
    assert not far.grad[boosted].any()


def far_from_the_sampler(batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    """Sampled by the old policy; and the log-probs of one whose ratios are up to e^0.5, the way of the advantage."""
    gap = 0.5 * batch.advantages * (batch.position % 10) / 9
    return dataclasses.replace(batch, rollout_logprobs=batch.old_logprobs), (batch.old_logprobs + gap).clamp(max=0.0)


def no_way_back(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    turned = pulled(sampled, DRPO(0.15), at=now) * batch.advantages > 0
    beyond = (now - batch.old_logprobs).exp().sub(1).abs() > 0.28
    assert (turned & beyond).any()
    assert not pulled(sampled, DRPO(0.15), ClipHigher(), at=now)[turned & beyond].any()


def stops_what_would_turn(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    turned = pulled(sampled, DRPO(0.2), at=now) * batch.advantages > 0
    assert turned.any()
    assert not pulled(sampled, DRPO(0.2), CPPO(0.15), at=now)[turned].any()


def never_looser(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    other, own = pulled(sampled, DPPO(), at=now), pulled(sampled, CPPO(min_weight=1.0), at=now)
    assert (other == 0).any()
    assert not own[other == 0].any()
    assert (own == 0).sum() > (other == 0).sum()


def keeps_what_the_clip_stops(batch: TokenBatch) -> None:
    """One token in ten is half a nat away: a mean square of 0.025 nats."""
    far = batch.position % 10 == 0
    now = batch.old_logprobs + torch.where(far, 0.5, 0.001) * batch.advantages
    sampled = dataclasses.replace(batch, rollout_logprobs=batch.old_logprobs, logprobs=now)
    assert asked(M2PO(), sampled).weight is None
    assert torch.equal(pulled(sampled, M2PO(), ClipHigher(), at=now) == 0, far)


def of_all_tokens(batch: TokenBatch) -> None:
    alone, beside = asked(compose(ASPO()), batch), asked(compose(ASPO(), TopEntropyMask()), batch)
    counts = [one.report["aspo/high_entropy"] for one in (alone, beside)]
    assert 0 < counts[0].value < 1
    assert (counts[0].total, counts[0].count) == (counts[1].total, counts[1].count)


def rare_and_rewarded(batch: TokenBatch) -> Tensor:
    return (batch.old_logprobs < -4) & batch.rewarded


def damped_and_boosted(batch: TokenBatch) -> None:
    most = torch.zeros_like(batch.rewarded).index_fill(0, weights(STEER(), batch).argsort()[:40], True)
    assert (most & batch.rewarded).any()
    assert (weights(STARE(), batch) > 1)[most & batch.rewarded].all()


def rare_less_and_more(batch: TokenBatch) -> None:
    """All ratios are 2 or 1 / 2; the rarer half of the rewarded tokens that rose, and the others."""
    room, now = moved(batch, 0.7)
    rose = room.rewarded & (now > room.old_logprobs)
    rare = room.old_logprobs < room.old_logprobs[rose].median()
    room_left, weight = pulled(room, MASPO(), at=now) / pulled(room, at=now), weights(AR(), room)
    assert room_left[rose & rare].min() > room_left[rose & ~rare].max()
    assert weight[rose & rare].max() < weight[rose & ~rare].min()


def rare_rise_damped(batch: TokenBatch) -> None:
    """At a ratio of 1.25, which a clip at 0.2 stops."""
    rare, now = rare_and_rewarded(batch), batch.old_logprobs + math.log(1.25)
    assert rare.any()
    assert not pulled(batch, ClipHigher(high=0.2), at=now)[rare].any()
    room_left, damped = pulled(batch, ClipHigher(), at=now), pulled(batch, ClipHigher(), AR(), at=now)
    assert room_left[rare].all()
    assert (damped / room_left)[rare].max() < 0.71


def rarest_boosted_and_damped(batch: TokenBatch) -> None:
    boosted, weight = weights(STARE(), batch) > 1, weights(AR(), batch)
    assert boosted.any()
    assert weight[boosted].max() < weight[batch.rewarded & ~boosted].min()


def both_soften(batch: TokenBatch) -> None:
    lp_reg = LpReg(share=0.05, min_p=1e-4)
    held, plain = penalised(lp_reg, batch), pulled(batch)
    assert held.any()
    for own in (AR(), lp_reg):
        assert (pulled(batch, own)[held] < plain[held]).all()


def few_of_the_rare(batch: TokenBatch) -> None:
    rare, weight = batch.punished & (batch.old_logprobs < -4), weights(STEER(), batch)
    assert weight[rare].max() < 0.95
    assert weight[batch.old_logprobs > -2].min() > 0.95
    held, silenced = penalised(KLCov(share=0.01), batch), weights(ClipCov(share=0.05), batch) == 0
    assert held.any()
    assert rare[held].all()
    assert 0 < (silenced & rare).sum() < rare.sum()


def only_pulled_back(batch: TokenBatch) -> None:
    """All tokens between the bounds are silenced, and the tenth of the largest covariance is held."""
    (room, now), methods = moved(batch, 0.3), (ClipCov(share=1.0), KLCov(share=0.1))
    silenced, held = weights(methods[0], room) == 0, penalised(methods[1], room)
    assert (silenced & held).any()
    assert (held & ~silenced).any()
    assert (silenced & ~held).any()
    found = pulled(room, *methods, at=now)[silenced & held]
    assert torch.equal(found.sign(), (now - room.old_logprobs)[silenced & held].sign())


def hit_and_dropped(batch: TokenBatch) -> None:
    own, mask = ClipCov(share=0.1), RandomMask(share=0.5, sign="all")
    hit, gone = weights(own, batch) == 0, dropped(mask, batch)
    assert (hit & gone).any()
    assert torch.equal(weights(compose(own, mask), batch) == 0, hit)
    assert not ((weights(within(mask, own), batch) == 0) & gone).any()


def hit_and_stopped(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.5)
    room = dataclasses.replace(room, logprobs=now)
    stopped = pulled(room, ClipHigher(), at=now) == 0
    assert ((weights(ClipCov(share=1.0), room) == 0) & stopped).any()
    hit = weights(ClipCov(share=1.0, clip_low=0.2, clip_high=0.28), room) == 0
    assert hit.any()
    assert not (hit & stopped).any()


def held_though_dropped(batch: TokenBatch) -> None:
    (room, now), own, mask = moved(batch, 0.3), KLCov(share=0.1), RandomMask(share=0.5, sign="all")
    held, gone = penalised(own, room), dropped(mask, room)
    assert (held & gone).any()
    found = pulled(room, own, mask, at=now)
    assert found[held & gone].all()
    assert not found[~held & gone].any()


def stopped_and_held(batch: TokenBatch) -> None:
    (room, now), own = moved(batch, 0.5), KLCov(share=0.1)
    held, stopped = penalised(own, room), pulled(room, ClipHigher(), at=now) == 0
    found = pulled(room, own, ClipHigher(), at=now)
    assert (held & stopped).any()
    assert torch.equal(found[held & stopped].sign(), (now - room.old_logprobs)[held & stopped].sign())
    assert pulled(room, own, at=now)[~held & stopped].all()
    assert not found[~held & stopped].any()


def shaped(batch: TokenBatch) -> Tensor:
    bonus = asked(EntropyShaping(), batch).bonus
    assert bonus is not None
    return batch.advantages + bonus


def read_without_the_bonus(batch: TokenBatch) -> None:
    larger = dataclasses.replace(batch, advantages=shaped(batch))
    for other in (STEER(), ClipCov(share=0.05)):
        assert torch.equal(weights(compose(EntropyShaping(), other), batch), weights(other, batch))
        assert not torch.equal(weights(other, larger), weights(other, batch))
    (penalty,) = asked(compose(EntropyShaping(), KLCov(share=0.2)), batch).penalties.values()
    assert penalty.where is not None
    assert torch.equal(penalty.where, penalised(KLCov(share=0.2), batch))
    assert not torch.equal(penalty.where, penalised(KLCov(share=0.2), larger))


def may_lower(batch: TokenBatch) -> None:
    """Of two tokens entropy falls with the log-prob of the likelier one."""
    likely = batch.rewarded & (batch.old_logprobs.exp() > 0.5)
    assert (pulled(batch, EntropyShaping())[likely] < pulled(batch)[likely]).all()
    for bonus in (EntropyBonus(), ALWAYS_PAYS):
        assert (pulled(batch, bonus, EntropyShaping())[likely] > pulled(batch, EntropyShaping())[likely]).all()


def advantages_of_their_own(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.3)
    for other in (FIPO(), GMPO(), GSPO(), HolderMean(), VESPO()):
        alone, beside = (pulled(room, *several, at=now) for several in ([other], [other, EntropyShaping()]))
        torch.testing.assert_close(beside / shaped(room), alone / room.advantages)
        assert not torch.allclose(beside, alone)


def wider_by_the_bonus(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.7)
    alone = pulled(room, MASPO(), at=now) / room.advantages
    beside = pulled(room, MASPO(), EntropyShaping(), at=now) / shaped(room)
    away = room.advantages * (now - room.old_logprobs) > 0
    assert (beside[away] < alone[away]).all()  # both are negative
    torch.testing.assert_close(beside[~away], alone[~away])


def nothing_left_of_the_rewarded(batch: TokenBatch) -> None:
    silent = weights(SignWeights(positive=0.0), batch) == 0
    acts = [dropped(S2TMask(), batch), weights(STARE(), batch) > 1, weights(STARE(variant="C2"), batch) != 1]
    assert all(one.any() for one in acts)
    assert [bool(silent[one].all()) for one in acts] == [True, True, False]
    assert silent[acts[2] & ~batch.punished].all()


def only_positive_acts(batch: TokenBatch) -> None:
    signs = SignWeights(positive=0.1, negative=3.0)
    torch.testing.assert_close(pulled(batch, WAPO(length=40), signs), 0.1 * pulled(batch, WAPO(length=40)))


def stronger_with_fewer_winners(batch: TokenBatch) -> None:
    """Ten groups of two with a winner each; then five of them without."""
    all_won = dataclasses.replace(batch, group_ids=torch.arange(20) // 2)
    half = dataclasses.replace(all_won, advantages=torch.where(batch.sequence % 4 < 2, batch.advantages, 0.0))
    many, few = (pulled(one, WAPO(length=40), KLPenalty()) - pulled(one, WAPO(length=40)) for one in (all_won, half))
    torch.testing.assert_close(few, 2 * many)


def one_ratio_for_all_blocks(batch: TokenBatch) -> None:
    """The policy moved in the second block of each response alone."""
    first = batch.position < 20
    blocks = dataclasses.replace(batch, block_ids=(~first).double())
    now = torch.where(first, batch.old_logprobs, batch.old_logprobs - 0.3)
    assert torch.equal(pulled(blocks, BlockMean(), at=now)[first], pulled(blocks, BlockMean())[first])
    for other in (GSPO(), GMPO(), HolderMean()):
        alike, apart = (pulled(blocks, BlockMean(), other, at=at)[first] for at in (batch.old_logprobs, now))
        assert ((apart / alike - 1).abs() > 0.05).all()


def damps_the_way_back(batch: TokenBatch) -> None:
    """Rewarded tokens sampled with probability 0.05, at a ratio of 5 and of 10."""
    old = torch.full_like(batch.old_logprobs, 0.05).log()
    sampled = dataclasses.replace(batch, old_logprobs=old, rollout_logprobs=old)
    for other in (SAPO(), MASPO()):
        left = []
        for ratio in (5.0, 10.0):
            alone, beside = (pulled(sampled, DRPO(0.15), *one, at=old + math.log(ratio)) for one in ([], [other]))
            assert (alone[batch.rewarded] > 0).all()
            left.append((beside / alone)[batch.rewarded].max())
        assert 0.01 > left[1] < left[0] < 0.5


def one_by_probability_one_by_ratio(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    likely = batch.old_logprobs.exp() > 0.5
    stopped = (pulled(sampled, CPPO(), at=now) == 0) & likely
    rare = rare_and_rewarded(batch)
    risen = torch.where(rare, batch.old_logprobs + math.log(4), batch.old_logprobs)
    assert stopped.any()
    assert rare.any()
    assert pulled(sampled, CPPO(), at=risen)[rare].all()
    for other in (SAPO(), MASPO()):
        damped = pulled(sampled, other, at=now) / pulled(sampled, at=now) <= 0.95
        assert stopped[damped & likely].all()
        assert (pulled(sampled, other, at=risen) / pulled(sampled, at=risen))[rare].max() < 0.97


def spends_though_dropped(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    mask = RandomMask(share=0.5, sign="all")
    gone = dropped(mask, sampled)
    stopped, fewer = (
        ~gone & (pulled(sampled, *several, at=now) == 0) for several in ([CPPO(), mask], [within(mask, CPPO())])
    )
    assert torch.equal(stopped, ~gone & (pulled(sampled, CPPO(), at=now) == 0))
    assert fewer.sum() < stopped.sum()


def the_ratio_to_the_sampler(batch: TokenBatch) -> None:
    """Old log-probs that the trainer recomputed, or those of the sampler, up to e^0.1 apart."""
    sampler = batch.old_logprobs - 0.1 * (batch.position % 7) / 6
    now = batch.old_logprobs + 0.3 * batch.advantages * (batch.position % 5) / 4
    recomputed = dataclasses.replace(batch, rollout_logprobs=sampler, logprobs=now)
    published = dataclasses.replace(recomputed, old_logprobs=sampler)
    weights = ImportanceCorrection(max_weight=None)
    for other in (CPPO(), DRPO(0.15), M2PO(budget=0.01)):
        expected = pulled(published, other, at=now)
        torch.testing.assert_close(pulled(recomputed, other, weights, at=now), expected)
        assert not torch.allclose(pulled(recomputed, other, at=now), expected, rtol=0.05)
        torch.testing.assert_close(pulled(published, other, weights, at=now), expected)


def in_streams(batch: TokenBatch) -> TokenBatch:
    """Half of the responses are branches, a tenth as long as the others."""
    branch = batch.sequence % 4 < 2
    keep = ~branch | (batch.position < 4)
    per_token = {name: values[keep] for name, values in batch.per_token()}
    shorter = dataclasses.replace(batch, **per_token, sequence=batch.sequence[keep], position=batch.position[keep])
    return dataclasses.replace(shorter, branch=branch[keep].double())


def share_of_branches(batch: TokenBatch, *methods: TokenObjective) -> float:
    """Of the pull on all tokens, those of branches, relative to the others."""
    branch, pull = batch.signal("branch") > 0, pulled(batch, StreamWeight(coefficient=0.5), *methods).abs()
    return float(pull[branch].sum() / pull[~branch].sum())


def counts_what_is_dropped(batch: TokenBatch) -> None:
    """The rare tokens of branches alone are dropped."""
    streams = in_streams(batch)
    branch = streams.signal("branch") > 0
    streams = dataclasses.replace(streams, entropies=torch.where(branch & (streams.position > 1), 0.0, 1.0))
    mask = TopEntropyMask(share=0.5)
    assert (dropped(mask, streams) == (branch & (streams.position > 1))).all()
    assert torch.equal(weights(compose(mask, StreamWeight()), streams), weights(StreamWeight(), streams))
    assert share_of_branches(streams) == pytest.approx(0.5)
    assert share_of_branches(streams, mask) == pytest.approx(0.25)
    pull = pulled(streams, within(mask, StreamWeight(coefficient=0.5))).abs()
    assert float(pull[branch].sum() / pull[~branch].sum()) == pytest.approx(0.5)


def out_of_proportion(batch: TokenBatch) -> None:
    streams = dataclasses.replace(in_streams(batch), block_ids=torch.zeros_like(in_streams(batch).old_logprobs))
    assert share_of_branches(streams, TokenMean()) == pytest.approx(0.5)
    for other in (SequenceMean(), BlockMean()):
        assert share_of_branches(streams, other) == pytest.approx(5.0)  # ten times shorter: each token ten times more


def one_penalty_for_both(batch: TokenBatch) -> None:
    streams = in_streams(batch)
    for penalty in (KLPenalty(), EntropyBonus()):
        alone = pulled(streams, penalty) - pulled(streams)
        beside = pulled(streams, StreamWeight(), penalty) - pulled(streams, StreamWeight())
        torch.testing.assert_close(beside, alone)


ALWAYS_PAYS = AdaptiveEntropy(target_entropy=1.0, initial=0.001)

#: Each claim, with the pairs of which it is declared: own and others; "mask" is any that drops tokens.
SHOWN: dict[Callable[[TokenBatch], None], str] = {
    of_all_tokens: "aspo top_entropy",
    never_looser: "cppo dppo",
    stops_what_would_turn: "cppo drpo",
    no_way_back: "drpo clip_higher",
    keeps_what_the_clip_stops: "m2po clip_higher",
    rare_both: "s2t stare",
    gate: "stare entropy_bonus adaptive_entropy",
    opposite_pulls: "kl entropy_bonus adaptive_entropy",
    fixed: "constant_length mask, wapo mask",
    sure_places: "stare top_entropy",
    nothing_left: "s2t top_entropy",
    below_its_own: "s2t top_entropy",
    pay_twice: "entropy_bonus adaptive_entropy",
    either: "random_mask s2t top_entropy",
    shrinks: "constant_length kl",
    alone: "sequence_mean mask",
    per_response: "sequence_mean kl entropy_bonus lp_reg",
    same_measure: "adaptive_entropy sequence_mean",
    stays_stopped: "stare clip_higher",
    reach: "kl mask, entropy_bonus mask, adaptive_entropy mask",
    damped_and_held: "stare lp_reg",
    keeps_its_penalty: "lp_reg top_entropy",
    never_meet: "s2t lp_reg",
    exempt: "clip_higher lp_reg",
    untouched_where_exempt: "cispo lp_reg, maspo lp_reg, sapo lp_reg, vespo lp_reg",
    a_clipped_mean_stays_inside: "gmpo clip_higher",
    clipped_where_exempt: "gmpo lp_reg",
    mean_of_what_is_kept: "gmpo mask, gspo mask, holder_mean mask",
    a_mean_stays_inside: "gspo cispo clip_higher sapo maspo",
    damped_by_less_than_a_twentieth: "maspo clip_higher, sapo clip_higher",
    weight_of_the_whole: "vespo mask",
    rare_rise_damped: "ar clip_higher",
    both_soften: "ar lp_reg",
    rare_less_and_more: "ar maspo",
    rarest_boosted_and_damped: "ar stare",
    one_ratio_for_all_blocks: "block_mean gmpo gspo holder_mean",
    hit_and_dropped: "clip_cov mask",
    hit_and_stopped: "clip_cov clip_higher",
    only_pulled_back: "clip_cov kl_cov",
    spends_though_dropped: "cppo mask",
    one_by_probability_one_by_ratio: "cppo maspo sapo",
    damps_the_way_back: "drpo maspo sapo",
    may_lower: "entropy_shaping adaptive_entropy entropy_bonus",
    read_without_the_bonus: "entropy_shaping clip_cov kl_cov steer",
    advantages_of_their_own: "entropy_shaping fipo gmpo gspo holder_mean vespo",
    wider_by_the_bonus: "entropy_shaping maspo",
    the_ratio_to_the_sampler: "importance_correction cppo drpo m2po",
    held_though_dropped: "kl_cov mask",
    stopped_and_held: "kl_cov clip_higher",
    nothing_left_of_the_rewarded: "sign_weights s2t stare",
    few_of_the_rare: "steer clip_cov kl_cov",
    damped_and_boosted: "steer stare",
    counts_what_is_dropped: "stream_weight mask",
    out_of_proportion: "stream_weight sequence_mean block_mean",
    one_penalty_for_both: "stream_weight kl entropy_bonus",
    stronger_with_fewer_winners: "wapo kl",
    only_positive_acts: "wapo sign_weights",
}


def test_every_declared_pair_is_shown_in_numbers() -> None:
    declared = {
        (name, other.replace(MASK, "mask"))
        for name in METHODS.names()
        for fact in METHODS.get(name).about.interacts
        if fact.kind != "good"
        for other in fact.names
    }
    several = [group.split() for groups in SHOWN.values() for group in groups.split(", ")]
    assert declared == {(own, other) for own, *others in several for other in others}


@pytest.mark.parametrize("seed", range(2))
def test_what_is_declared_of_a_pair_holds(seed: int) -> None:
    for claim in SHOWN:
        claim(drawn(seed))


def test_the_older_s2t_is_idle_only_up_to_the_share_that_top_entropy_drops() -> None:
    for quantile, share, expected in [(0.8, 0.2, True), (0.7, 0.2, True), (0.9, 0.2, False)]:
        found = interactions(compose(S2TMask(population="all", quantile=quantile), TopEntropyMask(share=share)))
        ((kind, text),) = found
        assert kind == "redundant"
        assert ("`top_entropy` drops every token that `s2t` would drop." in text) == expected


def test_a_clip_on_policy_changes_nothing() -> None:
    batch = dataclasses.replace(drawn(), live_ratio=True)
    assert torch.equal(pulled(batch, ClipHigher(low=0.0, high=0.0)), pulled(batch))
