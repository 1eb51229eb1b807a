"""Every mistake in a file is answered by file, line, what was wrong and what to write instead."""

from __future__ import annotations

import pytest

from rlstab import available
from rlstab.config import load_objective, load_run
from rlstab.errors import ConfigError, Conflict
from rlstab.presets import PRESETS as preset_names

METHODS = ", ".join(available())
PRESETS = ", ".join(sorted(preset_names))

#: Name of the mistake: the file, and the error without the name of the file.
MISTAKES = {
    # names
    "unknown key": (
        "objective: s2t\noptimisation:\n  rollouts: 5\n  lrr: 1e-4\n",
        "4: optimisation.lrr: unknown key 'lrr'. Did you mean 'lr'?",
    ),
    "unknown key at the top": (
        "objective: s2t\n\noptimization: {lr: 1}\n",
        "3: optimization: unknown key 'optimization'. Did you mean 'optimisation'?",
    ),
    "unknown key far from any other": (
        "objective: s2t\nadvantage: {zzz: 1}\n",
        "2: advantage.zzz: unknown key 'zzz'. Known: ddof, epsilon, estimator, std.",
    ),
    "unknown key of a task": (
        "objective: s2t\ntask:\n  name: countdown\n  numbrs: 4\n",
        "4: task.numbrs: unknown key 'numbrs'. Did you mean 'numbers'?",
    ),
    "unknown task": (
        "objective: s2t\ntask:\n  name: countdwn\n",
        "3: task.name: no task is called 'countdwn'. Did you mean 'countdown'?",
    ),
    "task without a name": ("objective: s2t\ntask: {numbers: 4}\n", "2: task: a task needs its `name`."),
    "unknown method": (
        "objective:\n  - name: clip_hgher\n",
        "2: objective.0.name: no method is called 'clip_hgher'. Did you mean 'clip_higher'?",
    ),
    "unknown method as text": (
        "objective:\n  - s2t\n  - zzz\n",
        f"3: objective.1.name: no method is called 'zzz'. Known: {METHODS}.",
    ),
    "preset as a method": (
        "objective: [grpo]\n",
        "1: objective.0.name: no method is called 'grpo', it is a preset: write {preset: grpo}.",
    ),
    "stage as a method": (
        "objective: [s2t, overlong]\n",
        "1: objective.1.name: no method is called 'overlong', it is a stage: list it under `stages`.",
    ),
    "name that is no text": ("objective: [{name: 5}]\n", "1: objective.0.name: expected the name of a method, not 5."),
    "unknown setting": (
        "objective:\n  - name: s2t\n    max_prb: 0.1\n",
        "3: objective.0.max_prb: unknown key 'max_prb'. Did you mean 'max_prob'?",
    ),
    "unknown preset": (
        "objective:\n  - s2t\n  - preset: jstrl\n",
        "3: objective.1.preset: no preset is called 'jstrl'. Did you mean 'justrl'?",
    ),
    "unknown preset far from any other": (
        "objective: {preset: zzz}\n",
        f"1: objective.preset: no preset is called 'zzz'. Known: {PRESETS}.",
    ),
    "unknown key beside a preset": (
        "objective:\n  - preset: dapo\n    high: 0.3\n",
        "3: objective.0.high: unknown key 'high'. Known: drop, preset, set.",
    ),
    "unknown method in set": (
        "objective:\n  - preset: dapo\n    set:\n      clip_higher: {high: 0.3}\n      token_men: {}\n",
        "5: objective.0.set.token_men: the preset 'dapo' has no method 'token_men'. Did you mean 'token_mean'?",
    ),
    "unknown method in drop": (
        "objective:\n  - preset: dapo\n    drop:\n      - clip_higher\n      - kl\n",
        "5: objective.0.drop.1: the preset 'dapo' has no method 'kl'. Known: clip_higher, token_mean.",
    ),
    "unknown setting in set": (
        "objective:\n  - preset: dapo\n    set:\n      clip_higher:\n        hgh: 0.3\n",
        "5: objective.0.set.clip_higher.hgh: unknown key 'hgh'. Did you mean 'high'?",
    ),
    "another method in set": (
        "objective: {preset: dapo, set: {clip_higher: {name: s2t}}}\n",
        "1: objective.set.clip_higher.name: expected 'clip_higher', not 's2t'.",
    ),
    # values
    "out of range": (
        "objective:\n  - name: s2t\n    quantile: 1.5\n",
        "3: objective.0.quantile: expected a number of at most 1, not 1.5.",
    ),
    "below an open bound": (
        "objective: [{name: s2t, max_prob: 0}]\n",
        "1: objective.0.max_prob: expected a number above 0, not 0.",
    ),
    "out of range in a section": (
        "objective: s2t\nrollout:\n  group: 4\n  prompts: 0\n",
        "4: rollout.prompts: expected a number of at least 1, not 0.",
    ),
    "out of range in a list": (
        "objective: s2t\noptimisation:\n  betas:\n    - 0.9\n    - 1\n",
        "5: optimisation.betas.1: expected a number below 1, not 1.",
    ),
    "out of range in a list on one line": (
        "objective: s2t\nevaluation: {every: 5,\n  pass_at: [1, 2,\n    0]}\n",
        "4: evaluation.pass_at.2: expected a number of at least 1, not 0.",
    ),
    "out of range in a preset": (
        "objective:\n  - preset: dapo\n    set:\n      clip_higher:\n        high: -1\n",
        "5: objective.0.set.clip_higher.high: expected a number of at least 0, not -1.",
    ),
    "out of range inside within": (
        "objective:\n  - {name: within, outer: s2t, inner: [\n      kl, {name: stare,\n         share: 0}]}\n",
        "4: objective.0.inner.1.share: expected a number above 0, not 0.",
    ),
    "settings that disagree": (
        "objective:\n  - name: adaptive_entropy\n    low: 1\n",
        "2: objective.0: 'adaptive_entropy': low = 1.0, initial = 0.0, high = 0.005, expected low <= initial <= high.",
    ),
    "text for a number": (
        "objective:\n  - name: s2t\n    max_prob: small\n",
        "3: objective.0.max_prob: expected a number, not 'small'.",
    ),
    "true for a number": (
        "objective: [{name: clip_higher, high: yes}]\n",
        "1: objective.0.high: expected a number, not true.",
    ),
    "text for a whole number": (
        'objective: s2t\nrollout: {group: "8"}\n',
        "2: rollout.group: expected a whole number, not '8'.",
    ),
    "fraction for a whole number": (
        "objective: [{name: constant_length, length: 2.5}]\n",
        "1: objective.0.length: expected a whole number, not 2.5.",
    ),
    "number for true or false": (
        "objective: s2t\nadvantage: {std: 1}\n",
        "2: advantage.std: expected true or false, not 1.",
    ),
    "number for text": ("objective: s2t\nmodel: {name: 5}\n", "2: model.name: expected text, not 5."),
    "null for a number": (
        "objective: s2t\nrollout: {group: ~}\n",
        "2: rollout.group: expected a whole number, not null.",
    ),
    "another word than those allowed": (
        "objective:\n  - {name: stare, variant: O3}\n",
        "2: objective.0.variant: expected 'O1' or 'C2', not 'O3'.",
    ),
    "not finite": (
        "objective: s2t\noptimisation: {lr: .nan}\n",
        "2: optimisation.lr: expected a finite number, not nan.",
    ),
    "not finite by overflow": (
        "objective: [{name: kl, coefficient: 1e999}]\n",
        "1: objective.0.coefficient: expected a finite number, not inf.",
    ),
    "not finite inside free options": (
        "objective: s2t\ntask:\n  name: reasoning_gym\n  dataset: a\n  options:\n    a: [1,\n      {b: .inf}]\n",
        "7: task.options.a.1.b: expected a finite number, not inf.",
    ),
    "number for a section": ("objective: s2t\nrollout: 8\n", "2: rollout: expected a mapping, not 8."),
    "empty section": (
        "objective: s2t\nrollout:\n# group: 8\nseed: 1\n",
        "2: rollout: expected a mapping, not null.",
    ),
    "number for a list": (
        "objective: s2t\nevaluation: {pass_at: 4}\n",
        "2: evaluation.pass_at: expected a list, not 4.",
    ),
    "list too short": ("objective: s2t\noptimisation: {betas: [0.9]}\n", "2: optimisation.betas: too few values."),
    "list too long": (
        "objective: s2t\noptimisation: {betas: [0.9, 0.9, 0.9]}\n",
        "2: optimisation.betas: expected a list of at most 2, not [0.9, 0.9, 0.9].",
    ),
    "key that is no text": (
        "objective: s2t\nrollout:\n  8: 8\n",
        "2: rollout: the key 8 is not text. Put it in quotes.",
    ),
    "key that is no text in free options": (
        "objective: s2t\ntask: {name: reasoning_gym, dataset: a, options: {on: 1}}\n",
        "2: task.options: the key true is not text. Put it in quotes.",
    ),
    "key that is no text in a method": (
        "objective:\n  - name: s2t\n    1: 2\n",
        "2: objective.0: the key 1 is not text. Put it in quotes.",
    ),
    "long value": (
        f"objective: s2t\nrollout: {{group: {'x' * 99}}}\n",
        f"2: rollout.group: expected a whole number, not '{'x' * 56}....",
    ),
    # something is missing
    "required setting": (
        "objective:\n  - s2t\n  - name: constant_length\n",
        "3: objective.1: the setting `length` is missing; it has no default.",
    ),
    "required setting, as text": (
        "objective:\n  - s2t\n  - constant_length\n",
        "3: objective.1: the setting `length` is missing; it has no default.",
    ),
    "required setting of a task": (
        "objective: s2t\ntask: {name: jsonl}\n",
        "2: task: the setting `path` is missing; it has no default.",
    ),
    "required part of within": (
        "objective:\n  - {name: within, outer: s2t}\n",
        "2: objective.0: the setting `inner` is missing; it has no default.",
    ),
    "no objective": (
        "seed: 1\n",
        "1: the key `objective` is missing. List the methods of the loss, or name a preset.",
    ),
    "empty objective": (
        "seed: 1\nobjective:\n",
        "2: objective: no method is left. List at least one, for example: - name: clip_higher",
    ),
    "empty list of methods": (
        "objective: []\n",
        "1: objective: no method is left. List at least one, for example: - name: clip_higher",
    ),
    "everything dropped": (
        "objective:\n  - preset: dapo\n    drop: [clip_higher, token_mean]\n",
        "1: objective: no method is left. List at least one, for example: - name: clip_higher",
    ),
    "empty part of within": (
        "objective:\n  - name: within\n    outer: s2t\n    inner: []\n",
        "4: objective.0.inner: no method is left. List at least one, for example: - name: clip_higher",
    ),
    "method without a name": (
        "objective:\n  - s2t\n  - {max_prob: 0.1}\n",
        "3: objective.1: a method needs its `name`, or `preset` for a recipe.",
    ),
    "number for a method": (
        "objective:\n  - s2t\n  - 5\n",
        "3: objective.1: expected a method, for example {name: s2t}, not 5.",
    ),
    "list for a method": (
        "objective:\n  - [s2t, stare]\n",
        "2: objective.0: expected a method, for example {name: s2t}, not ['s2t', 'stare'].",
    ),
    "empty file": ("", " a run is a mapping with the keys model, task, rollout, objective, optimisation, ..."),
    "list for a run": (
        "- s2t\n",
        "1: a run is a mapping with the keys model, task, rollout, objective, optimisation, ...",
    ),
    # what does not fit together
    "mini-batches": (
        "objective: s2t\nrollout: {prompts: 16}\noptimisation:\n  epochs: 2\n  mini_batches: 3\n",
        "5: optimisation.mini_batches: 3 mini-batches do not divide the 16 prompts of a rollout. Choose another number "
        "here, or another rollout.prompts.",
    ),
    "ratio of one": (
        "objective: s2t\noptimisation:\n  epochs: 2\n  mini_batches: 2\n  old_logprobs: live\n",
        "5: optimisation.old_logprobs: live needs one optimizer step per rollout, and epochs x mini_batches is 4: the "
        "ratio would stay 1 while the policy moves. Use recompute or rollout.",
    ),
    "pass@k": (
        "objective: s2t\nevaluation:\n  samples: 4\n  pass_at:\n    - 4\n    - 8\n",
        "6: evaluation.pass_at.1: pass@8 needs at least 8 samples per prompt, and evaluation.samples is 4. Raise it, "
        "or lower this.",
    ),
    "range of numbers": (
        "objective: s2t\ntask:\n  name: countdown\n  low: 10\n",
        "4: task.low: 10 is above task.high = 9. Swap them.",
    ),
    # YAML
    "key twice": (
        "objective: s2t\nrollout:\n  group: 8\n  group: 4\n",
        "4: the key 'group' appears twice. Remove one of them.",
    ),
    "key twice on one line": (
        "objective:\n  - s2t\n  - {name: kl, cap: 1,\n     cap: 2}\n",
        "4: the key 'cap' appears twice. Remove one of them.",
    ),
    "Python object": (
        "objective:\n  - !!python/object/apply:os.system [ls]\n",
        "2: the tag !!python/object/apply:os.system is refused. Write plain values, lists and mappings.",
    ),
    "tag of one's own": (
        "objective:\n  - !method s2t\n",
        "2: the tag !method is refused. Write plain values, lists and mappings.",
    ),
    "set": ("objective: !!set {a, b}\n", "1: the tag !!set is refused. Write plain values, lists and mappings."),
    "tag on a key": (
        "objective: s2t\n!!binary a: 1\n",
        "2: the tag !!binary is refused. Write plain values, lists and mappings.",
    ),
    "value that its tag does not fit": (
        "objective: s2t\nseed: !!int ''\n",
        "2: not valid YAML: '' cannot be read as int. Put text in quotes.",
    ),
    "key that its tag does not fit": (
        "objective: s2t\n? !!bool maybe\n: 1\n",
        "2: not valid YAML: 'maybe' cannot be read as bool. Put text in quotes.",
    ),
    "mapping as a key": (
        "objective: s2t\n? {a: b}\n: 1\n",
        "2: a list or mapping is used as a key. Write text.",
    ),
    "tabs": (
        "objective:\n\t- s2t\n",
        "2: not valid YAML: while scanning for the next token, found character '\\t' that cannot start any token. "
        "Indent with spaces.",
    ),
    "bracket left open": (
        "objective: [s2t\nseed: 1\n",
        "2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'. Close the list with "
        "`]`.",
    ),
    "two documents": (
        "objective: s2t\n---\nobjective: stare\n",
        "2: not valid YAML: expected a single document in the stream, but found another document. Keep one of "
        "them, without the line `---`.",
    ),
    "alias without anchor": (
        "objective: *nothing\n",
        "1: not valid YAML: found undefined alias 'nothing'. Put text that begins with `*` in quotes.",
    ),
    "control character": (
        "objective: s2t\nseed: \x00\n",
        "2: not valid YAML: the character '\\x00' is not allowed. Remove it, or write it as an escape in double "
        "quotes.",
    ),
    "alias that contains itself": (
        "objective: &a [*a]\n",
        " nested deeper than 100 levels. An alias may repeat without end.",
    ),
    "aliases that multiply": (
        "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10) if n else 's2t'}]\n" for n in range(9)),
        " more than 100000 values. An alias may repeat without end.",
    ),
    "nested without end": (f"objective: {'[' * 5000}", " nested deeper than 100 levels. Write fewer."),
}  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the file ``run.yaml`` of the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        path = tmp_path / "run.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path.name

    return write


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_line(file, text, expected):
    with pytest.raises(ConfigError) as caught:
        load_run(file(text))
    assert str(caught.value) == f"run.yaml:{expected}"


def test_every_mistake_of_a_file_is_named_at_once(file):
    with pytest.raises(ConfigError) as caught:
        load_run(file("objective: s2t\nrollout: {group: 0}\nseed: -1\nsed: 1\n"))
    assert str(caught.value).splitlines() == [
        "run.yaml:2: rollout.group: expected a number of at least 1, not 0.",
        "run.yaml:3: seed: expected a number of at least 0, not -1.",
        "run.yaml:4: sed: unknown key 'sed'. Did you mean 'seed'?",
    ]


#: Name of the conflict: the file, and the error without the name of the file.
CONFLICTS = {
    "two owners of a slot": (
        "seed: 1\nobjective:\n  - token_mean\n  - sequence_mean\n",
        "2: objective: 'sequence_mean' and 'token_mean' both define the aggregate; a composition has exactly one.\n"
        "  Remove one of them. (Weights, masks, gates and penalties combine freely.)",
    ),
    "a preset and a method": (
        "objective:\n  - preset: dapo\n  - {name: clip_higher, high: 0.3}\n",
        "1: objective: 'clip_higher_1' and 'clip_higher_2' both define the bounds; a composition has exactly one.\n"
        "  Remove one of them. (Weights, masks, gates and penalties combine freely.)",
    ),
    "within, with a slot inside": (
        "objective:\n  - s2t\n  - name: within\n    outer: s2t\n    inner: token_mean\n",
        "3: objective.1: within('s2t', 'token_mean'): the inner method defines the aggregate, which belongs to all "
        "tokens.\n  Compose 'token_mean' beside it instead.",
    ),
    "within, with two owners inside": (
        "objective:\n  name: within\n  outer: s2t\n  inner:\n    - token_mean\n    - sequence_mean\n",
        "4: objective.inner: 'sequence_mean' and 'token_mean' both define the aggregate; a composition has exactly "
        "one.\n  Remove one of them. (Weights, masks, gates and penalties combine freely.)",
    ),
    "two estimators": (
        "seed: 1\nobjective:\n  - preset: dapo\n    drop: [clip_higher, token_mean]\n  - preset: dr_grpo\n",
        "2: objective: the presets use different advantage estimators: dr_grpo, grpo.\n"
        "  Say which with advantage: {estimator: ...}.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CONFLICTS.values(), ids=CONFLICTS)
def test_a_conflict_names_both_parties_and_the_fix(file, text, expected):
    with pytest.raises(Conflict) as caught:
        load_run(file(text))
    assert str(caught.value) == f"run.yaml:{expected}"


def test_bytes_that_are_not_utf8_are_refused(file):
    with pytest.raises(ConfigError) as caught:
        load_run(file("objective: s2t\nname: é".encode("latin-1")))
    assert str(caught.value) == "run.yaml: not UTF-8 text (byte 21). Save the file as UTF-8."


@pytest.mark.parametrize("load", [load_run, load_objective])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("none.yaml", "none.yaml: cannot be read: no such file or directory. Give the path of a YAML file."),
        (".", ".: cannot be read: is a directory. Give the path of a YAML file."),
        ("a\0b", "'a\\x00b' is not a path: embedded null byte. Give the path of a YAML file."),
    ],
)
def test_a_path_that_cannot_be_read_is_named(file, load, path, expected):
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([{"name": "s2t", "quantile": 2}], "objective.0.quantile: expected a number of at most 1, not 2."),
        ({"name": "s2t", "quantile": 2}, "objective.quantile: expected a number of at most 1, not 2."),
        ({"objectve": "s2t"}, "the key `objective` is missing. List the methods of the loss, or name a preset."),
        ("", "objective: no method is left. List at least one, for example: - name: clip_higher"),
        (b"s2t", "objective: expected a method, for example {name: s2t}, not b's2t'."),
        ([{"name": "kl", "coefficient": 10**400}], f"objective.0.coefficient: expected a number, not 1{'0' * 56}...."),
        ([{"name": "kl", "coefficient": 10**5000}], "objective.0.coefficient: expected a number, not this int."),
    ],
)
def test_an_objective_from_python_is_answered_without_a_file(data, expected):
    with pytest.raises(ConfigError) as caught:
        load_objective(data if data != "" else None)
    assert str(caught.value) == expected


def test_data_that_contains_itself_is_refused():
    endless: dict = {"name": "within", "outer": "s2t"}
    endless["inner"] = endless
    with pytest.raises(ConfigError) as caught:
        load_objective(endless)
    assert str(caught.value) == "objective.inner.inner.inner: nested deeper than 100 levels."


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"optimisation.lr": -1}, "--set optimisation.lr: expected a number of at least 0, not -1."),
        ({"optimisation.lrr": 1}, "--set optimisation.lrr: unknown key 'lrr'. Did you mean 'lr'?"),
        ({"rollout": {"group": 0}}, "--set rollout: rollout.group: expected a number of at least 1, not 0."),
        ({"optimisation": {"lr": -1}}, "--set optimisation: optimisation.lr: expected a number of at least 0, not -1."),
        ({"rollout.group": 0}, "--set rollout.group: expected a number of at least 1, not 0."),
        ({"objective": "star"}, "--set objective: objective.name: no method is called 'star'. Did you mean 'stare'?"),
        ({"objective.0.high": 1}, "--set objective.0.high: objective is not a mapping."),
        ({"seed.more": 1}, "--set seed.more: seed is not a mapping."),
        ({"seed": 1, "optimisation.epochs": 0},
         "--set optimisation.epochs: expected a number of at least 1, not 0."),
    ],
)  # fmt: skip
def test_an_override_is_named_where_it_is_wrong(file, overrides, expected):
    with pytest.raises(ConfigError) as caught:
        load_run(file("objective: [s2t]\noptimisation: {lr: 1, epochs: 2}\nseed: 1\n"), overrides)
    assert str(caught.value) == expected
