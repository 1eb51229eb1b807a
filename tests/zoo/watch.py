"""Methods at many settings, and an optimizer step on which each has something to do."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

from rlstab.core.method_settings import Setting, settings_of
from rlstab.core.objective import TokenObjective
from rlstab.errors import OutOfRange
from rlstab.testing.steps import make_step
from tests.examples import EXAMPLES

SHIPPED = [type(methods[0]) for methods in EXAMPLES.values()]
STEP = make_step("mixed", [6, 2, 5, 7, 3, 8], 2, 75)
#: A mean entropy near 0.1, no token far from the likeliest and a sampler far off: every method and setting acts.
STEP = STEP.given(
    entropies=0.1 * STEP.evidence["entropies"],
    max_logprobs=0.5 * STEP.evidence["logprobs"],
    rollout_logprobs=0.5 * STEP.evidence["logprobs"],
)


def instances(cls: type[TokenObjective]) -> list[TokenObjective]:
    """One for each combination of choices, and of None and a number, that it takes; other settings at their default."""

    def values(setting: Setting) -> Sequence[object]:
        if setting.choices or bool in setting.kinds:
            return setting.choices or (False, True)
        some = next(value for value in (0.5, 2, 2.0) if setting.accepts(value))
        required = setting.default is dataclasses.MISSING
        return (None, some) if setting.optional else (some if required else setting.default,)

    settings, methods = settings_of(cls), []
    for chosen in itertools.product(*map(values, settings)):
        with contextlib.suppress(OutOfRange):
            methods.append(cls(**{setting.name: value for setting, value in zip(settings, chosen, strict=True)}))
    return methods
