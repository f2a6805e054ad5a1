"""A headless Chromium that tells what a page does: asks for, complains of, and how wide it is."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
UNFOLD = "document.querySelectorAll('details').forEach(one => one.open = true)"
WIDTH = {  # of the contents; on paper nothing scrolls, so that what a box cuts off or lets out counts, too
    "screen": "document.documentElement.scrollWidth",
    "print": "Math.max(document.documentElement.scrollWidth,"
    " ...[...document.querySelectorAll('body, body *')].map(one => Math.floor(one.getBoundingClientRect().right)))",
}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


def chromium() -> str | None:
    """The browser's command; None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Browser:
    """A page in a browser, spoken to through a pair of pipes."""

    asks: int
    answers: int
    session: str = ""
    number: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    unread: bytes = b""

    def call(self, method: str, **params: Any) -> Any:
        """The result of a call of the DevTools protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.asks, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def visit(self, page: Path, *, width: int, scheme: str = "light", media: str = "screen") -> dict[str, Any]:
        """Show a page so wide, unfolded; what it asked for, its errors, and how wide its contents are."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.value(UNFOLD)
        kinds = [(event["method"], event["params"]) for event in self.events if "method" in event]
        urls = [params["request"]["url"] for method, params in kinds if method == "Network.requestWillBeSent"]
        return {
            "outside": [url for url in urls if not url.startswith(("data:", page.as_uri()))],
            "errors": [params for method, params in kinds if method in ("Log.entryAdded", "Runtime.exceptionThrown")],
            "width": self.value(WIDTH[media]),
        }

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            got = os.read(self.answers, 1 << 16)
            assert got, "the browser is gone"
            self.unread += got
        message, _, self.unread = self.unread.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with an empty page; its files lie in a folder."""
    command = chromium()
    assert command is not None
    (its_in, asks), (answers, its_out) = os.pipe(), os.pipe()
    flags = (*FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe")
    script = f'exec "$@" 3<&{its_in} 4>&{its_out}'  # the browser reads and writes these two
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", command, *flags, "about:blank"],
        pass_fds=(its_in, its_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        browser = Browser(asks, answers)
        (page,) = [one for one in browser.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        browser.session = browser.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for part in ("Page", "Network", "Log", "Runtime"):
            browser.call(f"{part}.enable")
        yield browser
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(asks)
        os.close(answers)
