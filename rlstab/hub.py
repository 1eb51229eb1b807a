"""Whether the hub of models and data sets answers, asked before a loader would retry for minutes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Seconds to wait for an answer.
HUB_WAIT = 5.0


def why_offline() -> str:
    """Why the hub does not answer; empty if it does, or must not be asked.

    A loader tries each file for half a minute, whereas one request takes a few seconds.
    """
    import huggingface_hub  # not in every installation

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return ""
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_WAIT)
    except Exception as error:  # of proxies and certificates, of any kind
        return f"{huggingface_hub.constants.ENDPOINT} cannot be reached: {first_line(error)}"
    return ""


def first_line(error: Exception) -> str:
    """The message of an error, in one line without a full stop."""
    text = re.sub(r":\s*\n", ": ", str(error).strip())  # a line that ends in a colon needs the next
    return text.partition("\n")[0].rstrip(" .,") or type(error).__name__


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Without the progress bars of transformers' logging or of datasets, which would mix with ours and with errors."""
    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()
