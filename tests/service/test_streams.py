"""Streams under real gunicorn, played by the test: sent from the hub (`/play`), and iterated over (`/flask/play`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.service.beside import TLS
from tests.service.serving import PATIENCE_S, Client, Served, children, gunicorn, until
from tests.service.sse_client import StreamClient

APP = "tests.service.stream_apps:server"
WORKERS = {
    "headrace": (),
    "gevent": ("-k", "gevent"),
    "gthread": ("-k", "gthread", "--threads", "4"),
    "sync": ("-k", "sync"),
}
WAYS = ("/play", "/flask/play")
CONTRACT = b"".join(
    b"event: token\ndata: %b\n\n" % piece for piece in (b"Tensors ", b"stream ", b"one ", b"by ", b"one.")
)
STOPPING = b'event: error\ndata: {"error":"the server is stopping","code":"DRAINING"}\n\n'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gunicorn(APP) as served:
        yield served


@pytest.fixture(scope="module")
def stock() -> Iterator[dict[str, Served]]:
    with contextlib.ExitStack() as ends:
        yield {name: ends.enter_context(gunicorn(APP, *flags)) for name, flags in WORKERS.items() if flags}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    with gunicorn(APP, env={"HEADRACE_SEND_TIMEOUT": "1.0", "HEADRACE_HEARTBEAT": "0.5"}) as served:
        yield served


def token(text: str | bytes) -> bytes:
    return b"event: token\ndata: %b\n\n" % (text if isinstance(text, bytes) else text.encode())


def post(served: Served, path: str, body: bytes = b"") -> bytes:
    with served.connect() as client:
        client.send(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
        status, _, answer = client.response()
    assert status == 200, answer
    return answer


def say(served: Served, name: str, *pieces: bytes) -> None:
    post(served, f"/say?name={name}", b"\n".join(json.dumps(piece.decode("latin-1")).encode() for piece in pieces))


def end(served: Served, name: str, cut: str = "") -> None:
    post(served, f"/end?name={name}" + (f"&cut={cut}" if cut else ""))


def state(served: Served, name: str) -> dict[str, object]:
    found = json.loads(served.get(f"/state?name={name}"))
    assert isinstance(found, dict)
    return found


def is_over(served: Served, name: str) -> bool:
    """Whether its task has been cancelled or has ended, and it counts no more."""
    found = state(served, name)
    return found["closed"] is True and found["open"] == 0


def until_over(served: Served, name: str, seconds: float = 2.0) -> None:
    until(lambda: is_over(served, name), f"{name} is over", seconds)


_names = iter(range(10_000))


def fresh() -> str:
    return f"s{next(_names)}"


# What is answered


def timeless(client: StreamClient) -> tuple[bytes, bytes]:
    body = client.finish()
    head = re.sub(rb"\r\nDate: [^\r]*", b"", client.head)
    return re.sub(rb"(X-Request-ID: )[0-9a-f]{16}", rb"\1*", head), body


@pytest.mark.parametrize("route", ["/generate", "/events"])
@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_the_contract_is_kept_to_the_byte_by_every_worker(
    served: Served, stock: dict[str, Served], route: str, version: str
) -> None:
    closing = "Connection: close"
    with StreamClient(served.port, route, closing, version=version) as client:
        ours = timeless(client)
    assert ours[1] == CONTRACT
    assert (client.status, client.whole) == (200, True)
    assert {
        name: client.headers.get(name)
        for name in ("content-type", "cache-control", "x-accel-buffering", "content-length", "transfer-encoding")
    } == {
        "content-type": "text/event-stream",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "content-length": None,
        "transfer-encoding": "chunked" if version == "HTTP/1.1" else None,
    }
    for other in stock.values():
        with StreamClient(other.port, route, closing, version=version) as client:
            assert timeless(client) == ours


SCRIPTS = {
    "none": ("[]", ""),
    "one": ('["a"]', ""),
    "many": (json.dumps([str(number) for number in range(300)]), ""),
    "ends of lines": (json.dumps(["\n", "\r\n", "\r", "a\rb\nc\r\nd", " ", "", "\u2028"]), ""),
    "cut": ('["a","b"]', "&cut=dead"),
    "large": (json.dumps(["x" * 2000, "y"]), ""),
    "numbered": ('["a","b\\nc"]', "&form=numbered"),
    "numbered, cut": ('["a"]', "&form=numbered&cut=dead"),
    "numbered, broken": ('["a","bad"]', "&form=numbered"),
    "failed at once": ("[]", "&cut=dead"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_way_answers_alike(served: Served, stock: dict[str, Served], script: str) -> None:
    pieces, more = SCRIPTS[script]
    answers = set()
    for server in (served, *stock.values()):
        for way in WAYS:
            for version in ("HTTP/1.1", "HTTP/1.0"):
                path = f"{way}?name={fresh()}&say={quote(pieces)}&end{more}"
                with StreamClient(server.port, path, "Connection: close", version=version) as client:
                    head, body = timeless(client)
                    assert client.whole
                answers.add((head.replace(version.encode(), b"").replace(b"\r\nTransfer-Encoding: chunked", b""), body))
    assert len(answers) == 1, answers


@pytest.mark.parametrize("path", ["/generate", "/events", "/play?name=head", "/flask/play?name=head"])
def test_head_starts_no_task_and_has_the_same_headers(served: Served, path: str) -> None:
    before = json.loads(served.get("/streams"))
    with StreamClient(served.port, path, "Connection: close", method="HEAD") as client:
        head = client.head if client.headers else b""
        assert client.finish() == b""
    assert json.loads(served.get("/streams")) == before
    with StreamClient(served.port, "/generate", "Connection: close") as client:
        client.finish()
    names = [line.split(b":")[0] for line in client.head.split(b"\r\n")]
    assert [line.split(b":")[0] for line in head.split(b"\r\n")] == [n for n in names if n != b"Transfer-Encoding"]


@pytest.mark.parametrize("way", WAYS)
def test_each_piece_comes_before_the_next_is_there(served: Served, stock: dict[str, Served], way: str) -> None:
    for server in (served, stock["gevent"], stock["gthread"]):
        name = fresh()
        with StreamClient(server.port, f"{way}?name={name}") as client:
            for number in range(5):
                until(lambda server=server, name=name: "taken" in state(server, name), "it has begun")  # type: ignore[misc]
                say(server, name, b"%d" % number)
                assert client.until(token(str(number))).endswith(token(str(number)))
            end(server, name)
            client.finish()
            assert (client.whole, client.chunks) == (True, 5)
        until_over(server, name)


@pytest.mark.parametrize("way", WAYS)
def test_a_character_in_pieces_arrives_whole(served: Served, way: str) -> None:
    name = fresh()
    with StreamClient(served.port, f"{way}?name={name}") as client:
        until(lambda: "taken" in state(served, name), "it has begun")
        for piece in (b"\xf0", b"\x9f\x98", b"\x80", b"\xe2\x82"):
            say(served, name, piece)
        client.until(token("\U0001f600"))
        assert state(served, name)["granted"] == 4
        end(served, name)
        assert client.finish() == token("\U0001f600") + token("\ufffd")
        assert client.chunks == 2


def test_a_failure_before_the_first_piece_has_its_status(served: Served) -> None:
    for path, status, body in (
        ("/play?name=refused", 500, b'{"error":"no","code":"MODEL_FAILED"}'),
        (f"/play?name={fresh()}&end&cut=dead", 500, b'{"error":"dead","code":"WORKER_DIED"}'),
    ):
        with StreamClient(served.port, path) as client:
            assert (client.status, client.headers["content-type"]) == (status, "application/json")
            assert client.finish() == body


def test_a_connection_goes_on_after_a_stream(served: Served) -> None:
    with served.connect() as client:
        for _ in range(3):
            client.send(b"GET /generate HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            while not received.endswith(b'"}'):
                received += client.socket.recv(65536)
            stream, _, health = received.partition(b"\r\n0\r\n\r\n")
            assert CONTRACT in stream
            assert health.startswith(b"HTTP/1.1 200 OK\r\n")


def test_the_last_event_id_reaches_the_handler(served: Served) -> None:
    name = fresh()
    with StreamClient(served.port, f"/play?name={name}&form=numbered", "Last-Event-ID: 41") as client:
        until(lambda: "begun" in state(served, name), "it has begun")
        begun = state(served, name)["begun"]
        say(served, name, b"a")
        assert client.until(b"\n\n") == b"id: 1\nretry: 250\ndata: a\n\n"
    assert isinstance(begun, list)
    assert begun[2] == "41"


def test_a_form_that_raises_is_the_trouble_of_its_stream_alone(served: Served) -> None:
    name, other = fresh(), fresh()
    with (
        StreamClient(served.port, f"/play?name={name}&form=numbered&say=[%22a%22]") as client,
        StreamClient(served.port, f"/play?name={other}&say=[%22a%22]") as bystander,
    ):
        client.until(b"data: a\n\n")
        bystander.until(token("a"))
        say(served, name, b"bad")
        assert client.finish().endswith(b'event: error\ndata: {"error":"internal error"}\n\n')
        say(served, other, b"b")
        bystander.until(token("b"))
    assert "ZeroDivisionError" in served.log()
    until_over(served, other)


def test_trouble_that_nobody_foresaw_is_that_of_its_stream_alone(served: Served) -> None:
    for way in WAYS:
        name, other = fresh(), fresh()
        with (
            StreamClient(served.port, f"{way}?name={name}&say=[%22a%22]") as client,
            StreamClient(served.port, f"/play?name={other}&say=[%22a%22]") as bystander,
        ):
            client.until(token("a"))
            bystander.until(token("a"))
            post(served, f"/say?name={name}&broken", b'"b"\n"c"')
            assert client.finish() == token("a")  # nothing follows what was lost
            assert not client.whole  # so that the client knows
            say(served, other, b"b")
            bystander.until(token("b"))
        until_over(served, other)
    assert served.log().count("IndexError") == 2


@pytest.mark.parametrize(("way", "direct"), [("/play", True), ("/flask/play", False)])
def test_express_routes_are_sent_from_the_hub(served: Served, way: str, direct: bool) -> None:
    name = fresh()
    with StreamClient(served.port, f"{way}?name={name}&say=[%22a%22]") as client:
        client.until(token("a"))
        say(served, name, b"b")
        client.until(token("b"))
        assert state(served, name)["direct"] is direct
        end(served, name)
        client.finish()


# However it comes in


def test_a_request_that_gunicorn_reads_is_streamed_alike(served: Served) -> None:
    name = fresh()
    way = f"/play?name={name}&say=[%22a%22]"
    with StreamClient(served.port, way, "Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n") as client:
        client.until(token("a"))
        for piece in (b"b", b"c"):
            say(served, name, piece)
            client.until(token(piece))
        assert client.chunks == 3
        assert state(served, name)["begun"] == ["watched", "no caller", "-"]
        client.socket.close()
        until_over(served, name)


def test_a_unix_socket_is_streamed_to_alike(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with gunicorn(APP, "-b", f"unix:{path}") as served:
        for leave in (leave_by_close, leave_by_half):
            name = fresh()
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
            with StreamClient(sock, f"/play?name={name}&say=[%22a%22]") as client:
                client.until(token("a"))
                say(served, name, b"b")
                client.until(token("b"))
                leave(client)
                until_over(served, name)
        assert "Traceback" not in served.log()


def test_under_tls_it_is_iterated_over_and_the_pools_client_watches() -> None:
    context = ssl.create_default_context(cafile=TLS)
    with (
        gunicorn(APP, env={"HEADRACE_HEARTBEAT": "0.5"}) as control,
        gunicorn(APP, "--certfile", TLS, "--keyfile", TLS, env={"HEADRACE_HEARTBEAT": "0.5"}) as served,
    ):
        path = "/play?name=tls&say=[%22a%22]"
        with (
            StreamClient(control.port, path, "Connection: close") as plain,
            StreamClient(secured(context, served), path, "Connection: close") as client,
        ):
            for each in (plain, client):
                each.until(token("a") + b": ping\n\n")
            post(control, "/end?name=tls&cut=dead")
            with Client(secured(context, served)) as controlling:
                controlling.send(b"POST /end?name=tls&cut=dead HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
                assert controlling.response()[0] == 200
                assert controlling.get("/state?name=tls")[2].count(b'["not watched","caller","-"]') == 1
            (head, body), (secure_head, secure_body) = timeless(plain), timeless(client)
            assert (secure_head, secure_body.replace(b": ping\n\n", b"")) == (head, body.replace(b": ping\n\n", b""))
            assert client.whole


def secured(context: ssl.SSLContext, served: Served) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", served.port), PATIENCE_S)
    return context.wrap_socket(sock, server_hostname="localhost")


# Clients that leave


def leave_by_close(client: StreamClient) -> None:
    client.socket.close()


def leave_by_reset(client: StreamClient) -> None:
    client.reset()


def leave_by_half(client: StreamClient) -> None:
    client.socket.shutdown(socket.SHUT_WR)
    assert client.finish().endswith(b'event: error\ndata: {"error":"the client has left","code":"CANCELLED"}\n\n')


def leave_with_a_request_behind(client: StreamClient) -> None:
    client.socket.sendall(b"GET /health HTTP/1.1\r\n")
    client.socket.close()


LEAVING = {
    "close": leave_by_close,
    "reset": leave_by_reset,
    "half-close": leave_by_half,
    "a request behind": leave_with_a_request_behind,
}


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_is_noticed_at_once(served: Served, way: str, how: str) -> None:
    name = fresh()
    with StreamClient(served.port, f"{way}?name={name}&say=[%22a%22]") as client:
        client.until(token("a"))
        LEAVING[how](client)
        until_over(served, name)
    assert state(served, name)["begun"] == ["watched", "no caller", "-"]


@pytest.mark.parametrize("how", ["close", "reset", "a request behind"])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_before_the_first_piece_is_noticed_at_once(served: Served, way: str, how: str) -> None:
    name = fresh()
    with StreamClient(served.port, f"{way}?name={name}") as client:
        until(lambda: "taken" in state(served, name), "it has begun")
        LEAVING[how](client)
        until_over(served, name)


def test_a_client_that_has_sent_its_next_request_and_stays_is_answered(served: Served) -> None:
    name = fresh()
    with StreamClient(served.port, f"/play?name={name}&say=[%22a%22]") as client:
        client.until(token("a"))
        client.socket.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        say(served, name, b"b")
        client.until(token("b"))
        end(served, name)
        received = b""
        while b'"status":"ok"' not in received:
            received += client.socket.recv(65536)


def test_a_stream_that_a_middleware_replaces_ends_and_the_next_one_is_watched(served: Served) -> None:
    first, second = fresh(), fresh()
    with served.connect() as connection:
        for way in WAYS:
            assert connection.get(f"{way}?name={first}&replaced&say=[%22a%22]")[2] == b"replaced"
            until_over(served, first)
        connection.get(f"/play?name={first}&replaced&say=[%22a%22]")
        with StreamClient(connection.socket, f"/play?name={second}&say=[%22a%22]") as client:
            client.until(token("a"))
            client.reset()
            until_over(served, second)


def test_a_handler_that_makes_no_event_is_interrupted_when_its_client_leaves(served: Served) -> None:
    name = fresh()
    with StreamClient(served.port, f"/generator?name={name}") as client:
        until(lambda: "taken" in state(served, name), "it has begun")
        say(served, name, b"a")
        client.until(b"data: a\n\n")
        client.socket.close()
        until_over(served, name)
    until(lambda: "GET /generator -> 200 aborted" in served.log(), "its line says so")


# Clients that do not read

PIECE = bytes(range(48, 112)) * 128  # 8 KiB


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_never_reads_bounds_its_stream_and_loses_it(impatient: Served, way: str) -> None:
    name, other = fresh(), fresh()
    with (
        StreamClient(impatient.port, f"{way}?name={name}&say=[%22a%22]", window=4096),
        StreamClient(impatient.port, f"/play?name={other}&say=[%22a%22]") as reader,
    ):
        until(lambda: "taken" in state(impatient, name), "it has begun")
        said = 1
        while state(impatient, name)["granted"] == said:
            say(impatient, name, PIECE)
            said += 1
            assert said < 100, "a client that does not read takes without end"
            with contextlib.suppress(AssertionError):
                until(lambda said=said: state(impatient, name)["granted"] == said, "it has been sent", 0.3)  # type: ignore[misc]
        say(impatient, other, b"b")
        reader.until(token("b"))  # and nobody else waits for it
        until(lambda: state(impatient, name)["closed"] is True, "it has lost its stream", 5)
        say(impatient, other, b"c")
        reader.until(token("c"))
    until_over(impatient, other)
    assert "Traceback" not in impatient.log()


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_reads_slowly_gets_all_of_it(impatient: Served, way: str) -> None:
    name = fresh()
    with StreamClient(impatient.port, f"{way}?name={name}&say=[%22a%22]", window=4096) as client:
        until(lambda: "taken" in state(impatient, name), "it has begun")
        expected = token("a")
        for number in range(4):  # each stall is shorter than the deadline, all of them are longer
            pieces = [b"%d.%d" % (number, part) + PIECE for part in range(4)]
            expected += b"".join(map(token, pieces))
            say(impatient, name, *pieces[:3])
            found = state(impatient, name)
            assert found["granted"] != found["taken"]
            say(impatient, name, pieces[3])  # what comes while something waits goes out behind it
            time.sleep(0.4)
            client.until(token(pieces[-1]))
        end(impatient, name)
        assert client.finish().replace(b": ping\n\n", b"") == expected
        assert client.whole
    until_over(impatient, name)


# Silence


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_stream_has_heartbeats(impatient: Served, way: str) -> None:
    name = fresh()
    with StreamClient(impatient.port, f"{way}?name={name}&say=[%22a%22]") as client:
        began = time.monotonic()
        client.until(b": ping\n\n: ping\n\n")
        assert 0.1 <= time.monotonic() - began < 1.5  # two of them, half a second each
        say(impatient, name, b"b")
        end(impatient, name)
        assert client.finish().replace(b": ping\n\n", b"") == token("a") + token("b")
        assert client.whole
    until_over(impatient, name)


# How many


def test_streams_leave_room_for_everything_else() -> None:
    with gunicorn(APP, "--worker-connections", "10") as served, contextlib.ExitStack() as ends:
        opened = []
        for number in range(8):
            way = ("/play", "/flask/play", "/generator")[number % 3]
            opened.append(ends.enter_context(StreamClient(served.port, f"{way}?name={fresh()}&say=[%22a%22]")))
        until(lambda: json.loads(served.get("/streams"))["open"] == 8, "all are open")
        for path in (f"/play?name={fresh()}", f"/flask/play?name={fresh()}", f"/generator?name={fresh()}", "/generate"):
            with StreamClient(served.port, path) as refused:
                assert (refused.status, refused.headers["retry-after"]) == (503, "1")
                assert json.loads(refused.finish())["code"] == "OVERLOADED"
        began = time.monotonic()
        assert b'"status":"ok"' in served.get("/health")
        assert time.monotonic() - began < 0.5
        opened[0].socket.close()
        until(lambda: json.loads(served.get("/streams"))["open"] == 7, "one has gone")
        with StreamClient(served.port, "/generate") as client:
            assert client.finish() == CONTRACT


@pytest.mark.parametrize(("worker", "limit"), [("gthread", 3), ("sync", 1), ("gevent", 40)])
def test_every_worker_has_a_limit_of_its_own_size(stock: dict[str, Served], worker: str, limit: int) -> None:
    if worker == "gevent":
        with gunicorn(APP, *WORKERS[worker], "--worker-connections", "50") as served:
            assert json.loads(served.get("/streams"))["limit"] == limit
    else:
        assert json.loads(stock[worker].get("/streams"))["limit"] == limit


# The end

ENDINGS = ["TERM", "INT", "TERM to the web process", "max_requests"]


@pytest.mark.parametrize("how", ENDINGS)
def test_open_streams_end_in_good_order_when_the_server_does(how: str) -> None:
    flags = ("--max-requests", "14") if how == "max_requests" else ()
    with gunicorn(APP, *flags, "--graceful-timeout", "4") as served, contextlib.ExitStack() as ends:
        clients = {
            name: ends.enter_context(StreamClient(served.port, f"{path}?name={name}&say=[%22a%22]", version=version))
            for name, path, version in (
                ("direct", "/play", "HTTP/1.1"),
                ("old", "/play", "HTTP/1.0"),
                ("flask", "/flask/play", "HTTP/1.1"),
            )
        }
        short = ends.enter_context(StreamClient(served.port, "/play?name=short&say=[%22a%22]"))
        silent = ends.enter_context(StreamClient(served.port, "/play?name=silent"))
        handlers = ends.enter_context(StreamClient(served.port, "/generator?name=handlers"))
        for client in (*clients.values(), short):
            client.until(token("a"))
        until(lambda: "taken" in state(served, "silent") and "taken" in state(served, "handlers"), "they have begun")
        say(served, "handlers", b"a")
        handlers.until(b"data: a\n\n")
        control = ends.enter_context(served.connect())
        control.send(b"POST /end?name=short HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n")
        until(lambda: json.loads(served.get("/streams"))["open"] == 6, "all are open")
        began = time.monotonic()
        if how == "max_requests":
            while children(served.process.pid) and _asked(served):
                pass
        elif how == "TERM to the web process":
            (web,) = children(served.process.pid)
            os.kill(web, signal.SIGTERM)
        else:
            served.signal(signal.Signals[f"SIG{how}"])
        control.send(b"\r\n")
        assert control.response()[0] == 200
        assert (short.finish(), short.whole) == (token("a"), True)  # one that is complete in time
        for client in clients.values():
            assert client.finish() == token("a") + STOPPING
            assert client.whole
        assert (handlers.finish(), handlers.whole) == (b"data: a\n\n" + STOPPING, True)
        assert silent.status == 503
        assert json.loads(silent.finish()) == {"error": "the server is stopping", "code": "DRAINING"}
        assert 1.5 < time.monotonic() - began < 4.0
        if how in ("TERM", "INT"):
            assert served.wait() == 0
        assert "Traceback" not in served.log()


def _asked(served: Served) -> bool:
    """Whether the web process takes another request: one that has had its share says so."""
    with served.connect() as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        return client.response()[1]["connection"] == "keep-alive"


def test_a_second_signal_ends_streams_at_once() -> None:
    with gunicorn(APP) as served, StreamClient(served.port, "/play?name=a&say=[%22a%22]") as client:
        client.until(token("a"))
        began = time.monotonic()

        def ends() -> bool:
            served.signal(signal.SIGTERM)
            return served.process.poll() is not None

        until(ends, "it hurries", 4)
        assert client.finish() == token("a") + STOPPING
        assert served.wait() == 0
        assert time.monotonic() - began < 4


# What is told of it


def test_each_stream_is_one_line_once_it_is_over(served: Served) -> None:
    for way in WAYS:
        complete, left = fresh(), fresh()
        with StreamClient(
            served.port, f"{way}?name={complete}&say=[%22a%22]", f"X-Request-ID: {complete}", "Connection: close"
        ) as client:
            client.until(token("a"))
            assert client.headers["x-request-id"] == complete
            assert complete not in served.log()
            end(served, complete)
            client.finish()
        until(lambda complete=complete: complete in served.log(), "its line")  # type: ignore[misc]
        with StreamClient(served.port, f"{way}?name={left}&say=[%22a%22]", f"X-Request-ID: {left}") as client:
            client.until(token("a"))
        until(lambda left=left: left in served.log(), "its line")  # type: ignore[misc]
        (line,) = [line for line in served.log().splitlines() if line.endswith(complete)]
        assert re.search(rf"GET {way} -> 200 [0-9.]+ ms {complete}$", line)
        (line,) = [line for line in served.log().splitlines() if line.endswith(left)]
        assert re.search(rf"GET {way} -> 200 aborted [0-9.]+ ms {left}$", line)


def test_the_access_log_counts_what_a_stream_has_sent() -> None:
    with gunicorn(APP, "--access-logfile", "-", "--access-logformat", "%(U)s %(s)s %(B)s") as served:
        for _ in range(2):
            with StreamClient(served.port, "/generate", "Connection: close") as client:
                client.finish()
        name = fresh()
        with StreamClient(served.port, f"/play?name={name}&say=[%22a%22]", "Connection: close") as client:
            client.until(token("a"))
            say(served, name, b"b")
            end(served, name)
            client.finish()
        assert served.process.stdout is not None
        served.signal(signal.SIGTERM)
        served.wait()
        lines = served.process.stdout.read().decode().splitlines()
    assert lines.count(f"/generate 200 {len(CONTRACT)}") == 2
    assert f"/play 200 {len(token('a') + token('b'))}" in lines
