"""What the site needs beyond the pages in docs: methods, stages, the reference, and files elsewhere that are linked to.

A link that leaves docs works on a code host. On the site it leads to a page that shows the file.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from docs.hooks import pages, pictures, probes  # noqa: E402  # mkdocs imports this file by its path
from docs.hooks.comments import Comments  # noqa: E402  # mkdocs imports this file by its path
from rlstab.probe.page import page as map_page  # noqa: E402  # mkdocs imports this file by its path
from tests.conformance import report as conformance  # noqa: E402  # mkdocs imports this file by its path

#: The public modules, with the title of the page of each. Methods and presets have pages of their own.
MODULES = {
    "rlstab": "The core",
    "rlstab.signals": "Signals",
    "rlstab.config": "Configuration",
    "rlstab.train": "Training",
    "rlstab.tasks": "Tasks",
    "rlstab.stages.stage": "Stages",
    "rlstab.testing": "Testing",
    "rlstab.record": "Records",
    "rlstab.explain": "Explaining",
    "rlstab.adapters.trl": "TRL",
    "rlstab.errors": "Errors",
}
#: What a reader of the core looks for first; the rest follows in the order of its `__all__`.
FIRST = (
    "compose",
    "within",
    "observe",
    "preset",
    "load_objective",
    "TokenObjective",
    "TokenBatch",
    "PolicyOutputs",
    "OptimizerStep",
    "make_plan",
    "Plan",
    "LossOutput",
    "Terms",
)
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)((?:#[^)]*)?\))")
#: A page that loads something from another host, and what it loads.
REQUEST = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=\"(https?://[^\"]+)|<link[^>]+rel=\"(?:stylesheet|preconnect|icon)\"[^>]+href=\"(https?://[^\"]+)"
)
#: Where the page of a probe lies, next to its bench file.
PROBES = "rlstab/probe/suite/"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh", ".json": "json"}

#: Where the pages that do not lie in docs come from: address on the site to file of the repository.
elsewhere: dict[str, str] = {}


def address(path: str) -> str:
    """Where a file of the repository, by its path from the root, stands on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    if path.startswith(PROBES) and path.endswith(".md"):
        return f"probes/{path.removeprefix(PROBES)}"
    if (ROOT / path).is_dir():
        raise PluginError(f"a page links to the folder {path}: link to a file in it")
    return f"project/{path}" if path.endswith(".md") else f"source/{path}.md"


def target(link: str, source: str) -> str:
    """The file, from the root of the repository, that a link in a file of it means."""
    return os.path.normpath(Path(source).parent / link)


def shown(path: str) -> str:
    """The text of the page for a file: a document as it is, anything else as a listing."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.startswith(PROBES) and path.endswith(".md"):  # without what only the program reads
        return text.split("---\n", 2)[-1] + probes.outcomes(Path(path).stem)
    if path.endswith(".md"):
        return text
    hidden = "---\nsearch: {exclude: true}\n---\n\n"  # a listing repeats what pages explain, and would come before them
    return f"{hidden}# {path}\n\n``````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}``````\n"


def notebook(place: str) -> dict[str, str | bytes]:
    """The page of a notebook with the outputs that are stored in it, and its pictures, by address."""
    text, resources = MarkdownExporter().from_filename(ROOT / "docs" / place)
    title, _, rest = text.partition("\n")
    link = f"[Download this notebook]({Path(place).name}){{: download }}"
    pictures = {f"{Path(place).parent}/{name}": data for name, data in resources["outputs"].items()}
    return {place.replace(".ipynb", ".md"): f"{title}\n\n{link}\n{rest}", **pictures}


def public(module: str, package: griffe.Module) -> list[str]:
    """Full names of what a module exports, less the methods, which have pages of their own."""
    exporting = package if module == "rlstab" else package[module.removeprefix("rlstab.")]
    names = exporting.exports
    if names is None:
        names = [name for name, member in exporting.members.items() if not member.is_alias and member.is_class]
    full, undocumented = [], []
    for name in sorted(map(str, names), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        member = exporting.members[name]
        real = member.final_target if member.is_alias else member
        if real.is_module or real.path.startswith("rlstab.zoo."):
            continue
        if not real.has_docstring:
            undocumented.append(f"{module}.{name} ({real.filepath})")
        full.append(f"{module}.{name}")
    if undocumented:
        raise PluginError(f"public and without a docstring: {', '.join(undocumented)}")
    return full


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every method, stage and module in the navigation, without naming them a second time."""
    for section in config.nav or []:
        for title, entries in section.items():
            if title == "Methods":
                entries += [{"One by one": [{cls.name: f"methods/{cls.name}.md"} for cls in pages.methods()]}]
                entries += [{"Stages one by one": [{cls.name: f"stages/{cls.name}.md"} for cls in pages.stages()]}]
            if title == "Reference":
                entries += [{"Python": [{title: f"reference/{name}.md"} for name, title in MODULES.items()]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add methods, stages, the reference, and a page for each file outside docs that a page links to."""
    texts, drawings = pages.all_pages()
    for place, text in texts.items():
        files.append(File.generated(config, place, content=text))
    for drawing in drawings:
        for name, svg in pictures.drawn(drawing).items():
            files.append(File.generated(config, f"methods/pictures/{name}", content=svg))
    package = griffe.load("rlstab", search_paths=[str(ROOT)], extensions=griffe.load_extensions(Comments))
    for module, title in MODULES.items():
        text = f"# {title}: `{module}`\n\n" + "".join(f"::: {name}\n\n" for name in public(module, package))
        files.append(File.generated(config, f"reference/{module}.md", content=text))

    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        elsewhere[address(name)] = name
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by] + list(
        elsewhere.values()
    )
    while waiting:
        source = waiting.pop()
        if not source.endswith(".md"):
            continue
        for _, link, _ in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            path = target(link, source)
            if not path.startswith("docs") and path != "README.md" and address(path) not in elsewhere:
                if not (ROOT / path).exists():
                    raise PluginError(f"{source} links to {path}, which does not exist")
                elsewhere[address(path)] = path
                waiting.append(path)
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        for place, content in notebook(file.src_uri).items():
            files.append(File.generated(config, place, content=content))
    for model, name in probes.MAPS.items():
        if probes.drawn(model).columns:
            files.append(File.generated(config, f"probes/{name}", content=map_page(probes.drawn(model))))
    for place, path in elsewhere.items():
        files.append(File.generated(config, place, content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    source = elsewhere.get(here, f"docs/{here}")
    if not source.endswith(".md") or here.startswith(("reference/", "notebooks/")):
        return markdown
    if here == "conformance.md":
        markdown = markdown.replace("<!-- tables -->", "\n".join(conformance.lines()))
    if here == "configuration.md":
        markdown = markdown.replace("<!-- names elsewhere -->", pages.names_elsewhere())
    if here == "results.md" and probes.stated() not in markdown:
        raise PluginError(f"docs/results.md does not say that {probes.stated()}, as the runs that ship do")
    folder = str(Path(here).parent)

    def moved(match: re.Match[str]) -> str:
        path = address(target(match[2], source))
        return f"{match[1]}{os.path.relpath(path, folder)}{match[3]}"

    return LINK.sub(moved, markdown)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would ask another host for anything."""
    for match in REQUEST.finditer(output):
        raise PluginError(
            f"{page.file.src_uri} loads {match[1] or match[2]}: the site makes no requests to other hosts"
        )
    return output
