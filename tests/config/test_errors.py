"""A mistake in a file is an error with the file, its line and the setting that is wrong."""

import re
from pathlib import Path

import pytest
import yaml

from rlstab.bench.file import load_bench
from rlstab.config import Document, load_objective, load_run, validation
from rlstab.core.method_settings import settings_of
from rlstab.errors import ConfigError, Conflict
from rlstab.stages import STAGES
from rlstab.zoo import METHODS

#: A file, and where its error points: line and setting. A file without an objective has `s2t` at its end. The schema
#: refuses these too.
MISTAKES = [
    ("optimisation:\n  rollouts: 5\n  lrr: 1e-4", "3: optimisation.lrr"),
    ("\noptimization: {lr: 1}", "2: optimization"),
    ("task:\n  name: countdwn", "2: task.name"),
    ("task: {numbers: 4}", "1: task"),
    ("task: {name: jsonl}", "1: task"),
    ("objective:\n  - s2t\n  - zzz", "3: objective.1.name"),
    ("objective: [s2t, overlong]", "1: objective.1.name"),
    ("objective: [{name: 5}]", "1: objective.0.name"),
    ("objective:\n  - s2t\n  - {max_prob: 0.1}", "3: objective.1"),
    ("objective:\n  - name: s2t\n    max_prb: 0.1", "3: objective.0.max_prb"),
    ("objective:\n  - s2t\n  - name: constant_length", "3: objective.1"),
    ("objective: [{name: s2t, max_prob: 0}]", "1: objective.0.max_prob"),
    ("stages: [grop]", "1: stages.0.name"),
    ("stages: [s2t]", "1: stages.0.name"),
    ("objective:\n  - s2t\n  - preset: jstrl", "3: objective.1.preset"),
    ("objective:\n  - preset: dapo\n    high: 0.3", "3: objective.0.high"),
    ("objective: {preset: dapo, drop: [zzz]}", "1: objective.drop.0"),
    ("objective:\n  - preset: dapo\n    set:\n      token_men: {}", "4: objective.0.set.token_men"),
    ("objective:\n  - preset: dapo\n    set:\n      clip_higher: {hgh: 0}", "4: objective.0.set.clip_higher.hgh"),
    ("objective: {preset: dapo, set: {clip_higher: {name: s2t}}}", "1: objective.set.clip_higher.name"),
    ("objective:\n  - {name: within, outer: s2t}", "2: objective.0"),
    ("objective:\n  - name: within\n    outer: s2t\n    inner: []", "4: objective.0.inner"),
    ("objective:\n  - {name: within, outer: s2t, inner: [\n      kl, {name: stare,\n         share: 0}]}",
     "4: objective.0.inner.1.share"),
    ("objective: []", "1: objective"),
    ("seed: 1\nobjective:", "2: objective"),
    ("- s2t", "1"),
    ("objective:\n  - name: s2t\n    max_prob: small", "3: objective.0.max_prob"),
    ("objective:\n  - name: s2t\n    quantile: 1.5", "3: objective.0.quantile"),
    ("objective: [{name: clip_higher, high: yes}]", "1: objective.0.high"),
    ("objective:\n  - {name: stare, variant: O3}", "2: objective.0.variant"),
    ('rollout: {group: "8"}', "1: rollout.group"),
    ("rollout:\n  group: 4\n  prompts: 0", "3: rollout.prompts"),
    ("rollout: 8", "1: rollout"),
    ("optimisation:\n  betas:\n    - 0.9\n    - 1", "4: optimisation.betas.1"),
    ("optimisation: {betas: [0.9]}", "1: optimisation.betas"),
    ("evaluation: {every: 5,\n  pass_at: [1, 2,\n    0]}", "3: evaluation.pass_at.2"),
    ("optimisation: {lr: 1e300}", "1: optimisation.lr"),
    ("rollout: {temperature: 1e-300}", "1: rollout.temperature"),
    ("rollout: {stop: ''}", "1: rollout.stop"),
    ("tracking: {out: ''}", "1: tracking.out"),
    ("engine: zero3", "1: engine"),
    ("model: {adapter: {targets: []}}", "1: model.adapter.targets"),
    ("optimisation: {schedule: {name: cosine, power: 2}}", "1: optimisation.schedule.power"),
    ("reward: 5", "1: reward"),
    ("reward: []", "1: reward"),
    ("reward: [{weight: 1}]", "1: reward.0"),
    ("reward:\n  - task\n  - {function: x, weigt: 3}", "3: reward.1.weigt"),
]  # fmt: skip
#: What the schema does not see: settings against each other, sizes together, what a preset brings, YAML.
UNSEEN = [
    ("objective:\n  - preset: dapo\n    drop:\n      - clip_higher\n      - kl", "5: objective.0.drop.1"),
    ("objective:\n  - preset: dapo\n    drop: [clip_higher, token_mean]", "1: objective"),
    ("objective:\n  - {preset: [dapo]}", "2: objective.0.preset"),
    ("optimisation: {lr: .nan}", "1: optimisation.lr"),
    ("task:\n  name: reasoning_gym\n  dataset: a\n  options:\n    a: [1,\n      {b: .inf}]", "6: task.options.a.1.b"),
    ("optimisation: {rollouts: 5,\n  warmup_optimizer_steps: 6}", "2: optimisation.warmup_optimizer_steps"),
    ("optimisation:\n  epochs: 2\n  old_logprobs: live", "3: optimisation.old_logprobs"),
    ("optimisation: {old_logprobs: live}\nrollout: {staleness: 1}", "1: optimisation.old_logprobs"),
    ("rollout: {prompts: 16}\noptimisation:\n  mini_batches: 3", "3: optimisation.mini_batches"),
    ("rollout:\n  group: 1", "2: rollout.group"),
    ("rollout: {prompts: 1000000, group: 1000}", "1: rollout.prompts"),
    ("evaluation: {prompts: 1000000, samples: 1000}", "1: evaluation.prompts"),
    ("evaluation:\n  samples: 4\n  pass_at:\n    - 4\n    - 8", "5: evaluation.pass_at.1"),
    ("engine: {name: ddp, offload: true}", "1: engine.offload"),
    ("engine: {name: fsdp2, gather: bf16}", "1: engine.gather"),
    ("task: {name: chain, flaky: 0.1}\nreward: a.py:f", "1: task.flaky"),
    ("task: {name: jsonl, path: a, system: b}", "1: task.system"),
    ("model: {adapter: {path: a, r: 4}}", "1: model.adapter.r"),
    ("model: {adapter: {path: a}, reference: adapter}", "1: model.reference"),
    ("model: {teacher: adapter}", "1: model.teacher"),
    ("optimisation: {schedule: greedy}", "1: optimisation.schedule.name"),
    ("optimisation: {schedule: warmup_stable_decay}", "1: optimisation.schedule"),
    ("reward: [task, task]", "1: reward.1.name"),
    ("reward: [{function: task, time_limit: 9}]", "1: reward.0.time_limit"),
    ("reward: [{function: x, weight: 0}]", "1: reward"),
    ("reward: [a.py:mean]", "1: reward.0.name"),
    ("reward: ['a.py:', task]", "1: reward.0.function"),
    ("rollout: {stop: ['']}", "1: rollout.stop.0"),
    ("rollout: {stop: []}", "1: rollout.stop"),
    ("rollout:\n  8: 8", "2"),
    ("rollout:\n  group: 8\n  group: 4", "3"),
    ("objective:\n  - !!python/object/apply:os.system [ls]", "2"),
    ("seed: !!int ''", "1"),
    ("objective:\n\t- s2t", "2"),
    ("seed: \x00", "1"),
]  # fmt: skip

#: A conflict, where it is and what it names.
CONFLICTS = [
    ("seed: 1\nobjective:\n  - token_mean\n  - sequence_mean", "2: objective", "token_mean"),
    ("objective:\n  - preset: dapo\n  - {name: clip_higher, high: 0.3}", "1: objective", "drop: [clip_higher]"),
    ("objective:\n  - s2t\n  - name: within\n    outer: s2t\n    inner: token_mean", "3: objective.1", "token_mean"),
    ("objective:\n  name: within\n  outer: s2t\n  inner: [token_mean, sequence_mean]", "4: objective.inner", "mean"),
    ("objective:\n  - {preset: dapo, drop: [clip_higher, token_mean]}\n  - preset: dr_grpo", "1: objective", "`stages"),
    ("objective: s2t\nstages: [opo, rloo]", "2: stages", "rloo"),
]  # fmt: skip

#: An unknown key, and what its error names instead.
HINTS = {
    "optimisation: {lrr: 1}": "'lr'",
    "optimisation: {Lr: 1}": "'lr'",
    "optimization: {lr: 1}": "'optimisation'",
    "optimisation: {learning_rate: 1}": "optimisation.lr",
    "optimisation: {learnig_rate: 1}": "optimisation.lr",
    "optimisation: {ppo_mini_batch_size: 64}": "optimisation.mini_batches",
    "optimisation: {warmup: 5}": "optimisation.warmup_optimizer_steps",
    "optimisation: {temperature: 1}": "`rollout.temperature`",
    "optimisation: {schedule: {name: cosine, min_lr_rate: 0.1}}": "{name: cosine_with_min_lr, min_lr_rate: ...}",
    "rollout: {num_generations: 8}": "rollout.group",
    "rollout: {use_vllm: true}": "the model that trains",
    "rollout: {min_p: 0.1}": "rollout.temperature",
    "rollout: {kl_loss_coef: 0.1}": "{name: kl, coefficient: ...}",
    "rollout: {epochs: 2}": "`optimisation.epochs`",
    "max_completion_length: 9": "rollout.max_new_tokens",
    "lr: 1e-5": "`optimisation.lr`",
    "out: runs/a": "`tracking.out`",
    "dapo: {}": "{preset: dapo}",
    "s2t: {max_prob: 0.1}": "list it under `objective`",
    "model: {rank: 8}": "model.adapter.r",
    "model: {r: 8}": "`model.adapter.r`",
    "model: {adapter: {lora_alpha: 8}}": "model.adapter.alpha",
    "model: {adapter: {target_modules: [q_proj]}}": "model.adapter.targets",
    "task: {name: jsonl, path: a, subset: main}": "{name: dataset, subset: ...}",
    "task: {name: reasoning_gym, dataset: a, execute_completions: true}": "execute_completions",
    "objective: [{name: clip_higher, epsilon: 0.2}]": "{name: clip_higher, low: ...}",
    "objective: [{name: clip_higher, max_prob: 0.2}]": "the method `s2t`",
    "objective: [{name: kl, coef: 0.2}]": "'coefficient'",
    "objective: [{name: s2t, lr: 0.2}]": "`optimisation.lr`",
    "objective: [{name: clip_higher, eps_hihg: 0.2}]": "{name: clip_higher, high: ...}",
    "objective: [{preset: dapo, high: 0.3}]": "set: {METHOD: {high: ...}}",
    "objective: [{preset: dapo, name: s2t}]": "other methods are items",
    "objective: [{preset: dapo, sets: {}}]": "'set'",
    "optimisation: {seed: 1}": "the top of the run file",
    "rollout: {stages: [overlong]}": "the top of the run file",
    "objective: [{name: kl, type: k3}]": "Known: anchor",
}

#: A name of a method or stage that is not one, and what its error names instead.
NAMES = {
    "objective: [dpao]": "{preset: dapo}",
    "objective: DAPO": "{preset: dapo}",
    "objective: {preset: DAPO}": "'dapo'",
    "objective: {preset: s2t}": "a method of the loss",
    "objective: [clip]": "'clip_higher'",
    "objective: [ppo_clip]": "'clip_higher'",
    "objective: [Clip-Higher]": "'clip_higher'",
    "objective: [kl_loss]": "'kl'",
    "objective: [staer]": "'stare'",
    "objective: [overlong]": "`stages`",
    "objective: [qqq]": "Known: ",
    "stages: [grop]": "'grpo'",
    "stages: [dapo]": "{preset: dapo}",
    "stages: [dynamic_filtering]": "'dynamic_sampling'",
}


def whole(text: str) -> str:
    return text if "objective" in text or text.startswith("- ") else f"{text}\nobjective: s2t\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the file ``run.yaml`` of the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(whole(text))
        return "run.yaml"

    return write


def said(error: type[Exception], *arguments) -> str:
    with pytest.raises(error) as caught:
        load_run(*arguments)
    return str(caught.value)


def test_a_mistake_is_named_with_its_line_and_setting(file):
    for text, where in [*MISTAKES, *UNSEEN]:
        told = said(ConfigError, file(text))
        assert told.startswith(f"run.yaml:{where}: ")
        assert "\n" not in told


def test_an_unknown_key_is_answered_with_what_was_meant(file):
    for text, hint in HINTS.items():
        told = said(ConfigError, file(text))
        assert "unknown key" in told
        assert hint in told


def test_an_unknown_name_is_answered_with_the_nearest_and_with_what_that_is(file):
    for text, hint in NAMES.items():
        assert hint in said(ConfigError, file(text)).partition(" is called ")[2], text
    for name in ("dapo", "s2t"):
        assert load_objective(name) == load_objective({"preset" if name == "dapo" else "name": name})


def test_names_of_other_libraries_lead_to_settings_methods_and_stages_that_exist(file):
    table = yaml.safe_load((Path(validation.__file__).parent / "other_names.yaml").read_text(encoding="utf-8"))
    assert set(table["methods"].values()) <= {*METHODS.names(), *STAGES.names()}
    settings = [f"{section}.{key}" for section in ("model", "rollout", "optimisation", "evaluation", "tracking")
                for key in validation.HEADINGS[section].model_fields]  # fmt: skip
    for name, answer in ((name, text) for names in table["settings"].values() for name, text in names.items()):
        for path in re.findall(r"(?:model|rollout|optimisation|evaluation|tracking)\.[a-z_]+", answer):
            assert path in [*settings, "rollout.chat_template"], name
        for item in re.findall(r"(?:objective|stages): (\[.*\])", answer):
            for leaf in yaml.safe_load(item.replace("...", "1")):
                leaf = {"name": leaf} if isinstance(leaf, str) else leaf
                registry = METHODS if answer.startswith("objective") else STAGES
                assert leaf.keys() - {"name"} <= {one.name for one in settings_of(registry.get(leaf["name"]))}, name


def test_a_file_of_another_kind_is_told_what_takes_it(file):
    bench = "name: b\nbase: {objective: s2t}\nmethods: {a: s2t}\n# objective\n"
    for text, load, hint in (
        (bench, load_run, "rlstab bench run.yaml"),
        (bench, load_objective, "rlstab bench run.yaml"),
        ("seed: 1", load_bench, "rlstab train run.yaml"),
        ("- s2t", load_run, "`objective`"),
        ("model: countdown-tiny", load_run, "model: {name: countdown-tiny}"),
        ("task: countdown", load_run, "task: {name: countdown}"),
        ("objective: [clip_higher: {high: 0.3}]", load_run, "{name: clip_higher, SETTING: ...}"),
        ("objective: [observe: kl]", load_run, "{name: observe, SETTING: ...}"),
        ("tracking: {trackers: wandb}", load_run, "trackers: [wandb]"),
        ("name: b\nbase: {objective: s2t}\nmethods: {a: s2t}\nseed: 3\n# objective", load_bench, "'seeds'"),
        ("stages: {overlong: {length: 3}}", load_run, "{name: overlong, SETTING: ...}"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(file(text))
        assert hint in str(caught.value)


def test_a_conflict_is_named_with_its_line_and_the_way_out(file):
    for text, where, named in CONFLICTS:
        told = said(Conflict, file(text))
        assert told.startswith(f"run.yaml:{where}: ")
        assert named in told


def test_all_mistakes_of_a_file_are_named_at_once_in_its_order(file):
    told = said(
        ConfigError,
        file(
            "seed: 1.5\nrollout:\n  group: a\n  grop: 1\nmodel: {nme: 1}\nobjective:\n  - dpao\n"
            "  - {name: s2t, quantile: 2,\n     max_prb: 1}\n  - preset: dapo\n    drop: [a,\n      b]\n"
            "stages:\n  - grop"
        ),
    )
    assert [line.split(": ")[0] for line in told.splitlines()] == [
        f"run.yaml:{line}" for line in (1, 3, 4, 5, 7, 8, 9, 11, 12, 14)
    ]


def test_a_file_is_read_whole_or_refused(file, monkeypatch):
    monkeypatch.setattr("rlstab.config.document.MAX_BYTES", 16)
    assert load_run(file("objective: s2t\n"))
    assert "16 bytes" in said(ConfigError, file("objective: s2t\nseed: 1\n"))


def test_an_objective_from_python_is_answered_without_a_file():
    endless: dict = {"name": "within", "outer": "s2t"}
    endless["inner"] = endless
    for data, where in [
        ([{"name": "s2t", "quantile": 2}], "objective.0.quantile: "),
        ({"name": "s2t", "quantile": 2}, "objective.quantile: "),
        ({"objectve": "s2t"}, "the key `objective`"),
        (None, "objective: "),
        (b"s2t", "objective: "),
        ([{"name": "kl", "coefficient": 10**5000}], "objective.0.coefficient: "),
        ([{1: 2, "name": "s2t"}], "objective.0"),
        (endless, "objective.inner.inner.inner: "),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_objective(data)
        assert str(caught.value).startswith(where)


def test_an_override_is_named_where_it_is_wrong(file):
    path = file("objective: [s2t]\noptimisation: {lr: 1, epochs: 2}\nseed: 1\n")
    for overrides, where in [
        ({"optimisation.lr": -1}, "--set optimisation.lr: "),
        ({"rollout": {"group": 0}}, "--set rollout: rollout.group: "),
        ({"rollout.group": 0}, "--set rollout.group: "),
        ({"objective": "star"}, "--set objective: objective.name: "),
        ({"objective.0.high": 1}, "--set objective.0.high: "),
        ({"seed.more": 1}, "--set seed.more: "),
        ({"seed": 1, "optimisation.epochs": 0}, "--set optimisation.epochs: "),
    ]:
        assert said(ConfigError, path, overrides).startswith(where)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ('optimisation: {lr: "1e-4"}', "1e-4."),
        ('rollout: {group: "8"}', "8."),
        ("optimisation: {lr: quick}", None),
        ("engine: fsdp", "fsdp2?"),
        ("engine: FSDP2", "fsdp2?"),
        ("engine: zero3", None),
    ],
)
def test_a_quoted_number_and_a_near_value_end_with_what_to_write(tmp_path: Path, text: str, advice: str | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"{text}\nmodel: {{name: countdown-tiny}}\ntask: {{name: countdown}}\nobjective: [s2t]\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError) as error:
        load_run(path)
    assert str(error.value).split()[-1] == advice if advice else not re.search("quotes:|mean", str(error.value))


@pytest.mark.parametrize("line_break", ["\x85", "\u2028", "\u2029"])
def test_a_line_that_unicode_breaks_is_counted_as_yaml_counts_it(line_break: str) -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml:2: not valid YAML"):
        Document.parse(f"a: 0{line_break}!0!0", "f.yaml")
