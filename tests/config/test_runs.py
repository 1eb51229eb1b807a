"""Runs in YAML: presets in place, defaults filled in, one hash for one result."""

import pytest
from hypothesis import strategies as st

from rlstab.config import Document, dump_objective, dump_run, load_objective, load_run, objective_hash, run_hash
from rlstab.errors import ConfigError
from rlstab.stages.grpo import GRPO
from tests.config.strategies import SECTIONS, objectives, search, searched
from tests.config.test_schema import validator


def run(**sections):
    return load_run({"objective": "clip_higher", **sections})


@searched
def test_what_is_written_is_valid_and_loads_as_the_same_run(examples):
    search(st.tuples(objectives(), SECTIONS, st.randoms(use_true_random=False)), examples, comes_back)


def comes_back(drawn):
    """A run of a drawn objective and drawn sections is valid by the schema, and is itself after writing and loading."""
    objective, sections, random = drawn
    written = dump_objective(objective)
    loaded = load_run({"objective": written, **sections})
    text = dump_run(loaded)
    data = Document.parse(text, "f.yaml").data
    assert not [error.message for error in validator().iter_errors(data)]
    again = load_run(data)
    assert again == loaded
    assert again.composition == loaded.composition == objective
    assert dump_run(again) == text
    assert run_hash(again) == run_hash(loaded)
    random.shuffle(written)
    assert objective_hash(load_objective(written)) == objective_hash(objective)


def test_a_name_is_an_engine_or_a_schedule_with_its_defaults():
    assert run(engine="ddp") == run(engine={"name": "ddp"})
    assert run() == run(engine="auto") != run(engine="fsdp2")
    short, long = (run(optimisation={"schedule": schedule}) for schedule in ("cosine", {"name": "cosine"}))
    assert short == long != run()


def test_a_preset_brings_its_estimator_unless_the_run_names_one():
    without_std = run(objective={"preset": "dapo"}, stages=[{"name": "grpo", "std": False}])
    assert without_std.pipeline.estimator == GRPO(std=False)
    assert run(objective={"preset": "dr_grpo"}, stages="rloo").pipeline.estimator.name == "rloo"
    two = [{"preset": "dapo", "drop": ["clip_higher", "token_mean"]}, {"preset": "dr_grpo"}]
    assert run(objective=two, stages="grpo").pipeline.estimator.name == "grpo"


def test_a_trace_of_an_earlier_release_that_is_off_asks_for_nothing():
    run = load_run({"objective": "s2t", "tracking": {"trace_every": 0, "samples": 1}})
    assert run == load_run({"objective": "s2t", "tracking": {"samples": 1}})
    with pytest.raises(ConfigError, match="trace_every"):
        load_run({"objective": "s2t", "tracking": {"trace_every": 5}})


def test_an_override_is_the_same_as_the_file_with_that_value():
    overrides = {"optimisation.lr": 1e-4, "rollout": {"group": 4}, "objective": ["s2t"], "seed": 5}
    data = {"objective": "clip_higher", "optimisation": {"epochs": 2}}
    assert load_run(data, overrides) == load_run(
        {"objective": ["s2t"], "optimisation": {"epochs": 2, "lr": 1e-4}, "rollout": {"group": 4}, "seed": 5}
    )
    assert data == {"objective": "clip_higher", "optimisation": {"epochs": 2}}


def test_rewards_load_in_every_form_and_as_they_are_written():
    for reward, names, weights in [
        ("rewards/own.py:brevity", ["brevity"], [1.0]),
        ({"function": "own.py:Class.method", "weight": 2}, ["Class.method"], [2.0]),
        ([{"function": "own.py:f", "weight": 0.2, "name": "short"}, "task"], ["short", "task"], [0.2, 1.0]),
    ]:
        loaded = run(reward=reward)
        assert [part.name for part in loaded.reward] == names
        assert [part.weight for part in loaded.reward] == weights
        assert load_run(Document.parse(dump_run(loaded), "f").data) == loaded
    assert run(reward=None).reward is None
