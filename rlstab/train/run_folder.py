"""The folder of a run: its lock, the checkpoint to continue from, and the replacement of an earlier run.

One process holds the folder, by a lock that the kernel releases when the process ends. Only files that a run of rlstab
wrote are moved or removed: those that are named here, and those that a checkpoint names.
"""

import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from os.path import lexists
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from filelock import BaseFileLock

import rlstab
from rlstab.config.allowed_changes import change_in_resume, run_hash
from rlstab.config.document import Document
from rlstab.config.objectives import objective_hash
from rlstab.config.runs import RunConfig, dump_run
from rlstab.config.user_code import changed_files, checksums, portable
from rlstab.core.compose import walk
from rlstab.core.metadata import idle_evidence
from rlstab.errors import CheckpointError, ConfigError
from rlstab.files import filesystem_errors, locked, replace_file
from rlstab.record.writer import remove_dump
from rlstab.run_files import ABOUT, CHECKPOINTS, CONFIG, DUMP, LOCK, METRICS, SAMPLES
from rlstab.safe_read import plain, read_json, read_object
from rlstab.tasks.rewards import Rewards
from rlstab.train import checkpoint

#: Files of one JSON object per line.
JOURNALS = (METRICS, SAMPLES)

#: Files that a run writes, apart from its checkpoints and the folders of its trackers.
FILES = (CONFIG, *JOURNALS, ABOUT)

#: Where a replaced run is kept until the new run has a checkpoint.
REPLACED = ".replaced"


class RunFolder:
    """The folder of a run, locked by this process.

    Attributes:
        path: the path of the folder.
        run_id: sixteen hexadecimal digits.
        start: the checkpoint to continue from; None for none.
    """

    def __init__(
        self, run: RunConfig, providers: Mapping[str, Any], say: Callable[[str], None], *, resume: bool, overwrite: bool
    ) -> None:
        """Lock ``tracking.out`` and decide how to go on. Nothing in it changes before :meth:`begin`.

        Args:
            run: the settings.
            providers: names of user-defined functions.
            say: prints a line about what was found.
            resume: see :func:`rlstab.train.train`.
            overwrite: see :func:`rlstab.train.train`.

        Raises:
            ConfigError: the folder holds another run or files of another origin, is locked, or cannot be written.
            CheckpointError: the run in the folder cannot be continued.
        """
        self.path, self._run, self._providers, self.say = Path(run.tracking.out), run, providers, say
        self.start: Path | None = None
        self._made: list[Path] = []
        self._about: dict[str, Any] = {}
        self._kept: dict[str, int | None] = {}  # bytes of the journals at the checkpoint to continue from
        self._examples: str | None = None
        self._lock: BaseFileLock | None = None
        if resume and overwrite:
            raise ConfigError("resume and overwrite exclude each other: one continues the run, the other replaces it.")
        try:
            with filesystem_errors(self.path):
                self._hold()
                before = run_id_in(self.path)
                moving = lexists(self.path / REPLACED) and run_id_in(self.path / REPLACED) is None  # killed meanwhile
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

    # -- the lock ----------------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.is_dir()]
            self.path.mkdir(parents=True, exist_ok=True)
        except ValueError as error:  # a null character, or half of a surrogate pair
            raise ConfigError(
                f"tracking.out: {str(self.path)!r} is not a path: {error}. Write the name of a folder."
            ) from error
        self._new_lock = not lexists(self.path / LOCK)
        self._lock = locked(self.path, "End it, or set another tracking.out.").lock

    def close(self) -> None:
        """Unlock the folder; after a failed start, remove the folders that it made."""
        if self._lock is None:
            return
        with suppress(OSError, ValueError):
            if self._new_lock and not lexists(self.path / ABOUT):
                (self.path / LOCK).unlink()
                for folder in self._made:
                    folder.rmdir()
        self._lock.release()

    def _refuse_strangers(self, run_id: str | None) -> None:
        """Refuse a folder with files that this run would write and that another run, or none of rlstab, wrote."""
        checkpoints = self.path / CHECKPOINTS
        present = [name for name in FILES if lexists(self.path / name)]
        taken = [name for name in present if run_id is None or not (self.path / name).is_file()]
        taken += [CHECKPOINTS] if lexists(checkpoints) and not checkpoints.is_dir() else []
        for path in checkpoint.checkpoints(checkpoints):
            taken += [f"{CHECKPOINTS}/{path.name}"] if checkpoint.owner(path) not in (run_id, None) else []
        if taken:
            raise ConfigError(
                f"{self.path} has {', '.join(taken[:6])}{' and more' if len(taken) > 6 else ''}, which no run that it "
                f"holds wrote. Move that away, or set another tracking.out."
            )

    # -- resuming ----------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Find the newest whole checkpoint, and check that it belongs to this run."""
        damaged: list[str] = []
        for path in reversed(checkpoint.checkpoints(self.path / CHECKPOINTS)):
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
        if read_json(self.path / ABOUT).get("saved"):
            raise CheckpointError(
                f"{self.path} had checkpoints, which are gone. Restore one from a copy, or start over by --overwrite."
            )
        config = self.path / CONFIG
        self._require_same({"journals": {}, **({"settings": Document.read(config).data} if config.is_file() else {})})

    def _require_same(self, before: Mapping[str, Any]) -> None:
        """Refuse to continue a run with other settings or user-defined functions than it began with."""
        after = {"settings": self._run.model_dump(mode="json"), "providers": dict(self._providers)}
        for key in after.keys() & before.keys():
            difference = change_in_resume(portable(before[key]), portable(after[key]))
            if difference is not None:
                path, old_value, new_value = difference
                raise CheckpointError(
                    f"{self.path} was started with {path or key} = {old_value!r}, which is {new_value!r} now. Resume "
                    f"with {self.path / CONFIG} and the same functions, or start over in another tracking.out."
                )
        for text in changed_files(before.get("code", {}), checksums(after["settings"])):
            self.say(text)
        self._examples = before.get("examples")
        self._kept = before.get("journals", dict.fromkeys(JOURNALS))  # earlier releases did not record them: keep all
        settings, schedule = self._run.optimisation, self._run.optimisation.schedule
        rollouts = before.get("settings", {}).get("optimisation", {}).get("rollouts", settings.rollouts)
        if rollouts != settings.rollouts and schedule is not None and not schedule.name.startswith("constant"):
            self.say(
                f"the schedule '{schedule.name}' ends with the run, which had {rollouts} rollouts and has "
                f"{settings.rollouts} now: the learning rate continues from a different point"
            )

    def note_examples(self, checksum: str) -> None:
        """Keep the checksum of the task's examples, and say that a continued run had others."""
        if self._examples not in (None, checksum):
            self.say("the examples of the task have changed since the run was last started")
        self._examples = checksum

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin this run in the folder: move a replaced run aside, and write the settings.

        Args:
            about: further entries of ``run.json``.
        """
        with filesystem_errors(self.path):
            if self._fresh:
                self._make_room()
            if self.start is None:
                remove_dump(self.path / DUMP)
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            for name in JOURNALS:
                path, size = self.path / name, self._kept.get(name, 0)
                if path.is_file():  # cut to these bytes, without a line that was cut off
                    os.truncate(path, path.read_bytes()[:size].rfind(b"\n") + 1)
            identity = self.identity()
            del identity["settings"], identity["journals"]
            self._about = {**identity, "saved": self.start is not None, **about}
            replace_file(self.path / ABOUT, json.dumps(self._about, indent=1))
            replace_file(self.path / CONFIG, dump_run(self._run))

    def _make_room(self) -> None:
        """Move the earlier run aside, ``run.json`` last; remove one that has no checkpoint and no record."""
        aside, checkpoints = self.path / REPLACED, self.path / CHECKPOINTS
        if run_id_in(aside) is not None:
            if not checkpoint.checkpoints(checkpoints):  # the run here replaced the one aside, and has no checkpoint
                clear(self.path)
                return
            self.forget_replaced()
        elif not lexists(aside) and not _came_far(self.path):
            clear(self.path)
            return
        aside.mkdir(exist_ok=True)
        for path in checkpoint.checkpoints(checkpoints):
            if checkpoint.owner(path) is not None:
                (aside / CHECKPOINTS).mkdir(exist_ok=True)
                shutil.move(path, aside / CHECKPOINTS / path.name)  # `checkpoints` may be a link to another disk
        for name in (DUMP, *FILES):
            if lexists(self.path / name):
                (self.path / name).rename(aside / name)
        self.say(f"the run that was here waits in {aside} for the first checkpoint of this one")

    def append(self, name: str, lines: str) -> None:
        """Append lines to a journal in one system call, so that readers see whole lines.

        Raises:
            ConfigError: the file cannot be written.
        """
        data = lines.encode("utf-8")  # one buffer for all; Python gives 0 and 1 other meanings
        with filesystem_errors(self.path / name), (self.path / name).open("ab", buffering=len(data) + 2) as file:
            file.write(data)

    def identity(self) -> dict[str, Any]:
        """The entries about this run in its checkpoints."""
        settings = self._run.model_dump(mode="json")
        return {
            "run_id": self.run_id,
            "run_hash": run_hash(self._run),
            "settings": settings,
            "providers": dict(self._providers),
            "code": checksums(settings),
            "examples": self._examples,
            "journals": {name: path.stat().st_size for name in JOURNALS if (path := self.path / name).is_file()},
        }

    def keep_newest(self, saved: Path) -> None:
        """Remove the oldest checkpoints; damaged ones of later rollouts stay."""
        with filesystem_errors(self.path, CheckpointError):
            if not self._about["saved"]:
                self._about["saved"] = True
                replace_file(self.path / ABOUT, json.dumps(self._about, indent=1))
            paths = [path for path in checkpoint.checkpoints(saved.parent) if checkpoint.owner(path) == self.run_id]
            until = [path for path in paths if checkpoint.number(path) <= checkpoint.number(saved)]
            for path in until[: -self._run.tracking.keep_checkpoints]:
                checkpoint.remove(path)

    def forget_replaced(self) -> None:
        """Remove the run that this one replaced."""
        with filesystem_errors(self.path):
            aside = self.path / REPLACED
            if lexists(aside):
                clear(aside)
                with suppress(OSError):
                    aside.rmdir()
            if lexists(aside):
                self.say(f"{aside} holds files that the replaced run did not write")


def describe(run: RunConfig, accelerator: Accelerator, rewards: Rewards, engine: str) -> dict[str, Any]:
    """Entries of ``run.json`` beyond the identity of the run: versions, the machine, rewards, signs of idle methods.

    Args:
        run: the settings.
        accelerator: the accelerator of this process.
        rewards: the rewards by which responses are scored.
        engine: the name of the engine and the number of processes.
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
        "idle": {leaf.name: asdict(idle_evidence(type(leaf.method))) for leaf in walk(run.composition)},
    }


def run_id_in(folder: Path) -> str | None:
    """The id of the run in a folder; None if there is none."""
    run_id = read_json(folder / ABOUT).get("run_id")
    return run_id if isinstance(run_id, str) else None


def clear(folder: Path) -> None:
    """Remove the files that a run wrote in a folder; without a run, nothing is removed."""
    if run_id_in(folder) is None:
        return
    checkpoints = folder / CHECKPOINTS
    for path in checkpoint.checkpoints(checkpoints):
        checkpoint.remove(path)
    shutil.rmtree(checkpoints / ".writing", ignore_errors=True)
    with suppress(OSError):
        checkpoints.rmdir()
    remove_dump(folder / DUMP)
    for name in FILES:  # run.json last: after a kill it marks the rest as removable
        (folder / name).unlink(missing_ok=True)


def _came_far(folder: Path) -> bool:
    """Whether a folder holds a run with a record or a checkpoint."""
    records = folder / JOURNALS[0]
    started = bool(checkpoint.checkpoints(folder / CHECKPOINTS)) or (records.is_file() and records.stat().st_size > 0)
    return started and run_id_in(folder) is not None


# -- journals --------------------------------------------------------------------------------------------------------


def line(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON; numbers that are NaN or Inf, which JSON lacks, become null."""
    return json.dumps(plain(record), allow_nan=False) + "\n"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The numbers in the records of ``metrics.jsonl``; unreadable lines are left out."""
    records = map(read_object, path.read_bytes().splitlines() if path.is_file() else ())
    return [
        {key: value for key, value in record.items() if isinstance(value, int | float)}
        for record in records
        if type(record.get("rollout")) is int
    ]
