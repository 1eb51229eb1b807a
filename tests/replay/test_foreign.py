"""The exports in ``data`` are of the trainers' own writers; see :mod:`benchmarks.foreign`."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.cli import main
from rlstab.look.find import find
from rlstab.record import load, read_dump
from tests.replay.responses import RESPONSES

DATA = Path(__file__).parent / "data"
#: By folder: numbers of the steps, rows of the first in the order of ranks and micro-batches, the ranks of these.
EXPORTS = {
    "prime-rl": ([0, 1], [0, 1, 2, 3], [0, 0, 1, 1]),
    "nemo-rl": ([1, 2], [0, 1, 2, 3], [0]),
    "slime": ([10, 11], [0, 2, 1, 3], [0, 0, 1, 1]),
}


@pytest.mark.parametrize("folder", EXPORTS)
def test_what_other_trainers_write_is_read(folder: str) -> None:
    numbers, rows, ranks = EXPORTS[folder]
    dump = read_dump(DATA / folder)
    assert [step.number for step in dump.steps] == numbers
    for place, step in enumerate(dump.steps):
        responses = [RESPONSES[4 * place + row] for row in rows]
        more = {"prime-rl": ["entropies"], "nemo-rl": []}.get(folder, ["ref_logprobs"])
        for name in ("ids", "advantages", "logprobs", "rollout_logprobs", *more):
            assert step.tensors[name].tolist() == [value for row in responses for value in getattr(row, name)], name
        counts = [folder != "nemo-rl" or row.row % 4 != 3 for row in responses]  # it left one response out
        expected = [value and counted for row, counted in zip(responses, counts, strict=True) for value in row.mask]
        assert step.tensors["mask"].tolist() == expected
        assert step.tensors["lengths"].tolist() == [len(row.ids) for row in responses]
        assert [prompt.tolist() for prompt in step.prompts] == [row.prompt for row in responses]
        assert len(set(zip(step.batch.group_ids.tolist(), [row.row // 2 for row in responses], strict=True))) == 2
        assert step.ranks == ranks
        rewards = None if folder == "prime-rl" else [row.reward for row in responses]
        assert (("rewards" in step.tensors and step.tensors["rewards"].tolist()) or None) == rewards
        assert (step.header.loss is None) == (folder != "prime-rl")
        old = step.tensors.get("old_logprobs")
        assert step.batch.live_ratio if old is None else torch.equal(old, step.tensors["rollout_logprobs"])
        assert (old is None) == (folder != "prime-rl")
    assert [len(batch) for batch in load(DATA / folder)] == [int(step.mask.sum()) for step in dump.steps]


def test_the_rollouts_of_verl_have_nothing_to_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(DATA / "verl", capsys).count("verl") >= 2


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which the command refuses."""
    assert main(["look", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ReportError: ")
    assert error.count("\n") == 1
    return error


PRIME = json.loads((DATA / "prime-rl/token_exports/step_0/rank_0.jsonl").read_text().splitlines()[0])
NEMO = json.loads((DATA / "nemo-rl/train_data_step1.jsonl").read_text().splitlines()[0])
COUNT = len(PRIME["token_ids"])
COLUMNS: dict[str, tuple[object, ...]] = {
    "token_ids": ([], "abc", [-1] * COUNT, [2**40] * COUNT, [0.5] * COUNT, [[1]] * COUNT, [None] * COUNT),
    "loss_mask": ([True], [False] * COUNT, ["a"] * COUNT, {}),
    "advantages": ([float("nan")] * COUNT, [float("inf")] * COUNT, [None] * COUNT, [10**400] * COUNT),
    "trainer_logprobs": ([1e300] * COUNT, [0.0] * (COUNT + 1), None),
    "step": (-1, "1", 10**30, None, 1.5),
    "micro_step": (-1, 10**12),
}
LINES: dict[str, object] = {
    "cut": json.dumps(PRIME)[:-40],
    "deep": "[" * 100_000,
    "many digits": '{"step": ' + "1" * 100_000 + "}",
    "binary": "\x00\xff\x80",
    "a list": [1],
    **{f"{name}: {value!r:.30}": PRIME | {name: value} for name, values in COLUMNS.items() for value in values},
    **{
        f"{name}: {value!r:.30}": NEMO | {name: value}
        for name, value in {
            "input_lengths": 3,
            "prev_logprobs": [[0.0]],
            "token_loss_mask": [[1, [2]]],
            "generation_logprobs": "abc",
            "token_ids": [[1] * 3],
        }.items()
    },
}


@pytest.mark.parametrize("name", LINES)
def test_a_damaged_line_is_left_out(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = LINES[name]
    path = tmp_path / "rank_0.jsonl"
    path.write_bytes((line if isinstance(line, str) else json.dumps(line)).encode("latin-1") + b"\n")
    assert "rank_0.jsonl: left out 1 line that" in refused(path, capsys)
    path.write_bytes(path.read_bytes() + json.dumps(PRIME).encode())  # what else is in the file is read
    dump = read_dump(path)
    assert [step.tensors["lengths"].tolist() for step in dump.steps] == [[3]]
    assert len(dump.notes) == 1


#: What `diagnose` reads of an export, by the columns that it takes.
MEASURED = {
    "inference_logprobs": {"mismatch/k3", "sampler/gap"},
    "entropy": {"tokens/entropy"},
    "is_masked": {"ratio/clipped"},
    "rl_weights": set(),
    "importance_ratio": set(),
    "rank": set(),
}


@pytest.mark.parametrize("missing", [*([name] for name in MEASURED), [*MEASURED]], ids=",".join)
def test_prime_rl_may_leave_columns_out(missing: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    rows: list[set[str]] = []
    for line in (PRIME, {name: value for name, value in PRIME.items() if name not in missing}):
        path.write_text(json.dumps(line) + "\n")
        (step,) = read_dump(path).steps
        assert step.tensors["advantages"].tolist() == PRIME["advantages"][-3:]
        if len(missing) != 1:
            assert main(["look", str(path), "--methods", "token_mean"]) == 0
        (found,) = find(path)
        assert found.log is not None
        rows.append({*found.log.metrics})
    assert rows[0] - rows[1] == set().union(*(MEASURED[name] for name in missing))
    assert step.batch.live_ratio == ("inference_logprobs" in missing)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


SAVED = torch.load(DATA / "slime/train_5.pt", weights_only=True)
SAMPLE = SAVED["samples"][0]


def sampled(path: Path, **changes: object) -> None:
    """A file of one response, which differs from what slime writes."""
    torch.save(SAVED | {"samples": [SAMPLE | changes]}, path)


def compressed(path: Path) -> None:
    """An archive that unfolds to a thousand times its size."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))


PICKLES: dict[str, Callable[[Path], object]] = {
    "runs code": lambda path: torch.save({"samples": [Runs()]}, path),
    "runs code, an old pickle": lambda path: path.write_bytes(pickle.dumps(Runs())),
    "empty": lambda path: path.touch(),
    "cut": lambda path: path.write_bytes((DATA / "slime/train_5.pt").read_bytes()[:-500]),
    "compressed": compressed,
    "a list": lambda path: torch.save([1], path),
    "samples are numbers": lambda path: torch.save(SAVED | {"samples": [1, 2]}, path),
    "the same sample a million times": lambda path: torch.save(
        SAVED | {"samples": [SAMPLE | {"tokens": [1] * 1000}] * 10**5}, path
    ),
    "a shape without memory": lambda path: sampled(path, tokens=torch.zeros(1).expand(10**11)),
    "a tensor without values": lambda path: sampled(path, log_probs=torch.empty(3, device="meta")),
    "sparse": lambda path: sampled(path, log_probs=torch.ones(3).to_sparse()),
    "NaN": lambda path: sampled(path, advantages=torch.full((3,), float("nan"))),
    "no advantages": lambda path: sampled(path, advantages=None),
    "a response longer than all": lambda path: sampled(path, response_lengths=7),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_one_line_and_runs_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    PICKLES[name](tmp_path / "train_5.pt")
    assert "train_5.pt" in refused(tmp_path, capsys)
    assert not Path("ran").exists()
