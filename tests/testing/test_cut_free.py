"""A loss that depends on the cut is reported with the cause; one that does not passes; hosts' losses give the page."""

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.errors import OutOfRange, UnknownName
from rlstab.testing import BrokenLaw, assert_cut_free, check_cut_free
from tests.testing import cut_hosts

PAGE = Path(__file__).parents[2] / "docs/how-to/test-your-loss.md"
CUT = {"micro-batches", "ranks"}


def pull(given: Any, factor: Any = 1.0) -> Any:
    """Of a policy gradient, without its divisor."""
    return -(given["advantages"] * given["logprobs"] * given["mask"] * factor).sum() * given["ranks"]


def top(given: Any) -> Any:
    entropies = given["entropies"].detach()
    return entropies > entropies[given["mask"] > 0].sort().values[-(int(given["mask"].sum()) // 5 + 1)]


def whitened(given: Any) -> Any:
    mean = (given["advantages"] * given["mask"]).sum() / given["mask"].sum()
    return (given["advantages"] - mean) / given["advantages"]


#: What is broken, and words of its cause; a loss of each mistake that trainers make.
BROKEN: dict[str, tuple[Callable[..., Any], set[str], str, str]] = {
    "mean per micro-batch": (lambda **g: pull(g) / g["mask"].sum(), CUT, "micro-batches", "its own tokens"),
    "mean of responses": (
        lambda **g: pull(g, 1 / g["mask"].sum(1, keepdim=True)) / len(g["mask"]),
        CUT,
        "micro-batches",
        "its own responses",
    ),
    "mean over padding": (
        lambda **g: pull(g, 1 / g["mask"].shape[1]) / g["sequences"],
        CUT | {"padding"},
        "micro-batches",
        "its own columns",
    ),
    "mean over positions": (
        lambda **g: pull(g) / g["mask"].numel(),
        CUT | {"padding"},
        "micro-batches",
        "its own positions",
    ),
    "padding in the divisor": (
        lambda **g: pull(g) / g["mask"].shape[1],
        CUT | {"padding"},
        "padding",
        "padding counts in the divisor",
    ),
    "quantile per micro-batch": (lambda **g: pull(g, top(g)) / g["tokens"], CUT, "micro-batches", "a quantile"),
    "advantages whitened per micro-batch": (
        lambda **g: pull(g, whitened(g)) / g["tokens"],
        CUT,
        "micro-batches",
        "other responses enter",
    ),
    "random by calls": (
        lambda **g: pull(g, torch.rand(g["mask"].shape) < 0.5) / g["tokens"],
        {"again", "padding", "order", *CUT},
        "again",
        "draws random numbers",
    ),
    "the first response as baseline": (
        lambda **g: pull(g, g["advantages"] - g["advantages"][:1, :1]) / g["tokens"],
        {"padding", "order", *CUT},
        "order",
        "",
    ),
    "padding in a mean": (
        lambda **g: pull(g, g["entropies"].detach() > g["entropies"].mean(1, keepdim=True)) / g["tokens"],
        {"padding", *CUT},
        "padding",
        "padding is part of",
    ),
    "the advantage of the first position": (
        lambda **g: pull(g, g["advantages"][:, :1] / g["advantages"]) / g["tokens"],
        {"padding"},
        "padding",
        "the values in padding",
    ),
    "averaged over ranks": (lambda **g: pull(g) / g["tokens"] / g["ranks"], {"ranks"}, "ranks", "multiply by `ranks`"),
    "not divided by parts": (
        lambda **g: pull(g) / g["tokens"] * g["parts"],
        CUT,
        "micro-batches",
        "divide by counts of the step",
    ),
}


#: A term without the mask beside a right policy gradient, and the argument through which padding has a gradient.
FORGOTTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "entropy": (lambda **g: -g["entropies"], "entropies"),
    "k1": (lambda **g: g["logprobs"] - g["ref_logprobs"], "logprobs"),
    "k2": (lambda **g: (g["ref_logprobs"] - g["logprobs"]) ** 2 / 2, "logprobs"),
    "k3": (lambda **g: (d := g["ref_logprobs"] - g["logprobs"]).exp() - d - 1, "logprobs"),
    "k2 of the step": (lambda **g: (g["old_logprobs"] - g["logprobs"]) ** 2 / 2, "logprobs"),
    "clipped ratio": (lambda **g: -(g["logprobs"] - g["old_logprobs"]).exp().clamp(0.5, 1.5), "logprobs"),
    "policy gradient": (lambda **g: -g["advantages"] * (g["logprobs"] - g["old_logprobs"]).exp(), "logprobs"),
    "weighted entropy": (lambda **g: g["advantages"].abs() * g["entropies"], "entropies"),
}


@pytest.mark.parametrize("term", FORGOTTEN)
def test_a_forgotten_mask_is_a_gradient_on_padding(term: str) -> None:
    loss, argument = FORGOTTEN[term]

    def forgotten(**given: Any) -> Any:
        return (pull(given) + 0.1 * loss(**given).sum() * given["ranks"]) / given["tokens"]

    def masked(**given: Any) -> Any:
        return (pull(given) + 0.1 * (loss(**given) * given["mask"]).sum() * given["ranks"]) / given["tokens"]

    report = check_cut_free(forgotten, steps=1)
    assert report.failed == {"padding"}, report
    assert f"padding has a gradient by `{argument}` of its own" in report["padding"].detail
    assert check_cut_free(masked, steps=1).ok


@pytest.mark.parametrize("mistake", BROKEN)
def test_what_broke_is_named(mistake: str) -> None:
    loss, broken, kind, cause = BROKEN[mistake]
    report = check_cut_free(loss, steps=1)
    assert report.failed == broken, report
    assert cause in report[kind].detail
    assert all((result.moved > 1e-3) == (result.law in broken) for result in report.results)  # type: ignore[attr-defined]  # CutResult has it


def test_one_row_of_all_responses_is_tried_where_the_loss_takes_their_numbers() -> None:
    def right(logprobs: Any, advantages: Any, mask: Any, sequence: Any, tokens: int, ranks: int) -> Any:
        assert ((sequence < 0) == (mask == 0)).all()
        return -(advantages * logprobs * mask).sum() / tokens * ranks, {"metrics": "are ignored"}

    def mixes(logprobs: Any, advantages: Any, mask: Any, tokens: int, ranks: int, sequence: Any) -> Any:
        return -((advantages * mask).sum(1) / mask.sum(1) * (logprobs * mask).sum(1)).sum() / tokens * ranks

    report = check_cut_free(right, steps=1)
    assert report.ok, report
    assert report["packed"].outcome == "passed"
    report = check_cut_free(mixes, steps=1)
    assert report.failed == {"packed"}, report
    with pytest.raises(BrokenLaw, match="broken: packed"):
        assert_cut_free(mixes, steps=1)


def test_gradients_by_entropies_count_and_a_mean_of_equal_parts_is_one() -> None:
    def bonus(entropies: Any, mask: Any) -> Any:
        return -(entropies * mask).sum() / mask.sum()

    def responses(logprobs: Any, mask: Any) -> Any:
        return ((logprobs * mask).sum(1) / mask.sum(1)).mean()

    assert check_cut_free(bonus, accumulate="mean", steps=1).failed == CUT
    assert_cut_free(responses, accumulate="mean", even=True, steps=1)
    assert check_cut_free(responses, accumulate="mean", steps=1).failed == CUT


@pytest.mark.parametrize(
    ("error", "loss", "says"),
    [
        (UnknownName, lambda log_probs: log_probs, "no 'log_probs'. Did you mean 'logprobs'"),
        (OutOfRange, lambda logprobs: logprobs.detach().sum(), "has no grad"),
        (OutOfRange, lambda logprobs: 0 * logprobs.sum(), "zero or not finite"),
    ],
)
def test_a_loss_that_cannot_be_tested_is_told(error: type[Exception], loss: Callable[..., Any], says: str) -> None:
    with pytest.raises(error, match=says):
        assert_cut_free(loss)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text, namespace = PAGE.read_text(encoding="utf-8"), {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, namespace)
    assert f"# {capsys.readouterr().out.strip()}" in text


@pytest.mark.filterwarnings("default")  # of hosts
@pytest.mark.parametrize("host", cut_hosts.HOSTS)
def test_the_losses_of_a_host_give_the_rows_of_the_page(host: str) -> None:
    if find_spec(host) is None:
        assert not os.environ.get(f"RLSTAB_REQUIRE_{host.upper()}"), f"{host} is missing"
        pytest.skip(f"{host} is not installed: nox -s {host}")
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {host} |")]
    assert list(cut_hosts.rows(host)) == rows
