"""Whether a host is what its adapter was written for: its release, and signatures, origin and bodies of its methods."""

import ast
import hashlib
import inspect
import pkgutil
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from rlstab.errors import HostError
from rlstab.hosts import HOSTS, facts


def check_release(host: str, installed: str = "") -> None:
    """Refuse a release that the adapter does not support; warn if it differs from the tested one.

    Args:
        host: key of :data:`rlstab.hosts.HOSTS`.
        installed: its version; empty asks for it.

    Raises:
        HostError: it has another release, or a method was replaced or has other parameters.
    """
    installed, host_facts = installed or version(host), facts(host)
    name, homes = f"{HOSTS[host].name} {installed}", tuple(host_facts["homes"])
    supported = [host_facts["release"], *host_facts.get("also", ())]
    if not any(_matches(installed, release) for release in supported):
        named = " and ".join([", ".join(supported[:-1]), supported[-1]]) if supported[1:] else f"{supported[0]} alone"
        raise HostError(f"{name} is installed, and the adapter knows {named}. {how_to_install(host)}")
    changed: list[str] = []
    for owner, methods in host_facts["methods"].items():
        scope, expected = pkgutil.resolve_name(owner), dict(methods)
        for method, package in host_facts.get("replaced", {}).items():  # as the adapter was tested
            if getattr(getattr(scope, method, None), "__module__", "").startswith(package):
                expected.pop(method, None)
        changed += check_methods(scope, expected, release=name, homes=homes, cure=how_to_install(host))
    if changed:
        warnings.warn(
            f"{', '.join(changed)} of {name}, or of what it builds on, changed since the adapter was tested. What is "
            f"new there may be missing here. Compare one step with its own loss, or install {tested(host)}.",
            stacklevel=4,
        )
    other = [
        f"{package} {version(package)}"
        for package, versions in host_facts.get("tested_with", {}).items()
        if not any(_matches(version(package), release) for release in versions.split(" or "))
    ]
    if other:
        warnings.warn(f"the adapter was not tested with {', '.join(other)}, but with {tested(host)}.", stacklevel=4)


def _matches(installed: str, known: str) -> bool:
    """Whether a version belongs to a release, which may leave its last numbers open."""
    release = Version(known).release
    return Version(installed).release[: len(release)] == release


def how_to_install(host: str) -> str:
    """The sentence that says how to get the release of a host that an adapter was tested with."""
    command = f"pip install '{host}=={facts(host)['release']}.*'"
    return HOSTS[host].install or f"Install the release that the adapter was tested with: {command}"


def tested(host: str) -> str:
    """The releases that the tests use."""
    host_facts = facts(host)
    return ", ".join(
        f"{name} {release}"
        for name, release in {host: host_facts["release"], **host_facts.get("tested_with", {})}.items()
    )


def check_methods(
    owner: Any, methods: Mapping[str, Sequence[str]], *, release: str, homes: tuple[str, ...], cure: str
) -> list[str]:
    """Refuse methods that are missing, that another package replaced, or that take other parameters.

    Args:
        owner: a class, or a module.
        methods: the names of the first parameters of each and, where its body matters, the :func:`checksum` that was
            tested.
        release: the host and its version, in the error.
        homes: prefixes of the modules that may define them.
        cure: what to do about it.

    Returns:
        the names of methods whose body is not the tested one.

    Raises:
        HostError: names the method.
    """
    changed = []
    title = owner.__name__.rpartition(".")[2]
    for name, (parameters, *checksums) in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise HostError(f"{title} of {release} has no {name}, which the adapter needs. {cure}")
        home = inspect.unwrap(method).__module__
        if not home.startswith(homes):
            raise HostError(f"{title}.{name} was replaced by {home}. Do not import it, or train without the adapter.")
        expected = parameters.split()
        actual = list(inspect.signature(inspect.unwrap(method)).parameters)[: len(expected)]
        if actual != expected:
            raise HostError(
                f"{title}.{name} of {release} takes ({', '.join(actual)}), expected ({', '.join(expected)}). {cure}"
            )
        if checksums and checksum(method) not in checksums:
            changed.append(name)
    return changed


def checksum(method: Callable[..., Any]) -> str:
    """Twelve digits over the syntax of a method, without comments and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]
