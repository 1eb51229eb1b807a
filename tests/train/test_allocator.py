"""What a run tells the C library, and when."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import pytest

from rlstab.train import allocator


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What a C library that obeys was told."""
    calls: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: Any) -> None:
            assert name is None, "of this process"

        def mallopt(self, what: int, value: int) -> int:
            calls.append((what, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_large_models_have_freed_memory_given_back(told: list[tuple[int, int]]) -> None:
    assert not allocator.free_at_once(allocator.PARAMETERS - 1)
    assert told == []
    assert allocator.free_at_once(allocator.PARAMETERS)
    assert told == [(-3, 128 * 1024)], "M_MMAP_THRESHOLD in malloc.h"


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_who_decided_keeps_what_they_decided(
    name: str, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    assert not allocator.free_at_once(10**9)
    assert told == []


@pytest.mark.parametrize(("system", "library"), [("darwin", "glibc"), ("linux", "musl")])
def test_other_libraries_are_left_alone(
    system: str, library: str, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))
    assert not allocator.free_at_once(10**9)
    assert told == []
