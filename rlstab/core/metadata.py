"""What a class says about itself, for its card, ``rlstab explain`` and the laws."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rlstab.core.method_settings import Spelled

#: Sources of instability by name; a method names those that it is meant to counter.
SOURCES: Mapping[str, str] = {
    "token": "single tokens whose gradient is out of proportion: rare, spurious or already certain",
    "trust region": "several optimizer steps on one rollout: the policy moves away from the data",
    "sample": "responses that should count less than others: stale, truncated or of the wrong sign",
    "exploration": "entropy that collapses, and with it exploration",
    "length": "responses of different lengths that share one divisor",
    "reference": "a reward that does not measure everything: what it does not measure drifts",
    "off-policy": "a sampler that differs from the policy: different kernels or precision, older weights",
}

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class NoOpAt(Spelled):
    """Where a method is the identity: it changes no loss and no gradient.

    Attributes:
        settings: a method with these values is the identity, whatever its other settings are, and they fit any other
            settings. Empty: it always is. None: no setting makes it so, but some optimizer steps do.
        why: the reason, one sentence without its full stop.
    """

    settings: Mapping[str, Any] | None
    why: str

    def at(self, method: Owner) -> Owner:
        """The method with these settings."""
        return dataclasses.replace(method, **(self.settings or {}))  # type: ignore[type-var]  # a dataclass

    def reached(self, method: object) -> bool:
        """Whether the settings of a method, and not only an optimizer step, make it the identity."""
        return self.settings is not None and all(
            getattr(method, name) == value for name, value in self.settings.items()
        )


@dataclass(frozen=True)
class IdleSign(Spelled):
    """A metric by which a run shows that a method never acted.

    Attributes:
        metric: the name of the metric, without that of the method.
        why: what it shows, with settings in braces.
        at: 0, above which it never rose, or 1, below which it never fell.
    """

    metric: str
    why: str
    at: Literal[0, 1] = 0


@dataclass(frozen=True)
class About(Spelled):
    """What a method or a stage says about itself; none of it changes the loss.

    Attributes:
        addresses: the sources of instability that it is meant to counter, of :data:`SOURCES`.
        no_op_at: the settings at which it is the identity; the laws check them.
        idle_signs: metrics that show that it never acted, the most telling first; without any, and without a metric
            that is a share of the tokens that it touched, a report cannot tell.
        expects: what it was published with, by name (or a field of Terms that another method fills), each with the
            reason. It works without them, but a warning says that it is then not what its source describes.
        exceptions: laws of :mod:`rlstab.testing` that it does not obey, each with the reason.
    """

    addresses: Set[str] = frozenset()
    no_op_at: tuple[NoOpAt, ...] = ()
    idle_signs: tuple[IdleSign, ...] = ()
    expects: Mapping[str, str] = field(default_factory=dict)
    exceptions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class IdleEvidence:
    """What shows in the record of a run that a method never acted; ``run.json`` holds it for reports.

    Attributes:
        identities: settings with which the method is the identity; see :class:`NoOpAt`.
        bounds: whether it bounds the ratio, whatever its settings are.
        signs: the metrics of the method that tell.
    """

    identities: tuple[Mapping[str, Any], ...] = ()
    bounds: bool = False
    signs: tuple[IdleSign, ...] = ()


def idle_evidence(cls: Any) -> IdleEvidence:
    """The evidence of the class of a method."""
    identities = tuple(limit.settings for limit in cls.about.no_op_at if limit.settings)
    # where `writes` is a property, it depends on settings
    return IdleEvidence(identities, isinstance(cls.writes, Set) and "bounds" in cls.writes, cls.about.idle_signs)


def docstring(cls: type) -> str:
    """The docstring of the class itself, dedented; empty if it has none, as under ``python -OO``."""
    return inspect.cleandoc(cls.__dict__.get("__doc__") or "")


def summary(cls: type) -> str:
    """The first line of the docstring of a class, without its markup."""
    return docstring(cls).partition("\n")[0].replace("``", "")


@dataclass(frozen=True)
class Card:
    """The docstring of a method or a stage, read as sections. Make one with :func:`card`.

    ``docs/hooks/pages.py`` makes the page of the class from it.

    Attributes:
        summary: what the class does, one line.
        sections: text by title, dedented.
    """

    summary: str
    sections: Mapping[str, str]

    def items(self, section: str) -> list[str]:
        """The ``- `` items of a section, each on one line; none without such a section."""
        text = self.sections.get(section, "")
        return [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]

    @property
    def written(self) -> Mapping[str, str]:
        """What a method does with each field of Terms, in sentences that name its settings in double backticks."""
        items = (re.match(r"``(\w+)``: (.+)", item) for item in self.items("Writes"))
        return {item[1]: item[2] for item in items if item}

    @property
    def parameters(self) -> Mapping[str, str]:
        """Each setting: its range, its default, its meaning and the source of the default."""
        items = (re.match(r"``(\w+)``(?: \([^)]+\))?: (.+)", item) for item in self.items("Parameters"))
        return {item[1]: item[2] for item in items if item}

    @property
    def arxiv(self) -> list[str]:
        """Numbers of the papers in the section Source."""
        return list(dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", self.sections.get("Source", ""))))


def card(cls: type) -> Card:
    """The card of a class; without sections if its docstring has none."""
    titled = re.split(r"(?m)^([A-Z]\w+):\n", docstring(cls))
    texts = (re.sub(r"(?m)^    ", "", text).strip("\n") for text in titled[2::2])
    return Card(titled[0].strip(), dict(zip(titled[1::2], texts, strict=True)))
