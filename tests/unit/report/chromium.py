"""A headless Chromium, driven through its debugging pipe: no port, no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER_S = 60.0


def find() -> str | None:
    """Path of a browser; EYAS_CHROMIUM names another one."""
    named = os.environ.get("EYAS_CHROMIUM")
    return named or next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Tab:
    """One page. ``events`` gathers what the browser said by itself."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer, self._last, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def open(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == self._last)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _until(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end_s = time.monotonic() + ANSWER_S
        while True:
            while b"\0" in self._buffer:
                raw, self._buffer = self._buffer.split(b"\0", 1)
                message = json.loads(raw)
                if "method" in message:
                    self.events.append(message)
                if is_wanted(message):
                    return message
            ready, _, _ = select.select([self._from], [], [], max(end_s - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data

    def show(self, page: Path, width: int, *, dark: bool) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press_tab(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

    def screenshot(self, path: Path) -> None:
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(program: str, home: Path) -> Iterator[Tab]:
    """A browser with a profile of its own below ``home``, gone at the end."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    quiet = (
        "--disable-background-networking",
        "--no-first-run",
        "--disable-extensions",
        "--disable-gpu",
        "--mute-audio",
    )
    flags = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", *quiet)
    command = [program, *flags, "--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank"]
    # The pipe is spoken on descriptors 3 and 4, whatever ours are called.
    script = f'exec 3<&{from_us} 4>&{to_us}; exec "$@"'
    environment = os.environ | {"HOME": os.fspath(home)}
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=(from_us, to_us),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    tab = Tab(to_browser, from_browser)
    try:
        tab.open()
        yield tab
    finally:
        tab._session = ""
        with suppress(AssertionError, OSError):
            tab.call("Browser.close")
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_browser)
        os.close(from_browser)
