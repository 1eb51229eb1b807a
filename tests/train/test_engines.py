"""Engines: several processes under each train to the weights of one, and go on from each other's checkpoints."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlstab.train.policy import load_policy
from tests.train.crews import Crew
from tests.train.runs import about, file_of, largest_difference, records, small, weights, without_times

STACK = [{"preset": "recommended"}, {"name": "lp_reg", "share": 0.2}, "entropy_bonus"]

#: Six optimizer steps on two prompts each, in several forwards. With a larger eps AdamW is smooth where a gradient is
#: next to nothing; else rounding would decide the sign of a step there.
SIX = {
    "seed": 3,
    "rollout__prompts": 6,
    "rollout__max_new_tokens": 12,
    "optimisation__rollouts": 2,
    "optimisation__mini_batches": 3,
    "optimisation__micro_batch_size": 3,
    "optimisation__lr": 1e-3,
    "optimisation__eps": 1e-4,
    "optimisation__max_grad_norm": 0.1,
}
#: What issue and documents promise of the largest difference between weights.
ALIKE = 1e-5


@pytest.fixture(scope="module")
def alone(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    crew.does(file_of(small(out, STACK, **SIX)), 1, "refused")
    return out


@pytest.mark.parametrize(
    ("engine", "processes"),
    [
        ("fsdp2", 2),
        *(
            pytest.param(engine, processes, marks=pytest.mark.slow)
            for engine in ("ddp", "fsdp2")
            for processes in (1, 2, 3)
            if (engine, processes) != ("fsdp2", 2)
        ),
    ],
)
def test_they_train_to_the_weights_of_one_process(
    engine: str, processes: int, crew: Crew, alone: Path, tmp_path: Path
) -> None:
    """Gradients are clipped, a step is refused, and in some steps a rank has no response."""
    out = tmp_path / "run"
    done = crew.does(file_of(small(out, STACK, **SIX, engine=engine)), processes, "refused")
    shares = [re.search("responses in each step: (.*)", said)[1].split() for said in done.said]
    assert [sum(map(int, step)) for step in zip(*shares, strict=True)] == [8] * 6
    assert processes == 1 or any("0" in step for step in shares), "a rank is empty"
    assert about(out)["processes"] == processes
    assert about(out)["engine"].startswith(engine if (engine, processes) != ("ddp", 1) else "one process")
    told = without_times(out)
    assert [one.get("optimizer_steps/refused", 0) for one in told] == [1, 0]
    assert all(one["gradient/norm"] > SIX["optimisation__max_grad_norm"] for one in told), "clipped"
    apart = largest_difference(alone, out)
    print(f"{about(out)['engine']}: largest difference {apart:.1e}")
    assert apart <= ALIKE
    start, end = load_policy("countdown-tiny").model.state_dict(), weights(out)
    assert max(float((start[name] - one).abs().max()) for name, one in end.items()) > 100 * ALIKE


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary head of its own; that of the model that ships is tied to the embeddings."""
    folder = tmp_path_factory.mktemp("untied")
    policy = load_policy("countdown-tiny")
    assert policy.model.config.tie_word_embeddings
    settings = {**policy.model.config.to_diff_dict(), "tie_word_embeddings": False, "num_hidden_layers": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "adapter"])
def test_an_untied_head_and_an_adapter_train_as_in_one_process(
    kind: str, crew: Crew, untied: Path, tmp_path: Path
) -> None:
    if kind == "adapter":
        pytest.importorskip("peft", reason='peft is not installed: pip install -e ".[lora]"')
    model = {"model__name": str(untied)} if kind == "untied" else {"model__adapter": {"r": 4, "alpha": 8}}
    settings = {**SIX, **model, "tracking__checkpoint_every": 1}
    objective = [*STACK, {"name": "kl", "coefficient": 0.1}]
    crew.does(file_of(small(tmp_path / "one", objective, **settings)), 1, "refused")
    for engine in ("ddp", "fsdp2"):
        for processes in (2, 3):
            out = tmp_path / f"{engine}{processes}"
            crew.does(file_of(small(out, objective, **settings, engine=engine)), processes, "refused")
            assert (about(out)["processes"], about(out)["engine"].split(",")[0]) == (processes, engine)
            assert largest_difference(tmp_path / "one", out) <= ALIKE
    out = tmp_path / "gone on"
    for engine, processes, scenario in (("fsdp2", 2, "halfway"), ("auto", 1, "resumed")):
        crew.does(file_of(small(out, objective, **settings, engine=engine)), processes, scenario)
    crew.does(file_of(small(tmp_path / "whole", objective, **settings)), 1)
    assert largest_difference(tmp_path / "whole", out) <= ALIKE
    assert ("lora_" in "".join(weights(out))) == (kind == "adapter")
    assert ("lm_head.weight" in weights(out)) == (kind == "untied")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all weights", "adapter"])
@pytest.mark.parametrize("lr", [1e-5, 2e-4])
def test_with_the_default_eps_rounding_decides_little(lr: float, kind: str, crew: Crew, tmp_path: Path) -> None:
    """Several processes change what another size of micro-batches changes in one: the order of sums.

    A gradient of about 0 becomes a step of any length, and a token on a threshold is selected or not.
    """
    settings: dict[str, Any] = {**SIX, "optimisation__lr": lr}
    del settings["optimisation__eps"]
    objective = STACK
    if kind == "adapter":
        pytest.importorskip("peft", reason='peft is not installed: pip install -e ".[lora]"')
        settings["model__adapter"], objective = {"r": 4, "alpha": 8}, [*STACK, {"name": "kl", "coefficient": 0.1}]
    others = [("auto", 1, size) for size in (2, 6)]
    others += [(engine, processes, 3) for engine in ("ddp", "fsdp2") for processes in (2, 3)]
    for seed in (3, 4):
        settings["seed"] = seed
        run = small(tmp_path / f"one{seed}", objective, **settings)
        assert run.optimisation.eps == 1e-8
        crew.does(file_of(run), 1, "refused")
        one = weights(tmp_path / f"one{seed}")
        for engine, processes, size in others:
            out = tmp_path / f"{engine}{processes}{size}{seed}"
            run = small(out, objective, **{**settings, "optimisation__micro_batch_size": size}, engine=engine)
            crew.does(file_of(run), processes, "refused")
            assert about(out)["processes"] == processes
            apart = torch.cat([(one[name] - values).abs().flatten() for name, values in weights(out).items()])
            far, count = int((apart > ALIKE).sum()), apart.numel()
            share = float(apart.norm()) / (6 * lr * count**0.5)  # of the way that six full steps go
            print(f"{kind}, lr {lr}, seed {seed}, {about(out)['engine']}, micro-batches of {size}: largest", end=" ")
            print(f"{apart.max():.1e}, {far} of {count} over {ALIKE}, {share:.1e} of six steps")
            assert share <= 0.01
            if lr == 1e-5:
                assert far == 0


# -- what one left and another goes on from --------------------------------------------------------------------------

#: Rollouts wait in a queue, and the objective has a state.
LEFT = {**SIX, "optimisation__rollouts": 4, "tracking__checkpoint_every": 2, "rollout__staleness": 1}
STATES = [*STACK[:2], {"name": "adaptive_entropy", "increment": 0.001, "target_entropy": 0.5}]


@pytest.fixture(scope="module")
def whole(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    crew.does(file_of(small(out, STATES, **LEFT)), 1)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp2", 2), ("auto", 1)),
        (("auto", 1), ("fsdp2", 2)),
        (("fsdp2", 2), ("fsdp2", 3)),
        (("ddp", 2), ("fsdp2", 3)),
        (("ddp", 3), ("auto", 1)),
        (("fsdp2", 3), ("ddp", 2)),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_number_of_processes(
    before: tuple[str, int], after: tuple[str, int], crew: Crew, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for (engine, processes), scenario in ((before, "halfway"), (after, "resumed")):
        crew.does(file_of(small(out, STATES, **LEFT, engine=engine)), processes, scenario)
        assert about(out)["processes"] == processes
        assert about(out)["engine"].startswith("one process" if engine == "auto" else engine)
    assert [one["rollout"] for one in without_times(out)] == [1, 2, 3, 4]
    assert largest_difference(whole, out) <= ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_after_the_kill_of_a_rank_all_end_and_the_run_goes_on(engine: str, crew: Crew, tmp_path: Path) -> None:
    """Five random moments for each engine; what is left at the end is, bit for bit, what an undisturbed run leaves."""
    settings = {**LEFT, "optimisation__rollouts": 8, "engine": engine}
    crew.does(file_of(small(tmp_path / "undisturbed", STATES, **settings)), 2)
    pace = min(one["seconds/rollout"] for one in records(tmp_path / "undisturbed"))
    chance, slowest = random.Random(14), 0.0
    for number in range(5):
        out = tmp_path / f"run{number}"
        file, moment = file_of(small(out, STATES, **settings)), (chance.randrange(6), pace * chance.random())
        done = crew.tries(file, 2, victim=number % 2, lines=moment[0], after=moment[1])
        assert done.codes[number % 2] == -signal.SIGKILL
        assert done.codes[1 - number % 2] == 1, "\n".join(done.said)
        slowest = max(slowest, done.seconds)
        crew.does(file, 2, "resumed")
        assert about(out)["processes"] == 2
        left, right = weights(tmp_path / "undisturbed"), weights(out)
        assert all(torch.equal(left[name], right[name]) for name in left | right)
        assert without_times(out) == without_times(tmp_path / "undisturbed")
    print(f"{engine}: the others ended within {slowest:.2f} s")
    assert slowest <= 30, "what the page on several processes promises"


@pytest.mark.slow
def test_a_rank_that_reaches_no_collective_ends_too(crew: Crew, tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run"))
    done = crew.tries(file, 2, "busy", victim=1, lines=1, after=2.0)
    assert done.codes == [1, -signal.SIGKILL]
    assert "rank 1 of 2 ended without a word, as one that is killed does; rank 0 ends too" in done.said[0]
    assert 10 <= done.seconds <= 30
    crew.does(file, 2, "resumed")


# -- what needs whole weights, and other settings --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"stages": ["opob"]}, id="gradients of responses"),
        pytest.param({"stages": [{"name": "goldilocks", "pool": 24}]}, id="features of prompts"),
        pytest.param({"rollout__precision": "int8"}, id="a rounded sampler"),
        pytest.param({"objective": ["clip_higher", "kl"]}, id="a reference policy"),
        pytest.param({"optimisation__gradient_checkpointing": True}, id="checkpointed gradients"),
        pytest.param({"optimisation__gradient_checkpointing": True, "engine": "ddp"}, id="the same with whole weights"),
        pytest.param({"optimisation__refresh": "step"}, id="evidence of each step"),
        pytest.param({"engine": {"name": "fsdp2", "offload": True}}, id="shards in host memory"),
    ],
)
def test_with_shards_everything_works_as_in_one_process(changes: dict[str, Any], crew: Crew, tmp_path: Path) -> None:
    changes = {"objective": STACK, **SIX, **changes}
    engine = changes.pop("engine", "fsdp2")
    stages = {"stages": changes.pop("stages")} if "stages" in changes else {}
    crew.does(file_of(small(tmp_path / "one", **changes, **stages)), 1)
    crew.does(file_of(small(tmp_path / "two", **changes, **stages, engine=engine)), 2)
    assert (about(tmp_path / "one")["engine"], about(tmp_path / "two")["processes"]) == ("one process", 2)
    name = engine if isinstance(engine, str) else engine["name"]
    assert about(tmp_path / "two")["engine"].startswith(f"{name}, 2 processes")
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= ALIKE


@pytest.mark.slow
def test_gathered_in_bfloat16_weights_are_learnt_in_float32(crew: Crew, tmp_path: Path) -> None:
    """Forwards are coarse; what the optimizer adds up is not rounded to bfloat16."""
    settings = {**SIX, "optimisation__precision": "bf16"}
    crew.does(file_of(small(tmp_path / "one", STACK, **settings)), 1)
    for gather in ("fp32", "bf16"):
        engine = {"name": "fsdp2", "gather": gather}
        crew.does(file_of(small(tmp_path / gather, STACK, **settings, engine=engine)), 2)
    assert about(tmp_path / "bf16")["engine"] == "fsdp2, 2 processes, weights gathered in bfloat16"
    start, end = load_policy("countdown-tiny").model.state_dict(), weights(tmp_path / "bf16")
    assert all(one.dtype == torch.float32 for one in end.values())
    assert any(not torch.equal(one, one.bfloat16().float()) for one in end.values())
    moved = max(float((start[name] - one).abs().max()) for name, one in end.items())
    coarse = largest_difference(tmp_path / "one", tmp_path / "bf16")
    print(f"moved {moved}, autocast in shards {largest_difference(tmp_path / 'one', tmp_path / 'fp32')}, bf16 {coarse}")
    assert ALIKE < coarse < moved, "it rounds more than autocast, and learns the same"
