"""Would the tests notice? Small changes to `rlstab/core` and `rlstab/zoo`, one at a time, under their own tests.

    python benchmarks/mutation.py --sample 300 --seed 0

A mutant lives only in memory: one warm process that has imported torch is forked for each, and the fork imports the
changed module in place of the file. No source is written, so an interrupted run leaves nothing behind. Each mutant
meets the tests in TESTS that enter its function (for a line outside of functions: all), those that found earlier
mutants of the file first, until one fails. Left out are tests that start processes, whose children would import the
file, and tests that fail without any change.

Not mutated: messages of errors (the arguments of `raise`, f-strings, strings with a space), docstrings, annotations
other than the ranges and choices of settings, `assert`, type aliases, and `TorchComm`, which needs several processes.
"""

import argparse
import ast
import copy
import importlib
import itertools
import json
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [path for folder in ("core", "zoo") for path in sorted((ROOT / "rlstab" / folder).glob("*.py"))]
TESTS = ["tests/core", "tests/zoo", "tests/testing", "tests/test_explain.py"]
LEFT_OUT = {"TorchComm"}
#: Files whose tests start processes.
STARTING = ("test_import.py", "test_docstring.py", "test_processes.py")

COMPARE: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
PAIRS = [("min", "max"), ("ceil", "floor"), ("any", "all"), ("logical_and", "logical_or"), ("mul", "add")]
PAIRS += [("zeros", "ones"), ("zeros_like", "ones_like")]
SWAP = {left: right for pair in PAIRS for left, right in (pair, pair[::-1])}
CONVERSIONS = {"detach", "double", "float"}

#: Where a node is replaced: (field, index) by (field, index) from the module downwards.
Route = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    function: int  #: first line of the innermost function around it, 0 outside of functions
    operator: str
    before: str
    after: str
    route: Route
    number: int  #: which of the changes of this node

    def __str__(self) -> str:
        return f"{self.file}:{self.line} [{self.operator}] {self.before}  ->  {self.after}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every mutant of one node, with the operator's name; what is inside of the node is not looked at."""

    def changed(**fields: object) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def negated(test: ast.expr) -> ast.expr:
        return ast.UnaryOp(ast.Not(), test)

    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for new in COMPARE[type(op)]:
                    yield "comparison", changed(ops=[*ops[:index], new(), *ops[index + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op):
            yield "arithmetic", changed(op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield "and/or", changed(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "drop unary", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.Constant(value=str(value)) if " " not in value:  # with a space it is for readers
            yield "string", ast.Constant(f"other {value}")
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "negate condition", changed(test=negated(test))
        case ast.comprehension(ifs=[*others, test]):
            yield "negate filter", changed(ifs=[*others, negated(test)])
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None", changed(value=ast.Constant(None))
        case ast.Raise() | ast.Expr() | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "drop statement", ast.Pass()
        case ast.Name(id=name, ctx=ast.Load()) if name in SWAP:
            yield "swap", changed(id=SWAP[name])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in SWAP:
            yield "swap", changed(attr=SWAP[name])
        case ast.keyword(arg="min" | "max" as name):
            yield "swap", changed(arg=SWAP[name])
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in CONVERSIONS:
            yield "drop conversion", value
    if isinstance(node, ast.AugAssign):
        yield "drop statement", ast.Pass()


def text(node: ast.AST) -> str:
    """A node on one line; of a statement with a body, its head."""
    if isinstance(node, ast.comprehension):
        return " ".join(f"if {ast.unparse(test)}" for test in node.ifs)
    if isinstance(node, ast.If | ast.While):
        return f"if {ast.unparse(node.test)}"
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).replace("\n", " ")


def left_out(node: ast.AST) -> bool:
    """Whether a node and all that it contains stay as they are."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.ClassDef(name=name):
            return name in LEFT_OUT
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal"))):
            return True
    return False


def is_setting(node: ast.AST) -> bool:
    """A field whose annotation says which values it may have."""
    match node:
        case ast.AnnAssign(annotation=ast.Subscript(value=ast.Name(id="Annotated" | "Literal"))):
            return True
    return False


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file, in the order of the source."""
    file = path.relative_to(ROOT).as_posix()

    def visit(node: ast.AST, route: Route, line: int, function: int) -> Iterator[Mutant]:
        if left_out(node):
            return
        line = getattr(node, "lineno", line)
        for number, (operator, new) in enumerate(changes(node)):
            yield Mutant(file, line, function, operator, text(node), text(new), route, number)
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            function = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        for name, value in ast.iter_fields(node):
            # the annotation of a field of a class is the range of a setting; others are for readers
            hint = name in ("annotation", "returns") and not is_setting(node)
            if hint or isinstance(node, ast.Raise):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST):
                    step = (name, index if isinstance(value, list) else None)
                    yield from visit(child, (*route, step), line, function)

    yield from visit(ast.parse(path.read_text()), (), 0, 0)


def compiled(mutant: Mutant) -> CodeType:
    """The code of the file with this change."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    *way, (field, last) = mutant.route
    parent: ast.AST = tree
    for name, index in way:
        value = getattr(parent, name)
        parent = value if index is None else value[index]
    value = getattr(parent, field)
    old = value if last is None else value[last]
    _, new = list(changes(old))[mutant.number]
    if "lineno" in old._attributes and not hasattr(new, "lineno"):
        ast.copy_location(new, old)
    if last is None:
        setattr(parent, field, new)
    else:
        value[last] = new
    return compile(ast.fix_missing_locations(tree), str(ROOT / mutant.file), "exec")


class Instead(MetaPathFinder):
    """Imports one module from given code."""

    def __init__(self, file: str, code: CodeType) -> None:
        self.name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.path, self.code = str(ROOT / file), code

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        loader = SourceFileLoader(fullname, self.path)
        loader.get_code = lambda _: self.code  # type: ignore[method-assign]  # the source as changed
        return spec_from_file_location(fullname, self.path, loader=loader)


class Watch:
    """A pytest plugin: chooses and orders tests; notes how long each took, what it entered and which failed."""

    def __init__(self, order: Sequence[str] | None = None) -> None:
        self.order = order
        self.took: Counter[str] = Counter()
        self.entered: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {item.nodeid: item for item in items if item.path.name not in STARTING}
        items[:] = known.values() if self.order is None else [known[name] for name in self.order if name in known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.order is not None:
            return (yield)
        sys.settrace(tracer(self.entered[item.nodeid]))  # the first run, without a change
        try:
            return (yield)
        finally:
            sys.settrace(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid or "import")


def tracer(entered: set[tuple[str, int]]) -> Callable[[FrameType, str, object], None]:
    """A trace function that notes the functions of the mutated files that are entered."""
    files = {str(path): path.relative_to(ROOT).as_posix() for path in FILES}

    def trace(frame: FrameType, event: str, argument: object) -> None:
        file = files.get(frame.f_code.co_filename)
        if file is not None:
            entered.add((file, frame.f_code.co_firstlineno))

    return trace


def forked(work: Callable[[], object], limit: int) -> object:
    """What ``work`` returns in a fork of this process; "timeout" after ``limit`` seconds, None if the fork died."""
    with tempfile.TemporaryFile() as result:
        child = os.fork()
        if child == 0:
            try:
                quiet = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(quiet, stream)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a loop inside of torch too
                signal.alarm(limit)
                result.write(pickle.dumps(work()))
                result.flush()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return "timeout" if os.WTERMSIG(status) == signal.SIGALRM else None
        result.seek(0)
        written = result.read()
        return pickle.loads(written) if written else None


def session(order: Sequence[str] | None, mutant: Mutant | None = None) -> Watch:
    """Run the tests in this process, which has forgotten rlstab."""
    from hypothesis import Phase, settings

    # what finds a mutant need not be made small
    settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutation")
    watch = Watch(order)
    if mutant is not None:
        sys.meta_path.insert(0, Instead(mutant.file, compiled(mutant)))
    files = TESTS if order is None else sorted({test.partition("::")[0] for test in order})
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        "--tb=no",
        "--assert=plain",
        *([] if order is None else ["-x"]),
    ]
    code = pytest.main([*options, *files], plugins=[watch])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not watch.failed:
        watch.failed.append("import")
    return watch


def warm_up() -> None:
    """Import what the tests import, then forget rlstab and the tests: a fork then imports them in milliseconds."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    for path in [*FILES, *(path for folder in TESTS for path in sorted((ROOT / folder).glob("*.py")))]:
        importlib.import_module(path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", "."))
    assert sys.modules["rlstab"].__file__ == str(ROOT / "rlstab" / "__init__.py")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rlstab", "tests")]:
        del sys.modules[name]


def draw(every: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """``size`` of them, from each file its share, by the largest remainder."""
    files: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in every:
        files[mutant.file].append(mutant)
    exact = {file: size * len(of) / len(every) for file, of in files.items()}
    taken = {file: int(share) for file, share in exact.items()}
    for file in sorted(exact, key=lambda file: taken[file] - exact[file])[: size - sum(taken.values())]:
        taken[file] += 1
    chosen = random.Random(seed)
    return [of[index] for file, of in files.items() for index in sorted(chosen.sample(range(len(of)), taken[file]))]


def killed_earlier(every: list[Mutant], record: Path) -> list[Mutant]:
    """The present mutants that an earlier run killed: the same text, in the file of the same name where it is there."""
    known: dict[tuple[str, str, str], list[Mutant]] = defaultdict(list)
    for mutant in every:
        known[mutant.operator, mutant.before, mutant.after].append(mutant)
    chosen: dict[Mutant, None] = {}
    for line in map(json.loads, record.read_text().splitlines()):
        if line["outcome"] != "killed":
            continue
        same = known[line["operator"], line["before"], line["after"]]
        same = [mutant for mutant in same if Path(mutant.file).name == Path(line["file"]).name] or same
        if same:
            chosen[min(same, key=lambda mutant: abs(mutant.line - line["line"]))] = None
        else:
            print(f"not there any more: {line['file']}:{line['line']} {line['before']}  ->  {line['after']}")
    return list(chosen)


def within_budget(order: list[str], took: Counter[str], seconds: float) -> list[str]:
    """The first tests that together took no longer than this without a change."""
    if not seconds:
        return order
    return [
        test
        for test, total in zip(order, itertools.accumulate(took[test] for test in order), strict=True)
        if total <= seconds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="how many mutants, stratified by file; 0 is all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--files", nargs="*", default=[""], help="only files whose path begins so: rlstab/zoo/s2t")
    parser.add_argument(
        "--budget", type=float, default=0, help="seconds of tests that a mutant meets; 0 is all of them"
    )
    parser.add_argument("--timeout", type=int, default=30, help="seconds that a mutant may take")
    parser.add_argument("--out", type=Path, help="write every outcome as a line of JSON")
    parser.add_argument("--again", type=Path, help="only what survived in this earlier --out")
    parser.add_argument("--killed", type=Path, help="only what was killed in this earlier --out, by its text")
    arguments = parser.parse_args()
    out, again = (path and path.resolve() for path in (arguments.out, arguments.again))
    arguments.killed = arguments.killed and arguments.killed.resolve()

    every = [mutant for path in FILES for mutant in mutants(path) if mutant.file.startswith(tuple(arguments.files))]
    chosen = draw(every, arguments.sample, arguments.seed) if 0 < arguments.sample < len(every) else every
    if again:
        lines = [json.loads(line) for line in again.read_text().splitlines()]
        left = {(line["file"], line["route"], line["number"]) for line in lines if line["outcome"] == "survived"}
        chosen = [mutant for mutant in every if (mutant.file, json.dumps(mutant.route), mutant.number) in left]
    if arguments.killed:
        chosen = killed_earlier(every, arguments.killed)
    print(f"{len(every)} mutants, {len(chosen)} of them tried, seed {arguments.seed}", flush=True)

    warm_up()
    first = forked(lambda: session(None), 900)
    assert isinstance(first, Watch), "the tests did not run"
    tests = [test for test in first.took if test not in first.failed]
    print(f"{len(tests)} tests; left out because they fail unchanged: {', '.join(first.failed) or 'none'}", flush=True)
    spent: Counter[str] = Counter()
    for test in tests:
        spent[test.partition("::")[0]] += first.took[test]

    outcomes: dict[Mutant, str] = {}
    killers: dict[str, Counter[str]] = defaultdict(Counter)
    record = out.open("w") if out else None
    started = time.monotonic()
    for count, mutant in enumerate(chosen):
        function, kills = (mutant.file, mutant.function), killers[mutant.file]
        reach = [test for test in tests if not mutant.function or function in first.entered[test]]
        near = {
            test for test in reach if not mutant.function or any(file == mutant.file for file, _ in first.entered[test])
        }

        def rank(test: str, kills: Counter[str] = kills, near: set[str] = near) -> tuple[object, ...]:
            file = test.partition("::")[0]
            # after those that found something, file by file: the fixtures of a file are then made once
            return (-kills[test], test not in near, spent[file], file, first.took[test])

        order = within_budget(sorted(reach, key=rank), first.took, arguments.budget)
        got = forked(lambda order=order, mutant=mutant: session(order, mutant), arguments.timeout)
        by = got.failed[:1] if isinstance(got, Watch) else []
        if isinstance(got, Watch):
            outcome = "killed" if by and order else "survived"
            kills.update(test for test in by if "::" in test)
        else:
            outcome = "timeout" if got == "timeout" else "killed"
        outcomes[mutant] = outcome
        if record:
            line = asdict(mutant) | {"route": json.dumps(mutant.route), "outcome": outcome, "by": by}
            record.write(json.dumps(line) + "\n")
            record.flush()
        if outcome != "killed":
            at = time.monotonic() - started
            print(f"{at:6.0f} s {count + 1:4d}  {outcome} ({len(order)} tests)  {mutant}", flush=True)

    print(f"\n{'file':<34}{'mutants':>8}{'tried':>7}{'killed':>8}{'timeout':>9}{'survived':>10}")
    for file in [*dict.fromkeys(mutant.file for mutant in every), ""]:
        row = Counter(outcome for mutant, outcome in outcomes.items() if mutant.file.startswith(file))
        size, columns = sum(mutant.file.startswith(file) for mutant in every), (row["killed"], row["timeout"])
        print(f"{file or 'all':<34}{size:>8}{row.total():>7}{columns[0]:>8}{columns[1]:>9}{row['survived']:>10}")
    noticed = sum(outcome != "survived" for outcome in outcomes.values())
    print(f"score {noticed}/{len(outcomes)} = {noticed / max(1, len(outcomes)):.1%}")


if __name__ == "__main__":
    main()
