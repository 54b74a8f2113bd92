"""Real gunicorn for tests, and a client that sends exactly the bytes it is told to. Loopback only, all bounded."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 20.0


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    port: int
    stderr: IO[bytes]

    def signal(self, sig: signal.Signals) -> None:
        self.process.send_signal(sig)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        return os.pread(self.stderr.fileno(), 10_000_000, 0).decode()

    def exchange(self, request: bytes) -> bytes:
        with self.connect() as client:
            client.send(request)
            return client.rest()

    def connect(self) -> Client:
        return Client(self.port)

    def get(self, path: str) -> bytes:
        return body_of(self.exchange(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()))


class Client:
    """One connection. `rest` reads to its end; a reset is told apart from an orderly end by raising."""

    def __init__(self, to: int | socket.socket) -> None:
        """`to`: a port of 127.0.0.1, or what is connected already."""
        self.socket = socket.create_connection(("127.0.0.1", to), PATIENCE_S) if isinstance(to, int) else to
        self._unread = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self) -> bytes:
        pieces = [self._unread]
        while piece := self.socket.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """One response with a Content-Length; status 0 when the server has closed before it."""
        while b"\r\n\r\n" not in self._unread:
            piece = self.socket.recv(65536)
            if not piece:
                assert self._unread == b""
                return 0, {}, b""
            self._unread += piece
        head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        length = int(headers.get("content-length", "0"))
        pieces = [self._unread]
        missing = length - len(self._unread)
        while missing > 0:
            piece = self.socket.recv(1 << 20)
            assert piece, "cut body"
            pieces.append(piece)
            missing -= len(piece)
        data = b"".join(pieces)
        body, self._unread = data[:length], data[length:]
        return int(lines[0].split()[1]), headers, body

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        return self.response()


@contextlib.contextmanager
def gunicorn(
    app: str = "tests.service.apps:server",
    *flags: str,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Iterator[Served]:
    """gunicorn with our configuration, a pool that is not there, and an application of the tests."""
    with tempfile.TemporaryFile() as stderr, start(app, *flags, workers=workers, env=env, cwd=cwd, stderr=stderr) as it:
        try:
            served = Served(it, listening_port(it, stderr), stderr)
            until(lambda: len(children(it.pid)) == workers, "the web processes are there")
            if "--certfile" not in flags:
                served.get("/")
            yield served
        finally:
            stop(it)


def start(
    app: str,
    *flags: str,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    stderr: IO[bytes] | int,
    port: int = 0,
    group: bool = False,
) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    ours = {"HEADRACE_POOL_SOCKET": "/nonexistent/pool.sock", "HEADRACE_WEB_WORKERS": str(workers)}
    command = [sys.executable, "-m", "gunicorn", "-c", str(ROOT / "gunicorn.conf.py"), "-b", f"127.0.0.1:{port}"]
    path = os.pathsep.join([str(cwd), str(ROOT)])
    return subprocess.Popen(
        [*command, *flags, *([app] if app else [])],
        cwd=cwd,
        env={**inherited, **ours, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=stderr,
        process_group=0 if group else None,
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    """Wait for a condition, looking often."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def body_of(response: bytes) -> bytes:
    return response.partition(b"\r\n\r\n")[2]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def listening_port(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> int:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    line = process.stdout.readline().decode() if readable else ""
    found = re.match(r"Listening on https?://127\.0\.0\.1:([0-9]+)", line)
    if found is None:
        stop(process)
        raise AssertionError(line + os.pread(stderr.fileno(), 100_000, 0).decode())
    return int(found[1])
