"""Prompts one after another: epochs of a task that has an end."""

import pytest

from rlstab.stages.in_order import STREAM, InOrder
from tests.stages.selections import number, offer


def expected(places, size, seed, shuffle):
    """Place by place, with the whole epoch sorted for each."""
    found = []
    for place in places:
        epoch, within = divmod(place, size)
        order = list(range(size))
        if shuffle:
            order.sort(key=lambda prompt: number(seed + STREAM, epoch, prompt))
        found.append(order[within])
    return found


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("drawn", "count", "size"), [(0, 4, 10), (8, 4, 10), (7, 25, 10), (3, 2, 1), (20, 5, 5)])
def test_equals_the_oracle(shuffle, drawn, count, size):
    found = InOrder(shuffle=shuffle).select(offer(count, drawn=drawn, size=size, seed=3), {})
    assert found.tolist() == expected(range(drawn, drawn + count), size, 3, shuffle)
