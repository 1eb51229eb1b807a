"""What ``rlstab look`` and ``rldoctor`` say of runs that other people published, one row for each log.

    python -m benchmarks real_logs                       # the half whose logs may be looked at
    python -m benchmarks real_logs --split all --page    # all of them, into docs/how-to/diagnose.md
    python -m benchmarks real_logs --judge               # rldoctor's verdicts again, with rldoctor 0.2.0 installed

The logs are those of :mod:`tests.real_logs`; both tools read the same lines. ``rldoctor`` is judged by its findings
from a warning on, which results/rldoctor_real_logs.json keeps. The level under chance is the share of shuffled logs,
each log's lines in random order, that get a cause: nothing happens in them.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.generated import END as END_OF_GENERATED
from benchmarks.generated import PAGE
from rlstab.look.diagnosis import diagnose
from rlstab.look.find import read_logs
from tests.real_logs import SPLITS, RealLog, Row, real_logs, sources, write_rows

VERDICTS = Path(__file__).parent / "results" / "rldoctor_real_logs.json"
#: Between these lines of the page stand the table and what sums it up.
BEGIN, END = "<!-- python -m benchmarks real_logs -->", "<!-- end of real_logs -->"
HEAD = (
    "| source | log | trainer, model | lines | reward | last / best quarter | `rlstab look` | rldoctor |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Verdict:
    """What was said of one log.

    Attributes:
        cause: the first cause; None if there is none, or if the log could not be opened.
        step: at which its sign begins.
        error: why the log could not be opened.
    """

    cause: str | None = None
    step: int | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.error:
            return "not opened"
        return "none" if self.cause is None else f"`{self.cause}` from step {self.step}"


def verdict_of(rows: Sequence[Row]) -> Verdict:
    """What ``rlstab look`` says of the lines of a log."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            (log,) = read_logs(write_rows(rows, Path(folder) / "log.jsonl"))
            first = diagnose(log).first
        except Exception as error:  # counted, not hidden: a log that does not open is a row of the table
            return Verdict(error=f"{type(error).__name__}: {error}")
    return Verdict() if first is None else Verdict(first.cause, first.sign.step)


def shuffle_level(logs: Iterable[RealLog], shuffles: int) -> tuple[int, int]:
    """How many logs with their lines in random order get a cause, and of how many."""
    verdicts = [verdict_of(log.shuffled(seed)) for log in logs for seed in range(shuffles)]
    return sum(verdict.cause is not None for verdict in verdicts), len(verdicts)


def row_of(log: RealLog, verdict: Verdict, findings: Sequence[str] | None) -> str:
    """A row of the table."""
    ended = f", {log.ended}" if log.ended else ""
    peer = "not tried" if findings is None else ", ".join(f"`{name}`" for name in findings) or "none"
    source = log.source
    cells = (
        log.repository,
        source["path"],
        f"{source['trainer']}, {source['model']}",
        len(log.rows),
        f"{log.outcome}{ended}",
        f"{log.last_over_best:.2f}",
        verdict,
        peer,
    )
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def summary(
    logs: Sequence[RealLog], verdicts: Mapping[str, Verdict], findings: Mapping[str, Sequence[str]]
) -> list[str]:
    """For each outcome, how many logs get a cause of rlstab, and a finding of rldoctor."""
    lines = ["| reward | logs | a cause by rlstab | a finding by rldoctor |", "|---|---|---|---|"]
    for outcome in ("lost", "fell", "kept", "rose"):
        names = [log.name for log in logs if log.outcome == outcome]
        named = sum(verdicts[name].cause is not None for name in names)
        lines.append(f"| {outcome} | {len(names)} | {named} | {sum(bool(findings.get(name)) for name in names)} |")
    return lines


def page_of(logs: Sequence[RealLog], findings: Mapping[str, Sequence[str]], shuffles: int) -> str:
    """The tables as Markdown, a row for every log."""
    verdicts = {log.name: verdict_of(log.rows) for log in logs}
    fired, total = shuffle_level(logs, shuffles)
    opened = sum(verdict.error is None for verdict in verdicts.values())
    repositories = len({log.repository for log in logs})
    lines = [f"{len(logs)} logs of {repositories} sources, of which {opened} open.", ""]
    lines += summary(logs, verdicts, findings)
    lines += ["", f"With their lines in random order, {fired} of {total} get a cause.", "", HEAD]
    lines += [row_of(log, verdicts[log.name], findings.get(log.name)) for log in logs]
    return "\n".join(lines)


def placed(page: str, text: str) -> str:
    """A page with the tables between :data:`BEGIN` and :data:`END`, at first below those of the generated runs."""
    block = f"{BEGIN}\n\n{text}\n\n{END}"
    if BEGIN in page:
        before, rest = page.split(BEGIN, 1)
        return before + block + rest.split(END, 1)[1]
    before, rest = page.split(END_OF_GENERATED, 1)
    return f"{before}{END_OF_GENERATED}\n\n{block}{rest}"


def judge() -> None:
    """Write what rldoctor finds in every log, from a warning on."""
    from rl_doctor import diagnose as examine
    from rl_doctor.detectors.base import Severity
    from rl_doctor.ingest import load_run

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for log in real_logs():
            findings = examine(load_run(str(log.write(Path(folder))))).findings
            found[log.name] = [finding.detector for finding in findings if finding.severity >= Severity.WARNING]
    VERDICTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{VERDICTS}: {sum(map(bool, found.values()))} of {len(found)} logs have a finding")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks real_logs", description=__doc__.split("\n\n")[0])
    parser.add_argument("--split", choices=[*SPLITS, "all"], default="seen", help="which half of the logs")
    parser.add_argument("--shuffles", type=int, default=2, help="random orders of each log")
    parser.add_argument("--page", action="store_true", help="write docs/how-to/diagnose.md")
    parser.add_argument("--judge", action="store_true", help="what rldoctor finds, again")
    arguments = parser.parse_args()
    if arguments.judge:
        judge()
        return
    logs = list(real_logs(None if arguments.split == "all" else arguments.split))
    known = Counter(source["split"] for source in sources())
    wanted = sum(known.values()) if arguments.split == "all" else known[arguments.split]
    if len(logs) < wanted:
        # a table with rows left out would flatter
        message = f"figures of {wanted - len(logs)} of {wanted} logs are missing, see tests/real_logs.py"
        if arguments.page or not logs:
            sys.exit(message)
        print(message, file=sys.stderr)
    text = page_of(logs, json.loads(VERDICTS.read_text()), arguments.shuffles)
    if arguments.page:
        PAGE.write_text(placed(PAGE.read_text(), text))
    else:
        print(text)
