"""One look at a run: its log, its loss, its sampler, its gradient, and what methods would do to it."""

import io
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rlstab.cli import main
from rlstab.config import load_objective
from rlstab.console import Terminal
from rlstab.core.plan import make_plan
from rlstab.errors import ConfigError, ReportError
from rlstab.look import Watch, WatchCallback
from rlstab.look.alternatives import CORRECTIONS, alternatives_of, own_objective
from rlstab.look.find import candidates, find, nearest
from rlstab.look.gradient import gradient_of, run_coefficients, shares_of
from rlstab.look.look import follow, look
from rlstab.look.sampler import mean_weight, sampler_of, weights_of
from rlstab.record import HostLoss, read_dump, write_dump
from rlstab.record.step import Step, rank_of
from rlstab.signs import signs
from rlstab.visible import visible
from tests.browser import BrowserPage
from tests.look.steps import behind, noise, step
from tests.replay.dumps import write
from tests.train.runs import apart, checkpoints, go, lines, number, printed, quiet, small

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dump-smollm2"
LOGS = ROOT / "tests" / "diagnose" / "data"
HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}<!--<script>\u202e\u2028[bold red]$title"


# -- the gradient ------------------------------------------------------------------------------------------------------


def test_shares_are_those_of_coefficients_and_each_token_without_a_gradient_has_a_reason() -> None:
    steps = [part.usable()[0] for part in read_dump(EXAMPLE).steps]
    shares = shares_of(steps)
    pulls = torch.cat([run_coefficients(part) * (1 - part.batch.logprobs.double().exp()) for part in steps])
    assert torch.allclose(torch.cat(shares), pulls / pulls.abs().sum(), rtol=1e-6, atol=1e-12)
    told = gradient_of(steps, shares)
    assert told is not None
    neutral = torch.cat([part.batch.advantages for part in steps]) == 0  # a KL term pulls there, too
    among = sum(share for share, _ in told.quadrants.values())
    assert among + float(torch.cat(shares)[neutral].abs().sum()) == pytest.approx(1)
    assert sum(share for share, _ in told.positions) == pytest.approx(1)
    zero = torch.cat(shares) == 0
    assert sum(told.without.values()) == pytest.approx(float(zero.double().mean()))
    largest = max(torch.cat(shares).abs().tolist())
    assert abs(told.largest[0].share) == pytest.approx(largest)
    top = told.largest[0]
    of_response = steps[top.step].row == top.response
    pulled = torch.zeros(len(of_response), dtype=torch.float64).masked_scatter(steps[top.step].mask, shares[top.step])
    assert float(pulled[of_response][top.position]) == pytest.approx(top.share)


def test_reasons_are_told_apart() -> None:
    def advantages(known: Any, draw: Any) -> Any:
        return torch.where(torch.arange(len(known["ids"])) < 50, 0.0, 1.0)

    def old(known: Any, draw: Any) -> Any:  # the last 60 tokens are far above the clip range
        return known["logprobs"] - torch.where(torch.arange(len(known["ids"])) >= len(known["ids"]) - 60, 1.0, 0.0)

    one = step(advantages=advantages, old_logprobs=old, first=False)
    told = gradient_of([one], shares_of([one]))
    assert told is not None
    assert told.without == {"zero advantage": 50 / told.tokens, "beyond the clip range": 60 / told.tokens}


def test_a_token_without_weight_names_the_method_that_took_it() -> None:
    rows = ["clip_higher", {"name": "importance_correction", "max_weight": None, "keep_high": 1.5}, {"name": "ar"}]
    made = step(first=False, old_logprobs=lambda known, draw: known["logprobs"] - 0.1, rollout_logprobs=noise(0.5))
    weight = make_plan(load_objective(rows[:2]), [made.batch]).part(0).terms.weight
    assert weight is not None
    header = made.header.model_copy(update={"loss": HostLoss(name="rlstab", settings={"objective": rows})})
    pulls = torch.zeros_like(made.tensors["advantages"]).masked_scatter(made.mask, weight.float())
    one = Step(header, {**made.tensors, "coefficients": -pulls}, made.ranks)
    told = gradient_of([one], shares_of([one]))
    assert told is not None
    rejected = int((weight == 0).sum())
    assert rejected > 0
    assert told.without == {"weight 0 by importance_correction": rejected / told.tokens}


# -- methods -----------------------------------------------------------------------------------------------------------


def test_the_run_itself_turns_nothing_and_each_method_joins_or_replaces_what_it_excludes() -> None:
    steps = [part.usable()[0] for part in read_dump(EXAMPLE).steps[::4]]
    assert [member.name for member in own_objective(steps).members] == ["clip_higher", "kl", "token_mean"]
    found = alternatives_of(steps)
    rows = {row.name: row for row in found.rows}
    assert rows["token_mean"].turn == pytest.approx(0, abs=1e-4)
    assert rows["token_mean"].joins == "in place of token_mean"
    assert rows["cispo"].joins == "in place of clip_higher"
    assert (rows["s2t"].joins, rows["s2t"].turn > 2) == ("added", True)
    assert 0.7 < rows["top_entropy"].actions["dropped"] < 0.85
    assert "log_kept_mass" in found.left_out["lp_reg"]
    assert "entropies" in found.left_out["entropy_bonus"]
    assert sum(top.share for top in found.own.top) < 1
    # the objective that was planned is that of the trainer: its gradient is what the trainer recorded
    first = found.own.top[0]
    of_response = steps[first.step].row == first.response
    recorded = torch.zeros(len(of_response), dtype=torch.float64)
    recorded = recorded.masked_scatter(steps[first.step].mask, shares_of(steps)[first.step])[of_response]
    assert torch.allclose(torch.tensor(first.tokens, dtype=torch.float64), recorded, rtol=1e-3, atol=1e-9)


def filled(name: str, value: float) -> dict[str, Any]:
    """A tensor by token that has one value throughout."""
    return {name: lambda known, draw: torch.full_like(known["logprobs"], value)}


#: What a run that fell apart leaves: no gradient, or numbers that are none.
DEAD: dict[str, dict[str, Any]] = {
    "equal rewards": filled("advantages", 0.0),
    "no choice": {**filled("logprobs", 0.0), **filled("rollout_logprobs", 0.0)},
    "every response rejected": filled("weights", 0.0),
    "a policy far away": filled("old_logprobs", -1e30),
    "weights of NaN": filled("weights", math.nan),
    "advantages of NaN": filled("advantages", math.nan),
}


@pytest.mark.parametrize("kind", DEAD)
def test_a_dead_run_is_looked_at_like_any_other(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = step(first=False, **DEAD[kind])
    loss = HostLoss(name="trl/dapo", settings={"low": 0.2, "high": 0.28}, values=[0.1])
    tensors = {name: values.clone() for name, values in dead.tensors.items()}
    write_dump(tmp_path / "dump", dead.header.model_copy(update={"loss": loss}), tensors)
    page, few = tmp_path / "look.html", ["--methods", "s2t"] * (kind != "equal rewards")
    assert main(["look", str(tmp_path), "--json", "--out", str(page), *few]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    usable = "NaN" not in kind
    shown = page.read_text().count('"tokens":[')
    assert shown == 8 * usable  # to be read, whatever the gradient


def test_settings_that_no_method_has_are_told() -> None:
    odd = step()
    loss = HostLoss(name="trl/dr_grpo", settings={"length": 0.4, "low": 5.0})
    odd = Step(odd.header.model_copy(update={"loss": loss}), odd.tensors, odd.ranks)
    assert "No methods are known" in own_objective([odd]).told


def test_a_correction_takes_the_place_of_the_recorded_one() -> None:
    weights = [step(weights=lambda known, draw: 0.2 + torch.rand(len(known["ids"]), generator=draw))]
    found = alternatives_of(weights)
    rows = {row.name: row for row in found.rows}
    assert rows["no correction"].joins == "in place of the correction"
    assert rows["no correction"].turn > 5
    # sampler and policy are the same here, so every correction leaves the weight 1, as no correction does
    assert rows["token, cap 2 (TIS)"].turn == pytest.approx(rows["no correction"].turn)


# -- the sampler -------------------------------------------------------------------------------------------------------


#: Of a standard normal number, the mean of its size.
MEAN_SIZE = math.sqrt(2 / math.pi)


@pytest.mark.parametrize(("engine", "update"), [(0.05, 0.0), (0.0, 0.1), (0.05, 0.1)])
def test_engine_and_staleness_are_told_apart_and_sized(engine: float, update: float) -> None:
    """Each alone and both, planted as normal noise; to a fifth where the one is not hidden in the other."""
    found = sampler_of([behind(number, engine, update) for number in (3, 4, 5, 6)])
    assert found is not None
    assert [lag.updates for lag in found.lags] == [0, 1, 2]
    assert found.engine == pytest.approx(engine * MEAN_SIZE, rel=0.2)
    added = [found.staleness(lag) for lag in found.lags]
    assert added[0] is None
    if update > engine / 2 or not update:
        planted = [update * MEAN_SIZE * math.sqrt(lag) for lag in (1, 2)]
        assert added[1:] == pytest.approx(planted, rel=0.2, abs=0.2 * engine * MEAN_SIZE)
    assert f"{found.engine:.3f} nats per token at no lag (engine and precision)" in found.sentence
    stale = f"after 2 updates, staleness adds {added[2]:.3f}" if update > engine / 2 else "adds nothing visible"
    assert stale in found.sentence


def test_a_signal_in_rollouts_stands_for_missing_versions() -> None:
    versions = behind(4, 0.0, 0.1)
    lags = versions.batch.lag
    assert lags is not None
    tensors = {name: values for name, values in versions.tensors.items() if name != "versions"}
    found = [sampler_of([made]) for made in (versions, Step(versions.header, {**tensors, "lag": lags}, [0]))]
    assert found[0] == found[1]
    assert sampler_of([]) is None


def nucleus(top_p: float, count: int = 20_000) -> dict[str, Any]:
    """A sampler of the likeliest tokens with this mass, of 50, which reports what it drew from; and the true mass."""
    draw = torch.Generator().manual_seed(0)
    every = torch.randn(count, 50, generator=draw).mul(2).log_softmax(-1).sort(-1, descending=True).values
    inside = every.exp().cumsum(-1) - every.exp() < top_p
    mass = (every.exp() * inside).sum(-1)
    index = torch.multinomial(every.exp() * inside, 1, generator=draw)
    logprobs = every.gather(1, index)[:, 0]
    return {"logprobs": logprobs, "rollout_logprobs": logprobs - mass.log(), "mass": float(mass.double().mean())}


@pytest.mark.parametrize("header", [{}, {"top_p": 0.8}, {"top_p": 0.8, "logprobs_mode": "processed_logprobs"}], ids=str)
def test_a_renormalised_sampler_is_named_and_sized(header: dict[str, Any]) -> None:
    drawn = nucleus(0.8)
    mass, tokens = drawn.pop("mass"), len(drawn["logprobs"])
    made = step(count=20)
    sizes = {"lengths": torch.full((20,), tokens // 20), "ids": torch.arange(tokens), "mask": torch.ones(tokens).long()}
    made = rank_of(made.header, {**made.tensors, **sizes, "advantages": torch.ones(tokens), **drawn})
    found = sampler_of([Step(made.header.model_copy(update=header), made.tensors, made.ranks)])
    assert found is not None
    assert found.mean_weight == pytest.approx(mass, rel=0.02)
    told = found.sentence
    assert ("top_p 0.8 renormalised" if header else "top-p or top-k renormalised") in told
    assert f"mean weight of {found.mean_weight:.2f}" in told


def test_what_a_sampler_says_of_itself_counts() -> None:
    """Known to draw from all, or to report what cannot be compared."""
    off = {"top_p": 1.0, "top_k": 0, "logprobs_mode": "processed_logprobs"}
    lower = behind(4, 0.0, 0.1)
    lower = lower.having({"rollout_logprobs": lower.tensors["rollout_logprobs"] + 0.3})
    for header, word in (
        ({}, "top-p or top-k"),
        (off, "staleness adds"),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.7}, "temperature 0.7"),
        ({"logprobs_mode": "raw_logprobs", "top_k": 20}, "none shows its top_k 20"),
    ):
        found = sampler_of([Step(lower.header.model_copy(update=header), lower.tensors, lower.ranks)])
        assert found is not None
        assert word in found.sentence


def test_the_mean_weight_of_a_mask_is_that_of_simulated_responses() -> None:
    spread, length, count = 0.02, 4096, 40_000
    draw = torch.Generator().manual_seed(0)
    gaps = spread * torch.randn(200_000, generator=draw, dtype=torch.float64) - spread**2 / 2
    sums = spread * math.sqrt(length) * torch.randn(count, generator=draw, dtype=torch.float64) - length * spread**2 / 2
    for settings, weights in (
        ({"level": "sequence", "max_weight": None, "keep_high": 3.0}, sums.exp() * (sums.exp() <= 3)),
        ({"level": "sequence", "max_weight": 2.0}, sums.exp().clamp(max=2)),
    ):
        assert mean_weight(gaps, settings, length) == pytest.approx(float(weights.mean()), abs=0.02)
    # as docs/how-to/look.md has them
    told = [mean_weight(gaps, {"level": "sequence", "keep_high": 3.0}, length) for length in (256, 4096, 16384)]
    assert [round(weight, 2) for weight in told] == [1.0, 0.59, 0.2]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_weights_of_a_correction_are_those_of_the_method_and_the_run_that_has_it_is_known(name: str) -> None:
    row = {"name": "importance_correction", **CORRECTIONS[name]}
    made = step(first=False, old_logprobs=lambda known, draw: known["logprobs"] - 0.1, rollout_logprobs=noise(0.5))
    planned = make_plan(load_objective([row]), [made.batch]).part(0).terms.weight
    assert planned is not None
    assert weights_of(made, CORRECTIONS[name]).tolist() == pytest.approx(planned.tolist(), rel=1e-5)
    first = weights_of(made, CORRECTIONS[name], 1)
    assert len(first) == 16  # the first token of each response
    plain = sampler_of([made])
    assert plain is not None
    assert plain.own == ""
    assert plain.corrections[name][0] == pytest.approx(float(first.mean()))
    loss = HostLoss(name="rlstab", settings={"objective": ["clip_higher", row]})
    for known in (Step(made.header.model_copy(update={"loss": loss}), made.tensors, made.ranks), made):
        found = sampler_of([known.having({"weights": planned}) if known is made else known])
        assert found is not None
        assert found.own == name


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """TRL's output folder with a dump in it, whose tokens have hostile texts."""
    folder = tmp_path / "<b>run"
    shutil.copytree(LOGS / "trl_1_16", folder)
    write(folder / "dump", steps=1)
    words = {f"{HOSTILE}{number}": number for number in range(30)}
    Tokenizer(WordLevel(words)).save(str(folder / "dump" / "tokenizer.json"))
    return folder


def test_a_folder_is_read_with_its_log_and_its_dump(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = find(run)
    assert found.log is not None
    assert found.dump is not None
    assert (found.log.writer, len(found.dump.steps)) == ("TRL", 1)
    assert main(["look", str(run), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert {"cause", "step", "signs", "loss", "turns", "sampler"} <= entry.keys()
    assert entry["loss"]["agrees"] is True
    assert not (run / "look.html").exists()


def test_without_a_dump_it_says_how_to_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", str(LOGS / "trl_1_16"), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert any("DumpCallback" in note for note in entry["notes"])


def test_the_terminal_has_at_most_25_lines(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["look", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 20 < len(lines) <= 25
    assert lines[-2] == "More is on the page."


def test_a_sign_of_fail_on_ends_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(LOGS / "truncation.jsonl")
    for name, code in (("truncation", 3), ("entropy_floor", 0)):
        assert main(["look", log, "--json", "--fail-on", name]) == code
    assert main(["look", log, "--fail-on", "truncated"]) == 2
    assert "truncation" in capsys.readouterr().err


def test_a_damaged_dump_without_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("json", "safetensors"):
        (tmp_path / f"step-000001.rank-0.{suffix}").write_text("{}")
    page = tmp_path / "look.html"
    assert main(["look", str(tmp_path), "--out", str(page)]) == 2
    assert "no optimizer step in it can be read. step-000001.rank-0.json is left out" in capsys.readouterr().err
    assert not page.exists()


def test_without_a_path_the_newest_run_here_is_taken(run: Path) -> None:
    shutil.copy(LOGS / "healthy.jsonl", run.parent / "old.jsonl")
    os.utime(run.parent / "old.jsonl", (0, 0))
    assert [path.name for path in candidates(run.parent)] == ["<b>run", "old.jsonl"]
    assert candidates(run) == [run]
    found, others = nearest(run.parent)
    assert ([one.path for one in found], others) == ([run], [run.parent / "old.jsonl"])


def test_the_page_in_a_browser(run: Path, browser_page: BrowserPage) -> None:
    for file in (run / "dump").glob("step-*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "host": HOSTILE}))
    assert main(["look", str(run)]) == 0
    page: Any = browser_page.open(run / "look.html")
    assert visible(HOSTILE, spaces=False) in page.text_content(".what")
    assert page.locator("script").count() == 2
    assert page.locator("img").count() == 0
    assert visible(HOSTILE) in page.locator("#list .t").first.text_content()
    assert page.locator("nav a").all_inner_texts() == ["Curves", "Loss", "Sampler", "Gradient", "Methods", "Tokens"]
    assert page.locator("[data-open]").count() > 10
    assert page.locator("#list .resp").count() == 8
    page.locator("#list .t").first.click()
    page.keyboard.press("ArrowRight")
    assert page.locator("#list [aria-current]").count() == 1
    click = "one => (one.click(), document.getElementById('card').innerText)"
    told = page.evaluate(f"[...document.querySelectorAll('#list .t')].map({click})")
    assert all("ratio" in one for one in told)
    assert any("clip_higher: clipped" in one for one in told)
    page.locator("[data-open]").first.click()
    assert page.locator("#objective").input_value() == "1"
    page.locator("#strips").focus()
    page.keyboard.press("ArrowRight")
    assert "step 1" in page.inner_text("#strips")
    page.mouse.move(0, 0)  # a chart that scrolls under the pointer would be read there
    read = []
    for chart in page.locator("svg.chart").all():
        chart.focus()
        page.keyboard.press("End")
        read.append(chart.locator("xpath=..").locator(".read").inner_text())
    assert len(read) == 1  # one step and one lag: positions alone
    assert read[0].startswith("position")
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    browser_page.assert_clean()


class Closed(io.StringIO):
    """What a reader of the output such as ``head`` has closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_the_page_stands_if_the_reader_of_the_output_stops(tmp_path: Path) -> None:
    for as_json in (False, True):
        page = tmp_path / f"{as_json}.html"
        with pytest.raises(BrokenPipeError):
            look([LOGS / "truncation.jsonl"], out=page, as_json=as_json, console=Terminal(file=Closed()))
        assert page.read_text().rstrip().endswith("</html>")


def test_the_findings_are_printed_if_the_page_cannot_be_written(tmp_path: Path) -> None:
    said = io.StringIO()
    with pytest.raises(ReportError, match="--out"):
        look([LOGS / "truncation.jsonl"], out=tmp_path, console=Terminal(file=said))
    assert "cut off" in said.getvalue()


# -- while it runs -----------------------------------------------------------------------------------------------------


def test_live_signs_are_those_of_a_look_and_the_callback_stops_at_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="truncation"):
        WatchCallback(stop_at=["truncated"])
    assert not WatchCallback(stop_at=None).stop_at
    lines = (LOGS / "truncation.jsonl").read_text().splitlines()[::2]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    (found,) = find(tmp_path / "log.jsonl")
    assert found.log is not None
    callback, stopped = WatchCallback(stop_at=["truncation"]), list[int]()
    callback.watch = Watch("rollout")
    for line in lines:
        row = json.loads(line)
        state = SimpleNamespace(global_step=row["rollout"], is_world_process_zero=True)
        control = SimpleNamespace(should_training_stop=False, should_save=False)
        callback.on_log(None, state, control, logs=row)
        assert control.should_save is control.should_training_stop
        stopped += [row["rollout"]] if control.should_training_stop else []
    assert callback.watch.seen.keys() >= {sign.name for sign in signs(found.log) if sign.fired}
    assert len(stopped) == 1
    assert (callback.watch.seen["truncation"].step or 0) <= stopped[0] < found.log.rollouts


def test_following_a_log_tells_each_sign_once(tmp_path: Path) -> None:
    lines = (LOGS / "truncation.jsonl").read_text().splitlines(keepends=True)
    log, said, read = tmp_path / "log.jsonl", list[str](), iter((10, 30, 60, len(lines), len(lines)))

    def goes_on() -> bool:
        count = next(read, None)
        if count is not None:
            log.write_text("".join(lines[:count]))
        return count is not None

    assert follow(log, said.append, every=0, goes_on=goes_on) is False
    assert len(said) == len(set(said)) >= 1
    assert follow(log, said.append, stop_at=["truncation"], every=0) is True


def test_our_trainer_stops_at_a_sign_with_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    """Answers of two tokens are cut off from the first rollout on."""
    stopped, plain = tmp_path / "stopped", tmp_path / "plain"
    short: dict[str, Any] = {"rollout__max_new_tokens": 2, "optimisation__rollouts": 3}
    said = quiet()
    go(small(stopped, tracking__stop_at=["truncation"], **short), console=said)
    assert "sign truncation" in printed(said)
    assert [number(path) for path in checkpoints(stopped)] == [1]
    go(small(plain, tracking__checkpoint_every=1, tracking__keep_checkpoints=9, **short))
    first, mine = (load_file(checkpoints(run)[0] / "model.safetensors") for run in (plain, stopped))
    assert all(torch.equal(values, mine[name]) for name, values in first.items())
    go(small(stopped, **short), resume=True)
    assert len(lines(stopped / "metrics.jsonl")) == 3
    assert apart(stopped, plain) == 0


def test_a_name_that_is_not_a_sign_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="truncation"):
        small(tmp_path, tracking__stop_at=["truncated"])
