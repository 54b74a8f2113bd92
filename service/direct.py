"""Streams sent from the hub: the callback that has read a piece writes it to the client's socket, and no greenlet is
woken for it.

The greenlet of the connection is parked meanwhile. It is woken when the stream ends, or when the socket takes no more:
then it sends what is left, as slowly as a client may read, and nothing more is produced until that has gone out. The
gunicorn worker loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import gevent
from gevent.socket import socket as GeventSocket

from service.answer import Answer
from service.connection import LOOK_S, ClientGone, Doorbell
from service.environ import PING


class Stream(Protocol):
    """A body as it is sent from here; see `service.streams.EventStream`."""

    heartbeat: float
    over: bool

    def frames(self) -> bytes: ...

    def grant(self) -> None: ...

    def notify(self, heard: Callable[[], None] | None) -> None: ...


def send(answer: Answer, stream: Stream, pieces: Iterable[bytes]) -> None:
    """Send a stream, from the hub where that can be. `pieces`: the same as the server would iterate over it."""
    doorbell = answer.reader.doorbell
    if doorbell is not None and type(answer.sock) is GeventSocket and answer.is_open_ended:
        Direct(answer, stream).run(doorbell)
    for piece in pieces:
        answer.write(piece)


class Direct:
    """One stream on its way. All but `run` is for the hub, and never raises."""

    __slots__ = (
        "_answer",
        "_chunked",
        "_failure",
        "_greenlet",
        "_hub",
        "_left",
        "_parked",
        "_quiet_since",
        "_send",
        "_spoke",
        "_stream",
        "_waking",
    )

    def __init__(self, answer: Answer, stream: Stream) -> None:
        self._answer = answer
        self._stream = stream
        self._hub = gevent.get_hub()
        self._greenlet = gevent.getcurrent()
        self._send: Callable[[bytes], int] = answer.sock._sock.send  # the system's, which never blocks
        self._chunked: bool = answer.chunked
        self._left = b""  # what the socket has not taken
        self._failure: Exception | None = None
        self._parked = False
        self._waking = False
        self._spoke = True  # since the last look
        self._quiet_since = 0.0

    def run(self, doorbell: Doorbell) -> None:
        """Until all of the stream has been sent but for the end of the body. `ClientGone` when the client does not
        take it."""
        stream = self._stream
        self._answer.write(stream.frames())  # the first ones go out with the head
        self._chunked = self._answer.chunked
        stream.grant()
        try:
            doorbell.send_from_hub(self)
            stream.notify(self._hear)
            self._hear()  # what has come meanwhile
            while self._failure is None:
                if self._left:
                    self._send_left()
                elif not stream.over:
                    self._park()
                else:
                    return
            raise self._failure
        finally:
            stream.notify(None)
            doorbell.send_from_hub(None)

    def _send_left(self) -> None:
        self._answer.be_patient_again()
        self._answer.send_all(self._left)
        self._left = b""
        self._spoke = True
        self._stream.grant()
        self._hear()

    def _hear(self) -> None:
        """There may be something to send."""
        if not self._may_send:
            return  # its turn comes when what is left has gone out
        try:
            data = self._stream.frames()
            if data:
                self._say(data)
            if self._stream.over:
                self._wake()
        except Exception as error:  # one stream's trouble is not another's
            self._fail(error)

    @property
    def _may_send(self) -> bool:
        """Whether nothing before it is left, or has got lost."""
        return not self._left and self._failure is None

    def look(self, now: float) -> float:
        """Shows the client that a silent stream lives. When to look again."""
        often = min(1.0, self._stream.heartbeat / 5)
        if self._spoke:
            self._spoke, self._quiet_since = False, now
        elif now - self._quiet_since >= self._stream.heartbeat - 2 * (often + LOOK_S) and self._may_send:
            try:
                self._say(PING)
            except Exception as error:
                self._fail(error)
        return now + often

    def _say(self, data: bytes) -> None:
        self._answer.sent += len(data)
        if self._chunked:
            data = b"%X\r\n%b\r\n" % (len(data), data)
        try:
            sent = self._send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ClientGone from error
        self._spoke = True
        if sent == len(data):
            self._stream.grant()
        else:
            self._left = data[sent:]
            self._wake()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._wake()

    # The greenlet

    def _park(self) -> None:
        self._parked = True
        try:
            self._hub.switch()
        finally:
            self._parked = False

    def _wake(self) -> None:
        if self._parked and not self._waking:
            self._waking = True
            self._hub.loop.run_callback(self._switch)

    def _switch(self) -> None:
        self._waking = False
        if self._parked:  # or it has been ended since, and waits for something else
            self._greenlet.switch()
