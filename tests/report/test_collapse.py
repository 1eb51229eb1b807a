"""Which runs are lost, when, by whose definition, and what a comparison says of it first."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstab.report.build import make_report
from rlstab.report.collapse import Fate, fate_of, losses_of
from rlstab.report.comparison import Comparison, compare
from rlstab.report.findings import findings
from rlstab.report.load import load_runs
from rlstab.report.markdown import markdown
from rlstab.report.results_file import export_results
from rlstab.report.runs import Loaded, RunRecord
from tests.report.conftest import place_run, record, rewards, write_run

NAN = float("nan")
GOOD = rewards(0, lost=False)


def run(values: Sequence[float], **fields: Any) -> RunRecord:
    """A run whose entropy goes on to the end, as that of one whose rewards are NaN does."""
    return record({"reward/mean": values, "tokens/entropy": [0.3] * (len(values) + fields.pop("more", 0))}, **fields)


#: Rewards, fields of the run, and its fate.
FATES: list[tuple[Sequence[float], dict[str, Any], Fate]] = [
    (GOOD, {}, Fate(False, 60)),
    ([0.5] * 30 + [0.0] * 30, {}, Fate(True, 40)),
    (GOOD[:20] + [NAN] * 40, {}, Fate(True, 30)),  # from rollout 21, which lies in the bin that ends at 30
    ([NAN] * 60, {}, Fate(True, 10)),
    ([NAN if rollout % 3 else 0.5 for rollout in range(60)], {}, Fate(True, 10)),  # two thirds
    (GOOD[:50] + [NAN] * 2 + GOOD[52:], {}, Fate(False, 60)),  # two rewards of sixty
    (GOOD[:40] + [float("inf")] * 20, {}, Fate(True, 50)),
    # readers of other trainers' logs leave NaN out, and say so
    (GOOD[:40], {"more": 20, "not_finite": ("reward/mean",)}, Fate(True, 50)),
    (GOOD[:40], {"more": 20}, Fate(False, 60)),
    (GOOD, {"status": "failed", "error": "NonFinite: three steps refused"}, Fate(True, 60)),
    (GOOD, {"status": "failed", "error": "OutOfMemoryError"}, Fate(None, 60)),
    (GOOD, {"status": "unfinished"}, Fate(None, 60)),
    (GOOD[:5], {}, Fate(None, 5)),
    ([0.5] * 30 + [0.35] * 30, {"collapse": {"below": 0.5}}, Fate(False, 60)),  # the bench's own bound, of the peak
    ([0.5] * 30 + [0.2] * 30, {"collapse": {"below": 0.5}}, Fate(True, 40)),
    ([0.2] * 10 + [0.5] * 20 + [0.15] * 30, {"collapse": {"below": 0.5, "of": "start"}}, Fate(False, 60)),
    ([0.2] * 10 + [0.5] * 20 + [0.05] * 30, {"collapse": {"below": 0.5, "of": "start"}}, Fate(True, 40)),
    ([0.5] * 30 + [0.35] * 30, {"collapse": {"below": 0.4, "of": "value"}}, Fate(True, 40)),
    (GOOD, {"collapse": {"below": 0.5, "metric": "tokens/entropy"}}, Fate(False, 60)),
    (GOOD, {"collapse": {"below": 0.5, "metric": "kl/value"}}, Fate(None, 60)),
    ([0.5] * 30 + [0.0] * 30, {"collapse": {"under": 0.5}}, Fate(True, 40)),  # damaged: as without it
]


@pytest.mark.parametrize(("values", "fields", "fate"), FATES)
def test_fates(values: Sequence[float], fields: dict[str, Any], fate: Fate) -> None:
    assert fate_of(run(values, **fields)) == fate


def eight(*lost: int, method: str = "dapo", **fields: Any) -> list[RunRecord]:
    return [run(rewards(seed, seed in lost), seed=seed, method=method, **fields) for seed in range(8)]


def of(*groups: list[RunRecord]) -> Comparison:
    return compare(Loaded([one for group in groups for one in group], [], []), metrics=["reward/area"])


#: Lost seeds by method, and the first sentence.
SENTENCES: list[tuple[dict[str, Sequence[int]], str]] = [
    (
        {"dapo": (2, 5, 6)},
        "dapo lost 3 of 8 runs, grpo 0 of 8: p = .25, 8 seeds cannot tell a rate of 0 from one of 31 %.",
    ),
    ({"dapo": ()}, "None of the 16 runs collapsed. A rate of up to 31 % can go unseen in 8 seeds."),
    ({"dapo": range(7)}, "dapo lost 7 of 8 runs, grpo 0 of 8: p = .016, beyond chance for dapo."),
    ({"grpo": range(7), "dapo": ()}, "dapo lost 0 of 8 runs, grpo 7 of 8: p = .016, beyond chance for dapo."),
    (
        {"grpo": (0,), "dapo": (0, 1)},
        "dapo lost 2 of 8 runs, grpo 1 of 8: p = 1, the rates may be 3 to 65 % of dapo and 0 to 53 % of grpo.",
    ),
    (
        {"dapo": (2, 5, 6), "s2t": (1,), "stare": ()},
        "dapo lost 3 of 8 runs and s2t lost 1 of 8 runs, grpo 0 of 8: p = .75 and p = 1, 8 seeds cannot tell a "
        "rate of 0 from one of 31 %.",
    ),
]


@pytest.mark.parametrize(("lost", "sentence"), SENTENCES)
def test_the_first_sentence_is_about_the_runs_that_were_lost(lost: dict[str, Sequence[int]], sentence: str) -> None:
    comparison = of(*(eight(*seeds, method=method) for method, seeds in ({"grpo": ()} | lost).items()))
    assert findings(comparison)[0].startswith(sentence)


def test_rewards_are_those_of_the_survivors_and_say_so() -> None:
    comparison = of(eight(method="grpo"), eight(2, 5, 6))
    cell = comparison.tables[0].cells["dapo", "reward/area"]
    assert (sorted(cell.values), len(cell.every)) == ([0, 1, 3, 4, 7], 8)
    assert cell.paired.seeds == (0, 1, 3, 4, 7)
    assert "Training reward, whole run, of the survivors" in findings(comparison)[0]
    assert "survivors" not in findings(of(eight(method="grpo"), eight()))[0]


def test_a_method_that_loses_all_its_runs_is_compared_by_them() -> None:
    comparison = of(eight(method="grpo"), eight(*range(8)))
    assert comparison.tables[0].cells["dapo", "reward/area"].paired.verdict == "lower"
    assert "no run of dapo survived, so lost ones count" in findings(comparison)[0]
    assert "lower (of lost runs, since none survived)" in markdown(comparison)
    nan = [run(rewards(seed, False)[:30] + [NAN] * 30, seed=seed, method="dapo") for seed in range(8)]
    assert of(eight(method="grpo"), nan).tables[0].cells["dapo", "reward/area"].values == {}


def test_the_time_to_a_loss_is_that_of_kaplan_and_meier() -> None:
    runs = [run([0.5] * at + [0.0] * (60 - at), seed=at) for at in (20, 30, 40)] + [
        run(rewards(s, False), seed=s) for s in (1, 2)
    ]
    runs += [replace(run(GOOD[:25], seed=3), status="unfinished")]  # seen up to its 25th rollout
    times, shares, low, high = losses_of({"m": runs}, None)["m"].survival
    # lost at 30, 40 and 50 (a fall is seen in the next bin); of six one is censored at 25, before the first
    assert times == (0, 25, 30, 40, 50, 60)
    assert shares == pytest.approx((1, 1, 4 / 5, 3 / 5, 2 / 5, 2 / 5))
    assert (low[0], high[0]) == (None, None)
    assert 0 < low[3] < 3 / 5 < high[3] < 1
    assert losses_of({"m": [run(GOOD)]}, None)["m"].survival == ((0, 60), (1, 1), (None, None), (None, None))


def test_a_bench_says_what_it_calls_lost_and_a_results_file_keeps_it(tmp_path: Path) -> None:
    half = [0.5] * 30 + [0.3] * 30  # six tenths of the peak
    for method, values in (("grpo", None), ("dapo", half)):
        for seed in range(3):
            noise = (0.001 * np.random.default_rng(seed).normal(size=60)).tolist()
            changed = {} if values is None else {"reward/mean": [a + b for a, b in zip(values, noise, strict=True)]}
            folder = write_run(tmp_path / f"b/runs/default/{method}/seed-{seed}", seed=seed, changes=changed)
            place_run(folder, bench="b", setting="default", method=method, seed=seed)
    for below, lost in ((0.5, 0), (0.7, 3)):
        about = {"name": "b", "baseline": "grpo", "collapse": {"below": below, "of": "peak"}}
        (tmp_path / "b/bench.json").write_text(json.dumps(about))
        loaded = load_runs(tmp_path / "b")
        for some in (loaded, load_runs(export_results(loaded, tmp_path / "x.jsonl"))):
            assert compare(some).tables[0].losses["dapo"].rate.hits == lost


def test_a_page_of_lost_runs_counts_them_first(tmp_path: Path) -> None:
    for method in ("grpo", "dapo"):
        for seed in range(8):
            lost = {"reward/mean": rewards(seed, lost=method == "dapo" and seed in (2, 5, 6))}
            folder = write_run(tmp_path / f"b/runs/default/{method}/seed-{seed}", seed=seed, changes=lost)
            place_run(folder, bench="b", setting="default", method=method, seed=seed)
    (tmp_path / "b/bench.json").write_text(json.dumps({"name": "b", "baseline": "grpo"}))
    make_report([tmp_path / "b"], out=tmp_path / "out", metrics=["reward/area"])
    text = (tmp_path / "out/report.html").read_text()
    assert '<p class="lead">dapo lost 3 of 8 runs, grpo 0 of 8: p = .25, 8 seeds' in text
    assert 'data-metric="survival"' in text
    said = (tmp_path / "out/report.md").read_text()
    assert "\ndapo lost 3 of 8 runs, grpo 0 of 8: p = .25, 8 seeds cannot tell a rate of 0 from one of 31 %." in said
    assert "| dapo | 8 | 0 | 3 of 8 | 9 to 76 % | p = .25 |" in said
