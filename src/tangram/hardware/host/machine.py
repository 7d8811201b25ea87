"""The machine at hand in neutral words: versions, cores, memory, disk, accelerators, communication back ends.

Whatever kind of accelerator there is, torch's own device-neutral interface is asked; no kind is named here. Cores and
memory are what this process may use, not what the host has: a container or a job's affinity counts.
"""

import importlib.metadata
import itertools
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed

import tangram
from tangram.errors import UserError

_UNLIMITED = 1 << 60  # v1 writes "no limit" as the largest multiple of the page size


@dataclass(frozen=True, slots=True)
class Limits:
    """Cores (a fraction is possible) and bytes of memory; None where nothing is limited."""

    cores: float | None
    memory: int | None


def limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Limits:
    """The tightest limits of this process's control group and of those that hold it."""
    cores = [quota for folder in _folders(root, own, "cpu") if (quota := _cores(folder)) is not None]
    memory = [most for folder in _folders(root, own, "memory") if (most := _memory_limit(folder)) is not None]
    return Limits(min(cores, default=None), min(memory, default=None))


def memory_kills(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup"), machine: Path = Path("/proc/vmstat")
) -> int:
    """How many processes the kernel has ended so far as memory ran out: of this process's control groups, or of the
    machine where those do not count; 0 where nobody does."""
    files = [
        folder / name for folder in _folders(root, own, "memory") for name in ("memory.events", "memory.oom_control")
    ]
    for words in (*map(_words, files), _words(machine)):
        counts = dict(itertools.pairwise(words))
        if (kills := counts.get("oom_kill")) is not None:
            return int(kills)
    return 0


def _folders(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group for a controller, from the innermost to the root."""
    if not own.exists():
        return
    for line in own.read_text().splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":  # v2: one tree for all controllers
            top = root
        elif controller in controllers.split(","):
            top = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        inner = top / group.strip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)


def _cores(folder: Path) -> float | None:
    v2 = _words(folder / "cpu.max")
    if len(v2) == 2 and v2[0] != "max":
        return int(v2[0]) / int(v2[1])
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = _words(folder / name)
        if words and words[0] != "max" and int(words[0]) < _UNLIMITED:
            return int(words[0])
    return None


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []


# The libraries whose versions give a figure or a bug report its meaning: ours, and the peers that benches compare with.
LIBRARIES = ("torch", "numpy", "lark", "safetensors", "pydantic", "typer", "rich", "transformers", "einops")

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator as torch sees it."""

    kind: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process has to work with. `cores` may be a fraction; sizes are in bytes; None where it is unknown."""

    system: str
    cpu: str
    cores: float
    cores_present: int
    memory_bytes: int | None
    memory_available_bytes: int | None
    disk_free_bytes: int
    shared_memory_free_bytes: int | None
    open_files: int
    accelerators: tuple[Accelerator, ...]
    backends: dict[str, bool]

    def as_json(self) -> dict[str, object]:
        """The fields as JSON has them."""
        return asdict(self)

    def in_words(self) -> dict[str, str]:
        """The same for a person to read."""
        devices = ", ".join(f"{one.name} ({one.kind}, {_size(one.memory_bytes)})" for one in self.accelerators)
        return {
            "system": self.system,
            "processor": self.cpu,
            "cores": f"{self.cores:g} usable of {self.cores_present}",
            "memory": f"{_size(self.memory_bytes)}, {_size(self.memory_available_bytes)} available",
            "disk": f"{_size(self.disk_free_bytes)} free",
            "shared memory": f"{_size(self.shared_memory_free_bytes)} free",
            "open files": str(self.open_files),
            "accelerators": devices or "none",
            "back ends": ", ".join(name for name, there in self.backends.items() if there) or "none",
        }


def versions() -> dict[str, str | None]:
    """Versions of Tangram, Python and the libraries in LIBRARIES; None for one that is not installed."""
    found: dict[str, str | None] = {"tangram": tangram.__version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = None
    return found


def describe(folder: str | Path | None = None) -> Machine:
    """Look at the machine; disk space is that of `folder` (the current one by default)."""
    allowed = limits()
    memory, available = _memory(allowed)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu(),
        cores=usable_cores(allowed),
        cores_present=os.cpu_count() or 1,
        memory_bytes=memory,
        memory_available_bytes=available,
        disk_free_bytes=shutil.disk_usage(folder or Path.cwd()).free,
        shared_memory_free_bytes=_shared_memory(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        accelerators=accelerators(),
        backends=backends(),
    )


def accelerators() -> tuple[Accelerator, ...]:
    """The accelerators that torch can use here; empty on a machine with none."""
    if not torch.accelerator.is_available():
        return ()
    device = torch.accelerator.current_accelerator()
    if device is None:
        return ()
    found: list[Accelerator] = []
    for index in range(torch.accelerator.device_count()):
        properties: object = torch.get_device_module(device).get_device_properties(index)
        memory = getattr(properties, "total_memory", None)
        found.append(Accelerator(device.type, str(getattr(properties, "name", device.type)), memory))
    return tuple(found)


def pick_device(choice: str, local_rank: int, world: int) -> torch.device:
    """The device of a rank: the machine's accelerator when there is one for each rank, else the CPU if asked for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True) if choice == "auto" else None
    if accelerator is None:
        return torch.device("cpu")
    if torch.accelerator.device_count() < world:
        raise UserError(
            f"the mesh has {world} ranks but this machine has {torch.accelerator.device_count()} {accelerator.type} "
            'device(s): set device = "cpu" in [run], or take a smaller mesh'
        )
    return torch.device(accelerator.type, local_rank)


def room_for_ranks(choice: str) -> int | None:
    """How many ranks this machine has devices for; None where they run on its CPU, which takes any number."""
    return torch.accelerator.device_count() if pick_device(choice, 0, 1).type != "cpu" else None


def backends() -> dict[str, bool]:
    """Every communication back end that this torch knows by name, and whether it was built with it."""
    if not torch.distributed.is_available():
        return {}
    names = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    return {name: torch.distributed.is_backend_available(name) for name in names}


def _size(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def usable_cores(allowed: Limits | None = None) -> float:
    """The cores that affinity and control groups leave to this process; a fraction is possible."""
    allowed = allowed or limits()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable if allowed.cores is None else min(usable, allowed.cores)


def _memory(allowed: Limits) -> tuple[int | None, int | None]:
    """Bytes in all and bytes available now."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, available = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    if allowed.memory is None:
        return total, available
    return min(total, allowed.memory), min(available, allowed.memory)


def repeatable() -> None:
    """Let torch refuse every operation that may give another result the next time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one maker's products are repeatable only with this
    torch.use_deterministic_algorithms(True)


def resident_mb() -> float:
    """The memory of this process that is in RAM now, in MB; its highest so far where the system does not tell."""
    try:  # asked every step: no more calls than it takes
        with _STATM.open("rb") as statm:
            pages = int(statm.read().split()[1])
    except FileNotFoundError:
        return peak_resident_mb()
    return pages * _PAGE_BYTES / 1e6


def peak_resident_mb() -> float:
    """The most memory that this process has had in RAM, in MB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


def _shared_memory() -> int | None:
    folder = Path("/dev/shm")
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
