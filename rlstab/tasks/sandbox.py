"""What a process that scores completions may do: limits everywhere, and on Linux a sandbox for those that execute them.

A process calls these functions on itself, before it reads the first completion. Nothing here can be undone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

#: Bytes of address space; more raises MemoryError.
MEMORY = 2 * 2**30

#: The working directory of a completion in a sandbox.
SCRATCH = "/scratch"

# <linux/prctl.h>, <linux/sched.h>, <linux/mount.h>, <linux/capability.h>
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
# the same number on every architecture; read-only, nosuid, nodev
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1 | 2 | 4
_CAPABILITIES_3 = 0x20080522
_NOBODY = 65534


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the one that started it ends, even by SIGKILL. Linux only.

    Args:
        parent: its process id, as this process sees it: it may have ended before this call.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def limit() -> None:
    """From now on: no more memory than MEMORY, no file made longer, no core dump, no new process or thread.

    The last does not hold for root outside a sandbox, which the kernel exempts.
    """
    for which, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard = resource.getrlimit(which)
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (lowest, lowest))


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process once it has computed so many more seconds, whatever it is doing."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def enter(folders: Iterable[str]) -> None:
    """Go on in a process that sees no network, no other process, and no files but those of some folders, read-only.

    The caller becomes its keeper and does not return: it ends when that process does. The process is in namespaces of
    its own for users, processes, mounts, network, IPC and host name.

    Args:
        folders: what is to be seen; those of the system's libraries are added.

    Raises:
        OSError: the system does not allow it.
    """
    if sys.platform != "linux":
        raise OSError("it needs Linux")
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        os.setresuid(_NOBODY, 0, 0)  # the kernel counts processes by the real user, and never those of root
    _call("unshare", _NEWUSER | _NEWPID | _NEWNS | _NEWNET | _NEWIPC | _NEWUTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    inside = os.fork()
    if inside:
        code = os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the keeper dies with the trainer, and this process with the keeper
    _see_only(folders)


def shut() -> None:
    """In a process of a sandbox: take an empty working directory in memory, and give up every capability."""
    _call("unshare", _NEWNS)
    _work_in_memory()
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _see_only(folders: Iterable[str]) -> None:
    root = "/proc"  # exists everywhere, and holds nothing that is needed from here on
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    seen: list[str] = []
    for folder in sorted({*folders, "/usr", "/lib", "/lib32", "/lib64"}):
        path = Path(folder)
        if not path.is_absolute() or path == Path("/") or any(path.is_relative_to(one) for one in seen):
            continue
        inner = Path(root + folder)
        if path.is_symlink() and path.parent == Path("/"):  # `/lib` is `/usr/lib`
            inner.symlink_to(path.readlink())
        elif path.is_dir():
            inner.mkdir(parents=True, exist_ok=True)
            _mount(folder, str(inner), None, _MS_BIND | _MS_REC)
            seen.append(folder)
    Path(root + SCRATCH).mkdir()
    read_only = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, -100, root.encode(), _AT_RECURSIVE, read_only, ctypes.sizeof(read_only))
    os.chroot(root)
    _work_in_memory()  # some libraries write when they are imported


def _work_in_memory() -> None:
    _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=64,mode=700")
    os.chdir(SCRATCH)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())


def _prctl(what: int, value: int) -> None:
    _call("prctl", what, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
