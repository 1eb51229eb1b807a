"""Folders of runs as users have them: what a report says of them before its verdicts, and what it does not say."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlstab.report.comparison import Comparison, compare
from rlstab.report.load import load_runs
from tests.report.conftest import CLIP, curves, place_run, rewards, write_run

LOW = {**CLIP, "high": 0.2}
HIGH = {**CLIP, "high": 0.3}
NAN = float("nan")


def bench(
    root: Path,
    method: str,
    seeds: Sequence[int] = range(4),
    objective: Mapping[str, Any] = HIGH,
    changes: Callable[[int], Mapping[str, Sequence[float]]] = lambda seed: {},
    name: str = "b",
    setting: str = "default",
    **fields: Any,
) -> None:
    """The runs of one method in a bench."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "bench.json").write_text(json.dumps({"name": name, "baseline": "grpo"}))
    for seed in seeds:
        folder = root / f"runs/{setting}/{method}/seed-{seed}"
        write_run(folder, objective=[objective], seed=seed, changes=changes(seed), **fields)
        place_run(folder, bench=name, setting=setting, method=method, seed=seed)


def grpo(root: Path, **fields: Any) -> None:
    bench(root, "grpo", objective=LOW, **fields)


def gained(seed: int) -> dict[str, list[float]]:
    return {"reward/mean": curves(60, seed + 100, gain=0.4)["reward/mean"]}


def same_everywhere(folder: Path) -> None:
    grpo(folder, changes=lambda seed: {"reward/mean": rewards(0, False)})
    bench(folder, "dapo", changes=gained)


def two_of_four_are_one(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo", changes=lambda seed: gained(min(seed, 2)))


def copied_method(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo")
    for seed in range(4):
        place = f"runs/default/%s/seed-{seed}/metrics.jsonl"
        shutil.copy(folder / (place % "grpo"), folder / (place % "dapo"))


def constant_rewards(folder: Path) -> None:
    """Rewards of 0 throughout are no sign of one run."""
    grpo(folder, changes=lambda seed: {"reward/mean": [0.0] * 60})
    bench(folder, "dapo", changes=gained)


def two_levels(folder: Path) -> None:
    """Nor are rewards of two values, with which two short runs may agree by chance."""
    grpo(folder, changes=lambda seed: {"reward/mean": [0.0] * 30 + [0.125] * 30})
    bench(folder, "dapo", changes=gained)


def one_mostly_nan(folder: Path) -> None:
    grpo(folder)
    bench(
        folder,
        "dapo",
        changes=lambda seed: {"reward/mean": rewards(seed, False)[:20] + [NAN] * 40} if seed == 2 else {},
    )


def nan_in_between(folder: Path) -> None:
    grpo(folder)
    bench(
        folder,
        "dapo",
        changes=lambda seed: {"reward/mean": [NAN if 10 <= k < 22 else v for k, v in enumerate(rewards(seed, False))]},
    )


def all_nan(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo", changes=lambda seed: {"reward/mean": rewards(seed, False)[:20] + [NAN] * 40})


def three_lost(folder: Path) -> None:
    grpo(folder, seeds=range(8))
    bench(folder, "dapo", range(8), changes=lambda seed: {"reward/mean": rewards(seed, seed in (2, 5, 6))})


def seeds_by_name_only(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo", changes=gained)
    for file in folder.rglob("config.yaml"):
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "seed": 0}))


def seeds_as_text(folder: Path) -> None:
    for name, objective in (("g", LOW), ("d", HIGH)):
        for seed in range(3):
            file = write_run(folder / f"{name}{seed}", objective=[objective], seed=seed) / "config.yaml"
            file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "seed": str(seed)}))


def one_seed_twice(folder: Path) -> None:
    for seed in range(3):
        write_run(folder / f"g{seed}", objective=[LOW], seed=seed)
        write_run(folder / f"d{seed}", objective=[HIGH], seed=seed, changes=gained(seed))
    write_run(folder / "d0-again", objective=[HIGH], seed=0, changes=gained(7), about={"run_hash": "other"})


def one_name_twice(folder: Path) -> None:
    for name, seeds in (("first", range(4)), ("second", range(4, 8))):
        grpo(folder / name / "b", seeds=seeds)
        bench(folder / name / "b", "dapo", seeds, changes=gained)


def one_name_and_seeds_twice(folder: Path) -> None:
    for name in ("first", "second"):
        grpo(folder / name / "b", about={"run_hash": name})
        bench(
            folder / name / "b",
            "dapo",
            changes=gained if name == "first" else lambda seed: {},
            about={"run_hash": name},
        )


def renamed(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo", (0, 1), changes=gained)
    bench(folder, "DAPO", (2, 3), changes=gained)


def renamed_otherwise(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo", (0, 1), changes=gained)
    bench(folder, "clip-higher", (2, 3), changes=gained)


def one_case_two_methods(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo")
    bench(folder, "DAPO", objective={**CLIP, "high": 0.4})


def evaluated_otherwise(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo", changes=gained)
    for file in folder.rglob("config.yaml"):
        prompts = 16 if "dapo" in str(file) else 64
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "evaluation": {"prompts": prompts}}))


def all_well(folder: Path) -> None:
    grpo(folder)
    bench(folder, "dapo", changes=gained)


def other_trainer(folder: Path) -> None:
    """Methods without an objective are not called alike."""
    grpo(folder)
    bench(folder, "dapo", changes=gained)
    for file in folder.rglob("config.yaml"):
        file.write_text(yaml.safe_dump({"lr": 1e-5 if "dapo" in str(file) else 1e-6, "optimisation": {"rollouts": 60}}))


#: A situation, words of the sentences beside the verdict, and lost runs and verdict of ``dapo`` in the first table.
SITUATIONS: list[tuple[Callable[[Path], None], list[str], str, str]] = [
    (all_well, [], "0 of 4", "higher"),
    (same_everywhere, ["The seeds of grpo are one run: seeds 0, 1, 2 and 3"], "0 of 4", "too few seeds"),
    (two_of_four_are_one, ["Some seeds of dapo are one run: seeds 2 and 3"], "0 of 3", "higher"),
    (copied_method, [], "0 of 4", "identical"),
    (constant_rewards, [], "0 of 4", "higher"),
    (two_levels, [], "0 of 4", "higher"),
    (one_mostly_nan, ["67 % of the rewards of dapo, seed 2, are NaN or Inf; these runs count as lost"], "1 of 4", ""),
    (nan_in_between, ["20 % of the rewards of dapo, seeds 0, 1, 2 and 3, are NaN or Inf; means leave"], "0 of 4", ""),
    (all_nan, ["67 % of the rewards of dapo, seeds 0, 1, 2 and 3"], "4 of 4", "too few seeds"),
    (three_lost, [], "3 of 8", "identical"),
    (seeds_by_name_only, ["By config.yaml, seeds 1, 2 and 3 of dapo", "2 and 3 of grpo are 0"], "0 of 4", "higher"),
    (seeds_as_text, [], "", ""),
    (one_seed_twice, ["Seed 0 of clip_higher (high=0.3) ran 2 times, with different results (d0 and"], "", ""),
    (one_name_twice, ["Runs of 2 benches of this name count together"], "0 of 8", "higher"),
    (one_name_and_seeds_twice, [], "0 of 4", "higher"),
    (renamed, ["DAPO and dapo have the same settings under 2 names"], "0 of 2", "too few seeds"),
    (renamed_otherwise, ["clip-higher and dapo have the same settings under 2 names"], "0 of 2", "too few seeds"),
    (one_case_two_methods, ["DAPO and dapo differ only in case, and have other settings"], "0 of 4", ""),
    (evaluated_otherwise, [], "0 of 4", "higher"),
    (other_trainer, [], "0 of 4", "higher"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words", "lost", "verdict"), SITUATIONS, ids=[row[0].__name__ for row in SITUATIONS])
def test_what_is_said_of_a_situation(
    make: Callable[[Path], None], words: list[str], lost: str, verdict: str, tmp_path: Path
) -> None:
    make(tmp_path)
    comparison = compare(load_runs(tmp_path), metrics=["reward/area"])
    assert len(comparison.checks) == len(words), comparison.checks
    for expected in words:
        assert any(expected in check for check in comparison.checks), comparison.checks
    table = comparison.tables[0]
    if lost:
        assert str(table.losses["dapo"].rate) == lost
    if verdict:
        assert table.cells["dapo", "reward/area"].paired.verdict == verdict


def test_a_seed_that_ran_twice_is_not_called_unfinished(tmp_path: Path) -> None:
    one_seed_twice(tmp_path)
    comparison = compare(load_runs(tmp_path))
    assert not [note for note in comparison.notes if "only one of method" in note]


def test_a_setting_of_evaluations_stands_beside_evaluations_alone(tmp_path: Path) -> None:
    from rlstab.report.tables import rows_of

    evaluated_otherwise(tmp_path)
    comparison: Comparison = compare(load_runs(tmp_path))
    remarks = {outcome.name: rows_of(comparison.tables[0], outcome)[1].remark for outcome in comparison.outcomes}
    assert {name for name, remark in remarks.items() if "evaluation.prompts 16 (grpo 64)" in remark} == {
        name for name in remarks if name.startswith("eval/")
    }


def test_seeds_as_text_are_seeds(tmp_path: Path) -> None:
    seeds_as_text(tmp_path)
    assert sorted({run.seed for run in load_runs(tmp_path).runs}) == [0, 1, 2]
    assert np.array_equal(sorted({run.setting for run in load_runs(tmp_path).runs}), ["default"])
