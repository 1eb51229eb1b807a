"""What makes a checkpoint fail is known before the first rollout; every file and folder of a tokenizer is kept."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from rlstab.errors import ConfigError, ModelError
from rlstab.models.policy import load_policy
from rlstab.train import checkpoint
from tests.train.runs import ADAPTER, first_layers, go, small

TEMPLATES = {"default": "{{ messages[0]['content'] }}", "tool_use": "tools {{ messages[0]['content'] }}"}


def model(folder: Path) -> Path:
    """The model that ships, with a tokenizer of two chat templates."""
    shutil.copytree(first_layers(1), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adapter", [{}, ADAPTER], ids=["all weights", "adapter"])
def test_a_checkpoint_keeps_folders_of_a_tokenizer(tmp_path: Path, adapter: dict[str, Any]) -> None:
    changes = {"tracking__checkpoint_every": 1, "tracking__keep_checkpoints": 1, **adapter}
    changes["model__name"] = str(model(tmp_path / "model"))
    go(small(tmp_path / "run", **changes))
    (kept,) = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")  # that before is gone, folders too
    assert sorted(path.name for path in kept.parent.iterdir()) == [kept.name]
    assert AutoTokenizer.from_pretrained(kept).chat_template == TEMPLATES
    assert "additional_chat_templates/tool_use.jinja" in json.loads((kept / checkpoint.INDEX).read_text())["files"]
    assert checkpoint.read(kept) is not None
    go(small(tmp_path / "run", **changes, optimisation__rollouts=3), resume=True)
    (last,) = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    (last / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    assert checkpoint.read(last) is None
    (last / "additional_chat_templates" / "mine.txt").write_text("stays")
    checkpoint.remove(last)
    assert [path.name for path in last.rglob("*")] == ["additional_chat_templates", "mine.txt"]


def test_removing_a_checkpoint_stays_inside(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "rollout-000001"
    for folder in (outside, inside, tmp_path / "empty"):
        folder.mkdir()
    (outside / "mine.txt").write_text("stays")
    (inside / "link").symlink_to(outside)
    names = ["../outside/mine.txt", str(outside / "mine.txt"), "link/mine.txt", "../empty/x"]
    (inside / checkpoint.INDEX).write_text(json.dumps({"files": dict.fromkeys(names, "")}))
    checkpoint.remove(inside)
    assert (outside / "mine.txt").exists()
    assert (tmp_path / "empty").is_dir()
    assert [path.name for path in inside.iterdir()] == ["link"]


def without_templates(self: Any, folder: Any, **_: Any) -> None:
    shutil.copytree(first_layers(1), folder, dirs_exist_ok=True)


def refuses(self: Any, *_: Any, **__: Any) -> None:
    raise OSError("no room")


#: What a tokenizer does when it is saved, and what is said of it.
TOKENIZERS: dict[str, tuple[Callable[..., None], str]] = {
    "raises": (refuses, "cannot be written: no room"),
    "loses its templates": (without_templates, "another chat template would be read"),
    "writes nothing": (lambda self, folder, **_: None, "could not be used: "),
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_saved_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = small(tmp_path / "run", model__name=str(model(tmp_path / "model")))
    act, told = TOKENIZERS[what]
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", act)
    with pytest.raises((ConfigError, ModelError), match=told):
        go(run)
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_cannot_be_read_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = LlamaConfig.save_pretrained

    def save_other(self: Any, folder: Any, **options: Any) -> None:
        save(self, folder, **options)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1.0}))

    monkeypatch.setattr(LlamaConfig, "save_pretrained", save_other)
    with pytest.raises(ModelError, match="another configuration would be read"):
        go(small(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_trial_checkpoint_has_no_weights(tmp_path: Path) -> None:
    policy = load_policy(str(first_layers(1)))
    policy.save(tmp_path / "folder", weights=False)
    assert not list((tmp_path / "folder").glob("*.safetensors"))
