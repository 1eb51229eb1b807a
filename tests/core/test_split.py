"""A step cut into parts and ranks, however it is cut, is the whole step: loss, gradient, report, next state."""

import random

import pytest
import torch

from rlstab import make_plan
from rlstab.testing.tolerances import REORDERED
from tests.core.compositions import COMPOSITIONS
from tests.core.ranks import CUTS, EMPTY, LENGTHS, SEEDS, two_steps, worker
from tests.core.steps import batch_of, random_rows, run_parts

ROWS = random_rows(SEEDS[0], LENGTHS)
WHOLE = [list(range(len(LENGTHS)))]


def random_cut(seed, rows):
    """1 to 12 parts, of which some are empty."""
    draw = random.Random(seed)
    order, number = draw.sample(range(rows), rows), draw.randint(1, 12)
    parts = [[] for _ in range(number)]
    for row in order:
        parts[draw.randrange(number)].append(row)
    return parts


def assert_same(whole, cut):
    close = {"rel": REORDERED, "abs": REORDERED}
    for one, other in zip(whole, cut, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], **close)
        assert other["kept"] == one["kept"]
        assert flat(other["state"]) == pytest.approx(flat(one["state"]), **close)
        assert values(other["report"]) == pytest.approx(values(one["report"]), nan_ok=True, **close)
        for field, slopes in one["slopes"].items():
            largest = max(float(slope.abs().max()) for slope in slopes.values() if slope.numel())
            for row, slope in slopes.items():
                torch.testing.assert_close(other["slopes"][field][row], slope, rtol=REORDERED, atol=REORDERED * largest)


def flat(state, prefix=""):
    found = {}
    for name, value in state.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return found


def values(report):
    return {name: summary.value for name, summary in report.items()}


@pytest.fixture(scope="module")
def whole():
    return {name: two_steps(objective, WHOLE) for name, objective in COMPOSITIONS.items()}


def test_every_composition_has_something_to_decide(whole):
    for name, objective in COMPOSITIONS.items():
        batch = batch_of(ROWS)
        terms = make_plan(objective, [batch]).terms(batch)
        decided = {field: getattr(terms, field) for field in ("keep", "weight", "exempt")}
        decided |= {key: penalty.where for key, penalty in terms.penalties.items()}
        for field, decision in decided.items():
            assert decision is None or decision.unique().numel() > 1, (name, field)
        assert whole[name][0]["loss"] != 0


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_cutting_a_step_into_parts_changes_nothing(name, whole):
    for seed in range(3):
        parts = random_cut(f"{name} {seed}", len(LENGTHS))
        assert_same(whole[name], two_steps(COMPOSITIONS[name], parts))


def test_statistics_of_each_part_alone_would_change_the_loss(whole):
    name = "s2t+top_entropy+stare"
    with pytest.warns(UserWarning, match="scope: microbatch"):
        _, loss, *_ = run_parts(COMPOSITIONS[name], ROWS, [[0, 1, 2, 3], [4, 5, 6, 7]], scope="microbatch")
    assert loss != pytest.approx(whole[name][0]["loss"], rel=1e-3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two and of three gloo processes found, for all compositions and cuts, by the number of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for world in (2, 3):
        torch.multiprocessing.spawn(worker, (str(folder), world), nprocs=world)
        found[world] = [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
    return found


def joined(steps):
    """The ranks' losses, gradients and reports added up; all know the same next state."""
    one, *others = steps
    report, slopes = dict(one["report"]), dict(one["slopes"])
    for other in others:
        assert one["state"] == other["state"]
        for name, summary in other["report"].items():
            report[name] = report[name].merge(summary) if name in report else summary
        slopes = {field: slopes[field] | other["slopes"][field] for field in slopes}
    return {**one, "loss": sum(step["loss"] for step in steps), "slopes": slopes, "report": report}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_cutting_a_step_over_ranks_changes_nothing(name, ranks, whole):
    for cut, parts in CUTS.items():
        steps = zip(*(found[name, cut] for found in ranks[len(parts)]), strict=True)
        assert_same(whole[name], [joined(step) for step in steps])


def test_ranks_without_any_token_agree_on_the_initial_state(ranks):
    initial = [objective.init_state() for objective in COMPOSITIONS.values()]
    for found in (one for world in ranks.values() for one in world):
        assert [flat(state) for state in found[EMPTY]] == [flat(state) for state in initial]
