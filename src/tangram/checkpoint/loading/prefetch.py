"""An iterator whose next items are made by a thread while those before are used."""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")
TOGETHER = 1 << 20
"""Bytes that change hands together."""
MOST = 1 << 10
"""Items that do."""


@contextlib.contextmanager
def fetched(items: Iterator[T], size: Callable[[T], int] | None = None) -> Generator[Iterator[T]]:
    """The same items, made ahead; an error of their making is raised where the item would be.

    `size`: the bytes of an item, with which small ones change hands together, since that costs more than to make one;
    else each is handed over alone. Left early, the thread makes no further ones, and has ended when this is left.
    """
    made: queue.Queue[tuple[list[T], BaseException | None, bool]] = queue.Queue(maxsize=1)
    left = threading.Event()

    def put(some: list[T], error: BaseException | None = None, more: bool = True) -> None:
        while not left.is_set():
            with contextlib.suppress(queue.Full):
                made.put((some, error, more), timeout=0.1)
                return

    def make() -> None:
        some, nbytes = list[T](), 0
        try:
            for item in items:
                some.append(item)
                nbytes += size(item) if size else TOGETHER
                if nbytes >= TOGETHER or len(some) == MOST:
                    put(some)
                    some, nbytes = [], 0
                if left.is_set():
                    return
            put(some, more=False)
        except BaseException as error:  # noqa: BLE001  raised where the item would be
            put(some, error)

    def take() -> Iterator[T]:
        more = True
        while more:
            some, error, more = made.get()
            yield from some
            if error is not None:
                raise error

    thread = threading.Thread(target=make, name="tangram-fetch")
    thread.start()
    try:
        yield take()
    finally:
        left.set()
        thread.join()
