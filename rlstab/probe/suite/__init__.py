"""The probes: each is a bench file whose settings are doses, and a page with what it provokes and what is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rlstab.config import Document
from rlstab.config.user_code import located
from rlstab.errors import UnknownName, did_you_mean

HERE = Path(__file__).parent

#: What a family of methods is expected to tolerate, compared with the base.
Prediction: TypeAlias = Literal["more", "same", "less"]

#: The rows of every map, with their titles: each bench file of the suite has them.
FIXED = {
    "base": "base",
    "no_clip": "no clip",
    "half_lr": "lr/2",
    "quarter_lr": "lr/4",
    "random_mask": "random mask",
    "control": "positive control",
}

#: The probes, in the order of a map.
NAMES = (
    *("step_size", "staleness", "mismatch_bits", "mismatch_noise", "false_symmetric", "false_positives"),
    *("false_negatives", "small_groups", "sparse", "switch", "spurious", "mirror"),
)

#: The row of the policy before training. It is measured at the first dose alone.
START = "start"


@dataclass(frozen=True)
class Probe:
    """One instability that is provoked by construction, with a dial.

    Attributes:
        name: of its bench file; behind the model and a hyphen where that is another than the small one.
    """

    name: str

    @cached_property
    def bench(self) -> Mapping[str, Any]:
        """What its bench file says, with paths that are absolute."""
        data: Mapping[str, Any] = located(Document.read(HERE / f"{self.name}.yaml")).data
        return data

    @cached_property
    def _page(self) -> tuple[Mapping[str, Any], str]:
        """Those of another model have one page together."""
        model, _, own = self.name.rpartition("-")
        path = HERE / f"{model or own}.md"
        _, head, text = path.read_text(encoding="utf-8").split("---\n", 2)
        data = Document.parse(head, path.name).data
        return data[own] if model else data, text

    @property
    def doses(self) -> tuple[str, ...]:
        """From harmless to fatal."""
        return tuple(self.bench["settings"])

    @property
    def quick_doses(self) -> tuple[str, ...]:
        """The first, about what the base tolerates, and about twice that; all of them on another model."""
        return tuple(self._page[0].get("quick", self.doses))

    @property
    def dial(self) -> str:
        """What a dose is."""
        return str(self._page[0]["dial"])

    @property
    def text(self) -> str:
        """The page, as Markdown."""
        return self._page[1]

    def predictions(self, policy: str = "trainer") -> Mapping[str, Prediction]:
        """By row, method, or what methods address; those of the sampler's policy where they are others come first."""
        head = self._page[0]
        own: Mapping[str, Prediction] = head.get("sampler", {}) if policy == "sampler" else {}
        return {**own, **{kind: told for kind, told in head["predictions"].items() if kind not in own}}

    def prediction(self, row: str, kinds: Sequence[str], policy: str = "trainer") -> Prediction | None:
        """The first that is for a row, or for one of the methods in it, or for what they address."""
        return next((told for kind, told in self.predictions(policy).items() if kind in (row, *kinds)), None)


def probes(names: Sequence[str] = (), model: str | None = None) -> list[Probe]:
    """Probes by name; all without names.

    Args:
        names: of them.
        model: on which they run; None is the small one.

    Raises:
        UnknownName: there is no such probe, or none on this model.
    """
    before = "" if model is None else f"{model}-"
    models = sorted({path.stem.partition("-")[0] for path in HERE.glob("*-*.yaml")})
    if model is not None and model not in models:
        raise UnknownName(f"--model {model}: no probe runs on it. {did_you_mean(model, models)}")
    known = [name for name in NAMES if (HERE / f"{before}{name}.yaml").is_file()]
    for name in names:
        if name not in known:
            raise UnknownName(f"--probe {name}: there is no such probe. {did_you_mean(name, known)}")
    return [Probe(f"{before}{name}") for name in dict.fromkeys(names) or known]
