"""Our worker beside gunicorn's own under the same settings: the application both serve, and the comparison.

Whatever can be set of gunicorn is tested by its effect: the same bytes are sent to both, and both answer alike. What
is only about times and names of sockets is left out; of what the server itself refuses only the status counts, which
ours gives with JSON and gunicorn with HTML.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from gunicorn.glogging import Logger

from tests.equality import plain
from tests.service.serving import PATIENCE_S, ROOT, Client, children, stop

OURS = "service.webworker.HeadraceWorker"
STOCK = "gevent"
TLS = str(Path(__file__).parent / "tls.pem")  # a key and its certificate, made for these tests

_REFUSAL = re.compile(
    rb"HTTP/1\.1 ([45]\d\d) [^\r]*\r\nConnection: close\r\nContent-Type: [^\r]*\r\n\r\n"
    rb'(?:<html>.*</html>\s*|\{"error":[^}]*\}|)\Z',
    re.DOTALL,
)
_OF_THE_MOMENT = re.compile(rb"(?:Date|Content-Length): [^\r]*\r\n")


# The application


def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """`tests.equality.plain`, and a few paths more."""
    found = _PATHS.get(environ["PATH_INFO"])
    if found is None:
        return plain.application(environ, start_response)
    body = found(environ)
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


def _stall(environ: dict[str, Any]) -> bytes:
    """Lets nothing else in its process run, until the master makes an end of it."""
    while True:
        os.getpid()


_PATHS = {
    # By whom a request without a body was read: `BytesIO` says by the lean way, `Body` by gunicorn's parser.
    "/way": lambda environ: type(environ["wsgi.input"]).__name__.encode(),
    "/pid": lambda environ: b"%d" % os.getpid(),
    "/setting": lambda environ: os.environ.get("A_SETTING", "none").encode(),
    "/stall": _stall,
}


class Telling(Logger):  # type: ignore[misc]
    """A logger of one's own, which prints what it was told of each request."""

    def access(self, resp: Any, req: Any, environ: dict[str, Any], request_time: timedelta) -> None:
        told = {
            "status": resp.status,
            "sent": resp.sent,
            "answered": resp.headers,
            "method": req.method,
            "uri": req.uri,
            "path": req.path,
            "query": req.query,
            "version": req.version,
            "headers": req.headers,
            "environ": [environ["REQUEST_METHOD"], environ["RAW_URI"]],
            "took a time": 0 <= request_time.total_seconds() < PATIENCE_S,
        }
        print(json.dumps(told), flush=True)


# The servers


@dataclass
class Running:
    """A gunicorn that is there. `addresses` are those it listens on, in its own words."""

    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    addresses: Sequence[str] = ()

    def connect(self, number: int = 0, bound_to: bytes | None = None) -> Client:
        """To the address of that number. `bound_to`: a name of the client's own, on a Unix socket."""
        scheme, _, rest = self.addresses[number].partition(":")
        if scheme == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(PATIENCE_S)
            if bound_to:
                sock.bind(bound_to)
            sock.connect(rest)
            return Client(sock)
        host, _, port = rest.removeprefix("//").rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S)
        if scheme == "https":
            sock = ssl.create_default_context(cafile=TLS).wrap_socket(sock, server_hostname="localhost")
        return Client(sock)

    def exchange(self, request: bytes, number: int = 0, bound_to: bytes | None = None) -> bytes:
        """Whatever comes until the server closes."""
        pieces = []
        with self.connect(number, bound_to) as client, contextlib.suppress(ConnectionResetError):
            client.send(request)
            while piece := client.socket.recv(65536):
                pieces.append(piece)
        return b"".join(pieces)

    def line(self) -> str:
        """The next one that is printed."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert readable, "nothing is printed"
        return self.process.stdout.readline().decode().rstrip("\n")

    def log(self) -> str:
        return os.pread(self.stderr.fileno(), 10_000_000, 0).decode()


Pair = tuple[Running, Running]  # ours and gunicorn's own


@contextlib.contextmanager
def running(
    worker: str,
    *flags: str,
    binds: Sequence[str] = ("127.0.0.1:0",),
    workers: int = 1,
    config: Path | None = None,
    env: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    launcher: Sequence[str] = (sys.executable,),
) -> Iterator[Running]:
    with contextlib.ExitStack() as ends:
        started = _start(ends, worker, flags, binds, workers, config, env, descriptors, launcher)
        yield _wait(started)


@contextlib.contextmanager
def both(
    *flags: str,
    binds: Sequence[Sequence[str]] = (("127.0.0.1:0",),) * 2,
    each: Sequence[Sequence[str]] = ((), ()),
    config: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """The two side by side, with one web process each. `each`: the flags in which they cannot be alike."""
    with contextlib.ExitStack() as ends:
        started = [
            _start(ends, worker, (*flags, *own), where, 1, config, env, (), (sys.executable,))
            for worker, where, own in zip((OURS, STOCK), binds, each, strict=True)
        ]
        ours, theirs = map(_wait, started)
        yield ours, theirs
        # Only ours is to end well. gunicorn's own worker takes a second or two for that.
        web_processes = children(theirs.process.pid)
        theirs.process.kill()
        for pid in web_processes:
            os.kill(pid, signal.SIGKILL)


def _start(
    ends: contextlib.ExitStack,
    worker: str,
    flags: Sequence[str],
    binds: Sequence[str],
    workers: int,
    config: Path | None,
    env: Mapping[str, str] | None,
    descriptors: Sequence[int],
    launcher: Sequence[str],
) -> Running:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    ours = {"HEADRACE_POOL_SOCKET": "/nonexistent/pool.sock", "HEADRACE_WEB_WORKERS": str(workers)}
    where = [flag for bind in binds for flag in ("-b", bind)]
    command = ["-m", "gunicorn", "-c", str(config or ROOT / "gunicorn.conf.py"), "-k", worker, *where, *flags]
    stderr: IO[bytes] = ends.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # closed with the others
    process = subprocess.Popen(
        [*launcher, *command, "tests.service.beside:application"],
        bufsize=0,  # `select` must know of every line
        cwd=ROOT,
        env={**inherited, **ours, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=stderr,
        pass_fds=descriptors,
    )
    ends.callback(stop, process)
    return Running(process, stderr)


def _wait(started: Running) -> Running:
    line = started.line()
    assert line.startswith("Listening on "), line + started.log()
    started.addresses = line.removeprefix("Listening on ").split(", ")
    return started


# The comparison


def request(
    target: str = "/", *headers: str, line: str = "GET {} HTTP/1.1", host: str = "a", body: bytes = b""
) -> bytes:
    """After which the server closes. No host: no such header."""
    lines = [line.format(target), *([f"Host: {host}"] if host else []), *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def alike(pair: Pair, requests: Iterable[bytes], number: int = 0) -> list[str]:
    """What ours answers to each, which is what gunicorn's own worker answers."""
    said = []
    for sent in requests:
        ours, theirs = (_comparable(server, server.exchange(sent, number)) for server in pair)
        assert ours == theirs, f"{sent!r}\nours: {ours[:1000]}\ntheirs: {theirs[:1000]}"
        said.append(ours)
    return said


def _comparable(server: Running, answers: bytes) -> str:
    answers = _OF_THE_MOMENT.sub(b"", answers)
    answers = _REFUSAL.sub(rb"refused with \1", answers)
    for address in server.addresses:
        for name in ("SERVER_NAME", "SERVER_PORT"):
            own = f'"{name}": "{address.rpartition(":")[2]}"'
            answers = answers.replace(own.encode(), f'"{name}": "its own"'.encode())
    return answers.decode("latin-1")


def is_lean(server: Running, number: int = 0) -> bool:
    """Whether a plain request passes gunicorn's parser by."""
    return server.exchange(request("/way"), number).endswith(b"\r\n\r\nBytesIO")


def environ_of(answer: str) -> dict[str, Any]:
    """Of the last answer."""
    told: dict[str, Any] = json.loads(answer.rpartition("\r\n\r\n")[2])
    return told
