"""`distill` with `model.teacher: sampler`: the divergence to the distributions at which each token was drawn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.errors import ConfigError, ModelError
from rlstab.models.decoding import Decoder
from rlstab.models.policy import load_policy
from rlstab.signals import TopK, token_signals_from_logits
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Example
from rlstab.train import reference_and_teacher
from rlstab.train.generate import sample
from tests.train.runs import (
    ALIKE,
    SHIPPED,
    SMOOTH,
    apart,
    column,
    forget_newest,
    go,
    metrics,
    moved,
    small,
)

SAMPLER: dict[str, Any] = {"model__teacher": "sampler"}


def trust(**settings: Any) -> list[object]:
    return ["clip_higher", {"name": "distill", "beta": 0.0, "coefficient": 0.3, **settings}]


@pytest.mark.parametrize("k", [3, 4096])
def test_a_rollout_keeps_the_distributions_at_which_it_drew(k: int) -> None:
    policy = load_policy(str(SHIPPED))
    vocabulary = policy.model.config.vocab_size
    settings = small(Path(), "clip_higher", rollout__temperature=0.7, rollout__top_p=0.8).rollout
    examples = [Example("12=", 0), Example("7=", 0)]
    decoder = Decoder(policy, settings, 3, ["logprobs"], {"sampler_k": k})
    (rollout,) = sample(decoder, examples, ResponseBatch.of([0.0] * 2, torch.arange(2), limit=settings.max_new_tokens))
    sequences = rollout.sequences
    index = sequences.response_mask.reshape(-1).nonzero().squeeze(-1)
    best = TopK.of(policy.teacher(sequences, index), min(k, vocabulary), vocabulary, 0.7)
    kept = sequences.sampler_logprobs.flatten(0, 1)[index]
    torch.testing.assert_close(kept, best.logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(sequences.sampler_ids.flatten(0, 1)[index][:, 0].long(), best.ids[:, 0])
    if k > vocabulary:
        torch.testing.assert_close(kept.exp().sum(-1), torch.ones(len(index)))


@pytest.mark.parametrize("top_k", [None, 3])
def test_it_is_zero_at_the_sampler_and_grows_with_the_distance(top_k: int | None, tmp_path: Path) -> None:
    def values(name: str, **settings: Any) -> list[float]:
        run = small(tmp_path / name, trust(top_k=top_k), **SAMPLER, **settings)
        return column(go(run).records, "distill/value")

    still = values("still", optimisation__lr=1e-9)
    assert still == pytest.approx([0.0] * 2, abs=1e-6)
    old, later = values("old", rollout__staleness=1, optimisation__lr=3e-3)
    assert abs(old) < 1e-6  # the weights at the start sampled both rollouts
    assert later > 1e-4
    assert values("noise", rollout__weight_noise=0.3)[0] > 1e-3  # another sampler from the first step on


def test_how_a_step_is_cut_does_not_matter(tmp_path: Path) -> None:
    told = {**SMOOTH, **SAMPLER, "optimisation__epochs": 3}
    for size in (16, 3):
        go(small(tmp_path / str(size), trust(beta=0.3, top_k=4), **told, optimisation__micro_batch_size=size))
    assert moved(tmp_path / "16") > 10 * ALIKE
    assert apart(tmp_path / "16", tmp_path / "3") <= ALIKE
    assert column(metrics(tmp_path / "16"), "distill/value") == pytest.approx(
        column(metrics(tmp_path / "3"), "distill/value"), rel=1e-4
    )


def test_a_waiting_rollout_keeps_them_in_a_checkpoint(tmp_path: Path) -> None:
    told = {**SAMPLER, "rollout__staleness": 1, "tracking__checkpoint_every": 1, "optimisation__rollouts": 3}
    run = small(tmp_path / "run", trust(), **told)
    go(run)
    whole = metrics(tmp_path / "run")
    forget_newest(tmp_path / "run")
    go(run, resume=True)
    assert metrics(tmp_path / "run") == whole
    assert column(whole, "distill/value")[-1] > 0


def test_a_list_of_all_tokens_is_the_whole_distribution() -> None:
    policy, sampler = (torch.randn(5, 9, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    best = sampler.topk(9)
    logits = policy.clone().requires_grad_()
    found = token_signals_from_logits(
        logits, best.indices[:, 0], needs={"teacher_divergence"}, teacher=TopK(best.indices, best.values), beta=0.0
    ).teacher_divergence
    expected = (sampler.exp() * (sampler - policy)).sum(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, policy.exp() - sampler.exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("objective", "settings", "text"),
    [
        ("opd", {}, "'rollout_logprobs'"),
        (trust(), {"model__teacher_prompt": "12"}, "Remove the hint"),
    ],
)
def test_what_the_sampler_cannot_teach_is_refused(objective: Any, settings: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        small(tmp_path, objective, **SAMPLER, **settings)


def test_a_large_vocabulary_is_not_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_and_teacher, "MOST_WHOLE", 8)
    with pytest.raises(ModelError, match="Set `top_k` of 'distill'"):
        go(small(tmp_path, trust(), **SAMPLER))
