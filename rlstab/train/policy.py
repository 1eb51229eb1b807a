"""The policy: a causal language model with its tokenizer, its optional LoRA adapter, and the ways in which it is asked.

Source of the adapter: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021,
https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlstab import hub
from rlstab.config.settings import AdapterSettings
from rlstab.errors import DataError, ModelError, did_you_mean
from rlstab.extras import require
from rlstab.signals import TokenSignals, token_signals_from_logits
from rlstab.signals.vocabulary_head import VocabularyHead, find_head
from rlstab.tasks.task import Message, Prompt, in_words
from rlstab.train.shared_prompts import SharedPrompts, can_share, forward_shared, position_ids

#: Models that ship with the package.
SHIPPED = {
    name: Path(__file__).parent.parent / "data" / name for name in ("chain-tiny", "countdown-tiny", "littered-tiny")
}

_GIVE = (
    "Give a folder that holds a transformers model with safetensors weights and its tokenizer, a name on the model "
    f"hub, or one of: {', '.join(SHIPPED)}."
)


@dataclass(frozen=True)
class Sequences:
    """Rows of prompt and response, padded to the longest: prompts on the left, responses on the right.

    Attributes:
        prompt_ids, prompt_mask: ``(R, P)`` int64 and bool.
        response_ids, response_mask: ``(R, T)`` int64 and bool, the mask True up to and including the end.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor

    def rows(self, index: Tensor) -> Sequences:
        """Some of the rows, cut to their own longest prompt and response."""
        prompt_mask, response_mask = self.prompt_mask[index], self.response_mask[index]
        width, length = 0, 0
        if index.numel():  # one wait for the device
            width, length = torch.stack([prompt_mask.sum(-1).max(), response_mask.sum(-1).max()]).tolist()
        start = self.prompt_ids.shape[1] - width
        return Sequences(
            self.prompt_ids[index][:, start:],
            prompt_mask[:, start:],
            self.response_ids[index][:, :length],
            response_mask[:, :length],
        )

    @classmethod
    def joined(cls, parts: Iterable[Sequences], pad_id: int) -> Sequences:
        """The rows of all parts, padded to the longest of them."""
        parts = list(parts)
        width = max(part.prompt_ids.shape[1] for part in parts)
        length = max(part.response_ids.shape[1] for part in parts)

        def left(values: list[Tensor], fill: int) -> Tensor:
            return torch.cat([pad(value, (width - value.shape[1], 0), value=fill) for value in values])

        def right(values: list[Tensor], fill: int) -> Tensor:
            return torch.cat([pad(value, (0, length - value.shape[1]), value=fill) for value in values])

        return cls(
            left([part.prompt_ids for part in parts], pad_id),
            left([part.prompt_mask for part in parts], 0),
            right([part.response_ids for part in parts], pad_id),
            right([part.response_mask for part in parts], 0),
        )

    def cut(self, length: int) -> Sequences:
        """The first ``length`` tokens of each response: what comes later cannot change their signals."""
        return replace(self, response_ids=self.response_ids[:, :length], response_mask=self.response_mask[:, :length])


@dataclass(frozen=True)
class Policy:
    """A model in float32 and in eval mode, with its tokenizer.

    Attributes:
        precision: ``bf16`` runs forwards in autocast over the float32 weights. Sampling, evidence and the reference
            forward beside the module that accelerate prepares, so the cast is here and not in accelerate's wrapper.
        base: of a model with an adapter, a checksum of the frozen weights; empty where all weights are trained.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    eos_ids: frozenset[int]
    precision: str
    base: str = ""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @cached_property
    def context_length(self) -> int | None:
        """Longest prompt and response together, in tokens; None where the model does not say."""
        length = getattr(self.model.config, "max_position_embeddings", None)
        return length if isinstance(length, int) else None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which forwards run."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def save(self, folder: Path) -> None:
        """Write weights, or the adapter alone, as safetensors and the tokenizer, for :func:`load_policy`."""
        with _quiet():
            if self.base:
                _save_adapter(self.model, folder, self.base)
            else:
                self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The context in which the adapter is off, so that the policy is the model that it was put on."""
        if not self.base:
            yield
            return
        self.model.disable_adapters()
        try:
            yield
        finally:
            self.model.enable_adapters()

    # -- text --------------------------------------------------------------------------------------------------------

    def encode(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        *,
        chat: bool,
        given: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``(R, P)`` ids and mask, padded on the left; ``given`` tokens of the answers follow their prompts.

        Raises:
            DataError: a prompt is empty, cannot be written in tokens, or does not leave room for the response.
        """
        rows = [self._tokens(prompt, chat) for prompt in prompts]
        for prompt, tokens in zip(prompts, rows, strict=True):
            if not tokens:
                raise DataError(f"a prompt has no token: {prompt!r}. Give the task a prompt_template with text.")
            if self.context_length is not None and len(tokens) + max_new_tokens > self.context_length:
                raise DataError(
                    f"a prompt of {len(tokens)} tokens and {max_new_tokens} new tokens exceed the model's context of "
                    f"{self.context_length}: {in_words(prompt)[:60]!r}... Lower rollout.max_new_tokens, shorten the "
                    f"prompts, or take a model with a longer context."
                )
        if given is not None:  # they are tokens of the answer, for which there is room
            rows = [[*tokens, *more] for tokens, more in zip(rows, given, strict=True)]
        width = max(map(len, rows), default=0)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.bool)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = True
        return ids.to(self.device), mask.to(self.device)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of some tokens of one response."""
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)  # a list of texts is the answer to a list of lists
        return text

    def _tokens(self, prompt: Prompt, chat: bool) -> list[int]:
        if not (chat or isinstance(prompt, str)):
            raise DataError(
                f"a prompt is a list of messages, which only a chat template can write as tokens: "
                f"{in_words(prompt)[:60]!r}. Set rollout.chat to true."
            )
        try:
            if chat:
                messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
                turns = [{"role": message.role, "content": message.content} for message in messages]
                return list(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
            return list(self.tokenizer(prompt)["input_ids"])
        except Exception as error:  # tokenizers raise a bare Exception for text outside their vocabulary
            cure = "Set rollout.chat to false" if chat and isinstance(prompt, str) else "Change the prompts"
            raise DataError(
                f"the tokenizer of '{self.tokenizer.name_or_path}' cannot encode the prompt {in_words(prompt)[:60]!r}: "
                f"{str(error).split('!')[0]}. {cure}, or take another model."
            ) from error

    # -- forwards ----------------------------------------------------------------------------------------------------

    def signals(
        self,
        sequences: Sequences,
        index: Tensor,
        *,
        temperature: float,
        needs: Set[str],
        options: Mapping[str, float],
        rows: Mapping[str, Tensor] | None = None,
        shared: SharedPrompts | None = None,
    ) -> TokenSignals:
        """Signals of the response tokens at ``index`` of the flattened ``(R, T)``, by one forward over the rows.

        From the hidden states where :attr:`head` is known, so that no logits are held and tokens without gradient cost
        no backward through the vocabulary; else from the model's logits. Prompts that are ``shared`` are forwarded once
        each; see :meth:`shared_prompts`.
        """
        ids = sequences.response_ids.reshape(-1)[index]
        asked: dict[str, Any] = {
            "temperature": temperature,
            "needs": needs,
            "min_p": options.get("min_p"),
            "rows": rows,
            "check_ids": not self._embeds_the_vocabulary,
        }
        with self.autocast():
            output = self._before_each_token(sequences, shared)
        output = output.reshape(-1, output.shape[-1])[index]
        if self.head is None:
            return token_signals_from_logits(output, ids, **asked)
        return self.head.signals(output, ids, torch.bfloat16 if self.precision == "bf16" else None, **asked)

    @torch.no_grad()
    def evidence(
        self,
        sequences: Sequences,
        rows: Tensor,
        micro_batch_size: int,
        *,
        temperature: float,
        needs: Set[str],
        options: Mapping[str, float],
    ) -> dict[str, Tensor]:
        """``(R, T)`` float32 signals on some rows, 0 on the others and where there is no token; without gradient."""
        shape, device = sequences.response_ids.shape, sequences.response_ids.device
        evidence = {name: torch.zeros(shape, device=device) for name in needs}
        for places in rows.to(device).split(micro_batch_size):
            if not len(places):
                continue
            part = sequences.rows(places)
            index = part.response_mask.reshape(-1).nonzero().squeeze(-1)
            signals = self.signals(
                part, index, temperature=temperature, needs=needs, options=options, shared=self.shared_prompts(part)
            )
            for name, values in evidence.items():
                own = getattr(signals, name)
                flat = torch.zeros(part.response_mask.numel(), dtype=own.dtype, device=device)
                padded = flat.index_copy(0, index, own).view(part.response_mask.shape)
                values[places, : padded.shape[1]] = padded
        return evidence

    def _before_each_token(self, sequences: Sequences, shared: SharedPrompts | None) -> Tensor:
        """``(R, T, ...)`` hidden states where :attr:`head` is known, else logits, which predict the response tokens."""
        length = sequences.response_ids.shape[1]

        def forward(**inputs: Any) -> Tensor:
            if self.head is not None:
                hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
                return hidden
            logits: Tensor = self.model(**inputs, **self._keep(length + 1)).logits
            return logits

        prompt = sequences.prompt_ids, sequences.prompt_mask
        response = sequences.response_ids, sequences.response_mask
        if shared is not None:
            return forward_shared(forward, self.model.config, *prompt, *response, shared)
        ids, mask = (torch.cat(pair, dim=1) for pair in zip(prompt, response, strict=True))
        output = forward(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False)
        return output[:, -length - 1 : -1]

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """What of the prompts of some sequences is worth forwarding once; None where nothing is, or cannot be.

        Gradient checkpointing keeps no keys and values. It synchronises with the device.
        """
        checkpointed = any(isinstance(module, CheckpointWrapper) for module in self.model.modules())
        if checkpointed or not self._shares_prompts:
            return None
        return SharedPrompts.among(sequences.prompt_ids, sequences.prompt_mask, sequences.response_ids.shape[1])

    @cached_property
    def _shares_prompts(self) -> bool:
        return can_share(self.model.config)

    @cached_property
    def head(self) -> VocabularyHead | None:
        """How hidden states become logits in this model; None where that is more than a product and a scale."""
        return find_head(self.model)

    @cached_property
    def _embeds_the_vocabulary(self) -> bool:
        """The embeddings have a row for each logit and no other, so that they refuse a token id that has none."""
        embeddings, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        rows = getattr(embeddings, "num_embeddings", None)
        return rows is not None and rows == getattr(head, "out_features", None)

    def next_logits(self, **inputs: Any) -> Any:
        """One step of decoding: the model's output, its logits for the last position only."""
        return self.model(**inputs, use_cache=True, **self._keep(1))

    def _keep(self, count: int) -> dict[str, int]:
        return {"logits_to_keep": count} if self._cuts_logits else {}

    @cached_property
    def _cuts_logits(self) -> bool:
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def checkpoint_gradients(self) -> None:
        """Recompute the activations of each layer in the backward pass.

        By torch's wrapper, as accelerate does: layers of transformers checkpoint in training mode alone, which would
        switch dropout on.

        Raises:
            ModelError: the model cannot.
        """
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        if not self.model.supports_gradient_checkpointing or not names:
            raise ModelError(
                f"'{self.tokenizer.name_or_path}' does not support gradient checkpointing. Set "
                f"optimisation.gradient_checkpointing to false and lower optimisation.micro_batch_size."
            )
        apply_activation_checkpointing(self.model, check_fn=lambda module: type(module).__name__ in names)


# -- loading ---------------------------------------------------------------------------------------------------------


def load_policy(
    name: str,
    *,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    adapter: AdapterSettings | None = None,
    saved: Path | None = None,
) -> Policy:
    """A causal language model by shipped name, folder or hub name, in float32 and in eval mode.

    Eval mode switches dropout off: the ratio compares two policies, not two dropout masks.

    Args:
        name: of the model.
        device: to load it to.
        precision: see :class:`Policy`.
        adapter: put on the model, so that it alone is trained.
        saved: a checkpoint, to take the weights from: all of them, or those of the adapter.

    Raises:
        ModelError: it cannot be loaded, or has no pad or EOS token.
        MissingPackage: an adapter is asked for, and peft is not installed.
    """
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
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers loads an adapter on the hub with its model
        raise _is_adapter(name, str(model.name_or_path))
    if report["missing_keys"]:
        raise ModelError(
            f"the model '{name}' has no weights for {min(report['missing_keys'])}; they would be random. Give a model "
            f"that was saved as a causal language model."
        )
    if tokenizer.pad_token_id is None:
        raise ModelError(
            f"the tokenizer of '{name}' has no pad token, and prompts are padded on the left. Set one and save it: "
            f"tokenizer.pad_token = tokenizer.eos_token; tokenizer.save_pretrained(folder)."
        )
    ends = {tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends |= set(configured) if isinstance(configured, list | tuple) else {configured}
    ends.discard(None)
    if not ends:
        raise ModelError(
            f"'{name}' has no EOS token, so no response would ever end. Set tokenizer.eos_token to the token that ends "
            f"an answer and save the tokenizer."
        )
    base = "" if adapter is None else put_adapter(model, name, adapter)
    model.to(torch.device(device)).eval()
    return Policy(model, tokenizer, int(tokenizer.pad_token_id), frozenset(map(int, ends)), precision, base)


def require_trainable(policy: Policy, name: str) -> None:
    """Raises ModelError: no weight of a model requires a gradient, so that nothing would be learnt."""
    if not any(weight.requires_grad for weight in policy.model.parameters()):
        raise ModelError(
            f"no weight of '{name}' can be trained: none requires a gradient. Give a model in a floating point format, "
            f"or put an adapter on it with model.adapter."
        )


def load_part(what: str, name: str, load: Callable[..., Any], **options: Any) -> Any:
    """A part of a model by one of transformers' loaders; no code that comes with a model is run.

    Raises:
        ModelError: it cannot be loaded, there is no such folder, or it holds an adapter.
    """
    source = str(SHIPPED.get(name, Path(name).expanduser()))
    if name.startswith((".", "/", "~")) and not Path(source).is_dir():
        raise ModelError(f"there is no folder '{source}'. {_GIVE}")
    if (Path(source) / ADAPTER_CONFIG).is_file():
        base = _json(Path(source) / ADAPTER_CONFIG).get("base_model_name_or_path")
        whole = (Path(source) / "config.json").is_file()
        raise _is_adapter(name, base if isinstance(base, str) and not whole else "")
    offline = "" if Path(source).is_dir() else hub.why_offline()
    try:
        with _quiet():
            return load(source, trust_remote_code=False, local_files_only=bool(offline), **options)
    except Exception as error:  # files of others fail in every way
        raise ModelError(
            f"the {what} of '{name}' cannot be loaded: {offline or hub.first_line(error)}. {_GIVE}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, which break into our own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


# -- LoRA adapters ---------------------------------------------------------------------------------------------------
# peft puts the matrices into the model's own layers, so that forwards, signals and sampling are those of any policy.

ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: Beside the adapter: the model that it was trained on, by name and by a checksum of its weights.
_BASE = "base_model.json"

#: What peft puts before names when it wraps a model.
_WRAPPED = "base_model.model."

_FIX = "Give the folder of a LoRA adapter that was trained on this model."


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_" in name


def put_adapter(model: PreTrainedModel, name: str, settings: AdapterSettings) -> str:
    """Put an adapter on a model and freeze all else; return a checksum of what is frozen.

    A new adapter starts as the identity; its random half is drawn from torch's generator on the CPU. A model on the
    device ``meta`` gets the adapter's shapes alone.

    Raises:
        ModelError: the adapter does not fit the model, or is of a kind that cannot be trained here.
    """
    from peft import LoraConfig, PeftConfig, load_peft_weights

    shapes_only = model.device.type == "meta"
    base = "" if shapes_only else _checksum(model)
    config: Any
    if settings.path is None:
        targets = list(settings.targets or ())
        _require_modules(model, targets)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.r,
            lora_alpha=settings.alpha,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            lora_dropout=0.0,
        )
        _inject(
            model,
            config,
            f"model.adapter does not fit '{name}'",
            "Name linear layers of it in model.adapter.targets, or `all-linear`",
        )
    else:
        before = _json(Path(settings.path).expanduser() / _BASE)
        if before.get("checksum", base) != base and not shapes_only:
            raise ModelError(
                f"the adapter '{settings.path}' was trained on other weights than '{name}' has now (then "
                f"'{before.get('name')}'). Give the model as it was, or start a new adapter."
            )
        path = str(Path(settings.path).expanduser())
        try:  # a folder, or on the hub; safetensors, or torch.load with weights_only
            config = PeftConfig.from_pretrained(path)
            weights = {} if shapes_only else load_peft_weights(path, device="cpu")
        except Exception as error:  # files of others fail in every way
            reason = hub.why_offline() or hub.first_line(error)
            raise ModelError(f"the adapter '{settings.path}' cannot be read: {reason}. {_FIX}") from error
        _require_plain_lora(config, settings.path)
        config.inference_mode, config.lora_dropout = False, 0.0
        _inject(model, config, f"the adapter '{settings.path}' does not fit '{name}'", _FIX.rstrip("."))
        if not shapes_only:
            _fill(model, weights, settings.path, name)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return base


def _is_adapter(name: str, base: str) -> ModelError:
    of, model = (f" of '{base}'", f"'{base}'") if base else ("", "the model that it was trained on")
    return ModelError(
        f"'{name}' is an adapter{of}, not a model: taken for a model, none of its weights would be trained. Set "
        f"model.name to {model} and model.adapter to '{name}', or merge the two and give the folder of the result."
    )


def _inject(model: PreTrainedModel, config: Any, what: str, fix: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a tied head, which is refused
            model.add_adapter(config)
    except Exception as error:  # peft refuses what it cannot adapt in every way
        raise ModelError(f"{what}: {hub.first_line(error)}. {fix}.") from error
    ends = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(model.config, "tie_word_embeddings", False) and any(hasattr(end, "base_layer") for end in ends):
        raise ModelError(
            f"{what}: its vocabulary head is tied to the embeddings, and one adapter on two places cannot be merged. "
            f"Leave both out of the targets."
        )


def _checksum(model: PreTrainedModel) -> str:
    """Sixteen hexadecimal digits over names, shapes and the first 64 KiB of each weight; training moves all of them."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        first = weight.detach().reshape(-1)[: (1 << 16) // weight.element_size()].contiguous()
        digest.update(first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _matrices(model: PreTrainedModel) -> Mapping[str, Tensor]:
    from peft import get_peft_model_state_dict

    # by default peft asks the hub about embeddings, and adds a head that is a target, which is frozen
    matrices: Mapping[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return matrices


def _save_adapter(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write an adapter as ``PeftModel.save_pretrained`` does, and beside it which model it was trained on."""
    weights = {f"{_WRAPPED}{name}": value.detach().contiguous() for name, value in _matrices(model).items()}
    save_file(weights, folder / _ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (name,) = model.active_adapters()
    model.peft_config[name].save_pretrained(str(folder))
    about = {"name": str(model.name_or_path), "checksum": base}
    (folder / _BASE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _fill(model: PreTrainedModel, weights: Mapping[str, Tensor], path: str, name: str) -> None:
    """Load the matrices of an adapter, all of them and nothing else."""
    from peft import set_peft_model_state_dict

    given, wanted = {key.removeprefix(_WRAPPED): value for key, value in weights.items()}, _matrices(model)
    for key in sorted(given.keys() | wanted.keys()):
        if key not in given or key not in wanted or given[key].shape != wanted[key].shape:
            raise ModelError(
                f"the adapter '{path}' does not fit '{name}': {key} is missing from the adapter or the model, or has "
                f"another shape. {_FIX}"
            )
    set_peft_model_state_dict(model, dict(given))


def _require_modules(model: PreTrainedModel, targets: list[str]) -> None:
    """Each target is the name of a module; peft is content if any of them is."""
    modules = {name: module for name, module in model.named_modules()}
    linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    for target in targets if targets != ["all-linear"] else ():
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            raise ModelError(
                f"model.adapter.targets: '{target}' is not a module of the model. "
                f"{did_you_mean(target, sorted(linear))}"
            )


def _require_plain_lora(config: Any, path: str) -> None:
    """Nothing but LoRA matrices is trained: the rest would stay when the adapter is off for the reference."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    more = [key for key in ("modules_to_save", "trainable_token_indices") if getattr(config, key, None)]
    more += ["bias"] if getattr(config, "bias", "none") != "none" else []
    if kind != "LORA" or more:
        raise ModelError(
            f"the adapter '{path}' is of the kind {kind}{' with ' if more else ''}{', '.join(more)}; only the matrices "
            f"of LoRA can be trained. Merge it into its model, and put a new adapter on the result."
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
