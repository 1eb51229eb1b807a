"""How much memory a run will take in each process, before a weight is loaded.

The model is built from its configuration with tensors that have shapes and no bytes, and one forward over them counts
what autograd would keep. The rest is arithmetic over parameters: what each engine holds whole and what in shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rlstab.config.runs import AdapterSettings, RunConfig
from rlstab.extras import require_package
from rlstab.signals import COLUMNS, ROWS
from rlstab.train import lora
from rlstab.train.policy import load_part

#: Bytes of a float32.
WIDE = 4
#: Of AdamW, beside the weight and its gradient: two moments.
MOMENTS = 2


@dataclass(frozen=True)
class Shape:
    """What of a model decides about memory.

    Attributes:
        parameters: numbers in its weights.
        trained: of these, numbers that have a gradient.
        layer: numbers in the largest of its layers.
        root: numbers outside the layers: embeddings, head, last norm.
        kept: bytes that autograd keeps of a forward over one response with its prompt.
        cached: bytes of the key-value cache of one response with its prompt, at its end.
        vocabulary: tokens that the head knows.
    """

    parameters: int
    trained: int
    layer: int
    root: int
    kept: int
    cached: int
    vocabulary: int


@dataclass(frozen=True)
class Footprint:
    """Bytes in one process, by what they are for.

    Attributes:
        standing: held all through the run.
        step: on top, at the fullest moment of an optimizer step, with the micro-batch size of the run.
        sampling: on top, at the fullest moment of sampling.
        per_response: of :attr:`step`, what one more response in a micro-batch adds.
        per_parameter: bytes that one more parameter adds to the larger of the two moments.
    """

    standing: Mapping[str, int]
    step: Mapping[str, int]
    sampling: Mapping[str, int]
    per_response: int
    per_parameter: float

    @property
    def peak(self) -> int:
        """The fullest moment of the run."""
        return sum(self.standing.values()) + max(sum(self.step.values()), sum(self.sampling.values()))

    def micro_batch_size(self, memory: int) -> int:
        """The largest that fits in so many bytes; 0 where none does."""
        resting = sum(self.standing.values())
        if memory < resting + sum(self.sampling.values()):
            return 0
        fixed = sum(self.step.values()) - self.step["activations"]
        return max(0, int((memory - resting - fixed) // self.per_response))

    def parameters(self, memory: int) -> int:
        """About how many a model may have in so many bytes, with the activations that one response has in this one."""
        return max(0, int((memory - self.per_response - self.step["signals"]) / self.per_parameter))


def shape_of(run: RunConfig, tokens: int) -> Shape:
    """The shape of a run's model, for responses of so many tokens with their prompts.

    Raises:
        ModelError: the configuration cannot be read.
        MissingPackage: an adapter is asked for, and peft is not installed.
    """
    config: PretrainedConfig = load_part("configuration", run.model.name, AutoConfig.from_pretrained)
    settings = run.optimisation
    return shape(config, tokens, settings.precision, run.model.adapter, settings.gradient_checkpointing, run.model.name)


def shape(
    config: PretrainedConfig,
    tokens: int,
    precision: str = "fp32",
    adapter: AdapterSettings | None = None,
    checkpointing: bool = False,
    name: str = "the model",
) -> Shape:
    """The shape of a model of this configuration; see :func:`shape_of`."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if adapter is not None:
            require_package("lora", "model.adapter")
            lora.put_shape(model, name, adapter)
    with FakeTensorMode():
        _as_if_on_cpu(model)
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [one for one in model.modules() if type(one).__name__ in names]
        inside = {id(weight) for one in layers for weight in one.parameters()}
        kept = _kept(model, tokens, precision)
        sizes = [sum(one.numel() for one in layer.parameters()) for layer in layers]
        whole = {id(one): one for one in model.parameters()}
        if checkpointing and layers:  # what goes into each layer, and all of one layer at a time
            width = int(getattr(config.get_text_config(), "hidden_size", 0))
            kept = kept // len(layers) + len(layers) * tokens * width * WIDE
        return Shape(
            parameters=sum(one.numel() for one in whole.values()),
            trained=sum(one.numel() for one in whole.values() if one.requires_grad),
            layer=max(sizes, default=0),
            root=sum(one.numel() for key, one in whole.items() if key not in inside),
            kept=kept,
            cached=_cached(config, tokens, precision),
            vocabulary=int(config.get_text_config().vocab_size),
        )


def footprint(
    shape: Shape,
    run: RunConfig,
    engine: Literal["one process", "ddp", "fsdp2"],
    processes: int,
    *,
    reference: bool,
    tokens: int,
) -> Footprint:
    """Bytes in one process.

    Args:
        shape: of the model.
        run: its settings.
        engine: see :mod:`rlstab.train.engines`.
        processes: of the run.
        reference: whether a second model stands beside the policy.
        tokens: in a response with its prompt.
    """
    shards = processes if engine == "fsdp2" else 1
    offload = engine == "fsdp2" and run.engine.offload
    gathered = WIDE / 2 if run.engine.gather == "bf16" else WIDE
    standing = {
        "weights": math.ceil(shape.parameters * WIDE / shards),
        "moments": math.ceil(shape.trained * MOMENTS * WIDE / shards),
    }
    if reference:
        standing["reference model"] = standing["weights"]
    if offload:
        standing = dict.fromkeys(standing, 0)  # in the host's memory
    if run.rollout.precision is not None:
        standing["sampler's weights"] = shape.parameters * WIDE

    rows = min(run.optimisation.micro_batch_size, _per_rank(run, processes))
    step = {
        "gradients": 0 if offload else math.ceil(shape.trained * WIDE / shards),
        "activations": rows * shape.kept,
        "signals": 2 * ROWS * min(COLUMNS, shape.vocabulary) * WIDE,
    }
    sampling = {
        "key-value cache": (at_once := min(run.rollout.batch_size, _per_rank(run, processes))) * shape.cached,
        "logits": 3 * at_once * shape.vocabulary * WIDE,
    }
    per_parameter = (shape.parameters * WIDE + shape.trained * (1 + MOMENTS) * WIDE) / shape.parameters / shards
    if engine == "fsdp2":
        # the root stays gathered from forward to backward; of the layers the one that runs and the next
        step["gathered weights"] = math.ceil((shape.root + 2 * shape.layer) * gathered + shape.layer * WIDE)
        sampling["gathered weights"] = shape.parameters * WIDE
        moment = (standing["moments"] + standing["weights"]) / shape.parameters + WIDE
        per_parameter = max(0.0 if offload else per_parameter, moment)
    if reference:
        per_parameter += 0 if offload else WIDE / shards
    return Footprint(standing, step, sampling, shape.kept, per_parameter)


def _per_rank(run: RunConfig, processes: int) -> int:
    """The most responses of a rollout in one process."""
    return math.ceil(run.rollout.prompts / processes) * run.rollout.group


def _as_if_on_cpu(model: PreTrainedModel) -> None:
    """Give a model on `meta`, where attention keeps what no real kernel does, fake weights on a CPU; ties stay."""
    made: dict[int, Tensor] = {}

    def fake(one: Tensor) -> Any:
        if id(one) not in made:
            empty = torch.empty(one.shape, dtype=one.dtype)
            made[id(one)] = nn.Parameter(empty, one.requires_grad) if isinstance(one, nn.Parameter) else empty
        return made[id(one)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, one in list(held.items()):
                if one is not None:
                    held[name] = fake(one)


def _kept(model: PreTrainedModel, tokens: int, precision: str) -> int:
    """Bytes that autograd keeps of a forward over one row, each storage once, weights aside."""
    weights = {one.untyped_storage()._cdata for one in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def keep(one: Tensor) -> Tensor:
        storage = one.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = (storage.nbytes(), one)  # the tensor too, so that no other gets its address
        return one

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones(1, 1, tokens, tokens, dtype=torch.bool),  # padded rows have one of their own
        "position_ids": torch.arange(tokens).unsqueeze(0),
        "use_cache": False,
    }
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), cast:
        model.base_model(**inputs)
    return sum(size for size, _ in found.values())


def _cached(config: PretrainedConfig, tokens: int, precision: str) -> int:
    text: Any = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * tokens * (2 if precision == "bf16" else WIDE))
