"""Who is compared: our engine, the raw disk, and every peer that is installed, behind one interface.

What a peer needed to run here at all, or to be as durable as ours, is said where it is done. None of them is given a
setting that makes it slower; where it has several ways, the default is taken.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# (the peers are an extra, mostly without types)

import contextlib
import importlib.util
import logging
import pickle
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench._checkpoint import disk
from bench._checkpoint.state import State
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.save import save
from tangram.relayout.exchange.peers import Peers

PACKAGES = {"torch_checkpointing": "torch_checkpointing", "Orbax": "orbax.checkpoint"}
"""What is not there with torch, by the peer that needs it."""


class Contender:
    """One way to save and load a state. Both are called on all ranks at once."""

    name = ""
    processes: int | None = None
    """The only number of processes that it works with."""
    linked = True
    """Whether its files know of each other: one of another save among them is damage, not another checkpoint."""

    def save(self, state: State, path: Path) -> None:
        """Write the state as `path`, which is not there, and wait until it is durable."""
        raise NotImplementedError

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        """Fill the state, or give new tensors where this is how it loads; what to check."""
        raise NotImplementedError


class Ours(Contender):
    """This engine, with all its checksums."""

    name = "ours"

    def save(self, state: State, path: Path) -> None:
        save(state.sections(), path, group=dist.group.WORLD)

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        load(state.sections(), path, group=dist.group.WORLD)
        return state.tensors


class Raw(Contender):
    """The limit: each rank writes its memory, and reads as many bytes into it, around the page cache."""

    name = "raw"

    def save(self, state: State, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        disk.write_raw(path / f"{dist.get_rank()}", state.memory)

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        self.read(state, path)
        return {}

    def read(self, state: State, path: Path, direct: bool = True) -> None:
        """Each rank its share of all files, one behind the other, in whole pages."""
        files = [(file, file.stat().st_size) for file in disk.files_of(path)]
        total, page = sum(size for _, size in files), 4096
        ranks, rank = dist.get_world_size(), dist.get_rank()
        low, high = (total * r // ranks // page * page for r in (rank, rank + 1))
        at = filled = 0
        for file, size in files:
            start, stop = max(low, at), min(high, at + size)
            if start < stop:
                disk.read_raw(file, start - at, state.memory[filled : filled + stop - start], direct)
                filled += stop - start
            at += size


class Dcp(Contender):
    """torch.distributed.checkpoint; it syncs its files by itself."""

    name = "DCP"

    def save(self, state: State, path: Path) -> None:
        dcp.save(dict(state.tensors), storage_writer=dcp.FileSystemWriter(path))

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        dcp.load(dict(state.tensors), storage_reader=dcp.FileSystemReader(path))
        return state.tensors


class DcpHuggingFace(Contender):
    """The same with safetensors files, a part of each tensor in each rank's file."""

    name = "DCP-HF"

    def save(self, state: State, path: Path) -> None:
        dcp.save(dict(state.tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(path), save_distributed=True))
        _settle(path)

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        dcp.load(dict(state.tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)))
        return state.tensors


class TorchCheckpointing(Contender):
    """Meta's torch_checkpointing, made to run without CUDA."""

    name = "torch_checkpointing"

    def save(self, state: State, path: Path) -> None:
        with _manager() as manager:
            manager.save(str(path), {"state": dict(state.tensors)})
        _settle(path)

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        with _manager() as manager:
            manager.load(str(path), into={"state": dict(state.tensors)})
        return state.tensors


@contextlib.contextmanager
def _manager() -> Generator[Any]:
    """A manager for one call: the second checkpoint that one saves (0.1.1) lacks the metadata to load it otherwise."""
    from torch_checkpointing import CheckpointManager, ItemSpec, metadata_manager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Its metadata is gathered through tensors on CUDA, whatever the group moves: gathered as objects here.
    metadata_manager.DefaultMetadataManager._all_gather_pickled_data = _gathered  # pyright: ignore[reportPrivateUsage]
    manager: Any = CheckpointManager(
        CheckpointManager.Config(
            items={"state": ItemSpec(resharder=DefaultResharder())},
            save=SyncCheckpointSaverConfig(),  # its asynchronous staging needs CUDA
            # Its O_DIRECT writes are not aligned, which ext4 refuses with EINVAL.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    try:
        yield manager
    finally:
        manager.close()


def _gathered(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, pickle.dumps(data), group=process_group)
    return {rank: pickle.loads(words) for rank, words in enumerate(found)}


class Safetensors(Contender):
    """One file by safetensors' own writer and reader."""

    name = "safetensors"
    processes = 1
    linked = False

    def save(self, state: State, path: Path) -> None:
        path.mkdir(parents=True)
        save_file(state.locals(), path / "state.safetensors")
        _settle(path)

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        return load_file(path / "state.safetensors")


class TorchSave(Contender):
    """One file by torch.save."""

    name = "torch.save"
    processes = 1
    linked = False

    def save(self, state: State, path: Path) -> None:
        path.mkdir(parents=True)
        # A view is saved with all the memory it is cut from: each tensor gets a storage of its own, as a model's have.
        views = {name: _own_storage(tensor) for name, tensor in state.locals().items()}
        torch.save(views, path / "state.pt")
        _settle(path)

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        return torch.load(path / "state.pt", weights_only=True)


def _own_storage(tensor: Tensor) -> Tensor:
    return torch.from_numpy(tensor.numpy())


class Orbax(Contender):
    """Orbax of JAX, from arrays of numpy."""

    name = "Orbax"
    processes = 1

    def __init__(self) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)
        import orbax.checkpoint as ocp

        self._checkpointer: Any = ocp.PyTreeCheckpointer()

    def save(self, state: State, path: Path) -> None:
        self._checkpointer.save(path, {name: tensor.numpy() for name, tensor in state.locals().items()})
        _settle(path)

    def load(self, state: State, path: Path) -> Mapping[str, Tensor]:
        found: dict[str, Any] = self._checkpointer.restore(path)
        return {name: torch.from_numpy(np.asarray(value)) for name, value in found.items()}


ALL: Mapping[str, type[Contender]] = {
    kind.name: kind for kind in (Raw, Ours, Dcp, DcpHuggingFace, TorchCheckpointing, Safetensors, TorchSave, Orbax)
}


def installed() -> tuple[list[str], list[str]]:
    """The contenders that can take part, and those whose package is not there."""
    absent = [name for name, package in PACKAGES.items() if not _there(package)]
    return [name for name in ALL if name not in absent], absent


def _there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def contenders(names: list[str]) -> list[Contender]:
    """Those of the names that work with as many processes as there are, made."""
    warnings.simplefilter("ignore")  # of peers, on every call
    logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
    world = dist.get_world_size()
    return [ALL[name]() for name in names if ALL[name].processes in (None, world)]


def _settle(path: Path) -> None:
    """Wait until what a peer has written is on the disk: each rank its share of the files, when all have written."""
    peers = Peers(dist.group.WORLD)
    peers.wait()
    disk.settle(path, disk.files_of(path)[peers.index :: peers.size])
