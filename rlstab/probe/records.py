"""Recorded runs: one JSON line each, identified by everything that decides the outcome of a run.

The folder ``recorded`` has the ``results.jsonl`` of ``rlstab probe`` for the runs that ship.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from rlstab.bench.file import BenchRun
from rlstab.bench.record import read_record
from rlstab.config.allowed_changes import digest
from rlstab.config.objectives import settings_as_yaml
from rlstab.config.settings import OTHER_MODELS
from rlstab.config.user_classes import name_in_yaml
from rlstab.config.user_code import SHIPPED_MODELS, checksums, portable
from rlstab.core.compose import Composition, Observe, Within
from rlstab.core.method import Method
from rlstab.core.method_settings import settings_of
from rlstab.errors import ReportError
from rlstab.files import checksum, from_home
from rlstab.probe.suite import HERE
from rlstab.report.run_reader import read_folder
from rlstab.report.runs import RunRecord

#: The version of the outcomes. Add 1 when a change of rlstab, or of a default, changes outcomes: then all records are
#: stale and must be made again.
NUMBERS = 1

#: A measurement, which is not NaN.
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Record:
    """The outcome of one run of a probe.

    Attributes:
        probe, dose, row, seed: what identifies the run in a map.
        identity: see :func:`identity`.
        trainer: held-out mean of the trainer's policy at the end; 0 if the policy was lost to NaN or Inf.
        sampler: the same for the sampler's policy, if that is another one.
        cpu_seconds: CPU-seconds that the run took.
    """

    probe: str
    dose: str
    row: str
    seed: int
    identity: str
    trainer: Number
    sampler: Number | None = None
    cpu_seconds: Number | None = None


def identity(run: BenchRun) -> str:
    """Twelve hexadecimal digits over everything that decides the outcome of a run.

    They cover settings that are not the default, so that a new setting makes no record stale; user-defined code, data
    files and weights by their content; and :data:`NUMBERS`. They cover neither paths nor the order of keys nor how
    float32 is rounded, which changes an outcome only as another seed does.
    """
    config = run.training
    sections = dict.fromkeys(("tracking", "engine", "model", "task", "stages", "objective"), True)
    exclude: dict[str, Any] = {**sections, "evaluation": {"pass_at"}, "rollout": {"stop"}}
    data = config.model_dump(mode="json", exclude_defaults=True, exclude=exclude)
    if config.rollout.stop is not None:  # a single text was recorded as a text
        data["rollout"]["stop"] = config.rollout.stop[0] if len(config.rollout.stop) == 1 else config.rollout.stop
    data["task"] = {"name": config.task.name} | config.task.model_dump(mode="json", exclude_defaults=True)
    data["model"] = config.model.model_dump(mode="json", exclude_defaults=True)
    models = ("name", *OTHER_MODELS.values())
    data["model"] |= {key: _weights(name) for key in models if (name := getattr(config.model, key))}
    data["objective"] = [_changed(method) for method in config.composition.members]
    data["stages"] = [_changed(stage) for stage in config.pipeline]
    data["gather"] = config.engine.gather
    code = checksums(config.model_dump(mode="json", exclude={"tracking", "engine"}))
    data["code"] = {name: content for name, content in code.items() if content not in _own_code()}
    return digest([NUMBERS, _whole(portable(data))])


def _changed(method: Method[Any]) -> dict[str, Any]:
    """A method or stage with its settings that are not the default."""
    if isinstance(method, Within):
        return {"outer": _changed(method.outer), "inner": _changed(method.inner)}
    if isinstance(method, Observe):
        return {"observe": _changed(method.method)}
    if isinstance(method, Composition):
        return {"all": [_changed(member) for member in method.members]}
    defaults = {setting.name: setting.default for setting in settings_of(type(method))}
    changed = {key: value for key, value in settings_as_yaml(method).items() if value != defaults[key]}
    return {"name": name_in_yaml(method), **changed}


def _whole(data: Any) -> Any:
    """The data with 1.0 as 1, since a factor makes a float of a whole number."""
    if isinstance(data, Mapping):
        return {key: _whole(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_whole(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


@cache
def _own_code() -> frozenset[str]:
    """Checksums of the tasks and stages of the suite, whose changes :data:`NUMBERS` counts."""
    return frozenset(checksum(path.read_bytes()) for path in HERE.glob("*.py"))


@cache
def _weights(name: str) -> list[str] | str:
    """Checksums of the weights of a model; its name if they are not on this machine."""
    folder = SHIPPED_MODELS.get(name, from_home(name))
    return [checksum(path.read_bytes()) for path in sorted(folder.glob("*.safetensors"))] or name


_ADAPTER = TypeAdapter(Record)


def recorded(*files: Path) -> dict[str, Record]:
    """Recorded runs by identity: those that ship, and those in more files.

    Raises:
        ReportError: a file cannot be read, or does not hold recorded runs.
    """
    shipped = sorted(Path(str(resources.files("rlstab.probe") / "recorded")).glob("*.jsonl"))
    records: dict[str, Record] = {}
    for path in (*shipped, *files):
        where = ""
        try:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                where = f", line {number}"
                record = _ADAPTER.validate_json(line, strict=True)
                records[record.identity] = record
        except (OSError, ValueError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ReportError(
                f"{path}{where}: not a recorded run: {reason}. Give a file that `probe` wrote."
            ) from error
    return records


def as_lines(records: Iterable[Record]) -> str:
    """Records as sorted lines: a second run with the same seeds gives the same lines, except for the times."""
    ordered = sorted(records, key=lambda record: (record.probe, float(record.dose), record.row, record.seed))
    entries = ({key: value for key, value in asdict(record).items() if value is not None} for record in ordered)
    return "".join(f"{json.dumps(record)}\n" for record in entries)


def made(run: BenchRun, identity: str) -> Record | str | None:
    """The record of a run from its folder; the reason if it failed; None if it is not finished."""
    record, (probe, _, dose) = read_record(run.folder), run.setting.rpartition("-")
    status, error = record.get("status"), str(record.get("error") or "")
    if record.get("run_hash") != run.hash or status not in ("finished", "failed"):
        return None
    trainer, sampler = 0.0, None
    if status == "finished":
        result = read_folder(run.folder)
        last = result.evaluations[-1] if isinstance(result, RunRecord) and result.evaluations else {}
        if "eval/mean" not in last:
            return "no evaluation at its end"
        trainer, sampler = last["eval/mean"], last.get("eval/sampler/mean")
    elif not error.startswith("NonFinite"):
        return (error.splitlines() or ["no reason given"])[-1]
    return Record(probe, dose, run.method, run.seed, identity, trainer, sampler, record.get("cpu_seconds"))
