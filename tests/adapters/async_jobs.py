"""Jobs for TRL's asynchronous trainer on fixed rollouts, in this process or over real ranks.

``python -m tests.adapters.async_jobs FOLDER`` under the variables of a launcher runs the jobs that FOLDER describes.
"""

import functools
import http.server
import json
import os
import queue
import random
import sys
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.adapters import cpu_fsdp, jobs
from tests.adapters.jobs import CHAIN, response, scored
from tests.adapters.trl_jobs import ON_CPU, prompts, recorder, reward, tokenizer


def varlen_attention(
    query: Any, key: Any, value: Any, starts: Any, paths: Any, *_: Any, softmax_scale: Any, causal: bool, **__: Any
) -> Any:
    """What ``flash_attn_varlen_func`` computes, on a CPU: segments attend to their paths, aligned at the end."""
    rows = []
    for first, last, begin, end in zip(starts[:-1], starts[1:], paths[:-1], paths[1:], strict=True):
        states = [values.transpose(0, 1) for values in (query[first:last], key[begin:end], value[begin:end])]
        queries, keys = last - first, end - begin
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(
                *states, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(rows)


@functools.cache
def first_policy() -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, responses, and their log-probs by the policy that training begins with."""
    asked = [tokenizer()(row["prompt"])["input_ids"] for row in prompts() for _ in range(4)]
    answers = [response(0, index) for index in range(len(asked))]
    values = [logprobs.tolist() for logprobs in scored(asked, answers)]
    return list(zip(asked, answers, values, strict=True))


class Worker:
    """A rollout worker, as TRL's own tests have it: a queue of scored samples, filled when the weights are new.

    Each adds ``each`` samples; with ``replies`` the third and fourth token of a response are what a tool answered.
    """

    def __init__(self, *, each: int = 8, lag: int = 0, spoiled: int = -1, replies: bool = False) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.each, self.lag, self.spoiled, self.version, self.count = each, lag, spoiled, 0, 0
        self.replies = replies

    def sample(self, index: int) -> Any:
        """One of four responses to a prompt, with log-probs near those of the first policy."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        prompt, ids, values = first_policy()[index]
        draw = random.Random(f"sampled {index}")
        logprobs = [min(value + draw.gauss(-0.3, 0.3), -1e-3) for value in values]
        if index == self.spoiled:
            logprobs[0] = float("nan")
        mask = [int(not (self.replies and position in (2, 3))) for position in range(len(ids))]
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array(prompt + ids),
            completion_mask=np.array([0] * len(prompt) + mask),
            old_log_probs=np.array([0.0] * len(prompt) + logprobs),
            advantage=draw.gauss(0.0, 1.0),
            model_version=max(0, self.version - self.lag),
            group_id=index // 4,
            metrics={"reward": reward([ids])[0]},
        )

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version
        for _ in range(self.each):
            self.rollout_buffer.put(self.sample(self.count))
            self.count += 1

    def start(self) -> None:
        self.update_model_version(self.version)  # one micro-batch more is fetched than a step takes

    def stop(self) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the trainer waits for more samples than an optimizer step has")


class Transfer:
    """Weights go nowhere; they are put together where they are sharded, which all ranks do."""

    def send_weights(self, weights: Any) -> None:
        assert all(values.numel() for _, values in weights)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def config(folder: Path, **changes: Any) -> Any:
    """Four optimizer steps of eight responses."""
    from trl.experimental.async_grpo import AsyncGRPOConfig

    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "token_budget": -1,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 4,
        "learning_rate": 0.0002,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "bf16": False,
        "dtype": "float32",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }
    return AsyncGRPOConfig(**given)


def trainer_of(
    folder: Path,
    objective: Any = None,
    *,
    base: str | None = None,
    signals: Any = None,
    plain: bool = False,
    adapters: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """The adapter's trainer, or TRL's if ``plain``; both attend on a CPU, whose peak of FLOPs TRL cannot look up.

    ``adapters`` are settings of LoRA.
    """
    import peft
    from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, packing

    from rlstab.adapters.trl.async_trainer import RLStabAsyncGRPOTrainer

    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    worker = given.pop("worker", {})
    worker = Worker(**worker) if isinstance(worker, dict) else worker
    chosen = (
        AsyncGRPOTrainer if plain else partial(RLStabAsyncGRPOTrainer, objective=objective, base=base, signals=signals)
    )
    return chosen(
        model=str(CHAIN),
        args=config(folder, **given),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        rollout_worker=worker,
        weight_transfer=Transfer(),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **adapters) if adapters else None,
    )


def run(
    folder: Path,
    objective: Any = None,
    *,
    resume: str | None = None,
    skipped: int = 0,
    dumped: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """Train, and say what happened; a resumed run goes on behind the ``skipped`` samples that the first one took."""
    trainer = trainer_of(folder, objective, **given)
    if isinstance(trainer.rollout_worker, Worker):
        trainer.rollout_worker.count = skipped
    steps = recorder(trainer)
    if dumped:
        from rlstab.adapters.trl import DumpCallback

        trainer.add_callback(DumpCallback(trainer, folder / "dump"))
    trainer.train(resume_from_checkpoint=resume)
    refusal = getattr(trainer, "last_refusal", None)
    return {"steps": steps, "log": trainer.state.log_history, "ranks": jobs.counted_ranks(), "refusal": refusal}


class Completions(http.server.BaseHTTPRequestHandler):
    """What TRL's worker asks of a vLLM server: completions of the policy that training begins with."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, logprobs, draw = list(asked["prompt"]), list[float](), torch.Generator().manual_seed(asked["seed"])
        policy = self.server.policy  # type: ignore[attr-defined]  # put there below
        while len(logprobs) < asked["max_tokens"] and (not logprobs or ids[-1] != jobs.EOS):
            with torch.no_grad():
                values = policy(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(values.exp(), 1, generator=draw)))
            logprobs.append(float(values[ids[-1]]))
        choice = {"token_ids": ids[-len(logprobs) :], "logprobs": {"token_logprobs": logprobs}}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def longer(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) + sum(ids) % 3 for ids in completion_ids]


def run_with_server(folder: Path, patch: Any, objective: Any, **given: Any) -> dict[str, Any]:
    """Train on the rollouts of TRL's own worker, a process that asks a server on this machine."""
    from datasets import Dataset
    from trl.experimental.async_grpo import async_rollout_worker

    patch.setattr(async_rollout_worker, "is_vllm_available", lambda *_: True)  # the server is not vLLM
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    server.policy = jobs.model()  # type: ignore[attr-defined]  # read by each request
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chat = tokenizer()
    chat.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fields = {"content": {"close_pattern": "$", "content": "text"}}
    chat.response_template = {"defaults": {"role": "assistant"}, "start_anchor": "=", "fields": fields}
    asked = Dataset.from_dict({"prompt": [[{"role": "user", "content": row["prompt"]}] for row in prompts()]})
    worker = async_rollout_worker.AsyncRolloutWorker(
        model_name=str(CHAIN),
        dataset=asked,
        reward_funcs=[longer],
        processing_class=chat,
        eos_token_ids=[jobs.EOS],
        num_generations=4,
        max_inflight_tasks=8,
        queue_maxsize=16,
        max_tokens=12,
        vllm_server_url=f"http://127.0.0.1:{server.server_port}",
    )
    try:
        return run(folder, objective, worker=worker, max_staleness=8, **given)
    finally:
        server.shutdown()
        server.server_close()


def over_ranks(folder: Path, given: dict[str, Any], *, sharded: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Jobs over two processes, whose model is sharded by FSDP2, or held by both (DDP)."""
    variables = {**ON_CPU, **(cpu_fsdp.VARIABLES if sharded else {})}
    return jobs.over_ranks("tests.adapters.async_jobs", folder, given, **variables)


if __name__ == "__main__":
    if "FSDP_VERSION" in os.environ:
        cpu_fsdp.shard_on_cpus()
    jobs.of_rank(Path(sys.argv[1]), run)
