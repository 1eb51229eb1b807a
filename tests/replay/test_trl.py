"""Dumps of TRL's own trainer and of the adapter's: the loss again, its coefficients, and what methods did."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from rlstab.adapters.host_objective import methods_of
from rlstab.look.alternatives import effect_of, own_objective
from rlstab.look.host_loss import judge, terms_of
from rlstab.look.recorded_loss import loss_of
from rlstab.record import Step, read_dump
from tests.adapters.jobs import farthest, model, same_weights
from tests.adapters.trl_jobs import config, over_ranks, run

pytestmark = pytest.mark.filterwarnings("default")
#: Four optimizer steps of four micro-batches over one generation taken twice, with a reference.
CUT: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "beta": 0.04}
LOSSES = ["dapo", "grpo", "bnpo", "dr_grpo"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs over two processes: TRL's own losses, and an objective."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs: dict[str, Any] = {loss: {**CUT, "loss_type": loss, "dumped": True} for loss in LOSSES}
    jobs["own"] = {**CUT, "beta": 0.0, "objective": OBJECTIVE, "dumped": True}
    return folder, over_ranks(folder, jobs)


OBJECTIVE = [
    {"name": "clip_higher", "high": 0.28},
    {"name": "s2t"},
    {"name": "stare", "target_entropy": 0.8},
    {"name": "random_mask", "share": 0.3},
]


def agrees(steps: list[Step], name: str) -> float:
    """The largest difference."""
    verdict = judge(steps)
    assert (verdict.name, verdict.agrees, verdict.findings) == (name, True, ())
    return verdict.error


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_trl_is_reproduced(loss: str, ranks: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = ranks
    dump = read_dump(folder / loss / "dump")
    assert dump.notes == []
    assert [(step.number, step.ranks) for step in dump.steps] == [(n, [0] * 4 + [1] * 4) for n in (1, 2, 3, 4)]
    agrees(dump.steps, f"trl/{loss}")
    assert [step.tensors["versions"].unique().tolist() for step in dump.steps] == [[0], [0], [2], [2]]
    assert [step.batch.lag.unique().tolist() for step in dump.steps if step.batch.lag is not None] == [[0], [1]] * 2
    header = dump.steps[0].header
    assert (header.temperature, header.top_p, header.top_k, header.logprobs_mode) == (1.0, 1.0, 0, None)
    for step in dump.steps:
        loss, told = loss_of(step), step.header.loss
        assert loss is not None
        assert told is not None
        expected = {kind: terms_of(loss, step, kind).sum(1) for kind in ("losses", "gradient")}
        assert torch.allclose(expected["losses"], torch.tensor(told.values).double(), atol=1e-6, rtol=0)
        apart = (expected["gradient"] - step.tensors["coefficients"]).abs().max()
        assert apart < 1e-5 * expected["gradient"].abs().max()
    assert dump.steps[1].tensors["rewards"].unique().numel() > 2
    assert (dump.steps[1].tensors["logprobs"] - dump.steps[1].tensors["old_logprobs"]).abs().max() > 1e-3


def test_the_coefficients_are_those_of_the_gradient(ranks: tuple[Path, dict[str, Any]]) -> None:
    """The first step's gradient of every weight again, from the dumped tokens and coefficients alone."""
    folder, results = ranks
    step = read_dump(folder / "dapo" / "dump").steps[0]
    policy, offset = model(), 0
    for prompt, length in zip(step.prompts, step.tensors["lengths"].tolist(), strict=True):
        ids, slopes = (step.tensors[name][offset : offset + length] for name in ("ids", "coefficients"))
        logits = policy(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        assert torch.allclose(logprobs, step.tensors["logprobs"][offset : offset + length], atol=1e-4)
        (logprobs * slopes / 2).sum().backward()
        offset += length
    gradients = results["dapo"][0]["steps"][0]["gradients"]
    for name, weight in policy.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(weight.grad, gradients[name], atol=1e-5), name


def test_an_objective_in_trl_is_replayed(ranks: tuple[Path, dict[str, Any]]) -> None:
    """With its state, which goes on from step to step."""
    folder, results = ranks
    steps = read_dump(folder / "own" / "dump").steps
    assert agrees(steps, "rlstab") < 1e-6
    for step, after in zip(steps, results["own"][0]["steps"], strict=True):
        loss = loss_of(step)
        assert loss is not None
        assert loss.objective is not None
        _, seen, state = effect_of(step, loss.objective, loss.state)
        assert state == after["settled"]
        dropped = ~seen.kept
        assert dropped.any()
        assert not step.tensors["coefficients"][step.mask][dropped].any()


def test_a_dumped_run_is_not_changed(tmp_path: Path) -> None:
    """Weights and all that TRL logs, with generation by the model."""
    cut = {**CUT, "extra": {"rollout_func": None}}
    plain, dumped = (run(tmp_path / str(on), dumped=on, **cut) for on in (False, True))
    for pair in zip(plain["steps"], dumped["steps"], strict=True):
        assert same_weights(*pair)
        assert farthest(*pair) == 0.0
    for before, after in zip(plain["log"][:4], dumped["log"][:4], strict=True):
        assert {**before, "step_time": 0} == {**after, "step_time": 0}
    assert judge(read_dump(tmp_path / "True" / "dump").steps).agrees
    assert json.loads((tmp_path / "True" / "dump" / "tokenizer.json").read_text())["model"]


@pytest.mark.parametrize(
    "change",
    [
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo"},
        {"entropy_coef": 0.01, "delta": 1.5},
        {"use_bias_correction_kl": False, "beta": 0.2},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.3},
        {"loss_type": "vespo", "steps_per_generation": 8},
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.005},
        {"use_adaptive_entropy": True, "entropy_target": 1.0, "entropy_coef": 0.02},
        {"importance_sampling_level": "sequence", "delta": 1.05},
    ],
    ids=str,
)
def test_other_settings_are_reproduced(change: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, dumped=True, learning_rate=0.01, **{**CUT, **change})
    steps = read_dump(tmp_path / "dump").steps
    agrees(steps, f"trl/{change.get('loss_type', 'dapo')}")
    trained = {method["name"] for method in methods_of(config(tmp_path, **{**CUT, **change}))}
    assert trained <= {member.name for member in own_objective(steps).members}
    halved = [step.having({"coefficients": step.tensors["coefficients"] / 2}) for step in steps]
    assert judge(halved).agrees is not True


def test_a_quantile_over_processes_is_not_called_an_error(tmp_path: Path) -> None:
    job = {**CUT, "top_entropy_quantile": 0.5, "max_steps": 1, "dumped": True}
    over_ranks(tmp_path, {"run": job})
    verdict = judge(read_dump(tmp_path / "run" / "dump").steps)
    assert verdict.agrees is None
    assert "quantile of a micro-batch" in verdict.sentence
