"""Names of methods: the modules of a package, entry points of other packages, and classes that a user registers."""

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from rlstab.core.method import Method
from rlstab.core.objective import TokenObjective
from rlstab.errors import Conflict, MethodError, UnknownName, did_you_mean, kind_of

Kind = TypeVar("Kind", bound=Method[Any])


class Registry(Generic[Kind]):
    """Looks up a method or a stage by name, and imports it only then.

    Args:
        table: name to ``module:Class`` or, where the class has the name of its module, to ``module``: those that rlstab
            ships. See :func:`modules_of`.
        group: entry point group through which other packages add theirs.
        base: what the classes inherit from.
        noun: what errors call one of them.
    """

    def __init__(
        self,
        table: Mapping[str, str],
        group: str = "rlstab.methods",
        base: type[Kind] = TokenObjective,  # type: ignore[assignment]  # the kind that most registries have
        noun: str = "method",
    ) -> None:
        self._table, self._group, self.base, self.noun = table, group, base, noun
        self._classes: dict[str, type[Kind]] = {}

    @cached_property
    def _where(self) -> dict[str, str]:
        """``module:Class``, or ``module``, by name; other packages cannot replace what ships with rlstab."""
        return {point.name: point.value for point in entry_points(group=self._group)} | dict(self._table)

    def names(self) -> list[str]:
        """Every known name, sorted: shipped, added by installed packages, and registered by the user."""
        return sorted(self._where.keys() | self._classes.keys())

    def shipped_classes(self) -> dict[str, str]:
        """The module of each class of the table, by the name of the class; imports all of them."""
        return {cls.__name__: cls.__module__ for cls in map(self.get, self._table)}

    def homes(self, class_name: str) -> list[str]:
        """The modules of the table that may define a class: its name begins with that of its module."""
        return [home for name, home in self._table.items() if class_name.lower().startswith(name.replace("_", ""))]

    def get(self, name: str) -> type[Kind]:
        """The class of this name.

        Raises:
            UnknownName: with the nearest known name.
        """
        if name not in self._classes:
            if name not in self._where:
                raise UnknownName(f"no {self.noun} is called '{name}'. {did_you_mean(name, self.names())}")
            module, _, attribute = self._where[name].partition(":")
            members = vars(import_module(module))
            named = (cls for cls in members.values() if isinstance(cls, type) and vars(cls).get("name") == name)
            self._classes[name] = members[attribute] if attribute else next(named)
        return self._classes[name]

    def known(self, name: str) -> type[Kind] | None:
        """The class of this name; None if it has none, like a class that a user's file names."""
        return self.get(name) if name in self.names() else None

    def register(self, cls: type[Kind]) -> type[Kind]:
        """Make a class known by its ``name``, in YAML too; works as a decorator.

        Raises:
            Conflict: another class has that name.
            MethodError: it is not a class of this kind.
        """
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            example = f"My{self.noun.capitalize()}"
            raise MethodError(
                f"register was given {kind_of(cls)}. Pass the class of a {self.noun}: register({example})."
            )
        registered = self._classes.get(cls.name, cls)
        where = self._where.get(cls.name, cls.__module__)
        # a class may be decorated and named by an entry point as well
        if where not in (cls.__module__, f"{cls.__module__}:{cls.__qualname__}") or registered is not cls:
            raise Conflict(
                f"'{cls.name}' is the name of {self._where.get(cls.name, registered)}. Give {cls.__qualname__} another."
            )
        self._classes[cls.name] = cls
        return cls


def modules_of(package: str, *shared: str) -> dict[str, str]:
    """The modules of a package by name, each with one method or stage of that name, but for those that others share."""
    names = {module.name for module in iter_modules(import_module(package).__path__)} - {*shared}
    return {name: f"{package}.{name}" for name in sorted(names)}
