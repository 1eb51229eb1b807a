"""Pages from templates that keep data from becoming markup."""

from __future__ import annotations

from collections.abc import Mapping
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
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_visible)
    environment.globals |= functions
    return environment.from_string(template).render(context)


def _visible(value: Any) -> Any:
    """Make characters visible that would control the page or hide in it; the page's own parts are Markup."""
    return visible(value, spaces=False) if isinstance(value, str) and not isinstance(value, Markup) else value
