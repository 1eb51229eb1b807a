import pytest

from benchmarks.goals import SMALL, Goal, Limits, evaluate, load
from benchmarks.head import MODES, PRESETS
from benchmarks.heads import HEADS
from benchmarks.report import fill, goal_rows

FASTER = Goal(
    row="2",
    says="times faster",
    better="higher",
    limits=Limits(must=1.8, aim=2.3),
    where={"benchmark": "head", "preset": ["A", "B"]},
    of={"case": ["naive", "trl"]},
    over={"case": "rlstab"},
    by=("preset",),
    value="cpu_s",
)


def record(case, cpu_s, *, preset="A", run="1", **more):
    date = f"2026-01-0{run}"
    return {"benchmark": "head", "case": case, "cpu_s": cpu_s, "preset": preset, "run": run, "date": date, **more}


def three(own, naive, trl, **where):
    return [record("rlstab", own, **where), record("naive", naive, **where), record("trl", trl, **where)]


def test_the_fastest_of_several_and_the_worst_shape_count():
    slowest = evaluate(FASTER, [*three(1.0, 5.0, 4.0), *three(2.0, 5.0, 9.0, preset="B")])
    assert (slowest.value, slowest.where) == (2.5, "B")
    assert slowest.values == {"A": 4.0, "B": 2.5}


OLD, NEW = three(1.0, 5.0, 4.0), three(1.0, 5.0, 3.0, run="2")


@pytest.mark.parametrize(
    ("records", "values"),
    [
        (OLD[:2], [None]),
        (three(1.0, 5.0, 4.0, preset="S"), [None]),
        ([*OLD, record("rlstab", 0.1, run="2")], [4.0, None]),
        ([*NEW, *OLD], [3.0, 4.0, None]),
    ],
    ids=["not all have run", "another shape", "both sides come from one run", "the newest run counts"],
)
def test_which_records_count(records, values):
    values_seen = [evaluate(FASTER, records, back=back) for back in range(len(values))]
    assert [each and each.value for each in values_seen] == values


def test_values_are_judged_in_their_direction():
    assert [FASTER.judge(value) for value in (2.3, 2.29, 1.8, 1.79)] == ["aim", "must", "must", "missed"]
    lower = Goal("3", "", "lower", Limits(must=0.25, aim=0.2))
    assert [lower.judge(value) for value in (0.2, 0.21, 0.25, 0.26)] == ["aim", "must", "must", "missed"]
    assert FASTER.judge(None) == "unmeasured"


def test_a_goal_without_a_ratio_is_the_field_itself():
    goal = Goal("4", "", "lower", Limits(5.2, 4.4), where={"benchmark": "head"}, value="g_units")
    assert evaluate(goal, [record("rlstab", 1.0, g_units=4.5)]).value == 4.5


def test_a_regression_is_marked():
    before, after = three(1.0, 4.0, 4.0), three(1.0, 3.0, 3.0, run="2")
    assert goal_rows([FASTER], [*before, *after])[0][5] == "4 **regression**"
    assert goal_rows([FASTER], before)[0][5] == ""


def test_what_the_goals_name_exists():
    presets = {name for name in PRESETS if name not in SMALL}
    for goal in load():
        if goal.unmeasured:
            continue
        assert goal.value, goal.row
        for side in (goal.where, goal.of, goal.over or {}):
            assert set(side.get("preset", [])) <= presets, goal.row
            if goal.where["benchmark"] == "head":
                mode = side.get("mode", "fwd")
                assert mode in MODES, goal.row
                cases = side.get("case", [])
                assert set([cases] if isinstance(cases, str) else cases) <= set(HEADS), goal.row


def test_a_page_is_filled_between_its_comments():
    page = "above\n<!-- a: written by `python -m benchmarks report` -->\nold\n<!-- end of a -->\nbelow"
    filled = fill(page, "a", "new")
    assert "old" not in filled
    assert filled.startswith("above\n")
    assert filled.endswith("below")
    assert fill(filled, "a", "new") == filled
    with pytest.raises(ValueError, match="no place for 'b'"):
        fill(page, "b", "new")
