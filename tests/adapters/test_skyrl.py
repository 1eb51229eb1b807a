"""SkyRL's worker and trainer with an objective: independent of the cut, equal to SkyRL's loss where it states that."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tests.adapters.cpu_skyrl", reason="SkyRL is not installed: nox -s skyrl", exc_type=ImportError)

from ray import cloudpickle
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

from rlstab import PolicyOutputs, TokenBatch, load_objective, make_plan
from rlstab.adapters.skyrl import NAME, PolicyLoss, register
from rlstab.errors import CheckpointError, ConfigError, HostError, MissingSignal
from tests.adapters import jobs
from tests.adapters.cpu_skyrl import ROWS, config, rollout, run
from tests.adapters.jobs import objectives, same_weights, unmoved

#: SkyRL and torch warn that there is no GPU.
pytestmark = pytest.mark.filterwarnings("ignore")

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2}
OBJECTIVES = objectives(CLIP, {"target_entropy": 1.2}, initial=0.004, share=0.9, min_p=0.001)
S2T = OBJECTIVES["s2t-stare"]
#: Thresholds on covariances, of which advantages divided by the tokens have none.
COV = [CLIP, {"name": "clip_cov", "share": 1.0, "low": 0.2, "high": 1.5, "clip_low": 0.2, "clip_high": 0.2}]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """S2T and STARE in micro-batches of four."""
    return run(tmp_path_factory.mktemp("four"), S2T)


def apart(first: Any, second: Any) -> float:
    """The largest difference between the gradients of the first optimizer step."""
    pairs = [(values, second["gradients"][0][name]) for name, values in first["gradients"][0].items()]
    return max(float((mine - other).abs().max()) for mine, other in pairs)


def test_clip_higher_is_skyrls_own_loss(tmp_path: Path) -> None:
    theirs = run(tmp_path, policy_loss_type="regular")
    ours = run(tmp_path, [CLIP])
    assert len(ours["gradients"]) == 2
    assert 1e-3 < max(float(values.abs().max()) for values in theirs["gradients"][0].values())
    assert apart(ours, theirs) < 2e-6
    losses = [
        (mine["policy_loss"], other["policy_loss"])
        for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True)
    ]
    assert all(mine == pytest.approx(other, abs=2e-6) for mine, other in losses)
    assert ours["rates"] == theirs["rates"]


def test_turns_follow_from_the_loss_mask(tmp_path: Path) -> None:
    """SkyRL takes the rewards out of the batch before the update, so that those of turns are refused."""
    done = run(tmp_path, [CLIP, {"name": f"{jobs.__file__}:ByTurn"}], updates=1)
    mask = rollout(0)["loss_mask"]
    second = sum(int(row[2:].sum()) for row in mask[::3])
    assert done["metrics"][0][f"{NAME}/by_turn/turn"] == pytest.approx(second / int(mask.sum()))
    with pytest.raises(MissingSignal, match="'turn_credit' reads 'turn_reward'"):
        run(tmp_path, [CLIP, {"name": "turn_credit"}])


def test_any_cut_is_the_same_step(four: dict[str, Any], tmp_path: Path) -> None:
    acts = [f"{NAME}/s2t/dropped", f"{NAME}/stare/gate"]
    assert all(four["metrics"][0][name] > 0 for name in acts)
    whole = run(tmp_path, S2T, rows_per_part=ROWS)
    by_tokens = run(tmp_path, S2T, tokens_per_part=40)
    for other in (whole, by_tokens):
        assert apart(four, other) < 5e-6
        assert all(four["metrics"][0][name] == other["metrics"][0][name] for name in acts)
    assert by_tokens["metrics"][0]["num_microbatches"] > 4


def test_two_processes_are_the_same_step(four: dict[str, Any], tmp_path: Path) -> None:
    both = jobs.over_ranks("tests.adapters.cpu_skyrl", tmp_path, {"both": {"objective": S2T}})["both"]
    assert [one["ranks"] for one in both] == [2, 2]
    assert apart(four, both[0]) < 5e-6
    assert both[0]["metrics"][0][f"{NAME}/s2t/dropped"] == four["metrics"][0][f"{NAME}/s2t/dropped"]


def test_thresholds_see_advantages_as_they_were(tmp_path: Path) -> None:
    """Clip-Cov by hand on the raw advantages; SkyRL's own sees covariances a hundred times below its threshold."""
    data = rollout(0)
    ours = run(tmp_path, COV, updates=1)
    live = data["action_log_probs"].clone().requires_grad_()
    batch = TokenBatch.from_padded(
        response_mask=data["loss_mask"], advantages=data["advantages"], old_logprobs=data["action_log_probs"]
    )
    report = make_plan(load_objective(COV), [batch]).loss(batch, PolicyOutputs.from_padded(batch, logprobs=live)).report
    selected = [name for name in report if name.startswith("clip_cov/")]
    assert selected
    told = {name: ours["metrics"][0][f"{NAME}/{name}"] for name in selected}
    assert any(value > 0 for value in told.values())
    scaled = TokenBatch.from_padded(
        response_mask=data["loss_mask"],
        advantages=data["advantages"] / data["loss_mask"].sum(),
        old_logprobs=data["action_log_probs"],
    )
    dead = (
        make_plan(load_objective(COV), [scaled]).loss(scaled, PolicyOutputs.from_padded(scaled, logprobs=live)).report
    )
    assert {name: dead[name].value for name in selected} != told


def test_a_refused_step_moves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = run(tmp_path, S2T, updates=1)
    with caplog.at_level("WARNING"):
        after = run(tmp_path, S2T, broken=[1])
    assert "an optimizer step was refused" in caplog.text
    assert unmoved(before, after)
    assert after["states"][0] == after["states"][1] == before["states"][0]
    assert after["metrics"][1][f"{NAME}/steps/refused"] == 1.0


def test_half_the_learning_rate(tmp_path: Path) -> None:
    trouble = {"name": f"{jobs.__file__}:Trouble", "kind": "lr"}
    before, plain, halved = (
        run(tmp_path, objective, updates=updates)
        for objective, updates in (([CLIP], 1), ([CLIP], 2), ([CLIP, trouble], 2))
    )
    assert halved["rates"] == plain["rates"]  # those of the schedule
    assert halved["metrics"][1][f"{NAME}/lr_scale"] == 0.5
    moved = {name: values - before["weights"][name] for name, values in plain["weights"].items()}
    assert max(float(values.abs().max()) for values in moved.values()) > 5e-4
    for name, values in halved["weights"].items():  # to the rounding of the weights
        torch.testing.assert_close(values - before["weights"][name], 0.5 * moved[name], rtol=0.0, atol=1e-6)


def test_a_run_resumes_as_it_was(tmp_path: Path) -> None:
    moving = [*S2T[:-1], {**S2T[-1], "increment": 0.05}]
    through = run(tmp_path, moving, updates=4, save=2)
    resumed = run(tmp_path, moving, updates=4, save=2, resume=str(tmp_path / "checkpoint"))
    assert same_weights(through, resumed)
    assert through["states"][2:] == resumed["states"]
    assert through["states"][1] != load_objective(moving).init_state()
    with pytest.raises(CheckpointError, match="belongs to the objective"):
        run(tmp_path, [CLIP], updates=4, save=2, resume=str(tmp_path / "checkpoint"))


def test_rays_copy_begins_anew() -> None:
    loss = PolicyLoss(load_objective(S2T))
    loss.objective_state = {"other": 1}
    copy = cloudpickle.loads(cloudpickle.dumps(loss))
    assert copy.objective == loss.objective
    assert copy.objective_state == loss.objective.init_state()


WRONG = [
    ({"loss_reduction": "sequence_mean"}, ConfigError, "loss_reduction = 'sequence_mean' has no effect"),
    ({"use_kl_loss": True}, ConfigError, "use_kl_loss = True, and no method of the objective reads the reference"),
    ({"off_policy_correction.tis_ratio_type": "token"}, ConfigError, "tis_ratio_type = 'token' has no effect"),
    ({"policy_loss_type": "regular"}, ConfigError, "policy_loss_type=rlstab"),
    ({"eps_clip_high": 0.28}, ConfigError, "eps_clip_high=0.2"),
]


@pytest.mark.parametrize(("settings", "error", "words"), WRONG)
def test_settings_that_the_objective_replaces_are_refused(settings: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        register([CLIP], config(**settings))
    assert NAME not in PolicyLossRegistry._functions or PolicyLossRegistry.unregister(NAME) is None


def test_what_skyrl_lacks_is_refused() -> None:
    megatron = config()
    megatron.trainer.strategy = "megatron"
    with pytest.raises(ConfigError, match=r"trainer\.strategy = 'megatron'"):
        register([CLIP], megatron)
    with pytest.raises(MissingSignal, match="'entropy_bonus' reads"):
        register([CLIP, {"name": "entropy_bonus", "coefficient": 0.01}], config())
    with pytest.raises(MissingSignal, match="truncated"):
        register([CLIP, {"name": "truncated_mask"}], config())
    kl = [CLIP, {"name": "kl", "coefficient": 0.02}]
    with pytest.raises(ConfigError, match=r"use_kl_loss=true.*\n.*kl_loss_coef=0"):
        register(kl, config())
    with pytest.raises(HostError, match="outside of a planned optimizer step"):
        PolicyLoss(load_objective([CLIP]))(torch.zeros(1, 1), None, None)


def test_the_reference_is_that_of_skyrl(tmp_path: Path) -> None:
    kl = [CLIP, {"name": "kl", "coefficient": 0.02}]
    ran = run(tmp_path, kl, updates=1, use_kl_loss=True, kl_loss_coef=0.0)
    assert ran["metrics"][0][f"{NAME}/kl/value"] > 0
