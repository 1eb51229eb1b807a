"""How much memory a run will take in each process, before a weight is loaded.

The model is built from its configuration with tensors that have shapes and no bytes, and one forward over them counts
what autograd would keep. The rest is arithmetic over parameters: what each engine holds whole and what in shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rlstab.config.runs import RunConfig
from rlstab.config.settings import AdapterSettings
from rlstab.extras import require
from rlstab.signals import COLUMNS, ROWS
from rlstab.train.policy import load_part, put_adapter

#: Bytes of a float32.
WIDE = 4
#: Of AdamW, beside the weight and its gradient: two moments.
MOMENTS = 2
#: The phase in which the activations of a micro-batch are held.
BACKWARD = "forward and backward"


Engine: TypeAlias = Literal["one process", "ddp", "fsdp2"]


@dataclass(frozen=True)
class Numbers:
    """How many numbers there are in the weights of a part of a model.

    Attributes:
        weights: in all.
        trained: of these, with a gradient.
    """

    weights: int
    trained: int


@dataclass(frozen=True)
class Shape:
    """What of a model decides about memory.

    Attributes:
        whole: all of it.
        layer: the largest of its layers.
        root: what is outside the layers: embeddings, head, last norm.
        largest: numbers in the largest weight that is trained.
        kept: bytes that autograd keeps of a forward over one response with its prompt.
        cached: bytes of the key-value cache of one response with its prompt, at its end.
        vocabulary: tokens that the head knows.
    """

    whole: Numbers
    layer: Numbers
    root: Numbers
    largest: int
    kept: int
    cached: int
    vocabulary: int


@dataclass(frozen=True)
class Footprint:
    """Bytes in one process, by what they are for.

    Attributes:
        standing: held all through the run.
        phases: on top, in each phase of the run at its fullest: :data:`BACKWARD`, with the micro-batch size of the run,
            and others.
        per_response: in :data:`BACKWARD`, what one more response in a micro-batch adds.
        per_parameter: bytes that one more parameter adds to the phase to which it adds most.
    """

    standing: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    per_response: int
    per_parameter: float

    @property
    def peak(self) -> int:
        """In the fullest phase of the run."""
        return max(map(self.held_in, self.phases))

    def held_in(self, phase: str) -> int:
        """Bytes in a phase."""
        return sum(self.standing.values()) + sum(self.phases[phase].values())

    def too_much(self, memory: int) -> str:
        """A phase that needs more than so many bytes whatever the micro-batch size; empty where all have room."""
        return next((one for one in self.phases if one != BACKWARD and self.held_in(one) > memory), "")

    def micro_batch_size(self, memory: int) -> int:
        """The largest that fits in so many bytes; 0 where none does."""
        if self.too_much(memory):
            return 0
        fixed = self.held_in(BACKWARD) - self.phases[BACKWARD]["activations"]
        return max(0, int((memory - fixed) // self.per_response))

    def parameters(self, memory: int) -> int:
        """About how many a model may have in so many bytes, with the activations that one response has in this one."""
        fixed = self.per_response + self.phases[BACKWARD]["signals"]
        return max(0, int((memory - fixed) / self.per_parameter))


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
            require("lora", "model.adapter")
            put_adapter(model, name, adapter)
    with FakeTensorMode():
        _as_if_on_cpu(model)
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [one for one in model.modules() if type(one).__name__ in names]
        inside = {id(weight) for one in layers for weight in one.parameters()}
        kept = _kept(model, tokens, precision)
        sizes = [_numbers(layer.parameters()) for layer in layers]
        whole = {id(one): one for one in model.parameters()}
        if checkpointing and layers:  # what goes into each layer, and all of one layer at a time
            width = int(getattr(config.get_text_config(), "hidden_size", 0))
            kept = kept // len(layers) + len(layers) * tokens * width * WIDE
        return Shape(
            whole=_numbers(whole.values()),
            layer=max(sizes, key=lambda one: one.weights, default=Numbers(0, 0)),
            root=_numbers(one for key, one in whole.items() if key not in inside),
            largest=max((one.numel() for one in whole.values() if one.requires_grad), default=0),
            kept=kept,
            cached=_cached(config, tokens, precision),
            vocabulary=int(config.get_text_config().vocab_size),
        )


def footprint(
    shape: Shape,
    run: RunConfig,
    engine: Engine,
    processes: int,
    *,
    reference: bool,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Footprint:
    """Bytes in one process, without what Python, torch and other libraries take.

    Args:
        shape: of the model.
        run: its settings.
        engine: see :mod:`rlstab.train.engine`.
        processes: of the run.
        reference: whether a second model stands beside the policy.
        device: on which weights are.
    """
    weights, trained = shape.whole.weights * WIDE, shape.whole.trained * WIDE
    shards = processes if engine == "fsdp2" else 1
    offload = engine == "fsdp2" and run.engine.offload
    own = 0 if offload else 1 / shards  # shards that are offloaded are in the host's memory
    standing = {"weights": math.ceil(weights * own), "moments": math.ceil(MOMENTS * trained * own)}
    if reference:
        standing["reference model"] = standing["weights"]
    if run.rollout.precision is not None:
        standing["sampler's weights"] = weights
    gradients = {"gradients": math.ceil(trained * own)}
    if engine == "ddp":  # its buckets, which gradients are views of
        standing |= gradients
        gradients = {}

    backward = gradients | {
        "activations": min(run.optimisation.micro_batch_size, _per_rank(run, processes)) * shape.kept,
        "signals": 2 * ROWS * min(COLUMNS, shape.vocabulary) * WIDE,
    }
    at_once = min(run.rollout.batch_size, _per_rank(run, processes))
    sampling = {"key-value cache": at_once * shape.cached, "logits": 3 * at_once * shape.vocabulary * WIDE}
    # Of second moments. On a GPU torch's AdamW finds those of all weights in one call; on a CPU, and of shards, it
    # takes one weight at a time, of which it also holds the root divided by a number.
    if device == "cuda" and engine != "fsdp2":
        update = gradients | {"square roots": trained}
    else:
        update = gradients | {"square roots of one weight": math.ceil(2 * shape.largest * WIDE * own)}
    phases = {BACKWARD: backward, "update of the weights": update, "sampling": sampling}
    if engine == "fsdp2":
        # The root is gathered from forward to backward. Of the layers there are the one that runs and the next, which
        # is in a buffer; of gradients those of the root, of the layer, and a buffer in which the last ones were sent.
        gather = 2 if run.engine.gather == "bf16" else WIDE
        backward["gathered layers"] = (shape.root.weights + 2 * shape.layer.weights) * gather
        whole = (shape.root.trained + shape.layer.trained) * gather
        backward["gradients of one layer"] = whole + shape.layer.trained * WIDE
        sampling["gathered weights"] = weights
        if reference:  # it is asked while the policy is whole
            sampling["gathered reference"] = weights
        phases["writing a checkpoint"] = {"gathered weights": weights, "moment of one weight": shape.largest * WIDE}
    else:
        backward["gradient of one weight"] = shape.largest * WIDE  # before it is added to those of other micro-batches

    growing = {*standing, "gradients", "square roots", "gathered weights", "gathered reference"}
    added = [sum(size for what, size in (standing | one).items() if what in growing) for one in phases.values()]
    return Footprint(standing, phases, shape.kept, max(added) / shape.whole.weights)


def _numbers(weights: Iterable[Tensor]) -> Numbers:
    found = [(one.numel(), one.requires_grad) for one in weights]
    return Numbers(sum(size for size, _ in found), sum(size for size, trained in found if trained))


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
