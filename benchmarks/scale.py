"""Peak memory of each process of a training run against what `rlstab check` says before it starts.

    python -m benchmarks scale
    python -m benchmarks scale --sizes 51M --engines "fsdp2, 2"

Llama models with random weights on the CPU, over gloo: two rollouts of answers of at most 24 tokens with an optimizer
step each, and a checkpoint, in processes of their own. Resident memory above what the process had with all libraries
loaded; the highest of the processes counts. What would not fit is not run. ``MALLOC_MMAP_THRESHOLD_`` is set, as the
page on several processes advises.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.memory import MIB, resident
from rlstab.config import RunConfig, load_run
from rlstab.models import SHIPPED
from rlstab.train.footprint import bytes_of, footprint, longest_prompt, shape_of

#: Width, layers and the inner width of the layers.
SIZES = {
    "0.1M": (64, 2, 192),
    "0.9M": (128, 4, 384),
    "10M": (320, 8, 896),
    "51M": (640, 10, 1760),
    "134M": (768, 18, 2080),
    "302M": (1024, 24, 2736),
    "566M": (1536, 20, 4096),
    "1.7B": (2048, 32, 6144),
}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "one process, checkpointing": (1, {"optimisation.gradient_checkpointing": True}),
    "one process, LoRA": (1, {"model.adapter": {"r": 16}}),
    "ddp, 2": (2, {"engine": "ddp"}),
    "fsdp2, 2": (2, {"engine": "fsdp2"}),
}  # fmt: skip
#: Of a response, at most.
TOKENS = 24
#: Responses in a micro-batch.
ROWS = 4
#: MiB above what is said, at most: what libraries hold once, and the allocator.
LIBRARIES = 100
#: With it glibc gives large tensors back when torch frees them. Else it keeps them and often cannot use them again.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "131072"}


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        engine: a key of the table above.
        parameters: of the model, with its adapter.
        processes: that took part, as they counted themselves.
        measured: MiB of the largest process; None where it would not fit in the memory or on the disk.
        said: MiB, by :mod:`rlstab.train.footprint`.
    """

    engine: str
    parameters: int
    processes: int
    measured: float | None
    said: float


def model(size: str, folder: Path) -> Path:
    """A configuration and a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED["countdown-tiny"])
    width, layers, inner = SIZES[size]
    LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=max(2, width // 64),
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, max_position_embeddings=128, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def fill_in(folder: Path) -> None:
    """Give it random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)


def settings(name: str, changes: dict[str, Any], out: Path) -> RunConfig:
    """The run file."""
    data: dict[str, Any] = {
        "model": {"name": name},
        "objective": ["clip_higher", "s2t"],
        # several micro-batches in each of two processes
        "rollout": {"prompts": max(8, 2 * ROWS), "group": 2, "max_new_tokens": TOKENS},
        # a reward that differs within groups, so that there is something to learn from
        "reward": ["benchmarks/broken_rewards.py:longer"],
        # the second step is the first with moments
        "optimisation": {"rollouts": 2, "lr": 1e-5, "micro_batch_size": ROWS},
        "evaluation": {"every": 0},
        "tracking": {"out": str(out), "checkpoint_every": 0},
    }
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = data
        for section in sections:
            place = place[section]
        place[key] = value
    return load_run(data)


def worker(asked: dict[str, Any]) -> None:
    """One process of a run; writes what it took."""
    import io

    from rlstab.train.loop import train

    run = load_run(asked["settings"])
    torch.ones(64, 64).matmul(torch.ones(64, 64, requires_grad=True)).sum().backward()  # libraries load their kernels
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(run, console=Console(file=io.StringIO(), force_terminal=False))
    rank = os.environ.get("RANK", "0")
    Path(asked["told"], rank).write_text(str(resident("VmHWM") - before))


def measure(size: str, engine: str, memory: int, disk: int) -> Measured:
    """What the largest process of a run takes, and what is said before."""
    processes, changes = ENGINES[engine]
    with tempfile.TemporaryDirectory() as place:
        folder, told = Path(place), Path(place, "told")
        told.mkdir()
        run = settings(str(model(size, folder / "model")), changes, folder / "run")
        shape = shape_of(run, longest_prompt(run) + TOKENS)
        said = footprint(shape, run, engine.partition(",")[0], processes)
        written = 4 * shape.weights + 12 * shape.trained  # the model, and a checkpoint
        took = None
        if said.peak * processes <= memory and written <= disk:
            fill_in(folder / "model")
            took = _taken(run, processes, told)
    return Measured(engine, shape.weights, processes, took, said.peak / MIB)


def _taken(run: RunConfig, processes: int, told: Path) -> float:
    asked = json.dumps({"settings": run.model_dump(mode="json", exclude_unset=True), "told": str(told)})
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] * (processes > 1)
    command = [sys.executable, *start, "-m", "benchmarks.scale", "--worker", asked]
    subprocess.run(command, check=True, env={**os.environ, **GLIBC})
    peaks = [int(path.read_text()) for path in told.iterdir()]
    if len(peaks) != processes:
        raise RuntimeError(f"{len(peaks)} processes told, and not {processes}")
    return max(peaks) / MIB


def row(run: Measured) -> tuple[str, ...]:
    """Of the table."""
    words = (_count(run.parameters), run.engine, f"{run.said:.0f}")
    if run.measured is None:
        return (*words, "too large to be run", "")
    return (*words, f"{run.measured:.0f}", f"{run.measured / run.said:.2f}")


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--memory", type=bytes_of, default=14 * 10**9, help="of all processes together")
    parser.add_argument("--disk", type=bytes_of, default=10 * 10**9, help="for the model and a checkpoint of it")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(json.loads(options.worker))
        return
    table = Table("parameters", "engine", "said, MiB", "measured, MiB", "measured / said")
    for size in options.sizes:
        for engine in options.engines:
            table.add_row(*row(measure(size, engine, options.memory, options.disk)))
    Console().print(table)


if __name__ == "__main__":
    main()
