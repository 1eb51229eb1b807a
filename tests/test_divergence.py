"""The divergence from a teacher: by its definition, over the vocabulary and over listed tokens, whatever the tiles."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlstab import signals
from rlstab.errors import MissingSignal, OutOfRange, ShapeError
from rlstab.signals import Teacher, TopK, token_signals, token_signals_from_logits

ROWS, WIDTH, VOCAB, WIDER = 6, 4, 19, 23
NEEDS = {"logprobs", "entropies", "teacher_divergence"}
BETAS = [0.0, 0.1, 0.5, 1.0]


@pytest.fixture(autouse=True)
def tiles(request, monkeypatch):
    """Of 3 x 5, unless a test asks for others."""
    rows, columns = getattr(request, "param", (3, 5))
    monkeypatch.setattr(signals, "ROWS", rows)
    monkeypatch.setattr(signals, "COLUMNS", columns)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def by_hand(policy, teacher, beta):
    """One row of log-probs each, a token at a time."""
    value = 0.0
    for lp, lq in zip(policy, teacher, strict=True):
        p, q = lp.exp(), lq.exp()
        if beta == 0:
            value = value + q * (lq - lp)
        elif beta == 1:
            value = value + p * (lp - lq)
        else:
            m = (beta * q + (1 - beta) * p).log()
            value = value + beta * q * (lq - m) + (1 - beta) * p * (lp - m)
    return value


def outcomes(row, listed):
    """The log-probs of the listed tokens, and of all others together."""
    others = [token for token in range(len(row)) if token not in listed]
    return torch.stack([*(row[token] for token in listed), *([row[others].logsumexp(0)] if others else [])])


HEADS = {
    "plain": {},
    "temperature of each row": {"temperature": torch.linspace(0.4, 2.0, ROWS).double()},
    "softcap and temperature": {"softcap": 1.5, "temperature": 0.7},
}


@pytest.mark.parametrize(
    ("beta", "k", "head", "tiles"),
    [
        *((beta, k, "plain", (3, 5)) for beta in BETAS for k in (None, 6)),
        (0.5, None, "temperature of each row", (3, 5)),
        (1.0, None, "softcap and temperature", (3, 5)),
        (0.0, 6, "temperature of each row", (4, 1)),
        (0.1, 6, "softcap and temperature", (3, 5)),
        (0.0, 1, "plain", (3, 5)),
        (1.0, VOCAB, "plain", (3, 5)),
        (0.1, VOCAB, "plain", (1024, 4096)),
        (0.5, None, "plain", (1024, 4096)),
    ],
    indirect=["tiles"],
)
def test_it_has_the_value_and_gradient_of_its_definition(beta, k, head, tiles):
    options = HEADS[head]
    leaves = [values.requires_grad_() for values in (normal(ROWS, WIDTH), normal(VOCAB, WIDTH), normal(VOCAB))]
    teacher = Teacher(normal(ROWS, WIDTH + 1), normal(WIDER, WIDTH + 1), normal(WIDER), 1.2)
    temperature = options.get("temperature", 1.0)
    divisor = temperature.unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature
    logits = leaves[0] @ leaves[1].T + leaves[2]
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    policy = (logits / divisor).log_softmax(-1)
    graded = (1.2 * (teacher.hidden @ teacher.weight.T + teacher.bias)[:, :VOCAB] / divisor).log_softmax(-1)
    if k is None:
        source, pairs = teacher, list(zip(policy, graded, strict=True))
    else:
        best = graded.topk(k)
        source, listed = TopK(best.indices, best.values), best.indices.tolist()
        if not isinstance(temperature, torch.Tensor):  # as a pass over the teacher finds them
            found = TopK.of(teacher, k, VOCAB, temperature)
            torch.testing.assert_close((found.ids, found.logprobs), (best.indices, best.values))
        rows = zip(policy, graded, listed, strict=True)
        pairs = [(outcomes(row, tokens), outcomes(other, tokens)) for row, other, tokens in rows]
    expected = torch.stack([by_hand(row, other, beta) for row, other in pairs])
    # a row of each kind: with both terms, with one of them, with none
    mix, other = torch.tensor([[1.0, -0.3, 0.0, 2.0, 0.0, 0.5], [0.0, 1.0, 0.0, 0.7, 1.0, 0.2]]).double()
    ids = torch.arange(ROWS) * 3
    chosen = policy.gather(1, ids.unsqueeze(1)).squeeze(1)
    wanted = torch.autograd.grad((expected * mix + chosen * other).sum(), leaves, retain_graph=True)

    def check(found):
        # 1 less the listed mass, of which the others' is 1e-6, has 1e-10 of its digits
        precision = {"rtol": 1e-12, "atol": 1e-12} if k in (None, VOCAB) else {"rtol": 1e-8, "atol": 1e-9}
        torch.testing.assert_close(found.teacher_divergence, expected, **precision)
        loss = (found.teacher_divergence * mix + found.logprobs * other).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, leaves, retain_graph=True), wanted, **precision)

    arguments = {"needs": NEEDS, "teacher": source, "beta": beta}
    check(token_signals(*leaves[:2], ids, bias=leaves[2], **options, **arguments))
    check(token_signals_from_logits(logits, ids, temperature=temperature, **arguments))


def test_gradcheck():
    hidden, weight = normal(2, 3).requires_grad_(), normal(6, 3).requires_grad_()
    full = Teacher(normal(2, 2), normal(6, 2))

    def passed(hidden, weight, source, beta):
        needs = {"teacher_divergence"}
        return token_signals(hidden, weight, torch.arange(2), needs=needs, teacher=source, beta=beta).teacher_divergence

    for source, beta in ((full, 0.3), (TopK.of(full, 3, 6, 1.0), 1.0)):
        assert torch.autograd.gradcheck(passed, (hidden, weight, source, beta))


def test_the_limits():
    """An absent entry does not count, an equal teacher is at 0, and impossible tokens give finite numbers."""
    logits, ids = normal(2, VOCAB).requires_grad_(), torch.zeros(2, dtype=torch.int64)
    best = logits.detach().log_softmax(-1).topk(4)
    padded = TopK(
        torch.cat([best.indices, torch.zeros(2, 3, dtype=torch.int64)], 1),
        torch.cat([best.values, torch.full((2, 3), -math.inf)], 1),
    )
    impossible = torch.zeros(VOCAB, WIDTH)
    impossible[3:] = -1e30
    everything = Teacher(torch.ones(2, WIDTH), impossible)
    for beta in BETAS:
        for source, most in ((TopK(best.indices, best.values), 1e-12), (padded, 1e-12), (everything, 1e4)):
            found = token_signals_from_logits(logits, ids, needs=NEEDS, teacher=source, beta=beta).teacher_divergence
            (gradient,) = torch.autograd.grad(found.sum(), logits)
            assert 0 <= found.abs().max() <= most
            assert gradient.isfinite().all()
            assert most > 1 or gradient.abs().max() < 1e-12


def test_a_half_precision_teacher_is_compared_in_float32():
    hidden, teacher = (
        normal(ROWS, WIDTH).float(),
        Teacher(normal(ROWS, WIDTH).bfloat16(), normal(VOCAB, WIDTH).bfloat16()),
    )
    wide = Teacher(teacher.hidden.float(), teacher.weight.float())
    weight, ids = normal(VOCAB, WIDTH, seed=1).float(), torch.arange(ROWS)
    values = [
        token_signals(hidden, weight, ids, needs=NEEDS, teacher=each).teacher_divergence for each in (teacher, wide)
    ]
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(*values, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tiles", [(16, 32)], indirect=True)
def test_no_tensor_is_as_large_as_tokens_times_vocabulary(tiles):
    tokens, vocab, largest = 64, 128, [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            largest[0] = max(largest[0], *sizes, 0)
            return out

    hidden, weight = normal(tokens, WIDTH).requires_grad_(), normal(vocab, WIDTH).requires_grad_()
    teacher = Teacher(normal(tokens, WIDTH), normal(vocab, WIDTH))
    for source in (teacher, TopK.of(teacher, 8, vocab, 1.0)):
        with Watch():
            out = token_signals(hidden, weight, torch.arange(tokens), needs=NEEDS, teacher=source, beta=0.5)
            out.teacher_divergence.sum().backward()
    assert largest[0] <= tokens * vocab // 8


def test_what_does_not_fit_is_refused():
    hidden, weight, ids = normal(ROWS, WIDTH), normal(VOCAB, WIDTH), torch.arange(ROWS)
    for teacher, beta, error, text in (
        (None, 1.0, MissingSignal, r"teacher_divergence needs a teacher\. Pass teacher=Teacher"),
        (Teacher(hidden, weight), 1.5, OutOfRange, r"beta = 1\.5, expected a number in \[0, 1\]"),
        (Teacher(hidden[1:], weight), 1.0, ShapeError, r"6 rows, and a teacher with hidden of shape \(5, 4\)"),
        (Teacher(hidden, weight[1:]), 1.0, ShapeError, r"weight \(18, 4\); expected .* V' of at least 19"),
        (Teacher(hidden[:, 1:], weight), 1.0, ShapeError, r"hidden \(6, 3\) and weight \(19, 4\)"),
        (TopK(ids, hidden), 1.0, ShapeError, r"a teacher with ids of shape \(6,\)"),
        (TopK(hidden, hidden), 1.0, ShapeError, r"ids of torch\.float64 and shape \(6, 4\), log-probs of \(6, 4\)"),
    ):
        with pytest.raises(error, match=text):
            token_signals(hidden, weight, ids, needs=NEEDS, teacher=teacher, beta=beta)
