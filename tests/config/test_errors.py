"""A mistake in a file is an error with the file, its line and the setting that is wrong."""

from __future__ import annotations

import pytest

from rlstab.config import load_objective, load_run
from rlstab.errors import ConfigError, Conflict

#: A file, and where its error points: line and setting.
MISTAKES = [
    ('objective: s2t\noptimisation:\n  rollouts: 5\n  lrr: 1e-4\n', '4: optimisation.lrr'),
    ('objective: s2t\n\noptimization: {lr: 1}\n', '3: optimization'),
    ('objective: s2t\nadvantage: {zzz: 1}\n', '2: advantage.zzz'),
    ('objective: s2t\ntask:\n  name: countdown\n  numbrs: 4\n', '4: task.numbrs'),
    ('objective: s2t\ntask:\n  name: countdwn\n', '3: task.name'),
    ('objective: s2t\ntask: {numbers: 4}\n', '2: task'),
    ('objective:\n  - name: clip_hgher\n', '2: objective.0.name'),
    ('objective:\n  - s2t\n  - zzz\n', '3: objective.1.name'),
    ('objective: [grpo]\n', '1: objective.0.name'),
    ('objective: [s2t, overlong]\n', '1: objective.1.name'),
    ('objective: [{name: 5}]\n', '1: objective.0.name'),
    ('objective:\n  - name: s2t\n    max_prb: 0.1\n', '3: objective.0.max_prb'),
    ('objective:\n  - s2t\n  - preset: jstrl\n', '3: objective.1.preset'),
    ('objective: {preset: zzz}\n', '1: objective.preset'),
    ('objective:\n  - preset: dapo\n    high: 0.3\n', '3: objective.0.high'),
    ('objective:\n  - preset: dapo\n    set:\n      clip_higher: {high: 0.3}\n      token_men: {}\n',
     '5: objective.0.set.token_men'),
    ('objective:\n  - preset: dapo\n    drop:\n      - clip_higher\n      - kl\n', '5: objective.0.drop.1'),
    ('objective:\n  - preset: dapo\n    set:\n      clip_higher:\n        hgh: 0.3\n',
     '5: objective.0.set.clip_higher.hgh'),
    ('objective: {preset: dapo, set: {clip_higher: {name: s2t}}}\n', '1: objective.set.clip_higher.name'),
    ('objective:\n  - name: s2t\n    quantile: 1.5\n', '3: objective.0.quantile'),
    ('objective: [{name: s2t, max_prob: 0}]\n', '1: objective.0.max_prob'),
    ('objective: s2t\nrollout:\n  group: 4\n  prompts: 0\n', '4: rollout.prompts'),
    ('objective: s2t\noptimisation:\n  betas:\n    - 0.9\n    - 1\n', '5: optimisation.betas.1'),
    ('objective: s2t\nevaluation: {every: 5,\n  pass_at: [1, 2,\n    0]}\n', '4: evaluation.pass_at.2'),
    ('objective:\n  - preset: dapo\n    set:\n      clip_higher:\n        high: -1\n',
     '5: objective.0.set.clip_higher.high'),
    ('objective:\n  - {name: within, outer: s2t, inner: [\n      kl, {name: stare,\n         share: 0}]}\n',
     '4: objective.0.inner.1.share'),
    ('objective:\n  - name: adaptive_entropy\n    low: 1\n', '2: objective.0'),
    ('objective:\n  - name: s2t\n    max_prob: small\n', '3: objective.0.max_prob'),
    ('objective: [{name: clip_higher, high: yes}]\n', '1: objective.0.high'),
    ('objective: s2t\nrollout: {group: "8"}\n', '2: rollout.group'),
    ('objective: [{name: constant_length, length: 2.5}]\n', '1: objective.0.length'),
    ('objective: s2t\nadvantage: {std: 1}\n', '2: advantage.std'),
    ('objective: s2t\nmodel: {name: 5}\n', '2: model.name'),
    ('objective: s2t\nrollout: {group: ~}\n', '2: rollout.group'),
    ('objective:\n  - {name: stare, variant: O3}\n', '2: objective.0.variant'),
    ('objective: s2t\noptimisation: {lr: .nan}\n', '2: optimisation.lr'),
    ('objective: [{name: kl, coefficient: 1e999}]\n', '1: objective.0.coefficient'),
    ('objective: s2t\ntask:\n  name: reasoning_gym\n  dataset: a\n  options:\n    a: [1,\n      {b: .inf}]\n',
     '7: task.options.a.1.b'),
    ('objective: s2t\nrollout: 8\n', '2: rollout'),
    ('objective: s2t\nrollout:\n# group: 8\nseed: 1\n', '2: rollout'),
    ('objective: s2t\nevaluation: {pass_at: 4}\n', '2: evaluation.pass_at'),
    ('objective: s2t\noptimisation: {betas: [0.9]}\n', '2: optimisation.betas'),
    ('objective: s2t\noptimisation: {betas: [0.9, 0.9, 0.9]}\n', '2: optimisation.betas'),
    ('objective: s2t\nrollout:\n  8: 8\n', '3'),
    ('objective: s2t\ntask: {name: reasoning_gym, dataset: a, options: {on: 1}}\n', '2'),
    ('objective:\n  - name: s2t\n    1: 2\n', '3'),
    ('objective:\n  - s2t\n  - name: constant_length\n', '3: objective.1'),
    ('objective: s2t\ntask: {name: jsonl}\n', '2: task'),
    ('objective:\n  - {name: within, outer: s2t}\n', '2: objective.0'),
    ('seed: 1\n', '1'),
    ('seed: 1\nobjective:\n', '2: objective'),
    ('objective: []\n', '1: objective'),
    ('objective:\n  - preset: dapo\n    drop: [clip_higher, token_mean]\n', '1: objective'),
    ('objective:\n  - name: within\n    outer: s2t\n    inner: []\n', '4: objective.0.inner'),
    ('objective:\n  - s2t\n  - {max_prob: 0.1}\n', '3: objective.1'),
    ('objective:\n  - s2t\n  - 5\n', '3: objective.1'),
    ('objective:\n  - [s2t, stare]\n', '2: objective.0'),
    ('- s2t\n', '1'),
    ('objective: s2t\nrollout: {prompts: 16}\noptimisation:\n  epochs: 2\n  mini_batches: 3\n',
     '5: optimisation.mini_batches'),
    ('objective: s2t\noptimisation:\n  epochs: 2\n  mini_batches: 2\n  old_logprobs: live\n',
     '5: optimisation.old_logprobs'),
    ('objective: s2t\nevaluation:\n  samples: 4\n  pass_at:\n    - 4\n    - 8\n', '6: evaluation.pass_at.1'),
    ('objective: s2t\ntask:\n  name: countdown\n  low: 10\n', '4: task.low'),
    ('objective: s2t\nrollout:\n  group: 8\n  group: 4\n', '4'),
    ('objective:\n  - !!python/object/apply:os.system [ls]\n', '2'),
    ('objective:\n  - !method s2t\n', '2'),
    ('objective: !!set {a, b}\n', '1'),
    ('objective: s2t\n!!binary a: 1\n', '2'),
    ("objective: s2t\nseed: !!int ''\n", '2'),
    ('objective: s2t\n? !!bool maybe\n: 1\n', '2'),
    ('objective: s2t\n? {a: b}\n: 1\n', '2'),
    ('objective:\n\t- s2t\n', '2'),
    ('objective: [s2t\nseed: 1\n', '2'),
    ('objective: s2t\n---\nobjective: stare\n', '2'),
    ('objective: *nothing\n', '1'),
    ('objective: s2t\nseed: \x00\n', '2'),
    # TRL's names, keys of another section, absurd values
    ("objective: s2t\noptimisation: {learning_rate: 1e-5}\n", "2: optimisation.learning_rate"),
    ("objective: s2t\nlr: 1e-5\n", "2: lr"),
    ("objective: s2t\noptimisation: {lr: 1e300}\n", "2: optimisation.lr"),
    ("objective: s2t\nrollout: {temperature: 1e-300}\n", "2: rollout.temperature"),
    ("objective: s2t\nrollout:\n  group: 1\n", "3: rollout.group"),
    ("objective: s2t\nrollout: {prompts: 3000000000}\n", "2: rollout.prompts"),
    ("objective: s2t\nrollout: {prompts: 1000000, group: 1000}\n", "2: rollout.prompts"),
    ("objective: s2t\nrollout: {max_new_tokens: 3000000000}\n", "2: rollout.max_new_tokens"),
    ("objective: s2t\noptimisation: {rollouts: 5,\n  warmup_optimizer_steps: 6}\n",
     "3: optimisation.warmup_optimizer_steps"),
    ("objective: s2t\noptimisation: {old_logprobs: live}\nrollout: {staleness: 1}\n", "2: optimisation.old_logprobs"),
    ("objective: s2t\nrollout: {stop: ''}\n", "2: rollout.stop"),
    ("objective: s2t\nrollout: {top_p: 0.9}\n", "2: rollout.top_p"),
    ("objective: s2t\ntracking: {out: ''}\n", "2: tracking.out"),
    ("objective: s2t\nengine: zero3\n", "2: engine"),
    ("objective: s2t\nengine: {name: ddp, offload: true}\n", "2: engine.offload"),
    ("objective: s2t\nengine: {gather: bf16}\n", "2: engine.gather"),
    ("objective: s2t\nengine: {name: fsdp2, gather: bf16}\n", "2: engine.gather"),
    ("objective: s2t\ntask: {name: chain, flaky: 0.1}\nreward: a.py:f\n", "2: task.flaky"),
    ("objective: s2t\ntask: {name: jsonl, path: a, system: b}\n", "2: task.system"),
    ("objective: s2t\ntask: {name: reasoning_gym, dataset: a, execute_completions: true}\n",
     "2: task.execute_completions"),
    ("objective: s2t\nmodel: {adapter: {dropout: 0.1}}\n", "2: model.adapter.dropout"),
    ("objective: s2t\nmodel: {adapter: {path: a, r: 4}}\n", "2: model.adapter.r"),
    ("objective: s2t\nmodel: {adapter: {targets: []}}\n", "2: model.adapter.targets"),
    # schedules
    ("objective: s2t\noptimisation: {schedule: greedy}\n", "2: optimisation.schedule"),
    ("objective: s2t\noptimisation: {schedule: {name: cosine, power: 2}}\n", "2: optimisation.schedule.power"),
    ("objective: s2t\noptimisation: {schedule: cosine_with_min_lr}\n", "2: optimisation.schedule"),
    ("objective: s2t\noptimisation: {schedule: warmup_stable_decay}\n", "2: optimisation.schedule"),
    ("objective: s2t\noptimisation: {schedule: {name: cosine_with_restarts, num_cycles: 1.5}}\n",
     "2: optimisation.schedule.num_cycles"),
    # rewards
    ("objective: s2t\nreward: 5\n", "2: reward"),
    ("objective: s2t\nreward: []\n", "2: reward"),
    ("objective: s2t\nreward: [5]\n", "2: reward.0"),
    ("objective: s2t\nreward: [task, task]\n", "2: reward.1.name"),
    ("objective: s2t\nreward: [{function: task, time_limit: 9}]\n", "2: reward.0.time_limit"),
    ("objective: s2t\nreward: [{weight: 1}]\n", "2: reward.0"),
    ("objective: s2t\nreward:\n  - task\n  - {function: x, weigt: 3}\n", "4: reward.1.weigt"),
    ("objective: s2t\nreward: [{function: x, weight: .nan}]\n", "2: reward.0.weight"),
    ("objective: s2t\nreward: [{function: x, weight: 0}]\n", "2: reward"),
    ("objective: s2t\nreward: [a.py:mean]\n", "2: reward.0.name"),
    ("objective: s2t\nreward: [{function: a.py:f, name: a b}]\n", "2: reward.0.name"),
    ("objective: s2t\nreward: ['a.py:', task]\n", "2: reward.0.function"),
    ("objective: s2t\nreward: [package.module:f]\n", "2: reward.0.function"),
    # stages
    ("objective: s2t\nstages: [grop]\n", "2: stages.0.name"),
    ("objective: s2t\nstages: [s2t]\n", "2: stages.0.name"),
    ("objective: s2t\nstages: [{name: grpo, epsilon: 0}]\n", "2: stages.0.epsilon"),
    ("objective: s2t\nstages: [5]\n", "2: stages.0"),
    ("objective: s2t\nstages: [{std: true}]\n", "2: stages.0"),
    ("objective: {preset: dr_grpo}\nadvantage: {std: false}\n", "2: advantage.std"),
    ("objective: s2t\nstages: [opo]\nadvantage: {std: false}\n", "3: advantage.std"),
]  # fmt: skip

CONFLICTS = [
    ("seed: 1\nobjective:\n  - token_mean\n  - sequence_mean\n", "2: objective", "token_mean"),
    ("objective:\n  - preset: dapo\n  - {name: clip_higher, high: 0.3}\n", "1: objective", "drop: [clip_higher]"),
    ("objective:\n  - s2t\n  - name: within\n    outer: s2t\n    inner: token_mean\n", "3: objective.1", "token_mean"),
    ("objective:\n  name: within\n  outer: s2t\n  inner:\n    - token_mean\n    - sequence_mean\n",
     "4: objective.inner", "sequence_mean"),
    ("seed: 1\nobjective:\n  - preset: dapo\n    drop: [clip_higher, token_mean]\n  - preset: dr_grpo\n",
     "2: objective", "advantage: {estimator: "),
    ("objective: s2t\nstages: [opo, rloo]\n", "2: stages", "rloo"),
    ("objective: s2t\nstages: [opo]\nadvantage: {estimator: rloo}\n", "3: advantage", "opo"),
]  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the file ``run.yaml`` of the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        (tmp_path / "run.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return "run.yaml"

    return write


def test_a_mistake_is_named_with_its_line_and_setting(file):
    for text, where in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            load_run(file(text))
        assert str(caught.value).startswith(f"run.yaml:{where}: "), (text, str(caught.value))
        assert "\n" not in str(caught.value)


def test_an_unknown_key_is_answered_with_the_nearest_known_one(file):
    for text, hint in {
        "optimisation: {lrr: 1}": "'lr'",
        "optimization: {lr: 1}": "'optimisation'",
        "task: {name: countdwn}": "'countdown'",
        "optimisation: {learning_rate: 1}": "optimisation.lr",
        "rollout: {num_generations: 8}": "rollout.group",
        "max_completion_length: 9": "rollout.max_new_tokens",
        "lr: 1e-5": "`optimisation`",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_run(file(f"objective: s2t\n{text}\n"))
        assert hint in str(caught.value)


def test_mistakes_in_several_sections_are_named_at_once(file):
    with pytest.raises(ConfigError) as caught:
        load_run(file("objective: s2t\nrollout: {group: 0}\nseed: -1\ntask: {name: chain, term: 4}\n"))
    lines = {line.partition(": ")[0] for line in str(caught.value).splitlines()}
    assert lines == {"run.yaml:2", "run.yaml:3", "run.yaml:4"}


def test_a_conflict_names_the_parties_and_what_to_write(file):
    for text, where, named in CONFLICTS:
        with pytest.raises(Conflict) as caught:
            load_run(file(text))
        assert str(caught.value).startswith(f"run.yaml:{where}: ")
        assert named in str(caught.value)


def test_files_that_never_end_and_are_no_yaml(file, tmp_path):
    multiplied = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10) if n else 's2t'}]\n" for n in range(9))
    for text in ("", "objective: &a [*a]\n", multiplied, f"objective: {'[' * 5000}", "objective: é".encode("latin-1")):
        with pytest.raises(ConfigError, match=r"^run\.yaml: "):
            load_run(file(text))
    for path in ("none.yaml", ".", "a\0b", "/dev/zero"):
        for load in (load_run, load_objective):
            with pytest.raises(ConfigError):
                load(path)


def test_an_objective_from_python_is_answered_without_a_file():
    endless: dict = {"name": "within", "outer": "s2t"}
    endless["inner"] = endless
    for data, where in [
        ([{"name": "s2t", "quantile": 2}], "objective.0.quantile: "),
        ({"name": "s2t", "quantile": 2}, "objective.quantile: "),
        ({"objectve": "s2t"}, "the key `objective`"),
        (None, "objective: "),
        (b"s2t", "objective: "),
        ([{"name": "kl", "coefficient": 10**400}], "objective.0.coefficient: "),
        ([{"name": "kl", "coefficient": 10**5000}], "objective.0.coefficient: "),
        ([{1: 2, "name": "s2t"}], "objective.0"),
        (endless, "objective.inner.inner.inner: "),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_objective(data)
        assert str(caught.value).startswith(where)


def test_an_override_is_named_where_it_is_wrong(file):
    for overrides, where in [
        ({"optimisation.lr": -1}, "--set optimisation.lr: "),
        ({"optimisation.lrr": 1}, "--set optimisation.lrr: "),
        ({"rollout": {"group": 0}}, "--set rollout: rollout.group: "),
        ({"rollout.group": 0}, "--set rollout.group: "),
        ({"objective": "star"}, "--set objective: objective.name: "),
        ({"objective.0.high": 1}, "--set objective.0.high: "),
        ({"seed.more": 1}, "--set seed.more: "),
        ({"seed": 1, "optimisation.epochs": 0}, "--set optimisation.epochs: "),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_run(file("objective: [s2t]\noptimisation: {lr: 1, epochs: 2}\nseed: 1\n"), overrides)
        assert str(caught.value).startswith(where)
