"""Signals and advantages of the user's own reach a method, token by token, and a resumed run has them again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlstab
from rlstab.config import RunConfig
from rlstab.core.registry import Registry
from rlstab.train import Responses, train
from rlstab.train.loop import group_advantages
from rlstab.zoo import METHODS
from tests.train.ranks import fading, places, weighing
from tests.train.runs import largest_difference, quiet, small, weights, without_times

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "signals-and-advantages.md"
#: One response in a micro-batch is cut off from its mini-batch, and evidence is refreshed between the two steps.
CUT = {
    "optimisation__mini_batches": 2,
    "optimisation__micro_batch_size": 3,
    "optimisation__refresh": "step",
    "optimisation__lr": 1e-4,
}


def assert_same(one: Path, other: Path) -> None:
    left, right = weights(one), weights(other)
    assert all(torch.equal(left[name], right[name]) for name in left | right)
    assert without_times(one) == without_times(other)


def alone(run: RunConfig, signal: str = "") -> RunConfig:
    """The run with the method of ``ranks.py``, whose metrics do not tell where it reads from."""
    return weighing(run, signal)


def test_a_signal_of_the_user_reaches_the_method_token_by_token(tmp_path: Path) -> None:
    train(alone(small(tmp_path / "known", **CUT)), console=quiet(), advantages=fading)
    given = alone(small(tmp_path / "given", **CUT), "places")
    train(given, console=quiet(), advantages=fading, signals={"places": places, "unread": lambda responses: 1 / 0})
    train(small(tmp_path / "without", **CUT), console=quiet(), advantages=fading)
    assert_same(tmp_path / "known", tmp_path / "given")
    assert largest_difference(tmp_path / "given", tmp_path / "without") > 1e-6


def by_length(responses: Responses) -> Tensor:
    return torch.tensor([len(text) % 5 / 4 for text in responses.texts], dtype=torch.float64)


def test_advantages_of_a_response_are_those_of_its_tokens(tmp_path: Path) -> None:
    def each(responses: Responses) -> Tensor:
        settings = small(tmp_path).advantage
        return group_advantages(by_length(responses), responses.group_ids, settings)

    def token(responses: Responses) -> Tensor:
        return each(responses).unsqueeze(-1).expand(responses.response_mask.shape).clone()

    traced = {**CUT, "tracking__trace_every": 1}
    for name, function in (("each", each), ("token", token)):
        train(small(tmp_path / name, **traced), console=quiet(), advantages=function)
    assert_same(tmp_path / "each", tmp_path / "token")
    lines = [json.loads(line) for line in (tmp_path / "token" / "tokens.jsonl").read_text().splitlines()]
    other = [json.loads(line) for line in (tmp_path / "each" / "tokens.jsonl").read_text().splitlines()]
    assert [one["advantage"] for one in lines] == pytest.approx([one["advantage"] for one in other], rel=1e-4)
    assert len({one["advantage"] for one in lines}) > 2


def test_the_estimator_as_a_function_trains_as_the_configured_one(tmp_path: Path) -> None:
    run = small(tmp_path / "function", optimisation__lr=1e-4)

    def configured(responses: Responses) -> Tensor:
        return group_advantages(responses.rewards, responses.group_ids, run.advantage)

    train(run, console=quiet(), advantages=configured)
    train(small(tmp_path / "configured", optimisation__lr=1e-4), console=quiet())
    assert_same(tmp_path / "function", tmp_path / "configured")


def test_advantages_by_token_pull_each_token_by_its_own(tmp_path: Path) -> None:
    """Weight and advantage enter the loss as a product: dividing one by the place and weighting by it cancel."""

    def flat(responses: Responses) -> Tensor:
        return fading(responses)[:, :1]

    seen: dict[str, float] = {}

    def mean_place(responses: Responses) -> Tensor:
        mask = responses.response_mask
        seen["mean"] = float(places(responses)[mask].double().mean())
        return torch.where(mask, fading(responses), 0.0) * seen["mean"]

    options = {"optimisation__steps": 1, "optimisation__lr": 1e-4}
    train(alone(small(tmp_path / "token", **options)), console=quiet(), advantages=mean_place)
    train(small(tmp_path / "flat", **options), console=quiet(), advantages=lambda one: flat(one).squeeze(-1))
    assert seen["mean"] > 1
    # the same gradient in another order of float32 products; AdamW makes of it a part of its step, lr
    assert largest_difference(tmp_path / "token", tmp_path / "flat") < 2e-5
    token, response = without_times(tmp_path / "token")[0], without_times(tmp_path / "flat")[0]
    assert token["gradient/norm"] == pytest.approx(response["gradient/norm"], rel=1e-4)
    assert response["gradient/norm"] > 0


def test_a_function_that_changes_what_it_gets_changes_nothing_else(tmp_path: Path) -> None:
    def rude(responses: Responses) -> Tensor:
        found = places(responses)
        for tensor in (responses.response_ids, responses.response_mask, responses.rewards, responses.group_ids):
            tensor.zero_()
        responses.signals["rollout_logprobs"].zero_()
        return torch.where(torch.isnan(found), 0.0, found)

    train(alone(small(tmp_path / "polite"), "places"), console=quiet(), signals={"places": places}, advantages=fading)
    train(alone(small(tmp_path / "rude"), "places"), console=quiet(), signals={"places": rude}, advantages=fading)
    assert_same(tmp_path / "polite", tmp_path / "rude")


def test_a_resumed_run_has_the_same_signals_and_advantages(tmp_path: Path) -> None:
    options: dict[str, Any] = {"signals": {"places": places}, "advantages": fading, "console": quiet()}
    train(alone(small(tmp_path / "whole", **CUT, optimisation__steps=4), "places"), **options)
    train(alone(small(tmp_path / "parts", **CUT, optimisation__steps=2), "places"), **options)
    longer = alone(small(tmp_path / "parts", **CUT, optimisation__steps=4), "places")
    with pytest.raises(rlstab.CheckpointError, match=r"with the providers .*ranks\.fading.* Pass the same signals and"):
        train(longer, resume=True, signals={"places": places}, console=quiet())
    train(longer, resume=True, **options)
    assert_same(tmp_path / "parts", tmp_path / "whole")


WRONG: dict[str, tuple[Callable[[Responses], Any], type[Exception], str]] = {
    "rows": (lambda one: torch.ones(3, 2), rlstab.ShapeError, r"returned torch.float32 of \(3, 2\), expected a float"),
    "integers": (lambda one: one.response_ids, rlstab.ShapeError, r"returned torch.int64 of \(16, \d+\), expected"),
    "a list": (lambda one: [1.0], rlstab.ShapeError, r"returned list, expected a floating point tensor of \(16, \d+\)"),
    "NaN": (
        lambda one: one.signals["entropies"] / 0 * 0,
        rlstab.NonFinite,
        r"returned \d+ values that are NaN or Inf on response tokens\. Change its function\.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("what", ["signals['places']", "advantages"])
def test_what_a_function_returns_is_checked(what: str, name: str, tmp_path: Path) -> None:
    function, error, text = WRONG[name]
    run = alone(small(tmp_path / "run"), "places")
    given: dict[str, Any] = {"signals": {"places": places}, "advantages": fading, "console": quiet()}
    given |= {"advantages": function} if what == "advantages" else {"signals": {"places": function}}
    if name in ("rows", "integers", "a list") and what == "advantages":
        text = text.replace(r"of \(16, \d+\)", r"of .*") if name == "a list" else text
    with pytest.raises(error, match=f"^{re.escape(what)} {text}"):
        train(run, **given)


def test_a_signal_of_rlstab_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(
        rlstab.ConfigError, match=r"^signals: 'entropies' is a signal of rlstab's own, which the trainer"
    ):
        train(small(tmp_path / "run"), signals={"entropies": places})
    assert not (tmp_path / "run").exists()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    assert isinstance(METHODS, Registry)
    namespace: dict[str, Any] = {"__name__": "a_page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    about = json.loads((tmp_path / "runs" / "novelty" / "run.json").read_text())
    assert about["providers"] == {"signals": {"novelty": "a_page.novelty"}, "advantages": "a_page.fading"}
    records = without_times(tmp_path / "runs" / "novelty")
    assert [one["step"] for one in records] == [1, 2]
    fields = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE.read_text(), flags=re.MULTILINE)))
    assert set(fields) == set(Responses.__dataclass_fields__)
    first = namespace["novelty"](
        Responses((), (), torch.tensor([[5, 6, 5, 5]]), torch.ones(1, 4) > 0, {}, *[torch.zeros(1)] * 3)
    )
    assert first.tolist() == [[1, 1, 0, 0]]
