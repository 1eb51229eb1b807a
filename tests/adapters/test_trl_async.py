"""TRL's asynchronous trainer with an objective: TRL's loss where it says so, cut-free, resumed exactly."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl.experimental.async_grpo.packing", reason="AsyncGRPOTrainer is that of TRL 1.16")

from trl.experimental.async_grpo import AsyncGRPOTrainer

from rlstab.adapters.training import plan_step
from rlstab.adapters.trl import DumpCallback, async_trainer, hooks
from rlstab.errors import CheckpointError, ConfigError, HostError, MissingSignal
from rlstab.look.alternatives import effect_of
from rlstab.look.host_loss import judge
from rlstab.look.recorded_loss import loss_of
from rlstab.record import read_dump
from tests.adapters import jobs
from tests.adapters.async_jobs import first_policy, over_ranks, run, run_with_server, trainer_of
from tests.adapters.jobs import farthest, largest, same_weights
from tests.adapters.trl_jobs import ON_CPU
from tests.adapters.trl_jobs import reward as reward_of

pytestmark = pytest.mark.filterwarnings("default")

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2}
KL = {"name": "kl", "coefficient": 0.5}
MASKS = [CLIP, {"name": "s2t"}, {"name": "random_mask", "share": 0.3}]
FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config has no `use_cpu`, so accelerate is told by the environment, here alone."""
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)


def test_without_an_objective_it_trains_as_trl_does(tmp_path: Path) -> None:
    host = run(tmp_path / "trl", plain=True)
    trained = run(tmp_path / "rlstab")
    for step, other in zip(host["steps"], trained["steps"], strict=True):
        assert farthest(step, other) < 1e-6 * largest(step)
    shared = ("loss", "ratio", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "reward")
    for line, other in zip(host["log"][:4], trained["log"][:4], strict=True):
        assert {name: line[name] for name in shared} == pytest.approx({name: other[name] for name in shared}, abs=1e-5)
        assert line.keys() <= other.keys()
    cut = run(tmp_path / "cut", **FOUR)
    assert farthest(host["steps"][0], cut["steps"][0]) < 1e-6
    assert farthest(host["steps"][0], run(tmp_path / "trl-cut", plain=True, max_steps=1, **FOUR)["steps"][0]) > 0.05


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    whole, cut = run(tmp_path / "whole", MASKS), run(tmp_path / "cut", MASKS, **FOUR)
    for step, other in zip(whole["steps"], cut["steps"], strict=True):
        assert farthest(step, other) < 1e-5 * largest(step)
        assert all(step[key] == other[key] for key in ("kept", "tokens", "state"))
    assert whole["steps"][0]["kept"][0] < whole["steps"][0]["tokens"][0]


def test_versions_reach_max_lag(tmp_path: Path) -> None:
    lagged = [CLIP, {"name": "max_lag", "updates": 1}]
    fresh = run(tmp_path / "fresh", lagged, **FOUR)
    stale = run(tmp_path / "stale", lagged, worker={"lag": 2}, **FOUR)
    seldom = run(tmp_path / "seldom", lagged, weight_sync_steps=2, worker={"each": 16})
    # two steps are queued before the first, and each step adds one
    for done, lags in ((fresh, [0, 1, 1, 1]), (stale, [0, 1, 2, 3]), (seldom, [0, 1, 2, 3])):
        assert [line["rlstab/max_lag/lag"] for line in done["log"][:4]] == lags
    assert [line["rlstab/max_lag/dropped"] for line in stale["log"][:4]] == [0.0, 0.0, 1.0, 1.0]


def test_each_response_keeps_its_number_group_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[Any] = []

    def planned(step: Any, batches: Any) -> None:
        parts.extend(batches)
        plan_step(step, batches)

    monkeypatch.setattr(hooks, "plan_step", planned)
    run(tmp_path, [CLIP, {"name": "truncated_mask"}], max_steps=1, **FOUR)
    assert len(parts) == 4
    rows = [row for batch in parts for row in zip(batch.sequence_ids.tolist(), batch.group_ids.tolist(), strict=True)]
    assert sorted(rows) == [(number, number // 4) for number in range(8)]
    for batch in parts:
        for row, number in enumerate(batch.sequence_ids.tolist()):
            ids, where = jobs.response(0, number), batch.sequence == row
            assert batch.position[where].tolist() == list(range(len(ids)))
            assert batch.truncated[where].tolist() == [float(ids[-1] != jobs.EOS)] * len(ids)


def test_live_entropies_have_a_gradient(tmp_path: Path) -> None:
    paid = [CLIP, {"name": "entropy_bonus", "coefficient": 0.1}]
    bare, whole = run(tmp_path / "bare", [CLIP], max_steps=1), run(tmp_path / "paid", paid, max_steps=1)
    assert farthest(bare["steps"][0], whole["steps"][0]) > 1e-3
    cut = run(tmp_path / "cut", paid, max_steps=1, **FOUR)
    assert farthest(cut["steps"][0], whole["steps"][0]) < 1e-6


def test_a_refused_step_moves_nothing(tmp_path: Path) -> None:
    broken = run(tmp_path, [CLIP, {"name": "mismatch"}], worker={"spoiled": 9}, **FOUR)
    assert "old_logprobs" in broken["refusal"]
    assert same_weights(broken["steps"][0], broken["steps"][1])
    assert not same_weights(broken["steps"][1], broken["steps"][2])
    assert [line["rlstab/steps/refused"] for line in broken["log"][:4]] == [0.0, 1.0, 0.0, 0.0]
    live = run(tmp_path / "live", [CLIP, {"name": f"{jobs.__file__}:Trouble"}])
    assert same_weights(live["steps"][1], live["steps"][2])


def test_a_run_resumes_as_it_was(tmp_path: Path) -> None:
    price = {"name": "adaptive_entropy", "target_entropy": 0.8, "initial": 0.002}
    saved = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    through = run(tmp_path / "through", [*MASKS, price], **saved)
    checkpoint = str(tmp_path / "through" / "checkpoint-2")
    assert Path(checkpoint, "rlstab.json").exists()
    resumed = run(tmp_path / "resumed", [*MASKS, price], resume=checkpoint, skipped=16, **saved)
    assert through["steps"][1]["settled"] != through["steps"][3]["settled"] == resumed["steps"][1]["settled"]
    with pytest.raises(CheckpointError, match="belongs to the objective"):
        run(tmp_path / "other", [CLIP], resume=checkpoint, **saved)


@pytest.mark.slow
def test_two_processes_are_the_same_step(tmp_path: Path) -> None:
    pair = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    lagged = [*MASKS, {"name": "max_lag", "updates": 1}]
    whole = run(tmp_path / "whole", lagged)
    ranks = over_ranks(tmp_path / "ranks", {"pair": {"objective": lagged, **pair}})["pair"]
    assert [job["ranks"] for job in ranks] == [2, 2]
    for job in ranks:
        for step, other in zip(whole["steps"], job["steps"], strict=True):
            assert farthest(step, other) < 1e-5 * largest(step)
            assert all(step[key] == other[key] for key in ("kept", "tokens", "state"))
        assert job["log"][1]["rlstab/max_lag/lag"] == whole["log"][1]["rlstab/max_lag/lag"] == 1.0


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        ([CLIP], {"epsilon": 0.3}, "AsyncGRPOConfig.epsilon = 0.3 has no effect"),
        ([CLIP, {"name": "turn_credit"}], {}, "'turn_credit' reads 'turn_reward'.*signals={'turn_reward': function}"),
        ([CLIP, {"name": "lp_reg"}], {}, "'lp_reg' reads 'max_logprobs'.*RLStabGRPOTrainer"),
        ([CLIP], {"optim": "lomo"}, "optim = 'lomo'"),
    ],
)
def test_what_does_not_fit_is_refused(objective: Any, changes: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, MissingSignal), match=f"(?s){text}"):
        trainer_of(tmp_path, objective, **changes)


def test_another_trainer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncGRPOTrainer, "compute_loss", lambda *_, **__: torch.zeros(()))
    with pytest.raises(HostError, match="compute_loss"):
        async_trainer.check_host()


def test_a_dump_has_the_versions_and_look_finds_the_loss(tmp_path: Path) -> None:
    lagged = [*MASKS, KL, {"name": "max_lag", "updates": 1}]
    plain = run(tmp_path / "plain", lagged, **FOUR)
    done = run(tmp_path, lagged, dumped=True, **FOUR)
    assert all(farthest(*pair) == 0.0 for pair in zip(plain["steps"], done["steps"], strict=True))
    dump = read_dump(tmp_path / "dump")
    assert dump.notes == []
    assert [(step.number, step.accumulation) for step in dump.steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [step.tensors["versions"].unique().tolist() for step in dump.steps] == [[0], [0], [1], [2]]
    verdict = judge(dump.steps)  # the worker's log-probs are not those of the first policy, which is no fault here
    assert (verdict.name, verdict.agrees, verdict.findings) == ("rlstab", True, ())
    assert verdict.error < 1e-5
    known = {tuple(prompt + ids): reward_of([ids])[0] for prompt, ids, _ in first_policy()}
    for step, after in zip(dump.steps, done["steps"], strict=True):
        loss = loss_of(step)
        assert loss is not None
        assert loss.objective is not None
        _, seen, state = effect_of(step, loss.objective, loss.state)
        assert state == after["settled"]
        assert int(seen.kept.sum()) == after["kept"][0]
        responses = step.tensors["ids"].split(step.tensors["lengths"].tolist())
        rewards = [known[*prompt.tolist(), *ids.tolist()] for prompt, ids in zip(step.prompts, responses, strict=True)]
        assert step.tensors["rewards"].tolist() == pytest.approx(rewards)


def test_a_dump_is_of_a_trainer_that_keeps_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AsyncGRPOTrainer keeps no tokens"):
        DumpCallback(trainer_of(tmp_path, plain=True), tmp_path / "dump")


@pytest.mark.parametrize("adapters", [None, {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}])
def test_the_reference_is_the_model_that_training_began_with(adapters: Any, tmp_path: Path) -> None:
    given = {"adapters": adapters, "learning_rate": 0.05, "max_steps": 2}
    whole = run(tmp_path / "whole", [CLIP, KL], dumped=True, **given)
    cut = run(tmp_path / "cut", [CLIP, KL], dumped=True, **FOUR, **given)
    for step, other in zip(whole["steps"], cut["steps"], strict=True):
        assert farthest(step, other) < 1e-5 * largest(step)
    for name in ("whole", "cut"):
        for step in read_dump(tmp_path / name / "dump").steps:
            reference = step.tensors["ref_logprobs"].split(step.tensors["lengths"].tolist())
            ids = step.tensors["ids"].split(step.tensors["lengths"].tolist())
            expected = jobs.scored([prompt.tolist() for prompt in step.prompts], [row.tolist() for row in ids])
            for values, right in zip(reference, expected, strict=True):
                assert torch.allclose(values, right, atol=1e-4)
        moved = (step.live_logprobs - step.tensors["ref_logprobs"]).abs().mean()
        assert moved > 1e-3


def test_turns_follow_from_the_mask_of_tools(tmp_path: Path) -> None:
    def scored(responses: Any) -> torch.Tensor:
        return (responses["completion_ids"] % 2).float()

    given = {"signals": {"turn_reward": scored}, "worker": {"replies": True}, "max_steps": 1, "dumped": True}
    credited = [CLIP, {"name": "turn_credit"}]
    whole, cut = run(tmp_path / "whole", credited, **given), run(tmp_path / "cut", credited, **FOUR, **given)
    assert farthest(whole["steps"][0], cut["steps"][0]) < 1e-5 * largest(whole["steps"][0])
    (step,) = read_dump(tmp_path / "cut" / "dump").steps
    lengths = step.tensors["lengths"].tolist()
    for turns in step.tensors["turn"].split(lengths):
        assert turns.tolist() == [0.0] * 2 + [1.0] * (len(turns) - 2)
    assert sum(lengths) == sum(len(ids[:2] + ids[4:]) for _, ids, _ in first_policy()[:8])
    assert torch.equal(step.tensors["turn_reward"], (step.tensors["ids"] % 2).float())


@pytest.mark.slow
def test_sharding_changes_nothing(tmp_path: Path) -> None:
    """FSDP2 over two real processes, with a reference model, whose parameters are sharded too."""
    pair = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "dumped": True}
    objective = [*MASKS, KL, {"name": "max_lag", "updates": 1}]
    whole = run(tmp_path / "whole", objective)
    ranks = over_ranks(tmp_path / "ranks", {"pair": {"objective": objective, **pair}}, sharded=True)["pair"]
    assert [job["ranks"] for job in ranks] == [2, 2]
    for job in ranks:
        for step, other in zip(whole["steps"], job["steps"], strict=True):
            assert other["sharded"]
            assert farthest(step, other) < 1e-5 * largest(step)
            assert all(step[key] == other[key] for key in ("kept", "tokens", "state"))
    dump = read_dump(tmp_path / "ranks" / "pair" / "dump")
    assert [step.header.ranks for step in dump.steps] == [2] * 4
    assert judge(dump.steps).agrees


@pytest.mark.slow
def test_trls_own_rollout_worker_feeds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's worker in its process asks a server for completions; each weight sync raises the version of the next."""
    pytest.importorskip("aiohttp")
    lagged = [*MASKS, {"name": "max_lag", "updates": 4}]
    served = run_with_server(tmp_path, monkeypatch, lagged, dumped=True, **FOUR)
    assert [line["rlstab/steps/refused"] for line in served["log"][:4]] == [0.0] * 4
    assert served["log"][0]["rlstab/max_lag/lag"] == 0.0
    assert all(0.0 <= line["rlstab/max_lag/lag"] <= 4.0 for line in served["log"][1:4])
    assert all(largest(step) > 0.0 for step in served["steps"])
    assert served["log"][0]["rlstab/ratio/mean"] == pytest.approx(1.0, abs=1e-4)  # the server has the first weights
    steps = read_dump(tmp_path / "dump").steps
    assert judge(steps).agrees
    for step, line in zip(steps, served["log"], strict=False):
        assert step.batch.lag is not None
        assert float(step.batch.lag.mean()) == pytest.approx(line["rlstab/max_lag/lag"])
