"""The Triton backend: the same function as the torch one, on a GPU or, where there is none, under its interpreter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlstab.errors import ShapeError
from rlstab.signals import token_signals

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
cases = importlib.import_module("tests.kernel_cases")

GIVEN = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
POINTERS = {"hidden", "weight", "bias", "out"}
NUMBERS = {"inner", "outer", "lowest", "floor"}
COUNTS = {
    "count", "size", "width", "row_step", "row_unit", "column_step", "column_unit", "slice_size",
    "first_column", "end_column",
}  # fmt: skip


#: What the interpreter of Triton 3.5, that of torch 2.9, does to numpy; numpy 2.4 refuses it.
TRITON_3_5 = "Conversion of an array with ndim > 0 to a scalar is deprecated"


@pytest.fixture(scope="module")
def interpreted():
    """What each case raised in a process in which Triton interprets."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-W", f"ignore:{TRITON_3_5}", "-m", "tests.kernel_cases"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["interpreted"]
    return told["raised"]


@pytest.mark.parametrize("name", cases.CASES)
def test_under_the_interpreter(interpreted, name):
    assert interpreted[name] == "", interpreted[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", cases.CASES)
def test_on_a_gpu(name):
    with cases.small():
        cases.CASES[name]("cuda")


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sums", "mass", "slopes"])
def test_a_kernel_compiles_without_a_gpu(monkeypatch, tmp_path, name, capability, dtype):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from rlstab.signals import kernels, triton_head

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is left open
    rows, columns, units = triton_head.BLOCK
    function = getattr(kernels, name)
    signature, constants = {}, {"ROWS": rows, "COLUMNS": columns, "UNITS": units, "WIDEN": False}
    for one in function.arg_names:
        if one.isupper():
            signature[one], constants[one] = "constexpr", constants.get(one, True)
        elif one in POINTERS:
            signature[one] = f"*{dtype}"
        elif one in NUMBERS | COUNTS:
            signature[one] = "fp32" if one in NUMBERS else "i32"
        else:
            signature[one] = "*i64" if one == "ids" else "*fp32"
    constants = {one: constants[one] for one, kind in signature.items() if kind == "constexpr"}
    made = compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    assert ("mma" in made.asm["ptx"]) == (dtype == "bf16")  # float32 is not rounded to the tensor cores' format


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            GIVEN,
            ShapeError,
            "token_signals: backend 'triton' needs a GPU, and hidden is on 'cpu'. Take backend='torch', or set "
            "TRITON_INTERPRET=1 before Triton is imported, which is for tests.",
        ),
        (
            (GIVEN[0].double(), GIVEN[1].double(), GIVEN[2]),
            ShapeError,
            "token_signals: backend 'triton' sums in float32, and hidden is torch.float64. Take backend='torch'.",
        ),
    ],
    ids=["cpu", "float64"],
)
def test_what_has_no_kernel_is_refused(given, kind, text):
    with pytest.raises(kind) as caught:
        token_signals(*given, backend="triton")
    assert str(caught.value) == text
