"""What a completion that is executed can reach."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstab.errors import ScorerError
from rlstab.tasks.scoring import Outcome, Workers
from tests.tasks.acts import Acts
from tests.tasks.test_scoring import asked, sandbox_or_skip


@pytest.fixture(scope="module")
def inside():
    shared = sandbox_or_skip(count=1, time_limit=2.0)
    yield shared
    shared.close()


def test_scores(inside):
    assert asked(inside, "say 0.5", "complain so", "torch") == [
        Outcome(0.5),
        Outcome(error="ValueError: so"),
        Outcome(0.0),
    ]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("os.fork()", "BlockingIOError"),
        ("__import__('threading').Thread(target=print).start()", "RuntimeError: can't start new thread"),
        ("__import__('subprocess').run(['/usr/bin/true'])", "BlockingIOError"),
        ("__import__('socket').create_connection(('127.0.0.1', PORT), 1)", "OSError: [Errno 101] Network is unreach"),
        ("__import__('socket').create_connection(('192.0.2.1', 80), 1)", "OSError: [Errno 101] Network is unreach"),
        ("open('/usr/x', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("open('PREFIX/x', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("open('/x', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("os.listdir('HERE')", "FileNotFoundError"),
        ("os.listdir('/etc')", "FileNotFoundError"),
        ("os.listdir('/proc/1')", "FileNotFoundError"),
        ("os.listdir('/run')", "FileNotFoundError"),
        ("os.listdir('/dev')", "FileNotFoundError"),
        ("os.kill(PARENT, 9)", "ProcessLookupError"),
        ("os.kill(1, 9) or os.getppid()[0]", "TypeError"),  # no signal harms the first process of its namespace
        ("os.chroot('/usr')", "PermissionError"),
        ("__import__('rlstab.tasks.sandbox').tasks.sandbox._call('unshare', 0x10000000)", "PermissionError"),
        ("__import__('rlstab.tasks.sandbox').tasks.sandbox._mount('/usr', '/scratch', None, 4096)", "PermissionError"),
        ("os.write(os.open('big', os.O_CREAT | os.O_WRONLY), b'x')", "OSError: [Errno 27] File too large"),
        ("[os.mkdir(str(i)) for i in range(100)]", "OSError: [Errno 28] No space left on device"),
        ("len(bytearray(64 * 2**30))", "MemoryError"),
    ],
)
def test_a_completion_cannot(inside, program, error, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = program.replace("os.", "__import__('os').").replace("PREFIX", sys.prefix).replace("PORT", str(port))
        program = program.replace("HERE", str(tmp_path)).replace("PARENT", str(os.getpid()))
        (found,) = asked(inside, f"python {program}")
    assert found.error is not None
    assert found.error.startswith(error)


def test_each_completion_begins_in_an_empty_folder_and_a_fresh_process(inside):
    listed = "python len(__import__('os').listdir('.'))"
    patched = "python setattr(__import__('tests.tasks.acts').tasks.acts.Acts, 'say', lambda *_: 100.0) or 1"
    found = asked(
        inside, listed, "python __import__('os').mkdir('left') or 1", listed, patched, "say 2", "leave", listed
    )
    assert [one.score for one in found] == [0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    assert [one.error for one in found if one.error] == ["the process that scored it ended with code 7"]


def test_the_home_folder_is_hidden(inside):
    home = Path.home()
    if any(Path(one).is_relative_to(home) for one in (sys.prefix, sys.base_prefix, *sys.path)):
        code = f"python len(__import__('os').listdir({str(home)!r})) - 1"  # the way to what it needs, and nothing else
    else:
        code = f"python float(__import__('os').path.exists({str(home)!r}))"
    assert asked(inside, code) == [Outcome(0.0)]


def test_hangs_are_cut_off(inside):
    assert asked(inside, "power", "sleep", "say 1") == [
        Outcome(timed_out=True),
        Outcome(timed_out=True),
        Outcome(1.0),
    ]


@pytest.mark.parametrize("call", ["unshare", "mount", "capset", "syscall"])
def test_a_machine_that_has_none_says_so(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstab.tasks.scoring._CODE", REFUSED.replace("REFUSED", call))
    with pytest.raises(ScorerError) as caught:
        Workers(Acts(), 1, 1.0, sandboxed=True).start()
    assert str(caught.value).startswith(
        "No process can be started that scores. Completions are to be executed, which needs a sandbox, and there is "
        "none on this machine ("
    )
    assert str(caught.value).endswith(f"{call}: refused). SECURITY.md says what it needs.")


REFUSED = """
import sys, types; package = sys.modules['rlstab'] = types.ModuleType('rlstab'); package.__path__ = sys.argv[1:]
from rlstab.tasks import sandbox, scoring_worker
allowed = sandbox._call
def refuse(name, *arguments):
    if name == 'REFUSED':
        raise PermissionError(1, 'REFUSED: refused')
    allowed(name, *arguments)
sandbox._call = refuse
scoring_worker.main()
"""


# -- an ordinary worker, which has limits and no sandbox: SECURITY.md says so in these words ---------------------------


@pytest.fixture(scope="module")
def outside() -> Iterator[Workers]:
    shared = Workers(Acts(), 1, 5.0)
    yield shared
    shared.close()


@pytest.mark.parametrize(
    ("program", "left"),
    [
        ("len(open('FILE').read())", "mine"),
        ("os.truncate('FILE', 0) or 4", ""),
        ("os.unlink('FILE') or 4", None),
        ("os.rename('FILE', 'FILE.moved') or 4", None),
        ("[mmap.mmap(os.open('FILE', os.O_RDWR), 4).write(b'lost')][0]", "lost"),
        ("os.kill(PARENT, 0) or 4", "mine"),
        ("4 * (socket.create_connection(('127.0.0.1', PORT), 1).fileno() > 0)", "mine"),
        ("4 * ('HF_TOKEN' not in os.environ)", "mine"),
    ],
)
def test_what_security_says_of_a_worker_outside_the_sandbox(
    outside: Workers, program: str, left: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    file = tmp_path / "file"
    file.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"FILE": str(file), "PARENT": str(os.getpid()), "PORT": str(server.getsockname()[1])}
        for name in ("os", "mmap", "socket"):
            program = re.sub(rf"\b{name}\.", f"__import__('{name}').", program)
        for name, value in places.items():
            program = program.replace(name, value)
        assert asked(outside, f"python {program}") == [Outcome(4.0)]
    assert (file.read_text() if file.exists() else None) == left
    words = ("read, empty, rename and remove files", "change what is in them through a memory map", "reach the network")
    text = " ".join(Path("SECURITY.md").read_text(encoding="utf-8").split())
    assert [one for one in (*words, "signal your other processes") if one not in text] == []


def test_a_worker_outside_the_sandbox_writes_no_byte_by_a_write(outside: Workers, tmp_path: Path) -> None:
    (found,) = asked(outside, f"write {tmp_path / 'new'}")
    assert found.score == 0
    assert (tmp_path / "new").read_text() == ""
