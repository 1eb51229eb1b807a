"""The map: rows times probes, each cell a score with what was predicted; as sentences, Markdown and JSON."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rlstab.probe.records import Record
from rlstab.probe.score import Outcomes, Score, score
from rlstab.probe.suite import FIXED, START, Prediction, Probe
from rlstab.report.formatting import NOTHING, listed
from rlstab.safe_read import plain

#: What a number on the page means; the docs say more.
LEGEND = (
    "A number is the dose that a row tolerates, divided by the dose that the base tolerates: up to there training "
    "keeps half of its healthy gain. The base's row has that dose itself. Intervals are at 95 %, by Student's t over "
    "seeds; where one includes 1 the cell is grey. A cell in words has three seeds, which tell nothing finer. The "
    "price is what is left of the healthy gain at the harmless end of the dial: 1 costs nothing. A row acted in the "
    "runs that end differently from the base's of the same seed. Other models tolerate other doses."
)


@dataclass(frozen=True)
class Column:
    """A probe, and the policy that is evaluated."""

    probe: Probe
    policy: str

    @property
    def title(self) -> str:
        """With the policy where the probe has two."""
        return self.probe.name + (f", {self.policy}" if self.policy else "")


@dataclass(frozen=True)
class MapCell:
    """A row in a column.

    Attributes:
        score: or the reason why there is none.
        outcomes: the outcome of each run, by dose and seed.
        prediction: written before the runs.
        base: whether the others are compared with it.
        acted: the number of runs that end differently from the base's run of the same dose and seed, and the number of
            such pairs. A method that asks for nothing does not change any bit of a run.
    """

    score: Score | str
    outcomes: Outcomes
    prediction: Prediction | None
    base: bool = False
    acted: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Map:
    """All cells.

    Attributes:
        columns: probes and policies.
        rows: names, with their titles.
        cells: the cells, by row and index of the column.
        starts: outcome of the policy before training, by index of the column.
        remarks: what is missing, and why.
    """

    columns: list[Column]
    rows: Mapping[str, str]
    cells: Mapping[tuple[str, int], MapCell]
    starts: Mapping[int, float]
    remarks: list[str]

    def seen(self, cell: MapCell) -> Prediction | None:
        """What a row tolerates compared with the base; None if it has no score."""
        if isinstance(cell.score, str) or cell.base:
            return None
        if not cell.score.visible or cell.score.verdict == "no visible difference":
            return "same"
        return "more" if cell.score.relative.value > 1 else "less"

    def held(self, cell: MapCell) -> bool | None:
        """Whether the prediction held; None without a prediction or a score."""
        return None if None in (cell.prediction, self.seen(cell)) else cell.prediction == self.seen(cell)

    def shown(self, cell: MapCell) -> str:
        """A cell in words: for the base its dose; in a quick map only the verdict."""
        if isinstance(cell.score, str):
            return NOTHING
        if cell.base:
            dose, last = cell.score.tolerated, cell.score.doses[-1]
            return f"dose {dose:.3g}" if math.isfinite(dose) else f"dose > {last:g}"
        if not cell.acted[0]:
            return "did not act"
        if cell.score.quick:
            return cell.score.verdict
        number, limit = cell.score.relative, cell.score.limit
        if number.low is None or number.high is None:
            return told(number.value, limit)
        value, low, high = (told(bound, limit) for bound in (number.value, number.low, number.high))
        return value if value == low == high else f"{value} [{low}, {high}]"

    def acted(self, row: str) -> str:
        """In how many of its runs a row changed the outcome."""
        changed, runs = (sum(cell.acted[k] for (name, _), cell in self.cells.items() if name == row) for k in (0, 1))
        return f"{changed} of {runs}" if runs else NOTHING

    @property
    def sentences(self) -> list[str]:
        """One sentence for each row other than the fixed ones."""
        sentences = []
        for row in self.rows.keys() - FIXED.keys():
            by_verdict: dict[str, list[str]] = defaultdict(list)
            for index, column in enumerate(self.columns):
                cell = self.cells[row, index]
                by_verdict[self.shown(cell) if isinstance(cell.score, Score) else "no score"].append(column.title)
            parts = (f"{verdict} in {listed(titles)}" for verdict, titles in by_verdict.items())
            sentences.append(f"{row}, tolerated dose relative to the base's: {'; '.join(parts)}.")
        return sorted(sentences)

    @property
    def markdown(self) -> str:
        """A table of doses, of prices and of predictions, a sentence for each row, and what is missing."""
        ends = {True: "", False: ", did not hold", None: ", no score"}
        tables: dict[str, Callable[[MapCell], str]] = {
            "tolerated dose": self.shown,
            "price": lambda cell: NOTHING if isinstance(cell.score, str) else str(cell.score.price),
            "predicted": lambda cell: f"{cell.prediction}{ends[self.held(cell)]}" if cell.prediction else NOTHING,
        }
        lines = ["# Probes", "", LEGEND, ""]
        for title, text in tables.items():
            rows = [[title, *(column.title for column in self.columns)], ["---"] * (len(self.columns) + 1)]
            for row, name in self.rows.items():
                rows.append([name, *(text(self.cells[row, index]) for index in range(len(self.columns)))])
            lines += [*(f"| {' | '.join(texts)} |" for texts in rows), ""]
        return "\n".join([*lines, *(f"- {text}" for text in (*self.sentences, *self.remarks))]) + "\n"

    @property
    def json(self) -> str:
        """Everything, for programs; infinite doses are null, and ``limit`` is what they exceed."""
        cells = []
        for (row, index), cell in self.cells.items():
            result, drawn = cell.score, self.columns[index]
            scored = {"why": result} if isinstance(result, str) else {**asdict(result), "verdict": result.verdict}
            column = {"row": row, "probe": drawn.probe.name, "policy": drawn.policy}
            outcomes = {f"{dose:g}": dict(seeds) for dose, seeds in cell.outcomes.items()}
            predicted = {"prediction": cell.prediction, "held": self.held(cell), "acted": cell.acted}
            cells.append({**column, **scored, **predicted, "outcomes": outcomes})
        return json.dumps(plain({"cells": cells, "remarks": self.remarks}), indent=1) + "\n"


def draw_map(
    suite: Sequence[Probe],
    kinds: Mapping[str, Sequence[str]],
    results: Sequence[Record],
    *,
    remarks: Sequence[str] = (),
) -> Map:
    """The map of the results of runs.

    Args:
        suite: the probes.
        kinds: the kinds of the rows other than the fixed ones, see :attr:`rlstab.probe.rows.Row.kinds`.
        results: the results of the runs.
        remarks: what is missing, and why.
    """
    two = {record.probe for record in results if record.sampler is not None}
    columns = [
        Column(probe, policy) for probe in suite for policy in (("trainer", "sampler") if probe.name in two else ("",))
    ]
    rows_of_suite = {row for probe in suite for row in probe.bench["methods"]}  # not all of them on another model
    names = {row: title for row, title in FIXED.items() if row in rows_of_suite} | {row: row for row in kinds}
    cells: dict[tuple[str, int], MapCell] = {}
    starts: dict[int, float] = {}
    for index, column in enumerate(columns):
        by_row: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for record in results:
            if record.probe == column.probe.name:  # a sampler that is the trainer's policy has the trainer's outcome
                sampler = record.trainer if record.sampler is None else record.sampler
                outcome = sampler if column.policy == "sampler" else record.trainer
                by_row[record.row][float(record.dose)][record.seed] = outcome
        before = [value for seeds in by_row[START].values() for value in seeds.values()]
        starts[index] = before[0] if before else math.nan
        for row in names:
            prediction = column.probe.prediction(row, kinds.get(row, ()), column.policy) if row != "base" else None
            scored = score(by_row[row], by_row["base"], starts[index]) if by_row["base"] else "the base has no run"
            base = {} if row == "base" else by_row["base"]
            differ = [
                value != base[dose][seed]
                for dose, seeds in by_row[row].items()
                for seed, value in seeds.items()
                if seed in base.get(dose, {})
            ]
            acted = sum(differ), len(differ)
            cells[row, index] = MapCell(scored, by_row[row], prediction, row == "base", acted)
    bases = {column.title: cells["base", index].score for index, column in enumerate(columns)}
    missing = [f"{title}: {score}" for title, score in bases.items() if isinstance(score, str)]
    return Map(columns, names, cells, starts, [*remarks, *missing])


def told(relative: float, limit: float) -> str:
    """A relative dose in words; beyond the last dose, only a lower bound is known."""
    if math.isnan(relative):
        return NOTHING
    if math.isinf(relative):
        return f"> {limit:.2g}"
    texts = (f"{relative:.{digits}g}" for digits in (2, 3, 4))
    return next((text for text in texts if text != "1"), "1")  # show on which side of 1 it is
