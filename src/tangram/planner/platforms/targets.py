"""Platforms that job files are written for: a row each. A new one is a module beside this and its row."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.planner.platforms.jobs import Job
from tangram.planner.platforms.kubernetes import pytorchjob, trainjob, volcano
from tangram.planner.platforms.skypilot import skypilot
from tangram.planner.platforms.slurm import slurm


@dataclass(frozen=True)
class Platform:
    """How a job file is written, and the client that takes it."""

    write: Callable[[Job], str]
    client: tuple[str, ...]
    """The command that submits the file whose name is put behind it."""


PLATFORMS: Mapping[str, Platform] = {
    "slurm": Platform(slurm, ("sbatch",)),
    "k8s-trainjob": Platform(trainjob, ("kubectl", "apply", "-f")),
    "k8s-pytorchjob": Platform(pytorchjob, ("kubectl", "apply", "-f")),
    "volcano": Platform(volcano, ("kubectl", "apply", "-f")),
    "skypilot": Platform(skypilot, ("sky", "launch", "--yes")),
}
"""By what they are called on the command line."""
SHORT = {"k8s": "k8s-trainjob"}
"""Other names."""


def platform(name: str) -> Platform:
    """Raises UserError for a name that is none."""
    name = SHORT.get(name, name)
    if name not in PLATFORMS:
        near = difflib.get_close_matches(name, PLATFORMS, 1)
        raise UserError(
            f"there is no platform {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}: there are "
            f"{', '.join(PLATFORMS)}"
        )
    return PLATFORMS[name]
