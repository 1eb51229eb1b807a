"""Bench files: what they expand to, and what is said about mistakes."""

from pathlib import Path

import pytest

from rlstab.bench.file import Bench, load_bench
from rlstab.cli import main
from rlstab.config import load_run, run_hash
from rlstab.config.document import dump
from rlstab.errors import ConfigError
from tests.bench.test_run import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = "name: x\nbase: {objective: clip_higher}\n"


def loaded(tmp_path: Path, text: str) -> Bench:
    (tmp_path / "b.yaml").write_text(text)
    return load_bench(tmp_path / "b.yaml")


def mistakes(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_runs_come_seed_by_seed_and_each_is_that_of_its_run_file(tmp_path: Path) -> None:
    methods = {"a": {"objective": {"preset": "dr_grpo"}, "set": {"optimisation.epochs": 2}}, "b": "s2t"}
    settings = {"slow": {"optimisation.lr": 1e-4}, "fast": {"optimisation.lr": 1e-2}}
    file = tiny(tmp_path, methods, settings=settings, seeds=[3, 1])
    bench = load_bench(file)
    assert [run.name for run in bench.runs] == [
        f"{setting}/{method}/seed-{seed}" for seed in (3, 1) for setting in ("slow", "fast") for method in ("a", "b")
    ]
    last = bench.runs[-1]
    assert (last.config.seed, last.config.optimisation.lr, list(last.config.composition.keyed)) == (1, 1e-2, ["s2t"])
    assert last.folder == tmp_path / "runs" / "fast" / "b" / "seed-1"
    assert (bench.file.baseline, bench.workers) == ("a", 2)
    alone = {**file["base"], "objective": {"preset": "dr_grpo"}, "seed": 3}
    assert bench.runs[0].hash == run_hash(load_run(alone, {"optimisation.epochs": 2, "optimisation.lr": 1e-4}))
    assert bench.runs[0].config.pipeline.estimator.name == "dr_grpo"


def test_a_method_may_bring_stages_of_its_own_which_come_after_those_of_a_setting(tmp_path: Path) -> None:
    """The list as a whole: it has no keys to set one by one."""
    stages = {"own": [{"name": "paced", "pool": 64}, "rloo"], "none": []}
    entries = {name: {"objective": "clip_higher", "set": {"stages": some}} for name, some in stages.items()}
    settings = {"long": {"stages": [{"name": "overlong", "buffer": 4}]}}
    bench = load_bench(tiny(tmp_path, entries, settings=settings))
    names = {run.method: [stage.name for stage in run.config.pipeline] for run in bench.runs}
    assert names == {"own": ["paced", "overlong", "rloo"], "none": ["in_order", "overlong", "grpo"]}


def test_a_method_scales_or_replaces_what_the_setting_says(tmp_path: Path) -> None:
    methods = {
        "half": {"objective": "s2t", "scale": {"optimisation.lr": 0.5}},
        "exact": {"objective": "s2t", "set": {"rollout.precision": None, "task.low": 2}},
    }
    settings = {"slow": {"rollout.precision": "int4", "task": {"name": "countdown", "high": 8}}}
    settings["fast"] = {"optimisation.lr": 1e-2, "task": {"name": "countdown"}, "model.teacher": "countdown-tiny"}
    bench = load_bench(tiny(tmp_path, methods, settings=settings))
    values = {run.name: (run.config.optimisation.lr, run.config.rollout.precision) for run in bench.runs}
    assert list(values.values()) == [(5e-4, "int4"), (1e-3, None), (5e-3, None), (1e-2, None)]
    assert [run.config.model.teacher for run in bench.runs] == [None, None, "countdown-tiny", "countdown-tiny"]
    assert [(run.config.task.low, run.config.task.high) for run in bench.runs] == [(1, 8), (2, 8), (1, 9), (2, 9)]
    assert [run.hash for run in load_bench(bench.resolved).runs] == [run.hash for run in bench.runs]


def test_what_is_the_same_or_has_one_folder_is_told(tmp_path: Path) -> None:
    file = tiny(tmp_path, {"a": "clip_higher", "A": "s2t", "again": "clip_higher"}, seeds=1)
    values = {"optimisation.lr": 1e-4}
    notes = load_bench({**file, "settings": {"one": values, "two": {"optimisation.lr": 1e-3}, "One": values}}).notes
    assert [note.split(":")[0] for note in notes] == [
        "the settings one, One are the same",
        "the settings one, One differ only in case",
        "the methods a, again are the same",
        "the methods a, A differ only in case",
    ]


@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_file_of_the_other_kind_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"objective": "clip_higher", "model": {"name": "countdown-tiny"}}
    (tmp_path / "f.yaml").write_text(dump(run if command == "bench" else tiny(tmp_path / "out", {"a": "s2t"})))
    assert main([command, str(tmp_path / "f.yaml")]) == 2
    other = "a run file" if command == "bench" else "a bench file"
    assert f"this is {other}" in capsys.readouterr().err


def test_the_base_may_be_a_file_beside_and_wants_checkpoints_or_not(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    base = "objective: s2t\noptimisation: {rollouts: 9}\ntracking: {out: elsewhere}\n"
    (tmp_path / "runs" / "base.yaml").write_text(base)
    bench = loaded(tmp_path, "name: x\nbase: runs/base.yaml\nmethods: {own: {}, other: stare}\nseeds: 1\n")
    own, other = (run.config for run in bench.runs)
    assert (list(own.composition.keyed), list(other.composition.keyed)) == (["s2t"], ["stare"])
    assert (own.optimisation.rollouts, own.tracking.checkpoint_every) == (9, 0)
    assert own.tracking.out == "runs/x/runs/default/own/seed-0"
    file = tiny(tmp_path, {"a": "s2t"})
    file["base"]["tracking"] = {"checkpoint_every": 7}
    assert load_bench(file).runs[0].config.tracking.checkpoint_every == 7


def test_the_resolved_file_loads_to_the_same_bench(tmp_path: Path) -> None:
    stack = "stack: [s2t, {name: stare, share: 0.2}]\nsettings: {a: {optimisation.lr: 1e-4}}\nseeds: 2\n"
    bench = loaded(tmp_path, HEAD + stack)
    resolved = dump(bench.resolved)
    assert "stack" not in resolved
    assert "&" not in resolved  # nothing is shared, which YAML would write as an alias
    again = loaded(tmp_path, resolved)
    assert again.resolved == bench.resolved
    assert [(run.name, run.hash) for run in again.runs] == [(run.name, run.hash) for run in bench.runs]


def test_a_stack_is_taken_apart(tmp_path: Path) -> None:
    for text, made in (
        (
            f"{HEAD}stack: [s2t, {{name: stare}}, kl]\nablate: leave_one_out\n",
            {
                "base": "clip_higher",
                "all": "clip_higher kl s2t stare",
                "all-minus-s2t": "clip_higher kl stare",
                "all-minus-stare": "clip_higher kl s2t",
                "all-minus-kl": "clip_higher s2t stare",
            },
        ),
        (
            f"{HEAD}stack: [s2t, {{name: stare}}]\nablate: add_one_in\n",
            {
                "base": "clip_higher",
                "all": "clip_higher s2t stare",
                "base-plus-s2t": "clip_higher s2t",
                "base-plus-stare": "clip_higher stare",
            },
        ),
        (  # without a base it stands alone
            "name: x\nbase: {}\nstack: [{preset: dapo}, s2t]\n",
            {
                "all": "clip_higher s2t token_mean",
                "base-plus-dapo": "clip_higher token_mean",
                "base-plus-s2t": "s2t",
            },
        ),
        (  # beside methods
            f"{HEAD}methods: {{first: stare}}\nstack: [s2t]\n",
            {"first": "stare", "base": "clip_higher", "all": "clip_higher s2t"},
        ),
    ):
        bench = loaded(tmp_path, text)
        parts = {run.method: " ".join(run.config.composition.keyed) for run in bench.runs if run.seed == 0}
        assert list(parts.items()) == list(made.items())
        assert bench.file.baseline == next(iter(made))


ONE = f"{HEAD}methods: {{a: s2t}}\n"


#: A file, and the line and the setting that its error names.
MISTAKES = [
    ("[1]", "b.yaml:1"),
    (f"{ONE}sedes: 3\n", "b.yaml:4: sedes"),
    ("base: {}\n", "b.yaml:1"),
    ("name: a/b\nbase: {}\nmethods: {a: s2t}\n", "b.yaml:1: name"),
    (f"{HEAD}methods:\n  ..: s2t\n", "b.yaml:4: methods..."),
    (f"{HEAD}methods: {{a: s3t}}\n", "b.yaml:3: objective.name"),
    (f"{HEAD}methods:\n  a: {{objectve: s2t}}\n", "b.yaml:4: methods.a.objectve"),
    (f"{HEAD}stack: [s2t]\nablate: all\n", "b.yaml:4: ablate"),
    (f"{ONE}seeds: 0\n", "b.yaml:4: seeds"),
    (f"{ONE}seeds: [10000000000]\n", "b.yaml:4: seeds.0"),
    ("name: x\nbase: 3\nmethods: {a: s2t}\n", "b.yaml:2: base"),
    ("name: x\nbase: {optimisation: {lrr: 1.0}}\nmethods: {a: s2t}\n", "b.yaml:2: optimisation.lrr"),
    (f"{HEAD}stack: [zzz]\n", "b.yaml:3: objective.1.name"),
    (f"{HEAD}methods: {{a: {{objective: zzz}}}}\n", "b.yaml:3: objective.name"),
    (f"{HEAD}methods: {{1: s2t}}\n", "b.yaml:3"),
    (HEAD, "b.yaml:1: methods"),
    ("name: x\nbase: {}\nmethods:\n  a: {set: {optimisation.lr: 1.0}}\n", "b.yaml:4: methods.a"),
    (f"{HEAD}methods: {{a: s2t}}\nbaseline: b\n", "b.yaml:4: baseline"),
    (f"{HEAD}ablate: both\n", "b.yaml:3: ablate"),
    (f"{HEAD}stack:\n  - s2t\n  - {{name: s2t}}\n", "b.yaml:5: stack.1"),
    (f"{HEAD}methods: {{all: s2t}}\nstack: [s2t]\n", "b.yaml:3: methods.all"),
    (f"{ONE}seeds: [1, 1]\n", "b.yaml:4: seeds.1"),
    (f"{ONE}seeds: 10000000000\n", "b.yaml:4: seeds"),
    (f"{HEAD}methods: {{a: s2t, b: kl}}\nsettings: {{c: {{}}, d: {{}}}}\nseeds: 25001\n", "b.yaml:5: seeds"),
    (f"{ONE}settings: {{a: {{rollout.group: 10000000000}}}}\n", "b.yaml:4: rollout.group"),
    (f"{HEAD}methods:\n  a: {{scale: {{rollout.stop: 2.0}}}}\n", "b.yaml:4: methods.a.scale.rollout.stop"),
    (f"{HEAD}methods:\n  a: {{scale: {{seed.x: 2.0}}}}\n", "b.yaml:4: methods.a.scale.seed.x"),
    ("name: x\nbase: no.yaml\nmethods: {a: s2t}\n", "b.yaml:2: base"),
    (f"{ONE}settings:\n  fast: {{optimisation.lrr: 1.0}}\n", "b.yaml:5: optimisation.lrr"),
    (f"{ONE}settings:\n  fast: {{seed.x: 1}}\n", "b.yaml:5: settings.fast.seed.x"),
    (f"{ONE}settings:\n  fast: {{model.name: other}}\n", "b.yaml:5: settings.fast.model.name"),
    (f"{ONE}settings:\n  fast: {{objective: s2t}}\n", "b.yaml:5: settings.fast.objective"),
    (f"{ONE}settings:\n  fast: {{tracking.out: x}}\n", "b.yaml:5: settings.fast.tracking.out"),
    (f"{ONE}settings:\n  fast: {{optimisation: {{lr: 1.0}}}}\n", "b.yaml:5: settings.fast.optimisation"),
    (
        f"{ONE}settings:\n  fast: {{task.name.x: 1}}\n".replace("{objective", "{task: {name: chain}, objective"),
        "b.yaml:5: task.name.x",
    ),
]


def test_a_mistake_is_pointed_at(tmp_path: Path) -> None:
    for text, place in MISTAKES:
        assert f"{place}: " in mistakes(tmp_path, text)


def test_all_mistakes_come_at_once_each_with_its_runs(tmp_path: Path) -> None:
    text = (
        "name: x\nbase: {rollout: {prompts: 4}}\n"
        "methods:\n  a: [clip_higher, {name: lp_reg, ratio_cap: 5.0}]\n  b: s2t\n"
        "settings:\n  one: {}\n  three: {optimisation.mini_batches: 3}\n"
    )
    lines = mistakes(tmp_path, text).splitlines()
    assert [line.split(": ")[:2] if line.startswith("b.yaml") else line for line in lines if "Remove" not in line] == [
        ["b.yaml:4", "objective"],
        "  in one/a, three/a",
        ["b.yaml:8", "optimisation.mini_batches"],
        "  in three/a, three/b",
    ]


def test_the_comparison_of_s2t_is_one_setting() -> None:
    """What `make compare` runs is the full bench with other seeds, and the mirror differs in its task alone."""
    short, full, rates, mirror = (
        {f"{run.setting}/{run.method}": run.config for run in load_bench(EXAMPLES / f"bench_{name}.yaml").runs}
        for name in ("s2t", "spurious", "spurious_rates", "mirror")
    )
    for name, run in short.items():
        same = {"seed": 0, "tracking": run.tracking}
        assert full[name].model_copy(update=same) == run.model_copy(update=same)
    for bench, changed in ((rates, "optimisation"), (mirror, "task")):
        for name, run in bench.items():
            base = full[f"default/{name.partition('/')[2]}"]
            assert getattr(run, changed) != getattr(base, changed)
            kept = {changed: getattr(run, changed), "tracking": run.tracking, "seed": 0}
            assert base.model_copy(update=kept) == run.model_copy(update=kept)
