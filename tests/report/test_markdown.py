import json
import re
from pathlib import Path

from rlstab.report.comparison import compare
from rlstab.report.findings import findings
from rlstab.report.load import load_runs
from rlstab.report.markdown import markdown
from rlstab.report.results_file import export_results
from tests.report.conftest import place_run, write_bench


def rows(text: str) -> list[list[str]]:
    """Cells of every table row, by unescaped bars."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_numbers_are_those_of_the_comparison(bench: Path) -> None:
    comparison = compare(load_runs(bench))
    text = markdown(comparison, title="Results", command="rlstab report x")
    assert text.startswith("# Results\n")
    assert "```sh\nrlstab report x\n```" in text
    cell = comparison.tables[0].cells["stare", "eval/entropy"]
    value, difference, wins = cell.summary, cell.paired.difference, cell.paired.wins
    assert [
        "stare",
        "4",
        # as many decimals as the page, and as the rest of the column
        f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]",
        f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]",
        f"{wins.value:.2f} [{wins.low:.2f}, {wins.high:.2f}]",
        "higher",
    ] in [row[1:] for row in rows(text)]
    assert "- eval/entropy against grpo: higher: 20_entropy, stare; identical: s2t." in text
    assert "rlstab bench examples/entropy.yaml" in text
    assert (
        "- clip_higher never acted: on-policy, the ratio is 1. This holds in entropy, default: 20_entropy, s2t, stare."
        in text
    )


def test_every_table_is_rectangular(bench: Path, sweep: Path) -> None:
    text = markdown(compare(load_runs(bench, sweep)))
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(row) for row in rows(block)}) == 1
    assert "## stability: highest stable optimisation.lr" in text
    assert ["s2t", "0.0002", "0, 0, 0 of 3", "0, 0, 0 of 3", "3, 3, 0 of 3"] in rows(text)


def test_names_and_errors_are_no_markup(bench: Path) -> None:
    place = {"bench": "entropy", "setting": "default", "method": "x|y`<b>", "seed": 0, "status": "failed"}
    place_run(bench / "runs/default/z/seed-0", error="boom\n<script>alert(1)</script>\n# [a](b) | \\| *c*", **place)
    text = markdown(compare(load_runs(bench)))
    assert not re.search(r"(?<!\\)<", text)
    assert r"\# " not in text
    assert not any(line.startswith("# [") for line in text.splitlines())
    assert r"x\|y\`\<b\>" in text
    assert r"\[a\](b) \| \\\| \*c\*" in text


def test_settings_without_a_finished_run_say_so(tmp_path: Path) -> None:
    write_bench(tmp_path / "b", methods={"grpo": {"done": 30}}, seeds=2)
    text = markdown(compare(load_runs(tmp_path)))
    assert "No run of this setting has finished, so there is nothing to compare." in text
    assert "unfinished, 30 of 60 rollouts" in text


def test_what_a_bench_says_about_itself_stands_before_its_numbers(tmp_path: Path) -> None:
    write_bench(tmp_path / "b", seeds=3)
    file = tmp_path / "b" / "bench.json"
    asked = "Built on purpose,\nso that it is <true>.\n\nOne task."
    file.write_text(json.dumps({**json.loads(file.read_text()), "about": asked}))
    loaded = load_runs(tmp_path / "b")
    for runs in (loaded, load_runs(export_results(loaded, tmp_path / "x.jsonl"))):
        comparison = compare(runs)
        first, second, frame, *_ = markdown(comparison).split("## entropy\n\n")[1].split("\n\n")
        assert [first, second] == [r"Built on purpose, so that it is \<true\>.", "One task."]
        assert frame.startswith("In all runs:")
        assert findings(comparison)[1:3] == ["Built on purpose, so that it is <true>.", "One task."]


def test_scores_that_a_grader_lost_have_an_outcome_of_their_own(tmp_path: Path) -> None:
    changes = {"changes": {"reward/true": [0.75] * 60}}
    write_bench(tmp_path / "b", methods={"grpo": changes, "s2t": changes}, seeds=3)
    comparison = compare(load_runs(tmp_path))
    names = [one.name for one in comparison.outcomes]
    assert names[0] == "eval/mean"
    assert names.index("reward/true/area") + 1 == names.index("reward/area")
    assert set(comparison.tables[0].cells["s2t", "reward/true/area"].values.values()) == {0.75}
