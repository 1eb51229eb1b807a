"""Objectives in YAML: every form loads, and what is written comes back."""

import rlstab
from rlstab import STARE, ClipHigher, KLPenalty, S2TMask, SequenceMean, TokenMean, compose, within
from rlstab.config import Document, dump_objective, load_objective, objective_hash
from rlstab.config.document import dump

DAPO = compose(ClipHigher(low=0.2, high=0.28), TokenMean())


def test_a_hash_is_shared_exactly_by_equal_objectives():
    for left, right in [
        (KLPenalty(coefficient=1), KLPenalty(coefficient=1.0)),
        (KLPenalty(coefficient=-0.0), KLPenalty(coefficient=0.0)),
        (ClipHigher(dual_clip=3), ClipHigher(dual_clip=3.0)),
        (compose(S2TMask()), S2TMask()),
    ]:
        assert objective_hash(left) == objective_hash(right)
    for left, right in [
        (within(S2TMask(), STARE()), compose(S2TMask(), STARE())),
        (within(S2TMask(), STARE()), within(S2TMask(quantile=0.5), STARE())),
        (compose(KLPenalty(), KLPenalty()), compose(KLPenalty())),
        (TokenMean(), SequenceMean()),
    ]:
        assert objective_hash(left) != objective_hash(right)


def nested(outer, inner):
    return [{"name": "within", "outer": outer, "inner": inner}]


def recommended(expected, **changes):
    return {"preset": "recommended", **changes}, compose(ClipHigher(dual_clip=10.0), TokenMean(), *expected)


#: What may stand for an objective, and what it is.
FORMS = [
    (["clip_higher", "token_mean"], DAPO),
    ([{"name": "clip_higher"}, "token_mean"], DAPO),
    (("clip_higher", "token_mean"), DAPO),
    ({"objective": ["clip_higher", "token_mean"]}, DAPO),
    ({"objective": "s2t"}, compose(S2TMask())),
    ({"objective": ["s2t"], "rollout": {"left": "alone"}}, compose(S2TMask())),
    ({"name": "s2t", "max_prob": 0.5}, compose(S2TMask(max_prob=0.5))),
    ({"preset": "dapo"}, DAPO),
    ([{"preset": "dapo"}, "s2t"], compose(DAPO, S2TMask())),
    ([{"preset": "dapo", "drop": ["token_mean"]}, "sequence_mean"], compose(ClipHigher(), SequenceMean())),
    ([{"preset": "dapo", "set": {"clip_higher": {"high": 1}}}], compose(ClipHigher(high=1.0), TokenMean())),
    ([{"preset": "dr_grpo", "set": {"constant_length": {"length": 9}}, "drop": ["clip_higher"]}],
     compose(rlstab.ConstantLength(length=9))),
    ([{"name": "kl"}, {"name": "kl", "estimator": "k2"}], compose(KLPenalty(), KLPenalty(estimator="k2"))),
    (nested("s2t", {"name": "stare"}), compose(within(S2TMask(), STARE()))),
    (nested("s2t", ["stare", "kl"]), compose(within(S2TMask(), compose(STARE(), KLPenalty())))),
    (nested(["s2t"], ["stare"]), compose(within(S2TMask(), STARE()))),
    (nested({"preset": "stapo"}, "stare"),
     compose(within(compose(ClipHigher(dual_clip=10.0), S2TMask(), TokenMean()), STARE()))),
    (nested({"name": "within", "outer": "s2t", "inner": {"name": "s2t", "quantile": 0.5}}, "entropy_bonus"),
     compose(within(within(S2TMask(), S2TMask(quantile=0.5)), rlstab.EntropyBonus()))),
    recommended([within(S2TMask(max_prob=0.5), STARE())], set={"s2t": {"max_prob": 0.5}}),
    recommended([within(S2TMask(), STARE(share=0.5))], set={"stare": {"share": 0.5}}),
    recommended([STARE()], drop=["s2t"]),
    recommended([S2TMask()], drop=["stare"]),
    recommended([STARE(share=0.5)], drop=["s2t"], set={"stare": {"share": 0.5}}),
    recommended([], drop=["s2t", "stare"]),
]  # fmt: skip


def test_every_form_loads():
    for source, expected in FORMS:
        loaded = rlstab.load_objective(source)
        assert loaded == expected, source
        assert load_objective(dump_objective(loaded)) == loaded, source


def test_a_file_loads_in_every_form(tmp_path):
    path = tmp_path / "objective.yaml"
    for text in (
        "- clip_higher\n- name: token_mean\n",
        "objective: {preset: dapo}\nseed: 3\n",
        "preset: dapo",
        "\ufeff- preset: dapo",
        "- &a clip_higher\n- token_mean",
        "- {name: clip_higher, <<: {high: 0.28}}\n- token_mean",
    ):
        path.write_text(text, encoding="utf-8")
        assert load_objective(path) == load_objective(str(path)) == DAPO


def test_a_number_with_an_exponent_is_a_number_and_dates_stay_text():
    for number in ("1e-3", "1E-3", "1.0e-3", "+1e-3", ".1e-2", "10e-4", "0.001"):
        assert Document.parse(number, "f.yaml").data == 1e-3
    assert Document.parse("[2020-01-01, =, 1e-3]", "f.yaml").data == ["2020-01-01", "=", 1e-3]


def test_text_that_looks_like_something_else_survives():
    breaks = ["\x85P", "a\u2028b", "\ufeff", "\ud800"]
    for text in ["1e-3", "2020-01-01", "=", "null", "yes", "12", "a: b", "- a", "", " ", "\n", "é", *breaks]:
        assert Document.parse(dump({"stop": text}), "f.yaml").data == {"stop": text}
