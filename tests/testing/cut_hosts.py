"""Which loss functions of hosts depend on the cut: ``python -m tests.testing.cut_hosts HOST`` prints rows of a page."""

import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distribution
from typing import Any

import torch

from rlstab.testing import check_cut_free, skyrl_loss, trl_loss, verl_loss
from rlstab.testing.cut_free import KINDS


def trl() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Every loss type of GRPOConfig, and what else it computes over tokens."""
    import tempfile
    from pathlib import Path

    from trl import GRPOTrainer

    from tests.adapters.jobs import model
    from tests.adapters.trl_jobs import config, prompts, reward, tokenizer

    types_ = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
    others: dict[str, dict[str, Any]] = {
        "dapo, top_entropy_quantile 0.2": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
        "dapo, entropy_coef 0.1": {"loss_type": "dapo", "entropy_coef": 0.1},
    }
    for name, settings in {**{one: {"loss_type": one} for one in types_}, **others}.items():
        with tempfile.TemporaryDirectory() as folder:
            made = {"args": config(Path(folder), **settings), "processing_class": tokenizer()}
            trainer = GRPOTrainer(model=model(), reward_funcs=reward, train_dataset=prompts(), **made)
            yield name, trl_loss(trainer), True


def verl() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Every registered policy loss at its own settings."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.config import ActorConfig, PolicyLossConfig

    for name, function in POLICY_LOSS_REGISTRY.items():
        policy_loss = PolicyLossConfig(loss_mode=name, dro_beta=0.1, rollout_correction={"rollout_is": "token"})
        actor = ActorConfig(
            strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True, policy_loss=policy_loss
        )
        yield name, verl_loss(function, actor), False


def skyrl() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Every registered policy loss at its own settings; a package that it imports lies in a folder of its wheel."""
    sys.path.append(str(distribution("skyrl").locate_file("skyrl-gym")))
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.config import AlgorithmConfig

    for name in PolicyLossRegistry.list_available():
        settings = AlgorithmConfig(policy_loss_type=name, loss_reduction="token_mean")
        yield name, skyrl_loss(PolicyLossRegistry.get(name), settings), False


def openrlhf() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Its policy losses with and without the corrections; the file alone, for the package needs a GPU's libraries."""
    package, path = "openrlhf.models", distribution("openrlhf").locate_file("openrlhf/models/loss.py")
    sys.modules.setdefault("deepspeed", types.ModuleType("deepspeed"))
    for name, of in ((package, ""), (f"{package}.utils", "utils.py"), (f"{package}.loss", "loss.py")):
        spec = importlib.util.spec_from_file_location(name, str(path).replace("loss.py", of or "loss.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        if of:
            spec.loader.exec_module(module)
        else:
            module.__path__ = []
    losses: dict[str, dict[str, Any]] = {
        "ppo": {},
        "ppo, dual clip": {"dual_clip": 3.0},
        "ppo, mean of each response": {"token_level_loss": False},
        "gspo": {"policy_loss_type": "gspo"},
        "ppo, TIS": {"is_correction_level": "token", "is_correction_mode": "clip"},
        "ppo, trust region": {
            "is_correction_level": "seq",
            "is_correction_gating": "binary_kl",
            "is_correction_threshold": (0.0, 0.002),
        },
    }

    def loss(policy_loss: Any, **given: Any) -> Any:
        counts = {"batch_num_tokens": given["tokens"], "global_batch_size": given["sequences"]}
        tensors = (given[name] for name in ("logprobs", "old_logprobs", "advantages", "mask", "rollout_logprobs"))
        return policy_loss(*tensors, dp_size=given["ranks"], **counts)

    for name, settings in losses.items():
        yield name, partial(loss, sys.modules[f"{package}.loss"].PolicyLoss(**settings)), False


HOSTS = {"trl": trl, "verl": verl, "skyrl": skyrl, "openrlhf": openrlhf}


def rows(host: str) -> Iterator[str]:
    """The rows of the table: by how much the gradient of each loss moves under each kind of cut.

    The losses that no cut moves share the last row.
    """
    still = []
    for name, loss, even in HOSTS[host]():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hosts
            report = check_cut_free(loss, even=even)
        moved = [f"{report[kind].moved:.2g}" if kind in report.failed else "0" for kind in KINDS if kind != "packed"]
        if any(number != "0" for number in moved):
            yield f"| {host} | {name} | {' | '.join(moved)} |"
        else:
            still.append(name)
    yield f"| {host} | {'; '.join(still)} | {' | '.join('0' for kind in KINDS if kind != 'packed')} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows(sys.argv[1]):
        print(row, flush=True)
