"""Whether the policy can be asked what a task asks: tried once, before anything is sampled."""

from __future__ import annotations

from rlstab.config.settings import RolloutSettings
from rlstab.errors import ConfigError, ModelError
from rlstab.tasks import Task
from rlstab.train.policy import Policy


def require_prompts(policy: Policy, task: Task, rollout: RolloutSettings) -> None:
    """Encode the first prompt of each split.

    Raises:
        ConfigError: prompts are lists of messages, and ``rollout.chat`` is false.
        ModelError: ``rollout.chat`` is true, and the tokenizer has no chat template.
        DataError: a prompt cannot be written in tokens, or leaves no room for the response.
    """
    examples = [task.example(split, 0) for split, size in task.size.items() if size != 0]
    if not rollout.chat and any(one.messages for one in examples):
        raise ConfigError(
            f"the prompts of the task '{task.name}' are lists of messages, which only a chat template can write as "
            f"tokens. Set rollout.chat to true, or make the prompts text and leave `system` out."
        )
    if rollout.chat and policy.tokenizer.chat_template is None:
        raise ModelError(
            f"rollout.chat is true, and the tokenizer of '{policy.tokenizer.name_or_path}' has no chat template. Take "
            f"a model that was trained on chats, or make the prompts text and set rollout.chat to false."
        )
    policy.encode([one.asked for one in examples], rollout.max_new_tokens, chat=rollout.chat)
