"""A scorer that hangs costs its sample the reward, and the run says so."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlstab.errors import OutOfRange
from rlstab.tasks import Countdown
from rlstab.tasks.scoring import Workers
from rlstab.train import loop
from tests.tasks.acts import Picky
from tests.train.runs import go, small, without_times


class Hangs(Countdown):
    """Countdown with a scorer that hangs on some completions."""

    workers: Any

    def __init__(self, count: int) -> None:
        super().__init__()
        self.workers = Workers(Picky(), count, 0.3)


def hangs_on(text: str) -> bool:
    return zlib.crc32(text.encode()) % 3 == 0


def test_completions_that_take_too_long_are_counted_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (1, 3):
        monkeypatch.setattr(loop, "build_task", lambda settings, count=count: Hangs(count))
        screen = io.StringIO()
        run = small(
            tmp_path / str(count), optimisation__rollouts=2, evaluation={"every": 2, "prompts": 2, "pass_at": [2]}
        )
        records = loop.train(run, console=Console(file=screen, width=200)).records
        found.append(without_times(tmp_path / str(count)))
        lines = [json.loads(one) for one in (tmp_path / str(count) / "samples.jsonl").read_text().splitlines()]
        late = [one for one in lines if hangs_on(one["text"])]
        assert late
        assert all(one["timed_out"] is True and one["reward"] == 0 for one in late)
        assert all("timed_out" not in one and one["reward"] == 0.5 for one in lines if one not in late)
        assert sum(one.get("scorer/timeouts", 0) for one in records) == len(late)
        assert all(one["scorer/errors"] == 0 for one in records if "scorer/errors" in one)
        assert sum(one.get("eval/scorer_timeouts", 0) for one in records) > 0
        first = next(one for one in late if one["rollout"] == late[0]["rollout"])
        times = sum(one["rollout"] == first["rollout"] for one in late)
        assert f"scorer timed out, reward 0: {times} times, first on {first['text']!r}" in screen.getvalue()
    assert found[0] == found[1]  # the number of workers changes nothing


def test_a_run_on_a_data_set_that_executes_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    run = small(tmp_path / "out", task={"name": "reasoning_gym", "dataset": "n_queens"})
    with pytest.raises(OutOfRange, match="executes completions as Python"):
        go(run)


def test_a_continued_run_may_change_how_it_scores(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{one}>", "answer": str(one)}) + "\n" for one in range(1, 9))
    (tmp_path / "rows.jsonl").write_text(rows)
    task = {"name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "eval_size": 2, "answer_pattern": "=(.+)"}
    go(small(tmp_path / "out", task=task, optimisation__rollouts=1))
    again = small(tmp_path / "out", task={**task, "workers": 1, "time_limit": 9.0}, optimisation__rollouts=2)
    assert len(go(again, resume=True).records) == 2
