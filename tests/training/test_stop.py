"""A signal asks the ranks to stop after their step, wherever it arrives; the second one ends the job at once."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tangram.training.run.signals import SAME_SECONDS, Stop, on_signals

SOON = 30.0


@contextmanager
def job(folder: Path) -> Generator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """A program with two ranks that step until they are asked to stop, in a process group of its own, as a shell does.

    Yields it and a function that reads its next line.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "tests.training.stopping"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, process_group=0
    ) as program:
        out = program.stdout
        assert out is not None
        try:
            yield program, lambda: out.readline().rstrip()
        finally:
            program.kill()


def ranks_of(line: Callable[[], str]) -> list[int]:
    """The process numbers of the ranks, which are stepping by now."""
    return [int(line().rpartition(" ")[2]) for _ in range(2)]


def to_parent(program: subprocess.Popen[str], ranks: list[int], number: int) -> None:
    os.kill(program.pid, number)


def to_all(program: subprocess.Popen[str], ranks: list[int], number: int) -> None:
    os.killpg(program.pid, number)


def to_a_rank(program: subprocess.Popen[str], ranks: list[int], number: int) -> None:
    os.kill(ranks[1], number)


@pytest.mark.parametrize(
    ("send", "number", "note"),
    [
        (to_parent, signal.SIGTERM, "stopping after this step (again to stop at once)"),
        (to_all, signal.SIGINT, "stopping after this step (again to stop at once)"),
        (to_all, signal.SIGUSR1, None),  # from the parent or a rank, whoever is first
        (to_a_rank, signal.SIGTERM, " was sent SIGTERM: stopping after this step"),
    ],
)
def test_a_signal_stops_all_ranks_after_their_step(
    send: Callable[[subprocess.Popen[str], list[int], int], None], number: int, note: str | None, tmp_path: Path
) -> None:
    with job(tmp_path) as (program, line):
        ranks = ranks_of(line)
        send(program, ranks, number)
        said = line()
        assert "stopping after this step" in said
        assert note is None or note in said
        # Both ranks tell at which step they stopped, and for which signal; both stopped at the same one.
        name, steps = line().split(" at step ")
        assert name == signal.Signals(number).name
        assert len(set(steps.split(" "))) == 1
        assert line() == "the handlers are as before: True"
        assert program.wait(SOON) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_that_closes_stops_all_ranks_after_their_step(tmp_path: Path) -> None:
    """What they print by then has nowhere to go, and stops nobody either."""
    terminal, inside = os.openpty()
    end = tmp_path / "end"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.training.stopping", str(end)]

    def take_terminal() -> None:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=environment, preexec_fn=take_terminal
    ) as program:
        os.close(inside)
        seen = b""
        while seen.count(b" is ") < 2:
            seen += os.read(terminal, 1000)
        os.close(terminal)
        assert program.wait(SOON) == 0
    assert end.read_text().startswith("SIGHUP at step ")


@pytest.fixture
def short() -> Generator[Path]:
    """A folder for temporary files whose sockets have an address; that of a test may be too long (`forks`)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_ranks_that_are_still_starting_are_as_polite(short: Path) -> None:
    with job(short) as (program, line):
        while not any(short.iterdir()):  # made when the handlers are, and before the ranks
            assert program.poll() is None
            time.sleep(0.01)
        os.killpg(program.pid, signal.SIGTERM)
        assert "stopping after this step" in line()
        ranks_of(line)
        assert line() == "SIGTERM at step 0 0"
        assert program.wait(SOON) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_job_at_once(number: int, short: Path) -> None:
    with job(short) as (program, line):
        ranks = ranks_of(line)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # their step never ends
        os.killpg(program.pid, number)
        assert "stopping" in line()
        os.killpg(program.pid, number)  # so soon after the first it is the same wish, passed on by somebody
        time.sleep(SAME_SECONDS)
        assert program.poll() is None
        os.killpg(program.pid, number)
        assert line() == "interrupted"
        assert program.wait(SOON) == 130
    assert list(short.iterdir()) == []


def test_a_killed_parent_leaves_no_folder(short: Path) -> None:
    with job(short) as (program, line):
        ranks_of(line)
        assert list(short.iterdir())
        program.kill()
        assert line() == ""  # the ranks hold the other end of this pipe: it ends when the last of them has ended
    assert list(short.iterdir()) == []


def test_signals_are_told_apart_and_handlers_restored() -> None:
    heard: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    with on_signals((signal.SIGUSR1,), lambda name: heard.append(f"first {name}"), heard.append):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["first SIGUSR1"]
        time.sleep(SAME_SECONDS)
        signal.raise_signal(signal.SIGUSR1)
    assert heard == ["first SIGUSR1", "SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with on_signals((signal.SIGUSR1,), pytest.fail, pytest.fail):
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_can_be_terminated() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from tangram.training.run.signals import on_signals\n"
        "with on_signals((signal.SIGTERM,), print, print):\n"
        "    ready, say = os.pipe()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.write(say, b'!')\n"
        "        time.sleep(600)\n"
        "    os.read(ready, 1)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    sys.exit(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == signal.SIGTERM


def test_outside_the_main_thread_no_handler_is_installed() -> None:
    seen: list[object] = []

    def look() -> None:
        with on_signals((signal.SIGTERM,), seen.append, seen.append):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_a_wish_is_told_once() -> None:
    told: list[str] = []
    stop = Stop(heard=told.append)
    assert not stop.requested()
    stop.ask("SIGTERM")
    stop.ask("SIGINT")
    assert told == []  # not from a signal handler, which may interrupt anything
    assert [stop.requested(), stop.requested()] == [True, True]
    assert (told, stop.signal) == (["SIGTERM"], "SIGTERM")
