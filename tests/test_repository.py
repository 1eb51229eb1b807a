"""Files of the repository that no command of rlstab reads: hooks, workflows, the address of the project."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILES = ("pyproject.toml", "CITATION.cff", "SECURITY.md")


@pytest.fixture
def project_url() -> ModuleType:
    spec = importlib.util.spec_from_file_location("project_url", ROOT / ".ci" / "project_url.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def repository(folder: Path, url: str) -> Path:
    """The files that name the project, with an address in pyproject.toml."""
    for name in FILES:
        text = (ROOT / name).read_text(encoding="utf-8")
        (folder / name).write_text(re.sub(r'^Repository = "[^"]*"', f'Repository = "{url}"', text, flags=re.MULTILINE))
    return folder


@pytest.mark.parametrize("url", ["", "rlstab", "https://", "https://host/owner/rlstab/"])
def test_a_release_without_an_address_is_refused(url: str, tmp_path: Path, project_url: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"project\.urls\.Repository"):
        project_url.require(repository(tmp_path, url))


def test_one_variable_gives_every_file_the_address(tmp_path: Path, project_url: ModuleType) -> None:
    for url in ("https://host/owner/rlstab", "https://other/rlstab"):  # set, and changed later
        root = repository(tmp_path, url) if url.startswith("https://host") else tmp_path
        text = (root / "pyproject.toml").read_text().replace("https://host/owner/rlstab", url)
        (root / "pyproject.toml").write_text(text)
        with pytest.raises(SystemExit, match=r"Run: python \.ci/project_url\.py"):
            project_url.require(root)
        for path, wanted in project_url.wanted(root).items():
            path.write_text(wanted)
        project_url.require(root)
        assert yaml.safe_load((root / "CITATION.cff").read_text())["repository-code"] == url
        assert f"[the project's page]({url}/security/advisories/new), which" in (root / "SECURITY.md").read_text()


def test_a_commit_is_linted_by_the_pinned_release() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    ruff = [package for hook in repo["hooks"] for package in hook.get("additional_dependencies", [])]
    assert len(ruff) == 2
    assert set(ruff) <= set(pins)


def test_workflows_run_targets_that_exist() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    run = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            run |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
            run |= {match[1] for step in job["steps"] if (match := re.match(r"make ([\w-]+)", step.get("run", "")))}
    assert {"docs", "test", "lint", "notebooks"} <= run <= rules
