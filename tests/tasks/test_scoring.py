"""Worker processes that score: what a completion cannot do to the process that trains."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from rlstab.errors import ScorerError
from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.scorers import TextScorer
from rlstab.tasks.scoring import Outcome, Workers
from tests.tasks.acts import Acts, NeverReady

LIMIT = 1.0


def asked(workers: Workers, *completions: str) -> list[Outcome]:
    return workers.score([(None, one) for one in completions])


@pytest.fixture(scope="module")
def workers():
    shared = Workers(Acts(), 2, LIMIT)
    yield shared
    shared.close()


def sandbox_or_skip(count: int = 1, time_limit: float = LIMIT, scorer: object = None) -> Workers:
    made = Workers(scorer or Acts(), count, time_limit, sandboxed=True)
    try:
        made.start()
    except ScorerError as error:
        pytest.skip(str(error))
    return made


def test_scores_in_order(workers):
    numbers = [index / 7 for index in range(100)]
    assert asked(workers, *(f"say {one!r}" for one in numbers)) == [Outcome(one) for one in numbers]
    assert asked(workers) == []


def test_nothing_of_a_completion_is_lost(workers):
    texts = ["", "\0", "\ud800", "\x1b[31m", "\U0001d7d9\u202e", "x" * 3_000_000, "\n" * 10]
    assert [one.score for one in asked(workers, *(f"length {one}" for one in texts))] == [len(one) for one in texts]


def test_numbers_that_are_none_arrive(workers):
    found = [one.score for one in asked(workers, "say nan", "say inf", "say -inf")]
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("hang", ["loop", "power", "sleep"])
def test_a_hang_is_cut_off_and_the_rest_is_scored(workers, hang):
    start = time.monotonic()
    found = asked(workers, "say 1", hang, "say 2", "say 3")
    assert found == [Outcome(1.0), Outcome(timed_out=True), Outcome(2.0), Outcome(3.0)]
    assert LIMIT <= time.monotonic() - start < LIMIT + 20  # a worker starts anew, on a machine that may be busy
    with pytest.raises(ScorerError, match=r"^The scorer took longer than 1 s\. Raise `time_limit`"):
        workers.score_one(None, hang)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("complain odd [length]", "ValueError: odd [length]"),
        ("exit", "SystemExit: bye"),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("memory", "MemoryError: "),
        ("crash", "the process that scored it was ended by SIGSEGV"),
        ("leave", "the process that scored it ended with code 7"),
        ("garbage {", "the process gave no answer that can be read"),
        ("garbage [1]", "the process gave no answer that can be read"),
        ("garbage " + "[" * 9000, "the process gave no answer that can be read"),
        ('garbage {"score": true}', "the process gave no answer that can be read"),
        ("complain " + "y" * 5000, "ValueError: " + "y" * 988),
    ],
)
def test_whatever_a_scorer_does_is_an_error_of_its_completion(workers, act, error):
    assert asked(workers, "say 1", act, "say 2") == [Outcome(1.0), Outcome(error=error), Outcome(2.0)]
    with pytest.raises(ScorerError, match=r"^\S+"):
        workers.score_one(None, act)


def test_a_scorer_writes_no_file(workers, tmp_path):
    (found,) = asked(workers, f"write {tmp_path / 'file'}")
    assert found.error.startswith("OSError: [Errno 27] File too large")


def test_workers_do_not_import_torch(workers):
    assert "torch" in sys.modules
    assert asked(workers, "torch") == [Outcome(0.0)]


def test_workers_inherit_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    mine = Workers(Acts(), 1, LIMIT)
    assert asked(mine, "python float('SOME_API_KEY' in __import__('os').environ)") == [Outcome(0.0)]
    mine.close()


def test_results_depend_neither_on_the_number_of_workers_nor_on_the_order():
    pytest.importorskip("math_verify")
    jobs = [(f"\\frac{{{i % 5}}}{{3}}", f"we get $\\frac{{{i % 4}}}{{{1 + i % 3}}}$") for i in range(24)]
    jobs += [("1", "$9^{9^{9^{9}}}$"), (" ", "1")]
    shuffled = random.Random(0).sample(range(len(jobs)), len(jobs))
    found = []
    for count, order in ((1, range(len(jobs))), (3, shuffled)):
        mine = Workers(TextScorer("math_verify", AnswerPattern(None)), count, LIMIT)
        outcomes = dict(zip(order, mine.score([jobs[place] for place in order]), strict=True))
        found.append([outcomes[place] for place in range(len(jobs))])
        mine.close()
    assert found[0] == found[1]
    assert [one.timed_out for one in found[0]].count(True) == 1
    assert 0 < sum(one.score for one in found[0]) < 24


def test_an_expression_that_backtracks_for_ever_is_cut_off():
    mine = Workers(TextScorer("exact", AnswerPattern(r"^((?:a+)+)$")), 1, LIMIT)
    assert mine.score([("a", "a"), ("a", "a" * 40 + "!"), ("a", "b")]) == [
        Outcome(1.0),
        Outcome(timed_out=True),
        Outcome(0.0),
    ]
    mine.close()


def test_nobody_waits_once_stop_is_set(workers):
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    start = time.monotonic()
    mine = Workers(Acts(), 1, 60.0)
    assert mine.score([(None, "sleep")] * 3, stop) == []
    assert time.monotonic() - start < 30
    assert asked(mine, "say 1") == [Outcome(1.0)]
    mine.close()


def test_an_interrupted_question_leaves_no_answers_behind(monkeypatch):
    mine = Workers(Acts(), 1, 60.0)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        assert asked(mine, "say 1") == [Outcome(1.0)]
        patch.setattr(mine, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            asked(mine, "say 2", "say 3")
    assert asked(mine, "say 4", "say 5") == [Outcome(4.0), Outcome(5.0)]
    mine.close()


def test_a_worker_that_was_killed_while_it_was_idle_is_replaced(workers):
    assert asked(workers, "say 1") == [Outcome(1.0)]
    for one in workers._workers:
        os.kill(one._process.pid, signal.SIGKILL)
        one._process.wait()
    assert asked(workers, "say 2", "say 3") == [Outcome(2.0), Outcome(3.0)]


def test_a_worker_that_cannot_start_says_why():
    with pytest.raises(ScorerError) as caught:
        asked(Workers(NeverReady(), 2, LIMIT), "say 1")
    assert str(caught.value) == "No process can be started that scores. ImportError: no such␛[31m library"


def test_closed_workers_are_gone_and_come_back(workers):
    mine = Workers(Acts(), 2, LIMIT)
    assert asked(mine, "say 1", "say 2") == [Outcome(1.0), Outcome(2.0)]
    before = [one._process for one in mine._workers]
    mine.close()
    assert all(one.returncode is not None for one in before)
    assert asked(mine, "say 3") == [Outcome(3.0)]
    before = [one._process for one in mine._workers]
    del mine
    assert all(one.returncode is not None for one in before)


PROGRAM = """
import sys, threading, time
from rlstab.tasks.scoring import Workers
from tests.tasks.acts import Acts
hang = Workers(Acts(), 2, 1000.0, sandboxed=sys.argv[2] == "True")
hang.start()
threading.Thread(target=lambda: hang.score([(None, sys.argv[1])] * 2), daemon=True).start()
while len([one for one in hang._workers if one.place is not None]) < 2:
    time.sleep(0.05)
time.sleep(0.5)
print("stuck", flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word to a child is Linux's")
@pytest.mark.parametrize("sandboxed", [False, True])
@pytest.mark.parametrize("hang", ["power", "sleep"])
def test_workers_die_with_a_parent_that_is_killed(hang, sandboxed):
    if sandboxed:
        sandbox_or_skip().close()
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), hang, str(sandboxed)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout.readline() == "stuck\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == (6 if sandboxed else 2)  # keeper, sandbox and completion
        parent.kill()
    gone, left = psutil.wait_procs(children, timeout=10)
    print(f"{len(gone)} of {len(children)} worker processes ended with their parent, {len(left)} are left")
    assert left == []
