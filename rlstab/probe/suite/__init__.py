"""The probes: each is a bench file whose settings are doses, and a page on what it provokes and what is predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rlstab.config import Document
from rlstab.config.user_code import located
from rlstab.errors import UnknownName, did_you_mean

HERE = Path(__file__).parent

#: The dose that a family of methods is expected to tolerate, compared with the base.
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
    *("step_size", "staleness", "mismatch_bits", "mismatch_noise", "mismatch_top_p", "false_symmetric"),
    *("false_positives", "false_negatives", "small_groups", "sparse", "switch", "spurious", "mirror"),
)

#: The row of the policy before training, which is measured only at the first dose.
START = "start"


@dataclass(frozen=True)
class Probe:
    """One instability that is provoked by construction, with a dial.

    Attributes:
        name: the name of its bench file; with the model and a hyphen before it on another model than the small one.
    """

    name: str

    @cached_property
    def bench(self) -> Mapping[str, Any]:
        """The content of its bench file, with absolute paths."""
        data: Mapping[str, Any] = located(Document.read(HERE / f"{self.name}.yaml")).data
        return data

    @cached_property
    def _page(self) -> tuple[Mapping[str, Any], str]:
        """Head and text of its page; the probes on another model share one page."""
        model, _, name = self.name.rpartition("-")
        path = HERE / f"{model or name}.md"
        _, head, text = path.read_text(encoding="utf-8").split("---\n", 2)
        data = Document.parse(head, path.name).data
        return data[name] if model else data, text

    @property
    def doses(self) -> tuple[str, ...]:
        """From harmless to fatal."""
        return tuple(self.bench["settings"])

    @property
    def quick_doses(self) -> tuple[str, ...]:
        """The first dose, about the one that the base tolerates, and about twice that; all of them on another model."""
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
        """Predictions by row, method, or the source that methods address; those for the sampler's policy come first."""
        head = self._page[0]
        first: Mapping[str, Prediction] = head.get("sampler", {}) if policy == "sampler" else {}
        return {**first, **{kind: prediction for kind, prediction in head["predictions"].items() if kind not in first}}

    def prediction(self, row: str, kinds: Sequence[str], policy: str = "trainer") -> Prediction | None:
        """The first prediction for a row, for one of its methods, or for a source that they address."""
        return next((score for kind, score in self.predictions(policy).items() if kind in (row, *kinds)), None)


def probes(names: Sequence[str] = (), model: str | None = None) -> list[Probe]:
    """Probes by name; all if no name is given.

    Args:
        names: names of probes.
        model: the model on which they run; None is the small one.

    Raises:
        UnknownName: there is no such probe, or none on this model.
    """
    before = "" if model is None else f"{model}-"
    models = sorted({path.stem.partition("-")[0] for path in HERE.glob("*-*.yaml")})
    if model is not None and model not in models:
        raise UnknownName(f"--model {model}: no probe runs on it. {did_you_mean(model, models)}")
    available = [name for name in NAMES if (HERE / f"{before}{name}.yaml").is_file()]
    for name in names:
        if name not in available:
            raise UnknownName(f"--probe {name}: there is no such probe. {did_you_mean(name, available)}")
    return [Probe(f"{before}{name}") for name in dict.fromkeys(names) or available]
