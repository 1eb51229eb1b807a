"""Tracking through accelerate: JSON lines always, wandb and TensorBoard on request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from rlstab.config.renamed import new_record
from rlstab.config.runs import RunConfig


class JsonLinesTracker(GeneralTracker):
    """One JSON object per rollout in ``metrics.jsonl``, flushed at once. For the main process alone.

    Args:
        path: of the file.
        last: rollout of the checkpoint that a run continues from; later lines are removed, for they will come again.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: Path, last: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # accelerate gives it no types
        forget_after(path, last)
        self._file = path.open("a", encoding="utf-8")

    @property
    def tracker(self) -> Any:
        """The open file."""
        return self._file

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration is in ``config.yaml``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._file.write(json.dumps({"rollout": step, **values}) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def forget_after(path: Path, last: int) -> None:
    """Remove the records after a rollout, and a last line that a kill cut off, by rewriting the file."""
    if not path.exists():
        return
    kept = [line for line in _complete_lines(path) if new_record(json.loads(line))["rollout"] <= last]
    temporary = path.with_suffix(".writing")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a last line that a kill cut off is left out."""
    return [new_record(json.loads(line)) for line in _complete_lines(path)]


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return lines[:-1]


def start_trackers(accelerator: Accelerator, run: RunConfig, out: Path, last: int) -> None:
    """Open the trackers of a run. wandb stays offline unless the environment configures it."""
    if "wandb" in run.tracking.trackers and not {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys():
        os.environ["WANDB_MODE"] = "offline"
    if accelerator.is_main_process:
        accelerator.log_with.append(JsonLinesTracker(out / "metrics.jsonl", last))
    options: dict[str, Any] = {"wandb": {"dir": str(out), "name": out.name}}
    accelerator.init_trackers(run.tracking.project, _flat(run.model_dump(mode="json")), init_kwargs=options)


def _flat(data: Any, place: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        return {path: value for key, one in data.items() for path, value in _flat(one, f"{place}{key}.").items()}
    if isinstance(data, list):
        return _flat({str(index): one for index, one in enumerate(data)}, place)
    return {place.rstrip("."): "null" if data is None else data}
