"""Run published code on fixed tensors and store what it gives::

    python -m benchmarks published trl                            # trl 1.16.0 installed
    python -m benchmarks published verl                           # verl 0.9.1 installed
    python -m benchmarks published stare    CHECKOUT              # hp-luo/STARE
    python -m benchmarks published lp_reg   CHECKOUT              # CarlanLark/Lp-Reg-dev
    python -m benchmarks published dr_grpo  CHECKOUT CHECKOUT     # sail-sg/understand-r1-zero, sail-sg/oat
    python -m benchmarks published maspo    CHECKOUT              # FlyTune/MASPO-RL
    python -m benchmarks published ce_gppo  CHECKOUT              # Kwai-Klear/CE-GPPO
    python -m benchmarks published dcpo     CHECKOUT              # lime-RL/DCPO
    python -m benchmarks published aspo     CHECKOUT              # wizard-III/Archer2.0
    python -m benchmarks published steer    CHECKOUT              # zz-haooo/STEER
    python -m benchmarks published m2po     CHECKOUT              # Infini-AI-Lab/M2PO
    python -m benchmarks published drpo     CHECKOUT              # Tencent-Hunyuan/UniRL
    python -m benchmarks published cppo     CHECKOUT              # Tencent-Hunyuan/UniRL
    python -m benchmarks published holder   CHECKOUT              # YihangChen9/HolderPO
    python -m benchmarks published ar       CHECKOUT              # zhyang2226/AR-Lopti
    python -m benchmarks published fipo     CHECKOUT              # modelscope/ms-swift
    python -m benchmarks published vcpo     CHECKOUT              # mit-han-lab/vcpo
    python -m benchmarks published nemo     CHECKOUT              # NVIDIA-NeMo/RL
    python -m benchmarks published prime_rl CHECKOUT              # PrimeIntellect-ai/prime-rl

What is recorded from a checkout is in :mod:`benchmarks.authors`.
A step in parts is run as its trainer runs it: one call of the published loss for each part, one backward each,
gradients and losses added. Only losses, advantages, masks and controllers are called; what their modules import
besides, and what is not installed, is replaced by an empty module.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import authors
from benchmarks.recording import Config, case
from tests.conformance.inputs import CUTS, DATA, LENGTH, load, of_tokens, of_two_rewards, tensors

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
        made = types.SimpleNamespace(
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
        made.__dict__.update(chosen)
        made.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, made)
        return made

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

    def weights(trainer: Any, values: dict[str, Tensor]) -> Tensor:
        return block(
            "self.use_vllm and self.vllm_importance_sampling_correction",
            "masked_fill",
            "vllm_importance_sampling_ratio",
            self=trainer,
            completion_mask=values["mask"],
            old_per_token_logps=values["old"],
            sampling_per_token_logps=values["rollout"],
        )

    def left(mask: Tensor, cut_off: Sequence[int]) -> Tensor:
        """The mask without responses that do not end with EOS."""
        trainer = types.SimpleNamespace(
            mask_truncated_completions=True, eos_token_ids=[1], _tokenizer=types.SimpleNamespace(pad_token_id=0)
        )
        ids = [[2 if row in cut_off else 1] for row in range(len(mask))]
        test = "self.mask_truncated_completions"
        return block(
            test, "", "completion_mask", self=trainer, completion_ids_list=ids, completion_mask=mask, device=mask.device
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
        that were truncated, of a step in one part.
        """
        parts = 1 if cut is None else len(CUTS[cut])
        if "vllm_importance_sampling_mode" in settings:
            settings |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
        owner = trainer(parts, **settings)
        items = left(torch.tensor(load("inputs")[inputs]["mask"]).long(), cut_off).sum()

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, Tensor | None]:
            entropies = values["entropies"].float() if "entropies" in values else torch.zeros_like(live)
            owner._get_per_token_logps_and_entropies = lambda *_, **__: (live, entropies, None)
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
            if owner.use_vllm:
                given["importance_sampling_ratio"] = weights(owner, values)
            selected = None
            if owner.top_entropy_quantile < 1:
                level = 1 - owner.top_entropy_quantile
                selected = GRPOTrainer.get_high_entropy_mask(owner, entropies, given["completion_mask"], level)
            return GRPOTrainer._compute_loss(owner, None, given), selected

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
        """``info`` None: counts of only the part, and the part weighted by its share of the rows."""
        rows = len(load("inputs")[inputs]["advantages"])
        config = Config(
            clip_ratio=0.2, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual, global_batch_info=info or {}
        )

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            loss, _ = code.compute_policy_loss_vanilla(
                old_log_prob=values["old"],
                log_prob=live,
                advantages=values["advantages"],
                response_mask=values["mask"],
                loss_agg_mode=mode,
                config=config,
            )
            return loss * (len(live) / rows if info is None else 1), None

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
            weighed, mask, _ = correct(every["old"], every["rollout"], mask, **correction)
            weights = weights if weighed is None else weighed.batch["rollout_is_weights"]
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
            loss, _ = code.get_policy_loss_fn(kind)(
                old_log_prob=values["old"],
                log_prob=live,
                advantages=values["advantages"],
                response_mask=mask[part],
                loss_agg_mode=mode,
                config=config(chosen),
                rollout_is_weights=None if correction is None else weights[part],
            )
            return loss * (len(part) / rows if kind == "geo_mean" and by_rows else 1)

        parts = iter([list(range(rows))] if cut is None else CUTS[cut])

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, Tensor | None]:
            part = next(parts)
            loss = once(values, live, part, covariance or {})
            if correction is not None:
                return loss, weights[part] * mask[part] > 0
            if without is None:
                return loss, None
            slopes = [
                torch.autograd.grad(once(values, live, part, chosen), live)[0]
                for chosen in (covariance or {}, (covariance or {}) | without)
            ]
            return loss, slopes[0] != slopes[1]

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
        "worst token, k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.8},
        "worst token, k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.4},
        "mean k2": {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.15},
        "mean k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.15},
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
        advantages, _ = estimator(rewards, torch.ones_like(rewards), np.array(given["ids"]), **settings)
        return {"rewards": name, "settings": settings, "advantages": advantages[:, 0].tolist()}

    def per_token(**settings: Any) -> dict[str, Any]:
        given = of_tokens()
        mask = given["mask"]
        last = mask.sum(-1, keepdim=True) - 1
        rewards = torch.zeros_like(given["logprobs"]).scatter(1, last, given["rewards"].unsqueeze(-1))
        advantages, _ = code.compute_optimal_token_baseline_advantage(
            rewards, mask.double(), given["ids"].numpy(), given["logprobs"], given["sum_p_sq"], **settings
        )
        return {"rewards": "of tokens", "settings": settings, "advantages": advantages[mask].tolist()}

    def of_each() -> dict[str, Any]:
        given = of_two_rewards()
        ids, ones = given["ids"].numpy(), torch.ones(len(given["ids"]), 1)
        weights = given["reward_weights"][0].tolist()
        advantages, _ = code.compute_gdpo_outcome_advantage(
            ones,
            ones,
            ids,
            config={"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": weights},
            non_tensor_batch=dict(zip(("first", "second"), given["reward_parts"].T.numpy(), strict=True)),
            batch={"prompts": ones, "attention_mask": torch.cat([ones, ones], 1).long()},
        )
        return {"rewards": "two", "settings": {"weights": weights}, "advantages": advantages[:, 0].tolist()}

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
            "compute_rloo_vectorized_outcome_advantage, compute_optimal_token_baseline_advantage, "
            "compute_gdpo_outcome_advantage, and the losses registered by the names in loss_mode; "
            "verl.trainer.ppo.rollout_corr_helper: compute_rollout_correction_and_rejection_mask",
            "how": "The functions, called on the stored tensors. With global_batch_info the counts are those of the "
            "whole step and the losses of the parts are added; with null they are the part's own and each part is "
            "weighted by its share of the rows, as the older actor does; the cases with loss_mode have the counts of "
            "the whole step. A selection is read off the gradients with and without it, drawn with seed 0. Advantages "
            "in float32, those of the optimal token baseline in float64.",
        },
        "cases": cases,
        "advantages": {
            f"{name}, {rewards}": advantages(estimator, rewards, **settings)
            for name, (estimator, settings) in estimators.items()
            for rewards in ("groups", "singleton", "equal")
        }
        | {
            "optimal token baseline": per_token(),
            "optimal token baseline, tail": per_token(handle_zero_tail=False),
            "gdpo": of_each(),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="trl, verl, or a function of benchmarks/authors.py")
    parser.add_argument("checkouts", nargs="*", help="of the authors' repositories")
    given = parser.parse_args()
    makers = {"trl": trl, "verl": verl}
    made = (makers.get(given.source) or getattr(authors, given.source))(*given.checkouts)
    DATA.mkdir(exist_ok=True)
    text = json.dumps(made, indent=1)
    flat = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
    (DATA / f"{given.source}.json").write_text(flat + "\n")
