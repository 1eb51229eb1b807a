"""The teacher grades what the policy sampled, with a hint or without, and a token knows how old its weights are."""

from pathlib import Path

import pytest
import torch

from rlstab.errors import DataError, ModelError
from rlstab.train.rollout import Rollout
from tests.train.runs import SHIPPED, go, small


def aged(updates: int) -> list[object]:
    return [{"name": "opd", "coefficient": 0.1}, {"name": "max_lag", "updates": updates}]


def test_the_policy_is_its_own_teacher_unless_another_or_a_hint_is_given(tmp_path: Path) -> None:
    own = go(small(tmp_path / "own", aged(1), rollout__staleness=1)).records
    # the weights at the start sampled the second rollout, too
    assert [abs(record["opd/gap"]) < 1e-5 for record in own] == [True, True]
    assert [record["max_lag/lag"] for record in own] == [0.0, 1.0]
    assert go(small(tmp_path / "old", aged(0), rollout__staleness=1)).records[1]["optimizer_steps/skipped"] == 1
    hinted = go(small(tmp_path / "hint", "opd", model__teacher=str(SHIPPED), model__teacher_prompt="123")).records
    assert abs(hinted[0]["opd/gap"]) > 1e-3


def test_a_hint_stands_before_each_prompt_and_padding_before_both(tmp_path: Path) -> None:
    from rlstab.models.policy import Sequences, load_policy

    policy = load_policy(str(SHIPPED), device=torch.device("cpu"))
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[False, True, True], [True] * 3])
    answer = torch.tensor([[4], [4]])
    given = policy.hinted(Sequences(ids, mask, answer, torch.ones_like(answer, dtype=torch.bool)), "12")
    hint = policy.tokenizer("12", add_special_tokens=False)["input_ids"]
    rows = [row[seen].tolist() for row, seen in zip(given.prompt_ids, given.prompt_mask, strict=True)]
    assert rows == [[*hint, 5, 6], [*hint, 7, 8, 9]]
    assert given.prompt_mask[0].tolist() == [False] + [True] * (len(hint) + 2)
    assert policy.hinted(given, "").prompt_ids.tolist() == given.prompt_ids.tolist()
    with pytest.raises(DataError, match=r"model.teacher_prompt: 'wörd' cannot be encoded"):
        policy.hinted(given, "wörd")


def test_a_function_may_be_the_teacher(tmp_path: Path) -> None:
    def teacher(rollout: Rollout) -> torch.Tensor:
        return rollout.signals["rollout_logprobs"] - 0.25

    run = small(tmp_path, [{"name": "opd"}, "mismatch"])
    assert go(run, signals={"teacher_logprobs": teacher}).records[0]["opd/gap"] == pytest.approx(-0.25, abs=1e-3)


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.teacher 'littered-tiny' has another vocabulary"):
        go(small(tmp_path, "opd", model__teacher="littered-tiny"))
