"""The steps of the laws have what they are drawn for: ties, values on every threshold, ratios of 1 and far from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

import rlstab
from rlstab import ClipHigher, ImportanceCorrection, S2TMask, TopEntropyMask, compose
from rlstab.testing import BrokenLaw
from rlstab.testing.compare import check_slopes
from rlstab.testing.edges import Edge, count, edges_of, numbers_of, rich_step, sharpened
from rlstab.testing.steps import Step, make_step
from tests.testing.broken_methods import StrictSetting, open_trust_region, strict_literal

KEEPS = ImportanceCorrection(max_weight=None, keep_low=0.99, keep_high=1.01)
METHODS = [ClipHigher(), S2TMask(), KEEPS, compose(ClipHigher(low=0.1), TopEntropyMask(share=0.3)), StrictSetting()]


def difference(step: Step, edge: Edge) -> Tensor:
    """What the edge puts on its value, of all tokens."""

    def column(name: str) -> Tensor:
        live = name.removeprefix("live").strip()
        return step.live[live or "logprobs"] if name.startswith("live") else step.evidence[name]

    return column(edge.name) - (0.0 if edge.less is None else column(edge.less))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_rich_steps_put_a_token_on_every_edge(method: rlstab.TokenObjective) -> None:
    edges = edges_of(method)
    steps = [rich_step(number, (), edges) for number in range(count(edges))]
    missed = [edge for edge in edges if not any(bool((difference(step, edge) == edge.value).any()) for step in steps)]
    # the likeliest token is never less likely than the one that was sampled
    assert [edge for edge in missed if edge.name != "max_logprobs"] == []


def test_numbers_come_from_settings_literals_and_what_is_inside_of_functions() -> None:
    assert {0.2, 0.28} <= set(numbers_of(ClipHigher()))
    assert {0.2, 0.28, 0.3} <= set(numbers_of(compose(ClipHigher(), TopEntropyMask(share=0.3))))
    assert 0.7 in numbers_of(StrictSetting())
    assert 0.2 in numbers_of(strict_literal())
    assert 1.3 in numbers_of(open_trust_region())  # a literal of a lambda


def test_a_ratio_is_on_its_threshold_to_the_bit() -> None:
    edges = [edge for edge in edges_of(ClipHigher()) if (edge.name, edge.less) == ("live", "old_logprobs")]
    steps = [rich_step(number, (), edges) for number in range(count(edges))]
    ratio = torch.cat([(step.live["logprobs"] - step.evidence["old_logprobs"]).exp() for step in steps])
    for exact in (1.0, 1 + 0.28, 1 - 0.2):
        assert bool((ratio == exact).any()), exact
    assert ratio.max() > 3
    assert ratio.min() < 1 / 3


def test_tokens_tie_in_all_that_they_are_compared_by() -> None:
    step = rich_step(1, ("mine",), edges_of(S2TMask()))
    for name in ("entropies", "ref_logprobs", "sum_p_sq", "mine"):
        values = step.evidence[name]
        assert len(values.unique()) <= 0.6 * len(values), name
    ordered = step.evidence["sum_p_sq"].unique()
    assert bool((ordered.diff() < 2e-4 * ordered[1:]).any())  # and some miss it by less than half precision can tell


def test_a_step_is_sharpened_the_same_way_twice_and_an_empty_one_not_at_all() -> None:
    step = make_step("mixed", [4, 0, 3], 2, 5, ())
    first, second = (sharpened(step, 3, edges_of(ClipHigher())) for _ in range(2))
    assert all(torch.equal(values, second.evidence[name]) for name, values in first.evidence.items())
    assert not torch.equal(first.live["logprobs"], step.live["logprobs"])
    empty = make_step("mixed", [0, 0], 1, 0, ())
    assert sharpened(empty, 3) is empty


Loss = Callable[[Mapping[str, Tensor]], Tensor]
AT = {"logprobs": torch.tensor([-1.0, 0.0, -2.0], dtype=torch.float64)}


@pytest.mark.parametrize(
    "loss",
    [
        lambda live: live["logprobs"].exp().sum(),
        lambda live: (1 + live["logprobs"]).relu().sum(),  # a kink at the first value: any slope between is right
        lambda live: live["logprobs"].abs().sum(),
    ],
    ids=["smooth", "hinge", "size"],
)
def test_slopes_and_kinks_are_slopes(loss: Loss) -> None:
    check_slopes(loss, AT, seed=0)


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (
            lambda live: (0.5 * live["logprobs"] + 0.5 * live["logprobs"].detach()).exp().sum(),
            "finite differences disagree",
        ),
        (lambda live: (live["logprobs"] * (live["logprobs"] >= -1)).sum() + live["logprobs"].sum(), "the loss jumps"),
        (lambda live: (live["logprobs"].sign().detach() * live["logprobs"].abs()).sum(), "is 0, and the slope"),
    ],
    ids=["half", "jump", "still at 0"],
)
def test_what_is_no_slope_is_told(loss: Loss, seen: str) -> None:
    with pytest.raises(BrokenLaw, match=seen):
        check_slopes(loss, AT, seed=0)
