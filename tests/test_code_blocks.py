"""Every block of code in README and the documents is run as it is printed, here or where a table below says.

A block that is new or has moved fails the first test until it is run, or listed with what runs it.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlstab.cli import main
from rlstab.config import load_run
from tests.test_docs import DOCS, NOTEBOOKS, ROOT, RUN_HERE, blocks
from tests.train.runs import checkpoints, go, small

PAGES = [
    *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")),
    *sorted(DOCS.rglob("*.md")),
]
#: The tests of tests/ that run blocks of pages of docs/ which tests/test_docs.py does not run as a whole.
RUN_BY = {
    "test_docs.py::test_the_loop_of_the_page_is_the_example_runs_and_learns": ["start/own-loop.md python"],
    "adapters/test_trl_page.py::test_the_lines_of_the_first_page_run": ["start/trl.md python", "start/trl.md yaml"],
    "adapters/test_trl_page.py::test_the_lines_of_the_page_run": ["hosts/trl.md python", "hosts/trl.md yaml"],
    "adapters/test_verl_page.py::test_the_lines_of_the_page_run": ["hosts/verl.md yaml"],
    "test_code_blocks.py::test_the_settings_for_axolotl_name_a_plugin_that_exists": ["hosts/axolotl.md text"],
    "adapters/test_prime_rl.py::test_the_example_of_the_page_trains": ["hosts/index.md toml"],
    "adapters/test_data.py::test_the_lines_of_the_page_run": ["hosts/data.md python", "hosts/data.md yaml"],
    "test_code_blocks.py::test_a_block_for_a_cluster_names_what_exists": [
        "hosts/skyrl.md python",
        "hosts/tinker.md python",
    ],
    "test_docs.py::test_the_page_on_methods_runs": [
        "how-to/add-a-method.md python",
        "how-to/add-a-method.md yaml",
        "how-to/add-a-method.md toml",
    ],
    "test_docs.py::test_yaml_in_the_documents_and_every_example_loads": ["how-to/compare.md yaml"],
    "replay/test_command.py::test_the_page_on_dumps_lists_the_format_and_its_code_runs": ["how-to/dump.md python"],
    "test_code_blocks.py::test_a_trainer_of_transformers_takes_the_callback": ["how-to/look.md python"],
    "test_code_blocks.py::test_a_trained_adapter_is_merged": ["how-to/lora.md python"],
    "test_code_blocks.py::test_parts_of_run_files_load": [
        "how-to/lora.md yaml",
        "how-to/several-processes.md yaml",
        "how-to/signals-and-advantages.md yaml",
    ],
    "test_code_blocks.py::test_the_page_on_rewards_and_tasks_runs": [
        "how-to/rewards-and-tasks.md python",
        "how-to/rewards-and-tasks.md yaml",
    ],
    "train/test_own.py::test_the_page_on_signals_and_advantages_runs": ["how-to/signals-and-advantages.md python"],
    "testing/test_cut_free.py::test_the_page_runs": ["how-to/test-your-loss.md python"],
    "test_code_blocks.py::test_rows_of_data_are_json": ["start/my-mask.md json", "start/trainer.md json"],
}
#: Blocks of text that are no code of rlstab: what a page shows of another program, or formulas.
SHOWN = {
    "docs/configuration.md": "a comment for an editor",
    "docs/hosts/data.md": "formulas",
    "docs/hosts/skyrl.md": "settings of SkyRL, which tests/adapters/test_skyrl.py passes on",
    "docs/how-to/test-your-loss.md": "losses of TRL and verl, which tests/testing/cut_hosts.py builds",
}
#: Lines for the shell that are not run here, by how they begin, and what runs them.
LINES_ELSEWHERE = {
    'eval "$(register-python-argcomplete': "tests/test_cli.py::test_a_shell_completes_commands_and_options",
    "register-python-argcomplete": "tests/test_cli.py::test_a_shell_completes_commands_and_options",
    "pip install": "every session of noxfile.py, and tests/slow/test_release.py",
    "make train": "tests/slow/test_release.py::test_make_train_in_a_fresh_clone",
    "make": "the workflows, whose targets tests/test_repository.py checks",
    "python -m benchmarks": "by hand: measurements that take hours",
    "python benchmarks/mutation.py": "by hand: a measurement that takes hours",
    "python -m pytest": "`make test` and `make test-slow`",
    "python examples/own_loop.py": "tests/test_docs.py::test_the_loop_of_the_page_is_the_example_runs_and_learns",
    "python examples/axolotl/axolotl_chain.py": "tests/adapters/test_axolotl.py",
    "PYTHONPATH=examples/axolotl axolotl train": "tests/adapters/test_axolotl.py",
    "accelerate launch --multi_gpu --num_processes 2 train.py": "tests/adapters/test_trl_page.py",
    "accelerate launch --use_fsdp": "tests/adapters/test_trl_page.py",
    "python3 -m verl.trainer.main_ppo": "tests/adapters/test_verl_page.py::test_the_lines_of_the_page_run",
    "torchrun --standalone --nproc_per_node 2 -m rlstab train FILE": "tests/train/test_launch.py",
    "accelerate launch --multi_gpu --num_processes 2 -m rlstab train FILE": "tests/train/test_launch.py",
}
#: Commands of rlstab that make runs for minutes: here they say what they would do.
LONG = (
    "rlstab bench examples/bench_s2t.yaml",
    "rlstab probe stack.yaml methods.py:MyMask",
    "rlstab probe clip_higher importance_correction top_entropy --model smollm2",
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def languages(page: Path) -> Counter[str]:
    return Counter(re.findall(r"(?m)^```(\w*)\n(?:.*\n)*?```$", page.read_text(encoding="utf-8")))


def lines_of(page: Path) -> list[str]:
    """The commands of a page, without their comments."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [line for row in text.splitlines() if (line := re.sub(r"\s+# .*", "", row).strip())]


def elsewhere(line: str) -> bool:
    return any(line.startswith(start) for start in LINES_ELSEWHERE)


def test_every_block_is_run_or_listed() -> None:
    listed, seen = [f"docs/{key}" for keys in RUN_BY.values() for key in keys], set()
    for page in PAGES:
        for language in languages(page):
            key = f"{name_of(page)} {language}"
            here = page in RUN_HERE and language in ("python", "yaml")
            shown = language in ("", "text") and name_of(page) in SHOWN
            assert here or shown or language == "sh" or key in listed, f"{key}: run the block, or list what runs it"
            seen.add(key)
    assert {*listed} <= seen, {*listed} - seen
    for place in (*RUN_BY, *LINES_ELSEWHERE.values()):
        file, _, test = place.removeprefix("tests/").partition("::")
        if test:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), place
    lines = {line for page in PAGES for line in lines_of(page)}
    assert {start for start in LINES_ELSEWHERE if not any(line.startswith(start) for line in lines)} == set()
    assert not [line for line in lines if not elsewhere(line) and not line.startswith(("rlstab ", "python -m "))]
    assert set(LONG) <= lines
    assert len(NOTEBOOKS) == 3  # tests/test_docs.py runs them


def test_rows_of_data_are_json() -> None:
    for page in (DOCS / "start" / "my-mask.md", DOCS / "start" / "trainer.md"):
        for block in blocks(page, "json"):
            assert all({"prompt", "answer"} == json.loads(row).keys() for row in block.splitlines())


def test_parts_of_run_files_load() -> None:
    for name in ("lora", "several-processes", "signals-and-advantages"):
        for block in blocks(DOCS / "how-to" / f"{name}.md", "yaml"):
            load_run({"objective": "clip_higher", **yaml.safe_load(block)})


def test_the_settings_for_axolotl_name_a_plugin_that_exists() -> None:
    (block,) = blocks(DOCS / "hosts" / "axolotl.md", "text")
    (plugin,) = yaml.safe_load(block)["plugins"]
    module, _, name = plugin.rpartition(".")
    assert f"class {name}" in (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    # the same line starts axolotl itself in tests/adapters/test_axolotl.py
    assert plugin in (ROOT / "examples" / "axolotl" / "chain.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("host", ["skyrl", "tinker"])
def test_a_block_for_a_cluster_names_what_exists(host: str) -> None:
    """The hosts' sessions make these calls in tests/adapters, with other values."""
    (block,) = blocks(DOCS / "hosts" / f"{host}.md", "python")
    source = ast.parse((ROOT / "rlstab" / "adapters" / f"{host}.py").read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    tree = ast.parse(block)
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    called = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) if isinstance(node.func, ast.Attribute)
    }
    assert imported <= defined
    assert called - {"AdamParams"} <= defined


def test_a_trainer_of_transformers_takes_the_callback() -> None:
    class Trainer:
        callbacks: list[Any] = []

        def add_callback(self, callback: Any) -> None:
            self.callbacks.append(callback)

    (block,) = blocks(DOCS / "how-to" / "look.md", "python")
    exec(compile(block, "look.md", "exec"), {"trainer": Trainer()})
    assert Trainer.callbacks[0].stop_at == {"refused_steps"}


def test_the_page_on_rewards_and_tasks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "how-to" / "rewards-and-tasks.md"
    monkeypatch.chdir(tmp_path)
    reward, task, from_python, turns = blocks(page, "python")
    (tmp_path / "rewards.py").write_text(reward)
    (tmp_path / "tasks.py").write_text(task)
    for index, block in enumerate(blocks(page, "yaml")):
        (tmp_path / f"{index}.yaml").write_text(block)
        load_run(tmp_path / f"{index}.yaml")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in (reward, task, from_python, turns):
        exec(compile(block, str(page), "exec", dont_inherit=True), namespace)
    twice = namespace["Twice"]()
    seven = twice.example("train", 6)
    assert [twice.reply(seven, said) for said in ("14$", "14$again:13$")] == ["again:", None]
    assert twice.turn_rewards(seven, "14$again:13$") == [1, 0]
    assert twice.turn_rewards(seven, "13$again:14$") == [0, 1]
    assert twice.turn_rewards(seven, "14") == [1, 0]
    assert (tmp_path / "runs" / "doubling" / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft with the newest transformers
def test_a_trained_adapter_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    go(small(tmp_path / "runs" / "lora", model__adapter={"r": 4}, optimisation__rollouts=1))
    (newest,) = checkpoints(tmp_path / "runs" / "lora")
    newest.rename(newest.with_name("rollout-000200"))
    (block,) = blocks(DOCS / "how-to" / "lora.md", "python")
    exec(compile(block, "lora.md", "exec"), {})
    assert (tmp_path / "merged" / "model.safetensors").is_file()


# -- the lines for a shell -------------------------------------------------------------------------------------------


def a_run(folder: Path, name: str) -> None:
    go(small(folder / name))


def rare_tokens(folder: Path) -> None:
    """The bench of the page, with shorter runs."""
    text = blocks(DOCS / "how-to" / "compare.md", "yaml")[0].replace("rollouts: 100", "rollouts: 2")
    data = yaml.safe_load(text)
    data["base"] |= {"rollout": {"prompts": 2, "group": 4}, "evaluation": {"prompts": 4, "samples": 2}}
    (folder / "rare.yaml").write_text(yaml.safe_dump(data))
    shell("rlstab bench rare.yaml", folder)
    for name in ("grpo-seed0", "grpo-seed1", "dapo-seed0", "dapo-seed1"):
        a_run(folder / "runs", name)


def files(**texts: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, text in texts.items():
            (folder / name.replace("__", ".")).write_text(text)

    return write


def a_log(folder: Path) -> None:
    shutil.copytree(ROOT / "tests" / "diagnose" / "data" / "trl_1_16", folder / "outputs" / "grpo")


def a_mask(folder: Path) -> None:
    """An objective of the user's, and a method in a file."""
    shutil.copy(ROOT / "examples" / "my_mask" / "my_mask.py", folder / "methods.py")
    text = (folder / "methods.py").read_text().replace("SkipCertain", "MyMask")
    files(methods__py=text, stack__yaml="objective: [clip_higher, s2t]\n")(folder)


def shell(line: str, folder: Path, codes: tuple[int, ...] = (0,)) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "rlstab"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rlstab "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    ran = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode in codes, f"{line}\n{ran.stdout}{ran.stderr}"


#: What a page's commands find, and the page's own files, which its blocks hold.
FOUND: dict[str, Callable[[Path], None]] = {
    "docs/hosts/verl.md": files(objective__yaml="objective: clip_higher\n"),
    "docs/how-to/compare.md": rare_tokens,
    "docs/how-to/explain.md": files(f__yaml="objective: s2t\n"),
    "docs/how-to/look.md": a_log,
    "docs/how-to/probe.md": a_mask,
    "docs/start/trainer.md": files(first__yaml=blocks(DOCS / "start" / "trainer.md", "yaml")[0]),
}
#: Pages whose commands take a second together, in this process.
QUICK = {"docs/how-to/diagnose.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[] if name_of(page) in QUICK else [pytest.mark.slow])
        for page in PAGES
        if any(not elsewhere(line) for line in lines_of(page))
    ],
)
def test_the_commands_of_a_page_run_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in ("tests", "benchmarks", "docs", "rlstab"):
        (tmp_path / name).symlink_to(ROOT / name)
    FOUND.get(name_of(page), lambda folder: None)(tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in lines_of(page):
        if name_of(page) in QUICK:
            assert main(shlex.split(line)[1:]) == 0
        elif line in LONG:
            shell(f"{line} --dry-run", tmp_path)
        elif not elsewhere(line):  # 3: a sign of --fail-on is present; 1: doctor misses an optional trainer
            shell(line, tmp_path, codes=(0, 3) if "--fail-on" in line else (0, 1) if "doctor" in line else (0,))
