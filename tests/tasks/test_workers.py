"""Worker processes that score: what a completion cannot do to the process that trains."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from rlstab.errors import ScorerError
from rlstab.tasks.workers import Scored, Workers
from tests.tasks.acts import Acts, NeverReady

LIMIT = 2.0


def asked(workers: Workers, *completions: str) -> list[Scored]:
    return workers.score([("", completion, None) for completion in completions])


@pytest.fixture(scope="module")
def workers():
    shared = Workers(Acts(), 2, LIMIT)
    yield shared
    shared.close()


def test_scores_arrive_in_order_and_nothing_of_a_completion_is_lost(workers):
    numbers = [index / 7 for index in range(100)]
    assert asked(workers, *(f"say {number!r}" for number in numbers)) == [Scored(number) for number in numbers]
    assert asked(workers) == []
    texts = ["", "\0", "\ud800", "\x1b[31m", "\U0001d7d9\u202e", "x" * 3_000_000, "\n" * 10]
    assert asked(workers, *(f"length {text}" for text in texts)) == [Scored(float(len(text))) for text in texts]


def test_a_hang_is_cut_off_and_the_rest_is_scored():
    workers = Workers(Acts(), 2, limit := 1.0)  # the processor is busy for as long
    for hang in ("power", "sleep", "python os.kill(os.getpid(), signal.SIGXCPU)"):
        assert asked(workers, "say 1", hang, "say 2") == [Scored(1.0), Scored(timed_out=True), Scored(2.0)]
    (left,) = asked(workers, "python __import__('resource').getrlimit(0)[0] - time.process_time()")  # of RLIMIT_CPU
    assert limit - 1 < left.score <= limit + 1, "the kernel ends it if nothing else does"
    with pytest.raises(ScorerError, match="`time_limit`"):
        workers.score_one("", "sleep", None)
    workers.close()


def test_whatever_a_scorer_does_is_an_error_of_its_completion(workers, tmp_path):
    for act, error in {
        "complain odd [length]": "ValueError: odd [length]",
        "exit": "SystemExit: bye",
        "recurse": "RecursionError: ",
        "memory": "MemoryError: ",
        f"write {tmp_path / 'file'}": "OSError: [Errno 27] File too large",
        "crash": "the process that scored it was ended by SIGSEGV",
        "leave": "the process that scored it ended with code 7",
        "say nan": "it returned nan",
        "say -inf": "it returned -inf",
        "garbage {": "the process gave no answer",
        "garbage [1.0]": "the process gave no answer",
        "garbage [1.0, 2]": "the process gave no answer",
        "garbage " + "[" * 9000: "the process gave no answer",
        "garbage [true, null]": "the process gave no answer",
        "garbage [NaN, null]": "the process gave no answer",
        "garbage [1e999, null]": "the process gave no answer",
        "complain " + "y" * 5000: "ValueError: " + "y" * 988,
    }.items():
        before, outcome, after = asked(workers, "say 1", act, "say 2")
        assert (before, after) == (Scored(1.0), Scored(2.0))
        assert (outcome.score, outcome.timed_out) == (0.0, False)
        assert str(outcome.error).startswith(error)
    with pytest.raises(ScorerError, match="odd"):
        workers.score_one("", "complain odd", None)


def test_workers_do_not_import_torch_and_go_through_sets_in_one_order(workers):
    """Else a score could depend on which of them gives it."""
    assert "torch" in sys.modules
    assert asked(workers, "python 'torch' in sys.modules") == [Scored(0.0)]
    outcomes = asked(workers, *["python hash('a')", "python os.getpid()", "leave"] * 4)
    assert len({outcome.score for outcome in outcomes[::3]}) == 1
    assert len({outcome.score for outcome in outcomes[1::3]}) > 1, "who leaves is replaced"


def test_a_question_that_is_stopped_or_interrupted_leaves_no_answers_behind():
    mine, stop = Workers(Acts(), 1, 600.0), threading.Event()
    threading.Timer(0.3, stop.set).start()
    assert mine.score([("", "sleep", None)] * 3, stop) == []
    assert asked(mine, "say 1") == [Scored(1.0)]
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        asked(mine, "sleep", "say 3")
    assert asked(mine, "say 4", "say 5") == [Scored(4.0), Scored(5.0)]
    mine.close()


def test_a_worker_that_cannot_start_says_why():
    with pytest.raises(ScorerError, match=r"ImportError: no such␛\[31m library"):
        asked(Workers(NeverReady(), 2, LIMIT), "say 1", "say 2", "say 3")


def test_workers_that_were_killed_while_idle_or_closed_come_back_and_none_is_left():
    mine = Workers(Acts(), 2, LIMIT)
    for end in ("kill", "close", "forget"):
        assert asked(mine, "say 1", "say 2", "say 3") == [Scored(1.0), Scored(2.0), Scored(3.0)]
        processes = [worker.process for worker in mine._workers.values()]
        if end == "kill":
            for process in processes:
                process.kill()
                process.wait()
        elif end == "close":
            mine.close()
        else:
            del mine
        assert processes
        assert all(process.returncode is not None for process in processes), end


PROGRAM = """
import sys, threading, time
from rlstab.tasks.workers import Workers
from tests.tasks.acts import Acts
hang = Workers(Acts(), 2, 1000.0)
assert len(hang.score([("", "say 1", None)] * 50)) == 50
threading.Thread(target=lambda: hang.score([("", "power", None)] * 2), daemon=True).start()
while len(hang._workers) < 2:
    time.sleep(0.05)
time.sleep(0.5)
print("stuck", flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word to a child is Linux's")
def test_workers_die_with_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "stuck\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        parent.kill()
    _, left = psutil.wait_procs(children, timeout=30)
    # a dead process stays listed where process 1 does not collect it, as in some containers
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in left)


def test_a_worker_has_the_rights_of_the_user_but_not_the_secrets(tmp_path, monkeypatch):
    """As SECURITY.md says."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    mine, file = Workers(Acts(), 1, 5.0), tmp_path / "file"
    file.write_text("mine")
    for program in (f"len(open('{file}').read())", "4 * ('HF_TOKEN' not in os.environ)", f"os.unlink('{file}') or 4"):
        assert asked(mine, f"python {program}") == [Scored(4.0)]
    assert not file.exists()
    mine.close()
