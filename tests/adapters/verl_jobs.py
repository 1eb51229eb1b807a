"""Jobs for verl's real worker on fixed responses, in this process or over real ranks; each writes down what it did.

``python -m tests.adapters.verl_jobs FOLDER`` under the variables of a launcher runs the jobs that FOLDER describes.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tests.adapters.cpu_verl  # noqa: F401 (before verl, which trains on a CPU then)
from tests.adapters import jobs
from tests.adapters.jobs import CHAIN, response, scored, sharded, step_of, weights

ROWS, GROUP = 16, 4


def settings(folder: Path, objective: Any = None, **changes: Any) -> list[str]:
    """Overrides of verl's configuration: a tiny actor in float32, sharded by FSDP2, and an objective of a file."""
    if objective is not None:
        path = folder / "objective.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"objective": objective}))
        changes = {"actor.policy_loss.loss_mode": f"rlstab:{path}", **changes}
    precision = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
    given = {
        "model.path": CHAIN,
        "model.use_remove_padding": "false",
        "+model.override_config.attn_implementation": "eager",
        "model.enable_gradient_checkpointing": "false",
        "actor.strategy": "fsdp2",
        "actor.fsdp_config.use_torch_compile": "false",
        "+actor.fsdp_config.mixed_precision": precision,
        "actor.ppo_mini_batch_size": ROWS // GROUP,
        "actor.ppo_micro_batch_size_per_gpu": ROWS,
        "actor.optim.lr": 1e-3,
        "actor.optim.weight_decay": 0.1,
        "actor.grad_clip": 1e9,
        "rollout.name": "vllm",
        "rollout.n": GROUP,
        "rollout.log_prob_micro_batch_size_per_gpu": ROWS,
        **changes,
    }
    return [f"{'+' * key.startswith('+')}actor_rollout_ref.{key.lstrip('+')}={value}" for key, value in given.items()]


def composed(overrides: list[str]) -> Any:
    """verl's configuration, as Hydra composes it for ``main_ppo``."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def worker_of(folder: Path, objective: Any = None, **changes: Any) -> Any:
    """verl's ``ActorRolloutRefWorker`` with its actor, on this process."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if not torch.distributed.is_initialized():
        ranks: dict[str, Any] = {}
        if "RANK" not in os.environ:
            alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            os.environ.update(alone)
            ranks = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("gloo", **ranks)
    worker = ActorRolloutRefWorker(composed(settings(folder, objective, **changes)).actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def rollout(
    step: int,
    *,
    nested: bool = True,
    lost: Sequence[int] = (),
    weights: bool = False,
    equal: Sequence[int] = (),
    broken: Sequence[int] = (),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """The columns of a rollout of 16 responses to four prompts, of every rank together; another step has others.

    Rows are nested as in verl's trainer, else padded as in its older one; the sampler has ``lost`` log-probs of some
    rows; verl's correction made ``weights``; in some steps rewards are ``equal``, or a token impossible (``broken``).
    """
    draw = torch.Generator().manual_seed(step)
    responses = [response(step, place) for place in range(ROWS)]
    prompts = [[11, 12 + place // GROUP, 13][: 2 + place // GROUP % 2] for place in range(ROWS)]
    logprobs = scored(prompts, responses)

    def like(make: Any) -> list[torch.Tensor]:
        return [make(len(ids)) for ids in responses]

    columns: dict[str, Any] = {
        "prompts": [torch.tensor(ids) for ids in prompts],
        "responses": [torch.tensor(ids) for ids in responses],
        "input_ids": [torch.tensor(prompt + ids) for prompt, ids in zip(prompts, responses, strict=True)],
        "response_mask": like(lambda n: torch.ones(n, dtype=torch.int64)),
        "advantages": [torch.full((len(ids),), (place % 5 - 2) / 2) for place, ids in enumerate(responses)],
    }
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_prob"):
        moved = (values + 0.2 * torch.randn(len(values), generator=draw) for values in logprobs)
        columns[name] = [values.clamp(max=0) for values in moved]
    if step in equal:
        columns["advantages"] = like(torch.zeros)
    if step in broken:
        columns["rollout_log_probs"][3][0] = -torch.inf
    for place in lost:
        columns["rollout_log_probs"][place][1:] = torch.nan
    if weights:
        columns["rollout_is_weights"] = like(lambda n: 0.5 + torch.rand(n, generator=draw))
    columns["loss_mask"] = columns["response_mask"]
    columns["uid"] = [f"prompt {step} {place // GROUP}" for place in range(ROWS)]
    return {"nested": nested, "columns": {name: values for name, values in columns.items() if name not in without}}


def batch_of(rolled: dict[str, Any], rank: int, ranks: int, **keys: Any) -> Any:
    """verl's TensorDict of the rows of one rank, with what its trainer adds."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    columns = {name: values[mine] for name, values in rolled["columns"].items()}
    whole = {name: values for name, values in columns.items() if name not in ("uid", "input_ids", "loss_mask")}
    told = {"temperature": 1.0, "calculate_entropy": False, "global_batch_size": ROWS, "mini_batch_size": ROWS}
    told |= {"epochs": 1, "seed": 42, "dataloader_kwargs": {"shuffle": False}, "compute_loss": True, **keys}
    if rolled["nested"]:
        whole |= {name: columns[name] for name in ("input_ids", "loss_mask")}
        whole["position_ids"] = [torch.arange(len(ids)) for ids in columns["input_ids"]]
        tensors = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in whole.items()}
        return tu.get_tensordict({**tensors, "uid": columns["uid"]}, told)

    def padded(values: list[torch.Tensor], *, left: bool = False) -> torch.Tensor:
        side = "left" if left else "right"
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_side=side)

    tensors = {name: padded(values, left=name == "prompts") for name, values in whole.items()}
    there = padded([torch.ones_like(prompt) for prompt in columns["prompts"]], left=True)
    tensors["attention_mask"] = torch.cat([there, tensors["response_mask"]], dim=1)
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return left_right_2_no_padding(tu.get_tensordict({**tensors, "uid": columns["uid"]}, told))


def recorder(actor: Any) -> list[dict[str, Any]]:
    """What each optimizer step of an actor did, filled in while it trains."""
    steps: list[dict[str, Any]] = []
    engine, own = actor.engine, actor.engine.optimizer_step.__func__

    def optimizer_step(self: Any) -> Any:
        steps.append(step_of(self.module, getattr(actor, "_rlstab_step", None)))
        steps[-1]["rates"] = [group["lr"] for group in self.optimizer.param_groups]
        return own(self)

    type(engine).optimizer_step = optimizer_step
    return steps


def run(
    folder: Path,
    objective: Any = None,
    *,
    updates: int = 2,
    resume: str | None = None,
    save: int | None = None,
    keys: dict[str, Any] | None = None,
    rolled: dict[str, Any] | None = None,
    change: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train to the last of the ``updates``, and say what happened: steps, metrics, how many processes answered.

    Without an objective, by verl's own loss. A checkpoint is written after the update ``save``; ``keys`` are for the
    trainer's batch, ``rolled`` for :func:`rollout`, ``change`` is called with the actor; the rest are settings.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    worker = worker_of(folder, objective, **changes)
    actor, rank, ranks = worker.actor, torch.distributed.get_rank(), torch.distributed.get_world_size()
    if change is not None:
        change(actor)
    if resume is not None:
        worker.load_checkpoint(resume)
    first = 0 if resume is None else int(Path(resume).name.rpartition("-")[2])
    done: list[dict[str, Any]] = []
    module, before = actor.engine.module, type(actor.engine).optimizer_step
    steps = recorder(actor)
    try:
        for number in range(first, updates):
            batch = batch_of(rollout(number, **(rolled or {})), rank, ranks, **(keys or {}))
            metrics = reduce_metrics(rename_dict(tu.get(worker.update_actor(batch), "metrics"), "actor/"))
            done.append({"metrics": metrics, "weights": weights(module)})
            done[-1] |= {"moments": jobs.moments(actor.engine.optimizer)}
            done[-1] |= {"state": getattr(actor, "objective_state", None)}
            done[-1] |= {"refusal": getattr(actor, "last_refusal", None)}
            if save == number + 1:
                worker.save_checkpoint(str(folder / f"checkpoint-{save}"), global_step=save)
    finally:
        type(actor.engine).optimizer_step = before
    counts = {"ranks": jobs.counted_ranks(), "sharded": sharded(module)}
    return {"steps": steps, "updates": done, "class": type(actor).__name__, **counts}


if __name__ == "__main__":
    jobs.of_rank(Path(sys.argv[1]), run)
