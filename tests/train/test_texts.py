"""From prompts to tokens and from tokens to texts: what fits a model, what ends a response, what a reward is given."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlstab.config.settings import JsonlSettings, RolloutSettings
from rlstab.errors import ConfigError, DataError, ModelError
from rlstab.models.decoding import Decoder
from rlstab.models.policy import load_policy, require_prompts
from rlstab.preflight import preflight
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Countdown, Example, Message, TextTask
from rlstab.train import Rollout
from rlstab.train.generate import sample
from tests.train.runs import GRADED, go, lines, printed, quiet, small
from tests.train.texts import byte_tokenizer, writing


def watch(indices: range, title: str) -> Iterable[int]:
    return indices


# -- what ends a response --------------------------------------------------------------------------------------------


def test_a_response_ends_with_the_token_that_completes_a_stop_text(tmp_path: Path) -> None:
    """By the text of each response, token by token: several texts, bytes, special tokens, an answer that was begun."""
    for number, (written, stop, begun, most) in enumerate(
        [
            ("ab", "abba", "", 60),
            ("abc", ["caca", "bb"], "", 40),
            ("€", "€", "", 60),
            (" é", " é", "", 60),
            ("é\n", "\n\n", "", 30),
            ("a<|im_end|>", "<|im_end|>", "", 10),
            ("a<|im_end|>", "a<|im_end|>a", "", 20),
            ("🙂", "🙂", "", 100),
            ("ab", "ab", "a", 10),
            ("€", "€", "€", 60),
        ]
    ):
        policy = load_policy(str(writing(tmp_path / str(number), written)))
        given = policy.tokenizer(begun)["input_ids"][: 1 if begun == "a" else 2] if begun else []
        settings = RolloutSettings.model_validate({"stop": stop, "max_new_tokens": most, "batch_size": 5})
        require_prompts(policy, Countdown(), settings, watch)
        asked = ResponseBatch.of([0.0] * 6, limit=most, given=len(given))
        parts = [*sample(Decoder(policy, settings, 1, ["logprobs"]), [Example("?", "")] * 6, asked, begun=[given] * 6)]
        rollout, ended = Rollout.joined(parts, policy.pad_id), 0
        assert len(parts) == 2
        for answer, end in zip(rollout.answers(), rollout.responses.ended.tolist(), strict=True):
            assert answer[: len(given)] == given
            found = [
                any(text in policy.decode(answer[:count]) for text in settings.stop or ())
                for count in range(len(given) + 1, len(answer) + 1)
            ]
            assert found == [False] * (len(found) - 1) + [end], (stop, policy.decode(answer))
            ended += end
        assert ended >= 3, stop


def test_a_stop_text_that_the_tokenizer_cannot_write_is_refused(tmp_path: Path) -> None:
    lower = load_policy(str(writing(tmp_path / "lower", "a", lowercase=True)))
    plain = load_policy(str(writing(tmp_path / "plain", "a")))
    shipped = load_policy("countdown-tiny")
    for policy, stops, refused in [
        (lower, ["end", "END"], "'END'"),
        (lower, ["end"], None),
        (plain, ["END", " END", "\n", "é"], None),
        (shipped, ["="], None),
        (shipped, ["=", "é"], "'é'"),
        (shipped, ["\n\n"], "stop"),
        (shipped, ["<|im_end|>"], "stop"),
    ]:
        settings = RolloutSettings.model_validate({"stop": stops})
        if refused is None:
            assert require_prompts(policy, Countdown(), settings, watch)[0] == []
        else:
            with pytest.raises(ConfigError, match=r"rollout\.stop") as caught:
                require_prompts(policy, Countdown(), settings, watch)
            assert refused in str(caught.value)
    ((told,), _) = require_prompts(plain, Countdown(), RolloutSettings.model_validate({"stop": "<|eot_id|>"}), watch)
    assert "<|eot_id|>" in told


# -- what fits a model -----------------------------------------------------------------------------------------------


def rows(path: Path, *prompts: Any, **settings: Any) -> TextTask:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return TextTask(JsonlSettings(path=str(path), **{"eval_size": 2, **settings}))


def test_every_row_that_does_not_fit_is_named_before_a_run_or_left_out(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    writing(tmp_path / "model", "ab")
    tokenizer.add_tokens(["Whatever"])
    tokenizer.save_pretrained(tmp_path / "model")
    policy, settings, file = load_policy(str(tmp_path / "model")), RolloutSettings(), tmp_path / "rows.jsonl"
    long, fits = "x" * 233, "x" * 232
    for index, prompt, reason in [
        (2, "", "no token"),
        (0, "a Whatever", "259"),
        (4, long, "233 tokens"),
        (6, "", "no "),
    ]:
        prompts = [fits] * 7
        prompts[index] = prompt
        with pytest.raises(DataError, match=rf"rows\.jsonl, line {index + 1}: .*{reason}.*task\.too_long: skip"):
            require_prompts(policy, rows(file, *prompts), settings, watch)
        task = rows(file, *prompts, too_long="skip")
        ((told,), _) = require_prompts(policy, task, settings, watch)
        assert f"line {index + 1}" in told
        assert sorted(task.size.values()) == ([1, 5] if index == 6 else [2, 4])
        left = [task.example(split, i).prompt for split, size in task.size.items() for i in range(size or 0)]
        assert left == [fits] * 6
    assert require_prompts(policy, rows(file, *[fits] * 7), settings, watch)[0] == []
    for many, total in ((2, 3), (3, 3)):  # which leaves one row, or none
        with pytest.raises(DataError, match=f"{many - 1} more of {total}") as caught:
            require_prompts(policy, rows(file, *[long] * many, *["a"] * (5 - many)), settings, watch)
        assert ("task.too_long: skip" in str(caught.value)) == (many < total)
    for prompts in ([long] * 2 + ["a"] * 2, ["a"] * 2 + [""] * 2):  # nothing would be left of a split
        with pytest.raises(DataError, match=r"line"):
            require_prompts(policy, rows(file, *prompts, too_long="skip"), settings, watch)


def test_a_run_leaves_rows_out_and_says_so(tmp_path: Path) -> None:
    file, console = tmp_path / "rows.jsonl", quiet()
    rows(file, "1+1=", "2" * 500, "1+2=", "3+3=", "4+4=")
    task = {"name": "jsonl", "path": str(file), "eval_size": 1, "too_long": "skip"}
    run = small(tmp_path / "run", task=task, reward=GRADED, tracking__samples=99)
    assert any("1 of 4 prompts in `train`" in line for line in preflight(run))
    go(run, console=console)
    assert "line 2" in printed(console)
    assert {line["prompt"] for line in lines(tmp_path / "run" / "samples.jsonl")} <= {"1+1=", "1+2=", "3+3="}


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}think{% endif %}"


def test_variables_reach_the_chat_template_and_others_are_refused(tmp_path: Path) -> None:
    folder = writing(tmp_path, "ab", chat_template=TEMPLATE)
    policy, chat = load_policy(str(folder)), Example.chat([Message("user", "Hi")], "1")
    for variables, text in [(None, "Hi"), ({"enable_thinking": False}, "Hi"), ({"enable_thinking": True}, "Hithink")]:
        settings = RolloutSettings(chat=True, chat_template=variables)
        assert policy.decode(policy.tokens(chat, settings)) == text
    settings = RolloutSettings(chat=True, chat_template={"enable_thinkng": True})
    with pytest.raises(ModelError, match="enable_thinkng"):
        require_prompts(policy, Countdown(), settings, watch)
    for name in ("tokenize", "add_generation_prompt"):
        with pytest.raises(ValueError, match="Leave it out"):
            RolloutSettings(chat=True, chat_template={name: True})
    with pytest.raises(ValueError, match="rollout"):
        RolloutSettings(chat_template={"enable_thinking": True})
    empty = load_policy(str(writing(tmp_path / "empty", "ab", chat_template="{{ '' }}")))
    with pytest.raises(DataError, match="no token"):
        require_prompts(empty, rows(tmp_path / "rows", "a", "b", "c"), RolloutSettings(chat=True), watch)


def test_special_tokens_without_an_embedding_are_named_and_an_end_after_prompts_is_noted(tmp_path: Path) -> None:
    folder = writing(tmp_path / "pad", "ab")
    byte_tokenizer(pad_token="<new>").save_pretrained(folder)
    for try_it in (lambda: load_policy(str(folder)), lambda: preflight(small(tmp_path, model__name=str(folder)))):
        with pytest.raises(ModelError, match=r"pad token 259 \('<new>'\)"):
            try_it()
    assert not any("ends each prompt" in line for line in preflight(small(tmp_path)))
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A <|endoftext|>", None, [("<|endoftext|>", 256)])
    tokenizer.save_pretrained(writing(tmp_path / "ends", "ab"))
    told = preflight(small(tmp_path / "run", model__name=str(tmp_path / "ends")))
    assert any("ends each prompt with '<|endoftext|>'" in line for line in told)


# -- what a reward is given ------------------------------------------------------------------------------------------


def test_a_reward_gets_special_tokens_where_it_asks_for_them(tmp_path: Path) -> None:
    file, data = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    file.write_text("def end(prompt, completion, answer):\n    return float(completion.endswith('$'))\n")
    rows(data, "1+1=", "1+2=", "1+3=", "1+4=")
    reward = [{"function": f"{file}:end", "name": name, "special_tokens": name == "seen"} for name in ("seen", "not")]
    task = {"name": "jsonl", "path": str(data), "eval_size": 1}
    evaluation = {"every": 1, "samples": 2, "prompts": 1, "greedy": False}
    changes = {"rollout__max_new_tokens": 24, "optimisation__rollouts": 1, "evaluation": evaluation}
    first, last = go(small(tmp_path / "run", task=task, reward=reward, **changes)).records
    assert last["reward/seen"] == last["response/ended"] > 0
    assert last["reward/not"] == last["eval/reward/not"] == 0
    assert [record["eval/reward/seen"] for record in (first, last)] == [first["eval/ended"], last["eval/ended"]]
    assert "eval/pass@2" in last, "pass@k follows samples where nothing names a k"
