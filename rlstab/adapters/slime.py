"""The data level inside slime, by its hook ``--rollout-data-postprocess-path``: a contract, never run in slime.

slime calls the hook on every rank with all the responses of a rollout, after their log-probs and advantages and before
its first optimizer step, as ``function(args, rollout_id, rollout_data)``; its guide prints another signature. The hook
puts masks and advantages in the place of slime's, and slime's own ``policy_loss`` does the rest. Read at THUDM/slime
commit 624b824 (2026-08-21), version 0.3.1: ``slime/backends/megatron_utils/actor.py`` and ``loss.py``,
``slime/ray/rollout.py``, ``slime/utils/dp_schedule.py``.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlstab.adapters.data import DataLevel, DataStep, HostMean
from rlstab.adapters.kept_state import keep, restore
from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.objective import TokenObjective
from rlstab.core.walk import walk
from rlstab.errors import ConfigError, HostError, MissingSignal

#: The argument with the file of the objective, set by slime's ``--custom-config-path``.
OBJECTIVE = "rlstab_objective"
#: What slime's loss must not do beside the objective's, each with what to set.
OFF: Mapping[str, tuple[Any, str]] = {
    "entropy_coef": (0.0, "--entropy-coef 0"),
    "use_kl_loss": (False, "no --use-kl-loss"),
    "use_opsm": (False, "no --use-opsm"),
    "custom_pg_loss_reducer_function_path": (None, "no --custom-pg-loss-reducer-function-path"),
}
#: Estimators with which slime's loss has a ratio or a pull of its own.
OTHER_LOSSES = ("gspo", "cispo")
#: Names of signals in the rollout data of slime, where they differ.
NAMES: Mapping[str, str] = {"entropies": "entropy", "rollout_logprobs": "rollout_log_probs"}
#: Of the checkpoint: a folder beside slime's own, and the call of the hook in slime's actor.
FOLDER, HOOK = "rlstab", "rollout_data_postprocess"


class Postprocess:
    """The hook, and what one process of slime keeps between rollouts. slime is given :data:`postprocess`.

    Attributes:
        level: None until the first rollout.
        comm: the ranks that share an optimizer step; None asks Megatron.
    """

    def __init__(self, comm: Comm | None = None) -> None:
        self.level: DataLevel | None = None
        self.comm = comm

    def __call__(self, args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        """Put masks and advantages in the place of slime's, for every optimizer step of the rollout.

        Raises:
            ConfigError: an argument of slime and the objective disagree, or no mask and no advantages can say what a
                method asks for.
            MissingSignal: a method reads what slime did not compute.
            CheckpointError: the run goes on, and the state of the objective is not there.
        """
        if "advantages" not in rollout_data:  # a stage of the pipeline that computes no loss
            return
        comm = _data_parallel(rollout_data) if self.comm is None else self.comm
        if self.level is None:
            self.level = self._begun(args, rollout_id)
        rollout = _Rollout(args, rollout_data, self.level.objective)
        first, metrics = 0, {}
        pairs = zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True)
        for count, rollouts in pairs:
            parts = rollout_data["micro_batch_indices"][first : first + count]
            first += count
            found = self.level.step([rollout.batch(part) for part in parts], comm)
            rollout.put(parts, found, int(rollouts), comm)
            metrics = found.metrics()
        for name, value in metrics.items():  # those of the last optimizer step; slime logs what is a tensor
            rollout_data[f"rlstab/{name}"] = torch.tensor(value)
        if self.level.objective.init_state() and getattr(args, "save", None) and _first_rank():
            folder = Path(args.save, FOLDER, str(rollout_id))
            folder.mkdir(parents=True, exist_ok=True)
            keep(folder, self.level.objective, self.level.state)

    def _begun(self, args: Any, rollout_id: int) -> DataLevel:
        path = getattr(args, OBJECTIVE, None)
        if not path:
            raise ConfigError(
                f"slime's arguments name no objective. Write {OBJECTIVE}: objective.yaml into a file, and give slime "
                f"--custom-config-path with it."
            )
        level = DataLevel(path, HostMean("nothing"))
        check_arguments(args, level)
        if rollout_id and level.objective.init_state():
            folder = getattr(args, "load", None) or getattr(args, "save", None) or "."
            level.state = restore(Path(folder, FOLDER, str(rollout_id - 1)), level.objective)
        return level


#: ``--rollout-data-postprocess-path rlstab.adapters.slime.postprocess``
postprocess = Postprocess()


def check_arguments(args: Any, level: DataLevel) -> None:
    """Refuse arguments with which slime's loss is another one.

    Raises:
        ConfigError: names the argument and what to set.
    """
    if getattr(args, "loss_type", "policy_loss") != "policy_loss":
        raise ConfigError(f"slime's --loss-type is {args.loss_type}, and masks and advantages go into policy_loss.")
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator in OTHER_LOSSES:
        raise ConfigError(
            f"slime's --advantage-estimator {estimator} also changes its loss. Take grpo: the advantages are the same."
        )
    for name, (wanted, cure) in OFF.items():
        if getattr(args, name, wanted) not in (wanted, None):
            raise ConfigError(
                f"slime's {name} is {getattr(args, name)!r}, a term beside the objective, which is the whole loss. "
                f"Set {cure}."
            )
    own = [leaf.name for leaf in walk(level.objective) if "rollout_logprobs" in leaf.method.needs]
    acting = [name for name in own if name != "mismatch" and not name.startswith("observe_")]
    if getattr(args, "use_tis", False) and acting:
        raise ConfigError(
            f"'{acting[0]}' corrects for the sampler, and so does slime's --use-tis: together they would do it twice. "
            f"Remove one of them."
        )
    loss = level.loss
    for name, flag, wanted in (
        ("eps_clip", "--eps-clip", loss.low),
        ("eps_clip_high", "--eps-clip-high", loss.high),
        ("eps_clip_c", "--eps-clip-c", loss.dual_clip),
    ):
        if getattr(args, name, None) != wanted:
            cure = f"Set {flag} {wanted}" if wanted is not None else f"Leave {flag} out"
            raise ConfigError(
                f"slime's {name} is {getattr(args, name, None)}, and the objective's clip has {wanted}. {cure}."
            )


def check_host() -> None:
    """Refuse an installed slime that does not call the hook as this module expects.

    Raises:
        HostError: slime's actor is not found, or calls the hook otherwise or not at all.
    """
    spec = importlib.util.find_spec("slime")
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    path = next((one for root in roots if (one := Path(root, "backends/megatron_utils/actor.py")).exists()), None)
    if path is None:
        raise HostError("the installed package slime has no backends/megatron_utils/actor.py. Install THUDM/slime.")
    calls = [
        [ast.unparse(one) for one in node.args]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == HOOK
    ]
    if calls != [["self.args", "rollout_id", "rollout_data"]]:
        raise HostError(
            f"{path} calls its hook {HOOK} with {calls or 'nothing'}, expected (self.args, rollout_id, rollout_data). "
            f"Take slime 0.3.1."
        )


@dataclass(frozen=True)
class _Rollout:
    """What slime hands over, a list of ``(R,)`` tensors per name, and what is put in its place."""

    args: Any
    data: dict[str, Any]
    objective: TokenObjective

    def batch(self, part: Sequence[int]) -> TokenBatch:
        """The evidence of one micro-batch."""
        masks = [self.data["loss_masks"][one] for one in part]
        logprobs = self._signal("log_probs", part, masks)
        old = self._signal("rollout_log_probs", part, masks) if self.args.use_rollout_logprobs else logprobs
        if logprobs is None and "logprobs" in self.objective.reads_policies:
            raise self._missing("logprobs", "log_probs")
        if old is None:
            if "old_logprobs" in self.objective.reads_policies:
                raise self._missing("old_logprobs", "log_probs")
            old = torch.zeros(_padded(masks).shape, device=masks[0].device)  # nothing reads them
        given = {}
        for name in sorted(self.objective.needs - {"truncated"}):
            given[name] = self._signal(NAMES.get(name, name), part, masks)
            if given[name] is None:
                raise self._missing(name, NAMES.get(name, name))
        index = torch.tensor([int(self.data["sample_indices"][one]) for one in part], device=masks[0].device)
        truncated = torch.tensor([float(self.data["truncated"][one]) for one in part], device=masks[0].device)
        return TokenBatch.from_padded(
            response_mask=_padded(masks),
            advantages=_padded([self.data["advantages"][one] for one in part]),
            old_logprobs=old,
            logprobs=logprobs,
            truncated=truncated if "truncated" in self.objective.needs else None,
            sequence_ids=index,
            group_ids=index // int(self.args.n_samples_per_prompt),
            **given,  # type: ignore[arg-type]  # signals alone
        )

    def put(self, parts: Sequence[Sequence[int]], found: DataStep, rollouts: int, comm: Comm) -> None:
        """Masks, advantages and the divisors of rollouts, for one optimizer step.

        slime adds ``A * mask`` of each response up, over ``rollout_mask_sums`` and the rollouts of the step, or with
        ``--calculate-per-token-loss`` over the tokens of all masks, where an empty mask counts one. What it divides by
        is multiplied into the advantages.
        """
        rows = [
            (index, one, place)
            for part, one in zip(parts, found.parts, strict=True)
            for place, index in enumerate(part)
        ]
        masks = {}
        for index, one, place in rows:
            old = self.data["loss_masks"][index]
            masks[index] = one.mask[place, : old.numel()].to(old.dtype)
            self.data["loss_masks"][index] = masks[index]
        sizes = _sizes(masks.values())
        sums = self._rollout_sums(list(masks), sizes, comm)
        tokens = float(comm.sum(sizes.clamp(min=1).sum().reshape(1)))
        for index, one, place in rows:
            self.data["rollout_mask_sums"][index] = sums[index]
            share = tokens if self.args.calculate_per_token_loss else max(sums[index], 1.0) * rollouts
            old = self.data["advantages"][index]
            self.data["advantages"][index] = (one.advantages[place, : old.numel()].double() * share).to(old.dtype)

    def _rollout_sums(self, samples: Sequence[int], sizes: Tensor, comm: Comm) -> dict[int, float]:
        """Tokens of the masks of all samples of a rollout, wherever they are, by sample of this rank."""
        ids = [int(self.data["rollout_ids"][one]) for one in samples]
        every = comm.gather(torch.tensor(ids, dtype=torch.float64)).tolist()
        total: dict[int, float] = {}
        for one, size in zip(every, comm.gather(sizes).tolist(), strict=True):
            total[int(one)] = total.get(int(one), 0.0) + size
        return {sample: total[one] for sample, one in zip(samples, ids, strict=True)}

    def _signal(self, name: str, part: Sequence[int], masks: Sequence[Tensor]) -> Tensor | None:
        values = self.data.get(name)
        if values is None:
            return None
        chosen = [values[one] for one in part]
        if any(one.shape != mask.shape for one, mask in zip(chosen, masks, strict=True)):
            raise ConfigError(
                f"slime's {name} is not as long as the responses: context parallelism cuts them over ranks, and the "
                f"hook sees a piece of each. Set --context-parallel-size 1."
            )
        return _padded(chosen)

    def _missing(self, name: str, key: str) -> MissingSignal:
        leaves = walk(self.objective, observed=True)
        who = next(leaf.name for leaf in leaves if name in leaf.method.needs | leaf.method.reads_policies)
        cures = {"entropy": "Set --use-rollout-entropy", "rollout_log_probs": "Let the rollout return log-probs"}
        return MissingSignal(
            f"'{who}' reads '{name}', and slime's rollout data has no '{key}'. {cures.get(key, 'Let slime make it')}; "
            f"where a rollout makes one optimizer step, slime leaves out the forward for log_probs and entropy unless "
            f"--keep-old-actor is set."
        )


def _sizes(masks: Iterable[Tensor]) -> Tensor:
    """``(k,)`` float64 on the CPU: tokens of each mask, with one wait for the device."""
    counted = [one.sum() for one in masks]
    return torch.stack(counted).double().cpu() if counted else torch.zeros(0, dtype=torch.float64)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


def _data_parallel(rollout_data: Mapping[str, Any]) -> Comm:
    """The ranks that share an optimizer step of slime."""
    if not (dist.is_available() and dist.is_initialized()):
        return LocalComm()
    from megatron.core import mpu

    device = rollout_data["advantages"][0].device
    return TorchComm(mpu.get_data_parallel_group(with_context_parallel=False), device)


def _first_rank() -> bool:
    """One rank of the last stage of the pipeline writes; the states of all are the same."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    from megatron.core import mpu

    return bool(
        mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )
