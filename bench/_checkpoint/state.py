"""The state that the bench saves: fp32 weights and the two moments of AdamW, cut as FSDP does or otherwise.

Every value is a function of its tensor's name, its place and the step, so what was loaded is checked value by value
without a second copy. A rank's part lies in one piece of memory that begins on a page, so that the raw writer can write
the very same bytes without copying them.
"""

# ruff: noqa: N806  an array carries its dims in its name

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench._checkpoint import disk

Cut = Literal["rows", "columns", "whole"]
"""Shard(0), Shard(1) and Replicate; what has one dim is cut along it by both of the first."""
LAYERS = 12
ALIGNMENT = 64  # torch's own of a tensor's memory
CHUNK = 1 << 20  # elements checked at a time: they stay in the cache
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """The part of one rank, under the names `model.x`, `optim.x.exp_avg` and `optim.x.exp_avg_sq`."""

    tensors: Mapping[str, DTensor]
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    """All of them, in whole pages."""
    nbytes: int
    """Of the whole state, all ranks' parts together, what is held by several once."""

    def locals(self) -> dict[str, Tensor]:
        """The parts as plain tensors, which share the memory."""
        return {name: tensor.to_local() for name, tensor in self.tensors.items()}

    def sections(self) -> dict[str, dict[str, DTensor]]:
        """The same state as our own `save` takes it."""
        found: dict[str, dict[str, DTensor]] = {"model": {}, "optim": {}}
        for name, tensor in self.tensors.items():
            section, _, rest = name.partition(".")
            found[section][rest] = tensor
        return found


def shapes(nbytes: float) -> dict[str, tuple[int, ...]]:
    """The tensors of a state of about so many bytes: a decoder of 12 layers, its width fitted. 2 MB is the least."""
    per_square = 16 + LAYERS * (4 + 3 * 2.75)  # parameters over the square of the width
    d = max(32, round(math.sqrt(nbytes / 12 / per_square) / 32) * 32)
    f = d * 11 // 4
    weights: dict[str, tuple[int, ...]] = {"embed.weight": (16 * d, d), "norm.weight": (d,)}
    for i in range(LAYERS):
        layer = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}
        weights |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        weights |= {f"layers.{i}.norm{n}.weight": (d,) for n in (1, 2)}
    moments = {f"optim.{name}.{which}": shape for name, shape in weights.items() for which in MOMENTS}
    return {f"model.{name}": shape for name, shape in weights.items()} | moments


def make(nbytes: float, mesh: DeviceMesh, cut: Cut) -> State:
    """The part of this rank; its memory is touched, and all zeros."""
    ranks = mesh.size()
    known = shapes(nbytes)
    sizes = {name: math.prod(_local(shape, cut, ranks)) * 4 for name, shape in known.items()}
    starts: dict[str, int] = {}
    at = 0
    for name, size in sizes.items():
        starts[name] = at
        at += -(-size // ALIGNMENT) * ALIGNMENT
    memory = disk.pages(at)
    tensors: dict[str, DTensor] = {}
    for name, shape in known.items():
        bytes_here = torch.from_numpy(memory[starts[name] : starts[name] + sizes[name]])
        local = bytes_here.view(torch.float32).view(_local(shape, cut, ranks))
        placement = Replicate() if cut == "whole" else Shard(_dim(shape, cut))
        tensors[name] = DTensor.from_local(
            local,
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
    return State(tensors, memory, sum(4 * math.prod(shape) for shape in known.values()))


def fill(state: State, step: int = 1) -> None:
    """Give the state the values of a step."""
    for part, expected in _parts(state.tensors, step):
        part.copy_(expected)


def wrong(tensors: Mapping[str, Tensor], step: int = 1, negated: bool = False) -> list[str]:
    """The names whose values are not those of a step, exactly. Plain tensors count as whole."""
    found: list[str] = []
    for name, tensor in tensors.items():
        for part, expected in _parts({name: tensor}, step):
            if not torch.equal(part, -expected if negated else expected):
                found.append(name)
                break
    return found


def _parts(tensors: Mapping[str, Tensor], step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the local parts, some rows each, with the values that they should have."""
    for name, tensor in tensors.items():
        local, shape, offsets = tensor, tuple(tensor.shape), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            offsets = _offsets(tensor)
        table = local.view(-1, local.shape[-1]) if local.ndim > 1 else local.view(-1, 1)
        width = shape[-1] if len(shape) > 1 else 1
        column = offsets[-1] if len(shape) > 1 else 0
        rows = max(1, CHUNK // table.shape[1])
        for row in range(0, table.shape[0], rows):
            some = table[row : row + rows]
            yield some, _values(name, step, offsets[0] + row, some.shape[0], column, some.shape[1], width)


def _values(name: str, step: int, row: int, rows: int, column: int, columns: int, width: int) -> Tensor:
    """Numbers between 0.5 and 1 with both signs, as random as a hash of their place: they do not compress."""
    seed = zlib.crc32(f"{name} {step}".encode())
    at_R = np.arange(row, row + rows, dtype=np.uint32) * np.uint32(width)
    at_C = np.arange(column, column + columns, dtype=np.uint32)
    bits = (at_R[:, None] + at_C[None]) * np.uint32(0x9E3779B1) + np.uint32(seed)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x85EBCA6B)
    bits ^= bits >> np.uint32(13)
    bits &= np.uint32(0x807FFFFF)
    bits |= np.uint32(0x3F000000)
    return torch.from_numpy(bits.view(np.float32))


def _dim(shape: tuple[int, ...], cut: Cut) -> int:
    return 1 if cut == "columns" and len(shape) > 1 else 0


def _local(shape: tuple[int, ...], cut: Cut, ranks: int) -> tuple[int, ...]:
    if cut == "whole":
        return shape
    dim = _dim(shape, cut)
    return tuple(n // ranks if i == dim else n for i, n in enumerate(shape))


def _offsets(tensor: DTensor) -> tuple[int, ...]:
    placement = tensor.placements[0]
    local = tensor.to_local()
    rank = tensor.device_mesh.get_local_rank()
    dim = placement.dim if isinstance(placement, Shard) else -1  # pyright: ignore[reportUnknownVariableType]
    return tuple(rank * local.shape[i] if i == dim else 0 for i in range(tensor.ndim))
