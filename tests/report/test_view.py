"""The token viewer: what it reads, the page in a real browser, the terminal; and that text stays text."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rlstab.report.token_traces import Sample, Tokens, read_tokens
from tokenizers import Tokenizer, models

from rlstab.cli import main
from rlstab.errors import ReportError
from rlstab.report.view import choose, page, show, write_view
from rlstab.visible import visible
from tests.browser import BrowserPage

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


def line(sequence: int = 0, tokens: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    """A line of four tokens: dropped, boosted, clipped, and untouched."""
    tokens = ["a", " b", "c\n", "$"] if tokens is None else tokens
    count = len(tokens)
    return {
        "rollout": 1,
        "optimizer_step": 1,
        "sequence_id": sequence,
        "group_id": sequence // 2,
        "prompt": f"prompt {sequence}",
        "reward": float(sequence % 2),
        "advantage": 1.0 if sequence % 2 else -1.0,
        "tokens": tokens,
        "ids": list(range(count)),
        "logprobs": [-8.0, -3.0, -0.5, -0.01][:count] + [-0.2] * (count - 4),
        "entropies": [0.1] * count,
        "ratio": [1.0, 1.0, 1.5, 1.0][:count] + [1.0] * (count - 4),
        "weight": [1.0, 1.2, 1.0, 1.0][:count] + [1.0] * (count - 4),
        "kept": [False] + [True] * (count - 1),
        "clipped": [False, False, True, False][:count] + [False] * (count - 4),
        "methods": {
            "clip_higher": {"clipped": [2]},
            "kl": {"regularised": list(range(count))},
            "token_mean": {},
            "within/inner": {"boosted": [1], "weight": [[1, 1.2]]},
            "within/outer": {"dropped": [0]},
        },
        "names": {"within/inner": "stare", "within/outer": "s2t"},
        **changes,
    }


def untouched(sequence: int, **changes: Any) -> dict[str, Any]:
    """A line on which no method acted."""
    plain = {"weight": [1.0] * 4, "kept": [True] * 4, "clipped": [False] * 4, "ratio": [1.0] * 4}
    return line(sequence, **{**plain, "methods": {"clip_higher": {}, "kl": {"regularised": [0, 1, 2, 3]}}, **changes})


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in lines), encoding="utf-8"
    )
    return path


def sample_of(path: Path, *lines: Any) -> Sample:
    (sample,) = read_tokens(write(path / "tokens.jsonl", *lines)).samples
    return sample


def test_a_line_of_ours_is_read(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, line(1))
    assert (sample.rollout, sample.response, sample.group, sample.reward) == (1, "1", "0", 1.0)
    assert sample.surprisal == [8.0, 3.0, 0.5, 0.01]
    assert sample.advantages == [1.0] * 4
    assert {key: (method.name, dict(method.actions)) for key, method in sample.methods.items()} == {
        "clip_higher": ("clip_higher", {"clipped": [2]}),
        "kl": ("kl", {"regularised": [0, 1, 2, 3]}),
        "token_mean": ("token_mean", {}),
        "within/inner": ("stare", {"boosted": [1]}),
        "within/outer": ("s2t", {"dropped": [0]}),
    }
    assert sample.methods["within/inner"].weight == {1: 1.2}
    # missing values are not invented
    sample = sample_of(tmp_path, {"rollout": 1, "sequence_id": 0, "tokens": ["a", "b"]})
    assert [sample.surprisal, sample.entropies, sample.advantages, sample.ratio, sample.weight] == [[]] * 5
    assert sample.influence() == [0.0, 0.0]


def test_influence_is_how_far_the_pull_moved(tmp_path: Path) -> None:
    # dropped: all of A; weight 1.2 on A; clipped: all of A r; a bonus of -0.25
    sample = sample_of(tmp_path, line(1, bonus=[0.0, 0.0, 0.0, -0.25]))
    assert sample.influence() == pytest.approx([1.0, 0.2, 1.5, 0.25])
    gated = {"sapo": {"damped": [2], "gate": [[2, 0.75]]}}
    sample = sample_of(tmp_path, untouched(1, gate=[1.0, 1.0, 0.75, 1.0], methods=gated))
    assert sample.influence() == pytest.approx([0.0, 0.0, 0.25, 0.0])
    assert sample.methods["sapo"].gate == {2: 0.75}


DAMAGED = [
    '{"rollout": 1, "tok',
    "{}",
    line(0, logprobs=[-1.0]),
    line(0, gate=[1.0]),
    line(0, ratio=[1.0, 1.0, float("nan"), 1.0]),
    line(0, methods={"s2t": {"dropped": [4]}}),
    line(0, methods={"s2t": {"dropped": [-1]}}),
    line(0, tokens=["a", 1, "b", "c"]),
    line(0, []),
    line(0, ratio=[1e300] * 4, weight=[1e300] * 4),
    "[" * 100_000,
]


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    traces = read_tokens(write(tmp_path / "tokens.jsonl", line(0), *DAMAGED, line(1)))
    assert [sample.response for sample in traces.samples] == ["0", "1"]
    assert traces.notes == [f"tokens.jsonl: left out {len(DAMAGED)} damaged lines: 2, 3, 4, 5, 6, ...."]
    path = write(tmp_path / "tokens.jsonl", line(0))
    path.write_bytes(path.read_bytes() + b"\xff\xfe\x00\n")
    assert len(read_tokens(path).samples) == 1


def test_a_rollout_and_the_largest_influence_are_chosen(tmp_path: Path) -> None:
    traces = read_tokens(write(tmp_path / "t.jsonl", untouched(0), line(1), untouched(2, rollout=50), line(3)))
    assert [sample.response for sample in choose(traces, 50, 10).samples] == ["2"]
    few = choose(traces, None, 2)
    assert [sample.response for sample in few.samples] == ["1", "3"]
    assert "4 responses were read; here are the 2" in few.notes[0]


def exported(**changes: Any) -> dict[str, Any]:
    """A sequence of prime-rl's token export: two tokens of prompt, then four of which the third is a tool's."""
    return {
        "schema_version": 1,
        "step": 3,
        "rank": 1,
        "export_sequence_idx": 4,
        "env_name": "math",
        "token_ids": [0, 1, 2, 3, 4, 5],
        "loss_mask": [False, False, True, True, False, True],
        "advantages": [0.5] * 6,
        "inference_logprobs": [0.0, 0.0, -1.0, -2.0, 0.0, -3.0],
        "trainer_logprobs": [0.0, 0.0, -1.1, -2.1, 0.0, -2.9],
        "entropy": [0.1, 0.1, 0.2, 0.3, 0.4, None],
        "importance_ratio": [1.0, 1.0, 0.9, 0.9, 1.0, 1.1],
        "is_masked": [False, False, False, True, False, False],
        "rl_weights": [None] * 6,
        "ref_kl_weights": [0.0, 0.0, 0.0, 0.0, 0.0, 0.1],
        **changes,
    }


def test_the_token_export_of_prime_rl_is_read(tmp_path: Path) -> None:
    odd = [exported(loss_mask=[True]), *(exported(token_ids=[0, 1, number, 3, 4, 5]) for number in (2**32, -1))]
    for step in (10, 9):
        folder = tmp_path / "token_exports" / f"step_{step}"
        folder.mkdir(parents=True)
        write(folder / "rank_1.jsonl", exported(step=step), *odd)
    vocabulary = {word: place for place, word in enumerate(["Q", ":", "x", " y", "<tool>", "z"])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="Q")).save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "token_exports"):
        assert [sample.rollout for sample in read_tokens(path).samples] == [9, 10]
    traces = read_tokens(tmp_path / "token_exports" / "step_9", tmp_path)
    assert traces.notes == ["rank_1.jsonl: left out 3 damaged lines: 2, 3, 4."]
    (sample,) = traces.samples
    assert (sample.response, sample.group, sample.reward, sample.optimizer_step) == ("1-4", "math", None, None)
    assert "".join(sample.tokens).replace(" ", "") == "xy<tool>z"
    assert sample.prompt.replace(" ", "") == "Q:"
    assert sample.surprisal == [1.0, 2.0, 0.0, 3.0]
    assert sample.entropies == [0.2, 0.3, 0.4, None]
    assert sample.ratio == [0.9, 0.9, 1.0, 1.1]
    assert sample.weight == []
    assert sample.kept == [True, True, False, True]
    assert {key: dict(method.actions) for key, method in sample.methods.items()} == {
        "loss_mask": {"dropped": [2]},
        "trust_region": {"clipped": [1]},
        "ref_kl": {"regularised": [3]},
    }
    # an id beyond this vocabulary costs nothing
    assert page(read_tokens(write(tmp_path / "x.jsonl", exported(token_ids=[0, 1, 10**9, 3, 4, 5])), tmp_path), "x")


def test_an_export_without_a_tokenizer_shows_ids_and_says_how_to_get_text(tmp_path: Path) -> None:
    traces = read_tokens(write(tmp_path / "rank_0.jsonl", exported(is_masked=[None] * 6)))
    assert traces.samples[0].ids == [2, 3, 4, 5]
    assert "--tokenizer" in traces.notes[0]
    assert "⟨2⟩⟨3⟩⟨4⟩⟨5⟩" in printed(traces)
    with pytest.raises(ReportError, match="not a tokenizer"):
        read_tokens(tmp_path / "rank_0.jsonl", tmp_path)


def test_what_has_no_shape_is_made_visible() -> None:
    assert visible(" \n\t\x1b\x7f\x9b") == "·↵⇥␛␡⟨U+009B⟩"
    assert visible("\u202e\u200b\u2028\ud800") == "⟨U+202E⟩⟨U+200B⟩⟨U+2028⟩⟨U+D800⟩"
    assert visible("a b\n", spaces=False) == "a b\n"
    assert visible("naïve 日本 😀", spaces=False) == "naïve 日本 😀"


def printed(traces: Tokens, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=100, **options)
    show(traces, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_shows_marks_below_the_tokens(tmp_path: Path) -> None:
    lines = printed(read_tokens(write(tmp_path / "t.jsonl", untouched(0), line(1)))).splitlines()
    assert all(len(entry) <= 100 for entry in lines)
    at = lines.index("a·bc↵")
    assert lines[at + 1] == "x^ #"
    assert lines[at + 2] == "$"
    assert lines[at + 3] == "clip_higher clipped 1, stare (within/inner) boosted 1, s2t (within/outer) dropped 1"
    assert any("kl: every token is regularised" in entry for entry in lines)
    assert next(entry for entry in lines if entry.startswith("rollout")).startswith(
        "rollout 1, optimizer step 1  response 1"
    )


def test_hostile_text_is_inert_in_a_terminal(tmp_path: Path) -> None:
    text = "".join(HOSTILE)
    bad = line(0, HOSTILE, prompt=text, methods={text: {"dropped": [0]}})
    out = printed(read_tokens(write(tmp_path / "t.jsonl", bad)), force_terminal=True, color_system="truecolor")
    assert "\x1b[" in out  # rich's own colours, and nothing but them
    assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert not set("\x07\x9b\u202e\u2066\x00\x7f\u200b") & set(out)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "[bold·red]markup[/]" in plain
    assert "␛[31mred" in plain


def test_the_command_writes_a_page_beside_the_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "seed-3"
    folder.mkdir()
    traces = write(folder / "tokens.jsonl", line(0), line(1))
    assert main(["view", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "view.html")
    assert main(["view", str(traces), "--out", str(tmp_path / "other.html"), "--limit", "1"]) == 0
    assert (tmp_path / "other.html").stat().st_size > 10_000
    assert main(["view", str(folder), "--terminal", "--limit", "1"]) == 0
    assert capsys.readouterr().out.count("influence") == 2  # the response, and the note about the other one
    place = json.dumps({"bench": "<b>", "setting": "slow", "method": "s2t", "seed": 3})
    named, unnamed = "&lt;b&gt;, slow, s2t, seed 3", "seed-3"  # as the bench calls it, or as its folder
    for text, source, title in ((place, folder, named), (place, traces, named), ("{", folder, unnamed)):
        (folder / "bench.json").write_text(text)
        assert f"<title>Tokens of {title}</title>" in write_view(source).read_text(encoding="utf-8")


@pytest.fixture
def opened(browser_page: BrowserPage, tmp_path: Path) -> Any:
    """Writes lines, opens their page; gives playwright's page."""

    def open_page(*lines: Any) -> Any:
        return browser_page.open(write_view(write(tmp_path / "tokens.jsonl", *lines)))

    yield open_page
    browser_page.assert_clean()


def classes(page: Any, response: int = 0) -> list[list[str]]:
    return [
        entry.get_attribute("class").split()
        for entry in page.locator("article").nth(response).locator(".text > .t").all()
    ]


def test_the_page_marks_what_was_done_and_tells_it(opened: Any) -> None:
    page = opened(line(1), line(0))
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
    page = opened(line(1))
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
    page = opened(untouched(0), line(1), untouched(2, rollout=5), line(3, rollout=5, ratio=[1.0, 1.0, 3.0, 1.0]))

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
    page.select_option("#rollout", "5")
    assert sorted(responses()) == ["2", "3"]
    page.select_option("#reward", "0")
    assert responses() == ["2"]
    page.select_option("#reward", "all")
    page.select_option("#rollout", "all")
    page.select_option("#order", "file")
    assert responses() == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_a_click_on_a_point_goes_to_its_token(opened: Any) -> None:
    page = opened(line(1), line(0))
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
    name = "</script><b>run&$title"
    bad = line(0, HOSTILE, prompt=text, methods={text: {"dropped": [0]}, "__proto__": {"boosted": [1]}})
    bad["names"] = {text: text}
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir()
    page = browser_page.open(write_view(write(folder / "tokens.jsonl", bad, line(1)).parent))
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
    page = opened(*(line(number, words) for number in range(1999)), line(1999, [" token"] * 1000))
    assert page.locator("article").count() == 25
    assert "of 2,000" in page.locator(".place").first.inner_text()
    page.select_option("#order", "length")
    assert page.locator("article").first.locator(".text > .t").count() == 1000
    assert page.locator(".text > .t").count() <= 4000
    first = page.locator("article").count()
    page.locator("[data-go='1']").first.click()
    assert page.locator(".place").first.inner_text().startswith(str(first + 1))
