"""Runs that were broken on purpose, in our format and in others: what came first is named, at its step."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from rlstab.logs.log import Rows
from rlstab.look.diagnosis import TOGETHER, Diagnosis, diagnose, first_of, leading
from rlstab.look.find import read_logs
from rlstab.look.remedies import CAUSES, remedies
from rlstab.signs import SIGNS, Sign
from tests.diagnose.formats import BROKEN, DATA, HEALTHY, written

#: The rollout in which each of them began to go wrong, and how late it may be named. Read off the metrics.
BEGINS = {
    "learning_rate": (2, 10),
    "staleness": (2, 4),
    "mismatch": (1, 1),
    "entropy_collapse": (8, 25),
    "dead_groups": (1, 1),
    "truncation": (6, 16),
}
#: Those whose reward rises all the same.
UNHARMED = ("mismatch", "entropy_collapse")


#: verl logs no gap between sampler and trainer in log-probs.
OF_VERL = ("learning_rate", "entropy_collapse", "dead_groups", "truncation")
CAUSED = [*itertools.product(BROKEN, ("rlstab", "TRL", "wandb")), *itertools.product(OF_VERL, ("verl",))]


@pytest.mark.parametrize(("name", "form"), CAUSED)
def test_the_first_cause_of_a_run_that_was_broken(name: str, form: str, tmp_path: Path) -> None:
    (diagnosis,) = map(diagnose, read_logs(written(name, form, tmp_path)))
    sign = diagnosis.fired[0]
    assert CAUSES[sign.name] == name
    earliest, latest = BEGINS[name]
    assert earliest <= (sign.step or 0) <= latest
    assert diagnosis.log.writer == form
    if name in UNHARMED:  # the reward of these runs rises
        assert diagnosis.first is None
        assert diagnosis.verdict().startswith("no harm; ")
    else:
        assert diagnosis.verdict() == f"first, at {diagnosis.log.unit} {sign.step}: {remedies()[name].title}"


@pytest.mark.parametrize(("name", "form"), [*itertools.product(HEALTHY, ("rlstab", "TRL", "verl", "wandb"))])
def test_nothing_is_found_in_a_healthy_run(name: str, form: str, tmp_path: Path) -> None:
    (diagnosis,) = map(diagnose, read_logs(written(name, form, tmp_path)))
    assert diagnosis.first is None
    assert diagnosis.verdict() == "nothing found"
    unseen = {"held_out", "components", "kl_drift", "shrunk_steps", "repetition"}
    # other trainers log nothing of a sampler that is the policy itself
    unseen |= set() if form == "rlstab" else {"sampler_mismatch", "sampler_drift"}
    assert {sign.name for sign in diagnosis.unseen} == unseen
    assert {sign.name for sign in diagnosis.looked_at} == SIGNS.keys() - unseen


def trl_run(name: str, every: int = 1) -> list[dict[str, float]]:
    """Lines of TRL 1.16 on the countdown model, at lr 2e-4 or 50 times that; ``every`` as ``logging_steps``."""
    lines = json.loads((DATA / "trl_1_16_lr" / f"{name}.json").read_text(encoding="utf-8"))["log_history"]
    told = []
    for start in range(0, len(lines) - every + 1, every):
        some = lines[start : start + every]
        means = {key: sum(line[key] for line in some) / every for key in some[-1]}
        told.append(means | {key: some[-1][key] for key in ("step", "grad_norm", "learning_rate")})  # as transformers
    return told


def diagnosed(lines: list[dict[str, float]]) -> Diagnosis:
    return diagnose(Rows({int(line["step"]): line for line in lines}).run("", "TRL"))


def test_a_learning_rate_that_is_too_high_comes_before_the_answers_it_cuts_off() -> None:
    for every in (1, 2, 5, 10):  # in a line for several steps, the first is already broken
        for name in ("too_high", "broken_at_once"):
            diagnosis = diagnosed(trl_run(name, every))
            assert diagnosis.first is not None
            assert diagnosis.first.cause == "learning_rate", (name, every)
        assert diagnosed(trl_run("healthy", every)).first is None


def test_steps_that_train_nothing_are_remarked() -> None:
    lines = trl_run("healthy")
    assert diagnosed(lines).remarks == ()
    for line in lines[3:33]:
        line |= {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "grad_norm": 0.0}
    (remark,) = diagnosed(lines).remarks
    assert "30 of 48 lines" in remark


def test_what_looks_like_a_cause_for_a_moment() -> None:
    """Rewards of nearly nothing waver, prompts may be solved late in a run, and single steps have a token of any KL."""
    steps, draw = np.arange(1, 301), np.random.default_rng(0)
    solved = 1 - 0.75 * np.exp(-3 * steps / 300)
    hard = np.maximum(0, 0.015 + 0.01 * draw.standard_normal(300))
    spikes = np.where(steps % 10 == 5, 30.0, 0.02)
    for cause, step, metrics in (
        ("difficulty", 1, {"reward": hard}),
        (None, None, {"reward": solved, "frac_reward_zero_std": 0.8 * solved}),
        (None, None, {"reward": 0.5 * solved, "kl": spikes}),
        (None, None, {"reward": 0.5 * solved, "kl": np.where(steps > 100, 3.0, 0.02)}),  # an observation
        ("kl_drift", 101, {"reward": np.where(steps > 150, 0.1, 0.6), "kl": np.where(steps > 100, 3.0, 0.02)}),
    ):
        rows = zip(steps.tolist(), *(values.tolist() for values in metrics.values()), strict=True)
        first = diagnosed([dict(zip(("step", *metrics), row, strict=True)) for row in rows]).first
        assert (first and (first.cause, first.sign.step)) == (cause and (cause, step)), metrics.keys()


#: Signs that hurt a run wherever they are present, in these tests.
HARMS = ("reward_fall", "zero_std_groups", "refused_steps", "no_gradient")


def sign(name: str, step: int | None, share: float | None = None, *, from_start: bool = False) -> Sign:
    return Sign(name, step is not None, step, "", share, harm=name in HARMS, from_start=from_start)


SIGNED = [
    # the earliest counts
    ("entropy_collapse", [sign("reward_fall", 60), sign("entropy_floor", 30), sign("truncation", None)]),
    ("learning_rate", [sign("reward_fall", 20), sign("entropy_floor", 30)]),
    (None, [sign("reward_fall", None)]),
    # of those that begin together, the one that explains the others
    ("staleness", [sign("reward_fall", 20), sign("sampler_drift", 20 + TOGETHER)]),
    ("learning_rate", [sign("reward_fall", 20), sign("sampler_drift", 21 + TOGETHER)]),
    # equal rewards after a fall are no cause
    ("learning_rate", [sign("zero_std_groups", 12), sign("reward_fall", 15)]),
    ("dead_groups", [sign("zero_std_groups", 1), sign("reward_fall", None)]),
    ("dead_groups", [sign("zero_std_groups", 12), sign("reward_fall", 40)]),
    # what did not hurt the run has no cause, and what was there all along, or came later, is not one
    (None, [sign("plateau", 20), sign("kl_drift", 60), sign("entropy_floor", 30), sign("clipped", 3)]),
    ("learning_rate", [sign("reward_fall", 60), sign("truncation", 1, from_start=True), sign("kl_drift", 90)]),
    # of those at one step the gravest: no numbers, then no gradient, then the rest
    ("learning_rate", [sign("refused_steps", 1), sign("zero_std_groups", 1), sign("truncation", 1)]),
    ("no_gradient", [sign("no_gradient", 1), sign("kl_drift", 1)]),
    # answers that are cut off explain a reward that falls with them, and no other
    ("truncation", [sign("truncation", 30, share=0.3), sign("reward_fall", 30, share=0.4)]),
    ("learning_rate", [sign("truncation", 30, share=0.8), sign("reward_fall", 30, share=0.05)]),
]


def test_the_sign_that_counts() -> None:
    for cause, signs in SIGNED:
        first = first_of(signs)
        assert (first and first.cause) == cause, signs
    # of observations, a plateau is what is left to say, and of two that part the one that says more counts
    for name, signs in (
        ("kl_drift", [sign("plateau", 20), sign("kl_drift", 60)]),
        ("length_without_gain", [sign("held_out", 20), sign("length_without_gain", 90)]),
        ("truncation", [sign("truncation", 60), sign("length_without_gain", 40)]),
    ):
        lead = leading(signs)
        assert (lead and lead.name) == name, signs
    # a log with a line for every 25 steps has no finer order
    first = first_of([sign("reward_fall", 25), sign("sampler_drift", 50)], interval=25)
    assert (first and first.cause) == "staleness"


def test_every_sign_has_a_cause_and_every_cause_a_remedy() -> None:
    assert CAUSES.keys() == SIGNS.keys()
    assert set(CAUSES.values()) == remedies().keys() >= set(BROKEN)
