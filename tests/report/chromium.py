"""Drives a headless Chromium over its debugging pipe: no server, no port, no package.

Messages are JSON, each ended by a zero byte, on the browser's file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync",
    "--disable-extensions", "--mute-audio", "--hide-scrollbars",
)  # fmt: skip


def browser_path() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `messages` of the console and `errors` of scripts; `requests`: addresses that the page asked for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._number, self._rest = write, read, 0, b""
        self.messages: list[str] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file, until its charts are drawn."""
        phone = width < 600
        self.messages, self.errors, self.requests, self._loaded = [], [], [], False
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, code: str) -> Any:
        """The value of an expression in the page, as JSON has it."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}[name]
            text = {"text": "\r"} if name == "Enter" and kind == "rawKeyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type="keyDown" if text else kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                **text,
            )

    def picture(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {SECONDS} seconds"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found.get("method", ""), found.get("params", {}))
        return found

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str(said["args"]))
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(said["entry"]["text"])


@contextmanager
def browsing(path: str) -> Iterator[Page]:
    """A browser with one tab, ended at the end of the block."""
    to_browser, from_browser = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_browser[0], from_browser[1])]
    for fd in (to_browser[0], from_browser[1]):
        os.close(fd)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        silent = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, silent, 1), (os.POSIX_SPAWN_DUP2, silent, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        arguments = [path, *OPTIONS, f"--user-data-dir={profile}"]
        pid = os.posix_spawn(path, arguments, os.environ, file_actions=actions, setpgroup=0)
        for fd in (*high, silent):
            os.close(fd)
        try:
            yield Page(to_browser[1], from_browser[0])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(to_browser[1])
            os.close(from_browser[0])
