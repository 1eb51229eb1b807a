"""A mixture of experts in which each expert is a module of its own, so that many get no gradient from a batch.

Those of transformers are one weight together, which every token reaches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from rlstab.config import load_run
from rlstab.train import loop, train
from rlstab.train.policy import load_policy

#: Of which a token reaches two.
EXPERTS = 16


class ListedExperts(nn.Module):
    """In place of ``MixtralExperts``.

    Attributes:
        reached: the numbers of those that a token reached.
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner, bias=False), nn.SiLU(), nn.Linear(inner, width, bias=False))
            for _ in range(config.num_local_experts)
        )
        self.reached = set[int]()

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As it."""
        found = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            token, place = torch.where(chosen == number)
            values = self.experts[number](hidden[token]) * weights[token, place, None]
            found = found.index_add(0, token, values)
            self.reached.add(number)
        return found


class ListedConfig(MixtralConfig):
    model_type = "listed_experts"


class ListedModel(MixtralForCausalLM):
    config_class = ListedConfig

    def __init__(self, config: ListedConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = ListedExperts(config)
        self.post_init()


def register() -> None:
    """Let transformers load it."""
    AutoConfig.register("listed_experts", ListedConfig, exist_ok=True)
    AutoModelForCausalLM.register(ListedConfig, ListedModel, exist_ok=True)


def save(folder: Path, listed: bool) -> Path:
    """A model of random weights, for the tokens of one that ships."""
    policy = load_policy("countdown-tiny")
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    config = (ListedConfig if listed else MixtralConfig)(
        **{name: getattr(policy.model.config, name) for name in names},
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    (ListedModel if listed else MixtralForCausalLM)(config).save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def listed(file: Path) -> None:
    """The run; says how many experts of each layer the tokens of this process reached in each optimizer step."""
    register()
    step, reached = loop.Learner._step, list[list[int]]()

    def counted(self: Any, *given: Any, **options: Any) -> None:
        found = [one for one in self.engine.policy.model.modules() if isinstance(one, ListedExperts)]
        for one in found:
            one.reached.clear()
        step(self, *given, **options)
        reached.append([len(one.reached) for one in found])

    loop.Learner._step = counted
    train(load_run(file))
    print("experts reached:", reached)
