"""The examples say what they mean: nothing in them is idle, and the demo can be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstab.bench.describe import is_bench
from rlstab.config import load_run
from rlstab.core.objective import no_fit_warnings
from rlstab.explain.notes import notes
from rlstab.explain.tables import read

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_check_has_nothing_to_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    files = [path for path in EXAMPLES.glob("*.yaml") if not is_bench(str(path))]
    assert {"countdown", "chain", "objective", "stack"} <= {path.stem for path in files}
    with no_fit_warnings():
        assert [told for path in files if (told := notes(*read(str(path), {})))] == []


def test_the_demo_moves_the_ratio_and_is_traced() -> None:
    run = load_run(str(EXAMPLES / "countdown.yaml"))
    assert run.optimisation.optimizer_steps_per_rollout > 1
    assert run.tracking.trace_every
    # the viewer reads the whole file: well below a megabyte, at about 80 bytes per token
    traced = 1 + run.optimisation.rollouts // run.tracking.trace_every
    tokens = traced * run.tracking.trace_responses * run.rollout.max_new_tokens * run.optimisation.epochs
    assert 80 * tokens < 1_000_000
