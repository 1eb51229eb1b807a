"""The policy: a causal language model with its tokenizer, and the two ways in which it is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from rlstab import hub
from rlstab.config.runs import AdapterSettings
from rlstab.errors import DataError, ModelError
from rlstab.extras import require
from rlstab.signals import TokenSignals, token_signals_from_logits
from rlstab.signals.vocabulary_head import VocabularyHead, find_head
from rlstab.tasks.task import Message, Prompt, in_words
from rlstab.train import lora
from rlstab.train.padded_rows import Sequences, position_ids
from rlstab.train.shared_prompts import SharedPrompts, can_share, forward_shared

#: Models that ship with the package.
SHIPPED = {
    "chain-tiny": Path(__file__).parent.parent / "data" / "chain-tiny",
    "countdown-tiny": Path(__file__).parent.parent / "data" / "countdown-tiny",
    "littered-tiny": Path(__file__).parent.parent / "data" / "littered-tiny",
}


@dataclass(frozen=True)
class Policy:
    """A model in float32 with its tokenizer.

    Attributes:
        precision: ``bf16`` runs forwards in autocast over the float32 weights.
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
                lora.save(self.model, folder, self.base)
            else:
                self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def without_adapter(self) -> AbstractContextManager[None]:
        """The context in which the adapter is off, so that the policy is the model that it was put on."""
        return lora.off(self.model)

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
                    f"a prompt of {len(tokens)} tokens and {max_new_tokens} new ones exceed the model's context of "
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
                turns = [{"role": one.role, "content": one.content} for one in messages]
                return list(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
            return list(self.tokenizer(prompt)["input_ids"])
        except Exception as error:  # tokenizers raise a bare Exception for text outside their vocabulary
            cure = "Set rollout.chat to false" if chat and isinstance(prompt, str) else "Change the prompts"
            raise DataError(
                f"the tokenizer of '{self.tokenizer.name_or_path}' cannot encode the prompt {in_words(prompt)[:60]!r}: "
                f"{str(error).split('!')[0]}. {cure}, or take another model."
            ) from error

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
        with self.autocast(), self._checkpointed():
            found = self._before_each_token(sequences, shared)
        found = found.reshape(-1, found.shape[-1])[index]
        if self.head is None:
            return token_signals_from_logits(found, ids, **asked)
        return self.head.signals(found, ids, torch.bfloat16 if self.precision == "bf16" else None, **asked)

    def _before_each_token(self, sequences: Sequences, shared: SharedPrompts | None) -> Tensor:
        """``(R, T, ...)`` hidden states where :attr:`head` is known, else logits, which predict the response tokens."""
        length = sequences.response_ids.shape[1]

        def forward(**inputs: Any) -> Tensor:
            if self.head is not None:
                hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
                return hidden
            logits: Tensor = self.model(**inputs, **self._keep(length + 1)).logits
            return logits

        if shared is not None:
            return forward_shared(forward, self.model.config, sequences, shared)
        mask = torch.cat([sequences.prompt_mask, sequences.response_mask], dim=1)
        ids = torch.cat([sequences.prompt_ids, sequences.response_ids], dim=1)
        found = forward(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False)
        return found[:, -length - 1 : -1]

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """What of the prompts of some sequences is worth forwarding once; None where nothing is, or cannot be.

        Gradient checkpointing keeps no keys and values. It reads the device.
        """
        return SharedPrompts.among(sequences) if self._shares_prompts and not self._checkpointing() else None

    @cached_property
    def _shares_prompts(self) -> bool:
        return can_share(self.model.config)

    def checkpoint_gradients(self) -> None:
        """Make the layers' activations again in the backward instead of keeping them.

        Raises:
            ModelError: the model cannot.
        """
        if not self.model.supports_gradient_checkpointing:
            raise ModelError(
                f"'{self.tokenizer.name_or_path}' does not support gradient checkpointing. Set "
                f"optimisation.gradient_checkpointing to false and lower optimisation.micro_batch_size."
            )
        newer = getattr(self.model, "activation_checkpointing_enable", None)  # its name in later versions
        (newer or self.model.gradient_checkpointing_enable)()
        for one in self._checkpointing():
            one._gradient_checkpointing_func = _in_eval(one, one._gradient_checkpointing_func)

    @contextmanager
    def _checkpointed(self) -> Iterator[None]:
        """Layers checkpoint only in training mode, and the policy is in eval mode for the sake of dropout: the layers
        alone are switched, as far as the decision to checkpoint, and only while a gradient is wanted.
        """
        switch = self._checkpointing() if torch.is_grad_enabled() else []
        for one in switch:
            one.training = True
        try:
            yield
        finally:
            for one in switch:
                one.training = False

    def _checkpointing(self) -> list[Any]:
        """The modules that decide to checkpoint: layers, or what holds them where they do not know how."""
        found = [one for one in self.model.modules() if getattr(one, "gradient_checkpointing", False)]
        return [one for one in found if isinstance(one, GradientCheckpointingLayer)] or found

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


def _in_eval(layer: Any, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint``, with the layer in eval mode inside: some layers apply dropout themselves, by their own mode."""

    def checkpointed(call: Callable[..., Any], *arguments: Any) -> Any:
        def run(*arguments: Any) -> Any:
            before, layer.training = layer.training, False
            try:
                return call(*arguments)
            finally:
                layer.training = before

        return checkpoint(run, *arguments)

    return checkpointed


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


_GIVE = (
    "Give a folder that holds a transformers model with safetensors weights and its tokenizer, a name on the model "
    f"hub, or one of: {', '.join(SHIPPED)}."
)


def _loaded(what: str, name: str, load: Callable[..., Any], source: str, offline: str, **options: Any) -> Any:
    """What a loader of transformers gives; it runs no code that comes with a model, and does not ask whether to.

    Args:
        what: is loaded.
        name: of the model, as the user gave it.
        load: the loader.
        source: folder or hub name.
        offline: why the hub is not to be asked for what its cache lacks; empty where it may be.
        options: of the loader.
    """
    try:
        with _quiet():
            return load(source, trust_remote_code=False, local_files_only=bool(offline), **options)
    except Exception as error:  # files of others fail in every way
        raise ModelError(
            f"the {what} of '{name}' cannot be loaded: {offline or hub.first_line(error)}. {_GIVE}"
        ) from error


def load_part(what: str, name: str, load: Callable[..., Any]) -> Any:
    """A part of a model that is not its weights, such as its configuration; ``load`` is transformers' loader.

    Raises:
        ModelError: it cannot be loaded.
    """
    source, offline = _source(name)
    return _loaded(what, name, load, source, offline)


def _source(name: str) -> tuple[str, str]:
    """The folder or hub name of a model, and why the hub is not to be asked; see :func:`_loaded`.

    Raises:
        ModelError: there is no such folder, or it holds an adapter.
    """
    source = str(SHIPPED.get(name, Path(name).expanduser()))
    if name.startswith((".", "/", "~")) and not Path(source).is_dir():
        raise ModelError(f"there is no folder '{source}'. {_GIVE}")
    lora.refuse_folder(name, Path(source))
    return source, "" if Path(source).is_dir() else hub.unreachable()


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
    source, offline = _source(name)
    tokenizer = _loaded("tokenizer", name, AutoTokenizer.from_pretrained, source, offline)
    model, report = _loaded(
        "weights",
        name,
        AutoModelForCausalLM.from_pretrained,
        source,
        offline,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
    )
    lora.refuse_loaded(name, model)
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
    base = "" if adapter is None else lora.put_on(model, name, adapter)
    model.to(torch.device(device)).eval()
    return Policy(model, tokenizer, int(tokenizer.pad_token_id), frozenset(map(int, ends)), precision, base)
