"""The sampler of a dump as martingale decomposes it: the same tokens and the same gap at each lag."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstab.look.sampler import sampler_of
from tests.look.steps import behind

if find_spec("martingale") is None:
    assert not os.environ.get("RLSTAB_REQUIRE_SIGNS"), "martingale is missing"
    pytest.skip("martingale is not installed: nox -s signs", allow_module_level=True)


@pytest.mark.parametrize(("engine", "update"), [(0.05, 0.0), (0.0, 0.1), (0.05, 0.1)])
def test_martingale_finds_the_same(engine: float, update: float, tmp_path: Path) -> None:
    from martingale.diagnostics import decompose
    from martingale.record import Recorder, SamplerConfig

    steps = [behind(number, engine, update) for number in (3, 4)]
    told = SamplerConfig(logprobs_mode="processed_logprobs", temperature_applied=True, temperature=1.0)
    recorder = Recorder(tmp_path)
    weights = [recorder.publish_revision(f"{step:064x}", b"tokenizer", told, step=step) for step in range(4)]
    for step in steps:
        columns = zip(*(step.tensors[name].tolist() for name in ("versions", "ids", "rollout_logprobs")), strict=True)
        lengths, rows = step.tensors["lengths"].tolist(), list(columns)
        scores, start = step.tensors["logprobs"].tolist(), 0
        for response, length in enumerate(lengths):
            with recorder.sequence(0, f"{step.number}-{response}", [1]) as sequence:
                for version, token, logprob in rows[start : start + length]:
                    sequence.token(weights[version].digest, token, logprob)
            recorder.score(sequence.record.digest, weights[step.number - 1].digest, scores[start : start + length])
            start += length
    theirs, ours = decompose(recorder.ledger), sampler_of(steps)
    assert ours is not None
    assert theirs["lags"] == [lag.updates for lag in ours.lags] == [0, 1, 2]
    for bucket, lag in zip(theirs["by_lag"], ours.lags, strict=True):
        assert bucket["n_tokens"] == lag.tokens
        assert bucket["float_informational"]["mean_abs_log_ratio"] == pytest.approx(lag.gap, rel=1e-6, abs=1e-9)
    assert theirs["lag0_floor"]["float_informational"]["mean_abs_log_ratio"] == pytest.approx(ours.engine, abs=1e-9)
