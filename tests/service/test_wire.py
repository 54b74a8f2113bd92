"""HTTP as clients really send it, to real gunicorn: limits, deadlines, malformed messages, JSON for each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.apps import RAISED
from tests.service.serving import Served, body_of, gunicorn, until

LIMITS = {
    "HEADRACE_BODY_LIMIT": "1000",
    "HEADRACE_BODY_TIMEOUT": "0.6",
    "HEADRACE_HEADER_TIMEOUT": "0.6",
    "HEADRACE_SEND_TIMEOUT": "0.6",
}
GET = b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gunicorn(env=LIMITS) as served:
        yield served


def post(path: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode() + body


def chunked(body: bytes, path: str = "/echo") -> bytes:
    return post(path, "Transfer-Encoding: chunked", body=body)


def closed_with(response: bytes, status: int) -> str:
    """The reason of an error response that ends its connection."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), response
    assert b"Connection: close" in head
    assert b"Content-Type: application/json" in head
    reason = json.loads(body)["error"]  # one response and nothing behind it
    assert isinstance(reason, str)
    return reason


ECHOES = pytest.mark.parametrize("path", ["/echo", "/flask/echo"])


@ECHOES
def test_declared_bodies_up_to_the_limit_come_back_whole(served: Served, path: str) -> None:
    with served.connect() as client:
        for size in (0, 1, 1000):
            body = b"\0" * size
            client.send(post(path, f"Content-Length: {size}", body=body))
            assert client.response()[::2] == (200, body)


@ECHOES
def test_chunked_bodies_up_to_the_limit_come_back_whole(served: Served, path: str) -> None:
    with served.connect() as client:
        for size in (1, 500, 1000):
            client.send(chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size), path))
            assert client.response()[::2] == (200, b"x" * size)


@ECHOES
@pytest.mark.parametrize("size", [1001, 200_000, 5_000_000])
def test_a_declared_body_over_the_limit_is_413_and_the_client_can_read_it(served: Served, size: int, path: str) -> None:
    response = served.exchange(post(path, f"Content-Length: {size}", body=b"x" * size))
    assert closed_with(response, 413) == "the body is larger than 1000 bytes"


@ECHOES
@pytest.mark.parametrize("size", [1001, 200_000, 5_000_000])
def test_a_chunked_body_over_the_limit_is_413_and_not_cut(served: Served, size: int, path: str) -> None:
    response = served.exchange(chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size), path))
    assert closed_with(response, 413) == "the body is larger than 1000 bytes"


@pytest.mark.parametrize(
    "body",
    [
        b"2\r\n{}XX0\r\n\r\n",
        b"-1\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5 ;a b\r\nhello\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFFFFZ\r\n",
        b"\r\n\r\n",
        b"0\r\nContent-Length: 3\r\n\r\n",
        b"0\r\nHost: b\r\n\r\n",
        b"5" * 20_000,
    ],
)
def test_a_malformed_chunk_is_400_and_the_end_of_the_connection(served: Served, body: bytes) -> None:
    assert closed_with(served.exchange(chunked(body)), 400) == "malformed chunked body"


@ECHOES
def test_a_body_that_ends_too_soon_is_not_handed_on(served: Served, path: str) -> None:
    for request in (post(path, "Content-Length: 10", body=b"12345"), chunked(b"a\r\n12345", path)):
        with served.connect() as client:
            client.send(request)
            client.socket.shutdown(1)
            assert closed_with(client.rest(), 400) == "the body ended too soon"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
        b"Transfer-Encoding: \x0bchunked\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n12345",
        b"Content-Length: +5\r\n\r\n12345",
        b"Content-Length: 5,5\r\n\r\n12345",
        b"No colon\r\n\r\n",
    ],
)
def test_an_ambiguous_or_malformed_head_is_400_and_nothing_after_it_is_a_request(served: Served, head: bytes) -> None:
    request = b"POST /echo HTTP/1.1\r\nHost: a\r\n" + head + b"GET /pid HTTP/1.1\r\nHost: a\r\n\r\n"
    assert closed_with(served.exchange(request), 400) == "malformed request"


@pytest.mark.parametrize(
    ("request_bytes", "status", "reason"),
    [
        (b"nonsense\r\n\r\n", 400, "malformed request line"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "unsupported HTTP version"),
        (b"get / HTTP/1.1\r\n\r\n", 400, "malformed method"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414, "request line too long"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 9000 + b"\r\n\r\n", 431, "request headers too large"),
        (b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 101 + b"\r\n", 431, "request headers too large"),
        (b"GET / HTTP/1.1\r\nExpect: 200-ok\r\n\r\n", 417, "expectation failed"),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: magic\r\n\r\n", 501, "unsupported transfer coding"),
    ],
)
def test_what_gunicorn_refuses_is_json_too(served: Served, request_bytes: bytes, status: int, reason: str) -> None:
    assert closed_with(served.exchange(request_bytes), status) == reason


def test_a_too_large_body_is_refused_before_100_continue(served: Served) -> None:
    request = post("/echo", "Content-Length: 999999999999", "Expect: 100-continue")
    assert closed_with(served.exchange(request), 413)


def test_100_continue_is_sent_once_when_the_body_is_wanted(served: Served) -> None:
    with served.connect() as client:
        client.send(post("/echo", "Content-Length: 2", "Expect: 100-continue"))
        assert client.response()[0] == 100
        client.send(b"ok")
        assert client.response()[::2] == (200, b"ok")
        # Whoever sends the body at once needs no word.
        client.send(post("/echo", "Content-Length: 2", "Expect: 100-continue", body=b"ok"))
        assert client.response()[::2] == (200, b"ok")


def test_a_handler_that_does_not_want_the_body_ends_the_expectation_and_the_connection(served: Served) -> None:
    response = served.exchange(post("/unread", "Content-Length: 2", "Expect: 100-continue"))
    assert response.startswith(b"HTTP/1.1 200 ")
    assert b"Connection: close" in response


def test_a_client_of_http_1_0_gets_no_100(served: Served) -> None:
    request = b"POST /echo HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok"
    assert body_of(served.exchange(request)) == b"ok"


def test_an_unread_small_body_leaves_the_connection_usable(served: Served) -> None:
    with served.connect() as client:
        client.send(post("/unread", "Content-Length: 5", body=b"12345"))
        assert client.response()[2] == b"unread"
        assert client.get("/pid")[0] == 200


def test_an_unread_large_body_ends_the_connection_and_the_answer_arrives(served: Served) -> None:
    response = served.exchange(post("/unread", "Content-Length: 3000000", body=b"x" * 3_000_000))
    assert b"Connection: close" in response
    assert body_of(response) == b"unread"


def test_slow_heads_are_closed_however_they_trickle(served: Served) -> None:
    for pause in (0.05, 10.0):
        with served.connect() as client:
            started = time.monotonic()
            client.send(b"GET /pid HTTP/1.1\r\n")
            client.socket.settimeout(pause)
            while time.monotonic() - started < 5:
                try:
                    response = client.rest()
                    break
                except TimeoutError:
                    client.send(b"X")
            assert 0.4 < time.monotonic() - started < 3
            assert closed_with(response, 408) == "the request came too slowly"


@ECHOES
def test_slow_bodies_are_408_however_they_trickle(served: Served, path: str) -> None:
    for pause in (0.05, 10.0):
        for request, piece in ((post(path, "Content-Length: 900"), b"x"), (chunked(b"", path), b"1\r\nx\r\n")):
            with served.connect() as client:
                started = time.monotonic()
                client.send(request)
                client.socket.settimeout(pause)
                while time.monotonic() - started < 5:
                    try:
                        response = client.rest()
                        break
                    except TimeoutError:
                        client.send(piece)
                assert 0.4 < time.monotonic() - started < 3
                assert closed_with(response, 408) == "the body came too slowly"


def test_a_body_that_came_while_the_handler_was_busy_is_not_slow(served: Served) -> None:
    with served.connect() as client:
        client.send(post("/late?s=1.0", "Content-Length: 4"))
        time.sleep(0.1)  # so that it comes behind the head, and is not read with it
        client.send(b"body")
        assert client.response()[::2] == (200, b"body")


def test_a_new_connection_that_says_nothing_is_closed_as_a_slow_head_is(served: Served) -> None:
    started = time.monotonic()
    with served.connect() as client:
        assert client.rest() == b""
    assert 0.4 < time.monotonic() - started < 3


@pytest.mark.parametrize("rest", [b"Z\r\n", b"1\r\nxZZ", b"5\r\nhel"])
def test_nothing_follows_an_answer_whatever_is_wrong_with_the_rest_of_the_body(served: Served, rest: bytes) -> None:
    with served.connect() as client:
        client.send(chunked(b"", "/unread"))
        assert client.response()[2] == b"unread"
        client.send(rest)
        client.socket.shutdown(1)
        assert client.rest() == b""


def test_a_hook_that_fails_after_the_answer_adds_nothing_to_it(tmp_path: Path) -> None:
    conf = tmp_path / "conf.py"
    conf.write_text(
        "from service.gunicorn_conf import *\n\n\n"
        "def post_request(worker, req, environ, resp):\n    raise OSError('the hook')\n"
    )
    with gunicorn("tests.service.apps:server", "-c", str(conf)) as served, served.connect() as client:
        for _ in range(2):
            assert client.get("/pid")[0] == 200
        client.socket.shutdown(1)
        assert client.rest() == b""
        assert "the hook" in served.log()


def test_the_rest_of_a_body_nobody_reads_is_waited_for_briefly() -> None:
    with gunicorn() as served, served.connect() as client:
        client.send(post("/unread", "Content-Length: 1000"))
        assert client.response()[2] == b"unread"
        started = time.monotonic()
        client.socket.settimeout(0.05)
        while time.monotonic() - started < 5:
            try:
                assert client.rest() == b""
                break
            except TimeoutError:
                client.send(b"x")
            except ConnectionResetError:
                break
        assert 0.5 < time.monotonic() - started < 4


def test_a_silent_connection_between_requests_is_not_a_slow_head(served: Served) -> None:
    with served.connect() as client:
        assert client.get("/pid")[0] == 200
        time.sleep(1.0)  # longer than the header timeout: nothing to wait for, silence is what is tested
        assert client.get("/pid")[0] == 200


def test_a_client_that_does_not_read_loses_its_connection(served: Served) -> None:
    with served.connect() as client:
        client.socket.setsockopt(1, 8, 4096)
        client.send(b"GET /large?n=50000000 HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: "GET /large -> 200 aborted" in served.log(), "the server gives up")


@pytest.mark.parametrize("target", ["//{}", "///{}", "/%2F{}", "%2F{}", "{}", "http://a//{}"])
@pytest.mark.parametrize("path", ["guarded", "guarded/flask", "pid"])
def test_a_path_with_more_or_fewer_slashes_is_another_path(served: Served, target: str, path: str) -> None:
    assert served.exchange(GET % b"/guarded").startswith(b"HTTP/1.1 403 ")
    answer = served.exchange(GET % target.format(path).encode())
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), answer


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    with served.connect() as client:
        client.send(b"".join(post("/echo", "Content-Length: 1", body=b"%d" % n) for n in range(5)))
        assert [client.response()[2] for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


def test_head_leaves_no_bytes_on_the_connection(served: Served) -> None:
    with served.connect() as client:
        for path in ("/pid", "/nope", "/stream", "/echo"):
            client.send(f"HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\nGET /pid HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            while b"\r\n\r\n" not in client._unread:
                client._unread += client.socket.recv(65536)
            client._unread = client._unread.partition(b"\r\n\r\n")[2]
            status, _, body = client.response()
            assert (status, b"pid" in body) == (200, True)


def test_a_stream_is_chunked_and_a_broken_one_has_no_end(served: Served) -> None:
    request = b"GET /%b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert body_of(served.exchange(request % b"stream")) == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"
    assert body_of(served.exchange(request % b"breaks")) == b"5\r\nfirst\r\n"


@pytest.mark.parametrize("path", ["/raises", "/raises-late"])
@pytest.mark.parametrize("what", RAISED)
def test_whatever_an_application_raises_is_500_and_logged_and_the_worker_lives(
    served: Served, path: str, what: str
) -> None:
    pid, before = served.get("/pid"), len(served.log())
    target = f"{path}?what={what}".encode()
    answer = served.exchange(GET % target)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert json.loads(body_of(answer)) == {"error": "internal error"}
    assert served.get("/pid") == pid
    log = served.log()[before:]
    assert log.count(f"GET {path} -> ") == 1
    assert type(RAISED[what]).__name__ in log


def test_a_header_that_cannot_be_sent_is_500_with_a_line_in_the_log(served: Served) -> None:
    assert closed_with(served.exchange(b"GET /bad-header HTTP/1.1\r\nHost: a\r\n\r\n"), 500) == "internal error"
    until(lambda: "GET /bad-header -> - aborted " in served.log(), "the line is there")


def test_no_header_changes_the_path(served: Served) -> None:
    for value in (b"/x", b"/pi"):
        with served.connect() as client:
            client.send(b"GET /pid HTTP/1.1\r\nHost: a\r\nSCRIPT_NAME: %b\r\nPATH_INFO: /x\r\n\r\n" % value)
            assert client.response()[0] == 200


def test_clients_mistakes_leave_no_traceback(served: Served) -> None:
    served.exchange(b"nonsense\r\n\r\n")
    served.exchange(chunked(b"Z\r\n"))
    tail = served.log().rsplit("400 malformed request line", 1)[1]
    until(lambda: "POST /echo -> 400 " in served.log().rsplit("400 malformed request line", 1)[1], "the line is there")
    assert "Traceback" not in tail
