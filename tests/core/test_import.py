import ast
import functools
import graphlib
import sys
from pathlib import Path

import pytest

import rlstab
from rlstab.zoo import METHODS

PACKAGE = Path(rlstab.__file__).parent


def modules(folder):
    return sorted(path.relative_to(PACKAGE.parent).as_posix() for path in (PACKAGE / folder).rglob("*.py"))


def statements(node):
    """All statements below a node; no expression imports anything, and most nodes are in expressions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@functools.cache
def imports(path):
    """Absolute names of the modules that a file imports, wherever in the file."""
    found = []
    for node in statements(ast.parse((PACKAGE.parent / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            files = [module for module in whole if (PACKAGE.parent / f"{module.replace('.', '/')}.py").exists()]
            found += files or [node.module]
    return found


def beyond(path, *allowed):
    """What a file imports that is neither in the standard library nor under an allowed name."""
    return [
        name
        for name in imports(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
    ]


def test_type_checkers_see_every_public_name():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    seen = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    seen |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert seen - {None} == {*rlstab.__all__, *METHODS.shipped_classes()}


#: Rooms from the ground up; a file imports its own room and those of lower floors, wherever in the file it imports.
FLOORS = [
    {"errors", "visible"},
    {"bins", "run_files", "safe_read"},
    {"files", "signs"},
    {"core", "console", "dump_files", "extras", "hub"},
    {"logs"},
    {"kl_estimators", "signals", "stages", "summary"},
    {"zoo"},
    {"presets"},
    {"config", "hosts"},
    {"explain", "page", "record", "tasks", "testing"},
    {"models", "replay"},
    {"adapters", "preflight", "train"},
    {"bench", "report"},
    {"probe"},
    {"look"},
    {"cli"},
    {"__main__"},
]
#: `rlstab` itself names what users need, and reads YAML only when it is asked to.
FILES = [path for path in modules(".") if path != "rlstab/__init__.py"]


def room(name):
    """The room of a path or of a module name: ``rlstab/zoo/s2t.py`` and ``rlstab.zoo.s2t`` are in ``zoo``."""
    return name.removesuffix(".py").replace("/", ".").split(".")[1]


def floor(name):
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} == set().union(*FLOORS)


@pytest.mark.parametrize("name", sorted(set().union(*FLOORS)))
def test_a_room_imports_itself_and_lower_floors(name):
    upward = [
        f"{path} imports {module}"
        for path in FILES
        if room(path) == name
        for module in imports(path)
        if module.startswith("rlstab.") and room(module) != name and floor(room(module)) >= floor(name)
    ]
    assert upward == []


@pytest.mark.parametrize("name", ["errors", "core", "kl_estimators", "stages", "zoo"])
def test_the_lower_floors_need_torch_alone(name):
    foreign = [(path, beyond(path, "torch", "rlstab")) for path in FILES if room(path) == name]
    assert [pair for pair in foreign if pair[1]] == []


def test_a_method_never_imports_a_sibling():
    methods = {f"rlstab.zoo.{name}" for name in METHODS.names()}
    siblings = [path for path in modules("zoo")[1:] if methods & set(imports(path))]
    assert siblings == []


def test_process_groups_live_in_one_file():
    users = [path for folder in ("core", "zoo") for path in modules(folder) if "torch.distributed" in imports(path)]
    assert users == ["rlstab/core/comm.py"]


def test_modules_import_each_other_in_no_circle():
    graph = {}
    for path in FILES:
        name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        graph[name] = {module for module in imports(path) if module.startswith("rlstab.")}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, with the circle
