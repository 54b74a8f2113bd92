"""Events as bytes, read back by a client's rules, and pieces of bytes as text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import sse
from service.environ import PING
from service.sse import TOKENS, Form, WholeCharacters
from workers.errors import Draining, ModelFailed


@dataclass
class Event:
    data: str
    event: str = "message"
    id: str = ""
    retry: int | None = None


@dataclass
class EventSource:
    """What a browser makes of a stream, step by step as the standard tells it, and independent of what wrote it."""

    events: list[Event] = field(default_factory=list)
    last_id: str = ""
    retry: int | None = None

    def read(self, stream: bytes) -> list[Event]:
        text = stream.decode("utf-8")
        if text.startswith("\ufeff"):
            text = text[1:]
        data, name = "", ""
        line, at = "", 0
        while at < len(text):
            character = text[at]
            at += 1
            if character not in "\r\n":
                line += character
                continue
            if character == "\r" and text[at : at + 1] == "\n":
                at += 1
            if not line:
                if data:
                    self.events.append(Event(data.removesuffix("\n"), name or "message", self.last_id, self.retry))
                data, name = "", ""
            elif not line.startswith(":"):
                key, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if key == "data":
                    data += value + "\n"
                elif key == "event":
                    name = value
                elif key == "id" and "\0" not in value:
                    self.last_id = value
                elif key == "retry" and value and set(value) <= set("0123456789"):
                    self.retry = int(value)
            line = ""
        return self.events


def read(stream: bytes) -> list[Event]:
    return EventSource().read(stream)


def normal(text: str) -> str:
    """What is left of the ends of lines once a client has read them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


TEXT = st.text(st.characters(codec="utf-8"))
AWKWARD = st.lists(
    st.sampled_from(["\r", "\n", "\r\n", " ", ":", "data: x", "\0", "\u2028", "\x85", "\ufeff", "\U0001f600"])
).map("".join)
ONE_LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"))


@given(st.lists(TEXT | AWKWARD))
def test_tokens_are_read_back_as_they_were_written(texts: list[str]) -> None:
    events = read(b"".join(TOKENS.frame(text) for text in texts))
    expected = [normal(text) for text in texts]
    assert [event.data for event in events] == expected
    assert {event.event for event in events} <= {"token"}


@given(
    st.fixed_dictionaries(
        {"data": TEXT | AWKWARD | st.integers() | st.dictionaries(TEXT, TEXT)},
        optional={"event": ONE_LINE, "id": ONE_LINE, "retry": st.integers(0, 10**9)},
    )
)
def test_events_are_read_back_as_they_were_written(event: dict[str, object]) -> None:
    source = EventSource()
    (got,) = source.read(sse.frame(event))
    data = event["data"]
    if isinstance(data, str):
        assert got.data == normal(data)
    else:
        assert json.loads(got.data) == data
    assert got.event == (event.get("event") or "message")
    assert got.id == event.get("id", "")
    assert got.retry == event.get("retry")


def test_the_frames_of_the_contract_are_so_to_the_byte() -> None:
    assert TOKENS.frame("Tensors ") == b"event: token\ndata: Tensors \n\n"
    assert TOKENS.frame("a\r\nb\rc\nd") == b"event: token\ndata: a\ndata: b\ndata: c\ndata: d\n\n"
    assert sse.failure(Draining("the server is stopping")) == (
        b'event: error\ndata: {"error":"the server is stopping","code":"DRAINING"}\n\n'
    )


def test_a_heartbeat_is_no_event() -> None:
    assert read(PING + TOKENS.frame("a") + PING) == [Event("a", "token")]


@pytest.mark.parametrize(
    "event", [{"id": "a\nb"}, {"id": "a\0b"}, {"event": "a\rb"}, {"retry": "1.5"}, {"retry": -1}, {"dada": "x"}]
)
def test_a_field_that_no_client_would_read_is_refused(event: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        sse.frame(event)


def test_the_text_of_a_failure_may_hold_anything() -> None:
    (event,) = read(sse.failure(ModelFailed("half \ud800\n\n: \0")))
    assert json.loads(event.data) == {"error": "half ?\n\n: \0", "code": "MODEL_FAILED"}


def test_a_failure_nobody_has_foreseen_is_told_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    assert read(sse.failure(ZeroDivisionError("secret"))) == [Event('{"error":"internal error"}', "error")]
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_form_makes_frames_or_events_or_nothing() -> None:
    assert Form(lambda text: b": " + text.encode() + b"\n\n").frame("x") == b": x\n\n"
    assert Form(lambda text: {"id": 1, "data": text}).frame("x") == b"id: 1\ndata: x\n\n"
    assert Form(lambda text: b"").frame("x") == b""


# Whole characters


@given(TEXT, st.data())
def test_text_comes_whole_wherever_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    characters = WholeCharacters()
    pieces = [characters.take(raw[a:b]) for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert "".join(pieces) == text
    assert characters.take(b"", last=True) == ""


@given(st.binary(), st.data())
def test_what_is_no_text_reads_the_same_wherever_it_is_cut(raw: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    characters = WholeCharacters()
    pieces = [characters.take(raw[a:b]) for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert "".join([*pieces, characters.take(b"", last=True)]) == raw.decode("utf-8", "replace")


def test_a_piece_that_completes_no_character_is_nothing() -> None:
    characters = WholeCharacters()
    said = [characters.take(piece) for piece in (b"\xf0", b"\x9f\x98", b"\x80", b"", b"\xe2\x82", b"\xacx")]
    assert said == ["", "", "\U0001f600", "", "", "\u20acx"]


@pytest.mark.parametrize("tail", [b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe2\x82", b"\xc3"])
def test_a_tail_that_is_cut_off_is_one_replacement_character(tail: bytes) -> None:
    characters = WholeCharacters()
    assert (characters.take(b"a" + tail), characters.take(b"", last=True)) == ("a", "\ufffd")
