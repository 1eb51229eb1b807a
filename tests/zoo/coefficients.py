"""The coefficient on the gradient of each log-prob: what decides whether two forms of a surrogate are the same."""

import math

import torch

from rlstab import compose
from tests.core.steps import batch_of, gradients, live_of, token

#: From far below to far above 1, on both sides of usual bounds.
RATIOS = (0.01, 0.5, 0.79, 0.81, 0.999, 1.0, 1.001, 1.19, 1.27, 1.29, 2.0, 4.9, 5.1, 100.0)
#: Log-ratios at which nothing may become infinite, in the middle of ordinary ones.
EXTREME = (-50.0, -20.0, -0.1, 0.0, 0.1, 20.0, 50.0)


def row(ratios, advantage, **more):
    """A response whose tokens have these ratios and one advantage."""
    return [token(now=-60.0, drift=math.log(one), A=advantage, **more) for one in ratios]


def coefficients(methods, rows, *, dtype=torch.float64, state=None, live_ratio=False):
    """``c`` of each token, in loss gradient = -c / N; with a sequence mean where all rows are equally long.

    Of one method or several.
    """
    objective = compose(*methods) if isinstance(methods, tuple | list) else compose(methods)
    batch = batch_of(rows, dtype=dtype, live_ratio=live_ratio)
    policy, leaves = live_of(batch, rows, dtype=dtype)
    objective(batch, policy, state=objective.init_state() if state is None else state).loss.backward()
    return [-len(batch) * slope + 0.0 for slope in gradients(batch, leaves)["logp"].tolist()]


def extremes(advantages=(1.5, -1.5), **more):
    """A response for each advantage, with log-ratios of up to 50 nats."""
    return [[token(now=-60.0, drift=one, A=advantage, **more) for one in EXTREME] for advantage in advantages]
