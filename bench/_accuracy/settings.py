"""The settings under which one torch is measured: each a process of its own, told by its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench._accuracy.sheet import Sheet, read, write
from bench._accuracy.sweep import SETTINGS, sheet
from tangram.errors import UserError
from tangram.hardware.host import workers

LIMIT = 600.0


@dataclass(frozen=True)
class Setting:
    """How torch computes on the processor."""

    torch: str = ""
    """One of sweep's SETTINGS."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


CAPABILITY = "ATEN_CPU_CAPABILITY"
"""The variable by which torch is told which of its compiled kernels to take."""
ON_CPU: Sequence[Setting] = (
    *(Setting(name) for name in SETTINGS),
    *(Setting("", {CAPABILITY: name}) for name in ("avx2", "default")),
)


def measured(folder: Path, device: str) -> list[Sheet]:
    """The sheets of this torch, written into the folder, the plain one first; then those that others put there."""
    folder.mkdir(parents=True, exist_ok=True)
    own = [_apart(folder, setting) for setting in ON_CPU] if device == "cpu" else [_here(folder, device)]
    names = dict.fromkeys([*own, *sorted(path.name for path in folder.glob("*.json"))])
    return [read(folder / name) for name in names]


def _here(folder: Path, device: str) -> str:
    found = sheet(device=device)
    write(found, folder / f"{found.name}.json")
    return f"{found.name}.json"


def _apart(folder: Path, setting: Setting) -> str:
    job = workers.Job("bench._accuracy.sweep:written", {"folder": str(folder.absolute()), "setting": setting.torch})
    (outcome,) = workers.run([job], LIMIT, setting.environment)
    if not outcome.ok:
        raise UserError(f"operators could not be measured with {setting}: {outcome.error}")
    return str(outcome.value)
