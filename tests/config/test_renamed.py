"""A name that changed is an error that says the new one, wherever the old one stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlstab.bench.file import load_bench
from rlstab.cli import main
from rlstab.config import load_objective, load_run
from rlstab.config.renamed import SETTINGS, new_record, new_settings, old_settings
from rlstab.config.runs import OptimisationSettings
from rlstab.core.settings import settings_of
from rlstab.errors import ConfigError
from rlstab.zoo import METHODS

OLD_FILES = {
    "a rollout count": (
        "objective: s2t\noptimisation:\n  steps: 5\n",
        "3: optimisation.steps: 'steps' is called 'rollouts' now. Rename it.",
    ),
    "a warm-up": (
        "objective: s2t\noptimisation: {warmup_steps: 5}\n",
        "2: optimisation.warmup_steps: 'warmup_steps' is called 'warmup_optimizer_steps' now. Rename it.",
    ),
    "both": (
        "objective: s2t\noptimisation:\n  steps: 5\n  warmup_steps: 5\n",
        "3: optimisation.steps: 'steps' is called 'rollouts' now. Rename it.\n"
        "run.yaml:4: optimisation.warmup_steps: 'warmup_steps' is called 'warmup_optimizer_steps' now. Rename it.",
    ),
    "a method": (
        "objective:\n  - name: stare\n    step: 0.01\n",
        "3: objective.0.step: 'step' is called 'increment' now. Rename it.",
    ),
    "a method inside another": (
        "objective:\n  name: within\n  outer: s2t\n  inner:\n    - {name: adaptive_entropy, step: 0.1}\n",
        "5: objective.inner.0.step: 'step' is called 'increment' now. Rename it.",
    ),
    "a method of a preset": (
        "objective:\n  - preset: stare\n    set: {stare: {step: 0.01}}\n",
        "3: objective.0.set.stare.step: 'step' is called 'increment' now. Rename it.",
    ),
    "a method that never had it": (
        "objective:\n  - {name: s2t, step: 0.01}\n",
        "2: objective.0.step: unknown key 'step'. Known: max_prob, name, population, quantile.",
    ),
}


@pytest.mark.parametrize(("text", "error"), OLD_FILES.values(), ids=OLD_FILES)
def test_an_old_name_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run("run.yaml")
    assert str(caught.value) == f"run.yaml:{error}"


def test_an_old_name_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("objective: s2t\n")
    assert main(["train", str(file), "--set", "optimisation.steps=3"]) == 2
    said = "--set optimisation.steps: 'steps' is called 'rollouts' now. Rename it."
    assert capsys.readouterr().err == f"ConfigError: {said}\n"


HEAD = "name: x\nbase: {optimisation: {lr: 1.0e-4}}\nmethods:\n  a: s2t\n"
OLD_BENCHES = {
    "base": (
        HEAD.replace("lr: 1.0e-4", "steps: 3"),
        "2: optimisation.steps: 'steps' is called 'rollouts' now. Rename it.",
    ),
    "settings": (
        f"{HEAD}settings:\n  long: {{optimisation.steps: 9}}\n",
        "6: optimisation.steps: 'steps' is called 'rollouts' now. Rename it.",
    ),
    "set": (
        f"{HEAD}  b: {{objective: s2t, set: {{optimisation.warmup_steps: 9}}}}\n",
        "5: optimisation.warmup_steps: 'warmup_steps' is called 'warmup_optimizer_steps' now. Rename it.",
    ),
    "methods": (f"{HEAD}  b: {{name: stare, step: 1.0}}\n", "5: objective.step: 'step' is called 'increment' now."),
}


@pytest.mark.parametrize(("text", "error"), OLD_BENCHES.values(), ids=OLD_BENCHES)
def test_an_old_name_in_a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bench.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_bench("bench.yaml")
    assert str(caught.value).startswith(f"bench.yaml:{error}")


def test_every_new_name_is_a_setting() -> None:
    for old, new in SETTINGS.items():
        owner, _, name = old.rpartition(".")
        known = (
            OptimisationSettings.model_fields.keys()
            if owner == "optimisation"
            else {one.name for one in settings_of(METHODS.get(owner))}
        )
        assert new in known
        assert name not in known


def test_a_resolved_run_of_before_loads_under_the_new_names() -> None:
    folder = Path(__file__).parents[1] / "report" / "written_before" / "runs" / "default" / "stare" / "seed-0"
    old = yaml.safe_load((folder / "config.yaml").read_text())
    assert dict(old_settings(old)) == {
        "objective.1.step": "increment",
        "optimisation.steps": "rollouts",
        "optimisation.warmup_steps": "warmup_optimizer_steps",
    }
    run = load_run(new_settings(old))
    assert (run.optimisation.rollouts, run.optimisation.warmup_optimizer_steps) == (4, 2)
    assert run.composition == load_objective(
        [{"name": "clip_higher"}, {"name": "stare", "increment": 0.01, "target_entropy": 0.5}]
    )
    assert not dict(old_settings(run.model_dump(mode="json")))


def test_the_metrics_of_a_record_of_before_are_read_under_the_new_names() -> None:
    old = {
        "step": 3,
        "reward/dead_groups": 0.5,
        "s2t/silenced": 0.1,
        "within_1/outer/silenced": 0.2,
        "reward/mean": 0.3,
    }
    assert new_record(old) == {
        "rollout": 3,
        "reward/zero_std_groups": 0.5,
        "s2t/dropped": 0.1,
        "within_1/outer/dropped": 0.2,
        "reward/mean": 0.3,
    }
