"""Settings of gunicorn keep their meaning: what is refused, whom it believes, how long a connection and a web process
last. Mostly by comparison with gunicorn's own worker."""

from __future__ import annotations

import select
import threading
import time
from pathlib import Path

import pytest

from tests.service.beside import OURS, alike, both, environ_of, is_lean, request, running
from tests.service.serving import PATIENCE_S

# What is refused


def test_limits_are_where_gunicorn_has_them() -> None:
    flags = "--limit-request-line", "300", "--limit-request-fields", "5", "--limit-request-field_size", "250"
    lines = [request("/" + "x" * size) for size in range(280, 292)]
    fields = [request("/", *(f"X-{number}: 1" for number in range(count))) for count in range(7)]
    sizes = [request("/", "X-A: " + "x" * size) for size in range(238, 252)]
    with both(*flags) as pair:
        assert is_lean(pair[0])
        for requests, refusal in ((lines, "414"), (fields, "431"), (sizes, "431")):
            said = alike(pair, requests)
            assert said[-1] == f"refused with {refusal}"
            assert said[0].startswith("HTTP/1.1 200 ")


# Who is believed

SCHEMES = [
    request("/"),
    *(
        request("/", *fields.split("|"))
        for fields in (
            "X-Forwarded-Proto: https",
            "X-Forwarded-Proto: http",
            "X-Forwarded-Proto: HTTPS",
            "x-forwarded-proto:https ",
            "X-Forwarded-Protocol: ssl",
            "X-Forwarded-Protocol: https",
            "X-Forwarded-Ssl: on",
            "X-Forwarded-Ssl: off",
            "X-Forwarded-Proto: https|X-Forwarded-Ssl: on",
            "X-Forwarded-Proto: https|X-Forwarded-Ssl: off",
            "X-Forwarded-Proto: http|X-Forwarded-Protocol: ssl",
            "X-Forwarded-Proto: https|X-Forwarded-Proto: https",
            "X-Forwarded-Proto: https|X-Forwarded-Proto: http",
            "X-Forwarded-Proto: https, http",
            "X-Tls: yes",
            "X-Tls: no",
            "X-Tls: yes|X-Forwarded-Proto: http",
            "X-Forwarded-For: 10.1.2.3",
            "Forwarded: proto=https",
        )
    ),
]
OWN_SCHEMES = """
from service.gunicorn_conf import *
secure_scheme_headers = {"X-TLS": "yes", "X-FORWARDED-PROTO": "https"}
"""


UNDERSCORES = [
    request("/a/c", *fields.split("|"))
    for fields in ("X_User: a", "X-User: a|X_User: b", "SCRIPT_NAME: /a", "Script_Name: /b", "X-User: a")
]


@pytest.mark.parametrize(("allowed", "scheme", "refused"), [("10.0.0.1", "http", 4), ("*", "https", 2)])
def test_a_proxy_is_believed_where_it_is_allowed(tmp_path: Path, allowed: str, scheme: str, refused: int) -> None:
    config = tmp_path / "gunicorn.conf.py"
    config.write_text(OWN_SCHEMES)
    names = "--header-map", "refuse", "--forwarder-headers", "X_USER"
    with both("--forwarded-allow-ips", allowed, *names, config=config) as pair:
        said = alike(pair, SCHEMES)
        named = alike(pair, UNDERSCORES)
        assert is_lean(pair[0])
    assert environ_of(said[0])["wsgi.url_scheme"] == "http"
    assert environ_of(said[1])["wsgi.url_scheme"] == scheme
    assert ("refused with 400" in said) == (scheme == "https")
    assert named.count("refused with 400") == refused
    assert environ_of(named[-1])["HTTP_X_USER"] == "a"


def test_the_environment_that_is_set_is_there_for_the_application_for_gunicorn_and_for_us() -> None:
    variables = "SCRIPT_NAME=/app", "A_SETTING=of ours", "HEADRACE_HEADER_TIMEOUT=0.5"
    targets = "/app", "/app/a%20b?c", "/other", "/application", "/app/setting"
    with both(*(flag for variable in variables for flag in ("--env", variable))) as pair:
        said = alike(pair, map(request, targets))
        with pair[0].connect() as silent:
            started = time.monotonic()
            assert silent.rest() == b""
            assert time.monotonic() - started < PATIENCE_S / 2
    environ = environ_of(said[1])
    assert (environ["SCRIPT_NAME"], environ["PATH_INFO"]) == ("/app", "/a b")
    assert said[2] == "refused with 500"
    assert said[4].endswith("\r\n\r\nof ours")


# How long it lasts


def test_a_connection_is_kept_for_as_long_as_is_set() -> None:
    with running(OURS, "--keep-alive", "1") as server, server.connect() as client:
        assert [client.get("/")[1]["connection"] for _ in range(2)] == ["keep-alive"] * 2
        started = time.monotonic()
        assert client.rest() == b""
        assert 0.8 < time.monotonic() - started < 5


def test_no_connection_is_kept_when_that_is_set() -> None:
    with running(OURS, "--keep-alive", "0") as server:
        assert is_lean(server)
        for body in ("Content-Length: 0\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
            with server.connect() as client:
                client.send(f"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n{body}".encode())
                assert client.response()[1]["connection"] == "close"
                assert client.rest() == b""


def test_web_processes_that_are_replaced_lose_no_request() -> None:
    pids: set[bytes] = set()
    until_s = time.monotonic() + PATIENCE_S
    lost = []

    def ask() -> None:
        while len(pids) < 4 and time.monotonic() < until_s:
            with server.connect() as client:
                headers = {"connection": "keep-alive"}
                while headers["connection"] != "close":
                    status, headers, body = client.get("/pid")
                    if status != 200:
                        lost.append(status)
                        return
                    pids.add(body)

    with running(OURS, "--max-requests", "5", "--max-requests-jitter", "3", workers=2) as server:
        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert not lost
        assert len(pids) >= 4


def test_a_connection_too_many_is_served_when_another_has_left() -> None:
    with (
        running(OURS, "--worker-connections", "2") as server,
        server.connect() as first,
        server.connect() as second,
        server.connect() as third,
    ):
        assert [client.get("/")[0] for client in (first, second)] == [200, 200]
        third.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert not select.select([third.socket], [], [], 0.3)[0]
        assert second.get("/")[0] == 200
        first.socket.close()
        assert third.response()[0] == 200
        assert second.get("/")[0] == 200


def test_a_web_process_that_hangs_is_replaced_after_the_timeout() -> None:
    with running(OURS, "--timeout", "2") as server:
        pid = server.exchange(request("/pid"))
        started = time.monotonic()
        assert server.exchange(request("/stall")).startswith(b"HTTP/1.1 500 ")
        assert time.monotonic() - started < 10
        assert server.exchange(request("/pid")) != pid
        assert "TIMEOUT" in server.log()
