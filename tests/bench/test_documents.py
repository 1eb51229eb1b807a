"""Bench files in the documents load, and the schema takes what loads."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlstab.bench.describe import bench_schema
from rlstab.bench.file import load_bench

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "how-to" / "compare.md").read_text(), flags=re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("bench_*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = bench_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_benches_on_the_page_and_in_the_examples_load_and_fulfil_the_schema(validator: Any) -> None:
    assert BLOCKS
    for data in [*map(yaml.safe_load, BLOCKS), *(yaml.safe_load(file.read_text()) for file in EXAMPLES)]:
        if "base" in data:
            assert list(validator.iter_errors(data)) == []
    for data in map(yaml.safe_load, BLOCKS):
        if "base" in data and not isinstance(data["base"], str):
            assert load_bench(data).runs


def test_the_comparison_of_s2t_is_one_setting() -> None:
    """What `make compare` runs is the full bench with other seeds, and the mirror differs in its task alone."""
    short, full, rates, mirror = (
        {f"{run.setting}/{run.method}": run.config for run in load_bench(ROOT / "examples" / f"bench_{name}.yaml").runs}
        for name in ("s2t", "spurious", "spurious_rates", "mirror")
    )
    for name, run in short.items():
        same = {"seed": 0, "tracking": run.tracking}
        assert full[name].model_copy(update=same) == run.model_copy(update=same)
    for bench, changed in ((rates, "optimisation"), (mirror, "task")):
        for name, run in bench.items():
            base = full[f"default/{name.partition('/')[2]}"]
            assert getattr(run, changed) != getattr(base, changed)
            kept = {changed: getattr(run, changed), "tracking": run.tracking, "seed": 0}
            assert base.model_copy(update=kept) == run.model_copy(update=kept)


def test_the_schema_refuses(validator: Any) -> None:
    good = {"name": "x", "base": {"optimisation": {"lr": 1.0}}, "methods": {"a": "s2t"}}
    assert list(validator.iter_errors(good)) == []
    for wrong in (
        {"sedes": 3},
        {"seeds": 0},
        {"methods": {"a/b": "s2t"}},
        {"methods": {"a": {"objective": "s2t", "sets": {}}}},
        {"base": {"optimisation": {"lrr": 1.0}}},
        {"ablate": "all"},
    ):
        assert list(validator.iter_errors({**good, **wrong})) != [], wrong
