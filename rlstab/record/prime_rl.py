"""A line of prime-rl's token export: ``token_exports/step_N/rank_R.jsonl``, schema_version 1.

Fields are those of its writer at 559b447 (``trainer/rl/token_export.py``). A line needs the ids, the loss mask, the
advantages and the trainer's log-probs, without which no loss can be made. All other columns may be missing, as in older
layouts.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rlstab.core.batch_checks import MOST
from rlstab.record.columns import Response, column, columns_of, first, tensors_of_response, whole
from rlstab.record.step import DID, HostLoss

#: Its field names, by those of a record.
NAMES = {
    "ids": "token_ids",
    "mask": "loss_mask",
    "advantages": "advantages",
    "logprobs": "trainer_logprobs",
    "rollout_logprobs": "inference_logprobs",
    "teacher_logprobs": "teacher_logprobs",
    "entropies": "entropy",
    f"{DID}ratio": "importance_ratio",
}
#: Its marks of what the loss did to tokens, by method and action.
ACTIONS = {"trust_region/clipped": "is_masked", "ref_kl/regularised": "ref_kl_weights", "ce/regularised": "ce_weights"}
#: The host if the loss is the default one: only this fills ``is_masked`` and reads the sampler's log-probs. An export
#: does not state the settings of the loss.
DEFAULT = "prime-rl, default loss"
LOSS = HostLoss(
    name="prime-rl/default",
    settings={
        "objective": [
            {"name": "dppo", "low": 0.2, "high": 0.2, "cap": 1e9},
            {"name": "kl", "coefficient": 2e-3, "estimator": "k2", "anchor": "rollout"},
        ]
    },
)


def response_of(record: Mapping[str, Any]) -> Response:
    """The response of a line. Its ratio divides by the log-probs of the sampler, if the line has them.

    Raises:
        Damaged: a required field is missing or malformed.
    """
    values = columns_of(record, NAMES)
    start, count = first(values["mask"]), values["ids"].numel()
    if record.get("rl_weights") is not None:
        weights = column(record, "rl_weights", count).nan_to_num(1.0)  # None is a weight of 1
        values |= {name: values[name] * weights for name in ("mask", "advantages")}
    if (sampled := values.get("rollout_logprobs")) is not None:
        scored = sampled.isfinite() & (sampled <= MOST["old_logprobs"])
        values["old_logprobs"] = torch.where(scored, sampled, values["logprobs"])
    actions = {name: column(record, field, count) for name, field in ACTIONS.items() if record.get(field)}
    default = sampled is not None and all(value is not None for value in record.get("is_masked") or [None])
    values |= {f"{DID}{name}": (marks.nan_to_num(0.0) != 0).double() for name, marks in actions.items()}
    step, rank, part = (
        whole(record.get(name, other)) for name, other in (("step", None), ("rank", 0), ("micro_step", 0))
    )
    return Response(DEFAULT if default else "prime-rl", step, 0, rank, tensors_of_response(values, start, part))
