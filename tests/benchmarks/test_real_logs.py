"""Published runs: their split and outcomes, the loader, and the table of the benchmark."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import real_logs as board
from benchmarks.generated import END as END_OF_GENERATED
from tests import real_logs as loader
from tests.real_logs import RealLog, last_over_best, outcome, real_logs, rewards_of, sources, split_of


def made(name: str = "made", lines: int = 40, **source: str) -> RealLog:
    rows = [{"step": step, "reward": 0.5 + step % 3 / 10, "grad_norm": 0.1} for step in range(1, lines + 1)]
    source = {"path": "logs/a|b.log", "trainer": "TRL", "model": "1B", **source}
    known = {"outcome": "kept", "ended": "died", "last_over_best": 0.97}
    return RealLog(name=name, split="seen", repository="owner/name", source=source, rows=rows, **known)


def test_sources_are_many_and_split_by_repository():
    collected = [source for source in sources() if not source["name"].startswith("shared/")]
    assert len(collected) >= 100
    assert len({source["repository"] for source in collected}) >= 12
    assert len({source["name"] for source in sources()}) == len(sources())
    assert all(source["split"] == split_of(source["repository"], source["path"]) for source in collected)
    aside = sum(source["split"] == "kept_aside" for source in collected)
    assert 0.4 < aside / len(collected) < 0.6


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1.0, 0.49, "lost"),
        (1.0, 0.84, "fell"),
        (1.0, 0.86, "kept"),
        (1.0, 1.17, "kept"),
        (1.0, 1.18, "rose"),
        (0.0, 0.1, "rose"),
        (0.0, 0.0, "kept"),
        (-2.0, -3.0, "lost"),
        (-3.0, -2.0, "rose"),
        (0.5, -0.5, "lost"),
    ],
)
def test_outcome_compares_the_outer_quarters(first, last, expected):
    assert outcome([first] * 10 + [first, last] * 10 + [last] * 10) == expected


def test_last_over_best_sees_a_loss_after_a_rise():
    rewards = [0.2] * 10 + [0.8] * 20 + [0.2] * 10
    assert outcome(rewards) == "kept"
    assert last_over_best(rewards) == pytest.approx(0.25)


def test_loader_reads_the_figures_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = [source["name"] for source in sources() if not source["name"].startswith("shared/")][:2]
    columns = {"step": [1, 2], "reward": [0.5, None], "critic/score/mean": [None, float("nan")]}
    (tmp_path / loader.FIGURES).write_bytes(gzip.compress(json.dumps({first: columns}).encode()))
    monkeypatch.setenv("RLSTAB_REAL_LOGS", str(tmp_path))
    logs = {log.name: log for log in real_logs()}
    assert first in logs
    assert second not in logs
    assert logs[first].rows[0] == {"step": 1, "reward": 0.5}
    assert set(logs[first].rows[1]) == {"step", "critic/score/mean"}
    lines = logs[first].write(tmp_path).read_text().splitlines()
    assert json.loads(lines[0]) == logs[first].rows[0]


def test_shuffled_lines_are_the_same_under_the_same_steps():
    log = made()
    shuffled = log.shuffled(0)
    assert shuffled != log.rows
    assert shuffled == log.shuffled(0) != log.shuffled(1)
    assert [row["step"] for row in shuffled] == [row["step"] for row in log.rows]
    assert sorted(row["reward"] for row in shuffled) == sorted(row["reward"] for row in log.rows)


def test_figures_have_the_outcomes_that_the_sources_state():
    logs = list(real_logs())
    if not logs:
        pytest.skip("no figures of published runs at hand, see tests/real_logs.py")
    for log in logs:
        rewards = rewards_of(log.rows)
        assert outcome(rewards) == log.outcome, log.name
        assert last_over_best(rewards) == pytest.approx(log.last_over_best, abs=0.002), log.name
        assert len(log.rows) == log.source["lines"], log.name


def test_page_has_a_row_for_every_log_and_counts_what_does_not_open():
    logs = [
        made("one"),
        made("two", lines=12),
        RealLog(**{**vars(made("three")), "rows": [{"step": 1, "bananas": 1.0}]}),
    ]
    page = board.page_of(logs, {"one": ["kl_drift"], "two": []}, shuffles=1)
    rows = [line for line in page.splitlines() if line.startswith("| owner/name")]
    assert len(rows) == 3
    assert "of which 2 open" in page
    assert "| logs/a/b.log | TRL, 1B | 40 | kept, died | 0.97 |" in rows[0]
    assert rows[0].endswith("`kl_drift` |")
    assert rows[1].endswith("none |")
    assert rows[2].endswith("| not opened | not tried |")
    assert "| kept | 3 | 0 | 1 |" in page


def test_page_is_placed_once():
    page = f"before\n\n{END_OF_GENERATED}\n\nafter\n"
    once = board.placed(page, "first")
    twice = board.placed(once, "second")
    assert once.startswith(f"before\n\n{END_OF_GENERATED}\n\n{board.BEGIN}\n\nfirst\n\n{board.END}")
    assert twice == once.replace("first", "second")
    assert twice.endswith("\n\nafter\n")


def test_every_log_has_a_verdict_of_rldoctor():
    verdicts = json.loads(board.VERDICTS.read_text())
    assert verdicts.keys() == {source["name"] for source in sources()}
