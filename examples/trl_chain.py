"""GRPO through TRL's trainer with an objective of rlstab, on the chain model that ships: no GPU, no network.

    pip install -c constraints.txt -e '.[trl]'
    python examples/trl_chain.py
    rlstab bench examples/bench_trl.yaml     # two methods, three seeds each

A hundred optimizer steps take a few minutes on one CPU core. It differs from a plain TRL script in the import of
the trainer and the argument `objective`.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

from rlstab.adapters.trl import RLStabGRPOTrainer
from rlstab.models import SHIPPED
from rlstab.tasks.chain import Chain

OBJECTIVE = Path(__file__).parent / "objective.yaml"


def main() -> None:
    """Train, and print what TRL logs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (100)")
    parser.add_argument("--objective", default=str(OBJECTIVE), help="YAML file of the objective")
    parser.add_argument("--seed", type=int, default=42, help="of the order of prompts and of sampling (42)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per batch, of 8 responses each (8)")
    parser.add_argument("--save", type=int, help="optimizer steps between checkpoints (none)")
    parser.add_argument("--out", default="runs/trl-chain", help="folder of TRL's checkpoints")
    options = parser.parse_args()

    task = Chain()
    examples = [task.example("train", index) for index in range(512)]
    sums = {example.prompt: example for example in examples}

    model = str(SHIPPED["chain-tiny"])
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")

    def correct(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        # from the ids: an answer ends with `$`, which is the EOS token, and TRL leaves that out of the text
        pairs = zip(prompts, tokenizer.batch_decode(completion_ids), strict=True)
        return [task.score(sums[prompt], completion) for prompt, completion in pairs]

    trainer = RLStabGRPOTrainer(
        model=model,
        reward_funcs=correct,
        args=GRPOConfig(
            output_dir=options.out,
            seed=options.seed,
            per_device_train_batch_size=4 * options.prompts,
            gradient_accumulation_steps=2,
            num_generations=8,
            num_iterations=2,
            max_completion_length=40,
            max_steps=options.steps,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="steps" if options.save else "no",
            save_steps=options.save or options.steps,
            save_total_limit=1,
            report_to="none",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": [example.prompt for example in examples]}),
        processing_class=tokenizer,
        objective=options.objective,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.out) if Path(options.out).is_dir() else None)
    trainer.save_state()


if __name__ == "__main__":
    main()
