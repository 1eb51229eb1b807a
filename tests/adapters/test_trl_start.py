"""What is refused when the trainer is made, with what to change; what a step refuses; and the rest of TRL's trainer."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")


import trl
from accelerate import Accelerator, DistributedType
from trl import GRPOTrainer

from rlstab import Gate, Mean, Terms, TokenObjective
from rlstab.adapters.trl import RLStabGRPOTrainer, release
from rlstab.adapters.trl.settings import BIAS_CORRECTION, REPLACED, check_engine
from rlstab.core.comm import LocalComm
from rlstab.errors import ConfigError, HostError, MissingSignal
from tests.adapters.trl_jobs import ROOT, config, model, recorder, run, sampler, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

CLIP = {"name": "clip_higher"}


# -- settings ----------------------------------------------------------------------------------------------------------

WRONG = {
    "loss_type": "sapo",
    "epsilon": 0.3,
    "epsilon_high": 0.28,
    "delta": 2.0,
    "importance_sampling_level": "sequence",
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "off_policy_mask_threshold": 0.5,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_that_the_objective_replaces_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"GRPOConfig.{name} = .* has no effect: .* Leave it at .*objective: "):
        trainer_of(tmp_path, [CLIP], **{name: WRONG[name]})


def test_every_setting_of_trls_loss_is_known() -> None:
    """What TRL's loss reads of its configuration is replaced by the objective, or stays in effect."""
    fields = set(trl.GRPOConfig.__dataclass_fields__)
    assert fields >= REPLACED.keys()
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))
    source += inspect.getsource(inspect.unwrap(GRPOTrainer.get_gamma_weights))
    read = {name for name in fields if f".{name}" in source} - REPLACED.keys()
    assert read == {
        *("beta", "steps_per_generation", "max_completion_length", "use_vllm", "vllm_importance_sampling_correction"),
        *("router_aux_loss_coef", BIAS_CORRECTION),
    }


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        ([CLIP], {"beta": 0.04}, r"beta = 0.04 has no effect: no method .* \{name: kl, coefficient: 0.04\}"),
        ([CLIP, {"name": "kl", "coefficient": 0.02}], {}, "'kl' reads 'ref_logprobs', .* Write beta=0.02"),
        ([CLIP, {"name": "kl", "coefficient": 0.02}], {"beta": 0.04}, "beta = 0.04, and the coefficient .* beta=0.02"),
        (
            [CLIP],
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
            | {"num_iterations": 1},
            "a step would span generations, .* Write steps_per_generation=4, or a multiple",
        ),
        ([CLIP], {"use_bias_correction_kl": False}, "use_bias_correction_kl = False has no effect"),
        (
            [CLIP, {"name": "kl", "coefficient": 0.02}],
            {"beta": 0.02},
            "use_bias_correction_kl = True, and the estimator of 'kl' is 'k3'.*_kl=False, or estimator: k3_unbiased",
        ),
        (
            [CLIP, {"name": "kl", "coefficient": 0.02, "estimator": "k3_unbiased"}],
            {"beta": 0.02, "use_bias_correction_kl": False},
            "use_bias_correction_kl = False, and the estimator of 'kl' is 'k3_unbiased'",
        ),
        ([CLIP], {"optim": "lomo"}, "optim = 'lomo' steps inside the backward pass"),
        (
            [CLIP, {"name": "importance_correction"}],
            {"use_vllm": True},
            "'importance_correction' corrects for the sampler, .* vllm_importance_sampling_correction=False",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(objective: Any, changes: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        trainer_of(tmp_path, objective, **changes)


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "extra", "text"),
    [
        (
            [CLIP, {"name": "lp_reg"}],
            {"head": "trl"},
            "'lp_reg' reads 'max_logprobs', which TRL .* does not provide.* head='rlstab'",
        ),
        ([CLIP, {"name": "block_mean"}], {}, r"'block_mean' reads 'block_ids', .* signals=\{'block_ids': function\}"),
        (
            [CLIP, {"name": "mismatch"}],
            {"rollout_func": None},
            "'mismatch' reads 'rollout_logprobs', .* generate with vLLM .* or with a rollout_func",
        ),
    ],
)
def test_a_signal_that_trl_does_not_have_is_refused(objective: Any, extra: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(MissingSignal, match=text):
        trainer_of(tmp_path, objective, extra=extra)


def test_a_signal_of_ones_own(tmp_path: Path) -> None:
    """A function of TRL's batch gives it; what it returns is checked."""

    def blocks(inputs: Any) -> torch.Tensor:
        return (torch.arange(inputs["completion_ids"].shape[1]) // 3).expand(inputs["completion_ids"].shape)

    objective = [CLIP, {"name": "block_mean"}]
    found = run(tmp_path, objective, max_steps=1, extra={"signals": {"block_ids": blocks}})
    assert found["log"][0]["rlstab/block_mean/without"] == 0.0


def test_sampler_log_probs_that_a_rollout_func_does_not_return(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [CLIP, {"name": "mismatch"}])
    with pytest.raises(MissingSignal, match="A rollout_func returns it under 'logprobs'"):
        trainer.train()


# -- the release -------------------------------------------------------------------------------------------------------


def test_this_release_is_known() -> None:
    release.check_release()


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("1.15.0", "1.17.0", "2.0.0"):
        with pytest.raises(HostError, match=rf"TRL {other} is installed, .* pip install 'trl==1.16.\*'"):
            release.check_release(version=other)

    class UnslothGRPOTrainer(GRPOTrainer):
        pass

    text = "UnslothGRPOTrainer takes the place of TRL's GRPOTrainer, and .* Do not import that package"
    with pytest.raises(HostError, match=text):
        release.check_release(UnslothGRPOTrainer)
    monkeypatch.setattr(trl, "GRPOTrainer", UnslothGRPOTrainer)
    with pytest.raises(HostError, match=text):
        release.check_release()


def test_unsloth_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    with pytest.raises(HostError, match="Unsloth is imported and patches TRL's GRPOTrainer"):
        trainer_of(tmp_path, [CLIP])


@pytest.mark.parametrize("name", release.METHODS)
def test_a_private_method_that_changed_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, batch: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, name, other)
        with pytest.raises(HostError, match=f"GRPOTrainer.{name} was replaced by tests"):
            release.check_release()
        other.__module__ = "trl.trainer.grpo_trainer"
        with pytest.raises(HostError, match=rf"GRPOTrainer.{name} of TRL .* takes \(self, batch\), expected \(self, "):
            release.check_release()


@pytest.mark.parametrize("name", release.METHODS)
def test_a_private_method_whose_body_changed_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = ", ".join(release.METHODS[name][0].split())
    scope: dict[str, Any] = {}
    exec(f"def {name}({parameters}): ...", scope)
    scope[name].__module__ = "trl.trainer.grpo_trainer"
    monkeypatch.setattr(GRPOTrainer, name, scope[name])
    monkeypatch.setattr(inspect, "getsource", lambda method: "def another(): ...")
    with pytest.warns(UserWarning, match=f"{name}.* changed since the adapter was tested"):
        release.check_release()


def test_what_stands_below_is_that_of_the_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for package, tested in release.BESIDE.items():
        assert pins[package].rpartition(".")[0] == tested
    monkeypatch.setattr(release, "installed", lambda package: "9.9.9")
    with pytest.warns(UserWarning, match="not tested with transformers 9.9.9, accelerate 9.9.9, but with trl 1.16"):
        release.check_release()
    monkeypatch.setattr(release, "ATTRIBUTES", ("_buffered_inputs", "_gone"))
    with (
        pytest.raises(HostError, match="has no _gone, which the adapter reads"),
        pytest.warns(UserWarning, match="9.9.9"),
    ):
        trainer_of(tmp_path, [CLIP])


def test_everything_private_that_is_read_is_checked() -> None:
    read = set()
    for path in (ROOT / "rlstab" / "adapters" / "trl").glob("*.py"):
        who = r"self|super\(\)" if path.name == "trainer.py" else r"trainer"
        read |= set(re.findall(rf"(?:{who})\.(_[a-z]\w*)", path.read_text(encoding="utf-8")))
    ours = {name for name in read if name.startswith("_rlstab") or name in vars(RLStabGRPOTrainer)}
    helpers = {"_before_optimizer_step", "_after_optimizer_step", "_collect"}
    assert read - (ours - release.METHODS.keys()) - helpers <= {*release.METHODS, *release.ATTRIBUTES}


# -- the engine --------------------------------------------------------------------------------------------------------


def test_an_engine_that_accelerate_launch_chose_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for engine in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        launched = types.SimpleNamespace(distributed_type=engine, parallelism_config=None)
        with pytest.raises(ConfigError, match=f"accelerate was launched with {engine.value}"):
            check_engine(launched)
    for kind in ("tp", "cp", "sp"):
        parallel = types.SimpleNamespace(**{f"{kind}_enabled": True})
        launched = types.SimpleNamespace(distributed_type=DistributedType.FSDP, parallelism_config=parallel)
        with pytest.raises(ConfigError, match=f"parallelism_config has {kind}_size"):
            check_engine(launched)
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType.DEEPSPEED))
    with pytest.raises(ConfigError, match="accelerate was launched with DEEPSPEED"):
        trainer_of(tmp_path, [CLIP])


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


def moments(trainer: Any) -> list[torch.Tensor]:
    return [one.clone() for state in trainer.optimizer.state.values() for one in state.values()]


def observed(trainer: Any) -> list[list[torch.Tensor]]:
    """The optimizer's moments after each step, filled in while the trainer trains."""
    from transformers import TrainerCallback

    seen: list[list[torch.Tensor]] = []

    class Keep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(moments(trainer))

    trainer.add_callback(Keep())
    return seen


def unchanged(steps: Any, kept: Any, second: int = 1) -> bool:
    before, after = steps[second - 1]["weights"], steps[second]["weights"]
    weights = all(torch.equal(one, after[name]) for name, one in before.items())
    return weights and all(torch.equal(*pair) for pair in zip(kept[second - 1], kept[second], strict=True))


ADAM = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-3}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_nan_in_a_gate_refuses_the_step(accumulation: int, tmp_path: Path) -> None:
    cut = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    trainer = trainer_of(tmp_path, Trouble(), **ADAM, **cut)
    steps, kept = recorder(trainer), observed(trainer)
    trainer.train()
    assert unchanged(steps, kept)
    assert [one["settled"]["trouble"]["step"] for one in steps] == [1, 1, 1, 1]  # refused again and again
    assert "are NaN or Inf" in trainer.last_refusal
    assert [one["rlstab/steps/refused"] for one in trainer.state.log_history[:4]] == [0.0, 1.0, 1.0, 1.0]
    assert all(torch.isfinite(one).all() for one in steps[-1]["weights"].values())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_nan_in_the_evidence_refuses_the_step(accumulation: int, tmp_path: Path) -> None:
    def spoiled(prompts: list[str], trainer: Any) -> Any:
        found = sampler(scored=True)(prompts, trainer)
        if trainer.state.global_step == 1:
            found["logprobs"][3][0] = -float("inf")
        return found

    cut = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    objective = [CLIP, {"name": "importance_correction"}]
    trainer = trainer_of(tmp_path, objective, sampling=spoiled, num_iterations=1, **ADAM, **cut)
    steps, kept = recorder(trainer), observed(trainer)
    trainer.train()
    assert unchanged(steps, kept)
    assert "NaN or Inf values: 1 in 'rollout_logprobs'" in trainer.last_refusal
    assert [one["rlstab/steps/refused"] for one in trainer.state.log_history[:4]] == [0.0, 1.0, 0.0, 0.0]
    assert not unchanged(steps, kept, 2)


def test_a_step_without_gradient_moves_nothing(tmp_path: Path) -> None:
    """Equal rewards: AdamW's momentum and weight decay would move the weights."""
    calls = []

    def reward(completion_ids: Any, **_: Any) -> list[float]:
        calls.append(1)
        return [1.0] * 8 if len(calls) == 2 else [float(sum(one) % 7) for one in completion_ids]

    extra = {"reward_funcs": reward}
    trainer = trainer_of(tmp_path, [CLIP], num_iterations=1, extra=extra, **ADAM)
    steps, kept = recorder(trainer), observed(trainer)
    trainer.train()
    assert unchanged(steps, kept)
    assert [one["rlstab/steps/skipped"] for one in trainer.state.log_history[:4]] == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("head", ["trl", "rlstab"])
def test_a_step_whose_responses_are_all_cut_off_moves_nothing(head: str, tmp_path: Path) -> None:
    """TRL masks them, so there is no token left."""

    def endless(prompts: list[str], trainer: Any) -> Any:
        found = sampler()(prompts, trainer)
        if trainer.state.global_step == 1:
            found["completion_ids"] = [[*one[:-1], 5] for one in found["completion_ids"]]
        return found

    extra = {"head": head}
    cut = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "mask_truncated_completions": True}
    objective = [CLIP, {"name": "s2t"}]
    trainer = trainer_of(tmp_path, objective, sampling=endless, num_iterations=1, extra=extra, **ADAM, **cut)
    steps, kept = recorder(trainer), observed(trainer)
    trainer.train()
    assert steps[1]["tokens"] == (0.0, 0.0)
    assert 0 < steps[0]["tokens"][1] < 8
    assert unchanged(steps, kept)
    assert [one["rlstab/steps/skipped"] for one in trainer.state.log_history[:4]] == [0.0, 1.0, 0.0, 0.0]


def test_what_a_tool_wrote_is_no_token(tmp_path: Path) -> None:
    def with_tools(prompts: list[str], trainer: Any) -> Any:
        found = sampler()(prompts, trainer)
        found["env_mask"] = [[int(place != 1) for place in range(len(one))] for one in found["completion_ids"]]
        return found

    plain, masked = run(tmp_path, [CLIP], max_steps=1), run(tmp_path, [CLIP], max_steps=1, sampling=with_tools)
    assert masked["steps"][0]["tokens"][0] == plain["steps"][0]["tokens"][0] - 8
    trls = run(tmp_path, max_steps=1, sampling=with_tools)
    for name, values in trls["steps"][0]["gradients"].items():
        assert torch.equal(values, masked["steps"][0]["gradients"][name])


def test_the_learning_rate_is_scaled_for_one_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Trouble(kind="lr"), lr_scheduler_type="linear", max_steps=3)
    steps = recorder(trainer)
    trainer.train()
    rates = [one["learning_rate"] for one in trainer.state.log_history[:3]]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert [one["rlstab/lr_scale"] for one in trainer.state.log_history[:3]] == [1.0, 0.5, 1.0]
    for number, scale in ((1, 0.5), (2, 1.0)):
        before, step = steps[number - 1]["weights"], steps[number]
        for name, gradient in step["gradients"].items():
            wanted = before[name] - rates[number] * scale * gradient
            assert torch.allclose(step["weights"][name], wanted, atol=1e-7)


# -- the rest of TRL's trainer -----------------------------------------------------------------------------------------


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    objective = [CLIP, {"name": "s2t"}]
    cut = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    one, two = run(tmp_path, objective, **cut), run(tmp_path, objective, gradient_checkpointing=True, **cut)
    for before, after in zip(one["steps"], two["steps"], strict=True):
        for name, values in before["gradients"].items():
            assert torch.equal(values, after["gradients"][name])


def test_lora_and_the_reference_model(tmp_path: Path) -> None:
    """Only adapters have gradients; the reference is the model without them, so its first KL is 0."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    objective = [CLIP, {"name": "s2t"}, {"name": "kl", "coefficient": 0.01, "estimator": "k3_unbiased"}]
    cut = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    for head in ("trl", "rlstab"):
        found = run(tmp_path, objective, beta=0.01, head=head, extra={"peft_config": adapters}, **cut)
        assert all("lora" in name for name in found["steps"][0]["gradients"])
        assert found["log"][0]["kl"] == pytest.approx(0.0, abs=1e-7)
        assert found["log"][3]["kl"] > 0.0


def test_a_whole_reference_model(tmp_path: Path) -> None:
    objective = [CLIP, {"name": "kl", "coefficient": 0.01, "cap": None}]
    found = run(tmp_path, objective, beta=0.01, use_bias_correction_kl=False)
    assert found["log"][0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert found["log"][1]["kl"] > 0.0


def test_evaluation_leaves_the_state_alone(tmp_path: Path) -> None:
    objective = [CLIP, {"name": "adaptive_entropy", "target_entropy": 0.8}]
    trainer = trainer_of(tmp_path, objective, per_device_eval_batch_size=4, max_steps=2)
    trainer.train()
    before = repr(trainer.objective_state)
    found = trainer.evaluate()
    assert repr(trainer.objective_state) == before
    assert torch.isfinite(torch.tensor(found["eval_loss"]))
    log = trainer.state.log_history[-1]
    assert log["eval_entropy"] > 0
    assert log["eval_rlstab/tokens/kept"] == 1.0


def test_a_model_is_generated_with_as_ever(tmp_path: Path) -> None:
    """TRL's own generation, with rlstab's head behind the model's forward."""
    found = run(tmp_path, [CLIP, {"name": "lp_reg"}], max_steps=2, extra={"rollout_func": None})
    assert len(found["steps"]) == 2
    assert found["log"][0]["completions/mean_length"] > 0


def test_the_trainer_takes_what_trls_takes(tmp_path: Path) -> None:
    """Arguments by place, and an objective by path."""
    from tests.adapters.trl_jobs import prompts, reward, tokenizer

    path = tmp_path / "objective.yaml"
    path.write_text("objective: [{preset: dapo}]\n")
    trainer = RLStabGRPOTrainer(
        *(model(), reward, config(tmp_path), prompts()), processing_class=tokenizer(), objective=str(path)
    )
    assert list(trainer.objective.keyed) == ["clip_higher", "token_mean"]
    assert isinstance(trainer._rlstab_comm, LocalComm)
    assert Mean.scalar(1.0).value == 1.0
