"""What a writer of a format is given: tensors to make, a function that fills a box of one, and room for its buffers.

Every writer takes the same `WriteTask`, writes into a folder that appears whole or not at all, and names its files.
Tensors come under the names that they have here; a writer says what its format calls them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.formats.common.optimiser_names import STEP, split
from tangram.checkpoint.saving.file_layout import Image, parts
from tangram.checkpoint.store.digest import Bytes
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.relayout import TensorSpec
from tangram.relayout.mapping.states import States


@dataclass(frozen=True)
class WriteTask:
    """A conversion as a writer sees it."""

    folder: Path
    """New and empty."""
    specs: Mapping[str, TensorSpec]
    """In the order in which they are best written."""
    states: States
    """Of the optimiser, that are among the tensors."""
    fill: Callable[[str, Region, Tensor], None]
    """Give a box of a tensor, into memory of its shape and type."""
    fill_bytes: Callable[[str, int, Bytes], None]
    """Give bytes of a tensor in row-major order, from one on."""
    chunk: int
    """Bytes of a piece at most, where a format has pieces."""
    shard: int
    """Bytes of a file at most, where a format has files of a size."""
    stack: bool
    """Layers that are alike in one tensor, where the format knows both."""
    experts_apart: bool
    """An optimiser of their own for experts, as Megatron-core has it where expert-parallel ranks cut them."""
    small: Mapping[str, bytes]
    objects: Mapping[str, Any]
    on_bytes: Callable[[int], None]
    """Hears of bytes that are written."""
    done: Callable[[str], None]
    """Hears of each data file that is whole, which may go elsewhere then."""

    @cached_property
    def owners(self) -> Mapping[str, tuple[str, str]]:
        """Of each tensor its parameter and which state of it."""
        return split(self.specs, self.states)

    def steps(self) -> dict[str, float]:
        """How many steps each parameter with states has taken, by the names of the counts."""
        counts: dict[str, float] = {}
        for name in sorted(name for name, (_, state) in self.owners.items() if state == STEP):
            value = torch.empty(self.specs[name].shape, dtype=getattr(torch, self.specs[name].dtype))
            self.fill(name, Region.full(self.specs[name].shape), value)
            counts[name] = float(value)
        return counts


def boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """A tensor in blocks of at most so many elements: rows of the first dim, and where one is more, parts of it."""
    if not shape:
        yield ()
        return
    row = 1
    for n in shape[1:]:
        row *= n
    if row > most:
        for i, rest in itertools.product(range(shape[0]), boxes(shape[1:], most)):
            yield ((i, i + 1), *rest)
        return
    step = max(1, most // max(row, 1))
    for first in range(0, max(shape[0], 1), step):
        yield ((first, min(first + step, shape[0])), *((0, n) for n in shape[1:]))


def filled(task: WriteTask, name: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """A tensor in blocks of the task's size: where each begins, and its values in memory of their own."""
    spec = task.specs[name]
    kind = getattr(torch, spec.dtype)
    for box in boxes(spec.shape, max(1, task.chunk // kind.itemsize)):
        values = torch.empty([b - a for a, b in box], dtype=kind)
        if values.numel():
            task.fill(name, Region.of([tuple(span(a, b) for a, b in box)]), values)
        yield tuple(a for a, _ in box), values
        task.on_bytes(values.nbytes)


def taking(image: Image, task: WriteTask, names: Mapping[str, str]) -> Callable[[int, Bytes], Bytes]:
    """A function that gives a file's bytes block by block. `names`: of the tensors, by those that the file has."""

    def take(start: int, out: Bytes) -> Bytes:
        head = image.head[start : start + len(out)]
        out[: len(head)] = np.frombuffer(head, np.uint8)
        for placed, first, last in parts(image, start, start + len(out)):
            begin = placed.offset + first - start
            task.fill_bytes(names[placed.piece.name], first, out[begin : begin + last - first])
        task.on_bytes(len(out))
        return out

    return take
