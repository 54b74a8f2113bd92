"""One line per completed request, `METHOD path -> status` with milliseconds and request id, and where it goes.

`Observed` watches one request at the WSGI level, so that every answer has its line, streams at their end and
aborted ones too. `start` is for processes whose logging is ours to set up: web processes under gunicorn.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from service.environ import ID_KEY
from service.request import decoded_path
from workers.log import UnblockingHandler

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

logger = logging.getLogger("headrace.request")

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None] | None


class Observed:
    """One request under way: gives it its id, sees its status, logs it once it is over."""

    def __init__(self, environ: WSGIEnvironment, start_response: StartResponse) -> None:
        given = environ.get("HTTP_X_REQUEST_ID", "")
        self.id = given if _SANE_ID.fullmatch(given) else os.urandom(8).hex()
        environ[ID_KEY] = self.id
        self._environ = environ
        self._start_response = start_response
        self._started = time.monotonic()
        self._status = "-"

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: _ExcInfo = None
    ) -> Callable[[bytes], object]:
        write = self._start_response(status, [*headers, ("X-Request-ID", self.id)], exc_info)
        self._status = status[:3]
        return write

    def watch(self, pieces: Iterable[bytes]) -> Iterable[bytes]:
        return _Watched(pieces, self._finished)

    def failed(self) -> None:
        """The application has raised: what the client gets, if anything, is the server's word."""
        self._finished(aborted=True)

    def _finished(self, aborted: bool) -> None:
        elapsed_ms = (time.monotonic() - self._started) * 1000
        path = printable(decoded_path(self._environ))
        method = self._environ["REQUEST_METHOD"]
        end = " aborted" if aborted else ""
        logger.info("%s %s -> %s%s %.1f ms %s", method, path, self._status, end, elapsed_ms, self.id)


class _Watched:
    """The pieces of a body; the server closes it when it has sent them, or has given up."""

    def __init__(self, pieces: Iterable[bytes], finished: Callable[[bool], None]) -> None:
        self._pieces = pieces
        self._iterator: Iterator[bytes] | None = None
        self._finished: Callable[[bool], None] | None = finished
        self._complete = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._iterator is None:
            self._iterator = iter(self._pieces)
        try:
            return next(self._iterator)
        except StopIteration:
            self._complete = True
            raise

    def close(self) -> None:
        try:
            close = getattr(self._pieces, "close", None)
            if close is not None:
                close()
        finally:
            finished, self._finished = self._finished, None
            if finished is not None:
                finished(not self._complete)


def start(stream: TextIO | None = None) -> None:
    """Send what `headrace…` loggers say to stderr; a reader of stderr that has stopped never stops a request."""
    root = logging.getLogger("headrace")
    root.handlers = [UnblockingHandler((stream or sys.stderr).fileno())]
    root.setLevel(logging.INFO)
    root.propagate = False


def printable(text: str) -> str:
    """`text` on one line, whatever a client put into it."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
