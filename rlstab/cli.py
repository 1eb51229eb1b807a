"""The command line: ``rlstab train | check | explain | bench | report | look`` and the rest that ``--help`` lists."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlstab import __version__
from rlstab.errors import ConfigError, RlstabError, did_you_mean, reason
from rlstab.extras import require
from rlstab.files import write_text
from rlstab.visible import in_error, visible

if TYPE_CHECKING:  # each command imports only what it uses
    from rlstab.config.document import Kind
#: Names of `rlstab look` in earlier releases.
OLD_NAMES = ("diagnose", "view", "replay")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; errors of rlstab end it with their text and code 2."""
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks becomes a mark, not a traceback
        with suppress(AttributeError, ValueError, OSError):
            if stream.errors == "strict" and stream.encoding.lower() not in ("utf-8", "utf8"):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # of a TextIOWrapper
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser, exclude=OLD_NAMES)
    options = parser.parse_args(arguments)
    try:
        code = int(options.command(options) or 0)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where errors are reported, rather than when Python ends
        return code
    except BrokenPipeError:  # the reader of the output has closed it, such as `| head`
        _forget_output()
        return 128 + int(signal.SIGPIPE)
    except RlstabError as error:
        return _failed(f"{type(error).__name__}: {error}{_notes(error)}")
    except MemoryError as error:
        larger = "rollout.prompts, rollout.batch_size, optimisation.micro_batch_size or evaluation.prompts"
        return _failed(f"MemoryError: {str(error) or 'out of memory'}. Lower {larger}.")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _forget_output()
        return _failed(f"OSError: the output cannot be written: {reason(error)}. Free some space, or use another disk.")
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":  # other processes would print the same
            hint = "; continue with --resume" if hasattr(options, "resume") else ""
            _failed(f"{str(stop) or f'stopped{hint}'}{_notes(stop)}")
        return 128 + int(getattr(stop, "number", signal.SIGINT))


def _failed(text: str) -> int:
    print(in_error(text), file=sys.stderr)
    return 2


def _notes(error: BaseException) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _forget_output() -> None:
    """Discard output that was not written; else Python would try again at its end and print another error."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Parser(argparse.ArgumentParser):
    """Names in its errors the command, the choice or the option that is most like an unknown one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(value, [name for name in action.choices if name not in OLD_NAMES])
            raise argparse.ArgumentError(action, f"unknown: '{value}'. {hint}")

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            name, option_names = unknown[0].partition("=")[0], options.parser._option_string_actions
            hint = did_you_mean(name, option_names) if name.startswith("-") else "Name it before the options."
            options.parser.error(f"unknown: {name}. {hint}")
        return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rlstab", description="Stability methods for RL with verifiable rewards.")
    parser.add_argument("--version", action="version", version=f"rlstab {__version__}")
    parser.set_defaults(command=lambda _: parser.print_help(), parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND", dest="called")

    def command(run: Callable[[argparse.Namespace], int | None], help: str, *old_names: str) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__.removeprefix("_"), help=help, aliases=old_names)
        added.set_defaults(command=run, parser=added)
        return added

    comma_list: dict[str, Any] = {"action": "extend", "type": lambda text: text.split(","), "default": []}
    look = command(
        _look,
        "look at a run: what went wrong first, whether the loss was what it said, what methods would do",
        *OLD_NAMES,
    )
    logs = "run folder, results file, log of a trainer or tracker (TRL, verl, wandb, MLflow, ...), export of prime-rl"
    look.add_argument("paths", nargs="*", metavar="PATH", help=f"{logs}, dump, or - for pasted text (this folder)")
    look.add_argument("--methods", **comma_list, metavar="METHOD,...", help="files or names (all)")
    look.add_argument("--out", metavar="PAGE.html", help="the page (look.html in the folder of the run)")
    description = "run this code, for user-defined methods of a dump; may be repeated"
    look.add_argument("--code", action="append", default=[], metavar="FILE.py", help=description)
    look.add_argument("--model", metavar="FOLDER", help="run this model to add the signals that a dump lacks")
    look.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer for a dump that has none")
    look.add_argument("--fail-on", **comma_list, metavar="SIGN,...", help="end with exit code 3 if one is present")
    look.add_argument("--json", dest="as_json", action="store_true", help="print JSON, with one entry per run")
    look.add_argument("--follow", dest="follows", action="store_true", help="print each sign of a run as it appears")
    look.add_argument("--open", dest="open_page", action="store_true", help="open the page in a browser")

    train = command(_train, "train a policy, as described in a YAML file")
    _takes_file(train, "run file", "run")
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in tracking.out")
    train.add_argument("--overwrite", action="store_true", help="replace a run that is already in tracking.out")
    train.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="longest silence (1800)")

    init = command(_init, "write a run file to start from, with a comment on every setting")
    init.add_argument("recipe", nargs="?", help="a preset, or an example of a run; omit it to list them")
    init.add_argument("--out", metavar="FILE", help="file to write (RECIPE.yaml); never over an existing file")
    for host, role in (("trl", "GRPOConfig"), ("verl", "verl's actor")):
        init.add_argument(
            f"--from-{host}", metavar="FILE", help=f"print the loss of settings of {role} as an objective"
        )

    check = command(_check, "check a file in seconds, without training: what would fail, what a run needs and costs")
    _takes_file(check, "run file, or a file with only an objective", "run", "objective")
    check.add_argument("--host", metavar="NAME", help="how the adapter of another trainer runs it, such as trl")
    check.add_argument("--settings", metavar="FILE", help="with --host: your settings of TRL or verl, checked as well")

    command(_doctor, "say which device, extras and other trainers are available, and whether the adapters work")

    explain = command(_explain, "explain in words what an objective does, needs and costs")
    source = _takes_file(explain, "run or objective file, or names such as s2t,stare")
    source.add_argument("--preset", metavar="NAME", help="a preset instead of a file")
    explain.add_argument("--markdown", action="store_true", help="print Markdown")

    schema = command(_schema, "write the JSON Schema of run files, for editors")
    schema.add_argument("--out", help="file to write (standard output)")

    bench = command(_bench, "compare methods: settings x methods x seeds of a YAML file")
    _takes_file(bench, "bench file", "bench", settings=False)
    bench.add_argument("--out", help="folder of the bench, instead of the file's")
    bench.add_argument("--workers", type=_count, help="runs in parallel, one thread each (one per CPU)")
    bench.add_argument("--launcher", choices=("local", "slurm"), default="local", help="slurm: a job for each run")
    bench.add_argument("--print", dest="launcher", action="store_const", const="print", help="print a command for each")
    bench.add_argument("--only", **comma_list, metavar="SETTING/METHOD,...", help="* matches anything")
    bench.add_argument("--overwrite", action="store_true", help="repeat finished runs whose settings have changed")
    bench.add_argument("--retry", action="store_true", help="repeat failed runs")
    bench.add_argument("--dry-run", action="store_true", help="run nothing; list the runs and the work they take")

    probe = command(_probe, "say which instabilities a method withstands, up to what dose, and at what cost")
    probe.add_argument("asked", nargs="*", metavar="METHOD", help="method, preset, stage, FILE.yaml, or file.py:Class")
    probe.add_argument("--probe", dest="names", **comma_list, metavar="NAME,...", help="this one (all)")
    probe.add_argument("--quick", action="store_true", help="three doses and three seeds")
    probe.add_argument("--model", metavar="NAME", help="on a model other than the small one, such as smollm2")
    probe.add_argument("--out", default="runs/probe", help="folder of the runs and the map (runs/probe)")
    probe.add_argument("--records", action="append", default=[], metavar="FILE.jsonl", help="more recorded runs")
    probe.add_argument("--workers", type=_count, help="runs in parallel, one thread each (one per CPU)")
    probe.add_argument("--dry-run", action="store_true", help="run nothing; say how much remains to run")
    probe.add_argument("--retry", action="store_true", help="repeat failed runs")

    report = command(_report, "compare finished runs: one HTML page with charts, Markdown tables")
    report.add_argument("paths", nargs="*", metavar="RUNS", help="bench folders, run folders, results files (.jsonl)")
    report.add_argument("--out", help="folder of report.html and report.md (report)")
    report.add_argument("--export", metavar="FILE.jsonl", help="write a results file, small enough to commit")
    report.add_argument("--markdown", dest="markdown_file", metavar="FILE.md", help="write the comparison as Markdown")
    report.add_argument("--paper", metavar="DIR", help="write CSV, a LaTeX table, and figures as SVG and PDF")
    report.add_argument("--width", choices=("column", "page"), default="column", help="of these figures (column)")
    description = "folders of the runs of a method, of rlstab or of another trainer, such as grpo='runs/grpo-*'"
    report.add_argument(
        "--method", dest="methods", action="append", default=[], metavar="NAME=PATTERN", help=description
    )
    description = "compare methods at the same number of these: rollouts, tokens or seconds (rollouts)"
    report.add_argument("--by", choices=("rollouts", "tokens", "seconds"), default="rollouts", help=description)
    report.add_argument("--metric", dest="metrics", **comma_list, metavar="NAME,...", help="eval/mean (all)")
    report.add_argument("--baseline", metavar="METHOD", help="compare with this method, not with each bench's own")

    runs = command(_runs, "list runs: what ran, how far it got, its best value")
    runs.add_argument("paths", nargs="*", metavar="PATH", help="run folders, bench folders, folders of them (runs)")

    listing = command(_list, "list methods, stages, presets and examples")
    listing.add_argument("words", nargs="*", metavar="WORD", help="words to look for")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of at least 1")
    return int(text)


def _takes_file(
    parser: argparse.ArgumentParser, what: str, *kinds: Kind, settings: bool = True
) -> argparse._MutuallyExclusiveGroup:
    """Let a command take a file, or a shipped example by its name, and values of settings."""
    if settings:
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as optimisation.lr=1e-4")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("file", nargs="?", help=what)
    group.add_argument("--example", metavar="NAME", help="an example in the package; `rlstab list` lists them")
    parser.set_defaults(kinds=kinds)
    return group


def _given(options: argparse.Namespace, *taken: str) -> dict[str, Any]:
    """The options as arguments of the function behind a command."""
    return {name: value for name, value in vars(options).items() if name not in ("command", "called", "parser", *taken)}


def _file(options: argparse.Namespace) -> str:
    """The path of the file, or of the example with the given name."""
    from rlstab.config.bundled_examples import example, examples

    if options.file is None and options.example is None:
        names = [name for name, shipped in examples().items() if shipped.kind in options.kinds]
        raise ConfigError(f"{options.called} needs the path of a file, or --example NAME: {', '.join(names)}.")
    if options.example is None:
        return str(options.file)
    return str(example(options.example, *options.kinds).path)


def _again(options: argparse.Namespace) -> list[str]:
    """The arguments that name the file and the settings of a run."""
    file = [options.file] if options.example is None else ["--example", options.example]
    return [*file, *(f"--set={pair}" for pair in options.set)]


def _overrides(pairs: list[str]) -> dict[str, object]:
    from rlstab.config import Document

    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair}: expected KEY=VALUE, for example --set optimisation.lr=1e-4.")
        overrides[key] = Document.parse(value, f"--set {key}").data
    return overrides


def _patterns(pairs: list[str]) -> dict[str, str]:
    patterns: dict[str, str] = {}
    for pair in pairs:
        name, _, pattern = pair.partition("=")
        if not name or not pattern or name in patterns:
            raise ConfigError(f"--method {pair}: expected NAME=PATTERN, each name once, such as grpo='runs/grpo-*'.")
        patterns[name] = pattern
    return patterns


def _train(options: argparse.Namespace) -> None:
    from rlstab.config import load_run

    run = load_run(_file(options), _overrides(options.set))
    require("train", "rlstab train")
    from accelerate import PartialState

    from rlstab.train.loop import Stopped, train

    if not 0 < options.timeout <= 1e9:
        raise ConfigError(f"--timeout {options.timeout}: expected a number of seconds, from above 0 to 1e9.")
    try:
        train(run, resume=options.resume, overwrite=options.overwrite, timeout=timedelta(seconds=options.timeout))
    except Stopped as stop:
        stop.args = (f"{stop}. Continue with: {shlex.join(['rlstab', 'train', *_again(options), '--resume'])}",)
        raise
    PartialState().destroy_process_group()  # all processes have passed their last collective


def _check(options: argparse.Namespace) -> None:
    from rlstab.console import Terminal, command, say
    from rlstab.core.objective import no_fit_warnings
    from rlstab.explain.check import check, check_host, read
    from rlstab.preflight import preflight

    file = _file(options)
    with no_fit_warnings():
        objective, run = read(file, _overrides(options.set))
        if options.settings is not None and options.host is None:
            raise ConfigError("--settings FILE holds settings of another trainer. Add --host trl or --host verl.")
        if options.host is not None:
            check_host(objective, options.host)
            if options.settings is not None:
                from rlstab.adapters.setting_conflicts import check_settings

                check_settings(options.host, options.settings, objective)
                print(f"{options.settings}: its settings fit")
            return
        check(objective, run, preflight(run) if run is not None else [])
        if run is not None:
            say(Terminal(), f"next: {command('train', *_again(options))}", copied=True)


def _init(options: argparse.Namespace) -> None:
    from rlstab.explain.run_file import recipe_list, run_file

    host_files = {host: path for host in ("trl", "verl") if (path := getattr(options, f"from_{host}")) is not None}
    if len(host_files) + (options.recipe is not None) > 1:
        raise ConfigError("rlstab init takes a recipe, --from-trl or --from-verl. Give one of them.")
    if host_files:
        from rlstab.adapters.host_objective import objective_file

        ((host, path),) = host_files.items()
        out, text = options.out, objective_file(host, path)
    elif options.recipe is not None:
        out = options.out or f"{options.recipe}.yaml"
        text = run_file(options.recipe, out)
    else:
        from rlstab.console import Terminal

        return Terminal().print(recipe_list())
    if out is not None:
        write_text(out, text)
    print(visible(text if out is None else f"{out}\n", spaces=False), end="")
    return None


def _doctor(options: argparse.Namespace) -> int:
    from rlstab.adapters.doctor import doctor

    lines, well = doctor()
    print(visible("\n".join(lines), spaces=False))
    return 0 if well else 1


def _bench(options: argparse.Namespace) -> int:
    require("train", "rlstab bench")
    from rlstab.bench.file import load_bench
    from rlstab.bench.plan import dry_run
    from rlstab.bench.run import run_bench

    bench = load_bench(_file(options), out=options.out)
    if options.dry_run:
        dry_run(bench, only=options.only)
        return 0
    return run_bench(bench, **_given(options, "file", "example", "out", "dry_run", "kinds"))


def _probe(options: argparse.Namespace) -> int:
    for extra in ("train", "report"):
        require(extra, "rlstab probe")
    from rlstab.probe.run import run_probes

    return run_probes(**_given(options))


def _explain(options: argparse.Namespace) -> None:
    from rlstab.core.objective import no_fit_warnings
    from rlstab.explain.explanation import explain, explain_preset, show

    overrides = _overrides(options.set)
    with no_fit_warnings():
        if options.preset is not None:
            text = explain_preset(options.preset, overrides)
        else:
            text = explain(_file(options), overrides)
    show(text, markdown=options.markdown)


def _report(options: argparse.Namespace) -> None:
    require("report", "rlstab report")
    from rlstab.report.build import make_report

    make_report(**_given(options, "methods"), methods=_patterns(options.methods))


def _look(options: argparse.Namespace) -> int:
    from rlstab.console import Terminal
    from rlstab.look.look import look

    if options.called in OLD_NAMES and not options.as_json:  # what reads JSON may read both streams as one
        print(f"rlstab {options.called} is rlstab look now; the next release drops the old name", file=sys.stderr)
    if options.called == "replay":  # took methods after its dump
        options.paths, options.methods = options.paths[:1], [*options.paths[1:], *options.methods]
    return look(**_given(options), console=Terminal())


def _schema(options: argparse.Namespace) -> None:
    from rlstab.config import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if options.out:
        write_text(options.out, text, b'"$schema"')
    else:
        sys.stdout.write(text)


def _runs(options: argparse.Namespace) -> None:
    from rlstab.console import Terminal
    from rlstab.report.listing import listing

    Terminal().print(listing(options.paths or ["runs"]))


def _list(options: argparse.Namespace) -> None:
    from rlstab.console import Terminal
    from rlstab.explain.catalogue import listing

    Terminal().print(listing(options.words))
