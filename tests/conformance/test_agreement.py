"""rlstab gives the stored numbers of published code, or differs by what its cards say."""

import warnings

import pytest

from benchmarks import published
from rlstab.testing.tolerances import REORDERED
from tests.conformance.agreements import AGREEMENTS
from tests.conformance.deviations import DEVIATIONS
from tests.conformance.inputs import load
from tests.conformance.recorded import any_sign, apart


@pytest.fixture(autouse=True)
def as_stored():
    with any_sign():
        yield


CHOICES = ("inputs", "parts", "dtype", "settings", "selected")


@pytest.mark.parametrize("row", AGREEMENTS, ids=lambda row: row.method)
def test_loss_gradient_and_selection_are_those_of_the_published_code(row):
    assert {case: far for case, compared in row.cases.items() if not (far := compared()) <= row.bound} == {}


@pytest.mark.parametrize("row", DEVIATIONS, ids=lambda row: f"{row.source}: {row.number}")
def test_where_rlstab_differs_it_differs_by_what_is_documented_and_the_card_says_so(row):
    there, here = row.measured()
    assert (there, here) == pytest.approx(row.expected, rel=1e-3, abs=1e-9, nan_ok=True)
    assert there != pytest.approx(here, rel=1e-4)
    assert row.says in row.documented()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["trl", "verl"])
def test_a_framework_still_gives_the_stored_numbers(framework):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(framework)
        now, stored = getattr(published, framework)(), load(framework)
    assert now["cases"].keys() == stored["cases"].keys()
    for case, known in stored["cases"].items():
        other = now["cases"][case]
        assert {key: known[key] for key in CHOICES if key in known} == {
            key: other[key] for key in CHOICES if key in other
        }
        assert apart(other["loss"], known["loss"]) <= REORDERED, case
        assert apart(other["gradient"], known["gradient"]) <= REORDERED, case
    for scale, given in stored["advantages"].items():
        assert now["advantages"][scale]["advantages"] == pytest.approx(given["advantages"], abs=1e-3), scale
