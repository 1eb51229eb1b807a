"""The law `split` over real gloo processes: what holds in threads, which share memory, need not hold there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from rlstab import STARE, ClipHigher, S2TMask, Terms, TokenBatch, TokenObjective, compose, observe
from rlstab.core.metadata import About
from rlstab.errors import ProcessError
from rlstab.testing import Processes, Report, check_objective, parametrize_laws
from rlstab.testing.examples import EXAMPLES, random_compositions
from rlstab.testing.outcome import joined
from rlstab.testing.steps import make_step
from tests.core.gate_methods import CISPO, VESPO
from tests.core.measuring_methods import CentredGate, CovarianceThreshold, PassRate

COMPOSED = compose(ClipHigher(), S2TMask(), STARE(target_entropy=0.8))
NO_TOKENS = make_step("mixed", [0, 0], 1, 0, ())


class SeededByProcess(TokenObjective):
    """Its random numbers belong to a token, as they should, but their seed is that of the process."""

    name = "seeded_by_process"
    writes = {"weight"}
    about = About(
        exceptions={"replication": "a copy of a sequence is another sequence, with other random numbers"},
    )

    def terms(self, batch: TokenBatch, stat: Any, state: Any) -> Terms:
        return Terms(weight=batch.uniform(os.getpid()).to(batch.logprobs.dtype))


class OnRankOne(TokenObjective):
    """Raises, dies or sleeps on rank 1."""

    name = "on_rank_one"

    does: str

    def terms(self, batch: TokenBatch, stat: Any, state: Any) -> Terms:
        if dist.is_initialized() and dist.get_rank() == 1:
            if self.does == "raise":
                raise ValueError("nothing left to weigh")
            if self.does == "die":
                os._exit(3)
            time.sleep(600)
        return Terms()


def split_of(report: Report) -> tuple[str, str]:
    (found,) = [(one.outcome, one.detail) for one in report.results if one.law == "split"]
    return found


def test_two_processes_are_one_and_find_what_threads_cannot() -> None:
    alone = check_objective(SeededByProcess(), examples=4)
    assert alone.failed == {"process"}  # in threads, ranks are one process
    with Processes(2) as two:
        outcome, detail = split_of(check_objective(COMPOSED, examples=4, processes=two))
        assert (outcome, detail) == (
            "passed",
            f"over 2 gloo processes, 8 optimizer steps, {two.empty_ranks} ranks without a part",
        )
        assert two.empty_ranks >= 4  # the second step of each example leaves a rank out
        assert two.counted == 2

        # groups are gathered, covariances take a second round, and a gate reads whole sequences
        rounds = compose(CovarianceThreshold(), PassRate(), CentredGate(), CISPO(), VESPO(), observe(S2TMask()))
        assert split_of(check_objective(rounds, examples=4, processes=two))[0] == "passed"

        report = check_objective(SeededByProcess(), examples=4, processes=two)
        assert report.failed == {"split", "process"}
        assert "over 2 ranks: the loss is" in split_of(report)[1]

        nowhere = two.run_ranks(COMPOSED, NO_TOKENS, [[[0], [1]], []])
        assert [one.state for one in nowhere] == [COMPOSED.init_state()] * 2
        assert joined(nowhere).loss == 0


def test_what_cannot_be_checked_over_processes_is_told_before_any_is_started() -> None:
    local = type("Local", (SeededByProcess,), {})()
    with Processes(2) as two, pytest.raises(ProcessError, match="Define its class at the top of a module"):
        two.run_ranks(local, NO_TOKENS, [[], [[0, 1]]])
    assert two.counted == 0
    with pytest.raises(ValueError, match="from 2 on"):
        check_objective(COMPOSED, processes=1)


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    with Processes(3) as processes:
        yield processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [*(one for several in EXAMPLES.values() for one in several), *random_compositions(10, seed=3)],
    ids=repr,
)
def test_three_processes_are_one(objective: TokenObjective, three: Processes) -> None:
    before = three.steps
    outcome, detail = split_of(check_objective(objective, examples=5, processes=three))
    if outcome != "excepted":
        assert (outcome, three.counted, three.steps - before) == ("passed", 3, 10), detail


@pytest.mark.slow
@parametrize_laws(COMPOSED, examples=4, processes=2)
def test_as_tests_of_pytest(check: Any) -> None:
    check()


@pytest.mark.slow
def test_a_method_that_raises_on_one_rank_breaks_the_law_and_the_next_one_is_checked() -> None:
    with Processes(2) as two:
        assert split_of(check_objective(OnRankOne("raise"), processes=two)) == (
            "failed",
            "it raised RuntimeError: rank 1 of 2 processes raised ValueError: nothing left to weigh",
        )
        assert split_of(check_objective(COMPOSED, examples=2, processes=two))[0] == "passed"


@pytest.mark.slow
def test_a_process_that_dies_ends_the_check() -> None:
    with pytest.raises(
        ProcessError, match=re.escape("rank 1 of 2 processes died during an optimizer step (exit code 3)")
    ):
        check_objective(OnRankOne("die"), processes=2)


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_check_in_time() -> None:
    with Processes(2, timeout=15.0) as two, pytest.raises(ProcessError, match="did not answer within 15 s of"):
        check_objective(OnRankOne("hang"), processes=two)
