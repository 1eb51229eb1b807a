from types import SimpleNamespace

import pytest

from rlstab import ClipHigher, S2TMask, TokenObjective, available
from rlstab.core.registry import Registry
from rlstab.errors import Conflict, UnknownName
from rlstab.zoo import METHODS
from tests.core.methods import DropPunished, Scale
from tests.core.says import says


@pytest.fixture
def registry():
    return Registry({"s2t": "rlstab.zoo.s2t:S2TMask"}, group="nobody.methods")


def test_names_lead_to_classes(registry):
    assert registry.names() == ["s2t"]
    assert registry.get("s2t") is S2TMask
    assert {name: METHODS.get(name).name for name in available()} == {name: name for name in available()}


def test_an_unknown_name_meets_its_neighbour(registry):
    with says(UnknownName, "no method is called 's2'. Did you mean 's2t'?"):
        registry.get("s2")
    with says(UnknownName, "no method is called 'entropy_of_state'. Known: s2t."):
        registry.get("entropy_of_state")


def test_a_registered_method_has_a_name(registry):
    assert registry.register(DropPunished) is DropPunished
    assert registry.register(DropPunished) is DropPunished
    assert registry.get("drop_punished") is DropPunished
    assert registry.names() == ["drop_punished", "s2t"]
    assert "drop_punished" not in available()


def test_a_name_has_one_class(registry):
    imposter = type("Imposter", (TokenObjective,), {"name": "s2t"})
    fix = "cannot take it. Give the class another `name`."
    with says(Conflict, f"'s2t' is already the name of rlstab.zoo.s2t:S2TMask; Imposter {fix}"):
        registry.register(imposter)
    registry.register(DropPunished)
    with says(Conflict, f"'drop_punished' is already the name of {DropPunished}; Other {fix}"):
        registry.register(type("Other", (TokenObjective,), {"name": "drop_punished"}))


def test_installed_packages_add_methods_and_replace_none(registry, monkeypatch):
    asked = []

    def installed(*, group):
        asked.append(group)
        return [
            SimpleNamespace(name="scale", value="tests.core.methods:Scale"),
            SimpleNamespace(name="s2t", value="tests.core.methods:DropPunished"),
        ]

    monkeypatch.setattr("rlstab.core.registry.entry_points", installed)
    assert registry.names() == ["s2t", "scale"]
    assert registry.get("scale") is Scale
    assert registry.get("s2t") is S2TMask
    assert asked == ["nobody.methods"]


def test_the_table_names_what_the_package_exports():
    assert METHODS.get("clip_higher") is ClipHigher
