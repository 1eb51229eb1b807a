"""The folder of a run: which process holds it, where the run goes on, and what replaces what.

One process holds the folder, by a lock that dies with it. Nothing is moved or removed but what a run of rlstab wrote:
the files that are named here, and the files that a checkpoint names.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.metadata import version
from os.path import lexists
from pathlib import Path
from typing import Any

import filelock
import torch
from accelerate import Accelerator

import rlstab
from rlstab.config.document import Document, flat
from rlstab.config.identity import is_neutral, run_hash
from rlstab.config.objectives import objective_hash
from rlstab.config.runs import RunConfig, dump_run
from rlstab.config.user_code import changed_files, checksums, portable
from rlstab.errors import CheckpointError, ConfigError
from rlstab.files import replace_file
from rlstab.models.loading import read_json
from rlstab.record.writer import remove_dump
from rlstab.tasks.rewards import Rewards
from rlstab.train import checkpoint
from rlstab.train.checkpoint import filesystem_errors

#: Files of one JSON object per line.
JOURNALS = ("metrics.jsonl", "samples.jsonl")

#: What a run writes beside its checkpoints and the folders of its trackers.
FILES = ("config.yaml", *JOURNALS, "run.json")

CHECKPOINTS, DUMP = "checkpoints", "dump"
LOCK = ".lock"

#: Where a run that is replaced waits for the first checkpoint of the new one.
REPLACED = ".replaced"

#: What a continued run may change although it counts: patterns of dotted paths.
MAY_CHANGE = {"optimisation.rollouts", "engine.gather", "task.time_limit", "reward.*.time_limit"}


class RunFolder:
    """The folder of a run that this process holds.

    Attributes:
        path: of the folder.
        run_id: of the run, sixteen hexadecimal digits.
        start: the checkpoint to continue from, or None.
    """

    def __init__(
        self, run: RunConfig, providers: Mapping[str, Any], say: Callable[[str], None], *, resume: bool, overwrite: bool
    ) -> None:
        """Take hold of ``tracking.out`` and find out how to go on. Nothing in it changes before :meth:`begin`.

        Args:
            run: its settings.
            providers: names of user-defined functions.
            say: is told what a user should know about what was there, a line each.
            resume: see :func:`rlstab.train.train`.
            overwrite: likewise.

        Raises:
            ConfigError: it holds a run or files that are in the way, another process holds it, it cannot be written.
            CheckpointError: the run in it cannot be continued.
        """
        self.path, self._run, self._providers, self.say = Path(run.tracking.out), run, providers, say
        self.start: Path | None = None
        self._made: list[Path] = []
        self._about: dict[str, Any] = {}
        self._lock: filelock.BaseFileLock | None = None
        if resume and overwrite:
            raise ConfigError("resume and overwrite exclude each other: one continues the run, the other replaces it.")
        try:
            with filesystem_errors(self.path):
                self._hold()
                before = run_id_in(self.path)
                moving = lexists(self.path / REPLACED) and run_id_in(self.path / REPLACED) is None  # a kill came
                self._fresh = not resume or before is None or moving
                if not (resume or overwrite) and (lexists(self.path / REPLACED) or _came_far(self.path)):
                    raise ConfigError(
                        f"{self.path} already holds a run. Give --resume, --overwrite, or another tracking.out."
                    )
                self._refuse_strangers(before)
                self.run_id = secrets.token_hex(8) if self._fresh or before is None else before
                if not self._fresh:
                    self._continue()
        except BaseException:
            self.close()
            raise

    # -- taking hold -------------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.is_dir()]
            self.path.mkdir(parents=True, exist_ok=True)
        except ValueError as error:  # a null character, or half of a surrogate pair
            raise ConfigError(
                f"tracking.out: {str(self.path)!r} is not a path: {error}. Write the name of a folder."
            ) from error
        lock, self._new_lock = filelock.FileLock(self.path / LOCK, timeout=0), not lexists(self.path / LOCK)
        try:
            lock.acquire()
        except filelock.Timeout:
            self._made.clear()
            raise ConfigError(
                f"{self.path} is being written by another process ({(self.path / LOCK).read_text()}). End it, or set "
                f"another tracking.out."
            ) from None
        self._lock = lock
        (self.path / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def close(self) -> None:
        """Let go of the folder; what was made for a start that failed is gone."""
        if self._lock is None:
            return
        with suppress(OSError, ValueError):
            if self._new_lock and not lexists(self.path / "run.json"):
                (self.path / LOCK).unlink()
                for folder in self._made:
                    folder.rmdir()
        self._lock.release()

    def _refuse_strangers(self, run_id: str | None) -> None:
        """Nothing that this run will write may be there, unless a run of rlstab wrote it."""
        inside = self.path / CHECKPOINTS
        there = [name for name in FILES if lexists(self.path / name)]
        taken = [name for name in there if run_id is None or not (self.path / name).is_file()]
        taken += [CHECKPOINTS] if lexists(inside) and not inside.is_dir() else []
        for path in checkpoint.checkpoints(inside) if self._fresh else ():
            taken += [f"{CHECKPOINTS}/{path.name}"] if checkpoint.owner(path) not in (run_id, None) else []
        if taken:
            raise ConfigError(
                f"{self.path} has {', '.join(taken[:6])}{' and more' if len(taken) > 6 else ''}, which no run that "
                f"rlstab knows of wrote there. Move that away, or set another tracking.out."
            )

    # -- going on ----------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Find the newest checkpoint that is whole, and see that it is of this run."""
        damaged: list[str] = []
        for path in reversed(checkpoint.checkpoints(self.path / CHECKPOINTS)):
            if checkpoint.owner(path) not in (self.run_id, None):
                raise CheckpointError(
                    f"{path} belongs to another run than {self.run_id}, which {self.path} holds. Move it away."
                )
            record = checkpoint.read(path)
            if record is not None:
                self.start = path
                self._require_same(record["run"])
                for text in [*damaged, f"continuing from {path.name}"] if damaged else ():
                    self.say(text)
                return
            damaged.append(f"{path.name} is damaged")
        if damaged:
            raise CheckpointError(
                f"{self.path} has no whole checkpoint: {'; '.join(damaged)}. Restore one, or start over by --overwrite."
            )
        if read_json(self.path / "run.json").get("saved"):
            raise CheckpointError(
                f"{self.path} had checkpoints, which are gone. Restore one from a copy, or start over by --overwrite."
            )
        config = self.path / "config.yaml"
        self._require_same({"settings": Document.read(config).data} if config.is_file() else {})

    def _require_same(self, before: Mapping[str, Any]) -> None:
        """A run continues with the settings and the user-defined functions that it began with."""
        now = {"settings": self._run.model_dump(mode="json"), "providers": dict(self._providers)}
        # with staleness the last rollouts were made earlier, so a longer run is another run
        fixed = {"optimisation.rollouts"} if self._run.rollout.staleness else set()
        for key in now.keys() & before.keys():
            difference = _difference(portable(before[key]), portable(now[key]), MAY_CHANGE - fixed)
            if difference is not None:
                place, was, wanted = difference
                raise CheckpointError(
                    f"{self.path} was started with {place or key} = {was!r}, which is {wanted!r} now. Resume with "
                    f"{self.path / 'config.yaml'} and the same functions, or start over in another tracking.out."
                )
        for text in changed_files(before.get("code", {}), checksums(now["settings"])):
            self.say(text)
        settings = self._run.optimisation
        rollouts = before.get("settings", {}).get("optimisation", {}).get("rollouts", settings.rollouts)
        if rollouts != settings.rollouts and settings.schedule is not None and settings.schedule.ends_with_the_run:
            self.say(
                f"the schedule '{settings.schedule.name}' ends with the run, which had {rollouts} rollouts and has "
                f"{settings.rollouts} now: the learning rate continues from a different point"
            )

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, about: Mapping[str, Any]) -> None:
        """Make the folder that of this run: what it replaces is moved aside, and its settings are written.

        Args:
            about: what ``run.json`` says beside the identity.
        """
        with filesystem_errors(self.path):
            if self._fresh:
                self._make_room()
            if self.start is None:
                remove_dump(self.path / DUMP)
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            last = -1 if self.start is None else checkpoint.number(self.start)
            for name in JOURNALS:
                _cut_after(self.path / name, last)
            known = self.identity()
            del known["settings"]  # which config.yaml has
            self._about = {**known, "saved": self.start is not None, **about}
            replace_file(self.path / "run.json", json.dumps(self._about, indent=1))
            replace_file(self.path / "config.yaml", dump_run(self._run))

    def _make_room(self) -> None:
        """Move the run that was here aside, with ``run.json`` last; remove one without a checkpoint or a record."""
        aside, inside = self.path / REPLACED, self.path / CHECKPOINTS
        if run_id_in(aside) is not None:
            if not checkpoint.checkpoints(inside):  # the run that is here replaced that one, and came to nothing
                clear(self.path)
                return
            self.forget_replaced()
        elif not lexists(aside) and not _came_far(self.path):
            clear(self.path)
            return
        aside.mkdir(exist_ok=True)
        for path in checkpoint.checkpoints(inside):
            if checkpoint.owner(path) is not None:
                (aside / CHECKPOINTS).mkdir(exist_ok=True)
                shutil.move(path, aside / CHECKPOINTS / path.name)  # `checkpoints` may lead to another disk
        for name in (DUMP, *FILES):
            if lexists(self.path / name):
                (self.path / name).rename(aside / name)
        self.say(f"the run that was here waits in {aside} for the first checkpoint of this one")

    def append(self, name: str, lines: str) -> None:
        """Append whole lines to a journal, by one call to the system, so that a reader sees whole lines.

        Raises:
            ConfigError: the file cannot be written.
        """
        with filesystem_errors(self.path / name), (self.path / name).open("ab", buffering=0) as file:
            rest = memoryview(lines.encode("utf-8"))
            while rest:
                rest = rest[file.write(rest) or 0 :]

    def identity(self) -> dict[str, Any]:
        """What its checkpoints say of this run."""
        settings = self._run.model_dump(mode="json")
        return {
            "run_id": self.run_id,
            "run_hash": run_hash(self._run),
            "settings": settings,
            "providers": dict(self._providers),
            "code": checksums(settings),
        }

    def keep_newest(self, saved: Path) -> None:
        """Remove the oldest checkpoints; damaged ones may be of later rollouts, and stay."""
        with filesystem_errors(self.path, CheckpointError):
            if not self._about["saved"]:
                self._about["saved"] = True
                replace_file(self.path / "run.json", json.dumps(self._about, indent=1))
            paths = [path for path in checkpoint.checkpoints(saved.parent) if checkpoint.owner(path) == self.run_id]
            until = [path for path in paths if checkpoint.number(path) <= checkpoint.number(saved)]
            for path in until[: -self._run.tracking.keep_checkpoints]:
                checkpoint.remove(path)

    def forget_replaced(self) -> None:
        """Remove the run that was here before this one."""
        with filesystem_errors(self.path):
            aside = self.path / REPLACED
            if lexists(aside):
                clear(aside)
                with suppress(OSError):
                    aside.rmdir()
            if lexists(aside):
                self.say(f"{aside} holds what the run that was replaced did not write")


def describe(run: RunConfig, accelerator: Accelerator, rewards: Rewards, engine: str) -> dict[str, Any]:
    """What ``run.json`` says of a run beside its identity: versions, the machine, and what took part.

    Args:
        run: its settings.
        accelerator: of this process.
        rewards: that are measured.
        engine: in words.
    """
    return {
        "objective_hash": objective_hash(run.composition),
        "command": " ".join(sys.argv),
        "rlstab": rlstab.__version__,
        **{name: version(name) for name in ("torch", "transformers", "accelerate")},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "engine": engine,
        "threads": torch.get_num_threads(),
        "rewards": rewards.in_words(),
    }


def run_id_in(folder: Path) -> str | None:
    """The id of the run that a folder holds; None where there is none."""
    run_id = read_json(folder / "run.json").get("run_id")
    return run_id if isinstance(run_id, str) else None


def clear(folder: Path) -> None:
    """Remove what a run wrote in a folder; where no run did, nothing."""
    if run_id_in(folder) is None:
        return
    inside = folder / CHECKPOINTS
    for path in checkpoint.checkpoints(inside):
        checkpoint.remove(path)
    shutil.rmtree(inside / ".writing", ignore_errors=True)
    with suppress(OSError):
        inside.rmdir()
    remove_dump(folder / DUMP)
    for name in FILES:  # run.json last, so that after a kill the rest can be removed
        (folder / name).unlink(missing_ok=True)


def _came_far(folder: Path) -> bool:
    """Whether there is a run that came as far as a record or a checkpoint."""
    records = folder / JOURNALS[0]
    started = bool(checkpoint.checkpoints(folder / CHECKPOINTS)) or (records.is_file() and records.stat().st_size > 0)
    return started and run_id_in(folder) is not None


def _difference(before: Any, now: Any, free: Set[str]) -> tuple[str, Any, Any] | None:
    """The first setting that differs and has to stay: its path, what it was, and what it is."""
    was, wanted = flat(before), flat(now)
    for path in sorted(was.keys() | wanted.keys()):
        may_change = is_neutral(path, was) or any(fnmatchcase(path, pattern) for pattern in free)
        if was.get(path) != wanted.get(path) and not may_change:
            return path, was.get(path), wanted.get(path)
    return None


# -- journals --------------------------------------------------------------------------------------------------------


def line(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, which has no NaN and no Inf: such a number is null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of ``metrics.jsonl``, numbers alone; lines that cannot be read are left out."""
    records = [_record(text) for text in _lines(path)]
    return [
        {key: value for key, value in record.items() if isinstance(value, int | float)}
        for record in records
        if record is not None
    ]


def _cut_after(path: Path, last: int) -> None:
    """Remove the records after a rollout, and what a kill left of a line, by writing the file anew.

    Lines that cannot be read stay where a record follows that stays.
    """
    kept, pending = b"", b""
    for text in _lines(path):
        pending += text
        record = _record(text)
        if record is not None:
            kept += pending if record["rollout"] <= last else b""
            pending = b""
    if path.is_file() and len(kept) < path.stat().st_size:
        replace_file(path, kept)


def _lines(path: Path) -> Iterable[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            yield from (text for text in file if text.endswith(b"\n"))  # a last line without its end was cut off


def _record(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # also an integer of thousands of digits
        return None
    return record if isinstance(record, dict) and type(record.get("rollout")) is int else None
