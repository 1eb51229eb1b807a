"""GRPO in a loop of your own with an objective of rlstab: one file, no trainer, no GPU, no network."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlstab import ClipHigher, OptimizerStep, PolicyOutputs, S2TMask, TokenBatch, compose
from rlstab.models import SHIPPED
from rlstab.signals import token_signals_from_logits
from rlstab.tasks import Countdown

ROLLOUTS, PROMPTS, GROUP = 60, 16, 8

torch.manual_seed(0)
task, objective = Countdown(), compose(ClipHigher(low=0.2, high=0.28), S2TMask(max_prob=0.01))
tokenizer = AutoTokenizer.from_pretrained(SHIPPED["countdown-tiny"], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(SHIPPED["countdown-tiny"])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
state = objective.init_state()


def signals(ids, mask, width):
    """Log-probs and entropies of the last `width` tokens, each (B, T)."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, -width - 1 : -1]
    tokens = token_signals_from_logits(logits.flatten(0, 1), ids[:, -width:].flatten())
    return tokens.logprobs.view(-1, width), tokens.entropies.view(-1, width)


for rollout in range(ROLLOUTS):
    examples = [task.example("train", rollout * PROMPTS + i) for i in range(PROMPTS) for _ in range(GROUP)]
    prompts = tokenizer([example.prompt for example in examples], return_tensors="pt", padding=True)
    ids = model.generate(**prompts, do_sample=True, max_new_tokens=24)
    width = ids.shape[1] - prompts.input_ids.shape[1]
    ended = ids[:, -width:] == tokenizer.eos_token_id
    response_mask = ended.cumsum(1) - ended.long() == 0  # up to the first EOS, and with it
    mask = torch.cat([prompts.attention_mask, response_mask.long()], dim=1)

    answers = [tokenizer.decode(row[keep]) for row, keep in zip(ids[:, -width:], response_mask, strict=True)]
    rewards = torch.tensor([task.score(example, text) for example, text in zip(examples, answers, strict=True)])
    groups = rewards.view(PROMPTS, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()

    with torch.no_grad():
        logprobs, entropies = signals(ids, mask, width)
    for mini_batch in torch.randperm(PROMPTS * GROUP).chunk(2):  # two optimizer steps ...
        cut = mini_batch.chunk(4)  # ... of four micro-batches
        parts = [
            TokenBatch.from_padded(
                response_mask=response_mask[rows],
                advantages=advantages[rows],
                old_logprobs=logprobs[rows],
                entropies=entropies[rows],
                sequence_ids=rows,
            )
            for rows in cut
        ]
        step = OptimizerStep(objective, state)
        step.make_plan(parts)  # thresholds and denominators of the whole optimizer step
        for part, rows in zip(parts, cut, strict=True):
            live, _ = signals(ids[rows], mask[rows], width)
            step.loss(part, PolicyOutputs.from_padded(part, logprobs=live)).loss.backward()
        step.finish(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if step.moves_weights:  # neither refused nor without a gradient
            with step.scaled_learning_rate(optimizer):
                optimizer.step()
        optimizer.zero_grad()
        state = step.state
    print(f"rollout {rollout}: right {rewards.mean():.3f}, entropy {entropies[response_mask].mean():.3f} nats")
