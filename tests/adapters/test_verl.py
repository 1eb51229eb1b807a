"""verl's actor with an objective: independent of the cut, equal to verl's loss where it states it, resumed exactly."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("tests.adapters.cpu_verl", reason="verl is not installed: nox -s verl")

from rlstab.config import load_objective
from rlstab.errors import CheckpointError, MissingSignal
from tests.adapters import jobs
from tests.adapters.jobs import farthest, largest, objectives, same_weights
from tests.adapters.verl_jobs import batch_of, composed, rollout, run, settings, worker_of

#: verl and what it imports warn of their own future, and of engines that are not installed.
pytestmark = pytest.mark.filterwarnings("ignore")

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2, "dual_clip": 3.0}
OBJECTIVES = objectives(CLIP, {"target_entropy": 1.2}, initial=0.004, share=0.9, min_p=0.001)
#: What shows that the methods act.
ACTS = {
    "s2t-stare": ["s2t/dropped", "stare/gate"],
    "mask-entropy": ["random_mask/dropped", "adaptive_entropy/coefficient"],
    "lp-reg": ["lp_reg/selected"],
}
#: Sixteen responses per optimizer step, cut otherwise.
FOUR = {"actor.ppo_micro_batch_size_per_gpu": 4}
#: Micro-batches by length, and rows one behind the other without padding, as in verl's own examples.
LENGTHS = {
    **{"actor.use_dynamic_bsz": "true", "rollout.log_prob_use_dynamic_bsz": "true"},
    **{"actor.ppo_max_token_len_per_gpu": 40, "rollout.log_prob_max_token_len_per_gpu": 40},
}
PACKED = {"model.use_remove_padding": "true", "+model.override_config.attn_implementation": "sdpa"}
RESUMED = {
    **FOUR,
    "actor.optim.lr_scheduler_type": "cosine",
    "actor.optim.total_training_steps": 8,
    "objective": OBJECTIVES["mask-entropy"],
    "updates": 4,
}


@pytest.fixture(scope="module")
def over_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """What two real processes did, by the name of the job, and their folder; they start once for all the tests."""
    folder = tmp_path_factory.mktemp("ranks")
    given: dict[str, Any] = {name: {"objective": objective, **FOUR} for name, objective in OBJECTIVES.items()}
    given |= {"plain": FOUR, "clip": {"objective": [CLIP], **FOUR}, "whole": {**RESUMED, "save": 2}}
    given |= {"resumed": {**RESUMED, "resume": str(folder / "whole" / "checkpoint-2")}}
    return folder, jobs.over_ranks("tests.adapters.verl_jobs", folder, given)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_cut_changes_nothing(name: str, over_two: Any, tmp_path: Path) -> None:
    """Micro-batches of 4 or by length against one of 16, rows padded, nested or packed, two processes under FSDP2."""
    objective, shapes = OBJECTIVES[name], set()

    def note(module: Any, args: Any, given: dict[str, Any]) -> None:
        """Whether the model is given one row, and no mask."""
        shapes.add((len(given["input_ids"]) == 1, given["attention_mask"] is None))

    def watch(actor: Any) -> None:
        actor.engine.module.register_forward_pre_hook(note, with_kwargs=True)

    whole = run(tmp_path / "whole", objective)
    parts = run(tmp_path / "parts", objective, rolled={"nested": False}, **FOUR)
    packed = run(tmp_path / "packed", objective, change=watch, **LENGTHS, **PACKED)
    ranks = over_two[1][name]
    assert [each["ranks"] for each in (whole, parts, packed, *ranks)] == [1, 1, 1, 2, 2]
    assert {each["class"] for each in (whole, parts, packed, *ranks)} == {"RLStabTrainingWorker"}
    assert all(each["sharded"] for each in ranks)
    assert shapes == {(True, True)}
    assert len(whole["steps"]) == 2
    for other in (parts, packed, *ranks):
        for first, second in zip(whole["steps"], other["steps"], strict=True):
            assert farthest(first, second) < 1e-5
            assert all(first[key] == second[key] for key in ("kept", "tokens", "state"))
        for mine, theirs in zip(whole["updates"], other["updates"], strict=True):
            for key, value in mine["metrics"].items():
                if "perf/" not in key:
                    assert theirs["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert all(largest(step) > 0.01 for step in whole["steps"])
    assert all(whole["updates"][0]["metrics"][f"actor/rlstab/{metric}"] > 0 for metric in ACTS[name])


@pytest.mark.parametrize(
    ("settings", "rolled"),
    [({}, {}), (FOUR, {"nested": False}), (PACKED, {}), (FOUR, {"lost": [1, 6]}), (FOUR, {"weights": True})],
    ids=["1", "4, padded", "packed", "lost log-probs", "weights of verl's correction"],
)
def test_clip_alone_is_verls_vanilla(settings: Any, rolled: Any, tmp_path: Path) -> None:
    """Bit for bit: gradients, weights; verl's own metrics under verl's own names."""
    given = {"rolled": rolled, "keys": {"calculate_entropy": True}, **settings}
    plain, own = run(tmp_path, **given), run(tmp_path, [CLIP], **given)
    assert (plain["class"], own["class"]) == ("TrainingWorker", "RLStabTrainingWorker")
    assert all(farthest(*pair) == 0.0 for pair in zip(plain["steps"], own["steps"], strict=True))
    for theirs, ours in zip(plain["updates"], own["updates"], strict=True):
        assert same_weights(theirs, ours)
        assert theirs["metrics"]["actor/grad_norm"] == ours["metrics"]["actor/grad_norm"]
        names = ["loss"]
        if settings != FOUR:  # with several micro-batches verl averages their means
            names += ["pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy_loss"]
        for name in (f"actor/{name}" for name in names):
            assert ours["metrics"][name] == pytest.approx(theirs["metrics"][name], abs=1e-6), name
    assert own["updates"][0]["metrics"]["actor/pg_clipfrac"] > 0
    assert ("actor/rlstab/host_correction/weight" in own["updates"][0]["metrics"]) == ("weights" in rolled)


def test_clip_alone_is_verls_vanilla_over_ranks(over_two: Any) -> None:
    plain, own = over_two[1]["plain"], over_two[1]["clip"]
    assert {each["ranks"] for each in (*plain, *own)} == {2}
    assert {each["class"] for each in plain} == {"TrainingWorker"}
    assert all(farthest(*pair) == 0.0 for pair in zip(plain[0]["steps"], own[0]["steps"], strict=True))


def test_clip_and_kl_are_verls_vanilla_with_its_kl_loss(tmp_path: Path) -> None:
    given = {"actor.use_kl_loss": "true", "actor.kl_loss_coef": 0.05, "updates": 1, **FOUR}
    objective = [CLIP, {"name": "kl", "coefficient": 0.05}]
    plain, own = run(tmp_path, **given), run(tmp_path, objective, **given)
    alone = run(tmp_path, [CLIP], updates=1, **FOUR)
    assert farthest(plain["steps"][0], own["steps"][0]) < 1e-6
    assert farthest(plain["steps"][0], alone["steps"][0]) > 1e-3
    for name in ("actor/loss", "actor/kl_loss"):
        theirs, ours = (each["updates"][0]["metrics"][name] for each in (plain, own))
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_lost_log_probs_are_replaced_by_old_ones_and_counted(tmp_path: Path) -> None:
    done = run(tmp_path, [CLIP, {"name": "importance_correction"}], rolled={"lost": [0]}, updates=1)
    tokens, metrics = done["steps"][0]["tokens"], done["updates"][0]["metrics"]
    lost = metrics["actor/rlstab/sampler/unscored"] * tokens[0]
    assert lost == pytest.approx(round(lost))
    assert lost >= 2
    assert metrics["actor/rlstab/steps/refused"] == 0.0


def test_an_update_of_several_optimizer_steps(tmp_path: Path) -> None:
    """Each mini-batch is planned by itself, twice over where verl takes the rollout twice."""
    objective = OBJECTIVES["mask-entropy"]
    keys = {"mini_batch_size": 8, "global_batch_size": 8, "epochs": 2}
    whole = run(tmp_path, objective, keys=keys, updates=1, **{"actor.ppo_micro_batch_size_per_gpu": 8})
    parts = run(tmp_path, objective, keys=keys, updates=1, **FOUR)
    assert len(whole["steps"]) == len(parts["steps"]) == 4
    for first, second in zip(whole["steps"], parts["steps"], strict=True):
        assert farthest(first, second) < 1e-5
        assert first["state"] == second["state"]
    kept = [step["kept"] for step in whole["steps"]]
    assert kept[:2] == kept[2:]  # identities come from the tokens
    assert len({str(step["state"]) for step in whole["steps"]}) > 1


def test_a_stopped_run_over_two_ranks_goes_on_bit_for_bit(over_two: Any, tmp_path: Path) -> None:
    folder, done = over_two
    whole, resumed, checkpoint = done["whole"], done["resumed"], folder / "whole" / "checkpoint-2"
    assert [len(each["updates"]) for each in (*whole, *resumed)] == [4, 4, 2, 2]
    assert {each["ranks"] for each in (*whole, *resumed)} == {2}
    for rank in (0, 1):
        for first, second in zip(whole[rank]["updates"][2:], resumed[rank]["updates"], strict=True):
            assert same_weights(first, second)
            assert first["state"] == second["state"]
    assert whole[0]["updates"][0]["state"] != whole[0]["updates"][3]["state"]
    assert {file.name for file in checkpoint.iterdir()} >= {"rlstab.json", "model_world_size_2_rank_1.pt"}
    other = worker_of(tmp_path / "other", [CLIP, {"name": "s2t"}])
    with pytest.raises(CheckpointError):
        other.load_checkpoint(str(checkpoint))


def test_weights_alone_are_loaded_whatever_the_objective(tmp_path: Path) -> None:
    done = run(tmp_path, [CLIP], updates=1, save=1)
    other = worker_of(tmp_path / "other", [CLIP, {"name": "s2t"}], **{"actor.checkpoint.load_contents": "[model]"})
    other.load_checkpoint(str(tmp_path / "checkpoint-1"))
    assert same_weights(done["updates"][0], {"weights": jobs.weights(other.actor.engine.module)})


@pytest.mark.parametrize(
    ("objective", "forwards"), [([CLIP], 1), ([CLIP, {"name": "s2t"}], 2), ([CLIP, {"name": "lp_reg"}], 2)]
)
def test_no_forward_is_made_for_nobody(objective: Any, forwards: int, tmp_path: Path) -> None:
    seen = []

    def count(actor: Any) -> None:
        before = actor.engine.forward_step
        actor.engine.forward_step = lambda *args, **kwargs: seen.append(1) or before(*args, **kwargs)

    run(tmp_path, objective, change=count, updates=1, **FOUR)
    assert len(seen) == 4 * forwards


def test_turns_follow_from_the_response_mask_of_the_agent_loop() -> None:
    from rlstab.adapters.verl.batch import MiniBatch
    from rlstab.adapters.verl.worker import require_from

    rolled = rollout(0)
    for mask, sampled in zip(
        *(rolled["columns"][name] for name in ("response_mask", "rollout_log_probs")), strict=True
    ):
        mask[1:2] = sampled[1:2] = 0  # as verl's agent loops write what a tool said
    mini = MiniBatch.of(batch_of(rolled, 0, 1), "cpu", {jobs.EOS})
    batch = mini.batch(SimpleNamespace(needs=frozenset({"turn"})))
    assert torch.equal(batch.signal("turn"), (batch.position > 0).float())
    with pytest.raises(MissingSignal, match="'turn_credit' reads 'turn_reward'"):
        require_from(composed(settings(Path())).actor_rollout_ref, load_objective(["clip_higher", "turn_credit"]))
