"""What a run is said to hold before it starts, against what models and autograd hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rlstab.train.engines.ddp import Ddp
from rlstab.train.engines.fsdp2 import Fsdp2
from rlstab.train.engines.module import PolicyModule, nothing
from rlstab.train.engines.one_process import OneProcess
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from rlstab.cli import main
from rlstab.config import RunConfig, load_run
from rlstab.config.settings import AdapterSettings
from rlstab.core.comm import LocalComm
from rlstab.errors import ConfigError
from rlstab.train import lora
from rlstab.train.footprint import BACKWARD, Engine, Footprint, Numbers, Shape, footprint, shape
from rlstab.train.footprint_table import bytes_of, in_words
from rlstab.train.policy import SHIPPED, load_policy

SMALL: Mapping[str, Any] = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 50}
CONFIGS = [
    LlamaConfig(**SMALL, intermediate_size=96, num_key_value_heads=2, bos_token_id=None, eos_token_id=1),
    Qwen2Config(
        **SMALL,
        intermediate_size=96,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    ),
    GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=1),
]


def really_kept(config: PretrainedConfig, tokens: int, adapter: AdapterSettings | None = None) -> int:
    """What autograd keeps of a forward over a real model, row with padding."""
    model = AutoModelForCausalLM.from_config(config).eval()
    if adapter is not None:
        lora.put_on(model, "it", adapter)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(one: torch.Tensor) -> torch.Tensor:
        storage = one.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = (storage.nbytes(), one)
        return one

    mask = torch.ones(1, tokens, dtype=torch.int64)
    mask[0, :2] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        model.base_model(torch.zeros_like(mask), attention_mask=mask, position_ids=places, use_cache=False)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: one.model_type)
@pytest.mark.parametrize("tokens", [24, 96])
def test_activations_are_those_that_autograd_keeps(config: PretrainedConfig, tokens: int) -> None:
    assert shape(config, tokens).kept == pytest.approx(really_kept(config, tokens), rel=0.02)


def test_activations_beside_an_adapter_are_those_that_autograd_keeps() -> None:
    pytest.importorskip("peft", reason='peft is not installed: pip install -e ".[lora]"')
    adapter = AdapterSettings(r=4)
    assert shape(CONFIGS[0], 24, adapter=adapter).kept == pytest.approx(really_kept(CONFIGS[0], 24, adapter), rel=0.02)


def test_parameters_are_those_of_the_model_and_tied_ones_count_once() -> None:
    for config in CONFIGS:
        model = AutoModelForCausalLM.from_config(config)
        found = shape(config, 8)
        count = sum(one.numel() for one in model.parameters())
        assert found.whole == Numbers(count, count)
        assert found.root.weights + 3 * found.layer.weights == count
        assert found.root.trained + 3 * found.layer.trained == count
        assert found.largest == max(one.numel() for one in model.parameters())


def test_an_adapter_trains_its_own_matrices_alone() -> None:
    config = AutoConfig.from_pretrained(SHIPPED["countdown-tiny"])
    whole = shape(config, 8)
    found = shape(config, 8, adapter=AdapterSettings(r=4, targets=("q_proj", "v_proj")))
    assert found.whole.trained == 3 * found.layer.trained == 3 * 2 * 4 * (96 + 96)
    assert found.whole.weights == whole.whole.weights + found.whole.trained
    assert (found.root, found.largest) == (Numbers(whole.root.weights, 0), 4 * 96)


def test_checkpointing_keeps_less() -> None:
    config = AutoConfig.from_pretrained(SHIPPED["countdown-tiny"])
    assert shape(config, 32, checkpointing=True).kept < shape(config, 32).kept / 2


#: A model of a million parameters, in ten layers.
MILLION = Shape(
    whole=Numbers(1_000_000, 1_000_000),
    layer=Numbers(90_000, 90_000),
    root=Numbers(100_000, 100_000),
    largest=50_000,
    kept=10_000,
    cached=1_000,
    vocabulary=100,
)


def of(name: Engine, processes: int, *, reference: bool = False, device: Any = "cpu", **settings: Any) -> Footprint:
    run: RunConfig = load_run({"objective": "clip_higher", **settings})
    return footprint(MILLION, run, name, processes, reference=reference, device=device)


def test_float32_weights_gradients_and_two_moments_are_sixteen_bytes_a_parameter() -> None:
    assert of("one process", 1).per_parameter == of("ddp", 2).per_parameter == 16.0
    assert of("one process", 1).standing == {"weights": 4_000_000, "moments": 8_000_000}
    assert of("fsdp2", 4).standing == {"weights": 1_000_000, "moments": 2_000_000}
    # at the fullest moment all weights are gathered, to sample
    assert of("fsdp2", 4).per_parameter == 4 + 12 / 4
    assert of("fsdp2", 4, reference=True).per_parameter == 4 + 4 + 16 / 4
    # on a GPU the square roots of second moments are found in one call
    assert of("one process", 1, device="cuda").per_parameter == 20.0
    assert of("ddp", 2).standing["gradients"] == 4_000_000


@contextmanager
def group(name: Engine) -> Iterator[None]:
    """For fsdp2 the first of two processes, to which the other sends nothing; else one process."""
    if name == "fsdp2":
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages in this process."""
    own = [one.to_local() if isinstance(one, DTensor) else one for one in tensors if one is not None]
    storages = [one.untyped_storage() for one in own]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


@pytest.mark.parametrize("adapter", [None, AdapterSettings(r=4)], ids=["all", "adapter"])
@pytest.mark.parametrize("name", ["one process", "ddp", "fsdp2"])
def test_an_engine_holds_what_is_said(name: Engine, adapter: AdapterSettings | None) -> None:
    if adapter is not None:
        pytest.importorskip("peft", reason='peft is not installed: pip install -e ".[lora]"')
    alike = partial(pytest.approx, rel=1e-3, abs=0)  # a shard of the embeddings is filled up to even rows
    with group(name):
        policy = load_policy("countdown-tiny", adapter=adapter)
        run = load_run({"objective": "clip_higher"})
        found = shape(AutoConfig.from_pretrained(SHIPPED["countdown-tiny"]), 8, adapter=adapter)
        said = footprint(found, run, name, 1 if name == "one process" else 2, reference=False)
        engine: OneProcess | Ddp | Fsdp2
        if name == "fsdp2":
            settings: Any = {"device": torch.device("cpu"), "gather": None, "offload": False, "checkpointing": False}
            engine = Fsdp2(policy, **settings, comm=LocalComm(), processes=2)
        else:
            engine = Ddp(policy, 2) if name == "ddp" else OneProcess(policy)
        optimizer = torch.optim.AdamW(engine.weights.values())
        for _ in engine.rounds([1, 2]):
            engine.backward(None if name == "fsdp2" else nothing(policy, PolicyModule(policy)))
        assert held(engine.weights.values()) == alike(said.standing["weights"])
        gradients = {**said.standing, **said.phases[BACKWARD]}["gradients"]
        assert held(one.grad for one in engine.weights.values()) == alike(gradients)
        optimizer.step()
        moments = [one for kept in optimizer.state.values() for key, one in kept.items() if key != "step"]
        assert held(moments) == alike(said.standing["moments"])
        if name == "fsdp2":
            with engine.whole() as whole:
                assert held(whole.model.parameters()) == alike(said.phases["sampling"]["gathered weights"])
            assert held(engine.policy.model.parameters()) == 0


def test_under_ddp_gradients_stay_in_the_buckets() -> None:
    places = set()
    with group("ddp"):
        engine = Ddp(load_policy("countdown-tiny"), 1)
        for _ in range(2):
            for _ in engine.rounds([1, 2, 3]):
                engine.backward(nothing(engine.policy, engine._module))
                places.add(tuple(one.grad.data_ptr() for one in engine.weights.values() if one.grad is not None))
            for one in engine.weights.values():
                one.grad = None
    assert len(places) == 1


def test_offloaded_shards_are_not_on_the_device() -> None:
    found = of("fsdp2", 2, engine={"name": "fsdp2", "offload": True})
    assert sum(found.standing.values()) == 0
    assert found.phases[BACKWARD]["gradients"] == 0


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    found = of("one process", 1, optimisation={"micro_batch_size": 16})
    memory = 20_000_000
    most = found.micro_batch_size(memory)
    assert most > 16
    for size, fits in ((most, True), (most + 1, False)):
        assert (found.held_in(BACKWARD) + (size - 16) * found.per_response <= memory) == fits
    assert found.micro_batch_size(1000) == 0


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24 * 10**9), ("1.5GiB", 3 * 2**29), ("512M", 512 * 10**6), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


def test_a_size_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expected a size such as 24GB"):
        bytes_of("lots")


def test_bytes_in_words() -> None:
    assert [in_words(one) for one in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2 KiB", "3 MiB", "5 GiB"]


def test_check_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("objective: [clip_higher]\nrollout: {prompts: 4, group: 4}\n")
    assert main(["check", str(file), "--memory", "1GB", "--processes", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "(ddp, 2 in all)" in out
    assert "micro_batch_size 128 fits. The largest that fits is" in out
    assert main(["check", str(file), "--memory", "2MB"]) == 0
    assert "too little for" in " ".join(capsys.readouterr().out.split())
    assert main(["check", str(file), "--processes", "0"]) == 2


def test_check_says_why_memory_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"objective: [clip_higher]\nmodel: {{name: {tmp_path}/none}}\n")
    assert main(["check", str(file)]) == 0
    assert "memory: not known: there is no folder" in " ".join(capsys.readouterr().out.split())
