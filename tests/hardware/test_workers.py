"""Helper processes give their answer or say why not, and leave nothing behind."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tangram.hardware.host.channel import Channel, Json
from tangram.hardware.host.workers import NICENESS, Detached, Job, run, start_detached

HERE = "tests.hardware.test_workers"


def add(a: int, b: int) -> int:
    print("adding")
    return a + b


def add_slowly(a: int, b: int) -> int:
    time.sleep(1)
    return a + b


def fail() -> None:
    raise RuntimeError("no luck")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def abort_as_it_ends() -> str:
    """As gloo does now and then, whose threads are torn down with the process."""
    atexit.register(os.abort)
    print("all is said")
    return "said"


def unsayable() -> object:
    return object()


def sleep_with_a_child(note: str) -> None:
    """Start a process, note its number and one's own, and hang."""
    child = subprocess.Popen(["sleep", "600"])
    Path(note).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def leave_a_child(note: str) -> None:
    Path(note).write_text(str(subprocess.Popen(["sleep", "600"]).pid))


def gone(pid: int) -> bool:
    """Whether a process has ended (one that waits for its parent to take note has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if all(gone(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_answers_come_in_the_order_of_the_jobs() -> None:
    first, second = run([Job(f"{HERE}:add", {"a": 1, "b": 2}), Job("os:getpid")], limit=60)
    assert (first.value, first.error, first.log) == (3, None, "adding\n")
    assert second.value not in (None, os.getpid())


def test_an_exception_is_told_and_logged() -> None:
    (outcome,) = run([Job(f"{HERE}:fail")], limit=60)
    assert outcome.error == "RuntimeError: no luck"
    assert "in fail" in outcome.log
    assert not outcome.ok


def test_a_crash_is_told() -> None:
    (outcome,) = run([Job(f"{HERE}:crash")], limit=60)
    assert outcome.error == "the helper process ended with signal SIGSEGV and without a result"


@pytest.mark.parametrize("function", ["tangram.nowhere:f", f"{HERE}:nothing", f"{HERE}:unsayable"])
def test_what_cannot_be_called_or_said_is_an_error(function: str) -> None:
    (outcome,) = run([Job(function)], limit=60)
    assert outcome.error is not None


def test_when_one_fails_the_others_are_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    hanging, _ = run([Job(f"{HERE}:sleep_with_a_child", {"note": str(tmp_path / "n")}), Job(f"{HERE}:fail")], limit=300)
    assert hanging.error == "ended because helper 1, which belongs to the same run, failed"
    assert time.monotonic() - start < 60


def test_the_time_limit_ends_a_helper_and_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "note"
    (outcome,) = run([Job(f"{HERE}:sleep_with_a_child", {"note": str(note)})], limit=3)
    assert outcome.error == "not done within 3 s"
    assert wait_until_gone([int(pid) for pid in note.read_text().split()])


def test_what_a_helper_leaves_running_is_ended_too(tmp_path: Path) -> None:
    note = tmp_path / "note"
    (outcome,) = run([Job(f"{HERE}:leave_a_child", {"note": str(note)})], limit=60)
    assert outcome.ok
    assert wait_until_gone([int(note.read_text())])


def test_helpers_end_when_their_caller_is_killed(tmp_path: Path) -> None:
    note, temporary = tmp_path / "note", tmp_path / "temporary"
    temporary.mkdir()
    job = f"Job('{HERE}:sleep_with_a_child', {{'note': '{note}'}})"
    code = f"from tangram.hardware.host.workers import *; run([{job}], 600)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment)
    while not note.exists() or len(note.read_text().split()) < 2:
        assert caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert wait_until_gone([int(pid) for pid in note.read_text().split()])
    assert list(temporary.iterdir()) == []


def test_no_folder_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run([Job("os:getpid"), Job(f"{HERE}:fail")], limit=60)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- helpers that outlive their caller


def echo(channel: Channel, greeting: str) -> None:
    """Answer until the caller is gone; then take half a second, and leave a note."""
    note = ""
    try:
        while True:
            received = channel.receive(60)
            assert received is not None
            message, files = received
            note = str(message.get("note", note))
            texts = [os.read(file, 100).decode() for file in files]
            channel.send({"greeting": greeting, "heard": message, "texts": texts, "nice": os.nice(0)})
    except EOFError:
        time.sleep(0.5)
        if note:
            Path(note).write_text("done")


def answer(helper: Detached, message: dict[str, Json], files: tuple[int, ...] = ()) -> dict[str, Json]:
    helper.channel.send(message, files)
    received = helper.channel.receive(60)
    assert received is not None
    return received[0]


def test_a_conversation_with_files(tmp_path: Path) -> None:
    helper = start_detached(Job(f"{HERE}:echo", {"greeting": "hello"}))
    long = {"text": "x" * 1_000_000}
    said = answer(helper, long)
    assert (said["greeting"], said["heard"], said["texts"]) == ("hello", long, [])
    assert said["nice"] == os.nice(0) + NICENESS
    for name in "ab":
        (tmp_path / name).write_text(f"in {name}")
    files = [os.open(tmp_path / name, os.O_RDONLY) for name in "ab"]
    assert answer(helper, {"with": "files"}, tuple(files))["texts"] == ["in a", "in b"]
    for file in files:
        os.close(file)
    assert helper.channel.receive(0.01) is None
    assert os.getsid(helper.pid) == helper.pid
    assert helper.ended == ""
    assert helper.close(60)
    assert helper.ended == "exit code 0"


def test_how_a_detached_helper_ended_is_seen() -> None:
    failing, crashing = start_detached(Job(f"{HERE}:fail")), start_detached(Job(f"{HERE}:echo", {"greeting": ""}))
    received = failing.channel.receive(60)
    assert received is not None
    assert "fail() takes 0 positional arguments" in str(received[0]["error"])
    with pytest.raises(EOFError):
        failing.channel.receive(60)
    assert failing.close(60)
    assert failing.ended == "exit code 1"
    crashing.kill()
    with pytest.raises(EOFError):
        crashing.channel.receive(60)
    assert crashing.close(60)
    assert crashing.ended == "SIGKILL"


def test_a_detached_helper_goes_on_when_its_caller_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = f"""
import time
from tangram.hardware.host.workers import *
helper = start_detached(Job('{HERE}:echo', {{'greeting': ''}}))
helper.channel.send({{'note': '{note}'}})
assert helper.channel.receive(60)
print(helper.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert caller.stdout is not None
    pid = int(caller.stdout.readline())
    caller.kill()
    assert caller.stdout.read() == b"", "the helper must not hold its caller's output open"
    assert not gone(pid)
    caller.stdout.close()
    caller.wait()
    assert wait_until_gone([pid])
    assert note.read_text() == "done"


def test_what_libraries_do_as_a_helper_ends_does_not_undo_its_answer() -> None:
    first, other = run([Job(f"{HERE}:abort_as_it_ends"), Job(f"{HERE}:add_slowly", {"a": 1, "b": 2})], 60)
    assert (first.value, first.error) == ("said", None)
    assert "all is said" in first.log
    assert (other.value, other.error) == (3, None)
