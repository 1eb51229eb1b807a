"""Traces say what the loss did: they agree with its metrics, and name the method."""

import pytest
import torch

from rlstab import zoo
from rlstab.core.batch import TokenBatch
from rlstab.core.compose import compose, observe, within
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, make_plan, member_terms
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import SLOTS, Gate, Terms, merge_terms
from rlstab.presets import PRESETS
from rlstab.record import ACTIONS, Trace, trace
from rlstab.record.effects import ALIKE
from rlstab.record.token_texts import token_texts
from rlstab.testing.run import run_parts
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.lp_reg import LpReg
from rlstab.zoo.random_mask import RandomMask
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.sapo import SAPO
from rlstab.zoo.stare import STARE
from rlstab.zoo.top_entropy import TopEntropyMask
from tests.core.methods import Capped, Scale
from tests.examples import EXAMPLES
from tests.zoo import watch

ADVANTAGES = torch.tensor([1.5, -0.7] * 3)
STEP = watch.STEP.given(
    advantages=ADVANTAGES.double()[watch.STEP.sequence], rollout_logprobs=watch.STEP.evidence["ref_logprobs"]
)


def traced(objective: TokenObjective) -> tuple[Plan, list[tuple[TokenBatch, Trace]], dict[str, float]]:
    """The plan of an optimizer step in two parts, the traces of its parts, and its metrics."""
    rows = [range(3), range(3, 6)]
    live = [PolicyOutputs(**STEP.rows(part).live) for part in rows]
    plan = make_plan(objective, [STEP.rows(part).batch() for part in rows])
    traces = [(part.batch, trace(plan, part.batch, policy)) for part, policy in zip(plan.parts, live, strict=True)]
    return plan, traces, {name: mean.value for name, mean in run_parts(objective, STEP, rows).report.items()}


def total(traces: list[tuple[TokenBatch, Trace]], key: str, action: str) -> int:
    return sum(int(step.methods[key].actions[action].sum()) for _, step in traces)


def test_traces_agree_with_the_metrics() -> None:
    objective = compose(
        ClipHigher(low=0.1, high=0.1, dual_clip=1.5),
        S2TMask(max_prob=0.3),
        STARE(variant="C2", target_entropy=2.0),
        LpReg(share=0.2),
    )
    _, traces, metrics = traced(objective)
    tokens = sum(len(batch) for batch, _ in traces)
    kept = sum(int(step.kept.sum()) for _, step in traces)
    for key, action, metric in (
        ("s2t", "dropped", "s2t/dropped"),
        ("stare", "boosted", "stare/boosted"),
        ("stare", "damped", "stare/damped"),
        ("lp_reg", "regularised", "lp_reg/selected"),
    ):
        assert 0 < total(traces, key, action) < tokens
        assert total(traces, key, action) / tokens == pytest.approx(metrics[metric])
    sides = [metrics[f"ratio/clipped_{side}"] for side in ("high", "low", "dual")]
    assert min(sides) > 0
    assert total(traces, "clip_higher", "clipped") / kept == pytest.approx(sum(sides))
    assert kept / tokens == pytest.approx(metrics["tokens/kept"])
    ratios = sum(float(step.ratio[step.kept].sum()) for _, step in traces)
    assert ratios / kept == pytest.approx(metrics["ratio/mean"])


#: What all methods of the zoo do to single tokens, at one of their example settings or another.
DOES = {
    "": "constant_length ess_scale gmpo gspo holder_mean mismatch sequence_mean support_replay token_mean",
    "boosted clipped damped": "aspo ce_gppo dppo",
    "boosted damped": "cispo drpo entropy_shaping fipo iw_opd opd rlsd stare steer stream_weight turn_credit vespo",
    "boosted damped dropped": "importance_correction",
    "clipped": "clip_higher cppo dcpo_clip off_policy_mask",
    "clipped regularised unclipped": "lp_reg",
    "damped": "ar block_mean clip_cov m2po maspo sapo sign_weights wapo",
    "damped dropped": "max_lag top_entropy truncated_mask",
    "dropped": "random_mask s2t",
    "damped regularised": "distill",
    "regularised": "adaptive_entropy entropy_bonus kl kl_cov sdar",
}
ACTS = {name: actions.split() for actions, names in DOES.items() for name in names.split()}


@pytest.mark.filterwarnings("ignore::rlstab.errors.FitWarning")  # alone, without what it was published with
def test_what_each_method_does_is_shown() -> None:
    assert set(ACTS) == set(zoo.METHODS.names())
    for name, expected in ACTS.items():
        steps = [step for method in EXAMPLES[name] for _, step in traced(compose(method))[1]]
        did = {action for step in steps for action, where in step.methods[name].actions.items() if where.any()}
        assert sorted(did) == expected, name
        assert did <= set(ACTIONS)


def test_members_merge_to_the_terms_of_the_plan() -> None:
    plans = [traced(preset.objective)[:2] for preset in PRESETS.values()]
    for plan, batch in [(plan, batch) for plan, traces in plans for batch, _ in traces]:
        merged = merge_terms({key: step.terms for key, step in member_terms(plan, batch).items()})
        terms = plan.terms(batch)
        assert merged.filled() == terms.filled()
        assert merged.report.keys() == terms.report.keys()
        for field in ("keep", "weight", "bonus", "unclipped"):
            step, other = getattr(merged, field), getattr(terms, field)
            assert (step is None and other is None) or torch.equal(step, other)
        assert {slot for slot in SLOTS if getattr(merged, slot)} == {slot for slot in SLOTS if getattr(terms, slot)}


def test_inside_within_a_method_touches_what_the_outer_one_keeps() -> None:
    objective = compose(
        ClipHigher(),
        within(S2TMask(max_prob=0.5), compose(STARE(target_entropy=2.0), LpReg(share=0.3))),
        within(TopEntropyMask(share=0.5), within(RandomMask(share=0.3), STARE(target_entropy=2.0))),
    )
    plan, traces, metrics = traced(objective)
    batch, step = traces[0]
    names = {f"{key}: {member.name}" for key, member in member_terms(plan, batch).items()}
    assert names == {
        "clip_higher: clip_higher",
        *("within_1/outer: s2t", "within_1/inner/stare: stare", "within_1/inner/lp_reg: lp_reg"),
        *("within_2/outer: top_entropy", "within_2/inner/outer: random_mask", "within_2/inner/inner: stare"),
    }
    for inner, action, outer in (
        ("within_1/inner/stare", "boosted", ["within_1/outer"]),
        ("within_1/inner/lp_reg", "regularised", ["within_1/outer"]),
        ("within_2/inner/outer", "dropped", ["within_2/outer"]),
        ("within_2/inner/inner", "boosted", ["within_2/outer", "within_2/inner/outer"]),
    ):
        where = step.methods[inner].actions[action]
        assert bool(where.any())
        for key in outer:
            assert not bool((where & step.methods[key].actions["dropped"]).any())
    tokens = sum(len(part) for part, _ in traces)
    assert total(traces, "within_1/outer", "dropped") / tokens == pytest.approx(metrics["within_1/outer/dropped"])


def test_a_bonus_boosts_along_the_advantage_and_damps_against_it() -> None:
    _, traces, _ = traced(compose(Scale(bonus=0.2)))
    for batch, step in traces:
        actions = step.methods["scale"].actions
        assert torch.equal(actions["boosted"], batch.advantages > 0)
        assert torch.equal(actions["damped"], batch.advantages < 0)


class Fence(TokenObjective):
    """A gate that stops tokens above a ratio, and halves the pull of others above 1."""

    name = "fence"
    writes = {"gates"}
    above: float = 1.3

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(
            gates={"": Gate(lambda ratio, constants: torch.where(ratio > self.above, 0.0, 1 - (ratio > 1) / 2))}
        )


def test_a_gate_clips_what_it_stops_and_damps_or_boosts_the_rest() -> None:
    objective = compose(Fence(), SAPO(), observe(SAPO(negative=3.0)), S2TMask(max_prob=0.3))
    plan, traces, metrics = traced(objective)
    pulling = sum(int(plan.part(batch).has_gradient.sum()) for batch, _ in traces)
    assert 0 < total(traces, "fence", "clipped") == pytest.approx(metrics["fence/stopped"] * pulling)
    assert sum(int(step.clipped.sum()) for _, step in traces) == total(traces, "fence", "clipped")
    assert total(traces, "sapo", "clipped") == total(traces, "sapo", "boosted") == 0
    for batch, step in traces:
        pulls, stopped = plan.part(batch).has_gradient, step.methods["fence"].actions["clipped"]
        assert torch.equal(stopped, pulls & (step.ratio > 1.3))
        assert torch.equal(step.clipped, stopped)
        assert torch.equal(step.methods["fence"].actions["damped"], pulls & ~stopped & (step.ratio > 1))
        z = torch.sigmoid(torch.where(batch.advantages > 0, 1.0, 1.05) * (step.ratio - 1))
        soft = torch.where(pulls, 4 * z * (1 - z), 1.0)
        torch.testing.assert_close(step.methods["sapo"].gate, soft)
        assert torch.equal(step.methods["sapo"].actions["damped"], soft < 1 - ALIKE)
        torch.testing.assert_close(step.gate, soft * step.methods["fence"].gate)
        assert step.methods["observe_sapo"].gate is None  # it changes nothing
        assert step.methods["observe_sapo"].actions == {}


def test_a_pull_is_a_gate_relative_to_the_ratio() -> None:
    _, traces, metrics = traced(compose(Capped(floor=0.7, cap=1.1), RandomMask(share=0.5)))
    for batch, step in traces:
        own, pulls = step.methods["capped"], step.kept & (batch.advantages != 0)
        assert torch.equal(own.actions["clipped"], pulls & (step.ratio < 0.7))
        assert torch.equal(own.actions["damped"], pulls & (step.ratio > 1.1 * (1 + ALIKE)))
        assert not own.actions["boosted"].any()
        assert torch.equal(step.clipped, own.actions["clipped"])
        assert torch.equal(step.gate, own.gate)
    assert metrics["ratio/stopped"] > 0


def test_gates_and_pulls_leave_unclipped_tokens_alone() -> None:
    for method in (Fence(above=0.5), Capped(floor=5.0)):
        _, traces, _ = traced(compose(method, LpReg(form="code", share=0.5)))
        for _, step in traces:
            free = step.methods["lp_reg"].actions["unclipped"]
            assert not (step.clipped & free).any()
            assert torch.equal(step.gate[free], torch.ones_like(step.gate[free]))
            assert step.clipped[~free].any()
    assert free.any()


def test_texts_of_tokens_join_to_the_text() -> None:
    # a character that never ends is shown with the last token
    for content in ("naïve 😀 \ufffd ok".encode(), b"a\xf0\x9f"):
        texts = token_texts(lambda ids: bytes(ids).decode(errors="replace"), list(content))
        assert len(texts) == len(content)
        assert "".join(texts) == content.decode(errors="replace")
    assert token_texts(lambda ids: bytes(ids).decode(errors="replace"), list("naïv".encode())) == [*"na", "", "ï", "v"]
