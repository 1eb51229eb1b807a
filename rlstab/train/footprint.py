"""How much memory a run will take in each process, before a weight is loaded; ``rlstab check`` prints it.

The model is built from its configuration with tensors that have shapes and no bytes, and one forward over them counts
what autograd would keep. The rest is arithmetic over parameters: what each engine holds whole and what in shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import torch
from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlstab.config.runs import RunConfig
from rlstab.errors import ConfigError, RlstabError
from rlstab.extras import require
from rlstab.models.loading import load_part, put_adapter
from rlstab.signals import COLUMNS, ROWS
from rlstab.tasks.build import build_task

#: Bytes of a float32.
WIDE = 4
#: The phase in which the activations of a micro-batch are held.
BACKWARD = "forward and backward"

#: So many of the first prompts are measured; a longer one may follow.
_MEASURED = 64


@dataclass(frozen=True)
class Shape:
    """What of a model decides about memory. Weights are counted in numbers, of which ``trained`` have a gradient.

    Attributes:
        weights, trained: of all of it.
        layer, layer_trained: of the largest of its layers.
        root, root_trained: outside the layers: embeddings, head, last norm.
        largest: of the largest weight that is trained.
        kept: bytes that autograd keeps of a forward over one response with its prompt.
        cached: bytes of the key-value cache of one response with its prompt, at its end.
        vocabulary: tokens that the head knows.
    """

    weights: int
    trained: int
    layer: int
    layer_trained: int
    root: int
    root_trained: int
    largest: int
    kept: int
    cached: int
    vocabulary: int


@dataclass(frozen=True)
class Footprint:
    """Bytes in one process, without what Python, torch and other libraries take.

    Attributes:
        standing: held all through the run, by what it is for.
        phases: on top, in each phase of the run at its fullest.
        per_response: in :data:`BACKWARD`, what one more response in a micro-batch adds.
    """

    standing: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    per_response: int

    @property
    def peak(self) -> int:
        """In the fullest phase of the run."""
        return max(map(self.held_in, self.phases))

    def held_in(self, phase: str) -> int:
        """Bytes in a phase."""
        return sum(self.standing.values()) + sum(self.phases[phase].values())

    def micro_batch_size(self, memory: int) -> int:
        """The largest that fits in so many bytes; 0 where none does, or another phase needs more."""
        if any(self.held_in(phase) > memory for phase in self.phases if phase != BACKWARD):
            return 0
        fixed = self.held_in(BACKWARD) - self.phases[BACKWARD]["activations"]
        return max(0, (memory - fixed) // self.per_response)


def footprint(shape: Shape, run: RunConfig, engine: str, processes: int) -> Footprint:
    """Bytes in one process of a run.

    Args:
        shape: of the model.
        run: its settings.
        engine: ``one process``, ``ddp`` or ``fsdp2``.
        processes: of the run.
    """
    sharded, weights, trained = engine == "fsdp2", shape.weights * WIDE, shape.trained * WIDE
    # shards that are offloaded are in the host's memory
    own = 0.0 if sharded and run.engine.offload else 1 / processes if sharded else 1.0
    per_rank = math.ceil(run.rollout.prompts / processes) * run.rollout.group
    sampled = min(run.rollout.batch_size, per_rank)
    gradients = {"gradients": math.ceil(trained * own)}
    standing = {"weights": math.ceil(weights * own), "moments": math.ceil(2 * trained * own)}
    # without an adapter to switch off, a second model stands beside the policy
    adapted = run.model.adapter is not None and run.model.reference is None
    reference = "ref_logprobs" in run.composition.needs and not adapted
    if reference:
        standing["reference model"] = standing["weights"]
    if run.rollout.precision is not None:
        standing["sampler's weights"] = weights
    if engine == "ddp":  # its buckets, which gradients are views of
        standing |= gradients
        gradients = {}
    backward = gradients | {
        "activations": min(run.optimisation.micro_batch_size, per_rank) * shape.kept,
        "signals": 2 * ROWS * min(COLUMNS, shape.vocabulary) * WIDE,
    }
    sampling = {"key-value cache": sampled * shape.cached, "logits": 3 * sampled * shape.vocabulary * WIDE}
    phases = {BACKWARD: backward, "sampling": sampling}
    if sharded:
        # The root is gathered from forward to backward. Of the layers there are the one that runs and the next, which
        # is in a buffer; of gradients those of the root, of the layer, and a buffer in which the last ones were sent.
        gather = 2 if run.engine.gather == "bf16" else WIDE
        backward["gathered layers"] = (shape.root + 2 * shape.layer) * gather
        gathered = (shape.root_trained + shape.layer_trained) * gather
        backward["gradients of one layer"] = gathered + shape.layer_trained * WIDE
        sampling["gathered weights"] = weights
        if reference:  # it is asked while the policy is whole
            sampling["gathered reference"] = weights
    else:
        backward["gradient of one weight"] = shape.largest * WIDE  # before it is added to those of other micro-batches
    return Footprint(standing, phases, shape.kept)


def shape_of(run: RunConfig, tokens: int) -> Shape:
    """The shape of a run's model, for responses of so many tokens with their prompts.

    Raises:
        ModelError: the configuration cannot be read.
        MissingPackage: an adapter is asked for, and peft is not installed.
    """
    config: Any = load_part("configuration", run.model.name, AutoConfig.from_pretrained)
    settings, text = run.optimisation, config.get_text_config()
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if run.model.adapter is not None:
            require("lora", "model.adapter")
            put_adapter(model, run.model.name, run.model.adapter)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")  # on `meta`, attention keeps what no real kernel does
        model.tie_weights()
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        whole = {id(weight): weight for weight in model.parameters()}
        inside = {id(weight) for layer in layers for weight in layer.parameters()}
        largest = max((_numbers(layer.parameters()) for layer in layers), default=(0, 0))
        kept = _kept(model, tokens, settings.precision)
        if settings.gradient_checkpointing and layers:  # what goes into each layer, and all of one layer at a time
            kept = kept // len(layers) + len(layers) * tokens * int(text.hidden_size) * WIDE
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        cached = 2 * text.num_hidden_layers * heads * width * tokens * (2 if settings.precision == "bf16" else WIDE)
        return Shape(
            *_numbers(whole.values()),
            *largest,
            *_numbers(weight for key, weight in whole.items() if key not in inside),
            max((weight.numel() for weight in whole.values() if weight.requires_grad), default=0),
            kept,
            int(cached),
            int(text.vocab_size),
        )


def _numbers(weights: Iterable[Tensor]) -> tuple[int, int]:
    """How many there are in weights, and how many of them have a gradient."""
    sizes = [(weight.numel(), weight.numel() * weight.requires_grad) for weight in weights]
    return sum(size for size, _ in sizes), sum(trained for _, trained in sizes)


def _kept(model: PreTrainedModel, tokens: int, precision: str) -> int:
    """Bytes that autograd keeps of a forward over one row, each storage once, weights aside."""
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    storages: dict[int, tuple[int, Tensor]] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = (storage.nbytes(), value)  # the tensor too, so that no other gets its address
        return value

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    inputs: dict[str, Any] = {
        "attention_mask": torch.ones(1, 1, tokens, tokens, dtype=torch.bool),  # padded rows have one of their own
        "position_ids": torch.arange(tokens).unsqueeze(0),
        "use_cache": False,
    }
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), cast:
        model.base_model(ids, **inputs)
    return sum(size for size, _ in storages.values())


# -- what `rlstab check` prints ----------------------------------------------------------------------------------------


def bytes_of(text: str) -> int:
    """The bytes that a size such as ``24GB``, ``24GiB`` or ``512M`` means.

    Raises:
        ConfigError: it means none.
    """
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError as error:
        raise ConfigError(f"--memory {text}: expected a size such as 24GB, 80GiB or 512MB.") from error


def in_words(size: int) -> str:
    """Bytes for people."""
    return ByteSize(size).human_readable(separator=" ")


def longest_prompt(run: RunConfig) -> int:
    """Tokens of the longest of the first training prompts."""
    tokenizer: Any = load_part("tokenizer", run.model.name, AutoTokenizer.from_pretrained)
    task = build_task(run.task)
    examples = (task.example("train", index) for index in range(task.size["train"] or _MEASURED))
    return max(len(tokenizer(example.prompt)["input_ids"]) for example in islice(examples, _MEASURED))


def describe_memory(run: RunConfig, processes: int = 1, memory: int | None = None) -> RenderableType:
    """A table: what a run holds in each process, and what would fit; or one line that says why that is not known.

    Args:
        run: its settings.
        processes: that it will have.
        memory: bytes that each of them has; None asks nothing about that.
    """
    try:
        longest = longest_prompt(run)
        shape = shape_of(run, longest + run.rollout.max_new_tokens)
    except (RlstabError, ImportError, AttributeError, TypeError, NotImplementedError) as error:
        return f"memory: not known: {escape(str(error).partition(chr(10))[0])}"
    engine = "fsdp2" if run.engine.name == "fsdp2" else "ddp" if processes > 1 else "one process"
    estimate = footprint(shape, run, engine, processes)
    title = f"memory of each process ({engine}, {processes} in all)"
    table = Table("when", "what", Column("size", justify="right"), title=title, title_justify="left")
    for when, parts in (("always", estimate.standing), *estimate.phases.items()):
        for row, (what, size) in enumerate(parts.items()):
            table.add_row("" if row else when, what, in_words(size))
    fullest = max(estimate.phases, key=estimate.held_in)
    table.add_row("[bold]at most[/]", f"in {fullest}", f"[bold]{in_words(estimate.peak)}[/]")
    text = (
        f"{shape.weights / 1e6:.3g}M parameters, {shape.trained / 1e6:.3g}M of them trained; "
        f"{in_words(estimate.per_response)} of activations for each response in a micro-batch, at {longest} tokens of "
        f"prompt and {run.rollout.max_new_tokens} of answer. Libraries take more, on a CPU about 0.5 GiB."
    )
    if engine == "fsdp2":
        text += " On a CPU start it with MALLOC_MMAP_THRESHOLD_=131072, or glibc keeps as much again."
    return Group(table, text, *([] if memory is None else [_fits(estimate, run, memory)]))


def _fits(estimate: Footprint, run: RunConfig, memory: int) -> str:
    largest, size = estimate.micro_batch_size(memory), run.optimisation.micro_batch_size
    if not largest:
        fullest = max(estimate.phases, key=estimate.held_in)
        return f"{in_words(memory)}: too little for {fullest}. Lower rollout.batch_size, or set engine: fsdp2."
    fits = "fits" if memory >= estimate.peak else "does not fit"
    return f"{in_words(memory)}: micro_batch_size {size} {fits}. The largest that fits is {largest}."
