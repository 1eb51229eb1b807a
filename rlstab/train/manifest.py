"""What a run made in its folder: ``manifest.json`` names the run, by an id drawn at its first start, and its files."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rlstab.config.document import Document
from rlstab.errors import ConfigError
from rlstab.train import checkpoint, durable

MANIFEST = "manifest.json"

JOURNALS = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")

#: What a run writes beside its checkpoints and the folders of its trackers.
FILES = ("config.yaml", "run.json", *JOURNALS)

CHECKPOINTS = "checkpoints"

#: Entries of a resolved run that every version has written; a config.yaml without them is not one of ours.
_PARTS = {"objective", "optimisation", "rollout", "tracking"}

_ID = re.compile("^[0-9a-f]{16}$")


def _inside(name: str) -> str:
    if name != Path(name).name or name == "..":
        raise ValueError("a name that leads out of the folder")
    return name


_Name = Annotated[str, AfterValidator(_inside)]


class Manifest(BaseModel):
    """What a run made in its folder. Nothing else there is ever moved or removed.

    Attributes:
        format: of this file.
        run_id: sixteen hexadecimal digits.
        run_hash: of the settings with which it was started or last continued.
        files: names of files.
        folders: names of folders, with all in them; of ``checkpoints`` only the checkpoints.
        checkpoints: names of those that stood when this was written.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format: int = 1
    run_id: Annotated[str, Field(pattern=_ID.pattern)]
    run_hash: str
    files: list[_Name]
    folders: list[_Name]
    checkpoints: list[_Name]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """That of a folder; None where there is none, or it is damaged."""
        try:
            return cls.model_validate(read_mapping(folder / MANIFEST))
        except ValidationError:
            return None

    def write(self, folder: Path) -> None:
        """Make it that of a folder."""
        durable.write(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")

    def owns(self, path: Path) -> bool:
        """Whether the run wrote a checkpoint: by what that says, or where it says nothing by the names here."""
        owner = checkpoint.owner(path)
        return path.name in self.checkpoints if owner is None else owner == self.run_id

    def move(self, source: Path, to: Path) -> None:
        """Move what the run made, the manifest last, so that after a kill the rest can be moved."""
        to.mkdir(exist_ok=True)
        for one in self._made(source):
            goal = to / one.relative_to(source)
            goal.parent.mkdir(exist_ok=True)
            durable.move(one, goal)
        self._leave(source, whole=False)
        if durable.there(source / MANIFEST):
            durable.move(source / MANIFEST, to / MANIFEST)

    def clear(self, folder: Path, *, whole: bool = False) -> None:
        """Remove what the run made, the manifest last; ``whole``: the folder was made for it."""
        for one in self._made(folder):
            if one.parent == folder:
                durable.remove(one)
            else:
                checkpoint.discard_own(one)
        self._leave(folder, whole=whole)
        durable.remove(folder / MANIFEST)

    def _made(self, folder: Path) -> list[Path]:
        """What is there of what the run made, but for the manifest."""
        own = [one for one in checkpoint.checkpoints(folder / CHECKPOINTS) if self.owns(one)]
        names = [folder / name for name in (*self.files, *self.folders) if name not in (CHECKPOINTS, MANIFEST)]
        return [one for one in (*own, *names) if durable.there(one)]

    def _leave(self, folder: Path, *, whole: bool) -> None:
        """Remove the folder of the checkpoints, if the run made it and nothing else is in it."""
        inside = folder / CHECKPOINTS
        if inside.is_dir() and not inside.is_symlink():
            checkpoint.tidy(inside)
            if whole or CHECKPOINTS in self.folders:
                durable.remove_empty(inside)


def found_in(folder: Path) -> tuple[Manifest | None, str]:
    """The manifest of the run in a folder, made up where there is none, and a remark; None where there is no run."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        return manifest, ""
    about, kept = read_mapping(folder / "run.json"), checkpoint.checkpoints(folder / CHECKPOINTS)
    ids = [about.get("run_id"), *(checkpoint.owner(one) for one in reversed(kept))]
    known = next((one for one in ids if isinstance(one, str) and _ID.fullmatch(one)), None)
    config, _ = read_config(folder / "config.yaml")
    if known is None and not {"run_hash", "objective_hash"} <= about.keys() and not config.keys() >= _PARTS:
        return None, ""
    if (folder / MANIFEST).exists() or known is not None:
        remark = f"{MANIFEST} is missing or damaged; it is written anew"
    else:
        remark = f"{folder} was written before runs had an id, a manifest and checksums; they begin now"
    own = [one.name for one in kept if checkpoint.owner(one) in (None, known)]
    made_up = Manifest(
        run_id=known or secrets.token_hex(8),
        run_hash=str(about.get("run_hash", "")),
        files=[name for name in FILES if durable.there(folder / name)],
        folders=[CHECKPOINTS] if own else [],
        checkpoints=own,
    )
    return made_up, remark


def clear(folder: Path, *, whole: bool = False) -> None:
    """Remove what a run made in a folder; where no run is known to have made anything, nothing."""
    manifest, _ = found_in(folder)
    if manifest is not None:
        manifest.clear(folder, whole=whole)


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """What a ``config.yaml`` holds, or why it cannot be used."""
    try:
        found = Document.read(path).data
    except ConfigError as error:
        return {}, str(error).splitlines()[0]
    return (found, "") if isinstance(found, dict) else ({}, f"{path} is not a mapping")


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where it cannot be read."""
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
