"""What a bench would do with each of its runs, according to the run's folder."""

from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from rlstab.bench.file import Bench, BenchRun, few
from rlstab.bench.launch import Launch
from rlstab.bench.progress import last_records
from rlstab.bench.record import FILE, read_record
from rlstab.bench.worker import can_go_on
from rlstab.config.allowed_changes import is_measured, is_neutral, settings_hash
from rlstab.config.document import Document, flat
from rlstab.config.runs import RunConfig
from rlstab.config.user_code import portable
from rlstab.console import Terminal, say
from rlstab.errors import ConfigError
from rlstab.run_files import ABOUT, CONFIG
from rlstab.safe_read import read_json, read_mapping

#: What may be done with a run, and how a dry run describes it.
KINDS = {
    "finished": "",
    "anew": "",
    "failed": "failed before, run again with --retry",
    "resumed": "interrupted, would continue from a checkpoint",
    "changed": "made with other settings, need --overwrite",
    "measured": "evaluated with other settings, need --overwrite to be made again",
}


def chosen(bench: Bench, only: Sequence[str]) -> tuple[BenchRun, ...]:
    """The runs that match any of the patterns; all runs without a pattern.

    Raises:
        ConfigError: no run matches a pattern.
    """

    def matches(run: BenchRun, pattern: str) -> bool:
        return fnmatchcase(run.name, pattern) or fnmatchcase(f"{run.setting}/{run.method}", pattern)

    for pattern in only:
        if not any(matches(run, pattern) for run in bench.runs):
            raise ConfigError(
                f"--only {pattern}: no run matches. Give setting/method or setting/method/seed-0, with * for any. "
                f"Settings: {', '.join(bench.file.settings)}. Methods: {', '.join(bench.file.methods)}."
            )
    return tuple(run for run in bench.runs if not only or any(matches(run, pattern) for pattern in only))


def plan_of(runs: Sequence[BenchRun], *, overwrite: bool = False, retry: bool = False) -> dict[str, list[BenchRun]]:
    """What to do with each run, according to its folder.

    ``finished``, ``measured`` (finished, and the file has another evaluation now) and ``failed`` stay, ``anew`` and
    ``resumed`` (from a whole checkpoint) are made, and ``changed`` were begun with settings other than the file's.
    """
    plan: dict[str, list[BenchRun]] = {kind: [] for kind in KINDS}
    for run in runs:
        plan[_kind(run, overwrite, retry)].append(run)
    return plan


def changed_beside(bench: Bench, runs: Sequence[BenchRun]) -> list[BenchRun]:
    """Runs of the bench beside the chosen ones that were begun with settings other than the file's."""
    names = {run.name for run in runs}
    return plan_of([run for run in bench.runs if run.name not in names])["changed"]


def _kind(run: BenchRun, overwrite: bool, retry: bool) -> str:
    record, records = read_record(run.folder), last_records(run.folder)
    status, resumable = record.get("status"), can_go_on(run.folder, isinstance(run.config, Launch))
    same_settings, settings = record.get("run_hash") == run.hash, _settings(run.folder)
    if status != "finished" and not records and not resumable:  # it holds nothing to keep
        return "failed" if status == "failed" and same_settings and not retry else "anew"
    if not same_settings and settings:  # releases have computed the hash in different ways
        same_settings = settings_hash(settings, read_json(run.folder / ABOUT).get("code") or {}) == run.hash
    if not same_settings:
        retries = status == "failed" and retry and not resumable
        return "anew" if overwrite or retries else "changed"
    if status is None and records and records[-1]["rollout"] >= run.rollouts:
        status = "finished"  # its record was lost
    if status == "finished":
        measured = any(is_measured(path) for path in differences(run))
        return "finished" if not measured else "anew" if overwrite else "measured"
    if status == "failed" and not retry:
        return "failed"
    return "resumed" if resumable else "anew"


def _settings(folder: Path) -> dict[str, Any]:
    """The settings with which a run was begun; empty if they cannot be read."""
    return read_mapping(folder / CONFIG, lambda text: Document.parse(text, CONFIG).data)[0] or {}


def differences(run: BenchRun) -> dict[str, str]:
    """Settings that affect training or an evaluation and differ between a run's folder and the file, in words."""
    before, after = flat(portable(_settings(run.folder))), flat(portable(run.settings))
    paths = [path for path in after if path in before and before[path] != after[path]]
    counting = [path for path in paths if is_measured(path) or not is_neutral(path, after)]
    return {path: f"{path} = {before[path]}, now {after[path]}" for path in counting}


def with_other_settings(bench: Bench, runs: Sequence[BenchRun]) -> str:
    """``2 runs with other settings than FILE has now: ... (optimisation.lr = 0.1, now 0.2)``."""
    names, changes = few([run.name for run in runs]), few(list(differences(runs[0]).values()))
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    sentence = f"{count} with other settings than {bench.source or 'the bench'} has now: {names}"
    return f"{sentence} ({changes})" if changes else sentence


def notes_of(bench: Bench, plan: Mapping[str, Sequence[BenchRun]], changed: Sequence[BenchRun]) -> list[str]:
    """Notes before the runs are made.

    Args:
        bench: the bench that makes the runs.
        plan: the plan of the chosen runs.
        changed: runs that were not chosen and whose settings differ from the file's.
    """
    notes = list(bench.notes)
    if changed:
        notes.append(f"{bench.out} holds {with_other_settings(bench, changed)}. --only leaves them as they are.")
    if measured := plan["measured"]:
        changes = few(list(differences(measured[0]).values()))
        notes.append(f"{KINDS['measured']}: {few([run.name for run in measured])} ({changes}).")
    return notes


def unnamed(bench: Bench) -> str:
    """A sentence about runs of a method, setting or seed that the file no longer has; may be empty."""
    if bench.again:  # a bench without a file
        return ""
    run_names, folder = {run.name for run in bench.runs}, bench.out / "runs"
    names = (path.parent.relative_to(folder).as_posix() for path in sorted(folder.glob(f"*/*/seed-*/{FILE}")))
    names_left = [name for name in names if name not in run_names]
    if not names_left:
        return ""
    return (
        f"{bench.out} also holds runs that {bench.source or 'this bench'} does not name: {few(names_left)}. A report "
        f"of the folder shows them too; remove them if that is not wanted."
    )


def dry_run(bench: Bench, *, only: Sequence[str] = (), console: Console | None = None) -> None:
    """Print what a bench would do: runs, rollouts and optimizer steps, and how much of it is finished.

    Raises:
        ConfigError: no run matches.
    """
    console = console or Terminal()
    runs = chosen(bench, only)
    plan = plan_of(runs)
    changed = changed_beside(bench, runs)
    finished = {run.name for kind in ("finished", "measured") for run in plan[kind]}
    groups: dict[str, list[BenchRun]] = {}
    for setting, method in product(bench.file.settings, bench.file.methods):
        groups[f"{setting}/{method}"] = [run for run in runs if (run.setting, run.method) == (setting, method)]
    lines = [f"{name}: {_work(members, finished)}" for name, members in (*groups.items(), ("all", runs)) if members]
    lines += [f"folder: {bench.out}; baseline: {bench.file.baseline}; workers: {bench.workers}"]
    for kind, description in KINDS.items():
        if description and plan[kind] and kind != "measured":
            changes = few(list(differences(plan[kind][0]).values())) if kind == "changed" else ""
            lines.append(
                f"{description}: {', '.join(run.name for run in plan[kind])}" + (f" ({changes})" if changes else "")
            )
    lines += [f"note: {note}" for note in notes_of(bench, plan, changed)]
    for line in [*lines, *filter(None, [unnamed(bench)])]:
        say(console, line)


def _work(runs: Sequence[BenchRun], finished: Set[str]) -> str:
    """The number of runs and their length, which is unknown for commands."""
    counts = {"runs": len(runs), "finished": sum(run.name in finished for run in runs)}
    for config in (run.config for run in runs if isinstance(run.config, RunConfig)):
        rollouts, steps = config.optimisation.rollouts, config.optimisation.optimizer_steps
        work = {"rollouts": rollouts, "optimizer steps": steps}
        work |= {"responses": rollouts * config.rollout.prompts * config.rollout.group}
        counts |= {name: counts.get(name, 0) + number for name, number in work.items()}
    return ", ".join(f"{number} {name}" for name, number in counts.items())
