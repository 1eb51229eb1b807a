import re

import pytest


def says(error, text):
    """The block raises exactly this message; a text that ends in ... is its beginning."""
    pattern = f"^{re.escape(text.removesuffix('...'))}"
    return pytest.raises(error, match=pattern if text.endswith("...") else f"{pattern}$")
