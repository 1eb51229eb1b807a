import importlib.util
import itertools
import math
import random
from functools import cache

import pytest
import torch

from rlstab import PolicyOutputs, available, compose, make_plan
from rlstab.core.method_settings import settings_of
from rlstab.core.plan import member_terms
from rlstab.testing.tolerances import REORDERED
from rlstab.zoo import METHODS
from tests.core.steps import LIVE, batch_of, number, random_rows, token
from tests.oracles import outcome


def grid(name, **choices):
    """All combinations, each with how many settings leave their first choice; with more than one it is slow.

    A setting that is not named has its default.
    """
    rows, rest = [], {setting.name: setting.default for setting in settings_of(METHODS.get(name))}
    for indices in itertools.product(*(range(len(values)) for values in choices.values())):
        chosen = {key: values[index] for (key, values), index in zip(choices.items(), indices, strict=True)}
        rows.append((name, {**rest, **chosen}, sum(index > 0 for index in indices)))
    return rows


def numbers(name, values, **choices):
    """The same, with the values of the first settings that are not named, in their order."""
    named = (setting.name for setting in settings_of(METHODS.get(name)) if setting.name not in choices)
    several = ([float(value) for value in some.split()] for some in values.split("|"))
    return grid(name, **dict(zip(named, several, strict=True)), **choices)


SETTINGS = [
    *grid("clip_higher", low=[0.2, 1.0, 0.0], high=[0.28, 0.0], dual_clip=[None, 1.5, 10.0]),
    *grid("cispo", cap=[1.2, 5.0], floor=[None, 0.8], negative_cap=[None, 1.1], negative_floor=[None, 0.95]),
    *grid("s2t", max_prob=[0.002, 1.0], quantile=[0.75, 0.3, 0.0, 1.0], population=["candidates", "all"]),
    *grid("sapo", positive=[1.0, 0.0, 4.0], negative=[1.05, 0.0, 9.0]),
    *grid("mismatch", of=["old_logprobs", "logprobs"], to=["rollout_logprobs"]),
    *grid("mismatch", of=["logprobs"], to=["old_logprobs"]),
    *numbers("vespo", "2 0 | 3 .1 | 3 1 | 2", anchor=["old", "rollout"]),
    *numbers("maspo", "1 .2 | .3 0 | .03 5 | .03 5 | 10 1 | .1 1 | 10 1", cap=[None, 1.2]),
    *grid("off_policy_mask", max_gap=[0.1, 0.0, 5.0], anchor=["rollout", "old"]),
    *grid("random_mask", share=[0.3, 0.0, 1.0], sign=["positive", "all"], seed=[11, 0]),
    *grid("top_entropy", share=[0.57, 0.2, 0.9, 1.0], denominator=["kept", "all"]),
    *grid("truncated_mask", denominator=["kept", "all"]),
    *grid("turn_credit", coefficient=[1.0, 0.5], normalise=[True, False], epsilon=[1e-4, 0.3]),
    *grid("lp_reg", share=[0.3, 0.01], min_p=[0.02, 1.0], coefficient=[1.3], form=["paper"], ratio_cap=[None, 2.0]),
    *grid("lp_reg", share=[0.3, 1.0], min_p=[0.02], coefficient=[1.3], form=["code"], ratio_cap=[None, 2.0]),
    *numbers("stare", ".25 4 | .57 .1 | 1.2 | .7 | .2 0 | 1.5 | .4", variant=["O1", "C2"]),
    *grid("ess_scale", base=[1.0, 0.55], power=[0.5, 1.0, 0.0], anchor=["rollout", "old"]),
    *grid(
        "importance_correction",
        level=["token", "sequence", "geometric"],
        max_weight=[2.0, 1.1, None],
        normalize=[False, True],
    ),
    *grid(
        "importance_correction",
        divergence=["max_k3", "max_k2", "mean_k2", "mean_k3", "mean_error"],
        max_divergence=[0.02, 1.15],
        denominator=["kept", "all"],
    ),
    *grid(
        "importance_correction",
        level=["sequence", "geometric", "token"],
        min_weight=[0.95],
        max_weight=[None],
        keep_low=[0.9],
        keep_high=[1.2, None],
        veto=[None, 0.7],
        normalize=[True, False],
        denominator=["kept", "all"],
    ),
    *numbers(
        "kl",
        ".3",
        estimator=["k3", "k1", "k2", "k3_straight_through", "k3_unbiased"],
        cap=[10.0, None],
        anchor=["reference", "rollout", "old"],
    ),
    *grid("entropy_bonus", coefficient=[0.01, 0.0, 0.02], aggregate=["loss", "token_mean"]),
    *grid(
        "adaptive_entropy",
        target_entropy=[0.25, 4.0],
        initial=[0.1, 0.0, 0.15],
        increment=[0.05],
        low=[0.0],
        high=[0.2],
        aggregate=["loss", "token_mean"],
    ),
    *grid("gmpo", low=[0.4, 0.1], high=[0.4, 0.0]),
    *grid("gspo"),
    *numbers("aspo", ".2 0 | .4 | .57 .2 1 | 3 1.2"),
    *numbers("ce_gppo", ".2 0 | .2 0 | .75 0 | 1 .5", dual_clip=[None, 1.5]),
    *numbers("cppo", ".05 .15 | .8 .3 | .004 .02 | .9 .57", anchor=["rollout", "old"]),
    *grid("dcpo_clip", low=[0.02, 0.16, 0.0], high=[0.03, 0.0], cap=[10.0, 1.2], dual_clip=[10.0, None, 1.5]),
    *grid(
        "dppo",
        divergence=["tv", "kl"],
        high=[0.05, 0.0],
        low=[0.02, 0.0],
        cap=[1.2],
        anchor=["rollout", "old"],
        stops=["away", "all"],
    ),
    *grid("drpo", delta=[0.15, 12.5], anchor=["rollout", "old"]),
    *grid("m2po", budget=[0.03712345, 0.0, 3.712345]),  # no mean of squares of hundredths is one of these
    *grid("holder_mean", power=[2.0, 0.0], final_power=[-2.0, 3.0], steps=[4, 1]),
    *grid("token_mean"),
    *grid("block_mean"),
    *grid("sequence_mean"),
    *grid("constant_length", length=[7]),
    *grid("ar", alpha=[0.3, 0.0, 1.0]),
    *grid("sign_weights", positive=[0.1, 0.0, 1.5], negative=[1.0, 0.0]),
    *grid("stream_weight", coefficient=[1.0, 0.0, 0.3]),
    *grid("kl_cov", share=[0.3, 0.002, 1.0], coefficient=[1.3]),
    *numbers("clip_cov", ".3 2e-4 1 | .2 -9 | 5 | 1 .05 | 1 .05", seed=[0, 11]),
    *grid("steer", high=[1.2, 1.0, 2.5], low=[0.8, 0.1], form=["exponential", "linear"]),
    *grid("entropy_shaping", alpha=[0.4, 0.0, 3.0], kappa=[2.0, 1.1]),
    *numbers("fipo", "32 1.5 | 1 0 | 1.2 50", max_ratio=[10.0, 1.2, None], safe_ratio=[4.0, 1.1, None]),
    *grid("wapo", length=[7]),
    *grid("opd", coefficient=[1.0, 0.0, 0.3], alone=[False, True]),
    *grid("distill", coefficient=[1.0, 0.0, 0.3], beta=[1.0, 0.0, 0.5], top_k=[None, 8], alone=[False, True]),
    *grid("rlsd", mix=[0.5, 0.0, 1.0], clip=[0.2, 1.0], punished_only=[False, True]),
    *grid("iw_opd", gain=[0.5, 0.0, 3.0]),
    *grid("sdar", coefficient=[0.1, 1.3], sharpness=[5.0, 0.2]),
    *grid("support_replay"),
    *grid("max_lag", updates=[1, 0, 8], denominator=["kept", "all"]),
    *grid(
        "importance_correction",
        divergence=["mean_kl", "mean_tv"],
        max_divergence=[0.004, 0.03],
        max_weight=[None],
    ),
]
#: Terms of several methods in one loss: masks, weights, exemptions and penalties under each aggregate.
TOGETHER = [
    ["gmpo", "s2t", "kl", "sequence_mean"],
    ["holder_mean", "clip_higher", "s2t", "sequence_mean"],
    ["gspo", "clip_higher", "s2t", "sequence_mean"],
    ["support_replay", "gspo", "clip_higher", "kl", "sequence_mean"],
    ["support_replay", "clip_higher", "stare", "kl", "sapo"],
    ["clip_higher", "s2t", "kl"],
    ["clip_higher", "top_entropy", "entropy_bonus", "sequence_mean"],
    ["s2t", "lp_reg", "stare", "constant_length"],
    ["vespo", "sapo", "s2t", "kl", "token_mean"],
    ["clip_higher", "s2t", "top_entropy", "stare", "kl", "adaptive_entropy", "sequence_mean"],
    ["cppo", "drpo", "sapo", "gspo", "clip_higher", "entropy_shaping", "random_mask", "sequence_mean"],
    ["clip_higher", "truncated_mask", "importance_correction", "kl", "ess_scale", "mismatch", "block_mean"],
]
#: Together with a trust region that punished tokens can leave.
EXEMPTING = {"share": 0.5, "min_p": 0.02, "coefficient": 1.3, "form": "code", "ratio_cap": None}


def label(methods):
    return " ".join(f"{name}({', '.join(map(str, chosen.values()))})" for name, chosen in methods.items())


def parameter(methods, slow=False):
    return pytest.param(methods, id=label(methods), marks=[pytest.mark.slow] if slow else [])


CASES = [parameter({name: chosen}, others > 1) for name, chosen, others in SETTINGS]
CASES.append(parameter({"clip_higher": SETTINGS[0][1], "lp_reg": dict(EXEMPTING)}))
#: The first choices of each method, which every edge is tried on.
FIRST = [{name: chosen} for name, chosen, others in SETTINGS if not others]
for names in TOGETHER:
    rows = {name: [chosen for known, chosen, _ in SETTINGS if known == name] for name in names}
    CASES += [parameter({name: several[which] for name, several in rows.items()}) for which in (0, -1)]

WITH_STATE = {"stare", "adaptive_entropy", "holder_mean"}
EDGES = {
    "one token": [[token(now=-7.0, drift=0.1)]],
    "no row": [],
    "some of everything": [
        [],
        *random_rows(1, [9]),
        [],
        *random_rows(2, [4]),
        *([{**token, "A": (-1.0) ** index * index} for index, token in enumerate(row)] for row in random_rows(6, [5])),
        [],
    ],
    "all rewarded": [[{**token, "A": 0.5} for token in row] for row in random_rows(3, [4, 1, 6])],
    "all punished": [[{**token, "A": -0.5} for token in row] for row in random_rows(4, [4, 1, 6])],
    "no advantage": [[{**token, "A": 0.0} for token in row] for row in random_rows(5, [4, 1, 6])],
    "all alike": [[token(now=-7.0, A=advantage) for _ in range(6)] for advantage in (1.0, -1.0)],
    "no candidate": [[token(now=-0.1, H=entropy) for entropy in (0.1, 0.2, 0.3)]],
    "log-probs from 0 to -80": [
        [token(now=now, drift=drift, A=advantage, ref=-40.0, gap=gap) for drift in (-30.0, -20.0, 0.0, 20.0, 30.0)]
        for now, advantage, gap in itertools.product((0.0, -40.0, -80.0), (1.0, -1.0), (0.0, 80.0))
    ],
}


#: Those of them that tell one setting from another, and show how terms of several methods merge.
TELLING = ("some of everything", "log-probs from 0 to -80")


def drawn_rows(seed):
    """Tokens on coarse grids, so that ties are frequent; entropies are dyadic, so that their sums are exact."""
    draw = random.Random(seed)

    def hundredth(low=-60, high=60):
        return draw.randint(low, high) / 100

    def drawn():
        return token(
            now=draw.choice([0.0, -0.5, -6.5, -7.0, -80.0, hundredth(-8000, 0), hundredth(-800, 0)]),
            drift=draw.choice([hundredth(), 0.0, -30.0, 30.0]),
            lag=hundredth(),
            H=draw.choice([0.0, 0.25, 0.5, draw.randint(0, 640) / 64]),
            A=draw.choice([-1.5, -1.0, 0.0, 0.5, 1.0]),
            ref=draw.choice([None, draw.randint(-800, 0) / 10]),
            gap=draw.choice([0.0, 1.0, 3.0, 80.0]),
            mass=draw.choice([0.0, -0.01, -0.5]),
            dH=draw.choice([0.0, 0.125]),
            dmass=draw.choice([0.0, -0.25]),
            sampled=hundredth(),
            block=draw.choice([-1.0, 0.0, 1.0, 2.0]),
        )

    rows = [[drawn() for _ in range(draw.randint(0, 7))] for _ in range(4)]
    for row, tokens in enumerate(rows):
        for place, token_ in enumerate(tokens):
            token_ |= {"turn": float(place // 2), "earned": float((row + place // 2 + seed) % 3)}
    return rows


DRAWN = {seed: drawn_rows(seed) for seed in range(4)}


def agree(value, parts):
    return math.isclose(value, math.fsum(parts), rel_tol=REORDERED, abs_tol=REORDERED * math.fsum(map(abs, parts)))


def close(values, expected):
    return all(math.isclose(*pair, rel_tol=REORDERED, abs_tol=1e-12) for pair in zip(values, expected, strict=True))


@cache
def made(methods):
    return compose(*(METHODS.get(name)(**dict(chosen)) for name, chosen in methods))


class Given:
    """A step for the library and for the oracles."""

    def __init__(self, rows, live_ratio=False, pairs=False):
        self.tokens, self.live_ratio = number(rows), live_ratio
        self.batch = batch_of(rows, range(len(rows)) if pairs else None, live_ratio=live_ratio)
        self.live = {
            field: torch.tensor([token[field] for token in self.tokens], dtype=torch.float64) for field in LIVE.values()
        }


@cache
def step(name, live_ratio=False, pairs=False):
    """In pairs, two rows are the answers to one prompt; else each row is a group."""
    return Given((EDGES | DRAWN)[name], live_ratio, pairs)


def check(methods, given, state=None, memories=None):
    """One step of the library and of the oracles: decisions, loss, gradient and next state agree."""
    tokens, batch = given.tokens, given.batch
    expected, decisions, memories = outcome(tokens, methods, memories, given.live_ratio)
    objective = made(tuple((name, tuple(chosen.items())) for name, chosen in methods.items()))
    plan = make_plan(objective, [batch], state)
    terms_of = member_terms(plan, 0)
    for name, decision in decisions.items():
        terms = terms_of[name].terms
        for field in ("keep", "unclipped"):
            if field in decision:
                assert getattr(terms, field).tolist() == decision[field], (name, field)
        if "weight" in decision:
            weight = [1.0] * len(tokens) if terms.weight is None else terms.weight.tolist()
            assert close(weight, decision["weight"]), (name, weight, decision["weight"])
        if "bonus" in decision:
            assert close(terms.bonus.tolist(), decision["bonus"]), (name, terms.bonus, decision["bonus"])
        if "lr_scale" in decision:
            assert terms.lr_scale == pytest.approx(decision["lr_scale"], rel=REORDERED)
        if "chosen" in decision:
            assert terms.penalties[""].where.tolist() == decision["chosen"]
    leaves = {field: values.clone().requires_grad_() for field, values in given.live.items()}
    out = plan.loss(0, PolicyOutputs(**{name: leaves[field] for name, field in LIVE.items()}))
    assert agree(out.loss.item(), expected.loss)
    if out.loss.requires_grad:
        out.loss.backward()
    for field, leaf in leaves.items():
        slopes = [0.0] * len(tokens) if leaf.grad is None else leaf.grad.tolist()
        for index, slope in enumerate(slopes):
            assert agree(slope, expected.slopes[index][field]), (field, index, slope, expected.slopes[index][field])
    for name, memory in memories.items():
        assert plan.state[name] == pytest.approx(memory or {}, rel=REORDERED)
    return plan.state, memories


def test_every_registered_method_has_an_oracle_and_settings():
    assert [name for name in available() if importlib.util.find_spec(f"tests.oracles.{name}") is None] == []
    assert {name for name, _, others in SETTINGS if not others} == set(available())


@pytest.mark.parametrize("methods", CASES)
def test_edge_steps_equal_the_oracle(methods):
    first = methods in FIRST
    for name in EDGES if first else TELLING:
        check(methods, step(name, pairs="turn_credit" in methods))
    for name in TELLING if first or len(methods) > 1 else TELLING[:1]:
        check(methods, step(name, live_ratio=True, pairs="turn_credit" in methods))


@pytest.mark.parametrize("methods", [parameter({name: chosen}, others > 0) for name, chosen, others in SETTINGS])
def test_drawn_steps_equal_the_oracle(methods):
    for seed in DRAWN:
        check(methods, step(seed, live_ratio=seed % 2 == 1, pairs="turn_credit" in methods))


@pytest.mark.parametrize("methods", [case for case in CASES if case.values[0].keys() & WITH_STATE])
def test_state_over_several_steps_equals_the_oracle(methods):
    state = memories = None
    for seed, level in enumerate([0.0, 0.25, 9.0, 9.0, None, 9.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0]):
        rows = [] if level is None else random_rows(seed, [5, 0, 3, 2])
        given = Given([[{**token, "H": level} for token in row] for row in rows])
        state, memories = check(methods, given, state, memories)
