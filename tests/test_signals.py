"""Signals against direct formulas in float64, whatever the chunks, the dtype and what is asked for."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import signals
from rlstab.errors import MissingSignal, OutOfRange, ShapeError
from rlstab.signals import ROWS, SIGNAL_NAMES, TokenSignals, tile, token_signals, token_signals_from_logits
from tests.tolerances import assert_near

MIN_P = 0.3
WIDTH, VOCABULARY = 4, 6
#: Roundings of a signal: a product, a softmax, and eight of single functions.
TERMS = WIDTH + VOCABULARY + 8
#: Bound on the logits.
LOGIT = 20.0


def direct(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """The definitions, a row at a time."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in sorted(SIGNAL_NAMES)}
    for row, token in zip(logits, ids.tolist(), strict=True):
        weights = (row / temperature - row.detach().max() / temperature).exp()
        p = weights / weights.sum()
        kept = p.detach() >= MIN_P * p.detach().max()
        found["logprobs"].append(p[token].log())
        found["entropies"].append(-(p[p > 0] * p[p > 0].log()).sum())
        found["max_logprobs"].append(p.detach().max().log())
        found["log_kept_mass"].append(p[kept].sum().log())
        found["sum_p_sq"].append((p * p).sum())
    return {name: torch.stack(rows) if rows else torch.zeros(0, dtype=logits.dtype) for name, rows in found.items()}


def random(rows: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden": normal(rows, WIDTH),
        "head": normal(VOCABULARY, WIDTH),
        "bias": normal(VOCABULARY),
        "ids": torch.randint(VOCABULARY, (rows,), generator=generator),
    }


def both(given, **options):
    """The signals by either door."""
    options = {"needs": SIGNAL_NAMES, "min_p": MIN_P, **options}
    logits = torch.nn.functional.linear(given["hidden"], given["head"], given["bias"])
    return (
        token_signals(given["hidden"], given["head"], given["ids"], bias=given["bias"], **options),
        token_signals_from_logits(logits, given["ids"], **options),
    )


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7])
def test_values_are_those_of_the_definitions_across_chunks(monkeypatch, rows, temperature):
    monkeypatch.setattr(signals, "ROWS", 3)
    given = random(rows)
    logits = given["hidden"] @ given["head"].T + given["bias"]
    expected = direct(logits, given["ids"], temperature)
    for found in both(given, temperature=temperature):
        for name, values in expected.items():
            assert_near(getattr(found, name), values, TERMS, size=LOGIT / temperature)


@pytest.mark.parametrize("rows", [0, 1, ROWS, ROWS + 1])
def test_a_chunk_ends_where_it_should(rows):
    given = random(rows)
    expected = direct(given["hidden"] @ given["head"].T + given["bias"], given["ids"])
    for found in both(given):
        for name, values in expected.items():
            assert_near(getattr(found, name), values, TERMS, size=LOGIT)


def test_no_chunk_is_larger_than_the_limit(monkeypatch):
    monkeypatch.setattr(signals, "ROWS", 3)
    seen, law = [], torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda values, dim: seen.append(tuple(values.shape)) or law(values, dim))
    with torch.no_grad():
        token_signals(*(random(7)[name] for name in ("hidden", "head", "ids")))
    assert seen == [(3, VOCABULARY), (3, VOCABULARY), (1, VOCABULARY)]


def test_without_a_bias_there_is_none():
    given = random(3)
    without = token_signals(given["hidden"], given["head"], given["ids"])
    zero = token_signals(given["hidden"], given["head"], given["ids"], bias=torch.zeros(VOCABULARY).double())
    assert torch.equal(without.logprobs, zero.logprobs)
    given_bias = token_signals(given["hidden"], given["head"], given["ids"], bias=given["bias"])
    assert not torch.allclose(without.logprobs, given_bias.logprobs)


DIFFERENTIABLE = sorted(SIGNAL_NAMES - {"max_logprobs"})


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("rows", [2, 5])
def test_gradients_are_those_of_finite_differences(monkeypatch, name, rows):
    monkeypatch.setattr(signals, "ROWS", 3)
    given = random(rows)
    mask = torch.arange(rows) % 2 == 0

    def from_hidden(hidden, head, bias):
        options = {"needs": {name}, "min_p": MIN_P, "temperature": 0.7, "bias": bias}
        plain = getattr(token_signals(hidden, head, given["ids"], **options), name)
        return plain, getattr(token_signals(hidden, head, given["ids"], rows={name: mask}, **options), name)

    inputs = [given[key].requires_grad_() for key in ("hidden", "head", "bias")]
    assert torch.autograd.gradcheck(from_hidden, inputs)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_the_definitions(name):
    given = random(4)
    logits = (given["hidden"] @ given["head"].T).requires_grad_()
    found = getattr(token_signals_from_logits(logits, given["ids"], needs={name}, min_p=MIN_P), name)
    weights = torch.arange(1.0, 5.0)
    expected = torch.autograd.grad((direct(logits, given["ids"])[name] * weights).sum(), logits)[0]
    assert_near(torch.autograd.grad((found * weights).sum(), logits)[0], expected, TERMS, size=4 * LOGIT)


def test_the_likeliest_token_carries_no_gradient():
    given = random(2)
    logits = (given["hidden"] @ given["head"].T).requires_grad_()
    found = token_signals_from_logits(logits, given["ids"], needs={"max_logprobs", "logprobs"})
    assert found.logprobs.requires_grad
    assert not found.max_logprobs.requires_grad


def test_the_kept_set_is_fixed_under_the_gradient():
    # probabilities 0.5, 0.3, 0.2 and min_p 0.5: the first two stay, and moving the third moves their mass alone
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    logits = p.log().requires_grad_()
    found = token_signals_from_logits(logits, torch.tensor([0]), needs={"log_kept_mass"}, min_p=0.5).log_kept_mass
    assert found.item() == pytest.approx(math.log(0.8))
    found.backward()
    # d ln(p0 + p1) / d logit_v = [v kept] p_v / 0.8 - p_v
    expected = [0.5 / 0.8 - 0.5, 0.3 / 0.8 - 0.3, -0.2]
    assert logits.grad[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("min_p", "kept"),
    [(1.0, 0.5), (0.61, 0.5), (0.59, 0.8), (0.41, 0.8), (0.39, 1.0), (1e-9, 1.0)],
)
def test_the_kept_mass_is_that_of_tokens_near_the_likeliest(min_p, kept):
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    found = token_signals_from_logits(logits, torch.tensor([0]), needs={"log_kept_mass"}, min_p=min_p)
    assert found.log_kept_mass.exp().item() == pytest.approx(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_forbidden_token_leaves_values_and_gradients_finite(dtype, scale):
    logits = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, -torch.inf, -torch.inf]], dtype=dtype, requires_grad=True)
    found = token_signals_from_logits(logits, torch.tensor([0, 0]), needs=SIGNAL_NAMES, min_p=0.5)
    p = 1 / (1 + math.e)
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert found.entropies.tolist() == pytest.approx([entropy, 0.0])
    total = sum(getattr(found, name).sum() for name in SIGNAL_NAMES)
    (scale * total).backward()
    assert torch.isfinite(total)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_give_float32(dtype):
    given = random(5, dtype)
    for found in both(given):
        expected = direct(
            torch.nn.functional.linear(given["hidden"], given["head"], given["bias"]).double(), given["ids"]
        )
        for name, values in expected.items():
            assert getattr(found, name).dtype == torch.float32
            assert_near(getattr(found, name), values, TERMS, size=LOGIT)


def test_wide_inputs_stay_wide():
    assert both(random(2))[0].entropies.dtype == torch.float64


@pytest.mark.parametrize("needs", [set(), *({name} for name in sorted(SIGNAL_NAMES)), {"logprobs", "sum_p_sq"}])
def test_what_is_not_asked_for_is_not_there(needs):
    for found in both(random(3), needs=needs):
        assert {name for name in SIGNAL_NAMES if getattr(found, name) is not None} == needs


def test_log_probs_and_entropies_are_asked_for_by_default():
    given = random(2)
    found = token_signals(given["hidden"], given["head"], given["ids"])
    assert {name for name in SIGNAL_NAMES if getattr(found, name) is not None} == {"logprobs", "entropies"}


def test_nothing_that_was_not_asked_for_is_computed(monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(tile, "_entropy", never)
    monkeypatch.setattr(tile, "_kept_mass", never)
    with pytest.raises(AssertionError):
        both(random(3), needs={"entropies"})
    both(random(3), needs={"logprobs", "sum_p_sq", "max_logprobs"})


@pytest.mark.parametrize("name", sorted(SIGNAL_NAMES))
@pytest.mark.parametrize("where", [[0, 1, 0, 0, 1, 1, 0], [0] * 7, [1] * 7])
def test_only_the_rows_that_need_it_have_a_signal(monkeypatch, name, where):
    monkeypatch.setattr(signals, "ROWS", 3)
    where = torch.tensor(where, dtype=torch.bool)
    for whole, some in zip(both(random(7)), both(random(7), rows={name: where}), strict=True):
        for one in SIGNAL_NAMES - {name}:
            assert torch.equal(getattr(some, one), getattr(whole, one))
        assert torch.equal(getattr(some, name), getattr(whole, name) * where)


def test_a_mask_of_a_signal_that_is_not_asked_for_does_nothing():
    plain, _ = both(random(3), needs={"logprobs"})
    masked, _ = both(random(3), needs={"logprobs"}, rows={"entropies": torch.tensor([True, False, True])})
    assert torch.equal(plain.logprobs, masked.logprobs)


def test_a_masked_row_has_no_gradient():
    given = random(2)
    logits = (given["hidden"] @ given["head"].T).requires_grad_()
    mask = torch.tensor([True, False])
    token_signals_from_logits(
        logits, given["ids"], needs={"entropies"}, rows={"entropies": mask}
    ).entropies.sum().backward()
    assert logits.grad[0].abs().sum() > 0
    assert logits.grad[1].tolist() == [0.0] * VOCABULARY


def test_two_records_are_not_compared_by_their_tensors():
    assert TokenSignals(logprobs=torch.zeros(2)) != TokenSignals(logprobs=torch.zeros(2))


LOGITS, IDS = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: token_signals_from_logits(torch.zeros(5), IDS), ShapeError,
         "token_signals_from_logits: logits are (5,), expected (N, V)."),
        (lambda: token_signals_from_logits(LOGITS, IDS[:2]), ShapeError,
         "3 rows and token_ids of shape (2,); expected (N,)."),
        (lambda: token_signals_from_logits(LOGITS, IDS.reshape(3, 1)), ShapeError,
         "3 rows and token_ids of shape (3, 1); expected (N,)."),
        (lambda: token_signals(torch.zeros(3, 4), torch.zeros(5, 3), IDS), ShapeError,
         "token_signals: hidden is (3, 4) and head_weight (5, 3); expected (N, d) and (V, d)."),
        (lambda: token_signals(torch.zeros(1, 3, 4), torch.zeros(5, 4), IDS), ShapeError,
         "token_signals: hidden is (1, 3, 4) and head_weight (5, 4); expected (N, d) and (V, d)."),
        (lambda: token_signals_from_logits(LOGITS, IDS, needs={"entropy"}), MissingSignal,
         "no signal is called 'entropy'. Known: entropies, log_kept_mass, logprobs, max_logprobs, sum_p_sq."),
        (lambda: token_signals_from_logits(LOGITS, IDS, temperature=0.0), OutOfRange,
         "temperature = 0.0, expected a number above 0."),
        (lambda: token_signals_from_logits(LOGITS, IDS, temperature=math.nan), OutOfRange,
         "temperature = nan, expected a number above 0."),
        (lambda: token_signals_from_logits(LOGITS, IDS, needs={"log_kept_mass"}), OutOfRange,
         "log_kept_mass needs min_p in (0, 1], not None."),
        (lambda: token_signals_from_logits(LOGITS, IDS, needs={"log_kept_mass"}, min_p=1.5), OutOfRange,
         "log_kept_mass needs min_p in (0, 1], not 1.5."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
