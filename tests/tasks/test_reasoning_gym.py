"""Data sets of reasoning-gym: examples in any order, splits that never meet, scores."""

import random

import pytest

from rlstab.config.settings import ReasoningGymSettings
from rlstab.errors import OutOfRange, UnknownName
from rlstab.tasks import ReasoningGym
from rlstab.tasks.reasoning_gym import EXECUTING
from rlstab.tasks.scorers import GymScorer


def gym(dataset: str, **options) -> ReasoningGym:
    pytest.importorskip("reasoning_gym")
    return ReasoningGym(ReasoningGymSettings(dataset=dataset, **options))


def test_is_deterministic_in_any_order():
    task = gym("chain_sum", eval_size=10)
    assert (task.name, task.size) == ("chain_sum", {"train": None, "eval": 10})
    indices = [0, 1, 63, 64, 200, 10**7, 2**40]
    ahead = [gym("chain_sum", seed=3).example("train", i) for i in indices]
    task = gym("chain_sum", seed=3)
    assert [task.example("train", i) for i in reversed(indices)][::-1] == ahead
    assert gym("chain_sum", seed=4).example("train", 0).prompt != ahead[0].prompt
    random.seed(1)  # a data set that draws from global random numbers
    before = random.getstate()
    first = gym("list_functions").example("train", 1)
    assert random.getstate() == before
    random.seed(2)
    assert gym("list_functions").example("train", 1) == first


def test_splits_never_share_a_seed(monkeypatch):
    task, seeds = gym("chain_sum"), []

    def recorded(name, seed, size):
        seeds.extend(range(seed, seed + size))
        return [{"question": ""}] * size

    monkeypatch.setattr("reasoning_gym.factory.create_dataset", recorded)
    for split, least in (("train", 0), ("eval", 2**31)):
        seeds.clear()
        for block in (1000, 2**25 - 1, 2**25, 1, 2):  # the last ones of two thousand million examples among them
            task.example(split, 64 * block)
        assert len(set(seeds)) == len(seeds) == 5 * 64
        assert least <= min(seeds) <= max(seeds) < least + 2**31


def test_a_template_a_pattern_and_a_threshold():
    task = gym("count_bits", prompt_template=r"{prompt} Put it in \boxed{}.")
    example = task.example("train", 0)
    assert example.prompt == example.answer["question"] + r" Put it in \boxed{}."
    right = example.answer["answer"]
    for threshold in (None, 1.0):
        scorer = GymScorer("count_bits", {}, "=> (.*)", threshold)
        scorer.prepare()
        texts = (f"=> 1\n=> {right}\nbye", right, f"=> about {right}")  # the second has no match
        *scores, credit = (scorer.score("", text, example.answer) for text in texts)
        assert scores == [1.0, 0.0]
        assert (0 < credit < 1) if threshold is None else credit == 0  # reasoning-gym's own, for an answer in words


def test_settings_that_cannot_be_used():
    for options, error, named in [
        ({"dataset": "chainsum"}, UnknownName, "'chain_sum'"),
        ({"dataset": "chain_sum", "options": {"min_term": 2}}, UnknownName, "'min_terms'"),
        ({"dataset": "chain_sum", "options": {"seed": 2}}, UnknownName, "task.seed"),
        ({"dataset": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}, OutOfRange, "task.options"),
        *(({"dataset": name}, OutOfRange, rf"task\.dataset: .*'{name}' executes completions") for name in EXECUTING),
    ]:
        with pytest.raises(error, match=named):
            gym(**options)
