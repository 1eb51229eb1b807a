"""What the jobs for TRL and for verl share: fixed responses, real ranks, and the comparison of two runs."""

import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from rlstab import Gate, Mean, Terms, TokenObjective

ROOT = Path(__file__).parents[2]
CHAIN = ROOT / "rlstab" / "data" / "chain-tiny"
#: No network, no second thread, and no text between pytest's dots.
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
EOS, WORDS = 19, [word for word in range(1, 29) if word != 19]


def defaults_of(config: type) -> dict[str, Any]:
    """The defaults of a dataclass of settings."""
    return {field.name: field.default for field in dataclasses.fields(config)}


def response(rollout: int, place: int) -> list[int]:
    """The fixed response at an index of a rollout: 3 to 12 tokens, three of four with an end."""
    draw = random.Random(f"response {rollout} {place}")
    words = [draw.choice(WORDS) for _ in range(draw.randint(2, 11))]
    return words + ([EOS] if place % 4 else [draw.choice(WORDS)])


def model() -> Any:
    """The model that training begins with."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(CHAIN, dtype=torch.float32)


@torch.no_grad()
def scored(prompts: list[list[int]], responses: list[list[int]]) -> list[torch.Tensor]:
    """Log-probs of the responses by that model."""
    policy, values = model(), []
    for prompt, ids in zip(prompts, responses, strict=True):
        logits = policy(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        values.append(logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1))
    return values


def objectives(clip: Any, target: Any, *, initial: float, **lp_reg: float) -> dict[str, list[dict[str, Any]]]:
    """Objectives by name: masks, weights, state, a penalty, and what TRL has no head for."""
    price = {"name": "adaptive_entropy", **target, "initial": initial}
    return {
        "s2t-stare": [clip, {"name": "s2t"}, {"name": "stare", **target}],
        "mask-entropy": [clip, {"name": "random_mask", "share": 0.3}, price],
        "lp-reg": [clip, {"name": "lp_reg", **lp_reg}],
    }


def whole(values: Any) -> torch.Tensor:
    """A copy of a tensor, put together where it is sharded."""
    values = values.detach()
    put_together: torch.Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    return put_together.clone()


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: whole(values) for name, values in module.named_parameters()}


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [whole(values) for state in optimizer.state.values() for values in state.values()]


def sharded(module: Any) -> bool:
    return any(hasattr(values, "full_tensor") for values in module.parameters())


def step_of(module: Any, step: Any) -> dict[str, Any]:
    """An optimizer step before it is made: its gradients, and its plan where the adapter made one."""
    gradients = {name: whole(values.grad) for name, values in module.named_parameters() if values.grad is not None}
    plan = None if step is None else step.plan
    if plan is None:
        return {"gradients": gradients}
    kept, every = plan.kept, plan.everything
    counts = {"kept": (kept.tokens, kept.sequences), "tokens": (every.tokens, every.sequences)}
    return {"gradients": gradients, "state": plan.state, **counts}


def over_ranks(module: str, folder: Path, jobs: dict[str, Any], **variables: str) -> dict[str, list[dict[str, Any]]]:
    """Jobs one after the other in two processes of ``python -m MODULE``: by name, what each process wrote down.

    Jobs are plain JSON, and what they write is in ``folder/NAME``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        env = {**os.environ, **QUIET, "MASTER_ADDR": "127.0.0.1", **own, **variables}
        with (folder / f"rank-{rank}.log").open("w") as log:  # the process has its own handle
            command = [sys.executable, "-m", module, str(folder)]
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    if any([process.wait(timeout=1200) for process in started]):  # all of them: none is left behind
        raise AssertionError("\n".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in (0, 1)))
    return {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)] for name in jobs}


def of_rank(folder: Path, run: Any) -> None:
    """What such a process does: run the jobs, and write down what each gave."""
    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        torch.save(run(folder / name, **job), folder / f"{name}-{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


def shell(line: str, folder: Path, **variables: str) -> str:
    """The output of a shell line, with this Python and its commands on the path, without a GPU."""
    own = {"HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **QUIET, **own, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", **variables}
    ran = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, cwd=folder, env=env, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def launched(line: str, folder: Path) -> list[str]:
    """The arguments of a shell line for verl: ``python3`` is a program that prints them."""
    python = folder / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    words = shell(line, folder, PATH=f"{folder}:/usr/bin:/bin").splitlines()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    return words[2:]


def counted_ranks() -> int:
    """How many processes answer."""
    count = torch.ones(1)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(count)
    return int(count)


def farthest(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest difference between the gradients of two steps."""
    mine, other = first["gradients"], second["gradients"]
    assert mine.keys() == other.keys()
    return max(float((values - other[name]).abs().max()) for name, values in mine.items())


def largest(step: dict[str, Any]) -> float:
    """The largest number in the gradients of a step."""
    return max(float(values.abs().max()) for values in step["gradients"].values())


def same_weights(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(torch.equal(values, second["weights"][name]) for name, values in first["weights"].items())


def unmoved(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Neither weights nor moments of the optimizer differ, and there are some."""
    pairs = zip(before["moments"], after["moments"], strict=True)
    return same_weights(before, after) and all(torch.equal(*pair) for pair in pairs) and bool(before["moments"])


class Trouble(TokenObjective):
    """In the second optimizer step: NaN in a gate, or half the learning rate."""

    name = "trouble"
    writes = {"gates", "lr_scale"}
    kind: str = "gate"

    def init_state(self) -> Any:
        return {"step": 0}

    def advance(self, state: Any, stat: Any) -> Any:
        return {"step": state["step"] + 1}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        now = state["step"] == 2
        if self.kind == "lr":
            return Terms(lr_scale=0.5 if now else 1.0)
        value = torch.nan if now else 1.0
        return Terms(gates={"": Gate(lambda ratio, constants: torch.full_like(ratio, value))})


class ByTurn(TokenObjective):
    """Adds to each token's advantage the number of its turn, and reports the mean."""

    name = "by_turn"
    needs = {"turn"}
    writes = {"bonus"}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        return Terms(bonus=batch.signal("turn"), report={"turn": Mean.of(batch.signal("turn"))})
