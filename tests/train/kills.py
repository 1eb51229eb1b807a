"""Kills trainers and continues them: ``python -m tests.train.kills KILLS SEED``; prints what it did as JSON.

One process imports everything and forks the trainers, so that a kill costs a fraction of a second. A trainer is killed
with SIGKILL at a call to the system that changes a file (before it, after it, or in the middle of a write), or at a
random moment; or it is ended by SIGTERM. Several such ends follow one another in one folder until a trainer finishes;
what it leaves must be, byte for byte, what one leaves that was never disturbed.
"""

from __future__ import annotations

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
from rich.console import Console
from rlstab.train.stopping import Stopped

from rlstab.config import RunConfig, load_run
from rlstab.errors import RlstabError
from rlstab.tasks import Countdown, Example
from rlstab.train import checkpoint, loop

#: Calls that change what is on the disk.
CALLS = ("fsync", "write", "replace", "rename", "unlink", "rmdir", "mkdir")

#: What a checkpoint's index says that no clock, id or restart changes.
KEPT = ("rollout", "optimizer_steps", "objective", "state", "standing", "tensors")

#: How many ends one folder sees before a trainer may finish.
ENDS = 8

#: What a trainer's process says when it was not killed.
FINISHED, TERMINATED, REFUSED, FAILED = 0, 143, 2, 1


def small(out: Path, **changes: Any) -> RunConfig:
    """Five rollouts of two optimizer steps, with evaluations, traces, and a state that changes."""
    data = {
        "objective": ["clip_higher", {"name": "adaptive_entropy", "increment": 0.001, "target_entropy": 0.5}],
        "rollout": {"prompts": 2, "group": 2, "max_new_tokens": 5},
        "optimisation": {"rollouts": 5, "lr": 1e-3, "mini_batches": 2},
        "evaluation": {"every": 2, "prompts": 2, "samples": 2, "pass_at": [2], "greedy": False},
        "tracking": {"out": str(out), "checkpoint_every": 2, "trace_every": 2, "trace_responses": 2},
    }
    return load_run(data, {key.replace("__", "."): value for key, value in changes.items()})


def staged(out: Path, **changes: Any) -> RunConfig:
    """The same with stages that have states, branches, refills, and rollouts that wait in a queue."""
    stages = [
        {"name": "goldilocks", "pool": 12},
        {"name": "laconic", "budget": 3, "step": 0.1},
        {"name": "deep_grpo", "branches": 2, "threshold": 0.5, "warmup": 0},
        {"name": "dynamic_sampling", "max_refills": 1},
    ]
    objective = [
        "clip_higher",
        "stream_weight",
        {"name": "adaptive_entropy", "increment": 0.001, "target_entropy": 0.5},
    ]
    return small(out, stages=stages, objective=objective, rollout__staleness=1, **changes)


class Graded(Countdown):
    """Countdown whose rewards differ, so that every rollout teaches something."""

    def score(self, example: Example, completion: str) -> float:
        return (len(completion) + sum(map(ord, completion))) % 7 / 6


def quicken() -> None:
    """Make trainers of this process, and of those forked from it, quick and their rewards different."""
    torch.set_num_threads(1)
    loop.build_task = lambda settings: Graded()


class Hook:
    """Counts the calls that change files, and kills its own process at one of them.

    Args:
        place: at which call, from 1; 0 only counts.
        when: ``before`` it, ``after`` it, or ``torn``: after half of what a write should write.
    """

    def __init__(self, place: int, when: str) -> None:
        self.place, self.when, self.count = place, when, 0

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._around(name, getattr(os, name)))

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            here = self.count == self.place
            if here and self.when == "torn" and name == "write":
                call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if here and self.when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            found = call(*arguments, **options)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return counted


def start(run: RunConfig, log: Path, hook: Hook | None = None, **options: Any) -> int:
    """Fork a trainer; its process id."""
    process = os.fork()
    if process:
        return process
    code = FAILED
    with log.open("a") as file:
        try:
            if hook is not None:
                hook.install()
            loop.train(run, console=Console(file=file, width=500), **options)
            code = FINISHED
        except Stopped:
            code = TERMINATED
        except RlstabError as error:
            file.write(f"{type(error).__name__}: {error}\n")
            code = REFUSED
        except BaseException:
            traceback.print_exc(file=file)
        if hook is not None:
            file.write(f"calls {hook.count}\n")
        file.flush()
        os._exit(code)


def end(process: int) -> int:
    """How it ended: its code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def left(out: Path) -> dict[str, Any]:
    """Everything in a run folder that does not depend on the clock, the run's id and how often it was started."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.name == checkpoint.INDEX:
            index = json.loads(path.read_text())
            found[name] = {key: index[key] for key in KEPT}
        elif name == "metrics.jsonl":
            records = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: one[key] for key in one if not key.startswith("seconds/")} for one in records]
        elif path.is_file() and name not in ("run.json", "manifest.json", ".lock"):
            found[name] = path.read_bytes()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class Campaign:
    """Many folders, each with several ends.

    Attributes:
        counts: of kills and other ends, by kind.
        failures: what was not as it should be, in words.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.log = root / "log"
        quicken()
        self.out = root / "run"
        began = time.monotonic()
        hook = Hook(0, "before")
        assert end(start(staged(self.out), self.log, hook)) == FINISHED, self.log.read_text()
        self.seconds = time.monotonic() - began
        self.calls = int(self.log.read_text().split()[-1])
        self.whole = left(self.out)
        assert self.whole["tokens.jsonl"], "it traced nothing, so it learnt nothing"
        self.kept = root / "other"  # a finished run of another seed, to be replaced
        shutil.rmtree(self.out)
        assert end(start(staged(self.out, seed=1), self.log)) == FINISHED, self.log.read_text()
        self.out.rename(self.kept)
        self.other = left(self.kept)
        self.other_id = json.loads((self.kept / "manifest.json").read_text())["run_id"]

    def folder(self, replaced: bool) -> None:
        """One folder, from its first start to a trainer that finishes; ``replaced``: it holds another run before."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.log.write_text("")
        if replaced:
            shutil.copytree(self.kept, self.out)
        happened = ["a run to replace" if replaced else "nothing"]
        options = {"overwrite": True} if replaced else {}
        for _ in range(ENDS):
            what, code = self._end(options)
            happened.append(f"{what}: {code}")
            if code == FINISHED:
                break
            if code not in (-signal.SIGKILL, TERMINATED):
                return self._fail(happened, self.log.read_text())
            self.counts[what.split()[0]] += 1
            if replaced and not self._one_is_kept():
                return self._fail(happened, "the run that was replaced is lost and the new one has no checkpoint")
            options = {"resume": True}
            if replaced and not self._is_new():
                options = {"overwrite": True}
            elif not replaced and not self._has_anything() and self.random.random() < 0.5:
                options = {}  # a start that failed does not block another one
        if code != FINISHED and (code := end(start(staged(self.out), self.log, **options))) != FINISHED:
            return self._fail(happened, self.log.read_text())
        self.counts["folders"] += 1
        if different := differences(left(self.out), self.whole):
            self._fail(happened, f"differs in {', '.join(different)}")
        return None

    def _end(self, options: dict[str, Any]) -> tuple[str, int]:
        """Start a trainer and end it in some way; the way, and how it ended."""
        run, kind = staged(self.out), self.random.choices(("aimed", "random", "terminated"), (7, 2, 1))[0]
        if kind == "aimed":
            # most folders have fewer calls left than a whole run has; early ones are those of a start
            place = self.random.randint(1, self.random.choice((25, self.calls // 3, self.calls)))
            when = self.random.choice(("before", "after", "torn"))
            return f"aimed {when} {place} {options}", end(start(run, self.log, Hook(place, when), **options))
        process = start(run, self.log, **options)
        seconds = self.random.random() * self.seconds
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL if kind == "random" else signal.SIGTERM)
        code = end(process)
        if code == -signal.SIGTERM:  # before the trainer minded it
            code = TERMINATED
        return f"{kind} {seconds:.3f} {options}", code

    def _has_anything(self) -> bool:
        metrics = self.out / "metrics.jsonl"
        kept = checkpoint.checkpoints(self.out / "checkpoints")
        return bool(kept) or (metrics.exists() and metrics.stat().st_size > 0) or any(self.out.glob(".replaced-*"))

    def _is_new(self) -> bool:
        """Whether the other run is out of the way."""
        manifest = self.out / "manifest.json"
        return not manifest.exists() or json.loads(manifest.read_text())["run_id"] != self.other_id

    def _one_is_kept(self) -> bool:
        """Whether there is a whole checkpoint of the new run, or all of the other one's."""
        for path in checkpoint.checkpoints(self.out / "checkpoints"):
            if checkpoint.owner(path) != self.other_id:
                checkpoint.verify(path)
                return True
        found = self._where()
        return not differences({name: found.get(name) for name in self.other}, self.other)

    def _where(self) -> dict[str, Any]:
        """The files of the other run, in the folder or moved aside."""
        found = {} if self._is_new() else left(self.out)
        for aside in self.out.glob(".replaced-*"):
            found |= left(aside)
        return found

    def _fail(self, happened: list[str], why: str) -> None:
        self.failures.append("; ".join(happened) + f": {why}")


def main(kills: int, seed: int) -> dict[str, Any]:
    """So many kills; what was done and what failed."""
    memory = Path("/dev/shm")  # a kill loses nothing that a disk would keep, and no disk is faster
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        campaign = Campaign(Path(folder), seed)
        number = 0
        counts, wanted = campaign.counts, 1 if kills else 0
        # what kind an end is of is drawn; that each kind is there is seen to
        while (counts["aimed"] + counts["random"] < kills or counts["terminated"] < wanted) and (
            len(campaign.failures) < 5
        ):
            campaign.folder(replaced=number % 3 == 2)
            number += 1
            if number % 20 == 0:
                print(dict(campaign.counts), campaign.failures, file=sys.stderr, flush=True)
    return {"calls": campaign.calls, **campaign.counts, "failures": campaign.failures}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2])), indent=1))
