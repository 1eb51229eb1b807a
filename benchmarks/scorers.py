"""Seconds of a rollout of 8 x 8 completions that scoring takes: in this process and in workers."""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable

from examples.demonstrations import demonstration
from rlstab.errors import ScorerError
from rlstab.tasks import Countdown
from rlstab.tasks.scorers import GymScorer, Scorer, TextScorer
from rlstab.tasks.workers import Job, Workers

PROMPTS, GROUP = 8, 8
TALK = "First we simplify the expression and collect the terms, and then we divide both sides. " * 4


def cases() -> dict[str, tuple[Scorer, list[Job]]]:
    """By name: a scorer, and the completions of a rollout with their right answers."""
    rollout = [(prompt, prompt + reply) for prompt in range(PROMPTS) for reply in range(GROUP)]
    sums = GymScorer("chain_sum", {}, None, None)
    sums.prepare()
    return {
        "pattern, exact": (
            TextScorer("exact", "#### (.+)"),
            [("", f"{TALK}\n#### {said}", str(right)) for right, said in rollout],
        ),
        "math_verify": (
            TextScorer("math_verify", None),
            [("", f"{TALK} So $x = \\frac{{{said}}}{{7}}$.", f"\\frac{{{right}}}{{7}}") for right, said in rollout],
        ),
        "reasoning-gym, chain_sum": (sums, [("", str(said), sums.made[0]) for _, said in rollout]),
    }


def fastest(repeats: int, work: Callable[[], object]) -> float:
    """The least of some wall times."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limit of its own
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    task = Countdown()
    examples = [task.example("train", prompt) for prompt in range(PROMPTS) for _ in range(GROUP)]
    texts = [demonstration(task, example, random.Random(place)) for place, example in enumerate(examples)]
    own = fastest(options.repeats, lambda: [task.score(*pair) for pair in zip(examples, texts, strict=True)])
    print(f"ms per rollout of {PROMPTS} x {GROUP} completions, {options.workers} workers, best of {options.repeats}")
    print(f"{'scorer':<26}{'in process':>12}{'workers':>12}{'start, s':>12}")
    print(f"{'countdown':<26}{1000 * own:>12.2f}{'-':>12}{'-':>12}")
    for name, (scorer, jobs) in cases().items():
        print(f"{name:<26}{measure(scorer, jobs, options.workers, options.repeats)}")


def measure(scorer: Scorer, jobs: list[Job], count: int, repeats: int) -> str:
    """A line of the table."""
    inside = fastest(repeats, lambda: [scorer.score(*job) for job in jobs])
    workers = Workers(scorer, count, 60.0)
    start = time.perf_counter()
    try:
        workers.score_one(*jobs[0])
    except ScorerError as error:
        return f"{1000 * inside:>12.2f} {error}"
    started = time.perf_counter() - start
    workers.score(jobs)  # the others start with the first rollout
    outside = fastest(repeats, lambda: workers.score(jobs))
    workers.close()
    return f"{1000 * inside:>12.2f}{1000 * outside:>12.2f}{started:>12.2f}"


if __name__ == "__main__":
    main()
