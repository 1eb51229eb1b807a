"""Learning-rate schedules in YAML, by their names in transformers::

optimisation:
lr: 1.0e-5
warmup_optimizer_steps: 20
schedule: cosine                                       # or {name: cosine_with_min_lr, min_lr_rate: 0.1}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

ScheduleName: TypeAlias = Literal[
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_warmup_with_min_lr",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "warmup_stable_decay",
]

#: What each schedule takes beside its name, and has to have.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "cosine": ("num_cycles",),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_with_restarts": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
    "linear": (),
    "polynomial": ("lr_end", "power"),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
#: Those that take the length of the run for granted: a longer run has other learning rates from its beginning.
ENDING = frozenset(OPTIONS) - {"constant", "constant_with_warmup", "inverse_sqrt"}

#: Those of transformers that follow the loss.
FOLLOWING = ("reduce_lr_on_plateau", "greedy")

Shape: TypeAlias = Literal["linear", "cosine", "1-sqrt"]
Share = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[int, Field(ge=1)]


class ScheduleSettings(BaseModel):
    """How the learning rate changes with the optimizer steps; options that are null are transformers' own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: ScheduleName
    num_cycles: Annotated[float, Field(gt=0)] | None = Field(None, description="of the cosine; a half is one descent")
    min_lr: Annotated[float, Field(ge=0)] | None = Field(None, description="of cosine_*_min_lr: where it ends")
    min_lr_rate: Share | None = Field(None, description="the same as a share of lr")
    warmup_lr_rate: Share | None = Field(None, description="of cosine_warmup_with_min_lr: where it begins, by lr")
    lr_end: Annotated[float, Field(ge=0)] | None = Field(None, description="of polynomial: where it ends")
    power: Annotated[float, Field(gt=0)] | None = Field(None, description="of polynomial")
    timescale: Steps | None = Field(None, description="of inverse_sqrt, in optimizer steps")
    num_decay_steps: Steps | None = Field(None, description="of warmup_stable_decay: optimizer steps of the decay")
    num_stable_steps: Steps | None = Field(None, description="of warmup_stable_decay: before it")
    warmup_type: Shape | None = Field(None, description="of warmup_stable_decay")
    decay_type: Shape | None = Field(None, description="of warmup_stable_decay")
    min_lr_ratio: Share | None = Field(None, description="of warmup_stable_decay: where it ends, as a share of lr")

    @property
    def options(self) -> dict[str, Any]:
        """What is passed to transformers."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    @model_validator(mode="after")
    def _fit(self) -> ScheduleSettings:
        for one in self.options:
            if one not in OPTIONS[self.name]:
                of = ", ".join(f"`{option}`" for option in OPTIONS[self.name]) or "nothing"
                raise _unfit((one,), f"the schedule '{self.name}' does not read it; it reads {of}. Remove it.")
        if self.name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and (self.min_lr is None) == (
            self.min_lr_rate is None
        ):
            raise _unfit((), f"'{self.name}' ends at `min_lr` or at `min_lr_rate`. Set one of the two.")
        if self.name == "warmup_stable_decay" and self.num_decay_steps is None:
            raise _unfit((), "'warmup_stable_decay' needs `num_decay_steps`, the optimizer steps of the decay. Set it.")
        if self.name == "cosine_with_restarts" and self.num_cycles is not None and self.num_cycles % 1:
            raise _unfit(("num_cycles",), "'cosine_with_restarts' has whole cycles. Write a whole number.")
        return self


def _unfit(place: tuple[str, ...], text: str) -> PydanticCustomError:
    return PydanticCustomError("unfit", "{text}", {"place": ("optimisation", "schedule", *place), "text": text})


def _named(given: Any) -> Any:
    named = {"name": given} if isinstance(given, str) else given
    if isinstance(named, Mapping) and named.get("name") in FOLLOWING:
        raise _unfit(
            (),
            f"'{named['name']}' follows a loss, and the loss of a policy gradient does not say how well a policy does. "
            f"Take one of: {', '.join(sorted(OPTIONS))}.",
        )
    return named


#: The value of `schedule` in a run: a name, or a mapping.
Schedule: TypeAlias = Annotated[
    ScheduleSettings | None,
    BeforeValidator(_named, json_schema_input_type=ScheduleName | ScheduleSettings | None),
]
