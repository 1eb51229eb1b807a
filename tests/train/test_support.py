"""Runs whose sampler draws with top-p or top-k: its supports reach the loss, the record and a continued run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab import PolicyOutputs, TokenBatch
from rlstab.explain.notes import notes
from rlstab.look.sampler import sampler_of
from rlstab.models.policy import Sequences
from rlstab.record import read_dump
from rlstab.record.step import MOST_KEPT
from rlstab.record.writer import tensors_of
from tests.train.runs import column, forget_newest, go, metrics, small

REPLAY = ["clip_higher", "support_replay"]
CUT: dict[str, Any] = {"rollout__top_p": 0.7, "rollout__temperature": 1.5, "optimisation__old_logprobs": "rollout"}


def test_the_ratio_is_one_where_the_support_is_replayed_and_the_mass_where_not(tmp_path: Path) -> None:
    told = CUT | {"optimisation__rollouts": 1, "tracking__dump_every": 1}
    with_replay, without = (
        go(small(tmp_path / name, objective, **told)).records
        for name, objective in (("with", REPLAY), ("without", "clip_higher"))
    )
    (mass,) = column(with_replay, "ratio/support_mass")
    assert 0.7 <= mass < 0.95
    assert column(with_replay, "ratio/mean") == pytest.approx([1.0], abs=1e-5)
    assert column(without, "ratio/mean") == pytest.approx([mass], abs=1e-5)
    assert column(with_replay, "sampler/gap_live")[0] < 1e-4 < 0.05 < column(without, "sampler/gap_live")[0]
    steps = [read_dump(tmp_path / name).steps[0] for name in ("with", "without")]
    found = [sampler_of([step]) for step in steps]
    assert [each is not None and "top_p 0.7 renormalised" in each.sentence for each in found] == [False, True]
    assert found[1] is not None
    assert "support_replay" in found[1].sentence
    assert "support" not in steps[1].tensors
    kept, ids = steps[0].tensors["support"], steps[0].tensors["ids"]
    assert kept.shape == (len(ids), MOST_KEPT)
    assert bool((kept == ids.unsqueeze(1)).any(1).all())  # what was drawn was kept


@pytest.mark.parametrize("settings", [{"optimisation__old_logprobs": "recompute"}, {"optimisation__refresh": "step"}])
def test_evidence_of_the_trainer_is_over_the_support(tmp_path: Path, settings: dict[str, Any]) -> None:
    told = CUT | {"rollout__top_p": 1.0, "rollout__top_k": 3, "optimisation__lr": 1e-7, **settings}
    records = go(small(tmp_path / "run", [*REPLAY, "kl"], **told)).records
    assert column(records, "sampler/gap") == pytest.approx([0.0] * 2, abs=1e-4)
    # the reference is the policy itself, over the same tokens
    assert column(records, "kl/value") == pytest.approx([0.0] * 2, abs=1e-6)


def test_replay_changes_nothing_where_the_sampler_keeps_every_token(tmp_path: Path) -> None:
    runs = [metrics(Path(go(small(tmp_path / str(len(one)), one)).out)) for one in (["clip_higher"], REPLAY)]
    with_replay = [{key: row[key] for key in row if key != "ratio/support_mass"} for row in runs[1]]
    assert column(runs[1], "ratio/support_mass") == [1.0, 1.0]
    assert with_replay == runs[0]


def test_a_waiting_rollout_keeps_its_support_in_a_checkpoint(tmp_path: Path) -> None:
    told = CUT | {"rollout__staleness": 1, "tracking__checkpoint_every": 1}
    run = small(tmp_path / "run", REPLAY, optimisation__rollouts=3, **told)
    go(run)
    whole = metrics(tmp_path / "run")
    forget_newest(tmp_path / "run")
    go(run, resume=True)
    assert metrics(tmp_path / "run") == whole


def test_sequences_keep_their_supports_when_they_are_joined_picked_and_cut() -> None:
    def made(rows: int, length: int, kept: int) -> Sequences:
        ids = torch.arange(rows * length).view(rows, length)
        mask = torch.ones_like(ids, dtype=torch.bool)
        support = torch.arange(rows * length * kept, dtype=torch.int32).view(rows, length, kept)
        return Sequences(ids, mask, ids, mask, support)

    both = Sequences.joined([made(1, 2, 3), made(2, 3, 1)], 0)
    assert both.support.shape == (3, 3, 3)
    assert both.support[0].tolist() == [[0, 1, 2], [3, 4, 5], [-1, -1, -1]]
    assert both.support[2, 2].tolist() == [5, -1, -1]
    assert both.rows(torch.tensor([0])).support.shape == (1, 2, 3)
    assert both.cut(1).support[0].tolist() == [[0, 1, 2]]
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert Sequences(ids, ids.bool(), ids, ids.bool()).support.shape == (2, 3, 0)


def test_a_record_has_so_many_ids_of_a_support_and_says_where_there_were_more() -> None:
    old = torch.full((1, 2), -1.0)
    batch = TokenBatch.from_padded(response_mask=torch.ones(1, 2), advantages=torch.ones(1), old_logprobs=old)
    live, ids = PolicyOutputs.from_padded(batch, logprobs=old), torch.zeros(1, 2, dtype=torch.int64)
    support = torch.arange(MOST_KEPT + 1).repeat(1, 2, 1)
    support[0, 0, -1] = -1
    kept = tensors_of(batch, live, ids, support=support)["support"]
    assert kept.tolist() == [list(range(MOST_KEPT)), [-2] * MOST_KEPT]
    assert (
        tensors_of(batch, live, ids, support=support[..., :1])["support"].tolist() == [[0] + [-1] * (MOST_KEPT - 1)] * 2
    )


def test_check_names_what_a_cut_needs_and_what_needs_a_cut(tmp_path: Path) -> None:
    cut, whole, both = (
        small(tmp_path, objective, **settings)
        for objective, settings in (("clip_higher", CUT), (REPLAY, {}), (REPLAY, CUT))
    )
    texts = ["\n".join(notes(run.composition, run)) for run in (cut, whole, both)]
    assert ["Add support_replay" in text for text in texts] == [True, False, False]
    assert ["support_replay cannot act" in text for text in texts] == [False, True, False]


def test_the_policy_is_evaluated_whole_and_the_sampler_as_it_samples(tmp_path: Path) -> None:
    told = CUT | {"evaluation__every": 2, "evaluation__sampler": True, "rollout__top_k": 1}
    last = go(small(tmp_path / "run", REPLAY, **told)).records[-1]
    assert last["eval/sampler/length"] != last["eval/length"] or last["eval/sampler/mean"] != last["eval/mean"]
