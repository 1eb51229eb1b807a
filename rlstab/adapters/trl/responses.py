"""A micro-batch of TRL, as evidence about its response tokens."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlstab.adapters.evidence import hashes, signals_of
from rlstab.adapters.host_correction import CORRECTION
from rlstab.console import capital
from rlstab.core.batch import BASICS, TokenBatch
from rlstab.core.devices import on_cpu, sent
from rlstab.core.objective import TokenObjective
from rlstab.core.turns import turns_of
from rlstab.errors import MissingSignal, ShapeError, kind_of
from rlstab.hosts import HOSTS, facts
from rlstab.signals import SIGNAL_NAMES, as_support

#: A micro-batch as TRL's trainer passes it to its loss.
Inputs: TypeAlias = Mapping[str, Any]
#: A function from such a micro-batch to ``(B, T)`` values of a user-defined signal.
Provider: TypeAlias = Callable[[Inputs], Tensor]

#: TRL's columns by signal.
COLUMNS: Mapping[str, str] = facts("trl")["columns"]
#: The keys under which the adapter adds identities to a generation, before TRL shuffles it.
SEQUENCE_IDS, GROUP_IDS = "rlstab_sequence_ids", "rlstab_group_ids"
#: The ``(B, T, K)`` tokens that the sampler kept, of a generation for `support_replay`.
SUPPORT = "rlstab_support"
#: Of each response, what a dump has in addition: its reward, and the optimizer steps before its sampler's weights.
REWARDS, SAMPLED = "rlstab_rewards", "rlstab_sampled_at"
_MASK = "rlstab_mask"
#: Bits of an id below the number of the visit; no run has more responses.
_VISIT = 48


def response_mask(inputs: Inputs) -> Tensor:
    """``(B, T)`` bool, True on the tokens that the policy wrote, not on padding and on answers of tools."""
    mask: Tensor = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if inputs.get("tool_mask") is not None else mask


def read_masks(parts: Sequence[Any]) -> None:
    """Take the masks of micro-batches to the CPU in one copy, where :func:`mask_on_cpu` finds them."""
    for part, mask in zip(parts, on_cpu([response_mask(part) for part in parts]), strict=True):
        part[_MASK] = mask


def mask_on_cpu(inputs: Inputs) -> Tensor:
    """:func:`response_mask` on the CPU: as :func:`read_masks` took it there, or read now."""
    read: Tensor | None = inputs.get(_MASK)
    return response_mask(inputs).cpu() if read is None else read


def stamp(generated: dict[str, Any], *, first: int, rank: int, ranks: int, group: int) -> dict[str, Any]:
    """Add identities to a generation: the index of a response among those of all ranks, from ``first`` on."""
    rows = generated["completion_ids"].shape[0]
    index = rank * rows + torch.arange(rows)  # on the CPU, where they are counted
    start = first * rows * ranks
    generated[SEQUENCE_IDS] = start + index
    generated[GROUP_IDS] = start + index // group * group
    return generated


def padded_support(responses: Sequence[Mapping[str, Any]], completion_ids: Tensor) -> Tensor:
    """``(B, T, K)`` ids of the tokens that the sampler kept, padded with -1, from the column that a rollout_func adds.

    Args:
        responses: ``support`` of each has a list of ids for each of its tokens; an empty one is the whole vocabulary.
        completion_ids: ``(B, T)``.

    Raises:
        MissingSignal: a response has no ``support``.
        ShapeError, OutOfRange: see :func:`rlstab.signals.as_support`; or a response has more lists than tokens.
    """
    length, lists = completion_ids.shape[1], list[Sequence[int]]()
    for response in responses:
        if response.get("support") is None:
            cure = HOSTS["trl"].cure("log_support_mass")
            raise MissingSignal(f"'support_replay' reads the column 'support' of the rollout_func. {capital(cure)}.")
        if len(response["support"]) > length:
            raise ShapeError(f"'support' lists the tokens kept at {len(response['support'])} of {length} tokens.")
        lists += [*response["support"], *[[]] * (length - len(response["support"]))]
    tokens, counts = torch.tensor([id for ids in lists for id in ids]).long(), torch.tensor([*map(len, lists)])
    return as_support(tokens, counts=counts).view(len(responses), length, -1).to(completion_ids.device)


def stamp_missing(parts: Sequence[Any], *, step: int, rank: int, ranks: int) -> None:
    """Add identities to micro-batches of an optimizer step that a subclass made without :func:`stamp`.

    Responses are numbered in their order, and responses to equal prompts on a rank are a group.
    """
    number = (step * ranks + rank) * sum(len(part["completion_ids"]) for part in parts)
    for part in parts:
        if SEQUENCE_IDS not in part:
            prompts = zip(part["prompt_ids"].cpu(), part["prompt_mask"].cpu().bool(), strict=True)
            part[GROUP_IDS] = hashes(
                prompt[mask].numpy().tobytes() + rank.to_bytes(4, "big") for prompt, mask in prompts
            )
            first, number = number, number + len(part["completion_ids"])
            part[SEQUENCE_IDS] = torch.arange(first, number)


def distinct_ids(parts: Sequence[Inputs]) -> list[Tensor]:
    """``(B,)`` int64 on the CPU for each micro-batch of an optimizer step: the ids of its responses, all different.

    A response that occurs twice in a step, which may use its generation more than once, gets another id each time.
    """
    visits: Counter[int] = Counter()
    ids = []
    for part in parts:
        rows = []
        for number in part[SEQUENCE_IDS].tolist():
            rows.append(number + (visits[number] << _VISIT))
            visits[number] += 1
        ids.append(part[SEQUENCE_IDS].new_tensor(rows))
    return ids


def truncated(inputs: Inputs, ends: Collection[int]) -> Tensor:
    """``(B,)`` bool, whether the response was cut off: its last token is not an end."""
    last = (inputs["completion_mask"].sum(-1) - 1).clamp(min=0)
    tokens = inputs["completion_ids"].gather(1, last.unsqueeze(1)).squeeze(1)
    return ~torch.isin(tokens, sent(torch.tensor(sorted(ends)), tokens.device))


def must_forward(inputs: Inputs, objective: TokenObjective) -> frozenset[str]:
    """The evidence about a micro-batch that only a forward of the policy can give; empty if none is needed.

    Methods that read no log-probs need none; if the rollout makes one optimizer step, TRL keeps no old log-probs, and
    the live ratio needs none. With a support the old log-probs are the sampler's, over the same tokens.
    """
    # an old log-prob replaces one that the sampler lost
    reads_old = objective.needs & {"old_logprobs", "rollout_logprobs"} and SUPPORT not in inputs
    computed = {"logprobs"} if reads_old and inputs.get("old_per_token_logps") is None else set()
    needs = frozenset(objective.needs & SIGNAL_NAMES | computed)
    return needs | {"log_support_mass"} if needs and SUPPORT in inputs else needs


def batch_of(
    inputs: Inputs,
    evidence: Mapping[str, Tensor],
    needs: Set[str],
    providers: Mapping[str, Provider],
    ends: Collection[int],
    ids: Tensor | None = None,
) -> TokenBatch:
    """The evidence about one micro-batch.

    Args:
        inputs: the micro-batch.
        evidence: ``(B, T)`` signals of a forward by the policy at the start of the optimizer step.
        needs: what the objective needs.
        providers: functions for user-defined signals.
        ends: the ids of tokens that end a response.
        ids: ``(B,)`` integers, of its responses; None is what they were stamped with.

    Raises:
        MissingSignal: TRL does not have a signal that was promised when the trainer was made.
        ShapeError: a user-defined function returned something other than ``(B, T)``.
    """
    mask, needs = mask_on_cpu(inputs), needs - BASICS
    old, computed = inputs.get("old_per_token_logps"), dict(evidence)
    if SUPPORT in inputs:
        old = inputs[COLUMNS["rollout_logprobs"]]
        if "logprobs" in evidence:
            computed["logprobs"] = evidence["logprobs"] - evidence["log_support_mass"]
    unread = torch.zeros(mask.shape, device=inputs["completion_ids"].device)
    anchor = next(values for values in (old, computed.get("logprobs"), unread) if values is not None)
    if "truncated" in needs:
        computed["truncated"] = truncated(inputs, ends)
    if "turn" in needs:
        computed["turn"] = turns_of(mask).to(anchor.device)
    for name, provider in providers.items():
        if name in needs:
            values = provider(inputs)
            if not isinstance(values, Tensor) or values.shape != mask.shape:
                shape = tuple(values.shape) if isinstance(values, Tensor) else kind_of(values)
                raise ShapeError(
                    f"signals['{name}'] returned {shape}, expected a tensor of {tuple(mask.shape)}. "
                    f"Change its function."
                )
            computed[name] = values
    return TokenBatch.from_padded(
        response_mask=mask,
        advantages=inputs["advantages"],
        sequence_ids=inputs[SEQUENCE_IDS] if ids is None else ids,
        group_ids=inputs[GROUP_IDS],
        live_ratio=old is None,
        **signals_of(needs, inputs, {**COLUMNS, CORRECTION: CORRECTION}, anchor, computed, host="trl"),
    )
