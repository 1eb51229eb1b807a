"""Prompts and answers from a data set of the package datasets: by its name on the hub, or from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rlstab import hub
from rlstab.errors import DataError, did_you_mean
from rlstab.extras import require
from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.jsonl_file import Fields, example_of
from rlstab.tasks.prompt_template import PromptTemplate
from rlstab.tasks.scorers import TextScorer
from rlstab.tasks.task import Example
from rlstab.tasks.text_task import TextTask


class DataSet(TextTask):
    """Rows with a prompt and its answer; all of them are read into memory. No code of a data set is run.

    Args:
        path: its name on the hub, which is asked once; a folder of `Dataset.save_to_disk`; or a folder of data files.
        subset: the configuration of a data set that has several, such as `main`.
        split: the rows to train on.
        eval_split: the rows of the eval split; None holds out the last `eval_size` of `split`.
        eval_size: how many.
        revision: branch, tag or commit on the hub; None for the newest.
        prompt_field: the column with the prompt, a string or a list of messages; `a.b` is the field `b` of column `a`.
        answer_field: the column with the right answer, likewise; a string or a number.
        right_answer_pattern: finds the right answer in that column, as `answer_pattern` does in a completion.
        scorer: see :class:`rlstab.tasks.Jsonl`, as for what follows.
        answer_pattern: likewise.
        prompt_template: likewise.
        system: likewise.
        time_limit: likewise.
        workers: likewise.

    Raises:
        DataError: it cannot be found or used; with the columns and splits that are there.
        MissingPackage: datasets, or math-verify where that is asked for, is not installed.
        OutOfRange: if a setting has a value that cannot be used.
    """

    def __init__(
        self,
        path: str,
        subset: str | None = None,
        split: str = "train",
        eval_split: str | None = None,
        eval_size: int = 64,
        revision: str | None = None,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        right_answer_pattern: str | None = None,
        scorer: Literal["exact", "math_verify"] = "exact",
        answer_pattern: str | None = None,
        prompt_template: str = "{prompt}",
        system: str | None = None,
        time_limit: float = 5.0,
        workers: int = 2,
    ) -> None:
        require("datasets", "The task dataset")
        TextScorer(scorer, AnswerPattern(answer_pattern))  # before the data, of which there may be much
        right = AnswerPattern(right_answer_pattern, "right_answer_pattern")
        fields = Fields(prompt_field, answer_field, PromptTemplate(prompt_template, "prompt"), system)
        splits = [split] if eval_split is None else [split, eval_split]
        found = [_examples(path, one, rows, fields, right) for one, rows in _loaded(path, subset, splits, revision)]
        super().__init__(
            path,
            found[0],
            None if eval_split is None else found[1],
            eval_size,
            "eval_split",
            scorer=scorer,
            answer_pattern=answer_pattern,
            time_limit=time_limit,
            workers=workers,
        )


def _loaded(path: str, subset: str | None, splits: list[str], revision: str | None) -> list[tuple[str, Any]]:
    """The rows of each split."""
    import datasets

    folder = Path(path).expanduser()
    local = folder.is_dir()
    if not local and path.startswith((".", "/", "~")):
        raise DataError(f"there is no folder '{folder}'. Set task.path to one, or to a name on the hub.")
    offline = "" if local else hub.why_offline()
    with _quiet(offline=bool(offline)):
        try:
            if local and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
                whole = datasets.load_from_disk(str(folder))
                several = isinstance(whole, datasets.DatasetDict)
                known = list(whole) if several else ["train"]
                rows = {name: whole[name] if several else whole for name in known}
            else:
                source = str(folder) if local else path
                known = datasets.get_dataset_split_names(source, subset, revision=revision)
                rows = {
                    name: datasets.load_dataset(source, subset, split=name, revision=revision)
                    for name in dict.fromkeys(splits)
                    if name in known
                }
        except Exception as error:  # files of others fail in every way
            why = offline or hub.first_line(error)
            raise DataError(
                f"the data set '{path}' cannot be loaded: {why}. Give a name on the hub, or in the cache, with "
                f"task.subset where it has several; or a folder."
            ) from error
    for name in splits:
        if name not in rows:
            raise DataError(f"the data set '{path}' has no split '{name}'. {did_you_mean(name, known)}")
    return [(name, rows[name]) for name in splits]


def _examples(path: str, split: str, rows: Any, fields: Fields, right: AnswerPattern) -> list[Example]:
    columns = {}
    for field, setting in ((fields.prompt, "prompt_field"), (fields.answer, "answer_field")):
        columns[field] = [field] if field in rows.column_names else field.split(".")
        if columns[field][0] not in rows.column_names:
            has = ", ".join(map(repr, rows.column_names)) or "none"
            raise DataError(
                f"the data set '{path}' has no column {field!r} in the split '{split}'; its columns: {has}. Set "
                f"task.{setting} to the one that is meant."
            )
    found = []
    names = sorted({one[0] for one in columns.values()})
    for number, values in enumerate(zip(*(rows[name] for name in names), strict=True)):
        row = dict(zip(names, values, strict=True))
        where = f"the data set '{path}', split '{split}', row {number}"
        prompt, answer = (_value(where, row, columns[field]) for field in (fields.prompt, fields.answer))
        if isinstance(prompt, list):  # a column has the same fields in each message, None where one has none
            turns = [one for one in prompt if isinstance(one, Mapping)]
            prompt = [{key: one[key] for key in one if one[key] is not None} for one in turns] if turns else prompt
        one = example_of(where, prompt, answer, fields)
        text = right.find(one.answer)
        if text is None:
            raise DataError(
                f"{where}: task.right_answer_pattern finds nothing in the answer {one.answer[-60:]!r}. Change it."
            )
        found.append(Example(one.prompt, text, one.messages))
    if not found:
        raise DataError(f"the data set '{path}' has no row in the split '{split}'. Set another one.")
    return found


def _value(where: str, row: Any, path: list[str]) -> Any:
    value = row
    for place, key in enumerate(path):
        if not isinstance(value, Mapping) or key not in value:
            has = ", ".join(map(repr, value)) if isinstance(value, Mapping) else "none"
            raise DataError(
                f"{where}: there is no field {key!r} in {'.'.join(path[:place])!r}; its fields: {has}. Change "
                f"task.prompt_field or task.answer_field."
            )
        value = value[key]
    return value


@contextmanager
def _quiet(*, offline: bool) -> Iterator[None]:
    """Without progress bars; `offline` asks the cache alone, and not for minutes whether the hub came back."""
    import datasets
    import huggingface_hub

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bar()
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before
        if shown:
            datasets.enable_progress_bar()
