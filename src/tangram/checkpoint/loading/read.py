"""Read wanted regions from a checkpoint: every needed block once, proved before a byte of it is used.

    plan and proof of coverage -> threads: read a block, compare its checksum, copy from it -> done

A thread does all three for one block while another waits for the disk, so disk, checksum and copies overlap; memory is
a block for each thread, however large the model is. With `peers` the ranks of a node read each block once for all of
them (`exchange`). What fails, fails before the elements of a damaged block are written; those of others may be.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.loading.block_threads import MEMORY, read_blocks
from tangram.checkpoint.loading.exchange import read_together
from tangram.checkpoint.loading.scatter import Want, moves
from tangram.checkpoint.store.manifest import Manifest
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout.exchange.peers import Peers

__all__ = ["MEMORY", "DamagedError", "Want", "read_wants", "tensor"]


def read_wants(
    path: Path,
    manifest: Manifest,
    wants: Sequence[Want],
    *,
    peers: Peers | None = None,
    memory: int = MEMORY,
    cast: bool = False,
) -> None:
    """Fill the memory of all wants from the checkpoint in the folder `path`, whose manifest is `manifest`.

    `peers`: collective over them; without, this process reads by itself. `memory`: bytes to read through; a block is
    the least. `cast`: memory may have another dtype than the stored one. Raises UserError before any byte changes where
    a want does not fit the manifest, and DamagedError, which names tensor and file, for what is not as it was written.
    """
    if peers is None or peers.size == 1:
        read_blocks(path, manifest, moves(manifest, wants, cast=cast), memory)
    else:
        read_together(path, manifest, lambda: moves(manifest, wants, cast=cast), peers, memory)


def tensor(path: Path, manifest: Manifest, name: str, region: Region | None = None) -> Tensor:
    """A stored tensor, or a region of it (flat where it is no grid). Raises as `read_wants` does."""
    if name not in manifest.tensors:
        raise UserError(f'the checkpoint "{path}" has no tensor {name}')
    spec = manifest.tensors[name].spec
    wanted = Region.full(spec.shape) if region is None else region
    shape = wanted.local_shape if wanted.local_shape is not None else (wanted.size,)
    shape = spec.shape if region is None else shape
    into = torch.empty(shape, dtype=getattr(torch, spec.dtype))
    read_wants(path, manifest, [Want(name, wanted, into)])
    return into
