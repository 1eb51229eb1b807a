import pytest

from rlstab.report.activity import idle_methods, idle_parts
from tests.report.conftest import CLIP, S2T, STARE, TOP, config, record

N = 30
UNCLIPPED = {"ratio/clipped_high": [0.0] * N, "ratio/clipped_low": [0.0] * N}


def off_policy(objective):
    whole = config(objective)
    whole["optimisation"]["epochs"] = 4
    return whole


@pytest.mark.parametrize(
    ("objective", "metrics", "expected"),
    [
        ([CLIP], UNCLIPPED, "on-policy, the ratio is 1"),
        ([S2T], {"s2t/dropped": [0.0] * N, "s2t/candidates": [0.0] * N}, "a probability below 0.002"),
        ([S2T], {"s2t/dropped": [0.0] * N, "s2t/candidates": [0.1] * N}, "no candidate had an entropy below"),
        ([TOP], {"top_entropy/share": [1.0] * N}, "every token counted"),
        ([STARE], {"stare/gate": [0.0] * N}, "stayed at or above 0.3 nats"),
        ([STARE], {"stare/gate": [1.0] * N, "stare/boosted": [0.0] * N}, "it touched no token"),
        ([{"name": "lp_reg"}], {"lp_reg/selected": [0.0] * N}, "it touched no token"),
        ([{"name": "random_mask"}], {"random_mask/dropped": [0.0] * N}, "it touched no token"),
        ([{"name": "kl", "coefficient": 0.0}], {"kl/value": [0.1] * N}, "its coefficient is 0"),
        (
            [{"name": "adaptive_entropy", "target_entropy": 0.2}],
            {"adaptive_entropy/coefficient": [0.0] * N},
            "never fell below 0.2 nats",
        ),
        (
            [{"name": "adaptive_entropy", "target_entropy": 0.2}],
            {"adaptive_entropy/coefficient": [0.0] * N, "adaptive_entropy/value": [0.1] * N},
            "its price was 0",
        ),
    ],
)
def test_what_never_acted_says_why(objective, metrics, expected) -> None:
    run = record({"reward/mean": [0.1] * N, **metrics}, config=config(objective))
    [(part, why)] = idle_parts(run)
    assert part == objective[0]["name"]
    assert expected in why


@pytest.mark.parametrize(
    ("objective", "metrics"),
    [
        ([CLIP], {**UNCLIPPED, "ratio/clipped_low": [0.0] * (N - 1) + [0.001]}),
        ([CLIP], {}),  # no metric, no claim
        ([S2T], {"s2t/dropped": [0.0] * (N - 1) + [1e-4]}),
        ([TOP], {"top_entropy/share": [0.2] * N}),
        ([STARE], {"stare/gate": [0.0] * 20 + [1.0] * 10, "stare/boosted": [0.1] * N}),
        ([{"name": "kl", "coefficient": 0.1}], {"kl/value": [0.1] * N}),
        ([{"name": "token_mean"}], {}),
        ([{"name": "of_another_package"}], {"of_another_package/level": [0.0] * N}),
    ],
)
def test_what_acted_or_cannot_be_told_is_not_called_idle(objective, metrics) -> None:
    assert idle_parts(record({"reward/mean": [0.1] * N, **metrics}, config=config(objective))) == []


def test_off_policy_the_reason_is_another() -> None:
    run = record({"reward/mean": [0.1] * N, **UNCLIPPED}, config=off_policy([CLIP]))
    assert idle_parts(run) == [("clip_higher", "no ratio left its bounds")]


def test_methods_inside_within_and_numbered_ones_are_found() -> None:
    objective = [{"name": "within", "outer": S2T, "inner": [STARE, TOP]}, S2T, S2T]
    metrics = {
        "within/outer/dropped": [0.0] * N,
        "within/outer/candidates": [0.1] * N,
        "within/inner/stare/gate": [0.0] * N,
        "within/inner/top_entropy/share": [0.2] * N,
        "s2t_1/dropped": [0.1] * N,
        "s2t_2/dropped": [0.0] * N,
    }
    found = [part for part, _ in idle_parts(record(metrics, config=config(objective)))]
    assert found == ["within/outer (s2t)", "within/inner/stare", "s2t_2"]


def test_runs_of_a_method_are_told_together() -> None:
    still, acting = {"s2t/dropped": [0.0] * N, "s2t/candidates": [0.0] * N}, {"s2t/dropped": [0.1] * N}
    runs = [record(still if seed < 2 else acting, seed=seed, config=config([S2T])) for seed in range(3)]
    [found] = idle_methods(runs)
    assert found.seeds == (0, 1)
    assert found.text.startswith("s2t never acted in 2 of 3 runs: no token with positive advantage")
