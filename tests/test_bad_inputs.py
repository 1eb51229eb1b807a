"""Bad input by command and by kind: one error that ends with what to do, and nothing of the user's is changed.

Each row is one kind of input to one command, run in this process in a folder of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import rlstab
from rlstab.cli import main

#: Seconds after which a row is called hanging, on a machine that is busy with something else.
HANGS = 120

MODEL = Path(rlstab.__file__).parent / "data" / "countdown-tiny"
ESC = "\x1b[31m\u202e\x07"

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
Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """One kind.

    Attributes:
        command: the arguments; ``{}`` in one is the folder of the row.
        kind: what is wrong.
        files: text or bytes by path.
        prepare: does what files cannot say.
        says: is in the error.
        code: how the command ends.
        makes: paths below the folder that may be new.
    """

    command: tuple[str, ...]
    kind: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Prepare = lambda folder: None
    says: str = ""
    code: int = 2
    makes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.command[0]}: {self.kind}"

    def of(self, command: str) -> bool:
        """Whether it is a kind for this command, and none of the way in which commands are called."""
        return self.command[0] == command and not self.kind.startswith("usage")


ROWS: list[Row] = []


def row(command: str | list[str], kind: str, **options: Any) -> None:
    ROWS.append(Row(tuple(command.split() if isinstance(command, str) else command), kind, **options))


# -- files ------------------------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{inner}: &{inner} [{', '.join([f'*{outer}'] * 9)}]\n" for outer, inner in zip("abcdefgh", "bcdefghi", strict=True)
)
#: What is wrong with a YAML file, whatever it is for.
TEXTS: dict[str, tuple[str | bytes, str]] = {
    "is empty": ("", ""),
    "is a comment": ("# nothing\n", ""),
    "is binary": (bytes(range(256)), "not UTF-8 text"),
    "is of NULs": (b"\0" * 100, "is not allowed"),
    "is Latin-1": ("objective: s2t # \xe9\n".encode("latin-1"), "not UTF-8 text"),
    "is UTF-16": ("objective: s2t\n".encode("utf-16"), "not UTF-8 text"),
    "is cut within a character": ("objective: \u20ac".encode()[:-1], "not UTF-8 text"),
    "is a number": ("5\n", ""),
    "is a text": ("hello there\n", ""),
    "is a list of numbers": ("[1, 2]\n", ""),
    "is two documents": ("objective: s2t\n---\nobjective: s2t\n", "not valid YAML"),
    "is JSON cut short": ('{"objective": "s2t", "seed"', "not valid YAML"),
    "has a tab": ("objective:\n\t- s2t\n", "not valid YAML"),
    "has an open bracket": ("objective: [s2t\n", "not valid YAML"),
    "has an open quote": ('objective: "s2t\n', "not valid YAML"),
    "has a key twice": ("objective: s2t\nseed: 1\nseed: 2\n", "appears twice"),
    "has a tag of Python": ("objective: !!python/object/apply:os.system [touch bad]\n", "is refused"),
    "has a tag of its own": ("objective: !mine s2t\n", "is refused"),
    "has binary data": ("objective: !!binary aGVsbG8=\n", "is refused"),
    "has an alias of itself": ("objective: &a [*a]\n", "nested deeper"),
    "has aliases of aliases": (LAUGHS, "more than 100000 values"),
    "has an unknown alias": ("objective: *none\n", "not valid YAML"),
    "is nested deeply": ("objective: " + "[" * 1500 + "]" * 1500, "nested deeper"),
    "is nested without end": ("objective: " + "[" * 1500, "nested deeper"),
    "has 5,000 digits": (f"objective: s2t\nseed: 1{'0' * 5000}\n", "cannot be read as int"),
    "has a list as a key": ("objective: s2t\n[1, 2]: 3\n", "used as a key"),
    "has null as a key": ("objective: s2t\nnull: 3\n", "is not text"),
    "has a control character": ("objective: s2t\nmodel: {name: \x07}\n", "is not allowed"),
    "merges what is no mapping": ("objective: s2t\n<<: 5\n", "not valid YAML"),
    "has an unknown section": ("objective: s2t\nzzz: 1\n", "zzz"),
    "has a section in a lone surrogate": ('objective: s2t\n"\\ud800": 1\n', ""),
    "steers a terminal": (f'objective: s2t\n"\\e[31m\\u202E": {json.dumps("<b>")}\n', "unknown key"),
}


def loop(folder: Path) -> None:
    (folder / "f.yaml").symlink_to("f.yaml")


#: Paths at which no file can be read: what to write, how it comes to be, and what is said.
PATHS: dict[str, tuple[str, Prepare, str]] = {
    "is missing": ("f.yaml", lambda folder: None, "no such file"),
    "is a folder": ("f.yaml", lambda folder: (folder / "f.yaml").mkdir(), "is a directory"),
    "is a link to itself": ("f.yaml", loop, "too many levels"),
    "is a dangling link": ("f.yaml", lambda folder: (folder / "f.yaml").symlink_to("gone"), "no such file"),
    "is below a file": ("x/f.yaml", lambda folder: (folder / "x").write_text(""), "not a directory"),
    "has a name that is too long": (f"{'n' * 300}.yaml", lambda folder: None, "too long"),
    "has a NUL in its name": ("a\0b.yaml", lambda folder: None, "not a path"),
    "has an empty name": ("", lambda folder: None, ""),
    "has a name that steers a terminal": (f"{ESC}.yaml", lambda folder: None, "no such file"),
    "has a name that is no UTF-8": (os.fsdecode(b"\xff\xfe.yaml"), lambda folder: None, "no such file"),
    "is a device without end": ("/dev/zero", lambda folder: None, ""),
}
for command in ("check", "explain", "train", "bench"):
    for kind, (text, says) in TEXTS.items():
        if command != "check" and "nested" in kind:
            continue  # all read by the same parser, which takes its time with these
        row([command, "f.yaml"], f"the file {kind}", files={"f.yaml": text}, says="" if command == "bench" else says)
    for kind, (path, prepare, says) in PATHS.items():
        row([command, path], f"the file {kind}", prepare=prepare, says="" if command == "explain" else says)

# -- settings ---------------------------------------------------------------------------------------------------------

for text, kind in {
    "optimisation": "no value",
    "=": "no key",
    "optimisation..lr=1": "an empty part within",
    "optimisation.lr={": "YAML cut short",
    "optimisation.lr=!!python/name:os.system x": "a tag of Python",
    f"optimisation.lr={ESC}": "what steers a terminal",
    "optimisation.lr=\udcff": "a byte that is no UTF-8",
    f"optimisation.rollouts=1{'0' * 5000}": "5,000 digits",
    "task={name: jsonl, path: .}": "a folder of prompts",
    "task={name: jsonl, path: f.yaml}": "prompts in YAML",
    "model.name=none/none/none": "no name of a model",
    "model.name=f.yaml": "a file for a model",
    'model.name="a\\0b"': "a NUL in the name of a model",
    "model.adapter=./none": "an adapter that is missing",
    "model.adapter={targets: [zzz]}": "an adapter of a module that is not there",
    "reward=f.yaml:f": "a reward in YAML",
    "reward=zzz": "a reward of an unknown name",
    "tracking.out=f.yaml": "a run folder that is a file",
    "tracking.out=f.yaml/x": "a run folder below a file",
    "tracking.out=/dev/full": "a run folder that is a device",
    'tracking.out="a\\0b"': "a NUL in the run folder",
    f"tracking.out={'n' * 300}": "a run folder with a name that is too long",
    "tracking.out=round": "a run folder that is a link to itself",
}.items():
    ROWS.append(
        Row(
            ("train", "f.yaml", "--set", text),
            f"--set: {kind}",
            {"f.yaml": RUN, "full/mine.txt": "mine"},
            lambda folder: (folder / "round").symlink_to("round"),
        )
    )

# -- check ------------------------------------------------------------------------------------------------------------

for options, kind in {
    "--memory": "",
    "--memory=": "memory of nothing",
    "--memory=lots": "memory in words",
    "--memory=-5GB": "memory below 0",
    "--memory=0": "no memory",
    "--memory=nanGB": "memory that is no number",
    "--memory=1e3GB": "memory in exponents",
    "--memory=٢GB": "memory in other digits",
    f"--memory={'9' * 400}TB": "memory beyond every number",
    "--processes=0": "no processes",
    "--processes=-1": "processes below 0",
    "--host=zzz": "an unknown host",
    "--host=": "a host without a name",
    "--host=trl --memory=zzz": "a host, and memory in words",
    "--set=objective=zzz": "an unknown method",
}.items():
    if kind:
        row(["check", "f.yaml", *options.split()], kind, files={"f.yaml": RUN})
row("check f.yaml", "a bench file", files={"f.yaml": BENCH}, says="this is a bench file")
row("check --example zzz", "an unknown example")
row("check --example bench_smoke", "an example of another kind")
row("explain --example zzz", "an unknown example")
row("explain --preset zzz", "an unknown preset")
row("explain s2t,zzz", "an unknown method")
row("explain s2t,,", "names between commas that are none")
row("explain ,", "a comma")
row("explain sequence_mean,token_mean", "methods that exclude each other")
row(["explain", "s2t,<b>"], "HTML for a name")
row(["explain", f"s2t,{ESC}"], "a name that steers a terminal")
row("explain --preset dapo --set objective=5", "a setting of the wrong type")
row("explain none.py:M", "a class of a file that is missing")
row("train --example zzz", "an unknown example")
row("train f.yaml --resume --overwrite", "--resume and --overwrite", files={"f.yaml": RUN})
row("train f.yaml --timeout=0", "a timeout of 0", files={"f.yaml": RUN})
row("train f.yaml --timeout=inf", "a timeout without end", files={"f.yaml": RUN})
row(
    "train f.yaml --overwrite",
    "--overwrite of a folder that is no run's",
    makes=("out/.lock",),
    files={"f.yaml": RUN, "out/src/a.py": "mine", "out/config.yaml": "mine: 1\n"},
)
row(
    "train f.yaml --resume",
    "--resume of a folder that is no run's",
    makes=("out/.lock",),
    files={"f.yaml": RUN, "out/src/a.py": "mine", "out/config.yaml": "mine: 1\n"},
)
row(
    "train f.yaml",
    "a folder that is no run's",
    makes=("out/.lock",),
    files={"f.yaml": RUN, "out/config.yaml": "mine: 1\n"},
)
row(
    "train f.yaml --resume",
    "--resume of a run without a checkpoint",
    makes=("out/.lock",),
    files={"f.yaml": RUN, "out/config.yaml": RUN, "out/metrics.jsonl": "", "out/manifest.json": "{}"},
)
for kind, text in {"manifest.json": "[" * 10000, "config.yaml": LAUGHS, "run.json": "\0"}.items():
    files: dict[str, str | bytes] = {
        "config.yaml": RUN,
        "metrics.jsonl": "",
        "manifest.json": "{}",
        "run.json": "{}",
        kind: text,
    }
    row(
        "train f.yaml --resume",
        f"--resume with a damaged {kind}",
        makes=("out/.lock",),
        files={"f.yaml": RUN, **{f"out/{name}": one for name, one in files.items()}},
    )

# -- code of one's own ------------------------------------------------------------------------------------------------

CODE: dict[str, str | bytes] = {
    "raises": "raise ValueError('no')\n",
    "exits": "import sys; sys.exit(3)\n",
    "exits well": "import sys; sys.exit(0)\n",
    "is stopped": "raise KeyboardInterrupt\n",
    "imports what is missing": "import nowhere_at_all\n",
    "is no Python": "def (:\n",
    "is binary": bytes(range(256)),
    "has NULs": b"\0",
    "is nested deeply": "x = " + "(" * 10000 + ")" * 10000,
    "calls itself": "def f(): f()\nf()\n",
    "is empty": "",
    "has no such name": "class Other: pass\n",
    "has a number of that name": "M = 5\n",
    "has a module of that name": "import os as M\n",
    "has a class of no kind": "class M: pass\n",
    "raises what is no text": "class E(Exception):\n    def __str__(self): return 5\nraise E\n",
    "raises what raises": "class E(Exception):\n    def __str__(self): raise self\nraise E\n",
    "steers a terminal": f"raise ValueError({ESC!r})\n",
    "raises many lines": "raise ValueError('a\\n' * 100)\n",
    "closes the output": "import sys; sys.stdout.close if 0 else None\nraise ValueError\n",
    "has a lone surrogate": "raise ValueError('\\ud800')\n",
    "warns and raises": "import warnings; warnings.warn('x'); raise ValueError\n",
}
for kind, text in CODE.items():
    if kind != "is stopped":
        row(
            ["check", "f.yaml", "--set", "objective=m.py:M"], f"a file that {kind}", files={"f.yaml": RUN, "m.py": text}
        )
    if kind not in ("has no such name", "has a number of that name", "has a module of that name", "is stopped"):
        row("list m.py", f"the file {kind}", files={"m.py": text})
row("list none.py", "a file that is missing")
row(["list", "a\0b.py"], "a NUL in a name")
row(["list", f"{'n' * 300}.py"], "a name that is too long")
row("list d.py", "a folder that is called Python", files={"d.py/x": ""})
HEAD = "class M:\n    name, keeps_special_tokens, workers = 'm', False, None\n"
SIZE = "    size = {'train': None, 'eval': 4}\n"
SCORE = "    def score(self, e, c): return 1\n"
REST = "    def example(self, s, i): pass\n" + SCORE
for kind, text in {
    "lacks everything": "class M: pass\n",
    "lacks example": HEAD + SIZE + SCORE,
    "lacks score": HEAD + SIZE + "    def example(self, s, i): pass\n",
    "cannot be made": "class M:\n    def __init__(self): raise ValueError('no')\n" + REST,
    "exits when made": "class M:\n    def __init__(self): raise SystemExit(3)\n" + REST,
    "needs a setting": "class M:\n    def __init__(self, k): pass\n" + REST,
    "has no size": HEAD + REST,
    "has a text for its size": HEAD + "    size = 'x'\n" + REST,
    "has a size of 0": HEAD + "    size = {'train': 0, 'eval': 4}\n" + REST,
    "has a name of numbers": HEAD + SIZE + "    name = 5\n" + REST,
    "gives no example": HEAD + SIZE + REST,
    "raises for an example": HEAD + SIZE + "    def example(self, s, i): raise KeyError('x')\n" + SCORE,
    "exits for an example": HEAD + SIZE + "    def example(self, s, i): raise SystemExit(3)\n" + SCORE,
    "gives a text for an example": HEAD + SIZE + "    def example(self, s, i): return 'x'\n" + SCORE,
    "gives a prompt of bytes": "from rlstab.tasks.task import Example\n"
    + (HEAD + SIZE + "    def example(self, s, i): return Example(b'x', 'y')\n" + SCORE),
}.items():
    row(
        ["train", "f.yaml", "--set", "task={name: 'm.py:M'}"],
        f"a task that {kind}",
        files={"f.yaml": RUN, "m.py": text},
    )
for kind, value in {"an unknown option": "{name: 'm.py:M', zzz: 1}", "a dotted name": "{name: 'm.py:M.N'}"}.items():
    row(
        ["train", "f.yaml", "--set", f"task={value}"],
        f"a task with {kind}",
        files={
            "f.yaml": RUN,
            "m.py": HEAD + SIZE + REST,
        },
    )

# -- prompts ----------------------------------------------------------------------------------------------------------

LINES: dict[str, str | bytes] = {
    "is empty": "",
    "is blank": "\n\n\n",
    "is no JSON": "hello\n",
    "is a list": "[1]\n",
    "lacks the prompt": '{"answer": "1"}\n',
    "lacks the answer": '{"prompt": "1"}\n',
    "has null": '{"prompt": null, "answer": "1"}\n',
    "has a prompt of numbers": '{"prompt": [1], "answer": "1"}\n',
    "has NaN": '{"prompt": "1", "answer": NaN}\n',
    "is Latin-1": b'{"prompt": "\xe9", "answer": "1"}\n',
    "is binary": bytes(range(256)),
    "is nested deeply": "[" * 100_000,
    "has 5,000 digits": '{"prompt": "1", "answer": ' + "9" * 5000 + "}\n",
    "has a message without a role": '{"prompt": [{"content": "x"}], "answer": "1"}\n',
    "has one line alone": '{"prompt": "1+1=", "answer": "2"}\n',
    "has a lone surrogate": '{"prompt": "\\ud800", "answer": "1"}\n' * 99,
    "has characters that the tokenizer has not": '{"prompt": "\u4e16<b>", "answer": "1"}\n' * 99,
    "has prompts longer than the context": json.dumps({"prompt": "1+" * 9999, "answer": "1"}) + "\n",
    "has an empty prompt": '{"prompt": "", "answer": "1"}\n' * 99,
    "has keys that steer a terminal": json.dumps({ESC: 1}) + "\n",
}
for kind, text in LINES.items():
    more = text * 99 if kind.startswith("has prompts") else text
    row(
        ["train", "f.yaml", "--set", "task={name: jsonl, path: p.jsonl}"],
        f"the file of prompts {kind}",
        files={"f.yaml": RUN, "p.jsonl": more},
    )
row(
    ["train", "f.yaml", "--set", "task={name: jsonl, path: pipe}"],
    "prompts from a pipe that nobody writes",
    files={"f.yaml": RUN},
    prepare=lambda folder: os.mkfifo(folder / "pipe"),
)

# -- models -----------------------------------------------------------------------------------------------------------


def damaged(name: str, content: bytes | None) -> Prepare:
    def prepare(folder: Path) -> None:
        shutil.copytree(MODEL, folder / "model")
        if content is None:
            (folder / "model" / name).unlink()
        else:
            (folder / "model" / name).write_bytes(content)

    return prepare


for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
    for kind, content in {
        "is missing": None,
        "is empty": b"",
        "is binary": bytes(range(256)),
        "is a list": b"[1]",
        "is an empty object": b"{}",
        "is nested deeply": b"[" * 100_000,
        "says a huge size": b"\xff" * 8 + b"{}",
    }.items():
        if kind in ("is missing", "is an empty object") and name == "tokenizer_config.json":
            continue  # not needed
        row(
            "train f.yaml --set model.name=./model",
            f"{name} of the model {kind}",
            files={"f.yaml": RUN},
            prepare=damaged(name, content),
        )
for kind, change in {
    "hidden_size": -1,
    "vocab_size": 0,
    "vocab_size ": 10**13,
    "model_type": "zzz",
    "model_type ": 5,
    "num_attention_heads": 0,
}.items():

    def with_config(folder: Path, key: str = kind.strip(), value: Any = change) -> None:
        shutil.copytree(MODEL, folder / "model")
        config = json.loads((MODEL / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps({**config, key: value}))
        (folder / "model" / "evil.py").write_text("raise SystemExit('it was run')")

    row(
        "train f.yaml --set model.name=./model",
        f"config.json of the model: {kind} = {change!r}",
        files={"f.yaml": RUN},
        prepare=with_config,
    )
ADAPTERS: dict[str, dict[str, str | bytes]] = {
    "is an empty folder": {"a/x": ""},
    "has an empty configuration": {"a/adapter_config.json": "{}", "a/adapter_model.safetensors": b""},
    "has no JSON": {"a/adapter_config.json": "{", "a/adapter_model.safetensors": b""},
    "is of another kind": {"a/adapter_config.json": '{"peft_type": "IA3"}', "a/adapter_model.safetensors": b""},
    "is of no kind": {"a/adapter_config.json": '{"peft_type": "zzz"}', "a/adapter_model.safetensors": b""},
    "is a list": {"a/adapter_config.json": "[]", "a/adapter_model.safetensors": b""},
    "has damaged weights": {
        "a/adapter_config.json": '{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}',
        "a/adapter_model.safetensors": b"\xff" * 99,
    },
}
for kind, files in ADAPTERS.items():
    row("train f.yaml --set model.adapter=./a", f"the adapter {kind}", files={"f.yaml": RUN, **files})

# -- bench ------------------------------------------------------------------------------------------------------------

row("bench --example zzz", "an unknown example")
row("bench --example countdown", "an example of another kind")
for option, kind in {
    "--workers=0": "no workers",
    "--workers=-1": "workers below 0",
    "--only=zzz": "--only of nothing",
    "--only=": "--only of an empty name",
    "--only=[": "--only of an open bracket",
    "--out=f.yaml": "--out that is a file",
    "--out=f.yaml/x": "--out below a file",
}.items():
    for extra in ([], ["--dry-run"]):
        if extra and "workers" not in option and "only" not in option:
            continue
        row(["bench", "f.yaml", option, *extra], f"{kind}{', dry' if extra else ''}", files={"f.yaml": BENCH})
for kind, text in {
    "a run file": RUN,
    "no methods": "base: {}\nmethods: {}\nseeds: 2\n",
    "methods as a list": "base: {}\nmethods: [s2t]\nseeds: 2\n",
    "an unknown method": BENCH.replace("s2t: s2t", "s2t: zzz"),
    "seeds below 0": BENCH.replace("seeds: 2", "seeds: -2"),
    "a seed twice": BENCH.replace("seeds: 2", "seeds: [1, 1]"),
    "1e9 seeds": BENCH.replace("seeds: 2", "seeds: 1000000000"),
    "a base that is missing": BENCH.replace(
        "base: {task: {name: countdown}, optimisation: {rollouts: 1}}", "base: none.yaml"
    ),
    "a base that is itself": BENCH.replace(
        "base: {task: {name: countdown}, optimisation: {rollouts: 1}}", "base: f.yaml"
    ),
    "a method called ..": BENCH.replace("s2t: s2t", '"..": s2t'),
    "a method called a/b": BENCH.replace("s2t: s2t", '"a/b": s2t'),
    "a method without a name": BENCH.replace("s2t: s2t", '"": s2t'),
    "a method of 300 letters": BENCH.replace("s2t: s2t", f"{'n' * 300}: s2t"),
    "a method that steers a terminal": BENCH.replace("s2t: s2t", '"\\e[31m": s2t'),
    "settings that are none": BENCH + "settings: {a: {zzz: 1}}\n",
    "a baseline that is none": BENCH + "baseline: zzz\n",
}.items():
    row("bench f.yaml --dry-run", kind, files={"f.yaml": text})
    if kind != "a run file":
        row("explain f.yaml", f"a bench with {kind}", files={"f.yaml": text})

# -- view -------------------------------------------------------------------------------------------------------------

TOKEN = {"rollout": 1, "sequence_id": 0, "tokens": ["a"]}
EXPORT = {
    "step": 1,
    "rank": 0,
    "micro_step": 0,
    "export_sequence_idx": 4,
    "env_name": "math",
    "token_ids": [0, 1, 2],
    "position_ids": [0, 1, 2],
    "loss_mask": [False, True, True],
    "advantages": [0.5] * 3,
    "inference_logprobs": [-1.0] * 3,
    "trainer_logprobs": [-1.0] * 3,
    "entropy": [0.1] * 3,
    "mismatch_kl": [0.0] * 3,
    "log_importance_ratio": [0.0] * 3,
    "importance_ratio": [1.0] * 3,
    "prob_delta": [0.0] * 3,
    "is_masked": [False] * 3,
    "is_masked_high": [False] * 3,
    "is_masked_low": [False] * 3,
    "rl_weights": [None] * 3,
    "ce_weights": [None] * 3,
    "ref_kl_weights": [0.0] * 3,
}
ODD_LINES: dict[str, str | bytes] = {
    "is empty": "",
    "is binary": bytes(range(256)),
    "is NULs": b"\0" * 100,
    "is no JSON": "hello\n",
    "is numbers": "1\n2\n",
    "is nested deeply": "[" * 100_000,
    "has 5,000 digits": '{"rollout": ' + "9" * 5000 + "}\n",
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
    row("view t.jsonl", f"a file that {kind}", files={"t.jsonl": text})
    row("view run --terminal", f"tokens.jsonl that {kind}", files={"run/tokens.jsonl": text, "run/config.yaml": RUN})
    row("diagnose t.jsonl", f"a file that {kind}", files={"t.jsonl": text})
    row("report t.jsonl", f"a file that {kind}", files={"t.jsonl": text})
    row("runs t.jsonl", f"a file that {kind}", files={"t.jsonl": text})
for command in ("view", "view --terminal", "diagnose", "report", "runs"):
    called = command.split()
    name = " --terminal" if "--terminal" in command else ""
    for kind, (path, prepare, _) in PATHS.items():
        path = path.replace("f.yaml", "f.jsonl").replace(".yaml", ".jsonl")

        def renamed(folder: Path, first: Prepare = prepare) -> None:
            first(folder)
            if os.path.lexists(folder / "f.yaml"):
                (folder / "f.yaml").rename(folder / "f.jsonl")

        row([*called, path], f"the file {kind}{name}", prepare=renamed)
    row([*called, "d"], f"a folder without a run{name}", files={"d/x.txt": "mine"})
    row(
        [*called, "d"],
        f"a folder that is a link to its parent{name}",
        prepare=lambda folder: ((folder / "d").mkdir(), (folder / "d" / "up").symlink_to(folder)),
    )
    row([*called, "d"], f"a folder with an empty config.yaml{name}", files={"d/config.yaml": ""})
    row([*called, "d"], f"a folder with a run that never began{name}", files={"d/config.yaml": RUN, "d/run.json": "{}"})
    row([*called, "d"], f"metrics of NULs{name}", files={"d/config.yaml": RUN, "d/metrics.jsonl": b"\0" * 100})
    row([*called, "f.yaml"], f"a run file{name}", files={"f.yaml": RUN})
GOOD = json.dumps(
    {"rollout": 1, "sequence_id": "1-0", "tokens": ["a", "b"], "logprobs": [-1, -2], "advantages": [1, 1]}
)
for option, kind in {
    "--rollout=99": "a rollout that was not traced",
    "--rollout=-1": "a rollout below 0",
    "--limit=0": "a limit of 0",
    "--limit=-3": "a limit below 0",
    "--tokenizer=none": "a tokenizer that is missing",
    "--tokenizer=.": "a folder without a tokenizer",
    "--out=/dev/full": "a full disk",
    "--out=.": "a folder for a page",
    "--out=t.jsonl/x": "a page below a file",
    "--out=": "a page without a name",
}.items():
    text = json.dumps(EXPORT) + "\n"
    row(["view", "t.jsonl", option], kind, files={"t.jsonl": text})
    if "out" not in option:
        row(["view", "t.jsonl", "--terminal", option], f"{kind}, --terminal", files={"t.jsonl": text})
row(
    "view t.jsonl --out t.jsonl",
    "a page onto the file that it is of",
    files={"t.jsonl": json.dumps(EXPORT) + "\n"},
    says="t.jsonl",
)
row(
    "view t.jsonl",
    "a page of somebody else beside the file",
    files={"t.jsonl": json.dumps(EXPORT) + "\n", "t.html": "<p>mine"},
    says="t.html exists",
)

# -- report, diagnose, init, schema ----------------------------------------------------------------------------------

METRICS = "".join(
    json.dumps({"rollout": n, "optimizer_step": n, "reward/mean": 0.1 * n, "tokens/entropy": 1.0}) + "\n"
    for n in range(1, 6)
)
RUNS = {
    "run/config.yaml": RUN.replace("clip_higher", "[{name: clip_higher}]"),
    "run/run.json": "{}",
    "run/metrics.jsonl": METRICS,
}
for option, kind in {
    "--out=/dev/full": "--out that is a device",
    "--out=f.txt": "--out that is a file",
    "--out=f.txt/x": "--out below a file",
    "--export=/dev/full": "a full disk for the export",
    "--export=.": "an export onto a folder",
    "--markdown=/dev/full": "a full disk for Markdown",
    "--markdown=.": "Markdown onto a folder",
    "--metric=zzz": "an unknown metric",
    "--metric=": "a metric without a name",
    "--baseline=zzz": "an unknown baseline",
    "--out=round": "--out that is a link to itself",
    f"--out={'n' * 300}": "--out with a name that is too long",
}.items():
    row(
        ["report", "run", option],
        kind,
        files={**RUNS, "f.txt": "mine"},
        prepare=lambda folder: (folder / "round").symlink_to("round"),
    )
row("report run --export run/metrics.jsonl", "an export onto its own run", files=RUNS, says="is not a results file")
row(
    "report run --markdown README.md",
    "Markdown onto a page of somebody else",
    files={**RUNS, "README.md": "# Mine"},
    says="exists",
)
for name in ("report.md", "report.html"):
    row("report run --out d", f"a folder with another {name}", files={**RUNS, f"d/{name}": "mine"}, says="exists")
row("schema --out notes.json", "--out is a file of somebody else", files={"notes.json": '{"a": 1}'}, says="exists")
row("report run/metrics.jsonl", "metrics for results", files=RUNS)
row("report run none", "a good run and one that is missing", files=RUNS)
row("diagnose run none", "a good run and one that is missing", files=RUNS)
row("runs run none", "a good run and one that is missing", files=RUNS)
LOGS: dict[str, tuple[str, str | bytes]] = {
    "a state that is a list": ("trainer_state.json", "[]"),
    "a log that is no list": ("trainer_state.json", '{"log_history": 5}'),
    "a log of numbers": ("trainer_state.json", '{"log_history": [1, 2]}'),
    "steps that are texts": ("trainer_state.json", '{"log_history": [{"step": "a", "reward": 1}]}'),
    "values that are objects": ("trainer_state.json", '{"log_history": [{"step": 1, "reward": {}}]}'),
    "a state that is binary": ("trainer_state.json", bytes(range(256))),
    "a state nested deeply": ("trainer_state.json", "[" * 100_000),
    "a state with NaN": ("trainer_state.json", '{"log_history": [{"step": NaN, "reward": NaN}]}'),
    "a state with a huge step": ("trainer_state.json", '{"log_history": [{"step": 1e999, "reward": 1}]}'),
    "a table of NULs": ("a.csv", b"\0" * 100),
    "a table in binary": ("a.csv", bytes(range(256))),
    "a table with an open quote": ("a.csv", 'Step,"reward\n1,2\n'),
    "a table with a field of 1 MB": ("a.csv", "Step,reward\n1," + "9" * 1_000_000 + "\n"),
    "a table of words": ("a.csv", "Step,reward\na,b\n"),
    "a table with a column twice": ("a.csv", "Step,Step,loss\n1,1,2\n"),
    "a table in UTF-16": ("a.csv", "Step,reward\n1,2\n".encode("utf-16")),
    "rows of text steps": ("a.jsonl", '{"step": "1", "reward": 1}\n'),
    "rows whose data is a list": ("a.jsonl", '{"step": 1, "data": [1]}\n'),
    "rows with a step of 400 digits": ("a.jsonl", '{"step": 1' + "0" * 400 + ', "zzz": 1}\n'),
    "a Parquet file": ("a.parquet", b"PAR1" + bytes(99) + b"PAR1"),
    "a picture": ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(99)),
}
for kind, (name, text) in LOGS.items():
    row(["diagnose", name], kind, files={name: text})
    row(["diagnose", name, "--json"], f"{kind}, --json", files={name: text})
row("init zzz", "an unknown recipe")
row("init ../zzz", "a recipe that is a path")
row(["init", ""], "a recipe without a name")
row(["init", "a\0b"], "a NUL in the recipe")
for command in ("init dapo", "schema"):
    for out, why in {
        "/dev/full": "a full disk",
        ".": "a folder",
        "none/x": "a folder that is missing",
        "f.txt/x": "a path below a file",
        "a\0b": "a NUL in the path",
        "n" * 300: "a name that is too long",
        "round": "a link to itself",
    }.items():
        row(
            [*command.split(), "--out", out],
            f"--out is {why}",
            files={"f.txt": "mine"},
            prepare=lambda folder: (folder / "round").symlink_to("round"),
        )
row("init dapo --out f.txt", "--out exists", files={"f.txt": "mine"})
row("init dapo", "the file of the recipe exists", files={"dapo.yaml": "mine"})
row(["init", "dapo", "--out", ""], "--out without a name")
for option, kind in {
    "f.txt": "a file",
    "f.txt/x": "a path below a file",
    "/dev/full": "a device",
    "/proc/none": "where no folder can be made",
    "round": "a link to itself",
    "n" * 300: "a name that is too long",
    "a\0b": "a NUL in the path",
}.items():
    row(
        ["init", "dapo", "--out", option],
        f"--out is {kind}",
        files={"f.txt": "mine"},
        prepare=lambda folder: (folder / "round").symlink_to("round"),
    )

# -- data sets --------------------------------------------------------------------------------------------------------

for kind, settings in {
    "without a path": "{name: dataset}",
    "in a folder that is missing": "{name: dataset, path: ./none}",
    "with an unknown key": "{name: dataset, path: ./d, zzz: 1}",
    "with a pattern that does not compile": "{name: dataset, path: ./d, answer_pattern: '('}",
    "with a template without its field": "{name: dataset, path: ./d, prompt_template: x}",
    "with a system message without a chat": "{name: dataset, path: ./d, system: x}",
    "with no rows held out": "{name: dataset, path: ./d, eval_size: 0}",
    "with a number for a split": "{name: dataset, path: ./d, split: 5}",
    "in a folder of something else": "{name: dataset, path: ./d}",
    "of a damaged state": "{name: dataset, path: ./e}",
}.items():
    row(
        ["train", "f.yaml", "--set", f"task={settings}"],
        f"a data set {kind}",
        files={"f.yaml": RUN, "d/x.txt": "mine", "e/state.json": "[", "e/dataset_info.json": "{}"},
    )

# -- usage ------------------------------------------------------------------------------------------------------------

for words in (
    "zzz",
    "--zzz",
    "check",
    "check a b",
    "check --processes x f.yaml",
    "check f.yaml --example x",
    "train",
    "train --timeout x f.yaml",
    "bench",
    "bench --workers 1.5 f.yaml",
    "view",
    "view --limit x f",
    "view --rollout 1.5 f",
    "report",
    "diagnose",
    "schema --of zzz",
    "schema x",
    "doctor x",
    "init a b",
    "explain",
    "explain --preset dapo f.yaml",
    "runs --zzz",
    "list --zzz",
):
    ROWS.append(Row(tuple(words.split()) or ("",), f"usage: {words or 'nothing'}", says="usage:"))


def snapshot(folder: Path) -> dict[str, str]:
    """What is in a folder: kind and content of each path."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            content = str(path.readlink()) if stat.S_ISLNK(mode) else ""
            if stat.S_ISREG(mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[os.fsencode(path.relative_to(folder)).decode("latin-1")] = f"{mode:o} {content}"
    return found


class Hangs(BaseException):
    """No exception that a command could take for one of the system, as TimeoutError is."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises :class:`Hangs` in what hangs."""

    def ring(number: int, frame: object) -> None:
        raise Hangs(f"nothing after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def faults(one: Row, folder: Path) -> tuple[list[str], str]:
    """What a row does that it must not, and what it printed."""
    for name, text in one.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    one.prepare(folder)
    before, here = snapshot(folder), Path.cwd()
    out, err = io.StringIO(), io.StringIO()
    found = []
    arguments = [text for text in one.command] if one.command != ("",) else []
    code: object = None
    os.chdir(folder)
    try:
        with limited(HANGS), redirect_stdout(out), redirect_stderr(err):
            code = main(arguments)
    except SystemExit as stop:
        code = stop.code
        if not one.kind.startswith("usage"):
            found.append(f"left by SystemExit({stop.code})")
    except BaseException as error:  # what a user would see as a traceback
        import traceback

        found.append(f"traceback: {type(error).__name__}: {error} @ {traceback.extract_tb(error.__traceback__)[-3:]}")
    finally:
        os.chdir(here)
    said = err.getvalue()
    if code != one.code:
        found.append(f"ended with {code}")
    if "Traceback" in said + out.getvalue():
        found.append("prints a traceback")
    if not one.kind.startswith("usage") and code == 2:
        if not re.search(r"(?m)^\w+: ", said) or len(re.findall(r"(?m)^\w+(Error|Conflict): ", said)) > 1:
            found.append("is not one error")
    if one.says not in said:
        found.append(f"does not say {one.says!r}")
    if acts := {
        text
        for text in said + out.getvalue()
        if unicodedata.category(text) in ("Cc", "Cf", "Cs") and text not in "\n\t"
    }:
        found.append(f"would steer a terminal: {acts}")
    after = snapshot(folder)
    if changed := sorted(entry for entry in {*before.items()} ^ {*after.items()} if entry[0] not in one.makes):
        found.append(f"changed {changed}")
    return found, said


COMMANDS = sorted({one.command[0] for one in ROWS if not one.kind.startswith("usage")})


@pytest.mark.parametrize("group", [*COMMANDS, "usage"])
def test_bad_input(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for all kinds of a command: a test of its own for each would take longer than what it tests."""
    monkeypatch.setattr("rlstab.hub.why_offline", lambda: "nobody answers")  # so that no row depends on a network
    found = {}
    rows = [one for one in ROWS if (one.kind.startswith("usage") if group == "usage" else one.of(group))]
    for number, one in enumerate(rows):
        (tmp_path / str(number)).mkdir()
        what, said = faults(one, tmp_path / str(number))
        if what:
            found[one.name] = (what, said)
    assert found == {}
    assert rows


# -- the surroundings of a process ------------------------------------------------------------------------------------


def process(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    (folder / "f.yaml").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(Path(rlstab.__file__).parents[1]), **options.pop("env", {})}
    program = [sys.executable, "-m", "rlstab", *arguments]
    return subprocess.run(program, cwd=folder, env=environment, timeout=300, check=False, **options)


#: How a process may be surrounded: arguments, environment, standard output, and the code with which it ends.
AROUND: dict[str, tuple[str, dict[str, str], str | None, int]] = {
    "a full disk": ("list", {}, "/dev/full", 2),
    "a full disk for a table": ("check f.yaml", {}, "/dev/full", 2),
    "a full disk for text": ("schema", {}, "/dev/full", 2),
    "a terminal in ASCII": ("explain --preset dapo", {"PYTHONIOENCODING": "ascii"}, None, 0),
    "a terminal in Latin-1": ("explain --preset dapo", {"PYTHONIOENCODING": "latin-1"}, None, 0),
    "twenty columns": ("check f.yaml", {"COLUMNS": "20"}, None, 0),
    "one column": ("list", {"COLUMNS": "1"}, None, 0),
    "no column": ("list", {"COLUMNS": "0"}, None, 0),
    "columns in words": ("list", {"COLUMNS": "wide"}, None, 0),
    "no home": ("check f.yaml", {"HOME": "/nowhere"}, None, 0),
    "no temporary folder": ("check f.yaml", {"TMPDIR": "/nowhere"}, None, 0),
    "an unknown terminal": ("list", {"TERM": "zzz", "LC_ALL": "zzz"}, None, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_the_surroundings_of_a_process(name: str, tmp_path: Path) -> None:
    arguments, env, out, code = AROUND[name]
    with Path(out or os.devnull).open("wb") as stdout:
        ran = process(tmp_path, *arguments.split(), env=env, stdout=stdout, stderr=subprocess.PIPE)
    assert (ran.returncode, b"Traceback" in ran.stderr) == (code, False), ran.stderr
    assert ran.stderr.count(b"\n") == (code != 0)
    assert {one.name for one in tmp_path.iterdir()} == {"f.yaml"}


@pytest.mark.slow
def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = process(tmp_path, "schema", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.slow
def test_a_closed_output_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(RUN)
    line = f"{sys.executable} -m rlstab check f.yaml >&- 2>&-"
    env = {**os.environ, "PYTHONPATH": str(Path(rlstab.__file__).parents[1])}
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, timeout=300, check=False).returncode == 0


@pytest.mark.slow
def test_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    """Also one whose writer takes its time. `check` and `explain` read a file twice, and so take none."""
    line = f"{sys.executable} -m rlstab train <(sleep 20; echo 'objective: zzz')"
    env = {**os.environ, "PYTHONPATH": str(Path(rlstab.__file__).parents[1])}
    ran = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, timeout=300, check=False, capture_output=True)
    assert ran.returncode == 2
    assert b":1: objective.name: no method is called 'zzz'" in ran.stderr
