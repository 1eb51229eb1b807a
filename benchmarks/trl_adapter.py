"""What an objective costs inside TRL's trainer: CPU-seconds of an optimizer step against TRL's own loss.

Fixed responses, so that no time goes into generation and the share of the adapter is at its largest. All cases take
turns in one process, in an order that rotates; the measure is the median over the rounds of the ratio within one.
"""

import argparse
import contextlib
import io
import os
import random
import statistics
import tempfile
import time
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CI": "1"})

#: Layers, width, vocabulary, and the most tokens of a response.
SIZES = {"tiny": (3, 96, 512, 48), "small": (6, 384, 8192, 96)}
CLIP = {"name": "clip_higher"}
STACK = [CLIP, {"name": "s2t"}, {"name": "stare", "target_entropy": 0.8}]
#: Objective, head, micro-batches of an optimizer step; without an objective it is TRL's own trainer.
CASES: dict[str, tuple[Any, str, int]] = {
    "TRL, 1 micro-batch": (None, "", 1),
    "TRL, 4 micro-batches": (None, "", 4),
    "clip, 1 micro-batch": ([CLIP], "auto", 1),
    "clip, 4 micro-batches": ([CLIP], "auto", 4),
    "clip + s2t + stare, 1 micro-batch": (STACK, "auto", 1),
    "clip + s2t + stare, 4 micro-batches (a forward more)": (STACK, "auto", 4),
    "clip, rlstab's head, 4 micro-batches": ([CLIP], "rlstab", 4),
    "clip + s2t + stare, rlstab's head, 4 micro-batches (a forward more)": (STACK, "rlstab", 4),
}


def trainer_of(objective: Any, head: str, accumulation: int, size: str, folder: str, steps: int) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from rlstab.adapters.trl import RLStabGRPOTrainer
    from rlstab.models import SHIPPED

    layers, width, vocab, longest = SIZES[size]
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
    model = LlamaForCausalLM(config)
    model.config._name_or_path = str(SHIPPED["chain-tiny"])
    draw = random.Random(0)
    responses = [[draw.randrange(20, vocab) for _ in range(draw.randint(longest // 4, longest))] for _ in range(16)]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": responses[: len(prompts)], "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(completion_id) % 5) for completion_id in completion_ids]

    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=16 // accumulation,
        gradient_accumulation_steps=accumulation,
        num_generations=8,
        num_iterations=2,
        max_steps=steps,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=10,
        disable_tqdm=True,
    )
    extra = {} if objective is None else {"objective": objective, "head": head}
    return (GRPOTrainer if objective is None else RLStabGRPOTrainer)(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["Q1+2=", "Q3+4=", "Q5-1="] * 8}),
        processing_class=AutoTokenizer.from_pretrained(SHIPPED["chain-tiny"], padding_side="left"),
        rollout_func=rollout,
        **extra,
    )


def clock(trainer: Any) -> list[float]:
    """CPU-seconds of each optimizer step, filled in while the trainer trains."""
    from transformers import TrainerCallback

    seconds: list[float] = []
    began = [0.0]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began[0] = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.process_time() - began[0])

    trainer.add_callback(Clock())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a turn")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    names = list(CASES)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainers = {name: trainer_of(*CASES[name], options.size, folder, options.steps) for name in names}
        clocks = {name: clock(trainer) for name, trainer in trainers.items()}
        for number in range(options.rounds + 1):  # the first warms up
            for index in range(len(names)):
                name = names[(index + number) % len(names)]
                clocks[name].clear()
                trainers[name].train()
                rounds[name].append(statistics.median(clocks[name]))
    print(f"size {options.size}, {options.rounds} rounds of {options.steps} steps, torch {torch.__version__}, 1 thread")
    print("CPU-seconds of an optimizer step, least; ratio to TRL's own loss at the same micro-batches, median")
    for name in names:
        base = rounds[f"TRL, {CASES[name][2]} micro-batch{'es' if CASES[name][2] > 1 else ''}"]
        ratios = [mine / other for mine, other in zip(rounds[name][1:], base[1:], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:<68} {min(rounds[name][1:]):.4f}  {statistics.median(ratios):.3f}  ({spread})")
