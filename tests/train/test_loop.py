"""The loop: every recipe trains, the cut into micro-batches does not matter, bad numbers are refused."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import rlstab
from rlstab.presets import PRESETS
from rlstab.tasks import Countdown, Example
from rlstab.train import asking, loop
from tests.train.runs import go, sampler_gap, small, trained_alike, weights, without_times


class Fixed(Countdown):
    """Countdown with another scorer."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self.reward = reward

    def score(self, example: Example, completion: str) -> float:
        return self.reward(completion) if callable(self.reward) else self.reward


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(reward: Any) -> None:
        monkeypatch.setattr(loop, "build_task", lambda settings: Fixed(reward))

    return use


def by_length(completion: str) -> float:
    return (len(completion) % 5) / 4


#: One of each kind: plain, masked, penalised, another ratio, off-policy, with stages. The others are slow tests.
OFTEN = {"dapo", "stapo", "lp_reg", "gspo", "cispo", "vcpo", "icepop", "recommended", "stack", "stack_stale"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in OFTEN else [pytest.mark.slow]) for one in sorted(PRESETS)]
)
def test_every_preset_trains(name: str, tmp_path: Path, scorer: Any) -> None:
    scorer(by_length)
    run = small(tmp_path / "run", {"preset": name}, optimisation__mini_batches=2, optimisation__epochs=2)
    records = go(run).records
    assert [one["rollout"] for one in records] == [1, 2, 3]
    for one in records:
        assert all(math.isfinite(value) for value in one.values())
        assert {"loss", "gradient/norm", "reward/mean", "tokens/entropy", "response/length"} <= one.keys()
        assert {"seconds/sample", "seconds/score", "seconds/train"} <= one.keys()


OPTIONS = [
    {},
    {"optimisation__mini_batches": 2, "optimisation__epochs": 2},
    {"optimisation__mini_batches": 2, "optimisation__refresh": "step", "optimisation__old_logprobs": "rollout"},
    {"optimisation__epochs": 2, "optimisation__old_logprobs": "recompute", "rollout__temperature": 0.8},
]
STACK = [{"preset": "recommended"}, {"name": "lp_reg", "share": 0.2}, "kl", "adaptive_entropy", "entropy_bonus"]


@pytest.mark.parametrize("options", OPTIONS, ids=["live", "recompute", "refresh", "epochs"])
def test_the_cut_into_micro_batches_does_not_matter(options: dict[str, Any], tmp_path: Path, scorer: Any) -> None:
    scorer(by_length)
    whole, cut = (
        small(tmp_path / str(size), STACK, optimisation__micro_batch_size=size, optimisation__lr=1e-4, **options)
        for size in (16, 5)  # at 3, a token of `recompute` stands on the threshold of lp_reg, and rounding decides
    )
    go(whole)
    go(cut)
    trained_alike(tmp_path / "16", tmp_path / "5")


def test_live_means_a_ratio_of_exactly_one(tmp_path: Path, scorer: Any) -> None:
    scorer(by_length)
    records = go(small(tmp_path, "clip_higher")).records
    assert {one["ratio/mean"] for one in records} == {1.0}
    assert all(one["sampler/largest_gap_live"] <= sampler_gap(torch.float32) for one in records)


def test_stale_data_moves_the_ratio(tmp_path: Path, scorer: Any) -> None:
    scorer(by_length)
    records = go(small(tmp_path, "clip_higher", optimisation__epochs=4)).records
    assert any(abs(one["ratio/mean"] - 1) > 1e-4 for one in records)
    assert any(one["ratio/clipped_high"] + one["ratio/clipped_low"] > 0 for one in records)


def test_a_step_without_advantage_is_skipped(tmp_path: Path, scorer: Any) -> None:
    scorer(1.0)
    before = weights_of_start(tmp_path / "start")
    records = go(small(tmp_path / "run", "clip_higher")).records
    assert [one["optimizer_steps/skipped"] for one in records] == [1, 1, 1]
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path / "run").items())


def test_a_penalty_still_acts_without_advantage(tmp_path: Path, scorer: Any) -> None:
    scorer(1.0)
    records = go(small(tmp_path, ["clip_higher", "entropy_bonus"])).records
    assert all("optimizer_steps/skipped" not in one for one in records)
    assert all(one["gradient/norm"] > 0 for one in records)


def test_a_scorer_that_raises_costs_its_sample_the_reward(tmp_path: Path, scorer: Any) -> None:
    def raises(completion: str) -> float:
        if len(completion) % 2:
            raise ValueError("odd [length]")
        return by_length(completion)

    scorer(raises)
    screen = io.StringIO()
    loop.train(small(tmp_path), console=Console(file=screen, width=200))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < one["scorer/errors"] <= 16 for one in records)
    assert "scorer raised, reward 0: ValueError: odd [length] (completion '" in screen.getvalue()


def test_a_scorer_that_exits_does_not_end_the_run(tmp_path: Path, scorer: Any) -> None:
    scorer(lambda completion: sys.exit(0))
    assert [one["scorer/errors"] for one in go(small(tmp_path, optimisation__rollouts=1)).records] == [16]


def test_nobody_waits_for_the_scorer_of_a_run_that_was_stopped(
    tmp_path: Path, scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, calls = threading.Event(), []

    def slow(completion: str) -> float:
        calls.append(completion)
        begun.set()
        time.sleep(0.2)
        return 0.0

    sample = asking.sample

    def interrupted(*arguments: Any, **options: Any) -> None:
        sample(*arguments, **options)
        begun.wait()
        raise KeyboardInterrupt

    scorer(slow)
    monkeypatch.setattr(asking, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(small(tmp_path))
    assert 1 <= len(calls) <= 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rewards_that_are_no_numbers_are_refused(value: float, tmp_path: Path, scorer: Any) -> None:
    scorer(lambda completion: value if completion.startswith(("1", "2")) else by_length(completion))
    before = weights_of_start(tmp_path / "start")
    screen = io.StringIO()
    run = small(tmp_path / "run", optimisation__rollouts=1)
    loop.train(run, console=Console(file=screen, width=300))
    assert "refused: " in screen.getvalue()
    assert "rewards are NaN or Inf. The rollout was refused and nothing was changed." in screen.getvalue()
    assert without_times(tmp_path / "run")[0]["optimizer_steps/refused"] == 1
    assert all(torch.equal(one, before[name]) for name, one in weights(tmp_path / "run").items())


def test_a_live_policy_with_nan_is_refused_until_the_run_ends(
    tmp_path: Path, scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer(by_length)
    monkeypatch.setattr(loop, "MAX_REFUSED", 2)
    honest = loop.load_policy
    calls = []

    def poisoned(*arguments: Any, **options: Any) -> Any:
        policy = honest(*arguments, **options)
        signals = type(policy).signals

        def broken(self: Any, *arguments: Any, **options: Any) -> Any:
            found = signals(self, *arguments, **options)
            if torch.is_grad_enabled():
                calls.append(1)
                values = found.logprobs.clone()
                values[0] = torch.nan
                return dataclasses.replace(found, logprobs=values)
            return found

        monkeypatch.setattr(type(policy), "signals", broken)
        return policy

    monkeypatch.setattr(loop, "load_policy", poisoned)
    with pytest.raises(
        rlstab.errors.NonFinite, match=r"2 optimizer steps in a row were refused, the last because: 1 live values"
    ):
        go(small(tmp_path))
    assert len(calls) == 2
    (record,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["optimizer_steps/refused"] == 1
    assert all(math.isfinite(value) for value in record.values())


def test_a_signal_that_nobody_provides_fails_before_anything_runs(tmp_path: Path) -> None:
    class Foreign(rlstab.TokenObjective):
        name = "foreign"
        needs = {"gradient_norms"}

        def terms(self, batch: Any, stat: Any, state: Any) -> rlstab.Terms:
            return rlstab.Terms()

    run = small(tmp_path / "run")
    run._composition = rlstab.compose(Foreign(), rlstab.ClipHigher())
    with pytest.raises(rlstab.errors.MissingSignal) as caught:
        go(run)
    assert str(caught.value) == (
        "'foreign' reads 'gradient_norms', which the trainer does not provide. It provides: block_ids, branch, "
        "entropies, log_kept_mass, logprobs, max_logprobs, ref_logprobs, rollout_logprobs, sum_p_sq, truncated. Remove "
        "'foreign', or pass rlstab.train.train a function that makes it, in signals."
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    run = small(tmp_path / "run", optimisation__rollouts=1)
    go(run)
    with pytest.raises(rlstab.errors.ConfigError) as caught:
        go(run)
    assert str(caught.value) == (
        f"{tmp_path / 'run'} already holds a run. Continue it with --resume, replace it with --overwrite, or set "
        f"another tracking.out."
    )
    assert len(go(run, overwrite=True).records) == 1


def test_a_run_leaves_its_configuration_metrics_samples_and_picture(tmp_path: Path) -> None:
    run = small(tmp_path, evaluation__every=2, evaluation__prompts=8, evaluation__samples=4, evaluation__pass_at=[1, 4])
    result = go(run)
    assert rlstab.config.load_run(tmp_path / "config.yaml") == run
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["run_hash"] == rlstab.config.run_hash(run)
    assert about["objective_hash"] == rlstab.config.objective_hash(run.composition)
    assert [one["rollout"] for one in result.evaluations] == [0, 2, 3]
    for one in result.evaluations:
        assert 0 <= one["eval/pass@1"] <= one["eval/pass@4"] <= 1
        assert one["eval/pass@1"] == pytest.approx(one["eval/mean"])
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["rollout"] for one in samples] == [1, 1, 2, 2, 3, 3]


def test_lines_and_the_summary_are_printed_where_there_is_no_terminal(tmp_path: Path) -> None:
    screen = io.StringIO()
    loop.train(small(tmp_path), console=Console(file=screen, width=120, force_terminal=False))
    shown = screen.getvalue()
    lines, mark, table = shown.partition("┏━━")
    assert mark
    assert re.fullmatch(r"(rollout \d/3 reward .* left.*\n)+", lines), "no bar before the table"
    assert "reward/mean" in table
    assert shown.endswith(f"run: {tmp_path}\n")


def test_other_trackers_get_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    go(small(tmp_path, tracking__trackers=["tensorboard", "wandb"]))
    assert list(tmp_path.rglob("events.out.tfevents*"))
    assert list(tmp_path.rglob("offline-run-*")), "wandb is offline unless it is configured"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_bf16_rounds_what_it_computes_and_keeps_float32_weights(tmp_path: Path, scorer: Any) -> None:
    scorer(by_length)
    wide = go(small(tmp_path / "wide")).records
    records = go(small(tmp_path / "narrow", optimisation__precision="bf16")).records
    assert all(value.dtype == torch.float32 for value in weights(tmp_path / "narrow").values())
    assert records[0]["tokens/entropy"] != wide[0]["tokens/entropy"]
    # not above 0: some kernels give each row of a batch the same bits as the row alone
    assert all(one["sampler/largest_gap_live"] <= sampler_gap(torch.bfloat16) for one in records)
    assert {one["ratio/mean"] for one in records} == {1.0}


def weights_of_start(out: Path) -> dict[str, torch.Tensor]:
    go(small(out, optimisation__rollouts=1, optimisation__lr=0.0))
    return weights(out)
