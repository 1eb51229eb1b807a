"""What a run computes, logs and leaves, each against transformers, torch or a run of another shape."""

import importlib.util
import inspect
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    get_scheduler,
)

import rlstab
from rlstab.errors import MissingSignal, ModelError, NonFinite
from rlstab.explain.costs import costs
from rlstab.look.gradient import traces_of
from rlstab.models.policy import load_policy
from rlstab.models.sampler_weights import Sampler
from rlstab.preflight import preflight
from rlstab.presets import PRESETS
from rlstab.record import read_dump
from tests.train import own
from tests.train.runs import (
    ADAPTER,
    ALIKE,
    SHIPPED,
    SMOOTH,
    about,
    apart,
    checkpoints,
    column,
    first_layers,
    go,
    lines,
    metrics,
    moved,
    number,
    of_user,
    printed,
    quiet,
    small,
    weights,
)

#: Between what the sampler or a trace says of a token and a forward of the model alone, in float32.
NEAR = 1e-4


# -- what is left ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_settings_records_samples_and_a_model_that_transformers_loads(tmp_path: Path) -> None:
    every = {"every": 2, "prompts": 4, "samples": 4, "pass_at": [1, 4]}
    run = small(tmp_path, optimisation__rollouts=3, evaluation=every, tracking__keep_checkpoints=1)
    console = quiet()
    result = go(run, console=console)
    assert rlstab.config.load_run(tmp_path / "config.yaml") == run
    assert about(tmp_path)["run_hash"] == rlstab.config.run_hash(run)
    assert about(tmp_path)["objective_hash"] == rlstab.config.objective_hash(run.composition)
    assert about(tmp_path)["processes"] == 1
    assert (result.out, result.records) == (tmp_path, lines(tmp_path / "metrics.jsonl"))
    assert [record["rollout"] for record in result.records] == [0, 1, 2, 3]
    assert [record["rollout"] for record in result.evaluations] == [0, 2, 3]
    for record in result.evaluations:
        assert 0 <= record["eval/pass@1"] <= record["eval/pass@4"] <= 1
    for record in result.records[1:]:
        assert {"loss", "gradient/norm", "reward/mean", "tokens/entropy", "response/length", "lr"} <= record.keys()
        assert {"seconds/rollout", "seconds/sample", "seconds/score", "seconds/train"} <= record.keys()
    assert Counter(column(lines(tmp_path / "samples.jsonl"), "rollout")) == {1: 2, 2: 2, 3: 2}
    told = printed(console).splitlines()[-5:]
    assert [line.partition(":")[0] for line in told] == ["rose", "fell", "stood out", "folder", "next"]
    assert told[3:] == [f"folder: {tmp_path} (every metric: rlstab report {tmp_path})", f"next: rlstab look {tmp_path}"]
    (newest,) = checkpoints(tmp_path)
    assert number(newest) == 3
    model, tokenizer = AutoModelForCausalLM.from_pretrained(newest), AutoTokenizer.from_pretrained(newest)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights(tmp_path).items())
    assert tokenizer("1+2")["input_ids"] == AutoTokenizer.from_pretrained(SHIPPED)("1+2")["input_ids"]


def test_trackers_write_beside_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wandb, which takes seconds to import and to start, only what it is told."""
    pytest.importorskip("tensorboard")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    wandb = MagicMock()
    wandb.api.api_key, wandb.__spec__ = None, importlib.util.find_spec("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (record,) = go(small(tmp_path, tracking__trackers=["tensorboard", "wandb"], optimisation__rollouts=1)).records
    assert any(b"reward/mean" in path.read_bytes() for path in tmp_path.rglob("events.out.tfevents*"))
    told = wandb.init.call_args.kwargs
    assert (told["id"], told["resume"], told["mode"]) == (about(tmp_path)["run_id"], "allow", "offline")
    (logged,) = (call.args[0] for call in wandb.init().log.call_args_list)
    assert logged["reward/mean"] == record["reward/mean"]


@pytest.mark.slow
def test_wandb_has_one_run_however_often_it_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for rollouts in (1, 2):
        trackers = {"tracking__trackers": ["wandb"], "optimisation__rollouts": rollouts}
        go(small(tmp_path, **trackers), resume=rollouts == 2)
    folders = list(tmp_path.rglob("offline-run-*"))  # it is offline unless it is configured
    assert len(folders) == 2
    assert {folder.name.rpartition("-")[2] for folder in folders} == {about(tmp_path)["run_id"]}


#: Masks, and stages with a stale sampler.
OFTEN = {"recommended", "stack_stale"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in sorted(PRESETS)]
)
def test_every_preset_trains(name: str, tmp_path: Path) -> None:
    changes = {"optimisation__mini_batches": 2, "optimisation__epochs": 2}
    # a teacher that is the start and reads what the policy reads teaches nothing at first
    changes |= {"model__teacher_prompt": "1+2"}
    # enough tokens for some responses to end by themselves
    records = go(small(tmp_path, {"preset": name}, rollout__max_new_tokens=24, **changes)).records
    assert [record["rollout"] for record in records] == [1, 2]
    assert all(math.isfinite(value) for record in records for value in record.values())
    assert moved(tmp_path) > 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with nothing but what :func:`small` sets."""
    out = tmp_path_factory.mktemp("plain") / "run"
    go(small(out))
    return out


# -- which steps are made --------------------------------------------------------------------------------------------


def test_the_ratio_is_exactly_one_where_the_policy_is_live_and_moves_where_data_are_stale(
    plain: Path, tmp_path: Path
) -> None:
    live = metrics(plain)
    assert column(live, "ratio/mean") == [1.0] * 2
    assert max(column(live, "sampler/largest_gap_live")) <= NEAR
    for name, changes in {"epochs": {"optimisation__epochs": 3}, "queue": {"rollout__staleness": 1}}.items():
        stale = go(small(tmp_path / name, **changes)).records
        assert max(abs(ratio - 1) for ratio in column(stale, "ratio/mean")) > 1e-3, name


def test_a_step_that_teaches_nothing_is_skipped_unless_a_penalty_acts(tmp_path: Path) -> None:
    records = go(small(tmp_path / "plain", task=of_user("Equal"))).records
    assert column(records, "optimizer_steps/skipped") == [1, 1]
    assert moved(tmp_path / "plain") == 0
    paid = small(tmp_path / "paid", ["clip_higher", "entropy_bonus"], task=of_user("Equal"))
    assert all(norm > 0 for norm in column(go(paid).records, "gradient/norm"))
    assert moved(tmp_path / "paid") > 0


def test_twenty_refused_steps_in_a_row_end_a_run(tmp_path: Path) -> None:
    few = {"rollout__prompts": 1, "rollout__max_new_tokens": 1, "optimisation__rollouts": 30}
    lost = small(tmp_path, ["clip_higher", of_user("Poisoned")], **few)
    with pytest.raises(NonFinite, match="20 optimizer steps"):
        go(lost, signals={"poison": lambda rollout: own.places(rollout).nan_to_num() * 0 + 1})
    assert sum(column(lines(tmp_path / "metrics.jsonl"), "optimizer_steps/refused")) == 19


def test_the_learning_rate_is_that_of_transformers_and_a_run_of_another_length_is_told(tmp_path: Path) -> None:
    cosine = {"name": "cosine_with_min_lr", "min_lr_rate": 0.1}
    changes: dict[str, Any] = {"optimisation__warmup_optimizer_steps": 2, "rollout__max_new_tokens": 2}
    run = small(tmp_path / "cosine", optimisation__schedule=cosine, optimisation__rollouts=6, **changes)
    shown = {record["rollout"]: record["lr"] for record in go(run).records if "lr" in record}
    assert len(shown) >= 4
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    (factor,) = get_scheduler(
        cosine["name"], optimizer, 2, 6, scheduler_specific_kwargs={"min_lr_rate": 0.1}
    ).lr_lambdas
    assert shown == {step: pytest.approx(1e-3 * factor(step - 1)) for step in shown}
    go(small(tmp_path / "constant", optimisation__schedule="constant_with_warmup", **changes))
    for name, schedule, before in (("cosine", cosine, 6), ("constant", "constant_with_warmup", 2)):
        console, length = quiet(), {"optimisation__rollouts": before + 1}
        go(small(tmp_path / name, optimisation__schedule=schedule, **length, **changes), resume=True, console=console)
        text = printed(console)
        assert ("the schedule" in text) == (name == "cosine"), name
        assert ("had 6 rollouts and has 7" in text) == (name == "cosine"), name


def test_what_user_code_sets_for_all_of_torch_changes_nothing(plain: Path, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    go(small(tmp_path / "set", task=of_user("Graded")))
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
    assert metrics(tmp_path / "set") == metrics(plain)


def test_the_first_lines_say_what_the_reference_is(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    penalised = ["clip_higher", {"name": "kl", "coefficient": 0.1}]
    console, changes = quiet(), {**ADAPTER, "optimisation__rollouts": 1}
    go(small(tmp_path / "sft", **changes))
    (adapter,) = checkpoints(tmp_path / "sft")
    continued = small(tmp_path / "run", penalised, model__adapter=str(adapter), optimisation__rollouts=1)
    (record,) = go(continued, console=console).records
    assert record["kl/value"] > 0, "the reference is the model without its adapter"
    said = printed(console)
    for text in (said, *costs(continued.composition, continued)[:1]):
        assert "without the adapter: no second model in memory" in text
        assert "the KL begins above 0" in text
    whole = small(tmp_path / "whole", penalised)
    assert "The weights at the start: a second model in memory" in costs(whole.composition, whole)[0]
    for refuse in (preflight, go):
        with pytest.raises(ModelError, match=r"is an adapter.*model\.reference"):
            refuse(small(tmp_path / "refused", penalised, model__reference=str(adapter)))


def test_a_signal_that_nobody_provides_is_told_before_anything_runs(tmp_path: Path) -> None:
    run = small(tmp_path / "run", ["clip_higher", of_user("WeighPlaces", signal="gradient_norms")])
    with pytest.raises(MissingSignal, match="gradient_norms"):
        go(run)
    assert not (tmp_path / "run").exists()


# -- what is sampled -------------------------------------------------------------------------------------------------

TRACED: dict[str, Any] = {"tracking__dump_every": 1, "optimisation__rollouts": 1}


def traced(out: Path) -> list[dict[str, Any]]:
    """The recorded responses of the first optimizer step."""
    step = read_dump(out).steps[0]
    lengths, tensors = step.tensors["lengths"].tolist(), step.tensors
    columns = {name: tensors[name].split(lengths) for name in ("ids", "logprobs", "entropies")}
    known = {"sequence_id": tensors["sequence_ids"], "prompt": step.prompts}
    return [{name: values[row].tolist() for name, values in (columns | known).items()} for row in range(len(lengths))]


def assert_of_model(out: Path, model: Any, tokenizer: Any, temperature: float) -> int:
    """The log-probs and entropies of a trace are those of a forward over each response alone; how many there were."""
    count, eos = 0, tokenizer.eos_token_id
    for line in traced(out):
        assert eos not in line["ids"][:-1]
        prompt = line["prompt"]
        ids = torch.tensor([prompt + line["ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        logprobs = logits.log_softmax(-1)
        mine = logprobs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
        assert line["logprobs"] == pytest.approx(mine.tolist(), rel=NEAR, abs=NEAR)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        assert line["entropies"] == pytest.approx(entropies.tolist(), rel=NEAR, abs=NEAR)
        count += len(line["ids"])
    return count


def test_traces_say_of_each_token_what_the_model_says_of_it(tmp_path: Path) -> None:
    whole = {"model__name": "countdown-tiny", "rollout__temperature": 0.7, "rollout__max_new_tokens": 12}
    go(small(tmp_path, **whole, **TRACED))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(SHIPPED), AutoTokenizer.from_pretrained(SHIPPED)
    assert assert_of_model(tmp_path, model, tokenizer, 0.7) > 50
    ended = [line["ids"][-1] == tokenizer.eos_token_id for line in traced(tmp_path)]
    assert 0 < sum(ended) < 8
    assert all(end or len(line["ids"]) == 12 for end, line in zip(ended, traced(tmp_path), strict=True))


SIZE: dict[str, Any] = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SIZE |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 19}
#: Positions that are learnt, caps on logits and windows, norms of heads, a scaled head, experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 29, "n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 19},
    "gemma2": {**SIZE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "qwen3": {**SIZE, "head_dim": 8, "tie_word_embeddings": True},
    "granite": {**SIZE, "logits_scaling": 3.0},
    "mixtral": {**SIZE, "num_local_experts": 4, "output_router_logits": True},
    "qwen2_moe": {**SIZE, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    | {"output_router_logits": True, "decoder_sparse_step": 1},
}


def made(folder: Path, family: str, **settings: Any) -> PreTrainedModel:
    """A model with random weights that minds its tokens, saved with the tokenizer that ships."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    for value in model.parameters():
        value.data.mul_(4.0 if value.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt2", "gemma2", "mixtral"))) for name in FAMILIES],
)
def test_models_of_other_families_are_sampled_and_trained_as_transformers_computes_them(
    family: str, tmp_path: Path
) -> None:
    changes = {"rollout__max_new_tokens": 10, "optimisation__micro_batch_size": 8, **TRACED}
    model = made(tmp_path / "model", family, **FAMILIES[family])
    (record,) = go(small(tmp_path / "run", model__name=str(tmp_path / "model"), **changes)).records
    tokens = assert_of_model(tmp_path / "run", model, AutoTokenizer.from_pretrained(SHIPPED), 1.0)
    assert tokens == sum(len(line["ids"]) for line in traced(tmp_path / "run")) > 20
    assert record["sampler/largest_gap_live"] <= NEAR
    assert record["gradient/norm"] > 0


def test_a_model_that_keeps_its_state_elsewhere_than_in_the_cache_of_keys_and_values_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "model", "mamba", vocab_size=29, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelError):
        go(small(tmp_path / "run", model__name=str(tmp_path / "model")))
    assert not (tmp_path / "run").exists()


def test_a_response_depends_on_its_identity_and_not_on_its_batch(tmp_path: Path) -> None:
    answers = []
    for size in (3, 128):
        go(small(tmp_path / str(size), rollout__batch_size=size, rollout__max_new_tokens=12, **TRACED))
        answers.append([(line["sequence_id"], line["ids"]) for line in traced(tmp_path / str(size))])
    assert answers[0] == answers[1]
    assert len({tuple(ids) for _, ids in answers[0]}) > 4, "they differ from each other"


def test_tokens_are_drawn_with_their_probabilities(tmp_path: Path) -> None:
    """400 first tokens of one prompt; the bound is passed by chance once in ten thousand times."""
    settings = {**TRACED, "rollout__prompts": 1, "rollout__group": 400}
    go(small(tmp_path, rollout__max_new_tokens=1, **settings))
    (prompt,) = {tuple(line["prompt"]) for line in traced(tmp_path)}
    ids = torch.tensor([prompt])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(first_layers(1))(ids).logits[0, -1].double().softmax(-1) * 400
    drawn = Counter(line["ids"][0] for line in traced(tmp_path))
    assert sum(drawn.values()) == 400
    often = [token for token, count in enumerate(expected.tolist()) if count >= 5]
    assert len(often) >= 3
    chi = sum((drawn[token] - float(expected[token])) ** 2 / float(expected[token]) for token in often)
    assert chi < len(often) + 4 * (2 * len(often)) ** 0.5 + 8


def test_greedy_evaluation_is_that_of_transformers(tmp_path: Path) -> None:
    task = own.Noting()
    evaluation = {"every": 1, "prompts": 4, "samples": 1, "pass_at": [1], "greedy": True}
    go(small(tmp_path, optimisation__rollouts=1, optimisation__lr=0.0, evaluation=evaluation), task=task)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(first_layers(1)), AutoTokenizer.from_pretrained(SHIPPED)
    scored = set(task.seen)
    for index in range(4):
        prompt = str(task.example("eval", index).prompt)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        told = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert (prompt, tokenizer.decode(told[0, ids.shape[1] :], skip_special_tokens=True)) in scored


def test_an_evaluation_is_of_held_out_prompts_and_pass_at_k_is_the_chance_of_a_right_one(tmp_path: Path) -> None:
    task = own.Noting()
    evaluation = {"every": 1, "prompts": 6, "samples": 4, "pass_at": [1, 2, 4], "greedy": False}
    first = go(small(tmp_path, optimisation__rollouts=1, evaluation=evaluation), task=task).evaluations[0]
    held_out, seen = [task.example("eval", index) for index in range(6)], list(task.seen)
    grade = own.Graded().score
    texts = [[text for prompt, text in seen if prompt == example.prompt][:4] for example in held_out]
    scores = [[grade(example, text) for text in given] for example, given in zip(held_out, texts, strict=True)]
    assert [len(of_prompt) for of_prompt in scores] == [4] * 6
    assert first["eval/mean"] == pytest.approx(sum(map(sum, scores)) / 24)
    right = [sum(score == 1 for score in of_prompt) for of_prompt in scores]
    assert 0 < sum(right) < 24
    for k in (1, 2, 4):
        chances = [1 - math.comb(4 - count, k) / math.comb(4, k) for count in right]
        assert first[f"eval/pass@{k}"] == pytest.approx(sum(chances) / 6)


# -- precision -------------------------------------------------------------------------------------------------------


def test_bf16_rounds_what_it_computes_and_keeps_float32_weights(plain: Path, tmp_path: Path) -> None:
    wide = metrics(plain)
    narrow = go(small(tmp_path / "narrow", optimisation__precision="bf16")).records
    assert all(value.dtype == torch.float32 for value in weights(tmp_path / "narrow").values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in weights(tmp_path / "narrow").values())
    assert narrow[0]["tokens/entropy"] != wide[0]["tokens/entropy"]
    assert narrow[0]["tokens/entropy"] == pytest.approx(wide[0]["tokens/entropy"], rel=0.05)
    assert column(narrow, "ratio/mean") == [1.0, 1.0]
    assert max(column(narrow, "sampler/largest_gap_live")) <= 0.5


def test_a_sampler_of_fewer_bits_is_further_from_the_trainer_whose_weights_are_not_rounded(tmp_path: Path) -> None:
    gaps = {}
    for precision in (None, "bf16", "int8", "fp8", "int4"):
        out = tmp_path / str(precision)
        changes = {"optimisation__rollouts": 1, "rollout__max_new_tokens": 3}
        run = small(out, rollout__precision=precision, optimisation__old_logprobs="recompute", **changes)
        gaps[precision] = go(run).records[0]["sampler/gap"]
        assert any(not torch.equal(value, value.bfloat16().float()) for value in weights(out).values())
    print(gaps)
    assert list(gaps.values()) == sorted(gaps.values())
    assert gaps[None] < 1e-6 < gaps["bf16"]
    assert gaps["int4"] > 10 * gaps["bf16"]


def test_weight_noise_is_the_same_whenever_it_is_asked_for(tmp_path: Path) -> None:
    policy, sampler = load_policy("countdown-tiny"), Sampler(None, 0.5, seed=3)
    policy.model.requires_grad_(False)
    samplers = (sampler, Sampler(None, 0.5, seed=3), Sampler(None, 0.5, seed=4))
    noisy, again, other = (dict(each.refreshed(policy).model.named_parameters()) for each in samplers)
    for name, weight in policy.model.named_parameters():
        matrix = weight.ndim > 1
        assert float((noisy[name] - weight).std()) == pytest.approx(0.5 * matrix * float(weight.std()), rel=0.1)
        assert torch.equal(noisy[name], again[name])
        assert torch.equal(noisy[name], other[name]) != matrix
        weight.data.zero_()  # a refresh adds to the weights of now, and takes its share of them
    assert not any(weight.any() for weight in sampler.refreshed(policy).model.parameters())


def test_the_sampler_is_evaluated_where_it_is_another_policy(tmp_path: Path) -> None:
    evaluation = {"every": 2, "prompts": 2, "samples": 1, "pass_at": [], "greedy": False, "start": False}
    for precision, others in (("int2", True), (None, False)):
        run = small(tmp_path / str(others), rollout__precision=precision, evaluation={**evaluation, "sampler": True})
        records = go(run).records
        assert [record["rollout"] for record in records if "eval/mean" in record] == [2]
        assert ("eval/sampler/mean" in records[-1]) == others


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_saved_alone_and_is_what_peft_loads_and_what_another_run_goes_on_with(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason='peft is not installed: pip install "rlstab[lora]"')
    new = {"model__adapter": {"r": 4, "alpha": 8}, "optimisation__lr": 1e-2}
    records = go(small(tmp_path / "run", ["clip_higher", {"name": "kl", "coefficient": 0.1}], **new)).records
    assert column(records, "kl/value")[-1] > 1e-5, "the policy did not leave the model without the adapter"
    saved, newest = weights(tmp_path / "run"), checkpoints(tmp_path / "run")[-1]
    assert not list(newest.glob("model*"))
    assert saved
    assert all(".lora_" in name and float(value.abs().max()) > 0 for name, value in saved.items())
    base, tokenizer = AutoModelForCausalLM.from_pretrained(first_layers(1)), AutoTokenizer.from_pretrained(SHIPPED)
    theirs = peft.PeftModel.from_pretrained(base, str(newest))
    again = {"model__adapter": str(newest), "optimisation__lr": 0.0, "rollout__max_new_tokens": 10}
    go(small(tmp_path / "again", **again, **TRACED))
    assert assert_of_model(tmp_path / "again", theirs, tokenizer, 1.0) > 20
    kept = weights(tmp_path / "again")
    assert all(torch.equal(value, kept[name]) for name, value in saved.items())
    for changes in ({"model__name": str(newest)}, {"model__name": "chain-tiny", "model__adapter": str(newest)}):
        with pytest.raises(ModelError):
            go(small(tmp_path / "unfit", **changes))
    assert not (tmp_path / "unfit").exists()


# -- prompts that are forwarded once ---------------------------------------------------------------------------------


def test_shared_prompts_are_forwarded_once_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of one response has nothing to share."""
    seen: list[int] = []
    forward = torch.nn.Embedding.forward

    def counting(module: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append(ids.numel())
        return forward(module, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", counting)
    tokens = {}
    changes = {"task": of_user("Wordy"), "rollout__max_new_tokens": 4, **SMOOTH}
    for size in (1, 8):
        seen.clear()
        go(small(tmp_path / str(size), optimisation__micro_batch_size=size, **changes))
        tokens[size] = sum(seen)
    print(f"tokens forwarded with a gradient: {tokens}")
    assert tokens[8] < tokens[1] / 2
    assert apart(tmp_path / "1", tmp_path / "8") <= ALIKE
    assert moved(tmp_path / "8") > 10 * ALIKE


@pytest.mark.skipif(
    "cache" in inspect.signature(LlamaModel.forward).parameters, reason="this transformers has the later name itself"
)
def test_a_cache_is_handed_over_under_the_name_that_the_model_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.24 calls ``cache`` what was ``past_key_values``."""
    changes = {"task": of_user("Wordy"), "rollout__max_new_tokens": 4}
    go(small(tmp_path / "today", **changes))
    handed: list[str] = []
    whole, base = LlamaForCausalLM.forward, LlamaModel.forward

    def of_whole(model: Any, input_ids: Any, cache: Any = None, logits_to_keep: Any = 0, **others: Any) -> Any:
        assert "past_key_values" not in others
        handed.append("whole")
        return whole(model, input_ids, past_key_values=cache, logits_to_keep=logits_to_keep, **others)

    def of_base(model: Any, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
        if cache is not None:  # else from the whole model, in its own words
            assert "past_key_values" not in others
            handed.append("base")
            others["past_key_values"] = cache
        return base(model, input_ids, **others)

    monkeypatch.setattr(LlamaForCausalLM, "forward", of_whole)
    monkeypatch.setattr(LlamaModel, "forward", of_base)
    go(small(tmp_path / "later", **changes))
    assert {*handed} == {"whole", "base"}
    assert apart(tmp_path / "today", tmp_path / "later") == 0


def test_responses_that_were_cut_off_are_known_to_methods(tmp_path: Path) -> None:
    (record,) = go(small(tmp_path, ["clip_higher", "truncated_mask"], rollout__max_new_tokens=12, **TRACED)).records
    assert 0 < record["truncated_mask/dropped"] < 1
    assert record["tokens/kept"] == pytest.approx(1 - record["truncated_mask/dropped"])
    ((step, seen),) = traces_of(read_dump(tmp_path).steps[0])
    lengths = step.tensors["lengths"].tolist()
    dropped = seen.methods["truncated_mask"].actions["dropped"].split(lengths)
    for ids, of_response in zip(step.tensors["ids"].split(lengths), dropped, strict=True):
        assert of_response.tolist() == [int(ids[-1]) != 19] * len(ids)
