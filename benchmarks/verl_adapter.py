"""What an objective costs inside verl's actor: CPU-seconds of an update against verl's own loss.

Updates of one optimizer step on fixed responses, by verl's own worker with FSDP2 on a CPU: no rollout, no old
log-probs, no reference model, so the share of the adapter is at its largest. All cases take turns in one process, in an
order that rotates; the measure is the median over the rounds of the ratio within one.
"""

import argparse
import contextlib
import io
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

#: Layers, width, vocabulary, and the most tokens of a response.
SIZES = {"tiny": (3, 96, 512, 48), "small": (6, 384, 8192, 96)}
CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2, "dual_clip": 3.0}
STACK = [CLIP, {"name": "s2t"}, {"name": "stare", "target_entropy": 0.8}]
#: Objective, and micro-batches of an optimizer step; without an objective it is verl's own loss.
CASES: dict[str, tuple[Any, int]] = {
    "verl, 1 micro-batch": (None, 1),
    "verl, 4 micro-batches": (None, 4),
    "clip, 1 micro-batch": ([CLIP], 1),
    "clip, 4 micro-batches": ([CLIP], 4),
    "clip + s2t + stare, 1 micro-batch (a forward more)": (STACK, 1),
    "clip + s2t + stare, 4 micro-batches (a forward more)": (STACK, 4),
    "clip + lp_reg, 4 micro-batches (a forward more, signals from logits)": ([CLIP, {"name": "lp_reg"}], 4),
}


def model_in(folder: Path, size: str) -> Path:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rlstab.models import SHIPPED

    layers, width, vocab, _ = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        eos_token_id=19,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED["chain-tiny"]).save_pretrained(folder)
    return folder


def rollout(size: str) -> dict[str, Any]:
    """The columns of 16 responses to two prompts."""
    import torch

    _, _, vocab, longest = SIZES[size]
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 4, longest + 1, (16,), generator=draw).tolist()
    responses = [torch.randint(20, vocab, (length,), generator=draw) for length in lengths]
    prompts = [torch.randint(20, vocab, (8,), generator=draw)] * 16
    ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "response_mask": ones,
        "loss_mask": ones,
        "old_log_probs": [-math.log(vocab) + 0.1 * torch.randn(length, generator=draw) for length in lengths],
        "advantages": [torch.full((length,), (index % 5 - 2) / 2) for index, length in enumerate(lengths)],
        "uid": [str(index // 8) for index in range(16)],
    }
    return {"nested": True, "columns": columns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="updates of a turn")
    options = parser.parse_args()
    import torch

    from tests.adapters.verl_jobs import ROWS, batch_of, worker_of

    torch.set_num_threads(1)
    names, rolled = list(CASES), rollout(options.size)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        path = {"model.path": model_in(folder / "model", options.size)}
        workers = {}
        for number, (case, (objective, cut)) in enumerate(CASES.items()):
            size = {"actor.ppo_micro_batch_size_per_gpu": ROWS // cut}
            workers[case] = worker_of(folder / str(number), objective, **path, **size)
        for number in range(options.rounds + 1):  # the first warms up
            for index in range(len(names)):
                name = names[(index + number) % len(names)]
                seconds = []
                for _ in range(options.steps):
                    batch = batch_of(rolled, 0, 1)
                    began = time.process_time()
                    workers[name].update_actor(batch)
                    seconds.append(time.process_time() - began)
                rounds[name].append(statistics.median(seconds))
    print(f"size {options.size}, {options.rounds} rounds of {options.steps} steps, torch {torch.__version__}, 1 thread")
    print("CPU-seconds of an update, least; ratio to verl's own loss at the same micro-batches, median")
    for name in names:
        base = rounds[f"verl, {CASES[name][1]} micro-batch{'es' if CASES[name][1] > 1 else ''}"]
        ratios = [mine / other for mine, other in zip(rounds[name][1:], base[1:], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:<70} {min(rounds[name][1:]):.4f}  {statistics.median(ratios):.3f}  ({spread})")
