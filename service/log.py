"""One line per completed request, `METHOD path -> status` with milliseconds and request id, and where it goes.

`Observed` watches one request at the WSGI level, so that every answer has its line, streams at their end and
aborted ones too. `start` is for processes whose logging is ours to set up: web processes under gunicorn. There the
lines of requests do not pass through `logging`, which costs more than many a request, unless somebody has a handler,
a filter or a level of their own in its way.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from service.environ import ID_KEY, VIEWS_KEY
from service.request import decoded_path
from service.streams import EventStream, HandlerEvents
from workers.log import UnblockingHandler

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

logger = logging.getLogger("headrace.request")

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None] | None


class Observed:
    """One request under way: gives it its id, sees its status and its body go by, logs it once it is over."""

    __slots__ = ("_complete", "_environ", "_pieces", "_start_response", "_started", "_status", "id")

    def __init__(self, environ: WSGIEnvironment, start_response: StartResponse) -> None:
        given = environ.get("HTTP_X_REQUEST_ID", "")
        self.id = given if given and _SANE_ID.fullmatch(given) else random.getrandbits(64).to_bytes(8, "big").hex()
        environ[ID_KEY] = self.id
        self._environ: WSGIEnvironment | None = environ
        self._start_response = start_response
        self._started = time.monotonic()
        self._status = "-"
        self._pieces: Iterable[bytes] = ()
        self._complete = False

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: _ExcInfo = None
    ) -> Callable[[Any], object]:
        write = self._start_response(status, [*headers, ("X-Request-ID", self.id)], exc_info)
        self._status = status[:3]
        return write

    def sends_views(self, environ: WSGIEnvironment) -> bool:
        """Whether the server takes memoryviews, and nobody stands in between."""
        return self._start_response == environ.get(VIEWS_KEY)

    def watch(self, pieces: Iterable[Any]) -> Iterable[bytes]:
        """The pieces of the body; the server closes it when it has sent them, or has given up."""
        self._pieces = pieces
        return self

    @property
    def event_stream(self) -> EventStream | None:
        """The body, if a server may send it from its hub. Iterated over afterwards, this finds that all has gone."""
        return self._pieces if isinstance(self._pieces, EventStream) else None

    @property
    def client_left(self) -> Callable[[], None] | None:
        """What a server that sees its clients leave may call."""
        return self._pieces.client_left if isinstance(self._pieces, HandlerEvents) else None

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:  # noqa: UP028  # which would close the pieces too: `close` does
            yield piece
        self._complete = True

    def close(self) -> None:
        try:
            if type(self._pieces) is not tuple:
                close = getattr(self._pieces, "close", None)
                if close is not None:
                    close()
        finally:
            self._finish()

    def failed(self) -> None:
        """The application has raised: what the client gets, if anything, is the server's word."""
        self._finish()

    def _finish(self) -> None:
        environ, self._environ = self._environ, None
        if environ is None:
            return
        elapsed_ms = (time.monotonic() - self._started) * 1000
        path = decoded_path(environ)
        if not path.isprintable():
            path = printable(path)
        end = "" if self._complete else " aborted"
        line = f"{environ['REQUEST_METHOD']} {path} -> {self._status}{end} {elapsed_ms:.1f} ms {self.id}"
        if _lines is not None and _lines.takes:
            _lines.add(line)
        else:
            logger.info("%s", line)


class Lines(UnblockingHandler):
    """The handler of a web process. Under gevent the lines of requests wait for the end of the hub's turn and leave in
    one write; every other line leaves at once, behind those that wait. With threads, and in a thread that is not the
    hub's, they are lines like any other."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._form = self.formatter
        self._second = 0
        self._stamp = self._start = ""
        self.begin()

    def begin(self) -> None:
        """In a new process: nothing of its parent's waits here, and its loop is another."""
        self._pid = os.getpid()
        self._millisecond = 0
        self._waiting: list[bytes] = []
        self._loop: Any = None
        self._ident: Callable[[], int] = int
        self._thread = 0

    @property
    def takes(self) -> bool:
        """Whether `add` may take a request's line: here, and to the same end as `logging`. What holds for the first
        line of a turn holds for the others."""
        if self._loop is None and not self._find_loop():
            return False
        return self._ident() == self._thread and (bool(self._waiting) or self._alone)

    @property
    def _alone(self) -> bool:
        return (
            len(_headrace.handlers) == 1
            and _headrace.handlers[0] is self
            and not (logger.handlers or logger.filters or self.filters or self.level or _headrace.propagate)
            and logger.propagate
            and self.formatter is self._form
            and logger.isEnabledFor(logging.INFO)
        )

    def _find_loop(self) -> bool:
        """Whether this process lives by gevent's event loop; asked without importing gevent."""
        monkey = sys.modules.get("gevent.monkey")
        if monkey is None or not monkey.is_module_patched("socket"):
            return False
        self._loop = sys.modules["gevent"].get_hub().loop
        self._ident = monkey.get_original("_thread", "get_ident")
        self._thread = self._ident()
        return True

    def add(self, line: str) -> None:
        now = int(time.time() * 1000)
        if now != self._millisecond:
            self._begin_millisecond(now)
        self._waiting.append(f"{self._start}{line}\n".encode("utf-8", "backslashreplace"))
        if len(self._waiting) == 1:
            self._loop.run_callback(self.flush)

    def _begin_millisecond(self, now: int) -> None:
        second, part = divmod(now, 1000)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        self._millisecond, self._start = now, f"{self._stamp},{part:03d} [{self._pid}] "

    def emit(self, record: logging.LogRecord) -> None:
        self.flush()
        super().emit(record)

    def flush(self) -> None:
        if self._ident() != self._thread:
            return  # they are the hub's
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.write(waiting)


_headrace = logging.getLogger("headrace")
_lines: Lines | None = None


def start(stream: TextIO | None = None) -> None:
    """Send what `headrace…` loggers say to stderr; a reader of stderr that has stopped never stops a request."""
    global _lines
    _lines = Lines((stream or sys.stderr).fileno())
    _headrace.handlers = [_lines]
    _headrace.setLevel(logging.INFO)
    _headrace.propagate = False


def _begin_in_child() -> None:
    if _lines is not None:
        _lines.begin()


os.register_at_fork(after_in_child=_begin_in_child)


def printable(text: str) -> str:
    """`text` on one line, whatever a client put into it."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
