"""Named compositions: published recipes as far as the loss and the advantage go, each value with its source."""

from collections.abc import Mapping

from rlstab.core.compose import compose, within
from rlstab.errors import UnknownName, did_you_mean
from rlstab.presets.distillation import DISTILLATION
from rlstab.presets.grpo_family import GRPO_FAMILY, JUSTRL_DUAL
from rlstab.presets.off_policy import OFF_POLICY
from rlstab.presets.ratios import RATIOS
from rlstab.presets.recipe import Preset, clip
from rlstab.presets.stacks import STACKS
from rlstab.presets.token_recipes import S2T_SOURCES, STARE_SOURCES, TOKENS
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.stare import STARE
from rlstab.zoo.token_mean import TokenMean

__all__ = ["PRESETS", "Preset", "preset"]

_RECOMMENDED = Preset(
    compose(ClipHigher(low=0.2, high=0.28, dual_clip=10.0), within(S2TMask(), STARE(variant="O1")), TokenMean()),
    "grpo",
    "Our stack: JustRL, spurious tokens dropped, and STARE's boost among the remaining tokens.",
    {**clip("arXiv 2503.14476: 0.2", "arXiv 2503.14476: 0.28", JUSTRL_DUAL), **S2T_SOURCES, **STARE_SOURCES},
)

#: Name to recipe: the family of GRPO, tokens treated otherwise, other ratios, other policies, our own, and stacks.
PRESETS: Mapping[str, Preset] = {
    **GRPO_FAMILY,
    **TOKENS,
    **RATIOS,
    **OFF_POLICY,
    **DISTILLATION,
    "recommended": _RECOMMENDED,
    **STACKS,
}


def preset(name: str) -> Preset:
    """The recipe of this name.

    Raises:
        UnknownName: with the nearest known name.
    """
    if name not in PRESETS:
        raise UnknownName(f"no preset is called '{name}'. {did_you_mean(name, PRESETS)}")
    return PRESETS[name]
