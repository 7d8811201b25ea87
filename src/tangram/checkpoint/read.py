"""Read wanted regions from a checkpoint: every needed block once, proved before a byte of it is used.

    plan and proof of coverage -> threads: read a block, compare its crc32, copy from it -> done

A thread does all three for one block while another waits for the disk, so disk, checksum and copies overlap; memory is
a block for each thread, however large the model is. With `peers` the ranks of a node read each block once for all of
them (`exchange`). What fails, fails before the elements of a damaged block are written; those of others may be.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tangram.checkpoint.manifest import BLOCK, Manifest
from tangram.checkpoint.scatter import Moves, Want, moves
from tangram.checkpoint.source import DamagedError, Sources, pages
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout.peers import Peers

__all__ = ["MEMORY", "READERS", "DamagedError", "Want", "read_blocks", "read_wants", "tensor"]

MEMORY = 64 << 20
"""Bytes that a rank reads through, if nobody says otherwise."""
READERS = 3
"""Threads of a rank: what one copies and sums, the others' requests hide."""


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
    read_blocks(path, manifest, moves(manifest, wants, cast=cast), memory)
    if peers is not None:
        peers.wait()


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


def read_blocks(path: Path, manifest: Manifest, wanted: Moves, memory: int = MEMORY) -> None:
    """Read the blocks that have something of what is wanted, in this process alone."""
    work = [(file, block) for file, table in sorted(wanted.by_block.items()) for block in sorted(table)]
    if not work:
        return
    with Sources(path, manifest, {file: wanted.names(file) for file in wanted.by_block}) as sources:
        iterator = iter(work)
        lock = threading.Lock()

        def step() -> Callable[[], bool]:
            room = pages(BLOCK)

            def one() -> bool:
                with lock:
                    item = next(iterator, None)
                if item is None:
                    return False
                file, block = item
                wanted.put(file, block, sources.read(file, block, room, wanted.names(file, block)))
                return True

            return one

        in_threads(step, min(READERS, len(work), max(1, memory // BLOCK)))


def in_threads(make: Callable[[], Callable[[], bool]], threads: int) -> None:
    """Let threads repeat a step, one made for each, until it says False. Raises the first error of any."""
    errors: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            step = make()
            while not stop.is_set() and step():
                pass
        except BaseException as error:  # noqa: BLE001  it is raised again by who waits
            errors.append(error)
            stop.set()

    others = [threading.Thread(target=run, name=f"tangram-read-{i}") for i in range(threads - 1)]
    for thread in others:
        thread.start()
    try:
        run()
    finally:
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]
