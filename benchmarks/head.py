"""What signals cost from hidden states: rlstab against the plain log-softmax of all logits.

    python benchmarks/head.py --preset S --dtype float32,bfloat16 --repeat 5 --json head.json

One forward and backward of log-probs (with a gradient) and entropies (without), where a share of the rows has a loss:
1, 0.2, 0.05 and 0. Times are CPU seconds of the process, the least of the repetitions; cases take turns and change
places, because shared machines are noisy: differences under 10 % are noise. `G` is a time over that of a bare product
of hidden states and weight in the same run: on any machine, a dense pass that keeps its logits needs 3, one that
makes them again 4, and one that leaves out silent rows 1 + 3 * live.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlstab.signals import token_signals

#: tokens, width, vocabulary
PRESETS = {"S": (512, 256, 8192), "A": (2048, 576, 49152)}
LIVE = (1.0, 0.2, 0.05, 0.0)
GEMM = "bare product"

Pass = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    fixed = logprobs.detach()
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(fixed.exp() * fixed).sum(-1)


def ours(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    found = token_signals(hidden, weight, ids)
    assert found.logprobs is not None
    assert found.entropies is not None
    return found.logprobs, found.entropies.detach()


def inputs(preset: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of a mean entropy of 3 to 4 nats."""
    tokens, width, words = PRESETS[preset]
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw) * 4 / math.sqrt(width)
    weight = torch.randn(words, width, generator=draw)
    ids = torch.randint(words, (tokens,), generator=draw)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids


def step(law: Pass, given: tuple[Tensor, Tensor, Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    values = law(*given)
    return (*values, *torch.autograd.grad((values[0] * weights).sum(), given[:2]))


def agree(given: tuple[Tensor, Tensor, Tensor], weights: Tensor) -> None:
    """Both give the same before anything is timed."""
    for mine, theirs in zip(step(ours, given, weights), step(naive, given, weights), strict=True):
        distance = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30)
        allowed = 1e-4 if given[0].dtype == torch.float32 else 2e-2
        assert distance <= allowed, f"the passes disagree by {distance:.1e}"


def measure(preset: str, dtype: torch.dtype, repeat: int) -> dict[str, list[float]]:
    given = inputs(preset, dtype)
    order = torch.randperm(given[2].numel(), generator=torch.Generator().manual_seed(1))
    cases: dict[str, Callable[[], Any]] = {
        GEMM: lambda: given[0].detach() @ given[1].detach().T,
    }
    for live in LIVE:
        weights = (order < round(live * order.numel())).float()
        agree(given, weights)
        for law in (naive, ours):
            cases[f"{law.__name__}, live {live:g}"] = lambda law=law, weights=weights: step(law, given, weights)
    for law in (naive, ours):
        cases[f"{law.__name__}, no gradient"] = torch.no_grad()(lambda law=law: law(*given))
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    cases[GEMM]()  # the others have run
    for turn in range(repeat):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            cases[name]()
            times[name].append(time.process_time() - start)
    return times


def rows(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row a case: least time, G, and the median over turns of its ratio to the plain path of the same run."""
    unit = min(times[GEMM])
    found = []
    for name, seconds in times.items():
        other = times[name.replace("ours", "naive")]
        ratio = statistics.median(b / a for a, b in zip(seconds, other, strict=True))
        found.append({"case": name, "cpu_s": min(seconds), "g": min(seconds) / unit, "naive_over_it": ratio})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="S", help="comma-separated: " + ", ".join(PRESETS))
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, results = Console(), []
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    for preset in options.preset.split(","):
        for dtype in options.dtype.split(","):
            tokens, width, words = PRESETS[preset]
            found = rows(measure(preset, getattr(torch, dtype), options.repeat))
            table = Table("case", title=f"{preset}: {tokens} tokens x {width} x {words}, {dtype}")
            for title in ("CPU s", "G", "naive / it"):
                table.add_column(title, justify="right")
            for row in found:
                table.add_row(row["case"], f"{row['cpu_s']:.3f}", f"{row['g']:.2f}", f"{row['naive_over_it']:.2f}")
            console.print(table)
            results.append({"preset": preset, "dtype": dtype, "repeat": options.repeat, "rows": found})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
