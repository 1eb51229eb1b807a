"""A published recipe through TRL, on a data set of mathematics with answers that can be checked.

    pip install -c constraints.txt -e '.[trl,tasks]'
    accelerate launch --num_processes 8 examples/recipes/train_trl.py --config examples/recipes/stapo/trl.yaml

A `trl.yaml` holds the fields of `Recipe` below and those of TRL's `GRPOConfig`; what follows it replaces its values.
"""

from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, TrlParser
from trl.rewards import accuracy_reward, get_soft_overlong_punishment

from rlstab.adapters.trl import RLStabGRPOTrainer


@dataclass
class Recipe:
    """What a recipe says in addition to TRL's settings."""

    model: str = field(metadata={"help": "name on the Hub, or a folder"})
    objective: str = field(metadata={"help": "YAML file of the objective"})
    dataset: str = field(metadata={"help": "name on the Hub, or a JSON or Parquet file"})
    dataset_config: str | None = field(default=None, metadata={"help": "configuration of a data set on the Hub"})
    prompt_column: str = field(default="prompt", metadata={"help": "the question"})
    answer_column: str = field(default="solution", metadata={"help": "the answer that is right"})
    prompt_suffix: str = field(default="", metadata={"help": "what is put behind every question"})
    overlong_cache: int = field(default=0, metadata={"help": "tokens before the limit that cost reward; 0 for none"})


def questions(recipe: Recipe) -> Dataset:
    """`prompt`, a conversation of one message, and `solution`."""
    path = Path(recipe.dataset)
    if path.exists():
        kind = "parquet" if path.suffix == ".parquet" else "json"
        rows = load_dataset(kind, data_files=str(path), split="train")
    else:
        rows = load_dataset(recipe.dataset, recipe.dataset_config, split="train")

    def asked(row: dict[str, str]) -> dict[str, object]:
        content = row[recipe.prompt_column] + recipe.prompt_suffix
        return {"prompt": [{"role": "user", "content": content}], "solution": f"${row[recipe.answer_column]}$"}

    return rows.map(asked, remove_columns=rows.column_names)


def main() -> None:
    """Read a recipe, and train."""
    recipe, args = TrlParser((Recipe, GRPOConfig)).parse_args_and_config()
    rewards = [accuracy_reward]
    if recipe.overlong_cache:
        rewards.append(get_soft_overlong_punishment(args.max_completion_length, recipe.overlong_cache))
    trainer = RLStabGRPOTrainer(
        model=recipe.model,
        reward_funcs=rewards,
        args=args,
        train_dataset=questions(recipe),
        processing_class=AutoTokenizer.from_pretrained(recipe.model, padding_side="left"),
        objective=recipe.objective,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
