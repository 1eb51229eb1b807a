"""What an author sees before anything runs: names, types in an editor, and the error of a misspelt signal."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlstab
from rlstab import TokenObjective, compose
from rlstab.errors import MethodError
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.stage import RewardShaper
from rlstab.testing import check_objective
from rlstab.zoo import METHODS
from tests.core.steps import batch_of, live_of, random_rows

PAGE = Path(__file__).parents[2] / "docs/how-to/add-a-method.md"
#: Declared by a property, too; and a class of its own below it.
BY_PROPERTY = """

class Forks(SkipCertain):
    name = "forks"
    share: float = 0.2

    @property
    def needs(self) -> set[str]:
        return {"entropies"} if self.share < 1 else set()


compose(Forks(max_logprob=-0.1, share=0.5))
Forks(shape=0.5)
"""


def test_the_names_of_the_package_are_the_public_ones() -> None:
    methods = {cls.__name__ for cls in map(METHODS.get, METHODS.names())}
    assert set(dir(rlstab)) == {*rlstab.__all__, *methods}
    assert all(hasattr(rlstab, name) for name in dir(rlstab))


@pytest.mark.slow
def test_pyright_accepts_the_first_method_of_the_page_and_declarations_by_property(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        assert not os.environ.get("CI"), "pyright is missing: install the extra `release`"
        pytest.skip("pyright is not installed: the extra `release` brings it")
    block = re.search(r"```python\n(.*?)\n\n\nold = ", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "method.py").write_text(block[1] + "\n" + BY_PROPERTY)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "method.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    told = [line for line in ran.stdout.splitlines() if "method.py:" in line]
    assert len(told) == 1, ran.stdout + ran.stderr
    assert 'No parameter named "shape"' in told[0]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("logprob", "logprobs"),
        ("old_logprob", "old_logprobs"),
        ("log_probs", "logprobs"),
        ("rollout_log_probs", "rollout_logprobs"),
        ("entropy", "entropies"),
        ("ref_logprob", "ref_logprobs"),
        ("block_id", "block_ids"),
    ],
)
def test_a_misspelt_signal_is_an_error_with_the_near_name(name: str, meant: str) -> None:
    near = f"Did you mean '{meant}'"
    with pytest.raises(MethodError, match=near):
        type("typo", (TokenObjective,), {"name": "typo", "needs": {name}, "terms": lambda self, *_: rlstab.Terms()})
    by_property = {"name": "typo", "needs": property(lambda self: {name}), "terms": lambda self, *_: rlstab.Terms()}
    method = type("typo", (TokenObjective,), by_property)()
    with pytest.raises(MethodError, match=near):
        compose(method)
    assert near in str(check_objective(method, examples=1, laws=["runs"]))
    shaper = type("typo", (RewardShaper,), {**by_property, "shape": lambda self, r, *_: r.rewards})()
    with pytest.raises(MethodError, match=near):
        Pipeline.of(shaper)
    with pytest.raises(MethodError, match="'raw_rewards'"):
        type("typo", (RewardShaper,), {"name": "typo", "needs": {"raw_reward"}, "shape": lambda self, r, *_: r.rewards})


@pytest.mark.parametrize("name", ["group_ids", "sequence_ids", "sequence", "position", "advantages", "extra"])
def test_what_every_batch_has_is_no_signal(name: str) -> None:
    body = {"name": "typo", "terms": lambda self, *_: rlstab.Terms()}
    told = f"needs names '{name}', which is not a signal: every batch has it. Read batch.{name}"
    with pytest.raises(MethodError, match=told):
        type("typo", (TokenObjective,), {**body, "needs": {name}})
    method = type("typo", (TokenObjective,), {**body, "needs": property(lambda self: {name})})()
    assert "not a signal" in str(check_objective(method, examples=1, laws=["runs"]))


@pytest.mark.parametrize("name", ["group_ids", "sequence_ids", "lengths", "ended", "prompt_ids", "given"])
def test_what_every_batch_of_responses_has_is_no_signal(name: str) -> None:
    with pytest.raises(MethodError, match=f"needs names '{name}', which is not a signal"):
        type("typo", (RewardShaper,), {"name": "typo", "needs": {name}, "shape": lambda self, r, *_: r.rewards})


@pytest.mark.parametrize("name", ["my_signal", "teacher_logprobs", "top_logprobs", "logits", "critic_values"])
def test_a_signal_of_a_name_of_its_own_is_none(name: str) -> None:
    type("own", (TokenObjective,), {"name": "own", "needs": {name}, "terms": lambda self, *_: rlstab.Terms()})


def test_entropies_that_are_not_finite_are_counted_and_not_averaged() -> None:
    rows = random_rows(3, [3, 5, 2])
    batch = batch_of(rows)
    policy, _ = live_of(batch, rows)
    entropies = batch.signal("entropies").clone()
    entropies[:2], entropies[2] = torch.nan, torch.inf
    metrics = compose()(dataclasses.replace(batch, entropies=entropies), policy).metrics()
    assert metrics["tokens/entropy"] == pytest.approx(float(entropies[3:].mean()))
    assert metrics["tokens/entropy_nonfinite"] == pytest.approx(3 / len(batch))
