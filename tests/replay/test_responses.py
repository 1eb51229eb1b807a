"""What a page shows of a record: its tokens, their numbers, and what the loss of the trainer did to them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from rlstab.cli import main
from rlstab.errors import ReportError
from rlstab.record import Header, MethodTrace, Step, Trace
from rlstab.record.response_traces import influence_of, read_responses
from rlstab.record.step import joined, rank_of
from rlstab.record.token_texts import LONGEST, token_texts
from tests.replay.dumps import write
from tests.replay.test_foreign import DATA, PRIME


def made(**tensors: Any) -> Step:
    """A step of one response of four tokens, advantage 1, on policy."""
    plain = {"lengths": torch.tensor([4]), "ids": torch.arange(4), "mask": torch.ones(4, dtype=torch.uint8)}
    plain |= {"advantages": torch.ones(4), "logprobs": torch.full((4,), -0.5), "old_logprobs": torch.full((4,), -0.5)}
    return joined([rank_of(Header(host="made up", step=1), plain | tensors)])


def test_influence_is_how_far_the_pull_moved() -> None:
    # dropped: all of A; weight 1.2 on A; clipped: all of A r; a bonus of -0.25
    where = torch.eye(4, dtype=torch.bool)
    weight, bonus = torch.tensor([1.0, 1.2, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, -0.25])
    method = MethodTrace("all", {"dropped": where[0], "clipped": where[2]}, weight, bonus)
    ratio = torch.tensor([1.0, math.nan, 1.5, 1.0])
    assert influence_of(made(), Trace(ratio, {"all": method})).tolist() == pytest.approx([1.0, 0.2, 1.5, 0.25])
    gate = MethodTrace("sapo", {}, None, None, torch.tensor([1.0, 1.0, 0.75, 1.0]))
    assert influence_of(made(), Trace(torch.ones(4), {"sapo": gate})).tolist() == pytest.approx([0, 0, 0.25, 0])


def test_the_loss_of_a_host_is_shown_as_what_it_clipped(tmp_path: Path) -> None:
    """`trl/dapo` with a clip from 0.8 to 1.28, a cap of 1.35, and tokens outside the loss."""
    folder = write(tmp_path, steps=2)
    every = read_responses(folder, limit=1000)
    assert len(every.responses) == 32
    assert {response.step for response in every.responses} == {1, 2}
    clipped = 0
    for response in every.responses:
        marks = {key: dict(method.actions) for key, method in response.methods.items()}
        outside = set(marks.get("loss_mask", {}).get("dropped", []))
        ratio, advantage = response.values["ratio"], response.values["advantage"]
        assert {index for index, value in enumerate(ratio) if value is None} == outside
        stopped = [
            index
            for index, (r, a) in enumerate(zip(ratio, advantage, strict=True))
            if r is not None and a is not None and (r > 1.28 if a > 0 else not 0.8 <= r <= 1.35)
        ]
        assert marks["clip_higher"].get("clipped", []) == stopped
        clipped += len(stopped)
    assert clipped > 10
    few = read_responses(folder, limit=3, step=2)
    total = sorted((sum(one.influence) for one in every.responses if one.step == 2), reverse=True)
    assert sorted((sum(one.influence) for one in few.responses), reverse=True) == total[:3]
    assert "these are the 3" in few.notes[0]


@pytest.mark.parametrize("wrong", [{"step": 9, "limit": 1}, {"limit": 0}])
def test_what_is_not_there_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ReportError):
        read_responses(write(tmp_path, steps=1), **wrong)


def test_the_export_of_prime_rl_says_what_its_loss_did(tmp_path: Path) -> None:
    count = len(PRIME["token_ids"])
    weights = {"is_masked": [False] * (count - 1) + [True], "ref_kl_weights": [0.1] * count}
    entropy = [*PRIME["entropy"][:-1], None]
    path = tmp_path / "rank_0.jsonl"
    path.write_text(json.dumps(PRIME | weights | {"entropy": entropy}))
    words = {word: index for index, word in enumerate(["Q", ":", "x", " y", "<tool>", "z"])}
    Tokenizer(models.WordLevel(words, unk_token="Q")).save(str(tmp_path / "tokenizer.json"))
    (response,) = read_responses(path, limit=9).responses
    assert len(response.tokens) == 3
    assert {key: dict(method.actions) for key, method in response.methods.items() if method.actions} == {
        "trust_region": {"clipped": [2]},
        "ref_kl": {"regularised": [0, 1, 2]},
    }
    assert response.values["entropy"][-1] is None
    assert response.values["ratio"] == pytest.approx(PRIME["importance_ratio"][-3:], rel=1e-4)


@pytest.mark.parametrize("folder", ["prime-rl", "nemo-rl", "slime"])
def test_every_dump_can_be_viewed(folder: str, tmp_path: Path) -> None:
    assert main(["view", str(DATA / folder), "--out", str(tmp_path / "view.html")]) == 0
    assert main(["view", str(DATA / folder), "--terminal"]) == 0
    shown = read_responses(DATA / folder, limit=99)
    assert len(shown.responses) == 8
    assert "--tokenizer" in shown.notes[-1]


def test_an_old_token_trace_names_what_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"format": 2, "rollout": 1, "sequence_id": 0, "tokens": ["a"], "ids": [1], "logprobs": [-1.0]}\n'
    (tmp_path / "tokens.jsonl").write_text(line)
    for command in (["view", str(tmp_path)], ["view", str(tmp_path / "tokens.jsonl")], ["replay", str(tmp_path)]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "62ee1c68" in error
        assert error.count("\n") == 1


def test_a_text_of_a_megabyte_is_cut() -> None:
    texts = token_texts(lambda ids: "".join("x" * 2**20 for _ in ids), [1, 2])
    assert [len(text) for text in texts] == [LONGEST + 1] * 2


def test_a_live_output_that_one_part_did_not_record_is_its_evidence() -> None:
    """What joins them must not forget the others', or ratios of all would be those of the evidence."""
    still = made().tensors
    moved = still | {"live_logprobs": torch.full((4,), -0.1)}
    header = Header(host="made up", step=1, ranks=2)
    both = joined([rank_of(header, moved), rank_of(header.model_copy(update={"rank": 1}), still)])
    assert both.tensors["live_logprobs"].tolist() == pytest.approx([-0.1] * 4 + [-0.5] * 4)
