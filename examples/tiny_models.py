"""Make a tiny model of countdown or chain: a small Llama, trained from scratch on noisy demonstrations.

`python -m examples.tiny_models --task TASK --out DIR` writes the model and its tokenizer into one folder and prints
how good it is. The models that come with the package were made this way.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlstab.tasks import ALPHABET, Chain, Countdown, Example, Task

PAD = "<pad>"
EOS = "$"


class Demonstrated(Task, Protocol):
    """A task that can show how it is done."""

    def demonstration(self, example: Example, rng: random.Random) -> str:
        """Return an answer to learn from."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What a warm start takes from its task.

    Attributes:
        task: makes the task from a seed, which chooses its problems.
        steps: optimizer steps.
        longest_answer: tokens that an answer may have.
    """

    task: Callable[[int], Demonstrated]
    steps: int
    longest_answer: int


RECIPES = {
    # two steps over one-digit numbers and the closing `$` take at most 18
    "countdown": Recipe(lambda seed: Countdown(seed=seed), steps=1000, longest_answer=24),
    # three steps, the answer and the closing `$` take at most 31 without junk
    "chain": Recipe(lambda seed: Chain(seed=seed), steps=450, longest_answer=40),
}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of `ALPHABET`, padding on the left, `$` as end of text.

    Encoding and decoding give back the text exactly. `$` is a special token: decode with
    `skip_special_tokens=False` to keep it. A character outside the alphabet raises.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, *ALPHABET])}
    # WordLevel without an unknown token: a foreign character is an error, not a silent gap
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def tiny_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama of 0.335 million parameters, in float32, with torch's current random state."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def warm_start(
    out: str | Path,
    task: str = "countdown",
    *,
    steps: int | None = None,
    batch_size: int = 128,
    lr: float = 2e-3,
    seed: int = 0,
    log: Callable[[int, float], None] | None = None,
) -> Path:
    """Train a tiny model on demonstrations of a task and save it with its tokenizer.

    It stops early on purpose: the more it is trained on, the less it varies its answers, and variety is what
    reinforcement learning needs.

    Args:
        out: the folder to make; it appears only when it is complete.
        task: a name in `RECIPES`.
        steps: optimizer steps, by default the recipe's; the learning rate falls to 0 over them along a cosine.
        batch_size: demonstrations per step.
        lr: the first learning rate of AdamW.
        seed: of the first weights, the problems and the noise. torch's own random state is left as it was.
        log: called after every step with the step (from 1) and the loss (nats per token of the answer).

    Returns:
        The folder.

    Raises:
        FileExistsError: if `out` exists.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists. Name a folder that does not exist, or remove it first.")
    recipe = RECIPES[task]
    steps = recipe.steps if steps is None else steps
    tokenizer = character_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_llama(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    batches = _batches(recipe.task(seed), tokenizer, steps, batch_size, seed)
    for step, (ids, attention_mask, labels) in enumerate(batches, start=1):
        loss = model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
            labels=labels,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if log is not None:
            log(step, loss.item())
    _save(model, tokenizer, recipe.longest_answer, out)
    return out


def _batches(
    task: Demonstrated, tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield token ids, attention mask and labels (-100 outside the answer), each int64 [batch, length]."""
    for step in range(steps):
        prompts, answers = [], []
        for index in range(step * batch_size, (step + 1) * batch_size):
            example = task.example("train", index)
            prompts.append(example.prompt)
            answers.append(task.demonstration(example, random.Random(f"demonstration {seed} {index}")))
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        # one token per character and padding on the left: an answer is the last len(answer) tokens of its row
        lengths = torch.tensor([len(answer) for answer in answers])
        from_end = torch.arange(batch.input_ids.shape[1], 0, -1)
        labels = batch.input_ids.masked_fill(from_end > lengths[:, None], -100)
        yield batch.input_ids, batch.attention_mask, labels


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, longest_answer: int, out: Path) -> None:
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=longest_answer,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        complete = Path(temporary) / out.name
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        complete.rename(out)


@dataclass(frozen=True)
class Quality:
    """How well a model does on the eval split of its task.

    Attributes:
        greedy: share of problems solved by the most likely answer.
        mean: share of the answers sampled at temperature 1 that are right.
        pass_any: share of problems solved by at least one of the sampled answers.
        entropy: mean entropy of the policy at the sampled tokens, in nats.
    """

    greedy: float
    mean: float
    pass_any: float
    entropy: float


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: str = "countdown",
    *,
    prompts: int = 256,
    samples: int = 4,
    seed: int = 0,
) -> Quality:
    """Measure a model on the first `prompts` problems of the eval split, with `samples` sampled answers to each."""
    recipe = RECIPES[task]
    problems = recipe.task(0)
    examples = [problems.example("eval", index) for index in range(prompts)]
    batch = tokenizer([example.prompt for example in examples], padding=True, return_tensors="pt")
    start = batch.input_ids.shape[1]

    greedy = model.generate(**batch, do_sample=False, max_new_tokens=recipe.longest_answer)
    right = [
        problems.score(e, text) for e, text in zip(examples, tokenizer.batch_decode(greedy[:, start:]), strict=True)
    ]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sampled = model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
            max_new_tokens=recipe.longest_answer,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = sampled.sequences[:, start:]
    repeated = [example for example in examples for _ in range(samples)]
    scores = torch.tensor(
        [problems.score(e, text) for e, text in zip(repeated, tokenizer.batch_decode(tokens), strict=True)]
    ).view(prompts, samples)
    entropy = torch.distributions.Categorical(logits=torch.stack(sampled.logits, dim=1)).entropy()
    answer = tokens != tokenizer.pad_token_id
    return Quality(
        greedy=sum(right) / prompts,
        mean=scores.mean().item(),
        pass_any=scores.amax(dim=1).mean().item(),
        entropy=entropy[answer].mean().item(),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_models",
        description="Train a tiny model from scratch (one to two and a half minutes on one CPU core).",
    )
    parser.add_argument("--task", choices=sorted(RECIPES), default="countdown")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--steps", type=int, help="default: the task's own number")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    steps = RECIPES[args.task].steps if args.steps is None else args.steps

    def log(step: int, loss: float) -> None:
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss:.3f} nats", flush=True)

    out = warm_start(args.out, args.task, steps=steps, batch_size=args.batch_size, lr=args.lr, seed=args.seed, log=log)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    quality = measure(LlamaForCausalLM.from_pretrained(out).eval(), tokenizer, args.task)
    print(
        f"saved in {out}\n256 eval problems: greedy {quality.greedy:.3f}, sampled mean {quality.mean:.3f}, "
        f"pass@4 {quality.pass_any:.3f}, entropy {quality.entropy:.3f} nats"
    )


if __name__ == "__main__":
    main()
