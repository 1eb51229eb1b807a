"""A client that speaks the SDK's interface, without the SDK: a linear policy here, and connections that drop."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

WORDS = 8


@dataclass(frozen=True)
class Datum:
    """The SDK's: ``loss_fn_inputs`` have ``data`` and ``shape``, also those that were given as tensors."""

    model_input: Any
    loss_fn_inputs: Any

    def __post_init__(self) -> None:
        for name, values in self.loss_fn_inputs.items():
            self.loss_fn_inputs[name] = tensor(values) if isinstance(values, torch.Tensor) else values


class Adam(SimpleNamespace):
    def model_copy(self, update: dict[str, Any]) -> "Adam":
        return Adam(**{**vars(self), **update})


def tensor(values: torch.Tensor) -> Any:
    return SimpleNamespace(data=values.numpy(), shape=list(values.shape))


class Future:
    """The result of a call on the server; the connection drops once before the client has it, if the call is due."""

    def __init__(self, value: Any, call: int, drops: set[int]) -> None:
        self.value, self.call, self.drops = value, call, drops

    def result(self) -> Any:
        if self.call in self.drops:
            self.drops.remove(self.call)
            raise ConnectionError("the connection dropped")
        return self.value


class Client:
    """Log-probs are those of one row of logits; a server adds gradients up until ``optim_step``, which is plain SGD.

    Args:
        drops: the calls, counted from 0, whose result the client does not get at first; those to come are left.
    """

    def __init__(self, drops: Sequence[int] = ()) -> None:
        self.logits = torch.zeros(WORDS, dtype=torch.float64)
        self.gradient = torch.zeros(WORDS, dtype=torch.float64)
        self.drops = set(drops)
        self.calls, self.sent, self.steps = 0, 0, 0
        self.rates: list[float] = []

    def _answer(self, value: Any) -> Future:
        self.calls += 1
        return Future(value, self.calls - 1, self.drops)

    def _logprobs(self, data: list[Any], loss: str) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        assert loss == "cross_entropy"
        assert all(set(datum.loss_fn_inputs) == {"target_tokens", "weights"} for datum in data)  # 0.25 takes no other
        fields = ("target_tokens", "weights")
        ids, weights = ([torch.as_tensor(datum.loss_fn_inputs[name].data) for datum in data] for name in fields)
        logits = self.logits.clone().requires_grad_()
        return [logits.log_softmax(-1)[row] for row in ids], weights, logits

    def forward(self, data: list[Any], loss: str) -> Future:
        rows = [row.detach() for row in self._logprobs(data, loss)[0]]
        return self._answer(SimpleNamespace(loss_fn_outputs=[{"logprobs": tensor(row)} for row in rows]))

    def forward_backward(self, data: list[Any], loss: str) -> Future:
        rows, weights, logits = self._logprobs(data, loss)
        total = torch.stack([-(row * of_row).sum() for row, of_row in zip(rows, weights, strict=True)]).sum()
        self.gradient += torch.autograd.grad(total, logits)[0]
        self.sent += 1
        return self._answer(None)

    def optim_step(self, adam: Any) -> Future:
        self.logits = self.logits - adam.learning_rate * self.gradient
        self.gradient = torch.zeros_like(self.gradient)
        self.steps += 1
        self.rates.append(adam.learning_rate)
        return self._answer(None)

    def save_state(self, name: str) -> Future:
        self.saved = self.logits.clone()
        return self._answer(SimpleNamespace(path=f"tinker://{name}"))


class Service:
    """Makes a client of what another saved."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def create_training_client_from_state_with_optimizer(self, path: str) -> Client:
        assert path == "tinker://two"
        made = Client()
        made.logits = self.client.saved
        return made


def data(seed: int, **fields: float) -> list[Datum]:
    """Twelve responses to four prompts; every third has a token that a tool wrote.

    Args:
        seed: of the tokens.
        fields: the value of every token of a field, in place of a drawn one or in addition.
    """
    draw, made = torch.Generator().manual_seed(seed), []
    for index in range(12):
        prompt, count = 2 + index // 3 % 3, int(torch.randint(3, 12, (1,), generator=draw))
        length = prompt + count
        mask = torch.cat([torch.zeros(prompt), torch.ones(count)])
        if index % 3 == 0:
            mask[prompt + 1] = 0
        ids = torch.randint(0, WORDS, (length,), generator=draw)
        ids[:prompt] = index // 3
        drawn = {
            "mask": mask,
            "logprobs": -1.5 - 2 * torch.rand(length, generator=draw).double(),
            "advantages": torch.full((length,), float(torch.randn(1, generator=draw))).double(),
        }
        drawn |= {name: torch.full((length,), value).double() for name, value in fields.items()}
        made.append(Datum(None, {"target_tokens": tensor(ids), **{key: tensor(one) for key, one in drawn.items()}}))
    return made
