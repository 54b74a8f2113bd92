"""Text that looks like the framing of events, or breaks other readers' lines: two parsers, neither ours, read the same.

A token's data is raw, in which events have one kind of line end only: CR and CRLF arrive as LF. Within JSON strings
everything arrives as it was.
"""

from __future__ import annotations

import json
import re

import httpx
import pytest
from httpx_sse import connect_sse

from tests.e2e.browser import Browser
from tests.e2e.playing import END, Playhouse

AWKWARD = [
    "\n", "\r\n", "\r", "\n\n", "\r\r\n", "\n\r", "a\n", "a\r", "\na", "a\r\nb\rc\nd",  # ends of lines
    "data: x", "data", "event: error", "id: 7", "retry: 1", ":", ": ping", "\ndata: x\n\n", "[DONE]",  # fields
    " ", "  a  ", "\t",  # a reader takes one space away
    "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e",  # lines end here for Python, or for JavaScript
    "\0", "a\0b", "\ufeff", "\ufffd", "\x7f", "e\u0301", "日本", "🌊", "\U0010ffff",
    "x" * 65536, "🌊" * 16384, "a\r\n" * 20000,
]  # fmt: skip


def with_line_feeds(text: str) -> str:
    return re.sub("\r\n|\r", "\n", text)


def heard_by_python(house: Playhouse, path: str) -> list[tuple[str, str, str]]:
    with (
        httpx.Client(trust_env=False) as client,
        connect_sse(client, "GET", house.address(path)) as source,
    ):
        return [(event.event, event.data, event.id) for event in source.iter_sse()]


def heard_by_chromium(browser: Browser, path: str) -> list[tuple[str, str, str]]:
    browser.listen(path)
    seen = browser.until_seen(len(AWKWARD))
    browser.value("source.close()")
    return [(event, data, id) for event, data, id in seen]


@pytest.mark.parametrize("route", ["/played", "/flask/played", "/quoted"])
def test_a_python_client_reads_what_was_said(house: Playhouse, route: str) -> None:
    assert heard_by_python(house, house.script(*AWKWARD, END).at(route)) == expected(route)


@pytest.mark.parametrize("route", ["/played", "/flask/played", "/quoted"])
def test_a_browser_reads_what_was_said(house: Playhouse, browser: Browser, route: str) -> None:
    assert heard_by_chromium(browser, house.script(*AWKWARD).at(route)) == expected(route)


def expected(route: str) -> list[tuple[str, str, str]]:
    if route == "/quoted":
        return [("message", json.dumps(text, ensure_ascii=False), "") for text in AWKWARD]
    return [("token", with_line_feeds(text), "") for text in AWKWARD]
