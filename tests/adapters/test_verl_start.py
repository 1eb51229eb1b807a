"""What is refused before an actor trains, with what to change; what a step refuses; how verl finds the adapter."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: nox -s verl", allow_module_level=True)

from rlstab import ClipHigher, Gate, Terms, TokenObjective
from rlstab import compose as compose_objective
from rlstab.errors import ConfigError, HostError, MissingSignal
from tests.adapters.verl_jobs import ROOT, composed, on_cpu, run, settings, worker_of

#: verl and what it imports warn of their own future, and of engines that are not there.
pytestmark = pytest.mark.filterwarnings("ignore")

CLIP = {"name": "clip_higher"}
KL = {"name": "kl", "coefficient": 0.02}


@pytest.fixture(autouse=True, scope="module")
def cpu() -> None:
    on_cpu()


# -- settings ----------------------------------------------------------------------------------------------------------


def checked(folder: Path, objective: Any, **changes: Any) -> None:
    """Hydra composes verl's configuration, and the adapter looks at it as an actor does."""
    from rlstab.adapters.verl.settings import check_settings
    from rlstab.adapters.verl.worker import require_from
    from rlstab.config import load_objective

    config = composed(settings(folder, objective, **changes)).actor_rollout_ref
    loaded = compose_objective(load_objective(objective))
    check_settings(config, loaded)
    require_from(config, loaded)


WRONG: dict[str, Any] = {
    "clip_ratio": 0.3,
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 10.0,
    "loss_agg_mode": "seq-mean-token-mean",
    "loss_scale_factor": 1024,
    "entropy_coeff": 0.001,
    "kl_loss_type": "k2",
    "tau_pos": 2.0,
    "tau_neg": 2.0,
    "policy_loss.clip_cov_ratio": 0.1,
    "policy_loss.clip_cov_lb": 2.0,
    "policy_loss.clip_cov_ub": 2.0,
    "policy_loss.kl_cov_ratio": 0.1,
    "policy_loss.ppo_kl_coef": 0.2,
    "policy_loss.dro_beta": 0.2,
}


def test_settings_that_the_objective_replaces_are_refused(tmp_path: Path) -> None:
    from rlstab.adapters.verl.settings import check_settings

    own, config = compose_objective(ClipHigher()), composed(settings(tmp_path, [CLIP])).actor_rollout_ref
    check_settings(config, own)
    for name, value in WRONG.items():
        wrong = copy.deepcopy(config)
        wrong.merge_with_dotlist([f"actor.{name}={value}"])
        with pytest.raises(ConfigError, match=rf"actor\.{name} = .* has no effect: .* Leave it at .*objective: "):
            check_settings(wrong, own)


def test_every_setting_of_verls_loss_is_known() -> None:
    """What verl's losses read of their configuration is replaced by the objective, or stays in effect."""
    import dataclasses
    import inspect

    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from rlstab.adapters.verl.settings import REPLACED, REPLACED_LOSS

    assert set(WRONG) == {*REPLACED, *(f"policy_loss.{name}" for name in REPLACED_LOSS)}
    for config, replaced, stays in (
        (ActorConfig, REPLACED, {"use_kl_loss", "kl_loss_coef", "policy_loss", "global_batch_info"}),
        (PolicyLossConfig, REPLACED_LOSS, {"loss_mode", "rollout_correction"}),
    ):
        fields = {one.name for one in dataclasses.fields(config)}
        assert fields >= replaced.keys()
        bodies = [ppo_loss, *core_algos.POLICY_LOSS_REGISTRY.values()]
        source = "".join(inspect.getsource(one) for one in bodies)
        told = {name for name in fields if f"config.{name}" in source or f".policy_loss.{name}" in source}
        told |= {name for name in fields if f'config.get("{name}"' in source or f'"{name}",  ' in source}
        told |= {name for name in fields if f'.get(\n        "{name}"' in source}
        assert told - replaced.keys() <= stays
        assert told >= replaced.keys() - {"loss_mode"}


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        ([CLIP], {"actor.use_kl_loss": "true"}, r"use_kl_loss has no effect: no method .* \{name: kl, coefficient: "),
        ([CLIP], {"actor.kl_loss_coef": 0.04}, "kl_loss_coef = 0.04 has no effect: .* Write kl_loss_coef=0.001"),
        ([CLIP, KL], {}, "'kl' reads 'ref_logprobs', .* Write .*use_kl_loss=true .*kl_loss_coef=0.02"),
        (
            [CLIP, KL],
            {"actor.use_kl_loss": "true", "actor.kl_loss_coef": 0.04},
            "kl_loss_coef = 0.04 has no effect: .* Write kl_loss_coef=0.02",
        ),
        ([CLIP], {"actor.strategy": "torchtitan"}, "strategy = 'torchtitan': .* FSDP alone. Write strategy=fsdp2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(objective: Any, changes: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        checked(tmp_path, objective, **changes)


def test_settings_that_fit(tmp_path: Path) -> None:
    checked(tmp_path, [CLIP, KL], **{"actor.use_kl_loss": "true", "actor.kl_loss_coef": 0.02})
    checked(tmp_path, [CLIP, {"name": "importance_correction"}, {"name": "lp_reg"}, {"name": "truncated_mask"}])


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        (
            [CLIP, {"name": "lp_reg"}],
            {"model.use_fused_kernels": "true"},
            "'lp_reg' reads 'max_logprobs', which verl .* leave .*use_fused_kernels at false: fused kernels form no",
        ),
        (
            [CLIP, {"name": "mismatch"}],
            {"rollout.calculate_log_probs": "false"},
            "'mismatch' reads 'rollout_logprobs', .* set actor_rollout_ref.rollout.calculate_log_probs=true",
        ),
        ([CLIP, {"name": "block_mean"}], {}, "'block_mean' reads 'block_ids', .* use a host that provides it"),
    ],
)
def test_a_signal_that_verl_does_not_have_is_refused(objective: Any, changes: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(MissingSignal, match=text):
        checked(tmp_path, objective, **changes)


def test_an_actor_is_refused_before_its_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine_workers import TrainingWorker

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model would be loaded now")

    monkeypatch.setattr(TrainingWorker, "reset", never)
    with pytest.raises(ConfigError, match=r"entropy_coeff = 0.001 has no effect"):
        worker_of(tmp_path, [CLIP], **{"actor.entropy_coeff": 0.001})
    with pytest.raises(ConfigError, match=r"names no file. Write loss_mode=rlstab:FILE"):
        worker_of(tmp_path, **{"actor.policy_loss.loss_mode": "'rlstab:'"})
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        worker_of(tmp_path, **{"actor.policy_loss.loss_mode": "rlstab:nowhere.yaml"})


def test_a_teachers_loss_is_refused(tmp_path: Path) -> None:
    from functools import partial

    from verl.trainer.distillation import distillation_ppo_loss

    worker = worker_of(tmp_path, [CLIP])
    with pytest.raises(HostError, match=r"takes the place of ppo_loss alone. Train without it"):
        worker.set_loss_fn(partial(distillation_ppo_loss, config=None))
    worker.config.actor.strategy = "fsdp2"
    worker.distillation_enabled = True
    with pytest.raises(ConfigError, match=r"distillation.enabled: .* Switch it off"):
        worker.actor_worker_cls(config=None)


def test_ranks_that_read_different_objectives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_node(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own, "the hash of another file"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", other_node)
    with pytest.raises(ConfigError, match=r"read different objectives: .* every node reads the same, .* absolute path"):
        worker_of(tmp_path, [CLIP])


def test_two_corrections_for_the_sampler_are_refused(tmp_path: Path) -> None:
    objective = [CLIP, {"name": "importance_correction"}]
    with pytest.raises(ConfigError, match=r"'importance_correction' corrects .*rollout_is=null, or remove"):
        run(tmp_path, objective, rolled={"weights": True}, updates=1)


def test_a_column_that_verl_promised(tmp_path: Path) -> None:
    text = r"reads 'rollout_logprobs', and verl's batch has no 'rollout_log_probs'. Set .*calculate_log_probs=true"
    with pytest.raises(MissingSignal, match=text):
        run(tmp_path, [CLIP, {"name": "mismatch"}], rolled={"without": ["rollout_log_probs"]}, updates=1)


# -- steps that are refused, skipped or scaled -------------------------------------------------------------------------


class Trouble(TokenObjective):
    """In the second optimizer step: NaN in a gate, or half the learning rate."""

    name = "trouble"
    writes = {"gates", "lr_scale"}
    kind: str = "gate"

    def init_state(self) -> Any:
        return {"step": 0}

    def advance(self, state: Any, stat: Any) -> Any:
        return {"step": state["step"] + 1}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        now = state["step"] == 2
        if self.kind == "lr":
            return Terms(lr_scale=0.5 if now else 1.0)
        value = torch.nan if now else 1.0
        return Terms(gates={"": Gate(lambda ratio, constants: torch.full_like(ratio, value))})


def becomes(objective: TokenObjective) -> Callable[[Any], None]:
    """Let an actor train by an objective that no file can name."""

    def change(actor: Any) -> None:
        actor.objective = compose_objective(objective)
        actor.objective_state = actor.objective.init_state()

    return change


def unchanged(found: Any, second: int = 1) -> bool:
    before, after = found["updates"][second - 1], found["updates"][second]
    weights = all(torch.equal(one, after["weights"][name]) for name, one in before["weights"].items())
    return weights and all(torch.equal(*pair) for pair in zip(before["moments"], after["moments"], strict=True))


def told(found: Any, name: str) -> list[float]:
    return [float(one["metrics"][f"actor/rlstab/{name}"]) for one in found["updates"]]


@pytest.mark.parametrize("rows", [4, 16])
def test_nan_in_a_gate_refuses_the_step(rows: int, tmp_path: Path) -> None:
    size = {"actor.ppo_micro_batch_size_per_gpu": rows}
    found = run(tmp_path, [CLIP], change=becomes(Trouble()), updates=3, **size)
    assert unchanged(found)
    assert [one["state"]["trouble"]["step"] for one in found["updates"]] == [1, 1, 1]  # refused again and again
    assert "are NaN or Inf" in found["updates"][1]["refusal"]
    assert told(found, "steps/refused") == [0.0, 1.0, 1.0]
    assert found["updates"][0]["metrics"]["actor/grad_norm"] > 0
    assert len(found["steps"]) == 1  # verl's optimizer was asked once


def test_nan_in_the_evidence_refuses_the_step(tmp_path: Path) -> None:
    objective = [CLIP, {"name": "importance_correction"}]
    found = run(tmp_path, objective, rolled={"broken": [1]}, updates=3, **{"actor.ppo_micro_batch_size_per_gpu": 4})
    assert unchanged(found)
    assert not unchanged(found, 2)
    assert "NaN or Inf values: 1 in 'rollout_logprobs'" in found["updates"][1]["refusal"]
    assert told(found, "steps/refused") == [0.0, 1.0, 0.0]


def test_a_step_without_gradient_moves_nothing(tmp_path: Path) -> None:
    """Equal rewards: AdamW's momentum and weight decay would move the weights."""
    found = run(tmp_path, [CLIP, {"name": "s2t"}], rolled={"equal": [1]}, updates=3)
    assert unchanged(found)
    assert not unchanged(found, 2)
    assert told(found, "steps/skipped") == [0.0, 1.0, 0.0]
    plain = run(tmp_path, rolled={"equal": [1]}, updates=3)
    assert not unchanged(plain)


def test_the_learning_rate_is_scaled_for_one_step(tmp_path: Path) -> None:
    found = run(tmp_path, [CLIP], change=becomes(Trouble(kind="lr")), updates=3)
    assert [one["rates"] for one in found["steps"]] == [[1e-3], [5e-4], [1e-3]]
    assert [one["metrics"]["actor/lr"] for one in found["updates"]] == [1e-3] * 3
    assert told(found, "lr_scale") == [1.0, 0.5, 1.0]


# -- the release -------------------------------------------------------------------------------------------------------


def test_this_release_is_known() -> None:
    import warnings

    from rlstab.adapters.verl import check_host

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter.*")
        check_host()


def test_another_verl_is_refused() -> None:
    from rlstab.adapters.verl.release import check_release

    for version in ("0.8.0", "0.9.2", "1.0.0.dev0"):
        with pytest.raises(HostError, match=rf"verl {version} is installed, .* pip install 'verl==0.9.1'"):
            check_release(version)


def test_a_method_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlstab.adapters.verl.release import METHODS, check_release

    def other(batch: Any) -> None: ...

    for owner, names in METHODS:
        who = owner.__name__.rpartition(".")[2]
        for name in names:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, other)
                other.__module__ = "tests.adapters"
                with pytest.raises(HostError, match=f"{who}.{name} was replaced by tests"):
                    check_release()
                other.__module__ = "verl.workers"
                with pytest.raises(HostError, match=rf"{who}.{name} of verl 0.9.1 takes \(batch\), expected \("):
                    check_release()


def test_a_method_whose_body_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.utils import losses

    from rlstab.adapters.verl.release import check_release

    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> None: ...

    ppo_loss.__module__ = "verl.workers.utils.losses"
    monkeypatch.setattr(losses, "ppo_loss", ppo_loss)
    with pytest.warns(UserWarning, match=r"has another ppo_loss than the release that the adapter was tested with"):
        check_release()


# -- how verl finds it -------------------------------------------------------------------------------------------------


def doctor(folder: Path, *, own: str = "", other: str = "", **variables: str) -> tuple[int, str]:
    """``rlstab doctor`` in a process of its own, with other entry points in verl's group."""
    for name, value in (("rlstab", own), ("theirs", other)):
        if value:
            info = folder / f"a_{name}-1.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: a-{name}\nVersion: 1\n")
            (info / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {value}\n")
    (folder / "breaks.py").write_text("raise RuntimeError('it is broken')\n")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **variables}
    command = [sys.executable, "-W", "ignore", "-m", "rlstab", "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False)
    lines = " ".join(ran.stdout.split())
    return ran.returncode, lines[lines.index("verl ") :]


def test_doctor_says_that_the_adapter_is_live(tmp_path: Path) -> None:
    code, said = doctor(tmp_path)
    assert said.startswith("verl 0.9.1: rlstab.adapters.verl is live")
    assert code == 0


def test_doctor_names_a_broken_entry_point(tmp_path: Path) -> None:
    """verl itself says nothing of it."""
    code, said = doctor(tmp_path, own="breaks")
    assert said.startswith(
        "verl 0.9.1: rlstab.adapters.verl does not work: HostError: the entry point 'rlstab' (breaks)"
    )
    assert "RuntimeError: it is broken" in said
    assert code != 0


def test_doctor_names_broken_plugins_of_others(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, other="breaks")
    assert said.startswith(
        "verl 0.9.1: rlstab.adapters.verl is live; tested with verl 0.9.1. verl's plugin 'theirs' (breaks)"
    )
    assert "RuntimeError: it is broken" in said
    assert code == 0


def test_doctor_names_the_switch_that_keeps_it_out(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "VERL_USE_EXTERNAL_PLUGINS='none' keeps verl from loading the adapter. Unset it, or add rlstab." in said
    assert code != 0


def test_a_run_without_the_adapter_has_verls_own_class() -> None:
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from rlstab.adapters.verl.plugin import ActorWorker

    assert isinstance(vars(ActorRolloutRefWorker)["actor_worker_cls"], ActorWorker)
    assert ActorRolloutRefWorker.actor_worker_cls is TrainingWorker


def test_an_adapter_that_cannot_be_imported_is_an_error_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: a run of verl alone has nothing to do with it."""
    monkeypatch.setitem(sys.modules, "rlstab.adapters.verl.worker", None)
    assert type(worker_of(tmp_path).actor).__name__ == "TrainingWorker"
    with pytest.raises(ImportError, match=r"rlstab.adapters.verl.worker"):
        worker_of(tmp_path, [CLIP])


def test_importing_verl_imports_neither_its_workers_nor_the_adapter() -> None:
    ours = "rlstab.adapters.verl.worker"
    code = f"import verl, sys; print([name for name in sys.modules if 'engine_workers' in name or {ours!r} in name])"
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[-2] == "[]"
