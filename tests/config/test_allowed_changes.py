"""One mark says which settings cannot change what a run learns, and runs that differ in them agree."""

import io
import json
from typing import Any, get_args

import pytest
from rich.console import Console

from rlstab.config import Document, dump_run, load_run, run_hash
from rlstab.config.allowed_changes import _marks, change_in_resume, is_measured, is_neutral, settings_hash
from rlstab.config.document import flat
from rlstab.config.runs import RunConfig
from rlstab.config.settings import Neutral, TaskSettings
from rlstab.config.user_code import checksums
from rlstab.train import train
from tests.train.runs import ALIKE, GRADED, small

#: For each mark a change of what it marks; of a section, of each setting in it. The numbers are the same bit for bit.
EXACT = {
    "evaluation": {
        "every": 1,
        "start": False,
        "sampler": True,
        "prompts": 3,
        "samples": 3,
        "pass_at": [1],
        "greedy": True,
    },
    "tracking": {
        "out": "elsewhere",
        "trackers": ["tensorboard"],
        "project": "other",
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
        "samples": 0,
        "dump_every": 1,
        "watch": True,
        "stop_at": ["refused_steps"],
    },
    "reward.*.workers": 1,
    "evaluation.prompts": 1,
    "evaluation.samples": 2,
}
#: Likewise: sums of float32 are made in another order.
ROUNDED = {
    "optimisation.deterministic": False,
    "rollout.batch_size": 3,
    "optimisation.micro_batch_size": 3,
    "optimisation.gradient_checkpointing": True,
    "engine.name": "fsdp2",
    "engine.offload": True,
}
#: The field of a reward, in another section.
OF_TASKS = {"task.workers"}


def base(folder, **changes):
    """A run of two rollouts with an evaluation after each."""
    reward = [{"function": GRADED, "workers": 2}]
    return small(folder, **{"evaluation__every": 2, "evaluation__samples": 4, "reward": reward, **changes})


def settings_of(path):
    """Another value of a marked setting, by the dotted path of each field; of a section, of all its fields."""
    value = (EXACT | ROUNDED)[path]
    if path == "reward.*.workers":
        return {"reward": [{"function": GRADED, "workers": value}]}
    if isinstance(value, dict):
        return {f"{path}__{key}": value[key] for key in value if key != "out"}
    engine = {"engine__name": "fsdp2"} if path == "engine.offload" else {}
    return {**engine, path.replace(".", "__"): value}


def learnt(run, folder):
    """What a run wrote of training, without times."""
    train(run, console=Console(file=io.StringIO()))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (record["rollout"], name): value
        for record in records
        for name, value in record.items()
        if not name.startswith(("seconds/", "eval/")) and record["rollout"]
    }


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """What the run learns without a change."""
    folder = tmp_path_factory.mktemp("before")
    metrics = learnt(base(folder), folder)
    assert len(metrics) > 30
    return metrics


def test_every_mark_has_a_change_here():
    paths = {path for path, mark in _marks() if isinstance(mark, Neutral)}
    for task in get_args(get_args(TaskSettings)[0]):  # a path has one meaning in all of them
        for name, field in task.model_fields.items():
            assert is_neutral(f"task.{name}", {}) is any(isinstance(mark, Neutral) for mark in field.metadata)
    assert paths == {*EXACT, *ROUNDED, *OF_TASKS}
    for section in ("evaluation", "tracking"):
        assert EXACT[section].keys() == RunConfig.model_fields[section].annotation.model_fields.keys()


def test_what_neutral_settings_leave_alone_is_equal_bit_for_bit(before, tmp_path):
    changes = {key: value for path in EXACT for key, value in settings_of(path).items()}
    assert learnt(base(tmp_path, **changes), tmp_path) == before


def test_what_neutral_settings_round_otherwise_is_equal_but_for_that(before, tmp_path):
    changes = {key: value for path in ROUNDED for key, value in settings_of(path).items()}
    metrics = learnt(base(tmp_path, **changes), tmp_path)
    assert metrics.keys() == before.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(before[name], rel=ALIKE, abs=ALIKE), name


@pytest.mark.filterwarnings("ignore:scope")
def test_a_micro_batch_counts_where_statistics_are_of_a_micro_batch(tmp_path):
    scoped = {"optimisation__scope": "microbatch", "objective": ["clip_higher", {"name": "top_entropy", "share": 0.5}]}
    runs = [small(tmp_path / str(size), optimisation__micro_batch_size=size, **scoped) for size in (3, 8)]
    assert run_hash(runs[0]) != run_hash(runs[1])
    assert learnt(runs[0], tmp_path / "3") != pytest.approx(learnt(runs[1], tmp_path / "8"), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("path", [*EXACT, *ROUNDED])
def test_runs_that_differ_in_a_neutral_setting_have_one_hash(path, tmp_path):
    assert run_hash(base(tmp_path / "other", **settings_of(path))) == run_hash(base(tmp_path))
    values = flat(base(tmp_path).model_dump(mode="json"))
    assert is_neutral(path.replace("*", "0"), values)
    assert is_measured(path) is (path in ("evaluation.prompts", "evaluation.samples"))


def test_the_hash_of_a_run_differs_with_what_counts():
    settings = {"name": "reasoning_gym", "dataset": "a"}
    gym = [{"task": {**settings, **more}} for more in ({"options": {"a": 1, "b": 2}}, {"options": {"b": 2, "a": 1}})]
    half = {"optimisation": {"precision": "bf16"}}
    for changes, others, same in [
        (gym[0], gym[1], True),
        ({"task": {**settings, "workers": 5}}, {"task": settings}, True),
        ({"seed": 0, "rollout": {"group": 8}, "optimisation": {"old_logprobs": "live"}}, {}, True),
        ({"task": {**settings, "eval_size": 3}}, {"task": settings}, False),
        ({"task": {**settings, "time_limit": 1.0}}, {"task": settings}, False),
        ({**half, "engine": {"name": "fsdp2", "gather": "bf16"}}, half, False),
        ({"model": {"name": "other"}}, {}, False),
        ({"task": {"name": "countdown", "seed": 1}}, {}, False),
        ({"stages": {"name": "grpo", "std": False}}, {}, False),
        ({"optimisation": {"lr": 2e-6}}, {}, False),
        ({"optimisation": {"rollouts": 9}}, {}, False),
        ({"objective": "s2t"}, {}, False),
        ({"seed": 1}, {}, False),
    ]:
        runs = [load_run({"objective": "clip_higher", **sections}) for sections in (changes, others)]
        assert (run_hash(runs[0]) == run_hash(runs[1])) is same, changes


def test_the_hash_of_stored_settings_is_that_of_the_run(tmp_path):
    run = base(tmp_path)
    stored = Document.parse(dump_run(run), "config.yaml").data
    assert settings_hash(stored, checksums(stored)) == run_hash(run)


def test_a_resume_may_change_what_is_marked_and_nothing_else(tmp_path):
    settings = base(tmp_path, rollout__staleness=0).model_dump(mode="json")
    stale = base(tmp_path, rollout__staleness=1).model_dump(mode="json")

    def change(settings: Any, section: str, **values: Any) -> Any:
        return change_in_resume(settings, {**settings, section: {**settings[section], **values}})

    assert change(settings, "optimisation", rollouts=99) is None
    assert change(stale, "optimisation", rollouts=99) == ("optimisation.rollouts", 2, 99)
    assert change(settings, "engine", gather="bf16") is None
    assert change(settings, "engine", name="ddp") is None
    assert change(settings, "optimisation", epochs=7)[0] == "optimisation.epochs"
    assert change(settings, "optimisation", micro_batch_size=1) is None
    scoped = {**settings, "optimisation": {**settings["optimisation"], "scope": "microbatch"}}
    assert change(scoped, "optimisation", micro_batch_size=1)[0] == "optimisation.micro_batch_size"
    worker = {"task": {"name": "jsonl", "time_limit": 5.0, "memory": 2.0}, "reward": [{"time_limit": 5.0}]}
    assert change(worker, "task", time_limit=1.0) is None
    assert change_in_resume(worker, {**worker, "reward": [{"time_limit": 1.0}]}) is None
    assert change(worker, "task", memory=1.0) == ("task.memory", 2.0, 1.0)
