"""Recorded runs: one JSON line each, known again by all that decides what comes of a run.

What ships is the ``results.jsonl`` of ``rlstab probe``, in the folder ``recorded``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path

from rlstab import __version__
from rlstab.bench.file import BenchRun
from rlstab.bench.record import read_record
from rlstab.config.objectives import digest
from rlstab.errors import ReportError
from rlstab.files import checksum
from rlstab.models.loading import SHIPPED
from rlstab.report.load import read_folder
from rlstab.report.runs import RunRecord


@dataclass(frozen=True)
class Record:
    """What came of one run of a probe.

    Attributes:
        probe, dose, row, seed: which run it is.
        identity: see :func:`identity`.
        trainer: held-out mean of the trainer's policy at the end; 0 where the policy was lost to NaN or Inf.
        sampler: the same of the sampler's policy, where that is another one.
        cpu_seconds: that it took.
    """

    probe: str
    dose: str
    row: str
    seed: int
    identity: str
    trainer: float
    sampler: float | None = None
    cpu_seconds: float | None = None


def identity(run: BenchRun) -> str:
    """Twelve hexadecimal digits over what decides a run: its resolved configuration, the model's file, and versions."""
    versions = [__version__, *(version(name).partition("+")[0] for name in ("torch", "transformers"))]
    return digest([run.hash, _model(run.config.model.name), versions])


@cache
def _model(name: str) -> list[str]:
    folder = SHIPPED.get(name, Path(name).expanduser())
    return [checksum(path.read_bytes()) for path in sorted(folder.glob("*.safetensors"))]


def recorded(*files: Path) -> dict[str, Record]:
    """Recorded runs by identity: those that ship, and those of more files.

    Raises:
        ReportError: a file cannot be read, or is not one of recorded runs.
    """
    shipped = sorted(Path(str(resources.files("rlstab.probe") / "recorded")).glob("*.jsonl"))
    records: dict[str, Record] = {}
    for path in (*shipped, *files):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            made = [Record(**json.loads(line)) for line in lines if line.strip()]
        except (OSError, ValueError, TypeError) as error:
            raise ReportError(f"{path}: not a file of recorded runs: {error}. Give one that `probe` wrote.") from error
        records |= {record.identity: record for record in made}
    return records


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records, sorted: a second run with the same seeds gives the same lines, but for the time that they took."""
    ordered = sorted(records, key=lambda record: (record.probe, float(record.dose), record.row, record.seed))
    kept = ({key: value for key, value in asdict(record).items() if value is not None} for record in ordered)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in kept), encoding="utf-8")


def made(run: BenchRun, identity: str) -> Record | str | None:
    """The record of a run by its folder; why it failed; None where it is not finished."""
    kept, (probe, _, dose) = read_record(run.folder), run.setting.rpartition("-")
    status, error = kept.get("status"), str(kept.get("error") or "")
    if kept.get("run_hash") != run.hash or status not in ("finished", "failed"):
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
    return Record(probe, dose, run.method, run.seed, identity, trainer, sampler, kept.get("cpu_seconds"))
