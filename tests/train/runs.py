"""Small runs that the tests train, and what is read from their folders; nothing here knows the trainer's inside."""

import io
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlstab.config import RunConfig, dump_run, load_run
from rlstab.config.settings import RolloutSettings
from rlstab.models.decoding import require_decoding
from rlstab.models.policy import Policy
from rlstab.tasks import Example
from rlstab.train import RunResult, train

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ROOT / "rlstab" / "data" / "countdown-tiny"
OWN = Path(__file__).parent / "own.py"
GRADED = f"{OWN.with_name('own_rewards.py')}:graded"

#: The largest difference between weights that the documents promise of several processes and of micro-batches.
ALIKE = 1e-5

#: Optimizer steps that rounding decides little about.
SMOOTH: dict[str, Any] = {"optimisation__eps": 1e-4, "optimisation__lr": 1e-4}

#: A state in the objective, which a continued run has to have.
STATED = ["clip_higher", {"name": "adaptive_entropy", "increment": 0.001, "target_entropy": 0.5}]

#: Every part of a run that has a state: a window, a budget, branches, refills, rollouts that wait.
STAGED: dict[str, Any] = {
    "objective": [*STATED, "stream_weight"],
    "stages": [
        {"name": "goldilocks", "pool": 12},
        {"name": "laconic", "budget": 3, "step": 0.1},
        {"name": "deep_grpo", "branches": 2, "threshold": 0.5, "warmup": 0},
        {"name": "dynamic_sampling", "max_refills": 1},
    ],
    "rollout__staleness": 1,
}
ADAPTER: dict[str, Any] = {"model__adapter": {"r": 4, "alpha": 8}, "optimisation__lr": 1e-2}


@cache
def _models() -> TemporaryDirectory[str]:
    """Until this process ends."""
    return TemporaryDirectory(prefix="rlstab-models-", ignore_cleanup_errors=True)


@cache
def first_layers(count: int) -> Path:
    """The model that ships, with its first layers alone: its responses vary as much, in a part of the time."""
    folder = Path(_models().name) / f"{count}-layers"
    shutil.copytree(SHIPPED, folder)
    weights = load_file(SHIPPED / "model.safetensors")
    later = tuple(f"model.layers.{index}." for index in range(count, 3))
    kept = {name: value for name, value in weights.items() if not name.startswith(later)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((SHIPPED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    return folder


def of_user(name: str, **settings: Any) -> dict[str, Any]:
    """A class of `own.py`, as a run file names it."""
    return {"name": f"{OWN}:{name}", **settings}


def small(out: Path, objective: Any = "clip_higher", **changes: Any) -> RunConfig:
    """A run of a fraction of a second, whose rewards differ; ``changes`` are settings with ``__`` for the dot."""
    data = {
        "model": {"name": str(first_layers(1))},
        "task": of_user("Graded"),
        "objective": objective,
        "rollout": {"prompts": 2, "group": 4, "max_new_tokens": 6},
        "optimisation": {"rollouts": 2, "lr": 1e-3},
        "evaluation": {"every": 0, "prompts": 2, "samples": 2, "pass_at": [2], "greedy": False},
        "tracking": {"out": str(out), "checkpoint_every": 0},
    }
    return load_run(data, {key.replace("__", "."): value for key, value in changes.items()})


def long(out: Path, objective: Any = STATED, **changes: Any) -> RunConfig:
    """Four rollouts of two optimizer steps, with checkpoints after 2 and 4, evaluations and traces."""
    settings = {
        "optimisation__rollouts": 4,
        "optimisation__mini_batches": 2,
        "tracking__checkpoint_every": 2,
        "tracking__dump_every": 3,
        "evaluation__every": 2,
    }
    return small(out, **{"objective": objective, **settings, **changes})


def file_of(run: RunConfig) -> Path:
    """The file of a run, next to its folder."""
    file = Path(run.tracking.out).with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_run(run))
    return file


def quiet() -> Console:
    """A console that is not a terminal; what it was told is :func:`printed`."""
    return Console(file=io.StringIO(), force_terminal=False, width=500)


def printed(where: Console) -> str:
    """What a console such as :func:`quiet` was told."""
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


class Mute(Console):
    """A console that renders nothing: the table at the end of a run takes a fifteenth of its time."""

    def print(self, *_: Any, **__: Any) -> None:
        return None


#: What :func:`require_decoding` returned in this process.
_DECODED: dict[Any, Any] = {}


def _require_decoding(policy: Policy, name: str, examples: Sequence[Example], settings: RolloutSettings) -> Any:
    """The check, which takes a fifth of so short a run, once for each kind of model, device, prompts and length."""
    prompts = tuple(str(example.prompt) for example in examples)
    key = name, type(policy.model), str(policy.model.device), prompts, settings.max_new_tokens, settings.temperature
    if key not in _DECODED:
        _DECODED[key] = require_decoding(policy, name, examples, settings)
    return _DECODED[key]


def go(run: RunConfig, **options: Any) -> RunResult:
    """Train without printing."""
    with patch("rlstab.train.loop.require_decoding", _require_decoding):
        return train(run, **{"console": Mute(file=io.StringIO(), force_terminal=False), **options})


def number(path: Path) -> int:
    """Of a checkpoint: the rollout in its name."""
    return int(path.name.rpartition("-")[2])


def checkpoints(out: Path) -> list[Path]:
    """Of a run, oldest first."""
    return sorted((out / "checkpoints").glob("rollout-*"), key=number)


def weights(out: Path) -> dict[str, Tensor]:
    """The weights of the newest checkpoint, or of the adapter in it."""
    newest = checkpoints(out)[-1]
    adapter = newest / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else newest / "model.safetensors")


def apart(out: Path, other: Path) -> float:
    """The largest difference between weights of two runs."""
    mine, theirs = weights(out), weights(other)
    assert mine.keys() == theirs.keys()
    distance = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
    print(f"{out.name} ({about(out)['engine']}) and {other.name} ({about(other)['engine']}): {distance:.1e} apart")
    return distance


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def column(records: list[dict[str, Any]], name: str) -> list[Any]:
    """A metric of all records that have it."""
    return [record[name] for record in records if name in record]


def metrics(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, less what a clock measured."""
    records = lines(out / "metrics.jsonl")
    return [{key: record[key] for key in record if not key.startswith("seconds/")} for record in records]


def about(out: Path) -> dict[str, Any]:
    """What a run says of itself: the processes as they counted themselves, and the engine."""
    return dict(json.loads((out / "run.json").read_text()))


def left(out: Path) -> dict[str, Any]:
    """What a run leaves that depends on no clock, id or restart: records, texts, the tensors of its checkpoints."""
    remains: dict[str, Any] = {"metrics": metrics(out)}
    remains["samples.jsonl"] = (out / "samples.jsonl").read_text() if (out / "samples.jsonl").exists() else ""
    remains["dump"] = {file.name: file.read_bytes() for file in sorted((out / "dump").glob("step-*"))}
    for path in checkpoints(out):
        for file in path.glob("*.safetensors"):
            # values alone: in which order a state lists its tensors is left to the process
            values = sorted(value.numpy().tobytes() for value in load_file(file).values())
            remains[f"{number(path)}/{file.name}"] = values
    return remains


def differences(out: Path, whole: dict[str, Any]) -> list[str]:
    """The names of what two runs left and that differs; ``whole`` is from :func:`left`."""
    mine = left(out)
    return sorted(name for name in mine.keys() | whole.keys() if mine.get(name) != whole.get(name))


def forget_newest(out: Path) -> None:
    """Bring a run back to its checkpoint before the newest, as a kill would that came before the newest was written."""
    shutil.rmtree(checkpoints(out)[-1])


def moved(out: Path) -> float:
    """The largest distance of a weight from where it began."""
    begun = load_file(Path(load_run(out / "config.yaml").model.name) / "model.safetensors")
    return max(float((begun[name] - value).abs().max()) for name, value in weights(out).items())
