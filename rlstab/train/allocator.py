"""What a run tells the C library's allocator, which on a CPU decides how much of what torch frees is free."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

#: Tensors of so many bytes get pages of their own, which go back to the system when they are freed: where glibc begins.
OWN_PAGES = 128 * 1024
#: In models of so many parameters. Pages have to be asked for and cleared: steps of 10M to 134M parameters take 15 to
#: 30 % more CPU time, in a model of 0.3M up to half as much again, where there is little memory to save.
PARAMETERS = 10_000_000

#: glibc's number of the setting, in malloc.h.
_M_MMAP_THRESHOLD = -3
#: Whoever sets one of these has decided.
_DECIDED = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def free_at_once(parameters: int) -> bool:
    """Let this process give back what torch frees on the CPU, where the model is large; whether it will.

    For runs that are to save memory: it costs time.

    glibc raises its threshold for pages of their own to the size of whatever was freed, up to 32 MiB; here it stays.
    Below it, torch's aligned requests find no room in what was freed before them, and the heap grows: to twice of what
    is held in an optimizer step under ``fsdp2``. It is a setting of the whole process.
    """
    if parameters < PARAMETERS or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    if any(name in os.environ for name in _DECIDED):
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, OWN_PAGES))
