"""A few responses of each run, from its first and its last rollout, and the way to its tokens."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from rlstab.report.model import RunRecord

#: Responses of one rollout, and runs with samples on a page.
MOST, MOST_RUNS = 2, 60
#: Characters of a prompt or a response; what is left out is told.
LENGTH = 700
#: Bytes at the beginning and at the end of ``samples.jsonl`` that are read: such files may be long.
READ = 300_000


@dataclass(frozen=True)
class Response:
    """One response, its texts cut to :data:`LENGTH` characters.

    Attributes:
        prompt, text: as they were decoded.
        reward: as scored.
    """

    prompt: str
    text: str
    reward: float | None


@dataclass(frozen=True, eq=False)
class Samples:
    """What a run wrote down of its responses.

    Attributes:
        run: whose they are.
        rollouts: responses by the number of their rollout, the first and the last one that has any.
        page: of its tokens, where ``rlstab view`` has written it; None where it has not.
        command: that writes this page; None where the run has no traces.
    """

    run: RunRecord
    rollouts: dict[int, list[Response]]
    page: Path | None
    command: str | None

    def link(self, folder: Path) -> str | None:
        """The address of :attr:`page` from a file in ``folder``; None without a page."""
        if self.page is None:
            return None
        try:
            return quote(Path(os.path.relpath(self.page.resolve(), folder.resolve())).as_posix())
        except ValueError:  # on another drive
            return None


def samples_of(runs: Iterable[RunRecord]) -> list[Samples]:
    """Of the runs that are still in a folder and left any, at most :data:`MOST_RUNS`, low seeds first."""
    found: list[Samples] = []
    for run in sorted(runs, key=lambda one: one.seed):
        if len(found) == MOST_RUNS:
            break
        folder = Path(run.path)
        rollouts = _rollouts(folder / "samples.jsonl")
        traced = (folder / "tokens.jsonl").is_file()
        if rollouts or traced:
            page = folder / "view.html"
            command = f"rlstab view {shlex.quote(run.path)}" if traced else None
            found.append(Samples(run, rollouts, page if traced and page.is_file() else None, command))
    return found


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    rollout: int
    prompt: str = ""
    text: str
    reward: float | None = None


def _rollouts(path: Path) -> dict[int, list[Response]]:
    """The first responses of the first and of the last rollout; a damaged line is passed over."""
    head, tail = (list(_read(part)) for part in _ends(path))
    if not head:
        return {}
    found = {}
    for lines, number in ((head, head[0].rollout), (tail or head, (tail or head)[-1].rollout)):
        own = [one for one in lines if one.rollout == number][:MOST]
        found[number] = [Response(_cut(one.prompt), _cut(one.text), one.reward) for one in own]
    return found


def _ends(path: Path) -> tuple[bytes, bytes]:
    """The beginning of a file, and its end where that does not hold it all; whole lines."""
    try:
        if not path.is_file():
            return b"", b""
        with path.open("rb") as file:
            head = file.read(READ)
            size = file.seek(0, os.SEEK_END)
            if size <= READ:
                return head, b""
            file.seek(max(READ, size - READ))
            tail = file.read(READ)
    except OSError:
        return b"", b""
    return head[: head.rfind(b"\n") + 1], tail[tail.find(b"\n") + 1 :]


def _read(part: bytes) -> Iterator[_Line]:
    for line in part.split(b"\n"):
        try:
            data: Any = json.loads(line.decode("utf-8", errors="replace"))
            yield _Line.model_validate(data)
        except (ValueError, ValidationError, RecursionError):
            continue


def _cut(text: str) -> str:
    more = len(text) - LENGTH
    return text if more <= 0 else f"{text[:LENGTH]} … ({more} more characters)"
