"""Write the address of the project, `project.urls.Repository` in pyproject.toml, into the files that name it.

The owner sets it once and runs ``python .ci/project_url.py``. `make release` fails while it is unset, or where a file
has another one.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def wanted(root: Path = ROOT) -> dict[Path, str]:
    """The text of each file that names the project; exit if its address is unset."""
    url = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    if not re.fullmatch(r"https://\S+[^/\s]", url):
        sys.exit(f"pyproject.toml: project.urls.Repository is {url!r}. Set the address of the project, https://...")
    citation, security = root / "CITATION.cff", root / "SECURITY.md"
    text = re.sub(r"^repository-code: .*\n", "", citation.read_text(encoding="utf-8"), flags=re.MULTILINE)
    page = f"[the project's page]({url}/security/advisories/new)"
    return {
        citation: f'{text.rstrip()}\nrepository-code: "{url}"\n',
        security: re.sub(
            r"\[the project's page\]\([^)]*\)|the project's page", page, security.read_text(encoding="utf-8")
        ),
    }


def require(root: Path = ROOT) -> None:
    """Exit if the address is unset, or a file does not have it."""
    for path, text in wanted(root).items():
        if path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.name} does not have the address of the project. Run: python .ci/project_url.py")


if __name__ == "__main__":
    for path, text in wanted().items():
        path.write_text(text, encoding="utf-8")
