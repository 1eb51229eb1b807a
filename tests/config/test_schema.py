"""The JSON Schema says about a file what the loader says."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given

import rlstab
from rlstab.bench.describe import bench_schema
from rlstab.config import dump_objective, dump_run, json_schema, load_run
from rlstab.core.settings import settings_of
from rlstab.presets import PRESETS
from rlstab.zoo import METHODS
from tests.config.strategies import SECTIONS, objectives, quick

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
FOLDER = Path(rlstab.__file__).parents[1] / "examples"
BENCHES = sorted(FOLDER.glob("bench_*.yaml"))  # files of another kind, with a schema of their own
EXAMPLES = sorted(set(FOLDER.glob("*.yaml")) - set(BENCHES))


def test_it_is_a_valid_schema_of_the_draft_that_it_names():
    assert SCHEMA["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def references(node):
    if isinstance(node, dict):
        yield from ([node["$ref"]] if isinstance(node.get("$ref"), str) else [])
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from references(one)


def test_every_reference_leads_somewhere():
    found = set(references(SCHEMA))
    assert found == {f"#/$defs/{name}" for name in SCHEMA["$defs"]}


def test_every_example_validates():
    bench_validator = jsonschema.Draft202012Validator(bench_schema())
    for validator, paths in ((VALIDATOR, EXAMPLES), (bench_validator, BENCHES)):
        for path in paths:
            assert not [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))], path


@quick(max_examples=40)
@given(objectives(), SECTIONS)
def test_every_run_that_is_written_validates(objective, sections):
    run = load_run({"objective": dump_objective(objective), **sections})
    assert not [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(dump_run(run)))]


def test_every_method_is_in_it_with_every_setting():
    for name in rlstab.available():
        definition = SCHEMA["$defs"][f"method.{name}"]
        assert definition["properties"].keys() == {"name", *(one.name for one in settings_of(METHODS.get(name)))}
        assert definition["additionalProperties"] is False
        assert VALIDATOR.is_valid({"objective": [name]})


def test_every_preset_is_in_it_as_it_is_and_expanded():
    for name, preset in PRESETS.items():
        assert VALIDATOR.is_valid({"objective": [{"preset": name}]})
        assert VALIDATOR.is_valid({"objective": dump_objective(preset.objective)})


GOOD = {
    "a method alone": {"objective": "s2t"},
    "a mapping alone": {"objective": {"name": "s2t", "max_prob": 1}},
    "null": {"objective": [{"name": "kl", "cap": None}]},
    "a preset, less": {"objective": {"preset": "dapo", "set": {"clip_higher": {"high": 0}}, "drop": ["token_mean"]}},
    "a preset that has what is required": {"objective": {"preset": "dr_grpo", "set": {"constant_length": {}}}},
    "within": {"objective": [{"name": "within", "outer": "s2t", "inner": {"name": "stare"}}]},
    "within lists": {"objective": [{"name": "within", "outer": ["s2t"], "inner": ["stare", "kl"]}]},
    "a task": {"objective": "s2t", "task": {"name": "jsonl", "path": "a"}},
}  # fmt: skip

BAD = {
    "no objective": {},
    "empty objective": {"objective": []},
    "unknown method": {"objective": ["zzz"]},
    "unknown setting": {"objective": [{"name": "s2t", "max": 1}]},
    "out of range": {"objective": [{"name": "s2t", "max_prob": 0}]},
    "wrong type": {"objective": [{"name": "s2t", "max_prob": "a"}]},
    "true for a number": {"objective": [{"name": "s2t", "max_prob": True}]},
    "required setting": {"objective": [{"name": "constant_length"}]},
    "unknown preset": {"objective": [{"preset": "zzz"}]},
    "unknown method in set": {"objective": [{"preset": "dapo", "set": {"zzz": {}}}]},
    "unknown setting in set": {"objective": [{"preset": "dapo", "set": {"s2t": {"zzz": 1}}}]},
    "unknown method in drop": {"objective": [{"preset": "dapo", "drop": ["zzz"]}]},
    "half of within": {"objective": [{"name": "within", "outer": "s2t"}]},
    "unknown section": {"objective": "s2t", "sed": 1},
    "unknown key": {"objective": "s2t", "rollout": {"grop": 1}},
    "unknown task": {"objective": "s2t", "task": {"name": "zzz"}},
    "task without a name": {"objective": "s2t", "task": {"numbers": 3}},
    "task without its path": {"objective": "s2t", "task": {"name": "jsonl"}},
    "too many betas": {"objective": "s2t", "optimisation": {"betas": [0.1, 0.1, 0.1]}},
}


def test_the_loader_takes_what_validates_and_refuses_what_does_not():
    for name, data in GOOD.items():
        load_run(data)
        assert not [error.message for error in VALIDATOR.iter_errors(data)], name
    for name, data in BAD.items():
        with pytest.raises(rlstab.errors.RlstabError):
            load_run(data)
        assert not VALIDATOR.is_valid(data), name


def test_the_schema_in_the_documentation_is_the_one_of_this_version():
    # rlstab schema --out docs/rlstab.schema.json
    path = Path(rlstab.__file__).parents[1] / "docs" / "rlstab.schema.json"
    assert json.loads(path.read_text()) == SCHEMA
