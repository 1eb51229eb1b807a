"""The folder of a run: who holds it, where it goes on, and what replaces what.

One process holds the folder, by a lock that dies with it. Nothing is ever moved or removed but what the manifest of a
run names as its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
from accelerate import Accelerator
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from torch import Tensor

from rlstab.config.own_code import changed, files, short
from rlstab.config.renamed import old_settings, with_stages
from rlstab.config.runs import RunConfig, dump_run, run_hash
from rlstab.config.schedule_settings import ENDING
from rlstab.errors import CheckpointError, ConfigError
from rlstab.train import checkpoint, durable, journal
from rlstab.train.checkpoint import Checkpoint, Damaged, Identity
from rlstab.train.engines import Moments
from rlstab.train.journal import Journal
from rlstab.train.manifest import (
    CHECKPOINTS,
    FILES,
    JOURNALS,
    MANIFEST,
    Manifest,
    clear,
    found_in,
    read_config,
    read_mapping,
)
from rlstab.train.policy import Policy
from rlstab.train.processes import from_first, require_seen
from rlstab.train.stopping import Stop

LOCK = ".lock"

#: What a continued run may change.
MAY_CHANGE = {
    "tracking",
    "engine",
    "evaluation",
    "task.time_limit",
    "task.workers",
    "optimisation.rollouts",
    "optimisation.micro_batch_size",
    "rollout.batch_size",
}

#: Where a run that is being replaced waits for the first checkpoint of the new one; the id of the run follows.
_ASIDE = ".replaced-"


class RunFolder:
    """The folder of a run that this process holds.

    Attributes:
        path: of the folder.
        run_id: of the run.
        start: the checkpoint to continue from, or None.
        said: what a user should know about how it was found, a line each.
    """

    def __init__(self, run: RunConfig, providers: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Take hold of ``tracking.out`` and find out how to go on. Nothing in it changes before :meth:`begin`.

        Raises:
            ConfigError: it holds a run or files that are in the way, another process holds it, it cannot be written.
            CheckpointError: the run in it cannot be continued.
        """
        self.path, self._run, self._providers = Path(run.tracking.out), run, providers
        self.start: Path | None = None
        self.said: list[str] = []
        self._made: list[Path] = []
        self._lock: filelock.BaseFileLock | None = None
        self._moved: Path | None = None
        self._replaced: Manifest | None = None
        self._last = -1  # the last rollout whose records stay; without a checkpoint not even those of rollout 0
        self._cut = False
        self._begun = False
        self._journals = {name: Journal(self.path / name) for name in JOURNALS}
        if resume and overwrite:
            raise ConfigError("resume and overwrite exclude each other: one continues the run, the other replaces it.")
        try:
            with durable.saying(self.path):
                self._hold()
                self._refuse_odd()
                self._manifest, remark = found_in(self.path)
                self.said += [remark] if remark else []
                #: a kill came while the run that is here was moved aside
                self._moving = self._manifest is not None and durable.there(self._aside(self._manifest))
                self._fresh = not resume or self._manifest is None or self._moving
                if not (resume or overwrite) and (any(self._asides()) or (self._manifest and self._worth_keeping())):
                    raise ConfigError(
                        f"{self.path} already holds a run. Continue it with --resume, replace it with --overwrite, or "
                        f"set another tracking.out."
                    )
                if self._fresh:
                    self._refuse_strangers()
                    self._refuse_far()
                elif self._manifest is not None:
                    self._continue(self._manifest)
        except BaseException:
            self.close()
            raise
        self.run_id = secrets.token_hex(8) if self._fresh or self._manifest is None else self._manifest.run_id

    # -- taking hold -----------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        try:
            for one in reversed([self.path, *self.path.parents]):
                if not one.is_dir():
                    self._made.append(one)
                    one.mkdir()
        except ValueError as error:  # a null character, or half of a surrogate pair
            raise ConfigError(
                f"tracking.out: {str(self.path)!r} is not a path: {error}. Write the name of a folder."
            ) from error
        path = self.path / LOCK
        if not durable.there(path):
            self._made.append(path)
        lock = filelock.FileLock(path, timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            self._made.clear()
            raise ConfigError(
                f"{self.path} is being written by {_holder(path)}. Wait for it to end, end it, or set another "
                f"tracking.out."
            ) from None
        self._lock = lock
        path.write_text(f"{os.getpid()} {socket.gethostname()}\n", encoding="utf-8")

    def close(self) -> None:
        """Let go of the folder; what was made for a start that failed is gone."""
        for one in self._journals.values():
            one.close()
        with suppress(OSError, ValueError):
            if not durable.there(self.path / MANIFEST):
                for path in reversed(self._made):
                    path.unlink() if path.name == LOCK else path.rmdir()
        if self._lock is not None:
            self._lock.release()

    # -- what is there ---------------------------------------------------------------------------------------------

    def _refuse_odd(self) -> None:
        """What is neither a file nor a folder may block for ever."""
        for name in (*FILES, MANIFEST, CHECKPOINTS):
            path = self.path / name
            if durable.there(path) and not (path.is_dir() if name == CHECKPOINTS else path.is_file()):
                raise ConfigError(
                    f"{path} is no {'folder' if name == CHECKPOINTS else 'file'}. Move it away, or set another "
                    f"tracking.out."
                )

    def _refuse_strangers(self) -> None:
        """Nothing that this run will write may be there, unless it is of the run that it replaces."""
        own = self._manifest
        taken = [name for name in FILES if durable.there(self.path / name) and not (own and name in own.files)]
        found = checkpoint.checkpoints(self.path / CHECKPOINTS)
        taken += [f"{CHECKPOINTS}/{one.name}" for one in found if not self._owns(one)]
        if taken:
            raise ConfigError(
                f"{self.path} has {', '.join(taken[:6])}{' and more' if len(taken) > 6 else ''}, which no run that "
                f"rlstab knows of wrote there. Move that away, or set another tracking.out."
            )

    def _refuse_far(self) -> None:
        """What a run that is replaced has is moved aside by renaming, which does not lead to another disk."""
        inside = self.path / CHECKPOINTS
        far = inside.is_dir() and inside.stat().st_dev != self.path.stat().st_dev
        if far and any(self._owns(one) for one in checkpoint.checkpoints(inside)):
            raise ConfigError(
                f"{inside} leads to another disk, and --overwrite cannot move the checkpoints in it aside. Move the "
                f"run away, or set another tracking.out."
            )

    def _owns(self, path: Path) -> bool:
        return self._manifest is not None and self._manifest.owns(path)

    def _worth_keeping(self) -> bool:
        """Whether the run that is here came as far as a record or a checkpoint."""
        records = self.path / JOURNALS[0]
        return any(checkpoint.checkpoints(self.path / CHECKPOINTS)) or (records.exists() and records.stat().st_size > 0)

    def _aside(self, manifest: Manifest) -> Path:
        return self.path / f"{_ASIDE}{manifest.run_id}"

    def _asides(self) -> list[Path]:
        return sorted(one for one in self.path.glob(f"{_ASIDE}*") if one.is_dir() and not one.is_symlink())

    # -- going on --------------------------------------------------------------------------------------------------

    def _continue(self, manifest: Manifest) -> None:
        """Find the newest checkpoint that is whole, and see that it is of this run."""
        found: Checkpoint | None = None
        damaged: list[str] = []
        for path in reversed(checkpoint.checkpoints(self.path / CHECKPOINTS)):
            owner = checkpoint.owner(path)
            if owner is not None and owner != manifest.run_id:
                raise CheckpointError(
                    f"{path} belongs to run {owner}, and {self.path} holds run {manifest.run_id}. Move that checkpoint "
                    f"away to continue."
                )
            if found is None:
                try:
                    found = self._verified(path, manifest)
                    self.start, self._last = path, found.rollout
                except Damaged as why:
                    damaged.append(f"{path.name} is damaged ({why})")
        if found is None:
            self._refuse_lost(manifest, damaged)
        there = {one.name for one in checkpoint.checkpoints(self.path / CHECKPOINTS)}
        damaged += [f"{name} is gone" for name in manifest.checkpoints if name not in there]
        self.said += damaged
        settings, providers = (
            (None, None) if found is None or found.run is None else (found.run.settings, found.run.providers)
        )
        self._require_same(settings, manifest)
        before = read_mapping(self.path / "run.json").get("providers") if providers is None else providers
        if self.start is not None and before is not None and before != self._providers:
            raise CheckpointError(
                f"{self.path} was started with the providers {before}, this call has {dict(self._providers)}. A run "
                f"continues as it began. Pass the same signals and advantages to train, or start over in another "
                f"tracking.out."
            )
        code = read_mapping(self.path / "run.json").get("code")
        if self.start is not None and isinstance(code, dict):
            self.said += changed(code, files(self._run.model_dump(mode="json")))
        if damaged and self.start is not None:
            self.said.append(f"continuing from {self.start.name}")
        self._look_at_records()

    def _verified(self, path: Path, manifest: Manifest) -> Checkpoint:
        found = checkpoint.verify(path)
        if found.run is None and path.name not in manifest.checkpoints:
            raise CheckpointError(
                f"{path} does not say which run it belongs to, and run {manifest.run_id} in {self.path} did not write "
                f"it. Move that checkpoint away to continue."
            )
        if found.rollout != checkpoint.number(path):
            raise Damaged(f"it is of rollout {found.rollout}")
        return found

    def _refuse_lost(self, manifest: Manifest, damaged: list[str]) -> None:
        """Without a checkpoint a run starts over: not where it had some, for that would lose its records."""
        cure = "Restore one from a copy, or start over with --overwrite"
        if damaged:
            raise CheckpointError(f"{self.path} has no checkpoint that is whole: {'; '.join(damaged)}. {cure}.")
        if manifest.checkpoints:
            raise CheckpointError(f"{self.path} had checkpoints, and they are gone. {cure}.")

    def _require_same(self, settings: Mapping[str, Any] | None, manifest: Manifest) -> None:
        """A run continues with the settings that it began with, as its checkpoint has them, or its config.yaml."""
        path = self.path / "config.yaml"
        written, why = read_config(path)
        if why:
            if settings is None and manifest.run_hash != run_hash(self._run):
                raise CheckpointError(
                    f"{self.path} cannot be continued, because nothing says how it was started: {why.rstrip('.')}. Put "
                    f"back its config.yaml, or start over with --overwrite."
                )
            self.said.append(f"{path} is missing or damaged; it is written anew")
            if settings is None:
                return
        elif settings is not None and not _agree(with_stages(written), with_stages(settings)):
            self.said.append(f"{path} is not what this run was started with; it is written anew")
        started = _filled(with_stages(written if settings is None else settings), self._run)
        if renamed := dict(old_settings(started)):
            names = ", ".join(f"{old} is called '{now}' now" for old, now in renamed.items())
            cure = "Use the new names there to continue the run."
            if any(old.startswith("objective.") for old in renamed):  # its checkpoints bear the hash of the old names
                cure = (
                    "Continue the run with the version of rlstab that wrote it, or start over in another tracking.out."
                )
            raise CheckpointError(f"{path} was written under older names: {names}. {cure}")
        now = self._run.model_dump(mode="json")
        rollouts = started.get("optimisation", {}).get("rollouts")
        if self._run.rollout.staleness and rollouts != self._run.optimisation.rollouts:
            raise CheckpointError(
                f"{self.path} was started with optimisation.rollouts = {rollouts}, the configuration says "
                f"{self._run.optimisation.rollouts}. With rollout.staleness its last rollouts were made earlier, "
                f"so a longer run is another one. Resume with {self.path / 'config.yaml'}, or start over in another "
                f"tracking.out."
            )
        schedule = self._run.optimisation.schedule
        if schedule is not None and schedule.name in ENDING and rollouts != self._run.optimisation.rollouts:
            self.said.append(
                f"optimisation.rollouts was {rollouts} and is {self._run.optimisation.rollouts} now: the schedule "
                f"'{schedule.name}' ends with them, so the learning rate goes on from another place of it"
            )
        _same(short(started), short(now), self.path)

    def _look_at_records(self) -> None:
        """Say which records of the rollouts until here are lost."""
        records, damaged = journal.read(self.path / JOURNALS[0])
        kept = {one["rollout"] for one in records}
        lost = [one for one in range(1, self._last + 1) if one not in kept]
        if damaged:
            many = f"{len(damaged)} line{'s' * (len(damaged) > 1)} cannot be read, the first is line {damaged[0]}"
            self.said.append(f"{JOURNALS[0]}: {many}")
        if lost:
            many = f"{len(lost)} rollout{'s' * (len(lost) > 1)}, the first is rollout {lost[0]}"
            self.said.append(f"{JOURNALS[0]} has no record of {many}")

    # -- writing ---------------------------------------------------------------------------------------------------

    def begin(self, about: Mapping[str, Any]) -> None:
        """Make the folder that of this run: what it replaces is moved aside, and its settings are written.

        Args:
            about: what ``run.json`` says beside the id.
        """
        with durable.saying(self.path):
            self._begun = True
            for name in (*FILES, MANIFEST):
                durable.remove(durable.beside(self.path / name))  # what a kill left
            if self._fresh:
                self._make_room()
            before = self._manifest
            new = {name for name in (CHECKPOINTS, *self._trackers()) if not durable.there(self.path / name)}
            folders = new.union(before.folders if before else ())
            manifest = Manifest(
                run_id=self.run_id,
                run_hash=run_hash(self._run),
                files=list(FILES),
                folders=sorted(folders),
                checkpoints=[],
            )
            self._prune(manifest, self._last)
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            checkpoint.tidy(self.path / CHECKPOINTS)
            durable.write(self.path / "config.yaml", dump_run(self._run))
            durable.write(self.path / "run.json", json.dumps({"run_id": self.run_id, **about}, indent=1))

    def _trackers(self) -> list[str]:
        """Folders that the trackers will make here."""
        tracking = self._run.tracking
        place = Path(os.path.normpath(tracking.project)).parts
        names = {"wandb": "wandb", "tensorboard": place[0] if place and not Path(place[0]).is_absolute() else ".."}
        return sorted({names[one] for one in tracking.trackers} - {"..", "."})

    def _write_manifest(self, manifest: Manifest) -> None:
        manifest.write(self.path)
        self._manifest = manifest

    def _make_room(self) -> None:
        """Move the run that was here aside; remove one that did not come as far as a record."""
        if self._manifest is None:
            return
        self._refuse_strangers()
        if not self._moving and not self._worth_keeping():
            self._manifest.clear(self.path)
        else:
            self._manifest.write(self.path)  # an older version left none
            self._moved, self._replaced = self._aside(self._manifest), self._manifest
            self._manifest = None
            self._replaced.move(self.path, self._moved)
            self.said.append(f"the run that was here waits in {self._moved} for the first checkpoint of this one")
        self._manifest = None

    def append(self, name: str, lines: str) -> None:
        """Append lines to a journal. With the first, the records that will be made again are removed from all."""
        if not self._cut:
            with durable.saying(self.path):
                for one in JOURNALS:
                    journal.cut_after(self.path / one, self._last)
            self._cut = True
        self._journals[name].append(lines)

    def records(self) -> list[dict[str, Any]]:
        """Those of ``metrics.jsonl``."""
        return journal.read(self.path / JOURNALS[0])[0]

    def save(
        self,
        found: Checkpoint,
        policy: Policy,
        moments: Moments,
        gathered: Callable[[Tensor], Tensor],
        *,
        planned: bool,
    ) -> Path:
        """Write a checkpoint and remove the oldest; if it was planned, also the run that this one replaces.

        Raises:
            CheckpointError: it cannot be written.
        """
        for one in self._journals.values():
            one.flush()
        folder, manifest = self.path / CHECKPOINTS, self._manifest
        assert manifest is not None
        saved = checkpoint.save(folder, found, policy, moments, gathered)
        with durable.saying(folder, CheckpointError):
            self._prune(manifest, found.rollout)
            if planned:
                self.forget_replaced()
        return saved

    def _prune(self, manifest: Manifest, rollout: int) -> None:
        """Remove checkpoints up to a rollout but the newest of them; damaged ones may be of later rollouts."""
        there = checkpoint.checkpoints(self.path / CHECKPOINTS)
        until = [one for one in there if checkpoint.number(one) <= rollout]
        surplus = until[: -self._run.tracking.keep_checkpoints]
        kept = [one.name for one in there if one not in surplus]
        self._write_manifest(manifest.model_copy(update={"checkpoints": kept}))
        for path in surplus:
            checkpoint.discard(path)

    def forget_replaced(self) -> None:
        """Remove the run that was here before this one; what it did not write stays, and is told."""
        for aside in self._asides():
            clear(aside, whole=True)
            if not durable.remove_empty(aside):
                self.said.append(f"{aside} holds what the run that was replaced did not write")
        self._moved = None

    def identity(self) -> Identity:
        """What its checkpoints say of this run."""
        run = self._run
        return Identity(self.run_id, run_hash(run), run.model_dump(mode="json"), dict(self._providers))

    def failed(self, error: BaseException) -> None:
        """The run ended with an error, which may have to say where the run is that this one replaces."""
        self._undo()
        if self._moved is not None and self._moved.exists():
            error.add_note(f"the run that was here before is in {self._moved}")

    def _undo(self) -> None:
        """After a start that failed before its first record: remove what it made, put back what it moved."""
        if not (self._begun and self._fresh) or (self._manifest is not None and self._worth_keeping()):
            return
        with suppress(OSError):
            if self._manifest is not None:
                self._manifest.clear(self.path)
            if self._moved is not None and self._replaced is not None:
                self._replaced.move(self._moved, self.path)
                durable.remove_empty(self._moved)


@contextmanager
def hold(
    run: RunConfig, accelerator: Accelerator, providers: Mapping[str, Any], stop: Stop, *, resume: bool, overwrite: bool
) -> Iterator[tuple[RunFolder | None, Path | None]]:
    """The run's folder, which the first process holds, and the checkpoint to continue from, which all load."""
    held: list[RunFolder] = []

    def first() -> Path | None:
        held.append(RunFolder(run, providers, resume=resume, overwrite=overwrite))
        return held[0].start

    try:
        latest = from_first(accelerator, first)
        if latest is not None:
            require_seen(latest)
        yield (held[0] if held else None), latest
    except BaseException as error:
        stop.hold()
        for one in held:
            one.failed(error)
        raise
    finally:
        stop.hold()
        for one in held:
            one.close()


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two resolved runs differ in nothing but what a continued run may change."""
    try:
        _same(short(one), short(other), Path())
    except CheckpointError:
        return False
    return True


def _filled(before: Any, now: BaseModel) -> Any:
    """Settings of a run, with the defaults of those that came to be after it began: it was made as they make it."""
    if not isinstance(before, Mapping):
        return before
    fields = type(now).model_fields
    later = {name: to_jsonable_python(one.get_default()) for name, one in fields.items() if not one.is_required()}
    parts = {name: getattr(now, name) for name in before.keys() & fields.keys()}
    own = {name: _filled(before[name], part) for name, part in parts.items() if isinstance(part, BaseModel)}
    return {**later, **before, **own}


def _same(before: Any, now: Any, out: Path, place: str = "") -> None:
    if place in MAY_CHANGE:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys(), key=str):
            _same(before.get(key), now.get(key), out, f"{place}.{key}" if place else str(key))
    elif before != now:
        raise CheckpointError(
            f"{out} was started with {place} = {before!r}, the configuration says {now!r}. A run continues as it "
            f"began. Resume with {out / 'config.yaml'}, or start over in another tracking.out."
        )


def _holder(lock: Path) -> str:
    """The process that holds a lock, as it wrote itself."""
    try:
        found = re.fullmatch(r"([0-9]{1,10}) (\S{1,255})\n", lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found is None:
        return "another process"
    return f"process {found[1]}" + ("" if found[2] == socket.gethostname() else f" on {found[2]}")
