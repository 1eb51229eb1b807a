"""verl's real agent loop with a tool, and one update of the actor on what it returns, in both of verl's trainers."""

import asyncio
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tests.adapters.cpu_verl", reason="verl is not installed: nox -s verl")

from rlstab.adapters.verl.batch import MiniBatch
from rlstab.errors import MissingSignal, ShapeError
from tests.adapters.byte_model import write_model
from tests.adapters.jobs import farthest
from tests.adapters.verl_jobs import composed, recorder, settings, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2}
CREDIT = [CLIP, {"name": "turn_credit", "normalise": False}]
#: Calls of the tool, whose reward is a quarter of the number.
ONE, TWO, THREE, SEVEN = (
    f'<tool_call>{{"name": "double", "arguments": {{"number": {number}}}}}</tool_call>' for number in (1, 2, 3, 7)
)
#: What the policy writes in each turn of four conversations; for the reply to the last call no room is left.
SAID = [[ONE, "done."], [THREE, TWO, "so be it."], ["no tool."], [TWO, "x" * 150 + SEVEN]]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model that reads bytes, whose tokenizer has a template for chats with tools."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, TEMPLATE)
    return str(folder)


class Server:
    """The stand-in for verl's server of the language model: it writes :data:`SAID`, with log-probs of the model."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        prompt = self.tokenizer.decode(prompt_ids)
        said = SAID[int(prompt.partition("Conversation ")[2][0])]
        ids = self.tokenizer.encode(said[prompt.count("it is")] + "<|im_end|>", add_special_tokens=False)
        logprobs = self.logprobs(prompt_ids + ids)[-len(ids) :]
        return TokenOutput(token_ids=ids, log_probs=logprobs.tolist(), extra_fields={"global_steps": 0})

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of each id but the first."""
        logits = self.model(torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def changes(model: str, **more: Any) -> dict[str, Any]:
    return {
        "model.path": model,
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_micro_batch_size_per_gpu": 2,
        "rollout.n": 1,
        "rollout.calculate_log_probs": "true",
        "rollout.prompt_length": 128,
        "rollout.response_length": 320,
        "rollout.multi_turn.enable": "true",
        "rollout.multi_turn.function_tool_path": Path(__file__).with_name("verl_tools.py"),
        "rollout.agent.default_agent_loop": "tool_agent",
        **more,
    }


def asked() -> dict[str, Any]:
    raw = np.empty(len(SAID), dtype=object)
    raw[:] = [[{"role": "user", "content": f"Conversation {index}{'.' * index}"}] for index in range(len(SAID))]
    return {"raw_prompt": raw, "uid": np.array(["a", "a", "b", "b"], dtype=object), "index": np.arange(len(SAID))}


@pytest.fixture(scope="module")
def rollout(model: str) -> Any:
    """verl's DataProto, as its ``AgentLoopWorker`` returns it, with what the trainer adds before the update."""
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.ray_trainer import compute_advantage

    server, configured = Server(model), composed(settings(Path(), **changes(model)))
    worker = AgentLoopWorker(configured, server)
    data = asyncio.run(worker.generate_sequences(DataProto.from_single_dict(asked(), meta_info={"global_steps": 0})))
    data.non_tensor_batch.pop("raw_prompt")
    mask, rows = data.batch["response_mask"], range(len(SAID))
    data.batch["token_level_rewards"] = torch.zeros(mask.shape)
    last = data.batch["attention_mask"][:, -mask.shape[1] :].sum(1) - 1
    data.batch["token_level_rewards"][rows, last] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    data.batch["token_level_scores"] = data.batch["token_level_rewards"]
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"].clone()
    return compute_advantage(data, "grpo")


def updated(rollout: Any, folder: Path, objective: Any, model: str, **more: Any) -> dict[str, Any]:
    """One update by verl's own trainer, which is given this process's worker as its group of workers."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    worker = worker_of(folder, objective, **changes(model, **more))
    group = SimpleNamespace(update_actor=worker.update_actor)
    configured = composed(settings(folder, **changes(model, **more)))
    trainer = SimpleNamespace(config=configured, actor_rollout_wg=group)
    before = type(worker.actor.engine).optimizer_step
    steps = recorder(worker.actor)
    try:
        data = deepcopy(rollout)
        metrics = RayPPOTrainer._update_actor(trainer, data).meta_info["metrics"]
    finally:
        type(worker.actor.engine).optimizer_step = before
    return {"step": steps[0], "metrics": metrics}


def tensors_of(rollout: Any) -> Any:
    from verl.workers.utils.padding import left_right_2_no_padding

    return left_right_2_no_padding(deepcopy(rollout).to_tensordict())


def signals_of(data: Any) -> tuple[Any, list[list[float]], list[list[float]]]:
    """The evidence about an update, and the turns and rewards of the tokens of each response."""
    batch = MiniBatch.of(data, "cpu", {2}).batch(SimpleNamespace(needs=frozenset({"turn", "turn_reward"})))
    columns = [batch.signal(name).split(batch.sequence.bincount().tolist()) for name in ("turn", "turn_reward")]
    return batch, *([values.tolist() for values in rows] for rows in columns)


#: What the tool paid for each turn of each conversation.
EARNED = [[0.25, 0.0], [0.75, 0.5, 0.0], [0.0], [0.5, 1.75]]


def test_turns_and_what_they_earned_come_out_of_the_loop(rollout: Any, model: str) -> None:
    _, turns, rewards = signals_of(tensors_of(rollout))
    mask, ids = rollout.batch["response_mask"].bool(), rollout.batch["responses"]
    decode = Server(model).tokenizer.decode
    for row, said in enumerate(SAID):
        lengths = [len(text) + 1 for text in said]  # a token for each byte, and the end
        assert turns[row] == [turn for turn, length in enumerate(lengths) for _ in range(length)]
        assert rewards[row] == [EARNED[row][int(turn)] for turn in turns[row]]
        assert decode(ids[row][mask[row]]) == "".join(f"{text}<|im_end|>" for text in said)
        assert ("it is" in decode(ids[row])) == (row != 2)
    assert {len(set(row)) for row in turns} == {1, 2, 3}


def test_credit_by_turn_is_that_by_hand(rollout: Any, model: str, tmp_path: Path) -> None:
    """Advantages that hold it already give the same gradient without the method."""
    batch, turns, _ = signals_of(tensors_of(rollout))
    assert batch.group_ids.unique().numel() == 2
    by_hand, mask = deepcopy(rollout), rollout.batch["response_mask"].bool()
    for row, (own, other) in enumerate(zip(EARNED, [EARNED[index] for index in (1, 0, 3, 2)], strict=True)):
        credit = [(mine - other[turn]) / 2 if turn < len(other) else 0.0 for turn, mine in enumerate(own)]
        by_hand.batch["advantages"][row][mask[row]] += torch.tensor([credit[int(turn)] for turn in turns[row]])
    plain = updated(rollout, tmp_path, [CLIP], model)
    credited = updated(rollout, tmp_path, CREDIT, model)
    assert farthest(credited["step"], updated(by_hand, tmp_path, [CLIP], model)["step"]) < 1e-6
    assert farthest(credited["step"], plain["step"]) > 1e-3
    whole = updated(rollout, tmp_path, CREDIT, model, **{"actor.ppo_micro_batch_size_per_gpu": 4})
    assert farthest(credited["step"], whole["step"]) < 1e-6
    assert credited["metrics"]["actor/rlstab/turn_credit/credit"].aggregate() > 0


def test_a_rejected_token_begins_no_turn(rollout: Any) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    _, before, _ = signals_of(tensors_of(rollout))
    rejecting = deepcopy(rollout)
    rejecting.batch["old_log_probs"][1, 5] -= 3.0
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    rejecting, _ = compute_rollout_correction_and_add_to_batch(rejecting, rejection)
    batch, turns, _ = signals_of(tensors_of(rejecting))
    assert int((batch.sequence == 1).sum()) == len(before[1]) - 1
    assert turns[1] == before[1][:5] + before[1][6:]


def test_verls_newest_trainer_hands_over_the_same(rollout: Any, model: str) -> None:
    """Its agent loop writes to a queue, whose columns an actor reads; here the queue is a list."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.utils.tensordict_utils import assign_non_tensor

    put: list[Any] = []

    async def noted(**_: Any) -> None: ...

    async def batch_put(*, fields: Any, **_: Any) -> None:
        put.append(fields)

    queued = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = queued.__new__(queued)
    AgentLoopWorker.__init__(worker, composed(settings(Path(), **changes(model))), Server(model))
    real, agent_loop_tq.tq = agent_loop_tq.tq, SimpleNamespace(async_kv_put=noted, async_kv_batch_put=batch_put)
    given = asked()
    try:
        for row in range(len(SAID)):
            prompt = {"agent_name": "tool_agent", "global_steps": 0, "raw_prompt": given["raw_prompt"][row]}
            where = {"step": 0, "sample_index": row, "rollout_n": 0, "validate": False}
            asyncio.run(worker._run_prompt({**prompt, "uid": given["uid"][row]}, {}, where))
    finally:
        agent_loop_tq.tq = real
    rows = [{name: fields[name][0] for name in fields.keys()} for fields in put]
    data = agent_loop_tq.list_of_dict_to_tensordict(rows)
    assign_non_tensor(data, temperature=1.0)
    for name in ("old_log_probs", "advantages"):
        data[name] = data["rollout_log_probs"]
    _, turns, rewards = signals_of(data)
    assert (turns, rewards) == signals_of(tensors_of(rollout))[1:]


def test_what_does_not_fit_is_refused(rollout: Any, model: str, tmp_path: Path) -> None:
    with pytest.raises(MissingSignal, match=r"'turn_credit' reads 'turn_reward', .* set .*multi_turn\.enable=true"):
        worker_of(tmp_path, CREDIT, **changes(model, **{"rollout.multi_turn.max_parallel_calls": 2}))
    data = deepcopy(rollout)
    data.non_tensor_batch["tool_rewards"][1] = [0.5]
    with pytest.raises(ShapeError, match="3 turns and 1 rewards of turns"):
        updated(data, tmp_path, CREDIT, model)
