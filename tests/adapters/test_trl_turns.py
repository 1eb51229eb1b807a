"""TRL's trainer with an environment of its own: its real loop of tools, its mask, and what each turn earned."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from rlstab.adapters.trl.responses import response_mask
from tests.adapters.byte_model import write_model
from tests.adapters.trl_jobs import QUIET, config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
os.environ.update(QUIET)

CREDIT = [{"name": "clip_higher"}, {"name": "turn_credit", "normalise": False}]
#: What the policy writes in each turn of four conversations.
ONE, TWO, SIX = (
    f'<tool_call>\n{{"name": "double", "arguments": {{"number": {number}}}}}\n</tool_call>' for number in "126"
)
SAID = [[ONE, "done."], [TWO, SIX, "so be it."], ["no tool."], [TWO, TWO + "no room for the reply" * 4]]


class Doubling:
    """An environment whose tool doubles a number, and pays the number in the turn that called it."""

    def reset(self, **_: Any) -> None:
        self.turn_rewards: list[float] = []

    def double(self, number: int) -> str:
        """Double a number.

        Args:
            number: to double.
        """
        self.turn_rewards.append(float(number))
        return f"it is {2 * number}"


def test_turns_of_an_environment_and_what_they_earned(tmp_path: Path) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlstab.adapters.trl import RLStabGRPOTrainer

    write_model(tmp_path, (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    prompts = [[{"role": "user", "content": f"Conversation {index}."}] for index in (0, 2)]
    trainer = RLStabGRPOTrainer(
        objective=CREDIT,
        model=AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(completion) % 3) for completion in completions],
        args=config(
            tmp_path / "out",
            **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 2},
            **{"max_steps": 1, "num_iterations": 1, "max_completion_length": 320},
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        environment_factory=Doubling,
    )
    asked: dict[str, int] = {}

    def write(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        """The stand-in for generation: of two answers to a prompt, each has a conversation."""
        replies = []
        for ids in prompt_ids:
            text = tokenizer.decode(ids)
            turn, index = text.count("it is"), int(text.partition("Conversation ")[2][0])
            if turn:
                index += SAID[index][0] not in text
            else:
                asked[text] = asked.get(text, -1) + 1
                index += asked[text]
            replies.append(tokenizer.encode(SAID[index][turn] + "<|im_end|>", add_special_tokens=False))
        return replies, None

    trainer._generate_single_turn = write
    parts: list[Any] = []
    trainer.on_part = lambda inputs, batch, live, loss: parts.append((inputs, batch))
    trainer.train()
    found = {}
    for inputs, batch in parts:
        for row in range(len(inputs["completion_ids"])):
            mask = response_mask(inputs)[row].bool()
            text = tokenizer.decode(inputs["completion_ids"][row][mask])
            where = batch.sequence == row
            pairs = zip(batch.signal("turn")[where].tolist(), batch.signal("turn_reward")[where].tolist(), strict=True)
            found[text] = list(dict.fromkeys(pairs))
    wanted = [[(0, 1), (1, 0)], [(0, 2), (1, 6), (2, 0)], [(0, 0)], [(0, 2), (1, 2)]]
    texts = ["".join(f"{text}<|im_end|>" for text in said) for said in SAID]
    assert found == dict(zip(texts, wanted, strict=True))
    assert trainer.state.log_history[0]["rlstab/turn_credit/credit"] > 0
