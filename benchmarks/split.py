"""How much the gradient moves when a memory knob changes how one optimizer step is cut into micro-batches.

    python benchmarks/split.py

128 countdown responses of the model that ships, cut into 1 to 32 parts. For each method, the relative L2 distance of
the gradient (with respect to the log-probs of all tokens) from that of the whole batch: once as rlstab decides, over
the whole step, and once with statistics per micro-batch, as much published code does (`scope: microbatch`).
"""

import warnings

import torch
from rich.console import Console
from rich.table import Table

from rlstab import STARE, ClipHigher, PolicyOutputs, TokenBatch, TokenObjective, TopEntropyMask, compose, make_plan
from rlstab.config.settings import RolloutSettings
from rlstab.core.plan import Scope
from rlstab.models.decoding import Decoder
from rlstab.models.policy import load_policy
from rlstab.stages.group_relative import grpo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Countdown
from rlstab.tasks.rewards import score
from rlstab.train.generate import sample
from rlstab.train.rollout import Rollout

PARTS = (2, 4, 8, 16, 32)
METHODS: dict[str, TokenObjective] = {
    "top_entropy": TopEntropyMask(),
    "top_entropy, all": TopEntropyMask(denominator="all"),
    "stare, C2": STARE(target_entropy=10.0, variant="C2"),  # so high a target that the gate is open
}


def rollout() -> tuple[Rollout, torch.Tensor]:
    policy, task = load_policy("countdown-tiny"), Countdown()
    examples = [task.example("train", index) for index in range(16) for _ in range(8)]
    asked, settings = ResponseBatch.of(torch.zeros(128), limit=24), RolloutSettings()
    (drawn,) = sample(Decoder(policy, settings, 0, ["entropies", "logprobs"]), examples, asked)
    rewards = score(task, examples, [policy.decode(answer) for answer in drawn.answers()]).rewards
    return drawn, grpo(rewards, torch.arange(128) // 8)


def gradient(
    method: TokenObjective, drawn: Rollout, advantages: torch.Tensor, parts: int, scope: Scope
) -> torch.Tensor:
    live = drawn.signals["logprobs"].double().requires_grad_()
    rows = torch.arange(128).chunk(parts)
    batches = [
        TokenBatch.from_padded(
            response_mask=drawn.sequences.response_mask[row],
            advantages=advantages[row],
            old_logprobs=drawn.signals["logprobs"][row].double(),
            entropies=drawn.signals["entropies"][row].double(),
            sequence_ids=row,
        )
        for row in rows
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scope: microbatch says that it depends on the cut, which is the point here
        plan = make_plan(compose(ClipHigher(), method), batches, scope=scope)
    losses = [
        plan.loss(batch, PolicyOutputs.from_padded(batch, logprobs=live[part])).loss
        for batch, part in zip(batches, rows, strict=True)
    ]
    return torch.autograd.grad(torch.stack(losses).sum(), live)[0]


def main() -> None:
    drawn, advantages = rollout()
    table = Table(title="relative L2 change of the gradient, 128 responses, by number of micro-batches")
    for column in ("method", "statistics over", *map(str, PARTS)):
        table.add_column(column, justify="left" if len(column) > 2 else "right")
    for name, method in METHODS.items():
        for scope in ("step", "microbatch"):
            whole = gradient(method, drawn, advantages, 1, "step")
            cells = [
                f"{float((gradient(method, drawn, advantages, parts, scope) - whole).norm() / whole.norm()):.2g}"
                for parts in PARTS
            ]
            table.add_row(name, scope, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
