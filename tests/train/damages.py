"""Kinds of damage to a run folder, and what is done with each: ``python -m tests.train.damages`` prints the table.

The folder is that of a run of five rollouts that was killed after the fourth: checkpoints of rollouts 2 and 4.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from rlstab.train import checkpoint, loop
from tests.train.kills import FAILED, FINISHED, REFUSED, left, quicken, small, start

NEWEST, LAST = "checkpoints/rollout-000004", "checkpoints/rollout-000005"

#: What is done: continue as if nothing were wrong, continue from the checkpoint before, refuse in one line.
ON, BEFORE, REFUSE = "continues", "continues from rollout 2", "refuses"

#: A trainer that takes so many seconds hangs.
HANGS = 60


@dataclass(frozen=True)
class Damage:
    """One kind.

    Attributes:
        name: what is damaged and how.
        do: does it to a folder.
        done: what a continued run does then.
        says: a part of what it says; empty where there is nothing to say.
        late: it is found when the checkpoint is loaded, not when the folder is opened.
    """

    name: str
    do: Callable[[Path], object]
    done: str
    says: str = ""
    late: bool = False


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_folder(path: Path) -> None:
    remove(path)
    path.mkdir()


def is_pipe(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def nul_tail(path: Path) -> None:
    """What a power cut leaves on some file systems."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3] + bytes(len(data) - len(data) * 2 // 3))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 4 // 5] ^= 4
    path.write_bytes(data)


HOW: dict[str, Callable[[Path], object]] = {
    "is missing": remove,
    "is empty": lambda path: path.write_bytes(b""),
    "is cut": cut,
    "ends in NULs": nul_tail,
    "has a flipped bit": flip,
    "is a folder": is_folder,
    "is a pipe": is_pipe,
}

INSIDE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer.safetensors",
    "trainer.json",
)

TOP = ("config.yaml", "run.json", "manifest.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl")


def sealed(change: Callable[[dict[str, Any]], object], name: str = NEWEST) -> Callable[[Path], None]:
    """The index of a checkpoint with something else in it, and its checksum right: not by accident."""

    def do(out: Path) -> None:
        path = out / name / checkpoint.INDEX
        record = json.loads(path.read_text())
        change(record)
        record.pop("sha256", None)
        path.write_text(json.dumps({**record, "sha256": checkpoint._sum(record)}))

    return do


def trainer_tensors(change: Callable[[dict[str, Any]], object], listed: bool = True) -> Callable[[Path], None]:
    """Other tensors of the trainer, and the checksums are right; the index may be one that does not list them."""

    def do(out: Path) -> None:
        path = out / NEWEST / "trainer.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        sealed(lambda record: record["files"].update({path.name: checkpoint._sum_of(path)}))(out)
        if not listed:
            sealed(lambda record: record.pop("optimizer"))(out)

    return do


def unsealed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The index of a checkpoint with something else in it, by accident: its checksum is not right."""

    def do(out: Path) -> None:
        path = out / NEWEST / checkpoint.INDEX
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return do


def of_another_run(out: Path, name: str = "rollout-000005", **changes: Any) -> None:
    to = out / "checkpoints" / name
    shutil.copytree(out / NEWEST, to)
    rollout = checkpoint.number(to)
    sealed(
        lambda record: record.update(rollout=rollout, run={**record["run"], "id": "0" * 16, **changes}),
        f"checkpoints/{name}",
    )(out)


def as_older(out: Path) -> None:
    """A checkpoint that says nothing of its run, in a folder whose run did not write it."""
    to = out / "checkpoints" / "rollout-000005"
    shutil.copytree(out / NEWEST, to)
    now = json.loads((to / checkpoint.INDEX).read_text())
    old = {"format": 2, **{key: now[key] for key in ("optimizer_steps", "objective", "state")}, "rollout": 5}
    (to / checkpoint.INDEX).write_text(json.dumps(old))


def line(text: bytes, place: int = 2) -> Callable[[Path], None]:
    """A line of metrics.jsonl that is something else."""

    def do(out: Path) -> None:
        path = out / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        lines[place] = text + b"\n"
        path.write_bytes(b"".join(lines))

    return do


def manifest(**changes: Any) -> Callable[[Path], object]:
    def do(out: Path) -> None:
        path = out / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return do


def config(text: str) -> Callable[[Path], object]:
    return lambda out: (out / "config.yaml").write_text(text)


def exploding() -> str:
    """Aliases of aliases: nine to the eighth values."""
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for one, after in zip("abcdefg", "bcdefgh", strict=True):
        lines.append(f"{after}: &{after} [{', '.join([f'*{one}'] * 9)}]")
    return "\n".join(lines)


def link(name: str, to: str) -> Callable[[Path], None]:
    def do(out: Path) -> None:
        remove(out / name)
        (out / name).symlink_to(to)

    return do


def moved_and_linked(out: Path) -> None:
    (out / NEWEST).rename(out / "elsewhere")
    (out / NEWEST).symlink_to(out / "elsewhere")


def folder_moved_and_linked(out: Path) -> None:
    (out / "checkpoints").rename(out / "elsewhere")
    (out / "checkpoints").symlink_to("elsewhere")


def both(do: Callable[[Path], object]) -> Callable[[Path], None]:
    def each(out: Path) -> None:
        for one in checkpoint.checkpoints(out / "checkpoints"):
            do(one)

    return each


def kinds() -> Iterator[Damage]:
    """All of them."""
    for file in INSIDE:
        for how, do in HOW.items():
            yield Damage(
                f"newest checkpoint: {file} {how}", lambda out, f=file, d=do: d(out / NEWEST / f), BEFORE, "is damaged"
            )
    for file in TOP:
        for how, do in HOW.items():
            odd = how in ("is a folder", "is a pipe")
            says = file if file in ("config.yaml", "manifest.json", "metrics.jsonl") else ""
            if how == "has a flipped bit":
                says = (
                    ""  # what is readable still cannot be told from what was written; only checkpoints have checksums
                )
            yield Damage(
                f"{file} {how}",
                lambda out, f=file, d=do: d(out / f),
                REFUSE if odd else ON,
                f"{file} is no file" if odd else says,
            )
    index = {
        "'rollout' is text": lambda record: record.update(rollout="4"),
        "'rollout' is true": lambda record: record.update(rollout=True),
        "'rollout' is another": lambda record: record.update(rollout=3),
        "'optimizer_steps' is null": lambda record: record.update(optimizer_steps=None),
        "'objective' is a list": lambda record: record.update(objective=[1]),
        "'state' is a list": lambda record: record.update(state=[]),
        "'state' is missing": lambda record: record.pop("state"),
        "'tensors' names what is not there": lambda record: record.update(tensors=[["a", "b"]]),
        "'tensors' is a list of numbers": lambda record: record.update(tensors=[1, 2]),
        "'files' names a file that is not there": lambda record: record["files"].update(x="0"),
        "'files' is null": lambda record: record.update(files=None),
        "'run' is missing": lambda record: record.pop("run"),
        "'run' has no settings": lambda record: record["run"].pop("settings"),
        "'format' is text": lambda record: record.update(format="three"),
    }
    for how, change in index.items():
        yield Damage(f"newest checkpoint: in trainer.json {how}", sealed(change), BEFORE, "is damaged")
    for how, text in {
        "a list": "[1]",
        "a number": "5",
        "deeply nested": "[" * 100_000,
        "a huge number": "1" * 9999,
    }.items():
        yield Damage(
            f"newest checkpoint: trainer.json is {how}",
            lambda out, t=text: (out / NEWEST / "trainer.json").write_text(t),
            BEFORE,
            "is damaged",
        )
    yield Damage(
        "newest checkpoint: written by a later version",
        sealed(lambda record: record.update(format=checkpoint.FORMAT + 1)),
        REFUSE,
        "Resume it with the version",
    )
    yield Damage(
        "newest checkpoint: of another objective",
        sealed(lambda record: record.update(objective="0" * 12)),
        REFUSE,
        "belongs to the objective",
        late=True,
    )
    norm = "optimizer/model.norm.weight/"
    of_norm = [f"{norm}{key}" for key in ("step", "exp_avg", "exp_avg_sq")]
    for how, tensors, says in (
        ("lacks one tensor", lambda found: found.pop(f"{norm}exp_avg"), "is incomplete"),
        ("lacks a parameter", lambda found: [found.pop(one) for one in of_norm], "'model.norm.weight' is missing"),
        ("is missing", lambda found: [found.pop(one) for one in list(found) if one.startswith("opt")], "is missing"),
        (
            "has a tensor of another shape",
            lambda found: found.update({f"{norm}exp_avg": found[f"{norm}exp_avg"][:-1]}),
            "or of another shape",
        ),
        (
            "is of another width",
            lambda found: found.update({one: found[one][:-1] for one in of_norm[1:]}),
            "or of another shape",
        ),
        (
            "has a parameter too many",
            lambda found: found.update({f"optimizer/x/{one[len(norm) :]}": found[one].clone() for one in of_norm}),
            "'x' is not known",
        ),
    ):
        yield Damage(f"newest checkpoint: its optimizer {how}", trainer_tensors(tensors), BEFORE, says)
    yield Damage(
        "newest checkpoint: its optimizer lacks one tensor, and it does not list them",
        trainer_tensors(lambda found: found.pop(f"{norm}exp_avg"), listed=False),
        BEFORE,
        "is incomplete",
    )
    yield Damage(
        "newest checkpoint: it does not list the parameters of its optimizer",
        trainer_tensors(lambda found: None, listed=False),
        ON,
    )
    yield Damage(
        "newest checkpoint: 'optimizer' in trainer.json is text",
        sealed(lambda record: record.update(optimizer="x")),
        BEFORE,
        "'optimizer' in trainer.json is",
    )
    for version in (1, 2, 7, 11, 19, 35, 67):  # each flips one bit of 3
        yield Damage(
            f"newest checkpoint: a flipped bit makes its format {version}",
            unsealed(lambda record, to=version: record.update(format=to)),
            BEFORE,
            "trainer.json is not what was written",
        )
    yield Damage(
        "newest checkpoint: a flipped bit in the id of its run",
        unsealed(lambda record: record["run"].update(id="f" * 16)),
        BEFORE,
        "trainer.json is not what was written",
    )
    yield Damage(
        "newest checkpoint: of another run",
        sealed(lambda record: record["run"].update(id="0" * 16), NEWEST),
        REFUSE,
        "belongs to run",
    )
    yield Damage("a later checkpoint of another run", of_another_run, REFUSE, "belongs to run 0000000000000000")
    yield Damage(
        "an earlier checkpoint of another run",
        lambda out: of_another_run(out, "rollout-000001"),
        REFUSE,
        "belongs to run 0000000000000000",
    )
    yield Damage("a later checkpoint that does not say its run", as_older, REFUSE, "does not say which run")
    yield Damage(
        "the newest checkpoint has another name",
        lambda out: (out / NEWEST).rename(out / "checkpoints/rollout-000009"),
        BEFORE,
        "it is of rollout 4",
    )
    yield Damage("the newest checkpoint is an empty folder", lambda out: is_folder(out / NEWEST), BEFORE, "is damaged")
    yield Damage(
        "the newest checkpoint is a file",
        lambda out: (remove(out / NEWEST), (out / NEWEST).write_text("x")),
        BEFORE,
        "is damaged",
    )
    yield Damage("the newest checkpoint is a link to nothing", link(NEWEST, "nowhere"), BEFORE, "is damaged")
    yield Damage("the newest checkpoint is a link to where it was moved", moved_and_linked, ON)
    yield Damage("the newest checkpoint is missing", lambda out: remove(out / NEWEST), BEFORE, "-000004 is gone")
    yield Damage("both checkpoints are empty folders", both(is_folder), REFUSE, "has no checkpoint that is whole")
    yield Damage(
        "both checkpoints have a flipped bit",
        both(lambda one: flip(one / "model.safetensors")),
        REFUSE,
        "no checkpoint that is whole",
    )
    yield Damage("both checkpoints are missing", both(remove), REFUSE, "had checkpoints, and they are gone")
    yield Damage("checkpoints is missing", lambda out: remove(out / "checkpoints"), REFUSE, "had checkpoints")
    yield Damage(
        "checkpoints is a file",
        lambda out: (remove(out / "checkpoints"), (out / "checkpoints").write_text("")),
        REFUSE,
        "checkpoints is no folder",
    )
    yield Damage("checkpoints is a link to where it was moved", folder_moved_and_linked, ON)
    yield Damage("checkpoints is a link to nothing", link("checkpoints", "nowhere"), REFUSE, "checkpoints is no folder")
    for name in (".writing-rollout-000005", ".removing-rollout-000002"):
        yield Damage(
            f"{name} is left over", lambda out, n=name: shutil.copytree(out / NEWEST, out / "checkpoints" / n), ON
        )
        yield Damage(f"{name} is a file", lambda out, n=name: (out / "checkpoints" / n).write_text("x"), ON)
        yield Damage(f"{name} is a link to a folder of others", link(f"checkpoints/{name}", "../../others"), ON)
    for name in (".config.yaml.writing", ".metrics.jsonl.writing", ".manifest.json.writing"):
        yield Damage(f"{name} is left over", lambda out, n=name: (out / n).write_text("half"), ON)
        yield Damage(f"{name} is a folder", lambda out, n=name: (out / n).mkdir(), ON)
    yield Damage(
        "a file that is called like a checkpoint", lambda out: (out / "checkpoints/rollout-5-copy").write_text(""), ON
    )
    for how, text in {
        "another program's": b"hello",
        "NULs": bytes(50),
        "an array": b"[1, 2]",
        "a record without its rollout": b"{}",
        "a record whose rollout is text": b'{"rollout": "3"}',
        "a huge number": b'{"rollout": ' + b"1" * 9999 + b"}",
        "a record whose rollout is negative": b'{"rollout": -3}',
        "no UTF-8": b"\xff\xfe",
        "half of a surrogate pair": b'{"rollout": 3, "\\ud800": 1}',
        "a record with text for a number": b'{"rollout": 3, "reward/mean": "high"}',
        "a record with a number of 400 digits": b'{"rollout": 3, "reward/mean": ' + b"9" * 400 + b"}",
        "deeply nested": b"[" * 100_000,
    }.items():
        readable = "half of", "a record with "
        says = "" if how.startswith(readable) else "metrics.jsonl: 1 line"
        yield Damage(f"metrics.jsonl: a line is {how}", line(text), ON, says)
    yield Damage(
        "metrics.jsonl: the last line is cut",
        lambda out: os.truncate(out / "metrics.jsonl", 3 + (out / "metrics.jsonl").read_bytes()[:-1].rindex(b"\n")),
        ON,
    )
    for how, text in {
        "a list": "[1, 2]",
        "text": "hello",
        "a cycle": "objective: &a [*a]\n",
        "aliases that explode": exploding(),
        "an object of Python": "!!python/object/apply:os.system [echo]",
        "no UTF-8": "\udcff",
    }.items():
        yield Damage(
            f"config.yaml is {how}",
            lambda out, t=text: (out / "config.yaml").write_text(t, errors="surrogateescape"),
            ON,
            "config.yaml is missing or damaged",
        )
    yield Damage("config.yaml has an objective that is none", config("objective: [5]\n"), ON, "config.yaml is not what")
    yield Damage(
        "config.yaml is of another run",
        lambda out: config((out / "config.yaml").read_text().replace("lr: 0.001", "lr: 0.5"))(out),
        ON,
        "config.yaml is not what this run was started with",
    )
    yield Damage("manifest.json: the id is a number", manifest(run_id=5), ON, "manifest.json is missing or damaged")
    yield Damage(
        "manifest.json: a name leads out", manifest(files=["../others/thesis"]), ON, "manifest.json is missing"
    )
    yield Damage("manifest.json: a name is ..", manifest(folders=[".."]), ON, "manifest.json is missing or damaged")
    yield Damage("manifest.json: of another run", manifest(run_id="0" * 16), REFUSE, "belongs to run")
    yield Damage(
        "manifest.json, run.json and config.yaml are missing",
        lambda out: [remove(out / name) for name in TOP[:3]],
        ON,
        "manifest.json is missing",
    )
    yield Damage(
        "all but the checkpoints is missing",
        lambda out: [remove(out / name) for name in TOP],
        ON,
        "has no record of 4 rollouts",
    )
    yield Damage(".lock is a folder", lambda out: is_folder(out / ".lock"), REFUSE, ".lock cannot be written")
    yield Damage(
        ".lock is a link to a file of others", link(".lock", "../others/thesis"), REFUSE, ".lock cannot be written"
    )
    yield Damage(".lock holds something else", lambda out: (out / ".lock").write_bytes(b"\xff" * 99), ON)


def killed(out: Path) -> None:
    """Make the folder that is damaged."""
    loop.train(small(out, optimisation__rollouts=4), console=loop.Console(file=open(os.devnull, "w")))  # noqa: PTH123
    others = out.parent / "others"
    others.mkdir()
    (others / "thesis").write_text("mine")


def outcome(damage: Damage, whole: Path, out: Path, log: Path) -> tuple[str, str]:
    """What a trainer does with a damaged copy of a folder, and what it says; a hang and a traceback are told too."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(whole, out)
    damage.do(out)
    log.write_text("")
    process = start(small(out), log, resume=True)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL))
    signal.alarm(HANGS)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    signal.alarm(0)
    said = log.read_text().strip()
    if code == FINISHED:
        return (BEFORE if "continuing from rollout-000002" in said else ON), said
    return {REFUSED: REFUSE, FAILED: "TRACEBACK"}.get(code, "HANG"), said


def main() -> dict[str, Any]:
    """Every kind, trained to the end: the table, and what was not as it should be."""
    quicken()
    table, failures = [], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        whole, out = root / "whole", root / "run"
        killed(whole)
        loop.train(small(out), console=loop.Console(file=open(os.devnull, "w")))  # noqa: PTH123
        end = left(out / LAST)
        for damage in kinds():
            done, said = outcome(damage, whole, out, root / "log")
            told = next((text for text in said.splitlines() if text.startswith(("run folder", "Co", "Ch"))), "")
            table.append([damage.name, done, told.replace(str(out), "OUT")])
            found = left(out / LAST) if done in (ON, BEFORE) else end
            problems = [
                f"{done} where {damage.done}"
                if done != damage.done and not (damage.done == BEFORE and done == ON and not damage.says)
                else "",
                "" if damage.says in said else f"does not say '{damage.says}'",
                "" if found == end else "ends in other weights",
                "" if (root / "others" / "thesis").read_text() == "mine" else "touched what is not its own",
            ]
            failures += [f"{damage.name}: {problem}: {said}" for problem in problems if problem]
    return {"kinds": len(table), "table": table, "failures": failures}


if __name__ == "__main__":
    found = main()
    for row in found["table"]:
        print(" | ".join(row))
    print(json.dumps({"kinds": found["kinds"], "failures": found["failures"]}, indent=1))
    sys.exit(bool(found["failures"]))
