"""A headless Chromium for tests, spoken to by the DevTools protocol over two pipes: no package, no port."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """The path of a Chromium on PATH; None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own; a context manager.

    `messages` are what the page said on its console, errors that nobody caught and requests that were refused.
    """

    def __init__(self, path: str, profile: Path):
        """Starts the browser at `path` with an empty profile in the folder `profile`."""
        self.messages: list[str] = []
        self._number, self._replies, self._session = 0, b"", None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile} about:blank"
        # The browser reads from descriptor 3 and writes to 4.
        command = f"exec {path} {flags} 3<&{to_browser} 4>&{from_browser}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result; what the page says meanwhile joins `messages`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._replies:
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._replies += received
        line, self._replies = self._replies.split(b"\0", 1)
        reply = json.loads(line)
        if reply.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(reply["params"]))
        return reply

    def open(self, path: Path, width: int, height: int, scheme: str = "light") -> None:
        """Opens a file in a window of `width` x `height` CSS pixels whose user prefers the colour scheme `scheme`."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def press(self, key: str) -> None:
        """Presses and releases a key, such as ArrowLeft or Tab."""
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])
