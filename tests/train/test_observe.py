"""What is only observed, from YAML to a trained run: loaded, explained, traced, and without effect."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from rich.console import Console

from rlstab import ClipHigher, LpReg, S2TMask, compose, load_objective, observe, within
from rlstab.config import Document, dump_objective, dump_run, json_schema, load_run, objective_hash, run_hash
from rlstab.core.metadata import summary
from rlstab.errors import Conflict
from rlstab.explain.page import page
from rlstab.explain.tables import check
from rlstab.report.activity import idle_parts
from rlstab.report.load import load_runs
from rlstab.report.runs import objective_names
from tests.train.runs import go, small, weights

YAML = """
objective:
  - clip_higher
  - {name: observe, method: {name: s2t, max_prob: 0.2}}
  - {name: observe, method: [stare, {name: within, outer: s2t, inner: lp_reg}]}
"""
OBJECTIVE = Document.parse(YAML, "f.yaml").data["objective"]


def test_it_loads_dumps_and_hashes() -> None:
    loaded = load_objective(OBJECTIVE)
    assert list(loaded.keyed) == ["clip_higher", "observe_s2t", "observe_stare", "observe_within"]
    assert loaded.keyed["observe_s2t"] == observe(S2TMask(max_prob=0.2))
    assert loaded.keyed["observe_within"] == observe(within(S2TMask(), LpReg()))
    again = load_objective(dump_objective(loaded))
    assert again == loaded
    assert objective_hash(again) == objective_hash(loaded)
    hashes = {
        objective_hash(one)
        for one in (
            compose(S2TMask()),
            compose(observe(S2TMask())),
            compose(observe(S2TMask(max_prob=0.1))),
            compose(ClipHigher()),
        )
    }
    assert len(hashes) == 4
    run = load_run({"objective": OBJECTIVE})
    assert load_run(Document.parse(dump_run(run), "g.yaml").data) == run
    assert run_hash(run) != run_hash(load_run({"objective": "clip_higher"}))


def test_it_is_in_the_schema() -> None:
    def fits(data: Any) -> bool:
        return bool(jsonschema.Draft202012Validator(json_schema()).is_valid({"objective": data}))

    assert fits(OBJECTIVE)
    assert fits(dump_objective(load_objective(OBJECTIVE)))
    assert fits({"name": "observe", "method": {"preset": "stapo"}})
    assert not fits([{"name": "observe"}])
    assert not fits([{"name": "observe", "method": "s2t", "share": 0.5}])


def test_what_cannot_be_observed_says_so_with_its_line() -> None:
    with pytest.raises(Conflict) as caught:
        load_run({"objective": ["s2t", {"name": "observe", "method": "token_mean"}]})
    assert str(caught.value) == (
        "objective.1: observe('token_mean'): it defines the aggregate of every token, so there is nothing to count.\n"
        "  Compare two runs instead, one with it and one without."
    )


def test_it_is_explained_as_only_observed(tmp_path: Path) -> None:
    run = load_run({"objective": OBJECTIVE})
    text = page("a run", run.composition, run)
    assert "**Only observed.** `observe_s2t`: Measure and report what `s2t` would do, and change nothing." in text
    assert "**Drop.** No token is dropped." in text
    assert "This one adds `observe_s2t`; adds `observe_stare`; adds `observe_within`." in text
    assert "- `entropies`, for `observe_s2t`, `observe_stare`, `observe_within`:" in text
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    console = Console(file=io.StringIO(), width=2000)
    check(str(file), {}, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"Only observed: {summary(S2TMask)} " in shown
    assert ":func:" not in shown


def test_a_run_with_it_is_the_run_without(tmp_path: Path) -> None:
    """Two rollouts of two optimizer steps; the state goes through a checkpoint, the tokens to the trace."""
    changes = {
        "optimisation__rollouts": 2,
        "optimisation__epochs": 2,
        "tracking__trace_every": 1,
        "tracking__checkpoint_every": 1,
    }
    alone = go(small(tmp_path / "alone", "clip_higher", **changes))
    beside = go(small(tmp_path / "beside", OBJECTIVE, **changes))
    one, other = weights(tmp_path / "alone"), weights(tmp_path / "beside")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for mine, theirs in zip(alone.records, beside.records, strict=True):
        shared = {name for name in mine if not name.startswith("seconds/")}
        assert {name: theirs[name] for name in shared} == {name: mine[name] for name in shared}
        assert "observe_s2t/would_drop" in theirs
        assert "observe_within/inner/would_penalise" in theirs
        assert all(math.isfinite(value) for name, value in theirs.items() if name.startswith("observe_"))
    traced = [json.loads(line) for line in (tmp_path / "beside" / "tokens.jsonl").read_text().splitlines()]
    assert traced
    (record,) = load_runs(tmp_path / "beside").runs
    assert objective_names(record.config) == ["clip_higher", "observe_s2t", "observe_stare", "observe_within"]
    assert not [name for name, _ in idle_parts(record) if "observe" in name]
