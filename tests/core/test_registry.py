from types import SimpleNamespace

import pytest

import rlstab
from rlstab import S2TMask, available
from rlstab.core.registry import Registry
from rlstab.zoo import METHODS
from tests.core.methods import DropPunished, Scale


@pytest.fixture
def registry():
    return Registry({"s2t": "rlstab.zoo.s2t:S2TMask"}, group="nobody.methods")


def test_names_lead_to_classes_that_ship_or_were_registered(registry):
    assert {name: METHODS.get(name).name for name in available()} == {name: name for name in available()}
    for _ in range(2):
        assert registry.register(DropPunished) is DropPunished
    assert (registry.get("s2t"), registry.get("drop_punished")) == (S2TMask, DropPunished)
    assert registry.names() == ["drop_punished", "s2t"]
    assert "drop_punished" not in available()


def test_a_shipped_class_is_imported_by_its_own_name():
    classes = [METHODS.get(name) for name in available()]
    assert [getattr(rlstab, cls.__name__) for cls in classes] == classes
    assert {cls.__name__: cls.__module__ for cls in classes} == METHODS.shipped_classes()
    assert METHODS.homes("KLCovariance") == ["rlstab.zoo.kl", "rlstab.zoo.kl_cov"]
    with pytest.raises(AttributeError, match="KLCovariance"):
        rlstab.KLCovariance  # noqa: B018  # the attribute is looked up, which is what fails


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
