"""A run that sends its checkpoints to an object store, on a real S3 server of this machine, and goes on from there."""

import http.server
import json
import shutil
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from tangram.checkpoint.inspect.verify import verify
from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.saving.save import About, save
from tangram.checkpoint.store.commits import committed, read_marker
from tangram.checkpoint.store.manifest import BLOCK
from tangram.checkpoint.store.objects import ObjectStore, store_of
from tangram.checkpoint.tiers import remote
from tangram.cli import main
from tangram.errors import UserError
from tangram.training.observe.events import CheckpointSaved, Note
from tangram.training.run import uploads
from tangram.training.run.resume import newest_good
from tangram.training.run.uploads import bring_here, sending
from tangram.training.start import ended_before
from tests.s3 import point_to, serve
from tests.training.small import plan_file, small_plan, write_text


@pytest.fixture(scope="module")
def server() -> Generator[str]:
    yield from serve()


@pytest.fixture
def address(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    bucket = "b" + "".join(letter for letter in tmp_path.name.lower() if letter.isalnum())[:40]
    point_to(server, monkeypatch, bucket)
    return f"s3://{bucket}/run"


def write(folder: Path, step: int, size: int = 1000) -> CheckpointSaved:
    path = folder / f"step-{step:08d}"
    save({"model": {"w": torch.arange(float(size)) + step}}, path, about=About(step=step))
    return CheckpointSaved(step, str(path), 0.0, 0.0, asynchronous=True)


def steps(store: ObjectStore) -> list[int]:
    return [marker.step for _, marker in remote.committed_in(store)]


def test_what_is_sent_comes_back_as_it_was(address: str, tmp_path: Path) -> None:
    store, disk = store_of(address), tmp_path / "disk"
    write(disk, 1)
    path = Path(write(disk, 2, size=5_000_000).path)  # in several parts, of several blocks
    name = remote.upload(path, store)
    assert name == "step-00000002"
    assert remote.upload(path, store) == name, "it is there already"
    ((_, marker),) = remote.committed_in(store)
    back, _ = remote.download(store, name, marker, tmp_path / "other")
    assert verify(back).sound
    assert read_marker(back).id == read_marker(path).id
    assert read_marker(back).serial == 2, "what follows there comes after it here, too"
    for file in path.glob("*.safetensors"):
        assert (back / file.name).read_bytes() == file.read_bytes()


def test_nothing_is_seen_before_the_marker_and_the_next_attempt_goes_on(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(address)
    path = Path(write(tmp_path, 2).path)
    sent, send = list[str](), ObjectStore.send

    def breaks(self: ObjectStore, name: str, blocks: list[bytes]) -> None:
        if name.endswith("tangram.json") and not any(one.endswith("tangram.json") for one in sent):
            sent.append(name)
            raise UserError("the store went away")
        sent.append(name)
        send(self, name, blocks)

    monkeypatch.setattr(ObjectStore, "send", breaks)
    with pytest.raises(UserError, match="went away"):
        remote.upload(path, store)
    assert len(store.sizes()) == 3, "the manifest, the tensors, an index"
    assert steps(store) == []
    sent.clear()
    sent.append("tangram.json")
    remote.upload(path, store)
    assert sent[1:] == ["step-00000002/tangram.json"], "what was there is not sent again"
    assert steps(store) == [2]


def test_rotten_bytes_are_neither_sent_nor_taken(address: str, server: str, tmp_path: Path) -> None:
    store, path = store_of(address), Path(write(tmp_path / "a", 1).path)
    remote.upload(path, store)
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    bucket = address.split("/")[2]
    client = boto3.client("s3", endpoint_url=server)
    client.put_object(Bucket=bucket, Key=f"run/step-00000001/{file.name}", Body=bytes(data))
    ((name, marker),) = remote.committed_in(store)
    with pytest.raises(DamagedError, match=r"s3://.*step-00000001/model.* has other bytes from 0 to"):
        remote.download(store, name, marker, tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())
    notes = list[str]()
    plan = small_plan(tmp_path, checkpoint={"store": address})
    with pytest.raises(UserError, match=r'^none of the checkpoints in "s3://.* is sound: begin anew'):
        bring_here(plan, tmp_path / "b", resume=True, tell=lambda e: notes.append(str(e)))
    assert any("is passed over" in note and "other bytes" in note for note in notes)
    rotten = Path(write(tmp_path / "a", 2).path)
    file = next(rotten.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    with pytest.raises(DamagedError, match="other bytes"):
        remote.upload(rotten, store)
    assert steps(store) == [1]


def test_what_the_newest_has_lost_is_told(address: str, tmp_path: Path) -> None:
    """As where somebody tidies a bucket: a run that goes on from an older one says so."""
    store, plan, notes = store_of(address), small_plan(tmp_path, checkpoint={"store": address}), list[str]()
    for step in (1, 2):
        remote.upload(Path(write(tmp_path / "a", step).path), store)
    (lost,) = (name for name in store.sizes() if "00000002/" in name and name.endswith(".safetensors"))
    store.delete([lost])
    assert bring_here(plan, tmp_path / "b", resume=True, tell=lambda e: notes.append(str(e)))
    assert [marker.step for _, marker in committed(tmp_path / "b")] == [1]
    assert any("step-00000002 of s3://" in note and 'its object "model-' in note for note in notes), notes
    store.send(lost.replace("2/", "1/"), [b"cut off"])
    with pytest.raises(UserError, match="none of the checkpoints in"):
        bring_here(plan, tmp_path / "c", resume=True, tell=lambda e: None)


def flip(file: Path, *places: int) -> bytes:
    """Change a byte in each of these blocks; what is in the file then."""
    data = bytearray(file.read_bytes())
    for block in places:
        data[block * BLOCK + 5000] ^= 1
    file.unlink()  # and not of the checkpoints that share it
    file.write_bytes(data)
    return bytes(data)


def test_what_is_damaged_here_is_fetched_and_no_more(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the disk nor the store has a sound checkpoint of step 2; together they have everything."""
    store, notes, disk = store_of(address), list[str](), tmp_path / "checkpoint"
    for step in (1, 2):
        remote.upload(Path(write(disk, step, size=5_000_000).path), store)  # of five blocks

    def tell(event: object) -> None:
        notes.append(str(event))

    newest = disk / "step-00000002"
    (newest / "notes.txt").write_text("of somebody: nothing is wrong with that")
    assert newest_good(tmp_path, tell, address) == newest
    assert notes == []
    (file,) = newest.glob("*.safetensors")
    sound = file.read_bytes()
    asked = list[int]()
    ranges = ObjectStore.ranges

    def counted(self: ObjectStore, name: str, starts: list[int], stops: list[int]) -> list[Any]:
        asked.extend(starts)
        return ranges(self, name, starts, stops)

    monkeypatch.setattr(ObjectStore, "ranges", counted)
    store.send(f"step-00000002/{file.name}", [flip(file, 3)])
    file.write_bytes(sound)
    flip(file, 1, 4)
    assert newest_good(tmp_path, tell, address) == newest
    assert verify(newest).sound
    assert [path.name for path, _ in committed(disk)] == ["step-00000001", "step-00000002"]
    assert asked == [BLOCK, 4 * BLOCK]
    assert any("fetched    step-00000002" in note and "2 of 6 blocks" in note for note in notes), notes
    file.write_bytes(sound[: 4 * BLOCK + 7])  # cut off: it is no checkpoint any more
    assert bring_here(small_plan(tmp_path, checkpoint={"store": address}), disk, resume=True, tell=tell)
    assert [path.name for path, _ in committed(disk)] == ["step-00000001", "step-00000002"]
    assert asked[2:] == [4 * BLOCK]
    assert verify(newest).sound
    flip(file, 3)
    notes.clear()
    assert newest_good(tmp_path, tell, address) == disk / "step-00000001"
    assert any(f"step-00000002 of {address} is passed over" in note and "12582912" in note for note in notes), notes
    assert any("is damaged and passed over" in note for note in notes), notes
    assert not list(disk.glob(".*.partial"))


def test_a_store_that_fails_for_a_while_costs_no_steps(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the newest one nothing is known then: an older one is not taken in its place."""
    store, plan = store_of(address), small_plan(tmp_path, checkpoint={"store": address})
    for step in (1, 2):
        remote.upload(Path(write(tmp_path / "a", step).path), store)

    def busy(*arguments: Any, **options: Any) -> None:
        raise OSError("Generic S3 error: Server returned non-2xx status code: 503 Service Unavailable: SlowDown")

    with monkeypatch.context() as patched:
        patched.setattr("obstore.get_ranges", busy)
        with pytest.raises(UserError, match=r"cannot be read \(step-00000002/.* too much to do, or fails"):
            bring_here(plan, tmp_path / "b", resume=True, tell=lambda e: None)
    assert not [*(tmp_path / "b").glob("[!.]*"), *(tmp_path / "b").glob(".*.partial")]
    assert bring_here(plan, tmp_path / "b", resume=True, tell=lambda e: None)
    assert [marker.step for _, marker in committed(tmp_path / "b")] == [2]


def test_a_run_that_has_ended_still_sends_what_the_store_did_not_take(address: str, tmp_path: Path) -> None:
    """Its last checkpoint failed to get there, so it ended badly, and a platform has started it again."""
    plan, notes = small_plan(tmp_path, checkpoint={"store": address}, run={"steps": 2}), list[object]()
    last = Path(write(tmp_path / "checkpoint", 2).path)
    assert ended_before(tmp_path, last, plan, notes.append) is None, "nothing is proved yet"
    for checkpoint in ("elsewhere/step-00000001", "elsewhere/step-00000002"):
        assert steps(store_of(address)) == []
        assert ended_before(tmp_path, last, plan, notes.append) is None, "of a run of fewer steps"
        (tmp_path / "summary.json").write_text(json.dumps({"checkpoint": checkpoint}))
    assert ended_before(tmp_path, last, plan, notes.append) == {"checkpoint": checkpoint}
    assert steps(store_of(address)) == [2]
    assert "has ended after step 2 of 2" in str(notes[-1])
    more = small_plan(tmp_path, checkpoint={"store": address})
    assert ended_before(tmp_path, last, more, notes.append) is None


def test_old_ones_go_and_what_died_half_way(address: str, tmp_path: Path) -> None:
    store = store_of(address)
    for step in (1, 2, 3, 4):
        remote.upload(Path(write(tmp_path, step).path), store)
    store.delete(["step-00000004/tangram.json"])
    remote.prune(store, ("last=1", "every=2"))
    assert steps(store) == [2, 3]
    assert {name.split("/")[0] for name in store.sizes()} == {"step-00000002", "step-00000003"}


def test_training_goes_on_where_the_store_fails_and_the_end_says_so(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PAUSES", (0.0,))
    plan, notes, broken = small_plan(tmp_path, checkpoint={"store": address, "keep": 1}), list[str](), [True]
    send = ObjectStore.send

    def fails(self: ObjectStore, name: str, blocks: list[bytes]) -> None:
        if broken[0]:
            raise UserError("no route to the store")
        send(self, name, blocks)

    monkeypatch.setattr(ObjectStore, "send", fails)

    def tell(event: object) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    (tmp_path / "disk" / ".pinned-step-00000009").mkdir(parents=True)
    with (  # noqa: PT012  the end of the block raises
        pytest.raises(
            UserError, match=r"step 2 could not be sent to s3://.*no route to the store: it is on the disk, and the"
        ),
        sending(plan, tmp_path / "disk", tell) as hear,
    ):
        hear(write(tmp_path / "disk", 1))
        hear(write(tmp_path / "disk", 2))
    assert any("step 2 could not be sent" in note for note in notes), notes
    broken[0] = False
    with sending(plan, tmp_path / "disk", tell) as hear:
        saved = write(tmp_path / "disk", 3)
        hear(saved)
        shutil.rmtree(saved.path)  # retention is quicker: its files stay until they are sent
    assert steps(store_of(address)) == [3]
    assert not list((tmp_path / "disk").glob(".pinned*"))
    with pytest.raises(ZeroDivisionError), sending(plan, tmp_path / "disk", tell) as hear:  # noqa: PT012
        hear(write(tmp_path / "disk", 4))
        raise ZeroDivisionError
    assert steps(store_of(address)) == [4], "a run that fails has its last one there"


def test_the_end_does_not_wait_in_silence_nor_long_for_a_store_that_hangs(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was asked to stop said nothing for ten minutes: three attempts of over three minutes each."""
    monkeypatch.setattr(uploads, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(uploads, "SILENCE", 0.05)
    monkeypatch.setattr(uploads, "PATIENCE", 0.2)
    plan, notes, attempts = small_plan(tmp_path, checkpoint={"store": address}), list[str](), list[str]()

    def hangs(self: ObjectStore, name: str, blocks: list[bytes]) -> None:
        attempts.append(name)
        time.sleep(0.3)
        raise UserError("it does not answer")

    monkeypatch.setattr(ObjectStore, "send", hangs)
    with (
        pytest.raises(UserError, match=r"step 1 could not be sent to s3://.*--resume sends it"),
        sending(plan, tmp_path / "disk", lambda event: notes.append(str(event))) as hear,
    ):
        hear(write(tmp_path / "disk", 1))
    assert len(attempts) == 1
    assert "the checkpoint of step 1 is on the disk, and still being sent to s3://" in notes[1], notes


def test_what_cannot_begin_says_why(address: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(where: str, *, resume: bool = False) -> bool:
        plan = small_plan(tmp_path, checkpoint={"store": where})
        return bring_here(plan, tmp_path / "x", resume=resume, tell=lambda event: None)

    assert not begin(address)
    assert not begin(address, resume=True)
    with pytest.raises(UserError, match=r'"s3://no-such-bucket/x" cannot be looked at') as absent:
        begin("s3://no-such-bucket/x")
    assert "\n" not in str(absent.value)
    remote.upload(Path(write(tmp_path / "a", 7).path), store_of(address))
    with pytest.raises(UserError, match="has checkpoints of a run, up to step 7: go on from them with --resume"):
        begin(address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="cannot be looked at"):
        begin(address)


def test_two_runs_do_not_share_an_address(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PAUSES", (0.0,))
    plan, notes = small_plan(tmp_path, checkpoint={"store": address, "keep": 1}), list[object]()
    one, other = tmp_path / "one", tmp_path / "other"
    assert not bring_here(plan, one, resume=False, tell=notes.append)
    assert not bring_here(plan, one, resume=False, tell=notes.append), "the same run, started again"
    with pytest.raises(UserError, match=r"belongs to another run, begun on .* without a checkpoint so far"):
        bring_here(plan, other, resume=False, tell=notes.append)
    with sending(plan, one, notes.append) as hear:
        hear(write(one, 1))
    with pytest.raises(UserError, match="has checkpoints of a run"):
        bring_here(plan, other, resume=False, tell=notes.append)
    with (  # noqa: PT012  the end of the block raises
        pytest.raises(UserError, match=r"step 2 could not be sent .* belongs to another run"),
        sending(plan, one, notes.append) as hear,
    ):
        assert bring_here(plan, other, resume=True, tell=notes.append), "taken over while the first one trains"
        hear(write(one, 2))
    assert steps(store_of(address)) == [1], "who was put out sends and removes nothing"
    with sending(plan, other, notes.append) as hear:
        hear(write(other, 3))
    assert steps(store_of(address)) == [3]
    assert not store_of(address).create("owner.json", b"{}"), "of two that begin in the same moment one comes first"
    store_of(address).send("owner.json", [b"torn"])
    with pytest.raises(UserError, match="belongs to another run, begun on an unknown machine"):
        remote.refuse_other_owner(store_of(address), "own")


class Refuses(http.server.BaseHTTPRequestHandler):
    """A store that knows nobody."""

    def do_GET(self) -> None:
        body = b"<Error><Code>InvalidAccessKeyId</Code><Message>unknown</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


def test_missing_and_wrong_credentials_are_told_apart(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{refusing.server_port}")
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{refusing.server_port}")
        with pytest.raises(UserError, match="it refuses the credentials"):
            remote.committed_in(store_of(address, quick=True))
        refusing.shutdown()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"it does not answer: look at its address \(AWS_ENDPOINT_URL, say\)"):
        remote.committed_in(store_of(address, quick=True))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="no credentials were found: set those of the store"):
        remote.committed_in(store_of(address, quick=True))


@pytest.mark.slow
def test_a_run_goes_on_from_the_store_on_another_disk(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "text")
    tables = {"checkpoint": {"store": address, "every_steps": 2}, "run": {"steps": 5}}
    plan = plan_file(tmp_path / "plan.toml", text, **tables)
    assert main(["train", str(plan), "--out", str(tmp_path / "whole"), "--set", 'checkpoint.store=""']) == 0
    assert main(["train", str(plan), "--out", str(tmp_path / "first")]) == 0
    assert steps(store_of(address))[-1] == 5
    store_of(address).delete(["step-00000005/tangram.json"])  # as if it had been killed while it sent the last
    assert steps(store_of(address)) in ([2], [4]), "whatever the store had taken by then"
    shutil.rmtree(tmp_path / "first")
    capsys.readouterr()
    assert main(["train", str(plan), "--out", str(tmp_path / "new")]) == 2
    assert "go on from them with --resume" in capsys.readouterr().err
    for way in ("train", "launch"):
        out = tmp_path / way
        assert main([way, str(plan), "--resume", "--out", str(out), "--set", f"run.steps={5 + (way == 'launch')}"]) == 0
        said = capsys.readouterr().out
        assert "fetched    step-0000000" in said, said
        assert "uploaded   step" in said, said
    (tmp_path / "launch" / "summary.json").unlink()  # killed as it proved what it had, and while it sent the last
    store_of(address).delete(["step-00000006/tangram.json"])
    assert main(["launch", "--resume", "--out", str(tmp_path / "launch")]) == 0
    assert [marker.step for _, marker in committed(tmp_path / "launch" / "checkpoint")] == [5, 6]
    ends = [str(committed(tmp_path / one / "checkpoint")[-1][0]) for one in ("train", "whole")]
    capsys.readouterr()
    main(["checkpoint", "diff", *ends, "--json"])
    assert json.loads(capsys.readouterr().out)["tensors"] == [], "as if it had never stopped, bit for bit"
    assert steps(store_of(address)) == [5, 6]
