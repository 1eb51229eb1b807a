"""Where rlstab differs on purpose it differs by what is documented, and the card says so."""

from __future__ import annotations

import inspect

import pytest

from tests.conformance.deviations import DEVIATIONS


@pytest.mark.parametrize("one", [pytest.param(one, id=f"{one.source}: {one.number}") for one in DEVIATIONS])
def test_the_numbers_are_those_documented(one):
    found = one.theirs(), one.here()
    assert found == pytest.approx(one.expected, rel=1e-3, abs=1e-9, nan_ok=True)
    assert one.theirs() != pytest.approx(one.here(), rel=1e-4)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.says) for one in DEVIATIONS])
def test_the_card_names_it(one):
    text = " ".join((inspect.getdoc(one.method) or "").split())
    if isinstance(one.method, type):
        text = text.partition(" Deviations: ")[2].partition(" Pitfalls: ")[0]
    assert one.says in text
