"""Compile kernels for a device that is not there, and print what the compiler says of each, a line of JSON each.

Run by itself, without the interpreter: `launch` starts its kernels as always, and in the place of a device there is a
compiler for compute capability 9.0 (Hopper). Of each: its name, its shared memory, the registers of a thread, bytes
that do not fit in registers, and which instructions of matrix units it has.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tangram.kernels.attention import Heads
from tangram.kernels.flash import launch
from tangram.kernels.flash.modes import MODES
from tangram.kernels.flash.spans import in_order

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.float8_e4m3fn: "*fp8e4nv"}
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


class Compiler:
    """In the place of a kernel: what starts it compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return self.compiled

    def compiled(self, *args: Any, **how: int) -> None:
        names, signature, constants, attributes = self.kernel.arg_names, {}, {}, {}
        for i, (name, value) in enumerate(zip(names, args, strict=True)):
            if self.kernel.params[i].is_constexpr or (isinstance(value, int) and value == 1):
                signature[name], constants[i,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if aligned and signature[name] != "constexpr":
                attributes[i,] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        found = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3, **how}
        )
        instructions = re.findall(r"(wgmma|mma)\.\S*?m\d+n\d+k\d+\S*?\.(e4m3|bf16|f16|tf32)", found.asm["ptx"])
        line = {"kernel": self.kernel.fn.__name__, "shared": found.metadata.shared, **_resources(found.asm["cubin"])}
        print(json.dumps({**line, "units": sorted({" ".join(one) for one in instructions})}), flush=True)


def _resources(binary: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "spilled": int(found[2])}


def main(mode: str, width: int, value_width: int) -> None:
    launch.kernel = launch.kernel = Compiler  # pyright: ignore
    heads = Heads(*(torch.zeros(1, h, 256, w).bfloat16() for h, w in ((8, width), (2, width), (2, value_width))))
    call = launch.Call(MODES[mode], in_order(256, 256), 0.1)
    whole = launch.forward(heads, call)
    launch.backward(torch.zeros(1, 8, 256, value_width).bfloat16(), heads, whole, call)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
