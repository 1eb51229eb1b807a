"""Any loss function under test: the gradient of an optimizer step must not depend on how the step is cut.

The same step is given whole, in micro-batches, with more padding, in another order, packed and over ranks, and the
gradients of its tokens are compared. The loss need not be written with rlstab.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstab.core.method_settings import check_choices
from rlstab.errors import OutOfRange, UnknownName, did_you_mean
from rlstab.testing.agreement import BrokenLaw
from rlstab.testing.check import Report, Result

#: The arguments that a loss may take, by name. Tensors are float64 and padded, log-probs in nats.
ARGUMENTS: Mapping[str, str] = {
    "logprobs": "(B, T), live log-probs of the sampled tokens, with grad",
    "entropies": "(B, T), live entropies, nats, with grad",
    "old_logprobs": "(B, T), of the policy that the ratio divides by",
    "ref_logprobs": "(B, T), of the reference policy",
    "rollout_logprobs": "(B, T), as the sampler reported them",
    "advantages": "(B, T), the same on all tokens of a response",
    "mask": "(B, T), 1.0 on tokens that count, 0.0 on padding",
    "sequence": "(B, T) int64, number of the response, -1 on padding; a loss that takes it is tested packed, too",
    "tokens": "number of tokens that count in the step, over all micro-batches and ranks",
    "sequences": "number of responses in the step, likewise",
    "parts": "number of micro-batches on this rank",
    "ranks": "number of ranks",
}
#: The kinds of cuts in the order of the report, each with its requirement.
KINDS: Mapping[str, str] = {
    "again": "Under another random seed, a step gives the same gradient.",
    "micro-batches": "A step in micro-batches gives the gradient of the whole step.",
    "padding": "Neither the amount of padding nor what it holds changes the gradient, and padding has none itself.",
    "order": "The order of the responses does not change the gradient.",
    "packed": "All responses end to end in one row give the gradient of padded rows.",
    "ranks": "A step over ranks gives the gradient of the whole step.",
}
#: Causes if all tokens share one factor, and if tokens of one response do not.
_FACTOR = {
    "padding": "padding counts in the divisor",
    "packed": "the divisor counts rows",
    "ranks": "the losses of ranks are averaged: multiply by `ranks`",
    "": "divide by counts of the step, such as `tokens`, or pass accumulate='mean'",
}
_HELD = "the values in padding enter it, for example through a value that is read at the first position"
_FORGOTTEN = "padding has a gradient by `{}` of its own, as in a mean without the mask: multiply every term by `mask`"
_CHOICE = {
    "": "a mean, a threshold, a quantile or a selection is taken over the tokens of one micro-batch",
    "padding": "padding is part of a mean, a threshold or a selection",
    "order": "a selection depends on the order of the responses",
    "packed": "a statistic of a row mixes responses",
}
#: Responses of a random step, tokens of the longest, and the distance of other log-probs from the old ones, nats.
_ROWS, _LONGEST = 16, 24
_SPREAD = {"logprobs": 0.3, "ref_logprobs": 0.5, "rollout_logprobs": 0.1}
#: The arguments with a gradient.
_LIVE = ("logprobs", "entropies")
_ROW = torch.arange(_ROWS).unsqueeze(1).expand(_ROWS, _LONGEST)


@dataclass(frozen=True)
class CutResult(Result):
    """One kind of cuts.

    Attributes:
        moved: the largest move of the gradient, relative to the L2 norm of the gradient of the whole step.
    """

    moved: float = 0.0


@dataclass(frozen=True)
class _Cut:
    """Rows of each micro-batch of each rank, columns of padding before and after, and whether padding is filled."""

    ranks: Sequence[Sequence[Sequence[int]]]
    before: int = 0
    after: int = 0
    filled: bool = False
    packed: bool = False


def assert_cut_free(loss: Callable[..., Any], **options: Any) -> None:
    """Raise if a loss depends on how an optimizer step is split; see :func:`check_cut_free` for the arguments.

    Raises:
        BrokenLaw: an AssertionError whose text is the report.
    """
    report = check_cut_free(loss, **options)
    if not report.ok:
        raise BrokenLaw(str(report))


def check_cut_free(
    loss: Callable[..., Any],
    *,
    accumulate: Literal["sum", "mean"] = "sum",
    even: bool = False,
    steps: int = 4,
    tolerance: float = 1e-5,
) -> Report:
    """Compare the gradients of random optimizer steps that are given to a loss whole and split.

    Args:
        loss: called for each micro-batch with those of :data:`ARGUMENTS` that its parameters name, or with all but
            ``sequence`` if it takes ``**names``; it returns the scalar to backpropagate, or a tuple that begins
            with it. :func:`trl_loss`, :func:`verl_loss` and
            :func:`skyrl_loss` make one of a host's own function. Gradients are averaged over ranks, as by DDP and FSDP.
        accumulate: whether the gradients of the micro-batches of a rank are summed or averaged.
        even: all micro-batches have the same number of responses. Set it if your trainer ensures that.
        steps: number of random optimizer steps, which are the same in every call.
        tolerance: how far a gradient may move, relative to its L2 norm.

    Returns:
        A report with one :class:`CutResult` for each of :data:`KINDS`.

    Raises:
        UnknownName: the loss has a parameter that is not one of the arguments.
        OutOfRange: the loss has no gradient, or one that is not finite; or there is no such ``accumulate``.
    """
    check_choices(check_cut_free, accumulate=accumulate)
    names = _names(loss)
    moved, causes = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, "")
    for seed in range(steps):
        step = _draw(seed)
        gradients, _ = _gradients(loss, names, step, _Cut([[range(_ROWS)]]), accumulate)
        if not gradients.isfinite().all() or not gradients.any():
            raise OutOfRange("assert_cut_free: the gradient of a whole step is zero or not finite. Check the loss.")
        for kind, cut in _cuts(step["mask"].sum(1), seed, even, "sequence" in names):
            moved_gradients, padding = _gradients(loss, names, step, cut, accumulate, seed=kind == "again")
            moves = [(moved_gradients - gradients).norm(), padding.norm() if cut.filled else torch.zeros(())]
            distance, padding_norm = (float((move / gradients.norm()).nan_to_num(torch.inf)) for move in moves)
            if max(distance, padding_norm) > tolerance:
                forgotten = _FORGOTTEN.format(_LIVE[int(padding.argmax())])
                cause = _cause(moved_gradients, gradients, step, cut, kind) if distance > tolerance else forgotten
                moved[kind], causes[kind] = max(moved[kind], distance, padding_norm), causes[kind] or cause
    results = []
    for kind, requirement in KINDS.items():
        silent = kind == "packed" and "sequence" not in names
        outcome: Any = "failed" if causes[kind] else "silent" if silent else "passed"
        cause = f"random numbers fall on other tokens, or {causes[kind]}" if causes["again"] else causes[kind]
        size = f"The gradient moves by up to {moved[kind]:.2g} of its norm: "
        detail = f"{size}{causes[kind] if kind == 'again' else cause}." if causes[kind] else ""
        results.append(CutResult(kind, requirement, outcome, detail, moved[kind]))
    return Report(getattr(loss, "__name__", repr(loss)), results)


def _names(loss: Callable[..., Any]) -> list[str]:
    """The parameters of a loss: names of :data:`ARGUMENTS`, and others only with a default."""
    parameters = inspect.signature(loss).parameters.values()
    if any(entry.kind is entry.VAR_KEYWORD for entry in parameters):
        return [name for name in ARGUMENTS if name != "sequence"]
    for entry in parameters:
        if entry.name not in ARGUMENTS and entry.default is entry.empty:
            raise UnknownName(f"assert_cut_free gives a loss no '{entry.name}'. {did_you_mean(entry.name, ARGUMENTS)}")
    return [entry.name for entry in parameters if entry.name in ARGUMENTS]


def _draw(seed: int, longest: int = _LONGEST) -> dict[str, Tensor]:
    """A step of ragged responses of both signs, with ratios on both sides of any clip range."""
    draw = torch.Generator().manual_seed(seed)

    def normal(columns: int = longest) -> Tensor:
        return torch.randn(_ROWS, columns, generator=draw, dtype=torch.float64)

    old = -0.05 - 1.5 * normal().abs()
    step = {name: (old + scale * normal()).clamp(max=-1e-3) for name, scale in _SPREAD.items()}
    step |= {"old_logprobs": old, "entropies": normal().abs(), "advantages": normal(1).expand(_ROWS, longest)}
    lengths = torch.randint(1, _LONGEST + 1, (_ROWS, 1), generator=draw)
    return {**step, "mask": (torch.arange(_LONGEST) < lengths).double(), "sequence": _ROW}


@cache
def _padding(filled: bool) -> dict[str, Tensor]:
    """What padding holds, more columns than any cut has: numbers as a model gives them to each column, or zeros."""
    step = _draw(-1, 2 * _LONGEST)
    step["advantages"] = step["logprobs"] - step["old_logprobs"]  # of both signs, and not one number for a response
    filler = {name: values * filled for name, values in step.items()}
    return {**filler, "mask": torch.zeros(_ROWS, 2 * _LONGEST), "sequence": -torch.ones_like(_ROW).repeat(1, 2)}


def _cuts(lengths: Tensor, seed: int, even: bool, packs: bool) -> Iterator[tuple[str, _Cut]]:
    """The cuts of a step; within each kind, the one that best tells causes apart comes first."""
    by_length = lengths.argsort(stable=True).tolist()
    shuffled = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(seed)).tolist()

    def dealt(rows: list[int], size: int) -> list[list[int]]:
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    for size in (4, 8, 1) if even else (5, 4, 8, 1):
        yield "micro-batches", _Cut([dealt(shuffled, size)])
        yield "micro-batches", _Cut([dealt(by_length, size)])
    for first, size in ((8, 4), (8, 8)) if even else ((4, 4), (8, 4), (8, 8)):
        yield "ranks", _Cut([dealt(by_length[:first], size), dealt(by_length[first:], size)])
    yield "again", _Cut([[range(_ROWS)]])
    for before, after in ((0, 7), (5, 0), (3, 4)):
        yield "padding", _Cut([[range(_ROWS)]], before, after, filled=True)
    yield "order", _Cut([[shuffled]])
    if packs:
        yield "packed", _Cut([[range(_ROWS)]], packed=True)


def _gradients(
    loss: Callable[..., Any], names: list[str], step: Mapping[str, Tensor], cut: _Cut, accumulate: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """``(N, 2)``, by the log-prob and by the entropy of each token of the step, and ``(2,)``, the norms on padding.

    Random numbers start at a seed.
    """
    filling = _padding(cut.filled)
    live, padding = ({name: tensor[name].clone().requires_grad_() for name in _LIVE} for tensor in (step, filling))
    counted = step["mask"] > 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parts in cut.ranks:
            counts = {"tokens": int(counted.sum()), "sequences": _ROWS, "parts": len(parts), "ranks": len(cut.ranks)}
            for part in parts:
                arguments: dict[str, Any] = dict(counts)
                rows = list(part)
                mask = counted[rows]
                longest = int(mask.sum(1).max())
                for name, values in {**step, **live}.items():
                    filler = {**filling, **padding}[name]
                    if cut.packed:
                        arguments[name] = values[rows][mask].unsqueeze(0)
                    else:
                        cells, sampled = (
                            pad(tensor[:, :longest], (cut.before, cut.after)) for tensor in (values[rows], mask)
                        )
                        arguments[name] = torch.where(sampled, cells, filler[rows, : cells.shape[1]])
                value = loss(**{name: arguments[name] for name in names})
                value = value[0] if isinstance(value, tuple) else value
                if not (isinstance(value, Tensor) and value.requires_grad):
                    raise OutOfRange("assert_cut_free: the loss has no grad. Do not detach `logprobs`.")
                (value / (len(parts) if accumulate == "mean" else 1) / len(cut.ranks)).backward()
    leaves = [*live.values(), *padding.values()]
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return torch.stack([grad[counted] for grad in grads[:2]], dim=-1), torch.stack([grad.norm() for grad in grads[2:]])


def _cause(moved: Tensor, gradients: Tensor, step: Mapping[str, Tensor], cut: _Cut, kind: str) -> str:
    """The cause of a moved gradient, from the tokens that share a factor."""
    if kind == "again" or not moved.isfinite().all():
        return "the loss draws random numbers by the order of calls" if kind == "again" else "it is not finite"
    column = int((moved - gradients).norm(dim=0).argmax())
    moved, gradients = moved[:, column], gradients[:, column]
    row = _ROW[step["mask"] > 0]

    def factors(groups: Sequence[Sequence[int]]) -> Tensor | None:
        """The factor of each group of responses, if all its tokens share one."""
        members = [torch.isin(row, torch.tensor(list(group))) & ((gradients != 0) | (moved != 0)) for group in groups]
        ratios = [moved[member] / gradients[member] for member in members]
        return torch.stack([ratio.mean() for ratio in ratios]) if all(map(_same, ratios)) else None

    parts = [list(part) for parts in cut.ranks for part in parts]
    if (shared := factors(parts)) is not None:
        if _same(shared):
            factor = float(shared.nanmean())
            cause = _FACTOR.get(kind, _FACTOR[""]) if kind != "padding" or 0 < factor < 1 else _HELD
            return f"all of it is {factor:.3g} times as large: {cause}"
        lengths = [step["mask"][part].sum(1) for part in parts]
        sizes = {
            "tokens": [float(length.sum()) for length in lengths],
            "responses": [float(len(length)) for length in lengths],
            "columns, padding included": [float(length.max()) for length in lengths],
            "positions, padding included": [float(length.max() * len(length)) for length in lengths],
        }
        for unit, size in sizes.items():
            if _same(shared * torch.tensor(size)):
                return f"each micro-batch is divided by the number of its own {unit}"
        return f"each micro-batch has its own factor, {float(shared.min()):.3g} to {float(shared.max()):.3g}"
    if (shared := factors([[number] for number in range(_ROWS)])) is not None:
        low, high = float(shared.min()), float(shared.max())
        cause = _HELD if kind == "padding" else "other responses enter it"
        return f"each response has its own factor, {low:.3g} to {high:.3g}: {cause}"
    odd = int((moved - gradients).abs().gt(1e-6 * gradients.abs().max()).sum())
    return f"{odd} of {len(row)} tokens change, unlike others of their response: {_CHOICE.get(kind, _CHOICE[''])}"


def _same(values: Tensor) -> bool:
    """Whether the values that are numbers are one number."""
    values = values[~values.isnan()]
    return bool((values - values[:1]).abs().le(1e-4 * values[:1].abs()).all())


# -- functions of hosts ------------------------------------------------------------------------------------------------


def trl_loss(trainer: Any) -> Callable[..., Tensor]:
    """The ``_compute_loss`` of a TRL ``GRPOTrainer`` or of a subclass, whose model is not run. Pass ``even=True``.

    Args:
        trainer: built with any small model. It keeps metrics of the drawn steps: do not train with it afterwards.
    """
    scored = 3 if "compute_aux_loss" in inspect.signature(trainer._get_per_token_logps_and_entropies).parameters else 2

    def loss(**arguments: Any) -> Tensor:
        live, mask = (arguments["logprobs"], arguments["entropies"], None)[:scored], arguments["mask"].long()
        first = torch.ones_like(mask[:, :1])
        inputs = {
            "prompt_ids": first,
            "prompt_mask": first,
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": (arguments["advantages"] * mask).sum(1) / mask.sum(1),
            "old_per_token_logps": arguments["old_logprobs"],
            "ref_per_token_logps": arguments["ref_logprobs"],
            "sampling_per_token_logps": arguments["rollout_logprobs"],
            "importance_sampling_ratio": (mask * (arguments["old_logprobs"] - arguments["rollout_logprobs"])).exp(),
            "num_items_in_batch": torch.tensor(arguments["tokens"]),
        }
        replacements = (
            (trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: live),
            (trainer, "current_gradient_accumulation_steps", arguments["parts"]),
            (trainer.args, "steps_per_generation", arguments["parts"]),
            (type(trainer.accelerator), "num_processes", arguments["ranks"]),
        )
        with ExitStack() as patches:
            for owner, name, value in replacements:
                patches.enter_context(mock.patch.object(owner, name, value, create=True))
            return trainer._compute_loss(trainer.model.train(), inputs)  # type: ignore[no-any-return]  # the host is untyped

    loss.__name__ = f"{type(trainer).__name__}, loss_type {trainer.loss_type}"
    return loss


def verl_loss(function: Callable[..., Any], config: Any, mode: str = "token-mean") -> Callable[..., Tensor]:
    """A policy loss of verl, with the counts of the step that verl's worker passes.

    Args:
        function: a policy loss, as ``register_policy_loss`` takes it or ``get_policy_loss_fn`` gives it.
        config: an ``ActorConfig``.
        mode: verl's ``loss_agg_mode``.
    """

    def loss(**arguments: Any) -> Tensor:
        counts = {"dp_size": "ranks", "batch_num_tokens": "tokens", "global_batch_size": "sequences"}
        info = {name: arguments[count] for name, count in counts.items()}
        config.global_batch_info.update(info, loss_scale_factor=config.loss_scale_factor)
        tensors = (arguments[name] for name in ("old_logprobs", "logprobs", "advantages", "mask"))
        return function(*tensors, loss_agg_mode=mode, config=config)[0]  # type: ignore[no-any-return]  # the host is untyped

    loss.__name__ = function.__name__
    return loss


def skyrl_loss(function: Callable[..., Any], config: Any) -> Callable[..., Tensor]:
    """A policy loss of SkyRL's registry, with advantages that are divided as SkyRL does for a mini-batch.

    Args:
        function: a policy loss, as ``register_policy_loss`` takes it.
        config: an ``AlgorithmConfig`` with the ``loss_reduction`` 'token_mean', or 'sequence_mean'.
    """

    def loss(**inputs: Any) -> Tensor:
        of_response = inputs["sequences"] * inputs["mask"].sum(1, keepdim=True)
        scaled = inputs["advantages"] / (inputs["tokens"] if config.loss_reduction == "token_mean" else of_response)
        evidence = {"loss_mask": inputs["mask"], "rollout_logprobs": inputs["rollout_logprobs"]}
        value = function(inputs["logprobs"], inputs["old_logprobs"], scaled, config=config, **evidence)[0]
        return value * inputs["ranks"]  # type: ignore[no-any-return]  # the host is untyped

    loss.__name__ = function.__name__
    return loss
