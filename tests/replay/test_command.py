"""The command and what it writes: pages, errors of one line, the page on it and its format."""

import json
import re
from pathlib import Path

import pytest

from rlstab.cli import main
from rlstab.record import read_dump
from rlstab.record.step import BY_RESPONSE, BY_TOKEN, Header
from tests.replay.dumps import write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("old", ["replay", "view", "diagnose"])
def test_an_old_name_works_and_prints_the_new_one(old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["s2t"] if old == "replay" else ["--methods", "s2t"]
    assert main([old, str(write(tmp_path / "dump", steps=1)), *methods, "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr()
    assert f"rlstab {old} is rlstab look now" in said.err
    assert "The loss is trl/dapo" in " ".join(said.out.split())
    assert (tmp_path / "page.html").exists()


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write(tmp_path / "dump", steps=1)


def test_objectives_of_the_users_own_and_a_second_time(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("objective: [clip_higher, {name: random_mask, share: 0.5}]")
    for _ in range(2):
        assert main(["look", str(dump), "--methods", f"s2t,preset:dapo,{file}"]) == 0
    capsys.readouterr()
    assert main(["look", str(dump), "--json", "--methods", f"s2t,preset:dapo,{file}"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in record["turns"]} == {"s2t", "preset:dapo", str(file)}


def test_the_page_on_dumps_lists_the_format_and_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "how-to" / "dump.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| `(\w+)` \| `\(", text) == [*BY_RESPONSE, "prompt_ids", *BY_TOKEN]
    assert json.loads((ROOT / "docs" / "dump.schema.json").read_text()) == Header.model_json_schema()
    monkeypatch.chdir(ROOT)
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "dump.md", "exec"), {"folder": tmp_path})
    assert capsys.readouterr().out.count("508 tokens of 64 responses") == 6
    assert len(read_dump(tmp_path).steps[0].batch) == 5
