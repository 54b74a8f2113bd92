"""Settings of gunicorn keep their meaning: what is logged and counted, what is refused, whom it believes, how long a
connection lasts. Mostly by comparison with gunicorn's own worker."""

from __future__ import annotations

import json
import re
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.beside import OURS, Running, alike, both, environ_of, request, running
from tests.service.serving import PATIENCE_S, until

# Every atom, and of each kind that names something one that is there and one that is not.
ATOMS = (
    *("h", "l", "u", "t", "r", "s", "m", "U", "q", "H", "b", "B", "f", "a", "T", "D", "M", "L", "p"),
    *("{x-tag}i", "{Host}i", "{none}i", "{content-type}o", "{none}o", "{server_name}e", "{wsgi.url_scheme}e"),
)
FORMAT = "|".join(f"%({atom})s" for atom in ATOMS)
OF_THE_MOMENT = {
    "t": r"\[\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\]",
    "T": r"0",
    "D": r"\d{1,6}",
    "M": r"\d{1,3}",
    "L": r"0\.\d{6}",
    "p": r"<\d+>",
}
LOGGED = [
    request("/sentinel"),
    request("/a%20b/%c3%a9?q=1&r=%26", "X-Tag: two words"),
    request("/", line="HEAD {} HTTP/1.1"),
    request("/", "Referer: http://b/?c", "User-Agent: agent/1.0 (x)", "Authorization: Basic dXNlcjpwYXNz"),
    request("/", "Authorization: Basic !"),
    request("/echo", "Content-Length: 4", line="POST {} HTTP/1.1", body=b"body"),
    request("/echo", "Transfer-Encoding: chunked", line="POST {} HTTP/1.1", body=b"4\r\nbody\r\n0\r\n\r\n"),
    request("/", line="GET {} HTTP/1.0", host=""),
    b"GET /sentinel HTTP/1.1\r\nHost: a\r\n\r\n" * 2 + request("/echo"),
    request("/stream"),
    request("/many"),
    request("/big"),
    request("/204"),
    request("/304"),
    request("/status-599"),
    request("/raises"),
    request("/raises-midway"),
    request("/header-crlf"),
    request("/echo", "Transfer-Encoding: chunked", line="POST {} HTTP/1.1", body=b"not hexadecimal\r\n"),
    request("/", "Content-Length: 1", "Content-Length: 2"),
    request("/", line="no request"),
]


# What is logged and counted


def logged(line: str) -> dict[str, str]:
    """What an access log says of a request, but for what is of the moment."""
    fields = dict(zip(ATOMS, line.split("|"), strict=True))
    for atom, pattern in OF_THE_MOMENT.items():
        assert re.fullmatch(pattern, fields.pop(atom)), line
    return fields


def test_the_access_log_says_the_same(tmp_path: Path) -> None:
    files = tmp_path / "ours", tmp_path / "theirs"
    own = [("--access-logfile", str(file)) for file in files]
    with both("--access-logformat", FORMAT, each=own) as pair:
        alike(pair, LOGGED)
    ours, theirs = ([logged(line) for line in file.read_text().splitlines()] for file in files)
    assert ours == theirs
    assert len(ours) == len(LOGGED) + 2 - 1  # one holds three requests, and the last is none
    assert {fields["s"] for fields in ours} >= {"200", "204", "304", "599", "500", "400"}


def is_lean(server: Running) -> bool:
    """Whether a plain request passes gunicorn's parser by."""
    return server.exchange(request("/way")).endswith(b"\r\n\r\nBytesIO")


def test_a_log_file_that_is_moved_away_is_opened_anew_at_usr1(tmp_path: Path) -> None:
    file, moved = tmp_path / "access", tmp_path / "moved"
    with running(OURS, "--access-logfile", str(file), "--access-logformat", "%(U)s") as server:
        server.exchange(request("/before"))
        file.rename(moved)
        server.process.send_signal(signal.SIGUSR1)
        asked = ["/before"]

        def is_reopened() -> bool:
            server.exchange(request(f"/{len(asked)}"))
            asked.append(f"/{len(asked)}")
            return file.exists() and bool(file.read_text())

        until(is_reopened, "a line in the new file")
        server.exchange(request("/after"))
        assert file.read_text().endswith("\n/after\n")
        assert (moved.read_text() + file.read_text()).splitlines() == [*asked, "/after"]


def test_the_access_log_goes_to_standard_output_when_asked_to_and_nowhere_by_default() -> None:
    asked = request("/one?two", "User-Agent: me")
    with running(OURS, "--access-logfile", "-") as server:
        server.exchange(asked)
        default = r'127\.0\.0\.1 - - \[[^]]*\] "GET /one\?two HTTP/1\.1" 200 \d+ "-" "me"'
        assert re.fullmatch(default, server.line())
    with running(OURS) as server:
        assert is_lean(server)
        server.exchange(asked)
        server.process.terminate()
        assert server.line() == ""  # the end


def test_statsd_is_told_the_same() -> None:
    requests = [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + request("/"),
        request("/204"),
        request("/stream"),
        request("/raises"),
    ]
    metrics = 3 * 5
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as theirs,
    ):
        for statsd in (ours, theirs):
            statsd.bind(("127.0.0.1", 0))
            statsd.settimeout(PATIENCE_S)
        own = [("--statsd-host", f"127.0.0.1:{statsd.getsockname()[1]}") for statsd in (ours, theirs)]
        with both("--statsd-prefix", "web", each=own) as pair:
            for server in pair:
                for sent in requests:
                    server.exchange(sent)
            told = [sorted(of_requests(statsd, metrics)) for statsd in (ours, theirs)]
    assert told[0] == told[1]
    assert Counter(told[0])["web.gunicorn.requests:1|c|@1.0"] == 5
    assert "web.gunicorn.request.status.500:1|c|@1.0" in told[0]
    assert "web.gunicorn.request.duration:ms" in told[0]


def of_requests(statsd: socket.socket, count: int) -> Iterator[str]:
    """So many metrics of requests, durations without their number."""
    while count:
        metric = statsd.recv(1024).decode()
        if "gunicorn.request" in metric:
            count -= 1
            yield re.sub(r":\d+\.\d+\|ms$", ":ms", metric)


def test_a_logger_of_ones_own_is_told_of_lean_requests_too() -> None:
    with both("--logger-class", "tests.service.beside.Telling") as pair:
        assert is_lean(pair[0])
        pair[0].line()
        for sent in LOGGED[:-1]:
            told = []
            for server in pair:
                server.exchange(sent)
                told.append([json.loads(server.line()) for _ in range(sent.count(b"HTTP/1."))])
            for said in told[0] + told[1]:
                said["answered"] = [field for field in said["answered"] if field[0] != "Content-Length"]
            assert told[0] == told[1], sent
        assert is_lean(pair[0])
        told = json.loads(pair[0].line())
    assert told == {
        "status": "200 OK",
        "sent": 7,
        "answered": [["Content-Type", "text/plain"], ["Content-Length", "7"]],
        "method": "GET",
        "uri": "/way",
        "path": "/way",
        "query": "",
        "version": [1, 1],
        "headers": [["HOST", "a"], ["CONNECTION", "close"]],
        "environ": ["GET", "/way"],
        "took a time": True,
    }


HOOKS = """
from service.gunicorn_conf import *

def pre_request(worker, req):
    print("before", req.method, req.uri, req.path, req.query, req.version, req.headers, worker.nr, flush=True)

def post_request(worker, req, environ, resp):
    print("after", req.method, environ["PATH_INFO"], resp.status, resp.sent, resp.headers_sent, worker.nr, flush=True)
"""


def test_hooks_see_every_request(tmp_path: Path) -> None:
    config = tmp_path / "gunicorn.conf.py"
    config.write_text(HOOKS)
    with both(config=config) as pair:
        assert not is_lean(pair[0])
        pair[0].line()
        assert pair[0].line().startswith("after GET /way 200 OK 4 True")
        pair[1].exchange(request("/way"))
        pair[1].line()
        pair[1].line()
        for sent in (request("/a?b"), LOGGED[2], LOGGED[5], LOGGED[8], request("/stream"), request("/raises-midway")):
            told = []
            for server in pair:
                server.exchange(sent)
                told.append([re.sub(r"PORT|200 OK \d+", "", server.line()) for _ in range(2 * sent.count(b"HTTP/1."))])
            assert told[0] == told[1]


def test_debugging_logs_every_request() -> None:
    with running(OURS, "--log-level", "debug") as server:
        assert not is_lean(server)
        assert "[DEBUG] GET /way" in server.log()


# What is refused


@pytest.mark.parametrize("fields_limited", [True, False])
def test_limits_are_where_gunicorn_has_them(fields_limited: bool) -> None:
    lines = [request("/" + "x" * size) for size in range(280, 292)]
    fields = [request("/", *(f"X-{number}: 1" for number in range(count))) for count in range(7)]
    sizes = [request("/", "X-A: " + "x" * size) for size in range(50, 62)]
    long_line = request("/" + "x" * 9000)
    if fields_limited:
        flags = "--limit-request-line", "300", "--limit-request-fields", "5"
        requests = [*lines, *fields]
        refusals = {"refused with 414", "refused with 431"}
    else:
        flags = "--limit-request-line", "0", "--limit-request-field_size", "60"
        requests = [long_line, *sizes]
        refusals = {"refused with 431"}
    with both(*flags) as pair:
        said = alike(pair, requests)
        assert refusals <= set(said)
        assert not all(answer.startswith("refused") for answer in said)
        assert is_lean(pair[0]) or not fields_limited


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


@pytest.mark.parametrize(
    ("allowed", "own", "scheme"),
    [
        ("10.0.0.1", False, "http"),
        ("*", False, "https"),
        ("127.0.0.0/8", True, "https"),
    ],
)
def test_a_proxy_is_believed_where_it_is_allowed(tmp_path: Path, allowed: str, own: bool, scheme: str) -> None:
    config = tmp_path / "gunicorn.conf.py"
    config.write_text(OWN_SCHEMES)
    with both("--forwarded-allow-ips", allowed, config=config if own else None) as pair:
        said = alike(pair, SCHEMES)
        assert is_lean(pair[0])
    assert environ_of(said[0])["wsgi.url_scheme"] == "http"
    assert environ_of(said[1])["wsgi.url_scheme"] == scheme
    assert ("refused with 400" in said) == (scheme == "https")


@pytest.mark.parametrize(
    "flags",
    [
        ("--header-map", "drop", "--forwarder-headers", "SCRIPT_NAME"),
        ("--header-map", "refuse", "--forwarder-headers", "X_USER"),
        ("--header-map", "dangerous"),
    ],
)
def test_names_with_an_underscore_are_treated_as_is_set(flags: tuple[str, ...]) -> None:
    names = ("X_User: a", "X-User: a|X_User: b", "SCRIPT_NAME: /a", "Script_Name: /b", "X-User: a")
    with both(*flags) as pair:
        said = alike(pair, [request("/a/c", *fields.split("|")) for fields in names])
    assert environ_of(said[-1])["HTTP_X_USER"] == "a"


def test_a_script_name_of_the_process_is_cut_off_the_path() -> None:
    with both("--env", "SCRIPT_NAME=/app") as pair:
        said = alike(pair, [request(target) for target in ("/app", "/app/a%20b?c", "/other", "/application")])
    assert environ_of(said[1])["SCRIPT_NAME"] == "/app"
    assert environ_of(said[1])["PATH_INFO"] == "/a b"
    assert said[2] == "refused with 500"


# How long it lasts


def test_the_environment_that_is_set_is_there_for_the_application_and_for_us() -> None:
    with running(OURS, "--env", "A_SETTING=of ours", "--env", "HEADRACE_HEADER_TIMEOUT=0.5") as server:
        assert server.exchange(request("/setting")).endswith(b"\r\n\r\nof ours")
        started = time.monotonic()
        with server.connect() as silent:
            assert silent.rest() == b""
        assert time.monotonic() - started < PATIENCE_S / 2


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_connection_is_kept_for_as_long_as_is_set(seconds: int) -> None:
    with both("--keep-alive", str(seconds)) as pair, pair[0].connect() as ours, pair[1].connect() as theirs:
        for client in (ours, theirs):
            _, headers, _ = client.get("/")
            if seconds:
                _, headers, _ = client.get("/")
            assert headers["connection"] == ("keep-alive" if seconds else "close")
        started = time.monotonic()
        for client in (ours, theirs):
            assert client.rest() == b""
            assert seconds * 0.8 < time.monotonic() - started < seconds + 2


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
