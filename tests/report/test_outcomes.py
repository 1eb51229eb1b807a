import numpy as np
import pytest

from rlstab.errors import ReportError
from rlstab.report.comparison import chosen_outcomes, known_outcomes, outcome_of
from tests.report.conftest import record

VALUES = {"reward/mean": [0.1] * 20 + [0.5] * 10 + [0.2] * 5}
END = [{"rollout": 0, "eval/mean": 0.1}, {"rollout": 35, "eval/mean": 0.3, "eval/pass@4": 0.6, "eval/pass@16": 0.9}]


def test_known_answers() -> None:
    run = record(VALUES, evaluations=END)
    assert outcome_of(run, "eval/mean") == 0.3
    assert outcome_of(run, "eval/pass@4") == 0.6
    assert outcome_of(run, "reward/area") == pytest.approx((2.0 + 5.0 + 1.0) / 35)
    assert outcome_of(run, "reward/best") == 0.5
    assert outcome_of(run, "reward/last") == 0.2
    assert outcome_of(run, "tokens/kept") is None


def test_a_last_tenth_of_whole_bins_weighs_them_by_their_rollouts() -> None:
    values = np.repeat([0.0, 1.0, 2.0], [90, 10, 7]).tolist()
    # the last tenth of 107 rollouts begins at 98: the bins that end at 100 and 107
    assert outcome_of(record({"reward/mean": values}), "reward/last") == pytest.approx((10 * 1.0 + 7 * 2.0) / 17)


@pytest.mark.parametrize("status", ["unfinished", "failed"])
def test_only_finished_runs_have_outcomes(status: str) -> None:
    assert outcome_of(record(VALUES, evaluations=END, status=status), "eval/mean") is None


def test_an_evaluation_before_the_end_is_not_that_of_the_end() -> None:
    run = record(VALUES, evaluations=END[:1])
    assert outcome_of(run, "eval/mean") is None


def test_the_outcomes_are_those_that_some_run_has() -> None:
    names = [one.name for one in known_outcomes([record(VALUES, evaluations=END), record({})])]
    assert names == ["eval/mean", "eval/pass@4", "eval/pass@16", "reward/area", "reward/best", "reward/last"]


def test_any_metric_can_be_chosen() -> None:
    run = record({**VALUES, "tokens/kept": [0.9] * 35}, evaluations=END)
    found = chosen_outcomes([run], ["tokens/kept", "eval/mean", "tokens/kept"])
    assert [one.name for one in found] == ["tokens/kept", "eval/mean"]
    assert outcome_of(run, "tokens/kept") == pytest.approx(0.9)
    half = record({"tokens/kept": [0.0] * 20 + [1.0] * 20}, evaluations=END)
    (whole,) = chosen_outcomes([half], ["tokens/kept/area"])
    assert whole.text == "mean of tokens/kept over all rollouts"
    assert outcome_of(half, "tokens/kept/area") == pytest.approx(0.5)
    with pytest.raises(ReportError, match=r"--metric tokens/keept: no run has it. Did you mean 'tokens/kept'"):
        chosen_outcomes([run], ["tokens/keept"])
