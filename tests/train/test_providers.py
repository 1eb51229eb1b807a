"""Signals and advantages of the user's own reach a method, token by token, and a resumed run has them again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlstab.errors import CheckpointError, ConfigError, NonFinite, ShapeError
from rlstab.stages.advantages import grpo
from rlstab.tasks import Example
from rlstab.train import Rollout, train
from rlstab.train.providers import Providers
from rlstab.zoo import METHODS
from tests.train.ranks import fading, places, weighing
from tests.train.runs import largest_difference, quiet, small, weights, weights_alike, without_times

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "signals-and-advantages.md"
#: Two optimizer steps per rollout, in uneven micro-batches, with evidence refreshed before each.
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


def test_a_signal_of_the_user_reaches_the_method_token_by_token(tmp_path: Path) -> None:
    train(weighing(small(tmp_path / "known", **CUT), ""), console=quiet(), advantages=fading)
    given = weighing(small(tmp_path / "given", **CUT), "places")
    train(given, console=quiet(), advantages=fading, signals={"places": places, "unread": lambda responses: 1 / 0})
    train(small(tmp_path / "without", **CUT), console=quiet(), advantages=fading)
    assert_same(tmp_path / "known", tmp_path / "given")
    assert largest_difference(tmp_path / "given", tmp_path / "without") > 1e-6


def by_length(responses: Rollout) -> Tensor:
    return torch.tensor([len(text) % 5 / 4 for text in responses.texts], dtype=torch.float64)


def test_advantages_of_a_response_are_those_of_its_tokens(tmp_path: Path) -> None:
    def each(responses: Rollout) -> Tensor:
        return grpo(by_length(responses), responses.group_ids)

    def token(responses: Rollout) -> Tensor:
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

    def configured(responses: Rollout) -> Tensor:
        return grpo(responses.rewards, responses.group_ids)

    train(run, console=quiet(), advantages=configured)
    train(small(tmp_path / "configured", optimisation__lr=1e-4), console=quiet())
    assert_same(tmp_path / "function", tmp_path / "configured")


def test_advantages_by_token_pull_each_token_by_its_own(tmp_path: Path) -> None:
    """Weight and advantage enter the loss as a product: dividing one by the place and weighting by it cancel."""

    seen: dict[str, float] = {}

    def of_the_first_token(responses: Rollout) -> Tensor:
        return fading(responses)[:, 0]

    def mean_place(responses: Rollout) -> Tensor:
        mask = responses.response_mask
        seen["mean"] = float(places(responses)[mask].double().mean())
        return torch.where(mask, fading(responses), 0.0) * seen["mean"]

    options = {"optimisation__rollouts": 1, "optimisation__lr": 1e-4}
    train(weighing(small(tmp_path / "token", **options), ""), console=quiet(), advantages=mean_place)
    train(small(tmp_path / "flat", **options), console=quiet(), advantages=of_the_first_token)
    assert seen["mean"] > 1
    # the same gradient in another order of float32 products
    weights_alike(tmp_path / "token", tmp_path / "flat")
    token, response = without_times(tmp_path / "token")[0], without_times(tmp_path / "flat")[0]
    assert token["gradient/norm"] == pytest.approx(response["gradient/norm"], rel=1e-4)
    assert response["gradient/norm"] > 0


def test_a_function_that_changes_what_it_gets_changes_nothing_else(tmp_path: Path) -> None:
    def rude(responses: Rollout) -> Tensor:
        found = places(responses)
        for tensor in (responses.response_ids, responses.response_mask, responses.rewards, responses.group_ids):
            tensor.zero_()
        responses.signals["rollout_logprobs"].zero_()
        return torch.where(torch.isnan(found), 0.0, found)

    train(
        weighing(small(tmp_path / "polite"), "places"), console=quiet(), signals={"places": places}, advantages=fading
    )
    train(weighing(small(tmp_path / "rude"), "places"), console=quiet(), signals={"places": rude}, advantages=fading)
    assert_same(tmp_path / "polite", tmp_path / "rude")


def test_a_resumed_run_has_the_same_signals_and_advantages(tmp_path: Path) -> None:
    options: dict[str, Any] = {"signals": {"places": places}, "advantages": fading, "console": quiet()}
    train(weighing(small(tmp_path / "whole", **CUT, optimisation__rollouts=4), "places"), **options)
    train(weighing(small(tmp_path / "parts", **CUT, optimisation__rollouts=2), "places"), **options)
    longer = weighing(small(tmp_path / "parts", **CUT, optimisation__rollouts=4), "places")
    with pytest.raises(CheckpointError, match=r"with the providers .*ranks\.fading.* Pass the same signals and"):
        train(longer, resume=True, signals={"places": places}, console=quiet())
    train(longer, resume=True, **options)
    assert_same(tmp_path / "parts", tmp_path / "whole")


def responses_of(rows: int) -> Responses:
    """``rows`` responses of two tokens, the last of one."""
    mask = torch.ones(rows, 2).bool()
    mask[-1:, 1] = False
    ids = torch.arange(rows)
    example = Example("1 + 1", "2")
    return Responses((example,) * rows, ("2",) * rows, mask.long(), mask, {}, ids.double(), ids, ids)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "rows": (
        torch.ones(2, 2),
        ShapeError,
        "torch.float32 of (2, 2), expected a floating point tensor of {}.",
    ),
    "integers": (
        torch.ones(3, 2).long(),
        ShapeError,
        "torch.int64 of (3, 2), expected a floating point ",
    ),
    "a list": (
        [1.0] * 3,
        ShapeError,
        "list, expected a floating point tensor of {}. Change its function.",
    ),
    "NaN": (
        torch.full((3, 2), torch.nan),
        NonFinite,
        "5 values that are NaN or Inf on response tokens. Change",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_returns_is_checked(name: str) -> None:
    values, error, text = WRONG[name]
    providers = Providers({"places": lambda responses: values}, lambda responses: values)
    with pytest.raises(error, match=re.escape(f"signals['places'] returned {text.format('(3, 2)')}")):
        providers.signals_of(responses_of(3), frozenset({"places"}))
    with pytest.raises(error, match=re.escape(f"advantages returned {text.format('(3,) or (3, 2)')}")):
        providers.advantages_of(responses_of(3))


def test_what_is_wrong_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    run = weighing(small(tmp_path / "run"), "places")
    with pytest.raises(ShapeError, match=r"^signals\['places'\] returned torch.float32 of \(16,\), expected a fl"):
        train(run, console=quiet(), signals={"places": lambda responses: places(responses).sum(-1)})
    assert not (tmp_path / "run").exists()


def test_padding_may_be_anything_and_a_rank_without_responses_is_not_asked() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, torch.nan]])
    providers = Providers({"places": lambda responses: values}, lambda responses: values)
    found = providers.signals_of(responses_of(3), frozenset({"places", "another"}))
    assert {name: one.tolist() for name, one in found.items()} == {"places": [[1, 2], [3, 4], [5, 0]]}
    nobody = Providers({"places": lambda responses: 1 / 0}, lambda responses: 1 / 0)  # type: ignore[arg-type,return-value]
    assert nobody.signals_of(responses_of(0), frozenset({"places"}))["places"].shape == (0, 2)
    assert nobody.advantages_of(responses_of(0)).shape == (0,)  # type: ignore[union-attr]


def test_a_signal_of_rlstab_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^signals: 'entropies' is a signal of rlstab's own, which the trainer"):
        train(small(tmp_path / "run"), signals={"entropies": places})
    assert not (tmp_path / "run").exists()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    namespace: dict[str, Any] = {"__name__": "a_page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    about = json.loads((tmp_path / "runs" / "novelty" / "run.json").read_text())
    assert about["providers"] == {"signals": {"novelty": "a_page.novelty"}, "advantages": "a_page.fading"}
    records = without_times(tmp_path / "runs" / "novelty")
    assert [one["rollout"] for one in records] == [1, 2]
    fields = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE.read_text(), flags=re.MULTILINE)))
    assert set(fields) == set(Responses.__dataclass_fields__)
    first = namespace["novelty"](
        Responses((), (), torch.tensor([[5, 6, 5, 5]]), torch.ones(1, 4) > 0, {}, *[torch.zeros(1)] * 3)
    )
    assert first.tolist() == [[1, 1, 0, 0]]
