"""Prompts and responses of a rollout in padded rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Sequences:
    """Rows of prompt and response, padded to the longest: prompts on the left, responses on the right.

    Attributes:
        prompt_ids, prompt_mask: ``(R, P)`` int64 and bool.
        response_ids, response_mask: ``(R, T)`` int64 and bool, the mask True up to and including the end.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor

    def rows(self, index: Tensor) -> Sequences:
        """Some of the rows, cut to their own longest prompt and response."""
        prompt_mask, response_mask = self.prompt_mask[index], self.response_mask[index]
        width, length = 0, 0
        if index.numel():  # one wait for the device
            width, length = torch.stack([prompt_mask.sum(-1).max(), response_mask.sum(-1).max()]).tolist()
        start = self.prompt_ids.shape[1] - width
        return Sequences(
            self.prompt_ids[index][:, start:],
            prompt_mask[:, start:],
            self.response_ids[index][:, :length],
            response_mask[:, :length],
        )

    @classmethod
    def joined(cls, parts: Iterable[Sequences], pad_id: int) -> Sequences:
        """The rows of all parts, padded to the longest of them."""
        parts = list(parts)
        width = max(one.prompt_ids.shape[1] for one in parts)
        length = max(one.response_ids.shape[1] for one in parts)

        def left(values: list[Tensor], fill: int) -> Tensor:
            return torch.cat([pad(one, (width - one.shape[1], 0), value=fill) for one in values])

        def right(values: list[Tensor], fill: int) -> Tensor:
            return torch.cat([pad(one, (0, length - one.shape[1]), value=fill) for one in values])

        return cls(
            left([one.prompt_ids for one in parts], pad_id),
            left([one.prompt_mask for one in parts], 0),
            right([one.response_ids for one in parts], pad_id),
            right([one.response_mask for one in parts], 0),
        )

    def cut(self, length: int) -> Sequences:
        """The first ``length`` tokens of each response: what comes later cannot change their signals."""
        return replace(self, response_ids=self.response_ids[:, :length], response_mask=self.response_mask[:, :length])


def position_ids(mask: Tensor) -> Tensor:
    """``(R, L)`` positions that count tokens and not padding."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
