"""The bench of two objectives in TRL, as its file says: started, recorded and compared."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")
pytest.importorskip("plotly", reason="the extra report is not installed")

from rlstab.cli import main
from rlstab.report.load import load_runs


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_objectives_in_trl_are_compared_over_three_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert main(["bench", "examples/bench_trl.yaml", "--out", str(tmp_path)]) == 0
    runs = load_runs(tmp_path).runs
    assert [(run.method, run.seed, run.status, run.rollouts) for run in runs] == [
        (method, seed, "finished", 30) for method in ("dapo", "grpo") for seed in range(3)
    ]
    assert all(run.spent.keys() == {"seconds", "tokens"} for run in runs)
    assert all({"reward/mean", "tokens/entropy", "gradient/norm"} <= run.metrics.keys() for run in runs)
    assert main(["report", str(tmp_path), "--by", "tokens"]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| reward/area | grpo | 3 |" in text
