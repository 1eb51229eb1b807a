"""What a dump says of its loss becomes the objective that was trained, with methods of the user's too.

The losses here are written as TRL writes them, by autograd, and share no code with the judge's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlstab import TokenBatch, load_objective
from rlstab.adapters.host_correction import CORRECTION
from rlstab.adapters.host_objective import objective_of, settings_of_trl
from rlstab.cli import main
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.errors import ConfigError
from rlstab.look.alternatives import own_objective
from rlstab.look.gradient import traces_of
from rlstab.look.host_loss import judge
from rlstab.look.recorded_loss import Formula, host_settings, loss_of, with_code
from rlstab.record import HostLoss, Step, write_dump
from rlstab.record.effects import what_methods_did
from rlstab.record.writer import settings_of, tensors_of
from tests.replay.dumps import BOTH, RANKS, SETTINGS, VERL, step, told

MASKS: dict[str, Any] = {
    "top_entropy_quantile": {"top_entropy_quantile": 0.3},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.01},
    "use_adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1},
    "entropy_coef": {"entropy_coef": 0.1, "loss_type": "grpo"},
    "delta": {"delta": 1.1},
    **{kind: {"loss_type": kind} for kind in ("sapo", "vespo", "luspo", "dr_grpo")},
}


def trl(given: Step, settings: dict[str, Any]) -> Step:
    """With TRL's loss of these settings, without weights outside its formula."""
    tensors = {name: values for name, values in given.tensors.items() if name != "weights"}
    loss = HostLoss(name=f"trl/{settings.get('loss_type', 'dapo')}", settings=settings)
    return replace(given, tensors=tensors, header=given.header.model_copy(update={"loss": loss, "host": "trl 1.16.0"}))


@pytest.mark.parametrize("name", MASKS)
def test_the_objective_of_a_dump_is_that_of_the_adapter(name: str) -> None:
    given = trl(step(1), MASKS[name])
    adapter = load_objective(objective_of(settings_of_trl(MASKS[name])))
    found = {member.name: member for member in own_objective([given]).members}
    assert [found[member.name] for member in adapter.members] == list(adapter.members)
    assert found.keys() - {member.name for member in adapter.members} <= {"token_mean"}
    assert {"kl", "host_correction"}.isdisjoint(found)


def with_gradient(given: Step, per_token: Any) -> Step:
    """With the coefficients of a loss that is a mean over each response, then over the responses of a micro-batch."""
    live = given.tensors["logprobs"].clone().requires_grad_()
    mask, row, parts = given.tensors["mask"], given.row, given.tensors["parts"]
    loss: Tensor = per_token(live - given.tensors["old_logprobs"], given.tensors["advantages"], live) * mask
    counts = torch.zeros(len(parts)).index_add(0, row, mask.float())
    sums = torch.zeros(len(parts)).index_add(0, row, loss) / counts.clamp(min=1)
    responses = torch.bincount(parts)[parts] * (len(given.ranks) // RANKS)
    (slopes,) = torch.autograd.grad((sums / responses).sum(), live)
    return given.having({"coefficients": slopes})


def sapo(log_ratio: Tensor, advantages: Tensor, live: Tensor) -> Tensor:
    temperature = torch.where(advantages > 0, 0.8, 1.4)
    return -torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature * advantages


def test_a_loss_without_a_formula_is_compared_by_its_gradient() -> None:
    settings = {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.4}
    right = with_gradient(trl(step(1), settings), sapo)
    verdict = judge([right])
    assert (verdict.name, verdict.agrees, verdict.findings) == ("trl/sapo", True, ())
    # an older dump has no temperatures, so that a difference says nothing of the trainer
    older = told(right, settings=BOTH)
    assert judge([older]).agrees is None
    assert "lacks settings" in judge([older]).sentence
    assert "lacks settings" in own_objective([older]).told


@pytest.mark.slow
def test_an_error_of_a_loss_without_a_formula_is_named() -> None:
    settings = {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.4}
    right = with_gradient(trl(step(1), settings), sapo)
    wrong = judge([right.having({"coefficients": right.tensors["coefficients"] / 4})])
    assert wrong.findings == ("It was divided by the gradient accumulation twice.",)
    assert judge([trl(right, settings | {"sapo_temperature_neg": 1.0})]).agrees is False


def test_responses_without_tokens_count_as_in_trl() -> None:
    given = trl(step(1), {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.4})
    empty = given.having({"mask": torch.where(given.row == 3, 0, given.tensors["mask"])})
    assert judge([with_gradient(empty, sapo)]).agrees
    methods = [{"name": "sapo", "positive": 0.8, "negative": 1.4}, {"name": "sequence_mean"}]
    adapted = told(with_gradient(empty, sapo), name="rlstab", settings={"objective": methods})
    assert judge([adapted]).agrees


def test_words_of_earlier_dumps_are_the_settings_of_the_host() -> None:
    words = {"sequence": True, "tokens": 50.0, "rewards": "group", "group": 4}
    assert host_settings("trl", SETTINGS | words) == {
        **{"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.35, "beta": 0.05, "max_completion_length": 12},
        **{"importance_sampling_level": "sequence", "use_bias_correction_kl": True, "num_items_in_batch": 50.0},
        **{"scale_rewards": "group", "num_generations": 4},
    }
    words = {"sequence": False, "estimator": "k3", "rewards": ""}
    assert host_settings("trl", words) == {
        **{"importance_sampling_level": "token", "use_bias_correction_kl": False},
        **{"multi_objective_aggregation": "normalize_then_sum"},
    }
    assert host_settings("verl", VERL) == VERL
    for settings in ({"epsilon": "wide"}, {"steps_per_generation": 0}, {"pi": 3}, {"bound": 7}, {"low": [0.2]}):
        assert loss_of(told(step(1), settings=settings)) is None
    for name in ("verl/dro", "verl/vanilla with more", "trl/pi", "trl/pi with more"):
        assert loss_of(told(step(1), name=name, settings={})) is None


def test_a_cap_of_the_ratio_is_a_field_that_errors_can_leave_out() -> None:
    loss = loss_of(trl(step(1), {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.2}))
    assert loss is not None
    assert loss.formula == Formula(low=0.1, high=0.3, cap=1.2, length=512)
    # cispo's cap may be below 1 in TRL alone
    narrow = loss_of(trl(step(1), {"loss_type": "cispo"}))
    assert narrow is not None
    assert narrow.formula is not None
    assert (narrow.formula.high, narrow.formula.weight) == (0.2, True)
    assert "largest ratio is 0.2" in narrow.nearly[-1]


def test_weights_of_a_host_are_recorded() -> None:
    padded = {"response_mask": torch.ones(1, 3), "advantages": torch.ones(1), "old_logprobs": -torch.ones(1, 3)}
    batch = TokenBatch.from_padded(**padded, extra={CORRECTION: torch.tensor([[0.5, 1.0, 2.0]])})
    tensors = tensors_of(batch, PolicyOutputs(batch.logprobs), torch.tensor([[5, 6, 7]]))
    assert tensors["weights"].tolist() == [0.5, 1.0, 2.0]


# -- user-defined methods ----------------------------------------------------------------------------------------------

CODE = '''
from pathlib import Path

import torch

from rlstab import Bounds, Gate, Penalty, Terms, TokenObjective

Path(__file__).with_name("ran").touch()


class Mine(TokenObjective):
    """All that a record can tell, and a state."""

    name = "mine"
    needs = {"logprobs"}
    writes = {"keep", "weight", "bonus", "gates"}

    def init_state(self):
        return {"count": 0.0}

    def terms(self, batch, stat, state):
        half = torch.where(batch.logprobs < -1.0, 0.5, 1.0)
        gate = Gate(lambda ratio, constants: 1 / ratio)
        return Terms(keep=batch.logprobs > -3.0, weight=half, bonus=0.1 * half, gates={"": gate})


class Bound(TokenObjective):
    """A clip."""

    name = "bound"
    writes = {"bounds"}

    def terms(self, batch, stat, state):
        return Terms(bounds=Bounds(0.1, 0.1))


class Paid(TokenObjective):
    """A penalty on some tokens."""

    name = "paid"
    needs = {"logprobs"}
    writes = {"penalties"}

    def terms(self, batch, stat, state):
        return Terms(penalties={"": Penalty(0.1, lambda live, anchor: live.logprobs**2, batch.logprobs < -2.0)})


class Twice(TokenObjective):
    """What no record tells."""

    name = "twice"
    writes = {"aggregate"}

    def terms(self, batch, stat, state):
        return Terms(aggregate=lambda sequence, counted, rows, totals: 2 * counted.double() / totals.tokens)
'''


def own_dump(folder: Path, *items: Any) -> Step:
    """A step that was trained by an objective with methods of ``methods.py``; the file is then as if never loaded."""
    code = folder / "methods.py"
    code.write_text(CODE)
    objective = load_objective(json.loads(json.dumps(items).replace("methods.py", str(code))))
    given = step(1)
    state = objective.init_state()
    plan = make_plan(objective, [given.batch], state)
    live = given.live
    (slopes,) = torch.autograd.grad(plan.loss(0, live).loss, live.logprobs)
    zeros = torch.zeros(len(given.mask))
    did = {
        name: zeros.masked_scatter(given.mask, values) for name, values in what_methods_did(plan, 0, given.live).items()
    }
    tensors = {name: values for name, values in given.tensors.items() if name != "weights"}
    tensors |= did | {"coefficients": zeros.masked_scatter(given.mask, RANKS * slopes)}
    told = HostLoss(name="rlstab", settings=settings_of(objective, state))
    (folder / "ran").unlink()
    code.rename(folder / "elsewhere.py")
    return replace(given, tensors=tensors, header=given.header.model_copy(update={"loss": told}))


CLIP: dict[str, Any] = {"name": "clip_higher", "low": 0.1, "high": 0.1}


@pytest.mark.parametrize(
    ("items", "compared"),
    [
        ([CLIP, {"name": "s2t", "max_prob": 0.5}, {"name": "methods.py:Mine"}], "all tokens"),
        ([{"name": "methods.py:Bound"}, {"name": "kl", "coefficient": 0.1}], "all tokens"),
        ([CLIP, {"name": "methods.py:Paid"}], "52 of 100 tokens"),
        ([CLIP, {"name": "within", "outer": {"name": "s2t"}, "inner": {"name": "methods.py:Mine"}}], "all tokens"),
        ([CLIP, {"name": "observe", "method": {"name": "methods.py:Mine"}}], "all tokens"),
        ([{"name": "methods.py:Mine"}, {"name": "methods.py:Bound"}], "all tokens"),
    ],
    ids=lambda value: " ".join(str(value).replace("name", "").split())[:60],
)
def test_the_rest_of_a_loss_is_compared_given_what_its_own_methods_did(
    items: list[Any], compared: str, tmp_path: Path
) -> None:
    given = own_dump(tmp_path, *items)
    verdict, names = judge([given]), {item["name"] for item in items if item["name"].startswith("methods.py")}
    assert (verdict.agrees, verdict.findings) == (True, ())
    assert f"coefficients of {compared}" in verdict.sentence
    assert all(name in verdict.sentence for name in names)
    shipped = {item["name"] for item in items} - names - {"within", "observe"}
    assert shipped <= {member.name for member in own_objective([given]).members}
    assert not (tmp_path / "ran").exists()  # a dump runs no code
    halved = given.having({"coefficients": given.tensors["coefficients"] / 2})
    assert not verdict.unloaded or judge([halved]).agrees is None
    # a file of that name, which the user gives, takes the place of what was recorded
    code = tmp_path / "given" / "methods.py"
    code.parent.mkdir()
    code.write_text(CODE)
    loaded = with_code(given, [code])
    verdict = judge([loaded])
    assert (verdict.agrees, list(verdict.unloaded)) == (True, [])
    assert "recorded" not in {member.name for member in own_objective([loaded]).members}
    assert next(iter(traces_of(loaded)))[1].methods.keys() == next(iter(traces_of(given)))[1].methods.keys()


def test_what_no_record_tells_is_not_called_an_error(tmp_path: Path) -> None:
    verdict = judge([own_dump(tmp_path, CLIP, {"name": "methods.py:Twice"})])
    assert (verdict.agrees, verdict.findings) == (None, ())
    assert "the code of methods.py:Twice is not loaded" in verdict.sentence


def test_look_runs_the_code_that_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, dump = own_dump(tmp_path, CLIP, {"name": "methods.py:Twice"}), tmp_path / "dump"
    header = given.header.model_copy(update={"ranks": 1, "parts": len(given.ranks)})
    write_dump(dump, header, {**given.tensors, "coefficients": given.tensors["coefficients"] / RANKS})
    code = tmp_path / "elsewhere.py"
    look = ["look", str(dump), "--json", "--methods", "cispo"]
    assert main(look) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"]["agrees"] is None
    assert not (tmp_path / "ran").exists()
    assert main([*look, "--code", str(code)]) == 2
    assert "It is in methods.py:Twice." in capsys.readouterr().err
    code.rename(tmp_path / "methods.py")
    assert main([*look, "--code", str(tmp_path / "methods.py")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"]["agrees"] is True
    with pytest.raises(ConfigError, match="in no file"):
        with_code(step(1), ["methods.py"])


def test_a_dump_cannot_name_code_that_is_loaded_unasked(tmp_path: Path) -> None:
    code = tmp_path / "methods.py"
    code.write_text(CODE)
    name = f"{code}:Mine"
    for data in (name, [name], {"name": name}, [[{"name": name}]], [{"name": "observe", "method": name}]):
        loss_of(told(step(1), name="rlstab", settings={"objective": data}))
        judge([told(step(1), name="rlstab", settings={"objective": data, "code": [str(code)]})])
    assert not (tmp_path / "ran").exists()
