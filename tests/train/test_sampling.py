"""Sampling: a response depends on its identity alone, and the signals are those of the distribution sampled from."""

from __future__ import annotations

import pytest
import torch

from rlstab.config.settings import RolloutSettings
from rlstab.tasks import Countdown
from rlstab.train.policy import Policy, load_policy
from rlstab.train.sampling import Sampled, _invert, grouped, sample
from rlstab.train.step import forward_signals
from tests.tolerances import depth, rounding

SIGNALS = {"logprobs", "entropies", "max_logprobs", "log_kept_mass", "sum_p_sq"}
#: Bound on the logits of the model on the prompts of the task.
LOGIT = 20.0


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("countdown-tiny")


def prompts(count: int) -> list[str]:
    task = Countdown()
    return grouped([task.example("train", index).prompt for index in range(count)], 4)


def draw(policy: Policy, texts: list[str], ids: torch.Tensor, **changes: object) -> Sampled:
    settings = RolloutSettings(**{"max_new_tokens": 20, **changes})  # type: ignore[arg-type]
    return sample(
        policy, texts, ids, settings, seed=3, needs=SIGNALS, options={"min_p": 0.1}, skip_special_tokens=False
    )


def test_a_response_depends_on_its_identity_and_not_on_its_batch(policy: Policy) -> None:
    texts, ids = prompts(4), torch.arange(16)
    whole = draw(policy, texts, ids)
    assert draw(policy, texts, ids, batch_size=3).texts == whole.texts
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    shuffled = draw(policy, [texts[int(one)] for one in order], ids[order])
    assert shuffled.texts == [whole.texts[int(one)] for one in order]
    assert len(set(whole.texts[:4])) > 1, "members of a group are sampled apart"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_signals_of_the_sampler_equal_those_of_a_forward(policy: Policy, temperature: float) -> None:
    rollout = draw(policy, prompts(4), torch.arange(16), temperature=temperature)
    again = forward_signals(policy, rollout.sequences, torch.arange(16), temperature, SIGNALS, {"min_p": 0.1})
    close = rounding(torch.float32, LOGIT / temperature, depth(policy.model, 40))
    for name in SIGNALS:
        torch.testing.assert_close(rollout.signals[name], again[name], atol=close, rtol=0)


def test_the_mask_ends_with_the_first_eos(policy: Policy) -> None:
    rollout = draw(policy, prompts(8), torch.arange(32), max_new_tokens=12)
    ids, mask = rollout.sequences.response_ids, rollout.sequences.response_mask
    assert 0 < int(rollout.ended.sum()) < 32, "the length is chosen so that some end and some are cut"
    for row in range(32):
        tokens = ids[row][mask[row]].tolist()
        ends = [place for place, token in enumerate(tokens) if token in policy.eos_ids]
        assert ends == ([len(tokens) - 1] if rollout.ended[row] else [])
        assert mask[row].long().diff().le(0).all(), "no token counts after the end"


def test_a_response_that_ends_exactly_at_the_limit_ended(policy: Policy) -> None:
    """A response does not depend on the limit, so each that ended can be sampled with its length as the limit."""
    long = draw(policy, prompts(4), torch.arange(16), max_new_tokens=40)
    lengths = long.sequences.response_mask.sum(-1)
    limit = int(lengths[long.ended].median())
    short = draw(policy, prompts(4), torch.arange(16), max_new_tokens=limit)
    assert short.ended.tolist() == (long.ended & (lengths <= limit)).tolist()
    exactly = lengths == limit
    assert short.ended[exactly].any()
    assert not short.ended.all(), "some are cut at the limit"


def test_greedy_equals_generate_of_transformers(policy: Policy) -> None:
    texts = prompts(8)[::4]
    settings = RolloutSettings(max_new_tokens=20)
    ours = sample(policy, texts, torch.arange(8), settings, seed=0, greedy=True, skip_special_tokens=False)
    ids, mask = policy.encode(texts, 20, chat=False)
    theirs = policy.model.generate(input_ids=ids, attention_mask=mask.long(), max_new_tokens=20, do_sample=False)
    for row, text in enumerate(ours.texts):
        expected = policy.tokenizer.decode(theirs[row, ids.shape[1] :], skip_special_tokens=False)
        assert text == expected.split("<pad>")[0]


def test_a_stop_text_ends_a_response(policy: Policy) -> None:
    rollout = draw(policy, prompts(4), torch.arange(16), stop=",")
    for text, ended in zip(rollout.texts, rollout.ended, strict=True):
        assert ended
        assert text.count(",") == (0 if "$" in text else 1)
        assert text.endswith((",", "$"))


def test_inversion_draws_each_token_with_its_probability() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    count = 20_000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = _invert(probabilities.expand(count, -1), draws)
    shares = torch.bincount(chosen, minlength=6) / count
    # each end of a token's interval lies between two draws, or by its rounding beside the next
    torch.testing.assert_close(shares, probabilities, atol=4 / count, rtol=0)
    edges = _invert(probabilities.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert edges.tolist() == [1, 4], "never a token of probability 0, at either end"


def test_sampling_nothing_gives_an_empty_rollout(policy: Policy) -> None:
    rollout = draw(policy, [], torch.arange(0))
    assert rollout.texts == []
    assert rollout.sequences.response_ids.shape == (0, 0)
