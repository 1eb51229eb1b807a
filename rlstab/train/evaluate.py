"""Evaluation on held-out prompts: sampled mean, pass@k, greedy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from einops import rearrange
from torch import Tensor

from rlstab.config.settings import EvaluationSettings, RolloutSettings
from rlstab.tasks import Task
from rlstab.tasks.rewards import Rewards, Scores, score
from rlstab.train.policy import Policy
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
    policy: Policy,
    task: Task,
    rollout: RolloutSettings,
    settings: EvaluationSettings,
    share: Share,
    rewards: Rewards = Rewards(),  # noqa: B008  # frozen
) -> dict[str, float]:
    """Metrics over all ranks. The reward is the weighted sum, as in training; each reward has its mean as well.

    A response counts as correct for pass@k when the task's own scorer gives it at least 1; where that is not among the
    rewards, when their sum is.

    The draws depend on the prompt and the sample number alone, so evaluations of one run are comparable.
    """
    size = task.size["eval"]
    count = settings.prompts if size is None else min(settings.prompts, size)
    mine = share.of(count)
    examples = [task.example("eval", index) for index in mine]
    prompts = [one.asked for one in examples]

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
    scores = score(task, [one for one in examples for _ in range(settings.samples)], sampled.texts, rewards=rewards)
    greedy = Scores.joined([])
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
        greedy = score(task, examples, best.texts, rewards=rewards)
    mask = sampled.sequences.response_mask
    entropies = sampled.signals["entropies"][mask].double()
    rank = {
        "rewards": rearrange(scores.rewards, "(p n) -> p n", n=settings.samples),
        "parts": {name: rearrange(one, "(p n) -> p n", n=settings.samples) for name, one in scores.parts.items()},
        "greedy": greedy.rewards,
        "entropy": (float(entropies.sum()), int(mask.sum())),
        "ended": (int(sampled.ended.sum()), len(sampled.ended)),
        "errors": len(scores.errors) + len(greedy.errors),
        "timed_out": len(scores.timed_out) + len(greedy.timed_out),
    }
    ranks = gather_object([rank])
    found = torch.cat([one["rewards"] for one in ranks])
    parts = {name: torch.cat([one["parts"][name] for one in ranks]) for name in rewards.names}
    entropy, tokens = map(sum, zip(*(one["entropy"] for one in ranks), strict=True))
    ended, responses = map(sum, zip(*(one["ended"] for one in ranks), strict=True))
    metrics = {
        "eval/mean": float(found.mean()),
        **{f"eval/reward/{name}": float(one.mean()) for name, one in parts.items()},
        "eval/entropy": entropy / max(tokens, 1),
        "eval/length": tokens / max(responses, 1),
        "eval/ended": ended / max(responses, 1),
        "eval/scorer_errors": float(sum(one["errors"] for one in ranks)),
        "eval/scorer_timeouts": float(sum(one["timed_out"] for one in ranks)),
    }
    if settings.greedy:
        metrics["eval/greedy"] = float(torch.cat([one["greedy"] for one in ranks]).mean())
    correct = (parts[rewards.correctness] if rewards.correctness is not None else found) >= 1
    for k in settings.pass_at:
        metrics[f"eval/pass@{k}"] = pass_at(correct, k)
    return metrics
