"""Runs that were made with different settings are told apart or reported, and nothing is left out silently."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlstab.report.comparison import Comparison, compare
from rlstab.report.load import load_runs
from rlstab.report.results_file import export_results
from rlstab.report.tables import rows_of
from tests.report.conftest import config, place_run

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.28}
TOP = {"name": "top_entropy", "share": 0.2}


def run(folder: Path, method: str = "grpo", seed: int = 0, *, setting: str = "default", **changes: Any) -> Path:
    """A finished run of ten rollouts of the bench `b`; changes are sections of its configuration, or its values."""
    folder = folder / "runs" / setting / method / f"seed-{seed}"
    folder.mkdir(parents=True)
    value = changes.pop("value", 0.5 + 0.01 * seed)
    rollouts = changes.pop("done", None) or changes.get("optimisation", {}).get("rollouts", 10)
    whole = config([CLIP], rollouts=rollouts, seed=seed)
    for key, part in changes.items():
        whole[key] = {**whole.get(key, {}), **part} if isinstance(part, dict) else part
    (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    (folder / "run.json").write_text(json.dumps({"run_id": f"{setting}-{method}-{seed}"}))
    place_run(folder, bench="b", setting=setting, method=method, seed=seed)
    lines = [{"rollout": number, "reward/mean": 0.5 + 0.01 * seed} for number in range(1, rollouts + 1)]
    lines[-1]["eval/mean"] = value
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder.parents[3] / "bench.json").write_text('{"name": "b", "baseline": "grpo"}')
    return folder


def told(*folders: Path) -> Comparison:
    return compare(load_runs(*folders), metrics=["eval/mean"])


#: What two of four seeds have, what the others have, and the names under which they are kept apart; none: they are one.
WITHIN = {
    "a learning rate": ({"optimisation": {"lr": 1e-4}}, {"optimisation": {"lr": 0.1}}, ["lr=1e-4", "lr=0.1"]),
    "an adapter": ({"model": {"adapter": None}}, {"model": {"adapter": {"r": 8}}}, ["adapter=null", "adapter=r=8"]),
    "a stage": (
        {"stages": [{"name": "grpo", "std": True}]},
        {"stages": [{"name": "grpo", "std": False}]},
        ["grpo (std=true)", "grpo (std=false)"],
    ),
    "more methods": ({"objective": [CLIP]}, {"objective": [CLIP, TOP]}, ["clip_higher", "top_entropy"]),
    "a weight": (
        {"reward": [{"name": "a", "weight": 1.0}]},
        {"reward": [{"name": "a", "weight": 2.0}]},
        ["weight=1", "weight=2"],
    ),
    "micro-batches with statistics of their own": (
        {"optimisation": {"micro_batch_size": 1, "scope": "microbatch"}},
        {"optimisation": {"micro_batch_size": 4, "scope": "microbatch"}},
        ["micro_batch_size=1", "micro_batch_size=4"],
    ),
    "micro-batches": (
        {"optimisation": {"micro_batch_size": 1, "scope": "step"}},
        {"optimisation": {"micro_batch_size": 4, "scope": "step"}},
        [],
    ),
    "another machine": (
        {"objective": [{"name": "/home/a/my.py:Mine"}]},
        {"objective": [{"name": "/data/b/my.py:Mine"}]},
        [],
    ),
    "a setting of a newer release": ({"rollout": {"group": 4}}, {"rollout": {"group": 4, "new": 1}}, []),
    "the evaluation": ({"evaluation": {"prompts": 8}}, {"evaluation": {"prompts": 64}}, []),
}


@pytest.mark.parametrize("what", WITHIN)
def test_runs_of_one_method_with_different_settings_stand_apart(what: str, tmp_path: Path) -> None:
    first, second, names = WITHIN[what]
    for seed in range(4):
        run(tmp_path, seed=seed, **(first if seed < 2 else second))
    comparison = told(tmp_path)
    groups = {
        f"{table.setting} {method}": len(some) for table in comparison.tables for method, some in table.runs.items()
    }
    assert sorted(groups.values()) == ([2, 2] if names else [4]), groups
    for name in names:
        assert any(name in group for group in groups), groups
    notes = " ".join(comparison.notes)
    assert ("kept apart" in notes) is bool(names)
    assert ("evaluated with different settings: evaluation.prompts 8 (2 runs), 64 (2 runs)" in notes) is (
        what == "the evaluation"
    )


@pytest.mark.parametrize(
    ("setting", "counts"),
    [
        ({"optimisation": {"lr": 2e-3}}, "optimisation.lr 0.002 (grpo 2e-4)"),
        ({"optimisation": {"rollouts": 30}}, "optimisation.rollouts 30 (grpo 10)"),
        ({"rollout": {"staleness": 4}}, "rollout.staleness 4 (grpo 0)"),
        ({"evaluation": {"samples": 1}}, "evaluation.samples 1 (grpo 4)"),
        ({"stages": [{"name": "rloo"}], "objective": [TOP]}, ""),
        ({"tracking": {"samples": 9}, "optimisation": {"gradient_checkpointing": True}}, ""),
    ],
)
def test_a_method_that_differs_in_more_is_told_beside_its_verdict(
    setting: dict[str, Any], counts: str, tmp_path: Path
) -> None:
    usual = {"rollout": {"staleness": 0}, "evaluation": {"samples": 4}, "tracking": {"samples": 2}}
    for seed in range(3):
        run(tmp_path, seed=seed, **usual)
        run(tmp_path, "mine", seed, value=0.9 + 0.02 * seed, **{**usual, **setting})
    comparison = told(tmp_path)
    [table] = comparison.tables
    row = rows_of(table, comparison.outcomes[0])[1]
    assert (counts in row.remark, table.differs == {}) == (True, not counts)
    assert any(counts in note and "more than its method" in note for note in comparison.notes) is bool(counts)


def test_links_are_followed_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for method, seed in (("grpo", 0), ("mine", 0), ("mine", 1), ("checkpoints", 0)):
        run(tmp_path / "b", method, seed)
    inside = tmp_path / "b" / "runs" / "default"
    (tmp_path / "disk").mkdir()
    for moved in (inside / "mine", inside / "grpo" / "seed-0"):
        shutil.move(moved, tmp_path / "disk" / moved.name)
        moved.symlink_to(tmp_path / "disk" / moved.name)
    (inside / "circle").symlink_to(tmp_path / "b")
    (inside / "gone").symlink_to(tmp_path / "unmounted")
    run(tmp_path / "b" / "a" / "b" / "c" / "d" / "e")
    run(inside / "mine" / "seed-0" / "inner", "inner")
    loaded = load_runs(tmp_path / "b")
    names = [(some.method, some.seed) for some in loaded.runs]
    assert names == [("checkpoints", 0), ("grpo", 0), ("inner", 0), ("mine", 0), ("mine", 1)]
    left = {Path(item.path).name: item.why for item in loaded.left_out}
    assert "broken link" in left["gone"]


def test_runs_that_lie_too_deep_are_named(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path.joinpath(*"abcdefgh"), "deep")  # twelve folders down
    assert load_runs(tmp_path).left_out == []
    run(tmp_path.joinpath(*"abcdefghi"), "mine")
    [item] = load_runs(tmp_path).left_out
    assert "was not searched" in item.why


@pytest.mark.parametrize(
    ("finished", "newer", "kept"), [("a", "b", "a"), ("b", "a", "b"), ("ab", "b", "b"), ("", "a", "a")]
)
def test_of_two_copies_the_finished_and_then_the_newer_one_counts(
    finished: str, newer: str, kept: str, tmp_path: Path
) -> None:
    for name in "ab":
        folder = run(tmp_path / name, value=0.1 if name == "a" else 0.2)
        if name not in finished:
            file = folder / "metrics.jsonl"
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:7]))
        os.utime(folder / "metrics.jsonl", (0, 2 if name == newer else 1))
    loaded = load_runs(tmp_path)
    [only] = loaded.runs
    assert Path(only.path).is_relative_to(tmp_path / kept)
    assert "read twice" in loaded.left_out[0].why


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None])
@pytest.mark.parametrize("exported", [False, True])
def test_an_outcome_that_is_no_number_is_missing(value: float | None, exported: bool, tmp_path: Path) -> None:
    for seed in range(4):
        run(tmp_path / "b", seed=seed)
        run(tmp_path / "b", "mine", seed, value=value if seed == 1 else 0.6 + 0.03 * seed)
    source = tmp_path / "b"
    if exported:
        source = export_results(load_runs(source), tmp_path / "b.jsonl")
        text = source.read_text().splitlines()
        number = next(k for k, line in enumerate(text) if '"mine"' in line and '"seed": 1,' in line)
        data = json.loads(text[number])
        data["evaluations"] = [{"rollout": 10, "eval/mean": value}]
        source.write_text("\n".join([*text[:number], json.dumps(data), *text[number + 1 :]]))
    comparison = told(source)
    assert "b: eval/mean is missing in mine seed 1, left out there." in comparison.notes
    assert list(comparison.tables[0].cells["mine", "eval/mean"].values) == [0, 2, 3]


def test_settings_stand_in_the_order_of_the_file_and_others_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        run(tmp_path / "b", setting=f"m{number}", optimisation={"lr": 1e-4}, task={"numbers": number})
        run(tmp_path / "b", f"k{number}", setting="m2", task={"numbers": 2})
    assert [table.setting for table in told(tmp_path / "b").tables] == ["m1", "m2", "m10"]
    assert told(tmp_path / "b").tables[1].methods == ["grpo", "k1", "k2", "k10"]
    names = {"settings": {"m2": {}, "m10": {}, "m1": {}}, "methods": {"grpo": None}, "seeds": [0]}
    (tmp_path / "b" / "bench.yaml").write_text(yaml.safe_dump(names, sort_keys=False))
    for path in (tmp_path / "b").rglob("config.yaml"):  # no sweep, whose values would be the order
        path.write_text(path.read_text().replace("numbers", path.parents[2].name))
    assert [table.setting for table in told(tmp_path / "b").tables] == ["m2", "m10", "m1"]


def test_code_that_changed_between_runs_tells_them_apart(tmp_path: Path) -> None:
    for seed in range(4):
        about = json.loads((run(tmp_path, seed=seed) / "run.json").read_text())
        code = {"code": {"my_reward.py:Mine": "a1b2" if seed < 2 else "c3d4", "data.jsonl": "same"}}
        (tmp_path / "runs" / "default" / "grpo" / f"seed-{seed}" / "run.json").write_text(json.dumps(about | code))
    comparison = told(tmp_path)
    assert [(table.setting, len(table.runs["grpo"])) for table in comparison.tables] == [
        ("my_reward=a1b2", 2),
        ("my_reward=c3d4", 2),
    ]
