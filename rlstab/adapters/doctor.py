"""``rlstab doctor``: the device, the extras, the installed hosts, and whether their adapters work."""

import importlib
import os
import platform
import warnings
from collections.abc import Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from rlstab.adapters import releases
from rlstab.extras import EXTRAS, how_to_install, missing
from rlstab.hosts import HOSTS, Host

#: Packages that every host needs.
BELOW = ("torch", "transformers", "accelerate")


def doctor(hosts: Iterable[Host] = HOSTS.values()) -> tuple[list[str], bool]:
    """Lines to print, and whether every installed host has a working adapter.

    The module of an adapter may have a ``check_host()`` in place of :func:`rlstab.adapters.releases.check_release`.
    """
    stack = ", ".join(f"{name} {_version(name) or 'not installed'}" for name in BELOW)
    lines, well = [f"rlstab {_version('rlstab')}: Python {platform.python_version()}, {stack}"], True
    import torch  # slow, and not needed before

    accelerator = torch.accelerator.current_accelerator(check_available=True)  # None without one
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else str(accelerator or "CPU alone")
    ready = [extra for extra in EXTRAS if not missing(extra)]
    absent = [f"{extra} (no {', '.join(missing(extra))})" for extra in EXTRAS if extra not in ready]
    lines.append(f"device: {device}, {os.cpu_count()} processors")
    lines.append(f"extras: {', '.join(ready) or 'none'}; not installed: {', '.join(absent) or 'none'}")
    for host in filter(lambda host: not host.data_level, hosts):
        line, live = _examined(host)
        lines.append(line)
        well = well and live
    return lines, well


def _examined(host: Host) -> tuple[str, bool]:
    installed = _version(host.key)
    if installed is None:
        return f"{host.name}: not installed. {host.install or how_to_install(host.key)}", True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            adapter = importlib.import_module(host.adapter)
            getattr(adapter, "check_host", partial(releases.check_release, host.key))()
        except Exception as error:  # importing a package may raise anything
            return f"{host.name} {installed}: {host.adapter} does not work: {type(error).__name__}: {error}", False
    warned = "".join(f" {warning.message}" for warning in caught if "adapter" in str(warning.message))
    return f"{host.name} {installed}: {host.adapter} is live; tested with {releases.tested(host.key)}.{warned}", True


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
