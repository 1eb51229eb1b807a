"""The sentences of a report: what differs with its interval, what does not, and nothing that was not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from rlstab.report.comparison import compare
from rlstab.report.findings import findings
from rlstab.report.formatting import MINUS, decimals, estimate, places, setting
from rlstab.report.load import load_runs
from rlstab.report.page import contents
from rlstab.report.runs import Loaded, RunRecord
from tests.report.conftest import CLIP, S2T, config, record, write_bench


def runs(ends: Mapping[str, Sequence[float]], **fields: object) -> list[RunRecord]:
    """Runs of thirty rollouts by method, whose held-out mean ends at the given values, one per seed."""
    return [
        record(
            {"reward/mean": [0.5] * 30},
            method=method,
            seed=seed,
            evaluations=[{"rollout": 30, "eval/mean": value}],
            config=config([{"name": "token_mean"}], rollouts=30),
            **fields,
        )
        for method, values in ends.items()
        for seed, value in enumerate(values)
    ]


def said(some: Sequence[RunRecord]) -> str:
    return " ".join(findings(compare(Loaded(list(some), [], []), metrics=["eval/mean"])))


def test_a_difference_comes_with_its_interval():
    ends = {
        "grpo": [0.20, 0.21, 0.19, 0.20],
        "better": [0.30, 0.32, 0.29, 0.31],
        "worse": [0.10, 0.12, 0.09, 0.11],
        "alike": [0.21, 0.20, 0.20, 0.19],
        "same": [0.20, 0.21, 0.19, 0.20],
        "few": [0.9, 0.9],
    }
    text = said(runs(ends))
    assert "Held-out reward compared with grpo over 2 to 4 seeds: better is higher by 0.105 [0.096, 0.114]" in text
    # lower by a positive amount, its interval turned with it
    assert "worse is lower by 0.095 [0.086, 0.104]" in text
    assert "alike shows no visible difference" in text
    assert "same gave exactly the values of grpo" in text
    assert "2 seeds are too few to tell few from grpo" in text
    assert "None of the 22 runs collapsed." in text


def test_many_settings_tell_only_what_differs():
    ends = {"grpo": [0.20, 0.21, 0.19], "alike": [0.21, 0.20, 0.20]}
    some = [run for name in "abcd" for run in runs(ends, setting=name)]
    assert "4 comparisons with the baseline in 4 settings: no visible difference in all." in said(some)
    some += runs({"grpo": [0.2, 0.21, 0.19], "better": [0.30, 0.31, 0.29]}, setting="e")[:-1]
    assert "5 comparisons with the baseline in 5 settings: no visible difference in 4; too few" in said(some)


def test_failures_and_falls_are_counted_apart():
    fine, lost = runs({"grpo": [0.2, 0.2, 0.2]}), runs({"other": [0.2]}, status="failed", error="OutOfMemoryError")
    falling = record({"reward/mean": [0.5] * 20 + [0.0] * 40}, method="fell")
    text = said([*fine, *lost, falling])
    assert (
        "Collapsed (the reward fell, or NaN or Inf ended the run): 1 of 1 run of fell. Failed: 1 of 1 run of other."
        in text
    )


def test_idle_methods_are_told_once(bench):
    text = " ".join(findings(compare(load_runs(bench))))
    assert "clip_higher never acted in 20_entropy, s2t and stare: on-policy, the ratio is 1." in text
    assert "stare never acted: its gate never opened" in text


def test_a_sweep_names_the_highest_stable_value(sweep):
    text = findings(compare(load_runs(sweep)))[0]
    assert "The highest optimisation.lr at which training is stable: 1e-4 for grpo and 2e-4 for s2t." in text


@pytest.mark.parametrize(
    ("value", "text"), [(1.5e-4, "1.5e-4"), (2e-4, "2e-4"), (0.02, "0.02"), (16, "16"), (0, "0"), (3e7, "3e7")]
)
def test_a_setting_is_written_as_one_would(value, text):
    assert setting(value) == text


def test_numbers_keep_the_decimals_of_their_column():
    assert places([0.3, 0.25]) == 3
    assert places([12.5, 0.1]) == 1
    assert places([0.00042]) == 5
    assert decimals(-0.1234, 3) == f"{MINUS}0.123"
    # what rounds to zero has no sign
    assert decimals(-0.0001, 3, signed=True) == "0.000"
    assert decimals(None, 3) == "\u2013"
    assert estimate(0.5, 0.25, None) == "0.500"


def test_what_no_seed_can_tell_is_not_called_alike(bench):
    found = compare(load_runs(bench))
    assert any("Held-out entropy is higher for 20_entropy (by " in one for one in findings(found))
    alone = [run for run in found.loaded.runs if run.seed == 0]
    text = " ".join(findings(compare(Loaded(alone, [], []))))
    assert "s2t gave exactly the values of grpo; one seed is too few to tell 20_entropy and stare from grpo" in text
    assert "Held-out entropy is the same as that of grpo for s2t." in text


def test_what_only_its_own_interval_tells_is_neither_found_nor_hidden():
    rng = np.random.default_rng(0)
    baseline = {"grpo": rng.normal(0.3, 0.01, 5).tolist()}
    ends = {f"other{k}": (np.array(baseline["grpo"]) + 0.001 * rng.normal(size=5)).tolist() for k in range(4)}
    almost = [value + step for value, step in zip(baseline["grpo"], (0.02, 0.05, 0.03, 0.06, 0.09), strict=True)]
    text = said(runs({**baseline, **ends, "almost": almost}))
    assert (
        "no visible difference; before the correction for several comparisons, almost is higher by 0.050 [0.016, 0.084]"
        in text
    )


def test_a_method_that_shares_no_seed_is_not_one_of_few_seeds():
    ends = {"grpo": [0.20, 0.21, 0.19], "alike": [0.21, 0.20, 0.20]}
    late = [dataclasses.replace(run, status="unfinished") for run in runs({"late": [0.2, 0.3]})]
    text = said([*runs(ends), *late])
    assert "compared with grpo over 3 seeds: alike shows no visible difference; late has no finished seed in" in text
    assert "0 to" not in text


def test_two_benches_are_not_mixed(bench, tmp_path):
    rollouts = 60
    acts = {"s2t/candidates": [0.01] * rollouts, "s2t/dropped": [0.001] * rollouts}
    falls = {"reward/mean": [0.5] * 30 + [0.0] * 30}
    write_bench(
        tmp_path / "two",
        name="two",
        baseline="first",
        seeds=3,
        methods={"first": {"objective": [CLIP]}, "s2t": {"objective": [CLIP, S2T], "changes": {**acts, **falls}}},
    )
    idle = {"s2t/candidates": [0.0] * rollouts, "s2t/dropped": [0.0] * rollouts}
    methods = {"grpo": {}, "s2t": {"objective": [CLIP, S2T], "changes": idle}}
    write_bench(tmp_path / "one", name="one", methods=methods, seeds=3)
    found = compare(load_runs(tmp_path / "one", tmp_path / "two"))
    text = " ".join(findings(found))
    assert "NaN or Inf ended the run): 3 of 3 runs of s2t (two)." in text  # not 3 of 6
    assert "one: s2t never acted: no token with positive advantage" in text
    assert "two: s2t never acted" not in text
    # neither baseline is that of all methods
    assert contents(found)["title"] == "one and two: grpo, s2t and first"


def test_a_method_that_acted_elsewhere_is_idle_at_its_setting_only(sweep):
    loaded = load_runs(sweep)
    moved = [
        dataclasses.replace(run, metrics={**run.metrics, "ratio/clipped_high": (np.array([10]), np.array([0.1]))})
        if run.setting != "lr_1e-4"
        else run
        for run in loaded.runs
    ]
    text = " ".join(findings(compare(Loaded(moved, [], []))))
    assert "clip_higher never acted in s2t at lr_1e-4: on-policy, the ratio is 1." in text


def test_a_run_alone_says_where_it_went():
    evaluations = [{"rollout": place, "eval/mean": 0.1 + place / 100} for place in (0, 10, 20, 30)]
    found = findings(compare(Loaded([record({"reward/mean": [0.5] * 30}, evaluations=evaluations)], [], [])))
    assert found[0] == "Held-out reward of grpo went from 0.100 to 0.400 in 30 rollouts (1 run)."
    assert found[1].startswith("Nothing can be compared in held-out reward")
