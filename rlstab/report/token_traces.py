"""Reads token traces: those of `rlstab train`, and the token export of prime-rl."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from rlstab.errors import ReportError
from rlstab.files import exists, is_file
from rlstab.report.formatting import counted
from rlstab.trace.effects import ACTIONS
from rlstab.trace.token_texts import token_texts

#: A value of a token, far from overflow; None where it was not finite, or was not given.
_Value = Annotated[float, Field(ge=-1e30, le=1e30)]
Number = _Value | None
#: What tokenizers take for the number of a token.
_Id = Annotated[int, Field(ge=0, lt=2**32)]
#: Values by token.
Numbers = list[Number]


@dataclass(frozen=True)
class Method:
    """What one method did to the tokens of a response.

    Attributes:
        name: of the method; the key under which it stands is the prefix of its metrics.
        actions: by action (see :data:`rlstab.trace.effects.ACTIONS`) the places of the tokens, ascending.
        weight, bonus, gate: by place, where the method has one of its own.
    """

    name: str
    actions: Mapping[str, list[int]]
    weight: Mapping[int, float] = field(default_factory=dict)
    bonus: Mapping[int, float] = field(default_factory=dict)
    gate: Mapping[int, float] = field(default_factory=dict)


class _Columns(BaseModel):
    """What samples and the lines of ``tokens.jsonl`` share."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    rollout: int
    optimizer_step: int | None = None
    prompt: str = ""
    reward: float | None = None
    tokens: Annotated[list[str], Field(min_length=1)]
    ids: list[int] = []
    entropies: Numbers = []
    ratio: Numbers = []
    weight: Numbers = []
    kept: list[bool] = []
    bonus: Numbers = []
    unclipped: list[bool] = []
    clipped: list[bool] = []
    gate: Numbers = []


class Sample(_Columns):
    """One response in one optimizer step. Lists have one entry per token; an empty one was not in the file.

    Attributes:
        rollout: from 1; what prime-rl calls a step.
        optimizer_step: from 1, or None.
        response: names the response in its run.
        group: names its prompt, or is None.
        reward: None where the file has none.
        tokens: their texts.
        ids: of the tokens.
        surprisal: minus the log-prob under the policy that sampled, nats.
        entropies: nats.
        advantages: by token.
        ratio, weight, kept, bonus, unclipped, clipped, gate: see :class:`rlstab.trace.effects.Trace`.
        methods: by key.
    """

    response: str
    group: str | None = None
    surprisal: Numbers = []
    advantages: Numbers = []
    methods: Mapping[str, Method] = {}

    def influence(self) -> list[float]:
        """By token, how far the methods moved its pull: ``|w g k c (A + b) r - A r|``.

        w is the weight, g the gate, k 0 where the token is dropped and c 0 where it is clipped (else 1), b the bonus, r
        the ratio, A the advantage; what is not known is taken for the identity. Penalties pull on their own and are not
        in it.
        """

        def column(values: Sequence[float | None], identity: float) -> NDArray[np.float64]:
            known = [identity if value is None else value for value in values]
            return np.array(known or [identity] * len(self.tokens), dtype=np.float64)

        advantage, ratio = column(self.advantages, 0.0), column(self.ratio, 1.0)
        factor = column(self.weight, 1.0) * column(self.gate, 1.0) * column(self.kept, 1.0)
        factor *= 1.0 - column(self.clipped, 0.0)
        influence: list[float] = np.abs(
            factor * (advantage + column(self.bonus, 0.0)) * ratio - advantage * ratio
        ).tolist()
        return influence


@dataclass(frozen=True)
class Tokens:
    """What was read.

    Attributes:
        samples: in the order of the files.
        notes: what is left out and why, and what the reader of the page should know of the source.
    """

    samples: list[Sample]
    notes: list[str]


def read_tokens(path: str | Path, tokenizer: str | Path | None = None) -> Tokens:
    """Read the traces of a run folder, or of a file.

    Args:
        path: a folder of `rlstab train` (its ``tokens.jsonl``), a folder of prime-rl or its ``token_exports`` or one of
            its ``step_N`` (``rank_*.jsonl``), or one such file.
        tokenizer: folder of a tokenizer, or its ``tokenizer.json``: gives the texts to a file that has only ids.

    Raises:
        ReportError: no such path, no trace there, no usable line in it, or the tokenizer cannot be read.
    """
    path = Path(path)
    decode = None if tokenizer is None else decoder(Path(tokenizer))
    samples: list[Sample] = []
    damaged: dict[str, list[int]] = {}
    notes: list[str] = []
    for file in _files(path):
        for number, line in _lines(file):
            try:
                samples.append(_ANY.validate_json(line).sample(decode))
            except ValidationError:
                damaged.setdefault(file.name if file == path else str(file.relative_to(path)), []).append(number)
    if not samples:
        count = sum(map(len, damaged.values()))
        what = f"no trace in its {counted(count, 'line')}" if count else "it holds no trace"
        raise ReportError(
            f"{path}: {what}. Set tracking.trace_every in the run file and train; a run that skipped every optimizer "
            f"step has none."
        )
    for name, numbers in damaged.items():
        first = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        notes.append(f"{name}: left out {counted(len(numbers), 'damaged line')}: {first}.")
    if decode is None and not all(any(sample.tokens) for sample in samples):
        notes.append("The file has token ids and no text. Give the folder of its tokenizer with --tokenizer.")
    return Tokens(samples, notes)


def _files(path: Path) -> list[Path]:
    if is_file(path):
        return [path]
    if not exists(path):
        raise ReportError(f"{path}: no such file or folder. Give a run folder, or a file of token traces (.jsonl).")
    if (path / "tokens.jsonl").is_file():
        return [path / "tokens.jsonl"]
    if files := exports(path):
        return files
    raise ReportError(
        f"{path}: no tokens.jsonl and no token_exports in it. Set tracking.trace_every in the run file, for example "
        f"50, and train."
    )


def exports(path: Path) -> list[Path]:
    """Files that prime-rl exported below a folder, by step and rank; none where there are none."""
    for pattern in ("rank_*.jsonl", "step_*/rank_*.jsonl", "token_exports/step_*/rank_*.jsonl"):
        if files := list(path.glob(pattern)):
            return sorted(files, key=lambda file: (last_number(file.parent.name), last_number(file.stem)))
    return []


def last_number(name: str) -> int:
    """The number at the end of a name such as ``step_20`` or ``checkpoint-20``; 0 without one."""
    digits = re.split("[-_]", name)[-1]
    return int(digits) if digits.isdecimal() else 0


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not empty, as they stand: what cannot be read is counted by the caller."""
    if file.exists() and not file.is_file():
        raise ReportError(f"{file}: is not an ordinary file. Give a file of token traces (.jsonl).")
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ReportError(f"{file}: cannot be read: {error.strerror}. Give a file that you may read.") from error


def decoder(path: Path) -> Callable[[list[int]], str]:
    """What gives ids their text, from a folder of a tokenizer or its ``tokenizer.json``."""
    from tokenizers import Tokenizer  # comes with transformers; only this option pays for it

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ReportError(f"{file}: not a tokenizer: {error}. Give a folder with a tokenizer.json.") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


class _OwnLine(_Columns):
    """A line of ``tokens.jsonl``."""

    sequence_id: int
    group_id: int | None = None
    advantage: Number = None
    logprobs: Numbers = []
    methods: dict[str, dict[str, list[int] | list[tuple[int, _Value]]]] = {}
    names: dict[str, str] = {}

    @model_validator(mode="after")
    def _fit(self) -> _OwnLine:
        _same_length(len(self.tokens), *(value for _, value in self if isinstance(value, list)))
        for method in self.methods.values():
            for entry in (entry for entries in method.values() for entry in entries):
                place = entry if isinstance(entry, int) else entry[0]
                if not 0 <= place < len(self.tokens):
                    raise ValueError(f"token {place} of {len(self.tokens)}")
        return self

    def sample(self, decode: Callable[[list[int]], str] | None) -> Sample:
        return Sample.model_construct(  # checked above
            **{name: _known(getattr(self, name)) for name in _Columns.model_fields},
            response=str(self.sequence_id),
            group=None if self.group_id is None else str(self.group_id),
            surprisal=_negated(self.logprobs),
            advantages=_known([self.advantage] * len(self.tokens)),
            methods={key: self._method(key, entries) for key, entries in self.methods.items()},
        )

    def _method(self, key: str, entries: Mapping[str, list[Any]]) -> Method:
        return Method(
            self.names.get(key, key.rpartition("/")[2]),
            {action: sorted(entries[action]) for action in ACTIONS if entries.get(action)},
            *(dict(entries.get(name, [])) for name in ("weight", "bonus", "gate")),
        )


class _PrimeLine(BaseModel):
    """A line of prime-rl's ``token_exports/step_N/rank_R.jsonl`` (schema_version 1).

    Read: ``step``, ``rank``, ``export_sequence_idx``, ``env_name``, ``token_ids``, ``loss_mask``, ``advantages``,
    ``inference_logprobs``, ``trainer_logprobs``, ``entropy``, ``importance_ratio``, ``is_masked``, ``rl_weights``,
    ``ce_weights``, ``ref_kl_weights``. All but the ids and the loss mask may be missing.

    Derived: surprisal is minus ``inference_logprobs`` (minus ``trainer_logprobs`` where those are missing); the prompt
    is the ids before the first token in the loss. Later tokens outside the loss are shown as dropped by ``loss_mask``;
    ``is_masked``, the tokens that the trust region of prime-rl's default loss has stopped, as clipped by
    ``trust_region``; tokens with a weight in ``ref_kl_weights`` or ``ce_weights`` as regularised by ``ref_kl`` or
    ``ce``. The export has no reward and no text.
    """

    model_config = _Columns.model_config
    step: int
    rank: int = 0
    export_sequence_idx: int = 0
    env_name: str | None = None
    token_ids: list[_Id]
    loss_mask: list[bool]
    advantages: Numbers = []
    inference_logprobs: Numbers = []
    trainer_logprobs: Numbers = []
    entropy: Numbers = []
    importance_ratio: Numbers = []
    is_masked: list[bool | None] = []
    rl_weights: Numbers = []
    ce_weights: Numbers = []
    ref_kl_weights: Numbers = []

    @model_validator(mode="after")
    def _fit(self) -> _PrimeLine:
        _same_length(len(self.token_ids), self.loss_mask, *(value for _, value in self if isinstance(value, list)))
        if not any(self.loss_mask):
            raise ValueError("no token is in the loss")
        return self

    def sample(self, decode: Callable[[list[int]], str] | None) -> Sample:
        start = self.loss_mask.index(True)
        count = len(self.token_ids) - start
        ids, mask = self.token_ids[start:], self.loss_mask[start:]
        places: dict[str, tuple[str, Sequence[object]]] = {
            "loss_mask": ("dropped", [not inside for inside in mask]),
            "trust_region": ("clipped", self.is_masked[start:]),
            "ref_kl": ("regularised", self.ref_kl_weights[start:]),
            "ce": ("regularised", self.ce_weights[start:]),
        }
        prompt = "" if not start else f"({start} tokens)" if decode is None else decode(self.token_ids[:start])
        sampled = self.inference_logprobs if _known(self.inference_logprobs) else self.trainer_logprobs
        return Sample.model_construct(
            rollout=self.step,
            response=f"{self.rank}-{self.export_sequence_idx}",
            group=self.env_name,
            prompt=prompt,
            tokens=[""] * count if decode is None else token_texts(decode, ids),
            ids=ids,
            surprisal=_negated(sampled[start:]),
            entropies=_known(self.entropy[start:]),
            advantages=_known(self.advantages[start:]),
            ratio=_known(self.importance_ratio[start:]),
            weight=_known(self.rl_weights[start:]),
            kept=mask,
            clipped=list(map(bool, self.is_masked[start:])),
            methods={
                key: Method(key, {action: touched})
                for key, (action, values) in places.items()
                if (touched := [place for place, value in enumerate(values) if value])
            },
        )


_ANY: TypeAdapter[_OwnLine | _PrimeLine] = TypeAdapter(_OwnLine | _PrimeLine)


def _same_length(length: int, *columns: Sequence[object]) -> None:
    for column in columns:
        if column and len(column) != length:
            raise ValueError(f"{len(column)} values for {length} tokens")


def _known(values: Any) -> Any:
    """Nothing where every value of a list is missing."""
    return [] if isinstance(values, list) and all(value is None for value in values) else values


def _negated(values: Numbers) -> Numbers:
    return [None if value is None else -value + 0.0 for value in _known(values)]
