"""Put a question into the text that surrounds it."""

from rlstab.errors import OutOfRange


class PromptTemplate:
    r"""Text with a placeholder, such as `Q: {question}\nA:`. Other braces stand for themselves.

    Args:
        template: the text.
        placeholder: the name between the braces.

    Raises:
        OutOfRange: if the text has no such placeholder.
    """

    def __init__(self, template: str, placeholder: str) -> None:
        self._template, self._mark = template, f"{{{placeholder}}}"
        if self._mark not in template:
            raise OutOfRange(
                f"`prompt_template` has no {self._mark}, so every prompt would be the same: {template!r}. "
                f"Write {self._mark} where the text of the example belongs."
            )

    @property
    def plain(self) -> bool:
        """Whether it adds nothing."""
        return self._template == self._mark

    def fill(self, text: str) -> str:
        """Return the template with the text in it."""
        # replace, not format: templates hold braces of their own, as in \boxed{}
        return self._template.replace(self._mark, text)
