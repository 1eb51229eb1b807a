"""Bad input by command and by kind: one error that ends with what to do, and none of the user's files is changed.

Each row is one kind of input to one command, run in this process in a folder of its own.
"""

import faulthandler
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import traceback
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import rlstab
from rlstab import errors
from rlstab.cli import main
from rlstab.visible import LINE

#: Seconds after which a row hangs, on a machine that is busy with something else.
HANGS = 120

MODEL = Path(rlstab.__file__).parent / "data" / "countdown-tiny"
WEIGHTS = load((MODEL / "model.safetensors").read_bytes())
ESC = "\x1b[31m\u202e\x07"
LONG = "n" * 300
BYTES = bytes(range(256))
DEEP = "[" * 100_000
DIGITS = "9" * 5000

#: A run that would be one of a second, for commands that read it and for those that end before it starts.
RUN = """\
objective: clip_higher
rollout: {prompts: 2, group: 2, max_new_tokens: 4}
optimisation: {rollouts: 1}
evaluation: {every: 0}
tracking: {out: out, checkpoint_every: 0}
"""
BENCH = """\
name: b
base: {task: {name: countdown}, optimisation: {rollouts: 1}}
methods: {grpo: token_mean, s2t: s2t}
seeds: 2
out: out
"""
Text = str | bytes
Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """One kind of input to a command: text or bytes by path, and what no file can say."""

    command: tuple[str, ...]
    kind: str
    files: Mapping[str, Text] = field(default_factory=dict)
    prepare: Prepare = lambda folder: None
    names: str = ""  #: in the error


ROWS: list[Row] = []


def row(command: str | list[str], kind: str = "", **options: Any) -> None:
    words = tuple(command.split() if isinstance(command, str) else command)
    ROWS.append(Row(words, kind or " ".join(words[1:]), **options))


def rows(command: str, arguments: list[str], **options: Any) -> None:
    """A row for each of the last arguments of a command."""
    for argument in arguments:
        row([*command.split(), *argument.split()], **options)


# -- files ------------------------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{inner}: &{inner} [{', '.join([f'*{outer}'] * 9)}]\n" for outer, inner in zip("abcdefgh", "bcdefghi", strict=True)
)
#: What is wrong with a YAML file, whatever it is for. All commands read it with the same parser: what it lets through
#: comes first.
TEXTS: dict[str, Text] = {
    "is empty": "",
    "is a number": "5\n",
    "is a list of numbers": "[1, 2]\n",
    "has an unknown section": "objective: s2t\nzzz: 1\n",
    "has a section in a lone surrogate": 'objective: s2t\n"\\ud800": 1\n',
    "steers a terminal": f'objective: s2t\n"\\e[31m\\u202E": {json.dumps("<b>")}\n',
    "is binary": BYTES,
    "is of NULs": b"\0" * 100,
    "is UTF-16": "objective: s2t\n".encode("utf-16"),
    "has an open quote": 'objective: "s2t\n',
    "has binary data": "objective: !!binary aGVsbG8=\n",
    "has an alias of itself": "objective: &a [*a]\n",
    "has aliases of aliases": LAUGHS,
    "is nested deeply": "objective: " + "[" * 1500 + "]" * 1500,
    "has 5,000 digits": f"objective: s2t\nseed: {DIGITS}\n",
    "has null as a key": "objective: s2t\nnull: 3\n",
    "merges something that is not a mapping": "objective: s2t\n<<: 5\n",
}
#: Paths at which no file can be read: what to write, and how it comes to be.
PATHS: dict[str, tuple[str, Prepare]] = {
    "is missing": ("f.yaml", lambda folder: None),
    "is a folder": ("f.yaml", lambda folder: (folder / "f.yaml").mkdir()),
    "is a link to itself": ("f.yaml", lambda folder: (folder / "f.yaml").symlink_to("f.yaml")),
    "is below a file": ("x/f.yaml", lambda folder: (folder / "x").write_text("")),
    "has a name that is too long": (f"{LONG}.yaml", lambda folder: None),
    "has a NUL in its name": ("a\0b.yaml", lambda folder: None),
    "has an empty name": ("", lambda folder: None),
    "has a name that steers a terminal": (f"{ESC}.yaml", lambda folder: None),
    "has a name that is no UTF-8": (os.fsdecode(b"\xff\xfe.yaml"), lambda folder: None),
    "is an endless device": ("/dev/zero", lambda folder: None),
    "is a pipe": ("f.yaml", lambda folder: os.mkfifo(folder / "f.yaml")),
    "is a socket": ("s", lambda folder: os.mknod(folder / "s", stat.S_IFSOCK)),
    "is the memory of the machine": ("/proc/kcore", lambda folder: None),
}
for command in ("check", "explain", "train", "bench"):
    for kind, text in [*TEXTS.items()][: None if command == "check" else 6]:
        row([command, "f.yaml"], f"the file {kind}", files={"f.yaml": text})
    for kind, (path, prepare) in PATHS.items():
        row([command, path], f"the file {kind}", prepare=prepare)

# -- settings ---------------------------------------------------------------------------------------------------------


def linked(folder: Path) -> None:
    (folder / "round").symlink_to("round")
    (folder / "piped").mkdir()
    os.mkfifo(folder / "piped" / "metrics.jsonl")


OPTIONS = {"f.yaml": RUN, "full/mine.txt": "mine"}
SET = ["optimisation", "=", "optimisation..lr=1", "optimisation.lr={", "optimisation.lr=!!python/name:os.system x"]
SET += [f"optimisation.lr={ESC}", "optimisation.lr=\udcff", f"optimisation.rollouts={DIGITS}"]
SET += ["model.name=none/none/none", "model.name=f.yaml", 'model.name="a\\0b"', "reward=f.yaml:f", "reward=zzz"]
SET += ["model.adapter=./none", "model.adapter={targets: [zzz]}"]
SET += [f"tracking.out={out}" for out in ("f.yaml", "f.yaml/x", "/dev/full", '"a\\0b"', LONG, "round", "piped")]
SET += ["stages=[blockwise]", "rollout.max_new_tokens=100000"]
SET += ["task={name: jsonl, path: .}", "task={name: jsonl, path: f.yaml}", "task={name: dataset}"]
SET += [f"task={{name: dataset, path: ./full{more}}}" for more in ("", "/none", ", answer_pattern: '('", ", split: 5")]
for text in SET:
    row(["train", "f.yaml", "--set", text], files=OPTIONS, prepare=linked)
CHECKED = ["--host=zzz", "--host=", "--set=objective=zzz"]
rows("check f.yaml", CHECKED, files={"f.yaml": RUN})
row("check f.yaml", "a bench file", files={"f.yaml": BENCH})
for command, other in {"check": "bench_entropy", "explain": "zzz", "train": "zzz", "bench": "countdown"}.items():
    row([command, "--example", other], "an example that is none of this command")
rows("explain", ["--preset=zzz", "s2t,zzz", "s2t,,", ",", "sequence_mean,token_mean", "s2t,<b>", f"s2t,{ESC}"])
rows("explain", ["--preset=dapo --set objective=5", "none.py:M"])
rows("train f.yaml", ["--resume --overwrite", "--timeout=0", "--timeout=nan", "--timeout=inf"], files={"f.yaml": RUN})

# -- user code --------------------------------------------------------------------------------------------------------

CODE: dict[str, Text] = {
    "exits well": "import sys; sys.exit(0)\n",
    "has NULs": b"\0",
    "is nested deeply": "x = " + "(" * 10000 + ")" * 10000,
    "calls itself": "def f(): f()\nf()\n",
    "is empty": "",
    "raises an error whose text is a number": "class E(Exception):\n    def __str__(self): return 5\nraise E\n",
    "steers a terminal": f"raise ValueError({ESC!r})\n",
    "raises many lines": "raise ValueError('a\\n' * 100)\n",
    "has a lone surrogate": "raise ValueError('\\ud800')\n",
    "has a module of that name": "import os as M\n",
}
for kind, text in CODE.items():
    files = {"f.yaml": RUN, "m.py": text}
    row("check f.yaml --set objective=m.py:M", f"a file that {kind}", files=files)
HEAD = "class M:\n    name, keeps_special_tokens, workers = 'm', False, None\n"
SIZE = "    size = {'train': None, 'eval': 4}\n"
SCORE = "    def score(self, e, c): return 1\n"
REST = "    def example(self, s, i): pass\n" + SCORE
TASKS = {
    "lacks score": HEAD + SIZE + "    def example(self, s, i): pass\n",
    "exits when made": "class M:\n    def __init__(self): raise SystemExit(3)\n" + REST,
    "needs a setting": "class M:\n    def __init__(self, k): pass\n" + REST,
    "has no size": HEAD + REST,
    "has a text for its size": HEAD + "    size = 'x'\n" + REST,
    "has a size of 0": HEAD + "    size = {'train': 0, 'eval': 4}\n" + REST,
    "has a name of numbers": HEAD + SIZE + "    name = 5\n" + REST,
    "gives no example": HEAD + SIZE + REST,
    "exits for an example": HEAD + SIZE + "    def example(self, s, i): raise SystemExit(3)\n" + SCORE,
    "gives a text for an example": HEAD + SIZE + "    def example(self, s, i): return 'x'\n" + SCORE,
    "gives a prompt of bytes": "from rlstab.tasks.task import Example\n"
    + (HEAD + SIZE + "    def example(self, s, i): return Example(b'x', 'y')\n" + SCORE),
}
for kind, text in TASKS.items():
    files = {"f.yaml": RUN, "m.py": text}
    row(["train", "f.yaml", "--set", "task={name: 'm.py:M'}"], f"a task that {kind}", files=files)

# -- prompts ----------------------------------------------------------------------------------------------------------

LINES: dict[str, Text] = {
    "has 5,000 digits": f'{{"prompt": "1", "answer": {DIGITS}}}\n',
    "has a lone surrogate": '{"prompt": "\\ud800", "answer": "1"}\n' * 99,
    "has characters that the tokenizer has not": '{"prompt": "\u4e16<b>", "answer": "1"}\n' * 99,
    "has prompts longer than the context": (json.dumps({"prompt": "1+" * 9999, "answer": "1"}) + "\n") * 99,
    "has an empty prompt": '{"prompt": "", "answer": "1"}\n' * 99,
    "has keys that steer a terminal": json.dumps({ESC: 1}) + "\n",
}
for kind, text in LINES.items():
    files = {"f.yaml": RUN, "p.jsonl": text}
    row(["train", "f.yaml", "--set", "task={name: jsonl, path: p.jsonl}"], f"a file of prompts {kind}", files=files)
row(
    ["train", "f.yaml", "--set", "task={name: jsonl, path: pipe}"],
    "prompts from a pipe that is never written to",
    files={"f.yaml": RUN},
    prepare=lambda folder: os.mkfifo(folder / "pipe"),
)

# -- models -----------------------------------------------------------------------------------------------------------


def model(name: str, content: bytes | None) -> Prepare:
    """The shipped model with another file, and code that must not run."""

    def prepare(folder: Path) -> None:
        shutil.copytree(MODEL, folder / "model")
        (folder / "model" / "evil.py").write_text("raise SystemExit('it was run')")
        if content is None:
            (folder / "model" / name).unlink()
            torch.save(WEIGHTS, folder / "model" / "pytorch_model.bin")  # no pickle takes its place
        else:
            (folder / "model" / name).write_bytes(content)

    return prepare


DAMAGES = {"is missing": None, "is binary": BYTES, "is a list": b"[1]", "is nested deeply": DEEP.encode()}
DAMAGES |= {"is an empty object": b"{}", "says a huge size": b"\xff" * 8 + b"{}"}
MODELS = {
    (name, kind): content
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    for kind, content in DAMAGES.items()
    if name != "tokenizer_config.json" or kind not in ("is missing", "is an empty object")  # not needed
}
CONFIG = json.loads((MODEL / "config.json").read_text())
for key, change in [("hidden_size", -1), ("hidden_size", 48), ("vocab_size", 0), ("vocab_size", 10**13),
                    ("model_type", "zzz"), ("model_type", "vit"), ("model_type", 5),
                    ("num_attention_heads", 0)]:  # fmt: skip
    MODELS["config.json", f"{key} = {change!r}"] = json.dumps({**CONFIG, key: change}).encode()
OWN_CODE = {**CONFIG, "model_type": "x", "auto_map": {"AutoConfig": "evil.C"}}
MODELS["config.json", "names code of its own"] = json.dumps(OWN_CODE).encode()
LESS = {key: value for key, value in WEIGHTS.items() if key != "model.norm.weight"}
MODELS["model.safetensors", "lacks a tensor"] = save(LESS, {"format": "pt"})
MODELS["model.safetensors", "is a pickle"] = b"\x80\x04cposix\nsystem\n."
for (name, kind), content in MODELS.items():
    files = {"f.yaml": RUN, "out/notes.txt": "mine"}
    command = "train f.yaml --set model.name=./model"
    row(command, f"{name} of the model: {kind}", files=files, prepare=model(name, content), names="model")
LORA = '{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}'
for configuration in (None, "{}", "{", '{"peft_type": "IA3"}', '{"peft_type": "zzz"}', "[]", LORA):
    adapter = {} if configuration is None else {"a/adapter_config.json": configuration}
    files = {"f.yaml": RUN, "a/adapter_model.safetensors": b"\xff" * 99, **adapter}
    row("train f.yaml --set model.adapter=./a", f"an adapter with {configuration}", files=files)

# -- bench ------------------------------------------------------------------------------------------------------------

BENCHED = ["--only=zzz", "--only=zzz --dry-run", "--only=", "--only=["]
rows("bench f.yaml", [*BENCHED, "--out=f.yaml", "--out=f.yaml/x"], files={"f.yaml": BENCH})
BASE = "base: {task: {name: countdown}, optimisation: {rollouts: 1}}"
for kind, text in {
    "a run file": RUN,
    "a base that is itself": BENCH.replace(BASE, "base: f.yaml"),
    "a method without a name": BENCH.replace("s2t: s2t", '"": s2t'),
    "a method of 300 letters": BENCH.replace("s2t: s2t", f"{LONG}: s2t"),
    "a method that steers a terminal": BENCH.replace("s2t: s2t", '"\\e[31m": s2t'),
}.items():
    row("bench f.yaml --dry-run", kind, files={"f.yaml": text})
row("explain f.yaml", "a bench file", files={"f.yaml": BENCH})

# -- what reads runs --------------------------------------------------------------------------------------------------

TOKEN = {"rollout": 1, "sequence_id": 0, "tokens": ["a"]}
EXPORT = {"step": 1, "token_ids": [0, 1, 2], "loss_mask": [False, True, True], "advantages": [0.0, 1.0, 1.0]}
EXPORT |= {"trainer_logprobs": [-1.0] * 3, "inference_logprobs": [-1.0] * 3}
METRICS = "".join(
    json.dumps({"rollout": n, "optimizer_step": n, "reward/mean": 0.1 * n, "tokens/entropy": 1.0}) + "\n"
    for n in range(1, 6)
)
RUNS_FILES: dict[str, Text] = {
    "run/config.yaml": RUN.replace("clip_higher", "[{name: clip_higher}]"),
    "run/run.json": "{}",
    "run/metrics.jsonl": METRICS,
}
ODD_LINES: dict[str, Text] = {
    "is empty": "",
    "is binary": BYTES,
    "is numbers": "1\n2\n",
    "is nested deeply": DEEP,
    "has 5,000 digits": f'{{"rollout": {DIGITS}}}\n',
    "is lists": "[]\n[1]\n",
    "is empty objects": "{}\n{}\n",
    "has NaN for a number": '{"rollout": NaN, "tokens": NaN}\n',
    "is a number as text": '{"rollout": "1", "tokens": "abc"}\n',
    "has null everywhere": '{"rollout": null, "tokens": null}\n',
    "is one long line": b"x" * 3_000_000,
    "is UTF-16": "{}\n".encode("utf-16"),
    "is our line cut short": json.dumps(TOKEN)[:-3],
    "has tokens of numbers": json.dumps({**TOKEN, "tokens": [1, None, {}]}) + "\n",
    "is an export without ids": '{"token_ids": [], "logprobs": []}\n',
    "is an export of texts": '{"token_ids": ["x"]}\n',
}
for kind, text in ODD_LINES.items():
    row("look run", f"tokens.jsonl that {kind}", files={"run/tokens.jsonl": text, "run/config.yaml": RUN})
    for command in ("look", "report", "runs"):
        row([command, "t.jsonl"], f"a file that {kind}", files={"t.jsonl": text})
EMPTY_FOLDERS: list[dict[str, Text]] = [
    {"d/x.txt": "mine"},
    {"d/config.yaml": ""},
    {"d/config.yaml": RUN, "d/run.json": "{}"},
    {"d/config.yaml": RUN, "d/metrics.jsonl": b"\0" * 100},
]
for command in ("look", "report", "runs"):
    for kind, (path, prepare) in PATHS.items():
        row([*command.split(), path], f"the file {kind}", prepare=prepare)
    for contents in EMPTY_FOLDERS:
        row(f"{command} d", f"a folder of {[*contents]}", files=contents)
    row(
        f"{command} d",
        "a folder that is a link to its parent",
        prepare=lambda folder: ((folder / "d").mkdir(), (folder / "d" / "up").symlink_to(folder)),
    )
    row(f"{command} f.yaml", "a run file", files={"f.yaml": RUN})
    row(f"{command} run none", "a good run and one that is missing", files=RUNS_FILES)
TRACE = {"t.jsonl": json.dumps(EXPORT) + "\n"}
rows(
    "look t.jsonl", ["--tokenizer=none", "--tokenizer=.", "--methods=zzz", "--fail-on=zzz", "--model=none"], files=TRACE
)
OUTS = ["--out=/dev/full", "--out=.", "--out=t.jsonl/x", "--out=", "--out=f.txt"]
rows("look t.jsonl", OUTS, files={**TRACE, "f.txt": "mine"})
row("look t.jsonl --out t.jsonl", "a page onto the file that it is of", files=TRACE, names="t.jsonl")
row("look t.jsonl", "another page next to the file", files={**TRACE, "t.look.html": "mine"}, names="t.look.html")
for option in [
    *("--out=/dev/full", "--out=f.txt", "--out=f.txt/x", "--out=round", f"--out={LONG}"),
    *("--export=/dev/full", "--export=.", "--markdown=/dev/full", "--markdown=."),
    *("--metric=zzz", "--metric=", "--baseline=zzz"),
]:
    row(["report", "run", option], files={**RUNS_FILES, "f.txt": "mine"}, prepare=linked)
row("report run --export run/metrics.jsonl", files=RUNS_FILES, names="metrics.jsonl")
row("report run --markdown README.md", files={**RUNS_FILES, "README.md": "# Mine"}, names="README.md")
for name in ("report.md", "report.html"):
    row("report run --out d", f"a folder with another {name}", files={**RUNS_FILES, f"d/{name}": "mine"}, names=name)
row("report run/metrics.jsonl", "metrics for results", files=RUNS_FILES)
STATES: list[Text] = ["[]", '{"log_history": [', '{"a": 1}', '{"log_history": [{"loss": 1.0, "step": 1}]}']
STATES += ['{"log_history": 5}', '{"log_history": [1, 2]}', BYTES, DEEP]
STATES += [
    f'{{"log_history": [{{"step": {step}, "reward": {reward}}}]}}'
    for step, reward in [('"a"', 1), (1, "{}"), ("NaN", "NaN"), ("1e999", 1)]
]
TABLES: list[Text] = [b"\0" * 100, BYTES, 'Step,"reward\n1,2\n', "Step,reward\n1," + "9" * 1_000_000 + "\n"]
TABLES += ["reward,entropy\n1,2\n", "Step,loss\n1,2\n", "Step,reward\na,b\n", "Step,Step,loss\n1,1,2\n"]
TABLES += ["Step,reward\n1,2".encode("utf-16")[:-1]]
LOGS: dict[str, list[Text]] = {
    "trainer_state.json": STATES,
    "a.csv": TABLES,
    "a.jsonl": [
        '{"step": "one", "reward": 1}\n',
        '{"step": 1, "data": [1]}\n',
        f'{{"step": {DIGITS[:400]}, "zzz": 1}}\n',
    ],
    "a.parquet": [b"PAR1" + bytes(99) + b"PAR1"],
    "a.png": [b"\x89PNG\r\n\x1a\n" + bytes(99)],
}
for name, texts in LOGS.items():
    for text in texts:
        row(["look", name], f"{name} with {text[:60]!r}", files={name: text})
row("look trainer_state.json --json", "JSON of nothing", files={"trainer_state.json": "[]"})

# -- what is written --------------------------------------------------------------------------------------------------

rows("init", ["zzz", "../zzz", "a\0b"])
row(["init", ""], "a recipe without a name")
row(["init", "dapo", "--out", ""], "--out without a name")
row("init dapo", "the file of the recipe exists", files={"dapo.yaml": "mine"})
row("init dapo --out f.txt", "--out exists", files={"f.txt": "mine"})
row("schema --out notes.json", "--out is another file", files={"notes.json": '{"a": 1}'}, names="notes.json")
for command in ("init dapo", "schema"):
    for out in ("/dev/full", "/proc/none", ".", "none/x", "f.txt/x", "a\0b", LONG, "round"):
        row([*command.split(), "--out", out], files={"f.txt": "mine"}, prepare=linked)


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Kind and content of each path in a folder, less what Python writes next to a user's module."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    ordinary = {path for path in paths if path.is_file() and not path.is_symlink()}
    return {path: (path.lstat().st_mode, path.read_bytes() if path in ordinary else b"") for path in paths}


def faults(case: Row, folder: Path) -> list[str]:
    """What a row does that it must not, and what it printed."""
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    case.prepare(folder)
    before, here = snapshot(folder), Path.cwd()
    out, err = io.StringIO(), io.StringIO()
    wrong = []
    os.chdir(folder)
    faulthandler.dump_traceback_later(HANGS, exit=True)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            if (code := main([*case.command])) != 2:
                wrong.append(f"ended with {code}")
    except BaseException as error:  # what a user would see as a traceback
        wrong.append(f"traceback: {type(error).__name__}: {error} @ {traceback.extract_tb(error.__traceback__)[-3:]}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.chdir(here)
    said = err.getvalue()
    named = [name for name in re.findall(r"(?m)^(\w+): ", said) if hasattr(errors, name) or name.endswith("Error")]
    if len(named) != 1 or "Traceback" in said + out.getvalue():
        wrong.append("is not one error")
    if case.names not in said:
        wrong.append(f"does not name {case.names}")
    if (longest := max(map(len, said.splitlines()), default=0)) > LINE:
        wrong.append(f"has a line of {longest} characters")
    printed = set(said + out.getvalue()) - {"\n", "\t"}
    if acts := {character for character in printed if unicodedata.category(character) in ("Cc", "Cf", "Cs")}:
        wrong.append(f"would steer a terminal: {acts}")
    if changed := {path for path, _ in before.items() ^ snapshot(folder).items()}:
        wrong.append(f"changed {changed}")
    return [*wrong, said] if wrong else []


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", sorted({case.command[0] for case in ROWS}))
def test_bad_input(command: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for all kinds of a command: a test of its own for each would take longer than what it tests."""
    monkeypatch.setattr("rlstab.hub.why_offline", lambda: "nobody answers")  # so that no row depends on a network
    wrong = {}
    for number, case in enumerate([case for case in ROWS if case.command[0] == command][::every]):
        (tmp_path / str(number)).mkdir()
        wrong[case.command, case.kind] = faults(case, tmp_path / str(number))
    assert {case: told for case, told in wrong.items() if told} == {}


USAGE = ["zzz", "--zzz", "check a b", "check f.yaml --example x"]
USAGE += ["train --timeout x f.yaml", "bench --workers 1.5 f.yaml", "look --zzz"]
USAGE += ["schema --zzz", "schema x", "doctor x", "init a b", "explain --preset a f.yaml"]
USAGE += ["probe --workers 0", "runs --zzz", "list --zzz"]


def test_a_wrong_use_is_told_by_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in USAGE:
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert (ended.value.code, capsys.readouterr().err.startswith("usage: ")) == (2, True), words


# -- the surroundings of a process ------------------------------------------------------------------------------------


#: How a process may be surrounded: a line of bash, the code with which it ends, what its one line of error names.
AROUND = [
    ("rlstab list > /dev/full", 2, ""),
    ("rlstab check f.yaml > /dev/full", 2, ""),
    ("PYTHONIOENCODING=ascii rlstab explain --preset dapo", 0, ""),
    ("COLUMNS=1 rlstab list", 0, ""),
    ("COLUMNS=wide rlstab list", 0, ""),
    ("HOME=/nowhere rlstab check f.yaml", 0, ""),
    ("TMPDIR=/nowhere rlstab check f.yaml", 0, ""),
    ("env TERM=zzz LC_ALL=zzz rlstab list", 0, ""),
    ("rlstab check f.yaml >&- 2>&-", 0, ""),
    ("rlstab schema | true; exit ${PIPESTATUS[0]}", 128 + signal.SIGPIPE, ""),
    ("rlstab train <(sleep 20; echo 'objective: zzz')", 2, "not a regular file"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "code", "named"), AROUND, ids=[line for line, *_ in AROUND])
def test_the_surroundings_of_a_process(line: str, code: int, named: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(RUN)
    env = {**os.environ, "PYTHONPATH": str(Path(rlstab.__file__).parents[1])}
    command = ["bash", "-c", line.replace("rlstab", f"{sys.executable} -m rlstab")]
    ran = subprocess.run(command, cwd=tmp_path, env=env, timeout=300, capture_output=True, text=True)
    assert (ran.returncode, "Traceback" in ran.stderr) == (code, False), ran.stderr
    assert ran.stderr.count("\n") == (code == 2)
    assert named in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["f.yaml"]
