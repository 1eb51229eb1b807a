"""The report: everything is in it, nothing of it runs or asks, its controls work in a browser, no file is lost."""

import base64
import dataclasses
import gzip
import hashlib
import itertools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from rlstab.cli import main
from rlstab.report import page
from rlstab.report.build import make_report
from rlstab.report.comparison import Comparison, compare
from rlstab.report.curves import curve_of, lead_curve, lead_sweep
from rlstab.report.page import data
from rlstab.report.runs import LeftOut, Loaded, RunRecord
from tests.report.conftest import config, curves, record, write_run

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=2>\u2028<!--"


class Parsed(HTMLParser):
    """Elements with their attributes, the text of each script, and the text of the rest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = self.inside = ""
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        self.scripts += [""] if tag == "script" else []

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += f" {data}"

    def having(self, name: str) -> list[dict[str, str | None]]:
        """Attributes of the elements that have one of this name."""
        return [attributes for _, attributes in self.elements if name in attributes]


def unpacked(text: str) -> str:
    """What the page unpacks before it draws."""
    return gzip.decompress(base64.b64decode(text)).decode()


def parsed(comparison: Comparison) -> Parsed:
    return Parsed(page.page(comparison))


def of(*runs: RunRecord) -> Comparison:
    return compare(Loaded(list(runs), [], []))


def saved(comparison: Comparison, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(page.page(comparison), encoding="utf-8")
    return path


@pytest.fixture
def hostile() -> Comparison:
    """A baseline and a method that is script, whose every text is script too."""
    runs = []
    for method, seed in itertools.product(("grpo", HOSTILE), range(3)):
        values = curves(60, seed, gain=0.2 if method == "grpo" else 0.3)
        values["odd/" + HOSTILE] = values["reward/mean"]
        whole = config([{"name": HOSTILE, "note": HOSTILE}], seed=seed)
        texts = dict.fromkeys(("bench", "setting", "path", "command"), HOSTILE)
        about = dict.fromkeys(("run_hash", "objective_hash", "machine"), HOSTILE)
        runs.append(record(values, seed=seed, method=method, config=whole, about=about, **texts))
    runs[-1] = dataclasses.replace(runs[-1], status="failed", error=HOSTILE)
    return compare(Loaded(runs, [LeftOut(HOSTILE, HOSTILE)], [HOSTILE]))


def test_texts_of_runs_are_texts_of_the_page(hostile: Comparison) -> None:
    text = page.page(hostile)
    read = Parsed(text)
    tags = [tag for tag, _ in read.elements]
    assert tags.count("script") == 3
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & set(tags)
    assert json.loads(unpacked(read.scripts[0]))["methods"][1]["name"] == HOSTILE
    # what has no shape of its own is shown, so that nothing hides in a name
    assert "⟨U+2028⟩" in read.text
    assert "\u2028" not in text


@pytest.fixture(scope="module")
def text(compared: Comparison) -> str:
    """The page of the bench."""
    return page.page(compared, "rlstab report 'a b'")


def test_nothing_is_asked_for_and_only_our_scripts_run(text: str) -> None:
    read = Parsed(text)
    assert unpacked(read.scripts[1]) == get_plotlyjs()
    assert "http" not in text.replace("http-equiv", "")
    assert not [read.having(name) for name in ("src", "srcset", "data") if read.having(name)]
    assert all(attributes["href"].startswith("#") for attributes in read.having("href"))
    [policy] = [attributes["content"] for attributes in read.having("http-equiv")]
    ran = unpacked(read.scripts[1]), read.scripts[2]
    digests = [base64.b64encode(hashlib.sha256(entry.encode()).digest()).decode() for entry in ran]
    assert {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")} == {
        **{name: ["'none'"] for name in ("default-src", "base-uri", "form-action")},
        "img-src": ["data:", "blob:"],
        "script-src": [f"'sha256-{entry}'" for entry in digests],
        "style-src": ["'unsafe-inline'"],
    }


def test_every_figure_has_its_numbers_and_every_row_its_texts(compared: Comparison, text: str) -> None:
    read = Parsed(text)
    numbers = json.loads(unpacked(read.scripts[0]))
    assert {attributes["data-figure"] for attributes in read.having("data-figure")} == {"curve"}
    drawn = {attributes["data-metric"] for attributes in read.having("data-metric")}
    assert {"reward/mean", "eval/mean", "tokens/entropy", "gradient/norm", "s2t/dropped", "stare/gate"} <= drawn
    assert drawn <= {name for method in numbers["curves"]["s0"].values() for name in method}
    curve = numbers["curves"]["s0"]["m0"]["reward/mean"]
    assert numbers["grids"][curve["grid"]] == [10, 20, 30, 40, 50, 60]
    assert curve["names"] == [0, 1, 2, 3]
    firsts = [np.mean(curves(60, seed)["reward/mean"][:10]) for seed in range(4)]
    assert [seed[0] for seed in curve["seeds"]] == pytest.approx(firsts, rel=1e-3)
    band = curve["low"][0], curve["mean"][0], curve["high"][0]
    assert band == pytest.approx((np.quantile(firsts, 0.25), np.mean(firsts), np.quantile(firsts, 0.75)), rel=1e-3)
    norms = numbers["curves"]["s0"]["m0"]["gradient/norm"]
    assert norms["mean"][0] == pytest.approx(np.median([seed[0] for seed in norms["seeds"]]), rel=1e-5)
    pair = compared.tables[0].cells["20_entropy", "eval/entropy"].paired
    assert pair is not None
    difference = pair.difference
    assert f"higher 0 of 4 {difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]" in read.text


def test_a_configuration_is_a_diff_from_the_base_and_the_command_is_there(text: str) -> None:
    changed = [line for line in text.splitlines() if line.startswith(("+", "-"))]
    assert {"+- name: s2t", "-- name: token_mean"} <= {*changed}
    # what only names one run is not a difference
    assert not [line for line in changed if "seed:" in line or "out:" in line]
    shown = Parsed(text).text
    assert "this report rlstab report 'a b'" in shown


def test_a_sweep_has_its_figure_and_its_table(swept: Comparison) -> None:
    read = parsed(swept)
    assert [attributes["data-figure"] for attributes in read.having("data-figure")].count("sweep") == 1
    numbers = json.loads(unpacked(read.scripts[0]))
    [swept] = numbers["sweeps"]
    assert (swept["key"], swept["labels"], swept["log"]) == ("optimisation.lr", ["1e-4", "2e-4", "4e-4"], True)
    by_name = {method["name"]: swept["methods"][method["key"]] for method in numbers["methods"]}
    assert (by_name["grpo"]["highest"], by_name["s2t"]["highest"]) == (1e-4, 2e-4)
    assert by_name["grpo"]["stable"] == [True, False, False]
    # settings stand in the order of the swept value
    assert [setting["name"] for setting in numbers["settings"]] == ["lr_1e-4", "lr_2e-4", "lr_4e-4"]


def test_numbers_of_curves_are_neither_steps_nor_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 1 - np.linspace(1.1e-4, 1.9e-4, 60)
    drawn = data(of(record({**curves(60, 0), "tokens/kept": kept.tolist()})))
    assert len(set(drawn["curves"]["s0"]["m0"]["tokens/kept"]["seeds"][0])) == 6
    values = np.random.default_rng(0).random(5003)
    comparison = of(*(record({"reward/mean": values + seed}, seed=seed) for seed in range(2)))
    drawn = data(comparison)
    [grid] = drawn["grids"]
    assert 100 <= len(grid) <= 120
    assert (grid[0], grid[-1]) == (50, 5003)  # a point is the mean over its bins of ten rollouts
    assert drawn["curves"]["s0"]["m0"]["reward/mean"]["seeds"][0][0] == pytest.approx(values[:50].mean(), rel=1e-5)
    monkeypatch.setattr("rlstab.report.curves.BUDGET", 60)
    assert len(data(comparison)["grids"][0]) <= 30


def test_odd_runs_have_a_page() -> None:
    read = parsed(of(record({"reward/mean": [0.1, 0.2], "lr": [1e-4, 1e-4]})))
    assert [attributes["data-metric"] for attributes in read.having("data-metric")] == ["reward/mean"]
    failed = of(record({}, status="failed", error="OutOfMemoryError", config={}))
    assert "1 run (1 failed)" in parsed(failed).text


def test_the_page_opens_with_the_curve_of_the_main_outcome_or_the_sweep(compared: Any, swept: Any) -> None:
    assert lead_curve(compared) == "eval/mean"
    assert (lead_curve(swept), lead_sweep(swept)) == (None, 0)
    assert lead_sweep(of(*compared.loaded.runs, *swept.loaded.runs)) is None
    assert lead_curve(compare(compared.loaded, metrics=["reward/best"])) == "reward/mean"
    comparison = compare(compared.loaded, metrics=["tokens/entropy/area"])
    assert curve_of(comparison, "tokens/entropy/area") == "tokens/entropy"
    # few evaluations show less than the training curve
    evaluations = [{"rollout": rollout, "eval/mean": 0.5, "eval/entropy": 0.2} for rollout in (0, 60)]
    comparison = of(record(curves(60, 0), evaluations=evaluations))
    assert (lead_curve(comparison), curve_of(comparison, "eval/entropy")) == ("reward/mean", "tokens/entropy")


def test_no_other_report_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, seed in (("all/a/run-0", 0), ("all/a/run-1", 1), ("all/b", 5)):
        write_run(Path(folder), seed=seed, rollouts=20, about={"run_id": folder})
    for given, place in (("all/a", "all/a/report"), ("all/a all/b", "all/report"), ("x.jsonl", "x-report")):
        if given == "x.jsonl":
            assert main(["report", "all/a", "--export", "x.jsonl"]) == 0
        assert main(["report", *given.split()]) == 0
        assert Path(place, "report.html").is_file()
        assert f"rlstab report {given} --out " in Path(place, "report.md").read_text()
    assert "2 runs, 1 method, 1 setting\n" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "x-report", "x.jsonl"]
    # its own report is made again, another one stays
    assert main(["report", "./all/a", "--out", "all/a/report", "--markdown", "all/a/report/report.md"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for options in ("--out all/a/report", "--markdown all/a/report/report.md"):
        assert main(["report", "all/b", *options.split()]) == 2
        assert "exists, is not a report of these runs" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_export_and_markdown_say_the_same(bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export, entry, other = tmp_path / "results" / "x.jsonl", tmp_path / "docs" / "entry.md", tmp_path / "other.md"
    assert main(["report", str(bench), "--export", str(export), "--markdown", str(entry), "--baseline", "stare"]) == 0
    assert f"written: {export}" in capsys.readouterr().err
    assert not (bench / "report").exists()
    make_report([export], markdown_file=other, baseline="stare")
    (command, text), (_, again) = (page.read_text().split("```", 2)[1:] for page in (entry, other))
    assert f"rlstab report {bench} --baseline stare --markdown {entry}" in command
    assert text == again


def drawn(tab: Any, metric: str, part: str = "mean") -> list[str]:
    """Keys of the methods of each curve of a kind in the figure of a metric."""
    return tab.evaluate(
        "([metric, part]) => document.querySelector(`figure[data-metric='${metric}'] .plot`).data"
        ".filter(entry => entry.meta.part === part).map(entry => entry.meta.method)",
        [metric, part],
    )


def opened(browser_page: Any, path: Path) -> Any:
    """The page once its figures are drawn."""
    tab = browser_page.open(path)
    tab.wait_for_selector("html[data-drawn]", state="attached")
    return tab


END = "document.querySelector(`figure[data-metric='reward/mean'] .plot`).data.at(-1).y.at(-1)"


@pytest.mark.slow
def test_it_opens_and_its_controls_work(compared: Comparison, tmp_path: Path, browser_page: Any) -> None:
    tab = opened(browser_page, saved(compared, tmp_path))
    empty = tab.evaluate(
        "[...document.querySelectorAll('figure:not([hidden]) .plot')]"
        ".filter(entry => !entry.querySelector('svg') && !entry.querySelector('.absent')).length"
    )
    assert empty == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280
    tab.set_viewport_size({"width": 400, "height": 800})
    options = "document.querySelectorAll('label option')"
    tab.evaluate(options + ".forEach(one => one.textContent += ' word'.repeat(20))")
    assert tab.evaluate("document.documentElement.scrollWidth") == 400
    tab.set_viewport_size({"width": 1280, "height": 720})
    labels = tab.evaluate("[...document.querySelectorAll('.plot')].map(entry => entry.getAttribute('aria-label'))")
    assert all(labels)
    assert any("grpo ends at" in label for label in labels)
    # a method is switched off in every figure
    chip = tab.locator("button.chip", has_text="20_entropy")
    key = chip.get_attribute("data-method")
    for metric in ("reward/mean", "gradient/norm", "top_entropy/share"):
        assert key in drawn(tab, metric)
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    for metric in ("reward/mean", "gradient/norm"):
        assert key not in drawn(tab, metric)
        assert len(drawn(tab, metric)) == 3
    assert "None of the methods shown" in tab.locator("figure[data-metric='top_entropy/share']").inner_text()
    chip.click()
    assert key in drawn(tab, "top_entropy/share")
    # shift-click: one alone, and all again
    chip.click(modifiers=["Shift"])
    assert drawn(tab, "reward/mean") == [key]
    chip.click(modifiers=["Shift"])
    assert len(drawn(tab, "reward/mean")) == 4
    # bands, seeds, the metric
    assert len(drawn(tab, "reward/mean", "band")) == 4
    tab.locator("#seeds").check()
    assert drawn(tab, "reward/mean", "band") == []
    assert len(drawn(tab, "reward/mean", "seed")) == 4 * 4
    tab.locator("select[data-for-metric]").first.select_option("reward/zero_std_groups")
    assert len(drawn(tab, "reward/zero_std_groups")) == 4
    browser_page.assert_clean()


@pytest.mark.slow
def test_setting_and_outcome_are_chosen(swept: Comparison, tmp_path: Path, browser_page: Any) -> None:
    tab = opened(browser_page, saved(swept, tmp_path))
    good = tab.evaluate(END)
    tab.locator("#setting").select_option(label="lr_4e-4")
    assert tab.evaluate(END) < 0.5 * good
    captions = "\n".join(tab.locator("table:visible caption").all_inner_texts())
    assert "lr_4e-4" in captions
    assert "lr_1e-4" not in captions
    title = tab.locator("figure[data-figure='sweep'] .title")
    assert title.inner_text() == "held-out reward against optimisation.lr"
    tab.locator("#outcome").select_option("reward/area")
    assert title.inner_text() == "training reward, whole run against optimisation.lr"
    assert "mean of reward/mean over all" in "\n".join(tab.locator("table:visible caption").all_inner_texts())
    browser_page.assert_clean()


@pytest.mark.slow
def test_hostile_texts_are_inert_in_a_browser(hostile: Comparison, tmp_path: Path, browser_page: Any) -> None:
    tab = opened(browser_page, saved(hostile, tmp_path))
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
def test_without_a_script_everything_is_there(compared: Comparison, tmp_path: Path, chromium: Any) -> None:
    written = saved(compared, tmp_path)
    context = chromium.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(written.resolve().as_uri())
    # the outcomes that the controls would choose from stand one after the other
    assert len(tab.locator(".first caption").all_inner_texts()) == len(compared.outcomes)
    assert not tab.locator(".bar").is_visible()
    assert not [figure for figure in tab.locator("figure[data-figure]").all() if figure.is_visible()]
    context.close()
