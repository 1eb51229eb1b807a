"""One scalar-loop oracle per method, written from the published formulas: plain floats, no tensors, nothing of rlstab.

A token is a dict with ``row`` (its sequence) and, in nats: ``logp`` (live), ``old``, ``now`` (start of the step),
``H``, ``live_H``, ``ref``, ``teacher``, ``rollout``, ``max``, ``mass`` (ln Z), ``live_mass``,
``live_support`` (ln M); ``A`` is its advantage,
``cut`` is 1 where its response was cut off, ``branch`` is 1 in a branch, ``lag`` counts updates, ``block`` is the
number of its block, ``live_ratio`` says that every ratio is exactly 1.

`<name>.py` has ``decide(tokens, memory, **settings) -> (decision, memory)``. A decision is a dict with any of
``keep``, ``weight``, ``bonus``, ``unclipped`` (lists), ``bounds`` (low, high, dual; numbers or lists), ``penalties``,
``aggregate``, ``support`` (True) and ``lr_scale`` (a number).
``ratio(tokens, keep, advantages, live_ratio)`` gives log-ratio and slope on
the own log-prob of each token; ``gate`` and ``surrogate`` are functions ``(tokens, ratios, keep, advantages)`` that
give a list: a factor on the policy term, or what replaces the ratio. Advantages there include every bonus.
"""

from importlib import import_module

from tests.oracles.loss import Outcome, total


def oracle_of(name):
    return import_module(f"tests.oracles.{name}").decide


def outcome(tokens, methods, memories=None, live_ratio=False) -> tuple[Outcome, dict, dict]:
    """Loss, decisions and memories of the methods ``{name: settings}`` on one whole step."""
    memories = memories or {}
    tokens = [{**token, "live_ratio": live_ratio} for token in tokens]
    if "support_replay" in methods:  # wherever a live log-prob is read
        tokens = [{**token, "logp": token["logp"] - token["live_support"]} for token in tokens]
    decisions, after = {}, {}
    for name, settings in methods.items():
        decisions[name], after[name] = oracle_of(name)(tokens, memories.get(name), **settings)
    return total(tokens, list(decisions.values()), live_ratio), decisions, after
