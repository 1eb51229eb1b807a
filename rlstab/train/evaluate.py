"""Evaluation on held-out prompts: mean reward of samples, pass@k, greedy decoding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.models.policy import Policy
from rlstab.tasks import Task
from rlstab.tasks.rewards import Rewards, Scores, score
from rlstab.train.rollout import Rollout
from rlstab.train.sampling import sample
from rlstab.train.tracking import Metrics

#: The seed of evaluation, so that its random numbers are not those of training.
SEED = 1_000_003


def pass_at(correct: Tensor, k: int) -> float:
    """Unbiased pass@k, ``1 - C(n - c, k) / C(n, k)`` averaged over prompts (arXiv 2107.03374 eq. 1).

    Args:
        correct: ``(P, n)`` bool.
        k: at most n.
    """
    samples = correct.shape[1]
    shares = [1 - math.comb(samples - int(row.sum()), k) / math.comb(samples, k) for row in correct]
    return sum(shares) / max(len(shares), 1)


def evaluate(policy: Policy, task: Task, rewards: Rewards, run: RunConfig, rank: int, world: int) -> dict[str, float]:
    """Metrics over all ranks. The reward is the weighted sum, as in training; each reward also has its own mean.

    For pass@k a response is correct if the task's scorer gives it at least 1, or, if that scorer is not among the
    rewards, if their weighted sum is at least 1.

    Random numbers depend only on the prompt and the sample number, so evaluations of one run are comparable.

    Args:
        policy: the model to evaluate.
        task: where the prompts come from.
        rewards: what each response is measured by.
        run: the configuration.
        rank: this process.
        world: the number of processes, which share the prompts.

    Returns:
        values by metric name, the same on every rank.
    """
    settings, size, metrics = run.evaluation, task.size["eval"], Metrics()
    samples = settings.samples
    mine = range(rank, settings.prompts if size is None else min(settings.prompts, size), world)
    examples = [task.example("eval", index) for index in mine]

    def scored(repeat: int, *, greedy: bool) -> tuple[Rollout, Scores]:
        ids = torch.tensor([index * repeat + number for index in mine for number in range(repeat)], dtype=torch.int64)
        repeated = [example for example in examples for _ in range(repeat)]
        parts: list[Scores] = []

        def score_batch(start: int, texts: list[str], whole: list[str]) -> None:
            parts.append(score(task, repeated[start : start + len(texts)], texts, rewards=rewards, whole=whole))

        sampled = sample(
            policy,
            repeated,
            ids,
            run.rollout,
            seed=SEED,
            needs={"entropies"},
            greedy=greedy,
            skip_special_tokens=not task.keeps_special_tokens,
            on_texts=score_batch,
        )
        scores = Scores.joined(parts, rewards)
        metrics.add("eval/scorer_errors", float(len(scores.errors)))
        metrics.add("eval/scorer_timeouts", float(scores.timed_out.sum()))
        return sampled, scores

    sampled, scores = scored(samples, greedy=False)
    entropies, count = sampled.signals["entropies"][sampled.response_mask].double(), len(sampled)
    metrics.mean("eval/mean", float(scores.rewards.sum()), count)
    for name in rewards.names:
        metrics.mean(f"eval/reward/{name}", float(scores.parts[name].sum()), count)
    metrics.mean("eval/entropy", float(entropies.sum()), len(entropies))
    metrics.mean("eval/length", len(entropies), count)
    metrics.mean("eval/ended", int(sampled.ended.sum()), count)
    correct = (scores.rewards if rewards.correctness is None else scores.parts[rewards.correctness]) >= 1
    for k in settings.pass_at or ():
        metrics.mean(f"eval/pass@{k}", pass_at(correct.view(-1, samples), k) * len(examples), len(examples))
    if settings.greedy:
        metrics.mean("eval/greedy", float(scored(1, greedy=True)[1].rewards.sum()), len(examples))
    return metrics.collect()
