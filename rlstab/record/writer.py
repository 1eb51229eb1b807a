"""Writes the record of an optimizer step: two files per rank.

``step-000012.rank-0.safetensors`` has the tensors, and ``step-000012.rank-0.json`` describes them. The second is
written last, and each appears only when it is complete: a rank that was killed in between has no record of the step.
"""

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from os.path import lexists
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstab.config import dump_objective
from rlstab.core.batch import TokenBatch, layout_of
from rlstab.core.devices import on_cpu
from rlstab.core.objective import State, TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.saved_state import dump_state
from rlstab.core.turns import context_of
from rlstab.errors import ConfigError
from rlstab.files import replace_file
from rlstab.record.step import BY_TOKEN, CORRECTION, DID, MOST_KEPT, Header, HostLoss, together

#: The tokenizer of the model, in the same folder as the steps.
TOKENIZER = "tokenizer.json"

_NOTHING = {name: torch.zeros(0, dtype=torch.int64) for name in ("lengths", "ids", "mask")}
_NOTHING |= dict.fromkeys(("advantages", "logprobs"), torch.zeros(0))


def write_dump(folder: Path, header: Header, tensors: Mapping[str, Tensor]) -> Path:
    """Write what one rank knows of an optimizer step, in place of an earlier dump of the same step.

    Args:
        folder: the folder of the dump; created if it is missing.
        header: without the checksum.
        tensors: those of :data:`BY_RESPONSE` and :data:`BY_TOKEN` by name, and ``prompt_ids``.

    Returns:
        the path of the JSON file.
    """
    from safetensors.torch import save  # part of the extras that write and read dumps

    data = save({name: values.detach().cpu().contiguous() for name, values in tensors.items()})
    folder.mkdir(parents=True, exist_ok=True)
    header = header.model_copy(update={"sha256": hashlib.sha256(data).hexdigest()})
    path = folder / f"step-{header.step:06d}.rank-{header.rank}.json"
    path.unlink(missing_ok=True)  # or it would describe other tensors
    replace_file(path.with_suffix(".safetensors"), data)
    replace_file(path, header.model_dump_json(indent=1))
    return path


def remove_dump(folder: Path) -> None:
    """Remove the files of a dump, and their folder if nothing else is in it; the target of a link stays."""
    if folder.is_symlink():
        return
    for path in (*folder.glob("step-*.rank-*.*"), folder / TOKENIZER):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


class Recorder:
    """Keeps the micro-batches of an optimizer step of this rank, and writes them at the end of the step.

    Args:
        folder: the folder of the dump.
        every: optimizer steps from one record to the next.
        last: number of the last optimizer step, 0 if it is unknown.

    Attributes:
        parts: the tensors of each micro-batch.
        values: the loss of each that was backpropagated.
    """

    def __init__(self, folder: str | Path, every: int = 1, last: int = 0) -> None:
        self.folder, self.every, self.last = Path(folder), every, last
        self.begin()

    def wants(self, step: int) -> bool:
        """Whether an optimizer step is recorded: every ``every``-th, the first and the last; numbers begin with 1."""
        return step in (1, self.last) or step % self.every == 0

    def begin(self) -> None:
        """Forget everything, including what an exception left of another step."""
        self.parts: list[dict[str, Tensor]] = []
        self.values: list[float] = []

    def add(
        self, tensors: Mapping[str, Tensor], loss: Tensor, logprobs: Tensor, scale: float = 1.0, where: Any = ...
    ) -> None:
        """Keep a micro-batch, before its backward pass.

        Args:
            tensors: those of the responses and tokens of the micro-batch.
            loss: the loss of the micro-batch.
            logprobs: live ones, from which the loss was made.
            scale: the factor by which the trainer multiplies the loss before the backward pass, relative to a mean over
                ranks.
            where: index of the tokens in the log-probs.
        """
        *values, of_loss = on_cpu([*tensors.values(), loss])  # one wait for the device
        part = dict(zip(tensors, values, strict=True))
        part["parts"] = torch.full_like(part["lengths"], len(self.parts))
        part["coefficients"] = torch.zeros_like(part["logprobs"])
        self.parts.append(part)
        self.values.append(float(of_loss) * scale)
        if logprobs.requires_grad:
            of_loss = part["mask"] * scale  # an index may name any log-prob for a token outside of the loss
            index = where.cpu() if isinstance(where, Tensor) else where  # to send it to the device would wait
            logprobs.register_hook(lambda slope: part.update(coefficients=slope.detach().cpu()[index] * of_loss))

    def write_tokenizer(self, tokenizer: Any) -> None:
        """Write the tokenizer by which tokens become text, if it has a fast form and the folder has none yet."""
        path, backend = self.folder / TOKENIZER, getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and not lexists(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, backend.to_str(pretty=True))

    def write(self, name: str, settings: Mapping[str, Any], version: int | None = None, **said: object) -> None:
        """Write the step, and forget it; a rank without responses writes an empty one.

        Args:
            name: the name of the loss.
            settings: those of the loss.
            version: optimizer steps before the weights that sampled all tokens; None leaves it to the micro-batches.
            said: the other fields of :class:`Header`.

        Raises:
            ConfigError: the first step of a run would go into a folder that has steps of another run.
        """
        parts, values = self.parts, self.values
        self.begin()
        if version is not None:
            for part in parts:
                part["versions"] = torch.full_like(part["ids"], version, dtype=torch.int32)
        header = Header.model_validate({**said, "parts": len(parts)})
        if header.step == 1 and any(self.folder.glob(f"step-*.rank-{header.rank}.*")):
            raise ConfigError(f"{self.folder} has the dump of another run, which is not replaced. Give another folder.")
        loss = HostLoss(
            name=name, settings=dict(settings), values=[value if math.isfinite(value) else None for value in values]
        )
        write_dump(self.folder, header.model_copy(update={"loss": loss}), together(parts) if parts else _NOTHING)


def tensors_of(
    batch: TokenBatch,
    live: PolicyOutputs,
    response_ids: Tensor,
    had: Mapping[str, Tensor] | None = None,
    support: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors of a micro-batch; :func:`rlstab.record.effects.what_methods_did` adds to them.

    Args:
        batch: the evidence, built from padded tensors.
        live: outputs that the loss is made of.
        response_ids: ``(B, T)`` int64, the tokens of the rows that the batch was built from.
        had: ``(B, T)`` signals that the trainer had for these rows and the loss may not read.
        support: ``(B, T, K)`` ids of the tokens that the sampler kept, of which at most 64 a token are recorded.
    """
    index = layout_of(batch.here).index
    names = {CORRECTION: "weights", **dict.fromkeys(BY_TOKEN)}
    tokens = {names[name] or name: values for name, values in batch.here.per_token() if name in names}
    if batch.live_ratio:
        del tokens["old_logprobs"]
    tokens |= {f"live_{name}": values for name, values in vars(live).items() if values is not None}
    tokens = dict(zip(tokens, on_cpu([*tokens.values()]), strict=True))  # to compare them
    for name in vars(live):
        if {name, f"live_{name}"} <= tokens.keys() and torch.equal(tokens[name], tokens[f"live_{name}"]):
            del tokens[f"live_{name}"]
    extra = {name: values.reshape(-1)[index].float() for name, values in (had or {}).items() if name not in tokens}
    if support is not None and support.shape[-1]:
        ids = support.flatten(0, 1)[index].int()
        too_large = (ids >= 0).sum(1, keepdim=True) > MOST_KEPT
        ids = pad(ids, (0, MOST_KEPT - ids.shape[1]), value=-1)  # cuts off what is beyond
        extra["support"] = ids.masked_fill(too_large, -2)
    return {
        **tokens,
        **extra,
        "ids": response_ids.reshape(-1)[index],
        "mask": torch.ones(len(batch), dtype=torch.uint8),
        "lengths": batch.lengths.long(),
        "sequence_ids": batch.sequence_ids,
        "group_ids": batch.group_ids,
    }


def with_replies(tensors: Mapping[str, Tensor], response_ids: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a micro-batch with the replies between its turns, which count in no loss; 0 in other columns.

    Args:
        tensors: the result of :func:`tensors_of`.
        response_ids: ``(B, T)`` int64, the tokens of responses and of replies.
        mask: ``(B, T)`` bool, the tokens of responses.

    Returns:
        the tensors, and ``(N,)`` int64, which of the ``n`` tokens of the loss each is, any for a reply.
    """
    context = context_of(mask)
    reply = ~mask[context]
    index = ((~reply).cumsum(0) - 1).clamp(min=0)
    tokens = {name: values for name, values in tensors.items() if name in BY_TOKEN or name.startswith(DID)}
    wider = {name: values.cpu()[index] for name, values in tokens.items()}
    for name, values in wider.items():
        values[reply] = -1 if name == "support" else 0
    return {
        **tensors,
        **wider,
        "ids": response_ids[context],
        "mask": (~reply).to(torch.uint8),
        "lengths": context.sum(1),
    }, index


def settings_of(objective: TokenObjective, state: State, scope: str = "step") -> dict[str, Any]:
    """The settings of the loss ``rlstab``; a state with tensors, which only user-defined methods have, is left out.

    Args:
        objective: its methods.
        state: before the optimizer step.
        scope: as in :func:`rlstab.make_plan`.
    """
    record, tensors = dump_state(state)
    return {"objective": dump_objective(objective), "state": None if tensors else record["state"], "scope": scope}
