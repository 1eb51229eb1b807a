"""The picture of a run: reward and entropy over rollouts, with the held-out evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Save reward and entropy over rollouts as a PNG.

    Args:
        records: lines of ``metrics.jsonl``.
        path: of the picture.
        title: printed above.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    reward, entropy = figure.subplots(1, 2)
    _curve(reward, records, "reward/mean", "tab:blue", "sampled, training prompts")
    _points(reward, records, "eval/mean", "tab:orange", "sampled, held out", "o-")
    _points(reward, records, "eval/greedy", "tab:green", "greedy, held out", "s--")
    reward.set(xlabel="rollout", ylabel="mean reward", title="reward")
    _curve(entropy, records, "tokens/entropy", "tab:purple", "training prompts")
    _points(entropy, records, "eval/entropy", "tab:orange", "held out", "o-")
    entropy.set(xlabel="rollout", ylabel="nats per token", title="policy entropy")
    for axes in (reward, entropy):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _curve(axes: Axes, records: Sequence[dict[str, Any]], name: str, color: str, label: str) -> None:
    rollouts = [one["rollout"] for one in records if name in one]
    values = [one[name] for one in records if name in one]
    window = max(1, len(values) // 20)
    smooth = [sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]
    axes.plot(rollouts, values, color=color, alpha=0.2, linewidth=0.8)
    label = f"{label} (mean of {window})" if window > 1 else label
    axes.plot(rollouts, smooth, color=color, linewidth=1.6, label=label)


def _points(axes: Axes, records: Sequence[dict[str, Any]], name: str, color: str, label: str, style: str) -> None:
    chosen = [one for one in records if name in one]
    if chosen:
        axes.plot(
            [one["rollout"] for one in chosen],
            [one[name] for one in chosen],
            style,
            color=color,
            markersize=4,
            linewidth=1,
            label=label,
        )
