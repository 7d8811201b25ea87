"""What a job file says of a plan: how many nodes, with how many devices of what kind, and what torchrun starts."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.planner.search.strategy import node

RUN = "-m tangram launch plan.toml --resume"
"""What torchrun starts where nothing else is said: started again, it goes on."""
LAUNCHER = ["-m", "tangram", "launch"]
RESTARTS = 1000
"""Of launchers, by torchrun: one for each node that is lost in months; what would come again ends torchrun at once."""
PORT = 29500
RESOURCES = (
    ("mi", "amd.com/gpu"),
    ("gaudi", "habana.ai/gaudi"),
    ("ascend", "huawei.com/Ascend910"),
    ("trainium", "aws.amazon.com/neuron"),
    *((of, "nvidia.com/gpu") for of in ("gb", "b200", "b300", "h", "a1", "a8", "v100", "l4", "t4", "rtx", "rubin")),
)
"""By how names of devices in `devices.toml` begin, what Kubernetes calls them: its plugins' own names."""


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    """Of lower-case letters, digits and dashes, as platforms want it."""
    nodes: int
    devices: int
    """Of each node."""
    device: str
    """As `devices.toml` names it."""
    run: str
    """What torchrun starts, with its arguments."""
    image: str = ""
    """The container's; "" where none was given."""

    @property
    def processes(self) -> int:
        """That torchrun starts on each node: a launcher, which starts the ranks itself, or the ranks."""
        return 1 if words(self)[: len(LAUNCHER)] == LAUNCHER else self.devices

    @property
    def again(self) -> str:
        """torchrun's option for what is known to go on where it is started again."""
        return f"--max-restarts {RESTARTS} " if words(self)[: len(LAUNCHER)] == LAUNCHER else ""


def job_of(cluster: Cluster, model: str, ranks: int, run: str, image: str) -> Job:
    """The job that starts so many ranks on a cluster. Raises UserError where it has no nodes to give."""
    if any(link.name == "gloo" for link in cluster.links):
        raise UserError(
            f"{cluster.name} has no nodes with accelerators that a scheduler could give: run the plan there with "
            "`tangram train`"
        )
    each = min(node(cluster), ranks)
    if ranks % each:
        raise UserError(f"{ranks} devices are not whole nodes of {each}: plan for a multiple with --gpus")
    try:
        shlex.split(run)
    except ValueError as error:
        raise UserError(f"--run {run!r} is no command: {error}") from None
    if not run.strip():
        raise UserError(f"--run is empty: say what torchrun starts, as in {RUN!r}")
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:40].strip("-") or "run"
    return Job(f"tangram-{name}", ranks // each, each, cluster.device.name, run, image)


def words(job: Job) -> list[str]:
    """What is started, word by word."""
    return shlex.split(job.run)


def resource(job: Job) -> str:
    """What Kubernetes calls the devices. Raises UserError for those whose name is not known."""
    found = next((name for start, name in RESOURCES if job.device.startswith(start)), "")
    if not found:
        raise UserError(
            f"nobody says what Kubernetes calls {job.device}: name the cluster's device as devices.toml does, as in "
            'device.name = "h100"'
        )
    return found


def written(whole: dict[str, Any]) -> str:
    """As YAML: keys in order, several lines as a block, the same object twice where it stands twice."""
    return yaml.dump(whole, Dumper=_Plain, sort_keys=False, width=1000)


class _Plain(yaml.SafeDumper):
    """YAML as people write it."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True

    def text(self, data: str) -> yaml.Node:
        """Several lines as a block."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Plain.add_representer(str, _Plain.text)
