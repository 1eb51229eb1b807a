"""Damage to a run folder or a checkpoint: a run goes on to the same end, or says in one line why it does not.

The folder is that of a run of four rollouts that has lost its last one: checkpoints of rollouts 2 and 3. What a file is
called and holds is the trainer's own: every file is damaged in every way, and every value of its JSON is changed.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlstab.errors import CheckpointError, ConfigError
from tests.train.forks import Forks
from tests.train.runs import checkpoints, file_of, forget_newest, go, left, long, number

SETTINGS: dict[str, Any] = {"tracking__checkpoint_every": 1, "tracking__keep_checkpoints": 2, "evaluation__every": 0}


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


def ends_in_zeros(path: Path) -> None:
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
    "is cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "ends in zeros": ends_in_zeros,
    "has a flipped bit": flip,
    "is a folder": is_folder,
    "is a pipe": is_pipe,
    "is a link to nothing": lambda path: (remove(path), path.symlink_to("nowhere")),
}

#: Instead of a value of JSON: of another kind, out of its range, deep, long.
OTHERS: list[Any] = [None, True, -1, 3, 1e300, "", "x" * 16, [], {}, [[]], "[" * 2000]


def values(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in JSON."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from values(value, (*place, key))


def change(path: Path, place: tuple[Any, ...], to: Any) -> None:
    data = json.loads(path.read_text())
    inside = data
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = to
    path.write_text(json.dumps(data))


class Outcomes:
    """What came of runs that were damaged and continued."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self.whole = whole
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def goes_on(self, out: Path, what: str) -> str:
        """Continue a run; ``same`` end, or ``refused`` in one line, or what was wrong."""
        (out / "notes.txt").write_text("mine")
        kept = {path: number(path) for path in checkpoints(out)}
        try:
            go(long(out, **SETTINGS), resume=True)
        except (CheckpointError, ConfigError) as error:
            came = "refused" if "\n" not in str(error) else f"many lines: {error}"
            if not all(os.path.lexists(path) for path in kept):
                came = "refused, and checkpoints are gone"
        except BaseException as error:
            came = f"{type(error).__name__}: {error}"
        else:
            # an earlier checkpoint may be the damaged one still
            wrong = differences_of_end(out, self.whole)
            came = "same" if not wrong else f"another run: {wrong}"
        if (out / "notes.txt").read_text() != "mine":
            came = "a file of the user is gone"
        self.counts[came] += 1
        if came not in ("same", "refused"):
            self.wrong.append(f"{what}: {came}")
        return came


def differences_of_end(out: Path, whole: dict[str, Any]) -> list[str]:
    """As :func:`differences`, of the last checkpoint and the last record; those before may be what is damaged."""
    mine = left(out)
    last = max(name.partition("/")[0] for name in whole if name[0].isdigit())
    wrong = [name for name in whole if name.startswith(f"{last}/") and mine.get(name) != whole[name]]
    return wrong + ["metrics"] * (mine["metrics"][-1:] != whole["metrics"][-1:])


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that has lost its last rollout, and what the whole one leaves."""
    out = tmp_path_factory.mktemp("cut") / "run"
    go(long(out, **{**SETTINGS, "tracking__keep_checkpoints": 3}))
    whole = left(out)
    forget_newest(out)
    assert [number(path) for path in checkpoints(out)] == [2, 3]
    return out, whole


def copied(cut: tuple[Path, dict[str, Any]], to: Path) -> Path:
    remove(to)
    shutil.copytree(cut[0], to, symlinks=True)
    return to


def names(out: Path) -> list[str]:
    """Files of a run folder and of its newest checkpoint."""
    newest = checkpoints(out)[-1]
    there = [path for path in (*out.iterdir(), *newest.rglob("*")) if path.is_file() and "lock" not in path.name]
    return sorted(str(path.relative_to(out)) for path in there)


@pytest.mark.parametrize("share", [0.06, pytest.param(1.0, marks=pytest.mark.slow)])
def test_damaged_files(share: float, cut: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    outcomes, chance = Outcomes(cut[1]), random.Random(1)
    for name in names(cut[0]):
        for how, do in HOW.items():
            if chance.random() > share:
                continue
            out = copied(cut, tmp_path / "run")
            do(out / name)
            came = outcomes.goes_on(out, f"{name} {how}")
            if (
                name.startswith("checkpoints/")
                and name.endswith("model.safetensors")
                and how not in ("is a link to nothing", "is a folder", "is a pipe")
            ):
                assert came == "same", (
                    f"{name} {how}: the checkpoint before is whole, and the run does not go on: {came}"
                )
    print(f"damaged files: {dict(outcomes.counts)}")
    assert outcomes.wrong == []
    assert outcomes.counts["same"] >= 1
    assert sum(outcomes.counts.values()) >= share * 40


@pytest.mark.parametrize("count", [6, pytest.param(400, marks=pytest.mark.slow)])
def test_mutated_json(count: int, cut: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    outcomes, chance = Outcomes(cut[1]), random.Random(2)
    places = []
    for name in names(cut[0]):
        if name.endswith(".json"):
            places += [(name, place) for place in values(json.loads((cut[0] / name).read_text()))]
    assert len(places) > 50
    for name, place in chance.sample(places, min(count, len(places))):
        out = copied(cut, tmp_path / "run")
        change(out / name, place, to := chance.choice(OTHERS))
        outcomes.goes_on(out, f"{name} {place} = {str(to)[:20]!r}")
    print(f"mutated values: {dict(outcomes.counts)} of {len(places)}")
    assert outcomes.wrong == []


def both(do: Callable[[Path], object]) -> Callable[[Path], None]:
    def each(out: Path) -> None:
        for path in checkpoints(out):
            do(path)

    return each


def damaged_weights(path: Path) -> None:
    flip(path / "model.safetensors")


def renamed(out: Path) -> None:
    newest = checkpoints(out)[-1]
    newest.rename(newest.with_name(newest.name.replace("3", "9")))


def linked(out: Path) -> None:
    newest = checkpoints(out)[-1]
    newest.rename(out / "elsewhere")
    newest.symlink_to(out / "elsewhere")


def of_another_run(out: Path) -> None:
    """A later checkpoint, which a run with another seed wrote."""
    other = out.parent / "other"
    remove(other)
    go(long(other, **SETTINGS, seed=5))
    newest = checkpoints(other)[-1]
    shutil.copytree(newest, out / "checkpoints" / newest.name)


#: What is damaged and how, and whether there is a checkpoint from which the run has to go on.
WHOLE: dict[str, tuple[Callable[[Path], object], bool]] = {
    "the newest checkpoint is gone": (forget_newest, True),
    "the newest checkpoint is empty": (lambda out: is_folder(checkpoints(out)[-1]), True),
    "the newest checkpoint is a file": (lambda out: (remove(last := checkpoints(out)[-1]), last.write_text("")), False),
    "the newest checkpoint is a link to where it was moved": (linked, True),
    "the newest checkpoint has another number": (renamed, False),
    "both checkpoints are empty": (both(is_folder), False),
    "both checkpoints are gone": (both(remove), False),
    "both have a flipped bit": (both(damaged_weights), False),
    "the folder of checkpoints is gone": (lambda out: remove(out / "checkpoints"), False),
    "the folder of checkpoints is a file": (
        lambda out: (remove(out / "checkpoints"), (out / "checkpoints").touch()),
        False,
    ),
    "a later checkpoint of another run": (of_another_run, False),
}


def test_damaged_folders(cut: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    outcomes = Outcomes(cut[1])
    for what, (do, goes_on) in WHOLE.items():
        out = copied(cut, tmp_path / "run")
        do(out)
        came = outcomes.goes_on(out, what)
        assert not goes_on or came == "same", f"{what}: {came}"
    print(f"damaged folders: {dict(outcomes.counts)}")
    assert outcomes.wrong == []
    assert sum(outcomes.counts.values()) == len(WHOLE)


# -- pickles -----------------------------------------------------------------------------------------------------------


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


#: What accelerate, transformers and torch call files that they pickle.
PICKLES = (
    *("pytorch_model.bin", "adapter_model.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "sampler.bin"),
    *("training_args.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", ".metadata", "rng_state.pth"),
)


def test_no_pickle_of_a_checkpoint_runs_code(cut: tuple[Path, dict[str, Any]], forks: Forks, tmp_path: Path) -> None:
    """Beside its files, in place of each, and no class or function is ever named by a pickle that is read."""
    ran, tried = tmp_path / "ran", 0
    payload = pickle.dumps(Payload(ran))
    assert not ran.exists()
    newest = checkpoints(cut[0])[-1]
    own = [path.relative_to(newest) for path in newest.rglob("*") if path.is_file() and path.suffix != ".json"]
    places = [("beside", None), *(("in place of", path) for path in own)]
    for how, place in places:
        out = copied(cut, tmp_path / "run")
        for path in checkpoints(out):
            for name in PICKLES if place is None else ():
                if not (path / name).exists():
                    (path / name).write_bytes(payload)
                    tried += 1
            if place is not None:
                (path / place).write_bytes(payload)
                tried += 1
        if place is None:
            (told,) = forks.does(file_of(long(out, **SETTINGS)), 1, "unpickled").counted
            assert told["named"] == [], "a pickle named them"
        else:
            with pytest.raises((CheckpointError, ConfigError)):
                go(long(out, **SETTINGS), resume=True)
        assert not ran.exists(), f"{how} {place}"
    print(f"{tried} pickles, none ran")
    assert tried >= 20
