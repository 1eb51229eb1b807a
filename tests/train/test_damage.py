"""Damage to a run folder or a checkpoint: a run continues to the same end, or says in one line why it does not.

What a file is called and holds is the trainer's own: each is damaged in every way, and every value of its JSON changed.
"""

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
    "is a pipe": lambda path: (remove(path), os.mkfifo(path)),
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


Cut = tuple[Path, dict[str, Any]]
Damages = dict[str, Callable[[Path], object]]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """A run that has lost its fourth and last rollout, and what the whole one leaves."""
    out = tmp_path_factory.mktemp("cut") / "run"
    go(long(out, **{**SETTINGS, "tracking__keep_checkpoints": 3}))
    whole = left(out)
    forget_newest(out)
    assert [number(path) for path in checkpoints(out)] == [2, 3]
    return out, whole


def copied(cut: Cut, to: Path) -> Path:
    remove(to)
    shutil.copytree(cut[0], to, symlinks=True)
    return to


def continued(out: Path, whole: dict[str, Any]) -> str:
    """What comes of a run that was damaged: the ``same`` end, ``refused`` in one line, or what was wrong."""
    (out / "notes.txt").write_text("mine")
    kept = checkpoints(out)
    try:
        go(long(out, **SETTINGS), resume=True)
    except (CheckpointError, ConfigError) as error:
        whole_line = "\n" not in str(error) and all(os.path.lexists(path) for path in kept)
        came = "refused" if whole_line else f"many lines, or checkpoints are gone: {error}"
    except BaseException as error:
        came = f"{type(error).__name__}: {error}"
    else:
        # the last checkpoint and the last record: those before may be what is damaged
        mine, last = left(out), max(name.partition("/")[0] for name in whole if name[0].isdigit())
        wrong = [name for name in whole if name.startswith(f"{last}/") and mine.get(name) != whole[name]]
        wrong += ["metrics"] * (mine["metrics"][-1:] != whole["metrics"][-1:])
        came = f"another run: {wrong}" if wrong else "same"
    return came if (out / "notes.txt").read_text() == "mine" else "a file of the user is gone"


def try_each(damages: Damages, cut: Cut, out: Path) -> dict[str, str]:
    """Continue the run after each damage; what came of each is ``same`` or ``refused``."""
    came = {}
    for what, damage in damages.items():
        damage(copied(cut, out))
        came[what] = continued(out, cut[1])
    print(f"{Counter(came.values())} of {len(came)} damages")
    assert {what: text for what, text in came.items() if text not in ("same", "refused")} == {}
    return came


def names(out: Path) -> list[str]:
    """Files of a run folder and of its newest checkpoint."""
    newest = checkpoints(out)[-1]
    there = [path for path in (*out.iterdir(), *newest.rglob("*")) if path.is_file() and "lock" not in path.name]
    return sorted(str(path.relative_to(out)) for path in there)


@pytest.mark.parametrize("share", [0.02, pytest.param(1.0, marks=pytest.mark.slow)])
def test_damaged_files(share: float, cut: Cut, tmp_path: Path) -> None:
    every = [(name, how) for name in names(cut[0]) for how in HOW]
    some = random.Random(1).sample(every, round(share * len(every)))
    damages: Damages = {f"{name} {how}": lambda out, name=name, how=how: HOW[how](out / name) for name, how in some}
    came = try_each(damages, cut, tmp_path / "run")
    assert "same" in came.values()
    for what, text in came.items():  # the checkpoint before is whole, and files that can be read say so
        if "/model.safetensors " in what and not what.endswith(("link to nothing", "folder", "pipe")):
            assert text == "same", what


@pytest.mark.parametrize("count", [2, pytest.param(400, marks=pytest.mark.slow)])
def test_mutated_json(count: int, cut: Cut, tmp_path: Path) -> None:
    chance = random.Random(2)
    files = [name for name in names(cut[0]) if name.endswith(".json")]
    places = [(name, place) for name in files for place in values(json.loads((cut[0] / name).read_text()))]
    assert len(places) > 50
    damages: Damages = {}
    for name, place in chance.sample(places, min(count, len(places))):
        to = chance.choice(OTHERS)
        what = f"{name} {place} = {str(to)[:20]!r}"
        damages[what] = lambda out, name=name, place=place, to=to: change(out / name, place, to)
    try_each(damages, cut, tmp_path / "run")


def newest(do: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda out: do(checkpoints(out)[-1])


def is_file(path: Path) -> None:
    remove(path)
    path.touch()


def is_linked(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def of_another_run(out: Path) -> None:
    """A later checkpoint, which a run with another seed wrote."""
    go(long(out.parent / "other", **SETTINGS, seed=5))
    last = checkpoints(out.parent / "other")[-1]
    shutil.copytree(last, out / "checkpoints" / last.name)


#: What leaves a checkpoint from which the run has to go on.
GOES_ON: Damages = {
    "the newest checkpoint is gone": forget_newest,
    "the newest checkpoint is empty": newest(is_folder),
    "the newest checkpoint is a link to where it was moved": newest(is_linked),
}
STAYS: Damages = {
    "the newest checkpoint is a file": newest(is_file),
    "the newest checkpoint has another number": newest(lambda path: path.rename(path.with_name("rollout-000009"))),
    "both have a flipped bit": lambda out: [flip(path / "model.safetensors") for path in checkpoints(out)],
    "the folder of checkpoints is gone": lambda out: remove(out / "checkpoints"),
    "the folder of checkpoints is a file": lambda out: is_file(out / "checkpoints"),
    "a later checkpoint of another run": of_another_run,
}


#: One from which the run goes on, and one from which it does not; all with the slow tests.
SOME = ("the newest checkpoint is empty", "both have a flipped bit", "a later checkpoint of another run")


@pytest.mark.parametrize("kinds", [SOME, pytest.param((*GOES_ON, *STAYS), marks=pytest.mark.slow)], ids=len)
def test_damaged_folders(kinds: tuple[str, ...], cut: Cut, tmp_path: Path) -> None:
    came = try_each({what: (GOES_ON | STAYS)[what] for what in kinds}, cut, tmp_path / "run")
    assert {came[what] for what in GOES_ON if what in kinds} == {"same"}


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


#: What accelerate, transformers and torch call files that they pickle.
PICKLES = """pytorch_model.bin adapter_model.bin optimizer.bin optimizer.pt scheduler.bin sampler.bin training_args.bin
random_states_0.pkl custom_checkpoint_0.pkl .metadata rng_state.pth""".split()


def test_no_pickle_of_a_checkpoint_runs_code(cut: Cut, forks: Forks, tmp_path: Path) -> None:
    """Next to its files, in place of each, and no class or function is ever named by a pickle that is read."""
    ran, out = tmp_path / "ran", tmp_path / "run"
    payload = pickle.dumps(Payload(ran))
    for path in checkpoints(copied(cut, out)):
        for name in PICKLES:
            (path / name).write_bytes(payload)
    (named,) = forks.does(file_of(long(out, **SETTINGS)), 1, "unpickled").counted
    assert named == [], "a pickle named them"
    tensors = [path.name for path in checkpoints(cut[0])[-1].glob("*.safetensors")]
    assert len(tensors) == 3
    for name in tensors:
        for path in checkpoints(copied(cut, out)):
            (path / name).write_bytes(payload)
        with pytest.raises((CheckpointError, ConfigError)):
            go(long(out, **SETTINGS), resume=True)
    assert not ran.exists()
