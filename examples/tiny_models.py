"""Make a tiny model of countdown, chain, littered chain or shift: a small Llama, from scratch on noisy demonstrations.

`python -m examples.tiny_models --task TASK --out DIR` writes the model and its tokenizer into one folder and prints
how good it is. The models that come with the package were made this way.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demonstrations import demonstration
from rlstab.probe.suite import shift
from rlstab.tasks import ALPHABET, Chain, Countdown, Task

PAD = "<pad>"
EOS = "$"


@dataclass(frozen=True)
class Recipe:
    """What a warm start takes from its task.

    Attributes:
        task: makes the task from a seed, which chooses its problems.
        steps: optimizer steps.
        longest_answer: tokens that an answer may have.
        alphabet: the characters that are tokens.
        noise: of the demonstrations, where it is not the task's own.
        batch_size: demonstrations per step.
        lr: the first learning rate of AdamW.
        shape: of the Llama, where it is not that of :func:`tiny_llama`.
    """

    task: Callable[[int], Task]
    steps: int
    longest_answer: int
    alphabet: str = ALPHABET
    noise: Mapping[str, float] = field(default_factory=dict)
    batch_size: int = 128
    lr: float = 2e-3
    shape: Mapping[str, int | bool] = field(default_factory=dict)


def littered(seed: int) -> Chain:
    """The chain with 1,000 symbols of junk, and sums that are easy enough to leave room for them."""
    return Chain(terms=5, seed=seed, largest=2, modulus=10, junk_symbols=1000)


RECIPES = {
    # two steps over one-digit numbers and the closing `$` take at most 18
    "countdown": Recipe(lambda seed: Countdown(seed=seed), steps=1000, longest_answer=24),
    # three steps, the answer and the closing `$` take at most 31 without junk
    "chain": Recipe(lambda seed: Chain(seed=seed), steps=450, longest_answer=40),
    # 27 without junk; a tenth of what is learnt from is junk, each symbol a ten-thousandth
    "littered": Recipe(
        littered,
        steps=700,
        longest_answer=48,
        alphabet=ALPHABET + "".join(symbol for symbol in littered(0).junk if symbol not in ALPHABET),
        noise={"wrong": 0.02, "junk": 0.0001},
        batch_size=64,
        lr=3e-3,
        # embeddings that are not tied: a symbol can become rare without its input moving along
        shape={"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "tie_word_embeddings": False},
    ),
    # five digits or letters and the closing `$`
    "shift": Recipe(
        lambda seed: shift.Shift(seed=seed),
        steps=400,
        longest_answer=7,
        alphabet=shift.ALPHABET,
        lr=5e-3,
        shape={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "tie_word_embeddings": False},
    ),
}


def character_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of the alphabet, padding on the left, `$` as end of text.

    Encoding and decoding give back the text exactly. `$` is a special token: decode with
    `skip_special_tokens=False` to keep it. A character outside the alphabet raises.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, *alphabet])}
    # WordLevel without an unknown token: a foreign character is an error, not a silent gap
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # type: ignore[call-arg]  # the stubs lack it
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


def tiny_llama(tokenizer: PreTrainedTokenizerFast, **shape: int | bool) -> LlamaForCausalLM:
    """Return an untrained Llama in float32, with torch's current random state.

    With the characters of `ALPHABET` it has 0.335 million parameters, unless the shape says otherwise.
    """
    config = LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "dtype": "float32",
            **shape,
        }
    )
    return LlamaForCausalLM(config)


def warm_start(
    out: str | Path,
    task: str = "countdown",
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    log: Callable[[int, float], None] | None = None,
) -> Path:
    """Train a tiny model on demonstrations of a task and save it with its tokenizer.

    It stops early on purpose: the longer it trains, the less its answers vary, and reinforcement learning needs
    variety.

    Args:
        out: the folder to make; it appears only when it is complete.
        task: a name in `RECIPES`.
        steps: optimizer steps, by default the recipe's; the learning rate falls to 0 over them along a cosine.
        batch_size: demonstrations per step, by default the recipe's.
        lr: the first learning rate of AdamW, by default the recipe's.
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
    tokenizer = character_tokenizer(recipe.alphabet)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_llama(tokenizer, **recipe.shape)
    lr = recipe.lr if lr is None else lr
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    batches = _batches(recipe, tokenizer, steps, recipe.batch_size if batch_size is None else batch_size, seed)
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
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield token ids, attention mask and labels (-100 outside the answer), each int64 [batch, length]."""
    task = recipe.task(seed)
    for step in range(steps):
        prompts, answers = [], []
        for index in range(step * batch_size, (step + 1) * batch_size):
            example = task.example("train", index)
            prompts.append(example.prompt)
            noise = random.Random(f"demonstration {seed} {index}")
            answers.append(demonstration(task, example, noise, **recipe.noise))
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
    parser.add_argument("--batch-size", type=int, help="default: the task's own number")
    parser.add_argument("--lr", type=float, help="default: the task's own rate")
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
