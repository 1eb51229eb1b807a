"""The suite: every probe is a whole bench, with the rows that each map has, and says what it predicts."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlstab.bench.file import load_bench
from rlstab.bench.run import run_bench
from rlstab.config.allowed_changes import digest
from rlstab.config.objectives import settings_as_yaml
from rlstab.core.metadata import SOURCES
from rlstab.core.method_settings import settings_of
from rlstab.core.stats import Settled
from rlstab.errors import ConfigError, Conflict, UnknownName
from rlstab.models import SHIPPED
from rlstab.probe import records
from rlstab.probe.map import draw_map
from rlstab.probe.records import Record, identity, made, recorded
from rlstab.probe.rows import Row, row, rows
from rlstab.probe.run import runs_of
from rlstab.probe.suite import FIXED, HERE, NAMES, START, Probe, probes
from rlstab.probe.suite.false_rewards import FalseRewards
from rlstab.probe.suite.shift import Shift
from rlstab.tasks.task import Split
from rlstab.zoo import METHODS
from tests.stages.responses import batch


@pytest.mark.parametrize("probe", probes(), ids=lambda probe: probe.name)
def test_a_probe_is_a_bench_with_doses_and_predictions(probe: Probe) -> None:
    assert {*probe.bench["methods"]} == {*FIXED, START}
    doses = list(map(float, probe.doses))
    assert len(doses) >= (3 if probe.name == "mismatch_top_p" else 5)
    assert doses == sorted(doses)
    assert list(probe.quick_doses) == [dose for dose in probe.doses if dose in probe.quick_doses]
    assert len(probe.quick_doses) == 3
    assert probe.quick_doses[0] == probe.doses[0]
    for policy in ("trainer", "sampler"):
        assert probe.predictions(policy).keys() >= {*FIXED.keys() - {"base"}, *SOURCES, "stage"}
        assert {*probe.predictions(policy).values()} <= {"more", "same", "less"}
    for part in ("Mechanism", "Source", "Recipe", "Dial", "Positive control", "Predictions"):
        assert f"**{part}.**" in probe.text
    assert probe.name == probe.bench["name"]


def test_every_page_belongs_to_a_probe_and_every_bench_file_to_one_of_its_models() -> None:
    assert {path.stem for path in HERE.glob("*.md")} == {*NAMES, "smollm2"}
    assert {path.stem.rpartition("-")[2] for path in HERE.glob("*.yaml")} == set(NAMES)


def test_the_other_model_has_three_doses_of_the_same_dials() -> None:
    for probe in probes(model="smollm2"):
        assert {*probe.bench["methods"]} >= {*FIXED, START} - {"half_lr", "no_clip"}
        assert probe.quick_doses == probe.doses
        assert len(probe.doses) == 3
        assert probe.predictions().keys() >= {"quarter_lr", "random_mask", "control"}
        assert f"]({probe.name}.yaml)" in probe.text
    # rows that none of these probes has are not on its map
    assert {*draw_map(probes(model="smollm2"), {}, []).rows} == {*FIXED} - {"half_lr", "no_clip"}
    with pytest.raises(UnknownName, match="staleness"):
        probes(["stalenes"])
    with pytest.raises(UnknownName, match="smollm2"):
        probes(model="smollm")


def known(probe: Probe, base: Mapping[str, Any] | None = None, *, seeds: Sequence[int] = ()) -> str:
    """The identity of the base at a probe's second dose, with other settings of the run by dotted key."""
    dose = probe.doses[1]
    settings = {dose: {**probe.bench["settings"][dose], **(base or {})}}
    file = {**probe.bench, "settings": settings, "methods": {"base": {}}, "seeds": list(seeds) or probe.bench["seeds"]}
    return identity(load_bench(file).runs[0])


def test_a_run_is_known_by_what_decides_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe("false_positives")
    here = known(probe)
    stage = {"name": f"{HERE}/false_rewards.py:FalseRewards", "positive": 0.3}
    others = [
        known(probe, seeds=[1]),
        known(probe, {"optimisation.lr": 2e-3}),
        known(probe, {"optimisation.old_logprobs": "recompute"}),
        known(probe, {"evaluation.samples": 5}),
        known(probe, {"task.length": 4}),
        known(probe, {"task": {"name": "chain"}}),
        known(probe, {"task": {"name": "countdown"}}),
        known(probe, {"stages": [stage]}),
        known(probe, {"stages": [{**stage, "positive": 0.2}, {"name": "grpo", "std": False}]}),
    ]
    monkeypatch.setattr(records, "NUMBERS", records.NUMBERS + 1)
    others.append(known(probe))
    monkeypatch.undo()
    monkeypatch.setattr(records, "_weights", lambda name: ["others"])
    others.append(known(probe))
    assert len({here, *others}) == len(others) + 1
    objectives: list[Any] = [["clip_higher"], [{"name": "clip_higher", "high": 0.3}], ["clip_higher", "s2t"]]
    objectives += [["clip_higher", {"name": "observe", "method": "s2t"}]]
    objectives += [[{"name": "within", "outer": "s2t", "inner": inner}] for inner in ("stare", "lp_reg")]
    methods = {"base": {}} | {f"m{k}": each for k, each in enumerate(objectives)}
    bench = load_bench({**probe.bench, "methods": methods, "seeds": 1})
    assert len(set(map(identity, bench.runs))) == len(bench.runs) == len(probe.doses) * len(methods)


def test_a_run_is_known_wherever_it_is_made(tmp_path: Path) -> None:
    probe = Probe("false_positives")
    here = known(probe)
    copied, weights = tmp_path / "elsewhere", SHIPPED["shift-tiny"]
    shutil.copytree(HERE, copied)
    shutil.copytree(weights, tmp_path / "renamed")
    base = {**probe.bench["base"], "model": {"name": str(tmp_path / "renamed")}}
    task = {"name": f"{copied}/shift.py:Shift"}
    stage = {"name": f"{copied}/false_rewards.py:FalseRewards", "negative": 0, "seed": 0, "positive": 0.2}
    # code of the suite that has moved, weights of another name, keys in another order, defaults that are said
    turned = {key: base[key] for key in reversed(base)}
    file = {
        **probe.bench,
        "base": turned,
        "methods": {"base": {}},
        "settings": {"x": {"task": task, "stages": [stage]}},
    }
    assert identity(load_bench(file, out=tmp_path / "other").runs[0]) == here
    said = {"optimisation.eps": 1e-8, "rollout.staleness": 0, "rollout.temperature": 1}
    assert known(probe, said) == here
    # code that is not rlstab's own is known by its content
    own = copied / "false_rewards.py"
    own.write_text(own.read_text() + "\n# changed\n")
    assert identity(load_bench(file, out=tmp_path / "other").runs[0]) != here


def test_a_setting_that_is_new_makes_no_record_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_bench(HERE / "false_positives.yaml").runs[0]
    before = identity(run)
    default = dataclasses.replace(settings_of(METHODS.get("clip_higher"))[0], name="added", default=7)
    monkeypatch.setattr("rlstab.probe.records.settings_of", lambda cls: (*settings_of(cls), default))
    added = {"added": 7}
    monkeypatch.setattr("rlstab.probe.records.settings_as_yaml", lambda method: settings_as_yaml(method) | added)
    assert identity(run) == before
    added["added"] = 8
    assert identity(run) != before


def test_what_is_recorded_is_not_stale() -> None:
    """Where this fails, runs are known by another identity, or give other numbers (see `records.NUMBERS`)."""
    tasks = [Shift(), Shift(solvable=0.25), Shift(switch=8), Shift(seed=1)]
    splits: tuple[Split, ...] = ("train", "eval")
    examples = [task.example(split, k) for task in tasks for split in splits for k in range(16)]
    asked = [[example.prompt, dataclasses.astuple(example.answer)] for example in examples]
    scores = [task.score(task.example("train", k), "85024$") for task in tasks for k in range(16)]
    some = batch([0.0, 1.0] * 32)
    shaped = [FalseRewards(negative=p, positive=1 - p).shape(some, Settled(), {}).tolist() for p in (0.2, 0.6)]
    assert known(Probe("false_positives")) == "d6c734789fa6"
    assert digest([asked, scores, shaped]) == "61a2000e4d8f"


OWN = """
from rlstab import Terms, TokenObjective
from rlstab.stages.stage import RewardShaper

class Mine(TokenObjective):
    name = "mine"
    writes = {"keep"}
    def terms(self, batch, stat, state):
        return Terms(keep=batch.advantages > -1)

class Shaper(RewardShaper):
    name = "shaper"
    def shape(self, responses, stat, state):
        return 0 * responses.rewards
"""


def test_rows_join_the_base_take_its_place_or_stand_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "stack.yaml").write_text("objective: [token_mean, {name: s2t}]\nstages: [dr_grpo]\n")
    probe = Probe("false_positives")
    base = probe.bench["base"]["objective"]
    own = str(tmp_path / "own.py")
    entries = {
        asked: row(asked).entry(probe)
        for asked in ("s2t", "clip_higher", "dapo", "dr_grpo", "rloo", f"{own}:Mine", f"{own}:Shaper")
    }
    assert entries["s2t"] == {"objective": [*base, {"name": "s2t"}], "set": {}}
    assert entries["clip_higher"]["objective"] == ["token_mean", {"name": "clip_higher"}]
    assert entries["dapo"]["objective"] == [{"preset": "dapo"}]
    assert entries["dr_grpo"]["objective"] == [{"preset": "dr_grpo"}]  # of two things of one name, the recipe
    assert entries["rloo"]["set"] == {"stages": [{"name": "rloo"}]}
    assert entries[f"{own}:Mine"]["objective"] == [*base, {"name": f"{own}:Mine"}]
    assert entries[f"{own}:Shaper"]["set"] == {"stages": [{"name": f"{own}:Shaper"}]}
    stack = row(str(tmp_path / "stack.yaml"))
    assert (stack.name, stack.whole, stack.stages) == ("stack", True, ("dr_grpo",))
    made = [*map(row, entries), stack]
    methods: dict[str, Any] = {"base": {}} | {line.name: line.entry(probe) for line in made if line.name != "dapo"}
    loaded = load_bench({**probe.bench, "methods": methods})
    own_stages = {run.method: [stage.name for stage in run.config.pipeline] for run in loaded.runs}
    assert own_stages["Shaper"] == ["in_order", "false_rewards", "shaper", "grpo"]


def test_what_acts_by_the_ratio_sees_the_sampler_where_that_is_another() -> None:
    stale, false = Probe("staleness"), Probe("false_positives")
    drift = {
        asked: row(asked).entry(stale)["set"] for asked in ("clip_higher", "cispo", "importance_correction", "s2t")
    }
    assert drift == {
        "clip_higher": {"optimisation.old_logprobs": "rollout"},
        "cispo": {"optimisation.old_logprobs": "rollout"},
        "importance_correction": {},
        "s2t": {},
    }
    assert row("clip_higher").entry(false)["set"] == {}


def test_a_method_that_has_to_be_told_the_length_is_told_that_of_the_probe() -> None:
    for probe in probes():
        told = row("constant_length").entry(probe)["objective"][-1]
        assert told == {"name": "constant_length", "length": probe.bench["base"]["rollout"]["max_new_tokens"]}


def test_what_is_no_row_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="s2t"):
        row("s2tt")
    (tmp_path / "none.yaml").write_text("objective: []\n")
    with pytest.raises(ConfigError, match="objective"):
        row(str(tmp_path / "none.yaml"))
    (tmp_path / "own.py").write_text("class Other:\n    pass\n")
    with pytest.raises(ConfigError, match="neither a method nor a stage"):
        row(f"{tmp_path / 'own.py'}:Other")
    with pytest.raises(ConfigError, match="s2t"):
        rows(["s2t", "s2t"])
    (tmp_path / "base.yaml").write_text("s2t\n")
    with pytest.raises(ConfigError, match="base"):
        rows([str(tmp_path / "base.yaml")])
    with pytest.raises(Conflict, match="cispo"):
        Row("both", ({"name": "cispo"}, {"name": "clip_higher"})).entry(Probe("sparse"))


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_dose_of_the_fixed_rows_ships(every: int, tmp_path: Path) -> None:
    known = recorded()
    runs = [run for probe in probes()[:: min(every, 2)] for run in runs_of(probe, [], False, tmp_path, [])]
    assert {run.method for run in runs} == {*FIXED, START}
    some = {run.name: identity(run) for run in runs[::every]}
    assert [name for name, kept in some.items() if kept not in known] == []
    # several probes share the run without a dose
    base = [(run.setting.rpartition("-")[0], some[run.name]) for run in runs[::every] if run.method == "base"]
    assert len(base) == len(set(base))


@pytest.mark.slow
def test_what_is_recorded_comes_again(tmp_path: Path) -> None:
    """On another processor or version of torch it may be another value, see the page on probes."""
    probe = Probe("false_negatives")
    [run, *_] = runs_of(probe, [], True, tmp_path, [])
    bench = load_bench(probe.bench, out=tmp_path)
    assert run_bench(dataclasses.replace(bench, runs=(run,), again="again")) == 0
    result = made(run, identity(run))
    assert isinstance(result, Record)
    assert result.trainer == recorded()[identity(run)].trainer
