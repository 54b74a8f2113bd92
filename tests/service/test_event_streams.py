"""A stream's body by itself, with the pool's side and the server's side played by the test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from service.app import create_app
from service.connection import ClientGone
from service.environ import PING, WATCH_KEY
from service.open_streams import OpenStreams, streams
from service.request import Request
from service.response import Response
from service.routing import Next
from service.sse import TOKENS, Form
from service.streams import EventStream, TooManyStreams
from tests.service.stub import StubClient, StubStream, status
from workers.errors import Cancelled, DeadlineExceeded, Draining, ModelFailed, Overloaded, WorkerDied

ERROR = b'event: error\ndata: {"error":"%b","code":"%b"}\n\n'


def tokens(*texts: str) -> bytes:
    return b"".join(TOKENS.frame(text) for text in texts)


@pytest.fixture(autouse=True)
def gives_every_place_back() -> Iterator[None]:
    assert len(streams) == 0
    yield
    gc.collect()
    assert len(streams) == 0


class Watch:
    """A server that notices at once when the client leaves."""

    def __init__(self) -> None:
        self.gone: object = None

    def __call__(self, gone: object) -> Callable[[], None]:
        self.gone = gone
        return self.end

    def end(self) -> None:
        self.gone = None

    def ring(self) -> None:
        assert callable(self.gone)
        self.gone()


def begun(stream: StubStream, form: Form = TOKENS, heartbeat: float = 60.0, **environ: object) -> EventStream:
    return EventStream(form, heartbeat).begin(lambda caller: stream, environ)


def played(*pieces: bytes) -> StubStream:
    stream = StubStream()
    stream.say(*pieces)
    return stream


# Both ways


def test_what_is_there_at_once_is_one_chunk() -> None:
    stream = played(b"a", b"b", b"c")
    stream.end()
    body = begun(stream)
    assert list(body) == [tokens("a", "b", "c")]
    body.close()


def test_more_may_be_produced_when_what_was_handed_out_has_been_sent() -> None:
    stream = played(b"a", b"b")
    body = begun(stream)
    assert (next(body), stream.taken, stream.granted) == (tokens("a", "b"), 2, 0)
    stream.say(b"c")
    assert (next(body), stream.taken, stream.granted) == (tokens("c"), 3, 2)
    body.close()


def test_a_piece_that_completes_no_character_is_not_sent_and_holds_nothing_up() -> None:
    stream = played(b"a")
    body = begun(stream)
    assert body.frames() == tokens("a")
    stream.say(b"\xf0\x9f")
    assert (body.frames(), stream.granted) == (b"", 2)
    stream.say(b"\x98\x80")
    assert body.frames() == tokens("\U0001f600")
    stream.say(b"\xe2\x82")
    stream.end()
    assert (body.frames(), body.over) == (tokens("\ufffd"), True)
    body.close()


def test_a_stream_of_no_pieces_is_complete() -> None:
    stream = StubStream()
    stream.end()
    body = begun(stream, Form(TOKENS.piece, b"data: [DONE]\n\n"))
    assert list(body) == [b"data: [DONE]\n\n"]
    body.close()


def test_a_failure_before_the_first_piece_is_raised() -> None:
    stream = StubStream()
    stream.end(DeadlineExceeded("too late"))
    with pytest.raises(DeadlineExceeded):
        begun(stream)
    assert stream.closed


def test_half_a_character_is_not_a_first_piece() -> None:
    stream = played(b"\xf0\x9f")
    stream.end(ModelFailed("no"))
    with pytest.raises(ModelFailed):
        begun(stream)


def test_a_failure_after_the_first_piece_is_the_last_event() -> None:
    stream = played(b"a")
    stream.end(WorkerDied("dead"))
    body = begun(stream)
    assert list(body) == [tokens("a") + ERROR % (b"dead", b"WORKER_DIED")]
    body.close()


def test_a_form_has_its_own_way_to_fail() -> None:
    stream = played(b"a")
    body = begun(stream, Form(TOKENS.piece, b"done", lambda error: b"failed"))
    next(body)
    stream.end(WorkerDied("dead"))
    assert list(body) == [b"failed"]
    body.close()


def test_after_a_long_silence_it_begins_with_a_heartbeat() -> None:
    stream = StubStream()
    body = EventStream(TOKENS, 60.0).begin(lambda caller: stream, {}, seconds=0.01)
    assert next(body) == PING
    stream.end(WorkerDied("dead"))  # its status has gone by now
    assert list(body) == [ERROR % (b"dead", b"WORKER_DIED")]
    body.close()


def test_silence_is_broken_by_heartbeats() -> None:
    stream = played(b"a")
    body = begun(stream, heartbeat=0.01)
    assert [next(body), next(body), next(body)] == [tokens("a"), PING, PING]
    stream.say(b"b")
    assert next(body) == tokens("b")
    body.close()


@pytest.mark.parametrize("form", [Form(lambda text: 1 / 0), Form(lambda text: {"dada": text})])  # type: ignore
def test_a_form_that_raises_ends_its_stream_and_is_told_to_the_log(
    form: Form, caplog: pytest.LogCaptureFixture
) -> None:
    stream = played(b"a")
    with pytest.raises((ZeroDivisionError, ValueError)):
        begun(stream, form)
    assert stream.closed


def test_a_form_that_raises_later_is_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    stream = played(b"1")
    body = begun(stream, Form(lambda text: str(1 // int(text)).encode()))
    assert next(body) == b"1"
    stream.say(b"0")
    assert list(body) == [b'event: error\ndata: {"error":"internal error"}\n\n']
    assert stream.closed
    assert "ZeroDivisionError" in caplog.text
    body.close()


# Ended from outside


def test_the_end_of_the_server_is_told_after_what_has_come() -> None:
    stream = played(b"a")
    body = begun(stream)
    next(body)
    stream.say(b"b")
    body.server_ends()
    assert stream.closed
    assert list(body) == [tokens("b") + ERROR % (b"the server is stopping", b"DRAINING")]
    body.close()


def test_a_client_that_leaves_before_the_first_piece_cancels_it() -> None:
    stream, watch = StubStream(), Watch()

    def start(caller: object) -> StubStream:
        assert caller is None
        return stream

    stream.wait = lambda seconds: bool(watch.ring())  # type: ignore[assignment]
    with pytest.raises(Cancelled):
        EventStream(TOKENS, 60.0).begin(start, {WATCH_KEY: watch})
    assert stream.closed
    assert watch.gone is None


def test_a_client_that_leaves_later_is_an_answer_that_broke_off() -> None:
    stream, watch = played(b"a"), Watch()
    body = begun(stream, **{WATCH_KEY: watch})
    assert next(body) == tokens("a")
    watch.ring()
    assert stream.closed
    assert next(body) == ERROR % (b"the client has left", b"CANCELLED")  # it may only have ended its own side
    with pytest.raises(ClientGone) as raised:
        next(body)
    assert isinstance(raised.value, BrokenPipeError)  # as other servers have it
    body.close()
    assert watch.gone is None


def test_a_client_that_the_pools_client_has_seen_leave_is_no_complete_answer_either() -> None:
    stream = played(b"a")
    body = begun(stream)
    assert next(body) == tokens("a")
    stream.end(Cancelled("the client has gone"))
    assert next(body) == ERROR % (b"the client has gone", b"CANCELLED")
    with pytest.raises(BrokenPipeError):
        next(body)


def test_without_a_server_that_watches_the_pools_client_does() -> None:
    callers: list[object] = []
    stream = StubStream()
    stream.end()

    def start(caller: object) -> StubStream:
        callers.append(caller)
        return stream

    EventStream(TOKENS, 60.0).begin(start, {"gunicorn.socket": "socket"}).close()
    assert callers == ["socket"]


def test_a_body_that_nobody_sends_is_given_back() -> None:
    stream = played(b"a")
    begun(stream)
    gc.collect()
    assert stream.closed


def test_closing_it_cancels_what_is_left_and_may_be_done_again() -> None:
    stream = played(b"a")
    body = begun(stream)
    body.close()
    body.close()
    assert stream.closed
    assert list(body) == []


# As an application has it


def test_flasks_test_client_gets_the_whole_stream() -> None:
    stub = StubClient(status("tokens"))
    stub.pieces = [b"Tensors ", b"stream"]
    app = create_app(stub).test_client()
    for path in ("/generate", "/events"):
        answer = app.get(path)
        assert (answer.status_code, answer.content_type, answer.data) == (
            200,
            "text/event-stream",
            tokens("Tensors ", "stream"),
        )
        begun = len(stub.streams)
        assert (app.head(path).status_code, len(stub.streams)) == (200, begun)
        assert app.post(path).status_code == 405
    assert all(stream.closed for stream in stub.streams)
    stub.refusal = Overloaded("full")
    answer = app.get("/generate")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert answer.json == {"error": "full", "code": "OVERLOADED"}


def test_a_middleware_that_answers_itself_ends_the_stream_it_had() -> None:
    stub = StubClient(status("tokens"))
    stub.played = True
    app = create_app(stub)

    @app.use
    def instead(request: Request, following: Next) -> Response:
        following(request)
        return Response.text("instead")

    class Said(StubStream):
        def __init__(self) -> None:
            super().__init__()
            self.say(b"a")

    stub.stream = lambda *_, **__: stub.streams.append(Said()) or stub.streams[-1]  # type: ignore
    assert app.test_client().get("/generate").text == "instead"
    gc.collect()
    assert [stream.closed for stream in stub.streams] == [True]


# How many


def test_four_in_five_connections_may_be_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OpenStreams()
    for connections, limit in ((1, 1), (2, 1), (5, 4), (50, 40), (6500, 5200)):
        ours.allow(connections)
        assert ours.limit == limit


def test_one_more_than_may_be_open_starts_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "limit", 2)
    body, other = begun(played(b"a")), Response.sse([{"data": "x"}])
    started: list[object] = []
    for _ in range(2):
        with pytest.raises(TooManyStreams):
            EventStream(TOKENS, 60.0).begin(started.append, {})  # type: ignore[arg-type]
        with pytest.raises(TooManyStreams):
            Response.sse([])
    assert started == []
    other.body.close()  # type: ignore[union-attr]
    begun(played(b"a")).close()
    body.close()


def test_when_the_server_ends_all_end_and_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "ending", False)
    body, other = begun(played(b"a")), Response.sse([{"data": "x"}, {"data": "y"}]).body
    assert not isinstance(other, (bytes, memoryview))
    events = iter(other)
    assert (next(body), next(events)) == (tokens("a"), b"data: x\n\n")
    streams.end()
    end = ERROR % (b"the server is stopping", b"DRAINING")
    assert (list(body), list(events)) == ([end], [end])
    with pytest.raises(Draining):
        begun(played(b"a"))
    body.close()
    other.close()  # type: ignore[attr-defined]
