"""The model card: written once beside the final weights, valid for the hub, nobody's file overwritten; and the push."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import yaml

from rlstab import S2TMask
from rlstab.cli import main
from rlstab.config import load_run
from rlstab.core.docstring import summary
from rlstab.errors import CheckpointError, ConfigError
from rlstab.train import card, checkpoint, push
from tests.train.runs import go, small, weights

OBJECTIVE = [{"preset": "recommended"}, {"name": "observe", "method": "lp_reg"}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("card") / "sums"
    changes = {"evaluation": {"every": 2, "prompts": 4, "samples": 2, "pass_at": [2]}, "tracking__checkpoint_every": 1}
    go(small(out, OBJECTIVE, optimisation__rollouts=2, **changes))
    return out


def newest(out: Path) -> Path:
    return checkpoint.checkpoints(out / "checkpoints")[-1]


def test_it_stands_beside_the_final_weights_alone(trained: Path) -> None:
    kept = checkpoint.checkpoints(trained / "checkpoints")
    assert [(one / "README.md").exists() for one in kept] == [False, True]
    found = huggingface_hub.ModelCard.load(kept[-1] / "README.md")
    assert found.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlstab", "reinforcement-learning"],
    }
    assert "# sums\n" in found.text
    assert "Trained from `countdown-tiny`, by reinforcement learning on the task `countdown`" in found.text
    assert ": 2 rollouts of 4 x 4 responses, with the seed 0." in found.text
    for text in ("| `grpo` |", "| `observe_lp_reg` | Only observed. ", "(rollout 2) |"):
        assert text in found.text
    (line,) = [one for one in found.text.splitlines() if one.startswith("| `s2t` |")]
    assert summary(S2TMask) in line
    assert "arXiv 2602.15620" in line
    settings = yaml.safe_load(found.text.partition("```yaml\n")[2].partition("```")[0])
    assert "tracking" not in settings
    assert load_run(settings).composition == load_run(trained / "config.yaml").composition
    assert str(trained.parent) not in found.text
    assert card.is_untouched(kept[-1] / "README.md")


def test_names_of_the_hub_are_in_the_front_matter() -> None:
    run = load_run(
        {
            "model": {"name": "Qwen/Qwen2.5-0.5B", "adapter": {}},
            "task": {"name": "dataset", "path": "openai/gsm8k", "subset": "main"},
            "objective": "clip_higher",
        }
    )
    found = huggingface_hub.ModelCard(card.content(run, {"command": "/somewhere/bin/rlstab train x.yaml"}, []))
    assert found.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "base_model_relation": "adapter",
        "datasets": ["openai/gsm8k"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["rlstab", "reinforcement-learning", "lora"],
    }
    assert "    rlstab train x.yaml\n" in found.text
    assert "None were kept." in found.text


def test_a_card_that_is_there_is_left_alone(trained: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained, tmp_path / "run")
    run = small(out, OBJECTIVE, optimisation__rollouts=2)
    readme = newest(out) / "README.md"
    readme.write_text("mine\n")
    assert card.write(newest(out), run, {}, []) is None
    assert not card.is_untouched(readme)
    checkpoint.verify(newest(out))  # it is no damage
    checkpoint.discard_own(newest(out))
    assert [one.name for one in (out / "checkpoints" / "rollout-000002").iterdir()] == ["README.md"]
    assert readme.read_text() == "mine\n"


def test_one_that_nobody_changed_goes_with_its_checkpoint(trained: Path, tmp_path: Path) -> None:
    saved = shutil.copytree(newest(trained), tmp_path / "rollout-000002")
    checkpoint.discard_own(saved)
    assert not saved.exists()


# -- the hub ----------------------------------------------------------------------------------------------------------


class Api:
    """One that notes what it is asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, repo: str, **options: Any) -> Any:
        self.asked.append((repo, options))
        return SimpleNamespace(repo_id=f"somebody/{repo}")

    def upload_folder(self, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append(("upload", options))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    found = Api()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    return found


def test_the_newest_checkpoint_is_uploaded_without_the_optimizer(
    trained: Path, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(trained), "sums"]) == 0
    assert capsys.readouterr().out == "https://huggingface.co/somebody/sums\n"
    assert api.asked == [
        ("sums", {"private": True, "exist_ok": True}),
        (
            "upload",
            {
                "repo_id": "somebody/sums",
                "folder_path": newest(trained),
                "ignore_patterns": ["trainer.json", "trainer.safetensors"],
                "commit_message": "Upload rollout-000002 of sums, trained with rlstab",
            },
        ),
    ]
    first = checkpoint.checkpoints(trained / "checkpoints")[0]
    assert main(["push", str(first), "sums", "--public"]) == 0
    assert capsys.readouterr().out.startswith("It has no model card, which a run gets at its end.\n")
    assert api.asked[2] == ("sums", {"private": False, "exist_ok": True})
    assert api.asked[3][1]["folder_path"] == first


def test_nothing_is_uploaded_by_training(trained: Path, api: Api, tmp_path: Path) -> None:
    go(small(tmp_path / "run", optimisation__rollouts=1))
    assert weights(tmp_path / "run")
    assert api.asked == []


def test_what_cannot_be_uploaded(
    trained: Path, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        push.push(tmp_path, "sums")
    damaged = shutil.copytree(trained, tmp_path / "run")
    (newest(damaged) / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        push.push(damaged, "sums")
    response = httpx.Response(403, request=httpx.Request("POST", "https://huggingface.co"))
    for error in (OSError("no route"), huggingface_hub.errors.HfHubHTTPError("403 Forbidden", response=response)):
        api.error = error
        with pytest.raises(ConfigError, match=r"'sums' cannot be written on .*(no route|403 Forbidden)"):
            push.push(trained, "sums")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(trained), "sums"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: nobody is logged in to the hub. Run `hf auth login`, or set HF_TOKEN to a token that can write.\n"
    )
