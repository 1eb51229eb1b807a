"""Samples on the page: the first and the last rollout, cut, inert, and the way to the tokens."""

from __future__ import annotations

import json
from pathlib import Path

from rlstab.report import html as page
from rlstab.report.comparison import compare
from rlstab.report.load import load_runs
from rlstab.report.runs import RunRecord
from rlstab.report.samples import LENGTH, MOST, READ, Samples, samples_of
from tests.report.conftest import record, write_bench
from tests.report.test_page import HOSTILE, Parsed


def write(folder: Path, rollouts: int, *, text: str = "answer", each: int = 3) -> RunRecord:
    """A run of which only samples are left."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"rollout": rollout, "prompt": f"p{rollout}", "text": f"{text} {place}", "reward": float(place)})
        for rollout in range(1, rollouts + 1)
        for place in range(each)
    ]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return record({"reward/mean": [0.5]}, path=str(folder))


def one(run: RunRecord) -> Samples:
    (found,) = samples_of([run])
    return found


def test_the_first_and_the_last_rollout_are_shown(tmp_path: Path) -> None:
    found = one(write(tmp_path / "run", 7))
    assert list(found.rollouts) == [1, 7]
    assert [len(some) for some in found.rollouts.values()] == [MOST, MOST]
    assert (found.rollouts[7][1].prompt, found.rollouts[7][1].text, found.rollouts[7][1].reward) == (
        "p7",
        "answer 1",
        1.0,
    )


def test_a_file_longer_than_what_is_read_still_has_its_last_rollout(tmp_path: Path) -> None:
    found = one(write(tmp_path / "run", 400, text="x" * 600))
    assert (tmp_path / "run" / "samples.jsonl").stat().st_size > 2 * READ
    assert list(found.rollouts) == [1, 400]
    # one response beyond the middle of the file alone
    assert list(one(write(tmp_path / "other", 200, text="y" * 550)).rollouts) == [1, 200]


def test_long_texts_are_cut_and_say_so(tmp_path: Path) -> None:
    (response, _) = one(write(tmp_path / "run", 1, text="z" * (LENGTH + 5), each=2)).rollouts[1]
    assert response.text == "z" * LENGTH + " … (7 more characters)"


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 2)
    file = tmp_path / "run" / "samples.jsonl"
    damage = b'{"rollout": "one"}\n[1]\n{"rollout": 1\n\xff\xfe\n' + b"[" * 5000 + b"\n"
    file.write_bytes(damage + file.read_bytes() + b'{"rollout": 3, "te')
    assert list(one(run).rollouts) == [1, 2]
    file.write_bytes(damage)
    assert samples_of([run]) == []
    assert samples_of([record({"reward/mean": [0.5]}, path="results.jsonl:3")]) == []


def test_the_tokens_are_a_link_where_their_page_is_and_a_command_elsewhere(tmp_path: Path) -> None:
    run = write(tmp_path / "javascript:a b", 1)
    assert one(run).command is None
    (tmp_path / "javascript:a b" / "view.html").write_text("")
    assert one(run).link(tmp_path) is None  # of other tokens, if of any
    (tmp_path / "javascript:a b" / "tokens.jsonl").write_text("{}\n")
    found = one(run)
    assert found.link(tmp_path) == "javascript%3Aa%20b/view.html"
    assert found.link(tmp_path / "report") == "../javascript%3Aa%20b/view.html"
    assert found.command == f"rlstab view '{run.path}'"


def test_the_page_shows_them_as_text(tmp_path: Path) -> None:
    bench = write_bench(tmp_path / "bench", methods={"grpo": {}, "stare": {}}, seeds=1, rollouts=20)
    for method in ("grpo", "stare"):
        write(bench / "runs" / "default" / method / "seed-0", 20, text=HOSTILE)
    (bench / "runs" / "default" / "stare" / "seed-0" / "tokens.jsonl").write_text("")
    found = Parsed(page.write(compare(load_runs(bench)), tmp_path / "out").read_text(encoding="utf-8"))
    assert [tag for tag, _ in found.elements].count("script") == 3
    assert found.text.count("<script>window.hit=1</script>") == 2 * 2 * MOST
    assert "Rollout 20" in found.text
    assert f"rlstab view {bench / 'runs/default/stare/seed-0'}" in found.text
