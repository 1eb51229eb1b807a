"""The code of the authors of methods, run as :mod:`benchmarks.published` runs that of the frameworks.

What is fetched is a checkout; of most only the functions named here are compiled, without what their file imports.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import io
import subprocess
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.published import Config, case
from tests.conformance.inputs import CUTS, LENGTH, load, taken, tensors

# -- one function of a file --------------------------------------------------------------------------------------------


def _compiled(checkout: str, path: str, *names: str, **given: Any) -> types.SimpleNamespace:
    """Functions of one file, without its imports and decorators; ``given`` takes the place of what they read."""
    tree = ast.parse((Path(checkout) / path).read_text())
    wanted = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name in names]
    for one in wanted:
        one.decorator_list = []
    space = {"torch": torch, **given}
    lazy = __future__.annotations.compiler_flag  # the types of the arguments are not there
    exec(compile(ast.Module(wanted, []), path, "exec", lazy, dont_inherit=True), space)
    return types.SimpleNamespace(**{one.name: space[one.name] for one in wanted})


def _fork(checkout: str, *names: str, **given: Any) -> types.SimpleNamespace:
    """Functions of the losses in a fork of verl, with its own means and aggregation."""
    tools = _compiled(checkout, "verl/utils/torch_functional.py", "masked_mean", "masked_sum")
    names = (*names, "agg_loss")
    return _compiled(checkout, "verl/trainer/ppo/core_algos.py", *names, verl_F=tools, **given)


def _provenance(repository: str, checkout: str, functions: str, how: str) -> dict[str, str]:
    return {"repository": repository, "commit": _commit(checkout), "functions": functions, "how": how}


CORE = "verl.trainer.ppo.core_algos"
CALLED = "The function, called on the stored tensors with the counts of the part."


def _empty(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def _commit(checkout: str) -> str:
    done = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


# -- hp-luo/STARE ------------------------------------------------------------------------------------------------------


def stare(checkout: str) -> dict[str, Any]:
    sys.path.insert(0, checkout)
    import verl

    _empty("verl.workers", __path__=[])
    _empty("verl.workers.config", ActorConfig=object)
    from verl.trainer.ppo import core_algos as code

    whole = {"batch_num_tokens": int(tensors("main")["mask"].sum()), "dp_size": 1}

    def loss(
        cut: str | None = None, inputs: str = "main", gate: bool = True, local: bool = False, **settings: Any
    ) -> dict[str, Any]:
        chosen = {"enabled": True, "variant": "O1", "top_p_ratio": 0.1, "reweight_w": 1.1, "reweight_m": 0.9}
        info = {} if local or inputs != "main" else whole
        config = Config(
            clip_ratio=0.2,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=10.0,
            global_batch_info=info,
            stare=chosen | settings,
        )
        controller = {"gate_on": gate}
        rows = len(load("inputs")[inputs]["advantages"])

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, Tensor]:
            one, _ = code.compute_policy_loss_stare(
                old_log_prob=values["old"],
                log_prob=live,
                advantages=values["advantages"],
                response_mask=values["mask"],
                loss_agg_mode="token-mean",
                config=config,
                stare_ctrl_dict=controller,
            )
            weights, _ = code.compute_stare_token_weights(
                live, values["advantages"], values["mask"], config, controller
            )
            return one * (len(live) / rows if local else 1), weights != 1

        return case(published, inputs, cut, gate=gate, local_counts=local, **chosen | settings)

    def controller(target: float, alpha: float, entropies: list[float]) -> dict[str, Any]:
        one = code.STAREController(target, 1.1, 0.9, adaptive=alpha > 0, alpha=alpha)
        steps = []
        for entropy in entropies:
            one.update(entropy)
            steps.append({"entropy": entropy, "gate": one.gate_on, "boost": one.reweight_w, "damp": one.reweight_m})
        return {"target_entropy": target, "alpha": alpha, "steps": steps}

    def mean_entropy(mode: str) -> float:
        values = tensors("main")
        return code.agg_loss(values["entropies"], values["mask"], mode).item()

    falling = [0.5, 0.35, 0.3, 0.29, 0.1, 0.1, 0.2, 0.31, 0.6, 0.6]
    return {
        "provenance": {
            "repository": "hp-luo/STARE",
            "commit": _commit(checkout),
            "functions": "verl.trainer.ppo.core_algos: compute_policy_loss_stare, compute_stare_token_weights, "
            "STAREController, agg_loss",
            "how": "The functions, called on the stored tensors; the gate is handed in. With local_counts each part "
            "is divided by its own tokens and weighted by its share of the rows, as verl/workers/actor/dp_actor.py "
            "does; otherwise the tokens of the whole step are handed in.",
            "version": verl.__version__,
        },
        "cases": {
            **{f"{variant} {cut}": loss(cut, variant=variant) for variant in ("O1", "C2") for cut in CUTS},
            "O1 ragged, local": loss("ragged", local=True),
            "C2 wide": loss("halves", variant="C2", top_p_ratio=0.35, reweight_w=1.5, reweight_m=0.5),
            "C2 gate closed": loss("halves", variant="C2", gate=False),
            "equal surprisals": loss(inputs="equal_surprisal", top_p_ratio=0.25),
        },
        "controllers": {
            "fixed": controller(0.3, 0.0, falling),
            "adaptive": controller(0.3, 0.01, falling),
            "steep": controller(0.3, 0.25, falling),
        },
        "mean_entropy": {mode: mean_entropy(mode) for mode in ("token-mean", "seq-mean-token-mean")},
    }


# -- CarlanLark/Lp-Reg-dev ---------------------------------------------------------------------------------------------


def lp_reg(checkout: str) -> dict[str, Any]:
    sys.path.insert(0, checkout)
    nothing = {"index_first_axis": None, "pad_input": None, "rearrange": None, "unpad_input": None}
    _empty("flash_attn")
    _empty("flash_attn.bert_padding", **nothing)
    from verl.trainer.ppo import core_algos as code
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    def proxy(logits: str, min_p: float) -> Tensor:
        values = tensors("main")[f"{logits}_logits"]
        kept = DataParallelPPOActor.apply_min_p(None, values.flatten(0, 1), min_p).view(values.shape)
        return taken(kept, torch.tensor(load("inputs")["main"]["tokens"]))

    def loss(
        cut: str | None = None,
        inputs: str = "main",
        live: str = "live",
        target: str = "old",
        share: float = 0.3,
        min_p: float = 0.02,
        low: float = 1.0,
        high: float = 9.0,
        dtype: str = "float64",
    ) -> dict[str, Any]:
        rows = len(load("inputs")[inputs]["advantages"])
        every = proxy(target, min_p) if inputs == "main" else tensors(inputs)["target"]
        every = every.to(getattr(torch, dtype))
        parts = iter([list(range(rows))] if cut is None else CUTS[cut])

        def published(values: dict[str, Tensor], leaf: Tensor) -> tuple[Tensor, Tensor]:
            aim = every[next(parts)]
            found = []
            for coefficient in (1.0, 0.0):  # the tokens at which the coefficient matters are the selected ones
                used = leaf if coefficient else leaf.detach().clone().requires_grad_()
                if live == "old":
                    used = used + (values["old"] - values["live"])
                one, *_ = code.compute_policy_loss_lp_reg(
                    old_log_prob=values["old"],
                    log_prob=used,
                    pos_tgt_log_prob=aim,
                    neg_tgt_log_prob=aim,
                    advantages=values["advantages"],
                    response_mask=values["mask"],
                    cliprange_low=low,
                    cliprange_high=high,
                    logp_neg_k_percent=share,
                    ppo_kl_coef=coefficient,
                )
                found.append((one, torch.autograd.grad(one, used, retain_graph=True)[0]))
            return found[0][0] * len(leaf) / rows, found[0][1] != found[1][1]

        settings = {"live": live, "proxy": target, "logp_neg_k_percent": share, "minp_p_threshold": min_p}
        return case(published, inputs, cut, dtype, **settings, clip_ratio_low=low, clip_ratio_high=high)

    def split(cut: str | None = None, inputs: str = "main") -> dict[str, Any]:
        rows = len(load("inputs")[inputs]["advantages"])

        def published(values: dict[str, Tensor], leaf: Tensor) -> tuple[Tensor, Tensor]:
            mask = values["mask"]  # is changed in place to the selection
            one, *_ = code.compute_policy_loss_8020_split(
                values["old"], leaf, values["entropies"], values["advantages"], mask, 0.2, 0.2, 0.28
            )
            return one * len(leaf) / rows, mask

        return case(published, inputs, cut)

    with contextlib.redirect_stdout(io.StringIO()):
        return {
            "provenance": {
                "repository": "CarlanLark/Lp-Reg-dev",
                "commit": _commit(checkout),
                "functions": "verl.trainer.ppo.core_algos: compute_policy_loss_lp_reg, compute_policy_loss_8020_split; "
                "verl.workers.actor.dp_actor: DataParallelPPOActor.apply_min_p",
                "how": "The functions, called on the stored tensors; the proxy is the log-softmax of what apply_min_p "
                "makes of the stored logits. Each part is weighted by its share of the rows, as dp_actor.py does.",
            },
            "proxy": {
                f"{logits} {min_p}": proxy(logits, min_p).tolist()
                for logits in ("old", "live")
                for min_p in (0.02, 0.1)
            },
            "cases": {
                **{f"on-policy {cut}": loss(cut, live="old") for cut in CUTS},
                "on-policy, published share": loss(live="old", share=0.01),
                "on-policy, min-p 0.1": loss(live="old", share=0.6, min_p=0.1),
                **{f"proxy of the live policy, {cut}": loss(cut, target="live") for cut in CUTS},
                "proxy of the old policy": loss(target="old"),
                "proxy handed in": loss(inputs="proxy", share=0.7),
                "proxy handed in, narrow clip": loss(inputs="proxy", share=0.7, low=0.2, high=0.28),
                "equal surprisals": loss(inputs="equal_surprisal", share=0.5),
                "one token": loss(inputs="equal_surprisal", share=0.25),
                "far proxy": loss(inputs="proxy_far", share=0.7, dtype="float32"),
                "8020_split whole": split(),
                "8020_split ragged": split("ragged"),
                "8020_split equal": split(inputs="equal_entropy"),
            },
        }


# -- sail-sg/understand-r1-zero ----------------------------------------------------------------------------------------


def dr_grpo(checkout: str, oat: str) -> dict[str, Any]:
    sys.path.insert(0, oat)
    from oat.utils.ops import masked_sum

    code = _compiled(checkout, "train_zero_math.py", "compute_monte_carlo_advantages")

    def loss(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
        token = -values["advantages"] * (live - values["old"]).exp()
        return masked_sum(token, values["mask"], axis=1, constant_normalizer=LENGTH).mean(), None

    def advantages(kind: str) -> dict[str, Any]:
        given = load("inputs")["rewards"]["groups"]
        order = sorted(range(len(given["ids"])), key=lambda row: given["ids"][row])
        learner = types.SimpleNamespace(args=types.SimpleNamespace(num_samples=4, critic_type=kind))
        rewards = torch.tensor([given["rewards"][row] for row in order]).unsqueeze(-1)
        found = code.compute_monte_carlo_advantages(learner, rewards, None)
        values = dict(zip(order, found.tolist(), strict=True))
        return {"rewards": "groups", "critic_type": kind, "advantages": [values[row] for row in range(len(order))]}

    return {
        "provenance": {
            "repository": "sail-sg/understand-r1-zero, sail-sg/oat",
            "commit": f"{_commit(checkout)}, {_commit(oat)}",
            "functions": "train_zero_math.py: ZeroMathLearner.compute_monte_carlo_advantages; oat/utils/ops.py: "
            "masked_sum",
            "how": "masked_sum over the tokens of a row with the constant, then the mean over rows, as in "
            "oat/algorithms/ppo.py, of the unclipped ratio times the negated advantage.",
        },
        "cases": {"constant": case(loss, "main", length=LENGTH), "empty row": case(loss, "empty_row", length=LENGTH)},
        "advantages": {kind: advantages(kind) for kind in ("drgrpo", "grpo")},
    }


# -- FlyTune/MASPO-RL --------------------------------------------------------------------------------------------------


def maspo(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss")

    def loss(inputs: str, **settings: float) -> dict[str, Any]:
        chosen = {"sigma_base": 1.0, "alpha": 0.3, "sigma_high": 10.0, "adv_low": 0.1, "adv_high": 10.0}
        chosen |= {"beta_neg": 0.03, "beta_pos": 0.03} | settings
        config = Config(ratio_clip=Config(ratio_mode="maspo", **{f"maspo_{name}": one for name, one in chosen.items()}))

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            one, *_ = code.compute_policy_loss(
                values["old"], live, values["advantages"], values["mask"], cliprange=0.2, policy_loss_config=config
            )
            return one, None

        return case(published, inputs, **chosen)

    return {
        "provenance": _provenance("FlyTune/MASPO-RL", checkout, f"{CORE}: compute_policy_loss, agg_loss", CALLED),
        "cases": {
            "ratios": loss("ratios"),
            "main": loss("main"),
            "narrow": loss("ratios", sigma_base=0.2, alpha=0.6, sigma_high=0.5, beta_neg=0.5, beta_pos=0.4),
            "scales reached": loss("ratios", sigma_base=0.3, beta_neg=2.0, beta_pos=0.9, adv_low=0.5, adv_high=1.5),
        },
    }


# -- Kwai-Klear/CE-GPPO ------------------------------------------------------------------------------------------------


def ce_gppo(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_gppo_loss_general_beta")

    def loss(inputs: str, low: float, high: float, dual: float) -> dict[str, Any]:
        chosen = {"cliprange_low": 0.2, "cliprange_high": 0.28, "clip_ratio_c": dual}
        chosen |= {"gppo_loss_beta1": low, "gppo_loss_beta2": high}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            one, *_ = code.compute_gppo_loss_general_beta(
                values["old"], live, values["advantages"], values["mask"], **chosen
            )
            return one, None

        return case(published, inputs, **chosen)

    functions = f"{CORE}: compute_gppo_loss_general_beta, agg_loss"
    return {
        "provenance": _provenance("Kwai-Klear/CE-GPPO", checkout, functions, CALLED),
        "cases": {
            "0.75, 1": loss("ratios", 0.75, 1.0, 10.0),
            "0.5, 1, main": loss("main", 0.5, 1.0, 10.0),
            "0.25, 0.6, dual clip 3": loss("ratios", 0.25, 0.6, 3.0),
        },
    }


# -- lime-RL/DCPO ------------------------------------------------------------------------------------------------------


def dcpo(checkout: str) -> dict[str, Any]:
    names = types.SimpleNamespace(TM="token-mean")
    code = _fork(
        checkout,
        "compute_policy_loss_dcpo",
        "get_clip_low_high",
        LossCalculator=names,
        AlgoConfig=type("AlgoConfig", (), {}),
    )

    def loss(inputs: str, low: float, high: float, dual: float) -> dict[str, Any]:
        chosen = {"clip_type": "dynamic", "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            one, *_ = code.compute_policy_loss_dcpo(
                values["old"], live, values["advantages"], values["mask"], config=Config(chosen)
            )
            return one, None

        return case(published, inputs, **chosen)

    functions = f"{CORE}: compute_policy_loss_dcpo, get_clip_low_high, agg_loss"
    return {
        "provenance": _provenance("lime-RL/DCPO", checkout, functions, CALLED),
        "cases": {
            "0.16, 0.2": loss("ratios", 0.16, 0.2, 10.0),
            "0.16, 0.2, main": loss("main", 0.16, 0.2, 10.0),
            "0.04, 0.05": loss("ratios", 0.04, 0.05, 10.0),
            "dual clip 3": loss("ratios", 0.04, 0.05, 3.0),
        },
    }


# -- wizard-III/Archer2.0 ----------------------------------------------------------------------------------------------


def aspo(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss_archer")

    def loss(inputs: str, cap: float, room: float = 0.4) -> dict[str, Any]:
        chosen = {"negative_clip_ratio_c": cap, "positive_clip_ratio_c": cap}
        rooms = {"negative_high_entropy_clip_ratio_low": room, "positive_high_entropy_clip_ratio_high": room}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, Tensor]:
            present = values["mask"].bool()
            entropies = torch.where(present, values["entropies"], torch.nan)
            # the rule of dp_actor.py; what the function calls the mask of high entropy is that of low
            low = (entropies <= torch.nanquantile(entropies, q=0.8, dim=-1, keepdim=True)) & present
            one, *_ = code.compute_policy_loss_archer(
                values["old"], live, values["advantages"], present, low, **chosen, **rooms
            )
            return one, present & ~low

        return case(published, inputs, **chosen, **rooms)

    how = f"{CALLED} The tokens of high entropy, stored as the selection, are those above the quantile 0.8 of their "
    how += "response, as in verl/workers/actor/dp_actor.py."
    return {
        "provenance": _provenance(
            "wizard-III/Archer2.0", checkout, f"{CORE}: compute_policy_loss_archer, agg_loss", how
        ),
        "cases": {
            "one room": loss("ratios", 3.0, 0.2),
            "one room, cap 1.2": loss("ratios", 1.2, 0.2),
            "one room, main": loss("main", 3.0, 0.2),
            "two rooms": loss("ratios", 3.0),
            "two rooms far apart": loss("ratios", 3.0, 0.9),
            "two rooms, main": loss("main", 3.0),
        },
    }


# -- zz-haooo/STEER ----------------------------------------------------------------------------------------------------


def steer(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss_with_entropy", "compute_token_weights")

    def loss(
        cut: str | None = None, inputs: str = "ratios", linear: bool = True, least: float = 0.8, most: float = 1.2
    ) -> dict[str, Any]:
        chosen = {"token_weight_min": least, "token_weight_max": most, "linear": linear}
        clip = {"cliprange_low": 0.2, "cliprange_high": 0.28, "clip_ratio_c": 10.0}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            one, *_ = code.compute_policy_loss_with_entropy(
                values["old"], live, values["advantages"], values["mask"], values["entropies"], **clip, **chosen
            )
            return one * values["mask"].sum() / tensors(inputs)["mask"].sum(), None

        return case(published, inputs, cut, "float32", **clip, **chosen)

    functions = f"{CORE}: compute_policy_loss_with_entropy, compute_token_weights, agg_loss"
    how = f"{CALLED} Each part is weighted by its share of the tokens. In float32, as its weights."
    return {
        "provenance": _provenance("zz-haooo/STEER", checkout, functions, how),
        "cases": {
            "linear": loss(),
            "linear, main": loss(inputs="main"),
            "linear, 0.3 to 2": loss(least=0.3, most=2.0),
            "linear, ragged": loss("ragged"),
            "exponential": loss(linear=False),
            "exponential, 0.3": loss(linear=False, least=0.3),
        },
    }


# -- Infini-AI-Lab/M2PO ------------------------------------------------------------------------------------------------


def m2po(checkout: str) -> dict[str, Any]:
    names = ("kpo_clip_harmful_tokens", "_get_trust_region_tokens_delta_sq", "_solve_tau_from_sorted_delta2")
    code = _fork(checkout, "compute_m2po_policy_loss", *names, get_ratio_stats=lambda *_: {})

    def loss(inputs: str, budget: float) -> dict[str, Any]:
        chosen = {"M2_budget": budget, "miniclip_low": None, "miniclip_high": None}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            with contextlib.redirect_stdout(io.StringIO()):
                one, *_ = code.compute_m2po_policy_loss(
                    values["old"], live, values["advantages"], values["mask"], **chosen
                )
            return one, None

        return case(published, inputs, **chosen)

    return {
        "provenance": _provenance(
            "Infini-AI-Lab/M2PO", checkout, f"{CORE}: compute_m2po_policy_loss, {', '.join(names)}, agg_loss", CALLED
        ),
        "cases": {"ratios": loss("ratios", 0.04), "ratios, 0.4": loss("ratios", 0.4), "main": loss("main", 0.04)},
    }


# -- Tencent-Hunyuan/UniRL ---------------------------------------------------------------------------------------------


def drpo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "unirl/algorithms/drpo.py", "_drpo_loss")

    def loss(inputs: str, epsilon: float) -> dict[str, Any]:
        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            one, _ = code._drpo_loss(
                new_logp=live, old_logp=values["old"], advantages=values["advantages"], epsilon=epsilon
            )
            return (one * values["mask"]).sum() / values["mask"].sum(), None

        return case(published, inputs, epsilon=epsilon)

    return {
        "provenance": _provenance(
            "Tencent-Hunyuan/UniRL",
            checkout,
            "unirl/algorithms/drpo.py: _drpo_loss",
            "The function, called on the stored tensors; the mean over the tokens is taken here.",
        ),
        "cases": {"12.5": loss("ratios", 12.5), "12.5, main": loss("main", 12.5), "0.15": loss("ratios", 0.15)},
    }


def cppo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "unirl/algorithms/cppo.py", "_cppo_loss", "_cppo_mask")

    def loss(inputs: str, delta: float, least: float, budget: float) -> dict[str, Any]:
        chosen = {"delta": delta, "w_min": least, "delta_b": budget}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            mask = values["mask"].bool()
            one, _ = code._cppo_loss(
                new_logp=live[mask],
                old_logp=values["old"][mask],
                advantages=values["advantages"][mask],
                lengths=mask.sum(-1),
                **chosen,
            )
            return one.mean(), None

        return case(published, inputs, **chosen)

    return {
        "provenance": _provenance(
            "Tencent-Hunyuan/UniRL",
            checkout,
            "unirl/algorithms/cppo.py: _cppo_loss, _cppo_mask",
            "The functions, called on the tokens that count, packed; the mean over them is taken here.",
        ),
        "cases": {
            "0.2": loss("ratios", 0.2, 0.8, 0.02),
            "0.15": loss("ratios", 0.15, 0.8, 0.02),
            "0.15, main": loss("main", 0.15, 0.8, 0.02),
            "0.2, floor 0.6": loss("ratios", 0.2, 0.6, 0.1),
            "0.1, floor 0.2": loss("ratios", 0.1, 0.2, 0.15),
        },
    }


# -- YihangChen9/HolderPO ----------------------------------------------------------------------------------------------


def holder(checkout: str) -> dict[str, Any]:
    path = "train_zero_math_holder.py"
    (wanted,) = (
        one
        for one in ast.walk(ast.parse((Path(checkout) / path).read_text()))
        if isinstance(one, ast.If) and ast.unparse(one.test) == "self.args.critic_type_modify == 'holder'"
    )
    branch = compile(ast.Module(wanted.body, []), path, "exec")

    def loss(inputs: str, power: float) -> dict[str, Any]:
        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            space = {
                "torch": torch,
                "args": Config(cliprange=0.2),
                "holder_p": power,
                "new_logps": live,
                "mb_logps": values["old"],
                "mb_response_masks": values["mask"],
                "mb_loss_masks": torch.ones(len(live)),
                "mb_advantage": values["advantages"][:, :1],
                "stats": defaultdict(list),
                "infos": {},
            }
            exec(branch, space)
            return space["loss"], None

        return case(published, inputs, holder_p=power, cliprange=0.2)

    return {
        "provenance": _provenance(
            "YihangChen9/HolderPO",
            checkout,
            f"{path}: ZeroMathLearner.learning_step, critic_type_modify holder",
            "The branch of the method, on the stored tensors.",
        ),
        "cases": {
            f"{power:g}{'' if inputs == 'ratios' else ', main'}": loss(inputs, power)
            for inputs, power in (("ratios", 2.0), ("ratios", 1.0), ("ratios", 0.0), ("ratios", -2.0), ("main", 2.0))
        },
    }


# -- zhyang2226/AR-Lopti -----------------------------------------------------------------------------------------------


def ar(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss")
    weigh = _compiled(checkout, "verl/trainer/ppo/ray_trainer.py", "compute_reweight_advantage")

    def loss(inputs: str, alpha: float) -> dict[str, Any]:
        chosen = {"reweight_method": "both_linear_normal", "reweight_k": alpha, "reweight_tau": 1 - alpha}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            advantages = weigh.compute_reweight_advantage(
                values["advantages"], values["old"], **chosen, neg_adv_weight=1.0
            )
            one, *_ = code.compute_policy_loss(
                values["old"],
                live,
                advantages,
                values["mask"],
                cliprange_low=0.2,
                cliprange_high=0.24,
                clip_ratio_c=3.0,
            )
            return one, None

        return case(published, inputs, **chosen)

    return {
        "provenance": _provenance(
            "zhyang2226/AR-Lopti",
            checkout,
            f"verl.trainer.ppo.ray_trainer: compute_reweight_advantage; {CORE}: compute_policy_loss, agg_loss",
            "The loss on the advantages that the first function makes from the stored old log-probs.",
        ),
        "cases": {"0.3": loss("ratios", 0.3), "0.3, main": loss("main", 0.3), "0.8": loss("ratios", 0.8)},
    }


# -- modelscope/ms-swift -----------------------------------------------------------------------------------------------


def fipo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "swift/rlhf_trainers/grpo_trainer.py", "_compute_fipo_influence")

    def loss(
        cut: list[list[int]], half_life: float, most: float, safe: float, reach: float = 0.2, high_only: bool = True
    ) -> dict[str, Any]:
        chosen = {"fipo_decay_rate": half_life, "fipo_clip_range": reach, "fipo_clip_high_only": high_only}
        chosen |= {"fipo_safety_threshold": safe}
        trainer = Config(chosen, args=Config(delta=most), fipo_gamma=2 ** (-1 / half_life))

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, None]:
            mask, advantages = values["mask"].bool(), values["advantages"]
            log_ratio = live - values["old"]
            ratio = log_ratio.exp()
            weight, _ = code._compute_fipo_influence(trainer, log_ratio, ratio, advantages, mask)
            token = -torch.min(ratio.clamp(max=most) * advantages, ratio.clamp(0.8, 1.28) * advantages) * weight
            return token[mask].mean(), None

        return case(published, "ratios", cut, **chosen, delta=most)

    unbroken = [[0, 2, 3, 4, 5, 6, 7]]
    return {
        "provenance": _provenance(
            "modelscope/ms-swift",
            checkout,
            "swift/rlhf_trainers/grpo_trainer.py: GRPOTrainer._compute_fipo_influence",
            "The method on a bare object with the settings; its weights on the loss of loss_type dapo, whose clip is "
            "written out here. All cases but one are on the rows without a hole.",
        ),
        "cases": {
            "half-life 32": loss(unbroken, 32.0, 10.0, 4.0),
            "half-life 2": loss(unbroken, 2.0, 3.0, 1.8),
            "half-life 2, 0.8 to 1.2": loss(unbroken, 2.0, 3.0, 1.8, high_only=False),
            "half-life 2, 0.1 to 1.9": loss(unbroken, 2.0, 3.0, 4.5, reach=0.9, high_only=False),
            "a hole": loss([[1]], 2.0, 5.0, 4.5, reach=0.9, high_only=False),
        },
    }


# -- mit-han-lab/vcpo --------------------------------------------------------------------------------------------------


def vcpo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "recipe/fully_async_policy/staleness_utils.py", "compute_global_ess_ratio")

    def share(inputs: str, anchor: str) -> dict[str, Any]:
        values = tensors(inputs)
        weights = ((values["live"] - values[anchor]) * values["mask"]).sum(-1).exp()
        _, found, *_ = code.compute_global_ess_ratio(weights.sum().item(), weights.square().sum().item(), len(weights))
        return {"inputs": inputs, "anchor": anchor, "ess_ratio": found}

    return {
        "provenance": _provenance(
            "mit-han-lab/vcpo",
            checkout,
            "recipe/fully_async_policy/staleness_utils.py: compute_global_ess_ratio",
            "The function, called on the sums of the weights of the stored responses and of their squares.",
        ),
        "shares": {
            "ratios, old": share("ratios", "old"),
            "ratios, rollout": share("ratios", "rollout"),
            "main, old": share("main", "old"),
        },
    }
