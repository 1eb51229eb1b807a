"""``rlstab explain`` of a bench: every method as the run that it is in the first setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlstab.bench.file import load_bench
from rlstab.config import Document
from rlstab.errors import ConfigError
from rlstab.explain.page import page


def bench_page(source: str, overrides: Mapping[str, Any]) -> str:
    """The pages of all methods of a bench file, as Markdown.

    Raises:
        ConfigError: see :func:`rlstab.bench.file.load_bench`; or there are overrides, which a bench takes in its file.
    """
    if overrides:
        raise ConfigError(f"{source}: a bench takes no --set. Write {', '.join(overrides)} under its base or settings.")
    bench = load_bench(source)
    first = bench.settings[0]
    others = f", the first of {len(bench.settings)} settings" if len(bench.settings) > 1 else ""
    pages = {
        one.method: page(one.method, one.config.composition, one.config)
        for one in bench.runs[::-1]
        if one.setting == first
    }
    head = f"# {source}\n\nBench {bench.name}, baseline {bench.baseline}. Each method at {first}{others}."
    nested = [re.sub(r"(?m)^#", "##", pages[name]) for name in bench.methods]
    return "\n\n".join([head, *nested])


def is_bench(source: str) -> bool:
    """Whether a file says what a bench file says."""
    data = Document.read(source).data
    return isinstance(data, Mapping) and "base" in data and bool(data.keys() & {"methods", "stack"})
