"""The token viewer: the page in a real browser, the terminal; and that text stays text."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlstab.cli import main
from rlstab.record.response_traces import MethodMarks, ResponseTrace, ResponseTraces
from rlstab.report.view import page as render
from rlstab.report.view import show, write_view
from rlstab.visible import visible
from tests.browser import BrowserPage
from tests.replay.dumps import write as write_dump

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<!--<script>",
    "javascript:window.hacked=3",
    "]]>&lt;b&gt;$title ${title}",
    "\u202egnp.exe\u2066",
    "\u2028\u2029\u200b\ufeff",
    "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "[bold red]markup[/]",
    "a b\tc\n",
    "\x00\x7f",
]


def response(number: int = 0, tokens: list[str] | None = None, **changes: Any) -> ResponseTrace:
    """A response of four tokens: dropped, boosted, clipped, and untouched."""
    tokens = ["a", " b", "c\n", "$"] if tokens is None else tokens
    count = len(tokens)

    def padded(*values: float) -> list[float | None]:
        return [*values[:count], *values[-1:] * (count - len(values))]

    reward = float(number % 2)
    values = {"surprisal": padded(8.0, 3.0, 0.5, 0.01), "entropy": padded(0.1), "advantage": padded(2 * reward - 1)}
    values |= {"ratio": padded(1.0, 1.0, 1.5, 1.0), "weight": padded(1.0, 1.2, 1.0)}
    methods = {
        "clip_higher": MethodMarks("clip_higher", {"clipped": [2]}),
        "kl": MethodMarks("kl", {"regularised": list(range(count))}),
        "token_mean": MethodMarks("token_mean", {}),
        "within/inner": MethodMarks("stare", {"boosted": [1]}, {"weight": {1: 1.2}}),
        "within/outer": MethodMarks("s2t", {"dropped": [0]}),
    }
    made = ResponseTrace(
        step=1,
        response=str(number),
        tokens=tokens,
        ids=list(range(count)),
        group=str(number // 2),
        prompt=f"prompt {number}",
        reward=reward,
        values=values,
        influence=[1.0, 0.2, 1.5, 0.0][:count] + [0.0] * (count - 4),
        methods=methods,
    )
    return replace(made, **changes)


def untouched(number: int, **changes: Any) -> ResponseTrace:
    """A response on which no method acted."""
    methods = {"clip_higher": MethodMarks("clip_higher", {}), "kl": MethodMarks("kl", {"regularised": [0, 1, 2, 3]})}
    values = response(number).values | {"ratio": [1.0] * 4, "weight": [1.0] * 4}
    return response(number, **{"methods": methods, "values": values, "influence": [0.0] * 4, **changes})


def test_what_has_no_shape_is_made_visible() -> None:
    assert visible(" \n\t\x1b\x7f\x9b") == "·↵⇥␛␡⟨U+009B⟩"
    assert visible("\u202e\u200b\u2028\ud800") == "⟨U+202E⟩⟨U+200B⟩⟨U+2028⟩⟨U+D800⟩"
    assert visible("a b\n", spaces=False) == "a b\n"
    assert visible("naïve 日本 😀", spaces=False) == "naïve 日本 😀"


def printed(*responses: ResponseTrace, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=100, **options)
    show(ResponseTraces(list(responses)), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_shows_marks_below_the_tokens() -> None:
    lines = printed(untouched(0), response(1)).splitlines()
    assert all(len(entry) <= 100 for entry in lines)
    at = lines.index("a·bc↵")
    assert lines[at + 1] == "x^ #"
    assert lines[at + 2] == "$"
    assert lines[at + 3] == "clip_higher clipped 1, stare (within/inner) boosted 1, s2t (within/outer) dropped 1"
    assert any("kl: every token is regularised" in entry for entry in lines)
    assert "optimizer step 1  response 1  reward 1  advantage +1  influence 2.7" in lines


def test_hostile_text_is_inert_in_a_terminal() -> None:
    text = "".join(HOSTILE)
    bad = response(0, HOSTILE, prompt=text, methods={text: MethodMarks("stare", {"dropped": [0]})})
    out = printed(bad, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in out  # rich's own colours, and nothing but them
    assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert not set("\x07\x9b\u202e\u2066\x00\x7f\u200b") & set(out)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "[bold·red]markup[/]" in plain
    assert "␛[31mred" in plain


def test_the_command_writes_a_page_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dump(tmp_path / "seed-3" / "dump").parent
    assert main(["view", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "view.html")
    assert main(["view", str(folder / "dump"), "--out", str(tmp_path / "other.html"), "--limit", "1"]) == 0
    assert (tmp_path / "other.html").stat().st_size > 10_000
    assert main(["view", str(folder), "--terminal", "--limit", "1", "--step", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("optimizer step 2") == out.count("response ") == 1
    place = json.dumps({"bench": "<b>", "setting": "slow", "method": "s2t", "seed": 3})
    named, unnamed = "&lt;b&gt;, slow, s2t, seed 3", "seed-3"  # as the bench calls it, or as its folder
    for text, title in ((place, named), ("{", unnamed)):
        (folder / "bench.json").write_text(text)
        assert f"<title>Tokens of {title}</title>" in write_view(folder).read_text(encoding="utf-8")


@pytest.fixture
def opened(browser_page: BrowserPage, tmp_path: Path) -> Any:
    """Opens the page of some responses; gives playwright's page."""

    def open_page(*responses: ResponseTrace) -> Any:
        file = tmp_path / "view.html"
        file.write_text(render(ResponseTraces(list(responses)), "responses"), encoding="utf-8")
        return browser_page.open(file)

    yield open_page
    browser_page.assert_clean()


def classes(page: Any, response: int = 0) -> list[list[str]]:
    return [
        entry.get_attribute("class").split()
        for entry in page.locator("article").nth(response).locator(".text > .t").all()
    ]


def test_the_page_marks_what_was_done_and_tells_it(opened: Any) -> None:
    page = opened(response(1), response(0))
    assert page.locator("article").count() == 2
    marks = [{"dropped", "boosted", "clipped", "regularised"} & set(each) for each in classes(page)]
    assert marks == [{"dropped"}, {"boosted"}, {"clipped"}, set()]
    notes = page.locator("#notes").inner_text()
    assert "kl: every token is regularised" in notes
    assert "token_mean" in notes
    page.locator(".text > .t").nth(1).hover()
    told = page.locator("#token").inner_text()
    assert "stare (within/inner) boosted it: weight 1.2" in told
    assert re.search(r"surprisal\s+3\b", told)
    assert re.search(r"probability\s+0.0498", told)


@pytest.mark.slow
def test_the_colour_follows_the_quantity_and_the_theme(opened: Any) -> None:
    page = opened(response(1))
    shades = {}
    for name in ("surprisal", "entropy", "advantage", "ratio", "weight"):
        page.select_option("#quantity", name)
        shades[name] = [next(entry for entry in each if re.fullmatch(r"[qd]\d", entry)) for each in classes(page)]
        assert name in page.locator("#scale").inner_text()
        if name == "weight":  # the edges as they are, not rounded to each other
            edges = page.locator("#scale b").all_inner_texts()
            assert edges == ["", "0.001", "0.5", "0.95", "0.999", "1.001", "1.05", "1.2", "2"]
    assert shades == {
        "surprisal": ["q7", "q5", "q2", "q0"],
        "entropy": ["q2"] * 4,
        "advantage": ["d7"] * 4,
        "ratio": ["d4", "d4", "d7", "d4"],
        "weight": ["d4", "d7", "d4", "d4"],
    }
    background = page.locator(".text > .t").nth(1).evaluate("entry => getComputedStyle(entry).backgroundColor")
    assert background not in ("rgba(0, 0, 0, 0)", "rgb(253, 252, 249)")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    assert page.evaluate(paper) != light
    page.locator("#theme").click()
    assert page.evaluate(paper) == light


@pytest.mark.slow
def test_choices_and_order(opened: Any) -> None:
    influential = response(3, step=5, influence=[1.0, 0.2, 3.0, 0.0])
    page = opened(untouched(0), response(1), untouched(2, step=5), influential)

    def responses() -> list[str]:
        return re.findall(r"response (\d+)", " ".join(page.locator("article h3").all_inner_texts()))

    assert responses() == ["3", "1", "0", "2"]
    page.select_option("#method", "any")
    assert responses() == ["3", "1"]
    assert page.locator(".text.some > .t.hit").count() == 6
    page.select_option("#method", "within/outer")
    assert page.locator(".text > .t.hit").count() == 2
    page.select_option("#action", "boosted")
    assert responses() == []
    assert "No response matches" in page.locator("#list").inner_text()
    page.select_option("#action", "any")
    page.select_option("#method", "all")
    page.select_option("#step", "5")
    assert sorted(responses()) == ["2", "3"]
    page.select_option("#reward", "0")
    assert responses() == ["2"]
    page.select_option("#reward", "all")
    page.select_option("#step", "all")
    page.select_option("#order", "file")
    assert responses() == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_a_click_on_a_point_goes_to_its_token(opened: Any) -> None:
    page = opened(response(1), response(0))
    # the only rewarded token of surprisal 8 is far right in the upper half
    box = page.locator("#plot").bounding_box()
    right, top = box["x"] + box["width"] - 14, box["y"] + 16
    for down in range(0, int(box["height"] / 2), 8):
        page.mouse.click(right - 4, top + down)
        if page.evaluate("() => document.activeElement.classList.contains('t')"):
            break
    active = "() => [document.activeElement.parentElement.sample.response, document.activeElement.place]"
    assert page.evaluate(active) == ["1", 0]
    counts = page.locator("#counts tbody tr").all_inner_texts()
    assert [entry.split("\t")[:2] for entry in counts[:4]] == [
        ["rewarded, rare", "3"],
        ["rewarded, common", "1"],
        ["punished, rare", "3"],
        ["punished, common", "1"],
    ]
    page.locator("#split").fill("5")
    assert page.locator("#counts tbody tr").first.inner_text().split("\t")[:2] == ["rewarded, rare", "1"]


def test_hostile_text_stays_text(browser_page: BrowserPage, tmp_path: Path) -> None:
    text = "".join(HOSTILE)
    methods = {text: MethodMarks(text, {"dropped": [0]}), "__proto__": MethodMarks("__proto__", {"boosted": [1]})}
    bad = response(0, HOSTILE, prompt=text, methods=methods)
    file = tmp_path / "view.html"
    html = render(ResponseTraces([bad, response(1)], [text]), "</script><b>run&$title", text)
    file.write_text(html, encoding="utf-8", errors="replace")
    page = browser_page.open(file)
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("script").count() == 2
    assert page.locator("img, a[href^='javascript'], #list script, #list b b").count() == 0
    page.select_option("#order", "file")
    shown = page.locator("article").first.locator(".text > .t").all_text_contents()
    assert shown == [visible(entry) for entry in HOSTILE]
    assert page.locator(".prompt").first.text_content() == visible(text, spaces=False)
    page.locator(".text > .t").first.hover()
    assert visible(text, spaces=False) in page.locator("#token").text_content()
    browser_page.assert_clean()
    # and if text did get in as HTML, the page's policy would refuse to run it
    page.evaluate("text => { document.body.insertAdjacentHTML('beforeend', text) }", HOSTILE[1])
    page.wait_for_timeout(50)
    assert page.evaluate("() => window.hacked") is None
    assert any("Content Security Policy" in entry for entry in browser_page.errors)


@pytest.mark.slow
def test_many_responses_come_by_pages(opened: Any) -> None:
    words = [f" w{place}" for place in range(40)]
    page = opened(*(response(number, words) for number in range(1999)), response(1999, [" token"] * 1000))
    assert page.locator("article").count() == 25
    assert "of 2,000" in page.locator(".place").first.inner_text()
    page.select_option("#order", "length")
    assert page.locator("article").first.locator(".text > .t").count() == 1000
    assert page.locator(".text > .t").count() <= 4000
    first = page.locator("article").count()
    page.locator("[data-go='1']").first.click()
    assert page.locator(".place").first.inner_text().startswith(str(first + 1))
