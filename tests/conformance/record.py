"""Run published code on fixed tensors and store what it gives::

    python -m tests.conformance.record inputs
    python -m tests.conformance.record trl                            # trl 1.16.0 installed
    python -m tests.conformance.record verl                           # verl 0.9.1 installed
    python -m tests.conformance.record stare    CHECKOUT              # hp-luo/STARE
    python -m tests.conformance.record lp_reg   CHECKOUT              # CarlanLark/Lp-Reg-dev
    python -m tests.conformance.record dr_grpo  CHECKOUT CHECKOUT     # sail-sg/understand-r1-zero, sail-sg/oat
    python -m tests.conformance.record maspo    CHECKOUT              # FlyTune/MASPO-RL
    python -m tests.conformance.record ce_gppo  CHECKOUT              # Kwai-Klear/CE-GPPO
    python -m tests.conformance.record dcpo     CHECKOUT              # lime-RL/DCPO
    python -m tests.conformance.record aspo     CHECKOUT              # wizard-III/Archer2.0
    python -m tests.conformance.record steer    CHECKOUT              # zz-haooo/STEER
    python -m tests.conformance.record m2po     CHECKOUT              # Infini-AI-Lab/M2PO
    python -m tests.conformance.record drpo     CHECKOUT              # Tencent-Hunyuan/UniRL
    python -m tests.conformance.record cppo     CHECKOUT              # Tencent-Hunyuan/UniRL
    python -m tests.conformance.record holder   CHECKOUT              # YihangChen9/HolderPO
    python -m tests.conformance.record ar       CHECKOUT              # zhyang2226/AR-Lopti
    python -m tests.conformance.record fipo     CHECKOUT              # modelscope/ms-swift
    python -m tests.conformance.record vcpo     CHECKOUT              # mit-han-lab/vcpo

What is recorded from a checkout is in :mod:`tests.conformance.authors`.
A step in parts is run as its trainer runs it: one call of the published loss for each part, one backward each,
gradients and losses added. Only losses, advantages, masks and controllers are called; what their modules import
besides, and what is not installed, is replaced by an empty module.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import math
import random
import re
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
WHOLE, HALVES, RAGGED = [list(range(8))], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2], [3], [4, 5, 6, 7]]
CUTS = {"whole": WHOLE, "halves": HALVES, "ragged": RAGGED}
#: A constant length that no input has.
LENGTH = 12

Rows = Sequence[Sequence[float]]
Loss = Callable[[dict[str, Tensor], Tensor], "tuple[Tensor, Tensor | None]"]


# -- the tensors -------------------------------------------------------------------------------------------------------


def inputs() -> dict[str, Any]:
    """Named sets of padded tensors. Padding holds numbers that would show if they were counted."""
    rewards = {
        "groups": {"ids": [0, 1, 2] * 4, "rewards": [1.0, 0.25, -1.0, -1.0, 0.75, 0.5, -1.0, 0.0, 0.5, -1.0, 1.0, 0.0]},
        "singleton": {"ids": [0, 0, 1], "rewards": [1.0, 0.0, 0.75]},
        "equal": {"ids": [0] * 8, "rewards": [0.7] * 8},  # in float32 their mean is not 0.7
    }
    return {"rewards": rewards, "main": _main(), "ratios": _ratios(), **_small()}


def _main() -> dict[str, Any]:
    """Eight responses of a vocabulary of eight, one of them with advantage 0; every other row has a hole."""
    draw, width, vocabulary = random.Random(2), 9, 8
    lengths, advantages = [9, 4, 7, 2, 8, 9, 4, 6], [1.25, -0.75, -1.5, 0.5, 0.75, -0.5, 0.0, -1.0]
    mask = [[int(t < n and not (row % 2 and t == 1)) for t in range(width)] for row, n in enumerate(lengths)]
    old = [[[round(draw.gauss(0, 2.5), 2) for _ in range(vocabulary)] for _ in range(width)] for _ in lengths]
    tokens = [
        [draw.choices(range(vocabulary), [math.exp(z / 2) for z in position])[0] for position in row] for row in old
    ]
    live = [[[round(z + draw.gauss(0, 0.2), 2) for z in position] for position in row] for row in old]
    for row, place, push in [(0, 2, 6.0), (0, 5, -6.0), (2, 1, 7.0), (2, 4, -5.0), (5, 0, 5.0), (7, 3, 9.0)]:
        pick = min if push > 0 else max  # ratios far from 1, for both signs
        tokens[row][place] = old[row][place].index(pick(old[row][place]))
        live[row][place][tokens[row][place]] += push
    logits = {name: torch.tensor(values, dtype=torch.float64) for name, values in (("old", old), ("live", live))}
    taken = {name: _taken(values, torch.tensor(tokens)) for name, values in logits.items()}
    present = torch.tensor(mask, dtype=torch.bool)
    live_distribution = logits["live"].log_softmax(-1)
    entropies = -(live_distribution.exp() * live_distribution).sum(-1).float().double()
    far = torch.tensor([[draw.choice([0.0] * 8 + [4.0, -12.5]) for _ in range(width)] for _ in lengths])
    noise = torch.tensor([[draw.gauss(0, 0.4) for _ in range(width)] for _ in lengths], dtype=torch.float64)
    return {
        "mask": mask,
        "advantages": advantages,
        "old": torch.where(present, taken["old"], -3.0).tolist(),
        "live": torch.where(present, taken["live"], -1.0).tolist(),
        "ref": torch.where(present, taken["live"] + noise + far, -9.0).tolist(),
        "entropies": torch.where(present, entropies, 50.0).tolist(),
        "tokens": tokens,
        "old_logits": old,
        "live_logits": [[[round(z, 2) for z in position] for position in row] for row in live],
    }


def _ratios() -> dict[str, Any]:
    """Eight responses: both signs at every ratio of a list, and as ``rollout`` what an engine says of the tokens."""
    draw, width, steps = random.Random(3), 8, [0.25, 0.5, 0.7, 0.9, 1.0, 1.1, 1.4, 2.0, 2.5, 4.0]
    lengths, advantages = [8, 8, 6, 5, 4, 3, 2, 1], [1.25, -0.75, -1.5, 0.5, 2.0, -0.25, -1.0, 0.75]
    wanted = {sign: draw.sample(steps, len(steps)) + draw.sample(steps, len(steps)) for sign in (True, False)}
    mask = [[int(t < n and (row, t) != (1, 2)) for t in range(width)] for row, n in enumerate(lengths)]
    padded = {"old": -3.0, "live": -1.0, "rollout": -5.0}
    rows = {name: [[value] * width for _ in lengths] for name, value in padded.items()}
    for row, advantage in enumerate(advantages):
        for t in (t for t in range(width) if mask[row][t]):
            ratio = wanted[advantage > 0].pop()
            old = round(math.log(draw.uniform(0.02, min(0.6, 0.9 / ratio))), 3)
            said = min(-0.001, round(old + draw.gauss(0, 0.15) + draw.choice([0.0] * 5 + [0.9, -1.2]), 3))
            for name, value in (("old", old), ("live", round(old + math.log(ratio), 6)), ("rollout", said)):
                rows[name][row][t] = value
    # one token that the engine finds far more likely, one on which all agree
    rows["old"][2][4], rows["live"][2][4], rows["rollout"][2][4] = -4.6, -4.8, -0.6
    rows["rollout"][4][1] = rows["old"][4][1]
    rows["entropies"] = [[round(abs(draw.gauss(0.7, 0.5)), 2) if present else 50.0 for present in row] for row in mask]
    return {"mask": mask, "advantages": advantages, **rows}


def _taken(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _small() -> dict[str, Any]:
    """Tensors of a few tokens on which rlstab and others part."""

    def step(advantages: list[float], old: Rows, live: Rows, mask: Rows | None = None, **more: Any) -> dict[str, Any]:
        ones = [[1.0] * len(old[0]) for _ in old]
        return {"mask": mask or ones, "advantages": advantages, "old": old, "live": live, **more}

    flat = [[-1.0] * 4] * 2
    near = 1.0 + 2.0**-23  # the float32 after 1
    return {
        "extreme": step([1.0, -1.0], [[-26.0, -1.0], [-26.0, -1.0]], [[-1.0, -26.0], [-1.0, -26.0]]),
        "far_ref": step([0.0], [[-1.0, -26.0]], [[-1.0, -26.0]], ref=[[-26.0, -1.0]]),
        "empty_row": step(
            [1.0, -0.5, 0.5],
            [[-1.0] * 3] * 3,
            [[-0.9, -1.1, -1.0], [-1.2, -1.0, -0.8], [-1.0, -1.05, -0.95]],
            [[1, 1, 1], [0, 0, 0], [1, 0, 0]],
        ),
        "dual_edge": step([-1.0], [[-2.0, -2.0]], [[-2.0 + math.log(2), -1.9]]),
        "equal_surprisal": step(
            [1.0, -1.0], flat, [[-2.0, -2.0, -1.0, -2.0]] * 2, entropies=[[0.1] * 4] * 2, target=[[-1.5] * 4] * 2
        ),
        "equal_entropy": step([1.0], [[-1.0] * 5], [[-1.0] * 5], entropies=[[0.1, 0.9, 0.9, 0.2, 0.3]]),
        "adjacent_entropy": step([1.0], [[-1.0] * 5], [[-1.0] * 5], entropies=[[0.25, 0.5, near, 1.0, 0.75]]),
        # the last four tokens: below the proxy, above it, far below it, not plausible
        "proxy": step(
            [-1.0, 1.0],
            [[-0.1, -0.2, -5.0, -3.0, -4.0, -5.0], [-0.1] * 6],
            [[-0.2, -0.1, -6.0, -4.0, -9.0, -8.0], [-0.2] * 6],
            target=[[-0.1, -0.2, -4.9, -4.9, -3.9, -1e4], [-0.1] * 6],
        ),
        "proxy_far": step([-1.0], [[-0.1, -2.0, -110.0]], [[-0.1, -2.0, -110.0]], target=[[-0.1, -1.9, -10.0]]),
    }


def load(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def tensors(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A set of inputs as tensors; advantages laid out over the tokens and, as in verl, 0 on padding."""
    values = {key: torch.tensor(column, dtype=dtype) for key, column in load("inputs")[name].items() if key != "tokens"}
    values["advantages"] = values["advantages"].unsqueeze(-1) * values["mask"]
    return values


def run(loss: Loss, name: str, parts: list[list[int]], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Add loss and gradient of the parts; ``selected`` where the loss says which tokens it chose."""
    values = tensors(name, dtype)
    gradient, chosen = torch.zeros_like(values["live"]), torch.zeros_like(values["live"])
    total, says = 0.0, False
    for rows in parts:
        live = values["live"][rows].clone().requires_grad_()
        summed, selected = loss({key: value[rows].clone() for key, value in values.items()}, live)
        summed.backward()
        assert live.grad is not None
        total, gradient[rows] = total + summed.item(), live.grad
        if selected is not None:
            says, chosen[rows] = True, selected.to(dtype)
    assert not gradient[values["mask"] == 0].any()
    result = {"loss": _number(total), "gradient": [[_number(number) for number in row] for row in gradient.tolist()]}
    return result | ({"selected": chosen.int().tolist()} if says else {})


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def case(
    loss: Loss, inputs: str, cut: str | list[list[int]] | None = None, dtype: str = "float64", **settings: Any
) -> dict[str, Any]:
    """What is stored: where it came from, and loss and gradient; ``cut`` may list the rows of each part."""
    rows = len(load("inputs")[inputs]["advantages"])
    parts = [list(range(rows))] if cut is None else CUTS[cut] if isinstance(cut, str) else cut
    stored = {"inputs": inputs, "parts": parts, "dtype": dtype, "settings": settings}
    return stored | run(loss, inputs, parts, getattr(torch, dtype))


class Config(dict):
    """Settings that are read as attributes and as items; what is absent is None."""

    __getattr__ = dict.get


# -- trl ---------------------------------------------------------------------------------------------------------------


def trl() -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer, __version__
    from trl.trainer import grpo_trainer as module

    class Alone:
        num_processes, sync_gradients = 1, True

        def pad_across_processes(self, values: Tensor, **_: Any) -> Tensor:
            return values

        gather = gather_for_metrics = pad_across_processes

        def reduce(self, values: Tensor, **_: Any) -> Tensor:
            return values

    # what a case does not set is what TRL's user does not set
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}

    def trainer(parts: int = 1, **settings: Any) -> Any:
        bare = types.SimpleNamespace(
            accelerator=Alone(),
            args=Config(defaults | settings, steps_per_generation=parts),
            model=types.SimpleNamespace(training=True),
            current_gradient_accumulation_steps=parts,
            aux_loss_enabled=False,
            off_policy_mask_threshold=None,
            importance_sampling_level="token",
            use_vllm=False,
            vllm_importance_sampling_clip_min=None,
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
        )
        chosen = {"top_entropy_quantile": 1.0, "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28} | settings
        bare.__dict__.update(chosen)
        bare.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, bare)
        return bare

    # weights and masks are made in the middle of a method that generates, so only their blocks are compiled
    generate = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))

    def block(test: str, has: str, result: str, **names: Any) -> Tensor:
        """What an ``if`` of that method leaves in a name."""
        (wanted,) = (
            node
            for node in ast.walk(generate)
            if isinstance(node, ast.If) and ast.unparse(node.test) == test and has in ast.unparse(node)
        )
        space = vars(module) | {"tool_mask": None} | names
        exec(compile(ast.Module([wanted], []), module.__file__, "exec"), space)
        return space[result]

    def weights(bare: Any, values: dict[str, Tensor]) -> Tensor:
        return block(
            "self.use_vllm and self.vllm_importance_sampling_correction",
            "masked_fill",
            "vllm_importance_sampling_ratio",
            self=bare,
            completion_mask=values["mask"],
            old_per_token_logps=values["old"],
            sampling_per_token_logps=values["rollout"],
        )

    def left(mask: Tensor, cut_off: Sequence[int]) -> Tensor:
        """The mask without responses that do not end with EOS."""
        bare = types.SimpleNamespace(
            mask_truncated_completions=True, eos_token_ids=[1], _tokenizer=types.SimpleNamespace(pad_token_id=0)
        )
        ids = [[2 if row in cut_off else 1] for row in range(len(mask))]
        test = "self.mask_truncated_completions"
        return block(
            test, "", "completion_mask", self=bare, completion_ids_list=ids, completion_mask=mask, device=mask.device
        )

    def loss(
        cut: str | None = None,
        inputs: str = "main",
        old: bool = True,
        sampled: bool = False,
        cut_off: Sequence[int] = (),
        **settings: Any,
    ) -> dict[str, Any]:
        """``sampled``: the rollout log-probs are handed in, as they are where an engine generates. ``cut_off``: rows
        that were truncated, of a step in one part."""
        parts = 1 if cut is None else len(CUTS[cut])
        if "vllm_importance_sampling_mode" in settings:
            settings |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
        bare = trainer(parts, **settings)
        items = left(torch.tensor(load("inputs")[inputs]["mask"]).long(), cut_off).sum()

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, Tensor | None]:
            entropies = values["entropies"].float() if "entropies" in values else torch.zeros_like(live)
            bare._get_per_token_logps_and_entropies = lambda *_, **__: (live, entropies, None)
            given = {
                "prompt_ids": torch.zeros(len(live), 1, dtype=torch.int64),
                "prompt_mask": torch.ones(len(live), 1, dtype=torch.int64),
                "completion_ids": torch.zeros(live.shape, dtype=torch.int64),
                "completion_mask": left(values["mask"].long(), cut_off),
                "advantages": values["advantages"][:, 0],
                "ref_per_token_logps": values.get("ref"),
                "num_items_in_batch": items,
            } | ({"old_per_token_logps": values["old"]} if old else {})
            if sampled:
                given["sampling_per_token_logps"] = values["rollout"]
            if bare.use_vllm:
                given["importance_sampling_ratio"] = weights(bare, values)
            selected = None
            if bare.top_entropy_quantile < 1:
                level = 1 - bare.top_entropy_quantile
                selected = GRPOTrainer.get_high_entropy_mask(bare, entropies, given["completion_mask"], level)
            return GRPOTrainer._compute_loss(bare, None, given), selected

        return case(published, inputs, cut, old=old, **settings, **({"cut_off": list(cut_off)} if cut_off else {}))

    cases = {
        f"{kind} {cut}": loss(cut, loss_type=kind, **({"max_completion_length": LENGTH} if kind == "dr_grpo" else {}))
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo")
        for cut in CUTS
    }
    cases["symmetric clip"] = loss(loss_type="dapo", epsilon_high=0.2)
    cases["on-policy"] = loss("halves", loss_type="grpo", old=False)
    plain_kl = {"beta": 0.04, "use_bias_correction_kl": False}
    cases["kl"] = loss("halves", loss_type="dapo", **plain_kl)
    cases["kl, TRL's default"] = loss("halves", loss_type="dapo", beta=0.04)
    cases["kl, TRL's default, on-policy"] = loss("halves", loss_type="dapo", beta=0.04, old=False)
    for cut in CUTS:
        cases[f"top entropy {cut}"] = loss(cut, loss_type="dapo", top_entropy_quantile=0.2)
    cases["top entropy, grpo"] = loss(loss_type="grpo", top_entropy_quantile=0.35)
    cases["top entropy and kl"] = loss(loss_type="dapo", top_entropy_quantile=0.2, **plain_kl)
    cases["extreme"] = loss(inputs="extreme", loss_type="dapo")
    cases["far ref"] = loss(inputs="far_ref", loss_type="dapo", **plain_kl | {"beta": 1.0})
    cases["empty row"] = loss(inputs="empty_row", loss_type="grpo")
    cases["empty row, dr_grpo"] = loss(inputs="empty_row", loss_type="dr_grpo", max_completion_length=LENGTH)
    cases["adjacent entropies"] = loss(inputs="adjacent_entropy", loss_type="dapo", top_entropy_quantile=0.2)
    cases["equal entropies"] = loss(inputs="equal_entropy", loss_type="dapo", top_entropy_quantile=0.2)

    ratios = functools.partial(loss, inputs="ratios")
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
    for delta in (None, 3.0, 1.8, 1.1):
        cases[f"delta {delta}"] = ratios(loss_type="dapo", delta=delta)
    cases["cispo"] = ratios(loss_type="cispo", epsilon_high=1.28)
    cases["cispo ragged"] = loss("ragged", loss_type="cispo", epsilon_high=5.0)
    cases["cispo, sequence"] = ratios(loss_type="cispo", **sequence | {"epsilon_high": 1.15})
    soft = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    cases["sapo"] = ratios(**soft)
    cases["sapo halves"] = loss("halves", **soft | {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0})
    cases["sapo, sequence"] = ratios(**soft, importance_sampling_level="sequence")
    gamma = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    other = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 1.5, "vespo_k_neg": 0.5, "vespo_lambda_neg": 0.25}
    cases["vespo"] = ratios(loss_type="vespo", **gamma)
    cases["vespo ragged"] = loss("ragged", loss_type="vespo", **other)
    for name, most in (("vespo, engine", 1e9), ("vespo, engine truncated", 3.0)):
        cases[name] = ratios(
            loss_type="vespo",
            **gamma,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=most,
        )
    for kind in ("grpo", "dapo", "luspo"):
        cases[f"{kind}, sequence"] = ratios(loss_type=kind, **sequence)
    cases["grpo, sequence, halves"] = loss("halves", loss_type="grpo", **sequence)
    cases["off-policy mask"] = ratios(loss_type="dapo", off_policy_mask_threshold=0.05)
    cases["off-policy mask ragged"] = loss("ragged", loss_type="dapo", off_policy_mask_threshold=0.1)
    cases["off-policy mask, engine"] = ratios(loss_type="grpo", off_policy_mask_threshold=0.05, sampled=True)
    for kind in ("dapo", "grpo"):
        cases[f"truncated, {kind}"] = ratios(loss_type=kind, cut_off=[0, 5])
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        for low in (None, 0.6):
            cases[f"{mode} {low}"] = ratios(
                loss_type="dapo",
                vllm_importance_sampling_mode=mode,
                vllm_importance_sampling_clip_max=2.0,
                vllm_importance_sampling_clip_min=low,
            )
    return {
        "provenance": {
            "repository": "huggingface/trl",
            "version": __version__,
            "functions": "GRPOTrainer._compute_loss, .get_high_entropy_mask, .get_off_policy_mask, .get_gamma_weights, "
            "._generate_and_score_completions",
            "how": "Losses: the methods on a bare object with the settings, whose forward pass returns the stored "
            "log-probs and entropies (float32). A cut is gradient accumulation over its parts, on one process. "
            "Importance weights, and the mask without truncated responses: the blocks of "
            "._generate_and_score_completions that make them, on the stored tensors. "
            "Advantages: a real trainer with a two-layer random model and a reward function that returns the stored "
            "rewards, group by group.",
        },
        "cases": cases,
        "advantages": {
            scale: _trl_advantages(name, scale) for name in ("groups",) for scale in ("group", "none", "batch")
        }
        | {"equal": _trl_advantages("equal", "group")},
    }


def _trl_advantages(name: str, scale: str) -> dict[str, Any]:
    import tempfile

    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    given = load("inputs")["rewards"][name]
    order = sorted(range(len(given["ids"])), key=lambda row: given["ids"][row])  # the trainer wants whole groups
    size = given["ids"].count(0)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["<pad>", "<eos>", "a", "b"])}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="a")
    shape = LlamaConfig(
        vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            num_generations=size,
            per_device_train_batch_size=len(order),
            max_completion_length=2,
            scale_rewards=scale,
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(shape),
            reward_funcs=lambda completions, **_: [given["rewards"][row] for row in order],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a b"] * len(order)}),
            processing_class=tokenizer,
        )
        trainer.model.train()
        scored = trainer._generate_and_score_completions([{"prompt": "a b"}] * len(order))
    by_row = dict(zip(order, scored["advantages"].tolist(), strict=True))
    return {"rewards": name, "scale_rewards": scale, "advantages": [by_row[row] for row in range(len(order))]}


# -- verl --------------------------------------------------------------------------------------------------------------


def verl() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    import numpy as np
    from verl.trainer.ppo import core_algos as code
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    try:
        installed = version("verl")
    except PackageNotFoundError:
        installed = (Path(code.__file__).parents[2] / "version" / "version").read_text().strip()

    whole = {"batch_num_tokens": int(tensors("main")["mask"].sum()), "global_batch_size": 8, "dp_size": 1}

    def vanilla(
        cut: str | None = None,
        inputs: str = "main",
        mode: str = "token-mean",
        low: float = 0.2,
        high: float = 0.28,
        dual: float = 10.0,
        info: dict[str, Any] | None = None,
        dtype: str = "float64",
    ) -> dict[str, Any]:
        """``info`` None: counts of the part alone, and the part weighted by its share of the rows."""
        rows = len(load("inputs")[inputs]["advantages"])
        config = Config(
            clip_ratio=0.2, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual, global_batch_info=info or {}
        )

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            summed, _ = code.compute_policy_loss_vanilla(
                old_log_prob=values["old"],
                log_prob=live,
                advantages=values["advantages"],
                response_mask=values["mask"],
                loss_agg_mode=mode,
                config=config,
            )
            return summed * (len(live) / rows if info is None else 1), None

        settings = {"loss_agg_mode": mode, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
        return case(published, inputs, cut, dtype, **settings, global_batch_info=info)

    def kl(kind: str, inputs: str = "main", cut: str | None = None) -> dict[str, Any]:
        info = {} if inputs != "main" else whole

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            value = code.kl_penalty(live, values["ref"], kind)
            return code.agg_loss(value, values["mask"], "token-mean", **info), None

        return case(published, inputs, cut, kl_penalty=kind)

    cases = {
        "dual clip 10": vanilla(),
        "dual clip 3": vanilla(high=0.2, dual=3.0),
        "dual clip 10, float32": vanilla(dtype="float32"),
        "token-mean whole": vanilla(),
        "token-mean ragged": vanilla("ragged", info=whole),
        "token-mean ragged, local": vanilla("ragged"),
        "seq-mean-token-mean ragged": vanilla("ragged", mode="seq-mean-token-mean", info=whole),
        "seq-mean-token-mean ragged, local": vanilla("ragged", mode="seq-mean-token-mean"),
        "seq-mean-token-sum ragged": vanilla("ragged", mode="seq-mean-token-sum", info=whole),
        "seq-mean-token-sum-norm ragged": vanilla(
            "ragged", mode="seq-mean-token-sum-norm", info=whole | {"loss_scale_factor": LENGTH}
        ),
        "seq-mean-token-sum-norm, no factor": vanilla(mode="seq-mean-token-sum-norm", info=whole),
        "extreme": vanilla(inputs="extreme"),
        "extreme, dual clip out of reach": vanilla(inputs="extreme", dual=1e12),
        "empty row": vanilla(inputs="empty_row", mode="seq-mean-token-mean"),
        "empty row, counted": vanilla(inputs="empty_row", mode="seq-mean-token-mean", info={"global_batch_size": 3}),
        "ratio on the dual bound": vanilla(inputs="dual_edge", dual=2.0),
        **{f"kl {kind}": kl(kind, cut="ragged") for kind in ("k1", "k2", "k3", "low_var_kl", "k3+")},
        **{f"kl {kind} far": kl(kind, "far_ref") for kind in ("k1", "k2", "k3", "k3+")},
    }
    assert cases["kl k3"]["gradient"] == cases["kl low_var_kl"]["gradient"]

    def policy(
        kind: str,
        cut: str | None = None,
        inputs: str = "ratios",
        mode: str = "token-mean",
        without: dict[str, Any] | None = None,
        covariance: dict[str, Any] | None = None,
        correction: dict[str, Any] | None = None,
        by_rows: bool = True,
        **settings: Any,
    ) -> dict[str, Any]:
        """A registered loss with verl's own configuration; the parts of a cut get the counts of the whole step.

        ``covariance``: settings of Clip-Cov and KL-Cov. ``without``: those at which no token is selected; the selected
        tokens are those whose gradient differs. ``correction``: settings of the rollout correction of the whole step,
        whose weights and mask then count; the selected tokens are those that it leaves. ``by_rows``: geo_mean, which
        takes the mean over the rows of a part, counts by their share; in verl its means are added.
        """
        every = tensors(inputs)
        mask, weights, rows = every["mask"], torch.ones_like(every["mask"]), len(every["mask"])
        if correction is not None:
            corrected, mask, _ = correct(every["old"], every["rollout"], mask, **correction)
            weights = weights if corrected is None else corrected.batch["rollout_is_weights"]
        info = {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(-1).sum()), "dp_size": 1}

        def config(chosen: dict[str, Any]) -> ActorConfig:
            selection = PolicyLossConfig(loss_mode=kind, **chosen)
            return ActorConfig(
                strategy="fsdp",
                use_dynamic_bsz=True,
                rollout_n=1,
                policy_loss=selection,
                global_batch_info=info,
                **settings,
            )

        def once(values: dict[str, Tensor], live: Tensor, part: list[int], chosen: dict[str, Any]) -> Tensor:
            torch.manual_seed(0)
            summed, _ = code.get_policy_loss_fn(kind)(
                old_log_prob=values["old"],
                log_prob=live,
                advantages=values["advantages"],
                response_mask=mask[part],
                loss_agg_mode=mode,
                config=config(chosen),
                rollout_is_weights=None if correction is None else weights[part],
            )
            return summed * (len(part) / rows if kind == "geo_mean" and by_rows else 1)

        parts = iter([list(range(rows))] if cut is None else CUTS[cut])

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, Tensor | None]:
            part = next(parts)
            summed = once(values, live, part, covariance or {})
            if correction is not None:
                return summed, weights[part] * mask[part] > 0
            if without is None:
                return summed, None
            slopes = [
                torch.autograd.grad(once(values, live, part, chosen), live)[0]
                for chosen in (covariance or {}, (covariance or {}) | without)
            ]
            return summed, slopes[0] != slopes[1]

        more = {"correction": correction} if correction is not None else covariance or {}
        return case(published, inputs, cut, loss_mode=kind, loss_agg_mode=mode, **settings, **more)

    wide, sides = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
    for kind in ("dppo_tv", "dppo_kl"):
        for low, high in ((0.15, 0.15), (0.05, 0.02)):
            names = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 20.0}
            cases[f"{kind} {low}, {high}"] = policy(kind, **names)
        cases[f"{kind}, ratios up to 1.7"] = policy(kind, clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=1.7)
        cases[f"{kind} ragged"] = policy(
            kind, "ragged", "main", clip_ratio_low=0.05, clip_ratio_high=0.02, clip_ratio_c=20.0
        )
    cases["dppo_tv, as configured"] = policy("dppo_tv")
    cases["gspo"] = policy("gspo", mode="seq-mean-token-mean", **sides)
    cases["gspo, token-mean"] = policy("gspo", **sides)
    cases["gspo ragged"] = policy("gspo", "ragged", "main", "seq-mean-token-mean", **sides)
    cases["sapo"] = policy("sapo", mode="seq-mean-token-mean")
    cases["sapo ragged"] = policy("sapo", "ragged", "main", "seq-mean-token-mean", tau_pos=2.0, tau_neg=3.0)
    cases["gpg"] = policy("gpg")
    cases["geo_mean"] = policy("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    cases["geo_mean ragged"] = policy("geo_mean", "ragged", "main", clip_ratio_low=0.1, clip_ratio_high=0.3)
    cases["geo_mean ragged, means added"] = policy(
        "geo_mean", "ragged", "main", by_rows=False, clip_ratio_low=0.1, clip_ratio_high=0.3
    )
    cases["cispo"] = policy("cispo", **wide)
    cases["cispo, no floor"] = policy("cispo", clip_ratio_low=1.0, clip_ratio_high=4.0)
    cases["cispo ragged"] = policy("cispo", "ragged", "main", **wide)
    spread = {"clip_cov_lb": 0.2, "clip_cov_ub": 1.5}
    for name, cut, share in (
        ("clip_cov, all candidates", None, 1.0),
        ("clip_cov, all candidates, ragged", "ragged", 1.0),
        ("clip_cov", None, 0.05),
        ("clip_cov ragged", "ragged", 0.1),
    ):
        cases[name] = policy(
            "clip_cov", cut, "main", covariance=spread | {"clip_cov_ratio": share}, without={"clip_cov_lb": 1e9}, **wide
        )
    for name, cut, share in (("kl_cov", None, 0.1), ("kl_cov ragged", "ragged", 0.2), ("kl_cov, one", None, 2e-4)):
        cases[name] = policy(
            "kl_cov", cut, "main", covariance={"kl_cov_ratio": share, "ppo_kl_coef": 0.7}, without={"ppo_kl_coef": 0.0}
        )
    for name, chosen in {
        "token, at most 2": {"rollout_is": "token"},
        "token, normalized": {"rollout_is": "token", "rollout_is_batch_normalize": True},
        "token, 0.5 to 2": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        "sequence, at most 2": {"rollout_is": "sequence"},
        "sequence, normalized": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        "sequence, 0.3 to 2": {"rollout_is": "sequence", "rollout_is_threshold": "0.3_2.0"},
        "tokens kept": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_3.0"},
        "sequences kept": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.4_4.0"},
        "geometric, kept": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.25"},
        "veto": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 2.0},
        "geometric, kept, with token weights": {
            "rollout_is": "token",
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.8_1.25",
        },
    }.items():
        cases[f"correction: {name}"] = policy("vanilla", correction=chosen, **wide, clip_ratio_c=10.0)

    def advantages(estimator: Callable[..., Any], name: str, **settings: Any) -> dict[str, Any]:
        given = load("inputs")["rewards"][name]
        rewards = torch.tensor(given["rewards"], dtype=torch.float32).unsqueeze(-1)
        estimates, _ = estimator(rewards, torch.ones_like(rewards), np.array(given["ids"]), **settings)
        return {"rewards": name, "settings": settings, "advantages": estimates[:, 0].tolist()}

    estimators = {
        "grpo": (code.compute_grpo_outcome_advantage, {}),
        "grpo without std": (code.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        "rloo": (code.compute_rloo_outcome_advantage, {}),
        "rloo_vectorized": (code.compute_rloo_vectorized_outcome_advantage, {}),
    }
    return {
        "provenance": {
            "repository": "verl-project/verl",
            "version": installed,
            "functions": "verl.trainer.ppo.core_algos: compute_policy_loss_vanilla, agg_loss, kl_penalty, "
            "compute_grpo_outcome_advantage, compute_rloo_outcome_advantage, "
            "compute_rloo_vectorized_outcome_advantage, and the losses registered by the names in loss_mode; "
            "verl.trainer.ppo.rollout_corr_helper: compute_rollout_correction_and_rejection_mask",
            "how": "The functions, called on the stored tensors. With global_batch_info the counts are those of the "
            "whole step and the losses of the parts are added; with null they are the part's own and each part is "
            "weighted by its share of the rows, as the older actor does; the cases with loss_mode have the counts of "
            "the whole step. A selection is read off the gradients with and without it, drawn with seed 0. Advantages "
            "in float32.",
        },
        "cases": cases,
        "advantages": {
            f"{name}, {rewards}": advantages(estimator, rewards, **settings)
            for name, (estimator, settings) in estimators.items()
            for rewards in ("groups", "singleton", "equal")
        },
    }


if __name__ == "__main__":
    from tests.conformance import authors

    source, *checkouts = sys.argv[1:]
    made = ({"inputs": inputs, "trl": trl, "verl": verl}.get(source) or getattr(authors, source))(*checkouts)
    DATA.mkdir(exist_ok=True)
    text = json.dumps(made, indent=1)
    flat = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
    (DATA / f"{source}.json").write_text(flat + "\n")
