"""Traces written, read, and read when they are torn, cut off, of two runs, of a newer version or not there."""

import ctypes
import faulthandler
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from bench._tracing.faults import other_clock
from tangram.errors import UserError
from tangram.tracing import reading
from tangram.tracing.blame import calls_of_step, findings, lifeless
from tangram.tracing.files.format import (
    AXES_AT_MOST,
    CHUNK_HEADER,
    EVENTS,
    HEADER,
    HEADER_BYTES,
    LIVE_AT,
    LOSS_NOT_FINITE,
    ROW_DTYPE,
    ROW_DTYPES,
    ROWS,
    End,
    Kind,
    Phase,
    file_of,
    ring_bytes,
)
from tangram.tracing.files.ring import TraceFiles, packed_rows, unpacked_rows
from tangram.tracing.files.stacks import SIGNAL
from tangram.tracing.reading import VERDICT, Peek, read, read_rank
from tangram.tracing.recorder import Recorder
from tangram.tracing.settings import TraceSettings, fresh_folder
from tangram.tracing.show.report import looks, report, top
from tangram.tracing.stops import Outside
from tangram.tracing.watch import Hang, Watch, watched

RUN = b"r" * 16


def write(folder: Path, rank: int, steps: int, run: bytes = RUN, world: int = 2, start_calls: int = 0) -> Recorder:
    """A rank's trace of steps with two calls each, made without any rank; `start_calls`: before the first."""
    files = TraceFiles(folder, run, rank, world)
    recorder = Recorder(files, {"mesh": "dp=2", "stages": []})
    group = recorder.group("0", "dp", [0, 1])
    for _ in range(start_calls):
        recorder.waited(number := recorder.enter(group, 0, 8, torch.float32, -1), group, 0, recorder.waits(number))
    for step in range(1, steps + 1):
        recorder.step(step)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            recorder.phase(phase)
            number = recorder.enter(group, 0, 64, torch.float32, -1)
            recorder.waited(number, group, 0, recorder.waits(number))
    return recorder


def test_steps_that_have_left_the_ring_are_read_from_their_columns(tmp_path: Path) -> None:
    write(tmp_path, 0, ROWS + 200)
    (trace,) = read(tmp_path)
    assert trace.rows["step"].tolist() == [*range(1, ROWS + 200)]  # the last one has not ended
    assert (trace.rows["calls"] == 2).all()
    assert (tmp_path / file_of(0, "steps")).stat().st_size / (ROWS + 128) < 200, "bytes a step"
    assert len(trace.events) == min(EVENTS, trace.last)
    assert (np.diff(trace.events["number"].astype(int)) == 1).all()


def test_who_begins_anew_in_a_folder_has_files_of_its_own(tmp_path: Path) -> None:
    """As a second recording of one process, whose groups still tell the first: both wrote to the same memory, where the
    begin of the second would also end the first with a signal if that wrote in this moment."""
    (tmp_path / file_of(0, "steps-before")).write_bytes(packed_rows(np.ones(3, ROW_DTYPE)))
    first = write(tmp_path, 0, 3)
    assert read_rank(tmp_path / file_of(0, "ring")).rows["step"].tolist() == [1, 2], "and no steps of another run"
    write(tmp_path, 0, 5)
    (before,) = read(tmp_path)
    first.enter(0, 0, 8, torch.float32, -1)
    first.close(End.FINISHED)
    (trace,) = read(tmp_path)
    assert trace.rows["step"].tolist() == [1, 2, 3, 4]
    assert trace.live.end is End.RUNNING
    assert trace.events.tolist() == before.events.tolist()
    assert trace.sites == before.sites


def test_steps_of_each_length_have_calls_of_their_own_sizes(tmp_path: Path) -> None:
    """Rows of conversations are as long as a step needs; a size that is wrong for its length is still seen."""
    recorder = Recorder(TraceFiles(tmp_path, RUN, 0, 2), {"mesh": "dp=2", "stages": []})
    group = recorder.group("0", "tp", [0, 1])
    lengths = [64, 128, 64, 64, 128, 128, 192, 64, 128, 128]
    for step, length in enumerate(lengths, 1):
        recorder.step(step, length)
        recorder.phase(Phase.FORWARD)
        wrong = step == len(lengths)
        number = recorder.enter(group, 0, 64 if wrong else length, torch.float32, -1)
        recorder.waited(number, group, 0, recorder.waits(number))
    recorder.step(len(lengths) + 1)
    (trace,) = read(tmp_path)
    assert [(one["kind"], one["step"]) for one in trace.deviations] == [("mis-sized", len(lengths))]


@pytest.mark.parametrize(("length", "wrong"), [(True, 9), (False, 9), (True, 0), (False, 0)])
def test_a_skipped_call_of_a_step_of_another_length_than_any_before_is_named(
    tmp_path: Path, length: bool, wrong: int
) -> None:
    """The rank's own sequence without sizes says so; those that never differ, as of gradients, are expected."""
    recorder = Recorder(TraceFiles(tmp_path, RUN, 0, 2), {"mesh": "tp=2", "stages": []})
    group = recorder.group("0", "tp", [0, 1])

    def call(nbytes: int) -> None:
        number = recorder.enter(group, 0, nbytes, torch.float32, -1)
        recorder.waited(number, group, 0, recorder.waits(number))

    for step in range(1, 12):
        recorder.step(step, 64 + step if length else 0)
        recorder.phase(Phase.FORWARD)
        call(64 + step)
        if step != wrong:
            call(640 + step)
        call(96 if step == 11 else 128)
    recorder.step(12, 1)
    noted = read(tmp_path)[0].deviations
    found = [(one["kind"], one["step"]) for one in noted]
    assert found == [("skipped", 9)] * bool(wrong) + [("mis-sized", 11)]
    assert ":" in noted[0]["line"]
    if wrong:
        lines = Path(__file__).read_text().splitlines()
        assert "call(640 + step)" in lines[int(noted[0]["line"].rpartition(":")[2]) - 1]


def as_first_version(folder: Path, rank: int) -> None:
    """Make the files of a rank what the first version wrote: steps without CPU times."""
    ring, size = folder / file_of(rank, "ring"), ring_bytes(EVENTS, 0)
    data = ring.read_bytes()
    rows = np.frombuffer(data, ROW_DTYPE, ROWS, size)
    old = np.zeros(ROWS, ROW_DTYPES[1])
    for name in old.dtype.names or ():
        old[name] = rows[name]
    ring.write_bytes(data[:8] + struct.pack("<I", 1) + data[12:size] + old.tobytes())
    packed = (folder / file_of(rank, "steps")).read_bytes()
    with (folder / file_of(rank, "steps")).open("wb") as file:
        while packed:
            magic, count, length, _ = CHUNK_HEADER.unpack_from(packed)
            body, packed = packed[CHUNK_HEADER.size :][:length], packed[CHUNK_HEADER.size + length :]
            flat = zlib.decompress(body)[: count * old.dtype.itemsize]  # what is new comes last
            body = zlib.compress(flat)
            file.write(CHUNK_HEADER.pack(magic, count, len(body), zlib.crc32(body)) + body)


def test_a_trace_of_the_first_version_is_read(tmp_path: Path) -> None:
    write(tmp_path, 0, ROWS + 200)
    now = read(tmp_path)[0].rows
    assert now["cpu_us"].all()
    as_first_version(tmp_path, 0)
    (old,) = read(tmp_path)
    assert len(old.rows) == len(now) == ROWS + 199
    for name in ROW_DTYPE.names or ():
        assert (old.rows[name] == (0 if name in ("cpu_us", "ready_us") else now[name])).all(), name
    assert report(tmp_path).rows[0][report(tmp_path).headers.index("cpu ms")] == ""
    assert [last for last, _ in Peek(tmp_path, RUN).look()] == [old.last]


def test_columns_are_what_they_were_made_of() -> None:
    rng = np.random.default_rng(0)
    rows = np.zeros(50, ROW_DTYPE)
    for name in ROW_DTYPE.names or ():
        kind = rows[name].dtype
        rows[name] = rng.integers(0, np.iinfo(kind).max, rows[name].shape, dtype=kind)
    packed = packed_rows(rows)
    assert (unpacked_rows(50, packed[struct.calcsize("<4sIII") :]) == rows).all()


def test_what_was_recorded_before_kill_9_is_read(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.tracing.test_files import write\n"
        "write(Path(sys.argv[1]), 0, 9); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -9
    (trace,) = read(tmp_path)
    assert trace.rows["step"].tolist() == [*range(1, 9)]
    assert trace.live.step == 9
    assert trace.events["kind"].tolist().count(Kind.ENTER) == 18


def test_a_torn_event_a_torn_chunk_and_half_a_line_are_left_out(tmp_path: Path) -> None:
    recorder = write(tmp_path, 0, 300)
    whole = read(tmp_path)[0]
    ring = tmp_path / file_of(0, "ring")
    with ring.open("r+b") as file:  # an event whose number was written for another place
        file.seek(HEADER_BYTES + 40 * (int(whole.events["number"][-5]) % EVENTS))
        file.write(struct.pack("<Q", 7777777))
    steps = tmp_path / file_of(0, "steps")
    steps.write_bytes(steps.read_bytes()[:-3])
    with (tmp_path / file_of(0, "names.jsonl")).open("ab") as file:
        file.write(b'{"site": 99, "op')
    (torn,) = read(tmp_path)
    assert len(torn.events) == len(whole.events) - 1
    assert set(whole.rows["step"]) - set(torn.rows["step"]) <= set(range(1, 300 - ROWS + 64))
    assert torn.sites.keys() == whole.sites.keys()
    assert recorder.failure() == ""


def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no trace: give the folder of a run"):
        read(tmp_path)
    write(tmp_path, 0, 3)
    ring = tmp_path / file_of(0, "ring")
    data = ring.read_bytes()
    for bad, said in (
        (data[:50], "is too short for a trace"),
        (b"x" * len(data), "is no trace of Tangram"),
        (data[:5000], r"is cut off: 5000 of \d+ bytes are there"),
        (data[:8] + struct.pack("<I", 99) + data[12:], "was written by a newer Tangram"),
    ):
        ring.write_bytes(bad)
        with pytest.raises(UserError, match=said):
            read(tmp_path)
    ring.write_bytes(data)
    write(tmp_path, 1, 3, run=b"s" * 16)
    with pytest.raises(UserError, match="has traces of 2 runs, as of ranks 0 and 1: move those of one away"):
        read(tmp_path)


def test_a_rank_that_has_just_made_its_files_does_not_stand_still(tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    write(tmp_path, 1, 1)
    ring = tmp_path / file_of(1, "ring")
    data = bytearray(ring.read_bytes())
    data[LIVE_AT : LIVE_AT + 8] = bytes(8)  # its heart has not beaten yet
    ring.write_bytes(data)
    assert lifeless(read(tmp_path), Outside()) == {}
    data[LIVE_AT : LIVE_AT + 8] = struct.pack("<Q", 1)
    ring.write_bytes(data)
    assert lifeless(read(tmp_path), Outside()) == {1: "stopped"}


def of_times(folder: Path, rank: int, own_ms: int, cpu_ms: int, ready_ms: int) -> None:
    """A rank's trace of twenty steps of so long in their forwards."""
    recorder = Recorder(TraceFiles(folder, RUN, rank, 4), {"mesh": "dp=4", "stages": []})
    recorder.group("0", "dp", range(4))
    own = [own_ms * 1000 * (phase is Phase.FORWARD) for phase in Phase]
    for step in range(20):
        noise = (7 * step + 3 * rank) % 5 * 100
        times = [one + noise * (one > 0) for one in own]
        row = (step + 1, 0, 1, step * 10**9, 10**9, 1)
        recorder.files.row(step, (*row, *times, *([0] * AXES_AT_MOST), cpu_ms * 1000, ready_ms * 1000))


@pytest.mark.parametrize(
    ("slow", "usual", "cause", "words"),
    [
        ((60, 58, 1), (20, 18, 1), "computes", "it computes for 58.0 ms of them"),
        ((240, 58, 150), (20, 18, 1), "computes", "it computes for 58.0 ms of them"),  # on a machine that others use
        ((60, 18, 40), (20, 18, 1), "starved", "for 18.0 ms of them and else was starved of CPU"),
        ((60, 18, 0), (20, 18, 1), "waits", "for 18.0 ms of them and else waited for something outside"),
        ((60, 0, 0), (20, 0, 0), "", "most of it in forward"),  # by the first version, which knew nothing of it
        ((80, 20, 35), (60, 20, 20), None, ""),  # all are short of CPU
    ],
)
def test_a_rank_that_computes_more_is_told_from_one_that_is_kept_from_it(
    slow: tuple[int, int, int], usual: tuple[int, int, int], cause: str | None, words: str, tmp_path: Path
) -> None:
    for rank in range(4):
        of_times(tmp_path, rank, *(slow if rank == 2 else usual))
    found = findings(read(tmp_path))
    assert [(one.kind, one.ranks, one.cause) for one in found] == ([] if cause is None else [("slow", (2,), cause)])
    assert all(one.text.endswith(words) or words in one.text for one in found)


def test_a_verdict_that_is_cut_off_is_told_of(tmp_path: Path) -> None:
    write(tmp_path, 0, 9)
    watch = Watch(TraceSettings(tmp_path, RUN))
    watch.end("rank 0 of 2 ended the job: killed by signal 9", dead=0)
    whole = report(tmp_path)
    assert (whole.state[:29], whole.findings[0].kind) == ("ended badly: rank 0 of 2 ende", "died")
    assert not any("verdict" in note for note in whole.notes)
    assert top(tmp_path).lines == (whole.state,)
    assert top(tmp_path).over
    verdict = tmp_path / VERDICT
    verdict.write_bytes(verdict.read_bytes()[:-20])
    torn = report(tmp_path)
    assert any("verdict.json is cut off or foreign" in note for note in torn.notes)
    assert [*tmp_path.glob("*.part")] == []


def test_ranks_that_are_missing_are_named_and_the_others_read(tmp_path: Path) -> None:
    write(tmp_path, 1, 3, world=4)
    assert report(tmp_path).notes == ("ranks 0, 2, 3 of 4 have no trace here: findings are of the others",)


@pytest.mark.parametrize("gone", [True, False])
def test_a_names_file_without_what_a_rank_noted_is_said(gone: bool, tmp_path: Path) -> None:
    for rank in range(2):
        recorder = write(tmp_path, rank, 5)
        recorder.enter(0, 1, 8, torch.float32, -1)  # which is not due
        recorder.step(6)
    assert report(tmp_path).notes == ()
    names = tmp_path / file_of(1, "names.jsonl")
    names.write_text("" if gone else "".join(names.read_text().splitlines(keepends=True)[:5]))
    assert report(tmp_path).notes == ("the names file of rank 1 is cut off or gone: what it noted is not among these",)


def test_lines_of_others_in_a_names_file_are_passed_over(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, 5)
    names = tmp_path / file_of(1, "names.jsonl")
    names.write_text('[1]\n5\nnull\n"x"\n' + names.read_text())
    assert report(tmp_path).findings == report(tmp_path).notes == ()


def test_a_plan_that_is_not_the_traces_is_said(tmp_path: Path) -> None:
    write(tmp_path / "trace", 0, 3)
    write(tmp_path / "trace", 1, 3)
    plan = tmp_path / "plan.toml"
    none = ("mesh = [", 'mesh = "dp=x"')  # of which findings need nothing
    for text, said in (
        ('mesh = "dp=2"', ()),
        *((one, ()) for one in none),
        ('mesh = "dp=1 tp=2"', ('has the mesh "dp=1 tp=2"',)),
    ):
        plan.write_text(text)
        notes = report(tmp_path).notes
        assert len(notes) == len(said)
        assert all(word in note for word, note in zip(said, notes, strict=True))
    write(tmp_path / "trace-2", 0, 3)  # the run has resumed by another plan
    assert not any("plan" in note for note in report(tmp_path / "trace").notes)


def test_clocks_that_are_apart_by_minutes_are_said_and_a_slow_rank_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    write(tmp_path, 1, 3)
    assert report(tmp_path).notes == ()
    other_clock(tmp_path, 1)
    (note,) = report(tmp_path).notes
    assert note == "the clocks of hosts are apart by minutes: times of one host are not held against another's"


def test_a_rank_of_more_than_four_gigabytes_has_them(tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    ring = tmp_path / file_of(0, "ring")
    data = bytearray(ring.read_bytes())
    np.frombuffer(data, ROW_DTYPE, ROWS, ring_bytes(EVENTS, 0))["memory_kb"][0] = 40_000_000
    ring.write_bytes(data)
    assert report(tmp_path).rows[0][-1] == "40,960"


def test_a_step_whose_begin_has_left_the_ring_is_not_held_against_others(tmp_path: Path) -> None:
    """Which call is which cannot be known then: those that are left are the last ones of each rank."""
    for rank in range(2):
        recorder = write(tmp_path, rank, 2)
        group = recorder.group("1", "tp", [rank])
        for _ in range(EVENTS):  # the last of the one are over other axes than those of the other
            recorder.enter(group if rank else 0, 0, 64, torch.float32, -1)
        assert calls_of_step(read_rank(tmp_path / file_of(rank, "ring")), 2) is None


def test_a_full_disk_stops_the_trace_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = write(tmp_path, 0, 2)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    group = recorder.group("1", "tp", [0])
    assert recorder.failure() == "tracing has stopped, training goes on: No space left on device"
    assert recorder.failure() == ""
    recorder.enter(group, 0, 8, None, -1)
    recorder.step(4)


def test_nothing_of_a_tensor_but_its_size_is_written(tmp_path: Path) -> None:
    recorder = write(tmp_path, 0, 5)
    recorder.not_finite(LOSS_NOT_FINITE)
    recorder.step(6)
    lines = (tmp_path / file_of(0, "names.jsonl")).read_text().splitlines()
    words = {key for line in lines for key in json.loads(line)}
    known = {"run", "group", "name", "axes", "ranks", "slot", "site", "op", "bytes", "peer", "dtype", "what", "layer"}
    assert words <= known | {"line", "sequence", "step"}
    assert [one.text for one in findings(read(tmp_path))] == [
        "rank 0: the own part of the loss of step 5 is not finite"
    ]


def test_each_time_that_a_run_goes_on_it_has_a_trace_of_its_own(tmp_path: Path) -> None:
    write(fresh_folder(tmp_path), 0, 3)
    write(fresh_folder(tmp_path), 0, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "trace-2"]
    assert read(tmp_path)[0].live.step == 8, "the newest is read"


def test_a_rank_that_ends_says_when(tmp_path: Path) -> None:
    """So that who was ended for its failure is told from who died before it and was the cause."""
    recorder, now = write(tmp_path, 0, 3), time.monotonic_ns()
    recorder.close(End.FAILED)
    write(tmp_path, 1, 3)._heart.stop()  # pyright: ignore[reportPrivateUsage]
    traces = read(tmp_path)
    assert traces[0].live.beat >= now
    gone = Outside(gone=frozenset({1}))
    assert [one.kind for one in findings(traces, gone)] == [], "it still ran when the other had failed"
    write_beat(tmp_path, 1, now - 1)
    assert [(one.kind, one.ranks) for one in findings(read(tmp_path), gone)] == [("died", (1,))]


def test_who_waits_for_a_late_rank_is_not_late(tmp_path: Path) -> None:
    """All ranks call together, and pairs of them before that: it is rank 1 that keeps all others waiting."""
    ranks = [write(tmp_path, rank, 3, world=4) for rank in range(4)]
    every = [one.group("1", "dp tp", [0, 1, 2, 3]) for one in ranks]
    pairs = [one.group("2", "tp", [1, 2] if rank in (1, 2) else [0, 3]) for rank, one in enumerate(ranks)]

    def calls_pair(rank: int, seconds: float) -> None:
        number = ranks[rank].enter(pairs[rank], 0, 64, torch.float32, -1)
        since = ranks[rank].waits(number)
        time.sleep(seconds)
        ranks[rank].waited(number, pairs[rank], 0, since)

    def gives_up(rank: int) -> None:
        ranks[rank].waits(ranks[rank].enter(every[rank], 0, 64, torch.float32, -1))
        ranks[rank].close(End.FAILED)

    for rank in (0, 3):
        calls_pair(rank, 0.0)
        gives_up(rank)
    calls_pair(2, 0.5)
    calls_pair(1, 0.0)
    for rank in (1, 2):
        gives_up(rank)
    (one,) = findings(read(tmp_path), Outside(still_ns=0.25e9))
    assert (one.kind, one.ranks, one.axes) == ("absent", (1,), "dp tp")
    assert re.search(r"came to all-reduce over dp tp .* 0\.\d s after the others, who had given up", one.text), one.text


def write_beat(folder: Path, rank: int, beat: int) -> None:
    """Have a rank's heart have beaten for the last time then."""
    with (folder / file_of(rank, "ring")).open("r+b") as file:
        file.seek(LIVE_AT)
        file.write(struct.pack("<Q", beat))


def test_of_each_attempt_it_is_said_how_it_ended_and_each_can_be_shown(tmp_path: Path) -> None:
    for attempt, steps in enumerate((3, 8, 5), 1):
        folder = fresh_folder(tmp_path)
        recorder = write(folder, 0, steps, run=bytes([attempt]) * 16, world=1)
        if attempt == 1:
            Watch(TraceSettings(folder, b"\1" * 16)).end("rank 0 of 1 ended the job: killed by signal 9", dead=0)
        recorder.close(End.FINISHED if attempt == 3 else End.FAILED)
    shutil.copytree(tmp_path / "trace", tmp_path / "trace-kept")  # somebody's own: no attempt
    newest = report(tmp_path)
    assert (newest.folder.name, newest.state) == ("trace-3", "ended well, after step 5")
    first = "attempt 1 ended badly: rank 0 of 1 ended the job: killed by signal 9 (--attempt 1 shows it)"
    second = "attempt 2 ended in step 8 with an error on rank 0 (--attempt 2 shows it)"
    assert newest.notes == ("this is attempt 3 of 3", first, second)
    old = report(reading.trace_folder(tmp_path, 1))
    assert (old.state, old.findings[0].kind) == ("ended badly: rank 0 of 1 ended the job: killed by signal 9", "died")
    assert old.notes[0] == "this is attempt 1 of 3"
    assert old.notes[2] == "attempt 3 ended well, after step 5 (--attempt 3 shows it)"
    with pytest.raises(UserError, match=r"has traces of 3 attempts: none is number 4$"):
        reading.trace_folder(tmp_path, 4)
    for _ in range(5):
        write(fresh_folder(tmp_path), 0, 2, world=1)
    notes = report(tmp_path).notes
    assert notes[:2] == ("this is attempt 8 of 8", "of 7 others only how the last 5 ended is shown")
    assert [note.split()[1] for note in notes[2:]] == ["3", "4", "5", "6", "7"]


def test_who_looks_at_a_run_sees_its_next_attempt(tmp_path: Path) -> None:
    write(fresh_folder(tmp_path), 0, 3, world=1)
    seen = looks(tmp_path, 0.01)
    assert not next(seen).over
    Watch(TraceSettings(tmp_path / "trace", RUN)).end("rank 0 of 1 ended the job: killed by signal 9", dead=0)
    (tmp_path / "failures.jsonl").write_text("{}\n")
    assert next(seen).over
    assert next(seen).lines[0].startswith("ended badly: rank 0 of 1"), "it is not over yet"
    recorder = write(fresh_folder(tmp_path), 0, 2, run=b"n" * 16, world=1)
    again = next(seen)
    assert (again.over, "trace-2" in again.title) == (False, True)
    recorder.close(End.FINISHED)
    assert [one.over for one in seen] == [True], "what ended well is not begun again"
    shutil.rmtree(tmp_path / "trace-2")
    assert [one.over for one in looks(tmp_path, 0.01)] == [True], "nor is what nobody saw run"
    shutil.rmtree(tmp_path / "trace")
    with pytest.raises(UserError, match="has no trace"):
        next(looks(tmp_path, 0.01))


def test_a_look_tells_what_a_whole_reading_tells(tmp_path: Path) -> None:
    write(tmp_path, 0, 40)
    write(tmp_path, 1, 20)
    write(tmp_path, 2, 20, run=b"o" * 16)
    looked = Peek(tmp_path, RUN).look()
    (tmp_path / file_of(2, "ring")).unlink()
    assert [(last, live.step) for last, live in looked] == [(trace.last, trace.live.step) for trace in read(tmp_path)]


def test_of_many_ranks_no_events_are_read_to_see_that_they_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at 16,384 ranks read 2.7 GB, on two ranks of each machine."""
    monkeypatch.setattr(reading, "KEPT_RANKS", 1)
    recorder = write(tmp_path, 0, 4)
    write(tmp_path, 1, 4)
    looked = Peek(tmp_path, RUN).look()
    assert [last for last, _ in looked] == [0, 0]
    watch = Watch(TraceSettings(tmp_path, RUN, hang_seconds=0.2))
    begun = time.monotonic()
    while time.monotonic() < begun + 0.6:  # longer than the time of a hang
        call = recorder.enter(0, 0, 64, torch.float32, -1)
        recorder.waits(call)
        assert watch.look()[1] is None
        time.sleep(0.05)


@pytest.mark.parametrize(("place", "watches"), [((0, 1), True), ((1, 0), True), ((2, 0), False), ((0, 2), False)])
def test_a_few_ranks_of_two_machines_watch(place: tuple[int, int], watches: bool, tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    with watched(TraceSettings(tmp_path), place, 4096, lambda hang: None):
        assert any(one.name == "tangram-watch" for one in {*threading.enumerate()} - before) is watches


@pytest.mark.parametrize("grouped", [False, True])
def test_a_recording_without_a_collective_says_why(grouped: bool, tmp_path: Path) -> None:
    """Its groups were made before it began: "nothing wrong was found", of nothing."""
    for rank in range(2):
        recorder = Recorder(TraceFiles(tmp_path, RUN, rank, 2), {"mesh": "dp=2", "stages": []})
        if grouped:
            recorder.group("0", "dp", [0, 1])
        recorder.step(1)
        recorder.close(End.FINISHED)
    assert [note[:27] for note in report(tmp_path).notes] == ([] if grouped else ["no collective was recorded:"])


def test_a_silent_heart_is_a_process_that_stands_still(tmp_path: Path) -> None:
    write(tmp_path / "alive", 0, 4)
    write(tmp_path / "alive", 1, 4)
    assert findings(read(tmp_path / "alive")) == []
    copy = Path(shutil.copytree(tmp_path / "alive", tmp_path / "copy"))  # in which no heart beats
    for rank, seconds in ((0, 100.0), (1, 90.0)):
        with (copy / file_of(rank, "ring")).open("r+b") as file:
            file.seek(512)
            file.write(struct.pack("<Q", int(seconds * 1e9)))
    (one,) = findings(read(copy), Outside())
    assert (one.kind, one.ranks) == ("stopped", (1,))


_ONE_CALL = {"computes": "re.fullmatch('(a+)+', 'a' * 99 + 'b')", "sleeps": "ctypes.PyDLL(None).usleep(60_000_000)"}


@pytest.mark.skipif(sys.platform != "linux", reason="nobody says what a process computes")
@pytest.mark.parametrize("does", _ONE_CALL)
def test_a_rank_within_one_call_that_computes_is_waited_for(does: str, tmp_path: Path) -> None:
    """Its heart does not beat, as no other thread has a turn: it was taken for one that stands still, and ended."""
    code = (
        "import ctypes, faulthandler, re, sys; from pathlib import Path\n"
        "from tests.tracing.test_files import SIGNAL, write; faulthandler.register(SIGNAL)\n"
        f"recorder = write(Path(sys.argv[1]), 1, 4); print('ready', flush=True); {_ONE_CALL[does]}"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=nowhere, env=environment, text=True) as other:
        faulthandler.register(SIGNAL)
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            recorder = write(tmp_path, 0, 4)
            recorder.step(5)
            recorder.phase(Phase.FORWARD)
            recorder.waits(recorder.enter(0, 0, 64, torch.float32, -1))
            watch, until = Watch(TraceSettings(tmp_path, RUN, hang_seconds=0.5)), time.monotonic() + 8
            while (hang := watch.look()[1]) is None and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            faulthandler.unregister(SIGNAL)
            other.kill()
    assert (hang and hang.rank) == {"computes": None, "sleeps": 1}[does]


def hang_of(folder: Path) -> Hang:
    """What is said of ranks that are in this process and do not move, once their stacks have been asked for."""
    watch = Watch(TraceSettings(folder, RUN, hang_seconds=0.1))
    assert watch.look()[1] is None
    time.sleep(0.15)
    assert watch.look()[1] is None, "they, and who looks, may have been stopped as of Ctrl-Z, and have just gone on"
    with (folder / file_of(0, "stacks")).open("wb") as stacks:
        faulthandler.register(SIGNAL, file=stacks)
        try:
            time.sleep(0.15)
            hang = watch.look()[1]
        finally:
            faulthandler.unregister(SIGNAL)
    assert hang is not None, "also for who looks that seldom"
    return hang


@pytest.mark.parametrize("spike", ["logit", "high logit", "activation", "loss", "experts", ""])
def test_a_jump_of_long_ago_is_not_why_a_run_hangs(spike: str, tmp_path: Path) -> None:
    """All ranks have joined the call that they wait in, as where the network is down."""
    for rank in range(2):
        recorder = write(tmp_path, rank, 3)
        call = recorder.enter(recorder.group("0", "dp", range(2)), 0, 64, torch.float32, -1)
        recorder.waits(call)
        if spike and rank:
            words = {"layer": "layers.0", "times": 9.0, "expert": 0, "before": 1.0, "samples": "a line"}
            recorder.files.name({"spike": spike, "step": 3, **words})
    kinds = {one.kind for one in findings(read(tmp_path))}
    assert len(kinds) == bool(spike)
    hang = hang_of(tmp_path)
    assert re.fullmatch(
        r"no rank has moved for 0 s: rank 0 waits in all-reduce over dp.*, which all have joined", hang.sentence
    )
    assert {one.kind for one in hang.findings} == kinds, "the report still has it"


@pytest.mark.parametrize("gone", [False, True], ids=["has ended its trace", "another has its number"])
def test_who_does_not_know_the_signal_is_not_sent_it(gone: bool, tmp_path: Path) -> None:
    """Asking for a stack would end it: a program that goes on after its recording, or a stranger."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        for rank in range(2):
            recorder = write(tmp_path, rank, 3)
            if rank == 0:
                recorder.waits(recorder.enter(recorder.group("0", "dp", range(2)), 0, 64, torch.float32, -1))
            elif not gone:
                recorder.close(End.FINISHED)
        ring = tmp_path / file_of(1, "ring")
        data = bytearray(ring.read_bytes())
        head = [*HEADER.unpack_from(data)]
        head[4], head[9] = other.pid, head[9] - int(600e9) * gone  # begun long before that process
        HEADER.pack_into(data, 0, *head)
        with ring.open("r+b") as file:
            file.write(data[:HEADER_BYTES])
        hang_of(tmp_path)
        alive = other.poll() is None
        other.kill()
    assert alive, "it has been ended"


def test_a_process_that_computes_has_not_stood_still(tmp_path: Path) -> None:
    """A call that keeps the interpreter to itself delays the heart: one that computes, and one that only waits."""
    recorder, at_once, power = write(tmp_path, 0, 2), 1_000_000, 0.0
    while power < 1.7:
        at_once, began = at_once * 2, time.monotonic()
        pow(3, at_once)
        power = time.monotonic() - began
    time.sleep(0.6)
    assert read(tmp_path)[0].stood == ()
    ctypes.PyDLL(None).usleep(1_700_000)
    time.sleep(0.6)
    recorder.close(End.FINISHED)
    ((since, until),) = read(tmp_path)[0].stood
    assert 1.7e9 < until - since < 3e9
