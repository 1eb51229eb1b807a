"""Whole training steps: rlstab's trainer and TRL's GRPOTrainer on one model, prompts, rewards, sizes and optimizer.

    python -m benchmarks throughput --job countdown --json
    python -m benchmarks throughput --job smollm2 --model ~/.cache/rlstab/smollm2-135m-instruct --json

Each trainer runs in its own process, one thread, in turns. A step is what lies between
the ends of two optimizer steps: sampling, scoring, forward, backward, update, and each trainer's own bookkeeping, by
CPU-seconds of the process. The first steps are left out. Neither evaluates, saves or reports anywhere. Responses are
drawn at random, so their mean length is reported: it must be similar for the work to be.
"""

import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.protocol import ROOT, Run, child, listed, parser

LEARNING_RATE, LOW, HIGH = 2e-4, 0.2, 0.28
BETAS = (0.9, 0.95)
#: Of the file of coin flips.
LINES = 512


@dataclass(frozen=True)
class Job:
    """What is trained, how much of it per step."""

    model: str
    task: dict[str, Any]
    prompts: int
    group: int
    new_tokens: int
    micro_batch: int
    precision: str
    lr: float
    steps: int
    warmup: int = field(default=2)

    @property
    def samples(self) -> int:
        """Responses per step."""
        return self.prompts * self.group


JOBS = {
    "countdown": Job(
        str(ROOT / "rlstab" / "data" / "countdown-tiny"),
        {"name": "countdown"},
        prompts=16,
        group=8,
        new_tokens=24,
        micro_batch=128,
        precision="fp32",
        lr=LEARNING_RATE,
        steps=30,
        warmup=5,
    ),
    "smollm2": Job(
        "~/.cache/rlstab/smollm2-135m-instruct",
        # the model guesses right and wrong within most groups: a trainer that leaves out groups without a gradient
        # gains little by it, which keeps the work of both alike
        {"name": "jsonl", "answer_pattern": r"^\s*(heads|tails)", "eval_size": 8},
        prompts=8,
        group=4,
        new_tokens=64,
        micro_batch=8,
        precision="bf16",
        lr=1e-6,
        steps=1,
        warmup=1,
    ),
}


def coins(path: Path) -> None:
    """A file of coin flips to continue."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(LINES):
            seen = ", ".join(rng.choice(("heads", "tails")) for _ in range(8))
            file.write(json.dumps({"prompt": f"Coin flips: {seen},", "answer": rng.choice(("heads", "tails"))}) + "\n")


def settings(job: Job, folder: Path) -> dict[str, Any]:
    """The run of our trainer."""
    task = dict(job.task)
    if task["name"] == "jsonl":
        task["path"] = str(folder / "coins.jsonl")
        coins(folder / "coins.jsonl")
    return {
        "model": {"name": job.model},
        "task": task,
        "rollout": {
            "prompts": job.prompts,
            "group": job.group,
            "max_new_tokens": job.new_tokens,
            "batch_size": job.samples,
        },
        "objective": [{"name": "clip_higher", "low": LOW, "high": HIGH}, {"name": "token_mean"}],
        "optimisation": {
            "rollouts": job.warmup + job.steps,
            "lr": job.lr,
            "betas": list(BETAS),
            "micro_batch_size": job.micro_batch,
            "precision": job.precision,
        },
        "evaluation": {"every": 0},
        "tracking": {"out": str(folder / "run"), "checkpoint_every": 0, "samples": 0},
    }


class Marks:
    """CPU and wall seconds at the end of every optimizer step of this process, by any trainer."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self._handle = register_optimizer_step_post_hook(self._mark)

    def _mark(self, *_: Any) -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def per_step(self, job: Job) -> dict[str, float]:
        """Means over the steps after the warm-up.

        Raises:
            RuntimeError: a step made no update (nothing to learn in it), so its seconds would go to its neighbour.
        """
        self._handle.remove()
        if len(self.cpu) != job.warmup + job.steps:
            raise RuntimeError(
                f"{len(self.cpu)} updates in {job.warmup + job.steps} steps: some had nothing to learn. Change the "
                f"job so that rewards differ within groups."
            )
        start = job.warmup - 1
        return {
            "cpu_s": (self.cpu[-1] - self.cpu[start]) / job.steps,
            "wall_s": (self.wall[-1] - self.wall[start]) / job.steps,
        }


def train_ours(job: Job, folder: Path) -> dict[str, float]:
    """A run by our trainer."""
    from rlstab.config import load_run
    from rlstab.train.loop import train

    run, marks = load_run(settings(job, folder)), Marks()
    records = train(run, console=Console(file=io.StringIO())).records[job.warmup :]
    return {
        **marks.per_step(job),
        **{
            f"{phase}_s": statistics.mean(record[f"seconds/{phase}"] for record in records)
            for phase in ("sample", "train")
        },
        "mean_tokens": statistics.mean(record["response/length"] for record in records),
        "mean_reward": statistics.mean(record["reward/mean"] for record in records),
        "zero_std_groups": statistics.mean(record["reward/zero_std_groups"] for record in records),
    }


def train_trl(job: Job, folder: Path) -> dict[str, float]:
    """The same by TRL's trainer, as it comes: its own sampling, its fused AdamW."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from rlstab.config import load_run
    from rlstab.tasks.build import build_task

    task = build_task(load_run(settings(job, folder)).task)
    source = str(Path(job.model).expanduser())
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    steps = job.warmup + job.steps
    examples = [task.example("train", index) for index in range(job.prompts * steps)]
    lengths: list[float] = []
    rewards: list[float] = []
    equal: list[float] = []

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        texts = [tokenizer.decode(ids, skip_special_tokens=not task.keeps_special_tokens) for ids in completion_ids]
        values = [task.score(examples[index], text) for index, text in zip(number, texts, strict=True)]
        groups = [values[start : start + job.group] for start in range(0, len(values), job.group)]
        lengths.append(statistics.mean(map(len, completion_ids)))
        rewards.append(statistics.mean(values))
        equal.append(statistics.mean(float(len(set(group)) == 1) for group in groups))
        return values

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.samples // job.micro_batch,
        num_generations=job.group,
        max_completion_length=job.new_tokens,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon=LOW,
        epsilon_high=HIGH,
        scale_rewards="group",
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=job.precision == "bf16",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    data = Dataset.from_list([{"prompt": example.prompt, "number": index} for index, example in enumerate(examples)])
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer
    )
    marks = Marks()
    trainer.train()
    return {
        **marks.per_step(job),
        "mean_tokens": statistics.mean(lengths[job.warmup :]),
        "mean_reward": statistics.mean(rewards[job.warmup :]),
        "zero_std_groups": statistics.mean(equal[job.warmup :]),
    }


TRAINERS = {"rlstab": (train_ours, "rlstab"), "trl": (train_trl, "trl")}


def compare(run: Run, name: str, job: Job, trainers: list[str], repeat: int, threads: int) -> None:
    """Processes in turns; one record per trainer, of its least CPU-seconds per step."""
    results: dict[str, list[dict[str, float]]] = {trainer: [] for trainer in trainers}
    for _ in range(repeat):
        for trainer in trainers:
            result = child("benchmarks.throughput", {"trainer": trainer, "job": asdict(job), "threads": threads})
            results[trainer].append(result)
            run.console.print(
                f"{name}, {trainer}: {result['cpu_s']:.3f} CPU-s per step, {result['mean_tokens']:.1f} tokens per "
                f"response, mean reward {result['mean_reward']:.2f}, {result['zero_std_groups']:.0%} zero-variance "
                f"groups",
                highlight=False,
            )
    drawn = Table("trainer", title=f"{name}: {job.samples} responses per step, at most {job.new_tokens} tokens")
    for title in ("CPU s per step", "samples / CPU s", "tokens per response", "tokens / CPU s", "zero-variance groups"):
        drawn.add_column(title, justify="right")
    for trainer, several in results.items():
        cpu = min(result["cpu_s"] for result in several)
        tokens = statistics.mean(result["mean_tokens"] for result in several)
        values = {
            "cpu_s": cpu,
            "wall_s": statistics.median(result["wall_s"] for result in several),
            "samples_per_cpu_s": job.samples / cpu,
            "tokens_per_cpu_s": job.samples * tokens / cpu,
            "mean_tokens": tokens,
            "zero_std_groups": statistics.mean(result["zero_std_groups"] for result in several),
            "ratio_to": {
                other: statistics.median(b["cpu_s"] / a["cpu_s"] for a, b in zip(several, theirs, strict=True))
                for other, theirs in results.items()
                if other != trainer
            },
        }
        run.add(
            trainer,
            job=name,
            shape=[job.prompts, job.group, job.new_tokens, job.micro_batch],
            dtype=job.precision,
            mode="step",
            repeat=repeat,
            **values,
        )
        drawn.add_row(
            trainer,
            f"{cpu:.3f}",
            f"{values['samples_per_cpu_s']:.2f}",
            f"{tokens:.1f}",
            f"{values['tokens_per_cpu_s']:.0f}",
            f"{values['zero_std_groups']:.0%}",
        )
    run.console.print(drawn)


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        return _child(json.loads(sys.argv[1]))
    arguments = parser(__doc__, repeat=3)
    arguments.add_argument("--job", default="countdown", help="comma-separated: " + ", ".join(JOBS))
    arguments.add_argument("--model", help="folder of the model, instead of the job's")
    arguments.add_argument("--steps", type=int, help="steps that count, instead of the job's")
    arguments.add_argument("--warmup", type=int, help="steps before them, at least 1, instead of the job's")
    arguments.add_argument("--against", default="trl", help="trl, or nothing")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    run = Run("throughput", options.json)
    run.say()
    trainers = ["rlstab"]
    for trainer in listed(options.against):
        if find_spec(TRAINERS[trainer][1]) is None:
            run.console.print(f"skipped: {trainer} (not installed; see benchmarks/README.md)")
        else:
            trainers.append(trainer)
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in listed(options.job):
        changed = {"model": options.model, "steps": options.steps, "warmup": options.warmup}
        job = Job(**(asdict(JOBS[name]) | {key: value for key, value in changed.items() if value is not None}))
        if job.warmup < 1:
            arguments.error("--warmup: the first optimizer step has no start, so at least one is left out.")
        compare(run, name, job, trainers, options.repeat, options.threads)
    return None


def _child(asked: dict[str, Any]) -> None:
    torch.set_num_threads(asked["threads"])
    with tempfile.TemporaryDirectory() as folder:
        result = TRAINERS[asked["trainer"]][0](Job(**asked["job"]), Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
