"""Each error of the atlas is in the release of its row, and gone in the first release that its row calls free of it."""

import os
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.atlas import measures
from tests.atlas.page import PAGE, page, rows

#: A host that must be installed.
REQUIRED = [row["host"] for row in rows() if "host" in row and os.environ.get(f"RLSTAB_REQUIRE_{row['host'].upper()}")]


def numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:3])


def installed(host: str | None) -> tuple[int, ...] | None:
    """The release of a host in this environment."""
    try:
        return numbers(version(host)) if host else None
    except PackageNotFoundError:
        return None


MEASURED = [row for row in rows() if installed(row.get("host")) or row.get("host") in REQUIRED]


def test_the_page_is_made_of_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.atlas.page"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of hosts
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['host']}-{row['measure'][-1]}")
def test_the_number_is_that_of_the_release(row: dict[str, object]) -> None:
    found = installed(str(row["host"]))
    assert found is not None
    name, *given = row["measure"]  # type: ignore[misc]  # a list, by the file
    if found < numbers(str(row["release"])):
        pytest.skip(f"{row['host']} {found} is older than the release of the row")
    measured = getattr(measures, name)(row["host"], *given)
    same = measured == pytest.approx(row["expected"], rel=0.02, abs=1e-3)
    mended = "until" in row and found >= numbers(str(row["until"]))
    assert same is not mended, f"{measured:.3g}; a row that is fixed says `until`"
