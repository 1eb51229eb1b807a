"""Random tensors in float16, bfloat16 and float32, at the edges: a number or an error of ours, never a silent NaN."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab import PolicyOutputs, TokenBatch, compose
from rlstab.core.batch import SIGNALS
from rlstab.errors import RlstabError
from tests.examples import EXAMPLES

EDGES = [0.0, -0.0, -1e-45, -1e-8, -1.0, -11.0, -20.0, -65504.0, -3e38, math.nan, -math.inf, math.inf, 1e30]
METHODS = [method for several in EXAMPLES.values() for method in several]


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    chosen=st.lists(st.sampled_from(METHODS), min_size=1, max_size=3, unique_by=lambda method: method.name),
    numbers=st.lists(st.sampled_from(EDGES), min_size=12, max_size=12),
    tame=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_loss_is_a_number_or_an_error_says_why(
    dtype: torch.dtype, chosen: list, numbers: list[float], tame: bool, seed: int
) -> None:
    values = [number for number in numbers if math.isfinite(number)] if tame else numbers
    rng = torch.Generator().manual_seed(seed)

    def tensor() -> torch.Tensor:
        picks = torch.randint(len(values), (2, 3), generator=rng) if values else torch.zeros(2, 3, dtype=torch.int64)
        return torch.tensor(values or [0.0], dtype=torch.float64)[picks].to(dtype)

    try:
        objective = compose(*chosen)
        batch = TokenBatch.from_padded(
            response_mask=torch.ones(2, 3),
            advantages=tensor().clamp(-5, 5),
            old_logprobs=tensor(),
            **{name: tensor() for name in SIGNALS},
        )
        leaves = {name: tensor().requires_grad_() for name in ("logprobs", "entropies", "log_kept_mass")}
        out = objective(batch, PolicyOutputs.from_padded(batch, **leaves), state=objective.init_state())
        out.loss.backward()
    except RlstabError:
        return
    assert math.isfinite(out.loss.item())
    for leaf in leaves.values():
        # a gradient beyond the range of half precision is infinite in half precision; NaN it never is
        assert leaf.grad is None or not bool(leaf.grad.isnan().any())
