"""Tensors whose numbers lie in files that are mapped to memory: pages that are not in use the system may give away.

A file has no name any more when its tensor is made, so nothing is left of it whatever ends the process. Files lie in
the folder for temporary ones (`TMPDIR`), which has to be one of a disk for this to save memory.
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch import Tensor

from tangram.errors import UserError


def mapped_like(x: Tensor) -> Tensor:
    """Zeros of the shape and type of `x`. Raises UserError where the disk has no room."""
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
