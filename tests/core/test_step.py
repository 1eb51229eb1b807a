"""The optimizer step of a host."""

import torch

from rlstab import ClipHigher, OptimizerStep, PolicyOutputs, TokenBatch, compose


def test_a_refused_step_counts_its_micro_batches_and_gives_a_zero_with_a_graph() -> None:
    step, live = OptimizerStep(compose(ClipHigher())), torch.zeros(2, 3, requires_grad=True)
    values = {"response_mask": torch.ones(1, 3), "advantages": torch.ones(1), "old_logprobs": -torch.ones(1, 3)}
    broken = {**values, "old_logprobs": torch.full((1, 3), torch.nan)}
    step.make_plan(
        [TokenBatch.from_padded(**part, sequence_ids=torch.tensor([row])) for row, part in enumerate((values, broken))]
    )
    for _ in range(2):
        index = step.losses
        loss = step.loss(index, PolicyOutputs.from_padded(step.batches[index], logprobs=live[index : index + 1])).loss
        loss.backward()
    assert step.losses == 2
    assert step.refusal is not None
    assert live.grad is not None
    assert not live.grad.any()
    assert step.state == step.objective.init_state()
