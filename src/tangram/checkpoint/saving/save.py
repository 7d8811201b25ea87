"""Save a state: every rank writes its share, the first puts the parts together and commits.

    save({"model": model, "optim": optimiser, "progress": {"step": 100}}, "runs/step-100")

Whatever fails on any rank, all of them hear of it, and nothing is left where a checkpoint would be.
"""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tangram.checkpoint.saving.file_layout import Image, Outgoing, fill, images
from tangram.checkpoint.saving.file_writer import Ring, WrittenFile, write_image
from tangram.checkpoint.saving.rank_parts import (
    About,
    SaveError,
    finish,
    leave_part,
    new_id,
    part_of,
    tensors_of,
)
from tangram.checkpoint.saving.shared_files import Earlier, shared_file
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.state.entries import Described, State, StateEntry, mine
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import Manifest
from tangram.errors import sentence
from tangram.relayout.exchange.peers import PeerLostError, Peers


def save(
    state: State,
    path: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    about: About | None = None,
    no_dist: bool = False,
) -> Manifest | None:
    """Write the state of all ranks of `group` (None: all that there are) as the checkpoint `path`, and wait.

    A collective call. `group` must move tensors of the CPU (gloo); `no_dist`: of this process alone. Returns the
    manifest on the first rank, None on the others. Raises SaveError on all ranks when one of them cannot write or has
    died, or when there is a checkpoint `path` already; UserError for a state that no checkpoint can hold.
    """
    peers = Peers.of_call(group, no_dist)
    try:
        return save_described(describe(state, peers), Path(path), peers, about or About())
    except PeerLostError as error:
        raise SaveError(f'the checkpoint "{path}" was not written: {error}') from error


def save_described(
    described: Described, path: Path, peers: Peers, about: About, ring: Ring | None = None
) -> Manifest | None:
    """The same for a state that is described already. `ring`: memory to write through, kept by the caller."""
    # One rank looks and makes the folder: on a shared file system each could see another state of it.
    word = peers.from_first(_begin(path) if peers.index == 0 else None)
    if word["error"]:
        raise SaveError(word["error"])
    partial = commits.partial_path(path, word["id"])
    error = _try(lambda: write_share(described, partial, peers.index, peers.size, word["id"], ring))
    # Also the wait for the slowest: nothing is committed before all have written and said so.
    errors = [f"rank {rank}: {text}" for rank, text in enumerate(peers.all_words(error)) if text]
    manifest: Manifest | None = None
    if peers.index == 0:
        if not errors:
            made: list[Manifest] = []
            error = _try(lambda: made.append(finish(partial, path, peers.size, word["id"], about)))
            manifest = made[0] if made else None
            errors = [error] if error else []
        if errors:  # nobody else would: its name is known to this save alone
            shutil.rmtree(partial, ignore_errors=True)
    verdict = peers.from_first({"errors": errors})
    if verdict["errors"]:
        more = f" (and {len(verdict['errors']) - 1} more ranks)" if len(verdict["errors"]) > 1 else ""
        raise SaveError(f'the checkpoint "{path}" could not be written: {verdict["errors"][0]}{more}')
    return manifest


def _begin(path: Path) -> dict[str, str]:
    save_id = new_id()
    if path.exists():
        return {"id": save_id, "error": f'there is a checkpoint "{path}" already: give another name, or remove it'}
    error = _try(lambda: commits.begin(path, save_id))
    return {"id": save_id, "error": f'the folder of "{path}" cannot be made: {error}' if error else ""}


def _try(act: Any) -> str:
    """What went wrong, as a sentence; nothing when all went well."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        return sentence(error)
    return ""


def outgoing(entries: list[StateEntry]) -> list[Outgoing]:
    return [Outgoing(entry.name, entry.spec, entry.region, entry.layout, entry.frozen) for entry in entries]


def write_share(
    state: Described, partial: Path, index: int, writers: int, save_id: str, ring: Ring | None = None
) -> None:
    """Write what the rank at this place writes of the state, and leave its part in the folder under way."""
    own = mine(state.entries, index)
    pieces = outgoing(own)
    values = {id(piece): entry.local for piece, entry in zip(pieces, own, strict=True)}
    files = images(pieces, index, writers, save_id)
    ring = ring or Ring()
    frozen = any(piece.frozen for piece in pieces)
    earlier: Earlier = commits.newest_files(partial.parent) if frozen else (partial, {})

    def write(image: Image) -> WrittenFile:
        of_image, room = [values[id(placed.piece)] for placed in image.placed], ring.blocks[0]

        def take(one: Image, start: int, stop: int) -> Bytes:
            fill(one, of_image, start, room[: stop - start])
            return room[: stop - start]

        return shared_file(partial, image, save_id, earlier, take) or write_image(partial, image, of_image, ring)

    written = [write(image) for image in files]
    empty = {entry.name: entry.spec for entry in state.entries if 0 in entry.spec.shape}
    leave_part(partial, index, part_of(tensors_of(files, empty), written, state.objects))
