"""Dumps of verl's worker with an objective: its loss again, in one process and over two."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: nox -s verl", allow_module_level=True)

from rlstab.look.host_loss import judge
from rlstab.record import read_dump
from tests.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")
OBJECTIVE = [
    {"name": "clip_higher", "low": 0.1, "high": 0.1},
    {"name": "s2t"},
    {"name": "stare", "target_entropy": 0.8},
]


def test_what_verl_trained_by_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTAB_DUMP", str(tmp_path / "dump"))
    given = {"run": {"objective": OBJECTIVE, "actor.ppo_micro_batch_size_per_gpu": 4, "rollout.top_p": 0.9}}
    results = jobs.over_ranks("tests.adapters.verl_jobs", tmp_path, given)["run"]
    assert [result["ranks"] for result in results] == [2, 2]
    dump = read_dump(tmp_path / "dump")
    assert dump.notes == []
    assert [step.number for step in dump.steps] == [1, 2]
    assert {step.ranks.count(rank) for step in dump.steps for rank in (0, 1)} == {2}
    verdict = judge(dump.steps)
    assert (verdict.name, verdict.agrees, verdict.findings) == ("rlstab", True, ())
    assert verdict.error < 5e-6
    assert all(len(prompt) for step in dump.steps for prompt in step.prompts)
    for step in dump.steps:  # each update makes one step, with the weights that sampled its rows
        header, columns = step.header, step.tensors
        assert (header.temperature, header.top_p, header.top_k) == (1.0, 0.9, 0)
        assert header.logprobs_mode == "processed_logprobs"
        assert columns["versions"].unique().tolist() == [step.number - 1]
        # what verl had, and the objective does not read
        assert {"rollout_logprobs", "ref_logprobs", "truncated"} <= columns.keys()
