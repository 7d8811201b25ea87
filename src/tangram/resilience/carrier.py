"""Brings snapshots to the disk while training goes on: of one machine, or of several that copy shares to each other.

Of one machine a thread copies what the plan wants on the disk, in order (`Promoter`). Of several (`Carrier`):

    node 0: order n, of the snapshot ID  ->  every node keeps its share, sends it to the next ones, and copies it to the
    disk where it is due  ->  all say so  ->  node 0 commits what is on the disk, and orders the newest there is by then

One snapshot after the other, as fast as the network takes them: so the last one that all nodes had copied stays until
the next one is, whatever training writes meanwhile. Where the copies go is a layout: share `i` is on the nodes `i` to
`i + k`, so that any `k` nodes may be lost (`survives`).

Trade-off: copies pass through the launchers, over a connection for each, in order; their bytes are proved where they
come in. What a lost node had written since the last order is lost: the steps of one copy.
"""

import contextlib
import itertools
import json
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from tangram.checkpoint.saving.rank_parts import About, new_id
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.store.manifest import BLOCK, checksum
from tangram.checkpoint.tiers.promote import copy_share, link_files, pin, promote
from tangram.errors import UserError, sentence
from tangram.resilience.nodes import LOOK, Nodes, address_of_this_node
from tangram.resilience.shares import Share, committed, shares_here
from tangram.resilience.tiers import HELD, Tiers
from tangram.training.observe.events import CheckpointSaved, Note, SaveFailed

Event = CheckpointSaved | SaveFailed | Note
Events = queue.Queue[Event]
PATIENCE = 10.0
"""Seconds that a node waits for its own share of a snapshot of which others have theirs."""


@dataclass(frozen=True)
class _Order:
    """What all nodes do next."""

    id: str
    """Of the snapshot; empty: nothing more."""
    before: str
    """The last one that all have copied, which stays."""
    partial: Path | None
    """Where it goes on the disk, if it does."""


def survives(count: int, copies: int, lost: frozenset[int]) -> bool:
    """Whether each share is on a node that is left, of `count` nodes with so many copies each."""
    return all(any((share + i) % count not in lost for i in range(copies + 1)) for share in range(count))


class Carrier:
    """One node's part. Made by all nodes at once."""

    def __init__(self, nodes: Nodes, tiers: Tiers, copies: int, keep: tuple[str, ...]) -> None:
        self._nodes, self._tiers, self._keep = nodes, tiers, keep
        self._copies = min(copies, nodes.count - 1)
        self._events: Events = queue.Queue()
        self._newest: CheckpointSaved | None = None
        self._wanted = False
        """Whether one is due on the disk."""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        secret = nodes.words(new_id())[0].encode()
        self._listener = Listener((address_of_this_node(), 0), authkey=secret)
        self._peers = nodes.words(self._listener.address)
        self._secret = secret
        self._to: dict[int, Connection] = {}
        threading.Thread(target=self._listen, name="tangram-copies", daemon=True).start()
        self._thread = threading.Thread(target=self._work, name="tangram-carrier", daemon=True)
        self._thread.start()

    def offer(self, snapshot: CheckpointSaved, *, disk: bool) -> bool:
        """Tell of this node's share of a snapshot; `disk`: whether one is due there. Returns at once."""
        with self._lock:
            self._newest, self._wanted = snapshot, self._wanted or disk
        return True

    def heard(self) -> Iterator[Event]:
        """What came of it since the last call, on node 0."""
        while not self._events.empty():
            yield self._events.get()

    def close(self) -> None:
        """Wait until what was offered last, where it is due on the disk, is there. By all nodes."""
        self._closing.set()
        self._thread.join()
        self._listener.close()

    # ------------------------------------------------------------ orders

    def _work(self) -> None:
        before, done = "", ""
        try:
            for number in itertools.count():
                order, snapshot = self._next(number, before, done)
                if not order.id:
                    return
                done = order.id
                reason = self._carried(order)
                self._nodes.say(f"carried/{number}/{self._nodes.index}", reason)
                words = [self._nodes.word(f"carried/{number}/{node}", node) for node in range(self._nodes.count)]
                reason = next((word for word in words if word), "")
                # Until all nodes have a newer one, the last that all have is kept: any node may be lost meanwhile.
                before = before if reason else order.id
                if snapshot is not None:
                    self._conclude(order, snapshot, reason)
        except Exception as error:  # noqa: BLE001  training goes on without copies, and whoever leads says so
            if not self._closing.is_set():
                self._events.put(Note(f"snapshots are no longer copied to other nodes: {sentence(error)}"))

    def _next(self, number: int, before: str, done: str) -> tuple[_Order, CheckpointSaved | None]:
        """The next order, and on node 0 what it is of."""
        if self._nodes.index:
            return self._nodes.word(f"orders/{number}", 0), None
        while True:
            closing = self._closing.is_set()
            with self._lock:
                snapshot, disk, self._newest, self._wanted = self._newest, self._wanted, None, False
            if snapshot is not None and (disk or not closing):
                with contextlib.suppress(UserError):  # else replaced by newer ones meanwhile
                    marker = commits.read_marker(Path(snapshot.path))
                    if disk or marker.id != done:
                        order = _Order(marker.id, before, self._begun(snapshot, marker.id) if disk else None)
                        self._nodes.say(f"orders/{number}", order)
                        return order, snapshot
            if closing:
                order = _Order("", before, None)
                self._nodes.say(f"orders/{number}", order)
                return order, None
            time.sleep(LOOK)

    def _begun(self, snapshot: CheckpointSaved, save_id: str) -> Path | None:
        """The folder under way on the disk."""
        target = commits.free_path(self._tiers.disk, snapshot.step)
        try:
            return commits.begin(target, save_id, anew=True)
        except OSError as error:
            self._events.put(SaveFailed(snapshot.step, sentence(error)))
            return None

    def _carried(self, order: _Order) -> str:
        """Do this node's part; why that was not possible, as a sentence. Whatever it was, the others wait for it."""
        try:
            self._forget({order.id, order.before})
            share, path = self._kept(order.id)
            # What all nodes have already is ordered once more only to bring it to the disk.
            for i in range(1, self._copies + 1 if order.id != order.before else 1):
                self._send(path, share.name, (self._nodes.index + i) % self._nodes.count)
            if order.partial is not None:
                copy_share(path, order.partial, self._nodes.index)
        except Exception as error:  # noqa: BLE001
            return sentence(error)
        return ""

    def _conclude(self, order: _Order, snapshot: CheckpointSaved, reason: str) -> None:
        """On node 0: commit what all have copied to the disk."""
        if order.partial is None:
            return
        begun = time.monotonic()
        target = commits.free_path(self._tiers.disk, snapshot.step)
        if not reason:
            held = self._tiers.folder(HELD) / f"{order.id}-{self._nodes.index}"
            found = commits.read_share(held)
            about = About(found.step, found.mesh, created=found.created)
            reason = committed(order.partial, target, self._nodes.count, order.id, about)
        if reason:
            shutil.rmtree(order.partial, ignore_errors=True)
            self._events.put(SaveFailed(snapshot.step, reason))
            return
        _arrived(snapshot, target, begun, self._keep, self._events)

    # ------------------------------------------------------------ what is kept here

    def _kept(self, save_id: str) -> tuple[Share, Path]:
        """This node's share of a snapshot, under a name that no retention takes away. Raises UserError."""
        until = time.monotonic() + PATIENCE
        while True:
            for share, path in shares_here(self._tiers).items():
                if share.id == save_id and share.number == self._nodes.index:
                    kept = self._tiers.folder(HELD) / share.name
                    if path != kept:
                        _linked(path, kept)
                    return share, kept
            if time.monotonic() > until:
                raise UserError(f"node {self._nodes.index} has no share of the snapshot")
            time.sleep(LOOK)

    def _forget(self, ids: set[str]) -> None:
        for path in self._tiers.folder(HELD).iterdir():
            if path.name.lstrip(".").partition("-")[0] not in ids:
                shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------ copies

    def _send(self, path: Path, name: str, node: int) -> None:
        """Send a share to a node, and wait until it is there. Raises OSError, EOFError, UserError."""
        line = self._to.get(node)
        if line is None:
            line = self._to[node] = Client(self._peers[node], authkey=self._secret)
        try:
            sizes = commits.read_marker(path).sizes
            files = [*(file for file in sizes if file != commits.MANIFEST), commits.MANIFEST, commits.MARKER]
            line.send_bytes(json.dumps([name, files]).encode())
            for file in files:
                data = (path / file).open("rb")
                with data:
                    while block := data.read(BLOCK):
                        line.send_bytes(block)
                line.send_bytes(b"")
            if answer := line.recv_bytes().decode():
                raise UserError(f"node {node}: {answer}")
        except BaseException:
            self._to.pop(node).close()
            raise

    def _listen(self) -> None:
        while True:
            try:
                line = self._listener.accept()
            except OSError:  # it is closed
                return
            except Exception:  # noqa: BLE001, S112  a stranger, who does not know the secret
                continue
            threading.Thread(target=self._receive, args=(line,), name="tangram-copy", daemon=True).start()

    def _receive(self, line: Connection) -> None:
        """Take what another node sends, copy after copy, each as a whole or not at all."""
        with contextlib.suppress(OSError, EOFError), line:
            while True:
                name, files = json.loads(line.recv_bytes())
                kept = self._tiers.folder(HELD) / Path(name).name
                partial = kept.with_name(f".{kept.name}{commits.PARTIAL}")
                shutil.rmtree(partial, ignore_errors=True)
                problem = ""
                try:
                    partial.mkdir()
                except OSError as error:
                    problem = sentence(error)
                for file in files:
                    problem = _received(line, partial / Path(file).name, problem)
                problem = problem or _proved(partial, kept)
                shutil.rmtree(partial, ignore_errors=True)
                line.send_bytes(problem.encode())


def _received(line: Connection, file: Path, problem: str) -> str:
    """Take the blocks of a file; what was a problem before, or is one now. All of them are taken in any case."""
    with contextlib.ExitStack() as opened:
        writing = None
        if not problem:
            try:
                writing = opened.enter_context(file.open("xb"))
            except OSError as error:
                problem = sentence(error)
        while block := line.recv_bytes():
            try:
                if writing is not None and not problem:
                    writing.write(block)
            except OSError as error:
                problem = sentence(error)
    return problem


def _proved(partial: Path, kept: Path) -> str:
    """Let what has come be a share, if its bytes are those that were written; else why not."""
    try:
        found = commits.read_share(partial)
        for name, stored in found.files.items():
            with (partial / name).open("rb") as reading:
                if any(checksum(reading.read(BLOCK)) != expected for expected in stored.sums):
                    return f'the file "{name}" has other bytes than were written'
        shutil.rmtree(kept, ignore_errors=True)
        partial.rename(kept)
    except (OSError, UserError) as error:
        return sentence(error)
    return ""


def _linked(path: Path, kept: Path) -> None:
    """The same files under another name. Raises OSError where they are gone."""
    partial = kept.with_name(f".{kept.name}{commits.PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    link_files(path, partial)
    shutil.rmtree(kept, ignore_errors=True)
    partial.rename(kept)


class Promoter:
    """Copies checkpoints into a folder one after the other, and prunes that folder by its rules of retention."""

    def __init__(self, folder: Path, keep: tuple[str, ...]) -> None:
        self._folder, self._keep = folder, keep
        self._orders: queue.Queue[tuple[CheckpointSaved, Path] | None] = queue.Queue()
        self._events: Events = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="tangram-promoter", daemon=True)
        self._thread.start()

    def offer(self, snapshot: CheckpointSaved, *, disk: bool) -> bool:
        """Have a snapshot copied, if it is due; its files stay until then. Returns at once; False where newer ones have
        taken its place already, so that the next is due."""
        if not disk:
            return True
        try:
            self._orders.put((snapshot, pin(Path(snapshot.path))))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._events.put(SaveFailed(snapshot.step, sentence(error)))
        return True

    def heard(self) -> Iterator[Event]:
        """What came of it since the last call."""
        while not self._events.empty():
            yield self._events.get()

    def close(self) -> None:
        """Wait until all that was taken is on the disk."""
        self._orders.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            snapshot, pinned = order
            begun = time.monotonic()
            try:
                path = promote(pinned, self._folder)
            except Exception as error:  # noqa: BLE001  whatever it is, it is told, and the next one is tried
                self._events.put(SaveFailed(snapshot.step, sentence(error)))
                continue
            finally:
                shutil.rmtree(pinned, ignore_errors=True)
            _arrived(snapshot, path, begun, self._keep, self._events)


def _arrived(snapshot: CheckpointSaved, path: Path, begun: float, keep: tuple[str, ...], events: Events) -> None:
    """Tell of a checkpoint that is on the disk, as which this snapshot was brought there, and prune its folder."""
    seconds = snapshot.seconds + time.monotonic() - begun
    events.put(CheckpointSaved(snapshot.step, str(path), snapshot.blocked_seconds, seconds, asynchronous=True))
    for note in retention.keep_to(keep, path.parent):
        events.put(Note(note))
