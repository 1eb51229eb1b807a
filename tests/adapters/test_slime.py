"""A contract with slime's documented fields, never run in slime: the hook, and slime's own loss written out here.

The fields, the hook's arguments and the reductions are those of THUDM/slime at commit 624b824 (2026-08-21).
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import rlstab
from rlstab import (
    STARE,
    ClipHigher,
    Composition,
    ImportanceCorrection,
    PolicyOutputs,
    S2TMask,
    SequenceMean,
    TokenBatch,
    TokenMean,
    TokenObjective,
    TopEntropyMask,
    TruncatedMask,
    compose,
    make_plan,
)
from rlstab.adapters.doctor import doctor
from rlstab.adapters.slime import Postprocess, check_host, postprocess
from rlstab.cli import main
from rlstab.config import dump_objective
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.objective import State
from rlstab.errors import CheckpointError, ConfigError, HostError, MissingSignal
from rlstab.explain.hosts import adapted
from rlstab.testing import Processes
from rlstab.testing.steps import Step, make_step

STACK = compose(ClipHigher(), S2TMask(max_prob=0.05), STARE(target_entropy=5.0), TokenMean())
LENGTHS = [5, 1, 9, 6, 2, 7, 4, 3]
#: Of one rank: two optimizer steps of four samples, in micro-batches as slime packs them; a rollout of two samples.
SCHEDULE = {"micro_batch_indices": [[0, 2], [1, 3], [4], [5, 6, 7]], "num_microbatches": [2, 2]}
ROLLOUTS = [0, 1, 2, 2, 3, 4, 5, 6]
SIZES = [3, 4]


def step_of() -> Step:
    return make_step("mixed", LENGTHS, 2, 5, [])


def arguments(objective: TokenObjective, folder: Path, **given: Any) -> types.SimpleNamespace:
    """What slime parsed; a file of the objective, as ``--custom-config-path`` would name it."""
    path = folder / "objective.yaml"
    path.write_text(yaml.safe_dump({"objective": dump_objective(compose(objective))}))
    return types.SimpleNamespace(
        **{
            "rlstab_objective": str(path),
            "loss_type": "policy_loss",
            "advantage_estimator": "grpo",
            "eps_clip": 0.2,
            "eps_clip_high": 0.28,
            "eps_clip_c": None,
            "entropy_coef": 0.0,
            "use_kl_loss": False,
            "use_opsm": False,
            "use_tis": False,
            "use_rollout_logprobs": False,
            "calculate_per_token_loss": False,
            "custom_pg_loss_reducer_function_path": None,
            "n_samples_per_prompt": 2,
            "save": None,
            "load": None,
            **given,
        }
    )


def rollout_of(step: Step, rows: Sequence[int], rollouts: Sequence[int], **given: Any) -> dict[str, Any]:
    """What slime's actor holds for the samples of one rank: lists of ``(R,)`` tensors."""

    def split(name: str) -> list[Tensor]:
        return [step.evidence[name][step.sequence == row].float() for row in rows]

    data: dict[str, Any] = {
        "loss_masks": [torch.ones(LENGTHS[row], dtype=torch.int) for row in rows],
        "response_lengths": [LENGTHS[row] for row in rows],
        "advantages": split("advantages"),
        "log_probs": split("old_logprobs"),
        "entropy": split("entropies"),
        "rollout_log_probs": split("rollout_logprobs"),
        "sample_indices": [int(step.sequence_ids[row]) for row in rows],
        "truncated": [int(step.evidence["truncated"][step.sequence == row][0]) for row in rows],
        "rollout_ids": [rollouts[row] for row in rows],
    }
    totals = {one: sum(LENGTHS[row] for row in range(8) if rollouts[row] == one) for one in rollouts}
    data["rollout_mask_sums"] = torch.tensor([float(totals[rollouts[row]]) for row in rows])
    return {**data, **SCHEDULE, "global_batch_sizes": SIZES, **given}


def slimes_loss(args: Any, data: dict[str, Any], part: Sequence[int], live: Sequence[Tensor], rollouts: int) -> Tensor:
    """``(1,)`` numerator of a micro-batch as slime reduces it; per token it is divided by the count of the step."""
    total = torch.zeros((), dtype=torch.float64)
    for index, now in zip(part, live, strict=True):
        ratio = (now - data["log_probs"][index].double()).exp()
        push = -data["advantages"][index].double()
        loss = torch.maximum(push * ratio, push * ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high))
        if args.eps_clip_c is not None:
            loss = torch.where(push > 0, torch.minimum(push * args.eps_clip_c, loss), loss)
        masked = (loss * data["loss_masks"][index]).sum()
        per_rollout = float(data["rollout_mask_sums"][index].clamp(min=1)) * rollouts
        total = total + (masked if args.calculate_per_token_loss else masked / per_rollout)
    return total


def gradients(args: Any, data: dict[str, Any], step: Step, rows: Sequence[int]) -> list[Tensor]:
    """Of the live log-probs of each sample, over the optimizer steps of the rollout."""
    live = [step.live["logprobs"][step.sequence == row].clone().requires_grad_() for row in rows]
    first = 0
    for count, rollouts in zip(data["num_microbatches"], data["global_batch_sizes"], strict=True):
        parts = data["micro_batch_indices"][first : first + count]
        first += count
        tokens = sum(max(float(data["loss_masks"][one].sum()), 1.0) for part in parts for one in part)
        for part in parts:
            loss = slimes_loss(args, data, part, [live[one] for one in part], rollouts)
            (loss / tokens if args.calculate_per_token_loss else loss).backward()
    return [one.grad for one in live if one.grad is not None]


def worker(objective: TokenObjective, step: Step, steps: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """The objective's own loss on the same optimizer steps, by sample."""
    found: dict[int, Tensor] = {}
    state: State | None = None
    for rows in steps:
        own = step.rows(rows).cast(torch.float32)
        batch, live = own.batch(), own.live["logprobs"].clone().requires_grad_()
        batch = TokenBatch(**{**vars(batch), "logprobs": batch.old_logprobs})
        plan = make_plan(compose(objective), [batch], state)
        plan.loss(batch, PolicyOutputs(live)).loss.backward()
        assert live.grad is not None
        found |= {row: live.grad[batch.sequence == place] for place, row in enumerate(rows)}
        state = plan.state
    return found


STEPS = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("per_token", [False, True], ids=["per rollout", "per token"])
@pytest.mark.parametrize(
    "objective",
    [
        STACK,
        compose(ClipHigher(dual_clip=1.5), TopEntropyMask(share=0.1), SequenceMean()),
        compose(ClipHigher(), TruncatedMask(denominator="kept"), ImportanceCorrection(max_weight=1.01)),
        compose(ClipHigher(), STARE(target_entropy=0.8, variant="C2", increment=0.05)),
    ],
    ids=["stack", "top entropy, sequence mean", "truncated mask, correction", "stare moving"],
)
def test_slimes_loss_is_the_objective(objective: Composition, per_token: bool, tmp_path: Path) -> None:
    dual = next((one.dual_clip for one in objective.members if isinstance(one, ClipHigher)), None)
    args = arguments(objective, tmp_path, calculate_per_token_loss=per_token, eps_clip_c=dual)
    step, hook = step_of(), Postprocess(LocalComm())
    data = rollout_of(step, range(8), ROLLOUTS)
    before = [one.clone() for one in data["loss_masks"]]
    hook(args, 0, data)
    wanted = worker(objective, step, STEPS)
    for row, found in enumerate(gradients(args, data, step, range(8))):
        assert float((found - wanted[row]).abs().max()) < 1e-6
    for old, new in zip(before, data["loss_masks"], strict=True):
        assert new.dtype == old.dtype
    if any(one.name in ("s2t", "top_entropy") for one in objective.members):  # a response that lost all keeps its mask
        assert sum(int(one.sum()) for one in data["loss_masks"]) < sum(int(one.sum()) for one in before)
    sums: dict[int, float] = {}
    for one, mask in zip(ROLLOUTS, data["loss_masks"], strict=True):
        sums[one] = sums.get(one, 0.0) + float(mask.sum())
    assert data["rollout_mask_sums"].tolist() == [sums[one] for one in ROLLOUTS]
    assert float(data["rlstab/tokens/kept"]) <= 1.0


def test_a_removed_sample_counts_as_slime_counts_it(tmp_path: Path) -> None:
    """Its mask is empty from the start, and per token slime counts one token for it."""
    step = step_of()
    for per_token in (False, True):
        args = arguments(ClipHigher(), tmp_path, calculate_per_token_loss=per_token)
        data = rollout_of(step, range(8), ROLLOUTS)
        data["loss_masks"][1] = torch.zeros_like(data["loss_masks"][1])
        data["rollout_mask_sums"][1] = 0.0
        Postprocess(LocalComm())(args, 0, data)
        found = gradients(args, data, step, range(8))
        wanted = worker(ClipHigher(), step, [[0, 2, 3], [4, 5, 6, 7]])
        assert not found[1].any()
        for row, one in wanted.items():
            assert float((found[row] - one).abs().max()) < 1e-6


# -- ranks: a rollout whose two samples lie on different ones ----------------------------------------------------------


def on_a_rank(objective: TokenObjective, folder: Path, step: Step, rows: Sequence[int], comm: Comm) -> Any:
    args = arguments(objective, folder, rlstab_objective=str(folder / "objective.yaml"))
    schedule = {"micro_batch_indices": [[0], [1], [2, 3]], "num_microbatches": [2, 1]}
    data = rollout_of(step, rows, ROLLOUTS, **schedule)
    Postprocess(comm)(args, 0, data)
    return gradients(args, data, step, rows), data["rollout_mask_sums"].tolist()


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path: Path) -> None:
    arguments(STACK, tmp_path)
    step = step_of()
    ranks = [[0, 2, 5, 6], [1, 3, 4, 7]]
    wanted = worker(STACK, step, STEPS)
    with Processes(2) as two:
        found = two.each(STACK, on_a_rank, [(STACK, tmp_path, step, rows) for rows in ranks])
        assert two.counted == 2
    for rows, (grads, _) in zip(ranks, found, strict=True):
        for row, one in zip(rows, grads, strict=True):
            assert float((one - wanted[row]).abs().max()) < 1e-6
    assert found[0][1][1] == found[1][1][1]  # samples 2 and 3 are one rollout


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"use_kl_loss": True}, "slime's use_kl_loss is True, a term beside the objective"),
        ({"entropy_coef": 0.01}, "slime's entropy_coef is 0.01, a term beside the objective"),
        ({"advantage_estimator": "gspo"}, "--advantage-estimator gspo also changes its loss"),
        ({"loss_type": "custom_loss"}, "--loss-type is custom_loss"),
        ({"eps_clip_high": 0.2}, "eps_clip_high is 0.2, and the objective's clip has 0.28. Set --eps-clip-high 0.28."),
        ({"eps_clip_c": 3.0}, "eps_clip_c is 3.0, and the objective's clip has None. Leave --eps-clip-c out."),
        ({"rlstab_objective": None}, "name no objective. Write rlstab_objective: objective.yaml"),
    ],
)
def test_arguments_that_make_another_loss_are_refused(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    args = arguments(STACK, tmp_path, **given)
    with pytest.raises(ConfigError, match=re.escape(told)):
        Postprocess(LocalComm())(args, 0, rollout_of(step_of(), range(8), ROLLOUTS))


def test_two_corrections_are_refused(tmp_path: Path) -> None:
    args = arguments(compose(ClipHigher(), ImportanceCorrection()), tmp_path, use_tis=True)
    with pytest.raises(ConfigError, match="'importance_correction' corrects for the sampler, and so does slime's"):
        Postprocess(LocalComm())(args, 0, rollout_of(step_of(), range(8), ROLLOUTS))


def test_what_slime_did_not_compute_is_named(tmp_path: Path) -> None:
    for gone, who in (("entropy", "'s2t' reads 'entropies'"), ("log_probs", "'s2t' reads 'logprobs'")):
        data = rollout_of(step_of(), range(8), ROLLOUTS)
        del data[gone]
        with pytest.raises(MissingSignal, match=who):
            Postprocess(LocalComm())(arguments(STACK, tmp_path), 0, data)
    data = rollout_of(step_of(), range(8), ROLLOUTS)
    data["entropy"] = [one[:1] for one in data["entropy"]]
    with pytest.raises(ConfigError, match="context parallelism cuts them"):
        Postprocess(LocalComm())(arguments(STACK, tmp_path), 0, data)


def test_without_a_reader_no_log_probs_are_asked_for(tmp_path: Path) -> None:
    """A rollout of one optimizer step: slime leaves them out and takes the live ones, the ratio is 1."""
    data = rollout_of(step_of(), range(8), ROLLOUTS)
    del data["log_probs"]
    Postprocess(LocalComm())(arguments(compose(ClipHigher(), TruncatedMask()), tmp_path), 0, data)
    assert all(bool(torch.isfinite(one).all()) for one in data["advantages"])


def test_a_stage_of_the_pipeline_without_a_loss_is_left_alone() -> None:
    data = {"tokens": [torch.zeros(3)]}
    postprocess(types.SimpleNamespace(), 0, data)
    assert list(data) == ["tokens"]


# -- the state ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_state(tmp_path: Path) -> None:
    moving = compose(ClipHigher(), STARE(target_entropy=5.0, variant="C2", increment=0.05))
    args = arguments(moving, tmp_path, save=str(tmp_path / "save"), load=str(tmp_path / "save"))
    step, whole = step_of(), Postprocess(LocalComm())
    states = []
    for rollout in (0, 1, 2):
        whole(args, rollout, rollout_of(step, range(8), ROLLOUTS))
        assert whole.level is not None
        states.append(whole.level.state)
    resumed = Postprocess(LocalComm())
    resumed(args, 2, rollout_of(step, range(8), ROLLOUTS))
    assert resumed.level is not None
    assert resumed.level.state == states[2] != states[1]
    with pytest.raises(CheckpointError, match=r"rlstab/8 has no rlstab.json"):
        Postprocess(LocalComm())(args, 9, rollout_of(step, range(8), ROLLOUTS))
    other = compose(ClipHigher(), STARE(target_entropy=0.9))
    args = arguments(other, tmp_path, save=args.save, load=args.load)
    with pytest.raises(CheckpointError, match="belongs to the objective"):
        Postprocess(LocalComm())(args, 2, rollout_of(step, range(8), ROLLOUTS))


# -- doctor, the command and the page ----------------------------------------------------------------------------------


def installed(folder: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package called slime whose actor calls its hook so."""
    actor = folder / "slime" / "backends" / "megatron_utils" / "actor.py"
    actor.parent.mkdir(parents=True, exist_ok=True)
    (folder / "slime" / "__init__.py").write_text("")
    actor.write_text(f"class Actor:\n    def train_actor(self, rollout_id, rollout_data):\n        {call}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "slime", raising=False)


def test_doctor_reads_how_the_hook_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        doctor([adapted("slime")])[0][1] == "slime: not installed. slime is installed from its repository, THUDM/slime."
    )
    installed(tmp_path / "a", "self.rollout_data_postprocess(self.args, rollout_id, rollout_data)", monkeypatch)
    check_host()
    monkeypatch.setattr("rlstab.adapters.doctor.version", lambda name: "0.3.1")
    lines, well = doctor([adapted("slime")])
    assert lines[1].startswith(
        "slime 0.3.1: rlstab.adapters.slime is live (a contract with slime's documented fields; "
    )
    assert well
    installed(tmp_path / "b", "self.rollout_data_postprocess(self.args, samples)", monkeypatch)
    with pytest.raises(HostError, match=r"calls its hook .* with \[\['self.args', 'samples'\]\]"):
        check_host()


def test_check_says_that_it_never_ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["check", "examples/objective.yaml", "--host", "slime"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "slime 0.3 or later, through rlstab.adapters.slime" in out
    assert "entropies: set --use-rollout-entropy" in out
    assert "tried: a contract with slime's documented fields; never run in slime" in out


def test_the_lines_of_the_page_are_the_hook() -> None:
    page = (Path(rlstab.__file__).parents[1] / "docs" / "hosts" / "slime.md").read_text(encoding="utf-8")
    path = re.search(r"--rollout-data-postprocess-path (\S+)", page)
    assert path is not None
    module, _, name = path[1].rpartition(".")
    assert getattr(sys.modules[module], name) is postprocess
    assert "rlstab_objective: objective.yaml" in page
    assert "never run in slime" in page
