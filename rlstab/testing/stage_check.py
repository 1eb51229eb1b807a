"""Checks a stage against all laws of stages, with a readable report or under pytest."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import hypothesis
from hypothesis import strategies as st

from rlstab.errors import OutOfRange, ProcessError, UnknownName, did_you_mean
from rlstab.extras import require
from rlstab.stages.response_batch import EVIDENCE
from rlstab.stages.stage import Stage
from rlstab.testing.agreement import BrokenLaw
from rlstab.testing.laws import NotHere
from rlstab.testing.objective_check import Report, Result
from rlstab.testing.rank_processes import Processes
from rlstab.testing.stage_laws import STAGE_LAWS, StageCase, StageLaw
from rlstab.testing.stage_run import may_refuse
from rlstab.testing.stage_steps import rollouts


def check_stage(
    stage: Stage,
    *,
    examples: int = 20,
    shrink: bool = True,
    processes: int | Processes | None = None,
    laws: Collection[str] | None = None,
) -> Report:
    """Check a stage against every law of stages.

    A stage may refuse, by :class:`~rlstab.errors.OutOfRange`, rewards outside of [0, 1], and a task that has no end.

    Args:
        stage: a prompt selector, a reward shaper, an advantage estimator or a rollout expander.
        examples: runs of three rollouts drawn per law.
        shrink: look for a small run where a law is broken, which takes seconds.
        processes: run the ranks of the law *split* as this many real processes, which start in seconds; without, as
            threads. :class:`~rlstab.testing.Processes` serves several calls. The report says how many took part.
        laws: names of those to check; None is all.

    Returns:
        A report. The draws are the same in every call, so a failure can be reproduced.

    Raises:
        ProcessError: a process died or did not answer within its timeout, or the stage cannot be sent to it.
        UnknownName: there is no such law.
    """
    known = [law.name for law in STAGE_LAWS]
    unknown = sorted(set(laws or ()) - set(known))
    if unknown:
        raise UnknownName(f"check_stage: there is no law '{unknown[0]}' of stages. {did_you_mean(unknown[0], known)}")
    asked = [law for law in STAGE_LAWS if laws is None or law.name in laws]
    with _running(processes) as ranks:
        held = [_hold(stage, law, examples, shrink=shrink, processes=ranks) for law in asked]
        return Report(repr(stage), held)


def parametrize_stage_laws(
    *stages: Stage, examples: int = 20, processes: int | Processes | None = None
) -> Callable[[Any], Any]:
    """A pytest decorator: one test per law and stage.

    ::

        @parametrize_stage_laws(MyStage(), MyStage(budget=100))
        def test_laws(check):
            check()

    Args:
        stages: what to check.
        examples: runs of three rollouts drawn per law.
        processes: as in :func:`check_stage`.

    Raises:
        MissingPackage: pytest is not installed.
    """
    require("testing", "parametrize_stage_laws", "pytest")
    import pytest

    def check_of(stage: Stage, law: StageLaw) -> Callable[[], None]:
        def check() -> None:
            with _running(processes if law.ranks else None) as ranks:
                result = _hold(stage, law, examples, processes=ranks)
            if result.outcome == "failed":
                raise BrokenLaw(f"{stage!r} breaks the law '{law.name}' ({law.says}): {result.detail}")

        return check

    cases = [
        pytest.param(check_of(stage, law), id=f"{stage.name}{number or ''}-{law.name}")
        for number, stage in enumerate(stages)
        for law in STAGE_LAWS
    ]
    return pytest.mark.parametrize("check", cases)


def _running(processes: int | Processes | None) -> Any:
    """Processes as they were given, or as many of our own, as a context."""
    return Processes(processes) if isinstance(processes, int) else nullcontext(processes)


def _hold(
    stage: Stage, law: StageLaw, examples: int, *, shrink: bool = True, processes: Processes | None = None
) -> Result:
    if law.name in stage.about.exceptions:
        return Result(law.name, law.says, "excepted", stage.about.exceptions[law.name])
    drawn = rollouts(sorted(stage.needs - EVIDENCE.keys()), extreme=law.extreme)

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink)[: 1 + shrink],
        verbosity=hypothesis.Verbosity.quiet,
        print_blob=False,
    )
    @hypothesis.given(drawn, st.integers(0, 2**31))
    def holds(run: Any, seed: int) -> None:
        try:
            law.check(stage, StageCase(run, seed, processes))
        except OutOfRange:
            if not any(may_refuse(stage, one) for one in run):
                raise
            hypothesis.reject()
        except BrokenLaw as error:
            raise BrokenLaw(f"{error} Seen on {', '.join(map(repr, run))}.") from error.__cause__

    try:
        holds()
    except NotHere as reason:
        return Result(law.name, law.says, "silent", str(reason))
    except BrokenLaw as error:
        return Result(law.name, law.says, "failed", str(error))
    except ProcessError:
        raise
    except Exception as error:  # a stage of a user may raise anything; that breaks the law that met it
        return Result(law.name, law.says, "failed", f"it raised {type(error).__name__}: {error}")
    seen = f"over {processes.counted} gloo processes" if processes and law.ranks else ""
    return Result(law.name, law.says, "passed", seen)
