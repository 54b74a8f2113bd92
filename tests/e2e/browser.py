"""A real browser: the Chromium of this machine. It speaks to this machine only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tests.e2e.stack import kill, place
from tests.programs import program
from tests.service.serving import until

FLAGS = (
    "--no-sandbox",  # it has none when it is root's
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

Seen = list[list[str]]


@dataclass
class Browser:
    """What it is told to do on `page.html`."""

    page: Page

    def open(self, address: str) -> None:
        self.page.goto(address)

    def listen(self, path: str) -> None:
        self.page.evaluate("(path) => listen(path)", path)

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def seen(self) -> Seen:
        """Type, data and id of each event since `listen`."""
        seen: Seen = self.value("seen")
        return seen

    def until_seen(self, count: int) -> Seen:
        until(lambda: self.value("seen.length") >= count, f"{count} events")
        return self.seen()

    def until_done(self) -> None:
        """It will not connect again by itself."""
        until(lambda: self.value("source.readyState === EventSource.CLOSED"), "the source is closed")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    path = program("chromium")
    with place() as directory:
        try:
            with sync_playwright() as playwright:
                # With its home there, all that it writes and every process of its own is found by the directory.
                context = playwright.chromium.launch_persistent_context(
                    directory / "profile",
                    executable_path=path,
                    headless=True,
                    args=FLAGS,
                    env={**os.environ, "HOME": str(directory), "TMPDIR": str(directory)},
                )
                with context:
                    yield Browser(context.new_page())
            until(lambda: not processes(directory), "the browser's processes have gone")
        finally:
            for pid in processes(directory):
                kill(pid)


def processes(directory: Path) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.fsencode(directory) in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found
