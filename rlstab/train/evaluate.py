"""Evaluation on held-out prompts: sampled mean, pass@k, greedy."""

from __future__ import annotations

import math

import torch
from accelerate.utils import gather_object
from einops import rearrange
from torch import Tensor

from rlstab.config.settings import EvaluationSettings, RolloutSettings
from rlstab.tasks import Task
from rlstab.tasks.rewards import Rewards, Scores, score
from rlstab.train.policy import Policy
from rlstab.train.sampling import sample

#: Evaluation draws its random numbers from a stream of its own.
SEED = 1_000_003


def pass_at(correct: Tensor, k: int) -> float:
    """Unbiased pass@k, ``1 - C(n - c, k) / C(n, k)`` averaged over prompts (arXiv 2107.03374 eq. 1).

    Args:
        correct: ``(P, n)`` bool.
        k: at most n.
    """
    samples = correct.shape[1]
    return sum(1 - math.comb(samples - int(row.sum()), k) / math.comb(samples, k) for row in correct) / len(correct)


def evaluate(
    policy: Policy,
    task: Task,
    rollout: RolloutSettings,
    settings: EvaluationSettings,
    rank: int = 0,
    world: int = 1,
    rewards: Rewards = Rewards(),  # noqa: B008  # frozen
) -> dict[str, float]:
    """Metrics over all ranks. The reward is the weighted sum, as in training; each reward has its mean as well.

    A response counts as correct for pass@k when the task's own scorer gives it at least 1; where that is not among the
    rewards, when their sum is.

    The draws depend on the prompt and the sample number alone, so evaluations of one run are comparable.
    """
    size, samples = task.size["eval"], settings.samples
    mine = range(rank, settings.prompts if size is None else min(settings.prompts, size), world)
    examples = [task.example("eval", index) for index in mine]
    repeated = [example for example in examples for _ in range(samples)]
    ids = torch.tensor([index * samples + number for index in mine for number in range(samples)], dtype=torch.int64)
    special = not task.keeps_special_tokens
    sampled = sample(
        policy,
        [example.asked for example in repeated],
        ids,
        rollout,
        seed=SEED,
        needs={"entropies"},
        skip_special_tokens=special,
    )
    scores = score(task, repeated, sampled.texts, rewards=rewards)
    greedy = Scores.joined([])
    if settings.greedy:
        prompts, ids = [example.asked for example in examples], torch.tensor(list(mine), dtype=torch.int64)
        best = sample(policy, prompts, ids, rollout, seed=SEED, greedy=True, skip_special_tokens=special)
        greedy = score(task, examples, best.texts, rewards=rewards)
    entropies = sampled.signals["entropies"][sampled.response_mask].double()
    own = {
        "rewards": rearrange(scores.rewards, "(p n) -> p n", n=samples),
        "parts": {name: rearrange(part, "(p n) -> p n", n=samples) for name, part in scores.parts.items()},
        "greedy": greedy.rewards,
        "entropy": (float(entropies.sum()), len(entropies)),
        "ended": (int(sampled.ended.sum()), len(sampled.ended)),
        "errors": len(scores.errors) + len(greedy.errors),
        "timed_out": len(scores.timed_out) + len(greedy.timed_out),
    }
    ranks = gather_object([own])
    total = torch.cat([each["rewards"] for each in ranks])
    parts = {name: torch.cat([each["parts"][name] for each in ranks]) for name in rewards.names}
    entropy, tokens = map(sum, zip(*(each["entropy"] for each in ranks), strict=True))
    ended, responses = map(sum, zip(*(each["ended"] for each in ranks), strict=True))
    metrics = {
        "eval/mean": float(total.mean()),
        **{f"eval/reward/{name}": float(part.mean()) for name, part in parts.items()},
        "eval/entropy": entropy / max(tokens, 1),
        "eval/length": tokens / max(responses, 1),
        "eval/ended": ended / max(responses, 1),
        "eval/scorer_errors": float(sum(each["errors"] for each in ranks)),
        "eval/scorer_timeouts": float(sum(each["timed_out"] for each in ranks)),
    }
    if settings.greedy:
        metrics["eval/greedy"] = float(torch.cat([each["greedy"] for each in ranks]).mean())
    correct = (parts[rewards.correctness] if rewards.correctness is not None else total) >= 1
    for k in settings.pass_at:
        metrics[f"eval/pass@{k}"] = pass_at(correct, k)
    return metrics
