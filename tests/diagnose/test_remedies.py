"""The table of remedies, its figures, and the page that is made of both."""

import json
from pathlib import Path

import pytest

from benchmarks import evidence as made
from benchmarks.troubleshooting import page
from rlstab.config import RunConfig
from rlstab.look import remedies
from rlstab.stages import STAGES
from rlstab.zoo import METHODS
from tests.test_docs import keys

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8") == page(), "python -m benchmarks evidence"


def test_methods_stages_and_settings_exist() -> None:
    known = set(keys(RunConfig.model_json_schema()))
    for remedy in remedies.remedies().values():
        addressing = {name for name in METHODS.names() if set(remedy.sources) & METHODS.get(name).about.addresses}
        assert addressing <= set(remedy.methods) <= set(METHODS.names())
        assert set(remedy.stages) <= set(STAGES.names())
        assert {name.rpartition(".")[2] for name in remedy.settings["rlstab"]} <= known | {"answer_pattern", "stop"}
        assert remedy.settings.keys() == {"rlstab", "TRL", "verl"}


def test_every_comparison_that_is_named_has_its_figures() -> None:
    for cause, data in remedies.table().items():
        for comparison in data["evidence"]:
            kept = {(figure.method, figure.outcome) for figure in remedies.figures()[remedies.key(comparison)]}
            wanted = {(method, outcome) for method in comparison["methods"] for outcome in comparison["outcomes"]}
            assert wanted <= kept, cause
            assert (ROOT / "examples" / f"bench_{comparison['file']}.yaml").is_file()
            for figure in remedies.figures()[remedies.key(comparison)]:
                text = (ROOT / figure.page).read_text(encoding="utf-8")
                assert f"\n### {figure.bench}\n" in text


@pytest.mark.slow
def test_every_figure_is_that_of_the_results() -> None:
    assert json.loads(made.text()) == json.loads(remedies.EVIDENCE.read_text(encoding="utf-8"))
