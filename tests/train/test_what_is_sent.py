"""What docs/how-to/several-processes.md says processes send each other and hold, as they count it themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rlstab.train.policy import load_policy
from tests.train.counting import said
from tests.train.crews import Crew
from tests.train.runs import about, file_of, largest_difference, small
from tests.train.test_engines import ALIKE, SIX, STACK

pytestmark = pytest.mark.slow

ADAPTER = {"model__adapter": {"r": 4, "alpha": 8}}
#: Three mini-batches of one prompt: in each step a process is empty.
EMPTY = {**SIX, "rollout__prompts": 3}
#: Rows of a matrix that two processes do not share evenly are filled up, and this little more is held or sent.
FILLED = 1e-3
PASSES = {"forward", "backward", "filler"}
#: What each process of a run counted.
Found: TypeAlias = list[dict[str, Any]]


def told(crew: Crew, out: Path, processes: int, objective: Any = STACK, **settings: Any) -> Found:
    """What each process of a run counted; as many as there should be."""
    done = crew.does(file_of(small(out, objective, **{**SIX, **settings})), processes, "counted")
    found = [said(text) for text in done.said]
    assert [one["processes"] for one in found] == [processes] * processes
    assert [len(one["steps"]) for one in found] == [6] * processes
    return found


@pytest.fixture(scope="module")
def plain(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("plain")
    return {
        engine: told(crew, folder / engine, processes, engine=engine)
        for engine, processes in (("auto", 1), ("ddp", 2), ("fsdp2", 2))
    }


def holds_everything(one: dict[str, Any]) -> bool:
    """16 bytes for each parameter; before the first optimizer step there are no moments."""
    return all(
        step["weights"] == step["gradients"] == 4 * one["parameters"]
        and step["moments"] == 8 * one["parameters"] * bool(number)
        for number, step in enumerate(one["steps"])
    )


def passes(step: dict[str, Any]) -> list[list[Any]]:
    """What was sent in the forward and backward passes of an optimizer step."""
    return [one for one in step["sent"] if one[0].split()[0] in PASSES]


def elements(sent: list[list[Any]], kind: str = "") -> int:
    return sum(one[2] for one in sent if kind in one[1])


def layers() -> tuple[int, int, int]:
    """How many layers the model has, and the elements in each of them and beside them."""
    policy = load_policy("countdown-tiny")
    found = [sum(one.numel() for one in layer.parameters()) for layer in policy.model.model.layers]
    assert len(set(found)) == 1
    return len(found), found[0], sum(one.numel() for one in policy.model.parameters()) - sum(found)


def test_one_process_sends_nothing_and_holds_everything(plain: dict[str, Found]) -> None:
    (one,) = plain["auto"]
    assert [step["sent"] for step in one["steps"]] == [[]] * 6
    assert holds_everything(one)


def test_ddp_sends_gradients_once_with_the_last_backward_and_holds_everything(plain: dict[str, Found]) -> None:
    for one in plain["ddp"]:
        assert holds_everything(one)
        assert max(step["rounds"] for step in one["steps"]) > 1
        for step in one["steps"]:
            gradients = passes(step)
            assert {phase.split()[1] for phase, *_ in gradients} == {str(step["rounds"])}
            assert {(kind, dtype) for _, kind, _, dtype in gradients} == {("allreduce", "float32")}
            assert elements(gradients) == one["parameters"] == one["trainable"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_beside_that_processes_share_the_statistics_of_a_step(engine: str, plain: dict[str, Found]) -> None:
    for one in plain[engine]:
        for step in one["steps"]:
            others = [few for few in step["sent"] if few not in passes(step)]
            assert others
            assert max(few[2] for few in others) <= 4096, "a pool that is gathered, or a histogram"
            assert {few[3] for few in others} <= {"float64", "int64"}
            kinds = "".join("p" if few in passes(step) else "s" for few in step["sent"])
            assert re.fullmatch("s+p+s{1,2}", kinds), "before the first pass, and loss and norm after the last"


def test_fsdp2_sends_layers_before_each_pass_and_gradients_after_each_backward(
    plain: dict[str, Found],
) -> None:
    """What is in no layer, embeddings and head, is gathered once for both passes."""
    count, layer, beside = layers()
    for one in plain["fsdp2"]:
        for step in one["steps"]:
            assert {dtype for *_, dtype in passes(step)} == {"float32"}
            for number in range(1, step["rounds"] + 1):
                there = {what: [few for few in passes(step) if few[0] == f"{what} {number}"] for what in PASSES}
                if there["filler"]:  # both passes of it
                    assert not there["forward"] + there["backward"]
                    there = {"forward": there["filler"][: count + 1], "backward": there["filler"][count + 1 :]}
                forward, backward = (sorted(few[1:3] for few in there[what]) for what in ("forward", "backward"))
                sizes = sorted([pytest.approx(beside, rel=0.1), *[layer] * count], key=str)
                assert sorted((few[1] for few in forward), key=str) == sizes
                assert [kind for kind, _ in forward] == ["allgatherbase"] * (count + 1)
                assert [few for few in backward if "gather" in few[0]] == [["allgatherbase", layer]] * count
                summed = [size for kind, size in backward if kind == "reducescatterbase"]
                assert sorted(summed, key=str) == sizes
                assert len(backward) == 2 * count + 1


def test_fsdp2_holds_a_share_of_everything(plain: dict[str, Found]) -> None:
    for one in plain["fsdp2"]:
        for number, step in enumerate(one["steps"]):
            for what, size in (("weights", 4), ("gradients", 4), ("moments", 8 * bool(number))):
                assert step[what] == pytest.approx(size * one["parameters"] / 2, rel=FILLED), what
            assert step["beside"] == 0, "the gathered ones are gone"


def test_between_steps_weights_are_gathered_and_dropped_afterwards(crew: Crew, tmp_path: Path) -> None:
    settings = {"evaluation__every": 1, "evaluation__prompts": 2, "optimisation__refresh": "step"}
    for one in told(crew, tmp_path / "run", 2, engine="fsdp2", **settings):
        whole = [few for few in one["gathered"] if few[0] == "allgatherintotensor"]
        assert {dtype for *_, dtype in whole} == {"float32"}
        assert len(one["whole"]) > 2 + 6, "for two rollouts, and the evidence of six steps"
        for inside, after in one["whole"]:
            assert inside == pytest.approx(4 * one["parameters"], rel=FILLED)
            assert after == 0
        assert sum(size for _, size, _ in whole) >= len(one["whole"]) * one["parameters"]


def test_weights_are_gathered_in_bfloat16_and_gradients_added_in_float32(crew: Crew, tmp_path: Path) -> None:
    def sent(gather: str) -> list[list[list[Any]]]:
        engine = {"name": "fsdp2", "gather": gather}
        (one, _) = told(crew, tmp_path / gather, 2, engine=engine, optimisation__precision="bf16")
        for few in one["gathered"]:
            assert few[2] in ("float32", "float64"), "what samples and what is saved is not rounded"
        for step in one["steps"]:
            assert step["weights"] == pytest.approx(4 * one["parameters"] / 2, rel=FILLED)
        assert one["steps"][-1]["moments"] == pytest.approx(8 * one["parameters"] / 2, rel=FILLED)
        return [passes(step) for step in one["steps"]]

    for wide, narrow in zip(sent("fp32"), sent("bf16"), strict=True):
        assert [one[:3] for one in wide] == [one[:3] for one in narrow], "as many numbers, of half the bytes"
        assert {(kind, dtype) for _, kind, _, dtype in narrow} == {
            ("allgatherbase", "bfloat16"),
            ("reducescatterbase", "float32"),
        }


def test_of_an_adapter_only_its_gradients_are_sent_and_fsdp2_shards_the_frozen_weights(
    crew: Crew, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason='peft is not installed: pip install -e ".[lora]"')
    for engine in ("ddp", "fsdp2"):
        for one in told(crew, tmp_path / engine, 2, engine=engine, **ADAPTER):
            assert 0 < one["trainable"] < one["parameters"] / 10
            frozen = 4 * (one["parameters"] - one["trainable"])
            assert one["frozen here"] == pytest.approx(frozen / (2 if engine == "fsdp2" else 1), rel=FILLED)
            for step in one["steps"]:
                times = step["rounds"] if engine == "fsdp2" else 1
                gradients = [few for few in passes(step) if "reduce" in few[1]]
                assert elements(gradients) == times * one["trainable"]
                if engine == "ddp":
                    assert passes(step) == gradients


def test_a_reference_policy_is_sharded_like_the_policy(crew: Crew, tmp_path: Path) -> None:
    for one in told(crew, tmp_path / "run", 2, ["clip_higher", "kl"], engine="fsdp2"):
        shards, beside = one["reference"]
        assert shards == pytest.approx(4 * one["parameters"] / 2, rel=FILLED)
        assert beside == 0


def test_a_process_without_work_runs_one_token_where_others_would_wait(crew: Crew, tmp_path: Path) -> None:
    idle = 0
    for engine in ("ddp", "fsdp2"):
        pairs = zip(*(one["steps"] for one in told(crew, tmp_path / engine, 2, engine=engine, **EMPTY)), strict=True)
        for pair in pairs:
            tokens = [step["tokens"] for step in pair]
            busy = max(len(one) for one in tokens)
            for own in tokens:
                if max(own) == 1:
                    idle += 1
                    assert own == [1] * (busy if engine == "fsdp2" else 1), "every forward gathers; one all-reduce"
    assert idle >= 12, "of two processes one has nothing in each of six steps, under both engines"


@pytest.mark.parametrize(("engine", "processes"), [("auto", 1), ("ddp", 2), ("fsdp2", 2)])
def test_activations_are_made_again_under_every_engine(engine: str, processes: int, crew: Crew, tmp_path: Path) -> None:
    kept, again = (
        told(crew, tmp_path / str(on), processes, engine=engine, optimisation__gradient_checkpointing=on)
        for on in (False, True)
    )
    assert all(step["again"] == 0 for one in kept for step in one["steps"])
    count, *_ = layers()
    for one in again:
        for step in one["steps"]:
            assert step["again"] == count * sum(size > 1 for size in step["tokens"] or [2] * step["rounds"])
    assert largest_difference(tmp_path / "False", tmp_path / "True") <= ALIKE


def test_shards_in_host_memory_in_one_process(crew: Crew, tmp_path: Path) -> None:
    told(crew, tmp_path / "one", 1)
    told(crew, tmp_path / "shards", 1, engine={"name": "fsdp2", "offload": True})
    assert about(tmp_path / "shards")["engine"] == "fsdp2, 1 process, shards in host memory"
    assert largest_difference(tmp_path / "one", tmp_path / "shards") <= ALIKE
