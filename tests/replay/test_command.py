"""The command and what it writes: pages, errors of one line, the page on it and its format."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlstab.cli import main
from rlstab.record.step import BY_RESPONSE, BY_TOKEN, Header
from rlstab.replay import read_dump
from tests.browser import BrowserPage
from tests.replay.dumps import write

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dump-smollm2"
HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"


def test_the_example_is_judged_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(EXAMPLE), "--out", str(tmp_path)]) == 0
    assert "The loss is trl/dapo" in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "replay.json").read_text())
    assert (record["loss"]["agrees"], record["loss"]["findings"], record["steps"]) == (True, [], [*range(1, 9)])
    rows = {row["name"]: row for row in record["methods"]}
    assert len(rows) + len(record["left_out"]) == 75
    assert "max_logprobs" in record["left_out"]["lp_reg"]
    assert 0.7 < rows["top_entropy"]["dropped"] < 0.8
    assert rows["token_mean"]["touched"] == 0
    assert {len(values) for row in rows.values() for values in row["steps"].values()} == {8}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write(tmp_path / "dump", steps=1)


def foreign(folder: Path) -> None:
    (folder / "replay").mkdir()
    (folder / "replay" / "replay.html").write_text("mine")


#: By what is wrong: arguments after the dump, what is done to its folder before, and what the line names.
REFUSED: dict[str, tuple[list[str], Callable[[Path], object] | None, str]] = {
    "a method that nobody knows": (["clip_hihger"], None, "clip_higher"),
    "a file of somebody else": ([], foreign, "replay.html exists"),
    "a file in place of the folder": (["--out", "{}/step-000001.rank-0.json"], None, "--out"),
    "no tokenizer": (["--tokenizer", "{}"], None, "not a tokenizer"),
    "no model": (["--model", "{}/none"], None, "none"),
    "no dump": ([], lambda folder: list(map(Path.unlink, folder.iterdir())), "no optimizer step"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_one_line(what: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, change, named = REFUSED[what]
    if change is not None:
        change(dump)
    before = {file: file.read_bytes() for file in dump.rglob("*") if file.is_file()}
    assert main(["replay", str(dump), *(word.format(dump) for word in more)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error
    assert {file: file.read_bytes() for file in dump.rglob("*") if file.is_file()} == before


def test_objectives_of_the_users_own_and_a_second_time(dump: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("objective: [clip_higher, {name: random_mask, share: 0.5}]")
    for _ in range(2):
        assert main(["replay", str(dump), "s2t", "preset:dapo", str(file)]) == 0
    record = json.loads((dump / "replay" / "replay.json").read_text())
    assert {row["name"] for row in record["methods"]} == {"s2t", "preset:dapo", str(file)}


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_page_in_a_browser(steps: int, tmp_path: Path, browser_page: BrowserPage) -> None:
    folder = write(tmp_path / "<b>dump", steps=steps)
    for file in folder.glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "host": HOSTILE}))
    assert main(["replay", str(folder), "--out", str(tmp_path)]) == 0
    page: Any = browser_page.open(tmp_path / "replay.html")
    assert HOSTILE in page.inner_text(".what")
    assert page.title() == "Replay of <b>dump"
    assert page.locator("table.wide tbody th[scope=row]").count() > 60
    # without a model nothing is known of the entropy
    assert page.locator("polyline").count() == (0 if steps == 1 else 3 * page.locator("#steps ~ div tbody tr").count())
    assert page.locator(".heat td").count() == page.locator(".heat tbody tr").count() ** 2 > 100
    for _ in range(2):
        page.click("#theme")
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    page.click("text=Every method on every token")
    page.wait_for_url("**/tokens.html")
    assert page.title() == "Tokens of <b>dump"
    browser_page.requests.clear()  # the page of tokens was asked for
    browser_page.assert_clean()


def test_the_page_on_replay_lists_the_format_and_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "how-to" / "replay.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| `(\w+)` \| `\(", text) == [*BY_RESPONSE, "prompt_ids", *BY_TOKEN]
    assert json.loads((ROOT / "docs" / "dump.schema.json").read_text()) == Header.model_json_schema()
    monkeypatch.chdir(ROOT)
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "replay.md", "exec"), {"folder": tmp_path})
    assert capsys.readouterr().out.count("508 tokens of 64 responses") == 6
    assert len(read_dump(tmp_path).steps[0].batch) == 5
