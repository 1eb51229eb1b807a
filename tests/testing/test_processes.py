"""The loss over real gloo processes is the whole loss: threads share memory, and processes do not."""

import os
from typing import Any

import pytest

from rlstab import CPPO, STARE, ClipHigher, KLCov, S2TMask, Terms, TokenBatch, TokenObjective, compose, observe
from rlstab.testing import BrokenLaw
from rlstab.testing.run import joined, run_parts, run_whole
from rlstab.testing.steps import make_step
from rlstab.testing.tolerances import REORDERED
from tests.core.methods import CappedGate, CentredGate, PassRate
from tests.examples import EXAMPLES, random_compositions
from tests.processes import Processes
from tests.zoo.test_states import METHODS, follow

COMPOSED = compose(ClipHigher(), S2TMask(), STARE(target_entropy=0.8))
# groups are gathered, covariances take a second round, and a gate reads whole sequences
ROUNDS = compose(KLCov(share=0.2), PassRate(), CentredGate(), CappedGate(), CPPO(anchor="old"), observe(S2TMask()))


class SeededByProcess(TokenObjective):
    """Its random numbers belong to a token, as they should, but their seed is that of the process."""

    name = "seeded_by_process"
    writes = {"weight"}

    def terms(self, batch: TokenBatch, stat: Any, state: Any) -> Terms:
        return Terms(weight=batch.uniform(os.getpid()).to(batch.logprobs.dtype))


def same_over(processes: Processes, objective: TokenObjective) -> None:
    """Two optimizer steps with state, ragged and padded; the second leaves all ranks but one without a part."""
    whole = ranked = None
    for number, cut in enumerate(([[0, 3], [1]], [[0], [1, 2, 3]])):
        step = make_step("mixed", [5, 0, 7, 4], 2, number, sorted(objective.needs & {"mine"}))
        ranks = [[cut[0]], [cut[1], [2]]] if number == 0 else [[*cut], []]
        ranks += [[]] * (processes.count - 2)
        whole = run_whole(objective, step, whole.state if whole else None)
        jobs = [(objective, step.laid_out(number), parts, ranked.state if ranked else None) for parts in ranks]
        ranked = joined(processes.each(run_parts, jobs))
        whole.require_same(f"step {number + 1} over {processes.count} processes", ranked, REORDERED)


def test_two_processes_are_one_and_find_what_threads_cannot() -> None:
    with Processes(2) as two:
        assert two.counted == 2
        for objective in (COMPOSED, ROUNDS):
            same_over(two, objective)
        for methods in {tuple(methods): methods for methods in METHODS}.values():  # with a state, as oracles follow it
            follow(methods, two)
        with pytest.raises(BrokenLaw):
            same_over(two, SeededByProcess())
        empty = make_step("mixed", [0, 0], 1, 0)
        nowhere = two.each(run_parts, [(COMPOSED, empty, parts, None) for parts in ([[0], [1]], [])])
        assert [outcome.state for outcome in nowhere] == [COMPOSED.init_state()] * 2


@pytest.mark.slow
def test_every_method_over_three_processes() -> None:
    with Processes(3) as three:
        methods = [method for several in EXAMPLES.values() for method in several]
        for objective in [*methods, *random_compositions(10, seed=3)]:
            same_over(three, objective)
