"""The commands, run in this process: what they print, how they end."""

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import rlstab
from rlstab import ClipHigher, zoo
from rlstab.cli import main
from rlstab.config import json_schema, load_objective, load_run, objective_hash, run_hash
from rlstab.config.bundled_examples import examples
from rlstab.core.registry import Registry
from rlstab.explain.run_file import recipes
from rlstab.presets import PRESETS
from rlstab.stages import STAGES

ROOT = Path(rlstab.__file__).parents[1]
EXAMPLES = sorted({*(ROOT / "examples").glob("*.yaml")} - {*(ROOT / "examples").glob("bench_*.yaml")})
MODEL = Path(rlstab.__file__).parent / "data" / "countdown-tiny"


@pytest.fixture
def rlstab_command(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder; gives code, output and errors, the table's lines and folds taken out."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, re.sub(r"[\s\u2500-\u257f]+", " ", out), err

    return run


def test_check_begins_with_its_verdict_for_every_preset_and_example_that_can_be_tried(rlstab_command, monkeypatch):
    for name in ["rlstab.train", *(name for name in sys.modules if name.startswith("rlstab.train."))]:
        monkeypatch.setitem(sys.modules, name, None)  # `check` does not import the trainer
    for name in sorted(PRESETS)[::4]:
        code, out, _ = rlstab_command("check", "f.yaml", f=f"preset: {name}")
        assert code == 0
        assert out.startswith(f"no conflict: objective {objective_hash(PRESETS[name].objective)} ")
        assert "first prompt" not in out  # an objective alone
    monkeypatch.chdir(ROOT)  # from where the documents start them
    for path in EXAMPLES:
        if not set(re.findall("smollm2|jsonl_math", path.name)):  # they need packages and a model
            code, out, err = rlstab_command("check", str(path))
            assert (code, err) == (0, ""), path
            assert out.startswith(f"no conflict: objective {objective_hash(load_objective(path))}")
            assert all(f" {name}: " in out for name in load_objective(path).keyed)


def test_check_tries_a_run_and_says_what_it_did_not(rlstab_command):
    text = "objective: [clip_higher, token_mean]\nstages: [opo]\n"
    code, out, _ = rlstab_command("check", "f.yaml", f=text)
    assert (code, "note: clip_higher cannot act" in out) == (0, True)
    code, out, _ = rlstab_command("check", "f.yaml", "--set", "optimisation.epochs=3", f=text)
    assert (code, "note: " in out) == (0, False)
    run = load_run("f.yaml", {"optimisation.epochs": 3})
    verdict = f"no conflict: objective {objective_hash(run.composition)}, run {run_hash(run)}"
    assert out.startswith(f"{verdict} task countdown")
    assert "first prompt: '2 8 3>9:'" in out
    assert "not checked: " in out
    assert " opo: " in out


#: What `check` refuses as `train` does: settings of a run, and the setting or name in the error.
REFUSED = {
    "task: {name: jsonl, path: none.jsonl}": "none.jsonl",
    "task: {name: jsonl, path: rows.jsonl, prompt_field: question}": "task.prompt_field",
    "task: {name: jsonl, path: rows.jsonl, eval_size: 9}": "task.eval_size",
    "task: {name: jsonl, path: chats.jsonl, eval_size: 1}": "rollout.chat",
    "task: {name: dataset, path: ./none}": "task.path",
    "task: {name: reasoning_gym, dataset: zzz}": "'zzz'",
    "task: {name: reasoning_gym, dataset: puzzle24}": "task.dataset",
    "task: {name: none.py:Task}": "none.py",
    "model: {name: ./none}": "no folder",
    "model: {name: ./empty}": "/empty' ",  # its tokenizer cannot be loaded, or with transformers 5.0 its weights
    "model: {name: ./no_weights}": "model.name",
    "rollout: {chat: true}": "rollout.chat",
    "rollout: {max_new_tokens: 99999}": "rollout.max_new_tokens",
    "rollout: {group: 1}": "rollout.group",
    "reward: none.py:f": "none.py",
    "reward: reward.py:none": "'none'",
    "reward: reward.py:text": "reward 'text'",
    "stages: [blockwise]": "`blocks`",
    "stages: [gdpo]": "'gdpo'",
    "reward: [task, {function: task, name: other, weight: 0}]\nstages: [gdpo]": "'gdpo'",
}


def test_check_refuses_what_train_refuses_in_its_first_seconds(rlstab_command, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "chats.jsonl").write_text('{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}\n' * 4)
    (tmp_path / "reward.py").write_text("def text(prompt, completion, answer):\n    return 'good'\n")
    (tmp_path / "empty").mkdir()
    shutil.copytree(MODEL, tmp_path / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    for text, named in REFUSED.items():
        code, out, err = rlstab_command("check", "f.yaml", f=f"objective: token_mean\n{text}\n")
        assert (code, out, err.count("\n")) == (2, "", 1), (text, out[:200], err)
        assert named in err, (text, err)


def test_list_names_everything_or_what_has_a_word(rlstab_command):
    for command, names in (
        ("list", {*rlstab.available(), *STAGES.names(), *PRESETS, *examples()}),
        ("init", recipes().keys()),
    ):
        code, out, _ = rlstab_command(command)
        assert code == 0
        assert names <= set(re.findall(r"\w+", out))
    code, out, _ = rlstab_command("list", "entropy")
    assert (code, " top_entropy " in out, " rloo " in out) == (0, True, False)
    code, out, err = rlstab_command("list", "zzzz")
    assert (code, out, "'zzzz'" in err) == (2, "", True)


def test_a_method_of_another_package_is_listed_too(rlstab_command, monkeypatch):
    registry = Registry({"clip_higher": "rlstab.zoo.clip_higher:ClipHigher"})
    registry.register(type("Mine", (ClipHigher,), {"name": "mine", "__doc__": "Do what [bold]mine[/] does."}))
    monkeypatch.setattr(zoo, "METHODS", registry)
    monkeypatch.setattr("rlstab.explain.catalogue.METHODS", registry)
    code, out, _ = rlstab_command("list")
    assert code == 0
    assert " mine Do what [bold]mine[/] does." in out  # brackets are not markup


def test_schema_goes_to_standard_output_or_a_file(rlstab_command, tmp_path):
    code, out, _ = rlstab_command("schema")
    assert (code, json.loads(out)) == (0, json_schema())
    assert rlstab_command("schema", "--out", "a.json")[:2] == (0, "")
    assert json.loads((tmp_path / "a.json").read_text()) == json_schema()


def test_settings_and_flags_of_train_arrive(rlstab_command, monkeypatch):
    trained = []
    monkeypatch.setattr("rlstab.train.loop.train", lambda run, **options: trained.append((run, options)))
    plain = {"resume": False, "overwrite": False, "timeout": timedelta(minutes=30)}
    for words, expected, options in [
        ("--set optimisation.lr=1e-4 --set optimisation.epochs=2", {"optimisation": {"lr": 1e-4, "epochs": 2}}, {}),
        ("--set rollout.stop=a=b", {"rollout": {"stop": "a=b"}}, {}),
        ("--set rollout.stop=", {}, {}),
        ("--set evaluation.pass_at=[1,2]", {"evaluation": {"pass_at": [1, 2]}}, {}),
        ("--set objective=[stare,kl]", {"objective": ["stare", "kl"]}, {}),
        ("--set seed=1 --set seed=2", {"seed": 2}, {}),
        ("--resume", {}, {"resume": True}),
        ("--overwrite", {}, {"overwrite": True}),
        ("--timeout 90", {}, {"timeout": timedelta(minutes=1.5)}),
    ]:
        assert rlstab_command("train", "f.yaml", *words.split(), f="objective: s2t\n") == (0, "", "")
        assert trained.pop() == (load_run({"objective": "s2t", **expected}), {**plain, **options})


def test_what_ends_training_is_no_traceback(rlstab_command, monkeypatch):
    for error, code, named in ((MemoryError, 2, "rollout.prompts"), (KeyboardInterrupt, 130, "--resume")):

        def fails(run, error=error, **options):
            raise error

        monkeypatch.setattr("rlstab.train.loop.train", fails)
        ended, out, err = rlstab_command("train", "f.yaml", f="objective: s2t\n")
        assert (ended, out, named in err, err.count("\n")) == (code, "", True, 1)


#: What was typed, and what the error names.
TYPOS = {
    "trian": "'train'",
    "probe gspo --quick s2t": "Name it before the options",
    "list clip_higer": "clip_higher",
    "list enropy": "entropy",
    "train": "--example NAME: broken_run, chain, countdown",
    "explain": "needs the path of a file",
    "train rnu.yaml": "'run.yaml'",
    "train --example contdown": "'countdown'",
    "train run.yaml --overwite": "'--overwrite'",
    "train run.yaml --ste seed=1": "'--set'",
    "bench run.yaml --launcher slrm": "'slurm'",
    "report . --by token": "'tokens'",
    "look . --fail-on reward_fal": "'reward_fall'",
    "look --fail-on reward_fal .": "reward_fal is not a sign. Did you mean 'reward_fall'?",
    "check run.yaml --host tlr": "'trl'",
    "explain --preset dpao": "'dapo'",
    "train tab.yaml": "tab.yaml:2: not valid YAML: a tab indents this line",
}


@pytest.mark.parametrize("typed", TYPOS)
def test_an_error_names_what_was_probably_meant(rlstab_command, capsys, typed):
    files = {"run": "objective: s2t\n", "tab": "rollout:\n\tgroup: 4\n"}
    try:
        code, out, err = rlstab_command(*typed.split(), **files)
    except SystemExit as ended:  # of argparse
        code, (out, err) = ended.code, capsys.readouterr()
    assert (code, out) == (2, "")
    assert TYPOS[typed] in err
    assert "Known: " not in err


@pytest.fixture
def looked(monkeypatch):
    """What the command ``look`` passes on."""
    calls = []
    monkeypatch.setattr("rlstab.look.look.look", lambda **options: calls.append(options) or 0)
    return calls


@pytest.mark.parametrize(
    ("words", "paths", "methods", "signs"),
    [
        ("--fail-on truncation .", ["."], [], ["truncation"]),
        ("--methods s2t folder", ["folder"], ["s2t"], []),
        ("--methods s2t,mask.yaml --methods a.py:B folder", ["folder"], ["s2t", "mask.yaml", "a.py:B"], []),
        (". --fail-on truncation,clipped --fail-on plateau", ["."], [], ["truncation", "clipped", "plateau"]),
        ("--fail-on plateau outputs/none", ["outputs/none"], [], ["plateau"]),
    ],
)
def test_commas_separate_values_and_a_path_behind_them_is_a_path(rlstab_command, looked, words, paths, methods, signs):
    code = rlstab_command("look", *words.split())[0]
    (options,) = looked
    assert (code, options["paths"], options["methods"], options["fail_on"]) == (0, paths, methods, signs)


def test_other_options_take_commas_too(rlstab_command, monkeypatch):
    calls = []
    monkeypatch.setattr("rlstab.probe.run.run_probes", lambda **options: calls.append(options) or 0)
    monkeypatch.setattr("rlstab.report.build.make_report", lambda *_, **options: calls.append(options))
    rlstab_command("probe", "gspo", "--probe", "staleness,sparse", "--probe", "mirror")
    rlstab_command("report", "--metric", "eval/mean,reward/area", "runs")
    assert (calls[0]["names"], calls[1]["metrics"]) == (["staleness", "sparse", "mirror"], ["eval/mean", "reward/area"])


def test_check_ends_with_the_command_that_trains(rlstab_command):
    words = ["run.yaml", "--set", "optimisation.epochs=3"]
    code, out, _ = rlstab_command("check", *words, run="objective: clip_higher\ntask: {name: countdown}\n")
    assert (code, out.strip().rpartition("next: ")[2]) == (0, "rlstab train run.yaml --set=optimisation.epochs=3")
    assert "next: " not in rlstab_command("check", "f.yaml", f="objective: clip_higher\n")[1]


def test_a_shell_completes_commands_and_options(monkeypatch, tmp_path):
    pytest.importorskip("argcomplete")
    answers = {}
    for line in ("rlstab tr", "rlstab train --over", "rlstab diag"):
        told = tmp_path / "completions"
        environment = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        environment |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(told), "IFS": "\x0b"}
        command = [sys.executable, "-m", "rlstab"]
        subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True)
        answers[line] = told.read_text().strip()
    assert list(answers.values()) == ["train", "--overwrite", ""]  # the old names of `look` are not offered
