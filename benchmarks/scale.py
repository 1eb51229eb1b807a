"""Peak memory of each process of a training run against what `rlstab check` says before it starts.

    python -m benchmarks scale --json benchmarks/results/scale.jsonl

Llama models with random weights, one rollout of 8 x 2 answers with one optimizer step, in processes of their own.
Resident memory above what the process had with all libraries loaded; the highest of the processes counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.memory import MIB, resident
from rlstab.config import load_run
from rlstab.train.footprint import footprint, shape_of
from rlstab.train.policy import SHIPPED

#: Width, layers and the inner width of the layers.
SIZES = {
    "0.9M": (128, 4, 384),
    "10M": (320, 8, 880),
    "51M": (640, 10, 1760),
    "134M": (768, 18, 2080),
    "302M": (1024, 24, 2736),
}
ENGINES = {
    "one process": (1, {}),
    "one process, checkpointing": (1, {"optimisation.gradient_checkpointing": True}),
    "one process, LoRA": (1, {"model.adapter": {"r": 16}}),
    "ddp, 2": (2, {"engine": "ddp"}),
    "fsdp2, 2": (2, {"engine": "fsdp2"}),
}  # fmt: skip
TOKENS = 24


def model(size: str, folder: Path) -> Path:
    """A model with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED["countdown-tiny"])
    width, layers, inner = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=width // 64 or 2,
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(name: str, changes: dict[str, Any], out: Path) -> dict[str, Any]:
    """The run file."""
    data: dict[str, Any] = {
        "model": {"name": name},
        "objective": ["clip_higher", "s2t"],
        "rollout": {"prompts": 8, "group": 2, "max_new_tokens": TOKENS},
        # a reward that differs within groups, so that there is something to learn from
        "reward": ["benchmarks/broken_rewards.py:longer"],
        "optimisation": {"rollouts": 1, "lr": 1e-5, "micro_batch_size": 8},
        "evaluation": {"every": 0},
        "tracking": {"out": str(out), "checkpoint_every": 0},
    }
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = data
        for section in sections:
            place = place[section]
        place[key] = value
    return data


def worker(asked: dict[str, Any]) -> None:
    """One process of a run; writes what it took."""
    import io

    from rich.console import Console

    from rlstab.train.loop import train

    run = load_run(asked["settings"])
    torch.ones(64, 64).matmul(torch.ones(64, 64, requires_grad=True)).sum().backward()  # libraries load their kernels
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(run, console=Console(file=io.StringIO(), force_terminal=False))
    rank = os.environ.get("RANK", "0")
    Path(asked["found"], rank).write_text(str(resident("VmHWM") - before))


def measure(size: str, engine: str) -> dict[str, Any]:
    """What the largest process of a run took, and what was said before."""
    processes, changes = ENGINES[engine]
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), Path(place, "found")
        found.mkdir()
        data = settings(str(model(size, folder / "model")), changes, folder / "run")
        asked = json.dumps({"settings": data, "found": str(found)})
        start = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
        )
        subprocess.run([sys.executable, *start, "-m", "benchmarks.scale", "--worker", asked], check=True)
        took = [int(one.read_text()) for one in found.iterdir()]
        if len(took) != processes:
            raise RuntimeError(f"{len(took)} processes told, and not {processes}")
        run = load_run(data)
        tokens = 8 + TOKENS
        shape = shape_of(run, tokens)
        name = engine.partition(",")[0]
        said = footprint(shape, run, name, processes, reference=False, tokens=tokens)  # type: ignore[arg-type]  # a key of ENGINES
    return {
        "size": size, "engine": engine, "parameters": shape.parameters, "processes": len(took),
        "measured_mib": max(took) / MIB, "said_mib": said.peak / MIB, "bytes_per_parameter_said": said.per_parameter,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--json", type=Path, help="file to append the results to, a line each")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(json.loads(options.worker))
        return
    print("| parameters | engine | measured, MiB | said, MiB | measured / said |\n|---|---|---|---|---|")
    for size in options.sizes:
        for engine in options.engines:
            one = measure(size, engine)
            print(
                f"| {one['parameters'] / 1e6:.1f}M | {engine} | {one['measured_mib']:.0f} | {one['said_mib']:.0f} | "
                f"{one['measured_mib'] / one['said_mib']:.2f} |",
                flush=True,
            )
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
