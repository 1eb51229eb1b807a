"""`support_replay` in TRL's trainer, whose ``rollout_func`` returns the tokens that the sampler kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from rlstab.adapters.trl import hooks
from rlstab.errors import MissingSignal, OutOfRange, RlstabError, ShapeError
from tests.adapters.jobs import farthest, largest, model
from tests.adapters.trl_jobs import recorder, run, sampler, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

CLIP, REPLAY = {"name": "clip_higher", "low": 0.2, "high": 0.2}, {"name": "support_replay"}
FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@torch.no_grad()
def kept(prompt: list[int], ids: list[int]) -> tuple[list[list[int]], list[float]]:
    """Of each token of a response the two likeliest and itself, but all at each third; and its log-prob over these."""
    logits = model()(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    support = [sorted({*row.topk(2).indices.tolist(), token}) for row, token in zip(logits, ids, strict=True)]
    support[::3] = [[]] * len(support[::3])
    over = [row if not of else row[of] for row, of in zip(logits, support, strict=True)]
    logprobs = [float(row[token] - few.logsumexp(0)) for row, few, token in zip(logits, over, ids, strict=True)]
    return support, logprobs


def sampling(change: Any = lambda support: support) -> Any:
    """The fixed responses, with their support."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = sampler()(prompts, trainer)
        found = [kept(*each) for each in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
        return output | {"support": change([support for support, _ in found]), "logprobs": [each for _, each in found]}

    return rollout


def test_the_loss_is_over_the_tokens_that_were_kept(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [CLIP, REPLAY], sampling=sampling(), max_steps=1)
    steps, parts = recorder(trainer), list[Any]()
    trainer.on_part = lambda inputs, *_: parts.append(inputs)
    trainer.train()
    (inputs,), log = parts, trainer.state.log_history[0]
    assert abs(log["rlstab/ratio/mean"] - 1) < 1e-5
    assert log["rlstab/ratio/support_mass"] < 0.95
    by_hand, losses = model(), []
    mask, width = inputs["completion_mask"].bool(), inputs["prompt_ids"].shape[1]
    logits = by_hand(
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
    ).logits[:, width - 1 : -1]
    for row, (here, ids) in enumerate(zip(mask, inputs["completion_ids"], strict=True)):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        support, _ = kept(prompt, ids[here].tolist())
        for of, few, token in zip(support, logits[row], ids[here], strict=False):
            logprob = few[token] - (few[of] if of else few).logsumexp(0)
            losses.append(-inputs["advantages"][row] * logprob)
    (torch.stack(losses).sum() / mask.sum()).backward()
    expected = {name: weight.grad for name, weight in by_hand.named_parameters()}
    assert farthest(steps[0], {"gradients": expected}) < 1e-5 * largest(steps[0])


def test_the_cut_does_not_matter_and_the_support_does(tmp_path: Path) -> None:
    whole, parts = (
        run(tmp_path / name, [CLIP, REPLAY, {"name": "s2t"}], sampling=sampling(), dumped=True, **cut)
        for name, cut in (("whole", {}), ("parts", FOUR))
    )
    without = run(tmp_path / "without", [CLIP, {"name": "s2t"}], sampling=sampling(), extra={"head": "rlstab"})
    for first, second in zip(whole["steps"], parts["steps"], strict=True):
        assert farthest(first, second) < 1e-5 * max(1.0, largest(first))
    assert farthest(whole["steps"][0], without["steps"][0]) > 1e-2 * largest(whole["steps"][0])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda support: None, MissingSignal, "'support'.* rollout_func"),
        (lambda support: [[*each, *each, *each, *each] for each in support], ShapeError, "'support' lists"),
        (lambda support: [[ids and [0, 0] for ids in each] for each in support], OutOfRange, "kept twice"),
        (lambda support: [[ids and [0] for ids in each] for each in support], OutOfRange, "not in their support"),
        (lambda support: [[ids and [*ids, 10**6] for ids in each] for each in support], OutOfRange, "the vocabulary"),
    ],
    ids=["none", "long", "twice", "others", "unknown"],
)
def test_a_column_that_does_not_fit_is_refused(change: Any, error: type, text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        trainer_of(tmp_path, [CLIP, REPLAY], sampling=sampling(change)).train()


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        ([CLIP, REPLAY], {"extra": {"rollout_func": None}}, "'support_replay' .*rollout_func"),
        ([CLIP, REPLAY], {"extra": {"head": "trl"}}, "'support_replay' .*head='rlstab'"),
        (
            [CLIP, REPLAY, {"name": "kl", "coefficient": 0.1}],
            {"beta": 0.1, "use_bias_correction_kl": False},
            "whole vocabulary",
        ),
        ([CLIP, REPLAY], {"use_vllm": True}, "vllm_importance_sampling_correction=False"),
    ],
)
def test_what_has_no_log_prob_over_the_support_is_refused(
    objective: Any, changes: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(RlstabError, match=f"(?s){text}"):
        trainer_of(tmp_path, objective, **changes)


def test_the_warning_of_filters_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(hooks.logger, "warning", warned.append)
    trainer_of(tmp_path, [CLIP, REPLAY], top_p=0.8)
    assert warned == []
    trainer_of(tmp_path, [CLIP], top_p=0.8)
    assert ["support_replay" in text for text in warned] == [True]
