"""Streams in a real browser: every event, once and in order, and none computed for a page that has gone."""

from __future__ import annotations

import json

import pytest

from tests.e2e.browser import Browser
from tests.e2e.playing import END, FAREWELL, RETRY_MS, WAYS, Playhouse, fail
from tests.e2e.stack import kill
from tests.service.sse_client import StreamClient


def test_every_event_arrives_as_it_was_said(house: Playhouse, browser: Browser) -> None:
    pieces = ["Tensors ", " stream", "  ", " ", "one\nby\n", "data: x", "日本 🌊", FAREWELL]
    script = house.script(*pieces, END)
    browser.listen(script.at("/numbered"))
    browser.until_done()
    ids = [*(str(number) for number in range(1, len(pieces))), "over"]
    assert browser.seen() == [["token", piece, id] for piece, id in zip(pieces, ids, strict=True)]
    # It came for more once, and was told that there is none.
    assert browser.value("[opened, lost]") == [1, 2]


@pytest.mark.parametrize("way", WAYS)
def test_each_event_arrives_before_the_next_is_made(house: Playhouse, browser: Browser, way: str) -> None:
    script = house.script()
    before = house.told()[1]
    browser.listen(script.at(way))
    for number in range(1, 6):
        script.add(f"piece {number} ")
        assert browser.until_seen(number)[-1] == ["token", f"piece {number} ", ""]
        assert house.told()[1] - before == number


def test_a_stream_that_has_ended_goes_on_where_it_was(house: Playhouse, browser: Browser) -> None:
    script = house.script("a", "b", END, "c", END, "d")
    browser.listen(script.at("/numbered"))
    assert browser.until_seen(4) == [["token", text, str(number)] for number, text in enumerate("abcd", 1)]
    assert browser.value("[opened, lost]") == [3, 2]
    script.add(FAREWELL, END)
    browser.until_done()
    assert browser.seen()[4:] == [["token", FAREWELL, "over"]]


def test_a_stream_whose_web_process_has_died_goes_on_in_the_next(house: Playhouse, browser: Browser) -> None:
    script = house.script("a", "b")
    browser.listen(script.at("/numbered"))
    browser.until_seen(2)
    (web,) = house.stack.web()
    kill(web)
    script.add("c", FAREWELL, END)
    browser.until_done()
    assert [event[1] for event in browser.seen()] == ["a", "b", "c", FAREWELL]
    assert house.stack.web() != [web]


def test_the_fields_of_a_resumable_stream_are_on_the_wire(house: Playhouse) -> None:
    script = house.script("a", "b", END)
    with StreamClient(house.port, script.at("/numbered"), "Last-Event-ID: 1", "Connection: close") as client:
        assert client.finish() == b"event: token\nid: 2\nretry: %d\ndata: b\n\n" % RETRY_MS
        assert client.whole


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pieces", [(), ("a",)], ids=["before the first event", "between events"])
def test_closing_the_source_frees_the_slot(house: Playhouse, browser: Browser, way: str, pieces: tuple[str]) -> None:
    script = house.script(*pieces)
    browser.listen(script.at(way))
    browser.until_seen(len(pieces))
    house.until_live()
    browser.value("source.close()")
    house.until_free()


@pytest.mark.parametrize("way", WAYS)
def test_leaving_the_page_frees_the_slot(house: Playhouse, browser: Browser, way: str) -> None:
    script = house.script("a")
    browser.listen(script.at(way))
    browser.until_seen(1)
    house.until_live()
    browser.open(house.address("/elsewhere"))
    house.until_free()


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_fails_later_tells_the_page_why(house: Playhouse, browser: Browser, way: str) -> None:
    script = house.script("a")
    browser.listen(script.at(way))
    browser.value("void source.addEventListener('error', (event) => { if (event.data) source.close(); })")
    script.add(fail("out of tensors"))
    first, last = browser.until_seen(2)
    browser.until_done()
    assert first == ["token", "a", ""]
    assert last[0] == "error"
    assert json.loads(last[1]) == {"error": "out of tensors", "code": "MODEL_FAILED"}


def test_a_stream_that_fails_at_once_is_not_asked_for_again(house: Playhouse, browser: Browser) -> None:
    script = house.script(fail("out of tensors"))
    browser.listen(script.at("/numbered"))
    browser.until_done()
    assert browser.value("[seen.length, opened, lost]") == [0, 0, 1]
