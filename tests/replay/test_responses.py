"""What a record says of its tokens, and what the loss of the trainer did to them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.look.gradient import traces_of
from rlstab.record import Header, Step, read_dump
from rlstab.record.step import joined, rank_of
from rlstab.record.token_texts import LONGEST, token_texts
from tests.replay.dumps import write
from tests.replay.test_foreign import PRIME


def made(**tensors: Any) -> Step:
    """A step of one response of four tokens, advantage 1, on policy."""
    plain = {"lengths": torch.tensor([4]), "ids": torch.arange(4), "mask": torch.ones(4, dtype=torch.uint8)}
    plain |= {"advantages": torch.ones(4), "logprobs": torch.full((4,), -0.5), "old_logprobs": torch.full((4,), -0.5)}
    return joined([rank_of(Header(host="made up", step=1), plain | tensors)])


def test_the_loss_of_a_host_is_shown_as_what_it_clipped(tmp_path: Path) -> None:
    """`trl/dapo` with a clip from 0.8 to 1.28, a cap of 1.35, and tokens outside the loss."""
    for step in read_dump(write(tmp_path, steps=2)).steps:
        ((part, seen),) = traces_of(step)
        above, below = part.batch.advantages > 0, part.batch.advantages < 0
        ratio = (part.live.logprobs.detach() - part.batch.old_logprobs).exp()
        stopped = (above & (ratio > 1.28)) | (below & ((ratio < 0.8) | (ratio > 1.35)))
        assert torch.equal(seen.methods["clip_higher"].actions["clipped"], stopped)
        assert stopped.sum() > 5


def test_the_export_of_prime_rl_says_what_its_loss_did(tmp_path: Path) -> None:
    count = len(PRIME["token_ids"])
    weights = {"is_masked": [False] * (count - 1) + [True], "ref_kl_weights": [0.1] * count}
    (tmp_path / "rank_0.jsonl").write_text(json.dumps(PRIME | weights | {"entropy": [*PRIME["entropy"][:-1], None]}))
    (step,) = read_dump(tmp_path / "rank_0.jsonl").steps
    ((_, seen),) = traces_of(step)
    did = {(key, action) for key, one in seen.methods.items() for action, where in one.actions.items() if where.any()}
    assert did == {("trust_region", "clipped"), ("ref_kl", "regularised")}
    assert seen.clipped.tolist() == [False, False, True]
    assert step.batch.entropies is not None
    assert step.batch.entropies[-1].isnan()


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
