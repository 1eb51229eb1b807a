"""What the benchmarks time is what they say it is, on shapes that take no time."""

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks import throughput
from benchmarks.e2e import Model, assert_updates_agree
from benchmarks.heads import HEADS, Problem
from benchmarks.memory import peak
from benchmarks.modules import Step, cases, stack
from benchmarks.protocol import ROOT, Disagreement
from benchmarks.throughput import JOBS, Job, Marks, settings
from rlstab import ClipHigher, TokenMean, compose, make_plan
from rlstab.config import load_run
from rlstab.testing.tolerances import SINGLE
from tests.train.forks import forkserver


def test_plain_is_the_loss_that_the_methods_extend():
    made, objective = Step(4, 16), compose(ClipHigher(), TokenMean())
    batch = made.pack(objective)
    (own,) = made.loss(make_plan(objective, [batch]), batch)
    torch.testing.assert_close(own, made.plain(), rtol=SINGLE, atol=0)


def test_the_stack_is_ten_methods_with_exact_thresholds_and_all_of_them_act():
    methods = stack()
    assert len(methods) >= 10
    assert {"top_entropy", "s2t", "stare"} <= {method.name for method in methods[:10]}
    made, objective = Step(8, 64), compose(*methods)
    batch = made.pack(objective)
    plan = make_plan(objective, [batch])
    assert 0 < plan.kept.tokens < plan.everything.tokens
    assert plan.penalised > 0
    assert all(loss is not None for loss in made.loss(plan, batch))


def test_each_number_of_methods_is_timed_in_parts_and_in_whole():
    made = Step(2, 8)
    timed = cases(made, {"0": compose(), "all": compose(*stack())})
    parts = [f"{name}: {part}" for name in ("0", "all") for part in ("pack", "plan", "loss", "stage")]
    assert list(timed) == ["plain", *parts]
    for case in timed.values():
        case.run(case.prepare())


def test_a_whole_model_has_the_same_gradients_under_each_head_or_is_not_timed():
    model, naive = Model("tiny", 2, 8, 0.25), HEADS["naive"].load()
    assert assert_updates_agree(model, {"rlstab": HEADS["rlstab"].load(), "naive": naive})["rlstab"] <= SINGLE
    assert float(model.gradients(naive).norm()) > 0
    with pytest.raises(Disagreement, match="rlstab, all gradients"):
        assert_updates_agree(model, {"rlstab": lambda given, weights, entropy: naive(given, weights + 0.1, entropy)})


def test_the_jobs_are_runs_of_ours(tmp_path):
    for job in JOBS.values():
        run = load_run(settings(job, tmp_path))
        assert run.rollout.prompts * run.rollout.group == job.samples
        assert run.optimisation.rollouts == job.warmup + job.steps
        assert (run.optimisation.optimizer_steps_per_rollout, run.evaluation.every) == (1, 0)


def test_a_step_lies_between_the_ends_of_two_updates(monkeypatch):
    now = iter([1.0, 2.0, 5.0, 9.0])
    monkeypatch.setattr(throughput.time, "process_time", lambda: next(now))
    optimizer, marks = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0), Marks()
    job = Job("", {}, 1, 1, 1, 1, "fp32", 0.0, steps=2, warmup=2)
    with pytest.raises(RuntimeError, match="0 updates in 4 steps"):  # it makes no figure
        Marks().per_step(job)
    for _ in range(4):
        optimizer.step()
    assert marks.per_step(job)["cpu_s"] == (9.0 - 2.0) / 2


def test_memory_of_a_fresh_process_holds_at_least_the_gradients():
    problem = Problem(64, 256, 16384, torch.float32)
    with forkserver().Pool(1, maxtasksperchild=1) as pool:  # this process has freed memory, which would be used again
        naive, own = (pool.apply(peak, (name, problem, 1.0)) for name in ("naive", "rlstab"))
    assert own["gradients_mib"] == naive["gradients_mib"] == pytest.approx(16.0625)
    assert naive["peak_mib"] >= naive["gradients_mib"] + 64 * 16384 * 4 / 2**20  # log-probs of the whole vocabulary


def test_every_name_is_a_module_with_a_main():
    for name in entry.NAMES:
        assert (ROOT / "benchmarks" / f"{name}.py").read_text().count("\ndef main(") == 1, name
