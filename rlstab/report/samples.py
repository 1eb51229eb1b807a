"""A few responses of each run, from its first and its last rollout, and where its tokens are shown."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from rlstab.config.run_files import SAMPLES
from rlstab.record.reader import dumped, folder_of
from rlstab.report.runs import RunRecord
from rlstab.safe_read import open_file, read_object

#: Responses of one rollout, and runs with samples on a page.
MOST, MOST_SAMPLED = 2, 60
#: Characters of a prompt or a response; what is left out is told.
LENGTH = 700
#: Bytes at the beginning and at the end of ``samples.jsonl`` that are read: such files may be long.
READ = 300_000


class Response(BaseModel):
    """One line of ``samples.jsonl``."""

    model_config = ConfigDict(extra="ignore", strict=True)
    rollout: int
    prompt: str = ""
    text: str
    reward: float | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    """What a run wrote down of its responses.

    Attributes:
        run: whose they are.
        rollouts: responses by the number of their rollout, the first and the last one that has any; texts are cut.
        traced: whether it has a dump of its tokens.
    """

    run: RunRecord
    rollouts: dict[int, list[Response]]
    traced: bool

    @property
    def command(self) -> str:
        """What writes the page of its tokens."""
        return f"rlstab view {shlex.quote(self.run.path)}"

    def link(self, folder: Path) -> str | None:
        """The address of the page of its tokens from a file in ``folder``; None without a page."""
        page = Path(self.run.path) / "view.html"
        if not self.traced or not page.is_file():
            return None
        return quote(Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix())


def samples_of(runs: Iterable[RunRecord]) -> list[Samples]:
    """Of the runs that are still in a folder and left any, at most :data:`MOST_SAMPLED`, low seeds first."""
    samples = (
        Samples(run, _rollouts(Path(run.path) / SAMPLES), bool(dumped(folder_of(run.path))))
        for run in sorted(runs, key=lambda run: run.seed)
    )
    return list(itertools.islice((sample for sample in samples if sample.rollouts or sample.traced), MOST_SAMPLED))


def _rollouts(path: Path) -> dict[int, list[Response]]:
    """The first responses of the first and of the last rollout; a damaged line is skipped."""
    head, tail = (list(_responses(part)) for part in _ends(path))
    if not head:
        return {}
    rollouts = {}
    for responses, number in ((head, head[0].rollout), (tail or head, (tail or head)[-1].rollout)):
        rollouts[number] = [response for response in responses if response.rollout == number][:MOST]
    return rollouts


def _ends(path: Path) -> tuple[bytes, bytes]:
    """The beginning of a file, and its end where that does not hold it all; whole lines."""
    try:
        with open_file(path) as file:
            head = file.read(READ)
            file.seek(max(READ, os.fstat(file.fileno()).st_size - READ))
            tail = file.read()
    except OSError:
        return b"", b""
    return head[: head.rfind(b"\n") + 1] if tail else head, tail[tail.find(b"\n") + 1 :]


def _responses(part: bytes) -> Iterator[Response]:
    for line in part.split(b"\n"):
        try:
            response = Response.model_validate(read_object(line))
        except ValueError:
            continue
        yield response.model_copy(update={"prompt": _cut(response.prompt), "text": _cut(response.text)})


def _cut(text: str) -> str:
    more = len(text) - LENGTH
    return text if more <= 0 else f"{text[:LENGTH]} … ({more} more characters)"
