"""What the errors of the atlas do, measured in the trainer's own code: each function gives the number of a row."""

import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlstab.testing import check_cut_free, trl_loss
from tests.testing import cut_hosts

#: Tokens of the drawn mini-batch for SkyRL.
ROWS, COLUMNS = 32, 1024


def _trainer(folder: str, rollout_func: Any = None, **settings: Any) -> Any:
    from trl import GRPOTrainer

    from tests.adapters.jobs import model
    from tests.adapters.trl_jobs import config, prompts, reward, tokenizer

    made = {"args": config(Path(folder), **settings), "processing_class": tokenizer(), "rollout_func": rollout_func}
    return GRPOTrainer(model=model(), reward_funcs=reward, train_dataset=prompts(), **made)


def cut(host: str, name: str, kind: str) -> float:
    """By how much the gradient of a loss moves under one kind of cut, relative to its norm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hosts
        if name == "trl_luspo":
            with tempfile.TemporaryDirectory() as folder:
                settings = {"loss_type": "luspo", "importance_sampling_level": "token"}
                return check_cut_free(trl_loss(_trainer(folder, **settings)), even=True)[kind].moved
        loss, even = next((loss, even) for one, loss, even in cut_hosts.HOSTS[host]() if one == name)
        return check_cut_free(loss, even=even)[kind].moved


def trl_generation(host: str) -> float:
    """The gradient of one of two optimizer steps of a generation, over that of a mean over the tokens of the step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, loss_type="dapo", steps_per_generation=2, num_iterations=1)
        loss = trl_loss(trainer)
        live = torch.full((4, 6), -1.0, requires_grad=True)
        given = {"logprobs": live, "old_logprobs": live.detach(), "advantages": torch.ones(4, 6)}
        others = {name: torch.full((4, 6), -1.0) for name in ("entropies", "ref_logprobs", "rollout_logprobs")}
        # one micro-batch is the step; the generation has two, so twice its tokens
        held = mock.patch.object(type(trainer.args), "steps_per_generation", property(lambda _: 2, lambda *_: None))
        with held:
            loss(**given, **others, mask=torch.ones(4, 6), tokens=2 * 4 * 6, parts=1, ranks=1).backward()
    assert live.grad is not None
    return float(-live.grad.sum())


def trl_sequence_mask(host: str, length: int) -> float:
    """The mean weight that is left of responses whose every token has an unbiased gap of 0.02 nats.

    TRL sees only the sum over a response; the sums here are the quantiles of what such gaps add up to.
    """
    count, size = 256, 0.02 * length**0.5
    sums = size * torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count) - size**2 / 2
    gap = (sums / length).unsqueeze(1).expand(count, length)
    rollout = {"prompt_ids": [[1]] * count, "completion_ids": [[2] * length] * count, "logprobs": (-gap).tolist()}
    settings = {"use_vllm": True, "per_device_train_batch_size": count, "max_completion_length": length}
    # vLLM is never asked for a response, and the trainer's log-probs are 0
    with tempfile.TemporaryDirectory() as folder, mock.patch("trl.trainer.grpo_trainer.VLLMGeneration"):
        trainer = _trainer(folder, rollout_func=lambda *_: rollout, **settings)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (torch.zeros(count, length), None, None)
    weight = trainer._generate_and_score_completions([{"prompt": "1"}] * count)["importance_sampling_ratio"]
    return float(weight.mean())


def verl_rejection(host: str) -> float:
    """The gradient of the tokens that are left, over that of a mean over them, where half are rejected."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25", "loss_type": "reinforce"}
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=rejection),
    )
    live = torch.full((2, 8), -1.0, requires_grad=True)
    sampled = live.detach().clone()
    sampled[:, ::2] -= 2.0  # beyond the bounds
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=16, global_batch_size=2)
    mask = torch.ones(2, 8)
    get_policy_loss_fn("bypass_mode")(sampled, live, mask, mask, loss_agg_mode="token-mean", config=actor)[0].backward()
    assert live.grad is not None
    return float(-live.grad.sum())


def _skyrl(name: str) -> tuple[Any, Any, dict[str, Tensor]]:
    next(cut_hosts.skyrl())  # what it imports
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.config import AlgorithmConfig

    draw = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, COLUMNS, generator=draw).mul(4).add(1e-3)
    advantages = torch.randn(ROWS, 1, generator=draw).expand(ROWS, COLUMNS)
    tensors = {"old_log_probs": old, "advantages": advantages / (ROWS * COLUMNS), "loss_mask": torch.ones_like(old)}
    return PolicyLossRegistry.get(name), AlgorithmConfig(policy_loss_type=name), tensors


def skyrl_clip_cov(host: str) -> float:
    """Tokens that Clip-Cov clips, with the advantages that SkyRL gives it."""
    function, config, tensors = _skyrl("clip_cov")
    live = tensors["old_log_probs"].clone().requires_grad_()
    function(live, config=config, **tensors)[0].backward()
    assert live.grad is not None
    return float((live.grad == 0).sum())


def skyrl_kl_cov(host: str) -> float:
    """The gradient of KL-Cov's penalty on a token that it chooses, over the policy gradient of the mean token."""
    function, config, tensors = _skyrl("kl_cov")
    live = (tensors["old_log_probs"] + 0.01).requires_grad_()
    plain = tensors["advantages"].abs().mean() * torch.tensor(0.01).exp()
    function(live, config=config, **tensors)[0].backward()
    assert live.grad is not None
    return float(live.grad.max() / plain)
