"""What works on this machine, found by trying it: each check does a small real thing and compares the result.

What may crash or hang (process groups, compilers) is tried in helper processes with a time limit; the rest is quick and
runs here. A check says `ok`, `missing` (not there, and what to install) or `failed` (there, but wrong or too little).
"""

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist

from tangram.hardware.host.machine import Machine
from tangram.hardware.host.workers import Job, Outcome, run

MIN_TORCH = "2.11"

_ENOUGH_SHARED_MEMORY = 1 << 30
_ENOUGH_OPEN_FILES = 4096
_HELPER_SECONDS = 120.0

Status = Literal["ok", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried; Tangram cannot work at all without the `needed` ones."""

    name: str
    status: Status
    detail: str
    needed: bool = False

    def as_json(self) -> dict[str, object]:
        """The fields as JSON has them."""
        return asdict(self)


def all_checks(machine: Machine, quick: bool = False) -> Iterator[Check]:
    """Every check, one after the other as they get done; `quick` leaves out the compiler, which takes many seconds."""
    yield check_torch()
    yield from check_bf16(machine)
    yield check_all_reduce(machine)
    if not quick:
        yield check_compile()
    yield check_shared_memory(machine.shared_memory_free_bytes)
    yield check_open_files(machine.open_files)
    yield check_transformers()


def check_torch() -> Check:
    """Whether torch is new enough."""
    new_enough = torch.__version__ >= MIN_TORCH
    detail = f"torch {torch.__version__}" + ("" if new_enough else f"; Tangram needs {MIN_TORCH} or newer")
    return Check("torch version", "ok" if new_enough else "failed", detail, needed=True)


def check_bf16(machine: Machine) -> Iterator[Check]:
    """A matmul in bfloat16 on the processor and on each kind of accelerator, against one in float64."""
    kinds = {accelerator.kind: None for accelerator in machine.accelerators}
    for kind in ("cpu", *kinds):
        name = f"bf16 matmul on {kind}"
        try:
            error = bf16_error(kind)
        except RuntimeError as reason:
            yield Check(name, "failed", _first_line(str(reason)))
        else:
            detail = f"largest error {error:.1e} of the largest element"
            yield Check(name, "ok" if error < 2**-6 else "failed", detail)


def check_all_reduce(machine: Machine) -> Check:
    """Two helper processes add up a tensor over gloo."""
    name = "all-reduce of 2 processes over gloo"
    if not machine.backends.get("gloo", False):
        return Check(name, "missing", "this torch was built without gloo", needed=True)
    with tempfile.TemporaryDirectory(prefix="tangram-store-") as folder:
        store = str(Path(folder) / "store")
        arguments = [{"rank": rank, "ranks": 2, "store": store} for rank in range(2)]
        outcomes = run([Job(f"{__name__}:all_reduce", given) for given in arguments], _HELPER_SECONDS)
    if all(outcome.value == 3.0 for outcome in outcomes):
        return Check(name, "ok", "both ranks hold the right sum", needed=True)
    return Check(name, "failed", _why(outcomes), needed=True)


def check_compile() -> Check:
    """torch.compile of a small function for the processor, which needs a C++ compiler."""
    name = "torch.compile on cpu"
    compiler = os.environ.get("CXX") or next((one for one in ("g++", "clang++", "c++") if shutil.which(one)), None)
    if compiler is None:
        return Check(name, "missing", "no C++ compiler found; install g++ or name one in CXX")
    outcomes = run([Job(f"{__name__}:compile_and_run")], _HELPER_SECONDS)
    if outcomes[0].value is True:
        return Check(name, "ok", f"compiled with {compiler} and right")
    return Check(name, "failed", _why(outcomes))


def check_shared_memory(free: int | None) -> Check:
    """Room in shared memory, through which the processes of data loaders and of one machine hand tensors on."""
    name = "shared memory"
    if free is None:
        return Check(name, "ok", "not limited to a file system of its own")
    enough = free >= _ENOUGH_SHARED_MEMORY
    advice = "" if enough else "; give /dev/shm 1 GiB or more (in a container: --shm-size)"
    return Check(name, "ok" if enough else "failed", f"{free / 2**30:.1f} GiB free{advice}")


def check_open_files(limit: int) -> Check:
    """The limit of open files, which sockets between ranks and tensors in shared memory count towards."""
    enough = limit >= _ENOUGH_OPEN_FILES or limit < 0  # negative: no limit
    advice = "" if enough else f"; raise it to {_ENOUGH_OPEN_FILES} or more (ulimit -n)"
    return Check("open files", "ok" if enough else "failed", f"limit {'none' if limit < 0 else limit}{advice}")


def check_transformers() -> Check:
    """Whether models of Hugging Face can be trained; found without importing the library, which takes seconds."""
    name = "Hugging Face models"
    try:
        return Check(name, "ok", f"transformers {importlib.metadata.version('transformers')}")
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "transformers is not installed; pip install 'tangram-train[hf]'")


def bf16_error(kind: str) -> float:
    """The largest error of a product in bfloat16, relative to the largest element of the product in float64."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(96, 96, generator=generator).to(torch.bfloat16) for _ in range(2))
    exact = left.double() @ right.double()
    product = (left.to(kind) @ right.to(kind)).cpu().double()
    return ((product - exact).abs().max() / exact.abs().max()).item()


def all_reduce(rank: int, ranks: int, store: str) -> float:
    """What one rank holds after an all-reduce of rank + 1 over gloo; runs in a helper process."""
    patience = timedelta(seconds=_HELPER_SECONDS / 2)
    # torch's stubs leave the collectives out of this class; it has those of every process group
    group = cast("dist.ProcessGroup", dist.ProcessGroupGloo(dist.FileStore(store, ranks), rank, ranks, patience))
    tensor = torch.tensor([rank + 1.0])
    group.allreduce([tensor]).wait()
    return tensor.item()


def compile_and_run() -> bool:
    """Whether a compiled function computes what the plain one does; runs in a helper process."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2 + x

    x = torch.linspace(-3, 3, 64)
    return torch.allclose(torch.compile(plain, fullgraph=True)(x), plain(x), rtol=1e-5, atol=1e-6)


def _why(outcomes: list[Outcome]) -> str:
    """The error of the helper that failed by itself, where one did."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    own = [error for error in errors if not error.startswith("ended because")]
    return _first_line((own or errors or ["the result was wrong"])[0])


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
