"""What the operating system lets this process have of the machine's cores and memory (Linux control groups, v1 and v2).

A container sees all cores of its host in most libraries; what it may use is written in its control group or in one that
holds it. Where there are no control groups (macOS) nothing is limited.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # v1 writes "no limit" as the largest multiple of the page size


@dataclass(frozen=True, slots=True)
class Limits:
    """Cores (a fraction is possible) and bytes of memory; None where nothing is limited."""

    cores: float | None
    memory: int | None


def limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Limits:
    """The tightest limits of this process's control group and of those that hold it."""
    cores = [quota for folder in _folders(root, own, "cpu") if (quota := _cores(folder)) is not None]
    memory = [most for folder in _folders(root, own, "memory") if (most := _memory(folder)) is not None]
    return Limits(min(cores, default=None), min(memory, default=None))


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


def _memory(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = _words(folder / name)
        if words and words[0] != "max" and int(words[0]) < _UNLIMITED:
            return int(words[0])
    return None


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []
