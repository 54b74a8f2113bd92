"""The gevent driver of the pool's client: thousands of greenlets wait, one hub reads.

The hub watches the reply pipe and the control socket; a frame switches to the greenlet that waits for it. A tick
lets deadlines pass and looks for callers whose connection is gone, so that nobody computes for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gevent
from gevent import monkey
from gevent.event import Event

from service.connection import TURN_S
from workers.connection import Connection
from workers.core import ClientCore, Task
from workers.errors import Cancelled, PoolError, PoolLost
from workers.model import Array
from workers.pieces import Pieces
from workers.status import ModelStatus

log = logging.getLogger("headrace.client")

TICK_S = 0.05
RECONNECT_S = 0.1
TROUBLE_S = 1.0  # until the next try after a failure nobody foresaw
READ_SIZE = 65536
_READ = 1  # a watcher's "readable"

_raw_socket = monkey.get_original("socket", "socket")
_raw_poll = monkey.get_original("select", "poll")


class HubClient:
    """A client of the pool that listens at `socket_path`, for the greenlets of one hub. `relaunch` is called when
    nobody listens there."""

    def __init__(self, socket_path: str, *, relaunch: Callable[[], None] | None = None) -> None:
        self._socket_path = socket_path
        self._relaunch = relaunch
        self._connection: Connection | None = None
        self._callers: dict[Task, socket.socket] = {}
        self._introduced = Event()
        self._lost = Event()
        self._closing = False
        self._keeper: gevent.Greenlet | None = None
        self._watchers: list[Any] = []

    def start(self) -> None:
        """Begin to connect, and never give up; switches to no other greenlet."""
        self._keeper = gevent.spawn(self._keep)

    def wait_introduced(self, seconds: float) -> bool:
        """Until the pool has introduced itself for the first time."""
        return bool(self._introduced.wait(seconds))

    # The contract of every client.

    def statuses(self) -> Mapping[str, ModelStatus]:
        return self._live().statuses()

    def admit(self, model: str) -> ModelStatus:
        return self._live().admit(model)

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> dict[str, Array]:
        connection = self._live()
        task, record = connection.prepare(model, inputs, deadline)
        core = self._run(connection, model, task, record, caller)
        try:
            return {name: array.copy() for name, array in core.arrays(task).items()}
        finally:
            core.release(task)

    def predict_body(
        self,
        model: str,
        body: bytes,
        codec: str,
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> bytes:
        connection = self._live()

        def pause() -> None:
            """Copying a large body takes long; the other greenlets get their turn in between."""
            gevent.sleep(TURN_S)
            if connection.lost:
                raise PoolLost("the pool is gone")

        task, record = connection.prepare_body(model, body, codec, deadline, pause)
        core = self._run(connection, model, task, record, caller)
        try:
            return core.body(task, pause)
        finally:
            core.release(task)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> Pieces:
        connection = self._live()
        task, record = connection.prepare_stream(model, inputs, deadline)
        self._enqueue(connection, model, task, record)
        assert connection.core is not None
        if caller is not None:
            self._callers[task] = caller
        return Pieces(connection.core, task, _wait_for_news, _wake, self._callers)

    def close(self) -> None:
        """Give everything back; whoever still waits gets `PoolLost`."""
        self._closing = True
        self._lost.set()
        if self._keeper is not None:
            self._keeper.join()

    def _live(self) -> Connection:
        connection = self._connection
        if connection is None or not connection.ready:
            raise PoolLost("there is no pool")
        return connection

    def _run(
        self, connection: Connection, model: str, task: Task, record: bytes, caller: socket.socket | None
    ) -> ClientCore:
        """Queue a prepared task and wait until it is settled."""
        core = connection.core
        assert core is not None
        hub = gevent.get_hub()
        task.wakes.append(gevent.getcurrent().switch)
        self._enqueue(connection, model, task, record)
        if caller is not None:
            self._callers[task] = caller
        try:
            while not (task.outcome or task.error):
                hub.switch()
        except BaseException:
            # This greenlet is being ended. Its task must not be left with nobody to take the answer.
            task.wakes.clear()
            if not core.abandon(task, Cancelled("the caller was ended")):
                core.release(task)
            raise
        finally:
            if caller is not None:
                self._callers.pop(task, None)
        return core

    def _enqueue(self, connection: Connection, model: str, task: Task, record: bytes) -> None:
        if task.spill is not None or not task.model.has_room:
            connection.enqueue(model, task, record)
        elif connection.enqueue_soon(model, task, record):
            # What one turn of the hub brings is queued at its end: a worker is woken once, and finds a batch.
            gevent.get_hub().loop.run_callback(self._guarded, partial(_enqueue_waiting, model), connection)

    # The hub's part.

    def _keep(self) -> None:
        while not self._closing:
            pause = RECONNECT_S  # a pool that cannot be used is not asked again and again
            try:
                self._keep_one()
            except Exception:  # no descriptors or memory left, for one: this greenlet has no successor
                log.exception("no connection to the pool now; trying again")
                pause = TROUBLE_S
            gevent.sleep(pause)

    def _keep_one(self) -> None:
        connection = self._connect()
        if connection is None:
            if self._relaunch is not None:
                self._relaunch()
            return
        self._lost.clear()
        try:
            self._watch(connection)
            if not self._closing:
                self._lost.wait()
        finally:
            self._lose(connection)

    def _connect(self) -> Connection | None:
        sock = _raw_socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            return Connection(self._socket_path, sock)
        except OSError:
            sock.close()
            return None

    def _watch(self, connection: Connection) -> None:
        self._connection = connection
        loop = gevent.get_hub().loop
        link = loop.io(connection.link.sock.fileno(), _READ)
        link.start(self._guarded, self._hear, connection)
        tick = loop.timer(TICK_S, TICK_S, ref=False)
        tick.start(self._guarded, self._tick, connection)
        self._watchers = [link, tick]

    def _guarded(self, step: Callable[[Connection], None], connection: Connection) -> None:
        # An exception that leaves a callback stops its watcher for good: every greenlet would wait for ever.
        try:
            step(connection)
        except PoolError as error:
            log.error("the pool cannot be used: %s", error)
            self._lost.set()
        except Exception:
            log.exception("the connection to the pool failed and is made anew")
            self._lost.set()

    def _hear(self, connection: Connection) -> None:
        was_ready = connection.ready
        _wake(connection.hear())
        connection.check()
        if connection.ready and not was_ready:
            reply = gevent.get_hub().loop.io(connection.reply, _READ)
            reply.start(self._guarded, self._read, connection)
            self._watchers.append(reply)
            self._introduced.set()
        if connection.lost:
            self._lost.set()

    def _read(self, connection: Connection) -> None:
        core = connection.core
        assert core is not None
        _wake(core.receive(os.read(connection.reply, READ_SIZE)))
        connection.check()

    def _tick(self, connection: Connection) -> None:
        core = connection.core
        if core is None:
            return
        connection.flush()
        _wake(core.expire(time.monotonic_ns()))
        if self._callers:
            _wake(connection.cancel_gone(self._callers, _raw_poll()))

    def _lose(self, connection: Connection) -> None:
        self._connection = None
        self._callers.clear()
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._watchers = []
        connection.lost = True
        tasks: list[Task] = []
        try:
            tasks += connection.hear_rest()
        finally:
            if connection.core is not None:
                tasks += connection.core.lose()
            connection.close()
            # Not in this greenlet; and by then one of theirs may have been ended, and wait for something else.
            gevent.get_hub().loop.run_callback(_wake, tasks)


def _enqueue_waiting(model: str, connection: Connection) -> None:
    _wake(connection.enqueue_waiting(model))


def _wake(tasks: list[Task]) -> None:
    for task in tasks:
        while task.wakes:
            task.wakes.pop()()
        if task.pieces is not None and (heard := task.heard) is not None:
            try:
                heard()
            except Exception:
                # Every other task is still to be woken.
                log.exception("whoever was to hear of a stream failed")


def _wait_for_news(task: Task, seconds: float | None) -> None:
    news = Event()
    wake = news.set
    task.wakes.append(wake)
    try:
        news.wait(seconds)
    finally:
        with contextlib.suppress(ValueError):  # who is woken has been taken off
            task.wakes.remove(wake)
