"""What a user of TRL's trainer keeps: its loss from GRPOConfig, windows, logs, checkpoints, subclasses."""

import inspect
import json
import random
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from transformers import TrainerCallback
from trl import GRPOTrainer

from rlstab.adapters.setting_conflicts import check_trl_settings
from rlstab.adapters.trl import RLStabGRPOTrainer, deviations_of, objective_of
from rlstab.adapters.trl.responses import GROUP_IDS, SEQUENCE_IDS, distinct_ids, stamp_missing
from rlstab.cli import main
from rlstab.config import load_objective
from rlstab.errors import ConfigError, HostError, OutOfRange
from rlstab.hosts import facts
from rlstab.visible import in_error
from tests.adapters.jobs import farthest, largest, model, same_weights
from tests.adapters.trl_jobs import config, prompts, recorder, reward, run, sampler, trainer_of

pytestmark = pytest.mark.filterwarnings("default")

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2}
ADAM = {"optim": "adamw_torch", "learning_rate": 0.003, "max_steps": 3}
SEQUENCE = {"importance_sampling_level": "sequence"}


def trained(kind: Any, folder: Path, *, given: Any = None, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer of this class after its run on fixed responses, and its steps."""
    trainer = trainer_of(folder, kind=kind, extra=given, **changes)
    steps = recorder(trainer)
    trainer.train()
    return trainer, steps


def keys(trainer: Any) -> set[str]:
    return {key for line in trainer.state.log_history for key in line}


#: GRPOConfig, and the bound of the weights' distance; 0.0 is bit for bit.
SETTINGS: list[tuple[dict[str, Any], float]] = [
    ({}, 0.0),
    ({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.15, "mask_truncated_completions": True}, 0.0),
    # 6e-7 of the first gradient, which Adam amplifies: 6e-5 in weights with TRL 1.16, 1.3e-4 with 1.12 to 1.14
    ({"loss_type": "grpo", **SEQUENCE, "epsilon": 0.01, "mask_truncated_completions": True}, 2e-4),
    ({"loss_type": "dr_grpo", "delta": 4.0, "top_entropy_quantile": 0.5}, 1e-5),
    ({"loss_type": "cispo", "epsilon_high": 2.0}, 1e-5),
    ({"loss_type": "sapo", "sapo_temperature_neg": 2.0, "mask_truncated_completions": True}, 1e-5),
    ({"loss_type": "vespo", "vespo_k_pos": 1.5, "beta": 0.05, "use_bias_correction_kl": False}, 1e-5),
    ({"loss_type": "luspo", **SEQUENCE, "off_policy_mask_threshold": 0.02, "entropy_coef": 0.05}, 1e-5),
    ({"loss_type": "bnpo", "entropy_coef": 0.03, "beta": 0.2}, 1e-5),
]


@pytest.mark.parametrize(
    ("settings", "bound"),
    SETTINGS,
    ids=lambda each: str(each.get("loss_type", "dapo")) if isinstance(each, dict) else "",
)
def test_without_an_objective_it_trains_as_trl_does(settings: Any, bound: float, tmp_path: Path) -> None:
    (plain, before), (own, after) = (
        trained(kind, tmp_path, **ADAM, **settings) for kind in (GRPOTrainer, RLStabGRPOTrainer)
    )
    assert deviations_of(own.args) == []
    weights, others = before[-1]["weights"], after[-1]["weights"]
    assert max(float((values - others[name]).abs().max()) for name, values in weights.items()) <= bound
    assert largest(before[0]) > 1e-3
    assert keys(plain) - keys(own) <= {"clip_ratio/low_min", "clip_ratio/high_max"}
    for first, second in zip(plain.state.log_history[:3], own.state.log_history[:3], strict=True):
        for name in ("entropy", "kl", "policy_loss", "entropy_coef", "cispo_clip_ratio", "vespo/phi_seq_mean"):
            assert (name in first) == (name in second)
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name
    assert own.entropy_coef == plain.entropy_coef


#: Likewise, without the log: more than one kind of term at once.
MORE: list[tuple[dict[str, Any], float]] = [
    ({**SEQUENCE, "loss_type": "cispo", "epsilon_high": 5.0, "top_entropy_quantile": 0.5}, 1e-5),
    ({"off_policy_mask_threshold": 0.001, "beta": 0.1}, 1e-5),
    ({"delta": 1.1, "epsilon_high": 0.4, "num_iterations": 3}, 0.0),
    ({"loss_type": "dr_grpo", "temperature": 0.7, "scale_rewards": False, "mask_truncated_completions": True}, 0.0),
    ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch", "epsilon": 0.0}, 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "bound"), MORE)
def test_settings_together_train_as_trl_does(settings: Any, bound: float, tmp_path: Path) -> None:
    # at a higher rate, rounding alone drives two runs apart
    given = {**ADAM, "learning_rate": 0.0003, **settings}
    (_, before), (own, after) = (trained(kind, tmp_path, **given) for kind in (GRPOTrainer, RLStabGRPOTrainer))
    assert deviations_of(own.args) == []
    weights, others = before[-1]["weights"], after[-1]["weights"]
    assert max(float((values - others[name]).abs().max()) for name, values in weights.items()) <= bound
    assert largest(before[0]) > 1e-3


def test_every_text_that_trl_compares_is_known() -> None:
    source = inspect.getsource(inspect.getmodule(GRPOTrainer))  # type: ignore[arg-type]  # never None for a class of a file
    for name, values in facts("trl")["values"].items():
        compared = re.findall(rf"self\.{name} (?:==|!=|in) (\[[^]]*\]|\"\w+\")", source)
        assert {text for each in compared for text in re.findall(r"\w+", each)} == set(values) - {True, False}, name


@pytest.mark.parametrize("settings", [{"loss_type": "dr-grpo"}, {**SEQUENCE, "importance_sampling_level": "sequnce"}])
def test_a_text_that_trl_does_not_know_is_refused_before_training(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown"):
        trained(GRPOTrainer, tmp_path, **settings)
    for objective in (None, [CLIP]):
        with pytest.raises(ConfigError, match=r"is not a value that TRL 1\.16 accepts\. Did you mean "):
            RLStabGRPOTrainer(model(), reward, config(tmp_path, **settings), prompts(), objective=objective)


def test_a_sequence_level_with_its_top_entropy_is_declared_and_differs(tmp_path: Path) -> None:
    settings = {**SEQUENCE, "loss_type": "grpo", "top_entropy_quantile": 0.5, "max_steps": 1}
    (_, before), (own, after) = (trained(kind, tmp_path, **settings) for kind in (GRPOTrainer, RLStabGRPOTrainer))
    assert [sentence.partition(":")[0] for sentence in deviations_of(own.args)] == ["gspo"]
    assert farthest(before[0], after[0]) > 0.01 * largest(before[0])


CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


@pytest.mark.parametrize("delta", [1.1, 1.4])
def test_what_delta_stops_is_not_clipped_as_in_trl(delta: float, tmp_path: Path) -> None:
    settings = {"epsilon_high": 0.4, "delta": delta, "epsilon": 0.1}
    (plain, _), (own, _) = (trained(kind, tmp_path, **ADAM, **settings) for kind in (GRPOTrainer, RLStabGRPOTrainer))
    for first, second in zip(plain.state.log_history[:3], own.state.log_history[:3], strict=True):
        assert [second[name] for name in CLIPPED] == pytest.approx([first[name] for name in CLIPPED], abs=1e-6)
    assert own.state.log_history[1]["clip_ratio/low_mean"] > 0
    assert own.state.log_history[1]["rlstab/ratio/clipped_delta"] > 0


def test_a_line_without_tokens_has_trls_metrics(tmp_path: Path) -> None:
    def endless(asked: list[str], trainer: Any) -> dict[str, Any]:
        rollout = sampler()(asked, trainer)
        return {**rollout, "completion_ids": [[*ids[:-1], 5] for ids in rollout["completion_ids"]]}

    settings = {"mask_truncated_completions": True, "beta": 0.1, "entropy_coef": 0.1, "max_steps": 2}
    given = {"rollout_func": endless}
    (plain, _), (own, _) = (
        trained(kind, tmp_path, given=given, **settings) for kind in (GRPOTrainer, RLStabGRPOTrainer)
    )
    for first, second in zip(plain.state.log_history[:2], own.state.log_history[:2], strict=True):
        assert first.keys() - second.keys() <= {"clip_ratio/low_min", "clip_ratio/high_max"}
        for name in ("entropy", "kl", "policy_loss", *CLIPPED):
            assert second[name] == first[name] == 0.0, name


def gmpo() -> type:
    """TRL's trainer of GMPO, which has a loss of its own."""
    kind: type = pytest.importorskip("trl.experimental.gmpo", reason="this TRL has no GMPO").GMPOTrainer
    return kind


def test_an_objective_that_a_subclass_would_leave_without_effect_is_refused(tmp_path: Path) -> None:
    class Own(RLStabGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            return next(model.parameters()).sum()

    class Public(RLStabGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            return next(model.parameters()).sum()

    class More(RLStabGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            return super()._compute_loss(model, inputs) * 2

    given = (model(), reward, config(tmp_path), prompts())
    for kind, owner in ((Own, "Own"), (type("Deeper", (Own,), {}), "Own"), (Public, "Public")):
        for base in (None, "config"):
            with pytest.raises(HostError, match=rf"^{owner} overrides _?compute_loss, so the objective"):
                kind(*given, objective=[CLIP], base=base)
    loss = [
        float(trained(kind, tmp_path, given={"objective": [CLIP]}, max_steps=1)[0].state.log_history[0]["grad_norm"])
        for kind in (RLStabGRPOTrainer, More)
    ]
    assert loss[1] == pytest.approx(2 * loss[0], rel=1e-5)


def test_a_trainer_of_trl_with_a_loss_of_its_own(tmp_path: Path) -> None:
    both, other = type("Both", (gmpo(), RLStabGRPOTrainer), {}), type("Other", (RLStabGRPOTrainer, gmpo()), {})
    given = {"objective": [CLIP]}
    with pytest.raises(HostError, match=r"^GMPOTrainer overrides _compute_loss, so the objective"):
        trained(both, tmp_path, given=given)
    with pytest.raises(
        HostError, match=r"^GMPOTrainer overrides _compute_loss, which would have no effect. Name GMPOTrainer before"
    ):
        trained(other, tmp_path)
    runs = [trained(kind, tmp_path, **ADAM)[1] for kind in (gmpo(), both)]
    assert all(same_weights(*pair) for pair in zip(*runs, strict=True))


def test_another_base_or_head_is_refused_with_the_nearest(tmp_path: Path) -> None:
    given = (model(), reward, config(tmp_path), prompts())
    for argument, text, nearest in (("base", "conf", "config"), ("head", "rlstb", "rlstab")):
        wrong: dict[str, Any] = {argument: text}
        with pytest.raises(OutOfRange, match=f"RLStabGRPOTrainer: {argument} = '{text}'. Did you mean '{nearest}'"):
            RLStabGRPOTrainer(*given, objective=[CLIP], **wrong)


def test_what_is_nearly_trls_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    for settings, word in [
        ({"loss_type": "bnpo", **cut}, "bnpo"),
        ({"top_entropy_quantile": 0.3, **cut}, "top_entropy"),
        ({"entropy_coef": 0.1, "loss_type": "grpo", **cut}, "entropy"),
        ({"use_adaptive_entropy": True}, "adaptive_entropy"),
        ({"beta": 0.1, **SEQUENCE}, "kl"),
        ({"loss_type": "vespo", "use_vllm": True}, "vespo"),
        ({"top_entropy_quantile": 0.3, "loss_type": "luspo", **SEQUENCE}, "gspo"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", **SEQUENCE}, "gspo"),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, "tokens"),
    ]:
        (sentence,) = deviations_of(config(tmp_path, **settings))
        assert sentence.startswith(f"{word}: ")
    for settings in ({"loss_type": "cispo"}, {"loss_type": "cispo", "epsilon_high": 0.9}, {"delta": 0.7}):
        with pytest.raises(ConfigError, match="The nearest is "):
            objective_of(config(tmp_path, **settings))
    told: list[str] = []
    monkeypatch.setattr("rlstab.adapters.trl.hooks.logger.warning", told.append)
    filtered = {"top_p": 0.9, "min_p": 0.05}
    given = {"loss_type": "bnpo", "epsilon": 0.1, **cut, **filtered}
    trainer = trainer_of(tmp_path, [{"name": "s2t"}], extra={"base": "config"}, **given)
    assert [len(told), "bnpo" in told[0], "top_p=0.9, min_p=0.05 renormalises" in told[1]] == [2, True, True]
    assert trainer.objective.keyed["clip_higher"].low == 0.1
    assert list(trainer.objective.keyed) == ["clip_higher", "s2t"]


#: Several wrong settings, with an objective that they contradict, and words of the error.
WRONG: list[tuple[dict[str, Any], list[dict[str, Any]], list[str]]] = [
    ({"epsilon": 0.3, "beta": 0.1, "loss_type": "dr_grpo"}, [CLIP], ["epsilon", "beta", "loss_type"]),
    ({"off_policy_mask_threshold": 0.5, "optim": "lomo"}, [CLIP, {"name": "kl"}], ["off_policy", "optim", "beta"]),
    ({"use_adaptive_entropy": True, "entropy_coef": 0.01}, [CLIP], ["use_adaptive_entropy", "entropy_coef"]),
    ({"loss_type": "luspo", "top_entropy_quantile": 0.2, "delta": 1.1}, [CLIP], ["luspo", "top_entropy", "delta"]),
    (
        {"beta": 0.04, "epsilon_high": 0.4},
        [CLIP, {"name": "kl", "coefficient": 0.02}],
        ["beta", "use_bias_correction_kl"],
    ),
    ({"use_bias_correction_kl": False, "delta": 9.0}, [CLIP], ["use_bias_correction_kl", "delta"]),
    ({"use_vllm": True, "loss_type": "vespo"}, [{"name": "vespo"}], ["'vespo' excludes it", "loss_type"]),
    (
        {"use_vllm": True, "epsilon": 0.1},
        [CLIP, {"name": "importance_correction"}],
        ["'importance_correction'", "epsilon"],
    ),
    (
        {"per_device_train_batch_size": 2, "generation_batch_size": 4, "gradient_accumulation_steps": 3, "beta": 0.1},
        [CLIP],
        ["span generations", "beta"],
    ),
    ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, [CLIP], ["No objective is what they say"]),
]


@pytest.mark.parametrize(("settings", "objective", "words"), WRONG)
def test_all_wrong_settings_are_told_and_the_advice_is_accepted(
    settings: Any, objective: Any, words: Any, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trl_settings(config(tmp_path, **settings), load_objective(objective))
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    file, path = tmp_path / "grpo.yaml", tmp_path / "objective.yaml"
    path.write_text(json.dumps({"objective": objective}))
    like = {"num_generations": 4, "num_iterations": 2, "max_completion_length": 12, "optim": "sgd", **settings}
    file.write_text(json.dumps(like))
    command = ["check", str(path), "--host", "trl", "--settings", str(file)]
    assert main(command) == 2
    assert capsys.readouterr().err == in_error(f"ConfigError: {text}") + "\n"
    (lines,) = re.findall(r"^  Write (.*)\.$", text, flags=re.MULTILINE)
    file.write_text(json.dumps({**like, **eval(f"dict({lines})")}))
    assert main(command) == 0
    check_trl_settings(config(tmp_path, **{**settings, **eval(f"dict({lines})")}), load_objective(objective))
    for pasted, more in re.findall(r"objective=(\[.*\])(?:, with (.*))?\.$", text, flags=re.MULTILINE):
        check_trl_settings(config(tmp_path, **{**settings, **eval(f"dict({more})")}), load_objective(eval(pasted)))


def test_check_says_what_grpoconfig_needs_and_the_trainer_accepts_it(tmp_path: Path, capsys: Any) -> None:
    for objective, vllm in [
        ("clip_higher, {name: kl, coefficient: 0.3, estimator: k2}", False),
        ("clip_higher, {name: kl, coefficient: 0.01, estimator: k3_unbiased}", False),
        ("{name: dppo}", True),
        ("clip_higher, off_policy_mask", True),
    ]:
        path = tmp_path / "objective.yaml"
        path.write_text(f"objective: [{objective}]")
        assert main(["check", str(path), "--host", "trl"]) == 0
        (lines,) = re.findall(r"^GRPOConfig: (.*)$", capsys.readouterr().out, flags=re.MULTILINE)
        check_trl_settings(config(tmp_path, use_vllm=vllm, **eval(f"dict({lines})")), load_objective(path))


@pytest.mark.parametrize(("slices", "iterations", "count"), [(1, 2, 2), (2, 3, 6), (2, 3, 2), (4, 3, 6), (4, 1, 2)])
def test_every_window_within_a_generation_trains_as_trl(
    slices: int, iterations: int, count: int, tmp_path: Path
) -> None:
    """Also where a step takes its generation several times, or ends in the middle of one."""
    given = {"per_device_train_batch_size": 8 // slices, "num_generations": 2, "max_steps": 3, "optim": "adamw_torch"}
    given |= {"steps_per_generation": slices, "num_iterations": iterations, "gradient_accumulation_steps": count}
    # responses of one length: TRL divides by the tokens of the generation, scaled to a step
    plain = run(tmp_path, sampling=even, **given)
    own = run(tmp_path, [CLIP], sampling=even, **given)
    assert farthest(plain["steps"][0], own["steps"][0]) < 1e-6 * largest(plain["steps"][0])
    assert all(same_weights(*pair) for pair in zip(plain["steps"], own["steps"], strict=True))
    masked = run(tmp_path, [CLIP, {"name": "random_mask", "share": 0.4}], sampling=even, **given)
    assert sum(step["tokens"][0] - step["kept"][0] for step in masked["steps"]) > 0


def even(asked: list[str], trainer: Any) -> dict[str, Any]:
    rollout = sampler()(asked, trainer)
    return {**rollout, "completion_ids": [(ids * 4)[:6] for ids in rollout["completion_ids"]]}


def test_a_generation_taken_twice_in_a_step_is_cut_as_one_pleases(tmp_path: Path) -> None:
    objective = [CLIP, {"name": "random_mask", "share": 0.4}, {"name": "s2t"}]
    whole, parts = (
        run(
            tmp_path,
            objective,
            steps_per_generation=slices,
            gradient_accumulation_steps=2 * slices,
            **{"max_steps": 2, "per_device_train_batch_size": 8 // slices},
        )
        for slices in (1, 4)
    )
    for first, second in zip(whole["steps"], parts["steps"], strict=True):
        assert first["kept"] == second["kept"]
        assert farthest(first, second) < 1e-5 * max(1.0, largest(first))


class Asks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            control.should_log = control.should_save = True


def test_no_metric_is_lost_and_every_checkpoint_has_the_state(tmp_path: Path) -> None:
    """A line at the end, one that a callback added later asks for, and a checkpoint without an optimizer."""
    objective = [CLIP, {"name": "adaptive_entropy", "target_entropy": 9.0}]
    given = {"logging_steps": 10, "max_steps": 5, "save_strategy": "steps", "save_steps": 4, "save_only_model": True}
    trainer = trainer_of(tmp_path, objective, **given)
    trainer.add_callback(Asks())
    trainer.train()
    lines = [line for line in trainer.state.log_history if "rlstab/steps/refused" in line]
    assert [line["step"] for line in lines] == [2, 5]
    assert all({"entropy", "clip_ratio/low_mean", "policy_loss", "entropy_coef"} <= line.keys() for line in lines)
    for number in (2, 4):
        folder = tmp_path / f"checkpoint-{number}"
        assert not (folder / "optimizer.pt").exists()
        resumed = trainer_of(tmp_path / "again", objective, max_steps=number + 1)
        resumed.train(resume_from_checkpoint=str(folder))
        assert resumed.state.global_step == number + 1
        price = resumed.objective_state["adaptive_entropy"]["next_coefficient"]
        assert price == pytest.approx(0.0001 * (number + 1))
    trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "rlstab.json").exists()


KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")
NAME = "_get_per_token_logps_and_entropies"


@pytest.mark.parametrize("kind", ["args", "named", "deeper", "trl"])
def test_a_subclass_with_a_batch_and_a_forward_of_its_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch has no identities; what the model gets with its tokens arrives, however the override is declared."""
    seen: list[bool] = []

    class Takes(RLStabGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            out = {name: out[name] for name in (*KEPT, "old_per_token_logps")}
            return out | {"token_type_ids": torch.zeros_like(torch.cat([out["prompt_ids"], out["completion_ids"]], 1))}

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append(kwargs.pop("token_type_ids", None) is not None)
        return getattr(super(Takes, self), NAME)(*args, **kwargs)

    def named(self: Any, model: Any, *args: Any, token_type_ids: Any = None, **others: Any) -> Any:
        return noted(self, model, *args, token_type_ids=token_type_ids, **others)

    if kind == "trl":
        before = getattr(GRPOTrainer, NAME)

        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                seen.append(kwargs.pop("token_type_ids", None) is not None)
            return before(self, *args, **kwargs)

        patched.__module__ = "trl.patched"
        patched.__wrapped__ = before  # type: ignore[attr-defined]  # as functools.wraps sets it
        monkeypatch.setattr(GRPOTrainer, NAME, patched)
    else:
        setattr(Takes, NAME, named if kind == "named" else noted)
    used = type("Deeper", (Takes,), {}) if kind == "deeper" else Takes
    given = {"objective": [CLIP, {"name": "random_mask", "share": 0.5}]}
    _, steps = trained(
        used, tmp_path, given=given, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2
    )
    assert seen == [True] * 4
    assert all(0 < step["kept"][0] < step["tokens"][0] for step in steps)


def test_missing_identities_are_made_and_repeated_ones_told_apart() -> None:
    def part(*prompts: int) -> dict[str, Any]:
        ids = torch.tensor([[0, prompt] for prompt in prompts])
        return {"prompt_ids": ids, "prompt_mask": (ids > 0).long(), "completion_ids": ids}

    parts = [part(7, 8), part(7), part(8, 9)]
    for rank in (0, 1):
        mine = [dict(each) for each in parts]
        stamp_missing(mine, step=3, rank=rank, ranks=2)
        first = (3 * 2 + rank) * 5
        assert torch.cat([each[SEQUENCE_IDS] for each in mine]).tolist() == list(range(first, first + 5))
        groups = torch.cat([each[GROUP_IDS] for each in mine]).tolist()
        assert [groups.index(group) for group in groups] == [0, 1, 0, 1, 4]
        again = [*mine, *mine]
        stamp_missing(again, step=9, rank=rank, ranks=2)
        ids = torch.cat(distinct_ids(again))
        assert ids[:5].tolist() == list(range(first, first + 5))
        assert len(ids.unique()) == 10


def test_compute_loss_by_hand_and_what_follows_it(tmp_path: Path) -> None:
    """In training mode and in evaluation, before and after a run; it changes no state."""
    objective = [CLIP, {"name": "adaptive_entropy", "target_entropy": 9.0, "initial": 0.001}]
    pair = trainer_of(tmp_path), trainer_of(tmp_path, objective), trainer_of(tmp_path, [CLIP])
    losses = []
    for trainer in pair:
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        inputs = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(float(loss))
        trainer.model.eval()
        assert torch.isfinite(trainer.compute_loss(trainer.model, inputs))
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)
    assert losses[1] < losses[2]
    before = repr(pair[1].objective_state)
    assert before == repr(pair[1].objective.init_state())
    pair[1].train()
    after = repr(pair[1].objective_state)
    pair[1].model.train()
    pair[1].compute_loss(pair[1].model, inputs)
    assert repr(pair[1].objective_state) == after != before


@pytest.mark.parametrize("value", [0.02, 3.0, float("inf"), float("nan")])
def test_a_sampler_value_that_is_no_log_prob_is_unscored(value: float, tmp_path: Path) -> None:
    def off(asked: list[str], trainer: Any) -> dict[str, Any]:
        rollout = sampler(scored=True)(asked, trainer)
        for row in rollout["logprobs"][::2]:
            row[1] = value
        return rollout

    done = run(tmp_path, [CLIP, {"name": "importance_correction"}], sampling=off, max_steps=1)
    assert done["refusal"] is None
    assert done["log"][0]["rlstab/sampler/unscored"] == pytest.approx(4 / done["steps"][0]["tokens"][0])


def scored_nearly(noise: float) -> Any:
    """A ``rollout_func`` with fixed responses, whose log-probs are the policy's, with noise."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        given, draw = sampler()(prompts, trainer), random.Random(trainer.state.global_step)
        logprobs = []
        for prompt, response in zip(given["prompt_ids"], given["completion_ids"], strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            exact = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
            logprobs.append([min(0.0, value + draw.gauss(0, noise)) for value in exact])
        return {**given, "logprobs": logprobs}

    return rollout


def test_the_off_policy_mask_with_trls_correction_and_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's default correction drops responses whose ratio to the sampler is above a bound, and weights the others."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", MagicMock())
    mask, bound = {"name": "off_policy_mask", "max_gap": 0.02}, {"vllm_importance_sampling_clip_max": 1.2}
    ours = {"name": "importance_correction", "level": "sequence", "max_weight": None, "keep_high": 1.2}
    off = {"vllm_importance_sampling_correction": False}

    def steps(*methods: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
        objective = [CLIP, *methods] if methods else None
        given = {"use_vllm": True, "sampling": scored_nearly(0.2), "max_steps": 2, **bound, **settings}
        return run(tmp_path, objective, **given)["steps"]

    plain = steps(off_policy_mask_threshold=0.02)
    assert all(map(same_weights, plain, steps(mask)))
    for step, other in zip(plain, steps(mask, ours, **off), strict=True):
        assert farthest(step, other) <= 1e-6 * largest(step)
    for others in (steps(mask, **off), steps(ours, **off)):  # each of the two acts
        assert farthest(plain[0], others[0]) > 0.01 * largest(plain[0])
