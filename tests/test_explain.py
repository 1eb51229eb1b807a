"""``rlstab explain``: its words are those of the code, its claims hold in numbers, its pages say what they should."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rlstab.explain.hosts import HOSTS, hosts
from torch import Tensor

import rlstab
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
    Terms,
    TokenBatch,
    TokenMean,
    TokenObjective,
    TopEntropyMask,
    TruncatedMask,
    compose,
    make_plan,
    within,
)
from rlstab.cli import main
from rlstab.config import load_run, objective_hash, run_hash
from rlstab.core.batch import SIGNALS
from rlstab.core.metadata import MASK
from rlstab.core.objective import active_methods
from rlstab.core.settings import Setting, percent, settings_of
from rlstab.core.terms import WRITABLE
from rlstab.errors import MissingSignal
from rlstab.explain import stage_words
from rlstab.explain.costs import costs, everywhere
from rlstab.explain.idle import idle, idle_in_run, unsafe
from rlstab.explain.interactions import interactions, pairs
from rlstab.explain.page import explain, page
from rlstab.explain.recipes import recipes
from rlstab.explain.story import STAGES, story
from rlstab.presets import PRESETS
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.grpo import GRPO
from rlstab.stages.in_order import InOrder
from rlstab.stages.overlong import Overlong
from rlstab.stages.pipeline import Pipeline, unmet
from rlstab.stages.response_batch import EVIDENCE, ResponseBatch
from rlstab.stages.rloo import RLOO
from rlstab.stages.stage import RewardShaper, Stage
from rlstab.stages.uniform import Uniform
from rlstab.testing.stage_examples import STAGE_EXAMPLES
from rlstab.train.generate import given_to, require_evidence
from rlstab.zoo import METHODS
from tests.zoo.watch import evidence, examples, live

EXAMPLES = sorted((Path(rlstab.__file__).parents[1] / "examples").glob("*.yaml"))
every_method = pytest.mark.parametrize("cls", [pytest.param(METHODS.get(name), id=name) for name in METHODS.names()])


# -- the words of a method -----------------------------------------------------------------------------------------


def instances(cls: type[TokenObjective]) -> list[TokenObjective]:
    """Every combination of choices, and where a controller can move, one that does."""
    moving: list[TokenObjective] = [AdaptiveEntropy(initial=0.004, low=0.003)] if cls is AdaptiveEntropy else []
    if cls is STARE:
        moving = [STARE(variant=one, increment=0.01) for one in ("O1", "C2")]
    return [*examples(cls), *moving]


def others(method: TokenObjective, setting: Setting) -> Iterator[TokenObjective]:
    """The method with other values of a setting, as far as they fit the rest."""
    candidates: list[Any] = list(setting.choices) or [False, True, 0.0035, 0.31, 0.93, 1.25, 7.5, 3, 11]
    for value in [*candidates, *([None] if setting.optional else [])]:
        if setting.accepts(value) and value != getattr(method, setting.name):
            try:
                yield dataclasses.replace(method, **{setting.name: value})
            except rlstab.errors.OutOfRange:
                continue


def losses(method: TokenObjective) -> list[Tensor]:
    """Loss and gradients of three steps with state, on evidence on which all controllers act."""
    tensors = evidence()
    batch, state, found = TokenBatch.from_padded(**tensors), None, []
    for _ in range(3):
        outputs = live(tensors)
        plan = make_plan(method, [batch], state)
        loss = plan.loss(batch, PolicyOutputs.from_padded(batch, **outputs)).loss
        loss.backward()
        found += [loss.detach(), *(torch.zeros(()) if one.grad is None else one.grad for one in outputs.values())]
        state = plan.state
    return found


@every_method
def test_there_are_words_for_each_field_that_is_filled(cls: type[TokenObjective]) -> None:
    for method in instances(cls):
        said = method.in_words()
        assert said.keys() == (method.writes or {"report"})
        assert all(re.fullmatch(r"[A-Z].*[.)]", text) and "``" not in text for text in said.values()), said


@every_method
def test_words_tell_settings_apart_that_act_differently(cls: type[TokenObjective]) -> None:
    """What the words leave out has no effect beside the other settings."""
    for method in instances(cls):
        before = losses(method)
        for setting in settings_of(cls):
            for other in others(method, setting):
                if other.in_words() == method.in_words():
                    assert all(torch.equal(one, two) for one, two in zip(before, losses(other), strict=True)), other


@every_method
def test_every_setting_is_mentioned_where_it_acts(cls: type[TokenObjective]) -> None:
    for setting in settings_of(cls):
        tried = [other for method in instances(cls) for other in others(method, setting)]
        assert tried
        if setting.choices or bool in setting.kinds:
            said = {getattr(one, setting.name): one.in_words() for one in tried}
            assert len({repr(text) for text in said.values()}) == len(setting.choices or (False, True))
        else:
            assert any(
                str(value) in text or (isinstance(value, float) and percent(value) in text)
                for one in tried
                for value in [getattr(one, setting.name)]
                if value is not None
                for text in one.in_words().values()
            ), setting.name


@dataclasses.dataclass(frozen=True)
class Own(TokenObjective):
    """Drop ``some`` tokens.

    More is said further down.
    """

    name = "own"
    needs = {"mood"}
    writes = {"weight", "keep"}
    level: float = 0.25

    def terms(self, batch, stat, state):  # type: ignore[no-untyped-def]
        return Terms(keep=batch.signal("mood") > self.level)


def test_a_method_without_words_has_its_first_line_and_its_settings() -> None:
    assert Own().in_words() == {"keep": "Drop some tokens. (level = 0.25)"}
    text = page("own", compose(Own(), KLPenalty()), None)
    assert "`own`: Drop some tokens. (level = 0.25)" in text
    assert "- `mood`, for `own`: a signal of your own. Yours to provide." in text
    assert "no: it does not provide `mood`" in text
    assert "`kl` acts on every token, also on those that `own` drops" in text


def test_a_share_in_percent() -> None:
    assert [percent(one) for one in (0.07, 0.29, 1, 0.005, 0.2)] == ["7 %", "29 %", "100 %", "0.5 %", "20 %"]


# -- the claims, in numbers ----------------------------------------------------------------------------------------


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

SHOWN: dict[tuple[str, str], list[Callable[[TokenBatch], None]]] = {
    ("aspo", "top_entropy"): [of_all_tokens],
    ("cppo", "dppo"): [never_looser],
    ("cppo", "drpo"): [stops_what_would_turn],
    ("drpo", "clip_higher"): [no_way_back],
    ("m2po", "clip_higher"): [keeps_what_the_clip_stops],
    ("s2t", "stare"): [rare_both],
    ("stare", "entropy_bonus"): [gate],
    ("stare", "adaptive_entropy"): [gate],
    ("kl", "entropy_bonus"): [opposite_pulls],
    ("kl", "adaptive_entropy"): [opposite_pulls],
    ("constant_length", MASK): [fixed],
    ("stare", "top_entropy"): [sure_places],
    ("s2t", "top_entropy"): [nothing_left, below_its_own],
    ("entropy_bonus", "adaptive_entropy"): [pay_twice],
    ("random_mask", "s2t"): [either],
    ("random_mask", "top_entropy"): [either],
    ("constant_length", "kl"): [shrinks],
    ("sequence_mean", MASK): [alone],
    ("sequence_mean", "kl"): [per_response],
    ("sequence_mean", "entropy_bonus"): [per_response],
    ("sequence_mean", "lp_reg"): [per_response],
    ("adaptive_entropy", "sequence_mean"): [same_measure],
    ("stare", "clip_higher"): [stays_stopped],
    ("kl", MASK): [reach],
    ("entropy_bonus", MASK): [reach],
    ("adaptive_entropy", MASK): [reach],
    ("stare", "lp_reg"): [damped_and_held],
    ("lp_reg", "top_entropy"): [keeps_its_penalty],
    ("s2t", "lp_reg"): [never_meet],
    ("clip_higher", "lp_reg"): [exempt],
    ("cispo", "lp_reg"): [untouched_where_exempt],
    ("gmpo", "clip_higher"): [a_clipped_mean_stays_inside],
    ("gmpo", "lp_reg"): [clipped_where_exempt],
    ("gmpo", MASK): [mean_of_what_is_kept],
    ("gspo", "cispo"): [a_mean_stays_inside],
    ("gspo", "clip_higher"): [a_mean_stays_inside],
    ("gspo", "sapo"): [a_mean_stays_inside],
    ("gspo", MASK): [mean_of_what_is_kept],
    ("holder_mean", MASK): [mean_of_what_is_kept],
    ("maspo", "clip_higher"): [damped_by_less_than_a_twentieth],
    ("maspo", "lp_reg"): [untouched_where_exempt],
    ("sapo", "clip_higher"): [damped_by_less_than_a_twentieth],
    ("sapo", "lp_reg"): [untouched_where_exempt],
    ("vespo", "lp_reg"): [untouched_where_exempt],
    ("vespo", MASK): [weight_of_the_whole],
    ("ar", "clip_higher"): [rare_rise_damped],
    ("ar", "lp_reg"): [both_soften],
    ("ar", "maspo"): [rare_less_and_more],
    ("ar", "stare"): [rarest_boosted_and_damped],
    ("block_mean", "gmpo"): [one_ratio_for_all_blocks],
    ("block_mean", "gspo"): [one_ratio_for_all_blocks],
    ("block_mean", "holder_mean"): [one_ratio_for_all_blocks],
    ("clip_cov", MASK): [hit_and_dropped],
    ("clip_cov", "clip_higher"): [hit_and_stopped],
    ("clip_cov", "kl_cov"): [only_pulled_back],
    ("cppo", MASK): [spends_though_dropped],
    ("cppo", "maspo"): [one_by_probability_one_by_ratio],
    ("cppo", "sapo"): [one_by_probability_one_by_ratio],
    ("drpo", "maspo"): [damps_the_way_back],
    ("drpo", "sapo"): [damps_the_way_back],
    ("entropy_shaping", "adaptive_entropy"): [may_lower],
    ("entropy_shaping", "clip_cov"): [read_without_the_bonus],
    ("entropy_shaping", "entropy_bonus"): [may_lower],
    ("entropy_shaping", "fipo"): [advantages_of_their_own],
    ("entropy_shaping", "gmpo"): [advantages_of_their_own],
    ("entropy_shaping", "gspo"): [advantages_of_their_own],
    ("entropy_shaping", "holder_mean"): [advantages_of_their_own],
    ("entropy_shaping", "kl_cov"): [read_without_the_bonus],
    ("entropy_shaping", "maspo"): [wider_by_the_bonus],
    ("entropy_shaping", "steer"): [read_without_the_bonus],
    ("entropy_shaping", "vespo"): [advantages_of_their_own],
    ("gspo", "maspo"): [a_mean_stays_inside],
    ("importance_correction", "cppo"): [the_ratio_to_the_sampler],
    ("importance_correction", "drpo"): [the_ratio_to_the_sampler],
    ("importance_correction", "m2po"): [the_ratio_to_the_sampler],
    ("kl_cov", MASK): [held_though_dropped],
    ("kl_cov", "clip_higher"): [stopped_and_held],
    ("sign_weights", "s2t"): [nothing_left_of_the_rewarded],
    ("sign_weights", "stare"): [nothing_left_of_the_rewarded],
    ("steer", "clip_cov"): [few_of_the_rare],
    ("steer", "kl_cov"): [few_of_the_rare],
    ("steer", "stare"): [damped_and_boosted],
    ("stream_weight", MASK): [counts_what_is_dropped],
    ("stream_weight", "sequence_mean"): [out_of_proportion],
    ("stream_weight", "block_mean"): [out_of_proportion],
    ("stream_weight", "kl"): [one_penalty_for_both],
    ("stream_weight", "entropy_bonus"): [one_penalty_for_both],
    ("wapo", MASK): [fixed],
    ("wapo", "kl"): [stronger_with_fewer_winners],
    ("wapo", "sign_weights"): [only_positive_acts],
}


def test_every_declared_pair_is_shown_in_numbers() -> None:
    """But those that are good together, of which nothing is claimed but that they were published so."""
    methods = [METHODS.get(name) for name in METHODS.names()]
    declared = {
        (cls.name, other) for cls in methods for one in cls.about.interacts if one.kind != "good" for other in one.names
    }
    assert declared == SHOWN.keys()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("claim", dict.fromkeys(one for several in SHOWN.values() for one in several))
def test_what_is_declared_of_a_pair_holds(claim: Callable[[TokenBatch], None], seed: int) -> None:
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


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (KLPenalty(), ["kl"]),
        (KLPenalty(coefficient=0.0), []),
        (EntropyBonus(), ["entropy_bonus"]),
        (AdaptiveEntropy(), ["adaptive_entropy"]),
        (AdaptiveEntropy(high=0.0), []),
        (LpReg(share=1.0), []),
        (within(TopEntropyMask(), KLPenalty()), []),
        (STARE(), []),
    ],
    ids=repr,
)
def test_who_acts_on_every_token_is_found(method: TokenObjective, expected: list[str]) -> None:
    assert everywhere(compose(method, S2TMask())) == expected


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (S2TMask(), "dropped or given weight 0 by `s2t`,"),
        (TopEntropyMask(denominator="all"), "dropped or given weight 0 by `top_entropy`,"),
        (STARE(variant="C2"), "(advantage 0, stopped"),
        (STARE(variant="C2", damp=0.0), "dropped or given weight 0 by `stare`,"),
    ],
    ids=repr,
)
def test_who_drops_tokens_is_found(method: TokenObjective, expected: str) -> None:
    assert expected in "\n".join(costs(compose(method), None))


# -- the sections --------------------------------------------------------------------------------------------------


def test_the_story_is_told_in_the_order_of_the_loss() -> None:
    told = story(
        compose(KLPenalty(), STARE(), S2TMask(), ClipHigher(), TopEntropyMask(denominator="all")),
        None,
        Pipeline.of(RLOO()),
    )
    heads = [re.fullmatch(r"(\d+)\. \*\*([\w ]+)\.\*\* (?:`(\w+)`)?.*", line) for line in told]
    assert [one.groups() for one in heads if one] == [
        ("1", "Advantage", "rloo"),
        ("2", "Drop", "s2t"),
        ("3", "Trust region", "clip_higher"),
        ("4", "Weight", "stare"),
        ("5", "Weight", "top_entropy"),
        ("6", "Average", "token_mean"),
        ("7", "Penalty", "kl"),
    ]
    assert "`token_mean`, the default:" in told[5]


def test_the_story_covers_every_field_of_terms() -> None:
    assert STAGES.keys() == {*WRITABLE, "report"}


def test_s2t_in_words() -> None:
    told = story(compose(S2TMask(max_prob=0.01, quantile=0.8, population="all"), TokenMean()), None, None)
    assert told == [
        "1. **Drop.** `s2t`: Drop a token when its advantage is positive, its probability is below 0.01 and its "
        "entropy is below the 0.8-quantile over all tokens of the optimizer step. It leaves the divisor too.",
        "2. **Trust region.** None: a token pulls with its ratio times its advantage, however far the ratio has gone.",
        "3. **Average.** `token_mean`: Average over all tokens of the optimizer step: every token weighs the same.",
    ]


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ([], ["None: a token pulls with its ratio times its advantage, however far the ratio has gone."]),
        ([FIPO()], ["None: a token pulls with its ratio times its advantage, however far the ratio has gone."]),
        ([GSPO()], ["Nothing beside the ratio: a token pulls with it times its advantage."]),
        ([GSPO(), SAPO()], []),
        ([MASPO()], []),
        ([VESPO()], []),
    ],
    ids=repr,
)
def test_no_trust_region_is_told_only_where_nothing_takes_its_place(objective: list[Any], expected: list[str]) -> None:
    told = [line.partition("**Trust region.** ")[2] for line in story(compose(*objective), None, None)]
    assert [one for one in told if one] == expected


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ([KLCov(), ClipHigher()], "- `clip_higher` and `kl_cov` act only with several optimizer steps per rollout"),
        ([LpReg(ratio_cap=10.0)], "- The trust region of `lp_reg` acts only with several optimizer steps per rollout"),
        ([S2TMask()], "Nothing is known to be idle"),
    ],
    ids=lambda one: one if isinstance(one, str) else repr(one),
)
def test_what_acts_only_with_several_steps_is_named(objective: list[Any], expected: str) -> None:
    assert idle(compose(*objective), None)[0].startswith(expected)


def test_what_is_expected_and_missing_is_told_with_its_reason() -> None:
    assert pairs(compose(GSPO(), TokenMean()))[0] == (
        "- **Not as published:** `gspo` expects `sequence_mean` beside it, which is missing: its ratio is that of a "
        "response, so responses should have equal votes. Under a token mean a long one outvotes the others."
    )
    assert not any("Not as published" in line for line in pairs(compose(GSPO(), SequenceMean())))


@pytest.mark.filterwarnings("error::rlstab.errors.FitWarning")
@pytest.mark.parametrize("mean", ["sequence_mean", "token_mean"])
def test_a_page_that_tells_what_is_missing_does_not_warn_of_it(
    mean: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.yaml").write_text(f"objective: [gspo, {mean}]")
    assert main(["explain", f"gspo,{mean}", "--markdown"]) == main(["check", str(tmp_path / "one.yaml")]) == 0
    assert capsys.readouterr().out.count("expects") == (2 if mean == "token_mean" else 0)


def test_inside_within_it_is_said_among_which_tokens() -> None:
    told = story(compose(within(S2TMask(), within(TopEntropyMask(), STARE()))), None, None)
    assert any(
        "`stare`, among the tokens that `s2t` and `top_entropy` keeps: In an optimizer step" in line for line in told
    )
    assert any("`top_entropy`, among the tokens that `s2t` keeps: Drop" in line for line in told)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_equals_itself(name: str) -> None:
    recipe = PRESETS[name]
    objective = compose(recipe.objective)
    assert recipes(objective, recipe.pipeline)[0] == f"- Equals `{name}`: {recipe.about}"
    other = Pipeline.of(*recipe.stages, RLOO())
    assert f"takes the advantage `rloo` instead of `{recipe.estimator}`" in recipes(objective, other)[0]


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (compose(ClipHigher()), "Equals `dapo`"),
        (compose(ClipHigher(dual_clip=10.0), STARE(damp=0.5, max_boost=2.0)), "Equals `stare`"),
        (compose(ClipHigher(high=0.3)), "sets `clip_higher.high` to 0.3 instead of 0.28."),
        (compose(ClipHigher(), KLPenalty()), "Nearest: `dapo`"),
        (compose(ClipHigher(), KLPenalty()), "This one adds `kl`."),
        (compose(S2TMask()), "Nearest: `stapo`"),
        (compose(S2TMask()), "This one lacks `clip_higher`."),
        (compose(ClipHigher(dual_clip=10.0), S2TMask(), STARE()), "has `stare` on all tokens instead of within `s2t`."),
        (compose(S2TMask(), S2TMask(max_prob=0.1)), "adds `s2t_1`; adds `s2t_2`"),
    ],
    ids=lambda one: one if isinstance(one, str) else repr(one),
)
def test_an_objective_is_compared_with_the_recipes(objective: Any, expected: str) -> None:
    assert expected in recipes(objective, Pipeline.of(GRPO()))[0]


@pytest.mark.parametrize(
    ("several", "expected"),
    [
        ([InOrder(shuffle=False)], "sets `in_order.shuffle` to False instead of True."),
        ([Overlong(buffer=4)], "adds the stage `overlong`."),
        ([Uniform(pool=9), DrGRPO()],
         "takes the advantage `dr_grpo` instead of `grpo`; takes the prompts of `uniform` instead of `in_order`."),
        ([GRPO(ddof=0)], "sets `grpo.ddof` to 0 instead of 1."),
        ([GRPO(std=False)], "takes the advantage `dr_grpo` instead of `grpo`."),
    ],
    ids=repr,
)  # fmt: skip
def test_stages_are_compared_with_the_recipes(several: list[Stage], expected: str) -> None:
    first = recipes(compose(ClipHigher()), Pipeline.of(*several))[0]
    assert first.startswith("- Nearest: `dapo`")
    assert first.endswith(f"This one {expected}")


def test_what_a_recipe_brings_and_a_run_lacks() -> None:
    recipe = PRESETS["stack"]
    (first, *_) = recipes(compose(recipe.objective), Pipeline.of(recipe.pipeline.selector, recipe.pipeline.estimator))
    assert first.endswith("This one lacks the stage `deep_grpo`.")


def run_of(objective: Any, **parts: Any) -> Any:
    return load_run({"objective": objective, **parts})


def test_of_an_advantage_without_its_deviation_it_is_dr_grpo_that_is_told() -> None:
    run = run_of(["clip_higher"], advantage={"std": False, "epsilon": 0.1})
    text = page("x", run.composition, run)
    assert "takes the advantage `dr_grpo` instead of `grpo`" in text
    assert "**Advantages.** `grpo`: Take the reward less the mean over the answers to the prompt.\n" in text
    assert "grpo.epsilon: nothing is divided by a standard deviation, so it is not read." in text


@pytest.mark.parametrize(
    ("objective", "optimisation", "expected"),
    [
        (["clip_higher"], {}, ["clip_higher cannot act: with one optimizer step per rollout the ratio is exactly 1."]),
        (["clip_higher"], {"old_logprobs": "recompute"}, ["clip_higher cannot act: .* 1 up to rounding"]),
        (["clip_higher"], {"old_logprobs": "rollout"}, []),
        (["clip_higher"], {"epochs": 2}, []),
        ([{"name": "lp_reg", "ratio_cap": 10.0}], {}, ["the trust region of lp_reg cannot act"]),
        (["s2t"], {"refresh": "step"}, ["optimisation.refresh = step: .* the same evidence again"]),
        (["s2t"], {"refresh": "step", "mini_batches": 2}, []),
    ],
)
def test_what_is_idle_in_a_run(objective: Any, optimisation: Any, expected: list[str]) -> None:
    run = run_of(objective, optimisation=optimisation)
    found = idle_in_run(run.composition, run)
    assert len(found) == len(expected)
    assert all(re.match(pattern, text) for pattern, text in zip(expected, found, strict=True))


def test_a_group_of_one_and_settings_that_are_not_read() -> None:
    run = run_of(["s2t"], rollout={"group": 1}, advantage={"ddof": 0, "std": False})
    first, *rest = idle_in_run(run.composition, run)
    assert first.startswith("rollout.group = 1: ")
    assert [text.partition(":")[0] for text in rest] == ["grpo.ddof"]
    of_the_whole_rollout = run_of(["s2t"], rollout={"group": 1}, stages=["reinforce_pp"])
    assert idle_in_run(of_the_whole_rollout.composition, of_the_whole_rollout) == []


STAGES_OF_A_RUN = [
    "dynamic_sampling",
    {"name": "opob"},
    {"name": "overlong", "buffer": 4},
    {"name": "goldilocks", "pool": 64},
    "deep_grpo",
]


def test_a_rollout_is_told_in_its_order() -> None:
    run = run_of(["clip_higher"], stages=STAGES_OF_A_RUN, rollout={"staleness": 2, "precision": "fp8"})
    told = stage_words.rollout(run.pipeline, run)
    heads = [re.fullmatch(r"(\d+)\. \*\*(\w+)\.\*\* (?:`(\w+)`: )?.*\.", line) for line in told]
    assert [one.groups() for one in heads if one] == [
        ("1", "Prompts", "goldilocks"),
        ("2", "Responses", None),
        ("3", "Rewards", "overlong"),
        ("4", "Rollout", "dynamic_sampling"),
        ("5", "Rollout", "deep_grpo"),
        ("6", "Advantages", "opob"),
    ]
    assert told[1] == (
        "2. **Responses.** 8 to each of 16 prompts, of at most 24 tokens, by weights that are 2 updates old, by "
        "weights rounded to fp8; the task `countdown` scores them."
    )
    assert "`in_order`, the default: Take prompts one after another" in stage_words.rollout(Pipeline.of(), None)[0]
    assert [line for line in stage_words.rollout(Pipeline.of(), None) if "Responses" in line] == []


@dataclasses.dataclass(frozen=True)
class Reads(RewardShaper):
    """Reads all kinds of evidence"""

    name = "reads"
    needs = {"entropies", "squared_gradient", "my_signal", "prompt_features"}

    def shape(self, responses: ResponseBatch, stat: Any, state: Any) -> Tensor:
        return responses.rewards


def test_what_stages_need_and_whose_it_is() -> None:
    lines = stage_words.needs(Pipeline.of(*(STAGE_EXAMPLES[name][0] for name in ("opob", "deep_grpo", "goldilocks"))))
    assert [line.partition(":")[0] for line in lines] == [
        "- `logprobs`, for the stage `opob`",
        "- `raw_rewards`, for the stages `goldilocks`, `deep_grpo`",
        "- `rollout_logprobs`, for the stage `opob`",
        "- `squared_gradient`, for the stage `opob`",
        "- State of stages, saved with the checkpoint",
    ]
    assert lines[1].endswith("Free: the scorer gave them.")
    assert lines[-1].endswith("`goldilocks` (right, wrong); `deep_grpo` (place, success, seen).")
    assert {name: stage_words.has(Reads(), name) for name in sorted(Reads.needs)} == {
        "entropies": "free: the sampler has the logits",
        "my_signal": "the trainer does not have it",
        "prompt_features": "the trainer does not have it for a stage of this kind, only for selectors",
        "squared_gradient": "the trainer does not have it for a stage of this kind, only for estimators",
    }
    assert stage_words.rollout(Pipeline.of(Reads()), None)[1] == "2. **Rewards.** `reads`: Reads all kinds of evidence."
    assert stage_words.needs(Pipeline.of()) == []


@pytest.mark.parametrize("name", sorted({*EVIDENCE, *SIGNALS, "logprobs", "prompt_features", "my_signal"}))
def test_what_the_trainer_has_is_what_it_gives(name: str) -> None:
    for one in (InOrder(), Overlong(buffer=4), STAGE_EXAMPLES["deep_grpo"][0], GRPO()):
        assert ("does not have it" in stage_words.has(one, name)) == (name not in given_to(one)), one.name


def test_evidence_that_the_trainer_does_not_have_is_a_warning() -> None:
    assert [told for one in STAGE_EXAMPLES.values() for told in stage_words.lacking(Pipeline.of(*one[:1]))] == []
    told = stage_words.lacking(Pipeline.of(Reads()))
    assert told[0] == "the stage reads needs my_signal: the trainer does not have it."
    assert len(told) == 3
    with pytest.raises(MissingSignal):
        require_evidence(Pipeline.of(Reads()))


def test_what_a_stage_expects_and_excludes_is_told() -> None:
    run = run_of(["clip_higher"], stages=["deep_grpo", "max_rl"])
    told = pairs(run.composition, run.pipeline)
    assert (
        "- **Not as published:** `deep_grpo` expects `stream_weight` beside it, which is missing: the loss of the"
        in (" ".join(told))
    )
    assert any(line.startswith("- **Excluded:** `max_rl` cannot act beside `laconic`, `overlong`: ") for line in told)
    there = run_of(["clip_higher", "stream_weight"], stages=["deep_grpo"])
    assert unmet(there.pipeline, [one.name for one in active_methods(there.composition)]) == []
    observed = run_of(["clip_higher", {"name": "observe", "method": "stream_weight"}], stages=["deep_grpo"])
    assert len(unmet(observed.pipeline, [one.name for one in active_methods(observed.composition)])) == 1


@pytest.mark.parametrize(
    ("objective", "optimisation", "expected"),
    [
        (["s2t"], {}, 0),
        (["s2t"], {"mini_batches": 4}, 1),
        (["s2t", "clip_higher"], {"mini_batches": 4}, 0),
        (["s2t"], {"scope": "microbatch"}, 1),
    ],
)
def test_what_is_unsafe_in_a_run(objective: Any, optimisation: Any, expected: int) -> None:
    run = run_of(objective, optimisation=optimisation)
    found = unsafe(run.composition, run)
    assert len(found) == expected
    assert [f"- **Warning:** {text}" for text in found] == idle(run.composition, run)[:expected] or not found


def test_settings_at_which_a_method_does_nothing() -> None:
    found = idle(compose(KLPenalty(coefficient=0.0), STARE(variant="C2", boost=1.0, damp=1.0), S2TMask()), None)
    assert [line.partition(" does nothing: ")[::2] for line in found] == [
        ("- " + repr(KLPenalty(coefficient=0.0)), "0 times the estimate; the reference is still evaluated."),
        ("- " + repr(STARE(variant="C2", boost=1.0, damp=1.0)), "every weight is 1, in variant C2 too."),
    ]
    (line,) = idle(compose(STARE(boost=1.0, damp=1.0, share=0.3), TokenMean()), None)
    assert line.endswith("does nothing: every weight is 1.")
    assert idle(compose(S2TMask()), None) == ["Nothing is known to be idle or unsafe."]
    assert "with one the ratio is 1" in idle(compose(ClipHigher()), None)[0]


@pytest.mark.parametrize(
    ("optimisation", "expected"),
    [
        ({}, ["Forward passes beyond sampling and the loss: one per rollout of the reference model.", "which learns"]),
        (
            {"epochs": 2, "mini_batches": 2},
            [
                "4 optimizer steps per rollout of 16 x 8 responses",
                "one per rollout for the old log-probs",
                "it is older",
            ],
        ),
        (
            {"refresh": "step", "scope": "microbatch"},
            ["one per optimizer step for fresh evidence", "at the start of each", "of each micro-batch alone"],
        ),
    ],
)
def test_what_a_run_costs(optimisation: Any, expected: list[str]) -> None:
    run = run_of(["s2t", "kl"], optimisation=optimisation)
    text = "\n".join(costs(run.composition, run))
    for one in [*expected, "State, saved with the checkpoint: none."]:
        assert one.replace("which learns", "which is the one that learns") in text
    assert "`kl` acts on every token" in text


def test_hosts_name_signals_that_exist() -> None:
    assert all(one.gives <= SIGNALS.keys() and one.live <= {"entropies", "log_kept_mass"} for one in HOSTS)


def test_what_a_host_does_not_hand_over() -> None:
    rows = hooks_of(compose(S2TMask(), EntropyBonus()))
    assert rows["`register_policy_loss`"] == "`entropies`, live `entropies`, a look at the whole optimizer step"
    assert "- TRL 1.16, through `rlstab.adapters.trl`: yes." in hosts(compose(S2TMask(), EntropyBonus()))
    assert any("`rlstab.adapters.trl`: no: it lacks `block_ids`." in line for line in hosts(compose(BlockMean())))
    assert any("for `ref_logprobs`, set GRPOConfig.beta above 0" in line for line in hosts(compose(KLPenalty())))
    assert set(hooks_of(compose(ClipHigher())).values()) == {"nothing"}


def hooks_of(objective: Any) -> dict[str, str]:
    """What the hooks of other trainers lack, by hook."""
    rows = [line.split(" | ") for line in hosts(objective) if line.startswith("| ") and "`" in line]
    return {hook: lacks for _, hook, lacks, _ in rows}


def test_what_the_data_level_cannot_say() -> None:
    lines = hosts(compose(S2TMask(), KLPenalty()))
    assert any(
        "`rlstab.adapters.data`: no: it lacks a place for what `kl` asks for: a penalty," in one for one in lines
    )
    lines = hosts(compose(S2TMask()))
    assert "- the data level, through `rlstab.adapters.data`: yes." in lines


def test_what_the_task_alone_knows_is_not_the_trainers() -> None:
    first, *_ = hosts(compose(TruncatedMask()))
    assert first.endswith(": yes.")
    first, *_ = hosts(compose(BlockMean()))
    assert first.endswith(": no: it does not provide `block_ids`.")


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs ``rlstab explain`` in an empty folder: code, output with its folds taken out, errors."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["explain", *arguments])
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), err

    return run


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_explained(shown: Any, name: str) -> None:
    code, out, err = shown("--preset", name)
    assert (code, err) == (0, "")
    assert f"preset {name}" in out
    assert f"Objective {objective_hash(PRESETS[name].objective)}." in out
    assert f"Equals {name}:" in out
    assert "`" not in out
    assert "None" not in out.replace("Trust region. None:", "").replace("None is stopped", "")


def test_names_and_a_file_that_says_the_same(shown: Any) -> None:
    Path("f.yaml").write_text("objective: [s2t, {preset: dapo}]\n")
    named, filed = shown("s2t, dapo")[1], shown("f.yaml")[1]
    assert named.replace("s2t, dapo", "f.yaml", 1) == filed
    assert "Nearest: stapo" in named


def test_a_name_that_a_preset_shares_means_the_method_and_says_so(shown: Any) -> None:
    alone = "This is the method stare; the preset is rlstab explain --preset stare."
    assert f"{alone} Objective {objective_hash(compose(STARE()))}." in shown("stare")[1]
    assert alone in shown("dapo,stare")[1]
    Path("f.yaml").write_text("objective: stare\n")
    for arguments in (["--preset", "stare"], ["f.yaml"], ["s2t,dapo"]):
        assert "This is the method" not in shown(*arguments)[1]


def test_a_file_goes_before_a_name(shown: Any) -> None:
    Path("s2t").write_text("kl")
    assert "Add 0.001 times the KL divergence" in shown("s2t")[1]


def test_a_run_with_its_hash_and_what_set_changes(shown: Any) -> None:
    Path("f.yaml").write_text("objective: s2t\nseed: 1\n")
    run = load_run("f.yaml", {"optimisation.epochs": 3})
    _, out, _ = shown("f.yaml", "--set", "optimisation.epochs=3")
    assert f"Objective {objective_hash(run.composition)}, run {run_hash(run)}." in out
    assert "Warning: 3 optimizer steps per rollout and no method with bounds" in out


def test_markdown_is_what_a_page_is(shown: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "kl", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out == page("kl", compose(KLPenalty()), None)
    assert out.startswith("# kl\n\nObjective `")
    assert out.count("\n## ") == 6
    assert "``" not in out
    assert max(line.count("|") for line in out.splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none.yaml"],
         "ConfigError: none.yaml: cannot be read: no such file or directory. Give the path of a YAML file.\n"),
        (["bad.yaml"], "ConfigError: bad.yaml:2: rollout.grop: unknown key 'grop'. Did you mean 'group'?\n"),
        (["stares"], "ConfigError: objective.0.name: no method is called 'stares'. Did you mean 'stare'?\n"),
        (["token_mean,sequence_mean"],
         "Conflict: objective: 'sequence_mean' and 'token_mean' both define the aggregate; a composition has exactly "
         "one.\n  Remove one of them. (Weights, masks, gates and penalties combine freely.)\n"),
        (["--preset", "jstrl"], "UnknownName: no preset is called 'jstrl'. Did you mean 'justrl'?\n"),
    ],
)  # fmt: skip
def test_a_wrong_source_ends_with_code_2_and_its_error(shown: Any, arguments: list[str], expected: str) -> None:
    Path("bad.yaml").write_text("objective: s2t\nrollout: {grop: 1}\n")
    assert shown(*arguments) == (2, "", expected)


def test_the_console_is_the_one_given() -> None:
    told = io.StringIO()
    explain("s2t", {}, Console(file=told, width=80))
    assert "Drop a token when" in told.getvalue()


BENCH = """
name: two
base:
  optimisation: {epochs: 2}
methods:
  plain: {name: clip_higher}
  masked: [{name: clip_higher}, s2t]
settings:
  slow: {optimisation.lr: 1.0e-5}
  fast: {optimisation.lr: 1.0e-3}
"""


def test_a_bench_is_explained_method_by_method(shown: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text(BENCH)
    assert main(["explain", str(file), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "Bench two, baseline plain. Each method at slow, the first of 2 settings." in out
    assert re.findall(r"(?m)^##? (.*)", out) == [str(file), "plain", "masked"]
    assert out.count("### What happens to a token") == 2
    assert out.count("**Drop.** `s2t`") == 1
    assert main(["explain", str(file), "--set", "optimisation.epochs=1"]) == 2
    assert "a bench takes no --set. Write optimisation.epochs under its base or settings." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("recommended", "stapo (STAPO: JustRL with spurious tokens dropped). This one adds stare."),
        ("s2t,stare,clip_higher", "instead of 10.0. As near: stapo."),
    ],
)
def test_beside_our_own_stack_stands_what_is_published(shown: Any, names: str, told: str) -> None:
    _, out, _ = shown(names)
    assert told in out.partition("Nearest that is published: ")[2]
    assert "Nearest that is published" not in shown("stapo")[1]
