"""An objective from the settings of TRL and verl, neither of which has to be installed."""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstab import load_objective
from rlstab.adapters.host_objective import deviations_of, objective_of, settings_of_trl, verl_deviations_of
from rlstab.cli import main
from rlstab.errors import ConfigError
from rlstab.hosts import facts
from tests.adapters.host_table import (
    DEVIATIONS,
    END,
    PAGE,
    START,
    TRL_END,
    TRL_PAGE,
    TRL_START,
    deviations,
    table,
)


def test_the_tables_of_the_pages_are_those_of_the_code() -> None:
    for page, start, end, made in ((PAGE, START, END, table()), (TRL_PAGE, TRL_START, TRL_END, deviations())):
        assert page.read_text(encoding="utf-8").partition(start)[2].partition(end)[0].strip() == made.strip()


def test_the_page_has_every_deviation_from_trl() -> None:
    """Each text of the function is a deviation if it has a colon."""
    code = ast.parse(textwrap.dedent(inspect.getsource(deviations_of)))
    texts = {each.value for each in ast.walk(code) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    known = {text for text in texts if re.match(r"\w+: .*\.$", text)}
    named = [deviations_of(settings_of_trl(settings)) for settings in DEVIATIONS]
    assert all(len(sentences) == 1 for sentences in named)
    assert {sentence for sentences in named for sentence in sentences} == known


#: Values that TRL refuses, sooner or later, each with the end of the error.
REFUSED_BY_TRL: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "dr-grpo"}, "Did you mean 'dr_grpo'"),
    ({"loss_type": "gspo"}, "Did you mean 'grpo'"),
    ({"loss_type": None}, "Known: bnpo"),
    ({"loss_type": "a loss of 2031"}, "Known: bnpo"),
    ({"importance_sampling_level": "sequnce"}, "Did you mean 'sequence'"),
    ({"importance_sampling_level": "sequence_token"}, "Did you mean 'sequence'"),
    ({"scale_rewards": "grop"}, "Did you mean 'group'"),
    ({"multi_objective_aggregation": "sum_then_normalise"}, "Did you mean 'sum_then_normalize'"),
    ({"vllm_importance_sampling_mode": "sequence-mask"}, "Did you mean 'sequence_mask'"),
    ({"beta": None}, "expected a number"),
    ({"beta": "0.04"}, "expected a number"),
    ({"entropy_coef": None}, "expected a number"),
    ({"epsilon": None}, "expected a number"),
    ({"top_entropy_quantile": None}, "expected a number"),
    ({"epsilon_high": "0.3"}, "expected a number"),
]


@pytest.mark.parametrize(("settings", "end"), REFUSED_BY_TRL)
def test_what_trl_refuses_is_refused_by_name(settings: dict[str, Any], end: str) -> None:
    ((name, value),) = settings.items()
    config = settings_of_trl(settings)
    for check in (objective_of, deviations_of):
        with pytest.raises(ConfigError, match=re.escape(f"GRPOConfig.{name} = {value!r}") + rf".*{end}"):
            check(config)


def test_what_trl_accepts_is_accepted() -> None:
    for name, values in facts("trl")["values"].items():
        for value in values:
            objective_of(settings_of_trl({name: value, **({"epsilon_high": 5.0} if value == "cispo" else {})}))
    objective_of(settings_of_trl({"max_completion_length": None, "epsilon": np.float32(0.25), "use_vllm": 1}))


def test_a_number_without_an_objective_is_told_with_the_objective() -> None:
    for settings, word in (({"top_entropy_quantile": -0.1}, "top_entropy, share: -0.1"), ({"beta": -1.0}, "kl")):
        with pytest.raises(ConfigError, match=f"no objective has these settings: .*{word}"):
            objective_of(settings_of_trl(settings))


@pytest.mark.parametrize(
    ("host", "text", "names"),
    [
        ("trl", "loss_type: luspo\nbeta: 0.1\nlearning_rate: 1e-6\n", ["clip_higher", "constant_length", "kl"]),
        ("trl", "loss_type: bnpo\ngradient_accumulation_steps: 8\n", ["clip_higher"]),
        ("verl", "actor_rollout_ref:\n  actor:\n    policy_loss: {loss_mode: gspo}\n", ["clip_higher", "gspo"]),
        ("verl", "actor:\n  entropy_coeff: 0.1\n  clip_ratio_low: null\n", ["clip_higher", "entropy_bonus"]),
        ("verl", "loss_agg_mode: seq-mean-token-mean\n", ["clip_higher", "sequence_mean"]),
    ],
)
def test_init_prints_an_objective_that_loads(
    host: str, text: str, names: list[str], tmp_path: Path, capsys: Any
) -> None:
    given, out = tmp_path / "settings.yaml", tmp_path / "objective.yaml"
    given.write_text(text)
    assert main(["init", f"--from-{host}", str(given)]) == 0
    printed = capsys.readouterr().out
    assert ("# nearly: bnpo" in printed) == ("bnpo" in text)
    assert main(["init", f"--from-{host}", str(given), "--out", str(out)]) == 0
    assert out.read_text() == printed
    assert list(load_objective(out).keyed) == names
    assert main(["init", f"--from-{host}", str(given), "--out", str(out)]) == 2  # it stays as it is


@pytest.mark.parametrize(
    ("host", "text", "word"),
    [
        ("trl", "epsilon: wide\n", "epsilon = 'wide', expected a number"),
        ("trl", "use_adaptive_entropy: 1\n", "expected true or false"),
        ("trl", "loss_type: drgrpo\n", "dr_grpo"),
        ("trl", "- loss_type: grpo\n", "settings of TRL by name"),
        ("trl", "loss_type: cispo\n", "The nearest is epsilon_high=1.0"),
        ("trl", "delta: 0.5\n", "The nearest is delta=1.01"),
        ("trl", "epsilon: .nan\n", "no objective has these settings"),
        ("trl", "top_entropy_quantile: 0.0\n", "objective.1.share"),
        ("trl", "rl: grpo\ntrl: {loss_type: dapo}\n", "below 'trl'"),
        ("verl", "clip_ratio_c: 1.0\n", "dual_clip"),
        ("verl", "policy_loss: {loss_mode: dro}\n", "loss_mode = 'dro'"),
        ("verl", "loss_agg_mode: token-sum\n", "loss_agg_mode = 'token-sum'"),
        ("verl", "loss_agg_mode: seq-mean-token-sum-norm\n", "Set loss_scale_factor"),
        ("verl", "use_kl_loss: true\nkl_loss_type: abs\n", "kl_loss_type = 'abs'"),
        ("verl", "clip_ratio: [0.2]\n", "expected a number"),
        ("verl", "kl_loss_type: null\n", "expected text"),
    ],
)
def test_what_no_objective_is_is_refused(host: str, text: str, word: str, tmp_path: Path, capsys: Any) -> None:
    given = tmp_path / "settings.yaml"
    given.write_text(text)
    assert main(["init", f"--from-{host}", str(given)]) == 2
    assert word in capsys.readouterr().err
    assert main(["init", "dapo", f"--from-{host}", str(given)]) == 2


@pytest.mark.parametrize(
    ("host", "objective", "text", "told"),
    [
        ("trl", "clip_higher", "loss_type: dapo\nlearning_rate: 1e-6\nuse_vllm: true\n", []),
        ("trl", "{name: kl, coefficient: 0.1}", "optim: lomo\nbeta: 0.2\n", ["optim = 'lomo'", "beta=0.1", "kl=False"]),
        ("trl", "clip_higher", "gradient_accumulation_steps: 3\nsteps_per_generation: 2\n", ["steps_per_generation=3"]),
        (
            *("trl", "clip_higher", "generation_batch_size: 4\nper_device_train_batch_size: 2\nnum_iterations: 2\n"),
            [],
        ),
        ("trl", "clip_higher", "num_iterations: 0\n", ["num_iterations = 0, expected a whole number"]),
        ("trl", "clip_higher", "per_device_train_batch_size: .nan\n", ["nan, expected a whole number"]),
        ("trl", "clip_higher", "loss_type: DAPO\n", ["is not a value that TRL 1.16 accepts. Did you mean 'dapo'?"]),
        ("verl", "clip_higher", "actor: {clip_ratio: 0.2, ppo_mini_batch_size: 64}\n", []),
        (
            *("verl", "clip_higher", "strategy: megatron\nuse_kl_loss: true\npolicy_loss: {dro_beta: 0.1}\n"),
            ["strategy=fsdp2", "actor.use_kl_loss=false", "policy_loss.dro_beta=null"],
        ),
        ("skyrl", "clip_higher", "trainer: {}\n", ["not of skyrl"]),
    ],
)
def test_check_says_which_settings_the_adapter_refuses(
    host: str, objective: str, text: str, told: list[str], tmp_path: Path, capsys: Any
) -> None:
    path, given = tmp_path / "objective.yaml", tmp_path / "settings.yaml"
    path.write_text(f"objective: [{objective}]")
    given.write_text(text)
    assert main(["check", str(path), "--host", host, "--settings", str(given)]) == (2 if told else 0)
    out, err = capsys.readouterr()
    assert [word for word in told if word not in err] == []
    assert ("its settings fit" in out) == (told == [])
    assert main(["check", str(path), "--settings", str(given)]) == 2


def test_what_is_nearly_verls_is_told() -> None:
    assert verl_deviations_of({}) == []
    for settings, count in (({"loss_mode": "kl_cov"}, 1), ({"loss_mode": "geo_mean", "use_kl_loss": True}, 2)):
        assert len(verl_deviations_of(settings)) == count
    assert objective_of(settings_of_trl({"delta": 1.1}))[0] == {
        **{"name": "clip_higher", "low": 0.2},
        **{"high": pytest.approx(0.1), "dual_clip": pytest.approx(1.2)},
    }
