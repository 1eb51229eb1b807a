"""The score: where curves cross, what intervals say, and the words of a map."""

import json
import math
import re

import numpy as np
import pytest

from rlstab.probe.map import draw_map, told
from rlstab.probe.page import page
from rlstab.probe.records import Record
from rlstab.probe.score import QUICK_SEEDS, Outcomes, Score, crossing, score
from rlstab.probe.suite import FIXED, Probe
from rlstab.report.formatting import NOTHING

DOSES = (0.0, 1.0, 2.0, 4.0, 8.0)
START, HEALTHY = 0.4, 0.8


def outcomes(cliff: float, seeds: int = 8, spread: float = 0.02, healthy: float = HEALTHY) -> Outcomes:
    """Healthy below a cliff, dead above it; half of the gain is left at the cliff itself."""
    rng = np.random.default_rng(int(10 * cliff))
    noise = rng.normal(0, spread, (len(DOSES), seeds))
    ends = [healthy if dose < cliff else (START + healthy) / 2 if dose == cliff else 0.1 for dose in DOSES]
    ends_of = dict(zip(DOSES, ends, strict=True))
    return {
        dose: {seed: float(ends_of[dose] + noise[k, seed]) for seed in range(seeds)} for k, dose in enumerate(DOSES)
    }


def scored(row: Outcomes, base: Outcomes) -> Score:
    result = score(row, base, START)
    assert isinstance(result, Score)
    return result


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ([1.0, 0.75, 0.25, 0.0, 0.0], 1.5),
        ([1.0, 0.0, 0.0, 0.0, 0.0], 0.5),
        ([0.4, 0.0, 0.0, 0.0, 0.0], 0.0),  # it never stood above
        ([1.0, 1.0, 1.0, 1.0, 0.5], math.inf),
        ([1.0, 0.4, 0.8, 0.0, 0.0], 2 + 2 * (0.6 - 0.5) / 0.6),  # what rises again is averaged with what fell
    ],
)
def test_where_a_decreasing_fit_crosses_one_half(values: list[float], at: float) -> None:
    assert crossing(np.array(DOSES), np.array(values), 0.5) == pytest.approx(at)


def test_the_tolerated_dose_is_relative_to_the_base() -> None:
    twice = scored(outcomes(4), outcomes(2))
    assert twice.relative.value == pytest.approx(2, rel=0.1)
    assert twice.verdict == "twice or more"
    assert twice.visible
    less = scored(outcomes(1), outcomes(4))
    assert less.verdict == "half or less"
    assert less.relative.value == pytest.approx(0.25, rel=0.15)
    same = scored(outcomes(2), outcomes(2))
    assert (same.verdict, same.relative.value, same.visible) == ("no visible difference", 1, False)
    beyond = scored(outcomes(99), outcomes(2))
    assert (beyond.tolerated, beyond.relative.value, beyond.verdict) == (math.inf, math.inf, "twice or more")
    assert beyond.limit == pytest.approx(4, rel=0.1)
    assert beyond.harm == math.inf
    assert 2 < twice.harm <= 8
    never = scored(outcomes(2), outcomes(99))  # the base survives the last dose, which is all that is known
    assert (never.relative.value, never.limit) == (pytest.approx(0.25, rel=0.1), 1)
    assert never.verdict == "half or less"


def test_less_than_twice_is_told_by_more_than_a_few_seeds_alone() -> None:
    more, less = scored(outcomes(3), outcomes(2)), scored(outcomes(2), outcomes(3))
    assert [(score.visible, score.verdict) for score in (more, less)] == [(True, "more"), (True, "less")]
    few = scored(outcomes(3, seeds=3), outcomes(2))
    assert (few.visible, few.verdict) == (True, "no visible difference")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 8, 20])
def test_intervals_hold_what_they_say(seeds: int) -> None:
    """Of 1,600 draws two standard errors are 1.1 points."""
    rng, doses = np.random.default_rng(seeds), np.array([0.0, 1, 2, 3, 4, 6, 8])
    curves = [left / (1 + (doses / at) ** 3) for left, at in ((0.4, 3.0), (0.5, 2.0))]
    row, base = (crossing(doses, curve / 0.5, 0.5) for curve in curves)
    held = {"relative": 0, "price": 0}
    for _ in range(1600):
        of_seeds = rng.normal(0, 0.02, (1, seeds))
        ends = [curve[:, None] + of_seeds + rng.normal(0, 0.02, (len(doses), seeds)) for curve in curves]
        drawn = score(*({d: dict(enumerate(e)) for d, e in zip(doses, some, strict=True)} for some in ends), 0.0)
        assert isinstance(drawn, Score)
        held["relative"] += drawn.relative.low <= row / base <= drawn.relative.high
        held["price"] += drawn.price.low <= 0.8 <= drawn.price.high
    print(f"{seeds} seeds: {held}")
    assert all(0.93 <= times / 1600 <= 0.97 for times in held.values())


def test_price_and_harm_are_those_of_the_row() -> None:
    frozen = scored(outcomes(99, healthy=START), outcomes(2))
    assert frozen.price.value == pytest.approx(0, abs=0.05)
    assert (frozen.tolerated, frozen.relative.value, frozen.verdict) == (0, 0, "half or less")
    dear = scored(outcomes(4, healthy=0.7), outcomes(2))
    assert dear.price.value == pytest.approx(0.75, abs=0.05)


def test_only_seeds_and_doses_of_both_count_and_too_few_say_nothing() -> None:
    few = {dose: dict(list(seeds.items())[:3]) for dose, seeds in outcomes(8).items() if dose in (0, 2, 4)}
    quick = scored(few, outcomes(2))
    assert (quick.doses, quick.seeds, quick.verdict) == ((0, 2, 4), (0, 1, 2), "twice or more")
    two = scored({dose: dict(list(seeds.items())[:2]) for dose, seeds in few.items()}, outcomes(2))
    assert (two.verdict, two.relative.low) == ("too few seeds", None)
    assert "dose" in str(score({0.0: {0: 0.8}}, outcomes(2), START))
    assert "seed" in str(score({0.0: {9: 0.8}, 1.0: {9: 0.8}}, outcomes(2), START))
    assert "gains nothing" in str(score(outcomes(2), outcomes(2, healthy=0.3), START))


def records(probe: Probe, cliffs: dict[str, float], sampler: dict[str, float] | None = None) -> list[Record]:
    """Runs of a probe whose doses are taken for those above, each row with its cliff."""
    made = [Record(probe.name, "0", "start", 0, "start", START)]
    for row, cliff in cliffs.items():
        others = outcomes((sampler or {}).get(row, cliff))
        for dose, seeds in outcomes(cliff).items():
            for seed, value in seeds.items():
                of_sampler = others[dose][seed] if sampler and dose else None
                made.append(Record(probe.name, f"{dose:g}", row, seed, f"{row}{dose}{seed}", value, of_sampler))
    return made


def test_a_map_scores_the_two_policies_apart_and_says_what_held() -> None:
    probe = Probe("mismatch_bits")
    cliffs = dict.fromkeys(FIXED, 2.0) | {"control": 8.0, "mine": 4.0}
    made = records(probe, cliffs, {"mine": 1.0})
    drawn = draw_map([probe], {"mine": ("importance_correction", "off-policy")}, made)
    assert [column.title for column in drawn.columns] == ["mismatch_bits, trainer", "mismatch_bits, sampler"]
    trainer, sampler = (drawn.cells["mine", place] for place in (0, 1))
    assert isinstance(trainer.score, Score)
    assert isinstance(sampler.score, Score)
    assert (trainer.score.relative.value > 1.5, sampler.score.relative.value < 0.7) == (True, True)
    assert [(cell.prediction, drawn.held(cell)) for cell in (trainer, sampler)] == [("more", True), ("less", True)]
    assert drawn.cells["half_lr", 0].prediction == "same"
    assert drawn.cells["base", 0].prediction is None
    [sentence] = drawn.sentences
    assert f"{drawn.shown(trainer)} in mismatch_bits, trainer" in sentence
    assert f"{drawn.shown(sampler)} in mismatch_bits, sampler" in sentence
    data = json.loads(drawn.json)
    assert len(data["cells"]) == 2 * len(drawn.rows)


def test_a_row_of_three_seeds_is_told_in_words_and_what_is_missing_is_said() -> None:
    probe = Probe("staleness")
    cliffs = {"base": 2.0, "mine": 8.0, "quick": 8.0, "idle": 2.0}
    made = [record for record in records(probe, cliffs) if record.row != "quick" or record.seed < QUICK_SEEDS]
    kinds = {row: ("token",) for row in ("mine", "quick", "idle")}
    drawn = draw_map([probe], kinds, made, remarks=["why"])
    # every run of it ended as the base's did
    assert (drawn.shown(drawn.cells["idle", 0]), drawn.acted("idle"), drawn.acted("base")) == (
        "did not act",
        "0 of 40",
        NOTHING,
    )
    assert drawn.acted("mine") == "40 of 40"
    assert '<td class="acted">0 of 40</td>' in page(drawn)
    assert drawn.shown(drawn.cells["quick", 0]) == "twice or more"
    assert drawn.shown(drawn.cells["mine", 0]) == "> 4 [3.9, > 4]"
    assert isinstance(drawn.cells["control", 0].score, str)
    assert "| quick | twice or more |" in drawn.markdown
    assert "- why" in drawn.markdown
    assert any("staleness" in remark for remark in draw_map([probe], {}, []).remarks)


def test_the_page_opens_a_figure_for_each_cell_and_loads_and_runs_nothing() -> None:
    probe = Probe("staleness")
    names = {"<b>mine": ("token",)}
    drawn = draw_map([probe], names, records(probe, {"base": 2, "control": 99, "<b>mine": 1}))
    text = page(drawn)
    assert "<script" not in text
    assert "default-src 'none'; script-src 'none'" in text
    assert "<b>mine" not in text
    for row in range(len(drawn.rows)):
        assert f'href="#c-{row}-0"' in text
        assert f'id="c-{row}-0"' in text
    assert text.count('circle class="first"') == 2 * 5 * 8  # a point for each seed and dose of the two other rows
    assert re.search('<td class="d[567]">', text)
    assert re.search('<td class="d[123]">', text)


def test_what_rounds_to_the_base_s_dose_tells_on_which_side_of_it() -> None:
    assert [told(value, 3.0) for value in (1.0, 1.0023, 0.9962, 1.031)] == ["1", "1.002", "0.996", "1.03"]
