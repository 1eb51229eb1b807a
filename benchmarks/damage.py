"""Commands on damaged files and extreme numbers: how many end in a traceback, and how many wait.

    python -m benchmarks damage --commands 2000 --seed 0

A run of a second is trained, with a dump, and its files lie next to logs and dumps of other trainers. Each command gets
a copy in which one file is damaged: cut, garbled, with extreme or mistyped values, or replaced by a pipe or a link. It
has to end with 0 or with one error (2), within a time.
"""

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlstab.cli import main as rlstab

#: Seconds after which a command waits.
WAITS = 120

RUN = """\
objective: [clip_higher, s2t]
rollout: {prompts: 8, group: 8, max_new_tokens: 16}
optimisation: {rollouts: 2}
evaluation: {every: 0}
tracking: {out: run, checkpoint_every: 1, dump_every: 1, samples: 2}
"""
#: In place of a value of JSON or of a cell.
EXTREMES = (
    *("1e308", "-1e308", "1e21", "1e-320", "1e999", "NaN", "-Infinity", str(2**63), str(-(2**63) - 1), "9" * 5000, "0"),
    *(
        '"NaN"',
        '"1e400"',
        "null",
        "true",
        "[]",
        "{}",
        '""',
        '"\\ud800"',
        '"\\u001b[31m"',
        "[" * 2000,
        '{"a":' * 99,
        "-1",
    ),
)
#: Each command with the files of which one is damaged, and how often it is chosen: what takes a second is rare.
COMMANDS: tuple[tuple[int, str, str], ...] = (
    (30, "look {file} --json", "log.jsonl trainer_state.json log.csv verl.log"),
    (10, "look run --json", "run/metrics.jsonl run/config.yaml run/run.json"),
    (8, "look --json results.jsonl", "results.jsonl"),
    (8, "runs run", "run/metrics.jsonl run/config.yaml run/run.json run/.lock"),
    (27, "look run/dump --methods token_mean --out page.html", "run/dump/*"),
    (13, "look foreign/{host} --methods token_mean --out page.html", "foreign/*/**/*"),
    (6, "check run.yaml", "run.yaml"),
    (6, "explain run.yaml", "run.yaml"),
    (1, "report results.jsonl --out page", "results.jsonl"),
    (1, "report run --out page", "run/metrics.jsonl run/config.yaml run/run.json run/samples.jsonl"),
    (3, "train run.yaml --resume", "run/**/*"),
)


class Waits(BaseException):
    """A command took too long."""


def prepare(folder: Path) -> None:
    """The whole files."""
    (folder / "run.yaml").write_text(RUN)
    rows = [{"step": step, "reward": 0.5, "entropy": 0.4, "grad_norm": 0.3} for step in range(1, 41)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40, "log_history": rows}))
    table = "step,reward,grad_norm\n" + "".join(f"{row['step']},{row['reward']},{row['grad_norm']}\n" for row in rows)
    (folder / "log.csv").write_text(table)
    console = "".join(f"step:{row['step']} - critic/score/mean:0.5 - actor/grad_norm:np.float64(0.3)\n" for row in rows)
    (folder / "verl.log").write_text(console)
    for command in ("train run.yaml", "report run --out whole --export results.jsonl"):
        if (code := _run(folder, command.split())) != "0":
            raise SystemExit(f"{command}: {code}")
    dumps = Path(__file__).parents[1] / "tests" / "replay" / "data"
    shutil.copytree(dumps, folder / "foreign", ignore=lambda _, names: [name for name in names if name.endswith(".py")])


def damage(path: Path, chance: random.Random) -> str:
    """Damage one file; gives what was done to it."""
    ways: dict[str, Callable[[], object]] = {}
    content = path.read_bytes()
    lines = content.split(b"\n")
    index = chance.randrange(len(lines))
    position = chance.randrange(len(content) + 1)

    def put(data: bytes) -> Callable[[], object]:
        return lambda: path.write_bytes(data)

    def instead(make: Callable[[Path], object]) -> Callable[[], object]:
        return lambda: (path.unlink(), make(path))

    ways["cut"] = put(content[:position])
    ways["garbled"] = put(content[:position] + chance.randbytes(chance.choice((1, 8, 300))) + content[position + 8 :])
    ways["line deleted"] = put(b"\n".join(lines[:index] + lines[index + chance.randint(1, 9) :]))
    ways["line repeated"] = put(b"\n".join([*lines, *lines[index:]]))
    ways["byte order mark"] = put(b"\xef\xbb\xbf" + content)
    ways["UTF-16"] = put(content.decode("latin-1").encode("utf-16"))
    ways["pipe"] = instead(os.mkfifo)
    ways["device"] = instead(lambda path: path.symlink_to(chance.choice(("/dev/zero", "/dev/stdin", path.name))))
    ways["folder"] = instead(os.mkdir)
    values = [*re.finditer(rb'(?<=[:,\[ ])-?(?:\d[\d.e+-]*|"[^"\n]*"|true|null|NaN)(?=[,\]}\s])', content)]
    for extreme in map(str.encode, chance.choices(EXTREMES, k=12) if values else ()):
        found = chance.choice(values)
        ways[f"{extreme[:12].decode()} for a value"] = put(content[: found.start()] + extreme + content[found.end() :])
    kind = chance.choice([*ways])
    ways[kind]()
    return kind


def _run(folder: Path, words: list[str]) -> str:
    """Run a command in a folder: its exit code, ``waits`` or the traceback's end."""

    def stop(*_: object) -> None:
        raise Waits

    here = Path.cwd()
    signal.signal(signal.SIGALRM, stop)
    os.chdir(folder)
    signal.alarm(WAITS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return str(rlstab(words))
    except Waits:
        return "waits"
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/rlstab/" in frame.filename]
        where = f"{frames[-1].filename.rpartition('/rlstab/')[2]}:{frames[-1].lineno}" if frames else "?"
        return f"{type(error).__name__} at {where}: {str(error)[:80]}"
    finally:
        signal.alarm(0)
        os.chdir(here)


def main() -> None:
    """Run the campaign and print its table; exit 1 where a command ended in a traceback or waited."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    counts: Counter[tuple[str, str]] = Counter()
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / "whole"
        whole.mkdir()
        prepare(whole)
        for number in range(options.commands):
            folder = Path(temporary) / str(number)
            shutil.copytree(whole, folder, symlinks=True)
            _, command, patterns = chance.choices(COMMANDS, [weight for weight, *_ in COMMANDS])[0]
            found = sorted(path for pattern in patterns.split() for path in folder.glob(pattern) if path.is_file())
            path = chance.choice(found)
            kind = damage(path, chance)
            name = str(path.relative_to(folder))
            words = command.format(file=name, host=name.split("/")[1] if "/" in name else "")
            ended = _run(folder, words.split())
            told = ended if ended in ("0", "2", "waits") else "traceback"
            counts[command.split()[0], told] += 1
            if told not in ("0", "2"):
                print(f"{number}: {words}, {name}: {kind}: {ended}", file=sys.stderr, flush=True)
                wrong[f"{words}, {name}: {kind}: {ended}"] += 1
            shutil.rmtree(folder, ignore_errors=True)
    table = Table("command", "ran", "well", "one error", "tracebacks", "waits", title=f"seed {options.seed}")
    for command in sorted({command for command, _ in counts}):
        row = [counts[command, told] for told in ("0", "2", "traceback", "waits")]
        table.add_row(command, *map(str, (sum(row), *row)))
    console = Console(width=200)
    console.print(table)
    for case, count in wrong.most_common():
        console.print(f"{count} x {case}", markup=False, highlight=False)
    raise SystemExit(bool(wrong))
