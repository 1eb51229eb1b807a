"""Whether the hub of models and data sets answers: asked once, before what would try for minutes."""

from __future__ import annotations

import re

#: Seconds in which it must answer.
HUB_WAIT = 5.0


def why_offline() -> str:
    """Why the hub does not answer; empty where it does, or is not to be asked.

    Each file that a loader wants is tried for half a minute; one question is answered or not in a few seconds.
    """
    import huggingface_hub  # not in every installation

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return ""
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_WAIT)
    except Exception as error:  # by proxies and certificates of every kind
        return f"{huggingface_hub.constants.ENDPOINT} cannot be reached: {first_line(error)}"
    return ""


def first_line(error: Exception) -> str:
    """What an error says, in one line without a full stop."""
    text = re.sub(r":\s*\n", ": ", str(error).strip())  # a line that ends in a colon needs the next
    return text.partition("\n")[0].rstrip(" .,") or type(error).__name__
