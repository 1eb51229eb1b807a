"""Checks a method or a stage against all laws, with a readable report or under pytest."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import walk
from rlstab.core.method import Method
from rlstab.core.objective import TokenObjective, no_fit_warnings
from rlstab.errors import OutOfRange, ProcessError, UnknownName, did_you_mean
from rlstab.extras import require
from rlstab.stages.response_batch import EVIDENCE
from rlstab.stages.stage import Stage
from rlstab.testing import fresh_process, tolerances
from rlstab.testing.compare import BrokenLaw
from rlstab.testing.edges import count, edges_of, rich_step, sharpened
from rlstab.testing.laws import LAWS, Law, NotApplicable, Trial
from rlstab.testing.rollouts import draw_run
from rlstab.testing.stage_laws import STAGE_LAWS, StageTrial, may_refuse
from rlstab.testing.steps import Step, draw_step, large_step

RUNS = LAWS[0]
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
    """What :func:`check_objective` or :func:`check_stage` saw; ``str`` is a table.

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
        return frozenset(result.law for result in self.results if result.outcome == "failed")

    def __getitem__(self, law: str) -> Result:
        """The result of the law of this name."""
        return next(result for result in self.results if result.law == law)

    def __str__(self) -> str:
        table = Table(title=escape(self.method), title_justify="left")
        for column in ("law", "", "what it says, what was seen"):
            table.add_column(column, overflow="fold")
        for result in self.results:
            says = f"{result.says}\n{result.detail}" if result.detail else result.says
            table.add_row(result.law, result.outcome, escape(says))
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
    laws: Collection[str] | None = None,
) -> Report:
    """Check a method or a composition against every law.

    Args:
        method: any :class:`~rlstab.TokenObjective`.
        oracle: the loss of the first optimizer step, computed independently; adds the law *oracle*.
        examples: optimizer steps per law, from small to rich ones; from 4 on, a large step and a long run beside them.
        laws: names of those to check beside *runs*; None is all.

    Returns:
        A report. The optimizer steps are the same in every call, so a failure can be reproduced.

    Raises:
        ProcessError: the process of the law *process* died or did not answer.
        UnknownName: there is no such law, or no oracle for the law *oracle*.
    """
    known = [*LAWS, *_oracle_law(oracle)]
    if laws is not None and "oracle" in laws and oracle is None:
        raise UnknownName("check_objective: there is no oracle for the law 'oracle'. Give the oracle, too.")
    checked = _chosen("check_objective", known, laws and {RUNS.name, *laws})
    report = _checked(_MethodCheck(method, examples), checked)
    if oracle is None and laws is None:
        return Report(report.method, [*report.results, _NO_ORACLE])
    return report


def check_stage(
    stage: Stage,
    *,
    examples: int = 20,
    laws: Collection[str] | None = None,
) -> Report:
    """Check a stage against every law of stages.

    A stage may refuse, by :class:`~rlstab.errors.OutOfRange`, rewards outside of [0, 1], and a task that has no end.

    Args:
        stage: a prompt selector, a reward shaper, an advantage estimator or a rollout expander.
        examples: runs of three rollouts per law, small ones first; from 4 on, a large and a long one beside them.
        laws: names of those to check; None is all.

    Returns:
        A report. The runs are the same in every call, so a failure can be reproduced.

    Raises:
        ProcessError: the process of the law *process* died or did not answer.
        UnknownName: there is no such law.
    """
    return _checked(_StageCheck(stage, examples), _chosen("check_stage", STAGE_LAWS, laws))


def parametrize_laws(
    *methods: TokenObjective | Stage,
    oracles: Mapping[str, Oracle] | None = None,
    examples: int = 20,
) -> Callable[[Any], Any]:
    """A pytest decorator: one test per law and method, or stage.

    ::

        @parametrize_laws(MyMethod(), compose(MyMethod(), ClipHigher()))
        def test_laws(check):
            check()

    Args:
        methods: what to check.
        oracles: by the name of a method.
        examples: as in :func:`check_objective`.

    Raises:
        MissingPackage: pytest is not installed.
    """
    require("testing", "parametrize_laws", "pytest")
    import pytest

    def test_of(check: _Check, law: Law) -> Callable[[], None]:
        def test() -> None:
            if law is not RUNS and law in LAWS and check.result(RUNS).outcome == "failed":
                pytest.skip(_skipped(law).detail)
            result = check.result(law)
            if result.outcome == "failed":
                raise BrokenLaw(f"{check.method!r} breaks the law '{law.name}' ({law.says}): {result.detail}")

        return test

    cases = []
    for number, method in enumerate(methods):
        of_stages = isinstance(method, Stage)
        check = _StageCheck(method, examples) if isinstance(method, Stage) else _MethodCheck(method, examples)
        for law in STAGE_LAWS if of_stages else [*LAWS, *_oracle_law((oracles or {}).get(method.name))]:
            cases.append(pytest.param(test_of(check, law), id=f"{method.name}{number or ''}-{law.name}"))
    return pytest.mark.parametrize("check", cases)


_NO_ORACLE = Result(
    "oracle",
    "the loss of an independent scalar loop",
    "silent",
    "not checked: no oracle was given. Only one can say what is meant, such as on which side of a threshold a token "
    "exactly on it is",
)


def _oracle_law(oracle: Oracle | None) -> list[Law]:
    if oracle is None:
        return []

    def agrees(method: TokenObjective, trial: Trial) -> None:
        ours = trial.whole(method)
        theirs = oracle(trial.first.tokens())
        if not abs(ours.loss - theirs) <= tolerances.ORACLE * ours.scale:
            raise BrokenLaw(f"the loss is {ours.loss!r}, the oracle's {theirs!r}.")

    return [Law("oracle", "the loss of an independent scalar loop", agrees, all_edges=True)]


def _chosen(where: str, laws: Sequence[Law], names: Collection[str] | None) -> list[Law]:
    known = [law.name for law in laws]
    for name in names or ():
        if name not in known:
            raise UnknownName(f"{where}: there is no law '{name}' to check. {did_you_mean(name, known)}")
    return [law for law in laws if names is None or law.name in names]


# -- what is checked, and on what --------------------------------------------------------------------------------------


class _Check:
    """A method or stage under the laws; what several laws look at is drawn once."""

    def __init__(self, method: Method[Any], examples: int) -> None:
        self.method, self.examples = method, max(1, examples)
        self.pickled = fresh_process.PickledMethod.of(method)
        self.trial = cache(self.draw)

    def excepted(self, law: Law) -> str:
        """Why it declares that it breaks a law; empty where it does not."""
        return self.method.about.exceptions.get(law.name, "")

    def trials(self, law: Law) -> Iterator[Any]:
        """What a law is checked on, small trials first."""
        many = self.examples >= 4
        for number in range(many if law.once else self.examples):
            yield self.trial(law.draws, number)
        if law.large and many:
            yield self.trial("large", 1)

    def draw(self, draws: str, number: int) -> Any:
        """One trial, the same for all laws that draw alike."""
        raise NotImplementedError

    def may_refuse(self, trial: Any) -> bool:
        """Whether ``OutOfRange`` is no fault on this trial."""
        return False

    def result(self, law: Law) -> Result:
        """Check one law."""
        reason = self.excepted(law)
        if reason:
            return Result(law.name, law.says, "excepted", reason)
        silent = ["it is checked from 4 examples on"] if law.once and self.examples < 4 else []
        checked = len(silent)
        for trial in self.trials(law):
            checked += 1
            try:
                with no_fit_warnings():  # alone or beside the partners of the laws, whatever it was published with
                    law.check(self.method, trial)
            except NotApplicable as nothing:
                silent.append(str(nothing))
            except ProcessError:
                raise
            except BrokenLaw as error:
                return Result(law.name, law.says, "failed", f"{error} Seen on {trial}.")
            except Exception as error:  # a user's method may raise anything; that breaks the law that met it
                if not (isinstance(error, OutOfRange) and self.may_refuse(trial)):
                    said = f"it raised {type(error).__name__}: {error} Seen on {trial}."
                    return Result(law.name, law.says, "failed", said)
        if len(silent) == checked:
            return Result(law.name, law.says, "silent", silent[0])
        return Result(law.name, law.says, "passed", "")


class _MethodCheck(_Check):
    method: TokenObjective

    def __init__(self, method: TokenObjective, examples: int) -> None:
        super().__init__(method, examples)
        self.extra, self.edges = sorted(method.needs - SIGNALS.keys() - BASICS), edges_of(method)

    def excepted(self, law: Law) -> str:
        return "; ".join(
            f"{leaf.name}: {leaf.method.about.exceptions[law.name]}"
            for leaf in walk(self.method, observed=True)
            if law.name in leaf.method.about.exceptions
        )

    def trials(self, law: Law) -> Iterator[Any]:
        yield from super().trials(law)
        if law.all_edges:
            for number in range(count(self.edges)):
                yield self._trial(rich_step(number, self.extra, self.edges), number)

    def draw(self, draws: str, number: int) -> Trial:
        if draws == "large":
            return self._trial(large_step(self.extra), number)
        extreme, edges = draws == "extreme", self.edges if draws == "sharp" else ()
        if number >= self.examples - 2:  # the last two are the richest
            first, second = (rich_step(number + one, self.extra, edges, extreme=extreme) for one in (0, 1))
        else:
            size = 1 + number // 2
            first, second = (draw_step(number + one, self.extra, size=size, extreme=extreme) for one in (0, 10**6))
            if not extreme:
                first, second = sharpened(first, number, edges, some=True), sharpened(second, number, edges, some=True)
        return self._trial(first, number, second)

    def _trial(self, first: Step, seed: int, second: Step | None = None) -> Trial:
        return Trial(first, first if second is None else second, seed, self.pickled)


class _StageCheck(_Check):
    method: Stage

    def draw(self, draws: str, number: int) -> StageTrial:
        needs = sorted(self.method.needs - EVIDENCE.keys())
        run = draw_run(number, needs, 2 + number // 2, extreme=draws == "extreme", large=draws == "large")
        return StageTrial(run, number, self.pickled)

    def may_refuse(self, trial: StageTrial) -> bool:
        return any(may_refuse(self.method, rollout) for rollout in trial.rollouts)


def _checked(check: _Check, laws: Sequence[Law]) -> Report:
    """Every law in order; the others are skipped where the first of methods is broken."""
    if any(law.name == "process" for law in laws):
        with suppress(fresh_process.Unreachable):
            for which in range(fresh_process.SERVERS):  # by the time that they are asked, they are there
                fresh_process.start(which)
    results: list[Result] = []
    for law in laws:
        stops = bool(results) and results[0].law == RUNS.name and results[0].outcome == "failed"
        results.append(_skipped(law) if stops else check.result(law))
    return Report(repr(check.method), results)


def _skipped(law: Law) -> Result:
    return Result(law.name, law.says, "skipped", f"not checked: '{RUNS.name}' is broken, mend that first")
