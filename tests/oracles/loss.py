"""The loss as sums of scalars. A number is kept as its summands, so that a test knows how much cancelled."""

import math
from dataclasses import dataclass


@dataclass
class Outcome:
    loss: list  # summands
    slopes: list  # for each token, {live field: summands of d loss / d field}


def total(tokens, decisions, live_ratio=False):
    n = len(tokens)
    keep = [all(decision["keep"][i] for decision in decisions if "keep" in decision) for i in range(n)]
    weight = [math.prod(decision["weight"][i] for decision in decisions if "weight" in decision) for i in range(n)]
    exempt = [any(decision["unclipped"][i] for decision in decisions if "unclipped" in decision) for i in range(n)]
    bonus = [sum(decision["bonus"][i] for decision in decisions if "bonus" in decision) for i in range(n)]
    advantages = [token["A"] + more for token, more in zip(tokens, bonus, strict=True)]
    bounds = next((decision["bounds"] for decision in decisions if "bounds" in decision), None)
    aggregate = next((decision["aggregate"] for decision in decisions if "aggregate" in decision), token_mean)
    log_ratio = next((decision["ratio"] for decision in decisions if "ratio" in decision), own_log_ratio)
    shifts = log_ratio(tokens, keep, advantages, live_ratio)
    ratios = [math.exp(min(max(shift, -20.0), 20.0)) for shift, _ in shifts]
    factors = [1.0] * n
    for decision in decisions:
        if "gate" in decision:
            factors = [f * g for f, g in zip(factors, decision["gate"](tokens, ratios, keep, advantages), strict=True)]
        if "surrogate" in decision:
            pulls = decision["surrogate"](tokens, ratios, keep, advantages)
            factors = [f * p / r for f, p, r in zip(factors, pulls, ratios, strict=True)]

    fields = "logp", "live_H", "live_mass", "live_support", "apart"
    out = Outcome([], [{field: [] for field in fields} for _ in tokens])
    for i, share in enumerate(aggregate(tokens, keep)):
        if keep[i]:
            value, slope = surrogate(advantages[i], *shifts[i], None if exempt[i] else bounds_of(bounds, i))
            scale = share * weight[i] * (1.0 if exempt[i] or advantages[i] == 0 else factors[i])
            out.loss.append(scale * value)
            out.slopes[i]["logp"].append(scale * slope)
    for decision in decisions:
        for penalty in decision.get("penalties", ()):
            shares = (penalty.get("aggregate") or aggregate)(tokens, [True] * n)
            for i in range(n):
                if penalty["where"][i]:
                    scale = penalty["coefficient"] * shares[i]
                    out.loss += [scale * part for part in penalty["value"][i]]
                    for field, parts in penalty["slope"][i].items():
                        out.slopes[i][field] += [scale * part for part in parts]
    if any("support" in decision for decision in decisions):
        for slopes in out.slopes:
            slopes["live_support"] = [-part for part in slopes["logp"]]
    return out


def own_log_ratio(tokens, keep, advantages, live_ratio):
    """Log-ratio of each token, and its slope on the token's own log-prob."""
    return [(0.0 if live_ratio else token["logp"] - token["old"], 1.0) for token in tokens]


def bounds_of(bounds, i):
    """(low, high, dual) of one token; low and high may be lists."""
    return None if bounds is None else tuple(bound[i] if isinstance(bound, list) else bound for bound in bounds)


def surrogate(advantage, shift, shift_slope, bounds):
    """min(max(-A r, -A clip(r)), -A c where A < 0), and its slope on the live log-prob."""
    moving = -20 <= shift <= 20
    ratio = math.exp(min(max(shift, -20.0), 20.0))
    if bounds is None:
        value, pulls = -advantage * ratio, True
    else:
        low, high, dual = bounds
        inside = min(max(ratio, 1 - low), 1 + high)
        value = max(-advantage * ratio, -advantage * inside)
        if advantage < 0 and dual is not None:
            value = min(value, -advantage * dual)
        if advantage > 0:
            pulls = ratio <= 1 + high
        else:
            pulls = 1 - low <= ratio and (dual is None or ratio <= dual)
    return value, -advantage * ratio * shift_slope if pulls and moving else 0.0


def rows_counted(tokens, counted):
    """{row: how many of its tokens count}, of rows with at least one."""
    lengths = {}
    for token, counts in zip(tokens, counted, strict=True):
        if counts:
            lengths[token["row"]] = lengths.get(token["row"], 0) + 1
    return lengths


def kept_values(tokens, keep, values):
    """{row: values of its kept tokens}."""
    rows = {token["row"]: [] for token in tokens}
    for token, kept, value in zip(tokens, keep, values, strict=True):
        if kept:
            rows[token["row"]].append(value)
    return rows


def token_mean(tokens, counted):
    return [1 / sum(counted) if sum(counted) else 0.0 for _ in tokens]


def k3(d, cap):
    """Summands of value and of slope on the log-prob: e^d - d - 1, with d clamped to +-20 and the value to cap."""
    held = min(max(d, -20.0), 20.0)
    value = [math.exp(held), -held, -1.0]
    if cap is not None and math.fsum(value) > cap:
        return [cap], [0.0]
    return value, [1.0, -math.exp(held)] if held == d else [0.0]
