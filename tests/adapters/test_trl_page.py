"""The page on TRL and its example run as they are printed."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from tests.adapters.jobs import CHAIN, ROOT, shell
from tests.adapters.trl_jobs import ON_CPU, config, prompts, reward, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

PAGE = (ROOT / "docs" / "hosts" / "trl.md").read_text(encoding="utf-8")
#: Its blocks, by language.
BLOCKS = {name: re.findall(rf"```{name}\n(.*?)```", PAGE, flags=re.DOTALL) for name in ("yaml", "sh", "python")}
SHARD = "from tests.adapters.cpu_fsdp import shard_on_cpus; shard_on_cpus()"


def test_the_lines_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objective.yaml").write_text(BLOCKS["yaml"][0])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS["python"]:
        exec(compile(block, "docs/hosts/trl.md", "exec", dont_inherit=True), namespace)
    assert list(namespace["trainer"].objective.keyed) == ["clip_higher", "s2t", "stare"]
    assert (tmp_path / "runs" / "trl" / "checkpoint-2" / "rlstab.json").exists()
    assert (tmp_path / "dump" / "step-000001.rank-0.json").exists()


def test_the_lines_of_the_first_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "start" / "trl.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "objective.yaml").write_text(yaml)
    # what the reader's script has already
    theirs: dict[str, Any] = {"model": str(CHAIN), "reward": reward, "dataset": prompts()}
    theirs["args"] = config(tmp_path, max_steps=1)
    first, watching = re.findall(r"```python.*?\n(.*?)```", page, flags=re.DOTALL)
    exec(first, theirs)
    assert set(theirs["trainer"].objective.keyed) == {"clip_higher", "token_mean", "s2t"}
    theirs["trainer"] = trainer_of(tmp_path)  # TRL's own
    exec(watching, theirs)


def test_the_launch_lines_of_the_page_run(tmp_path: Path) -> None:
    """As printed, on two processes each; for FSDP2 accelerate is told that it may shard on a CPU."""
    script, lines = BLOCKS["python"][0], BLOCKS["sh"][1].splitlines()
    (tmp_path / "objective.yaml").write_text(BLOCKS["yaml"][0])
    told = "launched {trainer.accelerator.num_processes} {trainer.accelerator.distributed_type.value}\\n"
    (tmp_path / "train.py").write_text(f"{script}\nprint(f'{told}', end='')\n")
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ:\n    " + SHARD)
    assert [line.partition(" --")[0] for line in lines] == ["accelerate launch"] * 2
    for line, engine in zip(lines, ("MULTI_CPU", "FSDP"), strict=True):
        said = shell(line, tmp_path, **ON_CPU, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert said.count(f"launched 2 {engine}") == 2
        checkpoint = tmp_path / "runs" / "trl" / "checkpoint-2"
        assert (checkpoint / "rlstab.json").exists()
        shutil.rmtree(checkpoint)


def test_the_example_trains(tmp_path: Path) -> None:
    said = shell(f"python {ROOT / 'examples' / 'trl_chain.py'} --steps 5 --out {tmp_path}", tmp_path, **ON_CPU)
    line = next(line for line in said.splitlines() if "rlstab/tokens/kept" in line)
    reward = re.search(r"'reward': '([0-9.]+)'", line)
    assert reward is not None
    assert 0.05 < float(reward[1]) < 0.8  # the model that ships solves some and not all
