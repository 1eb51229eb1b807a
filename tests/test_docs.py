"""The documents: their code runs, their YAML loads, and what they list is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

import rlstab
from rlstab import stages, zoo
from rlstab.bench.file import load_bench
from rlstab.config import RunConfig, json_schema, load_objective, load_run
from rlstab.core.registry import Registry
from rlstab.stages.stage import Stage
from rlstab.testing import STAGE_LAWS
from tests.train.runs import go, small

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: A how-to registers methods of its own, and tests/test_how_to.py runs it; a host may not be installed, and
#: tests/adapters run its pages where it is; tests/test_site.py runs the loop.
ELSEWHERE = {ROOT / "docs" / "start" / "trl.md", ROOT / "docs" / "start" / "own-loop.md"}
RUN_HERE = [page for page in PAGES if page.parent.name not in ("how-to", "hosts") and page not in ELSEWHERE]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_python_in_the_documents_runs(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fresh = Registry({"s2t": "rlstab.zoo.s2t:S2TMask"})
    monkeypatch.setattr(zoo, "METHODS", fresh)
    monkeypatch.setattr(rlstab, "register", fresh.register)
    monkeypatch.setattr(stages, "STAGES", Registry({}, "rlstab.stages", Stage, "stage"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec", dont_inherit=True), namespace)
    if page.name == "README.md":
        assert "'ratio/mean': 1.0" in capsys.readouterr().out


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_yaml_in_the_documents_loads(page: Path) -> None:
    for block in blocks(page, "yaml"):
        data = yaml.safe_load(block)
        if isinstance(data, dict) and "stages" in data:
            load_run({"objective": "clip_higher", **data})
        else:
            load_objective(data)


def test_the_first_code_of_the_readme_is_about_ten_lines() -> None:
    first = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 14


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_schema_in_docs_is_fresh() -> None:
    written = json.loads((ROOT / "docs" / "rlstab.schema.json").read_text())
    assert written == json_schema(), "run: rlstab schema --out docs/rlstab.schema.json"


def keys(model: type[BaseModel]) -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        found.add(name)
        for part in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= keys(part)
    return found


def test_every_setting_of_a_run_is_explained() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert {key for key in keys(RunConfig) if f"`{key}`" not in text} == set()


def test_every_metric_is_explained(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    objective = [
        "clip_higher",
        "s2t",
        "random_mask",
        "top_entropy",
        {"name": "lp_reg", "share": 0.2},
        {"name": "stare", "variant": "C2", "target_entropy": 5.0},
        "kl",
        "entropy_bonus",
        {"name": "adaptive_entropy", "target_entropy": 5.0, "initial": 0.001},
    ]
    changes = {"evaluation__every": 3, "evaluation__prompts": 4, "optimisation__epochs": 2}
    logged = {name for record in go(small(tmp_path, objective, **changes)).records for name in record}
    general = {re.sub(r"@\d+", "@k", name) for name in logged if not name.startswith("seconds/")}
    assert {name for name in general if f"`{name}`" not in text} == set()


def test_every_law_of_stages_is_explained() -> None:
    text = (ROOT / "docs" / "stages.md").read_text()
    told = re.findall(r"(?m)^\| `([\w ]+)` \| ", text)
    assert told == [law.name for law in STAGE_LAWS]


def test_a_stage_of_ones_own_takes_about_twenty_lines() -> None:
    (own, _) = blocks(ROOT / "docs" / "stages.md", "python")
    below = own.partition("@STAGES.register\n")[2]
    assert len([line for line in below.splitlines() if line.strip()]) <= 20


def test_every_method_and_preset_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for name in [*rlstab.available(), *rlstab.presets.PRESETS]:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_loads(file: Path) -> None:
    data = yaml.safe_load(file.read_text())
    if "base" in data:
        load_bench(file)
    elif "model" in data:
        load_run(file)
    else:
        load_objective(file)
