"""What metrics are called on axes, and where their axis begins."""

from __future__ import annotations

from dataclasses import dataclass

_TITLES = {
    "reward/mean": "training reward",
    "reward/true": "training reward before the flaky grader",
    "reward/zero_std_groups": "share of zero-variance groups",
    "eval/mean": "held-out reward",
    "eval/greedy": "held-out reward, greedy",
    "eval/entropy": "held-out entropy, nats per token",
    "eval/length": "held-out response length, tokens",
    "eval/ended": "held-out share of responses that ended",
    "tokens/entropy": "entropy, nats per token",
    "tokens/kept": "share of tokens kept",
    "tokens/live": "share of live tokens",
    "response/length": "response length, tokens",
    "response/ended": "share of responses that ended",
    "response/tokens": "tokens sampled per rollout",
    "gradient/norm": "gradient norm, mean",
    "gradient/largest_norm": "gradient norm, largest",
    "ratio/mean": "ratio, mean",
    "ratio/clipped_high": "share of tokens clipped above",
    "ratio/clipped_low": "share of tokens clipped below",
    "ratio/clipped_dual": "share of tokens clipped by the dual bound",
    "sampler/gap": "sampler-trainer gap, mean over all tokens, nats",
    "sampler/largest_gap": "sampler-trainer gap, largest over all tokens, nats",
    "sampler/gap_live": "sampler-trainer gap, mean over live tokens, nats",
    "sampler/largest_gap_live": "sampler-trainer gap, largest over live tokens, nats",
    "lr": "learning rate",
}
#: Axes that do not begin at zero: what has no natural zero, or stays near another value.
_FREE = ("ratio/mean", "loss", "length", "threshold", "value", "coefficient", "boost", "kept")
#: In the order in which a reader looks for them; others follow by name.
FIRST = (
    "reward/mean",
    "eval/mean",
    "eval/greedy",
    "eval/pass@",
    "tokens/entropy",
    "eval/entropy",
    "response/length",
    "eval/length",
    "response/ended",
    "eval/ended",
    "reward/zero_std_groups",
    "tokens/live",
    "tokens/kept",
    "gradient/norm",
    "gradient/largest_norm",
)


#: Of what methods log, by its last part.
_OWN = {
    "threshold": "nats",
    "gate": "share of optimizer steps open",
    **dict.fromkeys(("candidates", "dropped", "selected", "boosted", "damped"), "share of tokens"),
}


@dataclass(frozen=True)
class Axis:
    """How a metric is shown: its title, and whether its axis begins at zero."""

    title: str
    zero: bool


def axis(metric: str) -> Axis:
    """The axis of any metric; unknown ones are called by their own name."""
    last = metric.rpartition("/")[2]
    title = f"held-out {last}" if last.startswith("pass@") else metric
    return Axis(_TITLES.get(metric, title), not any(metric == one or last == one for one in _FREE))


def own_title(metric: str, method: str = "") -> str:
    """What a method logs, with its unit where that is known; without the method, which may stand above it."""
    last = metric.rpartition("/")[2]
    unit, name = _OWN.get(last), metric.removeprefix(f"{method}/")
    if last == "share":
        return f"{name} of tokens"
    return f"{name}, {unit}" if unit else name


def in_order(metrics: set[str]) -> list[str]:
    """Those a reader looks for first come first; ``pass@4`` before ``pass@16``."""

    def place(name: str) -> tuple[int, int, str]:
        stem, at, _ = name.partition("@")
        found = [index for index, one in enumerate(FIRST) if one == stem + at]
        number = name.rpartition("@")[2]
        return (found[0] if found else len(FIRST), int(number) if number.isdecimal() else 0, name)

    return sorted(metrics, key=place)
