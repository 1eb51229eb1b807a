"""Forward and backward over groups of responses that share their prompts, against whole rows.

    python -m benchmarks prompts --json

The tiny model and a Llama of 134.5M parameters with random weights, float32, log-probs of all response tokens. The
gradients of all parameters agree before anything is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.e2e import ALLOWED, MODELS
from benchmarks.protocol import SEED, Case, Run, assert_agree, interleave, measured, parser
from rlstab.models.policy import Policy, Sequences, load_policy
from rlstab.models.shared_prompts import SharedPrompts, worthwhile


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens."""

    model: str
    groups: int
    group: int
    prompt: int
    response: int

    @property
    def tokens(self) -> float:
        """Those of shared prompts as a share of those of whole rows."""
        return (self.prompt + self.group * self.response) / (self.group * (self.prompt + self.response))


SHAPES = [
    Shape("countdown-tiny", 10, 8, 9, 15),
    Shape("countdown-tiny", 10, 8, 15, 15),
    Shape("countdown-tiny", 10, 8, 60, 15),
    Shape("llama-134m", 1, 8, 32, 128),
    Shape("llama-134m", 1, 8, 64, 64),
    Shape("llama-134m", 1, 8, 128, 32),
]


def policy_of(name: str) -> Policy:
    """The model of a shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    policy = load_policy("countdown-tiny")
    if name == "countdown-tiny":
        return policy
    torch.manual_seed(SEED)
    config = LlamaConfig(**MODELS[name], tie_word_embeddings=True, max_position_embeddings=2048)
    return replace(policy, model=LlamaForCausalLM(config).eval())


def sequences_of(shape: Shape, vocabulary: int) -> Sequences:
    """Random tokens; no padding, which only one of the cases would save."""
    torch.manual_seed(SEED)
    prompts = torch.randint(vocabulary, (shape.groups, shape.prompt)).repeat_interleave(shape.group, 0)
    responses = torch.randint(vocabulary, (len(prompts), shape.response))
    return Sequences(prompts, torch.ones_like(prompts).bool(), responses, torch.ones_like(responses).bool())


def updates(policy: Policy, sequences: Sequences) -> dict[str, Callable[[], None]]:
    """Forward and backward by each of the two ways."""
    index = torch.arange(sequences.response_ids.numel())
    shared = SharedPrompts.among(sequences.prompt_ids, sequences.prompt_mask, sequences.response_ids.shape[1])
    assert shared is not None, "no shape of this benchmark is too short"

    def update(how: SharedPrompts | None) -> None:
        asked = {"temperature": 1.0, "needs": {"logprobs"}, "options": {}}
        logprobs = policy.signals(sequences, index, **asked, shared=how).logprobs  # type: ignore[arg-type]  # by name
        assert logprobs is not None
        logprobs.sum().backward()

    return {"shared prompts": lambda: update(shared), "whole rows": lambda: update(None)}


def gradients(policy: Policy, update: Callable[[], None]) -> Tensor:
    """Of all parameters, in one vector."""
    policy.model.zero_grad(set_to_none=True)
    update()
    flat = torch.cat(
        [parameter.grad.reshape(-1) for parameter in policy.model.parameters() if parameter.grad is not None]
    )
    policy.model.zero_grad(set_to_none=True)
    return flat


def _timed(update: Callable[[], None], ready: None) -> None:
    update()


def main() -> None:
    arguments = parser(__doc__, repeat=9)
    arguments.add_argument("--model", choices=sorted({shape.model for shape in SHAPES}), help="only one of the two")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    run = Run("prompts", options.json)
    run.say()
    drawn = Table("model", title="forward and backward, groups of responses to one prompt, float32")
    for title in ("groups x responses", "prompt + response", "tokens", "CPU s", "CPU s, whole rows", "times faster"):
        drawn.add_column(title, justify="right")
    for shape in SHAPES:
        if options.model not in (None, shape.model):
            continue
        policy = policy_of(shape.model)
        sequences = sequences_of(shape, policy.model.config.vocab_size)
        assert worthwhile(shape.groups * shape.group, shape.groups, shape.prompt, shape.response)
        both = updates(policy, sequences)
        first, other = (gradients(policy, update) for update in both.values())
        apart = assert_agree("shared prompts, all gradients", first, other, allowed=ALLOWED, relative=True)
        cases = {name: Case(partial(_timed, update), policy.model.zero_grad) for name, update in both.items()}
        timed = measured(*interleave(cases, options.repeat))
        for name, values in timed.items():
            run.add(
                name,
                model=shape.model,
                shape=[shape.groups, shape.group, shape.prompt, shape.response],
                dtype="float32",
                mode="fwdbwd",
                tokens=shape.tokens if name == "shared prompts" else 1.0,
                gradients_differ=apart,
                **values,
            )
        drawn.add_row(
            shape.model,
            f"{shape.groups} x {shape.group}",
            f"{shape.prompt} + {shape.response}",
            f"{shape.tokens:.0%}",
            f"{timed['shared prompts']['cpu_s']:.3f}",
            f"{timed['whole rows']['cpu_s']:.3f}",
            f"{timed['shared prompts']['ratio_to']['whole rows']:.2f}",
        )
    run.console.print(drawn)


if __name__ == "__main__":
    main()
