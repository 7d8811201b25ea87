"""Kubernetes jobs: Kubeflow's TrainJob (trainer v2) and PyTorchJob (training operator v1), and Volcano's Job.

Fields are those of their published schemas, which tests check every file against. Kubeflow sets torchrun's own
variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR ...) in each pod, so its command needs none of them; Volcano's
plugin sets MASTER_ADDR, MASTER_PORT and RANK, a number of the pod, which are passed on.
"""

from __future__ import annotations

from typing import Any

from tangram.errors import UserError
from tangram.planner.platforms.jobs import Job, resource, words, written

RUNTIME = "torch-distributed"
"""The runtime that comes with Kubeflow's trainer."""


def trainjob(job: Job) -> str:
    """Kubeflow's TrainJob, v1alpha1: its runtime brings the image, unless one is given."""
    trainer: dict[str, Any] = {
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
        **({"image": job.image} if job.image else {}),
        "command": ["torchrun", *words(job)],
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
            "template": {"spec": _pod(job, "pytorch", ["torchrun", *words(job)])},
        }
        for kind, count in pods.items()
        if count
    }
    return _text(
        "kubeflow.org/v1", "PyTorchJob", job, {"nprocPerNode": str(job.devices), "pytorchReplicaSpecs": replicas}
    )


def volcano(job: Job) -> str:
    """Volcano's Job, v1alpha1: all pods start together or none does. Raises UserError."""
    script = (
        f"torchrun --nnodes {job.nodes} --nproc-per-node {job.devices} --node-rank ${{RANK:-0}} "
        "--master-addr ${MASTER_ADDR:-localhost} --master-port ${MASTER_PORT:-23456} "
        f"{job.run}"
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
