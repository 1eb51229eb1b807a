"""Rewards in YAML: what is learnt from, where it is not the task's own scorer alone.

::

    reward: rewards.py:brevity          # a function of one's own in place of the task's scorer

    reward:                             # a weighted sum
      - task                            # the task's own scorer
      - {function: rewards.py:brevity, weight: 0.2}
      - {function: politeness, weight: 0.1, name: polite}     # an installed entry point of the group rlstab.rewards

A function is called with prompt, completion and answer. A relative path starts at the current folder, as every other
path in a run file does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

#: The reward that is the task's own scorer.
TASK = "task"

#: What follows `reward/` in metrics of the trainer and the report already.
TAKEN = frozenset({"area", "best", "last", "mean", "shaped_mean", "true", "zero_std_groups"})

_NAME = re.compile(r"[^\W\d][\w.-]*")


class RewardSettings(BaseModel):
    """One reward. Their weighted sum is what is learnt from, and what an evaluation means by the reward."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    function: str = Field(
        description="`path/to/file.py:function`, the name of an installed entry point of the group rlstab.rewards, or "
        "`task` for the task's own scorer"
    )
    weight: float = Field(1.0, description="factor in the sum; 0 measures without learning from it")
    name: str = Field("", description="in metrics, `reward/<name>`; that of the function where it is left out")
    time_limit: Annotated[float, Field(gt=0)] = Field(
        5.0, description="seconds that a completion may take; then this reward of it is 0"
    )
    workers: Annotated[int, Field(ge=1)] = Field(2, description="processes that score, for each process that trains")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"function": given}
        if isinstance(given, Mapping) and "name" not in given and isinstance(given.get("function"), str):
            return {**given, "name": given["function"].rpartition(":")[2]}
        return given


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str | Mapping) else given


def _fit(rewards: tuple[RewardSettings, ...]) -> tuple[RewardSettings, ...]:
    names = [one.name for one in rewards]
    if not rewards:
        raise _unfit((), f"no reward is listed. Write `{TASK}`, or leave `reward` out, for the task's own scorer.")
    if not any(one.weight for one in rewards):
        raise _unfit((), "every weight is 0, so that there is nothing to learn from. Give one of them another.")
    for place, one in enumerate(rewards):
        file, colon, function = one.function.rpartition(":")
        if (file if colon else function).endswith(".py") != bool(colon) or not function:
            raise _unfit(
                (place, "function"),
                f"'{one.function}' names no function in a file. Write it as path/to/file.py:function.",
            )
        if not _NAME.fullmatch(one.name):
            raise _unfit(
                (place, "name"),
                f"'{one.name}' is no part of the name of a metric. Give the reward a `name` of letters, digits and _.",
            )
        if one.name in TAKEN:
            raise _unfit(
                (place, "name"),
                f"'reward/{one.name}' is a metric of the trainer's own. Give the reward another `name`.",
            )
        if one.name in names[:place]:
            raise _unfit((place, "name"), f"two rewards are called '{one.name}'. Give one of them another `name`.")
        for setting in ("time_limit", "workers"):
            if one.function == TASK and getattr(one, setting) != RewardSettings.model_fields[setting].default:
                raise _unfit(
                    (place, setting),
                    f"the task's own scorer does not read it. Set task.{setting}, where the task has one.",
                )
    return rewards


def _unfit(place: tuple[int | str, ...], text: str) -> PydanticCustomError:
    return PydanticCustomError("unfit", "{text}", {"place": ("reward", *place), "text": text})


#: The value of `reward` in a run: one function, or a list.
Rewards: TypeAlias = Annotated[
    tuple[RewardSettings, ...],
    Field(strict=False),
    BeforeValidator(
        _as_list,
        json_schema_input_type=str | RewardSettings | Annotated[list[str | RewardSettings], Field(min_length=1)],
    ),
    AfterValidator(_fit),
]
