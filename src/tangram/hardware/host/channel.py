"""A conversation between two processes over a socket: JSON tables, and open files beside them."""

import json
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Channel:
    """One end of a conversation: JSON tables, one a line, and open files beside them. Any thread may send."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._data = bytearray()
        self._files: list[int] = []
        self._ready = select.poll()
        self._ready.register(link, select.POLLIN)

    def send(self, message: Mapping[str, Json], files: Sequence[int] = ()) -> None:
        """Say something. Raises OSError when the other end is gone."""
        line = json.dumps({"message": dict(message), "files": len(files)}).encode() + b"\n"
        with self._sending:
            sent = socket.send_fds(self._link, [line], list(files)) if files else 0
            self._link.sendall(line[sent:])

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Json], list[int]] | None:
        """The next message, with the files that came with it; None when none came in `timeout` seconds.

        Raises EOFError when the other end is gone and all that it said has been heard.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._data:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._ready.poll(None if left is None else left * 1000):
                return None
            try:
                data, files, _, _ = socket.recv_fds(self._link, 1 << 16, 8)
            except ConnectionError:  # it was killed with something unread
                data, files = b"", []
            self._files += files
            if not data:
                raise EOFError("the other end of the channel is gone")
            self._data += data
        line, _, rest = self._data.partition(b"\n")
        self._data = bytearray(rest)
        known = json.loads(line)
        count = int(known["files"])
        own, self._files = self._files[:count], self._files[count:]
        return known["message"], own

    def close(self) -> None:
        """End the conversation."""
        self._link.close()
