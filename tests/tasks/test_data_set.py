"""A data set of the package datasets as a task: folders, the cache, columns, chats, and what is refused in one line."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from rlstab.config import load_run
from rlstab.config.settings import DatasetSettings
from rlstab.errors import ConfigError, MissingPackage, RlstabError
from rlstab.tasks import DataSet
from rlstab.tasks.build import build_task, require_settings
from tests.train.runs import go, small

if os.environ.get("RLSTAB_REQUIRE_EXTRAS"):  # where they have to be there, a skipped test would hide that they are not
    import datasets
else:
    datasets = pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[datasets]"')

pyarrow = pytest.importorskip("pyarrow")
ROWS = {"question": [f"{one}+{one}=" for one in range(6)], "answer": [f"so #### {2 * one}" for one in range(6)]}
FIELDS: dict[str, Any] = {"prompt_field": "question", "right_answer_pattern": "#### (.+)"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits, by ``save_to_disk``."""
    folder = tmp_path_factory.mktemp("data") / "sums"
    both = {"train": datasets.Dataset.from_dict(ROWS), "test": datasets.Dataset.from_dict(ROWS).select([4, 5])}
    datasets.DatasetDict(both).save_to_disk(folder)
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and any attempt to connect is an error of its own."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def refusal(**settings: Any) -> str:
    with pytest.raises(RlstabError) as caught:
        DataSet(DatasetSettings(**settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_of_save_to_disk(saved: Path) -> None:
    task = DataSet(DatasetSettings(path=str(saved), eval_split="test", **FIELDS))
    assert task.size == {"train": 6, "eval": 2}
    example = task.example("train", 3)
    assert (example.prompt, example.answer) == ("3+3=", "6")
    assert task.example("eval", 0).prompt == "4+4="
    assert (task.score(example, " 6 "), task.score(example, "7")) == (1.0, 0.0)
    held_out = DataSet(DatasetSettings(path=str(saved), eval_size=2, **FIELDS))
    assert held_out.size == {"train": 4, "eval": 2}


def test_one_without_splits(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "one")
    assert DataSet(DatasetSettings(path=str(tmp_path / "one"), eval_size=1, **FIELDS)).size["train"] == 5


def test_a_folder_of_data_files(tmp_path: Path) -> None:
    lines = [json.dumps({"question": "1+1=", "answer": "#### 2"}), json.dumps({"question": "2+2=", "answer": "#### 4"})]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("\n".join(lines))
    task = DataSet(DatasetSettings(path=str(tmp_path / "files"), eval_size=1, **FIELDS))
    assert task.example("train", 0).answer == "2"


def test_a_run_learns_from_it(saved: Path, tmp_path: Path) -> None:
    task = {"name": "dataset", "path": str(saved), "eval_split": "test", **FIELDS}
    go(small(tmp_path / "run", task=task, optimisation__rollouts=1, rollout__max_new_tokens=4))
    samples = [json.loads(one) for one in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {one["prompt"] for one in samples} <= set(ROWS["question"])


def test_messages_and_fields_of_fields(tmp_path: Path) -> None:
    """As data sets for verl have it; in Arrow, what one message has the others have as null."""
    rows = {
        "prompt": [[{"role": "system", "content": "Add.", "name": "x"}, {"role": "user", "content": "1+1="}]],
        "reward_model": [{"ground_truth": "2", "style": "rule"}],
    }
    datasets.Dataset.from_dict({key: value * 2 for key, value in rows.items()}).save_to_disk(tmp_path / "chat")
    assert "message 1 is not an object with the texts `role` and `content` alone" in refusal(
        path=str(tmp_path / "chat"), answer_field="reward_model.ground_truth"
    )
    rows["prompt"] = [[{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]]
    both = {"prompt": rows["prompt"] * 2, "reward_model": rows["reward_model"] * 2}
    features = datasets.Dataset.from_dict(both).features
    features["prompt"] = [
        {"role": datasets.Value("string"), "content": datasets.Value("string"), "name": datasets.Value("string")}
    ]
    datasets.Dataset.from_dict(both, features=datasets.Features(features)).save_to_disk(tmp_path / "null")
    task = DataSet(DatasetSettings(path=str(tmp_path / "null"), answer_field="reward_model.ground_truth", eval_size=1))
    example = task.example("train", 0)
    assert [(one.role, one.content) for one in example.messages] == [("system", "Add."), ("user", "1+1=")]
    assert example.answer == "2"
    assert "there is no field 'truth' in 'reward_model'; its fields: 'ground_truth', 'style'." in refusal(
        path=str(tmp_path / "null"), answer_field="reward_model.truth"
    )


def test_what_is_cached_needs_no_hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout in which datasets keeps what came from the hub."""
    asked = answers_not(monkeypatch)
    whole = datasets.load_from_disk(str(saved))
    build = tmp_path / "cache" / "someorg___sums" / "default" / "0.0.0" / ("0" * 40)
    build.mkdir(parents=True)
    rows = whole["train"]
    table = rows.data.table
    import pyarrow

    with (
        pyarrow.OSFile(str(build / "sums-train.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    info = datasets.DatasetInfo(
        features=rows.features,
        builder_name="parquet",
        dataset_name="sums",
        config_name="default",
        version="0.0.0",
        splits=datasets.splits.SplitDict.from_split_dict([{"name": "train", "num_bytes": 1, "num_examples": 6}]),
    )
    info.write_to_directory(str(build))
    assert DataSet(DatasetSettings(path="someorg/sums", eval_size=2, **FIELDS)).example("train", 1).prompt == "1+1="
    assert len(asked) == 1


def answers_not(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that does not answer, and what it was asked."""
    asked: list[str] = []

    class Session:
        def head(self, url: str, *, timeout: float) -> None:
            asked.append(url)
            raise OSError("[Errno -3] Temporary failure in name resolution")

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    return asked


def test_an_unknown_name_without_a_network_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers_not(monkeypatch)
    assert refusal(path="nobody/none-such") == (
        "the data set 'nobody/none-such' cannot be loaded: https://huggingface.co cannot be reached: [Errno -3] "
        "Temporary failure in name resolution. Give a name on the hub, or in the cache, with task.subset where it has "
        "several; or a folder."
    )
    assert asked == ["https://huggingface.co"]


def test_what_is_not_there(saved: Path, tmp_path: Path) -> None:
    path = str(saved)
    assert refusal(path=path) == (
        f"the data set '{path}' has no column 'prompt' in the split 'train'; its columns: 'question', 'answer'. Set "
        f"task.prompt_field to the one that is meant."
    )
    assert refusal(path=path, split="dev") == f"the data set '{path}' has no split 'dev'. Known: test, train."
    assert refusal(path=path, eval_split="tests").endswith("has no split 'tests'. Did you mean 'test'?")
    assert refusal(path="./none") == "there is no folder 'none'. Set task.path to one, or to a name on the hub."
    (tmp_path / "empty").mkdir()
    assert refusal(path=str(tmp_path / "empty")).startswith(f"the data set '{tmp_path}/empty' cannot be loaded: ")
    assert refusal(path=path, eval_size=6, **FIELDS).startswith(f"{path}: has 6 examples, so holding out the last 6")
    wrong = {**FIELDS, "right_answer_pattern": "= (.+)"}
    assert refusal(path=path, **wrong) == (
        f"the data set '{path}', split 'train', row 0: task.right_answer_pattern finds nothing in the answer 'so #### "
        f"0'. Change it."
    )


def test_settings(saved: Path) -> None:
    run = load_run({"objective": "s2t", "task": {"name": "dataset", "path": str(saved), "eval_size": 1, **FIELDS}})
    require_settings(run.task)
    assert isinstance(build_task(run.task), DataSet)
    bad = load_run(
        {"objective": "s2t", "task": {"name": "dataset", "path": "x", "right_answer_pattern": "(", "split": "a"}}
    )
    with pytest.raises(ConfigError, match="task: `right_answer_pattern` is not a valid regular expression"):
        require_settings(bad.task)
    with pytest.raises(ConfigError, match=r"task\.system: a system message needs a chat template"):
        load_run({"objective": "s2t", "task": {"name": "dataset", "path": "x", "system": "Add."}})


def test_datasets_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstab.extras.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="datasets"):
        DataSet(DatasetSettings(path="x"))
