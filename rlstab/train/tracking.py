"""Tracking through accelerate: JSON lines always, wandb and TensorBoard on request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from rlstab.config.runs import RunConfig
from rlstab.train.journal import line


class JsonLinesTracker(GeneralTracker):
    """One JSON object per rollout in ``metrics.jsonl``, written at once. For the main process alone.

    Args:
        append: takes whole lines.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, append: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # accelerate gives it no types
        self._append = append

    @property
    def tracker(self) -> Any:
        """What lines are given to."""
        return self._append

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration is in ``config.yaml``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._append(line({"rollout": step, **values}))

    def finish(self) -> None:
        """The folder of the run closes its files."""


def start_trackers(accelerator: Accelerator, run: RunConfig, out: Path, append: Callable[[str], None] | None) -> None:
    """Open the trackers of a run. wandb stays offline unless the environment configures it.

    Args:
        accelerator: that logs to them.
        run: whose they are.
        out: its folder.
        append: writes lines of ``metrics.jsonl``; None in all processes but the first.
    """
    if "wandb" in run.tracking.trackers and not {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys():
        os.environ["WANDB_MODE"] = "offline"
    if append is not None:
        accelerator.log_with.append(JsonLinesTracker(append))
    options: dict[str, Any] = {"wandb": {"dir": str(out), "name": out.name}}
    accelerator.init_trackers(run.tracking.project, _flat(run.model_dump(mode="json")), init_kwargs=options)


def _flat(data: Any, place: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        return {path: value for key, one in data.items() for path, value in _flat(one, f"{place}{key}.").items()}
    if isinstance(data, list):
        return _flat({str(index): one for index, one in enumerate(data)}, place)
    return {place.rstrip("."): "null" if data is None else data}
