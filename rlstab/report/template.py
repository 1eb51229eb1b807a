"""Pages from templates, in which data stays data."""

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
        functions: that it calls.
        context: what it shows; every string is escaped that is not Markup.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_visible)
    environment.globals |= functions
    return environment.from_string(template).render(context)


def _visible(value: Any) -> Any:
    """Characters of data that would steer the page or hide in it are shown; the page's own parts are Markup."""
    return visible(value, spaces=False) if isinstance(value, str) and not isinstance(value, Markup) else value
