"""The pages of methods and stages: their docstrings as Markdown, with what their classes declare, and an index."""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs.hooks.pictures import KINDS as PICTURE_KINDS
from docs.hooks.pictures import Picture, method_of, picture, settings_in_words
from rlstab.config import validation
from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import walk
from rlstab.core.metadata import SOURCES, NoOpAt, card
from rlstab.core.method import Method
from rlstab.core.method_settings import settings_of
from rlstab.core.objective import Leaf, TokenObjective
from rlstab.core.terms import SLOTS, WRITABLE
from rlstab.explain.costs import COSTS, YOURS
from rlstab.explain.stages import KINDS
from rlstab.hosts import adapted
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.stages.response_batch import EVIDENCE
from rlstab.stages.stage import Stage
from rlstab.zoo import METHODS
from tests.examples import EXAMPLES, STAGE_EXAMPLES

#: Two fields of Terms that no composition has both: each is a surrogate.
RIVALS = ("surrogate", "bounds")
#: Where a method acts, by the fields of Terms that it fills; one that fills none reports a number of the step.
PLACES: Mapping[str, frozenset[str]] = {
    "ratio and trust region": frozenset({"support", "ratio", "bounds", "surrogate", "gates"}),
    "which tokens count": frozenset({"keep", "weight", "unclipped"}),
    "advantage": frozenset({"bonus"}),
    "penalty": frozenset({"penalties"}),
    "divisor": frozenset({"aggregate"}),
    "whole step": frozenset({"lr_scale"}),
}
#: What Markdown would take for emphasis, a tag or an escape; in ``2 * 3``, ``a_t`` and ``a < b`` it takes nothing.
_MISREAD = re.compile(r"\\|\*(?! )|(?<! )\*|(?<![^\W_])_|_(?![^\W_])|<(?=[\w/!?])")


def methods() -> list[type[TokenObjective]]:
    """The methods of rlstab itself, by name; those of other packages have pages of their own."""
    return [cls for cls in map(METHODS.get, METHODS.names()) if cls.__module__.startswith("rlstab.")]


def stages() -> list[type[Stage]]:
    """The stages of rlstab itself, by name."""
    return [cls for cls in map(STAGES.get, STAGES.names()) if cls.__module__.startswith("rlstab.")]


class Links(dict[str, str]):
    """Where the page of each method and stage is, by its name, as seen from one of the two folders."""

    def __init__(self, here: str) -> None:
        for folder, classes in (("methods", methods()), ("stages", stages())):
            way = "" if folder == here else f"../{folder}/"
            self.update({cls.name: f"{way}{cls.name}.md" for cls in classes})

    def without(self, name: str) -> Mapping[str, str]:
        """For the page of that name, which does not link to itself."""
        return {other: where for other, where in self.items() if other != name}


# -- docstrings as Markdown --------------------------------------------------------------------------------------------


def inline(text: str, links: Mapping[str, str]) -> str:
    """Text of a docstring: links to arXiv and to other pages, and nothing that Markdown would misread."""
    pieces = []
    for place, piece in enumerate(re.split("``?", text)):
        if place % 2:
            pieces.append(f"[`{piece}`]({links[piece]})" if piece in links else f"`{piece}`")
        else:
            plain = _MISREAD.sub(r"\\\g<0>", piece)
            pieces.append(re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", plain))
    return "".join(pieces)


def prose(text: str, links: Mapping[str, str]) -> str:
    """A section of a docstring: formulas and examples as blocks of code, the rest as it is."""

    def kind(paragraph: str) -> str:
        return "pycon" if paragraph.startswith(">>> ") else "text" if paragraph.startswith("    ") else ""

    pieces = []
    for language, paragraphs in itertools.groupby(re.split(r"\n\n+", text), kind):
        if language:
            code = inspect.cleandoc("\n\n".join(paragraphs))
            pieces.append(f"```{language}\n{code}\n```")
        else:  # a list begins after an empty line
            texts = (inline(paragraph, links) for paragraph in paragraphs)
            pieces += [text if text.startswith("- ") else text.replace("\n- ", "\n\n- ", 1) for text in texts]
    return "\n\n".join(pieces)


def listed(items: Iterable[str]) -> str:
    """Items as a list, or that there is none."""
    return "\n".join(f"- {item}" for item in items) or "none"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def names(several: Iterable[str]) -> str:
    """Names in double backticks, as in a docstring: "a, b and c"."""
    *first, last = [f"``{name}``" for name in several] or ["none that ships"]
    return f"{', '.join(first)} and {last}" if first else last


# -- what classes declare ----------------------------------------------------------------------------------------------


def written(cls: type[TokenObjective]) -> frozenset[str]:
    """The fields of Terms that a method may fill, under any of its settings."""
    return frozenset().union(*(method.writes for method in EXAMPLES[cls.name]))


def writers(field: str) -> list[str]:
    """The methods that may fill a field of Terms."""
    return [cls.name for cls in methods() if field in written(cls)]


def whom(key: str) -> str:
    """A method, or the methods that may fill a field."""
    return f"a method with {key} ({names(writers(key))})" if key in WRITABLE else f"``{key}``"


def excluded(cls: type[TokenObjective]) -> dict[str, str]:
    """With which methods or fields a method cannot be composed, under any of its settings, and why."""
    return {key: why for method in EXAMPLES[cls.name] for key, why in method.excludes.items()}


def interacts(cls: type[TokenObjective]) -> Iterator[tuple[str, str]]:
    """Title and sentence: what it cannot be composed with, and what it was published with."""
    writes = written(cls)
    for slot in SLOTS:
        rivals = [name for name in writers(slot) if name != cls.name]
        if slot in writes and rivals:
            yield "Conflict", f"{names(rivals)} can define the {slot} as well; only one method of a composition may."
    for field, rival in (RIVALS, RIVALS[::-1]):
        if field in writes:
            yield "Conflict", f"no method with {rival} next to it: {names(writers(rival))}. Both are trust regions."
    for key, why in excluded(cls).items():
        yield "Conflict", f"{whom(key)}: {why}"
    for other in methods():
        for key, why in excluded(other).items():
            if other is not cls and (key == cls.name or key in writes):
                yield "Conflict", f"``{other.name}``: {why}"
    for key, why in cls.about.expects.items():
        yield "Published with", f"{whom(key)}: {why}"


def limit(cls: type[TokenObjective], declared: NoOpAt) -> str:
    """Where a method does nothing, and why."""
    settings = ", ".join(f"{name}={value!r}" for name, value in (declared.settings or {}).items())
    return f"``{cls.__name__}({settings})``: {declared.why}" if settings else declared.why


def stage_interacts(cls: type[Stage]) -> Iterator[tuple[str, str]]:
    """The same of a stage."""
    for name, why in cls.excludes.items():
        yield "Conflict", f"``{name}``: {why}"
    for other in stages():
        for name in {cls.name, cls.kind} & other.excludes.keys():
            yield "Conflict", f"``{other.name}``: {other.excludes[name]}"
    for name, why in cls.about.expects.items():
        yield "Published with", f"``{name}``: {why}"


def presets_with(name: str) -> str:
    """The presets in which a method or a stage is."""
    naming = [
        preset
        for preset, recipe in PRESETS.items()
        if name in {recipe.estimator, *(stage.name for stage in recipe.stages)}
        or name in {leaf.name for leaf in walk(recipe.objective)}
    ]
    return ", ".join(f"`{preset}`" for preset in naming) or "none"


def yaml_of(cls: type[Method[Any]]) -> str:
    """How it is listed in a run file, with what has no default."""
    required = [key.name for key in settings_of(cls) if key.default is dataclasses.MISSING]
    return f"`{{{', '.join([f'name: {cls.name}', *(f'{name}: ...' for name in required)])}}}`"


def at_the_data_level(cls: type[TokenObjective]) -> str:
    """What becomes of it where only a mask and advantages reach the loss."""
    refused = next(
        (what for method in EXAMPLES[cls.name] if (what := adapted("data").refuses(method)) is not None), None
    )
    return "exact" if refused is None else f"refused: {refused}"


def costs(method: Method[Any]) -> str:
    """What it reads, keeps and costs at its settings."""
    told = (
        [f"reads {', '.join(f'`{name}`' for name in sorted(method.needs - BASICS))}"] if method.needs - BASICS else []
    )
    told += [f"state {', '.join(f'`{key}`' for key in method.init_state())}"] if method.init_state() else []
    if isinstance(method, TokenObjective):
        evidence = [f"{name}: {COSTS['signals'].get(name, YOURS)}" for name in sorted(method.needs - BASICS)]
        told += [line for line in evidence if ": free" not in line]
        told += [f"live {name}: {COSTS['live'].get(name, YOURS)}" for name in sorted(method.live_needs)]
        told += [COSTS["drift"][drift] for drift in sorted(method.reads_drift) if drift in COSTS["drift"]]
    return "; ".join(told) or "nothing"


def names_elsewhere() -> str:
    """What settings of other libraries are called here, from the table that errors answer with."""
    text = (Path(validation.__file__).parent / "other_names.yaml").read_text(encoding="utf-8")
    libraries = yaml.safe_load(text)["settings"]
    rows = [
        [library, f"`{name}`", said if said.endswith(".") else f"`{said}`"]
        for library, names in libraries.items()
        for name, said in names.items()
    ]
    return table(["library", "there", "here"], rows)


# -- pages -------------------------------------------------------------------------------------------------------------


def method_page(cls: type[TokenObjective], links: Links, shown: Picture) -> str:
    """The page of a method."""
    facts = {
        "Python": f"`from rlstab import {cls.__name__}`",
        "YAML": yaml_of(cls),
        "Presets": presets_with(cls.name),
        "[Data level](../hosts/data.md)": at_the_data_level(cls),
    }
    picture_of_it = (
        f"![What {cls.name} does](pictures/{cls.name}.svg){{.drawing}}\n\n"
        f"*Made with {settings_in_words(shown.method)}. {shown.caption}*"
    )
    declared = {
        "Interacts": [f"**{title}:** {text}" for title, text in interacts(cls)],
        "Limits": [limit(cls, case) for case in cls.about.no_op_at],
    }
    return _page(cls, links, facts, picture_of_it, declared)


def stage_page(cls: type[Stage], links: Links) -> str:
    """The page of a stage."""
    facts = {
        "Acts on": cls.kind,
        "Python": f"`from {cls.__module__} import {cls.__name__}`",
        "YAML": yaml_of(cls),
        "Presets": presets_with(cls.name),
    }
    declared = {"Interacts": [f"**{title}:** {text}" for title, text in stage_interacts(cls)]}
    return _page(cls, links, facts, "", declared)


def _page(
    cls: type[Method[Any]], links: Links, facts: Mapping[str, str], shown: str, declared: dict[str, list[str]]
) -> str:
    """The sections of the docstring; what the class declares stands with them, or before the example."""
    known, beside = card(cls), links.without(cls.name)
    declared["Laws that it does not obey"] = [f"**{law}:** {why}" for law, why in cls.about.exceptions.items()]
    pieces = [f"# `{cls.name}` · `{cls.__name__}`", f"**{inline(known.summary, beside)}**"]
    pieces.append(listed(f"**{fact}:** {value}" for fact, value in facts.items()))
    pieces += [shown] if shown else []
    titles = list(known.sections)
    for title in declared:
        if title not in titles and declared[title]:
            titles.insert(titles.index("Example"), title)
    for title in titles:
        pieces.append(f"## {title}")
        if title in known.sections:
            pieces.append(prose(known.sections[title], beside))
        if declared.get(title):
            pieces.append(listed(_headed(item, beside) for item in declared[title]))
    return "\n\n".join(pieces) + "\n"


def _headed(item: str, links: Mapping[str, str]) -> str:
    """An item with its title in bold, which is Markdown already."""
    title, mark, text = item.partition(":** ") if item.startswith("**") else ("", "", item)
    return f"{title}{mark}{inline(text, links)}"


def method_index(links: Links, drawn: list[TokenObjective]) -> str:
    """All methods: against what each is, what it needs, what cannot be composed, and the presets."""
    wide = "---\nhide: [toc]\n---\n\n"
    by_source = []
    for source, about in {**SOURCES, "": "none of these"}.items():
        here = [cls for cls in methods() if source in cls.about.addresses or not (source or cls.about.addresses)]
        if here:
            cells = []
            for place, fields in PLACES.items():
                acting = [
                    cls.name for cls in here if fields & written(cls) or (place == "whole step" and not written(cls))
                ]
                cells += [f"{place}: {', '.join(inline(f'``{name}``', links) for name in acting)}"] if acting else []
            by_source.append([f"**{source}**<br>{about}" if source else about, "<br>".join(cells)])
    rows = [
        [
            inline(f"``{method.name}``", links),
            inline(card(type(method)).summary, links.without(method.name)),
            costs(method),
        ]
        for method in drawn
    ]
    data_level: dict[str, list[str]] = {}
    for cls in methods():
        data_level.setdefault(at_the_data_level(cls), []).append(cls.name)
    conflicts = [f"**one {slot}:** {names(writers(slot))}." for slot in SLOTS]
    conflicts += ["**surrogate or bounds:** a surrogate replaces the ratio, and bounds are a trust region of it."]
    conflicts += [
        f"**``{cls.name}`` and {whom(key)}:** {why}" for cls in methods() for key, why in excluded(cls).items()
    ]
    pieces = [
        f"{wide}# All methods",
        "One page each, made from the class. The [gallery](gallery.md) shows what each does to tokens.",
        "## What each is against",
        "And where it acts. One that is against several sources of instability stands in several rows.",
        table(["source", "methods"], by_source),
        "## What each does and needs",
        "What it reads beyond log-probs and advantages, its state, and what it costs in rlstab's trainer, at the "
        "settings of its picture.",
        table(["method", "what it does to tokens", "needs"], rows),
        "The signals; live means that a penalty differentiates it:",
        listed(f"`{name}`: {what}" for name, what in SIGNALS.items()),
        "## What cannot be composed",
        "Every other pair composes, in any order. What composes and may surprise is on the page of each method, under "
        "*Interacts*.",
        listed(inline(text, links).replace("\\*\\*", "**") for text in conflicts),
        "## At the data level",
        "What becomes of each where [only a mask and advantages](../hosts/data.md) reach the loss.",
        listed(f"{says}: {inline(names(which), links)}." for says, which in sorted(data_level.items())),
        "## Presets",
        "With every setting. The source of each value is in `rlstab/presets/presets.yaml`.",
        listed(
            f"**`{name}`**: {inline(recipe.about, links)} Advantage `{recipe.estimator}`."
            + "".join(f"\n    - {_placed(leaf, links)}" for leaf in walk(recipe.objective))
            for name, recipe in PRESETS.items()
        ),
    ]
    return "\n\n".join(pieces) + "\n"


def _placed(leaf: Leaf, links: Mapping[str, str]) -> str:
    """A method of a preset with its settings, and where it acts."""
    settings = ", ".join(f"`{key.name}` {getattr(leaf.method, key.name)}" for key in settings_of(type(leaf.method)))
    place = f" within {', '.join(f'`{outer.name}`' for outer in leaf.around)}" if leaf.around else ""
    return f"{inline(f'``{leaf.name}``', links)}{place}{': ' if settings else ''}{settings}"


def gallery(pictures: list[Picture], links: Links) -> str:
    """All methods at a glance: their small pictures by kind, each a link to its page."""
    pieces = [
        "---\nhide: [toc]\n---\n\n# Gallery",
        "What each method does to tokens, made by running it: curves by differentiating its loss, clouds by what it "
        "asks for on one optimizer step that is the same for all. A picture leads to the page of the method, where it "
        "is larger, with a legend and with the settings.",
    ]
    for kind, (title, about) in PICTURE_KINDS.items():
        cells = [
            f"[![{name}](pictures/{name}-small.svg){{.drawing}} {name}]({links[name]})"
            for shown in pictures
            if shown.kind == kind and (name := shown.method.name)
        ]
        pieces += [f"## {title}", about, '<div class="gallery" markdown>\n' + "\n".join(cells) + "\n</div>"]
    return "\n\n".join(pieces) + "\n"


def stage_index(links: Links) -> str:
    """All stages in the order of a rollout."""
    pieces = [
        "---\nhide: [toc]\n---\n\n# All stages",
        "What acts outside the loss; the [methods](../methods/index.md) act in it. A rollout runs through the four "
        "kinds in the order of this page. [Stages](../stages.md) says how they work, and how to write your own; "
        "[what was left out](../concepts/left-out.md) says why.",
    ]
    for kind, (_, about) in KINDS.items():
        rows = [
            [
                inline(f"``{cls.name}``", links),
                inline(card(cls).summary, links.without(cls.name)),
                costs(STAGE_EXAMPLES[cls.name][0]),
            ]
            for cls in stages()
            if issubclass(cls, kind)
        ]
        pieces += [f"## {about[0].upper()}{about[1:]}", table(["stage", "what it does", "needs"], rows)]
    clashes = [
        inline(f"``{cls.name}`` and ``{name}``: {why}", links) for cls in stages() for name, why in cls.excludes.items()
    ]
    pieces += [
        "## What cannot act together",
        "Two stages of a kind that a run has once: selectors and estimators. And:",
        listed(clashes),
        "## Evidence",
        "The basics are rewards, lengths, whether a response ended, its prompt, its group, and where it branches from. "
        "Beyond them a stage may need a [signal of tokens](../methods/index.md), or:",
        listed(f"`{name}`: {what}" for name, (_, what) in EVIDENCE.items()),
    ]
    return "\n\n".join(pieces) + "\n"


def all_pages() -> tuple[dict[str, str], list[Picture]]:
    """Every generated page by its address, and the pictures of methods."""
    here, there = Links("methods"), Links("stages")
    pictures = [picture(method_of(cls)) for cls in methods()]
    texts = {f"methods/{shown.method.name}.md": method_page(type(shown.method), here, shown) for shown in pictures}
    texts["methods/index.md"] = method_index(here, [shown.method for shown in pictures])
    texts["methods/gallery.md"] = gallery(pictures, here)
    texts |= {f"stages/{cls.name}.md": stage_page(cls, there) for cls in stages()}
    return {**texts, "stages/index.md": stage_index(there)}, pictures
