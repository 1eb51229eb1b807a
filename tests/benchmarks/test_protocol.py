import itertools
import json

import pytest
import torch

from benchmarks.heads import HEADS, Problem, assert_heads_agree, inputs, step, weights_of
from benchmarks.protocol import (
    Case,
    Disagreement,
    Run,
    Times,
    assert_agree,
    interleave,
    measured,
    read,
    rotated,
)


class Clock:
    """A clock that work moves on, and nothing else."""

    def __init__(self):
        self.now = 0.0

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


def test_an_order_that_rotates_returns():
    assert rotated(["a", "b"], 2) == ["a", "b"]


def test_times_are_those_of_the_run_and_not_of_its_preparation():
    clock = Clock()

    def prepare():
        clock.spend(100.0)
        return 3.0

    times, _ = interleave({"one": Case(clock.spend, prepare)}, 2, cpu_clock=clock, wall_clock=clock)
    assert times["one"].cpu == times["one"].wall == [3.0, 3.0]


def test_least_cpu_median_wall_g_units_and_paired_ratios():
    times = {"a": Times([2.0, 4.0, 3.0], [2.0, 40.0, 3.0]), "b": Times([4.0, 16.0, 3.0], [1.0, 1.0, 1.0])}
    found = measured(times, Times([0.5, 1.0], [1.0, 1.0]))
    assert found["a"]["cpu_s"] == 2.0
    assert found["a"]["wall_s"] == 3.0
    assert found["a"]["g_units"] == 4.0
    assert found["a"]["ratio_to"] == {"b": 2.0}  # of 2, 4 and 1 in the three repetitions
    assert found["b"]["ratio_to"] == {"a": 0.5}


def test_without_a_unit_there_is_no_g():
    assert measured({"a": Times([1.0], [1.0])}, Times())["a"]["g_units"] is None


@pytest.mark.parametrize("relative", [False, True])
def test_agreement_bites(relative):
    reference = torch.tensor([3.0, 4.0])
    assert assert_agree("it", reference + 1e-6, reference, allowed=1e-5, relative=relative) > 0
    with pytest.raises(Disagreement, match="it: "):
        assert_agree("it", reference + 1e-3, reference, allowed=1e-5, relative=relative)


def test_nan_never_agrees():
    with pytest.raises(Disagreement):
        assert_agree("it", torch.tensor([torch.nan]), torch.tensor([1.0]), allowed=1e9, relative=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_ours_agrees_with_float64(dtype, entropy):
    laws = {name: HEADS[name].load() for name in ("rlstab", "naive")}
    assert_heads_agree(laws, inputs(Problem(16, 12, 40, dtype)), entropy=entropy)


@pytest.mark.parametrize("spoiled", ["logprobs", "gradient of half of the rows"])
def test_a_head_that_computes_something_else_is_not_timed(spoiled):
    good = HEADS["naive"].load()

    def bad(given, weights, entropy):
        if spoiled == "logprobs":
            loss, own, entropies = good(given, weights, entropy)
            return loss, own + 1e-3, entropies
        loss, own, entropies = good(given, weights * (torch.arange(len(weights)) % 2), entropy)
        return loss, own, entropies

    with pytest.raises(Disagreement, match="rlstab, "):
        assert_heads_agree({"rlstab": bad}, inputs(Problem(16, 12, 40, torch.float32)))


def test_in_bfloat16_a_head_is_held_to_the_error_of_the_plain_one():
    good, given = HEADS["naive"].load(), inputs(Problem(16, 12, 40, torch.bfloat16))

    def bad(given, weights, entropy):
        loss, own, entropies = good(given, weights, entropy)
        return loss, own + 0.2, entropies

    with pytest.raises(Disagreement, match="rlstab, logprobs"):
        assert_heads_agree({"rlstab": bad}, given)


def test_live_rows_are_as_many_as_asked_for_and_a_block_is_one():
    problem = Problem(40, 2, 3, torch.float32)
    assert [int(weights_of(problem, live).sum()) for live in (0.0, 0.05, 0.2, 1.0)] == [0, 2, 8, 40]
    assert weights_of(problem, 0.2, block=True).tolist() == [1.0] * 8 + [0.0] * 32
    assert weights_of(problem, 0.2).tolist() != weights_of(problem, 0.2, block=True).tolist()


@pytest.mark.parametrize("tokens", [1, 8])
def test_one_token_and_no_live_row_are_cases_too(tokens):
    problem = Problem(tokens, 4, 9, torch.float32)
    found = step(HEADS["rlstab"].load(), inputs(problem), weights_of(problem, 0.0))
    assert all(float(one.abs().sum()) == 0 for one in found.gradients)


def test_records_come_back_as_they_were_kept(tmp_path):
    keep = tmp_path / "deep" / "kept.jsonl"
    run = Run("head", keep)
    run.add("rlstab", cpu_s=0.5, live=None, ratio_to={"naive": 2.0})
    Run("head", keep).add("naive", cpu_s=1.0)
    found = read(keep)
    assert found[0] == json.loads(json.dumps(run.records[0]))
    assert [one["case"] for one in found] == ["rlstab", "naive"]
    assert {"machine", "threads", "load", "versions", "commit", "seed", "date", "run"} <= found[0].keys()
    assert torch.__version__.startswith(found[0]["versions"]["torch"])  # a package may leave "+cu128" out


def test_no_file_is_no_record(tmp_path):
    assert read(tmp_path / "none.jsonl") == []


def test_the_lines_of_a_run_share_its_identity(tmp_path):
    run = Run("head", None)
    assert len({one["run"] for one in itertools.starmap(run.add, [("a",), ("b",)])}) == 1
