"""What a run is said to hold before it starts, against what models and autograd hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from rlstab.cli import main
from rlstab.config import load_run
from rlstab.train.footprint import BACKWARD, Footprint, Shape, bytes_of, describe_memory, footprint, in_words, shape_of

SMALL: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 50}
SMALL |= {"intermediate_size": 96, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1}
LLAMA, QWEN = LlamaConfig(**SMALL), Qwen2Config(**SMALL, tie_word_embeddings=True)
GPT2 = GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=1)


def shape(config: PretrainedConfig, folder: Path, tokens: int, **changes: Any) -> Shape:
    config.save_pretrained(folder)
    run = load_run({"objective": "clip_higher", "model": {"name": str(folder)}}, changes)
    return shape_of(run, tokens)


def really_kept(config: PretrainedConfig, tokens: int) -> int:
    """What autograd keeps of a forward over a real model, a row with padding."""
    model = AutoModelForCausalLM.from_config(config).eval()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().data_ptr() not in weights:
            kept[value.untyped_storage().data_ptr()] = value
        return value

    mask = torch.ones(1, tokens, dtype=torch.int64)
    mask[0, :2] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model.base_model(torch.zeros_like(mask), attention_mask=mask, position_ids=places, use_cache=False)
    return sum(value.untyped_storage().nbytes() for value in kept.values())


def test_parameters_are_those_of_the_model_and_activations_those_that_autograd_keeps(tmp_path: Path) -> None:
    for config in (LLAMA, QWEN, GPT2):
        model = AutoModelForCausalLM.from_config(config)
        for tokens in (24, 96):
            measured = shape(config, tmp_path, tokens)
            assert measured.kept == pytest.approx(really_kept(config, tokens), rel=0.02)
        count = sum(weight.numel() for weight in model.parameters())
        assert (measured.weights, measured.trained) == (count, count)
        assert measured.root + 3 * measured.layer == count
        assert measured.largest == max(weight.numel() for weight in model.parameters())
    checkpointed = shape(LLAMA, tmp_path, 96, **{"optimisation.gradient_checkpointing": True})
    assert checkpointed.kept < shape(LLAMA, tmp_path, 96).kept / 2


def test_an_adapter_trains_its_own_matrices_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason='peft is not installed: pip install "rlstab[lora]"')
    measured = shape(LLAMA, tmp_path, 8, **{"model.adapter": {"r": 4, "targets": ["q_proj", "v_proj"]}})
    assert measured.trained == 3 * measured.layer_trained == 3 * 4 * (48 + 48 + 48 + 24)
    assert measured.weights == shape(LLAMA, tmp_path, 8).weights + measured.trained
    assert (measured.root_trained, measured.largest) == (0, 4 * 48)


#: A model of a million parameters, in ten layers.
MILLION = Shape(1_000_000, 1_000_000, 90_000, 90_000, 100_000, 100_000, 50_000, 10_000, 1_000, 100)


def of(kind: str, processes: int, **settings: Any) -> Footprint:
    return footprint(MILLION, load_run({"objective": "clip_higher", **settings}), kind, processes)


def test_float32_weights_gradients_and_two_moments_are_sixteen_bytes_a_parameter() -> None:
    alone, sharded = of("one process", 1), of("fsdp2", 4)
    assert alone.standing == {"weights": 4_000_000, "moments": 8_000_000}
    assert alone.phases[BACKWARD]["gradients"] == of("ddp", 2).standing["gradients"] == 4_000_000
    assert sharded.standing == {"weights": 1_000_000, "moments": 2_000_000}
    assert sharded.phases[BACKWARD]["gradients"] == 1_000_000
    assert of("one process", 1, objective=["clip_higher", "kl"]).standing["reference model"] == 4_000_000
    offloaded = of("fsdp2", 2, engine={"name": "fsdp2", "offload": True})
    assert sum(offloaded.standing.values()) == offloaded.phases[BACKWARD]["gradients"] == 0


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    estimate = of("one process", 1, optimisation={"micro_batch_size": 16})
    most = estimate.micro_batch_size(20_000_000)
    assert most > 16
    for size, fits in ((most, True), (most + 1, False)):
        assert (estimate.held_in(BACKWARD) + (size - 16) * estimate.per_response <= 20_000_000) == fits
    assert estimate.micro_batch_size(1000) == 0


def test_sizes() -> None:
    sizes = {"24GB": 24 * 10**9, "1.5GiB": 3 * 2**29, "512M": 512 * 10**6, "7": 7}
    assert {text: bytes_of(text) for text in sizes} == sizes
    assert [in_words(size) for size in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_check_says_what_fits_or_why_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("objective: [clip_higher]\nrollout: {prompts: 4, group: 4}\n")
    assert main(["check", str(file), "--memory", "1GB", "--processes", "2"]) == 0
    assert "ddp, 2 in all" in " ".join(capsys.readouterr().out.split())
    assert main(["check", str(file), "--memory", "2MB"]) == 0
    assert "too little" in " ".join(capsys.readouterr().out.split())
    unfit = load_run({"objective": "clip_higher", "model": {"adapter": {"targets": ["vproj"]}}})
    assert str(describe_memory(unfit)).startswith("memory: not known: ")
