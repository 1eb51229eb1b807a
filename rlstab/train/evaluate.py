"""Evaluation on held-out prompts: sampled mean, pass@k, greedy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from einops import rearrange
from torch import Tensor

from rlstab.config.runs import EvaluationSettings, RolloutSettings
from rlstab.tasks import Task
from rlstab.train.policy import Policy
from rlstab.train.reward import Scores, score
from rlstab.train.sampling import grouped, sample

#: Evaluation draws its random numbers from a stream of its own.
SEED = 1_000_003


@dataclass(frozen=True)
class Share:
    """Which of a list of items this rank works on."""

    rank: int
    world: int

    def of(self, count: int) -> list[int]:
        """Indices of this rank, every ``world``-th."""
        return list(range(self.rank, count, self.world))


def pass_at(correct: Tensor, k: int) -> float:
    """Unbiased pass@k, ``1 - C(n - c, k) / C(n, k)`` averaged over prompts (arXiv 2107.03374 eq. 1).

    Args:
        correct: ``(P, n)`` bool.
        k: at most n.
    """
    samples = correct.shape[1]
    return sum(1 - math.comb(samples - int(row.sum()), k) / math.comb(samples, k) for row in correct) / len(correct)


def evaluate(
    policy: Policy, task: Task, rollout: RolloutSettings, settings: EvaluationSettings, share: Share
) -> dict[str, float]:
    """Metrics over all ranks. A response counts as correct for pass@k when its reward is at least 1.

    The draws depend on the prompt and the sample number alone, so evaluations of one run are comparable.
    """
    size = task.size["eval"]
    count = settings.prompts if size is None else min(settings.prompts, size)
    mine = share.of(count)
    examples = [task.example("eval", index) for index in mine]
    prompts = [one.prompt for one in examples]

    repeated = grouped(prompts, settings.samples)
    ids = torch.tensor([index * settings.samples + one for index in mine for one in range(settings.samples)])
    sampled = sample(
        policy,
        repeated,
        ids.long(),
        rollout,
        seed=SEED,
        needs={"entropies"},
        skip_special_tokens=not task.keeps_special_tokens,
    )
    scores = score(task, [one for one in examples for _ in range(settings.samples)], sampled.texts)
    greedy = Scores(torch.zeros(0, dtype=torch.float64))
    if settings.greedy:
        best = sample(
            policy,
            prompts,
            torch.tensor(mine).long(),
            rollout,
            seed=SEED,
            greedy=True,
            skip_special_tokens=not task.keeps_special_tokens,
        )
        greedy = score(task, examples, best.texts)
    mask = sampled.sequences.response_mask
    entropies = sampled.signals["entropies"][mask].double()
    rank = {
        "rewards": rearrange(scores.rewards, "(p n) -> p n", n=settings.samples),
        "greedy": greedy.rewards,
        "entropy": (float(entropies.sum()), int(mask.sum())),
        "ended": (int(sampled.ended.sum()), len(sampled.ended)),
        "errors": len(scores.errors) + len(greedy.errors),
        "timed_out": len(scores.timed_out) + len(greedy.timed_out),
    }
    ranks = gather_object([rank])
    rewards = torch.cat([one["rewards"] for one in ranks])
    entropy, tokens = map(sum, zip(*(one["entropy"] for one in ranks), strict=True))
    ended, responses = map(sum, zip(*(one["ended"] for one in ranks), strict=True))
    metrics = {
        "eval/mean": float(rewards.mean()),
        "eval/entropy": entropy / max(tokens, 1),
        "eval/length": tokens / max(responses, 1),
        "eval/ended": ended / max(responses, 1),
        "eval/scorer_errors": float(sum(one["errors"] for one in ranks)),
        "eval/scorer_timeouts": float(sum(one["timed_out"] for one in ranks)),
    }
    if settings.greedy:
        metrics["eval/greedy"] = float(torch.cat([one["greedy"] for one in ranks]).mean())
    for k in settings.pass_at:
        metrics[f"eval/pass@{k}"] = pass_at(rewards >= 1, k)
    return metrics
