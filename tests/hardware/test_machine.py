"""The description of the machine: control groups of both versions, and checks that can say no."""

import json
import os
from pathlib import Path

import pytest

from tangram.hardware.host import machine
from tangram.hardware.host.machine import Limits, limits, memory_kills
from tangram.hardware.measuring import checks


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "fs",
        {
            "pod/cpu.max": "150000 100000\n",
            "pod/memory.max": "4096\n",
            "memory.max": "8192\n",
            "pod/box/cpu.max": "max 100000\n",
            "pod/box/memory.max": "max\n",
            "other/cpu.max": "1 100000\n",
        },
    )
    own = tree(tmp_path, {"own": "0::/pod/box\n"}) / "own"
    assert limits(root, own) == Limits(1.5, 4096)


def test_groups_of_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "fs",
        {
            "cpu,cpuacct/box/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "memory/box/memory.limit_in_bytes": "1000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    own = tree(tmp_path, {"own": "4:memory:/box\n3:cpu,cpuacct:/box\n"}) / "own"
    assert limits(root, own) == Limits(0.5, 1000)


def test_no_limit_in_version_1_is_a_large_number(tmp_path: Path) -> None:
    root = tree(tmp_path / "fs", {"memory/memory.limit_in_bytes": "9223372036854771712"})
    own = tree(tmp_path, {"own": "4:memory:/\n"}) / "own"
    assert limits(root, own) == Limits(None, None)


def test_processes_that_were_ended_for_memory_are_counted_where_somebody_counts(tmp_path: Path) -> None:
    two = tree(tmp_path / "two", {"pod/memory.events": "oom 5\noom_kill 3\noom_group_kill 0\n"})
    one = tree(tmp_path / "one", {"memory/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"})
    tree(tmp_path, {"2": "0::/pod\n", "1": "4:memory:/box\n", "all": "nr_free 1\noom_kill 7\n"})
    assert memory_kills(two, tmp_path / "2", tmp_path / "all") == 3
    assert memory_kills(one, tmp_path / "1", tmp_path / "all") == 2
    assert memory_kills(tmp_path, tmp_path / "1", tmp_path / "all") == 7
    assert memory_kills(tmp_path, tmp_path / "none", tmp_path / "none") == 0


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert limits(tmp_path, tmp_path / "none") == Limits(None, None)


def test_cores_are_those_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "limits", lambda: Limits(None, None))
    assert machine.describe().cores == len(os.sched_getaffinity(0))
    monkeypatch.setattr(machine, "limits", lambda: Limits(0.5, 1000))
    described = machine.describe()
    assert (described.cores, described.memory_bytes) == (0.5, 1000)


def test_the_description_is_json_and_words() -> None:
    described = machine.describe()
    assert json.loads(json.dumps(described.as_json()))["cores"] == described.cores
    assert all(described.in_words().values())


def test_memory_in_use_grows_with_what_is_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = machine.resident_mb()
    held = bytearray(os.urandom(1 << 20) * 64)
    assert 60 < machine.resident_mb() - before < 200
    assert machine.resident_mb() <= machine.peak_resident_mb() * 1.01
    del held
    monkeypatch.setattr(machine, "_STATM", tmp_path / "none")
    assert machine.resident_mb() == machine.peak_resident_mb(), "where the system does not tell"


def test_a_library_that_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIBRARIES", ("torch", "no-such-library"))
    assert machine.versions()["no-such-library"] is None
    assert machine.versions()["torch"] is not None


def test_checks_that_pass_and_that_do_not() -> None:
    assert checks.check_shared_memory(1 << 34).status == "ok"
    assert checks.check_shared_memory(1 << 20).status == "failed"
    assert checks.check_open_files(-1).status == "ok"
    assert checks.check_open_files(1024).status == "failed"


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_torch().status == "ok"
    monkeypatch.setattr(checks, "MIN_TORCH", "99.0")
    assert checks.check_torch().status == "failed"


def test_no_compiler_is_missing_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert checks.check_compile().status == "missing"


def test_a_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "all_reduce", None)  # not in the helpers, which import anew: they still work
    assert checks.check_all_reduce(machine.describe()).status == "ok"
    monkeypatch.setattr(checks, "_HELPER_SECONDS", 0.0)
    check = checks.check_all_reduce(machine.describe())
    assert (check.status, check.detail) == ("failed", "not done within 0 s")


def test_a_wrong_product_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "bf16_error", lambda kind: 0.5)
    assert [check.status for check in checks.check_bf16(machine.describe())] == ["failed"]


def test_the_least_torch_is_the_one_that_the_project_declares() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={checks.MIN_TORCH}"' in text
