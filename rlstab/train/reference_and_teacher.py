"""The reference of `kl` and the teacher of distillation: other policies whose log-probs or distributions a run reads.

The reference is another model, the weights at the start, or, for a run that trains an adapter, the same weights with
the adapter switched off.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from rlstab.config.runs import MOST_WHOLE, RunConfig
from rlstab.config.settings import OTHER_MODELS, SAMPLER
from rlstab.core.devices import sent
from rlstab.errors import ModelError
from rlstab.explain.costs import reference
from rlstab.models.decoding import require_batches
from rlstab.models.loading import vocabulary_size
from rlstab.models.policy import Policy, Sequences, load_policy, require_same_tokens
from rlstab.signals import TopK
from rlstab.signals.divergence import Source
from rlstab.train.engine import Engine
from rlstab.train.rollout import Rollout

#: In a context, gives the teacher's distributions before the tokens at an index of the responses of some sequences.
Lessons: TypeAlias = Callable[[], AbstractContextManager[Callable[[Sequences, Tensor], Source] | None]]


#: A user-defined teacher; see :func:`rlstab.train.train`.
Listed: TypeAlias = Callable[[Sequences], tuple[Tensor, Tensor]]


def load_other_models(
    run: RunConfig,
    engine: Engine,
    signals: Collection[str],
    device: torch.device,
    trial: tuple[Sequences, Sequences],
    teacher: Listed | None = None,
) -> tuple[dict[str, Callable[[Rollout], Tensor]], Lessons, list[str]]:
    """Load the reference and the teacher, as far as the objective reads them; every process calls it.

    Args:
        run: the configuration.
        engine: holds the policy.
        signals: names of the signals that user-defined functions make, for which no model is loaded.
        device: the device on which other weights are loaded.
        trial: batches by which :func:`rlstab.models.decoding.require_batches` tries a model that is named.
        teacher: user-defined, in place of the teacher's distributions.

    Returns:
        functions that compute the log-probs of each, by the name of the signal; the distributions of the teacher, in a
        context that every process enters (None in it if no method reads them); and a line on each model for the user.

    Raises:
        ModelError: a model cannot be used, or a teacher has other tokens than the policy.
    """
    logprobs, lines = dict[str, Callable[[Rollout], Tensor]](), list[str]()
    lessons: Lessons = nullcontext
    models = dict[str, Callable[[], AbstractContextManager[Policy]]]()
    for signal, role in OTHER_MODELS.items():
        if signal not in run.composition.needs | run.composition.live_needs or signal in signals:
            continue
        name, distributions = getattr(run.model, role), signal == "teacher_divergence"
        lists = teacher or (_of_sampler if name == SAMPLER else None)
        if distributions and lists is not None:
            k, vocabulary = run.composition.signal_options["top_k"], vocabulary_size(engine.policy.model.config)
            if teacher is None and not k and vocabulary > MOST_WHOLE:
                raise ModelError(
                    f"'distill' to the sampler: of a vocabulary of {vocabulary} tokens its whole distribution is not "
                    f"kept at each token, at most of {MOST_WHOLE}. Set `top_k` of 'distill'."
                )
            lessons = partial(nullcontext, partial(_listed, lists, engine.accelerator.device))
            continue
        lines.append(f"{role} model: {reference(run, name, 'optimizer step' if distributions else 'rollout')}")
        if role not in models:
            models[role] = engine.gathered_policy  # with the adapter off
            if run.model.adapter is None or name is not None:
                policy = load_policy(name or run.model.name, device=device, precision=run.optimisation.precision)
                if role == "teacher":
                    read = "teacher_divergence" in run.composition.live_needs
                    require_same_tokens(engine.policy, policy, name or run.model.name, distributions=read)
                if name is not None:
                    require_batches(policy, name, trial, run.rollout.temperature)
                policy.model.requires_grad_(False)
                models[role] = engine.frozen(policy)
        hint = run.model.teacher_prompt if role == "teacher" else None
        if distributions:
            lessons = partial(_lessons, models[role], run, hint, vocabulary_size(engine.policy.model.config))
        else:
            logprobs[signal] = partial(_logprobs, models[role], run, hint)
    return logprobs, lessons, lines


def _of_sampler(sequences: Sequences) -> tuple[Tensor, Tensor]:
    return sequences.sampler_ids.long(), sequences.sampler_logprobs


def _listed(teacher: Listed, device: torch.device, sequences: Sequences, index: Tensor) -> TopK:
    ids, logprobs = teacher(sequences)
    return TopK(*(sent(values.flatten(0, 1)[index], device) for values in (ids, logprobs)))


@contextmanager
def _lessons(
    gathered: Callable[[], AbstractContextManager[Policy]], run: RunConfig, hint: str | None, vocabulary: int
) -> Iterator[Callable[[Sequences, Tensor], Source]]:
    """See :data:`Lessons`; ``hint`` as in :func:`_logprobs`, ``vocabulary`` is the number of the policy's logits."""
    k = int(run.composition.signal_options["top_k"])
    with gathered() as policy:

        def distributions(sequences: Sequences, index: Tensor) -> Source:
            with policy.without_adapter():
                teacher = policy.teacher(sequences if hint is None else policy.hinted(sequences, hint), index)
            return TopK.of(teacher, k, vocabulary, run.rollout.temperature) if k else teacher

        yield distributions


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
