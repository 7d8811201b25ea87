"""Tensors whose numbers lie in files that are mapped to memory: pages that are not in use the system may give away.

A file has no name any more when its tensor is made, so nothing is left of it whatever ends the process. Files lie in
the folder for temporary ones (`TMPDIR`), which has to be one of a disk for this to save memory.
"""

from __future__ import annotations

import ctypes
import os
import tempfile

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tangram.errors import UserError


def mapped_like(x: Tensor) -> Tensor:
    """Zeros of the shape and type of `x`, of a DTensor this rank's part. Raises UserError where the disk has no
    room."""
    if isinstance(x, DTensor):
        part = mapped_like(x.to_local())
        return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    if not x.numel():
        return torch.zeros_like(x)
    with tempfile.NamedTemporaryFile(prefix="tangram-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, x.nbytes)  # else a disk that fills up ends the process by a signal
        except OSError as error:
            raise UserError(
                f'the folder "{tempfile.gettempdir()}" cannot take a tensor of {x.nbytes:,} bytes ({error.strerror}), '
                "as run.stream_layers asks: set TMPDIR to a folder of a disk that has room"
            ) from None
        return torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype).view(x.shape)  # pyright: ignore[reportUnknownMemberType]


def mapped(x: Tensor) -> Tensor:
    """A copy of `x`."""
    return mapped_like(x).copy_(x)


def free_at_once(least: int = 1 << 20) -> None:
    """Have the C library give the system what tensors of `least` bytes or more had, where it would keep that for later
    ones: what FSDP gathers layer by layer would take up to three times the memory. Nothing where that is not glibc."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, least)


_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
