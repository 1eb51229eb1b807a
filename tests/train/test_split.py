"""A run is the same however it is cut: into micro-batches, over ranks, by engine; and what ranks send and hold."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.train import own
from tests.train.forks import Forks
from tests.train.runs import (
    ALIKE,
    SMOOTH,
    STAGED,
    about,
    apart,
    checkpoints,
    file_of,
    first_layers,
    go,
    metrics,
    moved,
    of_user,
    small,
    weights,
)

#: Statistics over the step and penalties. Not a share of the tokens: many are equally probable but for rounding.
STACK = [{"preset": "recommended"}, "adaptive_entropy", "entropy_bonus"]
WITH_KL = [*STACK, {"name": "kl", "coefficient": 0.1}]

#: Three optimizer steps on one prompt each, so that one of two ranks is empty in each of them. With a larger eps
#: rounding does not decide the sign of a step where a gradient is next to nothing.
STEPS: dict[str, Any] = {
    "seed": 4,
    "model__name": str(first_layers(2)),
    "rollout__prompts": 3,
    "rollout__max_new_tokens": 6,
    "optimisation__rollouts": 1,
    "optimisation__mini_batches": 3,
    "optimisation__micro_batch_size": 3,
    "optimisation__eps": 1e-4,
    "optimisation__max_grad_norm": 0.1,
}
ADAPTER = {"model__adapter": {"r": 4, "alpha": 8}}
UNTIED = {"model__name": "untied"}  # in the folder of a test


@pytest.mark.parametrize(
    "options",
    [
        {"optimisation__mini_batches": 2, "optimisation__refresh": "step", "optimisation__old_logprobs": "rollout"},
        {"optimisation__epochs": 2, "optimisation__old_logprobs": "recompute", "rollout__temperature": 0.8},
    ],
    ids=["refresh", "epochs"],
)
def test_the_cut_into_micro_batches_does_not_matter(options: dict[str, Any], tmp_path: Path) -> None:
    for size in (16, 3):
        changes = {**SMOOTH, **options, "optimisation__micro_batch_size": size}
        go(small(tmp_path / str(size), STACK, rollout__prompts=4, **changes))
    assert moved(tmp_path / "16") > 10 * ALIKE
    assert apart(tmp_path / "16", tmp_path / "3") <= ALIKE
    for mine, theirs in zip(metrics(tmp_path / "16"), metrics(tmp_path / "3"), strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in mine.items()}


#: Rows of a matrix that processes do not share evenly: some hold or send this little more, or less.
FILLED = 1e-2


def begun() -> dict[str, Tensor]:
    """The weights from which runs start."""
    return load_file(first_layers(2) / "model.safetensors")


def parameters() -> int:
    return sum(value.numel() for value in begun().values())


def large(sent: list[Any], kind: str) -> int:
    """Elements of weights and gradients that collectives of a kind sent; statistics of a step are float64 or few."""
    return sum(size for name, size, dtype in sent if kind in name and dtype in ("float32", "bfloat16") and size > 64)


def counted(forks: Forks, out: Path, processes: int, **changes: Any) -> list[dict[str, Any]]:
    run = small(out, STACK, **{**STEPS, **changes})
    told = forks.does(file_of(run), processes, "counted").counted
    assert [rank["processes"] for rank in told] == [processes] * processes
    assert [len(rank["steps"]) for rank in told] == [3] * processes
    return list(told)


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one") / "run"
    (told,) = counted(forks, out, 1)
    assert about(out)["processes"] == 1
    return out, told


MANY = [("ddp", 3), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3)]


@pytest.mark.parametrize(
    ("engine", "processes"), [("ddp", 2), *(pytest.param(*many, marks=pytest.mark.slow) for many in MANY)]
)
def test_processes_train_to_the_weights_of_one(
    engine: str, processes: int, forks: Forks, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Gradients are clipped, and in every step a rank has no response. What ranks send and hold is counted."""
    out, size = tmp_path / "run", parameters()
    ranks = counted(forks, out, processes, engine=engine)
    assert (about(out)["processes"], about(out)["engine"].split(",")[0]) == (processes, engine)
    records = metrics(out)
    assert all(record["gradient/norm"] > STEPS["optimisation__max_grad_norm"] for record in records), "clipped"
    assert apart(alone[0], out) <= ALIKE
    assert moved(out) > 100 * ALIKE
    assert [large(step["sent"], "") for step in alone[1]["steps"]] == [0] * 3, "one process sends no gradient"
    for told in [alone[1], *ranks]:
        share = processes if told is not alone[1] and engine == "fsdp2" else 1
        for step in told["steps"]:
            for name, bytes_of_each in {"weights": 4, "gradients": 4, "moments": 8}.items():
                assert step[name] == pytest.approx(bytes_of_each * size / share, rel=FILLED * (share > 1))
    for told in ranks:
        for step in told["steps"][1:]:  # before the first one, weights are sent too
            summed = {name: large(step["sent"], name) for name in ("allreduce", "reducescatter", "allgather")}
            if engine == "ddp":
                assert summed == {"allreduce": size, "reducescatter": 0, "allgather": 0}, "gradients, once"
            elif processes > 1:
                assert summed["allreduce"] == 0
                assert min(summed["reducescatter"], summed["allgather"]) > 0.4 * size


CASES: dict[str, tuple[Any, dict[str, Any], str | dict[str, Any]]] = {
    "an adapter, a reference": (WITH_KL, ADAPTER, "fsdp2"),
    "an adapter under ddp": (WITH_KL, ADAPTER, "ddp"),
    "a reference": (WITH_KL, {}, "fsdp2"),
    "stages and a queue": (
        STAGED["objective"],
        {"optimisation__rollouts": 2, **{name: STAGED[name] for name in STAGED if name != "objective"}},
        "fsdp2",
    ),
    "gradients of responses": (STACK, {"stages": ["opob"]}, "fsdp2"),
    "a rounded sampler": (STACK, {"rollout__precision": "int8"}, "fsdp2"),
    "checkpointed gradients": (STACK, {"optimisation__gradient_checkpointing": True}, "fsdp2"),
    "the same under ddp": (STACK, {"optimisation__gradient_checkpointing": True}, "ddp"),
    "evidence of each step": (STACK, {"optimisation__refresh": "step"}, "fsdp2"),
    "shards in host memory": (STACK, {}, {"name": "fsdp2", "offload": True}),
    "an evaluation": (STACK, {"evaluation__every": 1, "evaluation__prompts": 3}, "ddp"),
    "a teacher": ([*STACK, {"name": "distill", "beta": 0.5}], {}, "fsdp2"),
    "likely tokens of a teacher": ([{"name": "distill", "top_k": 4}], {"optimisation__epochs": 2}, "ddp"),
    "the sampler as teacher": (
        [{"name": "distill", "beta": 0.3}],
        {"model__teacher": "sampler", "optimisation__epochs": 2},
        "fsdp2",
    ),
    "an adapter, a teacher": ([{"name": "distill", "beta": 0.0}], {**ADAPTER, "optimisation__epochs": 2}, "fsdp2"),
    "an untied head": (WITH_KL, UNTIED, "fsdp2"),
    "an untied head under ddp": (WITH_KL, UNTIED, "ddp"),
}


def untie(folder: Path) -> None:
    """The model from which runs start, with a head of its own."""
    shutil.copytree(first_layers(2), folder)
    given = begun()
    given["lm_head.weight"] = given["model.embed_tokens.weight"].clone()
    save_file(given, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "an adapter, a reference" else [pytest.mark.slow]) for name in CASES],
)
def test_everything_works_over_two_processes_as_in_one(name: str, forks: Forks, tmp_path: Path) -> None:
    objective, changes, engine = CASES[name]
    settings = {**STEPS, **changes}
    if changes is UNTIED:
        settings["model__name"] = str(tmp_path / "untied")
        untie(tmp_path / "untied")
    go(small(tmp_path / "one", objective, **settings))
    forks.does(file_of(small(tmp_path / "two", objective, **settings, engine=engine)), 2)
    assert [about(tmp_path / out)["processes"] for out in ("one", "two")] == [1, 2]
    assert apart(tmp_path / "one", tmp_path / "two") <= ALIKE
    saved = "".join(weights(tmp_path / "two"))
    assert ["lora_" in saved, "lm_head" in saved] == ["model__adapter" in changes, changes is UNTIED]
    for mine, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        held_out = {key: value for key, value in mine.items() if key.startswith("eval/")}
        assert {key: theirs[key] for key in held_out} == pytest.approx(held_out, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_layers_are_recomputed_under_each_engine(engine: str, forks: Forks, tmp_path: Path) -> None:
    run = small(tmp_path / "run", engine=engine, optimisation__gradient_checkpointing=True)
    assert forks.does(file_of(run), 1, "recomputed").counted[0] > 0


@pytest.mark.slow
def test_gathered_in_bfloat16_weights_are_learnt_and_gradients_added_in_float32(forks: Forks, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**STEPS, "optimisation__precision": "bf16"}
    go(small(tmp_path / "one", STACK, **settings))
    for told in counted(forks, tmp_path / "two", 2, **settings, engine={"name": "fsdp2", "gather": "bf16"}):
        for step in told["steps"]:
            assert {dtype for name, size, dtype in step["sent"] if "reducescatter" in name} == {"float32"}
            assert "bfloat16" in {dtype for name, size, dtype in step["sent"] if "allgather" in name}
            assert step["weights"] == pytest.approx(4 * parameters() / 2, rel=FILLED)
    end = weights(tmp_path / "two")
    assert all(value.dtype == torch.float32 for value in end.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in end.values())
    assert ALIKE < apart(tmp_path / "one", tmp_path / "two") < moved(tmp_path / "two")


@pytest.mark.slow
def test_functions_of_the_user_on_two_ranks_equal_those_on_one(forks: Forks, tmp_path: Path) -> None:
    """Each rank is asked for whole groups, and not at all where it has no response."""
    objective = ["clip_higher", of_user("WeighPlaces", signal="places")]
    settings = {**STEPS, "rollout__prompts": 1, "optimisation__mini_batches": 1, "optimisation__rollouts": 2}
    alone, both = (small(tmp_path / name, objective, **settings) for name in ("one", "two"))
    go(alone, signals={"places": own.places})
    done = forks.does(file_of(both), 2, "provided")
    assert [told["processes"] for told in done.counted] == [2, 2]
    assert sorted(told["calls"] for told in done.counted) == [[], [[4], [4]]]
    assert apart(tmp_path / "one", tmp_path / "two") <= ALIKE
    assert moved(tmp_path / "two") > 10 * ALIKE


def test_a_step_with_a_nan_on_one_rank_is_refused_by_all_and_the_next_one_is_made(forks: Forks, tmp_path: Path) -> None:
    settings = {**STEPS, "optimisation__mini_batches": 1, "optimisation__rollouts": 2, "tracking__checkpoint_every": 1}
    outs = [tmp_path / "1", tmp_path / "2"]
    alone, both = (small(out, ["clip_higher", of_user("Poisoned")], **settings) for out in outs)
    go(alone, signals={"poison": own.poison})
    assert [told["processes"] for told in forks.does(file_of(both), 2, "provided").counted] == [2, 2]
    for out in outs:
        assert [record.get("optimizer_steps/refused", 0) for record in metrics(out)] == [1, 0]
        assert all(math.isfinite(value) for record in metrics(out) for value in record.values())
        refused = load_file(checkpoints(out)[0] / "model.safetensors")
        assert all(torch.equal(value, refused[name]) for name, value in begun().items())
    assert apart(*outs) <= ALIKE
    assert moved(outs[1]) > 10 * ALIKE


@pytest.mark.slow
def test_of_an_adapter_only_its_gradients_are_sent(forks: Forks, tmp_path: Path) -> None:
    for told in counted(forks, tmp_path / "ddp", 2, engine="ddp", **ADAPTER):
        trained = sum(value.numel() for value in weights(tmp_path / "ddp").values())
        assert 0 < trained < parameters() / 10
        for step in told["steps"][1:]:
            assert step["moments"] == 8 * trained
            assert large(step["sent"], "allreduce") == trained
    for told in counted(forks, tmp_path / "fsdp2", 2, engine="fsdp2", **ADAPTER):
        assert all(step["moments"] == pytest.approx(4 * trained, rel=0.02) for step in told["steps"])
