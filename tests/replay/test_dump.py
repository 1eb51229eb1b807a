"""Dumps on disk: what was written is read, what is damaged is one line, what was cut off is reported."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import rlstab.record.writer as dump
from rlstab.cli import main
from rlstab.errors import ConfigError, ReportError
from rlstab.record import load, read_dump
from tests.replay.dumps import rank, write


def test_what_was_written_is_read(tmp_path: Path) -> None:
    read = read_dump(write(tmp_path))
    assert [step.number for step in read.steps] == [1, 2]
    assert read.notes == []
    step, written = read.steps[0], [rank(place, 1).tensors for place in (0, 1)]
    assert step.ranks == [0] * 4 + [1] * 4
    assert (step.header.ranks, step.accumulation) == (2, 4)
    mask = torch.cat([part["mask"] for part in written]).bool()
    for name in ("logprobs", "old_logprobs", "advantages", "entropies"):
        assert torch.equal(getattr(step.batch, name), torch.cat([part[name] for part in written])[mask])
    assert step.batch.lengths.sum() == mask.sum()
    assert [prompt.tolist() for prompt in step.prompts[:2]] == [[1, 2], [3, 4, 5]]
    assert [len(batch) for batch in load(tmp_path)] == [len(step.batch) for step in read.steps]


def test_the_dump_of_another_run_and_a_tokenizer_that_is_there_stay(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("theirs")
    recorder, said = dump.Recorder(tmp_path), {"host": "a trainer", "first": True}
    recorder.write_tokenizer(SimpleNamespace(backend_tokenizer=Tokenizer(WordLevel())))
    recorder.write("rlstab", {}, step=1, **said)
    recorder.write("rlstab", {}, step=2, **said)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 5
    with pytest.raises(ConfigError, match="another run"):
        dump.Recorder(tmp_path).write("rlstab", {"other": 1}, step=1, **said)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert (tmp_path / "tokenizer.json").read_text() == "theirs"


@pytest.mark.parametrize("count", [0, 1])
def test_a_kill_leaves_a_whole_dump_or_none(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before each change of a file, where an earlier dump of the step is replaced."""
    before, left, whole = rank(0, 1), iter(range(count)), Path.replace
    alone = before.header.model_copy(update={"ranks": 1})
    dump.write_dump(tmp_path, alone, before.tensors)

    def replace(self: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return whole(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        dump.write_dump(tmp_path, alone, {**before.tensors, "advantages": before.tensors["advantages"] + 1})
    with pytest.raises(ReportError, match="json is left out: no such file"):
        read_dump(tmp_path)


def header(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors, with the checksum that belongs to them."""
    own = dict(rank(0, 1).tensors)
    change(own)
    file = path.with_suffix(".safetensors")
    save_file(own, file)
    header(path, lambda data: data.update(sha256=hashlib.sha256(file.read_bytes()).hexdigest()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no tensors": lambda path: path.with_suffix(".safetensors").unlink(),
    "a bit": lambda path: path.with_suffix(".safetensors").write_bytes(
        path.with_suffix(".safetensors").read_bytes()[:-1] + b"\xff"
    ),
    "not JSON": lambda path: path.write_text("{"),
    "another format": lambda path: header(path, lambda data: data.update(format=2)),
    "an unknown key": lambda path: header(path, lambda data: data.update(pickle="yes")),
    "rank of a billion": lambda path: header(path, lambda data: data.update(ranks=10**9)),
    "negative parts": lambda path: header(path, lambda data: data.update(parts=-1)),
    "NaN": lambda path: header(path, lambda data: data.update(learning_rate=float("nan"))),
    "no ids": lambda path: tensors(path, lambda own: own.pop("ids")),
    "too few": lambda path: tensors(path, lambda own: own.update(logprobs=own["logprobs"][1:].clone())),
    "floats as ids": lambda path: tensors(path, lambda own: own.update(ids=own["ids"].float())),
    "lengths that differ": lambda path: tensors(path, lambda own: own.update(lengths=own["lengths"] + 1)),
    "prompts that differ": lambda path: tensors(path, lambda own: own.update(prompt_ids=own["prompt_ids"][1:].clone())),
    "a part beyond": lambda path: tensors(path, lambda own: own.update(parts=own["parts"] + 9)),
}


@pytest.mark.parametrize("what", [*DAMAGE])
def test_damage_is_told_in_a_line_and_the_other_steps_stay(what: str, tmp_path: Path) -> None:
    write(tmp_path)
    DAMAGE[what](tmp_path / "step-000001.rank-0.json")
    read = read_dump(tmp_path)
    assert [step.number for step in read.steps] == [2]
    assert read.notes
    assert all("\n" not in note for note in read.notes)


def test_a_response_outside_the_loss_and_values_that_are_not_finite_are_shown_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(own: dict[str, torch.Tensor]) -> None:
        own["mask"] = torch.where(torch.arange(len(own["mask"])) < own["lengths"][0], 0, own["mask"])
        own["entropies"] = own["entropies"].clone().index_fill(0, own["lengths"].cumsum(0)[:2], torch.nan)

    write(tmp_path)
    tensors(tmp_path / "step-000001.rank-0.json", change)
    assert main(["look", str(tmp_path), "--json", "--methods", "s2t,clip_higher"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in record["turns"]] == ["clip_higher"]
    assert "NaN" in record["left_out"]["s2t"]
