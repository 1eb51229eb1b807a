"""User-defined tasks, rewards and signals: what they decide, what their faults cost, what is refused."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlstab.errors import CheckpointError, ConfigError, MissingSignal, ModelError, NonFinite, ShapeError
from rlstab.record import read_dump
from rlstab.stages import STAGES
from rlstab.train import Rollout
from rlstab.zoo import METHODS
from tests.train import own
from tests.train.runs import (
    GRADED,
    ROOT,
    SHIPPED,
    apart,
    differences,
    forget_newest,
    go,
    left,
    lines,
    metrics,
    of_user,
    printed,
    quiet,
    small,
)

EVALUATE = {"every": 2, "prompts": 2, "samples": 2, "pass_at": [2], "greedy": False}


def test_a_scorer_that_raises_or_returns_nan_costs_its_sample_the_reward(tmp_path: Path) -> None:
    console = quiet()
    records = go(small(tmp_path, tracking__samples=8), task=own.Flawed(), console=console).records
    flawed = [line for line in lines(tmp_path / "samples.jsonl") if line["text"][-1:].isdigit()]
    assert {int(line["text"][-1]) % 2 for line in flawed} == {0, 1}
    assert sum(record["scorer/errors"] for record in records) == len(flawed) < 16
    assert all(line["reward"] == 0 for line in flawed)
    assert all("optimizer_steps/refused" not in record for record in records)
    assert "no score for [this]" in printed(console)


def test_a_task_object_is_kept_in_mind_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    run = small(tmp_path / "run", evaluation=EVALUATE)
    assert all(record["eval/mean"] == 1.0 for record in go(run, task=own.Equal()).evaluations)
    with pytest.raises(CheckpointError, match="Equal"):
        go(run, resume=True)
    with pytest.raises(ConfigError, match="name"):
        go(small(tmp_path / "none"), task=object())
    assert not (tmp_path / "none").exists()


def test_other_examples_than_before_are_named_on_resume(tmp_path: Path) -> None:
    """Wherever they come from: a data set on a hub has no file whose checksum could tell."""
    told = []
    for shift, resume in ((0, False), (0, True), (1, True)):
        console = quiet()
        go(small(tmp_path, tracking__checkpoint_every=2), task=own.Corrected(shift), resume=resume, console=console)
        told.append("the examples of the task have changed" in printed(console))
    assert told == [False, False, True]


def test_flaky_rewards_are_lost_in_training_and_kept_in_evaluation_and_the_truth_is_logged(tmp_path: Path) -> None:
    changes = {"model__name": "chain-tiny", "rollout__max_new_tokens": 40, "evaluation": EVALUATE}
    changes |= {"rollout__prompts": 8, "rollout__group": 6, "optimisation__rollouts": 1}
    go(small(tmp_path, task={"name": "chain", "flaky": 0.5}, tracking__samples=99, **changes))
    samples = lines(tmp_path / "samples.jsonl")
    assert 0 < sum(line["reward"] for line in samples) < sum(line["reward/true"] for line in samples)
    assert all(line["reward"] in (0, line["reward/true"]) for line in samples)


TEMPLATE = (
    "{% for turn in messages %}{{ {'system': '*', 'user': ''}[turn['role']] }}{{ turn['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def test_chats_are_written_by_the_template_of_the_model(tmp_path: Path) -> None:
    row = '{{"prompt": [{{"role": "user", "content": "{} 7 8>29"}}], "answer": "1"}}\n'
    (tmp_path / "rows.jsonl").write_text("".join(row.format(digit) for digit in range(1, 10)))
    shutil.copytree(SHIPPED, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    changes: dict[str, Any] = {
        "task": {"name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "eval_size": 2, "system": "1"},
        "model__name": str(tmp_path / "model"),
        "rollout__chat": True,
        "reward": [{"function": GRADED}],
        "tracking__dump_every": 1,
    }
    go(small(tmp_path / "run", **changes))
    traced = {tokenizer.decode(prompt) for step in read_dump(tmp_path / "run").steps for prompt in step.prompts}
    assert traced
    assert all(re.fullmatch(r"\*1[1-7] 7 8>29:", prompt) for prompt in traced)
    with pytest.raises(ModelError, match="chat template"):
        go(small(tmp_path / "plain", **{**changes, "model__name": "countdown-tiny"}))


def test_weights_of_rewards_decide_and_a_continued_run_has_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tracking__checkpoint_every": 1, "tracking__samples": 8, "evaluation": EVALUATE}
    settings["reward"] = [{"function": GRADED, "weight": 2.0}, {"function": "task", "weight": -1.0}]
    go(small(tmp_path / "run", **settings))
    for line in lines(tmp_path / "run" / "samples.jsonl"):
        assert line["reward"] == pytest.approx(2 * line["reward/graded"] - line["reward/task"])
    whole = left(tmp_path / "run")
    forget_newest(tmp_path / "run")
    go(small(tmp_path / "run", **settings), resume=True)
    assert differences(tmp_path / "run", whole) == []


def test_completions_that_take_too_long_are_counted_and_cost_the_reward_alone(tmp_path: Path) -> None:
    reward = [{"function": GRADED.replace("graded", "hangs"), "time_limit": 0.3, "workers": 2}]
    (record,) = go(small(tmp_path, reward=reward, tracking__samples=8, optimisation__rollouts=1)).records
    samples = lines(tmp_path / "samples.jsonl")
    late = [line for line in samples if sum(map(ord, line["text"])) % 3 == 1]
    assert 0 < len(late) < len(samples) == 8
    assert (record["scorer/timeouts"], record["scorer/errors"]) == (len(late), 0)
    assert all(line.get("timed_out") is True and line["reward"] == 0 for line in late)
    assert all("timed_out" not in line and line["reward"] > 0 for line in samples if line not in late)


#: Two optimizer steps per rollout, in uneven micro-batches, with evidence refreshed before each.
CUT: dict[str, Any] = {
    "optimisation__rollouts": 1,
    "optimisation__mini_batches": 2,
    "optimisation__micro_batch_size": 3,
    "optimisation__refresh": "step",
}


def weighing(out: Path, signal: str, **changes: Any) -> Any:
    stages = changes.pop("stages", [of_user("Fading")])
    return small(out, ["clip_higher", of_user("WeighPlaces", signal=signal)], **CUT, stages=stages, **changes)


def test_a_signal_of_the_user_reaches_the_method_token_by_token(tmp_path: Path) -> None:
    go(weighing(tmp_path / "known", ""))
    signals = {"places": own.places, "unread": lambda responses: 1 / 0}
    go(weighing(tmp_path / "given", "places"), signals=signals)
    go(small(tmp_path / "without", **CUT, stages=[of_user("Fading")]))
    assert apart(tmp_path / "known", tmp_path / "given") == 0
    assert apart(tmp_path / "given", tmp_path / "without") > 1e-6

    def rude(responses: Rollout) -> Tensor:
        values = own.places(responses)
        for tensor in (responses.response_ids, responses.response_mask, responses.rewards, responses.group_ids):
            tensor.zero_()
        responses.signals["rollout_logprobs"].zero_()
        return torch.where(torch.isnan(values), 0.0, values)

    go(weighing(tmp_path / "rude", "places"), signals={"places": rude})
    assert apart(tmp_path / "rude", tmp_path / "given") == 0, "it changed what others get"


def test_rewards_are_evidence_of_methods_and_stages(tmp_path: Path) -> None:
    reward = [{"function": "task"}, {"function": GRADED, "weight": 2.0}]

    def per_token(responses: Rollout, values: Tensor) -> Tensor:
        return values.float().unsqueeze(-1).expand(responses.response_mask.shape)

    signals = {
        "mine": lambda responses: per_token(responses, responses.rewards),
        "mine graded": lambda responses: per_token(responses, responses.responses.evidence("reward/graded")),
    }
    # a shaper, so that rewards differ from those that were scored
    changes = {"reward": reward, "stages": [of_user("Halved")], "rollout__max_new_tokens": 3}
    (record,) = go(small(tmp_path / "run", of_user("Compare"), **CUT, **changes), signals=signals).records
    assert record["compare/shaped"] == record["compare/scored"] == 0
    assert record["compare/apart"] > 0.01
    with pytest.raises(MissingSignal, match="reward/grade'"):
        go(weighing(tmp_path / "none", "reward/grade", reward=reward))


def test_advantages_of_a_response_are_those_of_its_tokens(tmp_path: Path) -> None:
    for name, stage in (("each", "grpo"), ("token", of_user("OfTokens"))):
        go(small(tmp_path / name, **CUT, stages=[stage]))
    assert apart(tmp_path / "token", tmp_path / "each") == 0
    assert metrics(tmp_path / "token") == metrics(tmp_path / "each")


def test_what_a_function_returns_is_checked_before_the_first_step(tmp_path: Path) -> None:
    wrong: list[tuple[Any, type[Exception]]] = [
        (lambda responses: own.places(responses)[:-1], ShapeError),
        (lambda responses: responses.response_mask.long(), ShapeError),
        (lambda responses: [1.0] * len(responses.texts), ShapeError),
        (lambda responses: torch.full(responses.response_mask.shape, torch.nan), NonFinite),
        (lambda responses: torch.full(responses.response_mask.shape, torch.inf), NonFinite),
    ]
    for function, error in wrong:
        with pytest.raises(error, match=r"signals\['places'\]"):
            go(weighing(tmp_path / "run", "places"), signals={"places": function})
    with pytest.raises(ConfigError, match="entropies"):
        go(small(tmp_path / "run"), signals={"entropies": own.places})
    assert not lines(tmp_path / "run" / "metrics.jsonl")


def test_the_page_on_signals_and_advantages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for registry in (METHODS, STAGES):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    text = (ROOT / "docs" / "how-to" / "signals-and-advantages.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "signals-and-advantages.md", "exec", dont_inherit=True), namespace)
    assert namespace["run"].pipeline.estimator.name == "fading"
    assert [record["rollout"] for record in metrics(tmp_path / "runs" / "novelty")] == [1, 2]
