"""The findings about one run, in sentences and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlstab.console import capital, counted
from rlstab.look.diagnosis import Diagnosis
from rlstab.look.find import Found

if TYPE_CHECKING:  # what only a dump has imports torch
    from rlstab.look.alternatives import Alternatives
    from rlstab.look.gradient import Gradient
    from rlstab.look.host_loss import LossVerdict
    from rlstab.look.sampler import Sampler
    from rlstab.record import Step
    from rlstab.record.token_texts import Decode

#: What a run has lost, by the sign that says so.
HARMS = {
    "reward_fall": "the reward is lost",
    "components": "the reward for the task is lost",
    "held_out": "the held-out score is lost",
    "truncation": "finished answers are lost",
    "entropy_floor": "nothing new is tried",
    "refused_steps": "the first NaN or Inf",
    "no_gradient": "no gradient",
    "zero_std_groups": "no group has a gradient",
    "difficulty": "hardly any group has a gradient",
}
#: What to do with a run that has learnt its prompts.
SOLVED = "Keep the best checkpoint, and stop or go on with harder prompts: groups that are solved have no gradient."


@dataclass
class Look:
    """The findings about one run.

    Attributes:
        found: its log and dump.
        diagnosis: of the log; None if no log can be judged.
        steps: that can be used, of the dump.
        loss: whether the loss was what it said; None without a dump.
        shares: by step, ``(n,)`` signed shares of the gradient.
        gradient, sampler, methods: None if unknown.
        decode: turns ids into text.
    """

    found: Found
    diagnosis: Diagnosis | None
    steps: Sequence[Step] = ()
    loss: LossVerdict | None = None
    gradient: Gradient | None = None
    sampler: Sampler | None = None
    methods: Alternatives | None = None
    decode: Decode | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The finding in a sentence."""
        run = self.diagnosis
        if run and run.first and run.remedy:
            first, harm = run.first.sign, run.first.harm
            later = f"; {HARMS[harm.name]} at {run.log.unit} {harm.step}" if harm is not first else ""
            return f"{capital(run.remedy.title)}, from {run.log.unit} {first.step} on{later}."
        if self.loss is not None and self.loss.agrees is False:
            return "The loss is not what the trainer says."
        if run is None:
            return "The log holds nothing that can be judged."
        if not run.looked_at and not run.observations:
            return "Nothing could be judged."
        calm = "Nothing hurt this run" if run.observations else "Nothing found"
        head = "This run is solved" if run.solved else calm
        return f"{head}: {run.outcome}." if run.outcome else f"{head}."

    @property
    def checked(self) -> str:
        """How many signs were looked for, and how many are present; empty without a log."""
        run = self.diagnosis
        if run is None:
            return ""
        signs = counted(len(run.fired) + len(run.looked_at), "sign")
        few = any("needed" in sign.text for sign in run.unseen)
        reason = "metrics not logged, or too few lines" if few else "metrics not logged"
        unseen = f"; {len(run.unseen)} not checked ({reason})" if run.unseen else ""
        return f"{signs} checked, {len(run.fired) or 'none'} found{unseen}."

    @property
    def advice(self) -> list[str]:
        """What to do: against the cause, or with a run that is solved; empty if nothing asks for a change."""
        if self.diagnosis is None:
            return []
        if remedy := self.diagnosis.remedy:
            return [remedy.first]
        return [SOLVED] if self.diagnosis.solved else []

    @property
    def lead(self) -> list[str]:
        """The other findings, a sentence each."""
        return [
            *([self.checked] if self.checked else []),
            *([self.loss.sentence] if self.loss else []),
            *([f"Sampler and trainer: {self.sampler.sentence}"] if self.sampler else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """The record for machines: that of the diagnosis, and what the dump says."""
        told: dict[str, Any] = {} if self.diagnosis is None else self.diagnosis.as_json()
        told |= {"run": self.found.title, "cause": told.get("cause"), "step": told.get("step"), "notes": self.notes}
        told["signs"] = told.get("signs", [])
        if self.loss is not None:
            told["loss"] = {"name": self.loss.name, "agrees": self.loss.agrees, "findings": list(self.loss.findings)}
        if self.sampler is not None:
            told["sampler"] = {
                "gap": self.sampler.gap,
                "engine_gap": self.sampler.engine,
                "mean_weight": self.sampler.mean_weight,
                "lags": [
                    {
                        "updates": lag.updates,
                        "gap": lag.gap,
                        "tokens": lag.tokens,
                        "staleness": self.sampler.staleness(lag),
                    }
                    for lag in self.sampler.lags
                ],
                "corrections": self.sampler.corrections,
                "lengths": list(self.sampler.lengths),
            }
        if self.methods is not None:
            told["turns"] = [
                {"name": row.name, "joins": row.joins, "turn": row.turn, "length": row.length, **row.actions}
                for row in self.methods.rows
            ]
            told["left_out"] = dict(self.methods.left_out)
        return told
