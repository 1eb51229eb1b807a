"""Which process samples, asks, writes and reads what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.crews import Crew
from tests.train.runs import about, file_of, small

pytestmark = pytest.mark.slow

TRACED = {"tracking__trace_every": 1, "tracking__trace_responses": 100, "optimisation__rollouts": 1}


def traced(out: Path) -> dict[int, Any]:
    """By response: its prompt, reward and tokens."""
    lines = [json.loads(line) for line in (out / "tokens.jsonl").read_text().splitlines()]
    return {one["sequence_id"]: (one["group_id"], one["prompt"], one["reward"], one["tokens"]) for one in lines}


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_response_is_the_same_whichever_process_samples_it_and_the_first_one_traces_its_own(
    engine: str, crew: Crew, tmp_path: Path
) -> None:
    crew.does(file_of(small(tmp_path / "one", **TRACED)), 1)
    everything = traced(tmp_path / "one")
    assert len(everything) == 16
    for processes in (2, 3):
        out = tmp_path / str(processes)
        crew.does(file_of(small(out, **TRACED, engine=engine)), processes)
        assert about(out)["processes"] == processes
        own = traced(out)
        assert 0 < len(own) < len(everything)
        assert own == {number: everything[number] for number in own}


def test_a_function_sees_whole_groups_and_is_not_called_without_responses(crew: Crew, tmp_path: Path) -> None:
    done = crew.does(file_of(small(tmp_path / "run", rollout__prompts=2)), 3, "asked")
    found = [json.loads(text.rpartition("asked: ")[2]) for text in done.said]
    assert [one["processes"] for one in found] == [3, 3, 3]
    assert [one["calls"] for one in found] == [[[4]] * 3, [[4]] * 3, []], "two prompts of four responses, three times"


def test_a_process_that_does_not_see_the_folder_is_an_error(crew: Crew, tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", tracking__checkpoint_every=1))
    crew.does(file, 2, "halfway")
    done = crew.tries(file, 2, "blind")
    assert done.codes == [1, 1]
    for text in done.said:
        assert "ConfigError: rank 1 does not see " in text
        assert "Set a tracking.out that all processes see." in text
