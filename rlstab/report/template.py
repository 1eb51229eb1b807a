"""Pages from templates that keep data from becoming markup."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from rlstab.visible import visible


def rendered(template: str, functions: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    """The HTML of a template.

    Args:
        template: its text.
        functions: the functions that it calls.
        context: its data; every string that is not Markup is escaped.
    """
    return _compiled(template).render({**functions, **context})


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_visible)
    return environment.from_string(template)


def _visible(value: Any) -> Any:
    """Make characters visible that would control the page or hide in it; the page's own parts are Markup."""
    return visible(value, spaces=False) if isinstance(value, str) and not isinstance(value, Markup) else value
