import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlstab

PACKAGE = Path(rlstab.__file__).parent
HEAVY = ["transformers", "accelerate", "pydantic", "yaml", "matplotlib", "rich", "wandb", "einops", "safetensors"]


def modules(folder):
    return sorted(path.relative_to(PACKAGE.parent).as_posix() for path in (PACKAGE / folder).rglob("*.py"))


def imports(path):
    """Absolute names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse((PACKAGE.parent / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def beyond(path, *allowed):
    """What a file imports that is neither in the standard library nor under an allowed name."""
    return [
        name
        for name in imports(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(name == one or name.startswith(f"{one}.") for one in allowed)
    ]


def test_importing_the_library_brings_torch_and_nothing_else():
    program = (
        "import sys, torch, torch.distributed; before = {name.partition('.')[0] for name in sys.modules};"
        "import rlstab;"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - before), sep='\\n');"
        f"print(*[name for name in {HEAVY} if name in sys.modules], sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    brought = set(ran.stdout.split()) - sys.stdlib_module_names
    assert brought == {"rlstab"}


@pytest.mark.parametrize("path", modules("core"))
def test_core_needs_torch_and_itself(path):
    assert beyond(path, "torch", "rlstab.core") == []


@pytest.mark.parametrize("path", modules("zoo"))
def test_zoo_needs_the_lower_floors_and_never_a_sibling(path):
    assert beyond(path, "torch", "rlstab.core", "rlstab.estimators", "rlstab.signals") == []


def test_process_groups_live_in_one_file():
    users = [path for folder in ("core", "zoo") for path in modules(folder) if "torch.distributed" in imports(path)]
    assert users == ["rlstab/core/comm.py"]


def test_estimators_need_torch_alone():
    assert beyond("rlstab/estimators.py", "torch") == []
