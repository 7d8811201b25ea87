"""Job files: right by the platforms' published schemas and in how many ranks they start; what is refused."""

import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.planner.platforms.jobs import RUN, Job, job_of
from tangram.planner.platforms.targets import ACCELERATORS, PLATFORMS, platform
from tests.planner.commands import refused
from tests.planner.exports.drawn import CLUSTER

HERE = Path(__file__).parent
SCHEMAS = {"k8s-trainjob": "trainjob", "k8s-pytorchjob": "pytorchjob", "volcano": "volcano", "skypilot": "skypilot"}
JOBS = [Job("tangram-x", nodes, devices, "h100", RUN, "registry/tangram:1") for nodes, devices in ((1, 4), (4, 8))]


def closed(schema: Any) -> Any:
    """A schema whose objects take no other fields than they name: Kubernetes drops those in silence."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if isinstance(found.get("properties"), dict) else found


def schema_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "peers" / f"{SCHEMAS[name]}.json").read_text())
    return found


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("job", JOBS, ids=["one node", "four nodes"])
def test_a_file_is_right_by_the_published_schema(name: str, job: Job) -> None:
    schemas = pytest.importorskip("jsonschema")
    published = schema_of(name)
    file = yaml.safe_load(PLATFORMS[name].write(job))
    check = schemas.Draft202012Validator(closed(published["schema"]))
    check.validate(file)
    if "kind" in published:
        assert (file["apiVersion"], file["kind"]) == (f"{published['group']}/{published['version']}", published["kind"])
        with pytest.raises(schemas.ValidationError):
            check.validate({**file, "spec": {**file["spec"], "nodes": 2}})


def test_wrong_files_are_seen() -> None:
    """The schemas are not so small that everything is right by them."""
    schemas = pytest.importorskip("jsonschema")
    job = JOBS[1]
    trainjob = yaml.safe_load(PLATFORMS["k8s-trainjob"].write(job))
    trainjob["spec"]["trainer"]["numNodes"] = "4"
    pytorchjob = yaml.safe_load(PLATFORMS["k8s-pytorchjob"].write(job))
    pytorchjob["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["cmd"] = ["x"]
    volcano = yaml.safe_load(PLATFORMS["volcano"].write(job))
    volcano["spec"]["tasks"][0]["policies"][0]["event"] = "Finished"
    sky = yaml.safe_load(PLATFORMS["skypilot"].write(job))
    sky["num_nodes"] = "4"
    for name, file in zip(SCHEMAS, (trainjob, pytorchjob, volcano, sky), strict=True):
        with pytest.raises(schemas.ValidationError):
            schemas.Draft202012Validator(closed(schema_of(name)["schema"])).validate(file)


@pytest.mark.parametrize("job", JOBS, ids=["one node", "four nodes"])
def test_as_many_ranks_are_started_as_are_planned(job: Job) -> None:
    job = replace(job, run="train.py")  # whatever starts no ranks itself
    train = yaml.safe_load(PLATFORMS["k8s-trainjob"].write(job))["spec"]["trainer"]
    assert (train["numNodes"], train["numProcPerNode"]) == (job.nodes, job.devices)
    assert train["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": job.devices}
    torch = yaml.safe_load(PLATFORMS["k8s-pytorchjob"].write(job))["spec"]
    assert sum(one["replicas"] for one in torch["pytorchReplicaSpecs"].values()) == job.nodes
    assert int(torch["nprocPerNode"]) == job.devices
    volcano = yaml.safe_load(PLATFORMS["volcano"].write(job))["spec"]
    assert sum(one["replicas"] for one in volcano["tasks"]) == volcano["minAvailable"] == job.nodes
    sky = yaml.safe_load(PLATFORMS["skypilot"].write(job))
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == (job.nodes, f"H100:{job.devices}")
    slurm = PLATFORMS["slurm"].write(job)
    assert f"#SBATCH --nodes={job.nodes}\n" in slurm
    assert f"#SBATCH --gpus-per-node={job.devices}\n" in slurm


def test_the_scripts_start_what_is_said(tmp_path: Path) -> None:
    """Run by bash, with programs in the place of Slurm's and torchrun that say what they were called with."""
    for name, body in {
        "scontrol": "echo node-a; echo node-b",
        "srun": 'shift; exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    job = replace(JOBS[1], run="train.py --name 'two words'")
    volcano = yaml.safe_load(PLATFORMS["volcano"].write(job))["spec"]["tasks"][1]["template"]["spec"]["containers"][0]
    scripts = {
        "slurm": PLATFORMS["slurm"].write(job),
        "skypilot": yaml.safe_load(PLATFORMS["skypilot"].write(job))["run"],
        "volcano": volcano["command"][-1],
    }
    given = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "4",
        "SLURM_JOB_ID": "7", "SKYPILOT_NODE_IPS": "node-a\nnode-b", "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1", "RANK": "1", "MASTER_ADDR": "node-a",
    }  # fmt: skip
    for name, script in scripts.items():
        done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True)
        words = done.stdout.splitlines()
        assert words[-3:] == ["train.py", "--name", "two words"], name
        assert words[words.index("--nnodes") + 1] == "4"
        assert words[words.index("--nproc-per-node") + 1] == "8"
        assert any(word.startswith("node-a") for word in words)


PROGRAMS = {
    "scontrol": 'echo "$@" >> said; echo node-a',
    "srun": 'shift; exec "$@"',
    "torchrun": """trap 'echo stopped >> said; exit 1' TERM; echo "$@" > said; while :; do sleep 0.05; done""",
}


def started(folder: Path, script: str, given: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A script with programs in the place of Slurm's and torchrun, which waits until it is asked to stop."""
    for name, body in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "MASTER_ADDR": "node-a", **given}
    process = subprocess.Popen(["bash", "-c", script], cwd=folder, env=env)
    until = time.monotonic() + 30
    while "tangram" not in (folder / "said").read_text() if (folder / "said").exists() else True:
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def test_a_launcher_is_started_once_a_node_and_goes_on_where_it_is_started_again() -> None:
    """By torchrun as often as nodes are lost in months; ranks are its own."""
    for name, one in PLATFORMS.items():
        text = " ".join(one.write(JOBS[1]).replace("- ", "").replace("'", "").split())
        assert "--max-restarts 1000" in text, name
        assert text.index("--max-restarts") < text.index("-m tangram launch plan.toml --resume"), name
        each = ("--nproc-per-node 1 ", "numProcPerNode: 1 ", "nprocPerNode: 1 ")
        assert sum(text.count(words) for words in each) in (1, 2), name
        assert "restarts" not in one.write(replace(JOBS[1], run="train.py")), name


@pytest.mark.parametrize("asked", ["USR1", "TERM"])
def test_a_slurm_job_whose_time_is_nearly_over_stops_and_is_queued_again(asked: str, tmp_path: Path) -> None:
    """One that somebody cancels is not: scancel has the tasks of the step stopped, not its script warned."""
    script = PLATFORMS["slurm"].write(JOBS[1])
    assert "#SBATCH --signal=B:USR1@120\n" in script
    assert "#SBATCH --requeue\n" in script
    assert "\nexport TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in script, "a lost launcher is replaced"
    given = {"SLURM_JOB_NODELIST": "node-[a-d]", "SLURM_NNODES": "4", "SLURM_JOB_ID": "7"}
    process = started(tmp_path, script, given)
    time.sleep(0.2)  # its trap stands
    if asked == "USR1":
        process.send_signal(signal.SIGUSR1)
    else:  # to the tasks
        subprocess.run(["pkill", "-TERM", "-P", str(process.pid)], check=True)
    assert process.wait(30) == 1
    said = (tmp_path / "said").read_text().splitlines()[1:]
    assert said == ["stopped"] + ["requeue 7"] * (asked == "USR1")
    plain = PLATFORMS["slurm"].write(replace(JOBS[1], run="train.py"))
    assert "requeue" not in plain, "of another program nobody knows that it would go on"


def test_a_pod_that_is_to_end_has_torchrun_stop_the_run(tmp_path: Path) -> None:
    """Kubernetes signals the first process alone, which must not be a shell, and waits until the state is saved."""
    for name in ("volcano", "k8s-pytorchjob"):
        file = yaml.safe_load(PLATFORMS[name].write(JOBS[1]))["spec"]
        pods = file["tasks"] if name == "volcano" else [*file["pytorchReplicaSpecs"].values()]
        assert {one["template"]["spec"]["terminationGracePeriodSeconds"] for one in pods} == {120}
        command = pods[0]["template"]["spec"]["containers"][0]["command"]
        if name == "k8s-pytorchjob":
            assert command[0] == "torchrun"
            continue
        process = started(tmp_path, f"{command[-1]}; true", {})  # which no shell takes for its last command
        process.terminate()
        assert process.wait(30) == 1
        assert (tmp_path / "said").read_text().endswith("stopped\n")


def test_the_texts_are_as_they_were() -> None:
    for name in PLATFORMS:
        suffix = "sh" if name == "slurm" else "yaml"
        assert PLATFORMS[name].write(JOBS[1]) == (HERE / "golden" / f"{name}.{suffix}").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((builtin("cpu-2"), "m", 2, RUN, ""), "cpu-2 has no nodes with accelerators that a scheduler could give"),
        ((CLUSTER, "m", 12, RUN, ""), "12 devices are not whole nodes of 8: plan for a multiple with --gpus"),
        ((CLUSTER, "m", 8, "train.py 'x", ""), "is no command: No closing quotation"),
        ((CLUSTER, "m", 8, "  ", ""), "--run is empty"),
    ],
)
def test_jobs_that_cannot_be(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(UserError) as found:
        job_of(*arguments)
    assert said in str(found.value)


def test_devices_that_platforms_do_not_know() -> None:
    other = replace(JOBS[0], device="my-cluster.toml")
    with pytest.raises(UserError, match="nobody says what Kubernetes calls"):
        PLATFORMS["k8s-trainjob"].write(other)
    with pytest.raises(UserError, match="SkyPilot has no name for"):
        PLATFORMS["skypilot"].write(other)
    with pytest.raises(UserError, match="need an image: give it with --image"):
        PLATFORMS["volcano"].write(replace(JOBS[0], image=""))
    for device in ("mi300x", "gaudi3", "ascend-910b", *ACCELERATORS):
        assert "/" in PLATFORMS["k8s-trainjob"].write(replace(JOBS[0], device=device))
    with pytest.raises(UserError, match="did you mean 'slurm'"):
        platform("slum")


SAID = ("llama-3-8b", "--cluster", "h100-8x8", "--tokens-per-batch", "1M", "--gpus", "16")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--job-file", "k8s-job"), "there is no platform 'k8s-job' (did you mean 'k8s-trainjob'?): there are slurm"),
        (("--job-file", "slurm", "--to", "torchtitan"), "write one file each: call the command for each of them"),
        (("--job-file", "slurm", "--submit"), "--submit needs a file: give one with --out"),
        (("--job-file", "slurm", "--submit", "--out", "x.sh"), "sbatch is not installed here: write the file without"),
        (("--to", "torchtitan", "--submit"), "--submit is of --job-file"),
        (("--job-file", "slurm", "--out", "nowhere/x.sh"), "cannot be written to nowhere/x.sh"),
        (("--job-file", "slurm", "--pick", "99"), "--pick 99: the rows of the ranking are 1 to 8"),
        (("--job-file", "volcano"), "need an image: give it with --image"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *SAID, *arguments)


def test_this_machine_has_no_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one with --cluster" in refused(capsys, "job.toml", "--job-file", "slurm")


def test_a_file_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sbatch, out = tmp_path / "sbatch", tmp_path / "job.sh"
    sbatch.write_text('#!/bin/bash\necho "Submitted $1"\ngrep -q "nodes=2" "$1"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = ("plan", *SAID, "--job-file", "slurm", "--submit", "--out", str(out), "--run", "train.py")
    assert main(list(said)) == 0
    captured = capfd.readouterr()
    assert f"Submitted {out}" in captured.out
    assert "note:" not in captured.err
    assert main([*said[:-1], "-m tangram train plan.toml"]) == 0
    assert "note: where the platform starts it again it begins anew: add --resume" in capfd.readouterr().err
    sbatch.write_text("#!/bin/bash\nexit 3\n")
    assert main(list(said)) == 2
    assert f"sbatch {out} ended with 3: it said why" in capfd.readouterr().err


def test_k8s_alone_is_a_trainjob(capsys: pytest.CaptureFixture[str]) -> None:
    texts: list[str] = []
    for name in ("k8s", "k8s-trainjob"):
        assert (
            main(["plan", "llama-3-8b", "--cluster", "h100-8x8", "--tokens-per-batch", "512K", "--job-file", name]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert "kind: TrainJob" in texts[0]
    assert texts[0] == texts[1]
