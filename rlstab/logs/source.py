"""What can lie under a path: each kind of log of a trainer or tracker, with its reader."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlstab.bins import Run
from rlstab.errors import ReportError, reason
from rlstab.files import exists, is_dir, leads_away
from rlstab.logs.log import logged, step_of
from rlstab.logs.readers import STATE, read_text
from rlstab.logs.trackers import database_runs, tensorboard_rows, wandb_rows
from rlstab.safe_read import as_step, read_bytes, text_of

#: The readable formats, for errors.
READABLE = (
    f"a run folder or results file of rlstab, {STATE} or an output folder of TRL, what a trainer printed, the file of "
    f"verl's file logger (.jsonl), a CSV exported from wandb, a folder with files of wandb or TensorBoard, a "
    f"database (.db) of Trackio or MLflow, or token exports of prime-rl"
)
#: The files of trackers are searched this many folders below an output folder.
DEPTH = 4


def log_files(path: Path) -> dict[str, list[Path]]:
    """By kind, the files of logs in the output folder of a trainer, or a file by its name.

    Kinds are in the order of preference.
    """
    if not is_dir(path):
        kinds = {".db": "database", ".wandb": "wandb"}
        return {"TensorBoard" if ".tfevents." in path.name else kinds.get(path.suffix.lower(), "text"): [path]}

    def below(name: str) -> list[Path]:
        paths = (file for depth in range(DEPTH) for file in path.glob(f"{'*/' * depth}{name}"))
        # sorted by the time in the name of wandb's folder, or of TensorBoard's file
        ordered = sorted(paths, key=lambda file: str(file) if file.suffix == ".wandb" else file.name)
        return list({file.resolve(): file for file in ordered}.values())  # wandb's latest-run is a link to another

    states = list(path.glob(f"checkpoint-*/{STATE}"))
    states.sort(key=lambda state: as_step(state.parent.name.rpartition("-")[2]) or 0, reverse=True)
    return {
        "TRL": [*([path / STATE] if exists(path / STATE) else []), *states],
        "database": sorted(path.glob("*.db"))[:1],
        "verl": below("*.jsonl"),
        "wandb": below("*.wandb"),
        "TensorBoard": below("events.out.tfevents.*"),
    }


def read_logs(path: Path) -> list[Run]:
    """The runs in a file, or in the output folder of a trainer, of the first kind that can be read.

    Raises:
        ReportError: the path does not exist, or no file there is a log with a known metric.
    """
    if not exists(path):
        raise ReportError(f"{path}: no such file or folder. Give {READABLE}.")
    remarks: list[str] = []
    for kind, paths in log_files(path).items():
        if paths and (runs := _READERS[kind](path, paths, remarks)):
            return [replace(runs[0], remarks=(*runs[0].remarks, *remarks)), *runs[1:]] if remarks else runs
    hint = f"{'; '.join(remarks)}." if remarks else f"Give {READABLE}."
    raise ReportError(f"{path}: no log in it. {hint}")


def text_at(path: Path) -> str:
    """The text of a log.

    Raises:
        ReportError: it cannot be read.
    """
    try:
        return text_of(read_bytes(path))
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {reason(error)}. Give {READABLE}.") from error


def _longest(folder: Path, files: Sequence[Path], remarks: list[str], *, newest: bool = False) -> list[Run]:
    """The file with the longest history; of checkpoints only the newest readable one is used."""
    runs: list[Run] = []
    for path in files:
        if newest and path.parent != folder and any(folder != Path(run.path).parent for run in runs):
            break
        if leads_away(path) or (path.parent != folder and leads_away(path.parent)):
            remarks.append(f"left out {path}: a link that leads out of the folder")
            continue
        try:
            runs += read_text(path, text_at(path))
        except ReportError as error:
            remarks.append(f"left out {str(error).rpartition('. ')[0]}")
    return [max(runs, key=lambda run: run.rollouts)] if runs else []


def _tracked(
    path: Path,
    files: Sequence[Path],
    remarks: list[str],
    *,
    writer: str,
    read: Callable[[Path, list[str]], Iterator[Mapping[str, Any]]],
) -> list[Run]:
    """The runs that a tracker kept in a file for each start, the newest first; wandb names a file by the run's id."""
    starts: dict[str, list[Path]] = {}
    for file in reversed(files):
        starts.setdefault(file.name if file.suffix == ".wandb" else "", []).insert(0, file)

    def steps(paths: Sequence[Path]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for file in paths:
            try:
                yield from ((step, row) for row in read(file, remarks) if (step := step_of(row)) is not None)
            except OSError as error:
                remarks.append(f"left out {file}: {reason(error)}")

    names = [path if len(starts) == 1 else paths[-1].parent for paths in starts.values()]
    return [
        run for name, paths in zip(names, starts.values(), strict=True) for run in logged(name, writer, steps(paths))
    ]


def _database(path: Path, files: Sequence[Path], remarks: list[str]) -> list[Run]:
    """The runs of Trackio or MLflow that have a known metric."""
    (file,) = files
    try:
        writer, runs = database_runs(file)
    except (OSError, TypeError, ValueError) as error:
        remarks.append(f"left out {file}: cannot be read: {reason(error)}")
        return []
    return [run for name, steps in runs for run in logged(f"{file}: {name}", writer, steps)]


#: By kind, the runs in its files below a path; remarks receive what cannot be read.
_READERS: Mapping[str, Callable[[Path, Sequence[Path], list[str]], list[Run]]] = {
    "text": lambda path, files, remarks: read_text(path, text_at(path)),
    "TRL": partial(_longest, newest=True),
    "database": _database,
    "verl": _longest,
    "wandb": partial(_tracked, writer="wandb", read=wandb_rows),
    "TensorBoard": partial(_tracked, writer="TensorBoard", read=tensorboard_rows),
}
