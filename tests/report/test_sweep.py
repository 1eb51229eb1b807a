from pathlib import Path

from rlstab.report.collapse import sweeps_of, swept_key
from rlstab.report.comparison import compare
from rlstab.report.load import load_runs
from tests.report.conftest import CLIP, config, place_run, record


def test_the_highest_stable_value_and_the_counts(sweep: Path) -> None:
    [found] = compare(load_runs(sweep)).sweeps
    assert (found.bench, found.key, found.values) == ("stability", "optimisation.lr", [1e-4, 2e-4, 4e-4])
    assert found.highest == {"grpo": 1e-4, "s2t": 2e-4}
    counts = {(one.method, one.value): (one.collapsed, one.runs) for one in found.points}
    assert counts["grpo", 2e-4] == (3, 3)
    assert counts["s2t", 2e-4] == (0, 3)


def test_above_an_unstable_value_nothing_counts_as_stable(sweep: Path) -> None:
    place = {"bench": "stability", "setting": "lr_1e-4", "method": "s2t", "seed": 1}
    place_run(sweep / "runs/lr_1e-4/s2t/seed-1", status="failed", error="OutOfMemoryError", **place)
    [found] = sweeps_of(load_runs(sweep).runs)
    assert found.highest["s2t"] is None
    [lowest] = [one for one in found.points if one.method == "s2t" and one.value == 1e-4]
    assert (lowest.collapsed, lowest.unknown, lowest.stable) == (0, 1, False)


def test_a_run_that_never_began_counts_in_its_setting(sweep: Path) -> None:
    place = {"bench": "stability", "setting": "lr_4e-4", "method": "s2t", "seed": 8}
    place_run(sweep / "runs/lr_4e-4/s2t/seed-8", status="failed", error="NonFinite: refused", **place)
    [found] = sweeps_of(load_runs(sweep).runs)
    assert [one.runs for one in found.points if one.method == "s2t"] == [3, 3, 4]


def test_ending_below_the_start_is_not_stable() -> None:
    def run(lr: float, last: float):
        values = {"reward/mean": [0.3] * 30 + [last] * 30}
        return record(values, bench="b", setting=f"lr_{lr}", config=config([CLIP], lr=lr))

    [found] = sweeps_of([run(1e-4, 0.4), run(2e-4, 0.25)])
    assert found.highest == {"grpo": 1e-4}
    assert [(one.collapsed, one.below_start) for one in found.points] == [(0, 0), (0, 1)]


def test_only_one_number_may_differ() -> None:
    def runs(*configs):
        return [record({}, bench="b", setting=f"s{k}", config=one) for k, one in enumerate(configs)]

    base, faster = config([CLIP], lr=1e-4), config([CLIP], lr=2e-4)
    longer = config([CLIP], lr=2e-4, rollouts=99)
    named = {**base, "task": {"name": "chain"}}
    assert swept_key(runs(base, faster)) == "optimisation.lr"
    assert swept_key(runs(base, longer)) is None
    assert swept_key(runs(base, named)) is None
    assert swept_key(runs(base, base)) is None
    assert swept_key(runs(base)) is None
