"""Export of a checkpoint's model to Hugging Face's format, and verification, cold, beside the raw disk."""

import mmap
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from bench._checkpoint import disk
from bench._checkpoint.state import shapes, wrong
from tangram.checkpoint.formats.hf_export import to_hugging_face
from tangram.checkpoint.inspect.verify import verify
from tangram.training.run.launch import Rank


@dataclass(frozen=True)
class Task:
    """Where the kept checkpoints are, and how often to measure."""

    folder: str
    kept: str
    nbytes: float
    repeats: int
    memory: int
    """Bytes that our export may take."""
    names: tuple[str, ...]


@dataclass
class Figures:
    """Medians in seconds by contender."""

    exports: dict[str, float] = field(default_factory=dict[str, float])
    verifies: dict[str, float] = field(default_factory=dict[str, float])
    nbytes: int = 0
    """Of the whole checkpoint."""
    extra: int = 0
    """Bytes of memory at the peak of our export, beyond what the process had."""


def measure(_: Rank, task: Task) -> Figures:
    """In one process."""
    root, out = Path(task.folder), Path(task.folder, "export")
    ours, dcps = root / f"ours-{task.kept}", root / f"DCP-{task.kept}"
    model = [file for file in disk.files_of(ours) if file.name.startswith("model-")]
    everything = [file for file in disk.files_of(ours) if file.suffix == ".safetensors"]
    figures = Figures(nbytes=sum(file.stat().st_size for file in everything))
    shutil.rmtree(out, ignore_errors=True)
    to_hugging_face(_cold(ours), out, memory=task.memory)  # what is imported on first use
    shutil.rmtree(out)
    peak = disk.Peak()
    to_hugging_face(_cold(ours), out, memory=task.memory)
    figures.extra = peak.extra()
    memory = disk.pages(sum(file.stat().st_size for file in everything))
    exports: dict[str, Callable[[], object]] = {
        "raw": lambda: _raw(model, memory, out),
        "ours": lambda: to_hugging_face(ours, out, memory=task.memory),
    }
    if "DCP" in task.names:
        exports["DCP + safetensors"] = lambda: _by_dcp(dcps, out, task.nbytes)
    taken = _in_turns(
        exports, lambda: (_cold(ours), _cold(dcps) if dcps.exists() else None, shutil.rmtree(out)), task, out
    )
    figures.exports = {name: statistics.median(times) for name, times in taken.items()}
    verifies: dict[str, Callable[[], object]] = {
        "raw": lambda: _read(everything, memory),
        "ours": lambda: _sound(ours),
    }
    taken = _in_turns(verifies, lambda: _cold(ours), task, None)
    figures.verifies = {name: statistics.median(times) for name, times in taken.items()}
    return figures


def _in_turns(
    acts: Mapping[str, Callable[[], object]], before: Callable[[], object], task: Task, out: Path | None
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {}
    names = list(acts)
    for turn in range(task.repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before()
            begin = time.monotonic()
            acts[name]()
            taken.setdefault(name, []).append(time.monotonic() - begin)
            if out is not None and name != "raw":
                _check(out)
    return taken


def _cold(path: Path) -> Path:
    disk.evict(path)
    return path


def _read(files: list[Path], memory: disk.Bytes) -> int:
    """Read files into memory, one behind the other; the bytes, in whole pages."""
    at = 0
    for file in files:
        size = file.stat().st_size // mmap.PAGESIZE * mmap.PAGESIZE
        disk.read_raw(file, 0, memory[at : at + size])
        at += size
    return at


def _raw(files: list[Path], memory: disk.Bytes, out: Path) -> None:
    size = _read(files, memory)
    out.mkdir()
    disk.write_raw(out / "raw", memory[:size])


def _by_dcp(source: Path, out: Path, nbytes: float) -> None:
    """What a user of DCP does: load the weights whole, write them with safetensors."""
    known = {name: shape for name, shape in shapes(nbytes).items() if name.startswith("model.")}
    tensors = {name: torch.empty(shape) for name, shape in known.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(source))
    out.mkdir()
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(named, out / "model.safetensors")
    disk.settle(out)


def _check(out: Path) -> None:
    """Every value, by safetensors' own reader."""
    found = {f"model.{n}": t for file in out.glob("*.safetensors") for n, t in load_file(file).items()}
    bad = wrong(found)
    if bad or not found:
        raise RuntimeError(f"an export has other values of {bad[:1] or 'everything'} than were saved")


def _sound(path: Path) -> None:
    if not verify(path).sound:
        raise RuntimeError(f"{path} is not sound")
