"""Whether what an adapter builds on is what it was written for: signatures, who defined it, and its body."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rlstab.errors import HostError


def check_methods(
    owner: Any, methods: Mapping[str, tuple[str, str]], *, release: str, homes: tuple[str, ...], cure: str
) -> list[str]:
    """Refuse methods that are missing, that another package replaced, or that take other parameters.

    Args:
        owner: a class, or a module.
        methods: for each the names of its first parameters, and the :func:`checksum` that was tested; empty where its
            body does not matter.
        release: the host and its version, in the error.
        homes: the beginnings of the names of modules that may have defined them.
        cure: what to do about it.

    Returns:
        Those whose body is not the one that was tested.

    Raises:
        HostError: names the method.
    """
    changed = []
    who = owner.__name__.rpartition(".")[2]
    for name, (parameters, tested) in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise HostError(f"{who} of {release} has no {name}, which the adapter needs. {cure}")
        home = inspect.unwrap(method).__module__
        if not home.startswith(homes):
            raise HostError(
                f"{who}.{name} was replaced by {home}. Do not import that package, or train without the adapter."
            )
        wanted = parameters.split()
        given = list(inspect.signature(inspect.unwrap(method)).parameters)[: len(wanted)]
        if given != wanted:
            raise HostError(
                f"{who}.{name} of {release} takes ({', '.join(given)}), expected ({', '.join(wanted)}). {cure}"
            )
        if tested and checksum(method) != tested:
            changed.append(name)
    return changed


def checksum(method: Callable[..., Any]) -> str:
    """Twelve digits of a method's syntax: comments and layout do not count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]
