"""The teacher grades what the policy sampled, with a hint or without, and a token knows how old its weights are."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.errors import DataError, ModelError
from rlstab.models.policy import Sequences, load_policy, require_same_tokens
from rlstab.signals import TopK
from rlstab.train.rollout import Rollout
from tests.train.runs import ALIKE, SHIPPED, SMOOTH, apart, go, metrics, moved, small


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


#: A teacher that differs from the policy, and three optimizer steps on each rollout.
TAUGHT: dict[str, Any] = {"model__teacher": str(SHIPPED), "optimisation__epochs": 3}


def distilled(**settings: Any) -> list[object]:
    return [{"name": "distill", "alone": True, **settings}, {"name": "mismatch"}]


def test_distill_brings_the_policy_to_its_teacher(tmp_path: Path) -> None:
    settings = {**TAUGHT, "optimisation__rollouts": 1}
    for beta in (0.0, 1.0):
        still, moving = (
            go(small(tmp_path / f"{beta} {lr}", distilled(beta=beta), **settings, optimisation__lr=lr)).records[0]
            for lr in (1e-9, 3e-3)
        )
        assert moving["distill/value"] < 0.9 * still["distill/value"]  # a mean over three steps
    start = go(small(tmp_path / "start", distilled())).records[0]  # no other teacher: it starts as its own
    assert abs(start["distill/value"]) < 1e-6


def test_how_a_step_is_cut_does_not_matter_to_distill(tmp_path: Path) -> None:
    for size in (16, 3):
        changes = {**SMOOTH, **TAUGHT, "model__teacher_prompt": "12", "optimisation__micro_batch_size": size}
        go(small(tmp_path / str(size), ["clip_higher", {"name": "distill", "beta": 0.3}], **changes))
    assert moved(tmp_path / "16") > 10 * ALIKE
    assert apart(tmp_path / "16", tmp_path / "3") <= ALIKE
    for mine, theirs in zip(metrics(tmp_path / "16"), metrics(tmp_path / "3"), strict=True):
        assert mine["distill/value"] == pytest.approx(theirs["distill/value"], rel=1e-4)


def test_a_function_may_list_the_likely_tokens_of_a_teacher(tmp_path: Path) -> None:
    """As a server does; the result is that of the model whose tokens they are."""
    policy = load_policy(str(SHIPPED))
    vocabulary = policy.model.config.vocab_size

    def asked(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        every = torch.arange(sequences.response_ids.numel())
        best = TopK.of(policy.teacher(sequences, every), 5, vocabulary, 1.0)
        return tuple(values.view(*sequences.response_ids.shape, 5) for values in (best.ids, best.logprobs))

    go(small(tmp_path / "asked", distilled(beta=0.5)), teacher=asked)
    go(small(tmp_path / "model", distilled(beta=0.5, top_k=5), model__teacher=str(SHIPPED)))
    go(small(tmp_path / "whole", distilled(beta=0.5), model__teacher=str(SHIPPED)))
    values = [metrics(tmp_path / name)[0]["distill/value"] for name in ("asked", "model", "whole")]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert 0 < values[1] < values[2]  # fewer outcomes differ less
    assert apart(tmp_path / "asked", tmp_path / "model") <= ALIKE


def test_a_teacher_without_all_logits_of_the_policy_is_refused() -> None:
    policy, teacher = load_policy(str(SHIPPED)), load_policy(str(SHIPPED))
    require_same_tokens(policy, teacher, "one", distributions=True)
    policy.model.config.vocab_size += 1
    with pytest.raises(ModelError, match=r"'one' has logits for \d+ tokens and the policy for \d+"):
        require_same_tokens(policy, teacher, "one", distributions=True)
    require_same_tokens(policy, teacher, "one", distributions=False)
    headless = dataclasses.replace(teacher)
    vars(headless)["head"] = None
    with pytest.raises(ModelError, match=r"the logits of model\.teacher 'one' are more than a product"):
        require_same_tokens(policy, headless, "one", distributions=True)
