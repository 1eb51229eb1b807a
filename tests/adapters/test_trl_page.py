"""The page on TRL and its example run as they are printed; a run that is watched is not changed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from transformers import TrainerCallback
from trl import GRPOTrainer

from rlstab.adapters.trl import WatchCallback
from rlstab.errors import ConfigError, MissingSignal
from tests.adapters.trl_jobs import QUIET, ROOT, recorder, run, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

PAGE = (ROOT / "docs" / "hosts" / "trl.md").read_text(encoding="utf-8")
CLIP = {"name": "clip_higher"}


def test_the_lines_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "objective.yaml").write_text(yaml)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
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
    exec(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0].partition("trainer =")[0], theirs)
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


def test_the_example_trains(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "trl_chain.py"), "--steps", "5", "--out", str(tmp_path)]
    env = {**QUIET, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    line = next(one for one in ran.stdout.splitlines() if "rlstab/tokens/kept" in one)
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
    found = []
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
        found.append((steps, trainer.state.log_history))
    (plain, log), (seen, told) = found
    for one, two in zip(plain, seen, strict=True):
        for name, values in one["weights"].items():
            assert torch.equal(values, two["weights"][name])
            assert torch.equal(one["gradients"][name], two["gradients"][name])
    for one, two in zip(log[:4], told[:4], strict=True):
        assert {**one, "step_time": 0} == {**{key: two[key] for key in one}, "step_time": 0}
        assert two.keys() >= {f"rlstab/{name}" for name in WATCHED}
    assert all(sum(two[f"rlstab/{name}"] for two in told[:4]) > 0 for name in WATCHED)
    assert any(float(values.abs().max()) > 0 for one in plain for values in one["gradients"].values())


def test_what_is_watched_is_what_observe_reports(tmp_path: Path) -> None:
    """The callback on TRL's clip, and `observe` beside the adapter's: one run, the same numbers."""
    from rlstab import load_objective, observe

    watched = [{"name": "s2t"}, {"name": "stare", "target_entropy": 0.8}]
    trainer = trainer_of(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.add_callback(WatchCallback(trainer, watched))
    trainer.train()
    objective = load_objective([{"name": "clip_higher", "low": 0.2, "high": 0.2}])
    members = [observe(one) for one in load_objective(watched).members]
    from rlstab import compose

    other = run(tmp_path, compose(objective, *members), per_device_train_batch_size=4, gradient_accumulation_steps=2)
    for one, two in zip(trainer.state.log_history[:4], other["log"][:4], strict=True):
        names = [key for key in one if key.startswith("rlstab/observe_")]
        assert len(names) >= 4
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=1e-5), name


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
