import json

import pytest
import torch

from benchmarks.heads import HEADS, Problem, assert_heads_agree, inputs, step, weights_of
from benchmarks.protocol import Case, Disagreement, Run, Times, assert_agree, interleave, measured, read


class Clock:
    """A clock that work moves on, and nothing else."""

    now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


def test_cases_take_turns_and_the_unit_runs_before_each():
    seen, clock = [], Clock()
    cases = {name: Case(lambda _, name=name: seen.append(name)) for name in "abc"}
    interleave(cases, 3, lambda: seen.append("unit"), cpu_clock=clock, wall_clock=clock)
    assert seen[0] == "unit"  # once before anything, so that the first timed one is warm
    assert seen[1::2] == ["unit"] * 9
    assert seen[2::2] == [*"abc", *"bca", *"cab"]


def test_times_are_those_of_the_run_and_not_of_its_preparation():
    clock = Clock()

    def prepare():
        clock.spend(100.0)
        return 3.0

    times, _ = interleave({"one": Case(clock.spend, prepare)}, 2, cpu_clock=clock, wall_clock=clock)
    assert times["one"].cpu == times["one"].wall == [3.0, 3.0]


def test_least_cpu_median_wall_g_units_and_paired_ratios():
    times = {"a": Times([2.0, 4.0, 3.0], [2.0, 40.0, 3.0]), "b": Times([4.0, 16.0, 3.0], [1.0, 1.0, 1.0])}
    both = measured(times, Times([0.5, 1.0], [1.0, 1.0]))
    assert [both["a"][name] for name in ("cpu_s", "wall_s", "g_units")] == [2.0, 3.0, 4.0]
    assert both["a"]["ratio_to"] == {"b": 2.0}  # of 2, 4 and 1 in the three repetitions
    assert both["b"]["ratio_to"] == {"a": 0.5}
    assert measured(times, Times())["a"]["g_units"] is None


def test_agreement_bites():
    reference = torch.tensor([3.0, 4.0])
    for relative in (False, True):
        assert assert_agree("it", reference + 1e-6, reference, allowed=1e-5, relative=relative) > 0
        for other, allowed in ((reference + 1e-3, 1e-5), (reference * torch.nan, 1e9)):
            with pytest.raises(Disagreement, match="it: "):
                assert_agree("it", other, reference, allowed=allowed, relative=relative)


def test_ours_agrees_with_float64():
    laws = {name: HEADS[name].load() for name in ("rlstab", "naive")}
    for dtype in (torch.float32, torch.bfloat16):
        for entropy in (False, True):
            assert_heads_agree(laws, inputs(Problem(16, 12, 40, dtype)), entropy=entropy)


@pytest.mark.parametrize(
    ("by", "half", "dtype"),
    [(1e-3, False, torch.float32), (0.0, True, torch.float32), (0.2, False, torch.bfloat16)],
    ids=["log-probs", "the gradient of half of the rows", "more than the plain head in bfloat16"],
)
def test_a_head_that_computes_something_else_is_not_timed(by, half, dtype):
    def head(given, weights, entropy):
        weights = weights * (torch.arange(len(weights)) % 2) if half else weights
        loss, logprobs, entropies = HEADS["naive"].load()(given, weights, entropy)
        return loss, logprobs + by, entropies

    with pytest.raises(Disagreement, match="rlstab, "):
        assert_heads_agree({"rlstab": head}, inputs(Problem(16, 12, 40, dtype)))


def test_live_rows_are_as_many_as_asked_for_and_one_token_or_none_is_a_case_too():
    problem = Problem(40, 2, 3, torch.float32)
    assert [int(weights_of(problem, live).sum()) for live in (0.0, 0.05, 0.2, 1.0)] == [0, 2, 8, 40]
    assert weights_of(problem, 0.2, block=True).tolist() == [1.0] * 8 + [0.0] * 32
    assert weights_of(problem, 0.2).tolist() != weights_of(problem, 0.2, block=True).tolist()
    for tokens in (1, 8):
        problem = Problem(tokens, 4, 9, torch.float32)
        idle = step(HEADS["rlstab"].load(), inputs(problem), weights_of(problem, 0.0))
        assert all(float(gradient.abs().sum()) == 0 for gradient in idle.gradients)


def test_records_come_back_as_they_were_kept(tmp_path):
    keep = tmp_path / "deep" / "kept.jsonl"
    run = Run("head", keep)
    run.add("rlstab", cpu_s=0.5, live=None, ratio_to={"naive": 2.0})
    Run("head", keep).add("naive", cpu_s=1.0)
    records = read(keep)
    assert records[0] == json.loads(json.dumps(run.records[0]))
    assert [record["case"] for record in records] == ["rlstab", "naive"]
    assert {"machine", "threads", "load", "versions", "commit", "seed", "date", "run"} <= records[0].keys()
    assert read(tmp_path / "none.jsonl") == []
