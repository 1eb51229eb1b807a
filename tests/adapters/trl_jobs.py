"""Jobs for TRL's trainer on fixed responses, in this process or over real ranks; each writes down what it did.

``python -m tests.adapters.trl_jobs FOLDER`` under the variables of a launcher runs the jobs that FOLDER describes.
"""

import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.adapters import cpu_fsdp, jobs
from tests.adapters.jobs import CHAIN, model, response, sharded, step_of, weights

#: What a separate process has in addition to :data:`tests.adapters.jobs.QUIET`.
QUIET = {**jobs.QUIET, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CI": "1"}
ON_CPU = {**QUIET, "ACCELERATE_USE_CPU": "true"}

os.environ.update(QUIET)


def sampler(*, spoiled: tuple[int, ...] = (), scored: bool = False) -> Any:
    """A ``rollout_func`` with fixed responses; ``scored`` gives it log-probs, None at ``spoiled`` positions of each."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rank, step = trainer.accelerator.process_index, trainer.state.global_step
        completions = [response(step, rank * len(prompts) + place) for place in range(len(prompts))]
        draw = random.Random(f"sampled {step} {rank}")
        logprobs = [
            [None if place in spoiled else -draw.uniform(0.5, 5.0) for place in range(len(ids))] for ids in completions
        ]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": logprobs if scored else None,
        }

    return rollout


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) / 6 for ids in completion_ids]


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


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHAIN, padding_side="left")


def trainer_of(
    folder: Path, objective: Any = None, *, kind: Any = None, sampling: Any = None, extra: Any = None, **changes: Any
) -> Any:
    """TRL's trainer, with an objective the adapter's, or a ``kind``; ``extra`` are other arguments of the trainer."""
    from trl import GRPOTrainer

    from rlstab.adapters.trl import RLStabGRPOTrainer

    chosen = GRPOTrainer if objective is None else partial(RLStabGRPOTrainer, objective=objective)
    return (kind or chosen)(
        **{
            "model": model(),
            "reward_funcs": reward,
            "args": config(folder, **changes),
            "train_dataset": prompts(),
            "eval_dataset": prompts(4),
            "processing_class": tokenizer(),
            "rollout_func": sampling or sampler(),
            **(extra or {}),
        }
    )


def recorder(trainer: Any) -> list[dict[str, Any]]:
    """What each optimizer step of a trainer did, filled in while it trains."""
    from transformers import TrainerCallback

    steps: list[dict[str, Any]] = []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            bare = trainer.accelerator.unwrap_model(trainer.model)
            steps.append(step_of(bare, getattr(trainer, "_rlstab_step", None)))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            bare = trainer.accelerator.unwrap_model(trainer.model)
            steps[-1] |= {"weights": weights(bare), "sharded": sharded(bare)}
            steps[-1] |= {"moments": jobs.moments(trainer.optimizer)}
            steps[-1]["settled"] = getattr(trainer, "objective_state", None)

    trainer.add_callback(Recorder())
    return steps


def run(
    folder: Path, objective: Any = None, *, resume: str | None = None, dumped: bool = False, **given: Any
) -> dict[str, Any]:
    """Train, and say what happened: the steps, the log, why a step was refused, and how many processes answered."""
    trainer = trainer_of(folder, objective, **given)
    steps = recorder(trainer)
    if dumped:
        from rlstab.adapters.trl import DumpCallback

        trainer.add_callback(DumpCallback(trainer, folder / "dump"))
    trainer.train(resume_from_checkpoint=resume)
    refusal = getattr(trainer, "last_refusal", None)
    return {"steps": steps, "log": trainer.state.log_history, "ranks": jobs.counted_ranks(), "refusal": refusal}


def over_ranks(folder: Path, given: dict[str, Any], *, sharded: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Jobs over two processes, whose model is sharded by FSDP2, or held by both (DDP)."""
    variables = {**ON_CPU, **(cpu_fsdp.VARIABLES if sharded else {})}
    return jobs.over_ranks("tests.adapters.trl_jobs", folder, given, **variables)


if __name__ == "__main__":
    if "FSDP_VERSION" in os.environ:
        cpu_fsdp.shard_on_cpus()
    jobs.of_rank(Path(sys.argv[1]), run)
