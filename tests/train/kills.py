"""Kills trainers and continues them: ``python -m tests.train.kills KILLS SEED``; prints what it did as JSON.

One process imports everything and forks the trainers, so that a kill costs a fraction of a second. The kernel kills a
trainer at an event that changes a file of its folder (before it, or a moment after, in the middle of a write), or at a
random moment; or it is ended by SIGTERM. Several such ends follow one another in one folder until a trainer finishes;
what it leaves must be, bit for bit, what one leaves that was never disturbed.
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

#: How a trainer ends: by itself, by SIGTERM that it minds, or by a signal for which no handler is asked.
FINISHED, FAILED, TERMINATED = 0, 1, 143
ENDED = (TERMINATED, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGALRM)

#: The runs that are killed in turn.
KINDS: dict[str, dict[str, Any]] = {"staged": STAGED, "adapter": ADAPTER, "plain": {}}


class Hook:
    """Counts the events that change files of a folder, from 1, and has its own process killed at the one of a place.

    ``after`` None kills before the event, a number this many seconds later, whatever happens then.
    """

    def __init__(self, folder: Path, place: int, after: float | None = None) -> None:
        self.folder, self.place, self.after, self.count = str(folder), place, after, 0

    def install(self) -> None:
        sys.addaudithook(self._see)
        for name in ("fsync", "write"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self._happens()
            return call(*given)

        return counted

    def _see(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event != "open" or (isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR))
        if event in EVENTS and self.folder in str(given[0]) and writes:
            self._happens()

    def _happens(self) -> None:
        self.count += 1
        if self.count == self.place:
            if self.after is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                signal.setitimer(signal.ITIMER_REAL, max(self.after, 1e-6))


def trainer(run: RunConfig, log: Path, hook: Hook, **options: Any) -> int:
    """Fork a trainer; its process id."""
    if process := os.fork():
        return process
    code = FAILED
    try:
        print_to(log)
        hook.install()
        train(run, console=quiet(), **options)
        code = FINISHED
    except Stopped:
        code = TERMINATED
    except BaseException:
        traceback.print_exc()
    print(hook.count, flush=True)
    os._exit(code)


class Campaign:
    """Many folders of one kind of run, each with several ends; counts these by kind, and says what failed."""

    def __init__(self, kind: str, root: Path, seed: int) -> None:
        self.kind, self.random = kind, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.log, self.out, self.kept = root / "log", root / "run", root / "other"
        began = time.monotonic()
        assert self._train() == FINISHED, self.log.read_text()
        self.seconds, self.events = time.monotonic() - began, int(self.log.read_text().split()[-1])
        self.whole = left(self.out)
        assert self.whole["dump"], "it recorded nothing, so it learnt nothing"
        shutil.rmtree(self.out)
        assert self._train(seed=1) == FINISHED, self.log.read_text()  # a finished run of another seed, to be replaced
        (self.out / "notes.txt").write_text("mine")
        self.other = self._sizes()
        self.out.rename(self.kept)

    def _train(
        self, place: int = 0, after: float | None = None, *, terminate: float = 0.0, seed: int = 0, **options: bool
    ) -> int:
        """Five rollouts, with checkpoints after 2, 4 and 5; the code with which it ended, or minus the signal."""
        run = long(self.out, **{"optimisation__rollouts": 5, **KINDS[self.kind], "seed": seed})
        process = trainer(run, self.log, Hook(self.out, place, after), **options)
        if terminate:
            time.sleep(terminate)
            os.kill(process, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def folder(self, replaced: bool) -> None:
        """One folder, from its first start to a trainer that finishes; ``replaced``: it holds another run before."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.log.write_text("")
        if replaced:
            shutil.copytree(self.kept, self.out)
        self.counts["folders"] += 1
        options, happened = {"overwrite": replaced}, [f"replaced {replaced}"]
        for number in range(ENDS + 1):
            kind, code = self._end(options) if number < ENDS else ("none", self._train(**options))
            happened.append(f"{kind} {options}: {code}")
            if code == FINISHED:
                break
            if code not in ENDED:
                return self._fail(happened, self.log.read_text())
            self.counts[kind.split()[0]] += 1
            if replaced and not self._one_is_kept():
                return self._fail(happened, "the run that was replaced is lost and the new one has no checkpoint")
            options = {"overwrite": True} if replaced and not self._is_new() else {"resume": True}
        if replaced and (self.out / "notes.txt").read_text() != "mine":
            self._fail(happened, "a file of the user is gone")
        if different := differences(self.out, self.whole):
            self._fail(happened, f"differs in {', '.join(different)}")
        return None

    def _end(self, options: dict[str, bool]) -> tuple[str, int]:
        """Start a trainer and end it in some way; the way, and how it ended."""
        (kind,) = self.random.choices(("aimed", "random", "terminated"), (7, 2, 1))
        seconds = self.random.random() * self.seconds
        # most folders have fewer events left than a whole run has; early ones are those of a start
        place = self.random.randint(1, self.random.choice((25, max(2, self.events // 3), self.events)))
        after = self.random.choice((None, 0.0, self.random.random() * 0.004))
        if kind == "terminated":
            return f"{kind} {seconds}", self._train(terminate=seconds, **options)
        hook = (place, after) if kind == "aimed" else (1, seconds)
        return f"{kind} {hook}", self._train(*hook, **options)

    def _is_new(self) -> bool:
        """Whether the folder holds the new run, or nothing of a run any more, for the other one is aside."""
        config = self.out / "config.yaml"
        return not config.exists() or "seed: 1\n" not in config.read_text()

    def _one_is_kept(self) -> bool:
        """Whether there is a checkpoint of the new run, or all of the other one's tensors and records."""
        there = self._sizes()
        other = all(any(name in mine and size == there[mine] for mine in there) for name, size in self.other.items())
        return other or (self._is_new() and bool(checkpoints(self.out)))

    def _sizes(self) -> dict[str, int]:
        """Of tensors and records, by the path in the folder."""
        kept = [*self.out.rglob("*.safetensors"), *self.out.rglob("metrics.jsonl")]
        return {str(path.relative_to(self.out)): path.stat().st_size for path in kept}

    def _fail(self, happened: list[str], why: str) -> None:
        self.failures.append(f"{self.kind}: " + "; ".join(happened) + f": {why}")


def main(kills: int, seed: int) -> dict[str, Any]:
    """Make the kills; print what was done and what failed."""
    torch.set_num_threads(1)
    memory = Path("/dev/shm")  # a kill loses nothing that a disk would keep, and no disk is faster
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        campaigns = []
        for kind in KINDS if kills >= 100 else ("staged",):
            (Path(place) / kind).mkdir()
            campaigns.append(Campaign(kind, Path(place) / kind, seed))
        number, counts, failures = 0, Counter[str](), list[str]()
        while counts["aimed"] + counts["random"] < kills and len(failures) < 5:
            campaigns[number % len(campaigns)].folder(replaced=number // len(campaigns) % 3 == 2)
            number += 1
            counts = sum((campaign.counts for campaign in campaigns), Counter())
            failures = [text for campaign in campaigns for text in campaign.failures]
    of = {campaign.kind: campaign.counts["aimed"] + campaign.counts["random"] for campaign in campaigns}
    return {"kills": sum(of.values()), "of": of, **counts, "failures": failures}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2])), indent=1))
