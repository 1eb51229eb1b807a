"""Loads a model by shipped name, folder or hub name, with a LoRA adapter if requested.

peft puts the matrices of an adapter into the layers of the model, so forwards are those of any other model.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from rlstab import hub
from rlstab.config.settings import AdapterSettings
from rlstab.config.user_code import SHIPPED_MODELS
from rlstab.errors import ModelError, did_you_mean
from rlstab.extras import how_to_install, require
from rlstab.files import from_home
from rlstab.safe_read import read_json

if TYPE_CHECKING:  # their modules take seconds, and a tokenizer needs none of them
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_GIVE = (
    "Give a folder that holds a transformers model with safetensors weights and its tokenizer, a name on the model "
    f"hub, or one of: {', '.join(SHIPPED_MODELS)}."
)


def load_model(
    name: str, adapter: AdapterSettings | None = None, saved: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, frozenset[int], str]:
    """A causal language model in float32 on the CPU, its tokenizer, the tokens that end an answer, and a checksum.

    The checksum is of the weights that an adapter leaves frozen; without an adapter it is empty.

    Args:
        name: the name of the model.
        adapter: put on the model, so that only the adapter is trained.
        saved: a checkpoint that has the weights: all of them, or those of the adapter.

    Raises:
        ModelError: the model cannot be loaded, or has no pad or EOS token.
        MissingPackage: an adapter is given, and peft is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if adapter is not None:
        require("lora", "model.adapter")
        adapter = adapter if saved is None else AdapterSettings(path=str(saved))
    elif saved is not None:
        name = str(saved)
    tokenizer = load_part("tokenizer", name, AutoTokenizer.from_pretrained)
    model, report = load_part(
        "weights",
        name,
        AutoModelForCausalLM.from_pretrained,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
    )
    if getattr(model, "_hf_peft_config_loaded", False):  # of an adapter on the hub, transformers loads the model too
        raise _is_adapter(name, str(model.name_or_path))
    if report["missing_keys"]:
        raise ModelError(
            f"the model '{name}' has no weights for {min(report['missing_keys'])}; they would be random. Give a model "
            f"that was saved as a causal language model."
        )
    require_pad_token(tokenizer, model.config, name)
    ends = {tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends |= set(configured) if isinstance(configured, list | tuple) else {configured}
    ends.discard(None)
    ends = {int(end) for end in ends if int(end) < vocabulary_size(model.config)}
    if not ends:
        raise ModelError(
            f"'{name}' has no EOS token that its embeddings know, so no response would ever end. Set "
            f"tokenizer.eos_token to the token that ends an answer and save the tokenizer."
        )
    base = "" if adapter is None else put_adapter(model, name, adapter)
    return model, tokenizer, frozenset(ends), base


def vocabulary_size(config: PretrainedConfig) -> int:
    """The number of token ids that a model of this configuration has embeddings for."""
    return int(config.get_text_config().vocab_size)


def require_pad_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, name: str) -> None:
    """Raises ModelError if the tokenizer has no pad token, or one without an embedding in the model."""
    pad, size = tokenizer.pad_token_id, vocabulary_size(config)
    if pad is None or pad >= size:
        lacks = "no pad token"
        if pad is not None:
            lacks = f"the pad token {pad} ({tokenizer.pad_token!r}), and the model has embeddings for {size} tokens"
        raise ModelError(
            f"the tokenizer of '{name}' has {lacks}; prompts are padded on the left. Set another one and save it: "
            f"tokenizer.pad_token = tokenizer.eos_token; tokenizer.save_pretrained(folder)."
        )


def load_part(role: str, name: str, load: Callable[..., Any], **options: Any) -> Any:
    """A part of a model by one of transformers' loaders; code that comes with a model is never run.

    Raises:
        ModelError: the part cannot be loaded, or the folder is missing or holds an adapter.
    """
    source = str(SHIPPED_MODELS.get(name, from_home(name)))
    if name.startswith((".", "/", "~")) and not Path(source).is_dir():
        raise ModelError(f"there is no folder '{source}'. {_GIVE}")
    if (Path(source) / ADAPTER_CONFIG).is_file():
        base = read_json(Path(source) / ADAPTER_CONFIG).get("base_model_name_or_path")
        has_config = (Path(source) / "config.json").is_file()
        raise _is_adapter(name, base if isinstance(base, str) and not has_config else "")
    offline = "" if Path(source).is_dir() else hub.why_offline()
    try:
        with hub.quiet(transformers_logging):
            return load(source, trust_remote_code=False, local_files_only=bool(offline), **options)
    except Exception as error:  # a loader may raise anything
        raise ModelError(
            f"the {role} of '{name}' cannot be loaded: {offline or hub.first_line(error)}. {_GIVE}"
        ) from error


# -- LoRA adapters ---------------------------------------------------------------------------------------------------
# peft puts the matrices into the layers of the model, so forwards, signals and sampling are those of any policy

ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: Next to the adapter: the model that it was trained on, by name and by a checksum of its weights.
_BASE = "base_model.json"

#: Releases that fit together, those of constraints.txt.
FIT = "transformers 5.23 with peft 0.21"

#: The prefix of names when peft wraps a model.
_WRAPPED = "base_model.model."

_FIX = "Give the folder of a LoRA adapter that was trained on this model."


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_" in name


def put_adapter(model: PreTrainedModel, name: str, settings: AdapterSettings) -> str:
    """Put an adapter on a model and freeze everything else; return a checksum of the frozen weights.

    A new adapter starts as the identity; its random half is drawn from torch's generator on the CPU.

    Raises:
        ModelError: the adapter does not fit the model, or is of a kind that cannot be trained.
    """
    from peft import LoraConfig, PeftConfig, load_peft_weights

    base = _checksum(model)
    config: Any
    if settings.path is None:
        targets = list(settings.targets or ())
        _require_modules(model, targets)
        modules, rank = targets[0] if targets == ["all-linear"] else targets, settings.r
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=settings.alpha, target_modules=modules)
        fix = "Name linear layers of it in model.adapter.targets, or `all-linear`"
        _inject(model, config, f"model.adapter does not fit '{name}'", fix)
    else:
        before = read_json(from_home(settings.path) / _BASE)
        if before.get("checksum", base) != base:
            raise ModelError(
                f"the adapter '{settings.path}' was trained on other weights than '{name}' has now (then "
                f"'{before.get('name')}'). Give the model as it was, or start a new adapter."
            )
        try:  # a folder, or on the hub
            path = str(from_home(settings.path))
            config, weights = PeftConfig.from_pretrained(path), load_peft_weights(path, device="cpu")  # weights_only
        except Exception as error:  # a loader may raise anything
            reason = hub.why_offline() or hub.first_line(error)
            raise ModelError(f"the adapter '{settings.path}' cannot be read: {reason}. {_FIX}") from error
        _require_plain_lora(config, settings.path)
        config.inference_mode, config.lora_dropout = False, 0.0
        _inject(model, config, f"the adapter '{settings.path}' does not fit '{name}'", _FIX.rstrip("."))
        _fill(model, weights, settings.path, name)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return base


def _is_adapter(name: str, base: str) -> ModelError:
    origin, model = (f" of '{base}'", f"'{base}'") if base else ("", "the model that it was trained on")
    return ModelError(
        f"'{name}' is an adapter{origin}, not a model; as a model, none of its weights would be trained. Set "
        f"model.name to {model} and model.adapter to '{name}'; for model.reference, merge the two and give the folder "
        f"of the result."
    )


def _inject(model: PreTrainedModel, config: Any, role: str, fix: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a tied head, which is refused
            model.add_adapter(config)
    except Exception as error:  # peft may raise anything
        if "version of PEFT" in str(error):  # transformers refuses this release of peft
            fix = f"Install releases that fit together, such as {FIT}: {how_to_install('train', 'lora')}"
        raise ModelError(f"{role}: {hub.first_line(error)}. {fix}.") from error
    ends = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(model.config, "tie_word_embeddings", False) and any(hasattr(end, "base_layer") for end in ends):
        raise ModelError(
            f"{role}: its vocabulary head is tied to the embeddings, and one adapter on both cannot be merged. "
            f"Leave both out of the targets."
        )


def _checksum(model: PreTrainedModel) -> str:
    """Sixteen hexadecimal digits over names, shapes and the first 64 KiB of each weight; training moves them all."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        first = weight.detach().reshape(-1)[: (1 << 16) // weight.element_size()].contiguous()
        digest.update(first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _matrices(model: PreTrainedModel) -> Mapping[str, Tensor]:
    from peft import get_peft_model_state_dict

    # by default, peft asks the hub about embeddings and adds a targeted head, which is frozen
    matrices: Mapping[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return matrices


def save_adapter(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write an adapter as ``PeftModel.save_pretrained`` does, and the model that it was trained on in another file."""
    weights = {f"{_WRAPPED}{name}": value.detach().contiguous() for name, value in _matrices(model).items()}
    save_file(weights, folder / _ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (name,) = model.active_adapters()
    model.peft_config[name].save_pretrained(str(folder))
    about = {"name": str(model.name_or_path), "checksum": base}
    (folder / _BASE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _fill(model: PreTrainedModel, weights: Mapping[str, Tensor], path: str, name: str) -> None:
    """Load the matrices of an adapter, all of them and nothing else."""
    from peft import set_peft_model_state_dict

    saved, matrices = {key.removeprefix(_WRAPPED): value for key, value in weights.items()}, _matrices(model)
    for key in sorted(saved.keys() | matrices.keys()):
        if key not in saved or key not in matrices or saved[key].shape != matrices[key].shape:
            raise ModelError(
                f"the adapter '{path}' does not fit '{name}': {key} is missing from the adapter or the model, or has "
                f"another shape. {_FIX}"
            )
    set_peft_model_state_dict(model, dict(saved))


def _require_modules(model: PreTrainedModel, targets: list[str]) -> None:
    """Require that each target is the name of a module; peft only requires that one of them is."""
    modules = {name: module for name, module in model.named_modules()}
    linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    for target in targets if targets != ["all-linear"] else ():
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            raise ModelError(
                f"model.adapter.targets: '{target}' is not a module of the model. "
                f"{did_you_mean(target, sorted(linear))}"
            )


def _require_plain_lora(config: Any, path: str) -> None:
    """Refuse to train anything but LoRA matrices: the rest would stay on when the adapter is off for the reference."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    extras = [key for key in ("modules_to_save", "trainable_token_indices") if getattr(config, key, None)]
    extras += ["bias"] if getattr(config, "bias", "none") != "none" else []
    if kind != "LORA" or extras:
        raise ModelError(
            f"the adapter '{path}' is of the kind {kind}{' with ' if extras else ''}{', '.join(extras)}; only the "
            f"matrices of LoRA can be trained. Merge it into its model, and put a new adapter on the result."
        )
