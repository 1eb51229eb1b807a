"""Objectives in YAML: every form loads, and what is written comes back."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import rlstab
from rlstab import (
    STARE,
    ClipHigher,
    ConstantLength,
    EntropyBonus,
    KLPenalty,
    S2TMask,
    SequenceMean,
    TokenMean,
    compose,
    within,
)
from rlstab.config import Document, dump_objective, load_objective, objective_hash
from rlstab.config.document import dump
from rlstab.core.settings import settings_of
from rlstab.zoo import METHODS
from tests.config.strategies import methods, objectives, quick

DAPO = compose(ClipHigher(low=0.2, high=0.28), TokenMean())


@quick(max_examples=60)
@given(objectives())
def test_what_is_written_loads_as_the_same_objective(objective):
    written = dump_objective(objective)
    again = load_objective(Document.parse(dump({"objective": written}), "f.yaml").data)
    assert again == objective
    assert dump_objective(again) == written
    assert objective_hash(again) == objective_hash(objective)


@quick(max_examples=15)
@given(st.data())
def test_every_setting_of_every_method_survives_plain_yaml(data):
    for name in rlstab.available():
        method = data.draw(methods(name))
        text = yaml.safe_dump(dump_objective(method), sort_keys=False)
        assert load_objective(yaml.safe_load(text)).members == (method,)


@quick(max_examples=60)
@given(objectives(), st.randoms(use_true_random=False))
def test_another_order_has_the_same_hash(objective, random):
    items = dump_objective(objective)
    random.shuffle(items)
    assert objective_hash(load_objective(items)) == objective_hash(objective)


@quick(max_examples=60)
@given(methods(), methods())
def test_methods_share_a_hash_exactly_when_they_are_equal(one, other):
    assert (objective_hash(one) == objective_hash(other)) is (one == other)


#: What a method has to be told, or wants so that each of its settings can change alone.
ROOM = {
    "adaptive_entropy": {"initial": 0.001, "high": 0.5},
    "constant_length": {"length": 7},
    "mismatch": {"of": "logprobs"},
    "maspo": {"sigma": 1e-4, "min_scale": 1e-4},
    "clip_cov": {"low": 0.0},
    "wapo": {"length": 7},
}
EVERY_SETTING = [(name, one) for name in rlstab.available() for one in settings_of(METHODS.get(name))]


def test_another_value_of_any_setting_has_another_hash():
    for name, setting in EVERY_SETTING:
        before = {"name": name, **ROOM.get(name, {})}
        (full,) = dump_objective(load_objective(before))
        candidates = (*setting.choices, True, 0.001, 0.5, 1.2, 2.0, 9)
        other = next(value for value in candidates if setting.accepts(value) and value != full[setting.name])
        changed = load_objective({**before, setting.name: other})
        assert objective_hash(changed) != objective_hash(load_objective(before)), (name, setting)


def test_a_hash_is_shared_exactly_by_equal_objectives():
    for one, other in [
        (KLPenalty(coefficient=1), KLPenalty(coefficient=1.0)),
        (KLPenalty(coefficient=-0.0), KLPenalty(coefficient=0.0)),
        (ClipHigher(dual_clip=3), ClipHigher(dual_clip=3.0)),
        (compose(S2TMask()), S2TMask()),
        (compose(TokenMean(), S2TMask()), compose(S2TMask(), TokenMean())),
    ]:
        assert objective_hash(one) == objective_hash(other)
    for one, other in [
        (within(S2TMask(), STARE()), compose(S2TMask(), STARE())),
        (within(S2TMask(), STARE()), within(S2TMask(quantile=0.5), STARE())),
        (compose(KLPenalty(), KLPenalty()), compose(KLPenalty())),
        (TokenMean(), SequenceMean()),
    ]:
        assert objective_hash(one) != objective_hash(other)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (["clip_higher", "token_mean"], DAPO),
        ([{"name": "clip_higher"}, "token_mean"], DAPO),
        (("clip_higher", "token_mean"), DAPO),
        ({"objective": ["clip_higher", "token_mean"]}, DAPO),
        ({"objective": "s2t"}, compose(S2TMask())),
        ({"objective": {"name": "s2t"}}, compose(S2TMask())),
        ({"objective": ["s2t"], "rollout": {"left": "alone"}}, compose(S2TMask())),
        ({"name": "s2t", "max_prob": 0.5}, compose(S2TMask(max_prob=0.5))),
        ({"preset": "dapo"}, DAPO),
        ([{"preset": "dapo"}, "s2t"], compose(DAPO, S2TMask())),
        ([{"preset": "dapo", "drop": ["token_mean"]}, "sequence_mean"], compose(ClipHigher(), SequenceMean())),
        ([{"preset": "dapo", "set": {"clip_higher": {"high": 0.3}}}], compose(ClipHigher(high=0.3), TokenMean())),
        ([{"preset": "dapo", "set": {"clip_higher": {"high": 1}}}], compose(ClipHigher(high=1.0), TokenMean())),
        ([{"preset": "dr_grpo", "set": {"constant_length": {"length": 9}}, "drop": ["clip_higher"]}],
         compose(ConstantLength(length=9))),
        ([{"name": "kl"}, {"name": "kl", "estimator": "k2"}], compose(KLPenalty(), KLPenalty(estimator="k2"))),
    ],
)  # fmt: skip
def test_every_form_loads(source, expected):
    assert load_objective(source) == expected
    assert rlstab.load_objective(source) == expected


def test_a_file_loads_in_every_form(tmp_path):
    path = tmp_path / "objective.yaml"
    for text in (
        "[clip_higher, token_mean]",
        "- clip_higher\n- name: token_mean\n",
        "objective:\n  - preset: dapo\n",
        "objective: {preset: dapo}\nseed: 3\n",
        "preset: dapo",
        "\ufeff- preset: dapo",
        "- &a clip_higher\n- token_mean",
        "- {name: clip_higher, <<: {high: 0.28}}\n- token_mean",
    ):
        path.write_text(text, encoding="utf-8")
        assert load_objective(path) == load_objective(str(path)) == DAPO


WITHIN = {
    "one method on each side": ("s2t", {"name": "stare"}, within(S2TMask(), STARE())),
    "a list inside": ("s2t", ["stare", "kl"], within(S2TMask(), compose(STARE(), KLPenalty()))),
    "a list of one": (["s2t"], ["stare"], within(S2TMask(), STARE())),
    "a preset outside": (
        {"preset": "stapo"},
        "stare",
        within(compose(ClipHigher(dual_clip=10.0), S2TMask(), TokenMean()), STARE()),
    ),
    "nested": (
        {"name": "within", "outer": "s2t", "inner": {"name": "s2t", "quantile": 0.5}},
        "entropy_bonus",
        within(within(S2TMask(), S2TMask(quantile=0.5)), EntropyBonus()),
    ),
}


@pytest.mark.parametrize(("outer", "inner", "expected"), WITHIN.values(), ids=WITHIN)
def test_within_takes_methods_lists_and_presets(outer, inner, expected):
    loaded = load_objective([{"name": "within", "outer": outer, "inner": inner}])
    assert loaded == compose(expected)
    assert load_objective(dump_objective(loaded)) == loaded


RECOMMENDED = {
    "set outside": ({"set": {"s2t": {"max_prob": 0.5}}}, within(S2TMask(max_prob=0.5), STARE())),
    "set inside": ({"set": {"stare": {"share": 0.5}}}, within(S2TMask(), STARE(share=0.5))),
    "drop outside": ({"drop": ["s2t"]}, STARE()),
    "drop inside": ({"drop": ["stare"]}, S2TMask()),
    "drop one and set the other": ({"drop": ["s2t"], "set": {"stare": {"share": 0.5}}}, STARE(share=0.5)),
}


@pytest.mark.parametrize(("changes", "expected"), RECOMMENDED.values(), ids=RECOMMENDED)
def test_a_preset_with_within_is_changed_by_the_names_of_its_methods(changes, expected):
    assert load_objective({"preset": "recommended", **changes}) == compose(
        ClipHigher(dual_clip=10.0), TokenMean(), expected
    )


def test_both_sides_of_within_can_be_dropped():
    assert load_objective({"preset": "recommended", "drop": ["s2t", "stare"]}) == compose(
        ClipHigher(dual_clip=10.0), TokenMean()
    )


def test_a_number_with_an_exponent_is_a_number_and_dates_stay_text(tmp_path):
    path = tmp_path / "objective.yaml"
    for number in ("1e-3", "1E-3", "1.0e-3", "+1e-3", ".1e-2", "10e-4", "0.001"):
        path.write_text(f"- {{name: kl, coefficient: {number}}}")
        assert load_objective(path) == compose(KLPenalty(coefficient=1e-3))
    assert Document.parse("[2020-01-01, =, 1e-3]", "f.yaml").data == ["2020-01-01", "=", 1e-3]


def test_text_that_looks_like_something_else_survives():
    breaks = ["\x85P", "a\u2028b", "\ufeff", "\ud800"]
    for text in ["1e-3", "2020-01-01", "=", "null", "yes", "12", "a: b", "- a", "", " ", "\n", "é", *breaks]:
        assert Document.parse(dump({"stop": text}), "f.yaml").data == {"stop": text}
