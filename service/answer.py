"""gunicorn's response, sent in as few pieces as can be and no slower than a client may read.

The gunicorn master loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from gevent.socket import socket as GeventSocket
from gunicorn import util
from gunicorn.http.wsgi import Response, _make_early_hints_callback

from service.connection import ClientGone, Patience, Reader
from service.environ import CLOSE_KEY

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

_SEND_STEP = 256 * 1024
_TCP_NOTSENT_LOWAT = 25
_UNSENT = (
    16 * 1024
)  # bytes of a stream the kernel may hold that the network has not taken: more would hide a slow client
_BY_SYSTEM = 0
_JOINED = 64 * 1024  # bytes of a piece that is sent in one with the head by copying it


class Lives(Protocol):
    alive: bool


class Answer(Response):  # type: ignore[misc]
    """gunicorn's response, closing the connection when that is asked for, sending no slower than a client may read.

    The head waits for the first piece of the body and leaves with it. Pieces may be `bytes` or contiguous memoryviews,
    which are sent from where they lie.
    """

    environ: WSGIEnvironment
    headers_sent: bool
    _patience: Patience | None = None
    _gone: ClientGone | None = None
    _head = b""
    _is_stream = False

    def __init__(self, req: Any, sock: socket.socket, cfg: Any, worker: Lives, reader: Reader, send_timeout: float):
        super().__init__(req, sock, cfg)
        self._worker = worker
        self.reader = reader
        self._send_timeout = send_timeout

    def start_response(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if not self._worker.alive or CLOSE_KEY in self.environ or self.reader.leaves_body(self.req.body):
            self.force_close()
        if exc_info is None and self.status is None and self._take_ordinary(status, headers):
            return self.write
        return super().start_response(status, headers, exc_info)

    def _take_ordinary(self, status: str, headers: list[tuple[str, str]]) -> bool:
        """What gunicorn would make of an answer in which there is nothing that its rules forbid or change: a body of a
        length that is given, or chunked, to a request that gets one. False, and nothing done, for any other."""
        code = _ORDINARY_STATUS.get(status)
        if code is None or self._omits_body_for(code):
            return False
        length = None
        for name, value in headers:
            if type(value) is not str:
                return False
            # Printable ASCII with no space around it is what a value may hold, and goes out as it is.
            if name not in _ORDINARY or not (value.isascii() and value.isprintable()) or value != value.strip():
                if name != "Content-Length" or not (value.isascii() and value.isdigit()):
                    return False
                length = int(value)
        self.status, self.status_code, self.headers = status, code, list(headers)
        self.response_length = length
        self.chunked = length is None and self.req.version > (1, 0)
        return True

    def _omits_body_for(self, code: int) -> bool:
        return self.req.method == "HEAD" or code < 200 or code in (204, 304)

    def process_headers(self, headers: list[tuple[str, str]]) -> None:
        """By gunicorn's rules; notes which names have none but that of their value's characters."""
        for name, value in headers:
            before = len(self.headers)
            super().process_headers([(name, value)])
            if len(self.headers) > before and name.lower() not in _RULED and len(_ORDINARY) < _MAX_ORDINARY:
                _ORDINARY.add(name)

    def can_sendfile(self) -> bool:
        return False  # with gevent it is a loop of reads and sends too, and one that knows no deadline

    def send_headers(self) -> None:
        """Makes the head; `flush` sends it, if no piece of the body has taken it along."""
        if self.headers_sent:
            return
        connection = "upgrade" if self.upgrade else "close" if self.should_close() else "keep-alive"
        start = _start_of_head(self.req.version, self.status, self.version, connection, self.chunked)
        fields = "".join([f"{name}: {value}\r\n" for name, value in self.headers])
        self._head = f"{start}{fields}\r\n".encode("latin-1")
        if self.response_length is None and _EVENT_STREAM in self.headers:
            self._is_stream = True
            self._limit_unsent(_UNSENT)
        self.headers_sent = True  # not before: until then a failure can still be answered

    def write(self, arg: bytes | memoryview) -> None:
        if type(arg) is bytes and len(arg) == self.response_length and not (self.headers_sent or self._omits_body):
            # The whole body at once, as most are.
            self.sent = len(arg)
            self.send_headers()
            self._emit_body(arg)
            return
        if self._is_stream:
            self.be_patient_again()  # it may last for ever
        try:
            if type(arg) is memoryview:
                self._write_view(_octets(arg))
            else:
                super().write(arg)
        finally:
            self.flush()

    def _write_view(self, view: memoryview) -> None:
        """As `write` for bytes, which asks for nothing but their length."""
        self.send_headers()
        if self.response_length is not None:
            view = view[: max(self.response_length - self.sent, 0)]
        if view and not self._omits_body:
            self.sent += len(view)
            self._emit_body(view)

    def flush(self) -> None:
        """Send a head that nothing has taken along."""
        if self._head:
            head, self._head = self._head, b""
            self.send_all(head)

    def close(self) -> None:
        if self._head or not self.headers_sent:
            self.send_headers()
            self.flush()
        if self.chunked:
            self.send_all(b"0\r\n\r\n")
        if self._is_stream:
            self._limit_unsent(_BY_SYSTEM)  # there may be a next answer

    def _limit_unsent(self, size: int) -> None:
        if self.sock.family in (socket.AF_INET, socket.AF_INET6):
            self.sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, size)

    def early_hints(self, headers: list[tuple[str, str]]) -> None:
        """`wsgi.early_hints`. `ClientGone` as from `write`."""
        _make_early_hints_callback(self.req, self, self)(headers)

    def sendall(self, data: bytes) -> None:
        """To gunicorn's early hints this is the socket."""
        self.send_all(data)

    @property
    def is_open_ended(self) -> bool:
        """Whether the body ends when the application says so."""
        return self.response_length is None and not self._omits_body_for(self.status_code)

    def be_patient_again(self) -> None:
        """What comes next is a message of its own to the client, who may take as long as for a first one."""
        self._patience = None

    def _emit_body(self, data: bytes | memoryview) -> None:
        if self.chunked:
            data = b"".join((b"%X\r\n" % len(data), data, b"\r\n"))
        if self._head:
            head, self._head = self._head, b""
            if len(data) <= _JOINED:
                data = head + data
            else:
                self.send_all(head)
        self.send_all(data)

    def send_all(self, data: bytes | memoryview) -> None:
        """Send all of it, as it is, within the client's time. `ClientGone` when the client does not take it."""
        # Not `sendall`: its timeout would be one for all of the data, however large.
        if self._gone is not None:
            raise self._gone  # what would follow now would stand in the middle of what was cut
        left = memoryview(data)
        if type(self.sock) is GeventSocket:
            try:
                sent = self.sock._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._give_up() from error
            if sent == len(left):
                return
            left = left[sent:]
        while left:
            left = left[self._send(partial(self.sock.send, left[:_SEND_STEP])) :]

    def _send(self, send: Callable[[], int]) -> int:
        """What `send` says it has sent, within the client's time."""
        if self._patience is None:
            self._patience = Patience(self._send_timeout)
        since, seconds = time.monotonic(), self._patience.left()
        try:
            if seconds <= 0:
                raise TimeoutError
            self.sock.settimeout(seconds)
            sent = send()
        except OSError as error:
            raise self._give_up() from error
        self._patience.spend(since, sent)
        return sent

    def _give_up(self) -> ClientGone:
        self.force_close()
        self._gone = ClientGone()
        return self._gone


# Names of fields that gunicorn treats as no more than a name and a value; learned from what it lets pass.
_ORDINARY: set[str] = set()
_EVENT_STREAM = ("Content-Type", "text/event-stream")
_RULED = frozenset({"content-length", "upgrade"})
_ORDINARY_STATUS = {f"{status.value} {status.phrase}": status.value for status in HTTPStatus}
_MAX_ORDINARY = 1024
_MAX_STARTS = 256


def _octets(view: memoryview) -> memoryview:
    """The same memory as bytes; a copy where it does not lie in order, or is of a shape that Python does not cast."""
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())


_starts: dict[object, str] = {}
_starts_of = 0


def _start_of_head(version: tuple[int, int], status: str, server: str, connection: str, chunked: bool) -> str:
    """The lines of a head that come before the application's fields: they change once a second, with `Date`."""
    global _starts_of
    now = int(time.time())
    if now != _starts_of or len(_starts) > _MAX_STARTS:
        _starts.clear()
        _starts_of = now
    key = version, status, server, connection, chunked
    start = _starts.get(key)
    if start is None:
        framing = "Transfer-Encoding: chunked\r\n" if chunked else ""
        start = _starts[key] = (
            f"HTTP/{version[0]}.{version[1]} {status}\r\nServer: {server}\r\nDate: {util.http_date(now)}\r\n"
            f"Connection: {connection}\r\n{framing}"
        )
    return start
