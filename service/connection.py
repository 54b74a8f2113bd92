"""One client's connection in a web process: how long its bytes may take, how it is answered and how it ends.

`Reader` is where every byte of a request comes from, so it holds the deadlines: one for the first byte of a
connection, one for the whole head counted from its first byte, one for the body, and gunicorn's `keepalive` for the
silence between requests. `Answer` is gunicorn's response with a deadline for a client that does not read. The
gunicorn master loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from gunicorn.http.body import ChunkedReader, LengthReader
from gunicorn.http.unreader import SocketUnreader
from gunicorn.http.wsgi import Response

from service.config import Settings
from service.environ import CLOSE_KEY

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

_MIN_RATE = 64 * 1024  # bytes a second: a body, or the reading of an answer, that is this fast may take for ever
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


class ClientGone(Exception):
    """The client has left, or does not read: not an `OSError`, so that no application's own is taken for it."""


class Phase(Enum):
    IDLE = auto()  # before a request
    HEAD = auto()
    BODY = auto()
    REST = auto()  # what the application has left of a body


class Patience:
    """How long a client may keep one message waiting: `seconds`, and one more for each 64 KiB that get through. What
    the application takes in between does not count."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = seconds

    def left(self) -> float:
        """For the next wait."""
        return min(self._seconds, self._left)

    def spend(self, since: float, size: int) -> None:
        """A wait that began at `since` is over, and has got `size` bytes through."""
        self._left += size / _MIN_RATE - (time.monotonic() - since)


class Reader(SocketUnreader):  # type: ignore[misc]
    """Reads one connection for gunicorn's parser. `idle` is the set of readers that wait for a request to begin."""

    def __init__(self, sock: socket.socket, settings: Settings, keepalive: float, idle: set[Reader]) -> None:
        super().__init__(sock)
        self.idle_since = time.monotonic()
        self.requests = 0
        self.failure: OSError | None = None  # of reading a body: the client's, if the application lets it pass
        self._settings = settings
        self._keepalive = keepalive
        self._idle = idle
        self._phase = Phase.IDLE
        self._until = 0.0  # of a head, or of the rest of a body
        self._patience = Patience(settings.body_timeout)
        self._owes_continue = False

    def begin_head(self) -> None:
        self._owes_continue = False
        self._phase = Phase.IDLE
        if self.buf.getbuffer().nbytes:
            self._head_has_begun()

    def begin_body(self, expects_continue: bool) -> None:
        """`expects_continue`: the client holds the body back for a `100 Continue`, which is sent when the body is
        first waited for, so that a refusal comes without one."""
        self.requests += 1
        self._owes_continue = expects_continue
        self._phase = Phase.BODY
        self._patience = Patience(self._settings.body_timeout)

    def begin_rest(self, until: float) -> None:
        self._phase = Phase.REST
        self._until = until

    def chunk(self, size_hint: int | None = None) -> bytes:
        if self._phase is Phase.IDLE:
            return self._first_bytes()
        if self._phase is Phase.BODY:
            return self._body_bytes(min(max(size_hint or 0, self.mxchunk), self.max_body_chunk))
        try:
            return self._receive(self.mxchunk, self._until - time.monotonic())
        except TimeoutError:
            if self._phase is Phase.HEAD:
                raise SlowHead from None
            raise

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
            data = self._receive(self.mxchunk, self._keepalive if self.requests else self._settings.header_timeout)
        except TimeoutError:
            return b""
        finally:
            self._idle.discard(self)
        self._head_has_begun()
        return data

    def _head_has_begun(self) -> None:
        self._phase = Phase.HEAD
        self._until = time.monotonic() + self._settings.header_timeout

    def _body_bytes(self, size: int) -> bytes:
        if self._owes_continue:
            self._owes_continue = False
            self.sock.settimeout(self._settings.send_timeout)
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        since = time.monotonic()
        try:
            data = self._receive(size, self._patience.left())
        except OSError as error:
            self.failure = error
            raise
        self._patience.spend(since, len(data))
        return data

    def _receive(self, size: int, seconds: float) -> bytes:
        if seconds <= 0:
            raise TimeoutError
        self.sock.settimeout(seconds)
        data: bytes = self.sock.recv(size)
        return data


class Lives(Protocol):
    alive: bool


class Answer(Response):  # type: ignore[misc]
    """gunicorn's response, closing the connection when that is asked for, sending no slower than a client may read."""

    environ: WSGIEnvironment

    def __init__(self, req: Any, sock: socket.socket, cfg: Any, worker: Lives, reader: Reader, send_timeout: float):
        super().__init__(req, sock, cfg)
        self._worker = worker
        self._reader = reader
        self._patience = Patience(send_timeout)

    def start_response(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if not self._worker.alive or self.environ.get(CLOSE_KEY) or self._reader.leaves_body(self.req.body):
            self.force_close()
        return super().start_response(status, headers, exc_info)

    def can_sendfile(self) -> bool:
        return False  # with gevent it is a loop of reads and sends too, and one that knows no deadline

    def send_headers(self) -> None:
        if not self.headers_sent:
            self._send(super().send_headers)

    def close(self) -> None:
        self.send_headers()
        self._send(super().close)

    def _emit_body(self, data: bytes) -> None:
        if self.chunked:
            data = b"%X\r\n%b\r\n" % (len(data), data)
        # Not `sendall`: its timeout would be one for all of the data, however large.
        left = memoryview(data)
        while left:
            left = left[self._send(partial(self.sock.send, left[:_SEND_STEP])) :]

    def _send(self, send: Callable[[], int | None]) -> int:
        """What `send` says it has sent, within the client's time."""
        since, seconds = time.monotonic(), self._patience.left()
        try:
            if seconds <= 0:
                raise TimeoutError
            self.sock.settimeout(seconds)
            sent = send() or 0
        except OSError as error:
            raise ClientGone from error
        self._patience.spend(since, sent)
        return sent


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
