"""Mixtures of experts: weights that the tokens of a step, or of a process in it, do not reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train import experts
from tests.train.crews import Crew
from tests.train.runs import about, file_of, go, largest_difference, small, weights
from tests.train.test_engines import ALIKE, SIX, STACK


def test_padding_that_reaches_an_expert_changes_nothing(tmp_path: Path) -> None:
    """How much of it there is depends on the micro-batches, and whether an expert has no gradient or zeros on it."""
    experts.register()
    model = experts.save(tmp_path / "model", listed=True)
    for size in (2, 3):
        go(small(tmp_path / str(size), STACK, **{**settings(model), "optimisation__micro_batch_size": size}))
    assert largest_difference(tmp_path / "2", tmp_path / "3") <= ALIKE


def settings(model: Path) -> dict[str, object]:
    return {**SIX, "model__name": str(model), "optimisation__micro_batch_size": 2}


@pytest.mark.slow
def test_those_of_transformers_train_as_in_one_process(crew: Crew, tmp_path: Path) -> None:
    model = experts.save(tmp_path / "model", listed=False)
    crew.does(file_of(small(tmp_path / "one", STACK, **settings(model))), 1, "refused")
    for engine in ("ddp", "fsdp2"):
        for processes in (2, 3):
            out = tmp_path / f"{engine}{processes}"
            crew.does(file_of(small(out, STACK, **settings(model), engine=engine)), processes, "refused")
            assert about(out)["engine"] == f"{engine}, {processes} processes"
            assert largest_difference(tmp_path / "one", out) <= ALIKE


@pytest.mark.slow
def test_under_ddp_experts_that_no_token_of_a_process_reaches(crew: Crew, tmp_path: Path) -> None:
    model = experts.save(tmp_path / "model", listed=True)
    crew.does(file_of(small(tmp_path / "one", STACK, **settings(model))), 1, "listed")
    for processes in (2, 3):
        out = tmp_path / str(processes)
        done = crew.does(file_of(small(out, STACK, **settings(model), engine="ddp")), processes, "listed")
        assert about(out)["engine"] == f"ddp, {processes} processes"
        reached = [json.loads(text.rpartition("experts reached: ")[2]) for text in done.said]
        assert all(any(layer < experts.EXPERTS for step in own for layer in step) for own in reached)
        assert largest_difference(tmp_path / "one", out) <= ALIKE
    trained = weights(tmp_path / "one")
    assert sum(".experts." in name for name in trained) == 2 * 2 * experts.EXPERTS


@pytest.mark.slow
def test_fsdp2_refuses_them(crew: Crew, tmp_path: Path) -> None:
    model = experts.save(tmp_path / "model", listed=True)
    done = crew.tries(file_of(small(tmp_path / "run", **settings(model), engine="fsdp2")), 2, "listed")
    assert done.codes == [1, 1]
    for text in done.said:
        assert "ModelError: a token of " in text
        assert "gives no gradient to model.layers.0.mlp.experts.experts." in text
        assert "Set engine to ddp, or take a model without such weights." in text
