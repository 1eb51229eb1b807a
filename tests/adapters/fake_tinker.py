"""A client that speaks the SDK's interface, without the SDK: a linear policy here, and connections that drop."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

WORDS = 8


class Datum(SimpleNamespace):
    """The SDK's: ``loss_fn_inputs`` have ``data`` and ``shape``."""

    def __init__(self, model_input: Any, loss_fn_inputs: Any) -> None:
        super().__init__(model_input=model_input, loss_fn_inputs=loss_fn_inputs)


class Adam(SimpleNamespace):
    def model_copy(self, update: dict[str, Any]) -> "Adam":
        return Adam(**{**vars(self), **update})


def tensor(values: torch.Tensor) -> Any:
    return SimpleNamespace(data=values.numpy(), shape=list(values.shape))


class Future:
    """A result on the server; the connection drops before the client has it, if ``drops``."""

    def __init__(self, value: Any, *, drops: bool) -> None:
        self.value, self.drops = value, drops

    def result(self) -> Any:
        if self.drops:
            self.drops = False
            raise ConnectionError("the connection dropped")
        return self.value


class Client:
    """Log-probs are those of one row of logits; a server adds gradients up until ``optim_step``, which is plain SGD.

    Args:
        drops: the calls, counted from 0, whose result the client does not get at first; or whose forward fails.
    """

    def __init__(self, drops: Sequence[int] = (), no_forward: Sequence[int] = ()) -> None:
        self.logits = torch.zeros(WORDS, dtype=torch.float64)
        self.gradient = torch.zeros(WORDS, dtype=torch.float64)
        self.drops, self.no_forward = set(drops), set(no_forward)
        self.calls, self.sent, self.steps = 0, 0, 0
        self.rates: list[float] = []

    def _call(self) -> int:
        self.calls += 1
        return self.calls - 1

    def forward_backward_custom(self, data: list[Any], loss: Callable[..., Any]) -> Future:
        number = self._call()
        if number in self.no_forward:
            raise ConnectionError("no connection")
        assert all(set(datum.loss_fn_inputs) == {"target_tokens"} for datum in data)  # 0.25 takes no other
        ids = [torch.as_tensor(datum.loss_fn_inputs["target_tokens"].data) for datum in data]
        live = [self.logits.log_softmax(-1)[row].requires_grad_() for row in ids]
        value, metrics = loss(data, live)
        value.backward()
        for row, values in zip(ids, live, strict=True):
            logits = self.logits.clone().requires_grad_()
            (logits.log_softmax(-1)[row] * values.grad).sum().backward()
            self.gradient += logits.grad
        self.sent += 1
        return Future(metrics, drops=number in self.drops)

    def optim_step(self, adam: Any) -> Future:
        number = self._call()
        self.logits = self.logits - adam.learning_rate * self.gradient
        self.gradient = torch.zeros_like(self.gradient)
        self.steps += 1
        self.rates.append(adam.learning_rate)
        return Future(None, drops=number in self.drops)

    def save_state(self, name: str) -> Future:
        self.saved = self.logits.clone()
        return Future(SimpleNamespace(path=f"tinker://{name}"), drops=False)


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
