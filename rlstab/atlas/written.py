"""All that `rlstab cards` writes: pages, pictures, gallery and map of methods, pages of stages; whether it is fresh."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from pathlib import Path

from rlstab.atlas.drawing import NOTE, large, small
from rlstab.atlas.gallery import gallery
from rlstab.atlas.panel import Picture
from rlstab.atlas.source_map import source_map
from rlstab.atlas.svg import same_drawing
from rlstab.atlas.views import method_of, picture
from rlstab.core.objective import TokenObjective
from rlstab.explain import cards, stage_cards
from rlstab.explain.card_page import MARK
from rlstab.explain.card_sections import CardError
from rlstab.explain.exclusions import shipped
from rlstab.files import is_foreign


def files() -> dict[str, str]:
    """Name within the folder to text: a page and two pictures per method, ``index``, ``gallery`` and ``map``."""
    methods = [method_of(cls) for cls in shipped()]
    drawn = [_drawn(method) for method in methods]
    pictures = [one for one, _ in drawn]
    found = cards.pages({one.name: _shown(one) for one in pictures})
    found |= {"gallery.md": gallery(pictures), "map.md": source_map(methods)}
    for _, both in drawn:
        found |= both
    return found


def stage_files(methods_at: str = "../methods") -> dict[str, str]:
    """Name within the folder to text: a page per stage, and ``index``.

    Args:
        methods_at: the folder of the pages of methods, as seen from this one.
    """
    return stage_cards.pages(methods_at)


@functools.cache
def _drawn(method: TokenObjective) -> tuple[Picture, dict[str, str]]:
    """A method is drawn once in a process."""
    one = picture(method)
    return one, {f"pictures/{one.name}.svg": large(one), f"pictures/{one.name}-small.svg": small(one)}


def _shown(one: Picture) -> str:
    return f"![What {one.name} does](pictures/{one.name}.svg)\n\n*Made with {one.settings}. {one.caption}*"


def write(folder: str | Path, wanted: Mapping[str, str] | None = None) -> None:
    """Write all files, and remove those that this function wrote before and that no method has any more.

    Args:
        folder: where to.
        wanted: text by name; None is :func:`files`.

    Raises:
        CardError: a class has no card, or the folder cannot be written.
    """
    folder, wanted = Path(folder), files() if wanted is None else wanted
    try:
        for path in (folder / name for name in wanted):
            if is_foreign(path, b"rlstab cards"):
                raise CardError(f"{path} exists, is no page of ours, and stays as it is. Give another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        if any(name.startswith("pictures/") for name in wanted):
            (folder / "pictures").mkdir(exist_ok=True)
        for name, text in wanted.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        for name in _orphans(folder, wanted):
            (folder / name).unlink()
    except (OSError, ValueError) as error:  # a name with a null character
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise CardError(f"{folder}: cannot be written: {reason}. Give another folder.") from error


def stale(folder: str | Path, wanted: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with the files in a folder, a line each; nothing when they say what the classes say.

    A picture is fresh where it differs by rounding alone: processors and versions of torch differ in the last bits.

    Args:
        folder: where they are.
        wanted: text by name; None is :func:`files`.

    Raises:
        CardError: a class has no card.
    """
    folder, wanted = Path(folder), files() if wanted is None else wanted
    found = []
    for name, text in wanted.items():
        page = folder / name
        if not page.is_file():
            found.append(f"{page}: is missing.")
            continue
        written = page.read_text(encoding="utf-8", errors="replace")
        if name.endswith(".svg"):
            if not same_drawing(written, text):
                found.append(f"{page}: the picture is not what the class does.")
        elif written != text:
            pairs = itertools.zip_longest(written.split("\n"), text.split("\n"), fillvalue="(nothing)")
            number, (has, should) = next(place for place in enumerate(pairs, 1) if place[1][0] != place[1][1])
            found.append(f"{page}:{number}: {_difference(has, should)}")
    return found + [f"{folder / name}: no method has this name any more." for name in _orphans(folder, wanted)]


def _difference(has: str, should: str) -> str:
    """Both lines around the first character in which they differ."""
    same = next(
        (i for i, (one, other) in enumerate(zip(has, should, strict=False)) if one != other),
        len(min(has, should, key=len)),
    )
    one, other = (
        ("..." if same > 30 else "") + line[max(0, same - 30) : same + 50] + ("..." if len(line) > same + 50 else "")
        for line in (has, should)
    )
    return f"the page says {one!r}, the class {other!r}."


def _orphans(folder: Path, wanted: Collection[str]) -> list[str]:
    """Files that this module wrote and that are not wanted."""
    places = (*folder.glob("*.md"), *folder.glob("pictures/*.svg"))
    others = {path.relative_to(folder).as_posix(): path for path in places}
    return [
        name
        for name, path in sorted(others.items())
        if name not in wanted and _ours(path.suffix, path.read_text(encoding="utf-8", errors="replace"))
    ]


def _ours(suffix: str, text: str) -> bool:
    return text.startswith(MARK) if suffix == ".md" else f"<!-- {NOTE} -->" in text
