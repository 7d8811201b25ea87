"""An iterator whose next item is made by a thread while the one before is used."""

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def fetched(items: Iterator[T]) -> Generator[Iterator[T]]:
    """The same items, one made ahead; an error of their making is raised where the item would be.

    Left early, the thread makes no further ones, and has ended when this is left.
    """
    made: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(maxsize=1)
    left = threading.Event()

    def put(there: bool, item: T | BaseException | None) -> None:
        while not left.is_set():
            with contextlib.suppress(queue.Full):
                made.put((there, item), timeout=0.1)
                return

    def make() -> None:
        try:
            for item in items:
                put(True, item)
                if left.is_set():
                    return
            put(False, None)
        except BaseException as error:  # noqa: BLE001  raised where the item would be
            put(False, error)

    def take() -> Iterator[T]:
        while True:
            there, item = made.get()
            if there:
                yield item  # pyright: ignore[reportReturnType]
            elif isinstance(item, BaseException):
                raise item
            else:
                return

    thread = threading.Thread(target=make, name="tangram-fetch")
    thread.start()
    try:
        yield take()
    finally:
        left.set()
        thread.join()
