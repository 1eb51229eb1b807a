"""Checks a method or a stage against all laws, with a readable report or under pytest."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlstab import TokenObjective
from rlstab.core.objective import no_fit_warnings
from rlstab.errors import OutOfRange, ProcessError, UnknownName, did_you_mean
from rlstab.extras import require
from rlstab.stages.stage import PromptSelector, Stage
from rlstab.testing import fresh_process, tolerances
from rlstab.testing.agreement import BrokenLaw
from rlstab.testing.edges import Edge, count, draw_step, edges_of
from rlstab.testing.fresh_process import own_signals
from rlstab.testing.laws import LAWS, Law, NotApplicable, Trial
from rlstab.testing.rollouts import draw_run
from rlstab.testing.stage_laws import STAGE_LAWS
from rlstab.testing.steps import large_step

#: The first law of methods and of stages: if it is broken, no other is checked.
RUNS = "runs"
#: The loss of an optimizer step, from its tokens as plain numbers (see ``Step.tokens``), written without rlstab.
Oracle = Callable[[list[list[dict[str, float]]]], float]


@dataclass(frozen=True)
class Result:
    """The result of one law: ``passed``, ``failed``, ``excepted`` (declared on the class), ``silent`` (not applicable),
    or ``skipped`` (not checked, because the method does not run).
    """

    law: str
    says: str
    outcome: Literal["passed", "failed", "excepted", "silent", "skipped"]
    detail: str


@dataclass(frozen=True)
class Report:
    """The findings of :func:`check_objective` or :func:`check_stage`; ``str`` is a table.

    Attributes:
        method: ``repr`` of what was checked.
        results: one per law.
    """

    method: str
    results: Sequence[Result]

    @property
    def ok(self) -> bool:
        """Whether no law is broken."""
        return not self.failed

    @property
    def failed(self) -> frozenset[str]:
        """Names of the laws that are broken."""
        return frozenset(result.law for result in self.results if result.outcome == "failed")

    def __getitem__(self, law: str) -> Result:
        """The result of the law of this name."""
        return next(result for result in self.results if result.law == law)

    def __str__(self) -> str:
        """A table of all laws; if the first is broken, only that one, with the cause last."""
        if RUNS in self.failed:
            return f"{self.method}\nbroken: {RUNS}. No other law is checked until it runs.\n{self[RUNS].detail}\n"
        table = Table(title=escape(self.method), title_justify="left")
        for column in ("law", "", "what it says, what was seen"):
            table.add_column(column, overflow="fold")
        for result in self.results:
            cell = f"{result.says}\n{result.detail}" if result.detail else result.says
            table.add_row(result.law, result.outcome, escape(cell))
        screen = Console(width=110, color_system=None)
        with screen.capture() as text:
            screen.print(table)
            screen.print("every law holds" if self.ok else f"broken: {', '.join(sorted(self.failed))}")
        return text.get()


def check_objective(
    method: TokenObjective, *, oracle: Oracle | None = None, examples: int = 20, laws: Collection[str] | None = None
) -> Report:
    """Check a method or a composition against every law.

    Args:
        method: any :class:`~rlstab.TokenObjective`.
        oracle: the loss of the first optimizer step, computed independently; adds the law *oracle*.
        examples: optimizer steps per law, from small to rich ones; from 4 on, also a large step and a long run.
        laws: names of those to check, in addition to *runs*; None is all.

    Returns:
        A report. The optimizer steps are the same in every call, so a failure can be reproduced.

    Raises:
        ProcessError: the process of the law *process* died or did not answer.
        UnknownName: no law has such a name.
    """
    return _Check(method, examples, oracle).report("check_objective", laws)


def check_stage(stage: Stage, *, examples: int = 20, laws: Collection[str] | None = None) -> Report:
    """Check a stage against every law of stages.

    A stage may refuse, by :class:`~rlstab.errors.OutOfRange`, rewards outside of [0, 1], unlimited prompts, and
    more prompts than its settings allow.

    Args:
        stage: a prompt selector, a reward shaper, an advantage estimator or a rollout expander.
        examples: runs of three rollouts per law, small ones first; from 4 on, also a large and a long one.
        laws: names of those to check, in addition to *runs*; None is all.

    Returns:
        A report. The runs are the same in every call, so a failure can be reproduced.

    Raises:
        ProcessError: the process of the law *process* died or did not answer.
        UnknownName: no law has such a name.
    """
    return _Check(stage, examples).report("check_stage", laws)


def parametrize_laws(
    *methods: TokenObjective | Stage, oracles: Mapping[str, Oracle] | None = None, examples: int = 20
) -> Callable[[Any], Any]:
    """A pytest decorator: one test per law and method, or stage.

    ::

        @parametrize_laws(MyMethod(), compose(MyMethod(), ClipHigher()))
        def test_laws(check):
            check()

    Args:
        methods: what to check.
        oracles: the oracle of a method, by its name.
        examples: the number of examples, as in :func:`check_objective`.

    Raises:
        MissingPackage: pytest is not installed.
    """
    require("testing", "parametrize_laws", "pytest")
    import pytest

    def test(check: _Check, law: Law) -> None:
        result = check.result(law)
        if result.outcome == "skipped":
            pytest.skip(result.detail)
        if result.outcome == "failed":
            raise BrokenLaw(f"{check.method!r} breaks the law '{law.name}' ({law.says}): {result.detail}")

    cases = []
    for number, method in enumerate(methods):
        check = _Check(method, examples, (oracles or {}).get(method.name))
        for law in check.laws:
            cases.append(pytest.param(partial(test, check, law), id=f"{method.name}{number or ''}-{law.name}"))
    return pytest.mark.parametrize("check", cases)


# -- what is checked, and on what --------------------------------------------------------------------------------------


class _Check:
    """A method or stage under the laws; trials that several laws use are drawn once."""

    def __init__(self, method: TokenObjective | Stage, examples: int, oracle: Oracle | None = None) -> None:
        self.method, self.examples, self.oracle = method, max(1, examples), oracle
        self.extra, self.pickled = own_signals(method), fresh_process.PickledMethod.of(method)
        self.laws, self.edges = STAGE_LAWS, list[Edge]()
        if isinstance(method, TokenObjective):
            agrees = Law("oracle", "the loss of an independent scalar loop", self._agrees)
            self.laws, self.edges = [*LAWS, agrees], list(edges_of(method))
        self.trial, self.result = cache(self.draw), cache(self.check)

    def report(self, caller: str, names: Collection[str] | None) -> Report:
        """Check the laws of these names, or all."""
        law_names = [law.name for law in self.laws]
        for name in names or ():
            if name not in law_names:
                raise UnknownName(f"{caller}: no law is called '{name}'. {did_you_mean(name, law_names)}")
        chosen = [law for law in self.laws if names is None or law.name in {RUNS, *names}]
        if any(law.name == "process" for law in chosen):
            with suppress(fresh_process.Unreachable):
                fresh_process.start()  # so that it is ready when it is needed
        return Report(repr(self.method), [self.result(law) for law in chosen])

    def excepted(self, law: Law) -> str:
        """The reasons why methods inside declare that they break a law; may be empty."""
        reasons = {part.name: part.about.exceptions.get(law.name) for part in fresh_process.methods_of(self.method)}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)

    def trials(self, law: Law) -> Iterator[Trial]:
        """The trials of a law, small ones first."""
        has_large = self.examples >= 4
        for number in range(has_large if law.once else self.examples):
            yield self.trial(law.draws, number)
        if law.large and has_large:
            yield self.trial("large", 1)
        if law.name == "oracle" and self.oracle is not None:  # every threshold of the method is hit exactly
            for number in range(count(self.edges)):
                yield Trial([draw_step(number, self.extra, self.edges)], number, self.pickled)

    def draw(self, draws: str, number: int) -> Trial:
        """One trial, shared by all laws that draw alike."""
        extreme, large = draws == "extreme", draws == "large"
        chain: Sequence[Any]
        if isinstance(self.method, Stage):
            chain = draw_run(number, tuple(self.extra), 4 + number // 2, extreme=extreme, large=large)
        elif large:
            chain = [large_step(self.extra)] * 2
        else:  # the last two are rich
            edges, rich = self.edges if draws == "sharp" else (), number >= self.examples - 2
            size, later = (None, 1) if rich else (1 + number // 2, 10**6)
            options: Any = {"size": size, "extreme": extreme}
            chain = [draw_step(seed, self.extra, edges, **options) for seed in (number, number + later)]
        return Trial(chain, number, self.pickled)

    def may_refuse(self, trial: Trial) -> bool:
        """Whether raising ``OutOfRange`` is allowed in a trial.

        It is for stages: for unlimited prompts, more than the pool of a small rollout has to hold, or rewards outside
        of [0, 1].
        """
        if isinstance(self.method, PromptSelector):
            return any(rollout.offer.size is None or rollout.offer.count > 6 for rollout in trial.chain)
        if isinstance(self.method, TokenObjective):
            return False
        reward_pairs = [(rollout.responses.rewards, rollout.columns["raw_rewards"]) for rollout in trial.chain]
        return any(bool(((rewards < 0) | (rewards > 1)).any()) for pair in reward_pairs for rewards in pair)

    def check(self, law: Law) -> Result:
        """Check one law; if the first is broken, the others are not checked."""
        result = partial(Result, law.name, law.says)
        if law is not self.laws[0] and self.result(self.laws[0]).outcome == "failed":
            return result("skipped", f"not checked: '{RUNS}' is broken, fix that first")
        if reason := self.excepted(law):
            return result("excepted", reason)
        silent = ["it is checked from 4 examples on"] if law.once and self.examples < 4 else []
        checked = len(silent)
        for trial in self.trials(law):
            checked += 1
            try:
                with no_fit_warnings():  # alone, it may lack methods that it was published with
                    law.check(self.method, trial)
            except NotApplicable as inapplicable:
                silent.append(str(inapplicable))
            except ProcessError:
                raise
            except BrokenLaw as error:
                return result("failed", f"On {trial}: {error}")
            except Exception as error:  # user code may raise anything, which breaks the law that ran it
                if not (isinstance(error, OutOfRange) and self.may_refuse(trial)):
                    return result("failed", f"On {trial}: it raised {type(error).__name__}: {error}")
        return result("silent", silent[0]) if len(silent) == checked else result("passed", "")

    def _agrees(self, method: TokenObjective, trial: Trial) -> None:
        if self.oracle is None:
            raise NotApplicable(
                "not checked: no oracle was given; only one can say on which side of a threshold a token on it belongs"
            )
        outcome, expected = trial.whole(method), self.oracle(trial.first.tokens())
        if not abs(outcome.loss - expected) <= tolerances.ORACLE * outcome.scale:
            raise BrokenLaw(f"the loss is {outcome.loss!r}, the oracle's {expected!r}.")
