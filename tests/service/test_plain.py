"""Plain requests: what is taken reads as gunicorn's own parser would have read it, whatever a client sends."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from gunicorn.config import Config
from gunicorn.http import wsgi
from gunicorn.http.errors import ParseException
from gunicorn.http.parser import RequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

from service.config import Settings
from service.connection import Reader
from service.environ import WATCH_KEY
from service.lean import Lean, may_be_lean
from service.plain import HeadReader
from tests.lengths import FUZZ_EXAMPLES

TCP = ("127.0.0.1", 8080), ("127.0.0.1", 54321)
STRANGER = ("127.0.0.1", 8080), ("192.0.2.7", 54321)
UNIX = "/run/headrace.sock", ""
PATHLY_UNIX = "/run/a:b.sock", ""
IPV6 = ("::1", 8080, 0, 0), ("::1", 54321, 0, 0)
ENDS = [TCP, STRANGER, UNIX, PATHLY_UNIX, IPV6]

CURL = (
    b"POST /score HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\nContent-Length: 22\r\n"
)
BROWSER = (
    b"GET /models/score?x=1&y=%20 HTTP/1.1\r\nHost: api.example.com\r\nConnection: keep-alive\r\n"
    b'sec-ch-ua: "Chromium";v="156", "Not.A/Brand";v="99"\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n'
    b"Accept: text/html,application/xhtml+xml;q=0.9,*/*;q=0.8\r\nAccept-Encoding: gzip, deflate, br, zstd\r\n"
    b"Cookie: a=b; c=d\r\n"
)
PROXIED = (
    b"POST /score HTTP/1.0\r\nHost: upstream\r\nX-Forwarded-For: 203.0.113.9, 10.0.0.1\r\nX-Forwarded-Proto: https\r\n"
    b"X-Request-ID: 0af7651916cd43dd8448eb211c80319c\r\nConnection: close\r\nContent-Length: 2\r\n"
)
OBS_TEXT = b"GET / HTTP/1.1\r\nHost: a\r\nX-Name: \t J\xf6rg \xe2\x82\xac \t\r\n"
PLAIN = [CURL, BROWSER, PROXIED, OBS_TEXT, b"GET / HTTP/1.0\r\n", b"GET /%2F%00%FF?a?b HTTP/1.1\r\nHost:a\r\n"]

NOT_PLAIN = {
    "chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n",
    "expects": b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n",
    "upgrade": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
    "absolute target": b"GET http://a/x HTTP/1.1\r\nHost: a\r\n",
    "two slashes": b"GET //x HTTP/1.1\r\nHost: a\r\n",
    "fragment": b"GET /x#y HTTP/1.1\r\nHost: a\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n",
    "rare method": b"TRACE / HTTP/1.1\r\nHost: a\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: a\r\n",
    "another version": b"GET / HTTP/1.2\r\nHost: a\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n",
    "a repeated field": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nx-a: 2\r\n",
    "an underscore": b"GET / HTTP/1.1\r\nHost: a\r\nContent_Length: 1\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n",
    "a signed length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n",
    "a superscript length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2\r\n",
    "a huge length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999999999999\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n 2\r\n",
    "a bare line feed": b"GET / HTTP/1.1\r\nHost: a\nX-A: 1\r\n",
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: a\rX-A: 1\r\n",
    "a NUL": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: \0\r\n",
    "a DEL": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: \x7f\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : a\r\n",
    "no name": b"GET / HTTP/1.1\r\n: a\r\n",
    "no colon": b"GET / HTTP/1.1\r\nHost\r\n",
    "an empty line first": b"\r\nGET / HTTP/1.1\r\nHost: a\r\n",
    "contradicting proxies": b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Ssl: off\r\n",
    "too many fields": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(101)),
    "too long a line": b"GET /" + b"x" * 8190 + b" HTTP/1.1\r\nHost: a\r\n",
}

NEVER_EQUAL = ("wsgi.input", "wsgi.errors", "wsgi.early_hints", WATCH_KEY)


@pytest.fixture(scope="module")
def sock() -> Iterator[socket.socket]:
    near, far = socket.socketpair()
    far.close()  # nothing comes but what a test puts there
    with near:
        yield near


def reader_of(sock: socket.socket, data: bytes) -> Reader:
    reader = Reader(sock, Settings(), 75)
    reader.unread(data)
    return reader


def lean(sock: socket.socket, cfg: Config, ends: Any, data: bytes) -> tuple[dict[str, Any], bool, bytes] | None:
    """The environ, whether the connection ends after it, and what is left to read."""
    server, peer = ends
    reader = reader_of(sock, data)
    side = Lean(HeadReader(cfg), reader, wsgi.base_environ(cfg), cfg, server, peer)
    found = side.next()
    if found is None:
        assert reader.take_buffered() == data, "what is not plain is put back as it came"
        return None
    request, environ = found
    reader.put_back(b"")
    environ = {key: value for key, value in environ.items() if key not in NEVER_EQUAL}
    return environ, request.should_close(), reader.take_buffered()


def gunicorns(sock: socket.socket, cfg: Config, ends: Any, data: bytes) -> tuple[dict[str, Any], bool, bytes]:
    server, peer = ends
    parser = RequestParser(cfg, sock, peer)
    parser.unreader = reader = reader_of(sock, data)
    request = next(parser)
    _, environ = wsgi.create(request, sock, peer, server, cfg)
    left = {key: value for key, value in environ.items() if key not in NEVER_EQUAL}
    return left, request.should_close(), reader.take_buffered()


@pytest.mark.parametrize("ends", ENDS, ids=["tcp", "a stranger", "unix", "a unix path with a colon", "ipv6"])
@pytest.mark.parametrize("head", PLAIN)
def test_plain_requests_are_taken_and_read_as_gunicorn_reads_them(sock: socket.socket, ends: Any, head: bytes) -> None:
    taken = lean(sock, Config(), ends, head + b"\r\nbody")
    assert taken is not None
    assert taken == gunicorns(sock, Config(), ends, head + b"\r\nbody")


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_whatever_is_unusual_is_left_to_gunicorn(sock: socket.socket, name: str) -> None:
    assert lean(sock, Config(), TCP, NOT_PLAIN[name] + b"\r\n") is None


def test_the_limits_are_those_of_the_configuration(sock: socket.socket) -> None:
    cfg = Config()
    cfg.set("limit_request_line", 40)
    assert lean(sock, cfg, TCP, b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 10)) is not None
    assert lean(sock, cfg, TCP, b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 40)) is None
    cfg = Config()
    cfg.set("limit_request_fields", 1)
    assert lean(sock, cfg, TCP, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") is not None
    assert lean(sock, cfg, TCP, b"GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n\r\n") is None


def test_settings_that_ask_for_more_leave_every_request_to_gunicorn() -> None:
    class Log:
        class error_log:
            @staticmethod
            def isEnabledFor(level: int) -> bool:
                return False

    assert may_be_lean(Config(), Log)
    for name, value in {
        "proxy_protocol": "auto",
        "certfile": __file__,
        "pre_request": lambda worker, req: None,
        "post_request": lambda worker, req: None,
    }.items():
        cfg = Config()
        cfg.set(name, value)
        assert not may_be_lean(cfg, Log), name


# What a mutation may put anywhere: what parsers disagree about.
SCRAPS = [
    *(bytes([b]) for b in b"\0\t\n\r !\"#%&'()*+,-./:;<=>?@[\\]_`{|}~\x7f\x80\xb2\xff019AZaz"),
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"\n\n",
        b"\r\n ",
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"http/1.1",
        b"//",
        b"://",
        b"%",
        b"%2",
        b"%zz",
    ),
    *(b"Host: b\r\n", b"Content-Length: 4\r\n", b"content-length: 04\r\n", b"Connection: close\r\n"),
    *(b"Connection: keep-alive, close\r\n", b"Transfer-Encoding: chunked\r\n", b"X_A: 1\r\n", b"Expect: x\r\n"),
    *(b"X-Forwarded-Proto: https\r\n", b"X-Forwarded-Ssl: on\r\n", b"Content-Type: a\r\n", b"Content-Type:\r\n"),
]


def mutated(head: bytes, seed: int, count: int) -> bytes:
    dice = random.Random(seed)
    for _ in range(count):
        at = dice.randrange(len(head) + 1)
        step = dice.randrange(4)
        scrap = dice.choice(SCRAPS)
        if step == 0:
            head = head[:at] + scrap + head[at:]
        elif step == 1:
            head = head[:at] + head[at + dice.randrange(1, 4) :]
        elif step == 2:
            head = head[:at] + scrap + head[at + len(scrap) :]
        else:
            lines = head.split(b"\r\n")
            lines.insert(dice.randrange(len(lines)), dice.choice(lines))
            head = b"\r\n".join(lines)
    return head


@settings(max_examples=FUZZ_EXAMPLES, deadline=None)
@given(st.sampled_from([*PLAIN, *NOT_PLAIN.values()]), st.integers(0, 2**32), st.integers(1, 4), st.sampled_from(ENDS))
def test_what_is_taken_of_broken_requests_gunicorn_reads_alike(
    sock: socket.socket, head: bytes, seed: int, count: int, ends: Any
) -> None:
    data = mutated(head + b"\r\n", seed, count)
    taken = lean(sock, Config(), ends, data)
    if taken is not None:
        try:
            expected = gunicorns(sock, Config(), ends, data)
        except (ParseException, StopIteration) as error:
            raise AssertionError(f"gunicorn refuses {data!r}: {error}") from error
        assert taken == expected, data
