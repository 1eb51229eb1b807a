"""What is refused when the trainer is made, with what to change; what a step refuses; and the rest of TRL's trainer."""

import importlib
import inspect
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

import trl
from accelerate import Accelerator, DistributedType
from trl import GRPOTrainer

from rlstab.adapters import releases
from rlstab.adapters.host_objective import TRL_LOSS, TRL_OTHER, TRL_STEPS
from rlstab.adapters.setting_conflicts import check_trl_settings
from rlstab.adapters.trl import RLStabGRPOTrainer, hooks, release
from rlstab.adapters.trl.hooks import check_engine
from rlstab.config import load_objective
from rlstab.core.turns import turns_of
from rlstab.errors import ConfigError, HostError, MissingSignal, ShapeError
from rlstab.hosts import facts
from tests.adapters.jobs import ROOT, Trouble, defaults_of, farthest, model, same_weights, unmoved
from tests.adapters.trl_jobs import config, prompts, reward, run, sampler, tokenizer, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

CLIP = {"name": "clip_higher"}
S2T = [CLIP, {"name": "s2t"}]
TWO = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


def test_a_setting_that_the_objective_replaces_is_refused(tmp_path: Path) -> None:
    objective = load_objective([CLIP])
    other = {"loss_type": "grpo", "importance_sampling_level": "sequence", "use_adaptive_entropy": True}
    for name in TRL_LOSS:
        with pytest.raises(ConfigError, match=rf"GRPOConfig\.{name} = .* has no effect"):
            check_trl_settings(config(tmp_path, **{name: other.get(name, 0.7)}), objective)


def test_every_setting_of_trls_loss_is_known() -> None:
    """What TRL's loss reads of its configuration is replaced by the objective, or stays in effect."""
    fields = defaults_of(trl.GRPOConfig)
    assert {**fields, **TRL_LOSS, **TRL_OTHER, **TRL_STEPS} == fields
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))
    source += inspect.getsource(inspect.unwrap(GRPOTrainer.get_gamma_weights))
    read = {name for name in fields if f".{name}" in source} - set(TRL_LOSS)
    assert read == {
        *("beta", "steps_per_generation", "max_completion_length", "use_vllm", "vllm_importance_sampling_correction"),
        *("router_aux_loss_coef", "use_bias_correction_kl"),
    }


def kl(**settings: Any) -> list[dict[str, Any]]:
    return [CLIP, {"name": "kl", "coefficient": 0.02, **settings}]


SPANS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
BIASED, UNBIASED = ({"beta": 0.02, "use_bias_correction_kl": on} for on in (True, False))


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        ([CLIP], {"epsilon": 0.3}, "epsilon = 0.3 has no effect"),
        (kl(), {}, "'kl' reads 'ref_logprobs' .*beta=0.02"),
        (kl(), {"beta": 0.04}, "beta = 0.04, .*Write beta=0.02"),
        (kl(anchor="old"), {"beta": 0.02}, "beta = 0.02, and no method"),
        ([CLIP], {**SPANS, "num_iterations": 1}, "span generations, .*steps_per_generation=4"),
        ([CLIP], {**UNBIASED, "beta": 0.0}, "use_bias_correction_kl = False, and it acts only on 'kl'"),
        (kl(), BIASED, "use_bias_correction_kl = True, .* estimator k3.*use_bias_correction_kl=False"),
        (kl(estimator="k3_unbiased"), UNBIASED, "use_bias_correction_kl = False, .* estimator k3_unbiased"),
        ([CLIP], {"optim": "lomo"}, "optim = 'lomo'"),
        ([CLIP, {"name": "importance_correction"}], {"use_vllm": True}, "vllm_importance_sampling_correction=False"),
        ([CLIP, {"name": "lp_reg"}], {"extra": {"head": "trl"}}, "'lp_reg' reads 'max_logprobs', .*head='rlstab'"),
        ([CLIP, {"name": "mismatch"}], {"extra": {"rollout_func": None}}, "'rollout_logprobs', .*rollout_func"),
    ],
)
def test_what_does_not_fit_is_refused(objective: Any, changes: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, MissingSignal), match=f"(?s){text}"):
        trainer_of(tmp_path, objective, **changes)


def test_a_fused_loss_of_older_releases_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", lambda *_: None, raising=False)
    with pytest.raises(ConfigError, match=r"by Liger's loss.*Write use_liger_kernel=False"):
        trainer_of(tmp_path, [CLIP], use_liger_kernel=True)


def test_signals_that_only_the_user_can_give(tmp_path: Path) -> None:
    def blocks(inputs: Any) -> torch.Tensor:
        return (torch.arange(inputs["completion_ids"].shape[1]) // 3).expand(inputs["completion_ids"].shape)

    def grown(inputs: Any) -> torch.Tensor:
        return torch.ones_like(inputs["completion_ids"])

    done = run(tmp_path, [CLIP, {"name": "block_mean"}], max_steps=1, extra={"signals": {"block_ids": blocks}})
    assert done["log"][0]["rlstab/block_mean/without"] == 0.0
    for signals, branches in (({}, 0.0), ({"branch": grown}, 1.0)):
        done = run(tmp_path, [{"preset": "stack"}], max_steps=1, extra={"signals": signals})
        assert done["log"][0]["rlstab/stream_weight/branches"] == branches
    with pytest.raises(MissingSignal, match="'sampling_per_token_logps'"):  # a rollout_func returns no log-probs
        trainer_of(tmp_path, [CLIP, {"name": "mismatch"}]).train()


def test_a_head_that_peft_wraps_is_named_and_not_the_model(tmp_path: Path) -> None:
    import peft

    saved = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    extra = {"peft_config": peft.LoraConfig(r=4, task_type="CAUSAL_LM", **saved)}
    with pytest.raises(ConfigError, match=r"ModulesToSaveWrapper of PEFT .* out of modules_to_save"):
        trainer_of(tmp_path, [CLIP, {"name": "lp_reg"}], extra=extra)


@pytest.mark.parametrize(("objective", "says"), [(S2T, True), ([CLIP], False)], ids=["reads", "reads nothing"])
def test_dropout_is_told(objective: Any, says: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(hooks.logger, "warning", told.append)
    trainer_of(tmp_path, objective)
    assert not told
    dropped = model()
    dropped.model.layers[1].self_attn.attention_dropout = 0.1
    trainer_of(tmp_path, objective, extra={"model": dropped})
    assert [("layers.1.self_attn" in line, "disable_dropout=True" in line) for line in told] == [(True, True)] * says


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter.*")
        release.check_release()
    for other in ("1.15.0", "1.17.0", "2.0.0"):
        with pytest.raises(HostError, match=rf"TRL {other} is installed, .* pip install 'trl==1.16.\*'"):
            release.check_release(version=other)

    with monkeypatch.context() as patch:
        patch.setattr("rlstab.adapters.releases.checksum", lambda method: "another")
        with pytest.warns(UserWarning, match="_compute_loss.* changed since the adapter was tested"):
            release.check_release()


def as_unsloth(patch: pytest.MonkeyPatch) -> None:
    """Put a generated trainer into the three places where Unsloth does (2026.10.9, models/rl.py), with its own loss."""

    def compute_loss(self: Any, model: Any, inputs: Any, **kwargs: Any) -> torch.Tensor:
        return 0.0 * next(model.parameters()).sum()

    fields = {"compute_loss": compute_loss, "__module__": "unsloth_compiled_cache"}
    patched = type("UnslothGRPOTrainer", (GRPOTrainer,), fields)
    for module in (trl, trl.trainer, trl.trainer.grpo_trainer):
        patch.setattr(module, "GRPOTrainer", patched)


def adapter_again(patch: pytest.MonkeyPatch) -> Any:
    """The adapter's trainer, imported again: above the trainer that TRL has now."""
    for name in [name for name in sys.modules if name.startswith("rlstab.adapters.trl")]:
        patch.delitem(sys.modules, name)
    return importlib.import_module("rlstab.adapters.trl.trainer")


def test_unsloth_is_refused_in_any_order_of_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = trainer_of(tmp_path, [CLIP])
    for name in ("unsloth", "unsloth_zoo"):  # it patches models and transformers as well
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, types.ModuleType(name))
            with pytest.raises(HostError, match="Unsloth is imported"):
                made.train()
    with monkeypatch.context() as patch:
        as_unsloth(patch)
        for start in (made.train, lambda: trainer_of(tmp_path, [CLIP])):
            with pytest.raises(HostError, match=r"unsloth_compiled_cache\.UnslothGRPOTrainer replaces"):
                start()
        again = adapter_again(patch)
    # TRL's own is back, and the adapter is still above the other
    with pytest.raises(HostError, match="UnslothGRPOTrainer replaces"):
        again.RLStabGRPOTrainer(objective=[CLIP])
    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    with pytest.raises(HostError, match="Unsloth is imported"):
        trainer_of(tmp_path, [CLIP])


def test_without_the_refusal_unsloth_would_silently_leave_out_the_objective(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_unsloth(monkeypatch)
    again = adapter_again(monkeypatch)
    for module, name in ((again, "check_release"), (sys.modules[hooks.__name__], "check_unpatched")):
        monkeypatch.setattr(module, name, lambda: None)
    monkeypatch.setattr(sys.modules["rlstab.adapters.trl"], "RLStabGRPOTrainer", again.RLStabGRPOTrainer)
    trainer = trainer_of(tmp_path, [CLIP], max_steps=1)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_what_stands_below_is_that_of_the_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = facts("trl")["tested_with"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert all(pins[package].rpartition(".")[0] in known.split(" or ") for package, known in beside.items())
    monkeypatch.setitem(facts("trl"), "attributes", ["_buffered_inputs", "_gone"])
    with pytest.raises(HostError, match="has no _gone"):
        trainer_of(tmp_path, [CLIP])
    monkeypatch.setattr(releases, "version", lambda package: "9.9.9")
    with pytest.warns(UserWarning, match="not tested with transformers 9.9.9, accelerate 9.9.9, but with trl 1.16"):
        release.check_release()


def test_everything_private_that_is_read_is_checked() -> None:
    read = set()
    for path in (ROOT / "rlstab" / "adapters" / "trl").glob("*.py"):
        who = r"self|super\(\)" if path.name in ("trainer.py", "hooks.py") else r"trainer"
        read |= set(re.findall(rf"(?:{who})\.(_[a-z]\w*)", path.read_text(encoding="utf-8")))
    ours = {name for name in read if name.startswith("_rlstab") or name in vars(RLStabGRPOTrainer)}
    known = facts("trl")
    methods = known["methods"]["trl:GRPOTrainer"]
    assert read - (ours - methods.keys()) <= {*methods, *known["attributes"]}


def test_an_engine_that_accelerate_launch_chose_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = types.SimpleNamespace(distributed_type=DistributedType.MEGATRON_LM, parallelism_config=None)
    with pytest.raises(ConfigError, match="accelerate was launched with MEGATRON_LM"):
        check_engine(launched)
    for kind in ("tp", "cp", "sp"):
        parallel = types.SimpleNamespace(**{f"{kind}_enabled": True})
        launched = types.SimpleNamespace(distributed_type=DistributedType.FSDP, parallelism_config=parallel)
        with pytest.raises(ConfigError, match=f"parallelism_config has {kind}_size"):
            check_engine(launched)
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType.DEEPSPEED))
    with pytest.raises(ConfigError, match="accelerate was launched with DEEPSPEED"):
        trainer_of(tmp_path, [CLIP])


ADAM = {"optim": "adamw_torch", "weight_decay": 0.1, "num_iterations": 1}


def told(done: Any, name: str) -> list[float]:
    return [line[f"rlstab/{name}"] for line in done["log"][:4]]


@pytest.mark.parametrize("cut", [{}, TWO], ids=["1", "2"])
def test_nan_in_a_gate_refuses_the_step(cut: Any, tmp_path: Path) -> None:
    done = run(tmp_path, Trouble(), **{**ADAM, "num_iterations": 2}, **cut)
    assert unmoved(*done["steps"][:2])
    assert [step["settled"]["trouble"]["step"] for step in done["steps"]] == [1, 1, 1, 1]  # refused again and again
    assert "are NaN or Inf" in done["refusal"]
    assert told(done, "steps/refused") == [0.0, 1.0, 1.0, 1.0]
    assert all(torch.isfinite(values).all() for values in done["steps"][-1]["weights"].values())


@pytest.mark.parametrize("cut", [{}, TWO], ids=["1", "2"])
def test_nan_in_the_evidence_refuses_the_step(cut: Any, tmp_path: Path) -> None:
    def spoiled(prompts: list[str], trainer: Any) -> Any:
        rollout = sampler(scored=True)(prompts, trainer)
        if trainer.state.global_step == 1:
            rollout["logprobs"][3][0] = -float("inf")
        return rollout

    done = run(tmp_path, [CLIP, {"name": "importance_correction"}], sampling=spoiled, **ADAM, **cut)
    assert unmoved(*done["steps"][:2])
    assert not unmoved(*done["steps"][1:3])
    assert "1 in 'rollout_logprobs'" in done["refusal"]
    assert told(done, "steps/refused") == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("head", ["trl", "rlstab"])
@pytest.mark.parametrize("masked", [False, True], ids=["equal rewards", "all cut off"])
def test_a_step_without_gradient_is_taken_as_trl_takes_it(masked: bool, head: str, tmp_path: Path) -> None:
    """By momentum and weight decay. TRL masks what is cut off, so there is no token left."""

    def endless(prompts: list[str], trainer: Any) -> Any:
        rollout = sampler()(prompts, trainer)
        if trainer.state.global_step == 1:
            rollout["completion_ids"] = [[*ids[:-1], 5] for ids in rollout["completion_ids"]]
        return rollout

    def equal(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        return [float(sum(ids) % 7) if trainer_state.global_step != 1 else 1.0 for ids in completion_ids]

    given = {"sampling": endless if masked else None, "mask_truncated_completions": masked, **TWO, **ADAM}
    clip = {**CLIP, "high": 0.2}
    done = run(tmp_path, [clip], extra={"reward_funcs": equal, "head": head}, **given)
    assert done["steps"][1]["tokens"] == ((0.0, 8.0) if masked else done["steps"][1]["kept"])
    assert not unmoved(*done["steps"][:2])
    assert told(done, "steps/without_gradient") == [0.0, 1.0, 0.0, 0.0]
    if head == "trl":
        plain = run(tmp_path, extra={"reward_funcs": equal}, **given)
        assert all(same_weights(*steps) for steps in zip(plain["steps"], done["steps"], strict=True))


def test_the_learning_rate_is_scaled_for_one_step(tmp_path: Path) -> None:
    done = run(tmp_path, Trouble(kind="lr"), lr_scheduler_type="linear", max_steps=3)
    rates, steps = [line["learning_rate"] for line in done["log"][:3]], done["steps"]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert [line["rlstab/lr_scale"] for line in done["log"][:3]] == [1.0, 0.5, 1.0]
    for number, scale in ((1, 0.5), (2, 1.0)):
        for name, gradient in steps[number]["gradients"].items():
            wanted = steps[number - 1]["weights"][name] - rates[number] * scale * gradient
            assert torch.allclose(steps[number]["weights"][name], wanted, atol=1e-7)


def test_what_a_tool_wrote_is_no_token(tmp_path: Path) -> None:
    def with_tools(prompts: list[str], trainer: Any) -> Any:
        rollout = sampler()(prompts, trainer)
        rollout["env_mask"] = [[int(place != 1) for place in range(len(ids))] for ids in rollout["completion_ids"]]
        return rollout

    plain, masked = run(tmp_path, [CLIP], max_steps=1), run(tmp_path, [CLIP], max_steps=1, sampling=with_tools)
    assert masked["steps"][0]["tokens"][0] == plain["steps"][0]["tokens"][0] - 8
    trls = run(tmp_path, max_steps=1, sampling=with_tools)
    assert farthest(trls["steps"][0], masked["steps"][0]) == 0.0

    def earned(inputs: Any) -> Any:  # by the first token, in the second turn alone
        turn = turns_of(inputs["tool_mask"])
        seen.append(turn)
        return turn * (inputs["completion_ids"][:, :1] % 2.0)

    seen: list[Any] = []
    credit = [CLIP, {"name": "turn_credit"}]
    credited = run(tmp_path, credit, max_steps=1, sampling=with_tools, extra={"signals": {"turn_reward": earned}})
    assert int(seen[0].max()) == 1
    assert credited["log"][0]["rlstab/turn_credit/credit"] > 0
    assert farthest(credited["steps"][0], masked["steps"][0]) > 0.0
    with pytest.raises(
        MissingSignal, match=r"the objective reads 'turn_reward', .*turn_rewards.*signals=\{'turn_reward'"
    ):
        run(tmp_path, credit, max_steps=1)

    def with_rewards(prompts: list[str], trainer: Any) -> Any:
        rollout = with_tools(prompts, trainer)
        rollout["turn_rewards"] = [[0.0, float(ids[0] % 2)] for ids in rollout["completion_ids"]]
        return rollout

    given = run(tmp_path, credit, max_steps=1, sampling=with_rewards, **TWO)
    assert farthest(credited["steps"][0], given["steps"][0]) < 1e-6
    with pytest.raises(ShapeError, match="a response has 2 turns and 3 rewards of turns"):
        run(
            tmp_path, credit, max_steps=1, sampling=lambda *both: {**with_tools(*both), "turn_rewards": [[0.0] * 3] * 8}
        )


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    plain, checkpointed = (run(tmp_path, S2T, gradient_checkpointing=on, **TWO) for on in (False, True))
    assert all(farthest(*pair) == 0.0 for pair in zip(plain["steps"], checkpointed["steps"], strict=True))


@pytest.mark.parametrize("head", ["trl", "rlstab", "a whole reference model"])
def test_lora_and_the_reference_model(head: str, tmp_path: Path) -> None:
    """Only adapters have gradients; the reference is the model without them, so its first KL is 0."""
    given: dict[str, Any] = {"beta": 0.02, **TWO}
    if head in ("trl", "rlstab"):
        import peft

        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        given["extra"] = {"peft_config": adapters, "head": head}
    done = run(tmp_path, [*kl(estimator="k3_unbiased"), {"name": "s2t"}], **given)
    assert all("lora" in name for name in done["steps"][0]["gradients"]) == ("extra" in given)
    assert done["log"][0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert done["log"][3]["kl"] > 0.0


def test_generation_is_trls_and_evaluation_leaves_the_state_alone(tmp_path: Path) -> None:
    """With rlstab's head behind the model's forward."""
    objective = [CLIP, {"name": "adaptive_entropy", "target_entropy": 0.8}, {"name": "lp_reg"}]
    given = {"per_device_eval_batch_size": 4, "max_steps": 2}
    own = trainer_of(tmp_path, objective, extra={"rollout_func": None}, **given)
    own.train()
    assert own.state.log_history[0]["completions/mean_length"] > 0
    before = repr(own.objective_state)
    assert torch.isfinite(torch.tensor(own.evaluate()["eval_loss"]))
    assert repr(own.objective_state) == before
    log = own.state.log_history[-1]
    assert log["eval_entropy"] > 0
    assert log["eval_rlstab/tokens/kept"] == 1.0


def test_the_trainer_takes_arguments_by_place(tmp_path: Path) -> None:
    given = (model(), reward, config(tmp_path, beta=0.04), prompts())
    with pytest.raises(ConfigError, match="beta"):
        RLStabGRPOTrainer(*given, processing_class=tokenizer(), objective=[CLIP])
