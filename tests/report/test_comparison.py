"""What a comparison says: outcomes, tables, detectors, sweeps, idle methods; in sentences and as Markdown."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstab.report.collapse import collapsed
from rlstab.report.comparison import Comparison, chosen_outcomes, compare, known_outcomes, outcome_of
from rlstab.report.findings import findings
from rlstab.report.formatting import MINUS, decimals, estimate, places, setting
from rlstab.report.idle import idle_methods, idle_parts
from rlstab.report.load import load_runs
from rlstab.report.markdown import markdown
from rlstab.report.results_file import export_results
from rlstab.report.runs import Loaded, RunRecord
from rlstab.report.sweeps import sweeps_of, swept_key
from tests.report.conftest import CLIP, OBJECTIVES, S2T, STARE, TOP, config, place_run, record, write_bench, write_run

VALUES = {"reward/mean": [0.1] * 20 + [0.5] * 10 + [0.2] * 5}
END = [{"rollout": 0, "eval/mean": 0.1}, {"rollout": 35, "eval/mean": 0.3, "eval/pass@4": 0.6, "eval/pass@16": 0.9}]


def alone(runs: Sequence[RunRecord]) -> Loaded:
    return Loaded(list(runs), [], [])


def test_outcomes_of_known_answers() -> None:
    more = {"tokens/kept": [0.0] * 20 + [1.0] * 15, "reward/true": [0.75] * 35}
    run = record({**VALUES, **more}, evaluations=END)
    of_rewards = {
        "reward/area": (2.0 + 5.0 + 1.0) / 35,
        "reward/best": 0.5,
        "reward/last": 0.2,
        "reward/true/area": 0.75,
    }
    expected = {**of_rewards, "eval/mean": 0.3, "tokens/kept": 1.0, "tokens/kept/area": 15 / 35, "tokens/entropy": None}
    assert {name: outcome_of(run, name) for name in expected} == pytest.approx(expected)
    # the last tenth of 107 rollouts begins at 98: the bins that end at 100 and 107, weighed by their rollouts
    tenth = record({"reward/mean": np.repeat([0.0, 1.0, 2.0], [90, 10, 7]).tolist()})
    assert outcome_of(tenth, "reward/last") == pytest.approx((10 * 1.0 + 7 * 2.0) / 17)
    for status in ("unfinished", "failed"):
        assert outcome_of(record(VALUES, evaluations=END, status=status), "eval/mean") is None
    assert outcome_of(record(VALUES, evaluations=END[:1]), "eval/mean") is None  # not of the end
    # those that some run has, or any metric that is asked for
    names = "eval/mean eval/pass@4 eval/pass@16 reward/true/area reward/area reward/best reward/last"
    assert [outcome.name for outcome in known_outcomes([run, record({})])] == names.split()
    chosen = chosen_outcomes([run], ["tokens/kept", "eval/mean", "tokens/kept", "tokens/kept/area"])
    assert [outcome.name for outcome in chosen] == ["tokens/kept", "eval/mean", "tokens/kept/area"]


def test_the_baseline_is_asked_for_or_that_of_the_bench(bench: Path, sweep: Path, tmp_path: Path) -> None:
    tables = compare(load_runs(bench, sweep), baseline="stare").tables
    assert [table.baseline for table in tables] == ["stare", None, None, None]
    assert tables[0].methods[0] == "stare"
    assert tables[1].cells["s2t", "eval/mean"].paired is None
    assert "has no run of stare" in tables[1].notes[0]
    [table] = compare(load_runs(write_bench(tmp_path / "b", baseline="dapo", seeds=1))).tables
    assert table.baseline == "grpo"
    assert "its baseline dapo has no run" in table.notes[0]


def test_what_is_missing_is_left_out_and_named(bench: Path) -> None:
    runs, place = bench / "runs" / "default", {"bench": "entropy", "setting": "default"}
    for name, seed, status, options in (
        ("stare", 8, "finished", {"evaluate": False}),
        ("s2t", 9, "running", {"done": 20}),
    ):
        folder = write_run(runs / name / f"seed-{seed}", objective=OBJECTIVES[name], seed=seed, **options)
        place_run(folder, method=name, seed=seed, status=status, **place)
    comparison = compare(load_runs(bench))
    [table] = comparison.tables
    assert table.cells["stare", "eval/mean"].paired.seeds == (0, 1, 2, 3)
    assert sorted(table.cells["s2t", "eval/mean"].values) == [0, 1, 2, 3]
    assert table.losses["s2t"].runs == 5
    notes = "\n".join(comparison.notes)
    for part in ("leave out s2t seed 9 (unfinished)", "are missing in stare seed 8", "finished these seeds: stare 8."):
        assert part in notes


def test_a_run_has_collapsed_where_its_reward_fell_or_its_numbers_ended_it() -> None:
    values = {"reward/mean": np.linspace(0.2, 0.4, 100)}
    assert not collapsed(record(values))
    assert collapsed(record({"reward/mean": np.linspace(0.4, 0.1, 100)}))
    assert collapsed(record(values, status="failed", error="rlstab.errors.NonFinite: 20 optimizer steps"))
    assert not collapsed(record(values, status="failed", error="torch.OutOfMemoryError"))


def test_every_run_below_its_start_is_the_first_sentence() -> None:
    def told(*ends: float) -> str:
        runs = [
            record({"reward/mean": np.linspace(0.4, end, 60)}, bench="b", method=method, seed=seed)
            for seed, end in enumerate(ends)
            for method in ("grpo", "s2t")
        ]
        return findings(compare(alone(runs)))[0]

    assert told(0.1, 0.2, 0.3).startswith("All 6 runs, those of the baseline too, ended below")
    assert "ended below" not in told(0.1, 0.2, 0.5)


def test_the_highest_stable_value_and_the_counts(sweep: Path) -> None:
    comparison = compare(load_runs(sweep))
    counts = comparison.tables[1].losses["grpo"]
    assert [(counts.fired[name], counts.judged[name]) for name in ("reward_fall", "entropy_floor")] == [(3, 3), (0, 3)]
    [swept] = comparison.sweeps
    assert (swept.bench, swept.key, swept.values) == ("stability", "optimisation.lr", [1e-4, 2e-4, 4e-4])
    assert swept.highest == {"grpo": 1e-4, "s2t": 2e-4}
    assert "stable: 1e-4 for grpo and 2e-4 for s2t." in findings(comparison)[0]
    points = {(point.method, point.value): (point.collapsed, point.runs) for point in swept.points}
    assert (points["grpo", 2e-4], points["s2t", 2e-4]) == ((3, 3), (0, 3))
    # above an unstable value nothing counts as stable, and a run that never began counts in its setting
    place = {"bench": "stability", "method": "s2t", "status": "failed"}
    place_run(sweep / "runs/lr_1e-4/s2t/seed-1", setting="lr_1e-4", seed=1, error="OutOfMemoryError", **place)
    place_run(sweep / "runs/lr_4e-4/s2t/seed-8", setting="lr_4e-4", seed=8, error="NonFinite: refused", **place)
    [swept] = sweeps_of(load_runs(sweep).runs)
    assert swept.highest["s2t"] is None
    points = [point for point in swept.points if point.method == "s2t"]
    assert (points[0].collapsed, points[0].unknown, points[0].stable) == (0, 1, False)
    assert [point.runs for point in points] == [3, 3, 4]


def test_ending_below_the_start_is_not_stable() -> None:
    ends = ((1e-4, 0.4), (2e-4, 0.25))
    values = {lr: {"reward/mean": [0.3] * 30 + [last] * 30} for lr, last in ends}
    [swept] = sweeps_of([record(values[lr], setting=f"lr_{lr}", config=config([CLIP], lr=lr)) for lr, _ in ends])
    assert swept.highest == {"grpo": 1e-4}
    assert [(point.collapsed, point.below_start) for point in swept.points] == [(0, 0), (0, 1)]


def test_only_one_number_may_differ() -> None:
    base, faster = config([CLIP], lr=1e-4), config([CLIP], lr=2e-4)
    longer, other = config([CLIP], lr=2e-4, rollouts=99), {**base, "task": {"name": "chain"}}
    for configs, key in (
        ([base, faster], "optimisation.lr"),
        ([base, {**faster, "added": 1}], "optimisation.lr"),  # a setting of a later release
        *(([base, *more], None) for more in ([longer], [other], [base], [])),
    ):
        runs = [record({}, bench="b", setting=f"s{k}", config=whole) for k, whole in enumerate(configs)]
        assert swept_key(runs) == key


def test_a_setting_of_a_stage_and_the_precision_of_the_sampler_are_swept_whatever_stages_methods_bring() -> None:
    def whole(own: list[dict[str, Any]], precision: str | None = None, share: float = 0.5) -> dict[str, Any]:
        stages = [{"name": "stage.py:Noise", "share": share}, *own]
        return {**config([CLIP]), "stages": stages, "rollout": {"precision": precision}}

    for settings, key, values in (
        ([{"share": 0.1}, {"share": 0.3}], "stages.stage.py:Noise.share", [0.1, 0.3]),
        ([{"precision": "int8"}, {"precision": None}, {"precision": "int2"}], "rollout.precision", [0.0, 1 / 127, 1.0]),
    ):
        runs = [
            record({}, bench="b", setting=f"s{k}", method=name, config=whole(own, **more))
            for k, more in enumerate(settings)
            for name, own in (("a", []), ("b", [{"name": "overlong"}]))
        ]
        [swept] = sweeps_of(runs)
        assert (swept.key, swept.values) == (key, values)


N = 30
ZERO, SOME = [0.0] * N, [0.1] * N
ONCE = [0.0] * (N - 1) + [1e-4]
UNCLIPPED = {"ratio/clipped_high": ZERO, "ratio/clipped_low": ZERO}
ADAPTIVE = {"name": "adaptive_entropy", "target_entropy": 0.2}
#: A method, what it logged, and words of the reason why it never acted; None where it did, or where that is unknown.
IDLE: list[tuple[dict[str, Any], dict[str, list[float]], str | None]] = [
    (CLIP, UNCLIPPED, "on-policy"),
    (S2T, {"s2t/dropped": ZERO, "s2t/candidates": ZERO}, "below 0.002"),
    (S2T, {"s2t/dropped": ZERO, "s2t/candidates": SOME}, "no candidate"),
    (TOP, {"top_entropy/share": [1.0] * N}, "every token counted"),
    (STARE, {"stare/gate": ZERO}, "above 0.3 nats"),
    (STARE, {"stare/gate": [1.0] * N, "stare/boosted": ZERO}, "touched no token"),
    ({"name": "lp_reg"}, {"lp_reg/selected": ZERO}, "touched no token"),
    ({"name": "kl", "coefficient": 0.0}, {"kl/value": SOME}, "coefficient is 0"),
    (ADAPTIVE, {"adaptive_entropy/coefficient": ZERO}, "never fell below 0.2 nats"),
    (ADAPTIVE, {"adaptive_entropy/coefficient": ZERO, "adaptive_entropy/value": SOME}, "price was 0"),
    (CLIP, {**UNCLIPPED, "ratio/clipped_low": ONCE}, None),
    (CLIP, {}, None),  # no metric, no claim
    (S2T, {"s2t/dropped": ONCE}, None),
    (TOP, {"top_entropy/share": [0.2] * N}, None),
    (STARE, {"stare/gate": [*ZERO[:20], *[1.0] * 10], "stare/boosted": SOME}, None),
    ({"name": "kl", "coefficient": 0.1}, {"kl/value": SOME}, None),
    ({"name": "of_another_package"}, {"of_another_package/level": ZERO}, None),
]


def test_what_never_acted_says_why_and_nothing_else_is_called_idle() -> None:
    for method, metrics, why in IDLE:
        parts = idle_parts(record({"reward/mean": SOME, **metrics}, config=config([method])))
        assert [part for part, _ in parts] == ([] if why is None else [method["name"]]), method
        assert why is None or why in parts[0][1]
    whole = config([CLIP])
    whole["optimisation"]["epochs"] = 4
    assert idle_parts(record(UNCLIPPED, config=whole)) == [("clip_higher", "no ratio left its bounds")]


def test_a_run_says_itself_what_shows_an_idle_method_and_may_be_damaged() -> None:
    metrics, whole = (
        {"reward/mean": SOME, "mine/level": ZERO, "mine/dropped": SOME},
        config([{"name": "mine", "low": 2}]),
    )
    sign = {"metric": "level", "why": "no level above {low} {low.real} {}", "at": 0}
    for kept, told in (
        ({"mine": {"signs": [sign]}}, ["no level above 2 {low.real} {}"]),
        ({"mine": {"identities": [{"low": 2}]}}, ["its low is 2"]),
        ({"mine": {"bounds": True}}, []),
        ({"mine": {"signs": [{**sign, "at": 7}]}}, []),
        ({"mine": [sign]}, []),
        ({}, []),
        ([], []),
    ):
        parts = idle_parts(record(metrics, config=whole, about={"idle": kept}))
        assert [why for _, why in parts] == told


def test_methods_inside_within_and_numbered_ones_are_named_and_runs_told_together() -> None:
    objective = [{"name": "within", "outer": S2T, "inner": [STARE, TOP]}, S2T, S2T]
    metrics = {
        "within/outer/dropped": ZERO,
        "within/outer/candidates": SOME,
        "within/inner/stare/gate": ZERO,
        "within/inner/top_entropy/share": [0.2] * N,
        "s2t_1/dropped": SOME,
        "s2t_2/dropped": ZERO,
    }
    parts = [part for part, _ in idle_parts(record(metrics, config=config(objective)))]
    assert parts == ["within/outer (s2t)", "within/inner/stare", "s2t_2"]
    idle, acting = {"s2t/dropped": ZERO, "s2t/candidates": ZERO}, {"s2t/dropped": SOME}
    [told] = idle_methods([record(idle if seed < 2 else acting, seed=seed, config=config([S2T])) for seed in range(3)])
    assert (told.part, told.methods) == ("s2t", "grpo (2 of 3 runs)")


def runs(ends: Mapping[str, Sequence[float]], **fields: object) -> list[RunRecord]:
    """Runs of thirty rollouts by method, whose held-out mean ends at the given values, one per seed."""
    fields = {"config": config([{"name": "token_mean"}], rollouts=30), **fields}
    return [
        record(
            {"reward/mean": [0.5] * 30},
            method=method,
            seed=seed,
            evaluations=[{"rollout": 30, "eval/mean": value}],
            **fields,
        )
        for method, values in ends.items()
        for seed, value in enumerate(values)
    ]


DIFFERENT = {
    "grpo": [0.20, 0.21, 0.19, 0.20],
    "better": [0.30, 0.32, 0.29, 0.31],
    "worse": [0.10, 0.12, 0.09, 0.11],
    "alike": [0.21, 0.20, 0.20, 0.19],
    "same": [0.20, 0.21, 0.19, 0.20],
    "few": [0.9, 0.9],
}
FOUR = [run for name in "abcd" for run in runs({"grpo": [0.20, 0.21, 0.19], "alike": [0.21, 0.20, 0.20]}, setting=name)]
#: Five methods among which only its own interval tells one from the baseline.
CLOSE = {"grpo": [0.30, 0.31, 0.29, 0.30, 0.31], "almost": [0.32, 0.36, 0.32, 0.36, 0.40]}
CLOSE |= {f"other{k}": [0.30 + 0.001 * k, 0.31, 0.29, 0.301, 0.309] for k in range(4)}
COURSE = [{"rollout": place, "eval/mean": 0.1 + place / 100} for place in (0, 10, 20, 30)]
#: Runs, and what is said of their held-out reward.
SAID: list[tuple[list[RunRecord], list[str]]] = [
    (
        [*runs(DIFFERENT), *runs({"late": [0.2, 0.3]}, status="unfinished")],
        [
            "None of 22 runs that can be judged was lost; 2 cannot be. A rate of up to 78 % can go unseen in",
            "better is higher by 0.105 [0.094, 0.116]",
            "worse is lower by 0.095 [0.084, 0.106]",  # by a positive amount, its interval turned with it
            "no visible difference for alike",
            "exactly the values of the baseline for same",
            "too few seeds for few",
            "no seed in common with the baseline for late",
        ],
    ),
    (
        [*FOUR, *runs({"grpo": [0.2, 0.21, 0.19], "better": [0.30, 0.31]}, setting="e")],  # only what differs
        ["5 comparisons with the baseline in 5 settings: no visible difference for alike at a, alike at b"],
    ),
    (
        runs(CLOSE),
        [
            "no visible difference for almost, other0, other1, other2 and other3; before the correction",
            "almost is higher by 0.050 [0.01",
        ],
    ),
    (
        [
            *runs({"grpo": [0.2, 0.2, 0.2]}),
            *runs({"other": [0.2]}, status="failed", error="OutOfMemoryError"),
            record({"reward/mean": [0.5] * 20 + [0.0] * 40}, method="fell"),
        ],
        [
            "fell lost 1 of 1 runs, grpo 0 of 3: p = 1",
            "no seed in common with the baseline for fell and other",
            "1 of 1 run of other failed",
        ],
    ),
    (
        [record({"reward/mean": [0.5] * 30}, evaluations=COURSE)],
        [
            "Nothing can be compared in held-out reward",
        ],
    ),
]


def test_what_is_said() -> None:
    for some, words in SAID:
        text = " ".join(findings(compare(alone(some), metrics=["eval/mean"])))
        assert [expected for expected in words if expected not in text] == [], text


def test_two_benches_are_not_mixed(tmp_path: Path) -> None:
    acts = {"s2t/candidates": [0.01] * 60, "s2t/dropped": [0.001] * 60}
    falls = {"reward/mean": [0.5] * 30 + [0.0] * 30}
    idle = {"s2t/candidates": [0.0] * 60, "s2t/dropped": [0.0] * 60}
    for name, baseline, changes in (("one", "grpo", idle), ("two", "first", {**acts, **falls})):
        methods = {baseline: {"objective": [CLIP]}, "s2t": {"objective": [CLIP, S2T], "changes": changes}}
        write_bench(tmp_path / name, name=name, baseline=baseline, seeds=3, methods=methods)
    comparison = compare(load_runs(tmp_path))
    assert "two: s2t lost 3 of 3 runs, first 0 of 3: p = .25, 3 seeds" in " ".join(findings(comparison))  # not 3 of 6
    assert {idle.bench for idle in comparison.idle if idle.part == "s2t"} == {"one"}


def test_what_no_seed_can_tell_is_not_called_alike(compared: Comparison) -> None:
    text = " ".join(findings(compared))
    assert "Held-out entropy compared with grpo over 4 seeds: 20_entropy is higher by " in text
    text = " ".join(findings(compare(alone([run for run in compared.loaded.runs if run.seed == 0]))))
    assert "Held-out reward compared with grpo over 1 seed: too few seeds for 20_entropy, s2t and stare" in text


def test_numbers_are_written_as_one_would() -> None:
    shown = {1.5e-4: "1.5e-4", 2e-4: "2e-4", 0.02: "0.02", 16: "16", 0: "0", 3e7: "3e7"}
    assert {value: setting(value) for value in shown} == shown
    assert (places([0.3, 0.25]), places([12.5, 0.1]), places([0.00042])) == (3, 1, 5)
    assert [decimals(value, 3, signed=True) for value in (-0.1234, -0.0001, None)] == [
        f"{MINUS}0.123",
        "0.000",
        "\u2013",
    ]
    assert estimate(0.5, 0.25, None) == "0.500"


def rows(text: str) -> list[list[str]]:
    """Cells of every table row, by unescaped bars."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_markdown_has_the_numbers_of_the_comparison(compared: Comparison, swept: Comparison) -> None:
    comparison = compare(alone([*compared.loaded.runs, *swept.loaded.runs]))
    text = markdown(comparison, title="Results", command="rlstab report x")
    assert text.startswith("# Results\n")
    assert "```sh\nrlstab report x\n```" in text
    cell = comparison.tables[0].cells["stare", "eval/entropy"]
    value, difference = cell.summary, cell.paired.difference
    assert [
        *("stare", "4"),
        # as many decimals as the page, and as the rest of the column
        f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]",
        f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]",
        "higher",
    ] in [[*row[1:5], row[-1]] for row in rows(text)]  # the cost of a rollout stands before the verdict
    assert ["s2t", "2e-4", "0, 0, 0 of 3", "0, 0, 0 of 3", "3, 3, 0 of 3"] in rows(text)
    assert "entropy, default: clip_higher never acted in 20_entropy, s2t and stare: on-policy" in text
    # the command of a bench is what its folder says, and not a block to copy
    assert "```text\nrlstab bench examples/entropy.yaml\n" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(row) for row in rows(block)}) == 1


def test_names_and_errors_are_no_markup(bench: Path) -> None:
    place = {"bench": "entropy", "setting": "default", "method": "x|y`<b>", "seed": 0, "status": "failed"}
    place_run(bench / "runs/default/z/seed-0", error="boom\n<script>alert(1)</script>\n# [a](b) | \\| *c*", **place)
    text = markdown(compare(load_runs(bench)))
    assert not re.search(r"(?<!\\)<", text)
    assert not any(line.startswith("# [") for line in text.splitlines())
    assert r"x\|y\`\<b\>" in text
    assert r"\[a\](b) \| \\\| \*c\*" in text


def test_what_a_bench_says_about_itself_stands_before_its_numbers(tmp_path: Path) -> None:
    write_bench(tmp_path / "b", methods={"grpo": {"done": 30}}, seeds=2)
    file = tmp_path / "b" / "bench.json"
    about = "Built on purpose,\nso that it is <true>.\n\nOne task."
    file.write_text(json.dumps({**json.loads(file.read_text()), "about": about}))
    loaded = load_runs(tmp_path / "b")
    for again in (loaded, load_runs(export_results(loaded, tmp_path / "x.jsonl"))):
        text = markdown(compare(again))
        first, second, frame, *_ = text.split("## entropy\n\n")[1].split("\n\n")
        assert [first, second] == [r"Built on purpose, so that it is \<true\>.", "One task."]
        assert frame.startswith("In all runs: task countdown, model countdown-tiny, rollouts 60")
        assert "No run of this setting has finished" in text
