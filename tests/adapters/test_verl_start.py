"""What is refused before an actor trains, with what to change; what a step refuses; how verl finds the adapter."""

import copy
import pkgutil
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tests.adapters.cpu_verl", reason="verl is not installed: nox -s verl")

from rlstab import ClipHigher
from rlstab import compose as compose_objective
from rlstab.adapters.releases import check_release
from rlstab.errors import ConfigError, HostError, MissingSignal
from rlstab.hosts import facts
from tests.adapters import jobs
from tests.adapters.jobs import ROOT, shell, unmoved
from tests.adapters.verl_jobs import composed, run, settings, worker_of

#: verl and what it imports warn of their own future, and of engines that are not installed.
pytestmark = pytest.mark.filterwarnings("ignore")

CLIP = {"name": "clip_higher"}
KL = {"name": "kl", "coefficient": 0.02}
TROUBLE = {"name": f"{jobs.__file__}:Trouble"}


def checked(folder: Path, objective: Any, **changes: Any) -> None:
    """Hydra composes verl's configuration, and the adapter looks at it as an actor does."""
    from rlstab.adapters.host_objective import settings_of_verl
    from rlstab.adapters.setting_conflicts import check_verl_settings
    from rlstab.adapters.verl.worker import require_from
    from rlstab.config import load_objective

    config = composed(settings(folder, objective, **changes)).actor_rollout_ref
    loaded = compose_objective(load_objective(objective))
    check_verl_settings(settings_of_verl(config), loaded)
    require_from(config, loaded)


def test_settings_that_the_objective_replaces_are_refused(tmp_path: Path) -> None:
    from rlstab.adapters.host_objective import settings_of_verl
    from rlstab.adapters.setting_conflicts import check_verl_settings

    own, config = compose_objective(ClipHigher()), composed(settings(tmp_path, [CLIP])).actor_rollout_ref
    check_verl_settings(settings_of_verl(config), own)
    known = facts("verl")
    for name in (*known["instead"], *(f"policy_loss.{name}" for name in known["instead_of_policy_loss"])):
        wrong = copy.deepcopy(config)
        wrong.merge_with_dotlist([f"actor.{name}=another"])
        with pytest.raises(ConfigError, match=rf"actor\.{name} = 'another'"):
            check_verl_settings(settings_of_verl(wrong), own)


REFERENCE = {"actor.use_kl_loss": "true"}
FUSED, UNSCORED = {"model.use_fused_kernels": "true"}, {"rollout.calculate_log_probs": "false"}


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        ([CLIP], REFERENCE, "use_kl_loss = True, and no method .*use_kl_loss=false"),
        ([CLIP], {"actor.kl_loss_coef": 0.04}, "kl_loss_coef = 0.04, .*kl_loss_coef=0.001"),
        ([CLIP, KL], {}, r"(?s)'kl' reads .* Write .*use_kl_loss=true\..*kl_loss_coef=0.02"),
        ([CLIP, {**KL, "anchor": "old"}], REFERENCE, "use_kl_loss = True, and no method"),
        ([CLIP, KL], {**REFERENCE, "actor.kl_loss_coef": 0.04}, "kl_loss_coef = 0.04, .*coef=0.02"),
        ([CLIP], {"actor.strategy": "torchtitan"}, "strategy = 'torchtitan'"),
        ([CLIP, {"name": "lp_reg"}], FUSED, "'lp_reg' reads 'max_logprobs', .*use_fused_kernels at false"),
        ([CLIP, {"name": "mismatch"}], UNSCORED, "'mismatch' reads 'rollout_logprobs', .*calculate_log_probs=true"),
    ],
)
def test_what_does_not_fit_is_refused(objective: Any, changes: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, MissingSignal), match=text):
        checked(tmp_path, objective, **changes)


def test_an_actor_is_refused_before_its_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine_workers import TrainingWorker

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model would be loaded now")

    monkeypatch.setattr(TrainingWorker, "reset", never)
    mode = "actor.policy_loss.loss_mode"
    for objective, changes, text in (
        ([CLIP], {"actor.entropy_coeff": 0.001}, "entropy_coeff = 0.001"),
        (None, {mode: "'rlstab:'"}, "names no file"),
        (None, {mode: "rlstab:nowhere.yaml"}, "nowhere.yaml"),
    ):
        with pytest.raises(ConfigError, match=text):
            worker_of(tmp_path, objective, **changes)


def test_a_teachers_loss_is_refused(tmp_path: Path) -> None:
    from verl.trainer.distillation import distillation_ppo_loss

    worker = worker_of(tmp_path, [CLIP])
    with pytest.raises(HostError, match="only ppo_loss"):
        worker.set_loss_fn(partial(distillation_ppo_loss, config=None))
    worker.config.actor.strategy = "fsdp2"
    worker.distillation_enabled = True
    with pytest.raises(ConfigError, match=r"distillation.enabled"):
        worker.actor_worker_cls(config=None)


def test_ranks_that_read_different_objectives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_node(ranks: list[Any], own: Any, group: Any = None) -> None:
        ranks[:] = [own, "the hash of another file"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", other_node)
    with pytest.raises(ConfigError, match="read different objectives"):
        worker_of(tmp_path, [CLIP])


def test_a_rollout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Two corrections for the sampler, and a column that verl's configuration promised."""
    with pytest.raises(ConfigError, match=r"'importance_correction' and .*rollout_is=null"):
        run(tmp_path, [CLIP, {"name": "importance_correction"}], rolled={"weights": True}, updates=1)
    with pytest.raises(MissingSignal, match=r"'rollout_logprobs', .*calculate_log_probs=true"):
        run(tmp_path, [CLIP, {"name": "mismatch"}], rolled={"without": ["rollout_log_probs"]}, updates=1)


def told(done: Any, name: str) -> list[float]:
    return [float(update["metrics"][f"actor/rlstab/{name}"]) for update in done["updates"]]


@pytest.mark.parametrize("rows", [4, 16])
def test_nan_in_a_gate_refuses_the_step(rows: int, tmp_path: Path) -> None:
    size = {"actor.ppo_micro_batch_size_per_gpu": rows}
    done = run(tmp_path, [TROUBLE], updates=3, **size)
    assert unmoved(*done["updates"][:2])
    assert [update["state"]["trouble"]["step"] for update in done["updates"]] == [1, 1, 1]  # refused again and again
    assert "are NaN or Inf" in done["updates"][1]["refusal"]
    assert told(done, "steps/refused") == [0.0, 1.0, 1.0]
    assert done["updates"][0]["metrics"]["actor/grad_norm"] > 0
    assert len(done["steps"]) == 1  # verl's optimizer was asked once


@pytest.mark.parametrize(
    ("method", "rolled", "metric"), [("importance_correction", "broken", "refused"), ("s2t", "equal", "skipped")]
)
def test_a_spoiled_or_silent_step_moves_nothing(method: str, rolled: str, metric: str, tmp_path: Path) -> None:
    """Without gradient, as rewards are equal: AdamW's momentum and weight decay would move the weights."""
    size = {"actor.ppo_micro_batch_size_per_gpu": 4}
    done = run(tmp_path, [CLIP, {"name": method}], rolled={rolled: [1]}, updates=3, **size)
    assert unmoved(*done["updates"][:2])
    assert not unmoved(*done["updates"][1:])
    assert told(done, f"steps/{metric}") == [0.0, 1.0, 0.0]
    if rolled == "broken":
        assert "1 in 'rollout_logprobs'" in done["updates"][1]["refusal"]
    else:
        assert not unmoved(*run(tmp_path, rolled={rolled: [1]}, updates=3)["updates"][:2])


def test_the_learning_rate_is_scaled_for_one_step(tmp_path: Path) -> None:
    done = run(tmp_path, [{**TROUBLE, "kind": "lr"}], updates=3)
    assert [step["rates"] for step in done["steps"]] == [[1e-3], [5e-4], [1e-3]]
    assert [update["metrics"]["actor/lr"] for update in done["updates"]] == [1e-3] * 3
    assert told(done, "lr_scale") == [1.0, 0.5, 1.0]


def test_this_release_is_known_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlstab.adapters.verl import check_host

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter.*")
        check_host()
    for version in ("0.8.0", "0.9.2", "1.0.0.dev0"):
        with pytest.raises(HostError, match=rf"verl {version} is installed, .* pip install 'verl==0.9.1.\*'"):
            check_release("verl", version)
    with monkeypatch.context() as patch:
        patch.setattr("rlstab.adapters.releases.checksum", lambda method: "another")
        with pytest.warns(UserWarning, match=r"train_mini_batch, .* ppo_loss of verl"):
            check_release("verl")
    for owner, methods in facts("verl")["methods"].items():
        with monkeypatch.context() as patch:
            patch.setattr(pkgutil.resolve_name(owner), next(iter(methods)), run)
            with pytest.raises(HostError, match=r"was replaced by tests.adapters.verl_jobs"):
                check_release("verl")


@pytest.mark.parametrize(
    ("points", "switch", "words"),
    [
        ({}, "auto", ["verl is live"]),
        ({"rlstab": "breaks"}, "auto", ["does not work: HostError", "'rlstab' (breaks)", "RuntimeError: it is broken"]),
        ({"theirs": "breaks"}, "auto", ["verl is live", "verl's plugin 'theirs'", "RuntimeError: it is broken"]),
        ({}, "none", ["does not work", "VERL_USE_EXTERNAL_PLUGINS='none'"]),
    ],
    ids=["well", "broken", "another's is broken", "switched off"],
)
def test_doctor_on_verl(points: dict[str, str], switch: str, words: list[str], tmp_path: Path) -> None:
    """In a separate process, with other entry points in verl's group, of which verl says nothing."""
    for name, value in points.items():
        info = tmp_path / f"a_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: a-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {value}\n")
    (tmp_path / "breaks.py").write_text("raise RuntimeError('it is broken')\n")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "VERL_USE_EXTERNAL_PLUGINS": switch}
    *said, code = shell("python -W ignore -m rlstab doctor && echo 0 || echo $?", tmp_path, **variables).split()
    assert [word for word in ["verl 0.9.1: rlstab.adapters.verl", *words] if word not in " ".join(said)] == []
    assert (code == "0") == ("verl is live" in words)


def test_verl_alone_has_nothing_to_do_with_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not imported with verl; a run without it has verl's own class, and only a run with it sees that it is broken."""
    ours = "rlstab.adapters.verl.worker"
    code = f"import verl, sys; print([name for name in sys.modules if 'engine_workers' in name or '{ours}' in name])"
    assert shell(f'python -W ignore -c "{code}"', tmp_path).split("\n")[-2] == "[]"
    monkeypatch.setitem(sys.modules, ours, None)
    assert type(worker_of(tmp_path).actor).__name__ == "TrainingWorker"
    with pytest.raises(ImportError, match=ours):
        worker_of(tmp_path, [CLIP])
