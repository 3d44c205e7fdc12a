"""A headless Chromium that tests drive over its debugging protocol, if one is installed."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
START_TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """Return the path of a Chromium, also one that HYBRIDRL_TEST_BROWSER names; None without one."""
    return os.environ.get("HYBRIDRL_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.errors: list[str] = []  # exceptions of scripts, and what the page's security policy has refused

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(timeout=60)).data)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:1000])
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Return what an expression of JavaScript returns; awaits promises."""
        found = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:1000])
        return found["result"].get("value")

    async def until(self, script: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + timeout_s
        while not (found := await self.value(script)):
            if time.monotonic() > deadline:
                text = await self.value("document.body.innerText.slice(0, 1000)")
                raise TimeoutError(f"{script} is not true after {timeout_s:g} s; the page: {text}; {self.errors}")
            await asyncio.sleep(0.1)
        return found

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def open_page(browser: str, *, width: int = 1280, height: int = 860) -> AsyncIterator[Page]:
    """Start the browser and yield its one tab; both end with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        flags += [f"--window-size={width},{height}", f"--user-data-dir={folder}", "about:blank"]
        program = subprocess.Popen([browser, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tab = next(tab for tab in await answer.json() if tab["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.send(f"{domain}.enable")
                    yield page
        finally:
            program.terminate()
            program.wait(30)


async def _port(file: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (file.exists() and file.read_text().strip()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the browser did not start within {START_TIMEOUT_S:g} s")
        await asyncio.sleep(0.1)
    return file.read_text().split()[0]
