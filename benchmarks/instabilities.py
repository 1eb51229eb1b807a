"""The pictures of docs/concepts/instabilities.md, from runs that were broken on purpose, and a healthy one.

    python -m benchmarks instabilities

The runs are those on which the tests of ``rlstab look`` stand (seed 0; `python -m benchmarks diagnose` makes them).
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "tests" / "diagnose" / "data"
OUT = ROOT / "docs" / "concepts" / "pictures"

#: Name of a run to its panels: metric and label.
PICTURES = {
    "entropy_collapse": [
        ("reward/mean", "reward"),
        ("tokens/entropy", "entropy, nats"),
        ("reward/zero_std_groups", "dead groups"),
    ],
    "learning_rate": [
        ("reward/mean", "reward"),
        ("tokens/entropy", "entropy, nats"),
        ("gradient/norm", "gradient norm"),
    ],
    "staleness": [("reward/mean", "reward"), ("tokens/entropy", "entropy, nats"), ("sampler/gap", "sampler gap, nats")],
    "mismatch": [("reward/mean", "reward"), ("tokens/entropy", "entropy, nats"), ("sampler/gap", "sampler gap, nats")],
    "dead_groups": [
        ("reward/mean", "reward"),
        ("reward/zero_std_groups", "dead groups"),
        ("optimizer_steps/skipped", "skipped steps"),
    ],
    "truncation": [
        ("reward/mean", "reward"),
        ("response/ended", "answers that end"),
        ("response/length", "length, tokens"),
    ],
}


def rows(name: str) -> list[dict[str, float]]:
    """The metrics of a run, one dict per rollout."""
    return [json.loads(line) for line in (RUNS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def series(run: list[dict[str, float]], metric: str) -> tuple[list[float], list[float]]:
    """Where the metric was logged, and its values. Nothing sampled differs where sampler and trainer are one policy."""
    metric = metric if any(metric in row for row in run) else metric.replace("/gap", "/gap_live")
    if metric == "optimizer_steps/skipped":
        return [row["rollout"] for row in run], [row.get(metric, 0.0) for row in run]
    return [row["rollout"] for row in run if metric in row], [row[metric] for row in run if metric in row]


def draw(name: str) -> Path:
    """The picture of one run: three panels, the run in colour and a healthy one in grey."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.3), layout="constrained")
    for axis, (metric, label) in zip(axes, PICTURES[name], strict=True):
        axis.plot(*series(rows("healthy"), metric), color="#aaaaaa", lw=1.2, label="healthy")
        axis.plot(*series(rows(name), metric), color="#c2410c", lw=1.6, label="broken")
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("rollout", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    path = OUT / f"{name}.svg"
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    mpl.use("agg")
    with mpl.rc_context({"svg.hashsalt": "rlstab", "font.family": "sans-serif", "svg.fonttype": "none"}):
        for name in PICTURES:
            print(draw(name).relative_to(ROOT))


if __name__ == "__main__":
    main()
