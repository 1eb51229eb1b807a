"""Kills trainers and continues them: ``python -m tests.train.kills KILLS SEED``; prints what it did as JSON.

One process imports everything and forks the trainers, so that a kill costs a fraction of a second. A trainer is killed
with SIGKILL at an event that changes a file of its folder (before it, or a moment after, in the middle of a write), or
at a random moment; or it is ended by SIGTERM. Several such ends follow one another in one folder until a trainer
finishes; what it leaves must be, bit for bit, what one leaves that was never disturbed.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlstab.config import RunConfig
from rlstab.train import Stopped, train
from tests.train.forks import print_to
from tests.train.runs import ADAPTER, STAGED, checkpoints, differences, left, long, quiet

#: Python says of these to an audit hook before it does them.
EVENTS = {"open", "shutil.rmtree"} | {
    f"os.{change}" for change in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "truncate")
}

#: How many ends one folder sees before a trainer may finish.
ENDS = 8

#: What a trainer's process says when it was not killed.
FINISHED, FAILED, TERMINATED = 0, 1, 143

#: The runs that are killed in turn.
KINDS: dict[str, dict[str, Any]] = {"staged": STAGED, "adapter": ADAPTER, "plain": {}}


class Hook:
    """Counts the events that change files of a folder, and kills its own process at one of them.

    Args:
        folder: whose files count.
        place: at which event, from 1; 0 only counts.
        after: seconds, at random up to so many, that a forked process waits before it kills; None kills before the
            event, ``0.0`` and more somewhere in or after it.
    """

    def __init__(self, folder: Path, place: int, after: float | None = None) -> None:
        self.folder, self.place, self.after, self.count = str(folder), place, after, 0

    def install(self) -> None:
        sys.addaudithook(self._see)
        for name in ("fsync", "write"):
            setattr(os, name, self._counting(getattr(os, name)))

    def _see(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in EVENTS or self.folder not in str(given[0]):
            return
        if event == "open" and not (isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self._happens()

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            self._happens()
            return call(*given, **options)

        return counted

    def _happens(self) -> None:
        self.count += 1
        if self.count != self.place:
            return
        own = os.getpid()
        if self.after is None:
            os.kill(own, signal.SIGKILL)
        elif os.fork() == 0:  # which kills the trainer while that goes on
            time.sleep(self.after)
            os.kill(own, signal.SIGKILL)
            os._exit(0)


def trainer(run: RunConfig, log: Path, hook: Hook | None = None, **options: Any) -> int:
    """Fork a trainer; its process id."""
    process = os.fork()
    if process:
        return process
    code = FAILED
    try:
        print_to(log)
        if hook is not None:
            hook.install()
        train(run, console=quiet(), **options)
        code = FINISHED
    except Stopped:
        code = TERMINATED
    except BaseException:
        traceback.print_exc()
    if hook is not None:
        print(f"events {hook.count}")
    sys.stdout.flush()
    os._exit(code)


def end(process: int) -> int:
    """How it ended: its code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Campaign:
    """Many folders of one kind of run, each with several ends.

    Attributes:
        counts: of kills and other ends, by kind.
        failures: what was not as it should be, in words.
    """

    def __init__(self, kind: str, root: Path, seed: int) -> None:
        self.kind, self.random = kind, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.log, self.out, self.kept = root / "log", root / "run", root / "other"
        began = time.monotonic()
        assert end(trainer(self._run(), self.log, Hook(self.out, 0))) == FINISHED, self.log.read_text()
        self.seconds = time.monotonic() - began
        self.events = int(self.log.read_text().split()[-1])
        self.whole = left(self.out)
        assert self.whole["tokens.jsonl"], "it traced nothing, so it learnt nothing"
        shutil.rmtree(self.out)
        # a finished run of another seed, to be replaced
        assert end(trainer(self._run(seed=1), self.log)) == FINISHED, self.log.read_text()
        (self.out / "notes.txt").write_text("mine")
        self.other = self._files(self.out)
        self.out.rename(self.kept)

    def _run(self, **changes: Any) -> RunConfig:
        """Five rollouts, with checkpoints after 2, 4 and 5."""
        return long(self.out, **{"optimisation__rollouts": 5, **KINDS[self.kind], **changes})

    def folder(self, replaced: bool) -> None:
        """One folder, from its first start to a trainer that finishes; ``replaced``: it holds another run before."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.log.write_text("")
        if replaced:
            shutil.copytree(self.kept, self.out)
        happened = ["a run to replace" if replaced else "nothing"]
        options = {"overwrite": True} if replaced else {}
        code = FAILED
        for number in range(ENDS + 1):
            last = number == ENDS  # which may finish
            what, code = ("none", end(trainer(self._run(), self.log, **options))) if last else self._end(options)
            happened.append(f"{what} {options}: {code}")
            if code == FINISHED:
                break
            if code not in (-signal.SIGKILL, TERMINATED):
                return self._fail(happened, self.log.read_text())
            self.counts[what.split()[0]] += 1
            if replaced and not self._one_is_kept():
                return self._fail(happened, "the run that was replaced is lost and the new one has no checkpoint")
            options = {"overwrite": True} if replaced and not self._is_new() else {"resume": True}
        self.counts["folders"] += 1
        if replaced and (self.out / "notes.txt").read_text() != "mine":
            self._fail(happened, "a file of the user is gone")
        if different := differences(self.out, self.whole):
            self._fail(happened, f"differs in {', '.join(different)}")
        return None

    def _end(self, options: dict[str, Any]) -> tuple[str, int]:
        """Start a trainer and end it in some way; the way, and how it ended."""
        (kind,) = self.random.choices(("aimed", "random", "terminated"), (7, 2, 1))
        if kind == "aimed":
            # most folders have fewer events left than a whole run has; early ones are those of a start
            place = self.random.randint(1, self.random.choice((25, max(2, self.events // 3), self.events)))
            after = self.random.choice((None, 0.0, self.random.random() * 0.004))
            hook = Hook(self.out, place, after)
            return f"aimed {place} {after}", end(trainer(self._run(), self.log, hook, **options))
        process = trainer(self._run(), self.log, **options)
        seconds = self.random.random() * self.seconds
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL if kind == "random" else signal.SIGTERM)
        code = end(process)
        if code == -signal.SIGTERM:  # before the trainer minded it
            code = TERMINATED
        return f"{kind} {seconds:.3f}", code

    def _is_new(self) -> bool:
        """Whether the folder holds the new run, or nothing of a run any more, for the other one is aside."""
        config = self.out / "config.yaml"
        return not config.exists() or "seed: 1\n" not in config.read_text()

    def _one_is_kept(self) -> bool:
        """Whether there is a checkpoint of the new run, or all of the other one's tensors and records."""
        if self._is_new() and checkpoints(self.out):
            return True
        there = self._files(self.out)
        return all(any(name in mine and size == there[mine] for mine in there) for name, size in self.other.items())

    def _files(self, folder: Path) -> dict[str, int]:
        """Sizes of tensors and records, by the path in a folder."""
        kept = [*folder.rglob("*.safetensors"), *folder.rglob("metrics.jsonl")]
        return {str(path.relative_to(folder)): path.stat().st_size for path in kept}

    def _fail(self, happened: list[str], why: str) -> None:
        self.failures.append(f"{self.kind}: " + "; ".join(happened) + f": {why}")


def main(kills: int, seed: int) -> dict[str, Any]:
    """So many kills; what was done and what failed."""
    torch.set_num_threads(1)
    memory = Path("/dev/shm")  # a kill loses nothing that a disk would keep, and no disk is faster
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        campaigns = []
        for kind in KINDS if kills >= 100 else ("staged",):
            (Path(place) / kind).mkdir()
            campaigns.append(Campaign(kind, Path(place) / kind, seed))
        number = 0
        while counts["aimed"] + counts["random"] < kills and len(failures) < 5:
            campaigns[number % len(campaigns)].folder(replaced=number // len(campaigns) % 3 == 2)
            number += 1
            counts = sum((campaign.counts for campaign in campaigns), Counter())
            failures = [text for campaign in campaigns for text in campaign.failures]
        by_kind = {campaign.kind: campaign.counts["aimed"] + campaign.counts["random"] for campaign in campaigns}
    return {"kills": counts["aimed"] + counts["random"], "of": by_kind, **counts, "failures": failures}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2])), indent=1))
