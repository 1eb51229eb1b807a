"""The steps of the laws put a token on every threshold of a method, the same way each time."""

import pytest
import torch
from torch import Tensor

import rlstab
from rlstab import ClipHigher, ImportanceCorrection, S2TMask, TopEntropyMask, compose
from rlstab.testing.edges import Edge, count, edges_of, rich_step, sharpened
from rlstab.testing.steps import Step, make_step

KEEPS = ImportanceCorrection(max_weight=None, keep_low=0.99, keep_high=1.01)
METHODS = [ClipHigher(), S2TMask(), KEEPS, compose(ClipHigher(low=0.1), TopEntropyMask(share=0.3))]


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
    ratio = torch.cat([(step.live["logprobs"] - step.evidence["old_logprobs"]).exp() for step in steps])
    assert ratio.min() < 1 / 3
    assert ratio.max() > 3


def test_a_step_is_sharpened_the_same_way_twice_and_an_empty_one_not_at_all() -> None:
    step = make_step("mixed", [4, 0, 3], 2, 5, ())
    first, second = (sharpened(step, 3, edges_of(ClipHigher())) for _ in range(2))
    assert all(torch.equal(values, second.evidence[name]) for name, values in first.evidence.items())
    empty = make_step("mixed", [0, 0], 1, 0, ())
    assert sharpened(empty, 3) is empty
