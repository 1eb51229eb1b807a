"""Checks a method against all laws, with a readable report or under pytest."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import hypothesis
from hypothesis import strategies as st
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import walk
from rlstab.core.objective import TokenObjective, no_fit_warnings
from rlstab.errors import ProcessError, UnknownName, did_you_mean
from rlstab.extras import require
from rlstab.testing import elsewhere, tolerances
from rlstab.testing.agreement import BrokenLaw
from rlstab.testing.edges import count, edges_of, rich_step, sharp_steps
from rlstab.testing.law import Case, Law, NotHere
from rlstab.testing.laws import LAWS, RUNS
from rlstab.testing.outcome import run_whole
from rlstab.testing.rank_processes import Processes
from rlstab.testing.steps import Step, steps

#: The loss of an optimizer step, from its tokens as plain numbers (see ``Step.tokens``), written without rlstab.
Oracle = Callable[[list[list[dict[str, float]]]], float]


@dataclass(frozen=True)
class Result:
    """One law: ``passed``, ``failed``, ``excepted`` (declared on the class), ``silent`` (nothing to say here) or
    ``skipped`` (not checked, for the method does not run).
    """

    law: str
    says: str
    outcome: Literal["passed", "failed", "excepted", "silent", "skipped"]
    detail: str


@dataclass(frozen=True)
class Report:
    """What :func:`check_objective` found; ``str`` is a table.

    Attributes:
        method: ``repr`` of what was checked.
        results: one per law.
    """

    method: str
    results: Sequence[Result]

    @property
    def ok(self) -> bool:
        """No law is broken."""
        return not self.failed

    @property
    def failed(self) -> frozenset[str]:
        """Names of the laws that are broken."""
        return frozenset(one.law for one in self.results if one.outcome == "failed")

    def __str__(self) -> str:
        table = Table(title=escape(self.method), title_justify="left")
        for column in ("law", "", "what it says, what was seen"):
            table.add_column(column, overflow="fold")
        for one in self.results:
            table.add_row(one.law, one.outcome, escape(f"{one.says}\n{one.detail}" if one.detail else one.says))
        screen = Console(file=io.StringIO(), width=110, color_system=None)
        screen.print(table)
        screen.print("every law holds" if self.ok else f"broken: {', '.join(sorted(self.failed))}")
        assert isinstance(screen.file, io.StringIO)
        return screen.file.getvalue()


def check_objective(
    method: TokenObjective,
    *,
    oracle: Oracle | None = None,
    examples: int = 20,
    shrink: bool = True,
    processes: int | Processes | None = None,
    laws: Collection[str] | None = None,
) -> Report:
    """Check a method or a composition against every law.

    Args:
        method: any :class:`~rlstab.TokenObjective`.
        oracle: the loss of the first optimizer step, computed independently; adds the law *oracle*.
        examples: optimizer steps per law.
        shrink: look for a small optimizer step where a law is broken, which takes seconds.
        processes: run the ranks of the law *split* as this many real processes, which start in seconds; without, as
            threads. :class:`~rlstab.testing.Processes` serves several calls. The report says how many took part.
        laws: names of those to check beside *runs*; None is all.

    Returns:
        A report. The draws are the same in every call, so a failure can be reproduced.

    Raises:
        ProcessError: a process died or did not answer within its timeout, or the method cannot be sent to it.
        UnknownName: there is no such law, or no oracle for the law *oracle*.
    """
    asked = [law for law in (*LAWS[1:], *_oracle_law(oracle)) if laws is None or law.name in laws]
    if laws is not None and not set(laws) <= {RUNS.name, *(law.name for law in asked)}:
        raise UnknownName(_unknown(laws, asked))
    sent = elsewhere.Sent.of(method)
    if any(law.name == "process" for law in asked):
        with suppress(elsewhere.Unreachable):
            for which in range(elsewhere.SERVERS):  # by the time that they are asked, they are there
                elsewhere.start(which)
    first = _hold(method, RUNS, examples, sent, shrink=shrink)
    if first.outcome == "failed":
        return Report(repr(method), [first, *(_skipped(law) for law in asked)])
    with _running(processes) as ranks:
        results = [_hold(method, law, examples, sent, shrink=shrink, processes=ranks) for law in asked]
    return Report(repr(method), [first, *results, *([_NO_ORACLE] if oracle is None and laws is None else [])])


def _unknown(laws: Collection[str], asked: Sequence[Law]) -> str:
    known = [RUNS.name, *(law.name for law in LAWS[1:]), *(law.name for law in asked if law.name == "oracle")]
    name = min(set(laws) - set(known))
    cure = "Give the oracle, too." if name == "oracle" else did_you_mean(name, known)
    return f"check_objective: there is no law '{name}' to check. {cure}"


def parametrize_laws(
    *methods: TokenObjective,
    oracles: Mapping[str, Oracle] | None = None,
    examples: int = 20,
    processes: int | Processes | None = None,
) -> Callable[[Any], Any]:
    """A pytest decorator: one test per law and method.

    ::

        @parametrize_laws(MyMethod(), compose(MyMethod(), ClipHigher()))
        def test_laws(check):
            check()

    Args:
        methods: what to check.
        oracles: by the name of a method.
        examples: optimizer steps drawn per law.
        processes: as in :func:`check_objective`.

    Raises:
        MissingPackage: pytest is not installed.
    """
    require("testing", "parametrize_laws", "pytest")
    import pytest

    def check_of(method: TokenObjective, law: Law) -> Callable[[], None]:
        sent, runs = elsewhere.Sent.of(method), cache(lambda: _hold(method, RUNS, examples, sent))

        def check() -> None:
            if law is not RUNS and runs().outcome == "failed":
                pytest.skip(_skipped(law).detail)
            with _running(processes if law.ranks else None) as ranks:
                result = _hold(method, law, examples, sent, processes=ranks)
            if result.outcome == "failed":
                raise BrokenLaw(f"{method!r} breaks the law '{law.name}' ({law.says}): {result.detail}")

        return check

    cases = [
        pytest.param(check_of(method, law), id=f"{method.name}{number or ''}-{law.name}")
        for number, method in enumerate(methods)
        for law in [*LAWS, *_oracle_law((oracles or {}).get(method.name))]
    ]
    return pytest.mark.parametrize("check", cases)


@contextmanager
def _running(processes: int | Processes | None) -> Iterator[Processes | None]:
    """Processes as they were given, or as many of our own."""
    if isinstance(processes, int):
        with Processes(processes) as started:
            yield started
    else:
        yield processes


def _skipped(law: Law) -> Result:
    return Result(law.name, law.says, "skipped", f"not checked: '{RUNS.name}' is broken, mend that first")


_NO_ORACLE = Result(
    "oracle",
    "the loss of an independent scalar loop",
    "silent",
    "not checked: no oracle was given. Only one can say what is meant, such as on which side of a threshold a token "
    "exactly on it is",
)


def _hold(
    method: TokenObjective,
    law: Law,
    examples: int,
    sent: elsewhere.Sent,
    *,
    shrink: bool = True,
    processes: Processes | None = None,
) -> Result:
    excepted = [
        f"{leaf.name}: {leaf.method.about.exceptions[law.name]}"
        for leaf in walk(method, observed=True)
        if law.name in leaf.method.about.exceptions
    ]
    if excepted:
        return Result(law.name, law.says, "excepted", "; ".join(excepted))
    extra, extreme = sorted(method.needs - SIGNALS.keys() - BASICS), law.draws == "extreme"
    edges = edges_of(method) if law.draws == "sharp" else ()
    rich = 1 + (examples > 2)
    drawn = steps(extra, extreme=True) if extreme else sharp_steps(extra, edges)

    def holds(first: Step, second: Step | None, seed: int) -> None:
        try:
            law.check(method, Case(first, first if second is None else second, seed, processes, sent))
        except BrokenLaw as error:
            raise BrokenLaw(f"{error} Seen on {first!r}.") from error.__cause__

    @hypothesis.settings(
        max_examples=max(1, examples - rich),
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink)[: 1 + shrink],
        verbosity=hypothesis.Verbosity.quiet,
        print_blob=False,
    )
    @hypothesis.given(drawn, drawn if law.second else st.none(), st.integers(0, 2**31))
    def holds_on_drawn(first: Step, second: Step | None, seed: int) -> None:
        holds(first, second, seed)

    def holds_on_all() -> None:
        try:
            for number in range(count(edges) if law.all_edges else rich):
                one, other = (rich_step(number + side, extra, edges, extreme=extreme) for side in (0, 1))
                holds(one, other if law.second else None, number + 1)
        except (NotHere, ProcessError):
            raise
        except Exception:
            if shrink:
                holds_on_drawn()  # a smaller optimizer step says more
            raise
        holds_on_drawn()

    try:
        with no_fit_warnings():  # alone or beside the partners of the laws, whatever it was published with
            holds_on_all()
    except NotHere as reason:
        return Result(law.name, law.says, "silent", str(reason))
    except BrokenLaw as error:
        return Result(law.name, law.says, "failed", str(error))
    except ProcessError:
        raise
    except Exception as error:  # a method of a user may raise anything; that breaks the law that met it
        return Result(law.name, law.says, "failed", f"it raised {type(error).__name__}: {error}")
    return Result(law.name, law.says, "passed", f"over {processes}" if processes and law.ranks else "")


def _oracle_law(oracle: Oracle | None) -> list[Law]:
    if oracle is None:
        return []

    def agrees(method: TokenObjective, case: Case) -> None:
        ours = run_whole(method, case.first)
        theirs = oracle(case.first.tokens())
        if not abs(ours.loss - theirs) <= tolerances.ORACLE * ours.scale:
            raise BrokenLaw(f"the loss is {ours.loss!r}, the oracle's {theirs!r}.")

    return [Law("oracle", "the loss of an independent scalar loop", agrees, all_edges=True)]
