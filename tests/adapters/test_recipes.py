"""Launch files of published recipes: their own losses are the presets, and the hosts' classes take every value."""

import importlib
import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from rlstab import load_objective
from rlstab.cli import main
from rlstab.config import objective_hash
from rlstab.hosts import HOSTS
from rlstab.models import SHIPPED
from rlstab.presets import PRESETS
from tests.adapters.jobs import ROOT, launched, shell

FOLDER = ROOT / "examples" / "recipes"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/objective.yaml"))
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")


def overrides(name: str, folder: Path) -> dict[str, str]:
    """What a ``verl.sh`` gives verl."""
    words = launched(f"bash {FOLDER / name / 'verl.sh'} trainer.nnodes=1", folder)
    assert words[-1] == "trainer.nnodes=1"
    return dict(word.split("=", 1) for word in words)


def test_the_recipes_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for line in page.partition("```sh\n")[2].partition("```")[0].splitlines():
        assert all(Path(word).exists() for word in line.split() if word.startswith("examples/")), line
        if line.startswith("rlstab "):
            assert main(line.split()[1:]) == 0
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == NAMES
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_both_hosts_are_given_the_preset_and_the_same_run(name: str, tmp_path: Path) -> None:
    objective = load_objective(FOLDER / name / "objective.yaml")
    assert objective_hash(objective) == objective_hash(PRESETS[name].objective)
    for host in ("trl", "verl"):
        HOSTS[host].require(objective)
    trl, verl = yaml.safe_load((FOLDER / name / "trl.yaml").read_text()), overrides(name, tmp_path)
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
    assert verl["actor_rollout_ref.model.path"].endswith(trl["model"])


@needs_trl
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_trl_takes_a_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOConfig, TrlParser

    from rlstab.adapters.setting_conflicts import check_trl_settings

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(FOLDER))
    recipe_of = importlib.import_module("train_trl").Recipe
    file = FOLDER / name / "trl.yaml"
    given = yaml.safe_load(file.read_text())
    arguments = ["--config", str(file), "--use_cpu", "true"]
    recipe, config = TrlParser((recipe_of, GRPOConfig)).parse_args_and_config(arguments)
    given.pop("report_to")  # TRL makes a list of it
    for key, value in given.items():
        assert getattr(recipe if hasattr(recipe, key) else config, key) == value, key
    assert recipe.prompt_suffix.endswith("\\boxed{}.")
    check_trl_settings(config, load_objective(recipe.objective))


@needs_trl
def test_a_recipe_trains_a_tiny_model(tmp_path: Path) -> None:
    """The script as it is, with another model, other data, shorter responses and no GPU."""
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install -e '.[tasks]'")
    model = shutil.copytree(SHIPPED["chain-tiny"], tmp_path / "model")
    plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(plain)
    rows = [{"prompt": f"Q{number}+2=", "solution": str(number + 2)} for number in range(8)]
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
    script, config = FOLDER / "train_trl.py", FOLDER / "stapo" / "trl.yaml"
    said = shell(f"cd {ROOT}; python {script} --config {config} {shlex.join(words)}", tmp_path)
    assert "rlstab/s2t/dropped" in said
    assert "rewards/accuracy_reward/mean" in said
    assert (tmp_path / "out" / "model.safetensors").exists()


@needs_verl
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_verl_takes_a_recipe(name: str, tmp_path: Path) -> None:
    from rlstab.adapters.host_objective import settings_of_verl
    from rlstab.adapters.setting_conflicts import check_verl_settings
    from tests.adapters.verl_jobs import composed

    dataclass_of = importlib.import_module("verl.utils.config").omega_conf_to_dataclass
    given = overrides(name, tmp_path)
    config = composed([f"{key}={value}" for key, value in given.items()])
    ref = config.actor_rollout_ref
    actor, rollout, algorithm = (dataclass_of(part) for part in (ref.actor, ref.rollout, config.algorithm))
    assert actor.ppo_mini_batch_size == int(given["actor_rollout_ref.actor.ppo_mini_batch_size"])
    assert ref.model.use_remove_padding  # which tests/adapters/test_verl.py runs
    assert rollout.n in (8, 16)
    assert algorithm.adv_estimator == "grpo"
    assert algorithm.filter_groups.enable == (name in ("stare", "20_entropy"))
    host, _, path = actor.policy_loss.loss_mode.partition(":")
    assert host == "rlstab"
    check_verl_settings(settings_of_verl(ref), load_objective(path))
    if name == "20_entropy":
        assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 4096
