"""prime-rl's own loss module calls an objective: its own losses again, any cut, weights, and what is refused."""

import math
import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("prime_rl.trainer.rl.loss", reason="prime-rl is not on the path: nox -s prime_rl -- FOLDER")

from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig, IPOLossConfig
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs, compute_loss, setup_rl_loss_fn

from rlstab import PolicyOutputs, TokenBatch, load_objective, make_plan
from rlstab.adapters.prime_rl import loss
from rlstab.errors import ConfigError, MissingSignal, NonFinite
from rlstab.record.prime_rl import LOSS
from tests.adapters.jobs import ROOT

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.28}
LENGTHS = (7, 12, 3, 9)


def custom(objective: Any) -> Any:
    """The function that prime-rl makes of its configuration."""
    return setup_rl_loss_fn(
        CustomLossConfig(import_path="rlstab.adapters.prime_rl.loss", kwargs={"objective": objective})
    )


def responses() -> dict[str, list[Tensor]]:
    """Off-policy responses with tokens outside the loss."""
    draw = torch.Generator().manual_seed(3)
    sampled = [-3 * torch.rand(length, generator=draw) - 0.2 for length in LENGTHS]
    return {
        "inference_logprobs": sampled,
        "trainer_logprobs": [(row + 0.2 * torch.randn(len(row), generator=draw)).clamp(max=-0.01) for row in sampled],
        "ref_logprobs": [row - 0.1 for row in sampled],
        "advantages": [torch.randn(1, generator=draw).expand(length).contiguous() for length in LENGTHS],
        "loss_mask": [torch.rand(length, generator=draw) > 0.2 for length in LENGTHS],
    }


def by_prime(function: Any, rows: dict[str, list[Tensor]], *cuts: slice, weights: Any = None) -> tuple[float, Tensor]:
    """Loss and gradient of an optimizer step that prime-rl makes of these micro-batches."""
    live = [row.clone().requires_grad_() for row in rows["trainer_logprobs"]]
    tokens, total = int(sum(mask.sum() for mask in rows["loss_mask"])), 0.0
    for cut in cuts or (slice(None),):
        value, metrics = compute_loss(
            **{name: values[cut] for name, values in {**rows, "trainer_logprobs": live}.items()},
            rl_weights=None if weights is None else weights[cut],
            **dict.fromkeys(("ce_weights", "ref_kl_weights")),
            rl_loss_fn=function,
            **{"rl_scale": tokens, "ce_scale": 1, "ref_kl_scale": 1},
        )
        value.backward()
        total += float(value.detach())
        assert all(column.isfinite().all() for column in metrics.values())
    return total, torch.cat([torch.zeros_like(row) if row.grad is None else row.grad for row in live])


def same(first: tuple[float, Tensor], second: tuple[float, Tensor]) -> None:
    assert first[0] == pytest.approx(second[0], abs=1e-6)
    assert torch.allclose(first[1], second[1], atol=1e-7)
    assert first[1].abs().max() > 1e-3


def ppo(inputs: LossInputs) -> LossOutputs:
    """The custom loss in prime-rl's docs, with a clip on each side."""
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    surrogate = torch.min(ratio * inputs.advantages, ratio.clamp(0.8, 1.28) * inputs.advantages)
    return LossOutputs(loss=-surrogate[inputs.loss_mask].sum(), metrics={})


def test_turns_follow_from_the_loss_mask() -> None:
    rows = responses()
    by_turn = [CLIP, {"name": f"{ROOT / 'tests' / 'adapters' / 'jobs.py'}:ByTurn"}]
    further = {**rows, "advantages": []}
    for mask, advantages in zip(rows["loss_mask"], rows["advantages"], strict=True):
        seen = [(index, bool(counts)) for index, counts in enumerate(mask)]
        starts = [index for index, counts in seen if counts and not (index and mask[index - 1])]
        turns = [sum(start <= index for start in starts) - 1 for index, _ in seen]
        further["advantages"].append(advantages + torch.tensor(turns).clamp(min=0))
    assert not torch.equal(torch.cat(further["advantages"]), torch.cat(rows["advantages"]))
    same(by_prime(custom(by_turn), rows), by_prime(custom([CLIP]), further))


def test_the_losses_of_prime_rl_are_objectives() -> None:
    rows = responses()
    same(by_prime(custom([CLIP]), rows), by_prime(ppo, rows))
    same(by_prime(custom(LOSS.settings["objective"]), rows), by_prime(setup_rl_loss_fn(DefaultLossConfig()), rows))
    both = {"low": 0.1, "high": 0.1, "stops": "all"}
    config = IPOLossConfig(ipo_threshold=0.1)
    squared = {"name": "kl", "anchor": "rollout", "estimator": "k2", "coefficient": 2 * config.kl_tau}
    ipo = [{"name": "dppo", "divergence": "tv", "cap": 1e9, **both}, squared]
    same(by_prime(custom(ipo), rows), by_prime(setup_rl_loss_fn(config), rows))


OBJECTIVES: dict[str, Any] = {
    "kl": [CLIP, {"name": "kl", "coefficient": 0.1}, {"name": "token_mean"}],
    "gmpo": [{"name": "gmpo"}, {"name": "sign_weights"}],
    "dapo": "dapo",
    "masked": [CLIP, {"name": "off_policy_mask", "max_gap": 0.05}],
}


@pytest.mark.filterwarnings("ignore::rlstab.errors.FitWarning")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_is_that_of_the_library_however_it_is_cut(name: str) -> None:
    rows, objective = responses(), load_objective(OBJECTIVES[name])
    padded = {key: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for key, values in rows.items()}
    live = padded["trainer_logprobs"].requires_grad_()
    sampled = padded["inference_logprobs"]
    batch = TokenBatch.from_padded(
        response_mask=padded["loss_mask"],
        advantages=padded["advantages"],
        old_logprobs=sampled,
        logprobs=live.detach(),
        rollout_logprobs=sampled,
        ref_logprobs=padded["ref_logprobs"],
    )
    value = make_plan(objective, [batch]).loss(0, PolicyOutputs.from_padded(batch, logprobs=live)).loss
    value.backward()
    assert live.grad is not None
    gradient = torch.cat([row[:length] for row, length in zip(live.grad, LENGTHS, strict=True)])
    for cuts in ((), (slice(0, 1), slice(1, None)), (slice(2, None), slice(0, 2))):
        same((float(value.detach()), gradient), by_prime(custom(OBJECTIVES[name]), rows, *cuts))


def test_weights_and_responses_without_tokens_are_those_of_prime_rl() -> None:
    rows = responses()
    rows["loss_mask"][2] = torch.zeros(LENGTHS[2], dtype=torch.bool)
    weights = [torch.rand(length) for length in LENGTHS]
    weights[0][:3] = 0.0
    for given in (None, weights):
        same(by_prime(custom([CLIP]), rows, weights=given), by_prime(weighted, rows, weights=given))


def weighted(inputs: LossInputs) -> LossOutputs:
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    surrogate = torch.min(ratio * inputs.advantages, ratio.clamp(0.8, 1.28) * inputs.advantages)
    weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
    return LossOutputs(loss=-(surrogate * weights)[inputs.loss_mask].sum(), metrics={})


def test_the_example_of_the_page_trains() -> None:
    page = (ROOT / "docs" / "hosts" / "index.md").read_text(encoding="utf-8")
    settings = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])["trainer"]["loss"]
    value, gradient = by_prime(setup_rl_loss_fn(CustomLossConfig(**settings)), responses())
    assert math.isfinite(value)
    assert gradient.abs().max() > 1e-3


def test_metrics_are_those_of_the_response() -> None:
    row = {name: values[0] for name, values in responses().items()}
    with torch.no_grad():
        metrics = loss(LossInputs(**row), objective=[CLIP]).metrics
    ratio = (row["trainer_logprobs"] - row["inference_logprobs"]).exp()[row["loss_mask"]]
    assert metrics["rlstab/ratio/mean"].item() == pytest.approx(ratio.mean().item(), rel=1e-5)
    clipped = (ratio > 1.28) if row["advantages"][0] > 0 else (ratio < 0.8)
    sides = metrics["rlstab/ratio/clipped_low"] + metrics["rlstab/ratio/clipped_high"]
    assert sides.item() == pytest.approx(clipped.float().mean().item())


@pytest.mark.filterwarnings("ignore::rlstab.errors.FitWarning")
@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ([CLIP, {"name": "sequence_mean"}], "'sequence_mean' takes a mean other than that over the tokens"),
        ([CLIP, {"name": "random_mask"}], "'random_mask' drops tokens from the divisor"),
        ([CLIP, {"name": "kl_cov"}], "'kl_cov' decides by the whole optimizer step"),
        ([{"name": "holder_mean"}], "'holder_mean' decides by the whole optimizer step"),
        ("vcpo", "'importance_correction'|'ess_scale'|'sequence_mean'"),
    ],
)
def test_what_one_response_cannot_decide_is_refused(objective: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        by_prime(custom(objective), responses())


def test_signals_that_are_missing_are_refused() -> None:
    rows = responses()
    with pytest.raises(MissingSignal, match=r"'entropy_bonus' reads the live 'entropies', which prime-rl 0\.8\.0 "):
        by_prime(custom([CLIP, {"name": "entropy_bonus"}]), rows)
    without = rows | {"ref_logprobs": [None] * len(LENGTHS)}
    with pytest.raises(MissingSignal, match="ref_logprobs"):
        by_prime(custom(OBJECTIVES["kl"]), without)  # type: ignore[arg-type]  # prime-rl's None for a missing one
    rows["advantages"][1] = torch.full((LENGTHS[1],), torch.nan)
    with pytest.raises(NonFinite, match="advantages"):
        by_prime(custom([CLIP]), rows)
