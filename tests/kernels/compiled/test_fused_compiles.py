"""Kernels of fused operators compile for a Hopper device, which none has to be there for.

In a process of its own: where Triton interprets, it does not compile.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

_FLOATS = {"eps", "offset"}
_NORM = {"BH": 4096, "ROWS": 1, "ADDED": True, "WEIGHED": True}
_GATED = {"BW": 1024, "ROWS": 1, "GELU": True}
_X, _F = "*bf16", "*fp32"
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "norm": ("norm.forward", dict.fromkeys(("X", "RESIDUAL", "WEIGHT", "OUT", "SUM"), _X) | {"RSTD": _F}, _NORM),
    "norm of heads": ("norm.forward", dict.fromkeys(("X", "RESIDUAL", "WEIGHT", "OUT", "SUM", "RSTD"), _F),
                      {"BH": 128, "ROWS": 32, "ADDED": False, "WEIGHED": False}),
    "norm, backward": ("norm.backward", dict.fromkeys(("DY", "DSUM", "X", "WEIGHT", "DX"), _X)
                       | {"RSTD": _F, "PARTS": _F}, _NORM),
    "gated": ("gated.forward", dict.fromkeys(("GATE", "UP", "OUT"), _X), _GATED),
    "gated, backward": ("gated.backward", dict.fromkeys(("DY", "GATE", "UP", "DGATE", "DUP"), _X), _GATED),
    "rotary": ("rotary.rotate", dict.fromkeys(("Q", "K", "Q_OUT", "K_OUT"), _X) | {"COS": _F, "SIN": _F},
               {"BH": 64, "BS": 16, "BACK": True}),
    "loss": ("loss.gather", {"AT": "*i64"} | dict.fromkeys(("X", "TOP", "TOTAL", "LABEL"), _F), {"BC": 1024}),
    "loss, backward": ("loss.owed", {"AT": "*i64", "DX": _X} | dict.fromkeys(("X", "TOP", "SCALE", "LESS"), _F),
                       {"BC": 1024}),
    "fp8": ("packing.fp8", {"X": _X, "TURN": _F, "CODES": "*fp8e4nv", "SCALES": _F},
            {"ROWS": 128, "SQUARE": True, "TURNED": True}),
    "fp8 of rows": ("packing.fp8", {"X": _X, "TURN": _X, "CODES": "*fp8e4nv", "SCALES": _F},
                    {"ROWS": 32, "SQUARE": False, "TURNED": False}),
    "nvfp4, largest": ("packing.largest", {"X": _X, "TURN": _F, "MOST": _F}, {"ROWS": 16, "TURNED": True}),
    "nvfp4": ("packing.nvfp4", {"X": _X, "TURN": _F, "SECOND": _F, "PACKED": "*u8", "SCALES": "*fp8e4nv"},
              {"ROWS": 16, "TURNED": True}),
}  # fmt: skip
"""A kernel, the types of its pointers, its constants; what is left are whole numbers, and those of `_FLOATS`."""


def compile_for_hopper(name: str) -> int:
    """The bytes of a kernel's program; run where Triton does not interpret."""
    import triton
    from triton.backends.compiler import GPUTarget

    path, pointers, constants = CASES[name]
    module, _, function = path.partition(".")
    kernel = getattr(importlib.import_module(f"tangram.kernels.compiled.{module}"), function)
    names = [*inspect.signature(kernel.fn).parameters]
    numbers = {one: "fp32" if one in _FLOATS else "i32" for one in names if one not in pointers | constants}
    signature = {one: (numbers | pointers | dict.fromkeys(constants, "constexpr"))[one] for one in names}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Any) -> None:
    code = f"import json, runpy; own = runpy.run_path({__file__!r})\n"
    code += "print(json.dumps({name: own['compile_for_hopper'](name) for name in own['CASES']}))"
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout)
    assert sizes.keys() == CASES.keys()
    assert min(sizes.values()) > 1000
