"""The code of the authors of methods, run as :mod:`benchmarks.published` runs that of the frameworks.

What is fetched is a checkout; of most only the functions named here are compiled, without what their file imports.
"""

import __future__

import ast
import contextlib
import io
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.recording import Config, case
from tests.conformance.inputs import CUTS, LENGTH, load, taken, tensors

# -- one function of a file --------------------------------------------------------------------------------------------


def _compiled(checkout: str, path: str, *names: str, **given: Any) -> types.SimpleNamespace:
    """Functions of one file, without its imports and decorators; ``given`` replaces what they read."""
    tree = ast.parse((Path(checkout) / path).read_text())
    wanted = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in wanted:
        node.decorator_list = []
    space = {"torch": torch, **given}
    lazy = __future__.annotations.compiler_flag  # the types of the arguments are missing
    exec(compile(ast.Module(wanted, []), path, "exec", lazy, dont_inherit=True), space)
    return types.SimpleNamespace(**{node.name: space[node.name] for node in wanted})


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
            summed, _ = code.compute_policy_loss_stare(
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
            return summed * (len(live) / rows if local else 1), weights != 1

        return case(published, inputs, cut, gate=gate, local_counts=local, **chosen | settings)

    def controller(target: float, alpha: float, entropies: list[float]) -> dict[str, Any]:
        theirs = code.STAREController(target, 1.1, 0.9, adaptive=alpha > 0, alpha=alpha)
        steps = []
        for entropy in entropies:
            theirs.update(entropy)
            gains = {"boost": theirs.reweight_w, "damp": theirs.reweight_m}
            steps.append({"entropy": entropy, "gate": theirs.gate_on} | gains)
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
            results = []
            for coefficient in (1.0, 0.0):  # the tokens at which the coefficient matters are the selected ones
                used = leaf if coefficient else leaf.detach().clone().requires_grad_()
                if live == "old":
                    used = used + (values["old"] - values["live"])
                summed, *_ = code.compute_policy_loss_lp_reg(
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
                results.append((summed, torch.autograd.grad(summed, used, retain_graph=True)[0]))
            return results[0][0] * len(leaf) / rows, results[0][1] != results[1][1]

        settings = {"live": live, "proxy": target, "logp_neg_k_percent": share, "minp_p_threshold": min_p}
        return case(published, inputs, cut, dtype, **settings, clip_ratio_low=low, clip_ratio_high=high)

    def split(cut: str | None = None, inputs: str = "main") -> dict[str, Any]:
        rows = len(load("inputs")[inputs]["advantages"])

        def published(values: dict[str, Tensor], leaf: Tensor) -> tuple[Tensor, Tensor]:
            mask = values["mask"]  # is changed in place to the selection
            summed, *_ = code.compute_policy_loss_8020_split(
                values["old"], leaf, values["entropies"], values["advantages"], mask, 0.2, 0.2, 0.28
            )
            return summed * len(leaf) / rows, mask

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
        estimates = code.compute_monte_carlo_advantages(learner, rewards, None)
        values = dict(zip(order, estimates.tolist(), strict=True))
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


# -- a loss of one function --------------------------------------------------------------------------------------------


def _recorded(
    repository: str, checkout: str, functions: str, how: str, loss: Callable[..., Any], cases: Any, **shared: Any
) -> dict[str, Any]:
    """What is stored of a loss ``(values, live, **settings)``, which may also return the selected tokens.

    A case is inputs and settings; ``cut`` and ``dtype`` of all cases, or of one in its settings, are those of ``case``.
    """

    def run(inputs: str, settings: dict[str, Any]) -> dict[str, Any]:
        settings = shared | settings
        where = {name: settings.pop(name) for name in ("cut", "dtype") if name in settings}

        def published(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, Tensor | None]:
            given = loss(values, live, **settings)
            return given if isinstance(given, tuple) else (given, None)

        return case(published, inputs, **where, **settings)

    provenance = _provenance(repository, checkout, functions, how)
    return {"provenance": provenance, "cases": {name: run(*chosen) for name, chosen in cases.items()}}


def _four(values: dict[str, Tensor], live: Tensor) -> tuple[Tensor, ...]:
    return values["old"], live, values["advantages"], values["mask"]


def maspo(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss")

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: float) -> Tensor:
        named = {f"maspo_{name}": value for name, value in chosen.items()}
        config = Config(ratio_clip=Config(ratio_mode="maspo", **named))
        return code.compute_policy_loss(*_four(values, live), cliprange=0.2, policy_loss_config=config)[0]

    cases = {
        "ratios": ("ratios", {}),
        "main": ("main", {}),
        "narrow": ("ratios", {"sigma_base": 0.2, "alpha": 0.6, "sigma_high": 0.5, "beta_neg": 0.5, "beta_pos": 0.4}),
        "scales reached": (
            "ratios",
            {"sigma_base": 0.3, "beta_neg": 2.0, "beta_pos": 0.9, "adv_low": 0.5, "adv_high": 1.5},
        ),
    }
    chosen = {"sigma_base": 1.0, "alpha": 0.3, "sigma_high": 10.0, "adv_low": 0.1, "adv_high": 10.0}
    chosen |= {"beta_neg": 0.03, "beta_pos": 0.03}
    functions = f"{CORE}: compute_policy_loss, agg_loss"
    return _recorded("FlyTune/MASPO-RL", checkout, functions, CALLED, loss, cases, **chosen)


def ce_gppo(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_gppo_loss_general_beta")

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: float) -> Tensor:
        return code.compute_gppo_loss_general_beta(*_four(values, live), **chosen)[0]

    def settings(low: float, high: float, dual: float) -> dict[str, float]:
        clip = {"cliprange_low": 0.2, "cliprange_high": 0.28, "clip_ratio_c": dual}
        return clip | {"gppo_loss_beta1": low, "gppo_loss_beta2": high}

    cases = {
        "0.75, 1": ("ratios", settings(0.75, 1.0, 10.0)),
        "0.5, 1, main": ("main", settings(0.5, 1.0, 10.0)),
        "0.25, 0.6, dual clip 3": ("ratios", settings(0.25, 0.6, 3.0)),
    }
    functions = f"{CORE}: compute_gppo_loss_general_beta, agg_loss"
    return _recorded("Kwai-Klear/CE-GPPO", checkout, functions, CALLED, loss, cases)


def dcpo(checkout: str) -> dict[str, Any]:
    names = {"LossCalculator": types.SimpleNamespace(TM="token-mean"), "AlgoConfig": type("AlgoConfig", (), {})}
    code = _fork(checkout, "compute_policy_loss_dcpo", "get_clip_low_high", **names)

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: Any) -> Tensor:
        return code.compute_policy_loss_dcpo(*_four(values, live), config=Config(chosen))[0]

    def settings(low: float, high: float, dual: float) -> dict[str, Any]:
        return {"clip_type": "dynamic", "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}

    cases = {
        "0.16, 0.2": ("ratios", settings(0.16, 0.2, 10.0)),
        "0.16, 0.2, main": ("main", settings(0.16, 0.2, 10.0)),
        "0.04, 0.05": ("ratios", settings(0.04, 0.05, 10.0)),
        "dual clip 3": ("ratios", settings(0.04, 0.05, 3.0)),
    }
    functions = f"{CORE}: compute_policy_loss_dcpo, get_clip_low_high, agg_loss"
    return _recorded("lime-RL/DCPO", checkout, functions, CALLED, loss, cases)


def aspo(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss_archer")

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: float) -> tuple[Tensor, Tensor]:
        present = values["mask"].bool()
        entropies = torch.where(present, values["entropies"], torch.nan)
        # the rule of dp_actor.py; what the function calls the mask of high entropy is that of low
        low = (entropies <= torch.nanquantile(entropies, q=0.8, dim=-1, keepdim=True)) & present
        given = values["old"], live, values["advantages"], present, low
        return code.compute_policy_loss_archer(*given, **chosen)[0], present & ~low

    def settings(cap: float, room: float = 0.4) -> dict[str, float]:
        rooms = {"negative_high_entropy_clip_ratio_low": room, "positive_high_entropy_clip_ratio_high": room}
        return {"negative_clip_ratio_c": cap, "positive_clip_ratio_c": cap} | rooms

    cases = {
        "one room": ("ratios", settings(3.0, 0.2)),
        "one room, cap 1.2": ("ratios", settings(1.2, 0.2)),
        "one room, main": ("main", settings(3.0, 0.2)),
        "two rooms": ("ratios", settings(3.0)),
        "two rooms far apart": ("ratios", settings(3.0, 0.9)),
        "two rooms, main": ("main", settings(3.0)),
    }
    how = f"{CALLED} The tokens of high entropy, stored as the selection, are those above the quantile 0.8 of their "
    how += "response, as in verl/workers/actor/dp_actor.py."
    functions = f"{CORE}: compute_policy_loss_archer, agg_loss"
    return _recorded("wizard-III/Archer2.0", checkout, functions, how, loss, cases)


def steer(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss_with_entropy", "compute_token_weights")

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: Any) -> Tensor:
        given = code.compute_policy_loss_with_entropy(*_four(values, live), values["entropies"], **chosen)[0]
        inputs = "main" if live.shape[-1] == tensors("main")["mask"].shape[-1] else "ratios"
        return given * values["mask"].sum() / tensors(inputs)["mask"].sum()

    def settings(linear: bool = True, least: float = 0.8, most: float = 1.2, **more: Any) -> dict[str, Any]:
        clip = {"cliprange_low": 0.2, "cliprange_high": 0.28, "clip_ratio_c": 10.0}
        return clip | {"token_weight_min": least, "token_weight_max": most, "linear": linear} | more

    cases = {
        "linear": ("ratios", settings()),
        "linear, main": ("main", settings()),
        "linear, 0.3 to 2": ("ratios", settings(least=0.3, most=2.0)),
        "linear, ragged": ("ratios", settings(cut="ragged")),
        "exponential": ("ratios", settings(linear=False)),
        "exponential, 0.3": ("ratios", settings(linear=False, least=0.3)),
    }
    functions = f"{CORE}: compute_policy_loss_with_entropy, compute_token_weights, agg_loss"
    how = f"{CALLED} Each part is weighted by its share of the tokens. In float32, as its weights."
    return _recorded("zz-haooo/STEER", checkout, functions, how, loss, cases, dtype="float32")


def m2po(checkout: str) -> dict[str, Any]:
    names = ("kpo_clip_harmful_tokens", "_get_trust_region_tokens_delta_sq", "_solve_tau_from_sorted_delta2")
    code = _fork(checkout, "compute_m2po_policy_loss", *names, get_ratio_stats=lambda *_: {})

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: Any) -> Tensor:
        with contextlib.redirect_stdout(io.StringIO()):
            return code.compute_m2po_policy_loss(*_four(values, live), **chosen)[0]

    def settings(budget: float) -> dict[str, Any]:
        return {"M2_budget": budget, "miniclip_low": None, "miniclip_high": None}

    cases = {
        "ratios": ("ratios", settings(0.04)),
        "ratios, 0.4": ("ratios", settings(0.4)),
        "main": ("main", settings(0.04)),
    }
    functions = f"{CORE}: compute_m2po_policy_loss, {', '.join(names)}, agg_loss"
    return _recorded("Infini-AI-Lab/M2PO", checkout, functions, CALLED, loss, cases)


def drpo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "unirl/algorithms/drpo.py", "_drpo_loss")

    def loss(values: dict[str, Tensor], live: Tensor, epsilon: float) -> Tensor:
        given = {"new_logp": live, "old_logp": values["old"], "advantages": values["advantages"]}
        return (code._drpo_loss(**given, epsilon=epsilon)[0] * values["mask"]).sum() / values["mask"].sum()

    every = (("12.5", "ratios", 12.5), ("12.5, main", "main", 12.5), ("0.15", "ratios", 0.15))
    cases = {name: (inputs, {"epsilon": epsilon}) for name, inputs, epsilon in every}
    how = "The function, called on the stored tensors; the mean over the tokens is taken here."
    return _recorded("Tencent-Hunyuan/UniRL", checkout, "unirl/algorithms/drpo.py: _drpo_loss", how, loss, cases)


def cppo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "unirl/algorithms/cppo.py", "_cppo_loss", "_cppo_mask")

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: float) -> Tensor:
        mask = values["mask"].bool()
        given = {"new_logp": live[mask], "old_logp": values["old"][mask], "advantages": values["advantages"][mask]}
        return code._cppo_loss(**given, lengths=mask.sum(-1), **chosen)[0].mean()

    def settings(delta: float, least: float, budget: float) -> dict[str, float]:
        return {"delta": delta, "w_min": least, "delta_b": budget}

    cases = {
        "0.2": ("ratios", settings(0.2, 0.8, 0.02)),
        "0.15": ("ratios", settings(0.15, 0.8, 0.02)),
        "0.15, main": ("main", settings(0.15, 0.8, 0.02)),
        "0.2, floor 0.6": ("ratios", settings(0.2, 0.6, 0.1)),
        "0.1, floor 0.2": ("ratios", settings(0.1, 0.2, 0.15)),
    }
    functions = "unirl/algorithms/cppo.py: _cppo_loss, _cppo_mask"
    how = "The functions, called on the tokens that count, packed; the mean over them is taken here."
    return _recorded("Tencent-Hunyuan/UniRL", checkout, functions, how, loss, cases)


def holder(checkout: str) -> dict[str, Any]:
    path = "train_zero_math_holder.py"
    (wanted,) = (
        node
        for node in ast.walk(ast.parse((Path(checkout) / path).read_text()))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.args.critic_type_modify == 'holder'"
    )
    branch = compile(ast.Module(wanted.body, []), path, "exec")

    def loss(values: dict[str, Tensor], live: Tensor, holder_p: float, cliprange: float) -> Tensor:
        space = {
            "torch": torch,
            "args": Config(cliprange=cliprange),
            "holder_p": holder_p,
            "new_logps": live,
            "mb_logps": values["old"],
            "mb_response_masks": values["mask"],
            "mb_loss_masks": torch.ones(len(live)),
            "mb_advantage": values["advantages"][:, :1],
            "stats": defaultdict(list),
            "infos": {},
        }
        exec(branch, space)
        return space["loss"]

    every = (("2", "ratios", 2.0), ("1", "ratios", 1.0), ("0", "ratios", 0.0), ("-2", "ratios", -2.0))
    cases = {
        name: (inputs, {"holder_p": power, "cliprange": 0.2})
        for name, inputs, power in (*every, ("2, main", "main", 2.0))
    }
    functions = f"{path}: ZeroMathLearner.learning_step, critic_type_modify holder"
    how = "The branch of the method, on the stored tensors."
    return _recorded("YihangChen9/HolderPO", checkout, functions, how, loss, cases, cliprange=0.2)


def ar(checkout: str) -> dict[str, Any]:
    code = _fork(checkout, "compute_policy_loss")
    weigh = _compiled(checkout, "verl/trainer/ppo/ray_trainer.py", "compute_reweight_advantage")

    def loss(values: dict[str, Tensor], live: Tensor, **chosen: Any) -> Tensor:
        advantages = weigh.compute_reweight_advantage(values["advantages"], values["old"], **chosen, neg_adv_weight=1.0)
        clip = {"cliprange_low": 0.2, "cliprange_high": 0.24, "clip_ratio_c": 3.0}
        return code.compute_policy_loss(values["old"], live, advantages, values["mask"], **clip)[0]

    every = (("0.3", "ratios", 0.3), ("0.3, main", "main", 0.3), ("0.8", "ratios", 0.8))
    cases = {name: (inputs, {"reweight_k": alpha, "reweight_tau": 1 - alpha}) for name, inputs, alpha in every}
    functions = f"verl.trainer.ppo.ray_trainer: compute_reweight_advantage; {CORE}: compute_policy_loss, agg_loss"
    how = "The loss on the advantages that the first function makes from the stored old log-probs."
    method = {"reweight_method": "both_linear_normal"}
    return _recorded("zhyang2226/AR-Lopti", checkout, functions, how, loss, cases, **method)


def fipo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "swift/rlhf_trainers/grpo_trainer.py", "_compute_fipo_influence")

    def loss(values: dict[str, Tensor], live: Tensor, delta: float, **chosen: Any) -> Tensor:
        gamma = 2 ** (-1 / chosen["fipo_decay_rate"])
        trainer = Config(chosen, args=Config(delta=delta), fipo_gamma=gamma)
        mask, advantages = values["mask"].bool(), values["advantages"]
        log_ratio = live - values["old"]
        ratio = log_ratio.exp()
        weight, _ = code._compute_fipo_influence(trainer, log_ratio, ratio, advantages, mask)
        token = -torch.min(ratio.clamp(max=delta) * advantages, ratio.clamp(0.8, 1.28) * advantages) * weight
        return token[mask].mean()

    def settings(
        half_life: float, most: float, safe: float, reach: float = 0.2, high_only: bool = True, **more: Any
    ) -> dict[str, Any]:
        chosen = {"fipo_decay_rate": half_life, "fipo_clip_range": reach, "fipo_clip_high_only": high_only}
        return {"cut": [[0, 2, 3, 4, 5, 6, 7]]} | chosen | {"fipo_safety_threshold": safe, "delta": most} | more

    cases = {
        "half-life 32": ("ratios", settings(32.0, 10.0, 4.0)),
        "half-life 2": ("ratios", settings(2.0, 3.0, 1.8)),
        "half-life 2, 0.8 to 1.2": ("ratios", settings(2.0, 3.0, 1.8, high_only=False)),
        "half-life 2, 0.1 to 1.9": ("ratios", settings(2.0, 3.0, 4.5, reach=0.9, high_only=False)),
        "a hole": ("ratios", settings(2.0, 5.0, 4.5, reach=0.9, high_only=False, cut=[[1]])),
    }
    functions = "swift/rlhf_trainers/grpo_trainer.py: GRPOTrainer._compute_fipo_influence"
    how = "The method on a bare object with the settings; its weights on the loss of loss_type dapo, whose clip is "
    how += "written out here. All cases but one are on the rows without a hole."
    return _recorded("modelscope/ms-swift", checkout, functions, how, loss, cases)


def prime_rl(checkout: str) -> dict[str, Any]:
    names = ("compute_loss", "default_loss_fn", "ipo_loss_fn", "compute_importance_ratio_and_mismatch_kl", "_safe_mean")
    made = {"LossInputs": types.SimpleNamespace, "LossOutputs": types.SimpleNamespace}
    path = "src/prime_rl/trainer/rl/loss.py"
    code = _compiled(checkout, path, *names, **made)

    def loss(values: dict[str, Tensor], live: Tensor, type: str, rl_scale: int, **chosen: float) -> Tensor:
        """Where no engine spoke, the old policy is the one that sampled."""
        loss_of = {"default": code.default_loss_fn, "ipo": code.ipo_loss_fn}[type]
        sampler = values.get("rollout", values["old"])
        rows = [list(every) for every in (live, sampler, values["advantages"], values["mask"].bool())]
        streams = dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"))
        total, _ = code.compute_loss(
            **dict(zip(("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask"), rows, strict=True)),
            **streams,
            **{"rl_scale": rl_scale, "ce_scale": 1, "ref_kl_scale": 1},
            rl_loss_fn=lambda inputs: loss_of(inputs, Config(chosen)),
        )
        return total

    def settings(type: str, inputs: str, cut: str | None = None, kl_tau: float = 1e-3, **bounds: float) -> Any:
        scale = int(tensors(inputs)["mask"].sum())
        return inputs, {"cut": cut, "type": type, "rl_scale": scale, "adv_tau": 1.0, "kl_tau": kl_tau, **bounds}

    wide, narrow = ({"dppo_mask_low": low, "dppo_mask_high": high} for low, high in ((0.2, 0.2), (0.05, 0.02)))
    cases = {
        "default": settings("default", "ratios", **wide),
        "default, ragged": settings("default", "main", "ragged", **wide),
        "default, 0.05, 0.02, tau 0.3": settings("default", "ratios", None, 0.3, **narrow),
        "ipo": settings("ipo", "ratios", ipo_threshold=0.1),
        "ipo, ragged": settings("ipo", "main", "ragged", ipo_threshold=0.1),
        "ipo, 0.02, tau 0.3": settings("ipo", "ratios", None, 0.3, ipo_threshold=0.02),
    }
    how = "The functions, called on the stored rows with the number of tokens of the whole step."
    return _recorded("PrimeIntellect-ai/prime-rl", checkout, f"{path}: {', '.join(names[:3])}", how, loss, cases)


# -- mit-han-lab/vcpo --------------------------------------------------------------------------------------------------


def vcpo(checkout: str) -> dict[str, Any]:
    code = _compiled(checkout, "recipe/fully_async_policy/staleness_utils.py", "compute_global_ess_ratio")

    def share(inputs: str, anchor: str) -> dict[str, Any]:
        values = tensors(inputs)
        weights = ((values["live"] - values[anchor]) * values["mask"]).sum(-1).exp()
        _, share, *_ = code.compute_global_ess_ratio(weights.sum().item(), weights.square().sum().item(), len(weights))
        return {"inputs": inputs, "anchor": anchor, "ess_ratio": share}

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


def nemo(checkout: str) -> dict[str, Any]:
    name = "compute_and_apply_seq_logprob_error_masking"
    code = _compiled(checkout, "nemo_rl/algorithms/grpo.py", name)

    def kept(threshold: float) -> dict[str, Any]:
        values = tensors("ratios")
        mask = values["mask"]
        rows, prompt = len(mask), torch.zeros(len(mask), 1, dtype=mask.dtype)  # its first column is not looked at
        fields = {"token_mask": mask, "prev_logprobs": values["old"], "generation_logprobs": values["rollout"]}
        data = {field: torch.cat((prompt, value), 1) for field, value in fields.items()}
        data["sample_mask"] = torch.ones(rows, dtype=mask.dtype)
        with contextlib.redirect_stdout(io.StringIO()):
            getattr(code, name)(data, torch.zeros(rows), threshold)
        return {"inputs": "ratios", "threshold": threshold, "kept": data["sample_mask"].int().tolist()}

    return {
        "provenance": _provenance(
            "NVIDIA-NeMo/RL",
            checkout,
            f"nemo_rl/algorithms/grpo.py: {name}",
            "The function, called on the stored tensors.",
        ),
        "responses": {f"at most {threshold}": kept(threshold) for threshold in (1.25, 1.7, 2.0)},
    }
