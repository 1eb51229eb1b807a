"""The objective that is derived from verl's settings has the gradient of verl's own loss."""

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]', or nox -s verl")

from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from rlstab import PolicyOutputs, TokenBatch, load_objective, make_plan
from rlstab.adapters.host_objective import VERL_LOSS, verl_objective_of
from tests.adapters import jobs
from tests.adapters.host_table import MODES, VERL

LOSS_FIELDS = set(jobs.defaults_of(PolicyLossConfig))
WIDE = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.6}
#: share 1 of the candidates: Clip-Cov draws among more
COVARIANCE = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}


def test_the_defaults_are_verls() -> None:
    both = jobs.defaults_of(ActorConfig) | jobs.defaults_of(PolicyLossConfig)
    assert both == {**both, **VERL_LOSS}
    assert {*MODES, "dro", "bypass_mode"} == set(core_algos.POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize(
    "settings", [*({"loss_mode": mode, **WIDE, **COVARIANCE} for mode in MODES), *VERL[len(MODES) + 2 :]], ids=str
)
def test_the_gradient_is_verls(settings: dict[str, Any]) -> None:
    if settings.get("loss_agg_mode") == "token-sum":
        pytest.skip("no objective sums tokens")
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1] * 6, [1, 1, 1, 1, 0, 0]]).double()
    old = -torch.rand(4, 6, generator=generator, dtype=torch.float64) * 2 - 0.1
    start = (old + 0.4 * torch.randn(4, 6, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    ref, entropies = old - 0.1, torch.rand(4, 6, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5, -1.0, 0.7], dtype=torch.float64)
    chosen = {name: value for name, value in settings.items() if name in LOSS_FIELDS}
    info = {"batch_num_tokens": int(mask.sum()), "global_batch_size": 4, "dp_size": 1}
    info |= {"loss_scale_factor": settings["loss_scale_factor"]} if "loss_scale_factor" in settings else {}
    config = ActorConfig(
        strategy="fsdp",
        use_dynamic_bsz=True,
        rollout_n=1,
        policy_loss=PolicyLossConfig(**chosen),
        global_batch_info=info,
        **{name: value for name, value in settings.items() if name not in LOSS_FIELDS},
    )
    live, paid = start.clone().requires_grad_(), entropies.clone().requires_grad_()
    average = {"loss_mask": mask, "loss_agg_mode": config.loss_agg_mode, **info}
    loss, _ = core_algos.get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=live,
        advantages=advantages[:, None].expand(4, 6),
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    loss = loss - config.entropy_coeff * core_algos.agg_loss(loss_mat=paid, **average)
    if config.use_kl_loss:
        penalty = core_algos.kl_penalty(live, ref, config.kl_loss_type)
        loss = loss + config.kl_loss_coef * core_algos.agg_loss(loss_mat=penalty, **average)
    wanted = torch.autograd.grad(loss, (live, paid), allow_unused=True)

    objective = load_objective(verl_objective_of(settings))
    batch = TokenBatch.from_padded(
        response_mask=mask,
        advantages=advantages,
        **{"old_logprobs": old, "logprobs": start, "ref_logprobs": ref, "entropies": entropies},
    )
    now = {"logprobs": start.clone().requires_grad_(), "entropies": entropies.clone().requires_grad_()}
    given = {name: now[name] for name in {"logprobs", *objective.live_needs}}
    out = make_plan(objective, [batch]).loss(batch, PolicyOutputs.from_padded(batch, **given)).loss
    found = torch.autograd.grad(out, tuple(now.values()), allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        zero = torch.zeros_like(mask)
        assert torch.allclose((zero if ours is None else ours) * mask, zero if theirs is None else theirs, atol=1e-9)
    assert float(wanted[0].abs().max()) > 1e-3 / settings.get("loss_scale_factor", 1)
