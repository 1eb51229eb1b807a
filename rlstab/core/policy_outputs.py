"""The live policy, which is differentiated, for the tokens of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlstab.core.batch import TokenBatch, layout_of, widened
from rlstab.core.method_settings import Spelled
from rlstab.errors import MissingSignal, ShapeError


@dataclass(frozen=True, eq=False)
class PolicyOutputs(Spelled):
    """Outputs of the live policy that are differentiated, ``(n,)`` for the tokens of one batch.

    Attributes:
        logprobs: log-probs of the tokens, nats.
        entropies: entropies, nats, with grad only if a penalty differentiates them.
        log_kept_mass: log of the live policy's mass on the tokens that a min-p filter of the same policy keeps, the
            kept set held constant; read only on the rows that a penalty names.
        log_support_mass: log of the live policy's mass on the tokens that the sampler kept, which
            :meth:`over_support` divides by.
        teacher_divergence: divergence from a teacher's next-token distribution, nats.
    """

    logprobs: Tensor
    entropies: Tensor | None = None
    log_kept_mass: Tensor | None = None
    log_support_mass: Tensor | None = None
    teacher_divergence: Tensor | None = None

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if values is not None and (values.ndim != 1 or values.shape != self.logprobs.shape):
                raise ShapeError(
                    f"PolicyOutputs: '{name}' has shape {tuple(values.shape)}, expected (n,) for all. Use from_padded."
                )

    @classmethod
    def from_padded(cls, batch: TokenBatch, **outputs: Tensor | None) -> PolicyOutputs:
        """Pack live ``(B, T)`` tensors with the index of ``batch``.

        Args:
            batch: the evidence about these tokens.
            outputs: tensors by the names of the class; ``logprobs`` always.

        Raises:
            ShapeError: a tensor does not have the shape that the batch was built from.
        """
        layout, packed = layout_of(batch), dict[str, Any]()
        for name, values in outputs.items():
            if values is not None:
                if values.shape != layout.shape:
                    raise ShapeError(
                        f"PolicyOutputs.from_padded: '{name}' has shape {tuple(values.shape)}, the batch was built "
                        f"from {layout.shape}. Pass the live tensors of the same rows, prompt cut off."
                    )
                packed[name] = widened(values.reshape(-1)[layout.index])
        return cls(**packed)

    def signal(self, name: str) -> Tensor:
        """The live ``(n,)`` output of this name.

        Raises:
            MissingSignal: the policy outputs were built without it.
        """
        values: Tensor | None = getattr(self, name, None)
        if values is None:
            raise MissingSignal(
                f"a method reads the live '{name}', but PolicyOutputs was built without it. Pass {name}= with grad, as "
                f"rlstab.signals.token_signals makes it."
            )
        return values

    def __repr__(self) -> str:
        names = ", ".join(name for name, values in vars(self).items() if values is not None and name != "logprobs")
        return f"PolicyOutputs({self.logprobs.numel()} tokens{'; ' if names else ''}{names})"

    def present(self) -> list[Tensor]:
        """The outputs that are present, by name."""
        return [values for values in vars(self).values() if values is not None]

    def constant(self) -> PolicyOutputs:
        """The anchor: the same values without gradient."""
        return self._each(Tensor.detach)

    def over_support(self) -> PolicyOutputs:
        """The same outputs, with log-probs of the distribution over the tokens that the sampler kept.

        Raises:
            MissingSignal: the policy outputs were built without ``log_support_mass``.
        """
        return replace(self, logprobs=self.logprobs - self.signal("log_support_mass"))

    def select(self, where: Tensor) -> PolicyOutputs:
        """The tokens where the ``(n,)`` bool is True."""
        return self._each(lambda values: values[where])

    def _each(self, change: Callable[[Tensor], Tensor]) -> PolicyOutputs:
        changed: dict[str, Any] = {name: change(values) for name, values in vars(self).items() if values is not None}
        return PolicyOutputs(**changed)
