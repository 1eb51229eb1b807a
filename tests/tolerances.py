"""How far apart two computations of one number may be: from its dtype, its size and the roundings on the way.

Kernels of another processor, or of another shape on the same one, add in another order and fuse other products. What a
test says of the product bit for bit needs none of this. Those of the law kit:
`rlstab/testing/tolerances.py`. Not here: statistical errors, digits that a document prints, the truncation of finite
differences, one error as a share of another, the bounds that docs/conformance.md publishes.
"""

import torch


def rounding(dtype: torch.dtype, magnitude: float, terms: int) -> float:
    """The largest absolute difference between two computations of one number.

    One rounding is off by at most u = eps / 2 of what it rounds, which is at most ``magnitude``. The worst that
    ``terms`` of them do to each of two computations is ``2 terms u magnitude``. Of many roundings, that never comes:
    even in +-u they have a standard deviation of u / sqrt(3), independent they add up as a random walk, and the
    difference of two walks has one of ``sqrt(2 terms / 3) u magnitude``; ``4 sqrt(terms) u magnitude`` is five of
    these (one comparison in two million would fail). The smaller of the two is the bound.

    Args:
        dtype: in which it is computed; the narrower of two.
        magnitude: bound on all numbers on the way: for a sum, of the absolute values of what is added.
        terms: roundings on the longest way from an input to the result: n for a sum or a product of n terms.
    """
    return 2 * min(terms, 2 * terms**0.5) * torch.finfo(dtype).eps / 2 * magnitude


def assert_near(
    actual: torch.Tensor, expected: torch.Tensor, terms: int, *, size: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    """Two tensors are within :func:`rounding`; ``size`` bounds what is larger on the way than all that is expected.

    ``dtype`` is the one in which ``actual`` was computed, where it is not its own.
    """
    magnitude = max(size, float(expected.detach().abs().max())) if expected.numel() else size
    close = rounding(dtype or actual.dtype, magnitude, terms)
    actual, expected = actual.double(), expected.double()
    # to get ready to report a difference takes longer than to see that there is none
    if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=0, atol=close):
        torch.testing.assert_close(actual, expected, rtol=0, atol=close)
