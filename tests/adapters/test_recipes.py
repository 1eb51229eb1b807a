"""Launch files of published recipes: their own losses are the presets, and the hosts' classes take every value."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlstab
from rlstab import load_objective
from rlstab.cli import main
from rlstab.config import objective_hash
from rlstab.hosts import HOSTS
from rlstab.models import SHIPPED
from rlstab.presets import PRESETS

ROOT = Path(rlstab.__file__).parents[1]
FOLDER = ROOT / "examples" / "recipes"
NAMES = sorted(one.parent.name for one in FOLDER.glob("*/objective.yaml"))
#: A comment that says where a value comes from.
SOURCE = re.compile(
    r"(script|paper|arXiv \d{4}\.\d{5}[^:]*|[\w.-]+/[\w.-]+ script[^:]*): \S"
    r"|own choice|ours|above|arXiv \d{4}\.\d{5} eq|GRPO's"
)
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")


def read(name: str, file: str) -> str:
    return (FOLDER / name / file).read_text(encoding="utf-8")


def overrides(name: str) -> dict[str, str]:
    """The settings of a ``verl.sh``, its variables filled in as the shell would."""
    text = read(name, "verl.sh")
    values = {"PWD": str(ROOT), "HOME": "/home/somebody"}
    for key, value in re.findall(r"^(\w+)=\$\{\1:-([^}]*)\}", text, flags=re.MULTILINE):
        values[key] = re.sub(r"\$(\w+)", lambda found: values[found[1]], value)
    block = text.partition("settings=(\n")[2].partition("\n)")[0]
    pairs = re.findall(r"^  ([+\w.]+)=(\S+)", block, flags=re.MULTILINE)
    return {key: re.sub(r"\$(\w+)", lambda found: values[found[1]], value.strip('"')) for key, value in pairs}


def test_the_recipes_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for line in page.partition("```sh\n")[2].partition("```")[0].splitlines():
        assert all(Path(one).exists() for one in line.split() if one.startswith("examples/")), line
        if line.startswith("rlstab "):
            assert main(line.split()[1:]) == 0
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == NAMES
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_the_objective_is_the_preset(name: str) -> None:
    objective = load_objective(FOLDER / name / "objective.yaml")
    assert objective_hash(objective) == objective_hash(PRESETS[name].objective)
    for host in ("trl", "verl"):
        if host in HOSTS:
            HOSTS[host].require(objective)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_its_source(name: str) -> None:
    lines = [line for line in read(name, "objective.yaml").splitlines() if re.match(r"    \w+:|  - name: token", line)]
    lines += [line for line in read(name, "trl.yaml").splitlines() if re.match(r"\w", line)]
    lines += [line for line in read(name, "verl.sh").splitlines() if re.match(r"  [+\w]|[A-Z_]+=", line)]
    assert len(lines) > 70
    for line in lines:
        _, there, source = line.rpartition("  # ") if "  # " in line else line.rpartition(" # ")
        assert there, line
        assert SOURCE.match(source), line


@pytest.mark.parametrize("name", NAMES)
def test_both_hosts_are_given_the_same_run(name: str) -> None:
    trl, verl = yaml.safe_load(read(name, "trl.yaml")), overrides(name)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    responses = int(verl[f"{rollout}.n"])
    processes = 8
    assert trl["num_generations"] == responses
    assert trl["generation_batch_size"] == int(verl["data.train_batch_size"]) * responses
    step = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"] * processes
    assert step == int(verl[f"{actor}.ppo_mini_batch_size"]) * responses
    for key, other in {
        "max_completion_length": "data.max_response_length",
        "learning_rate": f"{actor}.optim.lr",
        "weight_decay": f"{actor}.optim.weight_decay",
        "max_grad_norm": f"{actor}.grad_clip",
        "temperature": f"{rollout}.temperature",
        "top_p": f"{rollout}.top_p",
    }.items():
        assert float(trl[key]) == float(verl[other]), key
    rollouts = trl["generation_batch_size"] // step
    assert trl["warmup_steps"] == rollouts * int(verl.get(f"{actor}.optim.lr_warmup_steps", 0))
    if "max_steps" in trl:
        assert trl["max_steps"] == rollouts * int(verl["trainer.total_training_steps"])
    assert trl["model"] in read(name, "verl.sh")


# -- TRL ---------------------------------------------------------------------------------------------------------------


@needs_trl
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_trl_takes_a_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOConfig, TrlParser

    from rlstab.adapters.trl.settings import check_settings

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(FOLDER))
    recipe_of = importlib.import_module("train_trl").Recipe
    given = yaml.safe_load(read(name, "trl.yaml"))
    parser = TrlParser((recipe_of, GRPOConfig))
    recipe, config = parser.parse_args_and_config(["--config", str(FOLDER / name / "trl.yaml"), "--use_cpu", "true"])
    given.pop("report_to")  # TRL makes a list of it
    for key, value in given.items():
        assert getattr(recipe if hasattr(recipe, key) else config, key) == value, key
    assert recipe.prompt_suffix.endswith("\\boxed{}.")
    check_settings(config, load_objective(recipe.objective))


@needs_trl
def test_a_recipe_trains_a_tiny_model(tmp_path: Path) -> None:
    """The script as it is, with another model, other data, shorter responses and no GPU."""
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install -e '.[tasks]'")
    model = shutil.copytree(SHIPPED["chain-tiny"], tmp_path / "model")
    plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(plain)
    rows = [{"prompt": f"Q{one}+2=", "solution": str(one + 2)} for one in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = {
        "model": model,
        "dataset": tmp_path / "rows.jsonl",
        "prompt_suffix": "",
        "use_vllm": "false",
        "vllm_importance_sampling_correction": "true",
        "use_cpu": "true",
        "bf16": "false",
        "max_completion_length": 16,
        "generation_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "max_steps": 2,
        "output_dir": tmp_path / "out",
    }
    words = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, str(FOLDER / "train_trl.py"), "--config", str(FOLDER / "stapo" / "trl.yaml"), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "rlstab/s2t/dropped" in ran.stdout
    assert "rewards/accuracy_reward/mean" in ran.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


# -- verl --------------------------------------------------------------------------------------------------------------


@needs_verl
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_verl_takes_a_recipe(name: str) -> None:
    hydra, package = importlib.import_module("hydra"), importlib.import_module("verl")
    dataclass_of = importlib.import_module("verl.utils.config").omega_conf_to_dataclass
    given = [f"{key}={value}" for key, value in overrides(name).items()]
    with hydra.initialize_config_dir(str(Path(str(package.__file__)).parent / "trainer" / "config"), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=given)
    ref = config.actor_rollout_ref
    actor, rollout = dataclass_of(ref.actor), dataclass_of(ref.rollout)
    algorithm = dataclass_of(config.algorithm)
    assert actor.ppo_mini_batch_size == int(overrides(name)["actor_rollout_ref.actor.ppo_mini_batch_size"])
    assert rollout.n in (8, 16)
    assert algorithm.adv_estimator == "grpo"
    assert algorithm.filter_groups.enable == (name in ("stare", "20_entropy"))
    host, _, path = actor.policy_loss.loss_mode.partition(":")
    assert host == "rlstab"
    objective = load_objective(path)
    if importlib.util.find_spec("rlstab.adapters.verl") is not None:
        settings = importlib.import_module("rlstab.adapters.verl.settings")
        settings.check_settings(ref, objective)
    if name == "20_entropy":
        assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 4096


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_gives_verl_what_is_written(name: str, tmp_path: Path) -> None:
    """The script runs up to Python, which is another one here that prints its arguments."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done\n')
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/somebody"}
    ran = subprocess.run(
        ["bash", str(FOLDER / name / "verl.sh"), "trainer.nnodes=1"],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    words = ran.stdout.splitlines()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    assert words[2:-1] == [f"{key}={value}" for key, value in overrides(name).items()]
    assert words[-1] == "trainer.nnodes=1"
