"""Which policies of a run can differ: unset settings make a method act, and what stays idle is named."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from rlstab import Gate, Terms, TokenObjective, observe
from rlstab.config import dump_run, load_run, run_hash
from rlstab.config.document import Document
from rlstab.config.runs import why_idle
from rlstab.config.settings import OldLogprobs, OptimisationSettings
from rlstab.core.validate import DRIFT
from rlstab.explain.notes import idle_in_run
from rlstab.explain.page import page
from rlstab.zoo import METHODS


class ReadsLive(TokenObjective):
    """A gate of the ratio; what it compares follows from what it writes."""

    name = "reads_live"
    writes = {"gates"}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        return Terms(gates={"": Gate(lambda ratio, constants: 1 / ratio)})


class ReadsStep(TokenObjective):
    """A weight by how far the policy of this optimizer step is from the one that the ratio divides by."""

    name = "reads_step"
    writes = {"weight"}
    reads_drift = {"step"}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        return Terms(weight=1 / (1 + (batch.logprobs - batch.old_logprobs).abs()))


class ReadsSampler(TokenObjective):
    """A mask where the trainer and the sampler disagree."""

    name = "reads_sampler"
    needs = {"rollout_logprobs"}
    writes = {"keep"}
    reads_drift = {"sampler"}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        return Terms(keep=(batch.old_logprobs - batch.signal("rollout_logprobs")).abs() < 0.1)


class ReadsStart(TokenObjective):
    """A mask of what the policy of this optimizer step has left."""

    name = "reads_start"
    needs = {"rollout_logprobs"}
    writes = {"keep"}
    reads_drift = {"start"}

    def terms(self, batch: Any, stat: Any, state: Any) -> Terms:
        return Terms(keep=(batch.logprobs - batch.signal("rollout_logprobs")).abs() < 0.1)


METHOD_OF = {"live": ReadsLive, "step": ReadsStep, "sampler": ReadsSampler, "start": ReadsStart}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    for cls in METHOD_OF.values():
        METHODS.register(cls)


def run(*drifts: str, **optimisation: Any) -> Any:
    objective = [METHOD_OF[one].name for one in drifts] or ["s2t"]
    return load_run({"objective": objective, "optimisation": optimisation})


def test_there_is_a_method_of_each_kind() -> None:
    assert METHOD_OF.keys() == DRIFT.keys()
    for drift, cls in METHOD_OF.items():
        assert cls().reads_drift == {drift}


@pytest.mark.parametrize(
    ("drifts", "optimizer_steps", "old_logprobs", "refresh"),
    [
        ((), 1, "live", "rollout"),
        ((), 4, "recompute", "rollout"),
        (("live",), 1, "live", "rollout"),
        (("live",), 4, "recompute", "rollout"),
        (("step",), 1, "live", "rollout"),
        (("step",), 4, "recompute", "step"),
        (("sampler",), 1, "recompute", "rollout"),
        (("sampler",), 4, "recompute", "rollout"),
        (("start",), 1, "recompute", "rollout"),
        (("start",), 4, "recompute", "step"),
        (("live", "step", "sampler"), 1, "recompute", "rollout"),
        (("live", "step", "sampler"), 4, "recompute", "step"),
    ],
)
def test_unset_settings_make_the_methods_act(
    drifts: Any, optimizer_steps: int, old_logprobs: str, refresh: str
) -> None:
    found = run(*drifts, epochs=2, mini_batches=optimizer_steps // 2) if optimizer_steps > 1 else run(*drifts)
    assert (found.optimisation.old_logprobs, found.optimisation.refresh) == (old_logprobs, refresh)
    idle = {drift for drift in drifts if why_idle(drift, found.optimisation)}
    # with one optimizer step the policy has not moved, whatever is read; the sampler may still disagree
    assert idle == (set(drifts) & {"live", "step"} if optimizer_steps == 1 else set())
    assert load_run(Document.parse(dump_run(found), "f").data) == found


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("refresh", ["rollout", "step"])
@pytest.mark.parametrize("old", get_args(OldLogprobs))
def test_what_is_set_stays(old: str, refresh: str, epochs: int) -> None:
    if old == "live" and epochs > 1:
        return  # refused, see test_errors
    found = run("live", "step", "sampler", old_logprobs=old, refresh=refresh, epochs=epochs).optimisation
    assert (found.old_logprobs, found.refresh) == (old, refresh)
    one = run("live", "step", "sampler", old_logprobs=old, epochs=epochs).optimisation
    assert one.old_logprobs == old


def test_what_is_set_as_it_would_be_changes_no_hash() -> None:
    explicit = run("step", "sampler", epochs=2, old_logprobs="recompute", refresh="step")
    assert run_hash(run("step", "sampler", epochs=2)) == run_hash(explicit)


def test_a_method_within_another_or_nested_counts() -> None:
    nested = {"name": "within", "outer": "reads_sampler", "inner": ["reads_step", "kl"]}
    found = load_run({"objective": ["clip_higher", nested], "optimisation": {"epochs": 2}}).optimisation
    assert (found.old_logprobs, found.refresh) == ("recompute", "step")


def test_what_is_only_observed_changes_no_policy_of_the_run() -> None:
    """Else the run with it would learn from other evidence than the run without."""
    observed = {"name": "observe", "method": ["reads_sampler", "reads_step"]}
    for epochs in (1, 2):
        alone, beside = (
            load_run({"objective": objective, "optimisation": {"epochs": epochs}})
            for objective in (["clip_higher"], ["clip_higher", "mismatch", observed])
        )
        assert beside.optimisation == alone.optimisation
    in_one_step = load_run({"objective": ["clip_higher", "mismatch"]})
    assert observe(ReadsSampler()).reads_drift == {"sampler"}
    assert any(text.startswith("observe_reads_step cannot act: the evidence is that of") for text in notes(beside))
    assert any(text.startswith("mismatch cannot act: old_logprobs: live compares") for text in notes(in_one_step))


# -- what stays idle ---------------------------------------------------------------------------------------------------


def notes(found: Any) -> list[str]:
    return idle_in_run(found.composition, found)


def policies(optimisation: OptimisationSettings) -> dict[str, tuple[str, str]]:
    """By hand: which policy each of a pair is, after the first of several optimizer steps."""
    sampled = "of the sampler, as it reported" if optimisation.old_logprobs == "rollout" else "before the first step"
    moved = "after a step" if optimisation.optimizer_steps_per_rollout > 1 else "before the first step"
    old = moved if optimisation.old_logprobs == "live" else sampled
    evidence = moved if optimisation.refresh == "step" else old
    # the trainer knows the log-probs of the sampler only as reported, unless it computes them again
    reported = "of the sampler, as it reported"
    sampler = old if optimisation.old_logprobs != "recompute" else reported
    # what is recomputed at the start of a step is the trainer's; else the evidence is what old_logprobs are made of
    recomputed = optimisation.refresh == "step" or optimisation.old_logprobs == "recompute"
    start = evidence if recomputed else reported
    return {"live": (moved, old), "step": (evidence, old), "sampler": (old, sampler), "start": (start, reported)}


@pytest.mark.parametrize(
    ("old", "refresh", "epochs"),
    [one for one in itertools.product(get_args(OldLogprobs), ["rollout", "step"], [1, 2]) if one[::2] != ("live", 2)],
)
@pytest.mark.parametrize("drift", DRIFT)
def test_a_method_is_called_idle_exactly_where_its_policies_are_one(
    drift: str, old: str, refresh: str, epochs: int
) -> None:
    found = run(drift, old_logprobs=old, refresh=refresh, epochs=epochs)
    one, other = policies(found.optimisation)[drift]
    (told,) = [text for text in notes(found) if "cannot act" in text] or [None]
    assert (told is not None) == (one == other), (one, other, told)
    assert told is None or told.startswith(f"{METHOD_OF[drift].name} cannot act: ")


def test_a_trust_region_beside_something_else_is_idle_alone() -> None:
    """The penalty of lp_reg acts also where its cap cannot."""
    found = load_run({"objective": [{"name": "lp_reg", "ratio_cap": 10.0}]})
    (told,) = notes(found)
    assert told.startswith("the trust region of lp_reg cannot act: ")


def test_nothing_is_called_idle_that_acts() -> None:
    """The sampler's own log-probs differ from the trainer's also in the first optimizer step."""
    acting = load_run({"objective": ["clip_higher", "reads_live"], "optimisation": {"old_logprobs": "rollout"}})
    assert notes(acting) == []
    assert "Nothing is known to be idle or unsafe." in page("a run", acting.composition, acting)
    assert notes(run("live", "step", "sampler", epochs=2)) == []
