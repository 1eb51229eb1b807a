"""The commands, run in this process: what they print, how they end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import pytest

import rlstab
from rlstab import ClipHigher, TokenObjective, zoo
from rlstab.cli import main
from rlstab.config import json_schema, load_objective, load_run, objective_hash, run_hash
from rlstab.core.metadata import SOURCES
from rlstab.core.registry import Registry
from rlstab.core.settings import Range
from rlstab.explain.stages import KINDS
from rlstab.presets import PRESETS
from rlstab.stages import STAGES

FOLDER = Path(rlstab.__file__).parents[1] / "examples"
EXAMPLES = sorted({*FOLDER.glob("*.yaml")} - {*FOLDER.glob("bench_*.yaml")})


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


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_check_takes_every_example(rlstab_command, monkeypatch, path):
    monkeypatch.chdir(path.parent.parent)  # from where the documents start them
    code, out, err = rlstab_command("check", str(path))
    assert (code, err) == (0, "")
    assert ": no conflict " in out
    assert f"objective {objective_hash(load_objective(path))}" in out
    for name in load_objective(path).keyed:
        assert f" {name} " in out


@pytest.mark.parametrize("name", PRESETS)
def test_check_takes_every_preset(rlstab_command, name):
    code, out, _ = rlstab_command("check", "f.yaml", f=f"preset: {name}")
    assert code == 0
    assert "run " not in out
    assert out.endswith(f"objective {objective_hash(PRESETS[name].objective)}: no conflict ")


def test_check_says_what_a_method_does_reads_and_costs(rlstab_command):
    _, out, _ = rlstab_command(
        "check", "f.yaml", f="objective: [{name: s2t, max_prob: 0.1}, kl, entropy_bonus, {name: lp_reg}]"
    )
    for text in (
        "Drop rewarded tokens that were sampled with tiny probability",
        "max_prob=0.1, quantile=0.75, population='candidates' entropies keep",
        "needs entropies: entropy of the full next-token distribution, nats; free: the sampler has the logits",
        "needs ref_logprobs: ",
        "a second model in memory and one more forward per rollout",
        "differentiates entropies of the live policy",
    ):
        assert text in out


def test_check_says_of_a_run_how_it_learns(rlstab_command):
    _, out, _ = rlstab_command("check", "f.yaml", f="objective: {preset: dr_grpo}\noptimisation: {epochs: 2}\n")
    assert "advantage: dr_grpo; ratio against: recompute; 2 optimizer step(s) per rollout of 16 x 8 responses" in out
    loaded = load_run("f.yaml")
    assert f"objective {objective_hash(loaded.composition)}, run {run_hash(loaded)}: no conflict" in out


def test_check_says_what_the_stages_of_a_run_do_need_and_expect(rlstab_command):
    _, out, _ = rlstab_command(
        "check", "f.yaml", f="objective: clip_higher\nstages: [{name: overlong, buffer: 4}, opob, deep_grpo]\n"
    )
    order = [out.index(f" {name} ") for name in ("in_order", "overlong", "deep_grpo", "opob")]
    assert order == sorted(order)
    for text in (
        "overlong rewards Take reward from an answer for each of its last 4 tokens before the limit",
        "place, success, seen",
        "needs squared_gradient, for opob: one backward for each response, before the rollout is learnt",
        "note: 'deep_grpo' expects 'stream_weight' beside it, which is missing: the loss of the paper",
        "advantage: opob; ratio against: ",
    ):
        assert text in out


def test_check_of_an_objective_alone_has_no_stages(rlstab_command):
    assert " in_order " not in rlstab_command("check", "f.yaml", f="clip_higher")[1]


def test_stages_that_exclude_each_other_are_refused_by_check_and_explain(rlstab_command):
    text = "objective: clip_higher\nstages: [max_rl, {name: overlong, buffer: 4}]\n"
    for command in ("check", "explain"):
        code, _, error = rlstab_command(command, "f.yaml", f=text)
        assert code == 2
        assert "the stage 'max_rl' and the stage 'overlong' exclude each other: " in error


BOTH = "s2t and stare act in opposite directions"
NOTES = {
    "a clip without a ratio": ("objective: clip_higher\nseed: 0", "clip_higher cannot act: with one optimizer step"),
    "s2t and stare": ("[s2t, stare]", BOTH),
    "s2t and top_entropy": ("[s2t, top_entropy]", "top_entropy drops every token below its own entropy"),
    "stare and a bonus": ("[stare, entropy_bonus]", "entropy_bonus raises the mean entropy"),
    "stare and an adaptive bonus": ("[stare, adaptive_entropy]", "adaptive_entropy raises the mean entropy"),
    "a mask and a fixed length": (
        "[s2t, {name: constant_length, length: 9}]",
        "constant_length divides by a fixed length, so the tokens that s2t drops still count in it.",
    ),
    "inside within": (
        "{name: within, outer: s2t, inner: {name: within, outer: top_entropy, inner: stare}}",
        "top_entropy drops every token below its own entropy",
    ),
}


@pytest.mark.parametrize(("text", "expected"), NOTES.values(), ids=NOTES)
def test_check_notes_what_pulls_against_something(rlstab_command, text, expected):
    assert f"note: {expected}" in rlstab_command("check", "f.yaml", f=text)[1]


@pytest.mark.parametrize(
    "text",
    [
        "[clip_higher, s2t]",
        "objective: clip_higher\noptimisation: {epochs: 2}",
        "{name: within, outer: s2t, inner: stare}",
        "[stare, kl]",
        "[{name: constant_length, length: 9}, clip_higher]",
        "[s2t, token_mean]",
    ],
)
def test_check_notes_nothing_where_all_is_well(rlstab_command, text):
    assert "note:" not in rlstab_command("check", "f.yaml", f=text)[1]


def test_list_names_every_method_and_preset(rlstab_command):
    code, out, err = rlstab_command("list")
    assert (code, err) == (0, "")
    for name in [*rlstab.available(), *PRESETS]:
        assert f" {name} " in out
    assert "STAPO: JustRL with spurious tokens dropped. clip_higher, s2t, token_mean" in out


def test_list_says_what_a_method_reads_keeps_and_costs_and_where_it_is_from(rlstab_command):
    _, out, _ = rlstab_command("list")
    for text in (
        "s2t Drop rewarded tokens that were sampled with tiny probability where the policy was otherwise sure. reads "
        "entropies · no state · free · arXiv 2602.15620 ",
        "reads ref_logprobs · no state · ref_logprobs: a second model in memory and one more forward per rollout · ",
        "reads entropies · state: gate, boost, damp, next_boost, next_damp · free · arXiv 2606.19236 ",
        "reads rollout_logprobs · no state · one more forward per rollout · arXiv ",
        "· also exploration · arXiv 2503.14476, 1707.06347, 1912.09729 ",
    ):
        assert text in out


def test_list_groups_methods_by_the_source_that_they_are_against(rlstab_command):
    _, out, _ = rlstab_command("list")
    heads = {source: out.index(f"{source}: {about}") for source, about in SOURCES.items()}
    ends = [*sorted(heads.values()), out.index(" presets ")]
    for name in zoo.METHODS.names():
        first = next(source for source in SOURCES if source in zoo.METHODS.get(name).about.addresses)
        start = heads[first]
        assert f" {name} " in out[start : ends[ends.index(start) + 1]]


def test_list_fits_into_100_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 3 * len([*zoo.METHODS.names(), *STAGES.names(), *PRESETS, *KINDS])


def test_list_groups_stages_by_kind_in_the_order_of_a_rollout(rlstab_command):
    _, out, _ = rlstab_command("list")
    heads = {kind: out.index(f"stages: {kind.kind}: ") for kind in KINDS}
    assert list(heads.values()) == sorted(heads.values())
    ends = [*heads.values(), out.index(" presets ")]
    for name in STAGES.names():
        start = heads[next(kind for kind in KINDS if issubclass(STAGES.get(name), kind))]
        assert f" {name} " in out[start : ends[ends.index(start) + 1]]
    assert "reads raw_rewards · state: right, wrong · arXiv 2602.14868" in out
    assert "squared_gradient: one backward for each response, before the rollout is learnt · arXiv 2602.17616" in out


class Bound(TokenObjective):
    """Needs a setting that nobody can guess."""

    name = "bound"
    limit: Annotated[float, Range(gt=7, lt=8)]

    def terms(self, batch, stat, state):
        raise AssertionError


def test_a_method_of_somebody_else_is_listed_too(rlstab_command, monkeypatch):
    fresh = Registry({"s2t": "rlstab.zoo.s2t:S2TMask"})
    fresh.register(Bound)
    monkeypatch.setattr("rlstab.explain.catalogue.METHODS", fresh)
    assert "others: against none of these sources bound Needs a setting that nobody" in rlstab_command("list")[1]


@pytest.mark.parametrize("arguments", [["list"], ["check", "f.yaml"]])
def test_no_markup_of_the_docstrings_is_printed(rlstab_command, arguments):
    assert "``" not in rlstab_command(*arguments, f="[entropy_bonus, stare, lp_reg, token_mean]")[1]


@pytest.mark.parametrize("arguments", [["list"], ["check", "f.yaml"]])
def test_brackets_in_an_effect_are_no_markup(rlstab_command, monkeypatch, arguments):
    monkeypatch.setattr(ClipHigher, "__doc__", "Keep [red]this[/red] as it is.")
    assert " Keep [red]this[/red] as it is. " in rlstab_command(*arguments, f="clip_higher")[1]


def test_schema_goes_to_standard_output(rlstab_command, capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_schema_goes_to_a_file(rlstab_command, tmp_path):
    assert rlstab_command("schema", "--out", "schema.json") == (0, "", "")
    assert json.loads((tmp_path / "schema.json").read_text()) == json_schema()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["check", "none.yaml"],
         "ConfigError: none.yaml: cannot be read: no such file or directory. Give the path of a YAML file.\n"),
        (["train", "none.yaml"],
         "ConfigError: none.yaml: cannot be read: no such file or directory. Give the path of a YAML file.\n"),
        (["check", "bad.yaml"],
         "ConfigError: bad.yaml:2: rollout.grop: unknown key 'grop'. Did you mean 'group'?\n"),
        (["train", "bad.yaml"],
         "ConfigError: bad.yaml:2: rollout.grop: unknown key 'grop'. Did you mean 'group'?\n"),
        (["check", "typo.yaml"],
         "ConfigError: typo.yaml:1: the key `objective` is missing. List the methods of the loss, or name a preset.\n"),
        (["check", "section.yaml"],
         "ConfigError: section.yaml:2: rolout: unknown key 'rolout'. Did you mean 'rollout'?\n"),
        (["check", "two.yaml"],
         "Conflict: two.yaml:1: objective: 'sequence_mean' and 'token_mean' both define the aggregate; a composition "
         "has exactly one.\n  Remove one of them. (Weights, masks, gates and penalties combine freely.)\n"),
        (["schema", "--out", "none/schema.json"],
         "ConfigError: none/schema.json: cannot be written: no such file or directory. Give --out another file.\n"),
        (["schema", "--out", "."],
         "ConfigError: .: cannot be written: is a directory. Give --out another file.\n"),
        (["check", "good.yaml", "--set", "optimisation.lr"],
         "ConfigError: --set optimisation.lr: expected KEY=VALUE, for example --set optimisation.lr=1e-4.\n"),
        (["check", "good.yaml", "--set", "=1"],
         "ConfigError: --set =1: expected KEY=VALUE, for example --set optimisation.lr=1e-4.\n"),
        (["check", "good.yaml", "--set", "optimisation.lr=[1"],
         "ConfigError: --set optimisation.lr:1: not valid YAML: while parsing a flow sequence, expected ',' or ']', "
         "but got '<stream end>'. Close the list with `]`.\n"),
        (["check", "good.yaml", "--set", "optimisation.lr=!!python/none 1"],
         "ConfigError: --set optimisation.lr:1: the tag !!python/none is refused. Write plain values, "
         "lists and mappings.\n"),
        (["check", "good.yaml", "--set", "optimisation.lr=-1"],
         "ConfigError: --set optimisation.lr: expected a number of at least 0, not -1.\n"),
        (["check", "good.yaml", "--set", "rollout.prompts=100000000000"],
         "ConfigError: --set rollout.prompts: 100000000000 x 8 responses at once, with rollout.group; at most 10000000 "
         "are allowed. Lower one of them.\n"),
        (["train", "good.yaml", "--set", "rollout.group=100000000000"],
         "ConfigError: good.yaml:1: rollout.prompts: 16 x 100000000000 responses at once, with rollout.group; at most "
         "10000000 are allowed. Lower one of them.\n"),
        (["train", "good.yaml", "--set", "evaluation.samples=100000000000"],
         "ConfigError: good.yaml:1: evaluation.prompts: 256 x 100000000000 responses at once, with evaluation.samples; "
         "at most 10000000 are allowed. Lower one of them.\n"),
        (["train", "good.yaml", "--set", "rollout.stop=''"],
         "ConfigError: --set rollout.stop: an empty text is in every response, so each would end after its first "
         "token. Write null for no stop text.\n"),
        (["check", "task.yaml"],
         "ConfigError: task: `answer_pattern` is not a valid regular expression: '(' (missing ), unterminated "
         "subpattern at position 0). For example, `#### (.+)` takes what follows the last `####`.\n"),
        (["check", "task.yaml", "--set", "task.answer_pattern=x"],
         "ConfigError: task: `answer_pattern` has no group: 'x'. Put round brackets around the answer: `#### (.+)` "
         "takes what follows the last `####`.\n"),
        (["check", "task.yaml", "--set", "task.answer_pattern=null", "--set", "task.prompt_template=Q"],
         "ConfigError: task: `prompt_template` has no {prompt}, so every prompt would be the same: 'Q'. Write "
         "{prompt} where the text of the example belongs.\n"),
        (["check", "gym.yaml"],
         "ConfigError: task: `prompt_template` has no {question}, so every prompt would be the same: '{prompt}'. "
         "Write {question} where the text of the example belongs.\n"),
        (["explain", "--preset", "dapo", "--set", "nonsense"],
         "ConfigError: --set nonsense: expected KEY=VALUE, for example --set optimisation.lr=1e-4.\n"),
        (["explain", "--preset", "dapo", "--set", "optimisation.lrr=1"],
         "ConfigError: --set optimisation.lrr: unknown key 'lrr'. Did you mean 'lr'?\n"),
        (["explain", "s2t,stare", "--set", "optimisation.lrr=1"],
         "ConfigError: --set optimisation.lrr: unknown key 'lrr'. Did you mean 'lr'?\n"),
        (["check", "good.yaml", "--set", "seed.a=1"],
         "ConfigError: --set seed.a: seed is not a mapping.\n"),
    ],
)  # fmt: skip
def test_an_error_ends_with_code_2_and_its_text_alone(rlstab_command, arguments, expected):
    code, out, err = rlstab_command(
        *arguments,
        good="objective: s2t\nseed: 1\n",
        bad="objective: s2t\nrollout: {grop: 1}\n",
        two="objective: [token_mean, sequence_mean]\n",
        typo="objectve: s2t\n",
        section="objective: s2t\nrolout: {group: 2}\n",
        task="objective: s2t\ntask: {name: jsonl, path: none.jsonl, answer_pattern: '('}\n",
        gym="objective: s2t\ntask: {name: reasoning_gym, dataset: x, prompt_template: '{prompt}'}\n",
    )
    assert (code, out, err) == (2, "", expected)


@pytest.mark.parametrize("source", [["s2t,stare"], ["--preset", "dapo"]])
def test_explain_takes_settings_of_a_run_with_names_and_presets(rlstab_command, source):
    code, out, _ = rlstab_command("explain", *source, "--markdown")
    assert (code, ", run `" in out) == (0, False)
    code, out, _ = rlstab_command("explain", *source, "--markdown", "--set", "optimisation.epochs=2")
    assert (code, ", run `" in out) == (0, True)
    assert "by one more forward of the trainer" in out


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("[s2t, s2t, clip_higher]", "s2t is listed 2 times with the same settings, and each acts. Remove one if"),
        (
            "[kl, {name: kl, estimator: k1}, kl, clip_higher]",
            "kl is listed 3 times with different settings, and each acts. Remove one if that is not meant.",
        ),
        ("[s2t, clip_higher, {preset: stapo, drop: [clip_higher]}]", "s2t is listed 2 times with the same settings"),
        ("[s2t, {name: observe, method: s2t}, clip_higher]", ""),
    ],
)
def test_a_method_that_is_listed_twice_is_noted(rlstab_command, listed, said):
    code, out, _ = rlstab_command("check", "f.yaml", f=f"objective: {listed}\n")
    assert code == 0
    assert said in " ".join(out.split())
    assert ("times with" in out) == bool(said)
    _, page, _ = rlstab_command("explain", "f.yaml", "--markdown", f=f"objective: {listed}\n")
    assert said in page


def test_memory_that_cannot_be_had_is_no_traceback(rlstab_command, monkeypatch):
    def fails(*_, **options):
        raise MemoryError

    monkeypatch.setattr("rlstab.train.loop.train", fails)
    code, _, err = rlstab_command("train", "f.yaml", f="objective: s2t\n")
    assert code == 2
    assert err.startswith("MemoryError: no more can be had. Lower what a run holds at once: rollout.prompts, ")


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (["optimisation.lr=1e-4"], {"optimisation": {"lr": 1e-4}}),
        (["optimisation.lr=1e-4", "optimisation.epochs=2"], {"optimisation": {"lr": 1e-4, "epochs": 2}}),
        (["rollout.stop='='"], {"rollout": {"stop": "="}}),
        (["rollout.stop=a=b"], {"rollout": {"stop": "a=b"}}),
        (["rollout.stop="], {}),
        (["evaluation.pass_at=[1, 2]"], {"evaluation": {"pass_at": [1, 2]}}),
        (["objective=[stare, kl]"], {"objective": ["stare", "kl"]}),
        (["seed=1", "seed=2"], {"seed": 2}),
        (["advantage={std: false}"], {"advantage": {"std": False}}),
    ],
)
def test_set_changes_what_is_trained(rlstab_command, monkeypatch, pairs, expected):
    trained = []
    monkeypatch.setattr("rlstab.train.loop.train", lambda run, **options: trained.append((run, options)))
    arguments = [text for pair in pairs for text in ("--set", pair)]
    assert rlstab_command("train", "f.yaml", *arguments, f="objective: s2t\n") == (0, "", "")
    ((run, _),) = trained
    assert run == load_run({"objective": "s2t", **expected})


@pytest.mark.parametrize("flags", [["--resume"], ["--overwrite"], ["--timeout", "90"], []])
def test_the_flags_of_train_arrive(rlstab_command, monkeypatch, flags):
    trained = []
    monkeypatch.setattr("rlstab.train.loop.train", lambda run, **options: trained.append(options))
    rlstab_command("train", "f.yaml", *flags, f="objective: s2t\n")
    timeout = timedelta(minutes=1.5 if "--timeout" in flags else 30)
    assert trained == [{"resume": "--resume" in flags, "overwrite": "--overwrite" in flags, "timeout": timeout}]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e12"])
def test_a_timeout_is_some_seconds(rlstab_command, seconds):
    said = f"ConfigError: --timeout {float(seconds)}: expected a number of seconds, from above 0 to 1e9.\n"
    assert rlstab_command("train", "f.yaml", f"--timeout={seconds}", f="objective: s2t\n") == (2, "", said)


def test_set_is_checked_too(rlstab_command):
    code, out, _ = rlstab_command("check", "f.yaml", "--set", "optimisation.epochs=3", f="objective: s2t\n")
    assert code == 0
    assert "3 optimizer step(s) per rollout" in out


def test_a_stop_from_the_keyboard_is_no_traceback(rlstab_command, monkeypatch):
    def stop(run, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlstab.train.loop.train", stop)
    assert rlstab_command("train", "f.yaml", f="objective: s2t\n") == (130, "", "stopped; continue with --resume\n")


@pytest.mark.parametrize("arguments", [[], ["zzz"], ["check"], ["train", "f.yaml", "--zzz"]])
def test_a_wrong_command_line_ends_with_code_2_and_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: rlstab")


@pytest.mark.slow  # several fresh interpreters
def test_python_without_docstrings_says_the_same(tmp_path):
    """``-OO`` drops docstrings and assertions; what the commands print must not depend on either."""
    (tmp_path / "f.yaml").write_text("[s2t, stare, {name: kl, coefficient: 0.0}]")
    program = (
        "from rlstab.cli import main\n"
        "for arguments in ('explain s2t,stare', 'check f.yaml', 'list', 'init dapo --out dapo.yaml'):\n"
        "    code = main(arguments.split())\n"
        "    print(arguments, code)\n"
    )
    printed, pages = [], []
    for flags in ([], ["-OO"]):
        ran = subprocess.run(
            [sys.executable, *flags, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        printed.append(ran.stdout)
        pages.append((tmp_path / "dapo.yaml").read_text())
        (tmp_path / "dapo.yaml").unlink()
    assert printed[0] == printed[1]
    assert pages[0] == pages[1]
    assert len(re.findall(r"(?m)^(explain|check|list|init) ?.* 0$", printed[1])) == 4
    assert "act in opposite directions" in printed[1]


@pytest.mark.parametrize("command", [["-m", "rlstab"], ["-m", "rlstab.cli"]])
def test_the_version_is_told_by_every_way_in(command):
    ran = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"rlstab {rlstab.__version__}\n"


def test_the_shell_is_answered_where_argcomplete_is_there(tmp_path):
    """By a stand-in that prints the commands; without it nothing happens."""
    asked = {**os.environ, "_ARGCOMPLETE": "1", "PYTHONPATH": f"{tmp_path}:{FOLDER.parent}"}
    command = [sys.executable, "-m", "rlstab", "--version"]
    if importlib.util.find_spec("argcomplete") is None:
        assert subprocess.run(command, capture_output=True, text=True, check=True, env=asked).stdout.startswith(
            "rlstab "
        )
    (tmp_path / "argcomplete.py").write_text(
        "import os\n"
        "def autocomplete(parser):\n"
        "    print(*parser._subparsers._group_actions[0].choices, flush=True)\n"
        "    os._exit(0)\n"
    )
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=asked)
    assert {"train", "check", "runs", "report"} <= set(ran.stdout.split())
