"""A headless Chromium, spoken to over a pipe as its DevTools do: to see a page as a person would.

Nothing but Python's own library is needed, and no port is opened. All network is refused by the browser's resolver.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
PATIENCE = 120.0  # seconds for one answer, on a machine that is busy with other tests


def executable() -> str:
    """Where the browser is. Without one the test is skipped, and fails in CI, which installs it."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return found
    why = f"none of {', '.join(NAMES)} is installed, so no page can be looked at"
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


class Browser:
    """A running browser with one page."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._pending = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for one thing of the DevTools protocol and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, page: Path, *, width: int, dark: bool = False, touch: bool = False) -> None:
        """Show a file in a window of this width and wait until it has loaded."""
        self.events.clear()
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=touch)
        self.dark(dark)
        self.call("Page.navigate", url=page.as_uri())
        while not self.named("Page.loadEventFired"):
            self.events.append(self._next())

    def dark(self, dark: bool) -> None:
        """What the reader's system prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression in the page gives; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def named(self, method: str) -> list[dict[str, Any]]:
        """The parameters of the events of this name since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def complaints(self) -> list[str]:
        """Everything that the console shows as a warning or an error."""
        said = [str(entry["entry"]["text"]) for entry in self.named("Log.entryAdded")]
        said += [str(one["exceptionDetails"]) for one in self.named("Runtime.exceptionThrown")]
        return said + [str(one["args"]) for one in self.named("Runtime.consoleAPICalled") if one["type"] != "log"]

    def requests(self) -> list[str]:
        """Every address that was asked for, the page's own among them."""
        return [str(one["request"]["url"])[:200] for one in self.named("Network.requestWillBeSent")]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._pending:
            if not select.select([self._receive], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._receive, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has gone")
            self._pending += chunk
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser() -> Generator[Browser]:
    """Start a browser with an empty profile, and end it."""
    path = executable()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        to_read, send = _pipe()
        receive, to_write = _pipe()
        # The browser reads from descriptor 3 and writes to 4; a shell can put them there, Python's own would not.
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', path, *FLAGS]
        command.append(f"--user-data-dir={profile}")
        process = subprocess.Popen(
            command,
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Browser(send, receive)
        finally:
            os.close(send)  # at the end of its pipe the browser goes by itself
            os.close(receive)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not among the descriptors that the browser wants for itself."""
    ends: list[int] = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends[0], ends[1]
