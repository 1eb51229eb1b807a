"""A LoRA adapter: low-rank matrices that are trained beside frozen weights, by peft.

The adapter is put into the model's own layers, so that forwards, signals and sampling are those of any other policy. A
checkpoint holds the adapter alone, in the format of ``peft.PeftModel.from_pretrained``.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rlstab.config.settings import AdapterSettings
from rlstab.errors import ModelError, did_you_mean
from rlstab.hub import first_line, why_offline

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: Beside the adapter: the model that it was trained on, by name and by a checksum of its weights.
BASE = "base_model.json"

#: What peft puts before names when it wraps a model.
_WRAPPED = "base_model.model."

#: So many bytes of each weight make the checksum: training moves all of them.
_PROBED = 1 << 16

_FIX = "Give the folder of a LoRA adapter that was trained on this model."


def refuse_folder(name: str, folder: Path) -> None:
    """Refuse an adapter as a model: it has no weights but its own.

    Raises:
        ModelError: the folder holds an adapter.
    """
    if (folder / CONFIG).is_file():
        base = _json(folder / CONFIG).get("base_model_name_or_path")
        raise _refused(name, "" if not isinstance(base, str) or (folder / "config.json").is_file() else base)


def refuse_loaded(name: str, model: PreTrainedModel) -> None:
    """The same for what transformers found on the hub to be an adapter, and loaded, frozen, with its model.

    Raises:
        ModelError: the model has an adapter.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _refused(name, str(model.name_or_path))


def _refused(name: str, base: str) -> ModelError:
    of, model = (f" of '{base}'", f"'{base}'") if base else ("", "the model that it was trained on")
    return ModelError(
        f"'{name}' is an adapter{of}, not a model: taken for one, none of its weights would be trained. Set model.name "
        f"to {model} and model.adapter to '{name}', or merge the two and give the folder of the result."
    )


def put_on(model: PreTrainedModel, name: str, settings: AdapterSettings) -> str:
    """Put an adapter on a model and freeze all else; return a checksum of what is frozen.

    A new one starts as the identity; its random half is drawn from torch's generator on the CPU.

    Raises:
        ModelError: the adapter does not fit the model, or is of a kind that cannot be trained here.
    """
    from peft import PeftConfig

    base = checksum(model)
    config: Any
    if settings.path is None:
        put_new(model, name, settings)
    else:
        folder = _folder(settings.path)
        _require_base(folder, settings.path, name, base)
        try:
            config = PeftConfig.from_pretrained(str(folder))
            weights = load_file(folder / WEIGHTS)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise ModelError(f"the adapter '{settings.path}' cannot be read: {first_line(error)}. {_FIX}") from error
        _require_lora(config, settings.path)
        config.inference_mode = False
        config.lora_dropout = 0.0
        _inject(model, config, f"the adapter '{settings.path}' does not fit '{name}'", _FIX.rstrip("."))
        _fill(model, weights, settings.path, name)
    for one in model.parameters():
        if one.requires_grad:
            one.data = one.data.float()
    return base


def put_new(model: PreTrainedModel, name: str, settings: AdapterSettings) -> None:
    """Put a new adapter on a model, which may have shapes and no weights.

    Raises:
        ModelError: the adapter does not fit the model.
    """
    from peft import LoraConfig

    assert settings.r is not None
    assert settings.alpha is not None
    assert settings.targets is not None
    names = settings.targets
    targets = names[0] if names == ("all-linear",) else list(names)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=settings.r, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0
    )
    if not isinstance(targets, str):
        _require_modules(model, targets)
    _inject(
        model,
        config,
        f"model.adapter does not fit '{name}'",
        "Name linear layers of it in model.adapter.targets, or `all-linear`",
    )


def put_shape(model: PreTrainedModel, name: str, settings: AdapterSettings) -> None:
    """Put an adapter on a model that has shapes and no weights, for its size.

    Raises:
        ModelError: the adapter cannot be read, or does not fit the model.
    """
    from peft import PeftConfig

    if settings.path is None:
        put_new(model, name, settings)
        return
    try:
        config = PeftConfig.from_pretrained(str(_folder(settings.path)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the adapter '{settings.path}' cannot be read: {first_line(error)}. {_FIX}") from error
    _require_lora(config, settings.path)
    config.inference_mode = False
    _inject(model, config, f"the adapter '{settings.path}' does not fit '{name}'", _FIX.rstrip("."))


def _inject(model: PreTrainedModel, config: Any, what: str, fix: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a tied head, which is refused
            model.add_adapter(config)
    except Exception as error:  # peft refuses what it cannot adapt in every way
        raise ModelError(f"{what}: {first_line(error)}. {fix}.") from error
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and any(
        hasattr(one, "base_layer") for one in (model.get_output_embeddings(), model.get_input_embeddings())
    ):
        raise ModelError(
            f"{what}: its vocabulary head is tied to the embeddings, and one adapter on two places cannot be merged. "
            f"Leave both out of the targets."
        )


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of that name is one of an adapter."""
    return ".lora_" in name


@contextmanager
def off(model: PreTrainedModel) -> Iterator[None]:
    """The model without its adapter, where it has one. No gradient is to be taken inside."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def require_trainable(model: PreTrainedModel, name: str) -> None:
    """Raises ModelError: no weight of a model requires a gradient, so that nothing would be learnt."""
    if not any(one.requires_grad for one in model.parameters()):
        raise ModelError(
            f"no weight of '{name}' can be trained: none requires a gradient. Give a model in a floating point format, "
            f"or put an adapter on it with model.adapter."
        )


def checksum(model: PreTrainedModel) -> str:
    """Sixteen hexadecimal digits over names, shapes and the first bytes of all weights, which are on the CPU."""
    found = hashlib.sha256()
    for name, one in sorted(model.named_parameters()):
        found.update(f"{name} {tuple(one.shape)} {one.dtype}".encode())
        first = one.detach().reshape(-1)[: _PROBED // one.element_size()].contiguous()
        found.update(first.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def save(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write an adapter as peft does, and beside it which model it was trained on."""
    from peft import get_peft_model_state_dict

    # peft would keep a head that is a target with it: that is frozen
    matrices = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(
        {f"{_WRAPPED}{name}": value.detach().contiguous() for name, value in matrices.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    (name,) = model.active_adapters()
    model.peft_config[name].save_pretrained(str(folder))
    about = {"name": str(model.name_or_path), "checksum": base}
    (folder / BASE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _require_base(folder: Path, path: str, name: str, base: str) -> None:
    """An adapter of ours says what its model was; those of others do not."""
    before = _json(folder / BASE)
    if before.get("checksum", base) != base:
        raise ModelError(
            f"the adapter '{path}' was trained on other weights than '{name}' has now (then '{before.get('name')}'). "
            f"Give the model as it was, or start a new adapter."
        )


def _require_modules(model: PreTrainedModel, targets: list[str]) -> None:
    """Each name is one of a module; peft is content with any of them."""
    known = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    whole = {name for name, _ in model.named_modules()}
    for one in targets:
        if not any(name == one or name.endswith(f".{one}") for name in whole):
            raise ModelError(
                f"model.adapter.targets: '{one}' is no module of the model. {did_you_mean(one, sorted(known))}"
            )


def _require_lora(config: Any, path: str) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    wrong = ""
    if kind != "LORA":
        wrong = f"is of the kind {kind}, and LoRA is what can be trained"
    elif getattr(config, "bias", "none") != "none":
        wrong = f"changes biases (bias: {config.bias}), which stay when an adapter is switched off for the reference"
    elif getattr(config, "modules_to_save", None):
        wrong = f"has whole modules beside its matrices ({', '.join(config.modules_to_save)})"
    elif getattr(config, "trainable_token_indices", None):
        wrong = "trains embeddings of some tokens"
    if wrong:
        raise ModelError(f"the adapter '{path}' {wrong}. Merge it into its model, and put a new one on the result.")


def _fill(model: PreTrainedModel, weights: Mapping[str, Tensor], path: str, name: str) -> None:
    """Load the matrices of an adapter, all of them and nothing else."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    given = {key.removeprefix(_WRAPPED): value for key, value in weights.items()}
    wanted: Mapping[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    for key in sorted(given.keys() | wanted.keys()):
        one, other = given.get(key), wanted.get(key)
        if one is None or other is None or one.shape != other.shape:
            what = (
                "lacks" if one is None else "has, and the model does not," if other is None else "has another shape of"
            )
            raise ModelError(f"the adapter '{path}' does not fit '{name}': it {what} {key}. {_FIX}")
    set_peft_model_state_dict(model, given)


def _folder(path: str) -> Path:
    """The folder of an adapter, which may be on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        if not (folder / CONFIG).is_file():
            raise ModelError(f"there is no adapter in '{folder}': it has no {CONFIG}. {_FIX}")
        if not (folder / WEIGHTS).is_file():
            raise ModelError(f"the adapter '{folder}' has no {WEIGHTS}; pickles are not read. {_FIX}")
        return folder
    try:
        offline = bool(why_offline())
        return Path(
            huggingface_hub.snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS, BASE], local_files_only=offline)
        )
    except Exception as error:  # by proxies and certificates of every kind
        raise ModelError(f"the adapter '{path}' cannot be loaded: {first_line(error)}. {_FIX}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
