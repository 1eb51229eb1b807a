import json
from pathlib import Path
from typing import Any

import pytest

from rlstab.report.activity import between_runs, jaccard, overlaps_of, within_runs
from rlstab.report.load import load_runs
from tests.report.conftest import CLIP, S2T, STARE, write_bench


def trace(rollout: int, sequence: int, methods: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """One response of six tokens."""
    usual = {"format": 1, "optimizer_step": rollout, "tokens": list("abcdef"), "ids": list(range(6)), "prompt": "p"}
    return {**usual, "rollout": rollout, "sequence_id": sequence, "methods": methods, **fields}


def write_traces(folder: Path, traces: list[dict[str, Any]]) -> None:
    (folder / "tokens.jsonl").write_text("".join(json.dumps(one) + "\n" for one in traces))


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    methods = {
        "grpo": {"objective": [CLIP, S2T, STARE]},
        "s2t": {"objective": [CLIP, S2T]},
        "none": {"objective": [CLIP]},
    }
    return write_bench(tmp_path / "b", methods=methods, seeds=1, baseline="none")


def test_jaccard() -> None:
    assert jaccard({(1,), (2,), (3,)}, {(2,), (3,), (4,)}) == pytest.approx(0.5)
    assert jaccard({(1,)}, {(1,)}) == 1.0
    assert jaccard({(1,)}, {(2,)}) == 0.0
    assert jaccard(set(), set()) is None


def test_methods_of_one_composition(traced: Path) -> None:
    methods = {"s2t": {"dropped": [0, 1]}, "stare": {"boosted": [1], "damped": [3], "weight": [[1, 1.1], [3, 0.9]]}}
    traces = [
        trace(1, 0, methods),
        trace(5, 0, {**methods, "clip_higher": {}}),
        trace(5, 1, {"stare": {"boosted": [2]}}),
    ]
    write_traces(traced / "runs/default/grpo/seed-0", traces)
    [found], notes = overlaps_of(load_runs(traced).runs)
    assert notes == []
    assert found.names == ["s2t", "stare"]  # clip_higher touched nothing
    assert found.touched == [4, 5]
    # token 1 in two rollouts is shared; seven tokens were touched
    assert found.matrix == [[1.0, pytest.approx(2 / 7)], [pytest.approx(2 / 7), 1.0]]
    assert found.compared == "all traced tokens of grpo: 1 run, 2 rollouts; clip_higher touched none of these tokens"


def test_between_methods_only_what_was_sampled_alike_counts(traced: Path) -> None:
    one = [
        trace(1, 0, {"s2t": {"dropped": [0, 1]}}),
        trace(1, 1, {"s2t": {"dropped": [4]}}),  # sampled otherwise below
        trace(2, 0, {"s2t": {"dropped": [5]}}),  # not the first rollout
    ]
    other = [
        trace(1, 0, {"s2t": {"dropped": [1, 2]}}),
        trace(1, 1, {"s2t": {"dropped": [4]}}, ids=[9, 1, 2, 3, 4, 5]),
        trace(2, 0, {"s2t": {"dropped": [5]}}),
    ]
    write_traces(traced / "runs/default/grpo/seed-0", one)
    write_traces(traced / "runs/default/s2t/seed-0", other)
    found, _ = overlaps_of(load_runs(traced).runs)
    [between] = [one for one in found if one.compared.startswith("between")]
    assert between.names == ["grpo: s2t", "s2t"]
    assert between.touched == [2, 2]
    assert between.matrix[0][1] == pytest.approx(1 / 3)
    assert "1 response of the first rollout" in between.compared


def test_without_traces_there_is_no_overlap(bench: Path) -> None:
    assert overlaps_of(load_runs(bench).runs) == ([], [])
    assert within_runs([]) == {}
    assert between_runs([]) == ({}, 0)


def test_damaged_traces_are_noted(traced: Path) -> None:
    (traced / "runs/default/grpo/seed-0/tokens.jsonl").write_text("{\n")
    found, notes = overlaps_of(load_runs(traced).runs)
    assert found == []
    assert "b default grpo seed 0" in notes[0].replace("entropy", "b")
    assert "cannot be read" in notes[0]


def test_who_touched_nothing_is_named_once(traced: Path) -> None:
    mine = {"s2t": {"dropped": [0]}, "stare": {"boosted": [1]}, "clip_higher": {}}
    write_traces(traced / "runs/default/grpo/seed-0", [trace(1, 0, mine)])
    write_traces(traced / "runs/default/s2t/seed-0", [trace(1, 0, {"s2t": {}, "clip_higher": {}})])
    found, _ = overlaps_of(load_runs(traced).runs)
    [between] = [one for one in found if one.compared.startswith("between")]
    # clip_higher nowhere; s2t acted in the other objective
    assert between.compared.endswith("clip_higher, s2t touched none of these tokens")
