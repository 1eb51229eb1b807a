"""The examples say what they mean: nothing in them is idle, and the demo can be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstab.bench.describe import is_bench
from rlstab.cli import main
from rlstab.config import load_run
from rlstab.core.objective import no_fit_warnings
from rlstab.explain.notes import notes
from rlstab.explain.tables import read

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(path for path in EXAMPLES.glob("*.yaml") if not is_bench(str(path)))


def test_there_are_examples() -> None:
    assert {"countdown", "chain", "objective", "stack"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_check_has_nothing_to_object(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    with no_fit_warnings():
        assert notes(*read(str(path), {})) == []


def test_the_demo_moves_the_ratio_and_is_traced() -> None:
    run = load_run(str(EXAMPLES / "countdown.yaml"))
    assert run.optimisation.optimizer_steps_per_rollout > 1
    assert run.tracking.trace_every
    # the viewer reads the whole file: well below a megabyte, at about 80 bytes per token
    traced = 1 + run.optimisation.rollouts // run.tracking.trace_every
    tokens = traced * run.tracking.trace_responses * run.rollout.max_new_tokens * run.optimisation.epochs
    assert 80 * tokens < 1_000_000


def test_a_bench_is_not_taken_for_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(EXAMPLES / "bench_entropy.yaml")]) == 2
    assert "bench_entropy.yaml --dry-run` checks it" in capsys.readouterr().err
