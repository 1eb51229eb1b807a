"""The JSON Schema says about a file what the loader says."""

import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

import rlstab
from rlstab.config import Document, json_schema, load_run
from rlstab.presets import PRESETS
from tests.config.test_errors import MISTAKES, whole

ROOT = Path(rlstab.__file__).parents[1]


@cache
def validator():
    return jsonschema.Draft202012Validator(json_schema())


def test_it_is_a_valid_schema_whose_references_lead_somewhere():
    schema = validator().schema
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in schema["$defs"]:
        assert f'"#/$defs/{name}"' in json.dumps(schema)
    assert json.dumps(schema).count('"$ref"') == json.dumps(schema).count('"$ref": "#/$defs/')


def test_every_example_and_preset_validates():
    for path in {*(ROOT / "examples").glob("*.yaml")} - {*(ROOT / "examples").glob("bench_*.yaml")}:
        assert not [error.message for error in validator().iter_errors(yaml.safe_load(path.read_text()))], path
    for name in PRESETS:
        assert validator().is_valid({"objective": [{"preset": name}]})
    for name in rlstab.available():
        assert validator().is_valid({"objective": [name]})
    mine = {"name": "methods.py:Halve", "factor": 1}
    validator().validate({"objective": ["a.py:B", mine], "stages": [mine, "a.py:B"], "task": mine})


GOOD = """
{objective: s2t}
{objective: {name: s2t, max_prob: 1}}
{objective: {name: kl, cap: null}}
{objective: {preset: dapo, set: {clip_higher: {high: 0}}, drop: [token_mean]}}
{objective: {preset: dr_grpo, set: {constant_length: {}}}}
{objective: {name: within, outer: [s2t], inner: {name: stare}}}
{objective: s2t, task: {name: jsonl, path: a}}
{objective: s2t, optimisation: {schedule: {name: cosine_with_min_lr, min_lr_rate: 0.1}}, engine: ddp}
"""


def test_the_loader_takes_what_validates_and_refuses_what_does_not():
    for data in map(yaml.safe_load, GOOD.split("\n")[1:-1]):
        load_run(data)
        assert not [error.message for error in validator().iter_errors(data)], data
    with pytest.raises(rlstab.errors.ConfigError):
        load_run({})
    assert not validator().is_valid({})
    for text, _ in MISTAKES:  # the loader refuses them by their line
        assert not validator().is_valid(Document.parse(whole(text), "f").data), text


def test_the_schema_in_the_documentation_is_the_one_of_this_version():
    # rlstab schema --out docs/rlstab.schema.json
    assert json.loads((ROOT / "docs" / "rlstab.schema.json").read_text()) == validator().schema
