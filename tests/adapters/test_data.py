"""The data level: a loss that knows nothing about rlstab, fed masks and advantages, has the objective's gradient."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlstab as r
from rlstab import TokenObjective, compose, make_plan
from rlstab.adapters.data import NO_HIGH, NO_LOW, DataLevel, DataPart, HostMean, LossSettings
from rlstab.core.batch import to_padded
from rlstab.core.comm import Comm
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.saved_state import dump_state, load_state
from rlstab.errors import ConfigError, NonFinite, OutOfRange, ShapeError
from rlstab.hosts import adapted
from rlstab.presets import PRESETS
from rlstab.testing.run import in_threads
from rlstab.testing.steps import KINDS, Step, make_step
from tests.adapters.jobs import ROOT
from tests.examples import EXAMPLES, random_compositions

HOST = adapted("data")
STACK = compose(r.ClipHigher(), r.S2TMask(max_prob=0.05), r.STARE(target_entropy=5.0), r.TokenMean())
MEANS = [HostMean(over, counts) for over in ("tokens", "sequences", "nothing") for counts in ("mask", "response")]
CUTS = ([[0, 1, 2, 3, 4, 5]], [[0, 3], [1, 2, 5], [4]])


def step_of(kind: str = "mixed", seed: int = 3) -> Step:
    return make_step(kind, [5, 1, 9, 6, 2, 7], 2, seed, [])


def vanilla(live: Tensor, old: Tensor, advantages: Tensor, loss: LossSettings) -> Tensor:
    """``(B, T)`` the clipped policy loss as verl's ``vanilla`` and slime's ``policy_loss`` have it, by the formulas."""
    ratio = (live - old).clamp(-20.0, 20.0).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - loss.low, 1 + loss.high))
    if loss.dual_clip is None:
        return clipped
    return torch.where(advantages < 0, torch.minimum(clipped, -advantages * loss.dual_clip), clipped)


def averaged(
    losses: Tensor, part: DataPart, response: Tensor, loss: LossSettings, whole: tuple[float, float]
) -> Tensor:
    """What a host makes of the losses of a micro-batch, given the counts of its whole optimizer step."""
    counted = part.mask if loss.mean.counts == "mask" else response
    masked = torch.where(part.mask, losses, 0.0)
    if loss.mean.over == "nothing":
        return masked.sum()
    if loss.mean.over == "tokens":
        return masked.sum() / whole[0]
    return (masked.sum(1) / counted.sum(1).clamp(min=1)).sum() / whole[1]


def by_the_host(level: DataLevel, step: Step, cut: Sequence[Sequence[int]]) -> Tensor:
    """``(n,)`` gradient of the host's loss in the live log-probs, in the order of the step's rows."""
    steps = [step.rows(rows) for rows in cut]
    batches, responses = zip(*(own.padded(2, 7.0) for own in steps), strict=True)
    parts = level.step(batches).parts
    masks = [part.mask for part in parts] if level.loss.mean.counts == "mask" else responses
    whole = sum(float(mask.sum()) for mask in masks), sum(float(mask.any(1).sum()) for mask in masks)
    by_row: dict[int, Tensor] = {}
    for rows, own, batch, part, response in zip(cut, steps, batches, parts, responses, strict=True):
        live = own.live["logprobs"].clone().requires_grad_()
        old = to_padded(batch, batch.old_logprobs)
        losses = vanilla(to_padded(batch, live, fill=0.0), old, part.advantages, level.loss)
        averaged(losses, part, response, level.loss, whole).backward()
        assert live.grad is not None
        by_row |= {row: live.grad[batch.sequence == number] for number, row in enumerate(rows)}
    return torch.cat([by_row[row] for row in sorted(by_row)])


def by_the_worker(objective: TokenObjective, step: Step) -> Tensor:
    live = step.live["logprobs"].clone().requires_grad_()
    batch = step.batch()
    make_plan(compose(objective), [batch]).loss(batch, PolicyOutputs(live)).loss.backward()
    assert live.grad is not None
    return live.grad


def assert_same(mine: Tensor, other: Tensor) -> None:
    assert float((mine - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


def assert_exact(objective: TokenObjective, step: Step, cut: Sequence[Sequence[int]], mean: HostMean) -> Tensor:
    worker = by_the_worker(objective, step)
    assert_same(by_the_host(DataLevel(objective, mean), step, cut), worker)
    return worker


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_everything_that_can_be_said_is_exact(times: int) -> None:
    """On steps of every kind, each on one or two: methods alone or with a clip, presets, random compositions."""
    clip = r.ClipHigher(low=0.1, high=0.1, dual_clip=1.5)
    methods = [method for several in EXAMPLES.values() for method in several]
    methods += [r.within(r.S2TMask(max_prob=0.05), r.STARE(target_entropy=5.0))]
    alone = [own if "bounds" in own.writes or HOST.refuses(own) else compose(own, clip) for own in methods]
    presets = [preset.objective for preset in PRESETS.values()]
    said = [own for own in (*alone, *presets, *random_compositions(75 * times, seed=4)) if HOST.refuses(own) is None]
    assert len(said) >= 40
    for number, own in enumerate([*said, *said[::-1]][: times * len(said)]):
        step = step_of(list(KINDS)[number % len(KINDS)], seed=number)
        rows = list(range(len(step.sequence_ids)))
        assert_exact(own, step, [rows[:2], rows[2:]], MEANS[number % len(MEANS)])


def test_a_response_that_lost_everything_keeps_its_mask() -> None:
    """verl leaves an empty response out of its count, slime counts one token for it, TRL counts it: none has to."""
    step, rare = step_of(), r.TopEntropyMask(share=0.1)
    batch = step.rows(CUTS[0][0]).padded(2, 7.0)[0]
    keep = make_plan(rare, [batch]).terms(0).keep
    assert keep is not None
    lost = batch.sequence_total(keep) == 0
    assert int(lost.sum()) >= 2
    for mean in (HostMean(), HostMean("sequences")):
        own = compose(r.ClipHigher(), rare, r.SequenceMean())
        part = DataLevel(own, mean).step([batch]).parts[0]
        assert part.mask.any(1).all()
        assert not part.advantages[lost].any()
        assert_exact(own, step, CUTS[1], mean)


def test_nothing_kept_is_silent() -> None:
    padded = step_of("no advantage").padded(0, 0.0)[0]
    given = DataLevel(STACK).step([padded])
    assert given.has_no_gradient
    assert not given.parts[0].advantages.any()
    everything = DataLevel(compose(r.RandomMask(share=1.0, sign="all"))).step([padded])
    assert everything.has_no_gradient
    assert everything.metrics()["tokens/kept"] == 0.0
    assert everything.parts[0].mask.any(1).all()


def test_the_state_is_carried_and_saved_and_stays_where_a_step_is_refused() -> None:
    moving = compose(r.ClipHigher(), r.STARE(target_entropy=0.8, variant="C2", increment=0.05))
    level, state = DataLevel(moving), moving.init_state()
    for seed in (1, 2, 3):
        batch = step_of(seed=seed).padded(0, 0.0)[0]
        plan = make_plan(moving, [batch], state)
        given = level.step([batch])
        assert level.state == plan.state == given.plan.state
        state = plan.state
        if seed == 2:
            record, tensors = dump_state(level.state)
            level = DataLevel(moving, state=load_state(record, tensors))
    assert level.state != moving.init_state()
    assert given.metrics()["stare/boost"] == state["stare"]["boost"]
    before = level.state
    with pytest.raises(NonFinite):
        level.step([step_of().given(entropies=torch.full((30,), torch.nan)).padded(0, 0.0)[0]])
    assert level.state is before


@pytest.mark.parametrize("ranks", [[[0, 4, 5], [1, 2, 3]], [[0, 1, 2, 3, 4, 5], []]], ids=["two", "one is empty"])
def test_two_ranks_are_one(ranks: list[list[int]]) -> None:
    step, level = step_of(), DataLevel(STACK)
    alone = level.step([step.padded(1, 0.0)[0]])
    (whole,), kept = alone.parts, 0

    def on_a_rank(rank: int, comm: Comm) -> Any:
        own, rows = DataLevel(STACK), ranks[rank]
        given = own.step([step.rows(rows).padded(1, 0.0)[0]] if rows else [], comm)
        return own.state, given.metrics(), given.parts

    for rows, (state, metrics, parts) in zip(ranks, in_threads(2, on_a_rank), strict=True):
        assert state == level.state
        assert metrics == pytest.approx(alone.metrics())
        for part in parts:
            kept += int(part.mask.sum())
            for place, row in enumerate(rows):
                assert_same(part.advantages[place][part.mask[place]], whole.advantages[row][whole.mask[row]])
    assert kept == int(whole.mask.sum())


def test_every_other_method_is_refused_by_name() -> None:
    refused = [
        (own, what) for several in EXAMPLES.values() for own in several if (what := HOST.refuses(own)) is not None
    ]
    assert {what for _, what in refused} >= set(HOST.refused.values()) - {HOST.refused["unclipped"]}
    for method, what in refused:
        with pytest.raises(ConfigError, match=re.escape(f"'{method.name}' asks for {what}")):
            DataLevel(compose(method))


def test_what_is_only_observed_is_not_refused() -> None:
    step = step_of()
    level = DataLevel(
        compose(r.ClipHigher(), r.observe(r.KLPenalty()), r.observe(compose(r.AR(), r.ClipHigher(low=0.01))))
    )
    assert_same(by_the_host(level, step, CUTS[1]), by_the_worker(r.ClipHigher(), step))
    assert level.step([step.padded(0, 0.0)[0]]).metrics()["observe_kl/would_penalise"] == 1.0


def test_what_the_host_has_to_be_set_to() -> None:
    assert DataLevel(PRESETS["justrl"].objective).loss == LossSettings(0.2, 0.28, 10.0, HostMean())
    assert DataLevel(compose(r.EntropyShaping())).loss == LossSettings(NO_LOW, NO_HIGH, None, HostMean())
    with pytest.raises(OutOfRange, match=r"over = 'rows'"):
        HostMean("rows")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ShapeError, match=r"no \(B, T\) shape"):
        DataLevel(STACK).step([step_of().batch()])


def test_the_lines_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = ROOT / "docs" / "hosts" / "data.md"
    page = file.read_text(encoding="utf-8")
    (yaml,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "objective.yaml").write_text(yaml)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, str(file), "exec", dont_inherit=True), namespace)
    assert namespace["gap"] < 1e-6
