"""The policy: a causal language model with its tokenizer, its optional LoRA adapter, and the ways in which it is asked.

Source of the adapter: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021,
https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlstab.config.settings import AdapterSettings, RolloutSettings
from rlstab.errors import ConfigError, DataError, ModelError
from rlstab.models.loading import load_model, quiet_transformers, save_adapter, vocabulary_size
from rlstab.models.shared_prompts import SharedPrompts, can_share, forward_shared, position_ids
from rlstab.signals import TokenSignals, token_signals_from_logits
from rlstab.signals.vocabulary_head import VocabularyHead, find_head
from rlstab.tasks.task import Example, Message, Task

#: Prompts of a split that are tried before a run begins, unless rows that do not fit are left out. A larger data set
#: has its later rows tried when they are asked.
TRIED = 100_000


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
            forward without the module that accelerate prepares, so the cast is here and not in accelerate's wrapper.
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
        with quiet_transformers():
            if self.base:
                save_adapter(self.model, folder, self.base)
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
        self, examples: Sequence[Example], settings: RolloutSettings, given: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(R, P)`` ids and mask of prompts, padded on the left; ``given`` tokens of the answers follow their prompts.

        Raises:
            DataError: see :meth:`tokens`.
        """
        rows = [self.tokens(example, settings) for example in examples]
        if given is not None:  # they are tokens of the answer, for which there is room
            rows = [[*tokens, *more] for tokens, more in zip(rows, given, strict=True)]
        width = max(map(len, rows), default=0)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.bool)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = True
        return ids.to(self.device), mask.to(self.device)

    def tokens(self, example: Example, settings: RolloutSettings) -> list[int]:
        """The tokens of a prompt.

        Raises:
            DataError: it cannot be written in tokens, has none, has one without an embedding, or leaves no room for
                the response.
        """
        tokens, room = self._tokens(example, settings), settings.max_new_tokens
        known = vocabulary_size(self.model.config)
        who = f"{example.where or 'the prompt'}: {example.prompt[:60]!r}"
        if not tokens:
            raise DataError(f"{who} has no token. Give the task a prompt_template with text.")
        if max(tokens) >= known:
            number = max(tokens)
            raise DataError(
                f"{who} has the token {number} ({self.decode([number])!r}), and the model has embeddings for "
                f"{known}. Resize its embeddings, or take the tokenizer that it was trained with."
            )
        if self.context_length is not None and len(tokens) + room > self.context_length:
            raise DataError(
                f"{who}... has {len(tokens)} tokens, which with {room} new tokens exceed the model's context of "
                f"{self.context_length}. Lower rollout.max_new_tokens, shorten the prompts, or take a model with a "
                f"longer context."
            )
        return tokens

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of some tokens of one response."""
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)  # a list of texts is the answer to a list of lists
        return text

    def _tokens(self, example: Example, settings: RolloutSettings) -> list[int]:
        who = f"{example.where or 'the prompt'}: {example.prompt[:60]!r}"
        if example.messages and not settings.chat:
            raise DataError(
                f"{who} is a list of messages, which only a chat template writes as tokens. Set rollout.chat to true."
            )
        try:
            if not settings.chat:
                return list(self.tokenizer(example.prompt)["input_ids"])
            messages = example.messages or (Message("user", example.prompt),)
            turns = [{"role": message.role, "content": message.content} for message in messages]
            variables: Any = settings.chat_template or {}
            ids: Any = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=False, **variables
            )
            return list(ids)
        except Exception as error:  # tokenizers raise a bare Exception for text outside their vocabulary
            cure = "Set rollout.chat to false" if settings.chat and not example.messages else "Change the prompts"
            raise DataError(
                f"{who} cannot be encoded by the tokenizer of '{self.tokenizer.name_or_path}': "
                f"{str(error).split('!')[0]}. {cure}, or take another model."
            ) from error

    def hinted(self, sequences: Sequences, hint: str) -> Sequences:
        """The same responses to prompts that begin with a hint."""
        ids = self.tokenizer(hint, add_special_tokens=False, return_tensors="pt")["input_ids"].to(self.device)
        before = ids.expand(len(sequences.prompt_ids), -1)
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
        needs: Set[str],
        temperature: float,
        options: Mapping[str, float] = MappingProxyType({}),
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
        self, sequences: Sequences, needs: Set[str], size: int, *, rows: Tensor | None = None, **asked: Any
    ) -> dict[str, Tensor]:
        """``(R, T)`` float32 signals without gradient, 0 where there is no token.

        Args:
            sequences: ``R`` prompts and responses.
            needs: which signals.
            size: rows in a forward.
            rows: ``(n,)`` int64, the others are 0 as well; None for all.
            asked: temperature and options of :meth:`signals`.
        """
        rows = torch.arange(len(sequences.response_ids)) if rows is None else rows
        shape, device = sequences.response_ids.shape, sequences.response_ids.device
        evidence = {name: torch.zeros(shape, device=device) for name in needs}
        for index_of_rows in rows.to(device).split(size):
            if not len(index_of_rows):
                continue
            part = sequences.rows(index_of_rows)
            index = part.response_mask.reshape(-1).nonzero().squeeze(-1)
            signals = self.signals(part, index, needs=needs, shared=self.shared_prompts(part), **asked)
            for name, values in evidence.items():
                given = getattr(signals, name)
                flat = torch.zeros(part.response_mask.numel(), dtype=given.dtype, device=device)
                padded = flat.index_copy(0, index, given).view(part.response_mask.shape)
                values[index_of_rows, : padded.shape[1]] = padded
        return evidence

    def _before_each_token(self, sequences: Sequences, shared: SharedPrompts | None) -> Tensor:
        """``(R, T, ...)`` hidden states where :attr:`head` is known, else logits, which predict the response tokens."""
        length = sequences.response_ids.shape[1]

        def forward(**inputs: Any) -> Tensor:
            inputs = self._with_cache(inputs)
            if self.head is not None:
                hidden: Tensor = self.model.base_model(**inputs, **self._plain).last_hidden_state
                return hidden
            logits: Tensor = self.model(**inputs, **self._plain, **self._keep(length + 1)).logits
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
        mask, sdpa = inputs["attention_mask"], self.model.config._attn_implementation == "sdpa"
        if mask.device.type != "cpu" and sdpa and self._shares_prompts and inputs["input_ids"].shape[1] == 1:
            # whether a mask of two dimensions is all ones is read in each step, which waits for the device
            inputs["attention_mask"] = mask[:, None, None].bool()
        return self.model(**self._with_cache(inputs), **self._plain, use_cache=True, **self._keep(1))

    def _with_cache(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The cache under the name that the model has for it: transformers 5.24 renames ``past_key_values``."""
        renamed = "past_key_values" in inputs and "cache" in self._arguments
        return {"cache" if renamed and name == "past_key_values" else name: value for name, value in inputs.items()}

    @cached_property
    def _plain(self) -> dict[str, bool]:
        """What switches router logits off: with them a mixture of experts computes a loss that fits no decoding."""
        on = getattr(self.model.config.get_text_config(), "output_router_logits", False)
        return {"output_router_logits": False} if on else {}

    def _keep(self, count: int) -> dict[str, int]:
        return {"logits_to_keep": count} if "logits_to_keep" in self._arguments else {}

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """The names of what the model's forward takes."""
        return frozenset(inspect.signature(self.model.forward).parameters)

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
    model, tokenizer, eos_ids, base = load_model(name, adapter, saved)
    nn.Module.to(model, device).eval()
    return Policy(model, tokenizer, int(tokenizer.pad_token_id), eos_ids, precision, base)


def require_prompts(
    policy: Policy, task: Task, rollout: RolloutSettings, watch: Callable[[range, str], Iterable[int]]
) -> list[str]:
    """Try the prompts of a task before a run begins; of a split without end, the first.

    Rows that do not fit are left out where the task says so by ``too_long``.

    Args:
        policy: that will be asked. Its model may be a description: ``config`` alone is read.
        task: whose prompts they are.
        rollout: how they are asked.
        watch: goes through a range under a title, and may show how far it is.

    Returns:
        what a user should know: rows that were left out.

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
        _require_template(policy.tokenizer, rollout.chat_template or {})
    told = _require_stops(policy, rollout.stop or ())
    skip = getattr(task, "too_long", "error") == "skip"
    for split, size in task.size.items():
        count = 1 if size is None else size if skip else min(size, TRIED)
        unfit: dict[int, DataError] = {}
        for index in watch(range(count), f"prompts in {split}"):
            try:
                policy.tokens(task.example(split, index), rollout)
            except DataError as error:
                unfit[index] = error
        if not unfit:
            continue
        first = next(iter(unfit.values()))
        if not skip or len(unfit) == size:
            more = f" {len(unfit) - 1} more of {count} do not fit either." if len(unfit) > 1 else ""
            cure = " Or leave such rows out by task.too_long: skip." if hasattr(task, "too_long") and not skip else ""
            raise DataError(f"{first}{more}{cure}")
        task.leave_out(split, unfit)  # type: ignore[attr-defined]  # what has `too_long` has it
        told.append(f"{len(unfit)} of {size} prompts in `{split}` are left out (task.too_long), the first as {first}")
    return told


def _require_template(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    template = variables.get("chat_template") or tokenizer.chat_template
    if template is None:
        raise ModelError(
            f"rollout.chat is true, and the tokenizer of '{tokenizer.name_or_path}' has no chat template. Take a model "
            f"that was trained on chats, or set rollout.chat to false."
        )
    read = {*re.findall(r"\w+", str(template))}
    for name in sorted(variables.keys() - read - {"chat_template"}):
        raise ModelError(
            f"rollout.chat_template: the template of '{tokenizer.name_or_path}' reads no variable '{name}'. Correct "
            f"the name, or leave it out."
        )


def _require_stops(policy: Policy, stops: Sequence[str]) -> list[str]:
    """Refuse a stop text that the tokenizer never writes; say which one looks like a special token and is not."""
    told = []
    for stop in stops:
        try:  # twice: a decoder may strip the blank before the first token
            ids = policy.tokenizer(stop + stop, add_special_tokens=False)["input_ids"]
            written = policy.decode(ids)
        except Exception:  # text outside of the vocabulary
            ids, written = [], ""
        if stop not in written or max(ids) >= vocabulary_size(policy.model.config):
            raise ConfigError(
                f"rollout.stop: the tokenizer of '{policy.tokenizer.name_or_path}' cannot write {stop!r}, so it would "
                f"end no response. Write it as the model does, or leave it out."
            )
        if re.fullmatch(r"<\|[^|]*\|>|\[[A-Z/_]+\]|</?s>", stop) and len(policy.tokenizer.tokenize(stop)) > 1:
            told.append(
                f"rollout.stop: {stop!r} is not a token of the model, which has to spell it out to end a response"
            )
    return told


def require_same_tokens(policy: Policy, teacher: Policy, name: str) -> None:
    """Raises ModelError: a teacher has other tokens than the policy, so that it cannot grade the policy's."""
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(
            f"model.teacher '{name}' has another vocabulary than the policy, and grades tokens by their ids. Name a "
            f"teacher with the same tokenizer."
        )


def require_trainable(policy: Policy, name: str) -> None:
    """Raises ModelError: no weight of a model requires a gradient, so that nothing would be learnt."""
    if not any(weight.requires_grad for weight in policy.model.parameters()):
        raise ModelError(
            f"no weight of '{name}' can be trained: none requires a gradient. Give a model in a floating point format, "
            f"or put an adapter on it with model.adapter."
        )
