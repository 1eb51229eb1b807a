"""A data set of the package datasets as a task: folders, the cache, columns, chats, and what is refused in one line."""

import importlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from rlstab.config.settings import DatasetSettings
from rlstab.errors import MissingPackage, RlstabError
from rlstab.tasks import Message, TextTask
from rlstab.tasks.task import checksum_of_examples

ROWS = {"question": [f"{n}+{n}=" for n in range(6)], "answer": [f"so #### {2 * n}" for n in range(6)]}
FIELDS: dict[str, Any] = {"prompt_field": "question", "right_answer_pattern": "#### (.+)"}


@pytest.fixture(scope="module", autouse=True)
def datasets() -> Any:
    """Imported where these tests run alone, since that takes a second."""
    if os.environ.get("RLSTAB_REQUIRE_EXTRAS"):  # where it is required, a skipped test would hide that it is missing
        return importlib.import_module("datasets")
    return pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[datasets]"')


def of(path: str | Path, **settings: Any) -> TextTask:
    return TextTask(DatasetSettings(path=str(path), **settings))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, datasets: Any) -> str:
    """Two splits, by ``save_to_disk``."""
    folder, rows = tmp_path_factory.mktemp("data") / "sums", datasets.Dataset.from_dict(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([4, 5])}).save_to_disk(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What a hub that does not answer was asked; any other attempt to connect is an error of its own."""
    asked: list[str] = []

    class Session:
        def head(self, url: str, *, timeout: float) -> None:
            asked.append(url)
            raise OSError("[Errno -3] Temporary failure in name resolution")

    def refuse(*_: object) -> None:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return asked


def test_folders(saved: str, tmp_path: Path, asked: list[str], datasets: Any) -> None:
    task = of(saved, eval_split="test", **FIELDS)
    assert task.size == {"train": 6, "eval": 2}
    example = task.example("train", 3)
    assert (example.prompt, example.answer) == ("3+3=", "6")
    assert task.example("eval", 0).prompt == "4+4="
    assert (task.score(example, " 6 "), task.score(example, "7")) == (1.0, 0.0)
    assert of(saved, eval_size=2, **FIELDS).size == {"train": 4, "eval": 2}
    assert of(saved, eval_split="train", **FIELDS).size == {"train": 6, "eval": 6}
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "one")
    assert of(tmp_path / "one", eval_size=1, **FIELDS).size["train"] == 5  # without splits
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"question": "2?", "answer": "#### 2"}\n' * 2)
    assert of(tmp_path / "files", eval_size=1, **FIELDS).example("eval", 0).answer == "2"
    assert asked == []


def test_messages_and_fields_of_fields(tmp_path: Path, datasets: Any) -> None:
    """As data sets for verl have them."""
    rows = {
        "prompt": [[{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]] * 2,
        "reward_model": [{"ground_truth": "2", "style": "rule"}] * 2,
    }
    features = datasets.Dataset.from_dict(rows).features
    features["prompt"] = [{key: datasets.Value("string") for key in ("role", "content", "name")}]  # null in each
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "chat")
    example = of(tmp_path / "chat", answer_field="reward_model.ground_truth", eval_size=1).example("train", 0)
    assert example.messages == (Message("system", "Add."), Message("user", "1+1="))
    assert example.answer == "2"
    with pytest.raises(RlstabError, match=r"row 0: has no field 'truth'; its fields: 'ground_truth', 'style'\."):
        of(tmp_path / "chat", answer_field="reward_model.truth")


def test_what_is_cached_needs_no_hub(tmp_path: Path, asked: list[str], datasets: Any) -> None:
    """The layout in which datasets keeps what came from the hub."""
    import pyarrow

    build = tmp_path / "cache" / "someorg___sums" / "default" / "0.0.0" / ("0" * 40)
    build.mkdir(parents=True)
    rows = datasets.Dataset.from_dict(ROWS)
    with pyarrow.ipc.new_stream(str(build / "sums-train.arrow"), rows.data.schema) as out:
        out.write_table(rows.data.table)
    info = {"builder_name": "parquet", "dataset_name": "sums", "config_name": "default", "version": "0.0.0"}
    splits = {"train": {"name": "train", "num_examples": 6}}
    (build / "dataset_info.json").write_text(json.dumps({**info, "splits": splits}))
    task = of("someorg/sums", eval_size=2, **FIELDS)
    assert task.example("train", 1).prompt == "1+1="
    assert asked == ["https://huggingface.co"]
    assert checksum_of_examples(of("someorg/sums", eval_size=2, **FIELDS)) == checksum_of_examples(task)
    rows = datasets.Dataset.from_dict(ROWS | {"answer": [*ROWS["answer"][:-1], "so #### 11"]})  # a row was corrected
    with pyarrow.ipc.new_stream(str(build / "sums-train.arrow"), rows.data.schema) as out:
        out.write_table(rows.data.table)
    assert checksum_of_examples(of("someorg/sums", eval_size=2, **FIELDS)) != checksum_of_examples(task)


def test_what_is_not_there_is_named_in_one_line(saved: str, tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    for settings, named in [
        ({"path": "nobody/none-such"}, "https://huggingface.co cannot be reached"),
        ({"path": saved}, "row 0: has no field 'prompt'; its fields: 'question', 'answer'."),
        ({"path": saved, "split": "dev"}, "has no split 'dev'. Known: test, train."),
        ({"path": saved, "eval_split": "tests"}, "has no split 'tests'. Did you mean 'test'?"),
        ({"path": "./none"}, "no folder 'none'"),
        ({"path": str(tmp_path / "empty")}, f"'{tmp_path}/empty' cannot be loaded"),
        ({"path": saved, "eval_size": 6, **FIELDS}, "task.eval_size"),
        ({"path": saved, **FIELDS, "right_answer_pattern": "= (.+)"}, "row 0: task.right_answer_pattern"),
    ]:
        with pytest.raises(RlstabError) as caught:
            of(**settings)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
    assert asked == ["https://huggingface.co"]


def test_datasets_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstab.extras.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="datasets"):
        of("x")
