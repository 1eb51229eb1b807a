"""The passes over the vocabulary: values, gradients, live rows, precision and memory, whatever the tiles."""

import copy
import math
from itertools import combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlstab import preflight, signals
from rlstab.errors import MissingSignal, OutOfRange, RlstabError, ShapeError
from rlstab.signals import SIGNAL_NAMES, as_support, tile, tiled_head
from tests.tolerances import assert_near
from tests.train.runs import small as small_run

MIN_P = 0.3
ROWS, WIDTH, VOCAB = 7, 5, 23
EACH_ROW = torch.linspace(0.4, 2.0, ROWS).double()  #: temperatures
#: Roundings of a signal: a product, a softmax, and eight of single functions; of a gradient, the rows as well.
TERMS = WIDTH + VOCAB + 8 + ROWS
#: Bounds on the logits, and on the logits over the smallest temperature.
LOGIT, HOT = 20.0, 50.0
DIFFERENTIABLE = sorted(SIGNAL_NAMES - {"max_logprobs"})
SUBSETS = [set(some) for size in range(len(SIGNAL_NAMES) + 1) for some in combinations(sorted(SIGNAL_NAMES), size)]
#: (rows, columns) of a tile: one tile, several that do not divide, one that divides, one column each
TILES = [(1024, 4096), (3, 5), (7, 23), (4, 1)]


def support_of(ids, vocab):
    """``(N, 4)`` what a sampler kept: the token, its neighbour, a distant one; every third row is not cut."""
    support = torch.stack([ids, (ids + 1) % vocab, (ids + vocab // 2) % vocab, torch.full_like(ids, -1)], 1)
    if vocab < 4:  # or they would not be distinct
        support[:, 1:] = -1
    support[::3] = -1
    return support


def token_signals(hidden, head_weight, token_ids, **options):
    """With a support, if it is read."""
    if "log_support_mass" in options.get("needs", ()):
        options = {"support": support_of(token_ids, len(head_weight)), **options}
    return signals.token_signals(hidden, head_weight, token_ids, **options)


def token_signals_from_logits(logits, token_ids, **options):
    if "log_support_mass" in options.get("needs", ()):
        options = {"support": support_of(token_ids, logits.shape[1]), **options}
    return signals.token_signals_from_logits(logits, token_ids, **options)


def dense(logits, ids, temperature=1.0):
    """The signals of ``(N, V)`` logits by their definitions, under autograd."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.unsqueeze(-1)
    logp = (logits / temperature).log_softmax(-1)
    p = logp.exp()
    inside = torch.zeros(logp.shape, dtype=torch.bool)
    for row, support in enumerate(support_of(ids, logits.shape[1]).tolist()):
        inside[row, [token for token in support if token >= 0] or slice(None)] = True
    kept = p.detach() >= MIN_P * p.detach().amax(-1, keepdim=True)
    return {
        "logprobs": logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1),
        "entropies": -(p * logp.clamp(min=-1e4)).sum(-1),
        "max_logprobs": logp.detach().amax(-1),
        "log_kept_mass": logp.masked_fill(~kept, -math.inf).logsumexp(-1),
        "sum_p_sq": p.square().sum(-1),
        "log_support_mass": logp.masked_fill(~inside, -math.inf).logsumexp(-1),
    }


def inputs(rows=ROWS, width=WIDTH, vocab=VOCAB, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    hidden, weight, bias = normal(rows, width), normal(vocab, width), normal(vocab)
    ids = torch.arange(rows) * 4 % vocab  # in many tiles, the first among them
    if rows > 1:
        ids[-1] = vocab - 1
    return hidden, weight, bias, ids


def leaves(*tensors):
    return [values.detach().clone().requires_grad_() for values in tensors]


def shape_of(tile):
    return f"{tile[0]}x{tile[1]}"


#: Whole rows at once, and a running pass: for what does not depend on where a tile ends.
BOTH_PASSES = pytest.mark.parametrize("tiles", TILES[:2], ids=shape_of, indirect=True)


@pytest.fixture(params=TILES, ids=shape_of)
def tiles(request, monkeypatch):
    monkeypatch.setattr(signals, "ROWS", request.param[0])
    monkeypatch.setattr(signals, "COLUMNS", request.param[1])
    return request.param


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(signals, "ROWS", 3)
    monkeypatch.setattr(signals, "COLUMNS", 5)


def mixed(rows):
    return torch.randn(len(SIGNAL_NAMES), rows, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def total(result, needs, mix):
    """A loss in which every row of every signal has a separate weight."""
    parts = [(result[name] * weights).sum() for name, weights in zip(sorted(needs), mix, strict=False)]
    return sum(parts) if parts else torch.zeros(())


HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "temperature of each row": {"temperature": EACH_ROW.float()},
    "scale": {"logit_scale": 0.5},
    "softcap": {"softcap": 1.5, "temperature": 0.7},
    "softcap and scale, temperature of each row": {"softcap": 2.0, "logit_scale": 1.5, "temperature": EACH_ROW},
}


def reference(hidden, weight, bias, ids, temperature=1.0, logit_scale=1.0, softcap=None):
    logits = hidden @ weight.T * logit_scale if bias is None else (hidden @ weight.T + bias) * logit_scale
    return dense(logits if softcap is None else softcap * torch.tanh(logits / softcap), ids, temperature)


def assert_by_definition(given, ids, *, needs=SIGNAL_NAMES, mix=None, size=LOGIT, weighed=1.0, **options):
    """Values of ``(hidden, weight, bias)`` or ``(logits,)``, and gradients of a loss, are those of the definitions.

    ``mix`` weighs every row of every signal in the loss, and makes gradients larger by ``weighed``; returns them.
    """
    mix = mixed(len(ids)) if mix is None else mix
    own, plain = copy.deepcopy(given), copy.deepcopy(given)
    if len(given) == 1:
        result = vars(token_signals_from_logits(*own, ids, needs=needs, min_p=MIN_P, **options))
        expected = dense(*plain, ids, **options)
    else:
        result = vars(token_signals(*own[:2], ids, bias=own[2], needs=needs, min_p=MIN_P, **options))
        expected = reference(*plain, ids, **options)
    for name in SIGNAL_NAMES:
        assert (result[name] is not None) == (name in needs)
        if name in needs:
            assert_near(result[name], expected[name], TERMS, size=size)
    for loss in (total(result, needs, mix), total(expected, needs, mix)):
        if loss.requires_grad:
            loss.backward()
    gradients, wanted = ([None if leaf is None else leaf.grad for leaf in side] for side in (own, plain))
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_near(mine, theirs, TERMS, size=size * weighed)
    return gradients


@pytest.mark.parametrize("frozen", [False, True], ids=["biased", "frozen, without bias"])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS.keys())
def test_every_choice_of_signals_has_the_values_and_gradients_of_the_definitions(small, options, frozen):
    hidden, weight, bias, ids = inputs()
    given = (*leaves(hidden), weight, None) if frozen else leaves(hidden, weight, bias)
    alone = [{name} for name in SIGNAL_NAMES]
    # which signals are asked for together does not depend on the head
    everything = "logit_scale" in options and "softcap" in options and not frozen
    for needs in SUBSETS if everything else [set(), *alone, SIGNAL_NAMES]:
        gradients = assert_by_definition(given, ids, needs=needs, size=HOT, **options)
        assert (frozen or not needs - {"max_logprobs"}) == (gradients[1] is None)


@pytest.mark.parametrize("temperature", [0.6, EACH_ROW], ids=["all", "a row each"])
def test_from_logits_too(tiles, temperature):
    hidden, weight, bias, ids = inputs()
    logits = leaves(hidden @ weight.T + bias)
    # which signals are asked for together does not depend on the tile
    for needs in SUBSETS[1:] if tiles == (3, 5) else [*({name} for name in SIGNAL_NAMES), SIGNAL_NAMES]:
        assert_by_definition(logits, ids, needs=needs, size=HOT, temperature=temperature)
    untouched = logits[0].detach().clone()
    token_signals_from_logits(*logits, ids, needs=SIGNAL_NAMES, min_p=MIN_P).logprobs.sum().backward()
    assert torch.equal(logits[0], untouched)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("vocab", [1, 4, 5, 6, 10, 11])
def test_a_tile_ends_where_it_should(small, rows, vocab):
    *given, ids = inputs(rows, WIDTH, vocab)
    ends = torch.tensor([0, vocab - 1, min(4, vocab - 1), min(5, vocab - 1), vocab - 1, 0])[:rows]
    count = len(SIGNAL_NAMES) * rows
    mix = torch.arange(1.0, count + 1, dtype=torch.float64).reshape(-1, rows) if rows else mixed(0)
    for token in (ids, ends):
        assert_by_definition(leaves(*given), token, mix=mix, weighed=count)


# silent rows


@BOTH_PASSES
@pytest.mark.parametrize("live", [[0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1], [0] * 7], ids=["some", "last", "none"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_silent_rows_get_nothing_and_the_others_what_they_had(tiles, name, live):
    hidden, weight, bias, ids = inputs()
    mix = mixed(ROWS) * torch.tensor(live)
    for given in (leaves(hidden, weight, bias), leaves(hidden @ weight.T)):
        gradients = assert_by_definition(given, ids, needs={name}, mix=mix)
        assert (gradients[0][torch.tensor(live) == 0] == 0).all()


def test_a_nan_among_the_incoming_gradients_stays_visible(tiles):
    hidden, weight, _, ids = inputs()
    g = torch.zeros(ROWS, dtype=torch.float64)
    g[3] = math.nan
    given = leaves(hidden, weight)
    by_hidden, by_weight = torch.autograd.grad(token_signals(*given, ids).logprobs, given, g)
    assert by_hidden.isnan().any(-1).nonzero().flatten().tolist() == [3]
    assert by_weight.isnan().all()
    (logits,) = leaves(hidden @ weight.T)
    (by_logits,) = torch.autograd.grad(token_signals_from_logits(logits, ids).logprobs, logits, g)
    assert by_logits.isnan().any(-1).nonzero().flatten().tolist() == [3]


def test_a_backward_works_on_the_live_rows_alone(small):
    hidden, weight, _, ids = inputs(60)
    given = leaves(hidden, weight)
    result = token_signals(*given, ids)
    with Largest() as seen:
        (result.logprobs[7] + result.entropies[9]).backward()
    assert given[0].grad.ne(0).any(-1).nonzero().flatten().tolist() == [7, 9]
    # 23 columns in tiles of 5: the logits again, and what they give to the hidden states and to the weight
    assert seen.products == {shape for c in (5, 3) for shape in ((2, WIDTH, c), (2, c, WIDTH), (c, 2, WIDTH))}


# edges of the numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forbidden_tokens_leave_everything_finite(tiles, dtype):
    hidden, weight, bias, ids = inputs(dtype=dtype)
    bias[:6] = -math.inf  # whole tiles of them, the first among them
    bias[9] = bias[22] = -math.inf
    ids = torch.full((ROWS,), 8)
    gradients = assert_by_definition(leaves(hidden, weight, bias), ids, mix=torch.ones(len(SIGNAL_NAMES), ROWS))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[2][:6] == 0).all()
    assert (gradients[1][9] == 0).all()
    nothing = token_signals(hidden, weight, ids, bias=torch.full_like(bias, -math.inf))
    assert torch.stack([nothing.logprobs, nothing.entropies]).isnan().all()


@BOTH_PASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("spread", [1e-4, 1.0, 1e4])
def test_big_and_tiny_logits(tiles, dtype, offset, spread):
    draw = torch.Generator().manual_seed(1)
    logits = (torch.randn(ROWS, VOCAB, generator=draw).double() * spread + offset).to(dtype)
    ids = logits.argmax(-1)
    hidden, weight = torch.eye(ROWS, dtype=dtype), logits.T.contiguous()
    g = torch.ones(len(SIGNAL_NAMES), ROWS, dtype=torch.float64)
    exact = leaves(logits.double())[0]
    expected = dense(exact, ids)
    total(expected, SIGNAL_NAMES, g).backward()
    product, made = leaves(weight)[0], leaves(logits)[0]
    for result, leaf in (
        (token_signals(hidden, product, ids, needs=SIGNAL_NAMES, min_p=MIN_P), product),
        (token_signals_from_logits(made, ids, needs=SIGNAL_NAMES, min_p=MIN_P), made),
    ):
        for name in SIGNAL_NAMES:
            # of the size of log-probs, not of logits: the largest logit is taken away before anything is rounded
            assert_near(getattr(result, name), expected[name], TERMS)
        total(vars(result), SIGNAL_NAMES, g.to(dtype)).backward()
        gradient = leaf.grad.T if leaf is product else leaf.grad
        assert_near(gradient, exact.grad, TERMS, size=math.log(VOCAB))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_likeliest_token_is_kept_however_its_logit_is_rounded_the_second_time(small, dtype):
    hidden, weight, _, ids = inputs(16, 300, VOCAB, dtype)
    hidden = hidden / 8
    for row in range(16):  # alone: another shape of product than the first time
        where = torch.arange(16) == row
        given = leaves(hidden, weight)
        names = {"log_kept_mass", "max_logprobs"}
        result = token_signals(*given, ids, needs=names, min_p=1.0, rows={"log_kept_mass": where})
        assert result.log_kept_mass[row] >= result.max_logprobs[row]
        if dtype != torch.bfloat16:  # where two tokens may be the likeliest
            terms = TERMS - WIDTH + 300
            assert_near(result.log_kept_mass[row], result.max_logprobs[row], terms, size=LOGIT)
            (passed,) = torch.autograd.grad(result.log_kept_mass.sum(), given[0])
            likeliest = (hidden @ weight.T).argmax(-1)
            logprobs = token_signals(*given, likeliest).logprobs[row]
            (expected,) = torch.autograd.grad(logprobs, given[0])
            assert_near(passed, expected, terms, size=LOGIT)


def error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("names", [{"logprobs"}, {"entropies"}, {"logprobs", "entropies", "sum_p_sq"}])
def test_bfloat16_is_as_near_to_float64_as_the_plain_path(monkeypatch, names, slow):
    monkeypatch.setattr(tiled_head, "slow_bf16", lambda: slow)
    monkeypatch.setattr(signals, "ROWS", 48)
    rows, width, vocab = 100, 64, 4500
    hidden, weight, _, ids = inputs(rows, width, vocab, torch.float32)
    hidden, weight = (hidden * 4 / math.sqrt(width)).bfloat16(), weight.bfloat16()
    mix = mixed(rows).float()

    exact, plain, ours = leaves(hidden.double(), weight.double()), leaves(hidden, weight), leaves(hidden, weight)
    wide, narrow = dense(exact[0] @ exact[1].T, ids), dense((plain[0] @ plain[1].T).float(), ids)
    result = vars(token_signals(*ours, ids, needs=names))
    for values in (wide, narrow, result):
        total(values, names, mix).backward()
    for name in names:
        assert error(result[name], wide[name]) <= 1.1 * error(narrow[name], wide[name])
    for mine, theirs, known in zip(ours, plain, exact, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert error(mine.grad, known.grad) <= 1.1 * error(theirs.grad, known.grad)


@pytest.mark.parametrize(("slow", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_where_bfloat16_is_slow_tiles_are_multiplied_in_float32(small, monkeypatch, slow, dtype):
    monkeypatch.setattr(tiled_head, "slow_bf16", lambda: slow)
    hidden, weight, bias, ids = inputs(dtype=torch.bfloat16)
    given = leaves(hidden, weight, bias)
    with Largest() as seen:
        result = token_signals(*given[:2], ids, bias=given[2])
        (result.logprobs + result.entropies).sum().backward()
    # what the rows' gradients are added up from is float32 in any case: products of an entropy nearly cancel
    assert seen.dtypes == {dtype, torch.float32}
    assert result.logprobs.dtype == result.entropies.dtype == torch.float32


@pytest.mark.parametrize("slow", [False, True])
def test_check_says_that_bfloat16_is_slower_on_such_a_machine(monkeypatch, tmp_path, slow):
    monkeypatch.setattr(preflight, "slow_bf16", lambda: slow)
    for precision, told in (("bf16", slow), ("fp32", False)):
        run = small_run(tmp_path, optimisation__precision=precision)
        assert any("bf16 is slower" in line for line in preflight.preflight(run)) == told


# what is refused, what is not done, what is not held


def test_a_second_derivative_is_refused():
    hidden, weight, _, ids = inputs()
    given, logits = leaves(hidden, weight), leaves(hidden @ weight.T)
    passes = (given[0], token_signals(*given, ids)), (logits[0], token_signals_from_logits(*logits, ids))
    for leaf, result in ((leaf, made.entropies) for leaf, made in passes):
        (first,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
        assert first.isfinite().all()
        with pytest.raises(RlstabError, match="first derivative only"):
            torch.autograd.grad(first.square().sum(), leaf)


def test_nothing_that_was_not_asked_for_is_computed(monkeypatch, tiles):
    # what entropies read, and what the kept mass reads
    for module, name in ((tile, "FLOOR"), (tiled_head, "FLOOR"), (tile, "math"), (tiled_head, "_kept_pass")):
        monkeypatch.delattr(module, name)
    hidden, weight, _, ids = inputs()
    needs = {"logprobs", "sum_p_sq", "max_logprobs"}
    token_signals(hidden, weight, ids, needs=needs)
    token_signals_from_logits(hidden @ weight.T, ids, needs=needs)


class Largest(TorchDispatchMode):
    """Sizes of every tensor that an operation returns, and the shapes of products."""

    def __enter__(self):
        self.numel, self.products, self.dtypes = 0, set(), set()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            self.numel = max(self.numel, made.numel() if isinstance(made, torch.Tensor) else 0)
        if function.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.products.add((left.shape[0], left.shape[1], right.shape[1]))
            self.dtypes.add(right.dtype)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
def test_no_tensor_is_as_large_as_rows_times_vocabulary(monkeypatch, dtype, options):
    monkeypatch.setattr(signals, "ROWS", 16)
    monkeypatch.setattr(signals, "COLUMNS", 64)
    rows, width, vocab = 40, 4, 300
    hidden, weight, bias, ids = inputs(rows, width, vocab, dtype)
    given = leaves(hidden, weight, bias)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.numel()) or saved, lambda x: x)
    with Largest() as seen, hooks:
        result = token_signals(*given[:2], ids, bias=given[2], needs=SIGNAL_NAMES, min_p=MIN_P, **options)
        total(vars(result), SIGNAL_NAMES, torch.ones(len(SIGNAL_NAMES), rows)).backward()
    assert 16 * 64 <= seen.numel <= vocab * width
    assert max(kept) <= vocab * width
    logits = torch.randn(rows, vocab, dtype=dtype)
    with torch.no_grad(), Largest() as seen:
        token_signals_from_logits(logits, ids, needs=SIGNAL_NAMES, min_p=MIN_P)
    assert vocab <= seen.numel <= 16 * 64  # a row is what fits


def test_autocast_reaches_the_head():
    hidden, weight, bias, ids = inputs(dtype=torch.float32)
    given = leaves(hidden, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = token_signals(*given[:2], ids, bias=given[2])
    narrow = token_signals(hidden.bfloat16(), weight.bfloat16(), ids, bias=bias.bfloat16())
    assert torch.equal(result.logprobs, narrow.logprobs)
    result.logprobs.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in given)


# which rows, and what is refused


def test_only_the_rows_that_need_it_have_a_signal(tiles):
    hidden, weight, _, ids = inputs()
    for law, source in ((token_signals, (hidden, weight)), (token_signals_from_logits, (hidden @ weight.T,))):
        given = leaves(*source)
        whole = law(*given, ids, needs=SIGNAL_NAMES, min_p=MIN_P)
        for where in ([0, 1, 0, 0, 1, 1, 0], [0] * 7, [1] * 7):
            where = torch.tensor(where, dtype=torch.bool)
            for name in SIGNAL_NAMES:
                again = leaves(*source)
                some = law(*again, ids, needs=SIGNAL_NAMES, min_p=MIN_P, rows={name: where})
                for other in SIGNAL_NAMES - {name}:
                    assert torch.equal(getattr(some, other), getattr(whole, other))
                # a product of fewer rows may round otherwise, by the processor
                torch.testing.assert_close(getattr(some, name), getattr(whole, name) * where, rtol=1e-12, atol=0)
                if name != "max_logprobs":
                    mine = torch.autograd.grad(getattr(some, name).sum(), again)
                    theirs = torch.autograd.grad(getattr(whole, name), given, where.double(), retain_graph=True)
                    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_what_does_not_fit_is_refused():
    hidden, weight, ids = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    for changes, kind, named in (
        ({"bias": torch.zeros(4)}, ShapeError, "bias"),
        ({"bias": torch.zeros(5, dtype=torch.float64)}, ShapeError, "bias"),
        ({"head_weight": torch.zeros(5, 3)}, ShapeError, "head_weight"),
        ({"hidden": torch.zeros(1, 3, 4)}, ShapeError, "hidden"),
        ({"token_ids": ids[:2]}, ShapeError, "token_ids"),
        ({"token_ids": ids.reshape(3, 1)}, ShapeError, "token_ids"),
        ({"token_ids": torch.tensor([0, -100, 4])}, OutOfRange, "token id"),
        ({"token_ids": torch.tensor([0, 1, 5])}, OutOfRange, "token id"),
        ({"softcap": 0.0}, OutOfRange, "softcap"),
        ({"temperature": 0.0}, OutOfRange, "temperature"),
        ({"temperature": math.nan}, OutOfRange, "temperature"),
        ({"temperature": torch.ones(2)}, ShapeError, "temperature"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, OutOfRange, "temperature"),
        ({"rows": {"entropies": torch.ones(2, dtype=torch.bool)}}, ShapeError, "entropies"),
        ({"needs": {"entropy"}}, MissingSignal, "entropy"),
        ({"needs": {"log_kept_mass"}}, OutOfRange, "min_p"),
        ({"needs": {"log_kept_mass"}, "min_p": 1.5}, OutOfRange, "min_p"),
        ({"needs": {"log_support_mass"}}, MissingSignal, "return_sampling_mask"),
        ({"needs": {"log_support_mass"}, "support": torch.zeros(2, 1).long()}, ShapeError, "support"),
        ({"needs": {"log_support_mass"}, "support": torch.zeros(3, 1)}, ShapeError, "support"),
        ({"needs": {"log_support_mass"}, "support": torch.tensor([[0], [1], [-1]])}, OutOfRange, "1 tokens are not in"),
        ({"needs": {"log_support_mass"}, "support": torch.tensor([[0, 5], [0, 1], [0, 2]])}, OutOfRange, "vocabulary"),
    ):
        with pytest.raises(kind, match=named):
            signals.token_signals(**{"hidden": hidden, "head_weight": weight, "token_ids": ids} | changes)
    with pytest.raises(ShapeError, match="logits"):
        token_signals_from_logits(torch.zeros(5), ids)


def test_a_support_is_read_in_the_forms_in_which_samplers_hand_it_over():
    flat, expected = torch.tensor([7, 3, 1, 5, 2]), [[7, 3, -1], [-1, -1, -1], [1, 5, 2]]
    assert as_support(flat, offsets=torch.tensor([0, 2, 2, 5])).tolist() == expected  # vLLM
    assert as_support(flat, counts=torch.tensor([2, 0, 3], dtype=torch.int32)).tolist() == expected  # prime-rl
    assert as_support(torch.tensor(expected, dtype=torch.int32)).tolist() == expected
    bits = torch.zeros(2, 9, dtype=torch.bool)
    bits[0, [1, 4]] = bits[1, 8] = True
    assert as_support(bits).tolist() == [[1, 4], [8, -1]]
    assert as_support(flat[:0], counts=torch.zeros(0, dtype=torch.int64)).shape == (0, 0)
    for given, kind, named in (
        ((flat, {}), ShapeError, "expected \\(N, K\\)"),
        ((flat, {"counts": torch.tensor([2, 2])}), ShapeError, "add up to 4"),
        ((torch.tensor([[1, 2, 1]]), {}), OutOfRange, "kept twice"),
    ):
        with pytest.raises(kind, match=named):
            as_support(given[0], **given[1])


def test_the_mass_of_a_support_is_exact_however_small_it_is():
    logits = torch.tensor([[0.0, -400.0, -401.0]])
    result = signals.token_signals_from_logits(
        logits, torch.tensor([1]), needs={"logprobs", "log_support_mass"}, support=torch.tensor([[1, 2]])
    )
    assert (result.logprobs - result.log_support_mass).item() == pytest.approx(-math.log1p(math.exp(-1.0)), abs=1e-4)
