"""What a composition means, before anything runs: in words, as a table, and as a card per method."""

from rlstab.explain.card_page import markdown
from rlstab.explain.card_sections import card
from rlstab.explain.catalogue import listing
from rlstab.explain.page import explain, explain_preset, show
from rlstab.explain.table import check

__all__ = ["card", "check", "explain", "explain_preset", "listing", "markdown", "show"]
