"""Pages and texts from templates: a page is one HTML file that loads nothing, and data in it stays text."""

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from rlstab.visible import visible

#: Characters that could end a script element, open a comment in it, or end a line in older scripts.
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def rendered(name: str, context: Mapping[str, Any], *, style: str = "", libraries: Sequence[str] = ()) -> str:
    """The HTML of a page.

    Args:
        name: the name of its template in the package, such as ``look/look.html``, which extends ``page/frame.html``.
            Style sheet and script of the same name are added to the shared ones.
        context: data and functions of the template; every string that is not Markup is escaped. Its ``numbers`` are
            what the script of the page reads; a page without any has no script.
        style: more style, before all other.
        libraries: digests of scripts that the page's script adds to it; see :func:`digest`.
    """
    stem = name.removesuffix(".html")
    styles = [style, *(resource(f"{part}.css") for part in ("page/page", stem))]
    scripts = "".join(resource(f"{part}.js") for part in ("page/page", stem)) if context["numbers"] else ""
    shared = {
        "style": Markup("\n".join(styles)),
        "script": Markup(scripts),
        # scripts run only by their digest, which a script in the data lacks
        "digests": [*libraries, *([digest(scripts)] if scripts else [])],
    }
    return _environment().get_template(name).render({**context, **shared})


def text_of(name: str, context: Mapping[str, Any], **filters: Callable[[Any], str]) -> str:
    """A text that is not HTML, from a template in the package; its filters escape what needs it."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= filters
    return environment.from_string(resource(name)).render(context)


@cache
def resource(name: str) -> str:
    """The text of a file of the package."""
    return (resources.files("rlstab") / name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(resource)
    return jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_visible, loader=loader, trim_blocks=True
    )


def _visible(value: Any) -> Any:
    """Make characters visible that would control the page or hide in it; the page's own parts are Markup."""
    return visible(value, spaces=False) if isinstance(value, str) and not isinstance(value, Markup) else value


def digest(text: str) -> str:
    """What a content policy calls a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@lru_cache(2)  # the library is that of every page
def packed(text: str) -> Markup:
    """A text for a page that unpacks it: gzip in base64, a third as long and the same at each call."""
    return Markup(base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode())


def safe_json(data: Any) -> str:
    """JSON for a ``<script>`` element, which nothing in it can end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.translate(_UNSAFE)
