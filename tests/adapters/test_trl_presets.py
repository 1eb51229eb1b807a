"""Each preset's gradients in TRL are those of float64 on full logits."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from rlstab import PolicyOutputs, TokenBatch, make_plan
from rlstab.presets import PRESETS
from tests.adapters.jobs import EOS, model, scored
from tests.adapters.trl_jobs import recorder, sampler, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

PAD = 0


def full(policy: Any, inputs: dict[str, Tensor], min_p: float | None) -> dict[str, Tensor]:
    """``(B, T)`` signals by their definitions, from all logits at once."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].shape[1]
    logits = policy(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    logp = logits.log_softmax(-1)
    p = logp.exp()
    signals = {
        "logprobs": logp.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1),
        "entropies": -(p * logp).sum(-1),
        "max_logprobs": logp.amax(-1),
        "sum_p_sq": p.square().sum(-1),
    }
    if min_p is not None:
        kept = (p >= min_p * p.amax(-1, keepdim=True)).detach()
        signals["log_kept_mass"] = (p * kept).sum(-1).log()
    return signals


def noisy(asked: list[str], trainer: Any) -> dict[str, Any]:
    """The fixed responses with log-probs of a sampler that is a little off."""
    rollout, draw = sampler()(asked, trainer), random.Random("a little off")
    exact = scored(rollout["prompt_ids"], rollout["completion_ids"])
    rollout["logprobs"] = [[value + draw.gauss(0.0, 0.2) for value in values.tolist()] for values in exact]
    return rollout


def branch(inputs: dict[str, Tensor]) -> Tensor:
    """Every second response is one that a rollout grew from another; TRL has none."""
    return (inputs["rlstab_sequence_ids"] % 2).unsqueeze(-1).expand(inputs["completion_ids"].shape)


def teacher(inputs: dict[str, Tensor]) -> Tensor:
    """Log-probs of a teacher that is sure of some tokens."""
    return -(inputs["completion_ids"] % 5 + 0.5) / 2


@pytest.mark.parametrize("name", PRESETS)
def test_the_gradients_of_a_preset(name: str, tmp_path: Path) -> None:
    objective = PRESETS[name].objective
    beta = max((method.coefficient for method in objective.members if method.name == "kl"), default=0.0)
    given: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    signals = {"branch": branch, "teacher_logprobs": teacher}
    given |= {"beta": beta, "use_bias_correction_kl": beta == 0.0, "extra": {"signals": signals}}
    trainer = trainer_of(tmp_path, objective, sampling=noisy, **given)
    steps = recorder(trainer)
    trainer.train()
    slices, policy, state = trainer._buffered_inputs, model().double(), None
    min_p = objective.signal_options.get("min_p")
    with torch.no_grad():
        first = [full(policy, inputs, min_p)["logprobs"] for inputs in slices]
    for step, bound in zip(steps, (2e-5, 5e-5), strict=True):  # the ratio adds the rounding of log-probs near -15
        live = [full(policy, inputs, min_p) for inputs in slices]
        batches = []
        for inputs, now, before in zip(slices, live, first, strict=True):
            mask = inputs["completion_mask"]
            last = inputs["completion_ids"].gather(1, mask.sum(-1, keepdim=True) - 1).squeeze(1)
            batches.append(
                TokenBatch.from_padded(
                    response_mask=mask,
                    advantages=inputs["advantages"].double(),
                    old_logprobs=before,
                    ref_logprobs=before,
                    rollout_logprobs=inputs["sampling_per_token_logps"].double(),
                    branch=branch(inputs),
                    teacher_logprobs=teacher(inputs).double(),
                    truncated=(last != EOS) & (last != PAD),
                    sequence_ids=inputs["rlstab_sequence_ids"],
                    group_ids=inputs["rlstab_group_ids"],
                    **{key: values.detach() for key, values in now.items()},
                )
            )
        plan = make_plan(objective, batches, state)
        policy.zero_grad()
        for batch, outputs in zip(batches, live, strict=True):
            asked = {key: outputs[key] for key in {"logprobs", *objective.live_needs}}
            plan.loss(batch, PolicyOutputs.from_padded(batch, **asked)).loss.backward(retain_graph=True)
        state = plan.state
        exact = {key: parameter.grad.clone() for key, parameter in policy.named_parameters()}
        largest = max(float(values.abs().max()) for values in exact.values())
        assert largest > 1e-4
        for key, parameter in policy.named_parameters():
            gap = float((step["gradients"][key].double() - exact[key]).abs().max())
            assert gap < bound * max(1.0, largest), key
            with torch.no_grad():
                parameter.copy_(step["weights"][key].double())
        assert plan.kept.tokens == step["kept"][0]
