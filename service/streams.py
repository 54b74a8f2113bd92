"""The bodies of streaming answers: what a model produces piece by piece, or a handler event by event.

`EventStream` goes two ways. Any WSGI server iterates over it: that waits for pieces, and says `: ping` when none have
come for a while. The lean worker sends it from the hub (`service.direct`), by `frames`, `grant` and `notify`, with no
greenlet to wake for each piece. What the client sees is the same.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import gevent
from gevent import monkey

from service import sse
from service.client import PieceStream
from service.config import Settings
from service.connection import ClientGone
from service.environ import PING, WATCH_KEY
from service.open_streams import streams
from service.sse import Form, WholeCharacters
from workers.errors import Cancelled, Draining, Overloaded, PoolError

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

Start = Callable[[socket.socket | None], PieceStream]
"""Begins a task. It is given the connection that waits for the answer, for the pool's client to watch; None where that
is seen to."""

Watch = Callable[[Callable[[], None]], Callable[[], None]]
FIRST_PIECE_S = 15.0  # then the headers go out without one, and what fails later has no status of its own

logger = logging.getLogger("headrace")


class TooManyStreams(Overloaded):
    """This process has as many streams open as it may: another one, or this one soon, can take it."""


class ClientLeft(ClientGone, BrokenPipeError):
    """Ends the iteration over the stream of a client that has left: an error that every server knows not to log."""

    def __init__(self) -> None:
        super().__init__(errno.EPIPE, "the client has left")


class EventStream:
    """One stream as server-sent events. `over` once all of it has been taken. Closed by the server, like any body."""

    def __init__(self, form: Form, heartbeat: float) -> None:
        self.over = False
        self.heartbeat = heartbeat
        self._form = form
        self._characters = WholeCharacters()
        self._stream: PieceStream | None = None
        self._unwatch: Callable[[], None] | None = None
        self._ready = b""  # frames to be handed out before any others
        self._cut: PoolError | None = None  # why it is ended from outside
        self._heard: Callable[[], None] | None = None
        self._given = False
        self._has_left = False  # the client, as the end has shown
        _take_place(self)

    def begin(self, start: Start, environ: WSGIEnvironment, seconds: float = FIRST_PIECE_S) -> EventStream:
        """Start the task and wait for the first piece, or so long. A failure before that is raised."""
        watch: Watch | None = environ.get(WATCH_KEY)
        try:
            self._stream = stream = start(None if watch else environ.get("gunicorn.socket"))
            if watch is not None:
                self._unwatch = watch(_calling(self._client_left))
            until = time.monotonic() + seconds
            while not (self._ready or self._has_ended()):
                left = until - time.monotonic()
                if left <= 0:
                    self._ready = PING
                    break
                stream.wait(left)
                self._collect()
            failure = self._failure()
            if failure is not None and not self._ready:
                raise failure
        except BaseException:
            self.close()
            raise
        return self

    # For a server that sends it from its hub

    def frames(self) -> bytes:
        """All that has come and has not been handed out, b"" when there is nothing. Never blocks."""
        if self.over or self._stream is None:
            return b""
        if self._cut is None:
            self._collect()
        if self._has_ended():
            self.over = True
            self._ready += self._ending()
        data, self._ready = self._ready, b""
        return data

    def grant(self) -> None:
        """What has been handed out has been sent: more may be produced."""
        if self._stream is not None and self._cut is None:
            self._stream.grant()

    def notify(self, heard: Callable[[], None] | None) -> None:
        """Have `heard` called in the hub when there is something to take."""
        self._heard = heard
        if self._stream is not None:
            self._stream.notify(heard)

    # For any server

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._given:
            self.grant()  # a server that asks for more has sent what it was given
        self._given = True
        until = time.monotonic() + self.heartbeat
        while not (data := self.frames()):
            if self.over or self._stream is None:
                self.close()  # not every server does that at once
                if self._has_left:
                    raise ClientLeft
                raise StopIteration
            left = until - time.monotonic()
            if left <= 0:
                return PING
            self._stream.wait(left)
        return data

    def close(self) -> None:
        """Give everything back; what is still being produced is cancelled."""
        self.over = True
        streams.discard(self)
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()
        stream, self._stream, self._heard = self._stream, None, None
        if stream is not None:
            stream.close()

    def __del__(self) -> None:
        if self._stream is not None:  # a middleware has put another answer in its place
            self.close()

    # Ended from outside

    def server_ends(self) -> None:
        self._cut_short(Draining("the server is stopping"))

    def _client_left(self) -> None:
        self._cut_short(Cancelled("the client has left"))

    def _cut_short(self, error: PoolError) -> None:
        stream = self._stream
        if stream is None or self.over or self._cut is not None:
            return
        try:
            self._collect()
            self._cut = error
            stream.close()
            if self._heard is not None:
                self._heard()
        except Exception:  # called by the hub, and for one stream after the other
            logger.exception("a stream could not be ended")

    # Within

    def _collect(self) -> None:
        """Make frames of the pieces that have come."""
        assert self._stream is not None
        pieces = self._stream.take()
        if not pieces:
            return
        try:
            for piece in pieces:
                text = self._characters.take(piece)
                if text:
                    self._ready += self._form.frame(text)
        except Exception as error:  # the form is a handler's
            self._cut = _Broken(error)
            self._stream.close()
            return
        if not self._ready:
            self._stream.grant()  # half a character only: nobody will send it

    def _has_ended(self) -> bool:
        return self._cut is not None or (self._stream is not None and self._stream.ended)

    def _failure(self) -> Exception | None:
        """Why it was cut short, once it has ended."""
        if isinstance(self._cut, _Broken):
            return self._cut.error
        if self._cut is not None or self._stream is None or not self._stream.ended:
            return self._cut
        return self._stream.failure()

    def _ending(self) -> bytes:
        failure = self._failure()
        self._has_left = isinstance(failure, Cancelled)
        try:
            if failure is not None:
                return self._form.failed(failure)
            tail = self._characters.take(b"", last=True)
            return (self._form.frame(tail) if tail else b"") + self._form.end
        except Exception as error:  # as in `_collect`
            return sse.failure(error)


class _Broken(PoolError):
    """Stands for what a handler's form has raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _calling(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method of a stream while there is that stream: who watches must not keep one that was replaced."""
    bound = WeakMethod(method)

    def call() -> None:
        still = bound()
        if still is not None:
            still()

    return call


class _Interrupted(BaseException):
    """Thrown into the code of a handler that makes events, where it waits."""


class HandlerEvents:
    """The events that a handler makes, one by one. Under gevent it is interrupted where it waits, when the client has
    left or the server ends; elsewhere that shows at its next event."""

    def __init__(self, events: Iterable[Mapping[str, object]]) -> None:
        self._frames = sse.frames(events)
        self._cut: PoolError | None = None
        self._told = False
        self._waiting: Any = None  # the greenlet that is in the handler's code
        _take_place(self)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._cut is None:
            self._waiting = gevent.getcurrent() if monkey.is_module_patched("socket") else None
            try:
                return next(self._frames)
            except _Interrupted:
                pass
            finally:
                self._waiting = None
        self._frames.close()
        if isinstance(self._cut, Cancelled):
            raise ClientLeft
        if self._told or self._cut is None:
            raise StopIteration
        self._told = True
        return sse.failure(self._cut)

    def close(self) -> None:
        streams.discard(self)
        self._frames.close()

    def server_ends(self) -> None:
        self._interrupt(Draining("the server is stopping"))

    def client_left(self) -> None:
        self._interrupt(Cancelled("the client has left"))

    def _interrupt(self, error: PoolError) -> None:
        if self._cut is None:
            self._cut = error
            if self._waiting is not None:
                gevent.get_hub().loop.run_callback(self._throw, self._waiting)

    def _throw(self, greenlet: Any) -> None:
        if self._waiting is greenlet:  # not when it has come back meanwhile
            greenlet.throw(_Interrupted)


def _take_place(stream: EventStream | HandlerEvents) -> None:
    if streams.ending:
        raise Draining("the server is stopping")
    if not streams.add(stream):
        raise TooManyStreams(f"{streams.limit} streams are open, and no more may be in this web process")


@functools.cache
def heartbeat_s() -> float:
    """The setting of this process."""
    return Settings.from_env(os.environ).heartbeat
