"""The table of hosts' settings in docs/hosts/index.md, and that of the deviations from TRL's loss in docs/hosts/trl.md.

``python -m tests.adapters.host_table`` rewrites both.
"""

from pathlib import Path
from typing import Any

from rlstab.adapters.host_objective import deviations_of, objective_of, settings_of_trl, verl_objective_of
from rlstab.config.document import flow
from rlstab.errors import ConfigError
from rlstab.hosts import facts

PAGE = Path(__file__).parents[2] / "docs" / "hosts" / "index.md"
START, END = "<!-- settings: made from the code -->\n", "<!-- end of settings -->\n"
TRL_PAGE = PAGE.with_name("trl.md")
TRL_START, TRL_END = "<!-- deviations: made from the code -->\n", "<!-- end of deviations -->\n"

CUT, SEQUENCE = {"gradient_accumulation_steps": 2}, {"importance_sampling_level": "sequence"}
#: Settings with which the objective is not quite TRL's loss, one deviation each.
DEVIATIONS: list[dict[str, Any]] = [
    {"loss_type": "bnpo", **CUT},
    {"steps_per_generation": 2},
    {"top_entropy_quantile": 0.2, **CUT},
    {"entropy_coef": 0.01, **CUT},
    {"entropy_coef": 0.01, "top_entropy_quantile": 0.2},
    {"use_adaptive_entropy": True},
    {"beta": 0.04, **SEQUENCE},
    {"top_entropy_quantile": 0.2, **SEQUENCE},
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", **SEQUENCE},
    {"use_vllm": True, "loss_type": "vespo"},
]

TRL: list[dict[str, Any]] = [
    *(
        {"loss_type": kind, **({"epsilon_high": 5.0} if kind == "cispo" else {})}
        for kind in facts("trl")["values"]["loss_type"]
    ),
    {"delta": 4.0},
    {"importance_sampling_level": "sequence"},
    {"top_entropy_quantile": 0.2},
    {"off_policy_mask_threshold": 0.5},
    {"entropy_coef": 0.01},
    {"entropy_coef": 0.01, "loss_type": "grpo"},
    {"use_adaptive_entropy": True},
    {"beta": 0.04},
    {"beta": 0.04, "use_bias_correction_kl": False},
]
MODES = ("vanilla", "gspo", "sapo", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "gpg")
AVERAGES = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
VERL: list[dict[str, Any]] = [
    *({"loss_mode": mode} for mode in (*MODES, "dro", "bypass_mode")),
    *({"loss_agg_mode": mode, **({"loss_scale_factor": 4096} if "norm" in mode else {})} for mode in AVERAGES),
    {"entropy_coeff": 0.01},
    {"use_kl_loss": True},
    {"use_kl_loss": True, "kl_loss_type": "k3+"},
]
#: What most objectives have, by the word that the page has for it.
SHORT = {
    "`{name: clip_higher, low: 0.2, high: 0.2}`": "*clip*",
    "`{name: clip_higher, low: 0.2, high: 0.2, dual_clip: 3.0}`": "*dual clip*",
}


def row(host: str, settings: dict[str, Any]) -> str:
    try:
        methods = objective_of(settings_of_trl(settings)) if host == "TRL" else verl_objective_of(settings)
        written = [f"`{flow(method)}`" for method in methods]
        objective = ", ".join(SHORT.get(method, method) for method in written)
    except ConfigError:
        objective = "none is this loss"
    return f"| {host} | `{flow(settings)[1:-1]}` | {objective} |\n"


def table() -> str:
    rows = [row(host, settings) for host, each in (("TRL", TRL), ("verl", VERL)) for settings in each]
    return "".join(["| host | setting | objective |\n|---|---|---|\n", *rows])


def deviations() -> str:
    rows = [
        f"| `{flow(settings)[1:-1]}` | {sentence} |\n"
        for settings in DEVIATIONS
        for sentence in deviations_of(settings_of_trl(settings))
    ]
    return "".join(["| with, for example | deviation |\n|---|---|\n", *rows])


if __name__ == "__main__":
    for page, start, end, made in ((PAGE, START, END, table()), (TRL_PAGE, TRL_START, TRL_END, deviations())):
        before, _, rest = page.read_text(encoding="utf-8").partition(start)
        page.write_text(before + start + "\n" + made + "\n" + end + rest.partition(end)[2], encoding="utf-8")
