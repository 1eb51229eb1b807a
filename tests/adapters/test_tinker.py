"""Optimizer steps through Tinker's interface without a server: by hand, refused, scaled, interrupted, resumed."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rlstab.adapters.tinker import TinkerLoss, TinkerTrainer
from rlstab.errors import CheckpointError, HostError, MissingSignal, NonFinite, ShapeError
from tests.adapters import jobs
from tests.adapters.fake_tinker import Adam, Client, Datum, Service, data, tensor

DAPO = [{"name": "clip_higher", "low": 0.2, "high": 0.28}]
PRICE = [*DAPO, {"name": "adaptive_entropy", "target_entropy": 1.2, "initial": 0.004}]
#: State and a statistic over the step.
STATEFUL = [*DAPO, {"name": "stare", "target_entropy": 1.2, "increment": 0.05}]
ADAM = Adam(learning_rate=0.5)


def live(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + seed)
    rows = [torch.as_tensor(datum.loss_fn_inputs["logprobs"].data) for datum in data(seed)]
    moved = [(row + 0.3 * torch.randn(len(row), generator=draw).double()).clamp(max=-0.01) for row in rows]
    return [row.requires_grad_() for row in moved]


def test_a_step_without_data_is_refused_before_anything_is_sent() -> None:
    client = Client()
    empty = [Datum(None, {"target_tokens": torch.zeros(0, dtype=torch.int64)})]
    for none in ([], empty):
        with pytest.raises(ShapeError, match="an optimizer step has no data with target_tokens"):
            TinkerTrainer(client, DAPO).step(none, ADAM)
    assert client.calls == 0


def test_what_no_field_can_give_is_not_advised() -> None:
    for method, name in (({"name": "entropy_bonus"}, "entropies"), ({"name": "lp_reg"}, "log_kept_mass")):
        with pytest.raises(MissingSignal) as caught:
            TinkerTrainer(Client(), [*DAPO, method])
        text = str(caught.value)
        assert f"reads the live '{name}', which Tinker does not provide. It provides: none." in text
        assert text.endswith("or use a host that provides it.")


def test_the_objective_of_the_example_needs_only_what_it_gives() -> None:
    text = (jobs.ROOT / "examples" / "tinker_chain.py").read_text(encoding="utf-8")
    (default,) = re.findall(r"options\.objective or (\[.*?\])\)", text)
    assert TinkerLoss(eval(default)).objective.needs <= {"advantages", "old_logprobs", "logprobs"}


def test_dapo_by_hand() -> None:
    given, values = data(0), live(0)
    loss, metrics = TinkerLoss(DAPO)(given, values)
    found = torch.cat(torch.autograd.grad(loss, values))
    columns = {
        name: [torch.as_tensor(one.loss_fn_inputs[name].data) for one in given] for name in given[0].loss_fn_inputs
    }
    mask, old, advantages = (torch.cat(columns[name]) for name in ("mask", "logprobs", "advantages"))
    now = torch.cat(values).detach().requires_grad_()
    ratio = (now - old).exp()
    by_hand = (torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28)) * mask).sum() / mask.sum()
    (wanted,) = torch.autograd.grad(by_hand, now)
    assert float((found - wanted).abs().max()) < 1e-7 * float(wanted.abs().max())
    assert metrics["loss"] == pytest.approx(float(by_hand.detach()), abs=1e-7)
    assert metrics["ratio/clipped"] > 0


def test_turns_follow_from_the_mask_unless_a_field_has_them() -> None:
    values, credit = live(0), [*DAPO, {"name": "turn_credit"}]
    bare, given = data(0), data(0)
    for row, told in zip(bare, given, strict=True):
        mask = torch.as_tensor(row.loss_fn_inputs["mask"].data)
        sampled = mask.nonzero().flatten()
        turn = torch.zeros(len(mask))
        turn[int(sampled[0]) + 2 :] = float(sampled[1] > sampled[0] + 1)  # after the token of a tool
        earned = (torch.as_tensor(row.loss_fn_inputs["advantages"].data) + turn) * mask
        for datum in (row, told):
            datum.loss_fn_inputs["turn_reward"] = tensor(earned)
        told.loss_fn_inputs["turn"] = tensor(turn)
    found, wanted, plain = (
        torch.cat(torch.autograd.grad(TinkerLoss(objective)(rows, values)[0], values))
        for objective, rows in ((credit, bare), (credit, given), (DAPO, bare))
    )
    assert torch.equal(found, wanted)
    assert not torch.equal(found, plain)
    with pytest.raises(MissingSignal, match="no 'turn_reward'"):
        TinkerLoss(credit)(data(0), values)


def test_the_order_of_the_data_does_not_matter() -> None:
    given, values = data(1, entropies=0.5), live(1)
    chain = [*DAPO, {"name": "random_mask", "share": 0.3}]
    forward = torch.autograd.grad(TinkerLoss(chain)(given, values)[0], values)
    back = torch.autograd.grad(TinkerLoss(chain)(given[::-1], values[::-1])[0], values)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(forward, back, strict=True))


def trained(client: Client, *, tries: int = 1, steps: int = 3, objective: Any = STATEFUL) -> TinkerTrainer:
    """Three steps, each repeated as by a user whose connection drops."""
    trainer = TinkerTrainer(client, objective)
    for number in range(steps):
        given = data(number, entropies=0.5 + number / 10)
        for attempt in range(tries):
            try:
                trainer.step(given, ADAM)
                break
            except ConnectionError:
                assert attempt < tries - 1
    return trainer


def test_a_dropped_connection_loses_nothing_and_counts_nothing_twice() -> None:
    plain = Client()
    through = trained(plain)
    assert (plain.calls, plain.sent, plain.steps) == (9, 3, 3)  # a forward, a gradient, an optimizer step
    for drops in (*([call] for call in range(9)), [0, 1], [1, 2], [3, 5, 6], range(5)):
        client = Client(drops)
        broken = trained(client, tries=6)
        assert (client.drops, client.sent, client.steps) == (set(), 3, 3)
        assert torch.equal(client.logits, plain.logits)
        assert broken.objective_state == through.objective_state
    assert not torch.equal(plain.logits, torch.zeros_like(plain.logits))
    assert through.objective_state != TinkerTrainer(Client(), STATEFUL).objective_state


def test_other_data_is_refused_while_a_step_is_under_way(tmp_path: Path) -> None:
    trainer = TinkerTrainer(Client(drops=[1]), DAPO)
    with pytest.raises(ConnectionError):
        trainer.step(data(0), ADAM)
    with pytest.raises(HostError, match="Call step with its data again"):
        trainer.step(data(0), ADAM)
    with pytest.raises(HostError, match="Call step with its data again, then save"):
        trainer.save("x", tmp_path)


@pytest.mark.parametrize("field", ["advantages", "logprobs"])
def test_nan_is_refused_and_nothing_is_sent(field: str) -> None:
    client = Client()
    trainer = TinkerTrainer(client, STATEFUL)
    before = trainer.objective_state
    metrics = trainer.step(data(0, entropies=0.5, **{field: float("nan")}), ADAM)
    assert metrics["steps/refused"] == 1.0
    assert trainer.last_refusal is not None
    assert (client.sent, client.steps, trainer.objective_state) == (0, 0, before)
    assert trainer.step(data(1, entropies=0.5), ADAM)["steps/refused"] == 0.0
    assert client.steps == 1


def test_nan_of_the_live_policy_or_a_gate_is_refused() -> None:
    values = live(0)
    values[3] = torch.full_like(values[3], torch.nan).requires_grad_()
    with pytest.raises(NonFinite):
        TinkerLoss(DAPO)(data(0), values)
    client, gate = Client(), [*DAPO, {"name": f"{jobs.__file__}:Trouble"}]
    trained(client, objective=gate)
    assert (client.sent, client.steps) == (1, 1)  # the second step is tried twice, since its state stays


def test_a_step_without_a_gradient_is_skipped() -> None:
    client = Client()
    metrics = TinkerTrainer(client, DAPO).step(data(0, advantages=0.0), ADAM)
    assert metrics["steps/skipped"] == 1.0
    assert (client.sent, client.steps) == (0, 0)


def test_the_learning_rate_is_scaled() -> None:
    client = Client()
    trained(client, objective=[*DAPO, {"name": f"{jobs.__file__}:Trouble", "kind": "lr"}])
    assert client.rates == [0.5, 0.25, 0.5]
    assert ADAM.learning_rate == 0.5


def test_a_run_resumes_as_it_was(tmp_path: Path) -> None:
    plain, client = Client(), Client()
    through = trained(plain)
    trained(client, steps=2).save("two", tmp_path)
    resumed = TinkerTrainer.load(Service(client), tmp_path, STATEFUL)
    resumed.step(data(2, entropies=0.7), ADAM)
    assert torch.equal(resumed.client.logits, plain.logits)
    assert resumed.objective_state == through.objective_state
    with pytest.raises(CheckpointError, match="belongs to the objective"):
        TinkerTrainer.load(Service(client), tmp_path, DAPO)
    (tmp_path / "tinker.txt").unlink()
    with pytest.raises(CheckpointError, match="does not name a checkpoint"):
        TinkerTrainer.load(Service(client), tmp_path, STATEFUL)


@pytest.mark.parametrize("cut", ["keep_state", "replace_file"])
def test_a_save_that_is_cut_short_leaves_the_checkpoint_before_it(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    trainer = trained(client, steps=2)
    trainer.save("two", tmp_path)
    before = trainer.objective_state
    trainer.step(data(2, entropies=0.7), ADAM)
    assert trainer.objective_state != before
    with monkeypatch.context() as patch:
        patch.setattr(f"rlstab.adapters.tinker.{cut}", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            trainer.save("three", tmp_path)
    assert TinkerTrainer.load(Service(client), tmp_path, STATEFUL).objective_state == before  # Service asserts the path
    trainer.save("two", tmp_path)
    assert TinkerTrainer.load(Service(client), tmp_path, STATEFUL).objective_state == trainer.objective_state


@pytest.mark.parametrize("state", ["..", "", ".", "state-1/../..", "/", "kept"])
def test_an_edited_checkpoint_is_refused_and_nothing_is_deleted(state: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    trainer = trained(Client(), steps=1)
    trainer.save("one", folder)
    (folder / "kept").mkdir()
    (folder / "tinker.txt").write_text(f"path\n{state}\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="does not name a checkpoint"):
        trainer.save("two", folder)
    with pytest.raises(CheckpointError, match="does not name a checkpoint"):
        TinkerTrainer.load(Service(trainer.client), folder, STATEFUL)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_missing_is_named() -> None:
    client = Client()
    with pytest.raises(MissingSignal, match=r"Give each Datum the field loss_fn_inputs\['entropies'\]"):
        TinkerTrainer(client, STATEFUL).step(data(0), ADAM)
    with pytest.raises(MissingSignal, match="live"):
        TinkerTrainer(client, PRICE)
    given = data(0)
    del given[4].loss_fn_inputs["advantages"]
    with pytest.raises(MissingSignal, match="a Datum has no 'advantages'"):
        TinkerTrainer(client, DAPO).step(given, ADAM)
    given = data(0)
    given[4].loss_fn_inputs["mask"] = tensor(torch.ones(2))
    with pytest.raises(ShapeError, match="has 2 values, and its target_tokens"):
        TinkerTrainer(client, DAPO).step(given, ADAM)
    with pytest.raises(ShapeError, match=r"expected \(N,\): one target per position"):
        TinkerLoss(DAPO)(data(0), [torch.zeros(4, 2, requires_grad=True)] * 12)
    assert (client.sent, client.steps) == (0, 0)
