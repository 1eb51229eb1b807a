"""Jobs for TRL's trainer on fixed responses, in this process or over real ranks; each writes down what it did.

``python -m tests.adapters.trl_jobs FOLDER`` under the variables of a launcher runs the jobs that FOLDER describes.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.adapters.cpu_fsdp import VARIABLES, shard_on_cpus

ROOT = Path(__file__).parents[2]
#: Neither a network nor a second thread, and no words between the dots.
QUIET = {
    **{"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
    **{"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TRL_EXPERIMENTAL_SILENCE": "1", "CI": "1"},
}
EOS, WORDS = 19, [one for one in range(1, 29) if one != 19]

os.environ.update({key: value for key, value in QUIET.items() if key != "ACCELERATE_USE_CPU"})


def response(generation: int, place: int) -> list[int]:
    """The fixed response at a place of a generation: 3 to 12 tokens, three of four with an end."""
    draw = random.Random(f"response {generation} {place}")
    words = [draw.choice(WORDS) for _ in range(draw.randint(2, 11))]
    return words + ([EOS] if place % 4 else [draw.choice(WORDS)])


def sampler(*, spoiled: tuple[int, ...] = (), scored: bool = False) -> Any:
    """A ``rollout_func`` with fixed responses; ``scored`` gives it log-probs, None at ``spoiled`` places of each."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rank, step = trainer.accelerator.process_index, trainer.state.global_step
        completions = [response(step, rank * len(prompts) + place) for place in range(len(prompts))]
        draw = random.Random(f"sampled {step} {rank}")
        logprobs = [
            [None if place in spoiled else -draw.uniform(0.5, 5.0) for place in range(len(one))] for one in completions
        ]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": logprobs if scored else None,
        }

    return rollout


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(one) % 7) / 6 for one in completion_ids]


def prompts(count: int = 32) -> Any:
    from datasets import Dataset

    from rlstab.tasks.chain import Chain

    task = Chain(terms=3)
    return Dataset.from_dict({"prompt": [task.example("train", index).prompt for index in range(count)]})


def config(folder: Path, **changes: Any) -> Any:
    """Two generations of eight responses each, taken twice: four optimizer steps."""
    from trl import GRPOConfig

    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 12,
        "max_steps": 4,
        "learning_rate": 0.001,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }
    return GRPOConfig(**given)


def model(**changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ROOT / "rlstab" / "data" / "chain-tiny", dtype=torch.float32, **changes)


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "rlstab" / "data" / "chain-tiny", padding_side="left")


def trainer_of(
    folder: Path, objective: Any = None, *, cls: Any = None, sampling: Any = None, extra: Any = None, **changes: Any
) -> Any:
    """TRL's trainer, or with an objective the adapter's."""
    from trl import GRPOTrainer

    from rlstab.adapters.trl import RLStabGRPOTrainer

    chosen = cls or (GRPOTrainer if objective is None else RLStabGRPOTrainer)
    own = {} if objective is None else {"objective": objective}
    return chosen(
        **{
            "model": model(),
            "reward_funcs": reward,
            "args": config(folder, **changes),
            "train_dataset": prompts(),
            "eval_dataset": prompts(4),
            "processing_class": tokenizer(),
            "rollout_func": sampling or sampler(),
            **own,
            **(extra or {}),
        }
    )


def whole(values: Any) -> torch.Tensor:
    """A copy of a tensor, put together where it is sharded."""
    values = values.detach()
    return (values.full_tensor() if hasattr(values, "full_tensor") else values).clone()


def recorder(trainer: Any) -> list[dict[str, Any]]:
    """What each optimizer step of a trainer did, filled in while it trains."""
    from transformers import TrainerCallback

    steps: list[dict[str, Any]] = []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            bare = trainer.accelerator.unwrap_model(trainer.model)
            window = getattr(trainer, "_rlstab_window", None)
            plan = window.plan if window is not None else None
            steps.append(
                {
                    "gradients": {
                        name: whole(one.grad) for name, one in bare.named_parameters() if one.grad is not None
                    },
                    "loss": 0.0 if window is None or window.loss is None else float(window.loss),
                    **(
                        {}
                        if plan is None
                        else {
                            "kept": (plan.kept.tokens, plan.kept.sequences),
                            "tokens": (plan.everything.tokens, plan.everything.sequences),
                            "state": plan.state,
                        }
                    ),
                }
            )

        def on_step_end(self, *_: Any, **__: Any) -> None:
            bare = trainer.accelerator.unwrap_model(trainer.model)
            steps[-1]["weights"] = {name: whole(one) for name, one in bare.named_parameters()}
            steps[-1]["sharded"] = any(hasattr(one, "full_tensor") for one in bare.parameters())
            steps[-1]["settled"] = getattr(trainer, "objective_state", None)

    trainer.add_callback(Recorder())
    return steps


def run(
    folder: Path, objective: Any = None, *, resume: str | None = None, head: str | None = None, **given: Any
) -> dict[str, Any]:
    """Train, and say what happened: the steps, the log, and how many processes answered."""
    if head is not None:
        given["extra"] = {**given.get("extra", {}), "head": head}
    trainer = trainer_of(folder, objective, **given)
    steps = recorder(trainer)
    trainer.train(resume_from_checkpoint=resume)
    counted = torch.ones(1)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(counted)
    return {"steps": steps, "log": trainer.state.log_history, "ranks": int(counted)}


def over_ranks(
    folder: Path, jobs: dict[str, dict[str, Any]], *, world: int = 2, sharded: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Jobs one after the other in processes of their own: by name, what each process wrote down.

    Jobs are plain JSON, and what they write is in ``folder/NAME``. The model is sharded by FSDP2, or held by all (DDP).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        env = {**os.environ, **QUIET, "MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in own.items()}}
        env |= VARIABLES if sharded else {}
        command = [sys.executable, "-m", "tests.adapters.trl_jobs", str(folder)]
        with (folder / f"rank-{rank}.log").open("w") as log:  # the process has a handle of its own
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    ended = [one.wait(timeout=1200) for one in started]
    if any(ended):
        raise AssertionError("\n".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in range(world)))
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)] for name in jobs
    }


def main(folder: Path) -> None:
    if "FSDP_VERSION" in os.environ:
        shard_on_cpus()
    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        found = run(folder / name, **job)
        torch.save(found, folder / f"{name}-{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
