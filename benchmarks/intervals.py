"""How often the intervals of a report hold the truth, for seeds drawn from distributions whose truth is known.

    python -m benchmarks intervals              # the tables of docs/how-to/compare.md, in that page; a few minutes
    python -m benchmarks intervals --print      # only printed

Each draw is a comparison: some seeds of a method and of its baseline, of which some runs may be lost. What is counted
is how often the interval of the mean difference of the surviving pairs holds the mean that unlimited surviving pairs
have. Beside it stands Student's t at 95 % over all pairs, lost ones too, and the mean of all: what a report would give
that does not count lost runs.
"""

import argparse
import re
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.protocol import ROOT
from rlstab.report.statistics import MIN_POWER_SEEDS, STUDENT_LEVEL, mean_of, power_of, share, student_bound

PAGE = ROOT / "docs" / "how-to" / "compare.md"
SEEDS, RATES = (3, 5, 8, 20), (0.1, 0.25, 0.5)
DRAWS = 20_000

Floats = NDArray[np.float64]
#: Differences of pairs, and whether a run of the pair is lost: two arrays ``(draws, seeds)``.
Draw = Callable[[np.random.Generator, tuple[int, int]], tuple[Floats, NDArray[np.bool_]]]


def _whole(differences: Callable[[np.random.Generator, tuple[int, int]], Floats]) -> Draw:
    """No run is lost."""
    return lambda rng, shape: (differences(rng, shape), np.zeros(shape, bool))


def _lost(rate: float, best: bool = False) -> Draw:
    """A gain of 0.1 with a deviation of 0.03, and 0.7 less for lost runs, which chance picks, or mostly the best."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Floats, NDArray[np.bool_]]:
        noise = rng.standard_normal(shape)
        lost = rng.random(shape) < (np.clip(rate * (1 + noise), 0, 1) if best else rate)
        return 0.1 + 0.03 * noise - 0.7 * lost, lost

    return draw


def _accuracies(prompts: int, method: float, baseline: float) -> Draw:
    def differences(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        return np.asarray((rng.binomial(prompts, method, shape) - rng.binomial(prompts, baseline, shape)) / prompts)

    return _whole(differences)


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _whole(lambda rng, shape: rng.standard_normal(shape)),
    "lognormal differences": _whole(lambda rng, shape: np.exp(0.5 * rng.standard_normal(shape))),
    "lognormal methods": _whole(
        lambda rng, shape: 1.5 * np.exp(0.5 * rng.standard_normal(shape)) - np.exp(0.5 * rng.standard_normal(shape))
    ),
    "accuracies of 16 prompts, near 0.5": _accuracies(16, 0.6, 0.5),
    "accuracies of 16 prompts, near 1": _accuracies(16, 0.95, 0.9),
    "accuracies of 64 prompts": _accuracies(64, 0.51, 0.5),
    **{f"lost: {100 * rate:.0f} %": _lost(rate) for rate in RATES},
    "lost: 25 %, the best more often": _lost(0.25, best=True),
}


def held(name: str, seeds: int, draws: int = DRAWS) -> tuple[float, float, float]:
    """Of the intervals, the share that holds the truth; the share of draws with one; the first for t over all pairs."""
    draw, rng = DISTRIBUTIONS[name], np.random.default_rng(seeds)
    many, gone = draw(np.random.default_rng(0), (1000, 4000))
    truth, every = many[~gone].mean(), many.mean()
    holding = given = plain = 0
    for differences, lost in zip(*draw(rng, (draws, seeds)), strict=True):
        estimate, _ = mean_of(differences[~lost])
        if estimate.low is not None and estimate.high is not None:
            given += 1
            holding += estimate.low <= truth <= estimate.high
        error = differences.std(ddof=1) / seeds**0.5
        plain += abs(differences.mean() - every) <= student_bound(seeds) * error
    return holding / given, given / draws, plain / draws


def held_rate(rate: float, seeds: int, draws: int = DRAWS) -> float:
    """How often the interval of a rate of lost runs holds it."""
    counts = np.bincount(np.random.default_rng(seeds).binomial(seeds, rate, draws), minlength=seeds + 1)
    ends = [share(hits, seeds) for hits in range(seeds + 1)]
    return (
        sum(int(n) for n, each in zip(counts, ends, strict=True) if (each.low or 0) <= rate <= (each.high or 0)) / draws
    )


def held_power(seeds: int, draws: int = DRAWS // 5) -> float:
    """How often the range of a power statement holds the difference that is shown in 8 of 10 repetitions."""
    rng = np.random.default_rng(seeds)
    effect, step = 0.0, 0.01
    noise = rng.standard_normal((4000, seeds))
    bound = student_bound(seeds, STUDENT_LEVEL)
    while (np.abs(noise.mean(1) + effect) > bound * noise.std(1, ddof=1) / seeds**0.5).mean() < 0.8:
        effect += step
    ranges = [power_of(rng.standard_normal(seeds)) for _ in range(draws)]
    return sum(low <= effect <= high for low, high in ranges) / draws


def tables(draws: int = DRAWS) -> Iterator[str]:
    heads = ["differences", *(f"{seeds} seeds" for seeds in SEEDS), *(f"t over all, {seeds}" for seeds in SEEDS)]
    yield from _grid(heads)
    for name in DISTRIBUTIONS:
        found = [held(name, seeds, draws) for seeds in SEEDS]
        own = [f"{100 * each:.1f}" + ("" if given > 0.995 else f" ({100 * given:.0f})") for each, given, _ in found]
        yield _row([name, *own, *(f"{100 * plain:.0f}" for *_, plain in found)])
    yield ""
    yield from _grid(["rate of lost runs", *(f"{seeds} seeds" for seeds in SEEDS)])
    for rate in RATES:
        shares = [held_rate(rate, seeds, draws) for seeds in SEEDS]
        yield _row([f"{100 * rate:.0f} %", *(f"{100 * each:.1f}" for each in shares)])
    with_power = [seeds for seeds in SEEDS if seeds >= MIN_POWER_SEEDS]
    power = ", ".join(f"{100 * held_power(seeds, draws // 5):.1f} % at {seeds} seeds" for seeds in with_power)
    yield ""
    yield f"The range of a power statement holds the difference that is shown in 8 of 10 repetitions in {power}."


def _grid(heads: list[str]) -> Iterator[str]:
    yield _row(heads)
    yield _row(["---"] * len(heads))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", dest="only", action="store_true", help="leave the page as it is")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of each cell ({DRAWS})")
    options = parser.parse_args()
    text = "\n".join(tables(options.draws))
    print(text)
    if not options.only:
        page = PAGE.read_text(encoding="utf-8")
        marked = re.sub(
            r"(?s)(<!-- intervals -->\n).*(<!-- /intervals -->)", lambda ends: f"{ends[1]}\n{text}\n\n{ends[2]}", page
        )
        PAGE.write_text(marked, encoding="utf-8")


if __name__ == "__main__":
    main()
