"""What a log says by chance: in random order, hardly any log is told to change something."""

import json
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from rlstab.logs.log import Rows
from rlstab.logs.watch import Watch
from rlstab.look.diagnosis import diagnose
from rlstab.signs import signs
from tests.diagnose.formats import DATA
from tests.real_logs import RealLog, real_logs


def noise(lines: int, seed: int) -> dict[int, dict[str, float]]:
    """A run in which nothing happens, with two groups of four a step: most of its norms are 0, and a few are large."""
    draw = np.random.default_rng([lines, seed])
    solved = draw.beta(2, 2, (lines, 2))
    right = draw.binomial(4, solved)
    differ = (right > 0) & (right < 4)
    norms = differ.sum(1) * draw.lognormal(-2, 1, lines) * np.where(draw.random(lines) < 0.02, 50.0, 1.0)
    columns: Mapping[str, np.ndarray] = {
        "reward": right.mean(1) / 4,
        "frac_reward_zero_std": 1 - differ.mean(1),
        "grad_norm": norms,
        "entropy": draw.lognormal(-1.5, 0.4, lines),
        "kl": draw.lognormal(-4, 1.5, lines),
        "completions/mean_length": draw.lognormal(5.5, 0.3, lines),
        "completions/clipped_ratio": draw.binomial(8, 0.1, lines) / 8,
        "clip_ratio/region_mean": draw.exponential(0.002, lines),
        "sampling/sampling_logp_difference/mean": draw.lognormal(-5, 0.3, lines),
    }
    return {step + 1: {name: float(values[step]) for name, values in columns.items()} for step in range(lines)}


def shuffled(rows: Mapping[int, dict[str, float]], seed: int) -> dict[int, dict[str, float]]:
    """The same lines in random order."""
    order = np.random.default_rng(seed).permutation(list(rows)).tolist()
    return {step: rows[other] for step, other in zip(rows, order, strict=True)}


def of_trl() -> Iterator[dict[int, dict[str, float]]]:
    """Logs of TRL, sound and broken, by step."""
    for path in sorted((DATA / "trl_broken").glob("*.json")):
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        yield {int(line["step"]): line for line in history if "reward" in line}


def test_noise_is_not_told_to_change_anything() -> None:
    logs = [noise(lines, seed) for lines, seeds in ((40, 29), (200, 29), (2000, 2)) for seed in range(seeds)]
    told = [diagnose(Rows(rows).run("noise", "TRL")).first for rows in logs]
    assert len(told) == 60
    assert sum(first is not None for first in told) <= 0.05 * len(told)


def test_broken_runs_in_random_order_have_lost_nothing() -> None:
    """A run without any reward is starved in any order; every other cause needs an order."""
    causes = [
        first.cause
        for rows in of_trl()
        for seed in range(4)
        if (first := diagnose(Rows(shuffled(rows, seed)).run("shuffled", "TRL")).first)
    ]
    assert not {"learning_rate", "staleness", "entropy_collapse", "kl_drift", "length"} & set(causes), causes


def test_published_logs_are_told_to_change_something_only_where_they_were_hurt() -> None:
    """Where their figures are at hand; the generated ones above stand in elsewhere."""
    logs = list(real_logs())
    if not logs:
        pytest.skip("the figures of published logs are not at hand: tests/data/real_logs/README.md")
    sound = [log for log in logs if log.outcome in ("kept", "rose")]
    hurt = [log for log in logs if log.outcome == "lost"]

    def named(log: RealLog) -> bool:
        rows = {int(row["step"]): row for row in log.rows}
        return diagnose(Rows(rows).run("log", "TRL")).first is not None

    assert sum(map(named, sound)) <= 0.05 * len(sound)
    assert sum(map(named, hurt)) >= 0.8 * len(hurt)


@pytest.mark.parametrize("name", ["learning_rate", "stale", "healthy", "limit_learnt"])
def test_a_sign_is_announced_once_as_a_look_at_that_moment_says_it(name: str) -> None:
    path = DATA / "trl_broken" / f"{name}.json"
    watch, rows, announced = Watch(), dict[int, dict[str, float]](), list[str]()
    for line in json.loads(path.read_text(encoding="utf-8"))["log_history"]:
        if "reward" not in line:
            continue
        rows[int(line["step"])] = line
        if found := watch.log(int(line["step"]), line):
            prefix = {sign.name: sign for sign in signs(Rows(dict(rows)).run("", "TRL"))}
            assert found == [prefix[sign.name] for sign in found]
            announced += [sign.name for sign in found]
    assert len(announced) == len(set(announced))
    assert bool(announced) or name == "healthy"
