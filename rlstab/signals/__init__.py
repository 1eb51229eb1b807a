"""Per-token signals of the next-token distribution: log-prob, entropy, max log-prob, kept mass, support mass,
sum of squares.

The only place where a vocabulary is touched. Everything downstream sees ``(N,)`` float32 fields.

One chunked pass finds what is asked for and nothing else. The backward reads off the incoming gradients which rows
are live, and computes only their logits: a method that drops 80 % of the tokens pays for 20 %.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlstab.core.devices import sent
from rlstab.errors import MissingSignal, OutOfRange, ShapeError
from rlstab.signals.divergence import Source, Teacher, TopK
from rlstab.signals.logits import LogitsSignals
from rlstab.signals.support import as_support
from rlstab.signals.tile import ORDER, SIGNAL_NAMES, TRAINER_SIGNALS, Ask, Target, TokenSignals, wide
from rlstab.signals.tiled_head import HeadSignals, slow_bf16

__all__ = [
    "COLUMNS",
    "ROWS",
    "SIGNAL_NAMES",
    "TRAINER_SIGNALS",
    "Teacher",
    "TokenSignals",
    "TopK",
    "as_support",
    "slow_bf16",
    "token_signals",
    "token_signals_from_logits",
]

#: Rows of the largest tile of logits that is held; its columns are of the vocabulary. On a CPU it stays near the cache.
ROWS = 1024
#: Columns of that tile.
COLUMNS = 4096
#: Rows of it on a GPU, where nothing is cached and few launches count: 128 MB in float32. Chosen, not measured.
GPU_ROWS = 8192


def token_signals(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    needs: Set[str] = frozenset({"logprobs", "entropies"}),
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    min_p: float | None = None,
    support: Tensor | None = None,
    rows: Mapping[str, Tensor] | None = None,
    check_ids: bool = True,
    teacher: Source | None = None,
    beta: float = 1.0,
) -> TokenSignals:
    """Signals from hidden states and the weight of the vocabulary head, without ever holding ``(N, V)`` logits.

    Sums over the vocabulary are float32 (float64 for float64 inputs). Only first derivatives exist.

    Args:
        hidden: ``(N, d)``, differentiable.
        head_weight: ``(V, d)``, differentiable; a frozen one costs nothing in the backward.
        token_ids: ``(N,)`` int64, the tokens whose log-prob is wanted.
        temperature: divides the logits; one number, or ``(N,)`` of them (no gradient).
        needs: names of the fields to compute; nothing else is.
        bias: ``(V,)`` of the head, or None; differentiable.
        logit_scale: multiplies the output of the head.
        softcap: c of a final ``c * tanh(logits / c)``, before the temperature.
        min_p: defines ``log_kept_mass``.
        support: ``(N, K)`` ids of the tokens that the sampler kept, see :func:`as_support`; defines
            ``log_support_mass``.
        rows: the ``(N,)`` bool of rows on which a name is needed; it is 0 elsewhere.
        check_ids: look whether the vocabulary has the tokens. On a GPU that waits for all kernels before; False where
            they are known to be in it, such as inputs of the same model.
        teacher: what ``teacher_divergence`` compares with: a :class:`Teacher`, or the :class:`TopK` of one, which may
            be the sampler. It is compared at the same temperature.
        beta: which divergence, from 0 (forward) to 1 (reverse); see :mod:`rlstab.signals.divergence`.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        MissingSignal: no such signal, ``log_support_mass`` without a support, or ``teacher_divergence`` without a
            teacher.
        OutOfRange: temperature or soft cap not positive, a token that the vocabulary does not have, or
            ``log_kept_mass`` without a ``min_p`` in (0, 1]; a token is not in its support; or ``beta`` not in [0, 1].
        RlstabError: in the backward, if a second derivative is asked for.
    """
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ShapeError(
            f"token_signals: hidden is {tuple(hidden.shape)} and head_weight {tuple(head_weight.shape)}; expected "
            f"(N, d) and (V, d)."
        )
    if bias is not None and bias.shape != head_weight.shape[:1]:
        raise ShapeError(f"token_signals: bias is {tuple(bias.shape)}, expected ({head_weight.shape[0]},).")
    if softcap is not None and not softcap > 0:
        raise OutOfRange(f"softcap = {softcap!r}, expected a number above 0, or None.")
    hidden, head_weight, bias = _autocast(hidden, head_weight, bias)
    if {hidden.dtype} != {tensor.dtype for tensor in (hidden, head_weight, bias) if tensor is not None}:
        raise ShapeError(
            f"token_signals: hidden is {hidden.dtype}, head_weight {head_weight.dtype}"
            f"{'' if bias is None else f' and bias {bias.dtype}'}; expected one dtype. Cast them, or run in autocast."
        )
    vocab, compared = head_weight.shape[0], (teacher, beta)
    ask, temperature = _ask(hidden, vocab, token_ids, temperature, needs, min_p, support, rows, check_ids, compared)
    values = HeadSignals.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
        hidden, head_weight, bias, token_ids, temperature, float(logit_scale), softcap, ask
    )
    return _record(values, rows or {})


def token_signals_from_logits(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    needs: Set[str] = frozenset({"logprobs", "entropies"}),
    min_p: float | None = None,
    support: Tensor | None = None,
    rows: Mapping[str, Tensor] | None = None,
    check_ids: bool = True,
    teacher: Source | None = None,
    beta: float = 1.0,
) -> TokenSignals:
    """Signals from ``(N, V)`` logits that already exist; they are not modified. See :func:`token_signals`."""
    if logits.ndim != 2:
        raise ShapeError(f"token_signals_from_logits: logits are {tuple(logits.shape)}, expected (N, V).")
    vocab, compared = logits.shape[1], (teacher, beta)
    ask, temperature = _ask(logits, vocab, token_ids, temperature, needs, min_p, support, rows, check_ids, compared)
    values = LogitsSignals.apply(logits, token_ids, temperature, ask)  # type: ignore[no-untyped-call]  # as above
    return _record(values, rows or {})


def _autocast(*inputs: Any) -> tuple[Any, ...]:
    """What autocast would make of the inputs of a linear layer."""
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind):
        return inputs
    narrow = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(narrow) for tensor in inputs)


def _ask(
    source: Tensor,
    vocab: int,
    token_ids: Tensor,
    temperature: float | Tensor,
    needs: Set[str],
    min_p: float | None,
    support: Tensor | None,
    rows: Mapping[str, Tensor] | None,
    check_ids: bool,
    compared: tuple[Source | None, float],
) -> tuple[Ask, float | Tensor]:
    """What is checked: the request, and the temperature in the dtype of the sums."""
    unknown = sorted(needs - frozenset(ORDER))
    if unknown:
        raise MissingSignal(f"no signal is called '{unknown[0]}'. Known: {', '.join(sorted(ORDER))}.")
    by_row = {"token_ids": token_ids, **{f"rows['{name}']": where for name, where in (rows or {}).items()}}
    if isinstance(temperature, Tensor):
        by_row["temperature"] = temperature
    for name, values in by_row.items():
        if values.shape != source.shape[:1]:
            raise ShapeError(f"{source.shape[0]} rows and {name} of shape {tuple(values.shape)}; expected (N,).")
    if not bool((torch.as_tensor(temperature) > 0).all()):
        raise OutOfRange(f"temperature = {temperature!r}, expected positive numbers.")
    if "log_kept_mass" in needs and not (min_p is not None and 0 < min_p <= 1):
        raise OutOfRange(f"log_kept_mass needs min_p in (0, 1], not {min_p!r}.")
    if "log_support_mass" in needs:
        _check_support(support, source, vocab, token_ids, check_ids)
    if check_ids and "logprobs" in needs and not bool(((token_ids >= 0) & (token_ids < vocab)).all()):
        raise OutOfRange(f"a token id is not in [0, {vocab}), the vocabulary. Leave out the rows without a token.")
    temperature = temperature.detach().to(wide(source.dtype)) if isinstance(temperature, Tensor) else float(temperature)
    height = ROWS if source.device.type == "cpu" else GPU_ROWS
    ask = Ask(frozenset(needs), min_p, (rows or {}).get("log_kept_mass"), height, COLUMNS, support)
    if "teacher_divergence" in needs:
        ask = replace(ask, target=_target(source, vocab, temperature, *compared))
    return ask, temperature


def _target(source: Tensor, vocab: int, temperature: float | Tensor, teacher: Source | None, beta: float) -> Target:
    """What the policy is compared with, checked."""
    if teacher is None:
        raise MissingSignal("teacher_divergence needs a teacher. Pass teacher=Teacher(hidden, weight), or a TopK.")
    if not 0 <= beta <= 1:
        raise OutOfRange(f"beta = {beta!r}, expected a number in [0, 1].")
    shapes = {name: tuple(values.shape) for name, values in vars(teacher).items() if isinstance(values, Tensor)}
    for name in shapes.keys() & {"hidden", "ids", "logprobs"}:
        if shapes[name][:1] != source.shape[:1] or len(shapes[name]) != 2:
            raise ShapeError(f"{source.shape[0]} rows, and a teacher with {name} of shape {shapes[name]}.")
    if isinstance(teacher, Teacher) and (shapes["weight"][1:] != shapes["hidden"][1:] or shapes["weight"][0] < vocab):
        raise ShapeError(
            f"a teacher with hidden {shapes['hidden']} and weight {shapes['weight']}; expected (N, d') and (V', d') "
            f"with V' of at least {vocab}, the policy's vocabulary."
        )
    if isinstance(teacher, TopK) and (shapes["ids"] != shapes["logprobs"] or teacher.ids.dtype != torch.int64):
        raise ShapeError(
            f"a teacher with ids of {teacher.ids.dtype} and shape {shapes['ids']}, log-probs of {shapes['logprobs']}; "
            f"expected torch.int64, and (N, k) for both."
        )
    return teacher.target(float(beta), vocab, temperature, COLUMNS)


def _check_support(support: Tensor | None, source: Tensor, vocab: int, token_ids: Tensor, check_ids: bool) -> None:
    if support is None:
        raise MissingSignal(
            "log_support_mass needs support=, the tokens that the sampler kept at each token. Have the sampler return "
            "them (vLLM: return_sampling_mask) and write support=as_support(ids, offsets=...)."
        )
    if support.ndim != 2 or support.shape[0] != source.shape[0] or support.is_floating_point():
        raise ShapeError(
            f"{source.shape[0]} rows and a support of {support.dtype} and shape {tuple(support.shape)}; expected "
            f"(N, K) token ids. See as_support."
        )
    if check_ids and support.numel():
        outside = (support >= 0).any(1) & ~(support == token_ids.unsqueeze(1)).any(1)
        if bool(outside.any()) or int(support.max()) >= vocab:
            raise OutOfRange(
                f"{int(outside.sum())} tokens are not in their support, or an id is not in [0, {vocab}), the "
                f"vocabulary: the supports are not those of these tokens. Align them, one row for each token."
            )


def _record(signals: tuple[Tensor | None, ...], rows: Mapping[str, Tensor]) -> TokenSignals:
    """The record. A signal that is needed on some rows is 0 on the others, and so is its gradient."""
    return TokenSignals(
        **{
            name: torch.where(sent(rows[name], values.device), values, 0.0) if name in rows else values
            for name, values in zip(ORDER, signals, strict=True)
            if values is not None
        }
    )
