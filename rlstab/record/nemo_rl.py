"""A line of NeMo-RL's ``train_data_stepN.jsonl``: a batch of one response, padded to the longest of the step.

Fields are those of its writers at 7ea279a (``algorithms/grpo.py``, ``utils/logger.py``).
"""

import re
from collections.abc import Mapping
from typing import Any

from rlstab.record.columns import Response, column, columns_of, first, tensors_of_response, whole

#: Its field names, by those of a record.
NAMES = {
    "ids": "token_ids",
    "mask": "token_loss_mask",
    "advantages": "advantages",
    "logprobs": "prev_logprobs",
    "rollout_logprobs": "generation_logprobs",
}


def response_of(record: Mapping[str, Any], stem: str) -> Response:
    """The response of a line in a file with this stem.

    Raises:
        Damaged: a required field is missing or malformed.
    """
    single = {name: value[0] for name, value in record.items() if isinstance(value, list) and len(value) == 1}
    record = {**record, **single}
    length = whole(record.get("input_lengths"))
    values = {name: padded[:length] for name, padded in columns_of(record, NAMES).items()}
    start = first(values["mask"])
    if not values["logprobs"][values["mask"] != 0].any():  # `force_on_policy_ratio` writes zeros
        values["logprobs"] = column(values, "rollout_logprobs")
    values["mask"] = values["mask"] * (record.get("sample_loss_mask") != 0)
    step = int((re.findall(r"step(\d{1,12})$", stem) or [0])[0])
    reward = record.get("filtered_rewards", record.get("rewards"))  # dynamic sampling: those of all samples
    return Response("NeMo-RL", step, 0, 0, tensors_of_response(values, start, 0, reward))
