"""The adapter for Tinker with the real SDK, and a real server on a CPU."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("tinker", reason="the SDK is not installed: nox -s tinker")

import tinker
from tinker import types
from tinker.lib.public_interfaces.training_client import TrainingClient

from rlstab.adapters.releases import check_release
from rlstab.adapters.tinker import TinkerLoss, TinkerTrainer
from tests.adapters.fake_tinker import WORDS, Client, data
from tests.adapters.jobs import ROOT, shell
from tests.adapters.test_tinker import ADAM, DAPO, live
from tests.adapters.tinker_server import Dropping, server

#: jax, the SDK and the server warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore")


def datums(seed: int) -> list[types.Datum]:
    """The same data as the SDK's."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(torch.as_tensor(one.loss_fn_inputs["target_tokens"].data).tolist()),
            loss_fn_inputs={
                name: types.TensorData.from_torch(torch.as_tensor(values.data).to(kind))
                for name, values in one.loss_fn_inputs.items()
                for kind in [torch.int64 if name == "target_tokens" else torch.float32]
            },
        )
        for one in data(seed)
    ]


def by_hand(given: list[Any]) -> Any:
    """DAPO as a function of the SDK."""

    def loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        columns = [
            [torch.as_tensor(one.loss_fn_inputs[name].data) for one in given]
            for name in ("mask", "logprobs", "advantages")
        ]
        mask, old, advantages = (torch.cat(column) for column in columns)
        ratio = (torch.cat(list(logprobs)) - old).exp()
        terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
        return (terms * mask).sum() / mask.sum(), {}

    return loss


def test_the_sdk_is_what_the_adapter_knows() -> None:
    check_release("tinker")


@pytest.mark.skipif(not hasattr(TrainingClient, "_compute_custom_loss"), reason="the SDK has it from 0.38 on")
def test_the_sdk_sends_the_gradient_by_fields() -> None:
    given = datums(0)
    forward = SimpleNamespace(
        loss_fn_outputs=[{"logprobs": types.TensorData.from_torch(row.detach().float())} for row in live(0)]
    )
    ours = TrainingClient._compute_custom_loss(given, TinkerLoss(DAPO), forward)
    theirs = TrainingClient._compute_custom_loss(given, by_hand(given), forward)
    pairs = list(zip(weights_of(ours), weights_of(theirs), strict=True))
    assert sum(float(one.abs().sum()) for one, _ in pairs) > 0
    assert max(float((one - other).abs().max()) for one, other in pairs) < 1e-7


@pytest.mark.parametrize("nan", [False, True])
def test_the_sdk_carries_what_the_trainer_sends(nan: bool) -> None:
    given, sent, plain = datums(0), Client(), Client()
    if nan:
        given[0].loss_fn_inputs["advantages"] = types.TensorData.from_torch(live(0)[0].detach().float() * torch.nan)
    metrics = TinkerTrainer(sent, DAPO).step(given, types.AdamParams(learning_rate=0.5))
    assert (metrics["steps/refused"], sent.calls) == ((1.0, 1) if nan else (0.0, 3))
    TinkerTrainer(plain, DAPO).step(data(0), ADAM)
    assert float(plain.logits.abs().max()) > 0.01
    torch.testing.assert_close(sent.logits, torch.zeros(WORDS).double() if nan else plain.logits, atol=1e-6, rtol=0)


def weights_of(made: Any) -> list[torch.Tensor]:
    sent = next(
        value for value in (made if isinstance(made, tuple) else vars(made).values()) if isinstance(value, list)
    )
    return [torch.as_tensor(one.loss_fn_inputs["weights"].data) for one in sent]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    with server(tmp_path_factory.mktemp("server")) as where:
        yield where


def test_two_steps_on_a_server_are_those_by_hand(running: tuple[str, str]) -> None:
    url, model = running
    service = tinker.ServiceClient(base_url=url)
    adam, ends = types.AdamParams(learning_rate=1e-3), []
    for ours in (True, False):
        client = service.create_lora_training_client(base_model=model, rank=4, seed=1)
        trainer = TinkerTrainer(client, DAPO)
        for number in range(2):
            given = datums(number)
            if ours:
                assert trainer.step(given, adam)["steps/refused"] == 0.0
            else:
                bare = [
                    types.Datum(
                        model_input=one.model_input,
                        loss_fn_inputs={"target_tokens": one.loss_fn_inputs["target_tokens"]},
                    )
                    for one in given
                ]
                client.forward_backward_custom(bare, by_hand(given)).result()
                client.optim_step(adam).result()
        broken = datums(2)
        broken[0].loss_fn_inputs["advantages"] = types.TensorData.from_torch(
            torch.full((len(broken[0].loss_fn_inputs["mask"].data),), torch.nan)
        )
        if ours:  # a refused step moves nothing
            assert trainer.step(broken, adam)["steps/refused"] == 1.0
        ends.append(logprobs_of(client, datums(3)))
    assert ADAM.learning_rate == 0.5
    assert float((ends[0] - ends[1]).abs().max()) < 1e-6


def logprobs_of(client: Any, given: list[Any]) -> torch.Tensor:
    bare = [
        types.Datum(
            model_input=one.model_input,
            loss_fn_inputs={
                "target_tokens": one.loss_fn_inputs["target_tokens"],
                "weights": types.TensorData.from_torch(torch.zeros(len(one.loss_fn_inputs["mask"].data))),
            },
        )
        for one in given
    ]
    out = client.forward(bare, "cross_entropy").result().loss_fn_outputs
    return torch.cat([torch.as_tensor(one["logprobs"].data) for one in out])


def test_a_dropped_connection_loses_nothing_and_counts_nothing_twice(running: tuple[str, str]) -> None:
    url, model = running
    ends = []
    for request in (b"", b"/api/v1/forward", b"/api/v1/optim_step", b"/api/v1/retrieve_future"):
        connection = Dropping(url, request)
        service = tinker.ServiceClient(base_url=connection.url)
        trainer = TinkerTrainer(service.create_lora_training_client(base_model=model, rank=4, seed=1), DAPO)
        for number in range(2):
            given = datums(number)
            while True:
                try:
                    assert trainer.step(given, types.AdamParams(learning_rate=1e-3))["steps/skipped"] == 0.0
                    break
                except Exception:  # whatever the SDK makes of it, once
                    assert connection.lost == 1
        assert connection.lost == bool(request)
        ends.append(logprobs_of(trainer.client, datums(3)))
    assert all(torch.equal(ends[0], end) for end in ends[1:])


def test_the_example_runs(running: tuple[str, str], tmp_path: Any) -> None:
    url, model = running
    line = f"python {ROOT}/examples/tinker_chain.py --url {url} --model {model} --rollouts 2"
    told = [one for one in shell(line, tmp_path, TINKER_API_KEY="tml-local").splitlines() if one.startswith("rollout")]
    assert [one.split(":")[0] for one in told] == ["rollout 0", "rollout 1"]
    assert all(float(one.rpartition("tokens/live ")[2]) > 0 for one in told)  # the share of tokens with a gradient
