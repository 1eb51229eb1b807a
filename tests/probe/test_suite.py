"""The suite: every probe is a whole bench, with the rows that each map has, and says what it predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlstab.bench.file import load_bench
from rlstab.core.metadata import SOURCES
from rlstab.errors import ConfigError, Conflict, UnknownName
from rlstab.probe.records import identity
from rlstab.probe.rows import Row, row, rows
from rlstab.probe.suite import FIXED, HERE, NAMES, START, Probe, probes


@pytest.mark.parametrize("probe", probes(), ids=lambda probe: probe.name)
def test_a_probe_is_a_bench_with_doses_and_predictions(probe: Probe) -> None:
    assert {*probe.bench["methods"]} == {*FIXED, START}
    doses = list(map(float, probe.doses))
    assert len(doses) >= 5
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
    bench = load_bench(HERE / f"{probe.name}.yaml")
    assert len({run.hash for run in bench.runs if run.method == "base"}) == len(doses) * len(probe.bench["seeds"])


def test_every_page_belongs_to_a_probe_and_every_bench_file_to_one_of_its_models() -> None:
    assert {path.stem for path in HERE.glob("*.md")} == set(NAMES)
    assert {path.stem.rpartition("-")[2] for path in HERE.glob("*.yaml")} == set(NAMES)


def test_the_other_model_has_three_doses_of_the_same_dials() -> None:
    for probe in probes(model="smollm2"):
        assert {*probe.bench["methods"]} >= {*FIXED, START} - {"half_lr", "no_clip"}
        assert probe.quick_doses == probe.doses
        assert len(probe.doses) == 3
    with pytest.raises(UnknownName, match="staleness"):
        probes(["stalenes"])
    with pytest.raises(UnknownName, match="smollm2"):
        probes(model="smollm")


def test_a_run_is_known_by_what_decides_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe("false_positives")

    def first(**more: Any) -> str:
        return identity(load_bench({**probe.bench, **more}, out=tmp_path / "other").runs[0])

    here = identity(load_bench(HERE / "false_positives.yaml").runs[0])
    assert first() == here
    assert first(seeds=[1]) != here
    monkeypatch.setattr("rlstab.probe.records.__version__", "9.9.9")
    assert first() != here
    monkeypatch.undo()
    monkeypatch.setattr("rlstab.probe.records._model", lambda name: ["another"])
    assert first() != here


OWN = """
from rlstab import Terms, TokenObjective
from rlstab.stages.stage import RewardShaper

class Mine(TokenObjective):
    name = "mine"
    needs = {"advantages"}
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


def test_what_is_no_row_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="s2t"):
        row("s2tt")
    (tmp_path / "none.yaml").write_text("stages: [rloo]\n")
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
