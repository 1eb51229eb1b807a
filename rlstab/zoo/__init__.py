"""The methods, one per file under its name; each is imported only when it is used."""

from rlstab.core.objective import TokenObjective
from rlstab.core.registry import Registry, modules_of

#: The shipped methods: every module but those that several methods share.
METHODS: Registry[TokenObjective] = Registry(
    modules_of(__name__, "anchored", "covariant", "divided_mask", "response_ratio")
)

#: The names that `rlstab` exports.
register, available = METHODS.register, METHODS.names
