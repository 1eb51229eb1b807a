"""The laws that only stages have, or obey in a way of their own, each a check on three rollouts of a random run."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import Method, measure_all
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, Stage
from rlstab.testing.agreement import BrokenLaw
from rlstab.testing.fresh_process import own_signals
from rlstab.testing.laws import (
    LONG,
    STAGE_LAWS,
    NotApplicable,
    Trial,
    check_finite,
    check_long_run,
    check_reads,
    law,
    unread_in,
    untouched,
)
from rlstab.testing.relabel import relabellings, same_draws
from rlstab.testing.rollouts import Rollout, make_rollout
from rlstab.testing.run import act, choose, run_parts, run_whole
from rlstab.testing.tolerances import REORDERED

__all__ = ["STAGE_LAWS"]


@law(STAGE_LAWS, draws="extreme")
def finite(stage: Stage, trial: Trial) -> None:
    """Extreme rewards, and rewards that differ by a rounding."""
    for _, _, outcome in trial.run(stage):
        check_finite(outcome)


@law(STAGE_LAWS, large=True)
def pure(stage: Stage, trial: Trial) -> None:
    """It changes no input, uses nothing that the process shares, and the same call gives the same."""
    for rollout, state, outcome in trial.run(stage):
        batch = rollout.batch(choose(stage, rollout.offer, state))
        with untouched(state, batch):
            replace(stage)  # make it once more
            stat, _ = measure_all(stage, [batch], state, LocalComm())
            act(stage, batch, stat, state, rollout.offer)
        outcome.require_same("called twice with the same", run_whole(stage, rollout, state), 0.0)


@law(STAGE_LAWS, once=True)
def later_rollouts(stage: Stage, trial: Trial) -> None:
    """Thirty rollouts with state: the same in parts under changing cuts; the state stays finite and bounded."""
    check_long_run(stage, [_rollout(stage, (2, 3, 1), number, trial) for number in range(LONG)])


@law(STAGE_LAWS, large=True)
def identity(stage: Stage, trial: Trial) -> None:
    """The result of a response depends on it, its group and settled statistics; ids only name it and its draws."""
    measures = any(getattr(type(stage), name) is not getattr(Method, name) for name in ("measure", "measure_again"))
    if isinstance(stage, PromptSelector):
        raise NotApplicable("what it does depends on the numbers of prompts")
    for rollout, state, outcome in trial.run(stage):
        for group in () if measures else rollout.units:
            outcome_of_group = run_parts(stage, rollout, [[group]], state)
            members = rollout.responses.group == group
            outcome_of_group.require_results("without other groups and with them", outcome, REORDERED, members)
        for description, relabelled in relabellings(rollout):
            with same_draws(relabelled, rollout):
                other = run_whole(stage, relabelled, state)
            outcome.require_results(f"under {description}", other, REORDERED)


@law(STAGE_LAWS)
def even_group(stage: Stage, trial: Trial) -> None:
    """If all answers to a prompt earned the same, every advantage is exactly 0."""
    if not isinstance(stage, AdvantageEstimator):
        raise NotApplicable("it estimates no advantages")
    evened = replace(trial, chain=[rollout.evened() for rollout in trial.chain])
    for rollout, _, outcome in evened.run(stage):
        responses = rollout.responses
        lone = responses.group_sum(torch.ones_like(responses.rewards)) == 1
        advantages = outcome.results["the advantage"][(responses.group % 2 == 0) | lone]
        if bool((advantages != 0).any()):
            worst = advantages.reshape(-1).abs().max()
            raise BrokenLaw(f"a group whose rewards are all equal has an advantage of {float(worst):.3g}.")


@law(STAGE_LAWS)
def selection(stage: Stage, trial: Trial) -> None:
    """A choice is a function of offer and state: as many prompts as asked, all of the task; a refill continues it."""
    if not isinstance(stage, PromptSelector):
        raise NotApplicable("it chooses no prompts")
    for rollout, state, _ in trial.run(stage):
        offer = rollout.offer
        larger = replace(offer, count=offer.count + 2)
        refill = replace(offer, first=offer.first + offer.count, drawn=offer.drawn + offer.count, count=2)
        first, at_once, refilled = (choose(stage, offered, state) for offered in (offer, larger, refill))
        for chosen in (at_once, refilled):
            if bool((chosen < 0).any()) or (offer.size is not None and bool((chosen >= offer.size).any())):
                raise BrokenLaw(f"it chooses {chosen.tolist()}, and the prompts are 0 to {offer.size or 'any'}.")
        joined_choices = torch.cat([first, refilled])
        if not torch.equal(at_once, joined_choices):
            raise BrokenLaw(
                f"{larger.count} prompts at once are {at_once.tolist()}, {offer.count} and a refill of 2 are "
                f"{joined_choices.tolist()}; a refill continues where the first choice ended."
            )


@law(STAGE_LAWS)
def declared(stage: Stage, trial: Trial) -> None:
    """It reads only the evidence of ``needs``."""
    check_reads(stage, trial)


@law(STAGE_LAWS, once=True)
def used(stage: Stage, trial: Trial) -> None:
    """It reads all evidence that ``needs`` names."""
    unread = unread_in(stage, [_rollout(stage, (2, 4, 3, 1, 4), number, trial) for number in range(8)])
    if unread:
        raise BrokenLaw(f"`needs` names '{min(unread)}', which nothing reads. It is made needlessly: remove it.")


def _rollout(stage: Stage, sizes: Sequence[int], number: int, trial: Trial) -> Rollout:
    return make_rollout(sizes, number, own_signals(stage), number=number, size=24, seed=trial.seed)


@law(STAGE_LAWS)
def padding(stage: Stage, trial: Trial) -> None:
    """Values after the end of a response in evidence about tokens change nothing."""
    for rollout, state, outcome in trial.run(stage):
        for fill in (1.0, 1e9):
            outcome.require_same("with other numbers after the end", run_whole(stage, rollout.padded(fill), state), 0.0)
