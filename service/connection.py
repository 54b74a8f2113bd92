"""One client's connection in a web process: how long its bytes may take, how it is answered and how it ends.

`Reader` is where every byte of a request comes from, so it holds the deadlines: one for the whole head counted
from its first byte, one for the body, and gunicorn's `keepalive` for the silence between requests. `Answer` is
gunicorn's response with a deadline for a client that does not read. The gunicorn master loads this module, so it
imports nothing of the application.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from gunicorn.http.body import ChunkedReader, LengthReader
from gunicorn.http.unreader import SocketUnreader
from gunicorn.http.wsgi import Response

from service.config import Settings
from service.environ import CLOSE_KEY

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

_MIN_RATE = 64 * 1024  # bytes a second: a body may take longer than its timeout as long as it comes this fast
_DRAINED = (
    64 * 1024
)  # an unread rest of a body up to this size is read and thrown away, a larger one ends the connection
_LINGER_S = 5.0
_LINGER_IDLE_S = 1.0
_SEND_STEP = 256 * 1024

# To sleep so long lets the hub look at its sockets. To sleep 0 seconds only lets greenlets run that are ready by
# then, some fifty times before it looks, and a new request is not noticed for so long.
TURN_S = 1e-9


class SlowHead(Exception):
    """The head of a request did not come in time."""


class Phase(Enum):
    IDLE = auto()  # between requests
    HEAD = auto()
    BODY = auto()


class Reader(SocketUnreader):  # type: ignore[misc]
    """Reads one connection for gunicorn's parser. `idle` is the set of readers that wait for a request to begin."""

    def __init__(self, sock: socket.socket, settings: Settings, keepalive: float, idle: set[Reader]) -> None:
        super().__init__(sock)
        self.idle_since = time.monotonic()
        self.requests = 0
        self._settings = settings
        self._keepalive = keepalive or settings.header_timeout  # without keep-alive this is for the first request
        self._idle = idle
        self._phase = Phase.IDLE
        self._since = 0.0
        self._received = 0
        self._owes_continue = False

    def begin_head(self) -> None:
        self._owes_continue = False
        self._enter(Phase.HEAD if self.buf.getbuffer().nbytes else Phase.IDLE)

    def begin_body(self, expects_continue: bool) -> None:
        """`expects_continue`: the client holds the body back for a `100 Continue`, which is sent when the body is
        first waited for, so that a refusal comes without one."""
        self.requests += 1
        self._owes_continue = expects_continue
        self._enter(Phase.BODY)

    def chunk(self, size_hint: int | None = None) -> bytes:
        if self._phase is Phase.IDLE:
            return self._first_bytes()
        if self._phase is Phase.HEAD:
            try:
                return self._receive(self.mxchunk, self._since + self._settings.header_timeout - time.monotonic())
            except TimeoutError:
                raise SlowHead from None
        if self._owes_continue:
            self._owes_continue = False
            self.sock.settimeout(self._settings.send_timeout)
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        idle = self._settings.body_timeout
        left = self._since + idle + self._received / _MIN_RATE - time.monotonic()
        data = self._receive(min(max(size_hint or 0, self.mxchunk), self.max_body_chunk), min(idle, left))
        self._received += len(data)
        return data

    def leaves_body(self, body: Any) -> bool:
        """Whether so much of the body is unread, or held back, that no next request can be read after it."""
        if self._owes_continue or body.failed:
            return True
        return isinstance(body.reader, LengthReader) and body.reader.length > _DRAINED

    def has_unread(self, body: Any) -> bool:
        """Whether the client has sent, or still sends, bytes nobody has read."""
        reader = body.reader
        if isinstance(reader, LengthReader) and reader.length > 0:
            return True
        if isinstance(reader, ChunkedReader) and reader.parser is not None:
            return True
        if body.failed or self.buf.getbuffer().nbytes:
            return True
        if isinstance(self.sock, ssl.SSLSocket):
            return False
        self.sock.setblocking(False)
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def hang_up(self) -> None:
        """End the wait for a next request as if the client had closed, unless one has begun to arrive.

        Shutting only the reading side down loses nothing: bytes that slip in before the waiting greenlet runs are
        still read by it, and can still be answered.
        """
        with socket.fromfd(self.sock.fileno(), self.sock.family, self.sock.type) as twin:
            twin.setblocking(False)
            try:
                if not twin.recv(1, socket.MSG_PEEK):
                    return  # the client has closed
            except BlockingIOError:
                twin.shutdown(socket.SHUT_RD)
            except OSError:
                return  # reset: its greenlet sees that too

    def _first_bytes(self) -> bytes:
        self.idle_since = time.monotonic()
        self._idle.add(self)
        try:
            data = self._receive(self.mxchunk, self._keepalive)
        except TimeoutError:
            return b""
        finally:
            self._idle.discard(self)
        self._enter(Phase.HEAD)
        return data

    def _receive(self, size: int, seconds: float) -> bytes:
        if seconds <= 0:
            raise TimeoutError
        self.sock.settimeout(seconds)
        data: bytes = self.sock.recv(size)
        return data

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = time.monotonic()
        self._received = 0


class Lives(Protocol):
    alive: bool


class Answer(Response):  # type: ignore[misc]
    """gunicorn's response, closing the connection when that is asked for, sending no slower than a client may read."""

    environ: WSGIEnvironment

    def __init__(self, req: Any, sock: socket.socket, cfg: Any, worker: Lives, reader: Reader, send_timeout: float):
        super().__init__(req, sock, cfg)
        self._worker = worker
        self._reader = reader
        self._send_timeout = send_timeout

    def start_response(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if not self._worker.alive or self.environ.get(CLOSE_KEY) or self._reader.leaves_body(self.req.body):
            self.force_close()
        return super().start_response(status, headers, exc_info)

    def send_headers(self) -> None:
        self.sock.settimeout(self._send_timeout)
        super().send_headers()

    def _emit_body(self, data: bytes) -> None:
        if self.chunked:
            data = b"%X\r\n%b\r\n" % (len(data), data)
        # Not `sendall`: its timeout would be one for all of the data, however large, and by the wall clock.
        self.sock.settimeout(self._send_timeout)
        left = memoryview(data)
        while left:
            left = left[self.sock.send(left[:_SEND_STEP]) :]


def refuse(sock: socket.socket, status: int, reason: str) -> None:
    """Answer what never became a request, as far as the client still listens."""
    body = json.dumps({"error": reason}, separators=(",", ":")).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        sock.settimeout(_LINGER_IDLE_S)
        sock.sendall(head.encode("ascii") + body)
    except OSError:
        pass


def linger(sock: socket.socket) -> None:
    """Read and drop what the client still sends, until it has seen the answer and closes, or for a while.

    To close a socket with unread bytes is to reset it, and a reset overtakes the answer (RFC 9112, 9.6).
    """
    until = time.monotonic() + _LINGER_S
    waste = bytearray(64 * 1024)
    try:
        sock.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            sock.settimeout(min(left, _LINGER_IDLE_S))
            if not sock.recv_into(waste):
                return
            time.sleep(TURN_S)  # a fast sender never makes a read wait
    except OSError:
        pass
