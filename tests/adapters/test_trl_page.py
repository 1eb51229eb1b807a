"""The page on TRL and its example run as they are printed; a run that is watched is not changed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from transformers import TrainerCallback
from trl import GRPOTrainer

from rlstab.adapters.trl import WatchCallback
from rlstab.errors import ConfigError, MissingSignal
from tests.adapters.jobs import ROOT, farthest, largest, same_weights
from tests.adapters.trl_jobs import ON_CPU, recorder, run, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

PAGE = (ROOT / "docs" / "hosts" / "trl.md").read_text(encoding="utf-8")
#: Its blocks, by language.
BLOCKS = {name: re.findall(rf"```{name}\n(.*?)```", PAGE, flags=re.DOTALL) for name in ("yaml", "sh", "python")}
CLIP = {"name": "clip_higher"}
SHARD = "from tests.adapters.cpu_fsdp import shard_on_cpus; shard_on_cpus()"


def test_the_lines_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objective.yaml").write_text(BLOCKS["yaml"][0])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS["python"]:
        exec(compile(block, "docs/hosts/trl.md", "exec", dont_inherit=True), namespace)
    assert list(namespace["trainer"].objective.keyed) == ["clip_higher", "s2t", "stare"]
    assert (tmp_path / "runs" / "trl" / "checkpoint-2" / "rlstab.json").exists()
    seen = {key for line in namespace["watched"].state.log_history for key in line}
    assert "rlstab/observe_s2t/would_drop" in seen


def test_the_lines_of_the_first_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "start" / "trl.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "objective.yaml").write_text(yaml)
    theirs: dict[str, Any] = {"__name__": "__main__"}  # what the reader's script has already
    exec(BLOCKS["python"][0].partition("trainer =")[0], theirs)
    config = theirs["GRPOConfig"](
        "runs/trl", per_device_train_batch_size=8, num_generations=4, max_steps=1, max_completion_length=8, bf16=False,
        use_cpu=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    theirs |= {"reward": theirs["shorter"], "args": config}
    theirs["dataset"] = theirs["Dataset"].from_dict({"prompt": ["Q1+2=", "Q3+4="] * 4})
    first, watching = re.findall(r"```python.*?\n(.*?)```", page, flags=re.DOTALL)
    exec(first, theirs)
    assert set(theirs["trainer"].objective.keyed) == {"clip_higher", "token_mean", "s2t"}
    theirs["trainer"] = GRPOTrainer(
        model=theirs["model"], reward_funcs=theirs["reward"], args=config, train_dataset=theirs["dataset"],
        processing_class=theirs["AutoTokenizer"].from_pretrained(theirs["model"], padding_side="left"),
    )  # fmt: skip
    exec(watching, theirs)


def shell(line: str, folder: Path, path: str = "") -> str:
    """What a line of a shell prints, with this Python and the commands beside it, without a GPU."""
    own = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": f"{path}:{ROOT}"}
    env = {**ON_CPU, **own, "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, env=env, cwd=folder, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def test_the_launch_lines_of_the_page_run(tmp_path: Path) -> None:
    """As printed, on two processes each; for FSDP2 accelerate is told that it may shard on a CPU."""
    script, lines = BLOCKS["python"][0], BLOCKS["sh"][1].splitlines()
    (tmp_path / "objective.yaml").write_text(BLOCKS["yaml"][0])
    told = "launched {trainer.accelerator.num_processes} {trainer.accelerator.distributed_type.value}\\n"
    (tmp_path / "train.py").write_text(f"{script}\nprint(f'{told}', end='')\n")
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ:\n    " + SHARD)
    assert [line.partition(" --")[0] for line in lines] == ["accelerate launch"] * 2
    for line, engine in zip(lines, ("MULTI_CPU", "FSDP"), strict=True):
        said = shell(line, tmp_path, str(tmp_path))
        assert said.count(f"launched 2 {engine}") == 2
        checkpoint = tmp_path / "runs" / "trl" / "checkpoint-2"
        assert (checkpoint / "rlstab.json").exists()
        shutil.rmtree(checkpoint)


def test_the_example_trains(tmp_path: Path) -> None:
    said = shell(f"python {ROOT / 'examples' / 'trl_chain.py'} --steps 5 --out {tmp_path}", tmp_path)
    line = next(line for line in said.splitlines() if "rlstab/tokens/kept" in line)
    reward = re.search(r"'reward': '([0-9.]+)'", line)
    assert reward is not None
    assert 0.05 < float(reward[1]) < 0.8  # the model that ships solves some and not all


# -- watching ----------------------------------------------------------------------------------------------------------

STACK = [CLIP, {"name": "s2t"}, {"name": "random_mask", "share": 0.3}, {"name": "stare", "target_entropy": 0.8}]


WATCHED = [
    *("observe_s2t/would_drop", "observe_random_mask/would_drop", "observe_clip_higher/clip/gate"),
    *("observe_stare/gate", "observe_lp_reg/would_penalise"),
]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_watched_run_is_not_changed(accumulation: int, tmp_path: Path) -> None:
    """Gradients, weights and everything that TRL logs, with dropout and generation by the model."""
    cut = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    runs = []
    for watched in (False, True):
        trainer = trainer_of(tmp_path, extra={"rollout_func": None}, **cut)
        for module in trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        steps = recorder(trainer)
        if watched:
            trainer.add_callback(WatchCallback(trainer, [*STACK, {"name": "lp_reg", "share": 0.4}]))
        trainer.train()
        assert trainer.model.training
        runs.append((steps, trainer.state.log_history))
    (plain, log), (seen, told) = runs
    for pair in zip(plain, seen, strict=True):
        assert same_weights(*pair)
        assert farthest(*pair) == 0.0
    for before, after in zip(log[:4], told[:4], strict=True):
        assert {**before, "step_time": 0} == {**{key: after[key] for key in before}, "step_time": 0}
        assert after.keys() >= {f"rlstab/{name}" for name in WATCHED}
    assert all(sum(line[f"rlstab/{name}"] for line in told[:4]) > 0 for name in WATCHED)
    assert any(largest(step) > 0 for step in plain)


def test_what_is_watched_is_what_observe_reports(tmp_path: Path) -> None:
    """The callback on TRL's clip, and `observe` beside the adapter's: one run, the same numbers."""
    from rlstab import compose, load_objective, observe

    watched = [{"name": "s2t"}, {"name": "stare", "target_entropy": 0.8}]
    trainer = trainer_of(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.add_callback(WatchCallback(trainer, watched))
    trainer.train()
    objective = load_objective([{"name": "clip_higher", "low": 0.2, "high": 0.2}])
    members = [observe(method) for method in load_objective(watched).members]
    other = run(tmp_path, compose(objective, *members), per_device_train_batch_size=4, gradient_accumulation_steps=2)
    for line, wanted in zip(trainer.state.log_history[:4], other["log"][:4], strict=True):
        names = [key for key in line if key.startswith("rlstab/observe_")]
        assert len(names) >= 4
        for name in names:
            assert line[name] == pytest.approx(wanted[name], rel=1e-5), name


def test_what_there_is_nothing_to_count_of_is_left_out(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    assert WatchCallback(trainer, [{"preset": "dapo"}]).left_out == ["token_mean"]
    with pytest.raises(ConfigError, match="token_mean: of these there is nothing to count"):
        WatchCallback(trainer, [{"name": "token_mean"}])
    with pytest.raises(MissingSignal, match="'observe_kl' reads 'ref_logprobs'"):
        WatchCallback(trainer, [CLIP, {"name": "kl"}])


def test_watching_leaves_a_module_that_is_in_eval_there(tmp_path: Path) -> None:
    watched, seen = trainer_of(tmp_path, max_steps=1), []
    layer = watched.model.model.layers[0]

    class Freeze(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            layer.eval()

    class See(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen.append((watched.model.training, layer.training))

    for callback in (Freeze(), WatchCallback(watched, [CLIP]), See()):
        watched.add_callback(callback)
    watched.train()
    assert seen == [(True, False)]
