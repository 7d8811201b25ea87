"""Platforms that job files are written for: a row each. A new one is a function and its row.

Fields of Kubernetes jobs (Kubeflow's TrainJob and PyTorchJob, Volcano's Job) are those of their published schemas,
which tests check every file against. Kubeflow sets torchrun's own variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR
...) in each pod, so its command needs none of them; Volcano's plugin sets MASTER_ADDR, MASTER_PORT and RANK, a number
of the pod, which are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tangram.errors import UserError
from tangram.planner.platforms.jobs import PORT, Job, resource, words, written
from tangram.text import nearest_hint

RUNTIME = "torch-distributed"
"""The runtime that comes with Kubeflow's trainer."""


def trainjob(job: Job) -> str:
    """Kubeflow's TrainJob, v1alpha1: its runtime brings the image, unless one is given."""
    trainer: dict[str, Any] = {
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        **({"image": job.image} if job.image else {}),
        "command": ["torchrun", *job.again.split(), *words(job)],
        "resourcesPerNode": _resources(job),
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": RUNTIME}
    return _text("trainer.kubeflow.org/v1alpha1", "TrainJob", job, {"runtimeRef": reference, "trainer": trainer})


def pytorchjob(job: Job) -> str:
    """Kubeflow's PyTorchJob, v1: a master and as many workers as there are further nodes. Raises UserError."""
    pods = {"Master": 1, "Worker": job.nodes - 1}
    replicas = {
        kind: {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": {"spec": _pod(job, "pytorch", ["torchrun", *job.again.split(), *words(job)])},
        }
        for kind, count in pods.items()
        if count
    }
    return _text(
        "kubeflow.org/v1", "PyTorchJob", job, {"nprocPerNode": str(job.processes), "pytorchReplicaSpecs": replicas}
    )


def volcano(job: Job) -> str:
    """Volcano's Job, v1alpha1: all pods start together or none does. Raises UserError."""
    script = (
        f"exec torchrun --nnodes {job.nodes} --nproc-per-node {job.processes} --node-rank ${{RANK:-0}} "
        "--master-addr ${MASTER_ADDR:-localhost} --master-port ${MASTER_PORT:-23456} "
        f"{job.again}{job.run}"
    )
    pods = {"master": 1, "worker": job.nodes - 1}
    tasks = [
        {
            "name": kind,
            "replicas": count,
            "policies": [{"event": "TaskCompleted", "action": "CompleteJob"}] if kind == "master" else [],
            "template": {"spec": {**_pod(job, kind, ["bash", "-c", script]), "restartPolicy": "OnFailure"}},
        }
        for kind, count in pods.items()
        if count
    ]
    return _text(
        "batch.volcano.sh/v1alpha1",
        "Job",
        job,
        {
            "minAvailable": job.nodes,
            "schedulerName": "volcano",
            "plugins": {"pytorch": ["--master=master", "--worker=worker", "--port=23456"], "svc": []},
            "tasks": tasks,
        },
    )


def _pod(job: Job, container: str, command: list[str]) -> dict[str, Any]:
    if not job.image:
        raise UserError("the job's containers need an image: give it with --image, as in --image registry/tangram:1")
    return {
        "terminationGracePeriodSeconds": 120,  # for a step and the state on the disk
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": command,
                "resources": _resources(job),
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # ranks of a node share more than 64 MiB
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {resource(job): job.devices}, "requests": {resource(job): job.devices}}


def _text(version: str, kind: str, job: Job, spec: dict[str, Any]) -> str:
    whole = {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}
    return written(whole)


ACCELERATORS = {
    "a100": "A100-80GB", "a100-40": "A100", "gb200": "GB200", "gb300": "GB300", "b200": "B200", "b300": "B300",
    "h100": "H100", "h200": "H200", "h20": "H20", "v100": "V100", "l4": "L4", "l40s": "L40S", "a10": "A10",
    "a10g": "A10G", "t4": "T4", "mi300x": "MI300X",
}  # fmt: skip
"""What SkyPilot's catalogues call devices, by their names in `devices.toml`."""


def skypilot(job: Job) -> str:
    """The YAML for `sky launch`. Raises UserError for a device that SkyPilot's catalogues do not name."""
    if job.device not in ACCELERATORS:
        raise UserError(f"SkyPilot has no name for {job.device}: it has {', '.join(ACCELERATORS)}")
    resources: dict[str, Any] = {"accelerators": f"{ACCELERATORS[job.device]}:{job.devices}"}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    each = "$SKYPILOT_NUM_GPUS_PER_NODE" if job.processes == job.devices else "1"
    run = (
        "first=${SKYPILOT_NODE_IPS%%$'\\n'*}\n"
        f"torchrun --nnodes $SKYPILOT_NUM_NODES --nproc-per-node {each} "
        f"--node-rank $SKYPILOT_NODE_RANK --master-addr $first --master-port {PORT} {job.again}{job.run}\n"
    )
    task = {"name": job.name, "num_nodes": job.nodes, "resources": resources, "run": run}
    return written(task)


def slurm(job: Job) -> str:
    """The script for `sbatch`. A run that goes on is asked to stop before its time is over, and queued again."""
    options = "\n#SBATCH --open-mode=append\n#SBATCH --requeue\n#SBATCH --signal=B:USR1@120" if job.again else ""
    # Else a launcher that takes the place of a lost one waits for an address that torchrun gives once (torch 2.13).
    share = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" if job.again else ""
    ending = f" &\n{_QUEUED_AGAIN}" if job.again else "\n"
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.devices}
#SBATCH --exclusive
#SBATCH --output=%x-%j.log{options}

set -euo pipefail

mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{share}srun --kill-on-bad-exit=1 torchrun \\
  --nnodes "$SLURM_NNODES" --nproc-per-node {job.processes} {job.again}\\
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${{names[0]}}:{PORT}" \\
  {job.run}{ending}"""


_QUEUED_AGAIN = """step=$! over=no code=0

# Its time is nearly over: srun passes the signal on, the state goes to the disk, and the job is queued again.
trap 'over=yes; kill -TERM "$step"' USR1
wait "$step" || code=$?
if [ "$over" = yes ]; then
  code=0
  wait "$step" || code=$?
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


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
        raise UserError(
            f"there is no platform {name!r}{nearest_hint(name, PLATFORMS)}: there are {', '.join(PLATFORMS)}"
        )
    return PLATFORMS[name]
