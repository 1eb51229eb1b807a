"""The policy: a causal language model with its tokenizer, its optional LoRA adapter, and its forwards.

Source of the adapter: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021,
https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from transformers.utils import logging as transformers_logging

from rlstab.config.settings import AdapterSettings, RolloutSettings
from rlstab.core.devices import on_cpu, sent
from rlstab.core.padding import joined_rows, rows_of
from rlstab.core.turns import context_of
from rlstab.errors import ConfigError, DataError, ModelError
from rlstab.files import filesystem_errors
from rlstab.hub import first_line, quiet
from rlstab.models.loading import load_model, save_adapter, vocabulary_size
from rlstab.models.shared_prompts import SharedPrompts, can_share, forward_shared, position_ids
from rlstab.models.vocabulary_head import VocabularyHead, embeds_the_vocabulary, find_head
from rlstab.signals import Teacher, TokenSignals, token_signals_from_logits
from rlstab.tasks.task import Example, Message, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Prompts of a split that are tried before a run begins, unless rows that do not fit are left out. Later rows of a
#: larger data set are tried when they are used.
TRIED = 100_000


#: The ``(R, T, K)`` tensors of :class:`Sequences`, with their dtypes.
LISTS = {"support": torch.int32, "sampler_ids": torch.int32, "sampler_logprobs": torch.float32}

#: What pads these to more tokens and a larger K; 0 for the others.
FILLS = {"support": -1, "sampler_logprobs": -torch.inf}


@dataclass(frozen=True)
class Sequences:
    """Rows of prompt and response, padded to the longest: prompts on the left, responses on the right.

    They lie on the CPU, which decides from them what to forward, and are sent to the device of the model.

    Attributes:
        prompt_ids, prompt_mask: ``(R, P)`` int64 and bool.
        response_ids, response_mask: ``(R, T)`` int64 and bool, the mask True on the tokens that the policy wrote, up to
            and including the end. Masked tokens between them are replies of the environment, which later tokens read.
        support: ``(R, T, K)`` int32, the tokens that the sampler kept (:mod:`rlstab.signals.support`); K is 0 where it
            draws from the whole vocabulary, or nothing reads them. None is K = 0.
        sampler_ids, sampler_logprobs: ``(R, T, K)`` int32 and float32, the sampler's likeliest tokens before top-p and
            top-k, and their log-probs over the whole vocabulary, where the sampler is the teacher; else K is 0.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    support: Tensor = None  # type: ignore[assignment]  # until __post_init__
    sampler_ids: Tensor = None  # type: ignore[assignment]  # as above
    sampler_logprobs: Tensor = None  # type: ignore[assignment]  # as above

    def __post_init__(self) -> None:
        for name, dtype in LISTS.items():
            if getattr(self, name) is None:
                empty = self.response_ids.new_zeros((*self.response_ids.shape, 0), dtype=dtype)
                object.__setattr__(self, name, empty)

    @property
    def responses(self) -> dict[str, Tensor]:
        """The ``(R, T)`` and ``(R, T, K)`` tensors of the responses, by name."""
        return {name: getattr(self, name) for name in ("response_ids", "response_mask", *LISTS)}

    @property
    def context(self) -> Tensor:
        """``(R, T)`` bool, the tokens of responses and of replies between them."""
        return context_of(self.response_mask)

    def rows(self, index: Tensor) -> Sequences:
        """Some of the rows, cut to their own longest prompt and response."""
        prompt_mask, response_mask = self.prompt_mask[index], self.response_mask[index]
        width, length = 0, 0
        if index.numel():
            width, length = int(prompt_mask.sum(-1).max()), int(context_of(response_mask).sum(-1).max())
        start = self.prompt_ids.shape[1] - width
        responses = {name: values[index][:, :length] for name, values in self.responses.items()}
        return Sequences(self.prompt_ids[index][:, start:], prompt_mask[:, start:], **responses)

    @classmethod
    def joined(cls, parts: Iterable[Sequences], pad_id: int) -> Sequences:
        """The rows of all parts, padded to the longest of them."""
        parts, fills = list(parts), FILLS | {"prompt_ids": pad_id, "response_ids": pad_id}
        tensors = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        return cls(
            **{
                name: joined_rows(rows, fills.get(name, 0), left=name.startswith("prompt"))
                for name, rows in tensors.items()
            }
        )

    def cut(self, length: int) -> Sequences:
        """The first ``length`` tokens of each response, whose signals do not depend on later tokens."""
        return replace(self, **{name: values[:, :length] for name, values in self.responses.items()})


@dataclass(frozen=True)
class Policy:
    """A model in float32 and in eval mode, with its tokenizer.

    Attributes:
        precision: ``bf16`` runs forwards in autocast over the float32 weights. Sampling, evidence and the reference do
            not run through the module that accelerate prepares, so the cast is here and not in accelerate's wrapper.
        base: a checksum of the frozen weights of a model with an adapter; empty if all weights are trained.
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
        """The most tokens of prompt and response together; None if the model does not say."""
        length = getattr(self.model.config, "max_position_embeddings", None)
        return length if isinstance(length, int) else None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which forwards run."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def save(self, folder: Path, *, weights: bool = True) -> None:
        """Write the weights, or only the adapter, as safetensors, and the tokenizer, for :func:`load_policy`.

        Without ``weights``, those of a whole model are left out.
        """
        with quiet(transformers_logging):
            if self.base:
                save_adapter(self.model, folder, self.base)
            else:
                self.model.save_pretrained(folder, state_dict=None if weights else {})
            self.tokenizer.save_pretrained(folder)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The context in which the adapter is off, so that the policy is the model without it."""
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
        self, examples: Sequence[Example], settings: RolloutSettings, given: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(R, P)`` ids and mask of prompts, padded on the left; ``given`` tokens of the answers follow their prompts.

        On the CPU.

        Raises:
            DataError: see :meth:`tokens`.
        """
        rows = [self.tokens(example, settings) for example in examples]
        if given is not None:  # they are tokens of the answer, for which there is room
            rows = [[*tokens, *begun] for tokens, begun in zip(rows, given, strict=True)]
        masks = [[True] * len(row) for row in rows]
        return rows_of(rows, torch.int64, self.pad_id, left=True), rows_of(masks, torch.bool, left=True)

    def tokens(self, example: Example, settings: RolloutSettings) -> list[int]:
        """The tokens of a prompt.

        Raises:
            DataError: it cannot be encoded, has no token, has one without an embedding, or leaves no room for the
                response.
        """
        vocabulary, room = vocabulary_size(self.model.config), settings.max_new_tokens
        label = f"{example.where or 'the prompt'}: {example.prompt[:60]!r}"
        if example.messages and not settings.chat:
            raise DataError(f"{label} is a list of messages, which need a chat template. Set rollout.chat to true.")
        try:
            if settings.chat:
                messages = example.messages or (Message("user", example.prompt),)
                turns = [{"role": message.role, "content": message.content} for message in messages]
                options: dict[str, Any] = {"add_generation_prompt": True, **(settings.chat_template or {})}
                ids: Any = self.tokenizer.apply_chat_template(turns, return_dict=False, **options)
            else:
                ids = self.tokenizer(example.prompt)["input_ids"]
            tokens: list[int] = list(ids)
        except Exception as error:  # tokenizers raise a bare Exception for text outside of their vocabulary
            cure = "Set rollout.chat to false" if settings.chat and not example.messages else "Change the prompts"
            raise DataError(
                f"{label} cannot be encoded by the tokenizer of '{self.tokenizer.name_or_path}': "
                f"{str(error).split('!')[0]}. {cure}, or take another model."
            ) from error
        if not tokens:
            raise DataError(f"{label} has no token. Give the task a prompt_template with text.")
        if max(tokens) >= vocabulary:
            number = max(tokens)
            raise DataError(
                f"{label} has the token {number} ({self.decode([number])!r}), and the model has embeddings for "
                f"{vocabulary}. Resize its embeddings, or take the tokenizer that it was trained with."
            )
        if self.context_length is not None and len(tokens) + room > self.context_length:
            raise DataError(
                f"{label}... has {len(tokens)} tokens, which with {room} new tokens exceed the model's context of "
                f"{self.context_length}. Lower rollout.max_new_tokens, shorten the prompts, or take a model with a "
                f"longer context."
            )
        return tokens

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of some tokens of one response."""
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)  # lists of lists give lists of texts
        return text

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text inside a response, which nothing begins or ends."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def hinted(self, sequences: Sequences, hint: str) -> Sequences:
        """The same responses to prompts that begin with a hint.

        Raises:
            DataError: the hint cannot be encoded.
        """
        try:
            hinted: Any = self.tokenizer(hint, add_special_tokens=False)["input_ids"]
        except Exception as error:  # as in tokens
            raise DataError(
                f"model.teacher_prompt: {hint[:60]!r} cannot be encoded by the tokenizer of "
                f"'{self.tokenizer.name_or_path}': {str(error).split('!')[0]}. Change it, or take another model."
            ) from error
        before = torch.tensor(hinted, dtype=torch.int64).expand(len(sequences.prompt_ids), -1)
        mask = torch.cat([torch.ones_like(before, dtype=torch.bool), sequences.prompt_mask], dim=1)
        ids = torch.cat([before, sequences.prompt_ids], dim=1)
        order = mask.long().argsort(dim=1, stable=True)  # padding first, then the tokens in their order
        return replace(sequences, prompt_ids=ids.gather(1, order), prompt_mask=mask.gather(1, order))

    # -- forwards ----------------------------------------------------------------------------------------------------

    def signals(
        self,
        sequences: Sequences,
        index: Tensor,
        *,
        options: Mapping[str, float] = MappingProxyType({}),
        shared: SharedPrompts | None = None,
        **requested: Any,
    ) -> TokenSignals:
        """Signals of the response tokens at ``index`` of the flattened ``(R, T)``, by one forward over the rows.

        They are made from hidden states if :attr:`head` is known, so that no logits are held and tokens without
        gradient cost no backward pass through the vocabulary; else from the logits. ``shared`` prompts are forwarded
        once each; see :meth:`shared_prompts`. ``requested`` are ``needs``, ``temperature``, ``rows`` and ``teacher`` of
        :func:`rlstab.signals.token_signals_from_logits`; the last two have a row for each of these tokens.
        """
        values = [sequences.response_ids.flatten()[index], sequences.support.flatten(0, 1)[index]]
        ids, support = (sent(value, self.device) for value in values)
        requested |= {"support": support, "check_ids": not embeds_the_vocabulary(self.model)}
        requested |= {"min_p": options.get("min_p"), "beta": options.get("beta", 1.0)}
        output = self._before_tokens(sequences, index, shared)
        if self.head is None:
            return token_signals_from_logits(output, ids, **requested)
        return self.head.signals(output, ids, self._product_dtype, **requested)

    @torch.no_grad()
    def teacher(self, sequences: Sequences, index: Tensor) -> Teacher:
        """The distributions before the response tokens at ``index`` of the flattened ``(R, T)``, to teach a policy.

        They read the weight of the head where it is, so use them only while the weights are whole.
        """
        assert self.head is not None
        output = self._before_tokens(sequences, index, self.shared_prompts(sequences))
        return self.head.teacher(output, self._product_dtype)

    @property
    def _product_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bf16" else None

    @torch.no_grad()
    def evidence(
        self, sequences: Sequences, needs: Set[str], size: int, *, rows: Tensor | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """``(R, T)`` float32 signals on the CPU without gradient, 0 where there is no token.

        Where the rows have a support, log-probs are over it, as those of their sampler.

        Args:
            sequences: ``R`` prompts and responses.
            needs: which signals.
            size: rows in a forward.
            rows: ``(n,)`` int64, the rows to compute; others are 0. None computes all.
            options: temperature and options of :meth:`signals`.
        """
        rows = torch.arange(len(sequences.response_ids)) if rows is None else rows
        over_support = sequences.support.shape[-1] > 0
        needs = needs | ({"log_support_mass"} if over_support else set())
        names, cells, columns = sorted(needs), [], list[Tensor]()
        for index_of_rows in rows.split(size):
            if not len(index_of_rows):
                continue
            part = sequences.rows(index_of_rows)
            index = part.response_mask.reshape(-1).nonzero().squeeze(-1)
            signals = self.signals(part, index, needs=needs, shared=self.shared_prompts(part), **options)
            width = part.response_mask.shape[1]
            cells.append((index_of_rows[index // width], index % width))
            columns += [getattr(signals, name) for name in names]
        evidence = {name: torch.zeros(sequences.response_ids.shape) for name in needs}
        for number, values in enumerate(on_cpu(columns)):  # one wait for the device
            evidence[names[number % len(names)]][cells[number // len(names)]] = values.float()
        if over_support and "logprobs" in needs:
            evidence["logprobs"] -= evidence["log_support_mass"]
        return evidence

    def _before_tokens(self, sequences: Sequences, index: Tensor, shared: SharedPrompts | None) -> Tensor:
        """``(n, ...)`` hidden states if :attr:`head` is known, else logits, that predict the tokens at ``index``."""
        length = sequences.response_ids.shape[1]

        def forward(**inputs: Any) -> Tensor:
            if self.head is not None:
                hidden: Tensor = self.model.base_model(**self._by_name(0, **inputs)).last_hidden_state
                return hidden
            logits: Tensor = self.model(**self._by_name(length + 1, **inputs)).logits
            return logits

        ids = sent(torch.cat([sequences.prompt_ids, sequences.response_ids], 1), self.device)
        mask, width = sent(torch.cat([sequences.prompt_mask, sequences.context], 1), self.device), ids.shape[1] - length
        with self.autocast():
            if shared is None:
                inputs = {"attention_mask": mask.long(), "position_ids": position_ids(mask)}
                output = forward(input_ids=ids, use_cache=False, **inputs)[:, -length - 1 : -1]
            else:
                shared = SharedPrompts(sent(shared.rows, self.device), sent(shared.of, self.device))
                output = forward_shared(forward, self.model.config, ids, mask, width, shared)
        return output.reshape(-1, output.shape[-1])[sent(index, self.device)]

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """Which prompts of some sequences are worth a shared forward; None if none are, or sharing is not possible.

        Gradient checkpointing keeps no keys and values.
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
        """How hidden states become logits in this model; None if that is more than a product and a scale."""
        return find_head(self.model)

    def next_logits(self, **inputs: Any) -> Any:
        """One step of decoding: the model's output, its logits for the last position only."""
        mask, sdpa = inputs["attention_mask"], self.model.config._attn_implementation == "sdpa"
        if mask.device.type != "cpu" and sdpa and self._shares_prompts and inputs["input_ids"].shape[1] == 1:
            # of a mask with two dimensions, each step checks whether it is all ones, which waits for the device
            inputs["attention_mask"] = mask[:, None, None].bool()
        return self.model(**self._by_name(1, use_cache=True, **inputs))

    def _by_name(self, keep: int, **inputs: Any) -> dict[str, Any]:
        """The arguments of a forward by the model's names for them, with logits of the last ``keep`` positions.

        transformers 5.24 renames ``past_key_values``. Router logits are switched off: their loss, in a mixture of
        experts, would break decoding.
        """
        if "past_key_values" in inputs and "cache" in self._arguments:
            inputs["cache"] = inputs.pop("past_key_values")
        if getattr(self.model.config.get_text_config(), "output_router_logits", False):
            inputs["output_router_logits"] = False
        return inputs | ({"logits_to_keep": keep} if keep and "logits_to_keep" in self._arguments else {})

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """The names of the arguments of the model's forward."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The layers, by the names of their classes, which an engine may change; empty if the model names none."""
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        return [module for module in self.model.modules() if type(module).__name__ in names]

    def checkpoint_gradients(self) -> None:
        """Recompute the activations of each layer in the backward pass.

        This uses torch's wrapper, as accelerate does: layers of transformers checkpoint only in training mode, which
        would switch dropout on.

        Raises:
            ModelError: the model does not support it.
        """
        if not self.model.supports_gradient_checkpointing or not self.layers:
            raise ModelError(
                f"'{self.tokenizer.name_or_path}' does not support gradient checkpointing. Set "
                f"optimisation.gradient_checkpointing to false and lower optimisation.micro_batch_size."
            )
        apply_activation_checkpointing(self.model, check_fn=self.layers.__contains__)


# -- loading ----------------------------------------------------------------------------------------------------------


def load_policy(
    name: str,
    *,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    adapter: AdapterSettings | None = None,
    saved: Path | None = None,
) -> Policy:
    """A causal language model by shipped name, folder or hub name, in float32 and in eval mode.

    Eval mode switches dropout off, because the ratio compares two policies, not two dropout masks.

    Args:
        name: the name of the model.
        device: the device of the weights.
        precision: see :class:`Policy`.
        adapter: put on the model, so that only the adapter is trained.
        saved: a checkpoint that has the weights: all of them, or those of the adapter.

    Raises:
        ModelError: the model cannot be loaded, or has no pad or EOS token.
        MissingPackage: an adapter is given, and peft is not installed.
    """
    model, tokenizer, eos_ids, base = load_model(name, adapter, saved)
    nn.Module.to(model, device).eval()
    return Policy(model, tokenizer, int(tokenizer.pad_token_id), eos_ids, precision, base)


def require_prompts(
    policy: Policy, task: Task, rollout: RolloutSettings, watch: Callable[[range, str], Iterable[int]]
) -> tuple[list[str], list[Example]]:
    """Try the prompts of a task before a run begins; of an unlimited split, the first.

    Rows that do not fit are left out if the task allows it by ``too_long``.

    Args:
        policy: the one that will get the prompts. Only ``config`` of its model is read.
        task: the one that has the prompts.
        rollout: how responses are sampled.
        watch: iterates over a range under a title, and may show the progress.

    Returns:
        notes for the user, such as on rows that were left out; and the shortest and the longest prompt in tokens.

    Raises:
        ConfigError: prompts are lists of messages, and ``rollout.chat`` is false; or a stop text cannot be written.
        ModelError: ``rollout.chat`` is true, and the tokenizer has no chat template, or one that reads other variables.
        DataError: see :meth:`Policy.tokens`.
    """
    examples = [task.example(split, 0) for split, size in task.size.items() if size != 0]
    if not rollout.chat and any(example.messages for example in examples):
        raise ConfigError(
            f"the prompts of the task '{task.name}' are lists of messages. Set rollout.chat to true, or make the "
            f"prompts text and leave `system` out."
        )
    if rollout.chat:
        variables, tokenizer = rollout.chat_template or {}, policy.tokenizer
        template = variables.get("chat_template") or tokenizer.chat_template
        if template is None:
            raise ModelError(
                f"rollout.chat is true, and the tokenizer of '{tokenizer.name_or_path}' has no chat template. Take a "
                f"model that was trained on chats, or set rollout.chat to false."
            )
        for name in sorted(variables.keys() - {*re.findall(r"\w+", str(template)), "chat_template"}):
            raise ModelError(
                f"rollout.chat_template: the template of '{tokenizer.name_or_path}' reads no variable '{name}'. "
                f"Correct the name, or leave it out."
            )
    notes = require_stop_texts(policy.tokenizer, vocabulary_size(policy.model.config), rollout.stop or ())
    sizes = dict[int, Example]()
    skip = getattr(task, "too_long", "error") == "skip"
    for split, size in task.size.items():
        count = 1 if size is None else size if skip else min(size, TRIED)
        unfit: dict[int, DataError] = {}
        for index in watch(range(count), f"prompts in {split}"):
            try:
                example = task.example(split, index)
                sizes.setdefault(len(policy.tokens(example, rollout)), example)
            except DataError as error:
                unfit[index] = error
        if not unfit:
            continue
        first = next(iter(unfit.values()))
        if not skip or len(unfit) == size:
            rest = f" {len(unfit) - 1} more of {count} do not fit." if len(unfit) > 1 else ""
            some_fit = hasattr(task, "too_long") and len(unfit) < count
            cure = " Or leave such rows out by task.too_long: skip." if some_fit else ""
            raise DataError(f"{first}{rest}{cure}")
        task.leave_out(split, unfit)  # type: ignore[attr-defined]  # tasks with `too_long` have it
        notes.append(f"{len(unfit)} of {size} prompts in `{split}` are left out (task.too_long), the first as {first}")
    return notes, [sizes[min(sizes)], sizes[max(sizes)]]


def require_stop_texts(tokenizer: Any, vocabulary: int, stops: Sequence[str]) -> list[str]:
    """Refuse stop texts that the tokenizer cannot write; notes name those that only look like special tokens.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: the number of tokens that the model has embeddings for.
        stops: the stop texts.

    Raises:
        ConfigError: names the text.
    """
    notes = []
    for stop in stops:
        try:  # twice: a decoder may strip the blank before the first token
            ids = tokenizer(stop + stop, add_special_tokens=False)["input_ids"]
            written = tokenizer.decode(ids, skip_special_tokens=False)
        except Exception:  # text outside of the vocabulary
            ids, written = [], ""
        if stop not in written or max(ids) >= vocabulary:
            raise ConfigError(
                f"rollout.stop: the tokenizer of '{tokenizer.name_or_path}' cannot write {stop!r}, so it would end no "
                f"response. Write it as the model does, or leave it out."
            )
        if re.fullmatch(r"<\|[^|]*\|>|\[[A-Z/_]+\]|</?s>", stop) and len(tokenizer.tokenize(stop)) > 1:
            notes.append(
                f"rollout.stop: {stop!r} is not a token of the model, which has to spell it out to end a response"
            )
    return notes


def require_saved(policy: Policy, name: str, examples: Sequence[Example], settings: RolloutSettings) -> None:
    """Write what a checkpoint has beside whole weights once before a run begins, read it back, and compare.

    Args:
        policy: tokenizer, and configuration or adapter.
        name: the model in errors.
        examples: prompts that both tokenizers encode.
        settings: how.

    Raises:
        ModelError: it cannot be read, or differs.
        ConfigError: the folder of temporary files cannot be written.
    """
    from transformers import AutoConfig, AutoTokenizer

    def content(tokenizer: Any, folder: str = "") -> dict[str, Any]:
        config = AutoConfig.from_pretrained(folder) if folder and not policy.base else policy.model.config
        of_folder = replace(policy, tokenizer=tokenizer)
        text = re.sub('"_name_or_path": .*', "", config.to_json_string(use_diff=False))  # which has no tuples
        return {
            "vocabulary": tokenizer.get_vocab(),
            "special tokens": tokenizer.special_tokens_map,
            "chat template": tokenizer.chat_template,
            "tokens of a prompt": [of_folder.tokens(example, settings) for example in examples],
            "configuration": text,
        }

    try:
        with TemporaryDirectory(prefix="rlstab-") as folder:
            with filesystem_errors(Path(folder)):
                policy.save(Path(folder), weights=False)
            after = content(AutoTokenizer.from_pretrained(folder), folder)
        before = content(policy.tokenizer)
        changed = [f"another {part} would be read" for part in before if before[part] != after[part]]
    except ConfigError:
        raise
    except Exception as error:  # of transformers and of tokenizers, of any kind
        changed = [first_line(error)]
    if changed:
        raise ModelError(
            f"a checkpoint of '{name}' could not be used: {changed[0]}. Correct that with the installed transformers, "
            f"save the model and its tokenizer again, or take another model."
        )


def require_same_tokens(policy: Policy, teacher: Policy, name: str, *, distributions: bool) -> None:
    """Raises ModelError: a teacher has other tokens than the policy, or no ``distributions`` over them to read."""
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(
            f"model.teacher '{name}' has another vocabulary than the policy, and grades tokens by their ids. Name a "
            f"teacher with the same tokenizer."
        )
    if not distributions:
        return
    if teacher.head is None:
        raise ModelError(
            f"the logits of model.teacher '{name}' are more than a product of hidden states and a weight, by which "
            f"'distill' reads them. Name another teacher, or use 'opd'."
        )
    rows, vocabulary = teacher.head.linear.out_features, vocabulary_size(policy.model.config)
    if rows < vocabulary:
        raise ModelError(
            f"model.teacher '{name}' has logits for {rows} tokens and the policy for {vocabulary}, which 'distill' "
            f"compares. Resize the teacher's embeddings, or use 'opd'."
        )
