import math

import pytest
import torch

from rlstab import PolicyOutputs, TokenBatch
from rlstab.core.batch import to_padded
from rlstab.errors import MissingSignal
from tests.core.steps import LIVE, batch_of, padded, random_rows

MASK = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 0, 1]])
VALUES = torch.arange(12.0).reshape(4, 3)


def make(**changes):
    given = {"response_mask": MASK, "advantages": torch.tensor([1.0, -1.0, 2.0, 0.5]), "old_logprobs": -VALUES}
    return TokenBatch.from_padded(**(given | changes))


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf, 1e9])
def test_what_stands_in_the_padding_is_never_read(filler):
    names = ["logprobs", "entropies", "ref_logprobs", "max_logprobs", "log_kept_mass", "sum_p_sq", "rollout_logprobs"]

    def filled(values):
        return torch.where(MASK.bool(), values, filler)

    given = {name: VALUES + place for place, name in enumerate(names)}
    given |= {"advantages": VALUES - 3, "old_logprobs": -VALUES}
    clean = make(**given, extra={"mine": VALUES * 2})
    dirty = make(**{name: filled(values) for name, values in given.items()}, extra={"mine": filled(VALUES * 2)})
    assert len(clean.per_token()) == 10
    for (name, values), (_, other) in zip(clean.per_token(), dirty.per_token(), strict=True):
        assert torch.equal(values, other), name

    live = PolicyOutputs.from_padded(dirty, logprobs=filled(-VALUES).requires_grad_())
    assert torch.equal(live.logprobs, clean.old_logprobs)


def test_tokens_are_packed_row_by_row():
    batch = make(sequence_ids=torch.tensor([7, 5, 3, 1]), group_ids=torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    assert len(batch) == 6
    assert batch.num_sequences == 4
    assert batch.old_logprobs.tolist() == [0.0, -1.0, -4.0, -5.0, -9.0, -11.0]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 3, 3]
    assert batch.position.tolist() == [0, 1, 0, 1, 0, 1]
    assert batch.sequence_ids.tolist() == [7, 5, 3, 1]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.group_ids.dtype == torch.int64
    assert batch.logprobs is batch.old_logprobs
    assert make().sequence_ids.tolist() == [0, 1, 2, 3]
    assert make().advantages.tolist() == [1.0, 1.0, -1.0, -1.0, 0.5, 0.5]  # of rows, and of tokens:
    assert make(advantages=VALUES).advantages.tolist() == [0.0, 1.0, 4.0, 5.0, 9.0, 11.0]


@pytest.mark.parametrize(
    ("given", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_evidence_is_detached_and_widened_at_the_door(given, kept):
    values = VALUES.to(given).requires_grad_()
    batch = make(old_logprobs=-values, entropies=values, advantages=values, extra={"mine": values})
    assert {tensor.dtype for _, tensor in batch.per_token()} == {kept}
    assert not any(tensor.requires_grad for _, tensor in batch.per_token())
    policy = PolicyOutputs.from_padded(batch, logprobs=values, entropies=values)
    assert {tensor.dtype for tensor in policy.present()} == {kept}
    assert all(tensor.requires_grad for tensor in policy.present())


def test_to_padded_is_the_inverse_of_packing():
    batch = make(entropies=VALUES)
    assert torch.equal(to_padded(batch, batch.entropies, fill=-1.0), torch.where(MASK.bool(), VALUES, -1.0))
    assert torch.equal(to_padded(batch, batch.entropies > 4), (VALUES > 4) & MASK.bool())


def test_select_keeps_the_numbers_of_sequences_and_all_signals():
    rows = random_rows(1, [3, 2, 4])
    batch = batch_of(rows, [5, 6, 7])
    where = batch.entropies >= batch.entropies.median()
    chosen = batch.select(where)
    for (name, values), (_, other) in zip(batch.per_token(), chosen.per_token(), strict=True):
        assert torch.equal(values[where], other), name
    assert torch.equal(batch.sequence[where], chosen.sequence)
    assert torch.equal(batch.uniform(3)[where], chosen.uniform(3))
    assert chosen.num_sequences == 3
    assert torch.equal(to_padded(chosen, chosen.entropies), to_padded(batch, batch.entropies * where))

    policy = PolicyOutputs.from_padded(batch, **{name: padded(rows, field) for name, field in LIVE.items()})
    assert torch.equal(policy.select(where).log_kept_mass, policy.log_kept_mass[where])


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (3, 2)])
def test_batch_without_tokens(shape):
    nothing = torch.zeros(shape)
    batch = TokenBatch.from_padded(response_mask=nothing, advantages=nothing, old_logprobs=nothing)
    assert (len(batch), batch.num_sequences) == (0, shape[0])
    assert to_padded(batch, batch.old_logprobs).shape == shape
    empty = TokenBatch.empty({"entropies", "mine"})
    assert batch.uniform(0).shape == empty.signal("entropies").shape == empty.signal("mine").shape == (0,)
    assert empty.num_sequences == len(empty) == 0
    with pytest.raises(MissingSignal):
        empty.signal("ref_logprobs")
