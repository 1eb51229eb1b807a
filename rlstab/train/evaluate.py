"""Evaluation on held-out prompts: mean reward of samples, pass@k, greedy decoding."""

import math

import torch
from torch import Tensor

from rlstab.models.policy import Policy
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks.rewards import Scores
from rlstab.train.generate import Generator
from rlstab.train.rollout import Rollout
from rlstab.train.tracking import Metrics


def pass_at(correct: Tensor, k: int) -> float:
    """Unbiased pass@k, ``1 - C(n - c, k) / C(n, k)`` averaged over prompts (arXiv 2107.03374 eq. 1).

    Args:
        correct: ``(P, n)`` bool.
        k: the number that is drawn, at most n.
    """
    samples = correct.shape[1]
    shares = [1 - math.comb(samples - int(row.sum()), k) / math.comb(samples, k) for row in correct]
    return sum(shares) / max(len(shares), 1)


def evaluate(policy: Policy, generator: Generator, *, cut: bool = False) -> dict[str, float]:
    """Metrics over all ranks. The reward is the weighted sum, as in training; each reward also has its own mean.

    For pass@k a response is correct if the task's scorer gives it at least 1, or, if that scorer is not among the
    rewards, if their weighted sum is at least 1.

    Random numbers depend only on the prompt and the sample number, so evaluations of one run are comparable.

    Args:
        policy: the model to evaluate.
        generator: samples and scores; the ranks share the prompts.
        cut: sample with the top-p and top-k of the run.

    Returns:
        values by metric name, the same on every rank.
    """
    run, rewards = generator.run, generator.rewards
    settings, size, metrics = run.evaluation, generator.task.size["eval"], Metrics()
    samples = settings.samples
    indices = range(generator.rank, settings.prompts if size is None else min(settings.prompts, size), generator.world)
    examples = [generator.task.example("eval", index) for index in indices]

    def scored(repeat: int, *, greedy: bool) -> tuple[Rollout, Scores]:
        ids = [index * repeat + number for index in indices for number in range(repeat)]
        repeated = [example for example in examples for _ in range(repeat)]
        planned = ResponseBatch.of(torch.zeros(len(ids)), sequence_ids=ids, limit=run.rollout.max_new_tokens)
        sampled, scores = generator.answered(policy, "eval", repeated, planned, Metrics(), greedy=greedy, cut=cut)
        metrics.sums["eval/scorer_errors"] += float(len(scores.errors))
        metrics.sums["eval/scorer_timeouts"] += float(scores.timed_out.sum())
        return sampled, scores

    sampled, scores = scored(samples, greedy=False)
    entropies, count = sampled.signals["entropies"][sampled.response_mask].double(), len(sampled)
    metrics.mean("eval/mean", float(scores.rewards.sum()), count)
    for name in rewards.names:
        metrics.mean(f"eval/reward/{name}", float(scores.parts[name].sum()), count)
    metrics.mean("eval/entropy", float(entropies.sum()), len(entropies))
    metrics.mean("eval/length", len(entropies), count)
    metrics.mean("eval/ended", int(sampled.responses.ended.sum()), count)
    correct = (scores.rewards if rewards.correctness is None else scores.parts[rewards.correctness]) >= 1
    for k in settings.pass_at or ():
        metrics.mean(f"eval/pass@{k}", pass_at(correct.view(-1, samples), k) * len(examples), len(examples))
    if settings.greedy:
        metrics.mean("eval/greedy", float(scored(1, greedy=True)[1].rewards.sum()), len(examples))
    return metrics.collect()
