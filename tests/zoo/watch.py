"""Methods at many settings, and an optimizer step on which each has something to do."""

from rlstab.testing.steps import make_step
from tests.examples import EXAMPLES

SHIPPED = [type(methods[0]) for methods in EXAMPLES.values()]
STEP = make_step("mixed", [6, 2, 5, 7, 3, 8], 2, 18)
#: A mean entropy near 0.1, no token far from the likeliest and a sampler far off: every method and setting acts.
STEP = STEP.given(
    entropies=0.1 * STEP.evidence["entropies"],
    max_logprobs=0.5 * STEP.evidence["logprobs"],
    rollout_logprobs=0.5 * STEP.evidence["logprobs"],
)
