"""Configurations side by side: which lines of one are not in another."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class Line:
    """One line of YAML: in both, only here (``new``), or only in the baseline's (``gone``)."""

    text: str
    kind: Literal["same", "new", "gone"]


def text(config: Mapping[str, Any]) -> str:
    """A configuration as YAML, without what names the run alone: its seed and its folder."""
    shown = {key: value for key, value in config.items() if key != "seed"}
    tracking = shown.get("tracking")
    if isinstance(tracking, Mapping):
        shown["tracking"] = {key: value for key, value in tracking.items() if key != "out"}
    return yaml.safe_dump(_plain(shown), sort_keys=False, allow_unicode=True, width=100)


def lines(config: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Line]:
    """The lines of a configuration, marked by what the baseline's has."""
    here, there = text(config).splitlines(), text(baseline).splitlines()
    found: list[Line] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, there, here, autojunk=False).get_opcodes():
        if tag == "equal":
            found += [Line(one, "same") for one in here[k:m]]
        else:
            found += [Line(one, "gone") for one in there[i:j]] + [Line(one, "new") for one in here[k:m]]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
