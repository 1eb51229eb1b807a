"""The report: everything is in it, nothing of it runs or asks, its controls work in a browser, no file is lost."""

from __future__ import annotations

import ast
import base64
import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from plotly.offline import get_plotlyjs

import rlstab
from rlstab.cli import main
from rlstab.errors import ReportError
from rlstab.report import figures, page
from rlstab.report.build import make_report
from rlstab.report.comparison import compare
from rlstab.report.curves import curve_of, lead_curve, lead_sweep
from rlstab.report.load import load_runs
from rlstab.report.page import Scale, contents, data, safe_json
from rlstab.report.runs import LeftOut, Loaded, RunRecord
from rlstab.report.samples import LENGTH, MOST, READ, Samples, samples_of
from tests.report.conftest import config, curves, record, write_bench, write_run

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=2>\u2028<!--"


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


@pytest.fixture
def written(bench: Path, tmp_path: Path) -> Path:
    return page.write(compare(load_runs(bench)), tmp_path / "out")


def hostile_runs() -> list[RunRecord]:
    """A baseline and a method that is script, whose every text is script too."""
    found = []
    for method in ("grpo", HOSTILE):
        for seed in range(3):
            values = curves(60, seed, gain=0.2 if method == "grpo" else 0.3)
            values["odd/" + HOSTILE] = values["reward/mean"]
            whole = config([{"name": HOSTILE, "note": HOSTILE}], seed=seed)
            texts = {"bench": HOSTILE, "setting": HOSTILE, "method": method, "path": HOSTILE, "command": HOSTILE}
            about = {"run_hash": HOSTILE, "objective_hash": HOSTILE, "machine": HOSTILE}
            found.append(record(values, seed=seed, config=whole, about=about, **texts))
    last = dataclasses.replace(found[-1], status="failed", error=HOSTILE)
    return [*found[:-1], last]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    loaded = Loaded(hostile_runs(), [LeftOut(HOSTILE, HOSTILE)], [HOSTILE])
    return page.write(compare(loaded), tmp_path / "out")


def test_texts_of_runs_are_texts_of_the_page(hostile):
    read = hostile.read_text(encoding="utf-8")
    found = Parsed(read)
    assert [tag for tag, _ in found.elements].count("script") == 3
    assert not [attributes for _, attributes in found.elements if any(name.startswith("on") for name in attributes)]
    assert not [tag for tag, _ in found.elements if tag in ("img", "iframe", "object", "embed", "link", "base", "form")]
    assert found.data["methods"][1]["name"] == HOSTILE
    # what has no shape of its own is shown, so that nothing hides in a name
    assert "⟨U+2028⟩" in found.text
    assert "\u2028" not in read


def test_json_cannot_leave_its_script_element():
    nasty = {"<b>": ["</script>", "<!--", "a & b", "\u2028\u2029", float("nan"), float("inf"), 1.5]}
    text = safe_json(nasty)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"<b>": ["</script>", "<!--", "a & b", "\u2028\u2029", None, None, 1.5]}


def test_nothing_is_asked_for_and_only_our_scripts_run(written):
    text = written.read_text(encoding="utf-8")
    found = Parsed(text)
    assert text.count(get_plotlyjs()) == 1
    assert "http" not in text.replace(get_plotlyjs(), "").replace("http-equiv", "")
    assert not [tag for tag, attributes in found.elements if {"src", "srcset", "data"} & attributes.keys()]
    # of places elsewhere only the token viewer's page, and only where it lies beside a run
    assert all(attributes["href"].startswith("#") for tag, attributes in found.elements if "href" in attributes)
    policy = next(one["content"] for tag, one in found.elements if one.get("http-equiv") == "Content-Security-Policy")
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["img-src"] == ["data:", "blob:"]
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found.scripts[1:]]
    assert rules["script-src"] == [f"'sha256-{one}'" for one in digests]
    assert set(rules) == {"default-src", "base-uri", "form-action", "img-src", "script-src", "style-src"}


def test_every_figure_has_its_numbers(written):
    found = Parsed(written.read_text(encoding="utf-8"))
    figures = [attributes for tag, attributes in found.elements if tag == "figure"]
    drawn = {one["data-metric"] for one in figures if one["data-figure"] == "curve"}
    assert {"reward/mean", "eval/mean", "tokens/entropy", "gradient/norm", "s2t/dropped", "stare/gate"} <= drawn
    measured = {name for method in found.data["curves"]["s0"].values() for name in method}
    assert drawn <= measured
    assert {"trajectory", "curve"} == {one["data-figure"] for one in figures}
    one = found.data["curves"]["s0"]["m0"]["reward/mean"]
    assert found.data["grids"][one["grid"]] == [10, 20, 30, 40, 50, 60]
    assert one["names"] == [0, 1, 2, 3]
    assert one["seeds"][2][0] == pytest.approx(np.mean(curves(60, 2)["reward/mean"][:10]), rel=1e-3)


def test_the_table_says_what_the_comparison_says(bench, written):
    comparison = compare(load_runs(bench))
    text = Parsed(written.read_text(encoding="utf-8")).text
    cell = comparison.tables[0].cells["20_entropy", "eval/entropy"]
    assert cell.paired is not None
    for one in (cell.summary, cell.paired.difference):
        sign = "+" if one is cell.paired.difference else ""
        assert f"{sign}{one.value:.3f} [{sign}{one.low:.3f}, {sign}{one.high:.3f}]" in text
    assert cell.paired.verdict == "higher"


def test_differences_to_the_base_are_marked(written):
    found = Parsed(written.read_text(encoding="utf-8"))
    text = written.read_text(encoding="utf-8")
    assert "<mark>- name: s2t</mark>" in text
    assert '<span class="gone">- name: token_mean</span>' in text
    assert "differ from grpo" in found.text
    # what names one run alone is no difference
    assert "<mark>seed:" not in text
    assert "out:" not in "".join(line for line in text.splitlines() if line.startswith("<mark>"))


def test_a_sweep_has_its_figure_and_its_table(sweep, tmp_path):
    found = Parsed(page.write(compare(load_runs(sweep)), tmp_path / "out").read_text(encoding="utf-8"))
    assert [one["data-figure"] for tag, one in found.elements if tag == "figure"].count("sweep") == 1
    (one,) = found.data["sweeps"]
    assert (one["key"], one["labels"], one["log"]) == ("optimisation.lr", ["1e-4", "2e-4", "4e-4"], True)
    by_name = {method["name"]: one["methods"][method["key"]] for method in found.data["methods"]}
    assert (by_name["grpo"]["highest"], by_name["s2t"]["highest"]) == (1e-4, 2e-4)
    assert by_name["grpo"]["stable"] == [True, False, False]
    # settings stand in the order of the swept value
    assert [setting["name"] for setting in found.data["settings"]] == ["lr_1e-4", "lr_2e-4", "lr_4e-4"]


def test_ticks_keep_clear_of_each_other_and_zero_is_not_alone():
    for low, high in ((-0.076, 0.021), (0, 0.031), (-0.04, 0.04), (-0.035, 0.035), (-1, 0.1), (0, 120), (-3e-5, 1e-5)):
        ticks = Scale([0.0, low, high]).ticks()
        assert "0" in [tick["text"] for tick in ticks]
        assert len(ticks) >= 2
        for tick, later in itertools.pairwise(ticks):
            # half of each label lies to each side; 11 px of a sans serif are about 6 px per character
            assert later["at"] - tick["at"] >= 6 * (len(tick["text"]) + len(later["text"])) / 2, (low, high)


def test_numbers_of_curves_are_neither_steps_nor_too_many(monkeypatch):
    kept = 1 - np.linspace(1.1e-4, 1.9e-4, 60)
    drawn = data(compare(Loaded([record({**curves(60, 0), "tokens/kept": kept.tolist()})], [], [])))
    assert len(set(drawn["curves"]["s0"]["m0"]["tokens/kept"]["seeds"][0])) == 6
    values = np.random.default_rng(0).random(5003)
    loaded = Loaded([record({"reward/mean": values}, seed=seed) for seed in range(2)], [], [])
    drawn = data(compare(loaded))
    [grid] = drawn["grids"]
    assert 100 <= len(grid) <= 120
    assert grid[-1] == 5003
    # a point is the mean over its bins of ten rollouts
    assert grid[0] == 50
    assert drawn["curves"]["s0"]["m0"]["reward/mean"]["seeds"][0][0] == pytest.approx(values[:50].mean(), rel=1e-5)
    monkeypatch.setattr("rlstab.report.curves.BUDGET", 60)
    assert len(data(compare(loaded))["grids"][0]) <= 30


def test_the_page_says_what_it_is_about(bench):
    loaded = dataclasses.replace(load_runs(bench), not_begun=3)
    context = contents(compare(loaded), "rlstab report 'a b'")
    assert "16 runs (16 finished, 3 not begun)" in context["what"]
    # the synthetic s2t is grpo with other metrics of its own
    assert context["same"] == {"s0": "s2t gives exactly the values of grpo, so their curves coincide."}
    assert context["title"] == "entropy: 20_entropy, s2t and stare against grpo"


def test_only_our_own_command_is_there_to_copy(bench, tmp_path):
    written = page.write(compare(load_runs(bench)), tmp_path / "out", "rlstab report 'a b'")
    text = Parsed(written.read_text(encoding="utf-8")).text
    assert "bench entropy rlstab bench examples/entropy.yaml as recorded in its folder" in text
    assert "this report rlstab report 'a b' copy" in text
    assert text.count("copy") == 1


def test_odd_runs_have_a_page(tmp_path):
    run = record({"reward/mean": [0.1, 0.2], "lr": [1e-4, 1e-4]})
    found = Parsed(page.write(compare(Loaded([run], [], [])), tmp_path).read_text(encoding="utf-8"))
    assert "Nothing can be compared" in found.text
    assert [one["data-metric"] for tag, one in found.elements if "data-metric" in one] == ["reward/mean"]
    run = record({}, status="failed", error="OutOfMemoryError", config={})
    found = Parsed(page.write(compare(Loaded([run], [], [])), tmp_path).read_text(encoding="utf-8"))
    assert "there is nothing to compare" in found.text
    assert "1 run (1 failed)" in found.text


def test_the_page_opens_with_the_curve_of_the_main_outcome_or_the_sweep(bench, sweep):
    assert lead_curve(compare(load_runs(bench))) == "eval/mean"
    assert (lead_curve(compare(load_runs(sweep))), lead_sweep(compare(load_runs(sweep)))) == (None, 0)
    assert lead_sweep(compare(load_runs(bench, sweep))) is None
    assert lead_curve(compare(load_runs(bench), metrics=["reward/best"])) == "reward/mean"
    comparison = compare(load_runs(bench), metrics=["tokens/entropy/area"])
    assert curve_of(comparison, "tokens/entropy/area") == "tokens/entropy"
    # few evaluations show less than the training curve
    evaluations = [{"rollout": rollout, "eval/mean": 0.5, "eval/entropy": 0.2} for rollout in (0, 60)]
    some = [record(curves(60, seed), seed=seed, evaluations=evaluations) for seed in range(3)]
    comparison = compare(Loaded(some, [], []))
    assert (lead_curve(comparison), curve_of(comparison, "eval/entropy")) == ("reward/mean", "tokens/entropy")


def test_what_was_spent_is_an_axis(tmp_path):
    write_run(tmp_path / "run", rollouts=25, changes={"response/tokens": [100.0] * 25})
    comparison = compare(load_runs(tmp_path))
    clock = data(comparison)["clocks"]["s0"]["m0"]["0"]
    assert clock == {"rollout": [0, 10, 20, 25], "seconds": [0, 2.5, 5, 6.25], "tokens": [0, 1000, 2000, 2500]}
    assert list(contents(comparison)["spent"]) == ["tokens", "seconds"]


# -- samples -----------------------------------------------------------------------------------------------------------


def write_samples(folder: Path, rollouts: int, *, text: str = "answer", each: int = 3) -> Samples:
    """Of a run of which only samples are left."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"rollout": rollout, "prompt": f"p{rollout}", "text": f"{text} {place}", "reward": float(place)})
        for rollout in range(1, rollouts + 1)
        for place in range(each)
    ]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (found,) = samples_of([record({"reward/mean": [0.5]}, path=str(folder))])
    return found


def test_the_first_and_the_last_rollout_are_shown(tmp_path):
    found = write_samples(tmp_path / "run", 7)
    assert {number: len(responses) for number, responses in found.rollouts.items()} == {1: MOST, 7: MOST}
    last = found.rollouts[7][1]
    assert (last.prompt, last.text, last.reward) == ("p7", "answer 1", 1.0)
    # also of a file that is longer than what is read of it
    found = write_samples(tmp_path / "long", 400, text="x" * 600)
    assert (tmp_path / "long" / "samples.jsonl").stat().st_size > 2 * READ
    assert list(found.rollouts) == [1, 400]
    assert list(write_samples(tmp_path / "other", 200, text="y" * 550).rollouts) == [1, 200]
    found = write_samples(tmp_path / "cut", 1, text="z" * (LENGTH + 5), each=2)
    assert found.rollouts[1][0].text == "z" * LENGTH + " … (7 more characters)"


def test_damaged_samples_are_passed_over(tmp_path):
    run = write_samples(tmp_path / "run", 2).run
    file = tmp_path / "run" / "samples.jsonl"
    damage = b'{"rollout": "one"}\n[1]\n{"rollout": 1\n\xff\xfe\n' + b"[" * 5000 + b"\n"
    file.write_bytes(damage + file.read_bytes() + b'{"rollout": 3, "te')
    assert list(samples_of([run])[0].rollouts) == [1, 2]
    file.write_bytes(damage)
    assert samples_of([run]) == []


def test_the_tokens_are_a_link_where_their_page_is_and_a_command_elsewhere(tmp_path):
    found = write_samples(tmp_path / "javascript:a b", 1)
    assert not found.traced
    (tmp_path / "javascript:a b" / "view.html").write_text("")
    assert found.link(tmp_path) is None  # of other tokens, if of any
    (tmp_path / "javascript:a b" / "tokens.jsonl").write_text("{}\n")
    (found,) = samples_of([found.run])
    assert found.link(tmp_path) == "javascript%3Aa%20b/view.html"
    assert found.link(tmp_path / "report") == "../javascript%3Aa%20b/view.html"
    assert found.command == f"rlstab view '{found.run.path}'"


def test_the_page_shows_samples_as_text(tmp_path):
    bench = write_bench(tmp_path / "bench", methods={"grpo": {}, "stare": {}}, seeds=1, rollouts=20)
    for method in ("grpo", "stare"):
        write_samples(bench / "runs" / "default" / method / "seed-0", 20, text=HOSTILE)
    (bench / "runs" / "default" / "stare" / "seed-0" / "tokens.jsonl").write_text("")
    found = Parsed(page.write(compare(load_runs(bench)), tmp_path / "out").read_text(encoding="utf-8"))
    assert [tag for tag, _ in found.elements].count("script") == 3
    assert found.text.count("<script>window.hit=1</script>") == 2 * 2 * MOST
    assert "Rollout 20" in found.text
    assert f"rlstab view {bench / 'runs/default/stare/seed-0'}" in found.text


# -- figures -----------------------------------------------------------------------------------------------------------


def text_of(path: Path) -> str:
    return "".join(ElementTree.parse(path).getroot().itertext())


def test_each_figure_is_a_png_and_an_svg_and_stands_in_the_page(tmp_path):
    nasty = "a<b>&$x_1$"
    runs = [record(curves(60, seed), method=name, seed=seed) for name in ("grpo", nasty) for seed in range(3)]
    for seed, run in enumerate(runs[:3]):
        run.metrics["s2t/threshold"] = (np.array([10 * seed + 7]), np.array([0.4]))
    comparison = compare(Loaded(runs, [], []))
    saved = figures.write(comparison, tmp_path)
    sections = ["differences", "learning-curves", "entropy-and-reward", "gradient-norms", "touched"]
    assert [figure.path.stem for figure in saved if figure.path.suffix == ".svg"] == sections
    assert sorted(figure.path for figure in saved) == sorted((tmp_path / "figures").iterdir())
    for figure in saved:
        if figure.path.suffix == ".png":
            with Image.open(figure.path) as image:
                assert min(image.size) > 200
        else:  # text stays text, and a name is neither markup nor mathematics
            assert nasty in text_of(figure.path)
    touched = " ".join(text_of(tmp_path / "figures" / "touched.svg").split())
    for words in ("0 throughout", "never recorded in half", "s2t/threshold, nats"):
        assert words in touched
    text = page.write(comparison, tmp_path, "rlstab report x", saved).read_text(encoding="utf-8")
    assert text.count("<noscript><img") == len(sections)
    # equal runs give equal files
    again = figures.write(comparison, tmp_path / "again")
    assert [figure.path.read_bytes() for figure in again] == [figure.path.read_bytes() for figure in saved]
    assert page.write(comparison, tmp_path / "again", "rlstab report x", again).read_text(encoding="utf-8") == text


def test_nothing_to_draw_gives_no_figure(tmp_path):
    comparison = compare(Loaded([record({}, status="failed", config={})], [], []))
    assert figures.write(comparison, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_settings_and_sweeps_have_figures_of_their_own(sweep, tmp_path):
    names = [figure.path.name for figure in figures.write(compare(load_runs(sweep)), tmp_path)]
    assert "sweep-stability.svg" in names
    assert {f"learning-curves-stability-lr_{lr}.svg" for lr in ("1e-4", "2e-4", "4e-4")} <= set(names)
    assert len(names) == len(set(names))


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_report_is_written_beside_its_runs_and_never_over_another_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "write", lambda comparison, out: [])  # they have tests of their own
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        write_run(tmp_path / "all" / "a" / f"run-{seed}", seed=seed, rollouts=20, about={"run_id": str(seed)})
    write_run(tmp_path / "all" / "b", seed=5, rollouts=20, about={"run_id": "5"})
    assert main(["report", "all/a"]) == 0
    assert "rlstab report all/a --out all/a/report" in Path("all/a/report/report.md").read_text()
    assert "2 runs, 1 method, 1 setting\n" in capsys.readouterr().err
    assert main(["report", "all/a", "all/b"]) == 0
    assert Path("all/report/report.html").is_file()
    assert main(["report", "all/a", "--export", "x.jsonl"]) == 0
    assert main(["report", "x.jsonl"]) == 0
    assert Path("x-report/report.html").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "x-report", "x.jsonl"]
    # its own report is made again, another one stays
    assert main(["report", "./all/a", "--out", "all/a/report"]) == 0
    page_of_a = Path("all/a/report/report.html").read_bytes()
    capsys.readouterr()
    assert main(["report", "all/b", "--out", "all/a/report"]) == 2
    assert "all/a/report/report.html is a report of other runs" in capsys.readouterr().err
    assert Path("all/a/report/report.html").read_bytes() == page_of_a
    for name in ("report.html", "report.md"):
        Path("mine").mkdir(exist_ok=True)
        Path("mine", name).write_text("mine")
        assert main(["report", "all/b", "--out", "mine"]) == 2
        assert [path.read_text() for path in Path("mine").iterdir()] == ["mine"]
        Path("mine", name).unlink()


def test_export_and_markdown_say_the_same(bench, tmp_path, capsys):
    export, one, other = tmp_path / "results" / "x.jsonl", tmp_path / "docs" / "one.md", tmp_path / "other.md"
    assert main(["report", str(bench), "--export", str(export), "--markdown", str(one), "--baseline", "stare"]) == 0
    said = capsys.readouterr().err
    assert f"written: {export}" in said
    assert not (bench / "report").exists()
    make_report([export], markdown_file=other, baseline="stare")
    assert f"rlstab report {bench} --baseline stare --markdown {one}" in one.read_text()
    cut = [text.read_text().split("```", 2)[2] for text in (one, other)]  # without the command
    assert cut[0] == cut[1]


def test_what_is_left_out_is_said_without_markup_and_errors_end_with_code_2(tmp_path, capsys):
    write_run(tmp_path / "a", done=30)
    (write_run(tmp_path / "[b]") / "config.yaml").unlink()
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path), "--markdown", str(tmp_path / "out.md")]) == 0
    said = capsys.readouterr().err
    assert f"left out: {tmp_path}/[b]: neither config.yaml nor bench.json" in said
    assert "note: default clip_higher seed 0: unfinished, 30 of 60 rollouts." in said
    for options in (["--markdown", "file/x.md"], ["--out", "file"], ["--export", "file/x.jsonl"]):
        option, place = options
        assert main(["report", str(tmp_path / "a"), option, str(tmp_path / place)]) == 2
        assert f"Give {option} another" in capsys.readouterr().err
    with pytest.raises(ReportError, match="--out another folder"):
        page.write(compare(load_runs(tmp_path / "a")), tmp_path / "file")


def test_markdown_needs_no_plotting_and_the_report_no_trainer(bench, tmp_path):
    program = (
        "import sys; from rlstab.report.build import make_report;"
        f"make_report([{str(bench)!r}], markdown_file={str(tmp_path / 'x.md')!r});"
        "print([name for name in ('plotly', 'matplotlib', 'transformers', 'accelerate') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    for path in (Path(rlstab.__file__).parent / "report").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not name.startswith(("rlstab.train", "rlstab.bench", "rlstab.adapters")), path.name


# -- in a browser -----------------------------------------------------------------------------------------------------


def visible_methods(tab: Any, metric: str) -> set[str]:
    """Keys of the methods whose mean is drawn in the figure of a metric."""
    return set(
        tab.evaluate(
            "metric => document.querySelector(`figure[data-metric='${metric}'] .plot`).data"
            ".filter(one => one.meta.part === 'mean').map(one => one.meta.method)",
            metric,
        )
    )


def parts(tab: Any, metric: str) -> list[str]:
    return tab.evaluate(
        "metric => document.querySelector(`figure[data-metric='${metric}'] .plot`).data.map(one => one.meta.part)",
        metric,
    )


@pytest.mark.slow
def test_it_opens_without_an_error_or_a_request(written, browser_page):
    tab = browser_page.open(written)
    empty = tab.evaluate(
        "[...document.querySelectorAll('figure:not([hidden]) .plot')]"
        ".filter(one => !one.querySelector('svg') && !one.querySelector('.absent')).length"
    )
    assert empty == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280
    labels = tab.evaluate("[...document.querySelectorAll('.plot')].map(one => one.getAttribute('aria-label'))")
    assert all(labels)
    assert any("grpo ends at" in label for label in labels)
    browser_page.assert_clean()


@pytest.mark.slow
def test_a_method_is_switched_off_in_every_figure(written, browser_page):
    tab = browser_page.open(written)
    chip = tab.locator("button.chip", has_text="20_entropy")
    key = chip.get_attribute("data-method")
    for metric in ("reward/mean", "gradient/norm", "top_entropy/share"):
        assert key in visible_methods(tab, metric)
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    for metric in ("reward/mean", "gradient/norm"):
        assert key not in visible_methods(tab, metric)
        assert len(visible_methods(tab, metric)) == 3
    gone = tab.locator("figure[data-metric='top_entropy/share']")
    assert "None of the methods shown" in gone.inner_text()
    chip.click()
    assert key in visible_methods(tab, "top_entropy/share")
    # shift-click: one alone, and all again
    chip.click(modifiers=["Shift"])
    assert visible_methods(tab, "reward/mean") == {key}
    chip.click(modifiers=["Shift"])
    assert len(visible_methods(tab, "reward/mean")) == 4
    browser_page.assert_clean()


@pytest.mark.slow
def test_seeds_bands_smoothing_and_the_metric_are_chosen(written, browser_page):
    tab = browser_page.open(written)
    assert parts(tab, "reward/mean").count("band") == 4
    tab.locator("#band").select_option("none")
    assert "band" not in parts(tab, "reward/mean")
    tab.locator("#seeds").check()
    assert parts(tab, "reward/mean").count("seed") == 4 * 4
    ends = "document.querySelector(`figure[data-metric='reward/mean'] .plot`).data.at(-1).y.at(-1)"
    before = tab.evaluate(ends)
    tab.locator("#smooth").select_option("5")
    assert tab.evaluate(ends) != before
    choice = tab.locator("select[data-for-metric]").first
    choice.select_option("reward/zero_std_groups")
    assert len(visible_methods(tab, "reward/zero_std_groups")) == 4
    browser_page.assert_clean()


@pytest.mark.slow
def test_setting_and_outcome_are_chosen(sweep, tmp_path, browser_page):
    written = page.write(compare(load_runs(sweep)), tmp_path / "out")
    tab = browser_page.open(written)
    mean = "document.querySelector(`figure[data-metric='reward/mean'] .plot`).data.at(-1).y.at(-1)"
    good = tab.evaluate(mean)
    tab.locator("#setting").select_option(label="lr_4e-4")
    assert tab.evaluate(mean) < 0.5 * good
    shown = "table:visible caption"
    assert any("lr_4e-4" in one for one in tab.locator(shown).all_inner_texts())
    assert not any("lr_1e-4" in one for one in tab.locator(shown).all_inner_texts())
    title = tab.locator("figure[data-figure='sweep'] .title")
    assert title.inner_text() == "held-out reward against optimisation.lr"
    tab.locator("#outcome").select_option("reward/area")
    assert title.inner_text() == "training reward, whole run against optimisation.lr"
    assert any("mean of reward/mean over all rollouts" in one for one in tab.locator(shown).all_inner_texts())
    browser_page.assert_clean()


@pytest.mark.slow
def test_hostile_texts_are_inert_in_a_browser(hostile, browser_page):
    tab = browser_page.open(hostile)
    tab.locator("#seeds").check()
    tab.locator("button.chip").last.click()
    tab.locator("button.chip").last.click()
    # hovering makes plotly show names, which reads tags and entities in its texts
    plot = tab.locator("figure[data-metric='reward/mean'] .plot")
    for place in (200, 210):
        plot.hover(position={"x": place, "y": 100})
        tab.wait_for_timeout(200)
    assert "<img src=x" in plot.locator(".hoverlayer .legend").text_content()
    assert plot.locator(".hoverlayer .legend").is_visible()
    tab.locator("details").last.locator("summary").click()
    assert tab.evaluate("window.hit") is None
    assert tab.evaluate("document.querySelectorAll('img, iframe').length") == 0
    browser_page.assert_clean()


@pytest.mark.slow
def test_without_a_script_everything_is_there(bench, tmp_path, chromium):
    comparison = compare(load_runs(bench))
    written = page.write(comparison, tmp_path, figures=figures.write(comparison, tmp_path))
    context = chromium.new_context(viewport={"width": 1000, "height": 800}, java_script_enabled=False)
    tab = context.new_page()
    tab.goto(written.resolve().as_uri())
    images = tab.locator("img.still").all()
    assert len(images) == 5
    assert all(image.is_visible() and image.bounding_box()["height"] > 100 for image in images)
    # the outcomes that the controls would choose from stand one after the other
    assert len(tab.locator(".first caption").all_inner_texts()) == len(comparison.outcomes)
    assert not tab.locator(".bar").is_visible()
    assert not [figure for figure in tab.locator("figure[data-figure]").all() if figure.is_visible()]
    context.close()


@pytest.mark.slow
def test_curves_are_drawn_over_what_was_spent(tmp_path, browser_page):
    for seed, seconds in ((0, 1.0), (1, 3.0)):
        values = {"response/tokens": [100.0] * 60, "seconds/rollout": [seconds] * 60}
        write_run(tmp_path / "runs" / str(seed), seed=seed, changes=values)
        # what the conftest writes itself stands after the changes
        file = tmp_path / "runs" / str(seed) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"seconds/rollout": 0.25', f'"seconds/rollout": {seconds}'))
    tab = browser_page.open(page.write(compare(load_runs(tmp_path / "runs")), tmp_path / "out"))
    last = "name => { const one = document.querySelector(`figure[data-metric='reward/mean'] .plot`);"
    last += " return [one.data.filter((trace) => trace.meta.part === name).map((trace) => trace.x.at(-1)),"
    last += " one.layout.xaxis.title.text]; }"
    assert tab.evaluate(last, "mean") == [[60], "rollout"]
    tab.locator("#axis").select_option("tokens")
    assert tab.evaluate(last, "mean") == [[6000], "tokens sampled"]
    tab.locator("#axis").select_option("seconds")
    # 60 and 180 seconds, each seed by its own clock
    assert tab.evaluate(last, "mean") == [[2], "training time, minutes"]
    tab.locator("#seeds").check()
    assert tab.evaluate(last, "seed") == [[1, 3], "training time, minutes"]
    browser_page.assert_clean()


#: Words outside of code whose letters stand on two lines; a hyphen is a place to break.
BROKEN = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!parent.checkVisibility() || parent.closest("script, style, svg, code, pre, option, .plot")) continue;
    for (const word of node.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter((one) => one.width > 0);
      if (new Set(boxes.map((one) => Math.round(one.top))).size > 1) found.push(word[0]);
    }
  }
  return found;
}"""
