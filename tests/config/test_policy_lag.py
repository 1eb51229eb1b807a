"""Which policies of a run can differ: unset settings make a method act, and what stays idle is named."""

import itertools
from typing import Any, get_args

import pytest

from rlstab import TokenObjective, observe
from rlstab.config import dump_run, load_run
from rlstab.config.document import Document
from rlstab.config.settings import OldLogprobs, OptimisationSettings
from rlstab.core.method_checks import DRIFT
from rlstab.explain.notes import idle_in_run
from rlstab.zoo import METHODS


def reads(drift: str) -> type[TokenObjective]:
    """A method that compares a pair of policies; a gate, which acts on the ratio, compares the live one by itself."""
    body = {
        "__module__": __name__,
        "name": f"reads_{drift}",
        "needs": {"rollout_logprobs"} if drift in ("sampler", "start") else set(),
        "terms": lambda self, batch, stat, state: None,
        **({"writes": {"gates"}} if drift == "live" else {"writes": {"keep"}, "reads_drift": {drift}}),
    }
    return type(f"Reads{drift.title()}", (TokenObjective,), body)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    for drift in DRIFT:
        METHODS.register(reads(drift))
        assert METHODS.get(f"reads_{drift}")().reads_drift == {drift}


def run(*drifts: str, **optimisation: Any) -> Any:
    objective = [f"reads_{drift}" for drift in drifts] or ["s2t"]
    return load_run({"objective": objective, "optimisation": optimisation})


def notes(run: Any) -> list[str]:
    return idle_in_run(run.composition, run)


def test_unset_settings_make_the_methods_act() -> None:
    for drifts, *evidence in [
        ("", "live rollout", "recompute rollout"),
        ("live", "live rollout", "recompute rollout"),
        ("step", "live rollout", "recompute step"),
        ("sampler", "recompute rollout", "recompute rollout"),
        ("start", "recompute rollout", "recompute step"),
        ("live step sampler", "recompute rollout", "recompute step"),
    ]:
        once, often = (run(*drifts.split(), epochs=epochs) for epochs in (1, 4))
        for loaded, expected in zip((once, often), evidence, strict=True):
            assert f"{loaded.optimisation.old_logprobs} {loaded.optimisation.refresh}" == expected, drifts
            assert load_run(Document.parse(dump_run(loaded), "f").data) == loaded
        # with one optimizer step the policy has not moved, whatever is read; the sampler may still disagree
        idle = {drift for drift in DRIFT if any(f"reads_{drift} cannot" in note for note in notes(once))}
        assert idle == set(drifts.split()) & {"live", "step"}
        assert not any("cannot" in note for note in notes(often))
    for sampler in ({"staleness": 1}, {"precision": "bf16"}):
        assert load_run({"objective": "s2t", "rollout": sampler}).optimisation.old_logprobs == "rollout"


def test_a_method_within_another_or_nested_counts() -> None:
    nested = {"name": "within", "outer": "reads_sampler", "inner": ["reads_step", "kl"]}
    loaded = load_run({"objective": ["clip_higher", nested], "optimisation": {"epochs": 2}}).optimisation
    assert (loaded.old_logprobs, loaded.refresh) == ("recompute", "step")


def test_a_penalty_towards_the_old_policy_needs_several_steps() -> None:
    def idle(epochs: int, **settings: str) -> list[str]:
        objective = {"name": "kl", "coefficient": 0.1, **settings}
        return notes(load_run({"objective": objective, "optimisation": {"epochs": epochs}}))

    (said,) = idle(1, anchor="old", estimator="k2")
    assert said.startswith("kl cannot act: ")
    assert idle(2, anchor="old", estimator="k2") == idle(1, anchor="old", estimator="k1") == []
    assert idle(1, anchor="rollout", estimator="k2") == idle(1) == []


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
    assert observe(METHODS.get("reads_sampler")()).reads_drift == {"sampler"}
    assert any(text.startswith("observe_reads_step cannot act: ") for text in notes(beside))
    assert any(text.startswith("mismatch cannot act: ") for text in notes(in_one_step))


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


def test_a_method_is_called_idle_exactly_where_its_policies_are_one() -> None:
    for drift, old, refresh, epochs in itertools.product(DRIFT, get_args(OldLogprobs), ["rollout", "step"], [1, 2]):
        if (old, epochs) == ("live", 2):
            continue  # refused
        loaded = run(drift, old_logprobs=old, refresh=refresh, epochs=epochs)
        assert (loaded.optimisation.old_logprobs, loaded.optimisation.refresh) == (old, refresh)  # what is set stays
        assert run(drift, old_logprobs=old, epochs=epochs).optimisation.old_logprobs == old
        left, right = policies(loaded.optimisation)[drift]
        told = [text for text in notes(loaded) if text.startswith(f"reads_{drift} cannot act: ")]
        assert len(told) == (left == right), (drift, old, refresh, epochs)
