"""An objective as the loss of a Tinker ``TrainingClient``: all of an optimizer step in one call, refused or scaled.

The server gives the log-probs of the whole step in one forward, and is sent the gradient of the loss by each of them,
so every statistic is that of the step.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlstab.adapters.evidence import distinct_hashes, hashes, signals_of
from rlstab.adapters.objective_state import keep_state, restore_state
from rlstab.adapters.training import Given, HostTraining, open_objective, plan_step
from rlstab.console import capital
from rlstab.core.batch import TokenBatch
from rlstab.core.compose import Composition
from rlstab.core.objective import State
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.turns import turns_of
from rlstab.errors import CheckpointError, HostError, MissingSignal, NonFinite, ShapeError
from rlstab.files import replace_file
from rlstab.hosts import adapted

#: The file of a checkpoint that names the server's, and the folder with the state of the objective that belongs to it.
SERVER, STATE = "tinker.txt", "state-"
_FIELDS = ("mask", "advantages", "logprobs")
#: The server's loss that is linear in the log-probs: its gradient by a log-prob is minus the weight of the token.
_LINEAR = "cross_entropy"


class TinkerLoss(HostTraining):
    """A function for ``forward_backward_custom`` where the SDK takes all fields of a ``Datum``; one per optimizer step.

    Each ``Datum`` has ``(N,)`` fields: ``target_tokens``; ``mask``, 1 on tokens that the policy sampled;
    ``advantages``; ``logprobs`` of the sampler; signals that the objective reads by their names, where ``turn``
    otherwise follows from ``mask``; and ``old_logprobs`` if the ratio is not to divide by the sampler's.

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition.
        state: the state of the objective after the last optimizer step; None is the initial one.

    Attributes:
        step: the optimizer step; ``step.state`` is for the next one.

    Raises:
        NonFinite: from the call, if something in the step is NaN or Inf; the SDK then sends no gradient, and from 0.38
            on takes no further request of that client, which :class:`TinkerTrainer` avoids.
    """

    def __init__(self, objective: Given, state: State | None = None) -> None:
        self._rlstab_open("tinker", _chosen(objective), state=state)
        self.step = self._rlstab_new_step()

    def __call__(self, data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        step, live = self.step, _padded("logprobs", logprobs, data)
        batch = batch_of(data, live.detach(), self.objective.needs)
        plan_step(step, [batch])
        out = step.loss(0, PolicyOutputs.from_padded(batch, logprobs=live))
        zero = live.sum() * 0.0  # a gradient for data without any
        gradients = torch.autograd.grad(out.loss + zero, list(logprobs), retain_graph=True)
        step.finish(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt())
        if step.refusal is not None:
            raise NonFinite(step.refusal)
        return out.loss + zero, self.metrics()

    def metrics(self) -> dict[str, float]:
        """Metrics of the step: rlstab's, and its loss."""
        self._rlstab_metrics.add(self.step)
        return {"loss": self.step.total_loss, **self._rlstab_metrics.collect()}


class TinkerTrainer(HostTraining):
    """Optimizer steps of a Tinker ``TrainingClient`` by an objective::

        trainer = TinkerTrainer(client, "objective.yaml")
        metrics = trainer.step(data, tinker.AdamParams(learning_rate=1e-4))

    If the connection drops or the call is interrupted, ``step`` with the same data continues there: what was sent
    is awaited and not sent again, and the state advances once.

    Args:
        client: the SDK's ``TrainingClient``.
        objective: path of a YAML file, what such a file holds, or a method or composition.
        state: the state of the objective after the last optimizer step; None is the initial one.

    Raises:
        MissingSignal: a method reads an output of the live policy that Tinker does not have.
    """

    def __init__(self, client: Any, objective: Given, state: State | None = None) -> None:
        self.client = client
        self._rlstab_open("tinker", _chosen(objective), state=state)
        self._data: list[Any] = []
        self._loss: TinkerLoss | None = None  # with the futures, while a step is in progress
        self._futures: list[Any] = []

    def step(self, data: Sequence[Any], adam: Any) -> dict[str, float]:
        """One optimizer step; nothing is sent, and nothing moves, if it is refused or has no gradient.

        Args:
            data: the data of the whole step, with the fields of :class:`TinkerLoss`.
            adam: the SDK's ``AdamParams``; its learning rate is multiplied by that of the objective.

        Returns:
            metrics of the step; ``steps/refused`` and ``steps/skipped`` say that nothing was sent.

        Raises:
            HostError: the last step is still under way, with other data.
            ShapeError: there is no data.
            MissingSignal: the data lacks a field that the objective reads.
        """
        data = list(data)
        if not any(len(datum.loss_fn_inputs["target_tokens"].data) for datum in data):
            raise ShapeError("an optimizer step has no data with target_tokens. Leave it out, or give it some.")
        if self._loss is not None and [id(item) for item in data] != [id(item) for item in self._data]:
            raise HostError(
                "the last optimizer step was interrupted and may be half done on the server. Call step with its data "
                "again, which continues where it was, or load the last checkpoint."
            )
        loss = self._loss or self._submit(data)
        if loss.step.moves_weights:
            self._futures[0].result()  # the gradient is there
            if len(self._futures) == 1:
                plan = loss.step.plan
                rate = adam.learning_rate * (1.0 if plan is None else plan.lr_scale)
                if not math.isfinite(rate):
                    raise HostError(f"the learning rate is {rate}. Give AdamParams a finite one.")
                scaled = adam if rate == adam.learning_rate else adam.model_copy(update={"learning_rate": rate})
                self._futures.append(self.client.optim_step(scaled))
            self._futures[1].result()
        self._loss = None
        self._rlstab_settle(loss.step)
        return loss.metrics()

    def _submit(self, data: list[Any]) -> TinkerLoss:
        """Send the gradient of a step, unless there is none; an error leaves nothing behind.

        ``forward_backward_custom`` does the same by two requests, but an SDK may call its function in the background,
        and then takes no further request after a step that is refused.
        """
        loss = TinkerLoss(self.objective, self.objective_state)
        unweighted = [torch.zeros(len(datum.loss_fn_inputs["target_tokens"].data)) for datum in data]
        outputs = self.client.forward(_weighted(data, unweighted), _LINEAR).result().loss_fn_outputs
        live = [torch.tensor(output["logprobs"].data).requires_grad_() for output in outputs]
        futures = []
        with suppress(NonFinite):  # the step is refused
            value, _ = loss(data, live)
            if loss.step.moves_weights:
                weights = [-gradient for gradient in torch.autograd.grad(value, live)]
                futures.append(self.client.forward_backward(_weighted(data, weights), _LINEAR))
        self._data, self._loss, self._futures = data, loss, futures
        return loss

    def save(self, name: str, folder: str | Path) -> str:
        """Save weights and optimizer on the server, and the state of the objective with their path in a local folder.

        A folder with an earlier checkpoint names that one until all of the new one is written.

        Returns:
            the path of the server's checkpoint.

        Raises:
            CheckpointError: the folder has a damaged checkpoint.
        """
        if self._loss is not None:
            raise HostError("the last optimizer step was interrupted. Call step with its data again, then save.")
        before = _saved(folder)[1] if Path(folder, SERVER).exists() else None
        path = str(self.client.save_state(name).result().path)
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = Path(tempfile.mkdtemp(prefix=STATE, dir=folder))
        keep_state(state, self.objective, self.objective_state)
        replace_file(Path(folder, SERVER), f"{path}\n{state.name}\n")
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        return path

    @classmethod
    def load(cls, service: Any, folder: str | Path, objective: Given) -> TinkerTrainer:
        """A trainer with a new client of ``service``, a ``ServiceClient``, from what :meth:`save` wrote.

        Raises:
            CheckpointError: the folder has no state, a damaged one, or that of another objective.
        """
        chosen, (path, state_folder) = _chosen(objective), _saved(folder)
        state = restore_state(state_folder, chosen)
        return cls(service.create_training_client_from_state_with_optimizer(path), chosen, state)


def batch_of(data: Sequence[Any], logprobs: Tensor, needs: frozenset[str]) -> TokenBatch:
    """The evidence about an optimizer step.

    Args:
        data: data with the fields of :class:`TinkerLoss`.
        logprobs: ``(B, N)`` of the policy at the start of the step, padded.
        needs: what the objective needs.

    Raises:
        MissingSignal: a field is missing.
        ShapeError: a field has another number of values than ``target_tokens``.
    """
    columns: dict[str, Tensor] = {}
    optional = ("old_logprobs", *(name for name in sorted(needs) if name != "rollout_logprobs"))
    for name in dict.fromkeys((*_FIELDS, *optional)):
        rows = [datum.loss_fn_inputs.get(name) for datum in data]
        if all(row is not None for row in rows):
            columns[name] = _padded(name, [torch.as_tensor(np.asarray(row.data)) for row in rows], data)
        elif name in _FIELDS:
            raise MissingSignal(f"a Datum has no '{name}'. {capital(adapted('tinker').cure(name))}.")
    columns = {"turn": turns_of(columns["mask"])} | columns
    old = columns.get("old_logprobs", columns["logprobs"])
    names = {name: name for name in needs - {"logprobs", "old_logprobs", "advantages"}}
    names["rollout_logprobs"] = "logprobs"
    ids = [np.asarray(datum.loss_fn_inputs["target_tokens"].data) for datum in data]
    prompts = [row[: int(mask.float().argmax())] for row, mask in zip(ids, columns["mask"], strict=True)]
    return TokenBatch.from_padded(
        response_mask=columns["mask"],
        advantages=columns["advantages"],
        sequence_ids=distinct_hashes([row.tobytes() for row in ids], Counter()),
        group_ids=hashes([prompt.tobytes() for prompt in prompts]),
        **signals_of(needs - {"branch"}, columns, names, old, {"logprobs": logprobs}, host="tinker"),
    )


def _saved(folder: str | Path) -> tuple[str, Path]:
    """The path of the server's checkpoint, and the folder with the state of the objective."""
    try:
        path, state = Path(folder, SERVER).read_text(encoding="utf-8").splitlines()
        if Path(state).name != state or not state.startswith(STATE):
            raise ValueError(f"its second line is '{state}', not the name of a folder {STATE}*")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} does not name a checkpoint of the server by a {SERVER}: {error}") from error
    return path, Path(folder, state)


def _chosen(objective: Given) -> Composition:
    chosen = open_objective(objective)
    host = adapted("tinker")
    replace(host, release="", gives=host.gives | chosen.needs).require(chosen)  # any field may be given
    return chosen


def _padded(name: str, rows: Sequence[Tensor], data: Sequence[Any]) -> Tensor:
    """``(B, N)`` values of a field, padded with zeros.

    Raises:
        ShapeError: a row is not one value per target.
    """
    for row, datum in zip(rows, data, strict=True):
        count = len(datum.loss_fn_inputs["target_tokens"].data)
        if row.ndim != 1:
            shape = tuple(row.shape)
            raise ShapeError(f"'{name}' of a Datum has shape {shape}, expected (N,): one target per position.")
        if len(row) != count:
            raise ShapeError(
                f"'{name}' of a Datum has {len(row)} values, and its target_tokens {count}. Make them equal."
            )
    return pad_sequence(list(rows), batch_first=True)


def _weighted(data: Sequence[Any], weights: Sequence[Tensor]) -> list[Any]:
    """The same data with only the fields of :data:`_LINEAR`, ``(N,)`` weights of their tokens among them."""
    return [
        replace(datum, loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": of_tokens})
        for datum, of_tokens in zip(data, weights, strict=True)
    ]
