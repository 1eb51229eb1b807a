"""docs/conformance.md holds what the report prints; the largest differences may move with the machine's rounding."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.report import lines

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
SMALL = re.compile(r"\| (0|\de-\d\d) \|")


def test_the_tables_of_the_page_are_fresh():
    page = [SMALL.sub("| |", line) for line in PAGE.read_text().splitlines() if line.startswith("|")]
    fresh = [SMALL.sub("| |", line) for line in lines() if line]
    assert page == fresh, "run: python -m tests.conformance.report"
