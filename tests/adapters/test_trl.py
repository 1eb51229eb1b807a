"""TRL's trainer with an objective: independent of the cut, equal to TRL's loss where it states it, resumed exactly."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from trl import GRPOTrainer

from rlstab.errors import CheckpointError
from tests.adapters.jobs import farthest, largest, objectives, same_weights
from tests.adapters.trl_jobs import over_ranks, run, sampler, trainer_of

#: TRL and what it imports warn of their own future.
pytestmark = pytest.mark.filterwarnings("default")

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2}
OBJECTIVES = objectives(CLIP, {"target_entropy": 0.8}, initial=0.002, share=0.4)
#: Eight responses per optimizer step, cut otherwise.
FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
FOUR_ON_EACH_OF_TWO = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}


RESUMED = {
    **FOUR_ON_EACH_OF_TWO,
    **{"optim": "adamw_torch", "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2},
    "objective": OBJECTIVES["mask-entropy"],
}


@pytest.fixture(scope="module")
def over_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """What two real processes did, by the name of the job, and their folder; they start once for all the tests."""
    folder = tmp_path_factory.mktemp("ranks")
    given: dict[str, Any] = {name: {"objective": each, **FOUR_ON_EACH_OF_TWO} for name, each in OBJECTIVES.items()}
    given |= {"plain": FOUR_ON_EACH_OF_TWO, "clip": {"objective": [CLIP], **FOUR_ON_EACH_OF_TWO}}
    given |= {"whole": RESUMED, "resumed": {**RESUMED, "resume": str(folder / "whole" / "checkpoint-2")}}
    return folder, over_ranks(folder, given)


def same_ends(done: dict[str, list[dict[str, Any]]]) -> None:
    """The last two of four steps, of each rank, of a whole run and of one resumed after two."""
    for whole, resumed in zip(done["whole"], done["resumed"], strict=True):
        for first, second in zip(whole["steps"][2:], resumed["steps"], strict=True):
            assert farthest(first, second) == 0.0
            assert same_weights(first, second)
            assert first["settled"] == second["settled"]


def same_steps(whole: dict[str, Any], other: dict[str, Any]) -> None:
    for first, second in zip(whole["steps"], other["steps"], strict=True):
        assert farthest(first, second) < 1e-5 * max(1.0, largest(first))  # later steps of some reach 5
        assert all(first[key] == second[key] for key in ("kept", "tokens", "state"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_accumulation_and_real_ranks_change_nothing(name: str, over_two: Any, tmp_path: Path) -> None:
    objective = OBJECTIVES[name]
    whole = run(tmp_path / "whole", objective)
    parts = run(tmp_path / "parts", objective, **FOUR)
    ranks = over_two[1][name]
    assert [each["ranks"] for each in (whole, parts, *ranks)] == [1, 1, 2, 2]
    assert len(whole["steps"]) == 4
    for other in (parts, *ranks):
        same_steps(whole, other)
        assert farthest(whole["steps"][0], other["steps"][0]) < 1e-6
    assert all(largest(step) > 0.01 for step in whole["steps"])
    if name != "lp-reg":
        assert whole["steps"][0]["kept"][0] < whole["steps"][0]["tokens"][0]
    # and so do the metrics, TRL's entropy among them
    for line, *others in zip(whole["log"][:4], parts["log"][:4], ranks[0]["log"][:4], strict=True):
        for key in line:
            if key in ("entropy", "loss") or key.startswith(("rlstab/", "clip_ratio/")):
                for other in others:
                    assert other[key] == pytest.approx(line[key], rel=1e-4, abs=1e-5), key


ONE_STEP = {"num_iterations": 1, **FOUR}


@pytest.mark.parametrize("cut", [{}, FOUR, ONE_STEP, None], ids=["1", "4", "one step per rollout", "two processes"])
def test_clip_alone_is_trls_dapo(cut: dict[str, Any] | None, over_two: Any, tmp_path: Path) -> None:
    """Bit for bit: gradients, weights, gradient norms."""
    if cut is None:
        plain, own = over_two[1]["plain"][0], over_two[1]["clip"][0]
    else:
        plain, own = run(tmp_path / "plain", **cut), run(tmp_path / "own", [CLIP], **cut)
    assert plain["ranks"] == own["ranks"] == (2 if cut is None else 1)
    for pair in zip(plain["steps"], own["steps"], strict=True):
        assert farthest(*pair) == 0.0
        assert same_weights(*pair)
    assert [line["grad_norm"] for line in plain["log"][:4]] == [line["grad_norm"] for line in own["log"][:4]]
    for first, second in zip(plain["log"][:4], own["log"][:4], strict=True):
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-6)
        if cut == {}:  # with several micro-batches TRL averages their means
            for name in ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
                assert second[name] == pytest.approx(first[name], abs=1e-6), name


@pytest.mark.parametrize("estimator", ["k3_unbiased", "k3"])
def test_kl_is_trls(estimator: str, tmp_path: Path) -> None:
    """TRL multiplies its estimate by the ratio unless told not to; tokens of an older policy tell the two apart."""
    given = {"beta": 0.5, "use_bias_correction_kl": estimator == "k3_unbiased", "learning_rate": 0.003}
    kl = {"name": "kl", "coefficient": 0.5, "estimator": estimator, "cap": None}
    plain, own = run(tmp_path / "plain", **given), run(tmp_path / "own", [CLIP, kl], **given)
    other = run(tmp_path / "other", [CLIP], **{**given, "beta": 0.0, "use_bias_correction_kl": True})
    for first, second in zip(plain["steps"], own["steps"], strict=True):
        # Adam divides by small moments, so rounding of the first steps grows in later ones: 1.6e-5 with TRL 1.14
        assert farthest(first, second) < 5e-5 * largest(first)
    assert farthest(plain["steps"][-1], other["steps"][-1]) > 1e-3 * largest(plain["steps"][-1])
    for first, second in zip(plain["log"][:4], own["log"][:4], strict=True):
        assert second["kl"] == pytest.approx(first["kl"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask", "sequence_truncate"])
def test_lost_log_probs_change_nothing(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TRL's correction for vLLM, and NaN where vLLM could give no log-prob: still TRL's loss, bit for bit."""
    # the responses are fixed, so vLLM is never asked for one
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", MagicMock())
    given = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "sampling": sampler(spoiled=(1, 4), scored=True)}
    given |= {"vllm_importance_sampling_clip_max": 50.0, **FOUR}
    plain, own = run(tmp_path / "plain", **given), run(tmp_path / "own", [CLIP], **given)
    for first, second in zip(plain["steps"], own["steps"], strict=True):
        assert farthest(first, second) == 0.0
    assert all(torch.isfinite(values).all() for values in own["steps"][-1]["weights"].values())
    assert own["log"][0]["rlstab/host_correction/weight"] != 1.0


def test_a_stopped_run_over_two_ranks_goes_on_bit_for_bit(over_two: Any, tmp_path: Path) -> None:
    folder, done = over_two
    whole, resumed, checkpoint = done["whole"], done["resumed"], folder / "whole" / "checkpoint-2"
    assert [len(each["steps"]) for each in (*whole, *resumed)] == [4, 4, 2, 2]
    assert {each["ranks"] for each in (*whole, *resumed)} == {2}
    same_ends(done)
    assert whole[0]["steps"][0]["settled"] != whole[0]["steps"][3]["settled"]
    other = trainer_of(tmp_path / "other", [CLIP, {"name": "s2t"}])
    with pytest.raises(CheckpointError):
        other.train(resume_from_checkpoint=str(checkpoint))


def test_sharding_changes_nothing_and_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """FSDP2 over two real processes, by TRL's head and by rlstab's."""
    names = ("s2t-stare", "lp-reg")
    whole = {**RESUMED, "objective": OBJECTIVES[names[0]]}
    given: dict[str, Any] = {name: {"objective": OBJECTIVES[name], **FOUR_ON_EACH_OF_TWO} for name in names}
    given |= {"whole": whole, "resumed": {**whole, "resume": str(tmp_path / "whole" / "checkpoint-2")}}
    done = over_ranks(tmp_path, given, sharded=True)
    for name in names:
        alone = run(tmp_path, OBJECTIVES[name])
        for ranked in done[name]:
            assert ranked["ranks"] == 2
            assert all(step["sharded"] for step in ranked["steps"])
            same_steps(alone, ranked)
    same_ends(done)


@pytest.mark.parametrize(
    ("objective", "accumulation", "without"),
    [([CLIP], 2, 0), ([CLIP, {"name": "s2t"}], 1, 0), ([CLIP, {"name": "s2t"}], 2, 2), ([CLIP, {"name": "ar"}], 2, 2)],
)
def test_no_idle_forward(objective: Any, accumulation: int, without: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing reads the evidence, or the step is one micro-batch whose live outputs are the evidence."""
    given = {"per_device_train_batch_size": 4, "num_iterations": 1, "max_steps": 1}
    trainer, seen = trainer_of(tmp_path, objective, gradient_accumulation_steps=accumulation, **given), []
    before = GRPOTrainer._get_per_token_logps_and_entropies

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch.is_grad_enabled())
        return before(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", noted)
    trainer.train()
    assert (seen.count(True), seen.count(False)) == (accumulation, without)
