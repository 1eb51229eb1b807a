"""Write the exports of other trainers in tests/replay/data again, by their own writers::

    python -m benchmarks foreign prime_rl CHECKOUT    # PrimeIntellect-ai/prime-rl, 559b447
    python -m benchmarks foreign nemo     CHECKOUT    # NVIDIA-NeMo/RL, 7ea279a
    python -m benchmarks foreign slime    CHECKOUT    # THUDM/slime, 624b824
    python -m benchmarks foreign verl     FOLDER      # site-packages with verl 0.9.1

The writers run on :data:`tests.replay.responses.RESPONSES`; mocks replace what else their modules import.
"""

import argparse
import ast
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from tests.replay.responses import RESPONSES

DATA = Path(__file__).parents[1] / "tests" / "replay" / "data"
STEPS = RESPONSES[:4], RESPONSES[4:]


def loaded(checkout: Path, path: str, *mocks: str) -> Any:
    """A file of a checkout as a module, with mocks for what it cannot import."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, checkout / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    parents = {".".join(name.split(".")[:end]) for name in mocks for end in range(1, name.count(".") + 2)}
    before = dict(sys.modules)
    sys.modules.update({name: MagicMock() for name in parents})
    try:
        spec.loader.exec_module(module)
    finally:
        for name in parents - before.keys():
            del sys.modules[name]
    return module


def method(checkout: Path, path: str, name: str, **names: Any) -> Any:
    """Only a function or method of a file that imports too much."""
    tree = ast.parse((checkout / path).read_text())
    (wanted,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    wanted.decorator_list, wanted.returns = [], None
    for argument in wanted.args.args:
        argument.annotation = None
    space = {"os": os, "json": json, "torch": torch, "np": np, **names}
    exec(compile(ast.Module([wanted], []), path, "exec"), space)
    return space[name]


def prime_rl(checkout: Path) -> None:
    """Two ranks, two micro-batches each, the sequences of a micro-batch packed and padded."""
    jaxtyping = ("beartype", "jaxtyping")
    mocks = (*jaxtyping, "prime_rl.configs.trainer", "prime_rl.utils.utils", "prime_rl.trainer.rl.loss")
    ratio = method(checkout, "src/prime_rl/trainer/rl/loss.py", "compute_importance_ratio_and_mismatch_kl")
    module = loaded(checkout, "src/prime_rl/trainer/rl/token_export.py", *mocks)
    module.DefaultLossConfig = SimpleNamespace
    module.compute_importance_ratio_and_mismatch_kl = ratio
    settings = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2)
    for step, rows in enumerate(STEPS):
        for rank in range(2):
            exporter = module.TokenExporter(DATA / "prime-rl", rank)
            for micro_step, packed in enumerate([[rows[2 * rank]], [rows[2 * rank + 1]]]):
                exporter.export(step, micro_step, *_packed(packed), settings)
            exporter.mark_stable()


def _packed(rows: list[Any]) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    def column(of: Any, before: Any, after: Any, dtype: torch.dtype) -> torch.Tensor:
        values = [value for row in rows for value in [*(before for _ in row.prompt), *of(row)]]
        return torch.tensor([[*values, after]], dtype=dtype)

    tokens = [token for row in rows for token in [*row.prompt, *row.ids]]
    names = [name for row in rows for name in ["sums"] * len(row.prompt + row.ids)]
    batch = {
        "input_ids": torch.tensor([[*tokens, 0]]),
        "position_ids": torch.arange(len(tokens) + 1)[None],
        "loss_mask": column(lambda row: row.mask, 0, 0, torch.bool),
        "advantages": column(lambda row: row.advantages, 0.0, 0.0, torch.float32),
        "inference_logprobs": column(lambda row: row.rollout_logprobs, 0.0, 0.0, torch.float32),
        "env_names": [*names, ""],
    }
    output = {
        "logprobs": column(lambda row: row.logprobs, -3.0, -3.0, torch.float32),
        "entropy": column(lambda row: row.entropies, 3.0, 3.0, torch.float32),
    }
    lengths = [len(row.prompt + row.ids) for row in rows]
    return batch, output, [*lengths[:-1], lengths[-1] + 1]


def nemo(checkout: Path) -> None:
    """One rank, every response padded to the longest of the step; the last response of each step is not trained on."""
    mocks = [f"nemo_rl.{name}" for name in ("data.multimodal_utils", "data.packing", "distributed.collectives")]
    module = loaded(checkout, "nemo_rl/distributed/batched_data_dict.py", *mocks)
    module.PackedTensor = type("PackedTensor", (), {})  # of images
    names = {"BatchedDataDict": module.BatchedDataDict}
    write = method(checkout, "nemo_rl/utils/logger.py", "log_batched_dict_as_jsonl", **names)
    for step, rows in enumerate(STEPS, 1):
        longest = max(len(row.prompt + row.ids) for row in rows)

        def padded(of: Any, longest: int = longest, rows: list[Any] = rows) -> list[list[float]]:
            values = [[0] * len(row.prompt) + list(of(row)) for row in rows]
            return torch.tensor([row + [0] * (longest - len(row)) for row in values]).tolist()

        data = {
            "content": [f"response {row.row}" for row in rows],
            "rewards": [row.reward for row in rows],
            "input_lengths": [len(row.prompt + row.ids) for row in rows],
            "token_ids": [(row.prompt + row.ids + [0] * longest)[:longest] for row in rows],
            "token_loss_mask": padded(lambda row: row.mask),
            "sample_loss_mask": [1.0, 1.0, 1.0, 0.0],
            "advantages": padded(lambda row: row.advantages),
            "generation_logprobs": padded(lambda row: row.rollout_logprobs),
            "prev_logprobs": padded(lambda row: row.logprobs),
        }
        write(SimpleNamespace(base_log_dir=DATA / "nemo-rl"), data, f"train_data_step{step}.jsonl")


def _rollout(rows: list[Any]) -> dict[str, Any]:
    """What slime has of some responses after training on them."""
    return {
        "tokens": [torch.tensor(row.prompt + row.ids) for row in rows],
        "response_lengths": [len(row.ids) for row in rows],
        "total_lengths": [len(row.prompt + row.ids) for row in rows],
        "loss_masks": [torch.tensor(row.mask, dtype=torch.int) for row in rows],
        "rewards": [row.advantages[0] for row in rows],
        "local_raw_reward": [row.reward for row in rows],
        "raw_reward": [row.reward for row in RESPONSES],
        "truncated": [0 for _ in rows],
        "sample_indices": [row.row for row in rows],
        "advantages": [torch.tensor(row.advantages) for row in rows],
        "log_probs": [torch.tensor(row.logprobs) for row in rows],
        "rollout_log_probs": [torch.tensor(row.rollout_logprobs) for row in rows],
        "ref_log_probs": [torch.tensor(row.ref_logprobs) for row in rows],
    }


def slime(checkout: Path) -> None:
    """Two ranks, a rollout with two optimizer steps of two micro-batches on each rank."""
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    settings = SimpleNamespace(
        use_dynamic_batch_size=False, micro_batch_size=1, balance_data=False, balance_by_flops=False
    )
    schedule = loaded(checkout, "slime/utils/dp_schedule.py", "slime.utils.flops_utils", "slime.utils.seqlen_balancing")
    lengths = [len(row.prompt + row.ids) for row in RESPONSES]
    partitions, indices, counts, sizes = schedule.build_dp_schedule(
        settings, parallel, lengths, global_batch_size=4, rollout_indices=[row.row for row in RESPONSES]
    )
    shards = [
        {
            "rank": rank,
            "data_parallel_rank": rank,
            "rollout_data": {
                **_rollout([RESPONSES[index] for index in partition]),
                "partition": partition,
                "micro_batch_indices": indices[rank],
                "num_microbatches": counts,
                "global_batch_sizes": sizes,
            },
        }
        for rank, partition in enumerate(partitions)
    ]
    module = loaded(checkout, "slime/observability/train_data_utils.py")
    (DATA / "slime").mkdir(parents=True, exist_ok=True)
    torch.save(module._build_dump_payload(shards, rollout_id=5, writer_rank=0), DATA / "slime" / "train_5.pt")


def verl(packages: Path) -> None:
    """Texts and scores."""
    write = method(packages, "verl/trainer/ppo/ray_trainer.py", "_write_generations")
    texts = [f"response {row.row}" for row in RESPONSES]
    write(texts, texts, [None] * 8, [row.reward for row in RESPONSES], {}, DATA / "verl", 1)


WRITERS = {"prime_rl": prime_rl, "nemo": nemo, "slime": slime, "verl": verl}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks foreign", description=__doc__)
    parser.add_argument("trainer", choices=WRITERS)
    parser.add_argument("checkout", type=Path)
    options = parser.parse_args(arguments)
    WRITERS[options.trainer](options.checkout)
