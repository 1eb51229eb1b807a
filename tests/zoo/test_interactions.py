"""What methods declare of each other holds in numbers; that two were published together claims nothing."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rlstab as r
from rlstab import TokenBatch, TokenObjective
from rlstab.core.metadata import MASK
from rlstab.core.terms import Terms
from rlstab.explain.notes import interactions
from rlstab.zoo import METHODS

ALWAYS_PAYS = r.AdaptiveEntropy(target_entropy=1.0, initial=0.001)
HELD = r.LpReg(share=0.05, min_p=1e-4)


def drawn(seed: int = 0, **changes: Tensor) -> TokenBatch:
    """800 tokens of 20 responses, a tenth of them rare; half of the responses rewarded, mean entropy about 0.25."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(20, 40, generator=rng, dtype=torch.float64)

    rare = uniform(0, 1) < 0.1
    logprobs = torch.where(rare, uniform(-9, -4), uniform(-2.6, -0.6))
    signals = {
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(10),
        "group_ids": torch.arange(20),
        "old_logprobs": logprobs,
        "entropies": uniform(0, 0.5),
        "ref_logprobs": logprobs - 0.1,
        "max_logprobs": torch.full_like(logprobs, -0.5),
        "log_kept_mass": uniform(-0.1, -0.01),
    }
    return TokenBatch.from_padded(response_mask=torch.ones(20, 40), **{**signals, **changes})


def asked(method: TokenObjective, batch: TokenBatch) -> Terms:
    return r.make_plan(method, [batch]).terms(batch)


def dropped(method: TokenObjective, batch: TokenBatch) -> Tensor:
    keep = asked(method, batch).keep
    assert keep is not None
    return ~keep


def weights(method: TokenObjective, batch: TokenBatch) -> Tensor:
    weight = asked(method, batch).weight
    assert weight is not None
    return weight


def penalised(method: TokenObjective, batch: TokenBatch) -> Tensor:
    (penalty,) = asked(method, batch).penalties.values()
    assert penalty.where is not None
    return penalty.where


def pulled(batch: TokenBatch, *methods: TokenObjective, advantage: bool = True, at: Tensor | None = None) -> Tensor:
    """The gradient on each live log-prob, of a policy that chooses between two tokens; without ``at`` the old one."""
    logprobs = (batch.old_logprobs if at is None else at).clone().requires_grad_()
    if not advantage:
        batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    entropies = -(logprobs.exp() * logprobs + torch.special.xlog1py(1 - logprobs.exp(), -logprobs.exp()))
    objective = r.compose(*methods)
    state = objective.init_state()
    objective(batch, r.PolicyOutputs(logprobs, entropies, logprobs), state=state).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def everywhere(where: Tensor, values: Tensor) -> bool:
    """No value is 0 or False there, and there is one."""
    return bool(where.any()) and bool(values[where].all())


def nowhere(where: Tensor, values: Tensor) -> bool:
    """Every value is 0 or False there, and there is one."""
    return bool(where.any()) and not values[where].any()


def moved(batch: TokenBatch, size: float) -> tuple[TokenBatch, Tensor]:
    """The batch with room above, and a policy that went up and down by ``size`` nats in turn, and up by a little."""
    old = batch.old_logprobs - size - 0.05
    now = old + torch.where(batch.position % 2 == 0, size, -size) + 0.02
    return dataclasses.replace(batch, old_logprobs=old), now.clamp(max=0.0)


def far_from_the_sampler(batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    """Sampled by the old policy; and the log-probs of one whose ratios are up to e^0.5, the way of the advantage."""
    gap = 0.5 * batch.advantages * (batch.position % 10) / 9
    return dataclasses.replace(batch, rollout_logprobs=batch.old_logprobs), (batch.old_logprobs + gap).clamp(max=0.0)


def uneven(batch: TokenBatch) -> TokenBatch:
    """Every second response has ten tokens, the others have forty."""
    return batch.select((batch.position < 10) | (batch.sequence % 2 == 0))


def in_streams(batch: TokenBatch) -> TokenBatch:
    """Half of the responses are branches, a tenth as long as the others."""
    shorter = batch.select((batch.sequence % 4 >= 2) | (batch.position < 4))
    branch = (shorter.sequence % 4 < 2).double()
    return dataclasses.replace(shorter, branch=branch, block_ids=torch.zeros_like(branch))


def rare_and_rewarded(batch: TokenBatch) -> Tensor:
    return (batch.old_logprobs < -4) & batch.rewarded


def shaped(batch: TokenBatch) -> Tensor:
    """The advantages with the bonus of ``entropy_shaping``."""
    bonus = asked(r.EntropyShaping(), batch).bonus
    assert bonus is not None
    return batch.advantages + bonus


def a_mean_stays_inside(batch: TokenBatch) -> None:
    room, now = moved(batch, 2.0)
    alone = pulled(room, r.GSPO(), r.SequenceMean(), at=now)
    for other in (r.ClipHigher(), r.DCPOClip(), r.CISPO(), r.SAPO(), r.MASPO()):
        beside = pulled(room, r.GSPO(), r.SequenceMean(), other, at=now)
        torch.testing.assert_close(beside, alone, rtol=1e-3, atol=0)
        assert not torch.allclose(pulled(room, other, at=now), pulled(room, at=now), rtol=0.1)
    inverse = pulled(room, r.GSPO(), r.SequenceMean(), r.ASPO(), at=now) / alone
    ratio = (now - room.old_logprobs).mean().exp()
    torch.testing.assert_close(inverse[room.rewarded], (ratio**-2).expand_as(inverse[room.rewarded]))
    assert (inverse[room.punished] == 1).all()
    assert not torch.allclose(pulled(room, r.ASPO(), at=now), pulled(room, at=now), rtol=0.1)


def a_clipped_mean_stays_inside(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.5)
    alone = pulled(room, r.GMPO(), r.SequenceMean(), at=now)
    assert 0 < (alone == 0).sum() < len(batch)
    for other in (r.ClipHigher(), r.DCPOClip()):
        assert torch.equal(pulled(room, r.GMPO(), r.SequenceMean(), other, at=now), alone)


def what_a_mask_changes(batch: TokenBatch, *own: TokenObjective) -> Tensor:
    """How many times as hard the tokens that a mask keeps pull, because it drops the others."""
    (room, now), mask = moved(batch, 0.3), r.RandomMask(share=0.3, sign="all")
    return (pulled(room, *own, mask, at=now) / pulled(room, *own, at=now))[~dropped(mask, room)]


def mean_of_what_is_kept(batch: TokenBatch) -> None:
    divisor = what_a_mask_changes(batch)
    torch.testing.assert_close(divisor, divisor[:1].expand_as(divisor))
    for own in (r.GSPO(), r.GMPO(), r.HolderMean()):
        assert what_a_mask_changes(batch, own).std() > 0.01


def weight_of_the_whole(batch: TokenBatch) -> None:
    torch.testing.assert_close(what_a_mask_changes(batch, r.VESPO()), what_a_mask_changes(batch))


def one_ratio_for_all_blocks(batch: TokenBatch) -> None:
    """The policy moved in the second block of each response alone."""
    first = batch.position < 20
    blocks = dataclasses.replace(batch, block_ids=(~first).double())
    now = torch.where(first, batch.old_logprobs, batch.old_logprobs - 0.3)
    assert torch.equal(pulled(blocks, r.BlockMean(), at=now)[first], pulled(blocks, r.BlockMean())[first])
    for other in (r.GSPO(), r.GMPO(), r.HolderMean()):
        alike, apart = (pulled(blocks, r.BlockMean(), other, at=at)[first] for at in (batch.old_logprobs, now))
        assert ((apart / alike - 1).abs() > 0.05).all()


#: Both restrain, and nothing is restrained less beside the other: pairs that act on some of the same tokens.
TWICE: list[tuple[TokenObjective, list[TokenObjective]]] = [
    (r.GSPO(), [r.CPPO(), r.DRPO(1.5), r.FIPO(low=0.5)]),
    (r.DRPO(1.5), [r.CPPO(), r.DPPO()]),
    (r.SAPO(), [r.MASPO()]),
    (r.VESPO(), [r.OffPolicyMask(max_gap=0.1), r.M2PO()]),
    (r.M2PO(), [r.DPPO()]),
    (r.ImportanceCorrection(level="sequence", max_weight=None, keep_high=1.1), [r.CPPO()]),
]


def restrained_twice(batch: TokenBatch) -> None:
    """The factors of both multiply, on some tokens those of both are below 1."""
    sampled, now = far_from_the_sampler(batch)
    sampled = dataclasses.replace(sampled, logprobs=now, rollout_logprobs=sampled.old_logprobs - 0.001 * batch.sequence)
    plain = pulled(sampled, at=now)
    for own, others in TWICE:
        for other in others:
            factors = [pulled(sampled, method, at=now) / plain for method in (own, other)]
            both = pulled(sampled, own, other, at=now) / plain
            torch.testing.assert_close(both, factors[0] * factors[1])
            assert ((factors[0] != 1) & (factors[1] < 0.99)).any()


def never_looser(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    other, own = pulled(sampled, r.DPPO(), at=now), pulled(sampled, r.CPPO(min_weight=1.0), at=now)
    assert nowhere(other == 0, own)
    assert (own == 0).sum() > (other == 0).sum()


def stops_what_would_turn(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    turned = pulled(sampled, r.DRPO(0.2), at=now) * batch.advantages > 0
    beyond = turned & ((now - batch.old_logprobs).exp().sub(1).abs() > 0.28)
    for where, other in ((turned, r.CPPO(0.15)), (turned, r.DPPO()), (beyond, r.ClipHigher())):
        assert nowhere(where, pulled(sampled, r.DRPO(0.2), other, at=now))


def damps_the_way_back(batch: TokenBatch) -> None:
    """Rewarded tokens sampled with probability 0.05, at a ratio of 5 and of 10."""
    old = torch.full_like(batch.old_logprobs, 0.05).log()
    sampled = dataclasses.replace(batch, old_logprobs=old, rollout_logprobs=old)
    for other in (r.SAPO(), r.MASPO()):
        left = []
        for ratio in (5.0, 10.0):
            alone, beside = (pulled(sampled, r.DRPO(0.15), *more, at=old + math.log(ratio)) for more in ([], [other]))
            assert (alone[batch.rewarded] > 0).all()
            left.append((beside / alone)[batch.rewarded].max())
        assert 0.01 > left[1] < left[0] < 0.5


def one_by_probability_one_by_ratio(batch: TokenBatch) -> None:
    sampled, now = far_from_the_sampler(batch)
    likely, rare = batch.old_logprobs.exp() > 0.5, rare_and_rewarded(batch)
    stopped = (pulled(sampled, r.CPPO(), at=now) == 0) & likely
    risen = torch.where(rare, batch.old_logprobs + math.log(4), batch.old_logprobs)
    assert everywhere(rare, pulled(sampled, r.CPPO(), at=risen))
    for other in (r.SAPO(), r.MASPO()):
        damped = pulled(sampled, other, at=now) / pulled(sampled, at=now) <= 0.95
        assert everywhere(damped & likely, stopped)
        assert (pulled(sampled, other, at=risen) / pulled(sampled, at=risen))[rare].max() < 0.97


def damped_by_less_than_a_twentieth(batch: TokenBatch) -> None:
    room, _ = moved(batch, 0.5)
    now = room.old_logprobs + room.advantages * (room.position / 80)  # up to half a nat, the way of the advantage
    clipped, plain = pulled(room, r.ClipHigher(), at=now), pulled(room, at=now)
    inside = (clipped != 0) & (room.position > 0)
    for own in (r.SAPO(), r.MASPO()):
        both = pulled(room, own, r.ClipHigher(), at=now)
        assert nowhere(clipped == 0, both)
        assert everywhere(inside, both / clipped > 0.95)
        assert ((pulled(room, own, at=now) / plain)[clipped == 0] < 0.97).any()


def keeps_what_the_clip_stops(batch: TokenBatch) -> None:
    """One token in ten is half a nat away: a mean square of 0.025 nats."""
    far = batch.position % 10 == 0
    now = batch.old_logprobs + torch.where(far, 0.5, 0.001) * batch.advantages
    sampled = dataclasses.replace(batch, rollout_logprobs=batch.old_logprobs, logprobs=now)
    assert asked(r.M2PO(), sampled).weight is None
    assert torch.equal(pulled(sampled, r.M2PO(), r.ClipHigher(), at=now) == 0, far)


def the_ratio_to_the_sampler(batch: TokenBatch) -> None:
    """Old log-probs that the trainer recomputed, or those of the sampler, up to e^0.1 apart."""
    sampler = batch.old_logprobs - 0.1 * (batch.position % 7) / 6
    now = batch.old_logprobs + 0.3 * batch.advantages * (batch.position % 5) / 4
    recomputed = dataclasses.replace(batch, rollout_logprobs=sampler, logprobs=now)
    published = dataclasses.replace(recomputed, old_logprobs=sampler)
    correction = r.ImportanceCorrection(max_weight=None)
    for other in (r.CPPO(), r.DRPO(0.15), r.M2PO(budget=0.01)):
        expected = pulled(published, other, at=now)
        torch.testing.assert_close(pulled(recomputed, other, correction, at=now), expected)
        assert not torch.allclose(pulled(recomputed, other, at=now), expected, rtol=0.05)
        torch.testing.assert_close(pulled(published, other, correction, at=now), expected)


def exempt(batch: TokenBatch) -> None:
    """Punished tokens that fell by half a nat; GMPO's, without the penalty, to see the policy term alone."""
    (room, now), lp_reg = moved(batch, 0.5), r.LpReg(share=0.05, min_p=1e-4, form="code")
    chosen, plain = penalised(lp_reg, room), pulled(room, lp_reg, at=now)
    for own in (r.ClipHigher(), r.CISPO(cap=1.1), r.SAPO(), r.MASPO(), r.VESPO()):
        pull = pulled(room, own, lp_reg, at=now)
        assert everywhere(chosen, pull == plain)
        assert not torch.allclose(pull[~chosen], plain[~chosen])
    fallen, free = chosen & (now < room.old_logprobs), dataclasses.replace(lp_reg, coefficient=0.0)
    assert everywhere(fallen, pulled(room, r.ClipHigher(), free, at=now))
    assert nowhere(fallen, pulled(room, r.GMPO(), free, at=now))


def rare_both(batch: TokenBatch) -> None:
    """S2T drops what STARE boosts: all that it drops, as long as the share is not smaller than that of rare tokens."""
    drops, boosts = dropped(r.S2TMask(), batch), weights(r.STARE(), batch) > 1
    assert everywhere(drops, boosts)
    inner = weights(r.within(r.S2TMask(), r.STARE()), batch) > 1
    assert not inner[drops].any()
    assert inner.sum() > (boosts & ~drops).sum()
    assert (boosts & dropped(r.TopEntropyMask(), batch)).any()


def gate(batch: TokenBatch) -> None:
    assert asked(r.STARE(), batch).weight is not None
    assert asked(r.STARE(), drawn(entropies=torch.full((20, 40), 0.31))).weight is None


def thresholds_of_entropy(batch: TokenBatch) -> None:
    forks = ~dropped(r.TopEntropyMask(), batch)
    for quantile, idle in ((0.8, True), (0.9, False)):
        old = r.S2TMask(population="all", quantile=quantile, max_prob=0.1)
        assert nowhere(dropped(old, batch), forks) == idle
    spurious = dropped(r.S2TMask(quantile=0.95), batch)
    assert (spurious & forks).any()
    assert (spurious & ~forks).any()


def fixed(batch: TokenBatch) -> None:
    left = ~dropped(r.S2TMask(), batch)
    for own in (r.ConstantLength(length=40), r.WAPO(length=40)):
        assert torch.equal(pulled(batch, own)[left], pulled(batch, own, r.S2TMask())[left])
    assert not torch.equal(pulled(batch)[left], pulled(batch, r.S2TMask())[left])


def alone(batch: TokenBatch) -> None:
    """Of the first response only the first token is left; it has the weight of a response, a twentieth."""
    entropies = torch.where(batch.sequence == 0, 0.0, 0.5 + batch.position / 100.0)
    lone = dataclasses.replace(batch, entropies=torch.where(batch.position == 0, 9.0, entropies))
    assert (~dropped(r.TopEntropyMask(), lone))[lone.sequence == 0].sum() == 1
    assert pulled(lone, r.TopEntropyMask(), r.SequenceMean())[0].item() == pytest.approx(-1 / 20)


def rare_less_and_more(batch: TokenBatch) -> None:
    """All ratios are 2 or 1 / 2; the rarer half of the rewarded tokens that rose, and the others."""
    room, now = moved(batch, 0.7)
    rose = room.rewarded & (now > room.old_logprobs)
    rare = room.old_logprobs < room.old_logprobs[rose].median()
    room_left, weight = pulled(room, r.MASPO(), at=now) / pulled(room, at=now), weights(r.AR(), room)
    assert room_left[rose & rare].min() > room_left[rose & ~rare].max()
    assert weight[rose & rare].max() < weight[rose & ~rare].min()


def rare_rise_damped(batch: TokenBatch) -> None:
    """At a ratio of 1.25, which a clip at 0.2 stops."""
    rare, now = rare_and_rewarded(batch), batch.old_logprobs + math.log(1.25)
    assert nowhere(rare, pulled(batch, r.ClipHigher(high=0.2), at=now))
    room_left, damped = pulled(batch, r.ClipHigher(), at=now), pulled(batch, r.ClipHigher(), r.AR(), at=now)
    assert everywhere(rare, room_left)
    assert (damped / room_left)[rare].max() < 0.71


def rarest_boosted_and_damped(batch: TokenBatch) -> None:
    boosted, weight = weights(r.STARE(), batch) > 1, weights(r.AR(), batch)
    assert weight[boosted].max() < weight[batch.rewarded & ~boosted].min()
    most = torch.zeros_like(batch.rewarded).index_fill(0, weights(r.STEER(), batch).argsort()[:40], True)
    assert everywhere(most & batch.rewarded, boosted)


def nothing_left_of_the_rewarded(batch: TokenBatch) -> None:
    silent = weights(r.SignWeights(positive=0.0), batch) == 0
    for acts in (dropped(r.S2TMask(), batch), weights(r.STARE(), batch) > 1):
        assert everywhere(acts, silent)
    both_signs = weights(r.STARE(variant="C2"), batch) != 1
    assert nowhere(both_signs & batch.punished, silent)
    assert everywhere(both_signs & ~batch.punished, silent)
    signs = r.SignWeights(positive=0.1, negative=3.0)
    torch.testing.assert_close(pulled(batch, r.WAPO(length=40), signs), 0.1 * pulled(batch, r.WAPO(length=40)))


def few_of_the_rare(batch: TokenBatch) -> None:
    rare, weight = batch.punished & (batch.old_logprobs < -4), weights(r.STEER(), batch)
    assert weight[rare].max() < 0.95 < weight[batch.old_logprobs > -2].min()
    assert everywhere(penalised(r.KLCov(share=0.01), batch), rare)
    silenced = weights(r.ClipCov(share=0.05), batch) == 0
    assert 0 < (silenced & rare).sum() < rare.sum()


def only_pulled_back(batch: TokenBatch) -> None:
    """All tokens between the bounds are silenced, and the tenth of the largest covariance is held."""
    (room, now), methods = moved(batch, 0.3), (r.ClipCov(share=1.0), r.KLCov(share=0.1))
    silenced, held = weights(methods[0], room) == 0, penalised(methods[1], room)
    both = silenced & held
    assert 0 < both.sum() < min(silenced.sum(), held.sum())
    assert torch.equal(pulled(room, *methods, at=now)[both].sign(), (now - room.old_logprobs)[both].sign())


def hit_and_stopped(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.5)
    room = dataclasses.replace(room, logprobs=now)
    stopped = pulled(room, r.ClipHigher(), at=now) == 0
    assert ((weights(r.ClipCov(share=1.0), room) == 0) & stopped).any()
    assert nowhere(weights(r.ClipCov(share=1.0, clip_low=0.2, clip_high=0.28), room) == 0, stopped)


def stopped_and_held(batch: TokenBatch) -> None:
    (room, now), own = moved(batch, 0.5), r.KLCov(share=0.1)
    held = penalised(own, room)
    for clip in (r.ClipHigher(), r.DCPOClip()):
        stopped, pull = pulled(room, clip, at=now) == 0, pulled(room, own, clip, at=now)
        assert everywhere(held & stopped, pull.sign() == (now - room.old_logprobs).sign())
        assert everywhere(~held & stopped, pulled(room, own, at=now))
        assert nowhere(~held & stopped, pull)


def opposite_pulls(batch: TokenBatch) -> None:
    """Where a reference is surer than the policy, and the policy prefers the token."""
    surer = drawn(ref_logprobs=torch.full((20, 40), -1e-4))
    preferred = surer.old_logprobs.exp() > 0.5
    assert everywhere(preferred, pulled(surer, r.KLPenalty(), advantage=False) < 0)
    assert everywhere(preferred, pulled(surer, r.EntropyBonus(), advantage=False) > 0)


def both_soften(batch: TokenBatch) -> None:
    held, plain = penalised(HELD, batch), pulled(batch)
    assert ((weights(r.STARE(variant="C2"), batch) < 1) & held).any()
    for own in (r.AR(), HELD):
        assert everywhere(held, pulled(batch, own) < plain)


def shrinks(batch: TokenBatch) -> None:
    """The mean length is 40, a tenth of 400."""
    for advantage in (True, False):
        token = pulled(batch, r.KLPenalty(), advantage=advantage)
        torch.testing.assert_close(
            10 * pulled(batch, r.KLPenalty(), r.ConstantLength(length=400), advantage=advantage), token
        )


def per_response(batch: TokenBatch) -> None:
    short = uneven(batch)
    lengths = short.sequence.bincount()[short.sequence]
    for penalty in (r.KLPenalty(), r.EntropyBonus(), HELD, ALWAYS_PAYS):
        token = pulled(short, penalty) - pulled(short)
        response = pulled(short, penalty, r.SequenceMean()) - pulled(short, r.SequenceMean())
        torch.testing.assert_close(20 * lengths * response, len(short) * token)
        assert not torch.allclose(response, token)
    states = [r.make_plan(r.compose(ALWAYS_PAYS, *more), [short]).state for more in ([], [r.SequenceMean()])]
    assert states[0]["adaptive_entropy"] == states[1]["adaptive_entropy"]


def stronger_with_fewer_winners(batch: TokenBatch) -> None:
    """Ten groups of two with a winner each; then five of them without."""
    won = dataclasses.replace(batch, group_ids=torch.arange(20) // 2)
    half = dataclasses.replace(won, advantages=torch.where(batch.sequence % 4 < 2, batch.advantages, 0.0))
    many, few = (
        pulled(some, r.WAPO(length=40), r.KLPenalty()) - pulled(some, r.WAPO(length=40)) for some in (won, half)
    )
    torch.testing.assert_close(few, 2 * many)


def read_without_the_bonus(batch: TokenBatch) -> None:
    larger = dataclasses.replace(batch, advantages=shaped(batch))
    for read, other in ((weights, r.STEER()), (weights, r.ClipCov(share=0.05)), (penalised, r.KLCov(share=0.2))):
        assert torch.equal(read(r.compose(r.EntropyShaping(), other), batch), read(other, batch))
        assert not torch.equal(read(other, larger), read(other, batch))


def may_lower(batch: TokenBatch) -> None:
    """Of two tokens entropy falls with the log-prob of the likelier one."""
    likely = batch.rewarded & (batch.old_logprobs.exp() > 0.5)
    own = pulled(batch, r.EntropyShaping())
    assert everywhere(likely, own < pulled(batch))
    for bonus in (r.EntropyBonus(), ALWAYS_PAYS):
        assert everywhere(likely, pulled(batch, bonus, r.EntropyShaping()) > own)


def advantages_of_their_own(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.3)
    for other in (r.FIPO(), r.GMPO(), r.GSPO(), r.HolderMean(), r.VESPO()):
        alone, beside = (pulled(room, *several, at=now) for several in ([other], [other, r.EntropyShaping()]))
        torch.testing.assert_close(beside / shaped(room), alone / room.advantages)
        assert not torch.allclose(beside, alone)


def wider_by_the_bonus(batch: TokenBatch) -> None:
    room, now = moved(batch, 0.7)
    alone = pulled(room, r.MASPO(), at=now) / room.advantages
    beside = pulled(room, r.MASPO(), r.EntropyShaping(), at=now) / shaped(room)
    away = room.advantages * (now - room.old_logprobs) > 0
    assert everywhere(away, beside < alone)  # both are negative
    torch.testing.assert_close(beside[~away], alone[~away])


def share_of_branches(batch: TokenBatch, *methods: TokenObjective) -> float:
    """Of the pull on all tokens, those of branches, relative to the others."""
    branch, pull = batch.signal("branch") > 0, pulled(batch, *methods).abs()
    return float(pull[branch].sum() / pull[~branch].sum())


def counts_what_is_dropped(batch: TokenBatch) -> None:
    """Half of the tokens of branches alone are dropped."""
    streams, own, mask = in_streams(batch), r.StreamWeight(coefficient=0.5), r.TopEntropyMask(share=0.5)
    late = (streams.signal("branch") > 0) & (streams.position > 1)
    streams = dataclasses.replace(streams, entropies=torch.where(late, 0.0, 1.0))
    assert torch.equal(dropped(mask, streams), late)
    assert torch.equal(weights(r.compose(mask, own), streams), weights(own, streams))
    shares = [share_of_branches(streams, *some) for some in ([own], [own, mask], [r.within(mask, own)])]
    assert shares == pytest.approx([0.5, 0.25, 0.5])
    assert share_of_branches(streams, own, r.TokenMean()) == pytest.approx(0.5)
    for other in (r.SequenceMean(), r.BlockMean()):  # ten times shorter: each token ten times more
        assert share_of_branches(streams, own, other) == pytest.approx(5.0)


#: Each claim, with the pairs of which it is declared: own and others; "mask" is any that drops tokens.
SHOWN: dict[Callable[[TokenBatch], None], str] = {
    a_mean_stays_inside: "gspo cispo clip_higher dcpo_clip sapo maspo, aspo gspo",
    a_clipped_mean_stays_inside: "gmpo clip_higher dcpo_clip",
    mean_of_what_is_kept: "gmpo mask, gspo mask, holder_mean mask",
    weight_of_the_whole: "vespo mask",
    one_ratio_for_all_blocks: "block_mean gmpo gspo holder_mean",
    restrained_twice: "gspo cppo drpo fipo, drpo cppo dppo, sapo maspo, vespo off_policy_mask m2po, m2po dppo, "
    "importance_correction cppo",
    never_looser: "cppo dppo",
    stops_what_would_turn: "drpo cppo dppo clip_higher",
    damps_the_way_back: "drpo maspo sapo",
    one_by_probability_one_by_ratio: "cppo maspo sapo",
    damped_by_less_than_a_twentieth: "clip_higher maspo sapo",
    keeps_what_the_clip_stops: "m2po clip_higher",
    the_ratio_to_the_sampler: "importance_correction cppo drpo m2po",
    exempt: "lp_reg clip_higher cispo maspo sapo vespo gmpo",
    rare_both: "s2t stare, stare top_entropy",
    gate: "stare entropy_bonus adaptive_entropy",
    thresholds_of_entropy: "s2t top_entropy",
    fixed: "constant_length mask, wapo mask",
    alone: "sequence_mean mask",
    rare_less_and_more: "ar maspo",
    rare_rise_damped: "ar clip_higher",
    rarest_boosted_and_damped: "ar stare, steer stare",
    nothing_left_of_the_rewarded: "sign_weights s2t stare, wapo sign_weights",
    few_of_the_rare: "steer clip_cov kl_cov",
    only_pulled_back: "clip_cov kl_cov",
    hit_and_stopped: "clip_cov clip_higher",
    stopped_and_held: "kl_cov clip_higher dcpo_clip",
    opposite_pulls: "kl entropy_bonus adaptive_entropy",
    both_soften: "ar lp_reg, stare lp_reg",
    shrinks: "constant_length kl",
    per_response: "sequence_mean kl entropy_bonus lp_reg, adaptive_entropy sequence_mean",
    stronger_with_fewer_winners: "wapo kl",
    read_without_the_bonus: "entropy_shaping clip_cov kl_cov steer",
    may_lower: "entropy_shaping adaptive_entropy entropy_bonus",
    advantages_of_their_own: "entropy_shaping fipo gmpo gspo holder_mean vespo",
    wider_by_the_bonus: "entropy_shaping maspo",
    counts_what_is_dropped: "stream_weight mask sequence_mean block_mean",
}

#: What follows from how every loss is put together: methods measure what masks drop, weights multiply, masks join,
#: penalties add up and ignore both; and one method takes rewarded tokens, the other punished ones.
BY_THE_LOSS = (
    "stare clip_higher, random_mask s2t top_entropy, s2t lp_reg, entropy_bonus adaptive_entropy, "
    "stream_weight kl entropy_bonus, aspo top_entropy, cppo mask, clip_cov mask, kl_cov mask, kl mask, "
    "entropy_bonus mask, adaptive_entropy mask, lp_reg top_entropy"
)


def test_every_declared_pair_is_shown_in_numbers() -> None:
    declared = {
        (name, other.replace(MASK, "mask"))
        for name in METHODS.names()
        for fact in METHODS.get(name).about.interacts
        if fact.kind != "good"
        for other in fact.names
    }
    several = [group.split() for groups in (*SHOWN.values(), BY_THE_LOSS) for group in groups.split(", ")]
    assert declared == {(own, other) for own, *others in several for other in others}


@pytest.mark.parametrize("seed", range(2))
def test_what_is_declared_of_a_pair_holds(seed: int) -> None:
    for claim in SHOWN:
        claim(drawn(seed))


def test_settings_decide_what_is_said() -> None:
    for methods, kind, part in (
        ((r.S2TMask(population="all", quantile=0.8), r.TopEntropyMask()), "redundant", "drops all that"),
        ((r.S2TMask(population="all", quantile=0.9), r.TopEntropyMask()), "redundant", "decides only about"),
        ((r.DRPO(0.5), r.DPPO()), "conflicts", "pulls a token back"),
        ((r.DRPO(12.5), r.DPPO()), "redundant", "damps what"),
        ((r.CPPO(), r.ImportanceCorrection()), "note", "turns the ratio"),
        ((r.CPPO(), r.ImportanceCorrection(level="sequence")), "redundant", "mismatch"),
        ((r.KLPenalty(anchor="rollout"), r.DPPO()), "good", "prime-rl"),
    ):
        ((said, text),) = interactions(r.compose(*methods))
        assert said == kind
        assert part in text, text
    assert interactions(r.compose(r.KLPenalty(anchor="old"), r.EntropyBonus(), r.ClipHigher())) == []
