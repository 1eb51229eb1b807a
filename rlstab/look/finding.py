"""The findings about one run, in sentences and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstab.bins import Run
from rlstab.console import capital, counted
from rlstab.look.diagnosis import Diagnosis
from rlstab.look.remedies import CAUSES

if TYPE_CHECKING:  # what only a dump has imports torch
    from rlstab.look.alternatives import Alternatives
    from rlstab.look.gradient import Gradient
    from rlstab.look.host_loss import LossVerdict
    from rlstab.look.sampler import Sampler
    from rlstab.record import Dump, Step
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
    """One run: what was found of it, and what that says.

    Attributes:
        path: the path where it was found.
        title: its name for the reader.
        log: its curves; without a log, those of the recorded optimizer steps.
        diagnosis: what the log shows.
        dump: its recorded optimizer steps; None if there are none.
        dump_path: folder or file of the dump, where one is looked for.
        notes: what is missing and how to get it, and what could not be read.
        steps: those of the dump that can be used.
        loss: whether the loss was what it said; None without a dump.
        gradient, sampler, methods: None if unknown.
        decode: turns ids into text.
    """

    path: Path
    title: str
    log: Run
    diagnosis: Diagnosis
    dump: Dump | None
    dump_path: Path
    notes: list[str]
    steps: Sequence[Step] = ()
    loss: LossVerdict | None = None
    gradient: Gradient | None = None
    sampler: Sampler | None = None
    methods: Alternatives | None = None
    decode: Decode | None = None

    @property
    def head(self) -> str:
        """The finding in a sentence."""
        run = self.diagnosis
        if run.first and run.remedy:
            first, harm = run.first.sign, run.first.harm
            later = f"; {HARMS[harm.name]} at {run.log.unit} {harm.step}" if harm is not first else ""
            return f"{capital(run.remedy.title)}, from {run.log.unit} {first.step} on{later}."
        if self.loss is not None and self.loss.agrees is False:
            return "The loss is not what the trainer says."
        if not run.looked_at and not run.observations:
            return "Nothing could be judged."
        calm = "Nothing hurt this run" if run.observations else "Nothing found"
        head = "This run is solved" if run.solved else calm
        return f"{head}: {run.outcome}." if run.outcome else f"{head}."

    @property
    def checked(self) -> str:
        """How many signs were looked for, and how many are present."""
        run = self.diagnosis
        signs = counted(len(run.fired) + len(run.looked_at), "sign")
        short = any("needed" in sign.text for sign in run.unseen)
        reason = "metrics not logged, or too few lines" if short else "metrics not logged"
        unseen = f"; {len(run.unseen)} not checked ({reason})" if run.unseen else ""
        return f"{signs} checked, {len(run.fired) or 'none'} found{unseen}."

    @property
    def advice(self) -> list[str]:
        """What to do: against the cause, or with a run that is solved; empty if nothing asks for a change."""
        if remedy := self.diagnosis.remedy:
            return [remedy.first]
        return [SOLVED] if self.diagnosis.solved else []

    @property
    def lead(self) -> list[str]:
        """The other findings, a sentence each."""
        return [
            self.checked,
            *([self.loss.sentence] if self.loss else []),
            *([f"Sampler and trainer: {self.sampler.sentence}"] if self.sampler else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """The record for machines; see docs/how-to/diagnose.md."""
        run, remedy = self.diagnosis, self.diagnosis.remedy
        record: dict[str, Any] = {
            "run": self.title,
            "writer": self.log.writer,
            "unit": self.log.unit,
            "steps": self.log.rollouts,
            "metrics": dict(self.log.names),
            "cause": run.first.cause if run.first else None,
            "title": remedy.title if remedy else None,
            "step": run.first.sign.step if run.first else None,
            "harm": {"sign": run.first.harm.name, "step": run.first.harm.step} if run.first else None,
            "solved": run.solved,
            "outcome": run.outcome,
            "observations": [
                {"sign": sign.name, "cause": CAUSES[sign.name], "step": sign.step} for sign in run.observations
            ],
            "signs": [{"sign": sign.name, "step": sign.step, "text": sign.text} for sign in run.fired],
            "looked_at": [{"sign": sign.name, "text": sign.text} for sign in run.looked_at],
            "unseen": [{"sign": sign.name, "why": sign.text} for sign in run.unseen],
            "methods": list(remedy.methods) if remedy else [],
            "stages": list(remedy.stages) if remedy else [],
            "settings": {host: list(names) for host, names in remedy.settings.items()} if remedy else {},
            "evidence": [
                {"method": method, "figures": [*map(dataclasses.asdict, figures)]}
                for method, figures in (remedy.evidence if remedy else ())
            ],
            "remarks": list(run.remarks),
            "notes": self.notes,
        }
        if self.loss is not None:
            record["loss"] = {"name": self.loss.name, "agrees": self.loss.agrees, "findings": list(self.loss.findings)}
        if (sampler := self.sampler) is not None:
            record["sampler"] = {
                "gap": sampler.gap,
                "engine_gap": sampler.engine,
                "mean_weight": sampler.mean_weight,
                "lags": [
                    {"updates": lag.updates, "gap": lag.gap, "tokens": lag.tokens, "staleness": sampler.staleness(lag)}
                    for lag in sampler.lags
                ],
                "corrections": sampler.corrections,
                "lengths": list(sampler.lengths),
            }
        if self.methods is not None:
            record["turns"] = [
                {"name": row.name, "joins": row.joins, "turn": row.turn, "length": row.length, **row.actions}
                for row in self.methods.rows
            ]
            record["left_out"] = dict(self.methods.left_out)
        return record
