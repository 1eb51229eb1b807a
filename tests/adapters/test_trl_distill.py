"""`distill` is the loss of TRL's DistillationTrainer, on the same tokens by the same models."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.16", reason="TRL 1.16 is not installed: nox -s trl")

from trl import DistillationConfig, DistillationTrainer
from trl.experimental.server_distillation import server_distillation_trainer as server
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from rlstab import Distill, PolicyOutputs, TokenBatch, compose
from rlstab.models.policy import Policy, Sequences
from rlstab.signals import Teacher, TopK, token_signals, token_signals_from_logits
from tests.adapters.jobs import EOS, model, response
from tests.adapters.trl_jobs import prompts, tokenizer

#: Hidden states, weight and bias of the policy's head; hidden states and weight of the teacher's.
SHAPES = (14, 6), (31, 6), (31,), (14, 5), (31, 5)

pytestmark = pytest.mark.filterwarnings("default")


def pair() -> tuple[Any, Any]:
    """The policy, and a teacher that is it with noise."""
    student, teacher = model(), model()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=draw))
    return student, teacher


def sequences() -> Sequences:
    """Six fixed responses of several lengths to prompts of several lengths."""
    read = tokenizer()(list(prompts(6)["prompt"]))["input_ids"]
    read = [ids[index % 3 :] for index, ids in enumerate(read)]
    answers, widest = [response(0, index) for index in range(6)], max(map(len, read))
    longest = max(map(len, answers))
    return Sequences(
        torch.tensor([[EOS] * (widest - len(ids)) + ids for ids in read]),
        torch.tensor([[False] * (widest - len(ids)) + [True] * len(ids) for ids in read]),
        torch.tensor([ids + [EOS] * (longest - len(ids)) for ids in answers]),
        torch.tensor([[True] * len(ids) + [False] * (longest - len(ids)) for ids in answers]),
    )


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 0.7), (0.5, 1.0), (1.0, 0.7)])
def test_loss_and_gradients_are_those_of_the_trainer(
    tmp_path: Path, beta: float, temperature: float, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, (student, teacher) = sequences(), pair()
    settings = DistillationConfig(
        str(tmp_path), beta=beta, temperature=temperature, use_cpu=True, bf16=False, report_to="none"
    )
    trainer = DistillationTrainer(student, teacher, settings, train_dataset=prompts(8), processing_class=tokenizer())
    if double:  # TRL's head and the layers of transformers ask for float32 by name
        for each in (student, teacher):
            each.double()
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    batch = {
        "prompt_ids": given.prompt_ids,
        "prompt_mask": given.prompt_mask.long(),
        "completion_ids": given.response_ids,
        "completion_mask": given.response_mask.long(),
    }
    theirs = trainer._compute_loss(student, batch, num_items_in_batch=given.response_mask.sum())[0]
    theirs.backward()
    expected = {name: weight.grad.clone() for name, weight in student.named_parameters()}
    student.zero_grad()

    policies = [Policy(each.eval(), tokenizer(), EOS, frozenset({EOS}), "fp32") for each in (student, teacher)]
    index = given.response_mask.reshape(-1).nonzero().squeeze(-1)
    objective = compose(Distill(alone=True, beta=beta))
    live = policies[0].signals(
        given,
        index,
        needs={"logprobs", *objective.live_needs},
        temperature=temperature,
        options=objective.signal_options,
        teacher=policies[1].teacher(given, index),
    )
    rewarded = torch.linspace(-1, 1, 6, dtype=live.logprobs.dtype)  # `alone` leaves it out
    tokens = TokenBatch.from_padded(
        response_mask=given.response_mask,
        advantages=rewarded,
        old_logprobs=live.logprobs.detach().new_zeros(given.response_mask.shape),
    )
    out = objective(tokens, PolicyOutputs(live.logprobs, teacher_divergence=live.teacher_divergence))
    out.loss.backward()
    assert float(out.loss.detach()) > 0.01
    assert out.loss.dtype == theirs.dtype == (torch.float64 if double else torch.float32)
    assert float((out.loss - theirs).detach().abs()) <= (1e-12 if double else 1e-6) * float(theirs.detach())
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, weight in student.named_parameters():
        apart = float((weight.grad - expected[name]).abs().max())
        # in float32 both are 3e-6 from float64, by the roundings of the model
        assert apart <= (1e-10 if double else 1e-5) * largest, f"{name}: {apart:.1e} of {largest:.1e}"


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_head_is_that_of_the_trainer(beta: float) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, weight, bias, theirs, graded = (torch.randn(*shape, generator=draw) for shape in SHAPES)
    leaves, options = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()], {"temperature": 0.8}
    mask = torch.arange(14).view(2, 7) % 3 > 0
    loss, entropy, _ = _chunked_divergence_loss(
        *(hidden.view(2, 7, -1), theirs.view(2, 7, -1), weight, graded, mask, beta),
        **{"student_lm_head_bias": bias, "student_final_logit_softcapping": 4.0, "teacher_logit_scale": 0.7, **options},
    )
    rows = mask.reshape(-1).nonzero().squeeze(-1)
    teacher, needs = Teacher(theirs[rows], graded, logit_scale=0.7), {"teacher_divergence", "entropies"}
    found = token_signals(
        *(hidden[rows], weight, rows), bias=bias, softcap=4.0, needs=needs, teacher=teacher, beta=beta, **options
    )
    assert found.teacher_divergence is not None
    torch.testing.assert_close(found.teacher_divergence.mean(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropies.sum(), entropy, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(each, leaves) for each in (found.teacher_divergence.mean(), loss)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_listed_tokens_and_the_rest_are_those_of_the_server_trainer(beta: float) -> None:
    draw = torch.Generator().manual_seed(2)
    logits, other = (torch.randn(9, 40, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    best = other.log_softmax(-1).topk(5)
    mask = torch.ones(9, 5, dtype=torch.bool)
    policy, valid = server._add_tail_bucket(logits.log_softmax(-1).gather(1, best.indices), mask)
    graded, _ = server._add_tail_bucket(best.values, mask)
    theirs = server._jsd_divergence(policy, graded, beta, valid)
    theirs = theirs.sum(-1) if theirs.ndim == 2 else theirs
    found = token_signals_from_logits(
        logits, best.indices[:, 0], needs={"teacher_divergence"}, teacher=TopK(best.indices, best.values), beta=beta
    ).teacher_divergence
    torch.testing.assert_close(found, theirs, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(values.sum(), logits, retain_graph=True) for values in (found, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
