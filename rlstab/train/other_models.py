"""The reference of `kl` and the teacher of distillation: other policies whose log-probs a run reads.

The reference is another model, the weights at the start, or, for a run that trains an adapter, the same weights with
the adapter switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.config.settings import OTHER_MODELS
from rlstab.explain.costs import reference
from rlstab.models.decoding import require_batches
from rlstab.models.policy import Policy, Sequences, load_policy, require_same_tokens
from rlstab.train.engine import Engine
from rlstab.train.rollout import Rollout


def load_other_models(
    run: RunConfig, engine: Engine, signals: Collection[str], device: torch.device, trial: tuple[Sequences, Sequences]
) -> tuple[dict[str, Callable[[Rollout], Tensor]], list[str]]:
    """Load the reference and the teacher, as far as the objective reads them; every process calls it.

    Args:
        run: the configuration.
        engine: holds the policy.
        signals: names of the signals that user-defined functions make, for which no model is loaded.
        device: where other weights are loaded.
        trial: batches by which :func:`rlstab.models.decoding.require_batches` tries a model that is named.

    Returns:
        functions that compute the log-probs of each, by the name of the signal; and a line on each for the user.

    Raises:
        ModelError: a model cannot be used, or a teacher has other tokens than the policy.
    """
    logprobs, lines = dict[str, Callable[[Rollout], Tensor]](), list[str]()
    for signal, role in OTHER_MODELS.items():
        if signal not in run.composition.needs or signal in signals:
            continue
        name = getattr(run.model, role)
        lines.append(f"{role} model: {reference(run, name)}")
        gathered = engine.gathered_policy  # with the adapter off
        if run.model.adapter is None or name is not None:
            policy = load_policy(name or run.model.name, device=device, precision=run.optimisation.precision)
            if role == "teacher":
                require_same_tokens(engine.policy, policy, name or run.model.name)
            if name is not None:
                require_batches(policy, name, trial, run.rollout.temperature)
            gathered = engine.frozen(policy)
        hint = run.model.teacher_prompt if role == "teacher" else None
        logprobs[signal] = partial(_logprobs, gathered, run, hint)
    return logprobs, lines


def _logprobs(
    gathered: Callable[[], AbstractContextManager[Policy]], run: RunConfig, hint: str | None, rollout: Rollout
) -> Tensor:
    """The log-probs of another policy, ``(R, T)`` float32; every process calls it.

    Args:
        gathered: enters the policy with all of its weights; an adapter is switched off meanwhile.
        run: the configuration.
        hint: text that the policy reads before each prompt.
        rollout: holds the tokens.
    """
    with gathered() as policy, policy.without_adapter():
        sequences = rollout.sequences if hint is None else policy.hinted(rollout.sequences, hint)
        size, temperature = run.optimisation.micro_batch_size, run.rollout.temperature
        return policy.evidence(sequences, {"logprobs"}, size, temperature=temperature)["logprobs"]
