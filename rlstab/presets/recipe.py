"""What a preset is, and the clip that most recipes begin with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstab.core.compose import Composition
from rlstab.stages import STAGES
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.stage import Stage


@dataclass(frozen=True)
class Preset:
    """One recipe.

    Attributes:
        objective: its loss.
        estimator: the stage that makes the advantages, with its defaults.
        about: what it is, one sentence.
        sources: ``method.setting`` to where the value comes from, for every setting of the objective and the stages.
        stages: what it does outside the loss, apart from the estimator.
    """

    objective: Composition
    estimator: str
    about: str
    sources: Mapping[str, str] = field(repr=False)
    stages: tuple[Stage, ...] = ()

    @property
    def pipeline(self) -> Pipeline:
        """What it does outside the loss."""
        return Pipeline.of(*self.stages, STAGES.get(self.estimator)())


def clip(low: str, high: str, dual_clip: str = "not in the paper's objective") -> Mapping[str, str]:
    """The sources of the three settings of ``clip_higher``."""
    return {"clip_higher.low": low, "clip_higher.high": high, "clip_higher.dual_clip": dual_clip}


def script(path: str, low: str, high: str, dual_clip: str) -> Mapping[str, str]:
    """The sources of a ``clip_higher`` whose three values are those of one script."""
    return clip(f"{path}: {low}", f"{path}: {high}", f"{path}: {dual_clip}")
