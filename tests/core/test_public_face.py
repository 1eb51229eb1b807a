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
from rlstab import TokenObjective, compose, make_plan
from rlstab.errors import MissingSignal
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
    method = type(
        "typo", (TokenObjective,), {"name": "typo", "needs": {name}, "terms": lambda self, *_: rlstab.Terms()}
    )()
    with pytest.raises(MissingSignal, match=f"'{name}' was read.* Did you mean '{meant}'"):
        make_plan(compose(method), [batch_of(random_rows(1, [2]))])


def test_entropies_that_are_not_finite_are_counted_and_not_averaged() -> None:
    rows = random_rows(3, [3, 5, 2])
    batch = batch_of(rows)
    policy, _ = live_of(batch, rows)
    entropies = batch.signal("entropies").clone()
    entropies[:2], entropies[2] = torch.nan, torch.inf
    metrics = compose()(dataclasses.replace(batch, entropies=entropies), policy).metrics()
    assert metrics["tokens/entropy"] == pytest.approx(float(entropies[3:].mean()))
    assert metrics["tokens/entropy_nonfinite"] == pytest.approx(3 / len(batch))
