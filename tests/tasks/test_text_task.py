"""A file of prompts and answers as a task: rows, chats, scores, and what is refused with its line."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlstab.config.settings import DatasetSettings, JsonlSettings, ReasoningGymSettings
from rlstab.errors import DataError, ScorerError
from rlstab.preflight import never_right
from rlstab.tasks import Example, Message, TextTask

ROWS = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(10)]
SYSTEM, USER = {"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}
ASSISTANT = {"role": "assistant", "content": "5"}


def write(folder: Path, rows: list[Any], name: str = "sums.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / name)


def of(path: str | Path, **settings: Any) -> TextTask:
    """All of a file for both splits, unless settings say otherwise."""
    held_out = {} if {"eval_path", "eval_size"} & settings.keys() else {"eval_path": str(path)}
    return TextTask(JsonlSettings(path=str(path), **held_out, **settings))


def test_the_last_lines_are_held_out_and_rows_start_again(tmp_path):
    task = of(write(tmp_path, ROWS), eval_size=3)
    assert (task.name, task.size) == ("sums.jsonl", {"train": 7, "eval": 3})
    assert [task.example("eval", i).prompt for i in range(4)] == ["7+7=", "8+8=", "9+9=", "7+7="]
    assert [task.example("train", i).prompt for i in reversed(range(14))] == [r["prompt"] for r in ROWS[6::-1]] * 2
    other = write(tmp_path, [{"prompt": "1+2=", "answer": "3"}], "test.jsonl")
    task = of(write(tmp_path, ROWS), eval_path=other)
    assert (task.size, task.example("eval", 0)) == ({"train": 10, "eval": 1}, Example("1+2=", "3"))


def test_exact_scores(tmp_path):
    rows = [{"q": "a", "a": " yes "}, {"q": "b", "a": 12}, {"q": "c", "a": 0.5}]
    task = of(write(tmp_path, rows), prompt_field="q", answer_field="a", prompt_template="Q: {prompt} {}\nA:")
    assert task.example("eval", 0).prompt == "Q: a {}\nA:"
    cases = [(0, "yes", 1), (0, "\nyes ", 1), (0, "Yes", 0), (0, "yes!", 0), (1, "12", 1), (1, "12.0", 0), (1, "", 0)]
    for index, text, score in [*cases, (2, "0.5", 1)]:
        assert task.score(task.example("eval", index), text) == score, text
    pattern = of(write(tmp_path, ROWS), eval_size=1, answer_pattern=r"#### (\S+)")
    texts = ("#### 17, no, #### 18", "#### 18, no, #### 17", "18")  # the last match counts
    assert [pattern.score(pattern.example("eval", 0), text) for text in texts] == [1.0, 0.0, 0.0]


def test_answers_that_are_whole_floats_are_integers(tmp_path):
    answers = {
        42.0: "42",
        -3.0: "-3",
        -0.0: "0",
        1e3: "1000",
        2.5e-3: "0.0025",
        1e300: "1e+300",
        7: "7",
        "42.0": "42.0",
    }
    task = of(write(tmp_path, [{"prompt": "?", "answer": answer} for answer in answers]))
    for index, text in enumerate(answers.values()):
        assert task.example("train", index).answer == text
        assert task.score(task.example("train", index), text) == 1.0


def never_right_of(path: str, **settings: Any) -> list[str]:
    told = JsonlSettings(path=path, eval_path=path, workers=1, **settings)
    return never_right(told, TextTask(told))


def test_right_answers_that_a_pattern_cannot_find_are_noted(tmp_path):
    file = write(tmp_path, [{"prompt": "?", "answer": answer} for answer in ("5", "12", "-7", "0", "1,000")])
    for settings, wrong in [
        ({}, 0),
        ({"answer_pattern": r"#### (.+)"}, 0),
        ({"answer_pattern": r"<answer>\s*(.*?)\s*</answer>"}, 0),
        ({"answer_pattern": r"\\boxed\{([^}]+)\}"}, 0),
        ({"answer_pattern": r"^Answer:\s+(?P<answer>-?[\d,]+)\.$"}, 0),
        ({"answer_pattern": r"#### (\d+)"}, 2),
        ({"answer_pattern": r"#### ([\d,]{2,})"}, 3),
        ({"answer_pattern": r"#### ([a-z]+)"}, 5),
    ]:
        told = never_right_of(file, **settings)
        assert told[0].startswith(f"note: {2 * wrong} of 10" if wrong else "right answers: 10 tried"), settings
        assert bool(wrong) == ("task.answer_pattern" in told[0])
    for pattern in (r"(?:answer|result): (\S+)", r"=\s(-?[\d,]+)\W?", r"\((\d+)\)", r"#### (\d+)?"):
        assert not never_right_of(file, answer_pattern=pattern), pattern  # no one text has the answer


def test_what_editors_write_is_read(tmp_path):
    text = '{"prompt": "ä\u2028b", "answer": "1"}\r\n\r\n{"prompt": "c", "answer": "2"}'
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    task = of(tmp_path / "windows.jsonl", eval_size=1)
    assert (task.example("train", 0), task.example("eval", 0)) == (Example("ä\u2028b", "1"), Example("c", "2"))


def test_chats(tmp_path):
    rows = [{"prompt": [SYSTEM, USER, ASSISTANT, USER], "answer": 5}, {"prompt": "1+1=", "answer": 2}]
    task = of(write(tmp_path, rows))
    turns = (Message("system", "Add."), Message("user", "2+3="), Message("assistant", "5"), Message("user", "2+3="))
    assert task.example("eval", 0) == Example("system: Add.\nuser: 2+3=\nassistant: 5\nuser: 2+3=", "5", turns)
    assert task.example("eval", 0).messages == turns
    assert task.example("eval", 1).messages == (Message("user", "1+1="),)  # one chat makes all of them chats
    plain = write(tmp_path, rows[1:], "plain.jsonl")
    assert not of(plain).example("train", 0).messages
    assert of(plain, eval_path=write(tmp_path, rows)).example("train", 0).messages == (Message("user", "1+1="),)
    system = of(plain, system="", prompt_template="Q: {prompt}").example("train", 0)
    assert system.messages == (Message("system", ""), Message("user", "Q: 1+1="))


GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'


def test_a_line_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    for content, where, named in [
        (b"\n \n", "", "no examples"),
        (GOOD + b"\n" + b'{"prompt": 1,}\n', ", line 3", "JSON"),
        (b'{"prompt": "a", "answer": NaN}\n', ", line 1", "NaN"),
        (GOOD + b'["1+1=", "2"]\n', ", line 2", "a list"),
        (GOOD + b'{"question": "1+1=", "answer": "2"}\n', ", line 2", "task.prompt_field"),
        (b'{"prompt": "1+1="}\n', ", line 1", "task.answer_field"),
        (b'{"prompt": 3, "answer": "2"}\n', ", line 1", "'prompt'"),
        (b'{"prompt": "a", "answer": true}\n', ", line 1", "'answer'"),
        (GOOD + b'{"prompt": "\xff", "answer": "2"}\n', ", line 2", "UTF-8"),
        (b"[" * 200_000 + b"\n", ", line 1", "JSON"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=named) as caught:
            of(path)
        assert str(caught.value).startswith(f"{path}{where}: ")
    path.write_bytes(GOOD * 2)
    with pytest.raises(DataError, match=r"task\.eval_size"):
        of(path, eval_size=64)
    for missing in (tmp_path / "none.jsonl", tmp_path, Path("/dev/zero")):
        with pytest.raises(DataError, match=str(missing)):
            of(missing)


def test_a_chat_that_cannot_be_used_is_named(tmp_path):
    for prompt, settings, named in [
        ([], {}, "nothing to answer"),
        (["a"], {}, "message 1"),
        ([USER, {"role": "user"}], {}, "message 2"),
        ([{**USER, "name": "x"}], {}, "message 1"),
        ([{"role": "user", "content": ["2+3="]}], {}, "message 1"),
        ([USER, ASSISTANT], {}, "nothing to answer"),
        ([SYSTEM, USER], {"system": "Be brief."}, "`system`"),
        ([USER], {"prompt_template": "Q: {prompt}"}, "`prompt_template`"),
    ]:
        path = write(tmp_path, [{"prompt": "1", "answer": "2"}, {"prompt": prompt, "answer": "2"}])
        with pytest.raises(DataError, match=named) as caught:
            of(path, **settings)
        assert str(caught.value).startswith(f"{path}, line 2: the field 'prompt'")


def test_patterns_and_templates_are_checked_with_the_settings():
    data, gym = {"path": "a"}, {"dataset": "a"}
    for settings, required in ((JsonlSettings, data), (DatasetSettings, data), (ReasoningGymSettings, gym)):
        for setting, value in (("prompt_template", "Q"), ("answer_pattern", "("), ("answer_pattern", "a")):
            with pytest.raises(ValidationError, match=setting):
                settings(**required, **{setting: value})
    with pytest.raises(ValidationError, match="right_answer_pattern"):
        DatasetSettings(path="a", right_answer_pattern="a{9999999999}")


def test_mathematics(tmp_path):
    pytest.importorskip("math_verify")
    cases = [
        (r"\frac{1}{2}", "The answer is $0.5$.", 1.0),
        (r"2\pi", r"\boxed{2\pi}", 1.0),
        (r"2\pi", "2", 0.0),
        (12, "the answer is 12.", 1.0),
        ("12", "", 0.0),
        (r"$\{1,2\}$", r"$\{2,1\}$", 1.0),
    ]
    rows = [{"prompt": "?", "answer": answer} for answer, _, _ in cases] + [{"prompt": "?", "answer": " "}]
    file = str(write(tmp_path, rows))
    told = JsonlSettings(path=file, eval_path=file, workers=1, scorer="math_verify")
    task = TextTask(told)  # whose worker takes a second to import
    for index, (_, completion, score) in enumerate(cases):
        assert task.score(task.example("eval", index), completion) == score, completion
    with pytest.raises(ScorerError, match="right answer ' '"):
        task.score(task.example("eval", len(cases)), "1")
    (note,) = never_right(told, task)
    assert note.startswith("note: 2 of 14 right answers")
    assert f"{file}, line 7" in note
