"""One client's connection in a web process: how long its bytes may take, how it is answered and how it ends.

`Reader` is where every byte of a request comes from, so it holds the deadlines: one for the first byte of a
connection, one for the whole head counted from its first byte, one for the body, and gunicorn's `keepalive` for the
silence between requests. It feeds gunicorn's parser, as gunicorn's own reader would, or hands out whole heads to be
read without it (`next_head`); what is not taken that way is put back. The gunicorn master loads this module, so it
imports nothing of the application.
"""

from __future__ import annotations

import io
import json
import math
import select
import socket
import ssl
import time
from collections.abc import Callable
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import gevent
from gevent import monkey
from gunicorn.http.body import Body, ChunkedReader, LengthReader
from gunicorn.http.unreader import SocketUnreader

from service.config import Settings
from service.environ import WHOLE_KEY

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

_MIN_RATE = 64 * 1024  # bytes a second: a body, or the reading of an answer, that is this fast may take for ever
_DRAINED = 64 * 1024  # gunicorn reads and throws away less than this of an unread body; a larger rest ends it
_LINGER_S = 5.0
_LINGER_IDLE_S = 1.0
_HEAD_READ = 16 * 1024

LOOK_S = 0.2  # between two looks for clients that have been silent for too long, or streams that have

# To sleep so long lets the hub look at its sockets. To sleep 0 seconds only lets greenlets run that are ready by
# then, some fifty times before it looks, and a new request is not noticed for so long.
TURN_S = 1e-9

_raw_poll = monkey.get_original("select", "poll")

T = TypeVar("T")


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


class Owing(Protocol):
    """An answer that has not gone out."""

    def settle(self) -> None: ...


class Direct(Protocol):
    """A stream that is being sent from the hub."""

    def look(self, now: float) -> float: ...


class Reader(SocketUnreader):  # type: ignore[misc]
    """Reads one connection. `keepalive`: seconds of silence allowed between two requests. `doorbell`: rings for it,
    where `next_head` is called."""

    def __init__(
        self, sock: socket.socket, settings: Settings, keepalive: float, doorbell: Doorbell | None = None
    ) -> None:
        super().__init__(sock)
        self.idle_since = time.monotonic()
        self.requests = 0
        self.failure: OSError | None = None  # of reading a body: the client's, if the application lets it pass
        self._settings = settings
        self._keepalive = keepalive
        self._phase = Phase.IDLE
        # What has come and is not read: behind a head that `next_head` gave out, or in gunicorn's buffer.
        self._rest = b""
        self._buffered = True
        self.doorbell = doorbell
        self.watch = doorbell.watch if doorbell is not None else None
        self._until = 0.0  # of a head, or of the rest of a body
        self._patience = Patience(settings.body_timeout)
        self._owes_continue = False

    @property
    def idle(self) -> bool:
        """Whether the next request has not begun to arrive."""
        return self._phase is Phase.IDLE

    def begin_head(self) -> None:
        self._owes_continue = False
        self._phase = Phase.IDLE
        if self.buf.getbuffer().nbytes:
            self._head_has_begun()

    def next_head(self, longest: int) -> bytes:
        """The next request's head with its empty line, if it comes in one piece and is no longer than that. Otherwise
        b"": what has come is there for gunicorn's parser. `ClientGone` when nothing comes any more."""
        self._owes_continue = False
        self._phase = Phase.IDLE
        data = self._rest
        if self._buffered:
            self._buffered = False
            data += self.take_buffered()
        if not data:
            assert self.doorbell is not None
            self.idle_since = time.monotonic()
            data = self.doorbell.wait(self._keepalive if self.requests else self._settings.header_timeout)
        end = data.find(b"\r\n\r\n") + 4
        if 4 <= end <= longest:
            self._rest = data[end:]
            return data[:end]
        self._to_buffer(data)
        self._head_has_begun()
        return b""

    def put_back(self, head: bytes) -> None:
        """A head that `next_head` gave out is for gunicorn's parser after all."""
        self._to_buffer(head + self._rest)
        self._head_has_begun()

    def _to_buffer(self, data: bytes) -> None:
        """All that has come and is not read is `data`; from now on it is read as gunicorn reads."""
        self._rest = b""
        self._buffered = True
        self.unread(data)

    def begin_plain_body(self, environ: WSGIEnvironment, length: int) -> Input | None:
        """Put the body behind the head that `next_head` gave out into the environ; None if it has come as a whole."""
        rest = self._rest
        if len(rest) >= length:
            self.requests += 1
            self._phase = Phase.BODY
            self._rest = rest[length:]
            body = rest[:length]
            environ["wsgi.input"] = stream = io.BytesIO(body)
            environ[WHOLE_KEY] = stream, environ.get("CONTENT_LENGTH"), body
            return None
        self._to_buffer(rest)
        self.begin_body(expects_continue=False)
        environ["wsgi.input"] = rest_of_it = Input(LengthReader(self, length))
        return rest_of_it

    @property
    def has_more(self) -> bool:
        """Whether bytes of a next request have come with the last one."""
        return bool(self._rest or self.buf.getbuffer().nbytes)

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
        if body is None:
            return False
        if body.failed:
            return True
        left = body.reader.length if isinstance(body.reader, LengthReader) else body.reader.parser is not None
        return left >= _DRAINED or (bool(left) and self._owes_continue)

    def has_unread(self, body: Any) -> bool:
        """Whether the client has sent, or still sends, bytes nobody has read."""
        if body is not None:
            reader = body.reader
            if isinstance(reader, LengthReader) and reader.length > 0:
                return True
            if isinstance(reader, ChunkedReader) and reader.parser is not None:
                return True
            if body.failed:
                return True
        if self._rest or self.buf.getbuffer().nbytes:
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
        try:
            data = self._receive(self.mxchunk, self._keepalive if self.requests else self._settings.header_timeout)
        except TimeoutError:
            return b""
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
        return self._within_patience(lambda seconds: self._receive(size, seconds), len)

    def read_body_into(self, view: memoryview) -> int:
        """Some bytes of the body, from the socket to where they are wanted; what is buffered comes first."""
        if self.buf.getbuffer().nbytes:
            data = self.take_buffered()
            size = min(len(data), len(view))
            view[:size] = data[:size]
            self.unread(data[size:])
            return size
        return self._within_patience(lambda seconds: self._receive_into(view, seconds), int)

    def _within_patience(self, receive: Callable[[float], T], size_of: Callable[[T], int]) -> T:
        since = time.monotonic()
        try:
            received = receive(self._patience.left())
        except OSError as error:
            self.failure = error
            raise
        self._patience.spend(since, size_of(received))
        return received

    def _receive(self, size: int, seconds: float) -> bytes:
        self._may_take(seconds)
        data: bytes = self.sock.recv(size)
        return data

    def _receive_into(self, view: memoryview, seconds: float) -> int:
        self._may_take(seconds)
        size: int = self.sock.recv_into(view)
        return size

    def _may_take(self, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError
        self.sock.settimeout(seconds)


class Doorbell:
    """Wakes the greenlet of a connection when its client sends something. One watcher for the life of the connection:
    to start and stop one for every request, as a gevent socket does, costs more than the rest of the wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock._sock  # type: ignore[attr-defined]  # the system's, which never blocks
        self._hub = gevent.get_hub()
        self._greenlet = gevent.getcurrent()
        self._watcher = self._hub.loop.io(sock.fileno(), 1)
        self._watching = False
        self._waiting = False
        self._until = 0.0
        self._gone: Callable[[], None] | None = None
        self._direct: Direct | None = None
        self.owing: Owing | None = None
        """What is sent at the end of the hub's turn, or, where the client does not take it, before all else."""
        self.look_at = math.inf
        """When there is something to look for, by the monotonic clock."""

    def watch(self, gone: Callable[[], None]) -> Callable[[], None]:
        """Have `gone` called, in the hub, once the client has closed, or has ended its side, which looks the same;
        until another one is watched for, or what this returns is called. It must not raise. Meanwhile nobody waits."""
        self._gone = gone
        self.look_at = 0.0
        if not self._watching:
            self._watcher.start(self._ring)
            self._watching = True

        def end() -> None:
            if self._gone is gone:
                self._gone = None

        return end

    def send_from_hub(self, direct: Direct | None) -> None:
        """From now on the connection is a stream's, until None is given."""
        self._direct = direct
        self.look_at = 0.0

    def wait(self, seconds: float) -> bytes:
        """What the client sends next. `ClientGone` when it closes, or sends nothing for so long, by `look`'s clock."""
        self._until = self.look_at = time.monotonic() + seconds
        while True:
            if not self._watching:
                self._watcher.start(self._ring)
                self._watching = True
            self._waiting = True
            try:
                self._hub.switch()
            finally:
                self._waiting = False
            if self.owing is not None:
                self.owing.settle()
            try:
                data: bytes = self._sock.recv(_HEAD_READ)
            except BlockingIOError:
                if time.monotonic() >= self._until:
                    raise ClientGone from None
                continue
            except OSError as error:
                raise ClientGone from error
            if not data:
                raise ClientGone
            return data

    def ring(self) -> None:
        """Have `wait` look at what is owed."""
        if self._waiting:
            self._hub.loop.run_callback(self._ring)

    def _ring(self) -> None:
        if self._waiting:
            self._greenlet.switch()
        elif self._watching:
            # Something has come, or the client has gone, while its request is at work. It would go on ringing.
            self._watcher.stop()
            self._watching = False
            self._look_for_end()

    def look(self, now: float) -> None:
        """To be called from `look_at` on, every `LOOK_S` or so: lets the greenlet know if its time is over, and whoever
        watches if the client has left."""
        self.look_at = math.inf
        if self._gone is not None:
            self.look_at = now + 1.0
            if not self._watching:
                self._look_for_end()  # of a client that has sent its next request, and so has rung already
        if self._direct is not None:
            self.look_at = self._direct.look(now)
        if self._waiting:
            self.look_at = self._until
            if now >= self._until:
                self.ring()

    def _look_for_end(self) -> None:
        if self._gone is not None:
            poll = _raw_poll()
            poll.register(self._sock.fileno(), select.POLLRDHUP)
            if poll.poll(0):
                gone, self._gone = self._gone, None
                gone()

    def close(self) -> None:
        self._watching = False
        self._watcher.stop()
        self._watcher.close()


class Input(Body):  # type: ignore[misc]
    """A body that has not come as a whole, which can also be read into memory of the application's, a slot for one."""

    def readinto(self, buffer: Any) -> int:
        """As many bytes as there are at once, without a copy in between; 0 at the end of the body."""
        with memoryview(buffer) as whole, whole.cast("B") as view:
            if self.buf.tell():
                data = self.read(min(len(view), self.buf.tell()))
                view[: len(data)] = data
                return len(data)
            reader = self.reader
            size = min(len(view), reader.length)
            if not size:
                return 0
            try:
                with view[:size] as part:
                    got: int = reader.unreader.read_body_into(part)
            except Exception:
                self.failed = True
                raise
            reader.length -= got if got else size  # the end before its time: nothing more will come
            return got


def refuse(sock: socket.socket, status: int, reason: str, to_head: bool) -> None:
    """Answer what never became a request, or was not answered, as far as the client still listens."""
    body = json.dumps({"error": reason}, separators=(",", ":")).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        sock.settimeout(_LINGER_IDLE_S)
        sock.sendall(head.encode("ascii") + (b"" if to_head else body))
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
