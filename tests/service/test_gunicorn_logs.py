"""What gunicorn's settings ask to be logged and counted, and the hooks of a configuration file: our worker tells as
much as gunicorn's own, of lean requests too."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.beside import OURS, alike, both, is_lean, request, running
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


def logged(line: str) -> dict[str, str]:
    """What an access log says of a request, but for what is of the moment."""
    fields = dict(zip(ATOMS, line.split("|"), strict=True))
    for atom, pattern in OF_THE_MOMENT.items():
        assert re.fullmatch(pattern, fields.pop(atom)), line
    return fields


def test_the_access_log_and_statsd_are_told_the_same(tmp_path: Path) -> None:
    files = tmp_path / "ours", tmp_path / "theirs"
    with udp() as ours, udp() as theirs:
        own = [
            ("--access-logfile", str(file), "--statsd-host", f"127.0.0.1:{statsd.getsockname()[1]}")
            for file, statsd in zip(files, (ours, theirs), strict=True)
        ]
        with both("--access-logformat", FORMAT, "--statsd-prefix", "web", each=own) as pair:
            alike(pair, LOGGED)
        lines = [[logged(line) for line in file.read_text().splitlines()] for file in files]
        metrics = [sorted(of_requests(statsd, 3 * len(lines[0]) + 6)) for statsd in (ours, theirs)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == len(LOGGED) + 2 - 1  # one holds three requests, and the last is none
    assert {fields["s"] for fields in lines[0]} == {"200", "204", "304", "599", "500", "400"}
    assert metrics[0] == metrics[1]
    counts = Counter(metrics[0])
    assert counts["web.gunicorn.requests:1|c|@1.0"] == counts["web.gunicorn.request.duration:ms"] == len(lines[0])
    assert counts["web.gunicorn.request.status.500:1|c|@1.0"] == 2
    assert counts["web.gunicorn.log.exception:1|c|@1.0"] == counts["web.gunicorn.log.warning:1|c|@1.0"] == 3


IN_ITS_OWN_HANDS = """
from service import gunicorn_conf
from service.gunicorn_conf import *

def worker_exit(server, worker):
    gunicorn_conf.worker_exit(server, worker)
    print("untouched" if worker._access.is_untouched() else "touched", flush=True)
"""


@pytest.mark.parametrize("form", [FORMAT, None, "%(m)s %(U)-9s %(s)5s"])
def test_the_lines_of_the_access_log_are_gunicorns(tmp_path: Path, form: str | None) -> None:
    files = tmp_path / "ours", tmp_path / "theirs"
    flags = ["--access-logformat", form] if form else []
    with both(*flags, each=[("--access-logfile", str(file)) for file in files]) as pair:
        alike(pair, LOGGED)
    ours, theirs = (file.read_text().splitlines() for file in files)
    if form == FORMAT:
        assert [logged(line) for line in ours] == [logged(line) for line in theirs]
    else:
        without_time = [[re.sub(r"\[.*?\]", "[]", line) for line in lines] for lines in (ours, theirs)]
        assert without_time[0] == without_time[1]
    assert len(ours) >= len(LOGGED)


def test_lines_leave_logging_out_only_while_nothing_of_the_users_is_there(tmp_path: Path) -> None:
    config = tmp_path / "gunicorn.conf.py"
    config.write_text(IN_ITS_OWN_HANDS)
    for flags, said in (
        (("--access-logfile", str(tmp_path / "access")), "untouched"),
        (("--access-logfile", str(tmp_path / "access"), "--statsd-host", "127.0.0.1:9"), "touched"),
        ((), "touched"),
    ):
        with running(OURS, *flags, config=config) as server:
            server.exchange(request("/"))
            server.process.terminate()
            assert server.line() == said


def test_the_lines_of_a_connection_are_there_once_it_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "access"
    with running(OURS, "--access-logfile", str(file), "--access-logformat", "%(U)s") as server:
        asked = []
        for number in range(50):
            asked += [f"/{number}", f"/{number}/refused"][: 1 + number % 2]
            ends = request(f"/{number}/refused", "Transfer-Encoding: chunked", body=b"none\r\n") if number % 2 else b""
            first = f"GET /{number} HTTP/1.1\r\nHost: a\r\n\r\n".encode() if ends else request(f"/{number}")
            server.exchange(first + ends)
            assert file.read_text().splitlines() == asked


def udp() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(PATIENCE_S)
    return sock


def of_requests(statsd: socket.socket, count: int) -> Iterator[str]:
    """So many metrics of requests and of lines about them, durations without their number."""
    while count:
        metric = statsd.recv(1024).decode()
        if "gunicorn.request" in metric or "gunicorn.log" in metric:
            count -= 1
            yield re.sub(r":\d+\.\d+\|ms$", ":ms", metric)


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


def test_the_access_log_goes_to_standard_output_and_to_syslog_when_asked_to() -> None:
    with running(OURS, "--access-logfile", "-", "--access-logformat", "%(U)s") as server:
        server.exchange(request("/only-there"))
        assert server.line() == "/only-there"
    with udp() as syslog:
        to = f"udp://127.0.0.1:{syslog.getsockname()[1]}"
        with running(OURS, "--access-logfile", "-", "--log-syslog", "--log-syslog-to", to) as server:
            assert is_lean(server)
            default = r'127\.0\.0\.1 - - \[[^]]*\] "GET /way HTTP/1\.1" 200 7 "-" "-"'
            assert re.fullmatch(default, server.line())
            assert re.search(rf"\.access: \[\d+\] {default}", syslog.recv(1024).decode())


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


def test_debugging_shows_every_request_and_no_access_log_is_written_unless_asked_for() -> None:
    with running(OURS, "--log-level", "debug") as server:
        assert not is_lean(server)
        assert "[DEBUG] GET /way" in server.log()
        server.process.terminate()
        assert server.line() == ""  # the end
