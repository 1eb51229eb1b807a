"""Rewards in YAML: one function, or a list, always in one canonical form."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict

from rlstab.config.document import Document
from rlstab.config.reward_settings import Rewards, RewardSettings
from rlstab.errors import ConfigError


class Run(BaseModel):
    """A run that is nothing but its rewards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    reward: Rewards | None = None


def read(text: str) -> Run:
    document = Document.parse(f"a: 3\nreward: {text}", "run.yaml")
    found = document.validate(Run, {"reward": document.data["reward"]})
    assert isinstance(found, Run)
    return found


@pytest.mark.parametrize(
    ("text", "names", "weights"),
    [
        ("rewards/own.py:brevity", ["brevity"], [1.0]),
        ("task", ["task"], [1.0]),
        ("polite", ["polite"], [1.0]),
        ("{function: own.py:Class.method, weight: 2}", ["Class.method"], [2.0]),
        ("[{function: own.py:f, weight: 0.2, name: short}, task]", ["short", "task"], [0.2, 1.0]),
        ("[{function: own.py:f, weight: 0}, {function: task, weight: -1.0}]", ["f", "task"], [0.0, -1.0]),
    ],
)
def test_forms(text, names, weights):
    found = read(text)
    assert found.reward is not None
    assert [one.name for one in found.reward] == names
    assert [one.weight for one in found.reward] == weights
    assert Run.model_validate(found.model_dump(mode="json")) == found  # the resolved run loads as itself


def test_none_is_the_task_alone():
    assert read("null").reward is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "run.yaml:2: reward: expected a list, not 5."),
        (
            "[]",
            "run.yaml:2: reward: no reward is listed. Write `task`, or leave `reward` out, for the task's own scorer.",
        ),
        ("[5]", "run.yaml:2: reward.0: expected a mapping, not 5."),
        (
            "[task, task]",
            "run.yaml:2: reward.1.name: two rewards are called 'task'. Give one of them another `name`.",
        ),
        (
            "{function: task, time_limit: 9}",
            "run.yaml:2: reward.0.time_limit: the task's own scorer does not read it. Set task.time_limit, where the "
            "task has one.",
        ),
        ("{weight: 1}", "run.yaml:2: reward.0: the setting `function` is missing; it has no default."),
        (
            "\n  - task\n  - {function: x, weigt: 3}",
            "run.yaml:4: reward.1.weigt: unknown key 'weigt'. Did you mean 'weight'?",
        ),
        ("[{function: x, weight: y}]", "run.yaml:2: reward.0.weight: expected a number, not 'y'."),
        ("[{function: x, weight: .nan}]", "run.yaml:2: reward.0.weight: expected a finite number, not nan."),
        (
            "{function: x, weight: 0}",
            "run.yaml:2: reward: every weight is 0, so that there is nothing to learn from. Give one of them another.",
        ),
        (
            "own.py:mean",
            "run.yaml:2: reward.0.name: 'reward/mean' is a metric of the trainer's own. Give the reward another "
            "`name`.",
        ),
        (
            "{function: own.py:f, name: a b}",
            "run.yaml:2: reward.0.name: 'a b' is no part of the name of a metric. Give the reward a `name` of letters, "
            "digits and _.",
        ),
        *(
            (
                f"'{one}'",
                f"run.yaml:2: reward.0.function: '{one}' names no function in a file. Write it as "
                "path/to/file.py:function.",
            )
            for one in ("own.py:", "own.py", "package.module:f", "")
        ),
    ],
)
def test_errors(text, message):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value) == message


def test_schema_says_what_yaml_may_say():
    validator = pytest.importorskip("jsonschema").Draft202012Validator(Run.model_json_schema())
    good = ["own.py:f", "task", {"function": "task"}, ["task", {"function": "own.py:f", "weight": 0.5}], None]
    assert all(validator.is_valid({"reward": one}) for one in good)
    bad = [5, [], [5], {"function": "task", "weigt": 1}, {"weight": 1}]
    assert not any(validator.is_valid({"reward": one}) for one in bad)


def test_from_python():
    assert RewardSettings(function="own.py:f") == RewardSettings(function="own.py:f", name="f")
