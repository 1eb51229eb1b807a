"""GRPO on a task of rlstab by a Tinker server: the server samples and trains, the objective runs here.

python examples/tinker_chain.py --url http://127.0.0.1:8011 --model MODEL
"""

import argparse

import tinker
import torch
from tinker import types

from rlstab.adapters.tinker import TinkerTrainer
from rlstab.tasks import Chain, Example

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", help="of the server; Tinker's own without it")
parser.add_argument("--model", required=True, help="the base model of the server")
parser.add_argument("--objective", help="a file, without methods that read entropies; DAPO without it")
parser.add_argument("--rollouts", type=int, default=6)
parser.add_argument("--prompts", type=int, default=4)
parser.add_argument("--group", type=int, default=4)
parser.add_argument("--tokens", type=int, default=12)
parser.add_argument("--rate", type=float, default=1e-3)
options = parser.parse_args()


def datum(prompt: list[int], sampled: types.SampledSequence, advantage: float) -> types.Datum:
    """One response: every position but the last predicts the next token; what the prompt predicts does not count."""
    ids, before = [*prompt, *sampled.tokens], len(prompt) - 1
    mask = torch.cat([torch.zeros(before), torch.ones(len(sampled.tokens))])
    logprobs = torch.cat([torch.zeros(before), torch.tensor(sampled.logprobs)])
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(ids[1:])),
            "mask": types.TensorData.from_torch(mask),
            "logprobs": types.TensorData.from_torch(logprobs),
            "advantages": types.TensorData.from_torch(advantage * mask),
        },
    )


def reward(example: Example, answer: str) -> float:
    """1 for the right answer, and up to 0.1 for digits: a model that never answers has a gradient too."""
    return task.score(example, answer) + 0.1 * sum(map(str.isdigit, answer)) / max(1, len(answer))


service = tinker.ServiceClient(base_url=options.url) if options.url else tinker.ServiceClient()
client = service.create_lora_training_client(base_model=options.model, rank=4)
trainer = TinkerTrainer(client, options.objective or [{"preset": "dapo"}])
task, tokenizer = Chain(), client.get_tokenizer()
adam = types.AdamParams(learning_rate=options.rate)
sampling = types.SamplingParams(max_tokens=options.tokens, temperature=1.0)

for rollout in range(options.rollouts):
    sampler = client.save_weights_and_get_sampling_client()
    data, got = [], []
    for index in range(options.prompts):
        example = task.example("train", rollout * options.prompts + index)
        prompt = tokenizer.encode(example.prompt, add_special_tokens=False)
        answered = sampler.sample(types.ModelInput.from_ints(prompt), options.group, sampling).result().sequences
        rewards = torch.tensor([reward(example, tokenizer.decode(answer.tokens)) for answer in answered])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        data += [datum(prompt, answer, float(value)) for answer, value in zip(answered, advantages, strict=True)]
        got += rewards.tolist()
    metrics = trainer.step(data, adam)
    if metrics["steps/refused"]:
        print(trainer.last_refusal)
    shown = {name: metrics.get(name, 0.0) for name in ("loss", "ratio/mean", "tokens/live")}
    line = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
    print(f"rollout {rollout}: reward {sum(got) / len(got):.3f}, {line}", flush=True)
