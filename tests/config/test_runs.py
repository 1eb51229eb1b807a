"""Runs in YAML: presets in place, defaults filled in, one hash for one result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstab import ClipHigher, S2TMask, TokenMean, compose
from rlstab.config import Document, dump_objective, dump_run, load_run, objective_hash, run_hash
from rlstab.presets import PRESETS
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.grpo import GRPO
from tests.config.strategies import SECTIONS, objectives, quick

ORDER = [("a", 1), ("b", 2)]


def run(**sections):
    return load_run({"objective": "clip_higher", **sections})


@quick(max_examples=60)
@given(objectives(), SECTIONS)
def test_what_is_written_loads_as_the_same_run(objective, sections):
    one = load_run({"objective": dump_objective(objective), **sections})
    text = dump_run(one)
    again = load_run(Document.parse(text, "f.yaml").data)
    assert again == one
    assert again.composition == one.composition == objective
    assert dump_run(again) == text
    assert run_hash(again) == run_hash(one)


def test_a_file_loads_as_its_data(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("objective: [clip_higher]\nrollout: {group: 4}\n")
    assert load_run(path) == load_run(str(path)) == run(rollout={"group": 4})


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"tracking": {"out": "elsewhere", "samples": 9, "trackers": ["wandb"], "keep_checkpoints": 7}}, True),
        ({"engine": {"name": "fsdp2", "offload": True}}, True),
        ({"model": {"name": "other"}}, False),
        ({"task": {"name": "countdown", "seed": 1}}, False),
        ({"rollout": {"group": 4}}, False),
        ({"rollout": {"batch_size": 4}}, False),
        ({"advantage": {"std": False}}, False),
        ({"optimisation": {"lr": 2e-6}}, False),
        ({"optimisation": {"epochs": 2}}, False),
        ({"evaluation": {"prompts": 8}}, False),
        ({"objective": "s2t"}, False),
        ({"seed": 1}, False),
    ],
)
def test_the_hash_of_a_run_ignores_tracking_and_the_engine_alone(changes, same):
    assert (run_hash(run(**changes)) == run_hash(run())) is same


def test_a_name_is_an_engine_with_its_defaults():
    assert run(engine="ddp") == run(engine={"name": "ddp"})
    assert run() == run(engine="auto") != run(engine="fsdp2")


def test_the_dtype_of_gathered_weights_counts_in_the_hash():
    half = {"optimisation": {"precision": "bf16"}}
    assert run_hash(run(**half, engine={"name": "fsdp2", "gather": "bf16"})) != run_hash(run(**half, engine="fsdp2"))


def test_what_stands_in_the_file_as_the_default_changes_no_hash():
    assert run_hash(run(seed=0, rollout={"group": 8}, optimisation={"old_logprobs": "live"})) == run_hash(run())


def test_the_order_of_keys_changes_no_hash():
    one, other = ({"name": "reasoning_gym", "dataset": "a", "options": dict(pairs)} for pairs in (ORDER, ORDER[::-1]))
    assert run_hash(run(task=one)) == run_hash(run(task=other))


def test_a_preset_is_expanded_in_place():
    data = load_run({"objective": [{"preset": "dapo", "set": {"clip_higher": {"high": 0.3}}}, "s2t"]})
    assert data.objective == dump_objective(compose(ClipHigher(high=0.3), TokenMean(), S2TMask()))
    assert "preset" not in dump_run(data)
    assert objective_hash(data.composition) == objective_hash(compose(S2TMask(), TokenMean(), ClipHigher(high=0.3)))


def test_a_preset_sets_the_advantage_estimator():
    for name in PRESETS:
        assert load_run({"objective": {"preset": name}}).pipeline.estimator.name == PRESETS[name].estimator


def test_settings_of_the_advantage_are_those_of_the_estimator_of_the_preset():
    assert load_run({"objective": {"preset": "dr_grpo"}, "advantage": {}}).pipeline.estimator == DrGRPO()
    loaded = load_run({"objective": {"preset": "dapo"}, "advantage": {"std": False}})
    assert loaded.pipeline.estimator == GRPO(std=False)


def test_the_estimator_of_the_file_stands_above_that_of_the_preset():
    loaded = load_run({"objective": {"preset": "dr_grpo"}, "advantage": {"estimator": "rloo"}})
    assert loaded.pipeline.estimator.name == "rloo"


TWO = [{"preset": "dapo", "drop": ["clip_higher", "token_mean"]}, {"preset": "dr_grpo"}]


def test_two_presets_with_different_estimators_fit_where_the_file_says_which():
    assert load_run({"objective": TWO, "advantage": {"estimator": "grpo"}}).pipeline.estimator.name == "grpo"


@pytest.mark.parametrize(
    ("optimisation", "expected"),
    [
        ({}, "live"),
        ({"epochs": 2}, "recompute"),
        ({"mini_batches": 2}, "recompute"),
        ({"epochs": 2, "old_logprobs": "rollout"}, "rollout"),
        ({"old_logprobs": "recompute"}, "recompute"),
    ],
)
def test_the_denominator_of_the_ratio_is_filled_in(optimisation, expected):
    assert run(optimisation=optimisation).optimisation.old_logprobs == expected


def test_an_override_is_the_same_as_the_file_with_that_value():
    overrides = {"optimisation.lr": 1e-4, "rollout": {"group": 4}, "objective": ["s2t"], "seed": 5}
    assert load_run({"objective": "clip_higher", "optimisation": {"epochs": 2}}, overrides) == load_run(
        {"objective": ["s2t"], "optimisation": {"epochs": 2, "lr": 1e-4}, "rollout": {"group": 4}, "seed": 5}
    )


def test_an_override_leaves_the_callers_data_alone():
    data = {"objective": "clip_higher", "optimisation": {"epochs": 2}}
    load_run(data, {"optimisation.epochs": 3, "rollout.group": 4})
    assert data == {"objective": "clip_higher", "optimisation": {"epochs": 2}}


@quick(max_examples=60)
@given(st.floats(1e-300, 1, allow_subnormal=False))
def test_a_number_is_read_back_exactly(lr):
    assert load_run(Document.parse(dump_run(run(optimisation={"lr": lr})), "f").data).optimisation.lr == lr


def test_rewards_load_in_every_form_and_as_they_are_written():
    for reward, names, weights in [
        ("rewards/own.py:brevity", ["brevity"], [1.0]),
        ("task", ["task"], [1.0]),
        ({"function": "own.py:Class.method", "weight": 2}, ["Class.method"], [2.0]),
        ([{"function": "own.py:f", "weight": 0.2, "name": "short"}, "task"], ["short", "task"], [0.2, 1.0]),
        ([{"function": "own.py:f", "weight": 0}, {"function": "task", "weight": -1.0}], ["f", "task"], [0.0, -1.0]),
    ]:
        loaded = run(reward=reward)
        assert [part.name for part in loaded.reward] == names
        assert [part.weight for part in loaded.reward] == weights
        assert load_run(Document.parse(dump_run(loaded), "f").data) == loaded
    assert run(reward=None).reward is None
