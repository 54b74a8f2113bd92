"""The client for programs with threads: `submit() → Future`, any number of threads at once.

There is no reader thread on the way of an answer. Of the threads that wait, one at a time is the reader: it blocks
in reading the reply pipe, settles whatever tasks the frames are for, and when its own is among them hands the
part on to another. A keeper thread hears the pool, lets deadlines pass, reads when nobody waits, and connects
again when the pool is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from types import TracebackType

from workers.connection import Connection
from workers.core import ClientCore, Task
from workers.errors import Cancelled, PoolError, PoolLost
from workers.model import Array
from workers.pieces import Pieces
from workers.status import ModelStatus, State

log = logging.getLogger("headrace.client")

TICK_S = 0.02
RECONNECT_S = 0.1
TROUBLE_S = 1.0  # until the next try after a failure nobody foresaw


class Future:
    """The answer of one task, to come. Take it by `result`, `answer` or `body`, or `cancel` it; any number of threads
    may ask for it at once. A future that is forgotten cancels itself.

    The first who comes for the answer has the slot to itself, and leaves to all others what became of it.
    """

    __slots__ = ("_client", "_connection", "_core", "_fate", "_task", "_untaken")

    def __init__(self, client: ThreadClient, connection: Connection, core: ClientCore, task: Task) -> None:
        self._client = client
        self._connection = connection
        self._core = core
        self._task = task
        self._untaken = [task]  # popped by the first
        self._fate: Fate | None = None

    def done(self) -> bool:
        return bool(self._task.outcome or self._task.error)

    def result(self, timeout: float | None = None) -> dict[str, Array]:
        """The outputs, arrays of shape (rows, *spec.shape), the caller's to keep; the same ones if asked again.

        Raises the task's `PoolError`, or `TimeoutError` if it is not settled within `timeout` seconds.
        """
        fate = self._fate
        if fate is None:
            fate = self._take(self._copies, timeout)
        if isinstance(fate, dict):
            return fate
        raise _error(fate)

    def answer(self, timeout: float | None = None) -> Answer:
        """As `result` without a copy: `with future.answer() as outputs:` gives views of shared memory that are
        valid within the block. Only once."""
        self.wait(timeout)
        try:
            task = self._untaken.pop()
        except IndexError:
            raise _error(self._await_fate(timeout)) from None
        self._settle(TAKEN)
        return Answer(self._core, task)

    def body(self, timeout: float | None = None) -> bytes:
        """The encoded answer of a task that was submitted as a body."""
        fate = self._fate
        if fate is None:
            fate = self._take(self._core.body, timeout)
        if isinstance(fate, bytes):
            return fate
        raise _error(fate)

    def wait(self, timeout: float | None = None) -> None:
        task = self._task
        if not (task.outcome or task.error):
            self._client.wait_for(self._connection, task, timeout)

    def cancel(self) -> bool:
        """Give the task up; true if it was not settled yet. It is not run if it has not begun."""
        task = self._task
        if self._core.abandon(task, Cancelled("the task was cancelled")):
            # Somebody may be waiting: for the reader to say so, or as the reader.
            _wake([task])
            self._connection.nudge()
            return True
        with contextlib.suppress(IndexError):
            self._untaken.pop()
            self._core.release(task)
            self._settle(Cancelled("the task was cancelled"))
        return False

    def __del__(self) -> None:
        if self._untaken:
            self.cancel()

    def _copies(self, task: Task) -> dict[str, Array]:
        return {name: array.copy() for name, array in self._core.arrays(task).items()}

    def _take(self, read: Callable[[Task], dict[str, Array] | bytes], timeout: float | None) -> Fate:
        """What `read` makes of the answer, or what became of it in the hands of another."""
        self.wait(timeout)
        try:
            task = self._untaken.pop()
        except IndexError:
            return self._await_fate(timeout)
        fate: Fate = TAKEN
        try:
            fate = read(task)
        except PoolError as error:
            fate = copy(error)  # itself it would lead back here by its traceback, in a circle
            raise
        finally:
            self._core.release(task)
            self._settle(fate)
        return fate

    def _settle(self, fate: Fate) -> None:
        self._fate = fate
        _wake([self._task])

    def _await_fate(self, timeout: float | None) -> Fate:
        """The first has the answer in hand, and says in a moment what becomes of it."""
        event = threading.Event()
        self._task.wakes.append(event.set)
        while self._fate is None:
            if self._core.arena.fd < 0:  # as in a child of fork, where the first is no more
                raise PoolLost("the pool is gone, and the answer with it")
            if not event.wait(timeout):
                raise TimeoutError("another thread is still at the answer")
            event.clear()
        return self._fate


TAKEN = "the answer has been taken already"
Fate = dict[str, Array] | bytes | PoolError | str
"""What became of an answer: a copy of it, its error, or why it is not to be had any more."""


def _error(fate: Fate) -> Exception:
    if isinstance(fate, PoolError):
        return fate
    return RuntimeError(fate if isinstance(fate, str) else TAKEN)


class Answer:
    """The outputs of a settled task in shared memory, until the block ends. Raises the task's error on entry."""

    __slots__ = ("_core", "_task")

    def __init__(self, core: ClientCore, task: Task) -> None:
        self._core = core
        self._task = task

    def __enter__(self) -> dict[str, Array]:
        try:
            return self._core.arrays(self._task)
        except PoolError:
            self._core.release(self._task)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._core.release(self._task)

    def __del__(self) -> None:
        # It may never have been entered.
        self._core.release(self._task)


class ThreadClient:
    """A client of the pool that listens at `socket_path`. `relaunch` is called when nobody does."""

    def __init__(self, socket_path: str, *, relaunch: Callable[[], None] | None = None) -> None:
        self._socket_path = socket_path
        self._relaunch = relaunch
        self._connection: Connection | None = None
        self._reader = threading.Lock()
        self._followers: dict[threading.Event, None] = {}
        self._callers: dict[Task, socket.socket] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._keeper = threading.Thread(target=self._keep, name="headrace client", daemon=True)
        _alive.add(self)

    def start(self) -> None:
        """Begin to connect; `wait_ready` says when that has come to something."""
        self._keeper.start()

    def __enter__(self) -> ThreadClient:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_introduced(self, seconds: float) -> bool:
        """Until the pool has introduced itself; how its models are is another question."""
        with self._changed:
            return self._changed.wait_for(self._introduced, seconds)

    def _introduced(self) -> bool:
        connection = self._connection
        return connection is not None and connection.ready

    def wait_ready(self, timeout: float = 60.0, models: Iterable[str] | None = None) -> None:
        """Until each of `models` (all of them by default) has a ready replica; `TimeoutError` says how things are."""
        wanted = None if models is None else set(models)

        def ready() -> bool:
            connection = self._connection
            if connection is None or not connection.ready:
                return False
            statuses = connection.statuses()
            return all(statuses[name].state is State.READY for name in (statuses if wanted is None else wanted))

        with self._changed:
            if not self._changed.wait_for(ready, timeout):
                connection = self._connection
                seen = connection.statuses() if connection is not None and connection.ready else "no pool"
                raise TimeoutError(f"not ready within {timeout:g} s: {seen}")

    # The contract of every client.

    def statuses(self) -> Mapping[str, ModelStatus]:
        return self._live().statuses()

    def admit(self, model: str) -> ModelStatus:
        return self._live().admit(model)

    def submit(self, model: str, inputs: Mapping[str, Array], *, deadline: float | None = None) -> Future:
        """Start one task. `inputs`: arrays of shape (rows, *spec.shape), read before this returns. `deadline`:
        absolute `time.monotonic()` seconds, the model's `timeout_s` from now by default. Raises at once what can
        be known at once: `InvalidInput`, `ModelNotFound`, `NotReady`, `Overloaded` …"""
        connection = self._live()
        task, record = connection.prepare(model, inputs, deadline)
        connection.enqueue(model, task, record)
        assert connection.core is not None
        return Future(self, connection, connection.core, task)

    def submit_body(self, model: str, body: bytes, codec: str, *, deadline: float | None = None) -> Future:
        """As `submit`, with a raw body that the worker decodes; take the answer by `Future.body`."""
        connection = self._live()
        task, record = connection.prepare_body(model, body, codec, deadline)
        connection.enqueue(model, task, record)
        assert connection.core is not None
        return Future(self, connection, connection.core, task)

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> dict[str, Array]:
        """`submit` and wait; `Cancelled` once the peer of `caller`, the connection of whoever asked, has gone."""
        future = self.submit(model, inputs, deadline=deadline)
        if caller is None:
            return future.result()
        with self._watching(future, caller):
            return future.result()

    def predict_body(
        self,
        model: str,
        body: bytes,
        codec: str,
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> bytes:
        future = self.submit_body(model, body, codec, deadline=deadline)
        if caller is None:
            return future.body()
        with self._watching(future, caller):
            return future.body()

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> Pieces:
        """Start one stream. `inputs`: arrays of shape (1, *spec.shape), read before this returns. `deadline`:
        absolute `time.monotonic()` seconds, the model's `stream_timeout_s` from now by default. Raises at once what
        can be known at once; what comes later, also `Cancelled` once the peer of `caller` has gone, ends the stream."""
        connection = self._live()
        task, record = connection.prepare_stream(model, inputs, deadline)
        connection.enqueue(model, task, record)
        assert connection.core is not None
        if caller is not None:
            self._callers[task] = caller

        def wait(task: Task, seconds: float | None) -> None:
            with contextlib.suppress(TimeoutError):
                self.wait_for(connection, task, seconds)

        def wake(tasks: list[Task]) -> None:
            _wake(tasks)
            connection.nudge()

        return Pieces(connection.core, task, wait, wake, self._callers)

    @contextlib.contextmanager
    def _watching(self, future: Future, caller: socket.socket) -> Iterator[None]:
        self._callers[future._task] = caller
        try:
            yield
        finally:
            self._callers.pop(future._task, None)

    def close(self) -> None:
        """Give everything back; whoever still waits gets `PoolLost`."""
        self._closing = True
        if self._keeper.is_alive():
            self._keeper.join()

    def _live(self) -> Connection:
        connection = self._connection
        if connection is None or not connection.ready:
            raise PoolLost("there is no pool")
        return connection

    # Waiting.

    def wait_for(self, connection: Connection, task: Task, timeout: float | None) -> None:
        """Until the task is settled, or has pieces: as the reader if nobody reads, else until the reader says so."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (task.outcome or task.error or task.pieces):
            if self._reader.acquire(blocking=False):
                try:
                    self._read_until(connection, task, until)
                finally:
                    self._reader.release()
                    self._pass_on()
            else:
                self._follow(task, until)
            if until is not None and time.monotonic() >= until and not (task.outcome or task.error or task.pieces):
                raise TimeoutError("the task is not settled yet")

    def _read_until(self, connection: Connection, task: Task, until: float | None) -> None:
        core = connection.core
        while not (task.outcome or task.error or task.pieces) and core is not None and not connection.lost:
            if until is not None and not _readable(connection.reply, until - time.monotonic()):
                return
            _wake(core.receive(os.read(connection.reply, 65536)))

    def _follow(self, task: Task, until: float | None) -> None:
        event = threading.Event()
        self._followers[event] = None
        task.wakes.append(event.set)
        try:
            # It may have been settled, or the reader may have left, before it was known that we wait.
            if not (task.outcome or task.error or task.pieces) and self._reader.locked():
                event.wait(None if until is None else max(0.0, until - time.monotonic()))
        finally:
            task.wakes.remove(event.set)
            del self._followers[event]

    def _pass_on(self) -> None:
        for event in list(self._followers):
            if not event.is_set():
                event.set()
                return

    # Keeping.

    def _keep(self) -> None:
        while not self._closing:
            pause = RECONNECT_S  # a pool that cannot be used is not asked again and again
            try:
                self._keep_one()
            except PoolError as error:
                log.error("the pool cannot be used: %s", error)
            except Exception:  # no descriptors or memory left, for one: this thread has no successor
                log.exception("no connection to the pool now; trying again")
                pause = TROUBLE_S
            if not self._closing:
                time.sleep(pause)

    def _keep_one(self) -> None:
        connection = self._connect()
        if connection is None:
            if self._relaunch is not None:
                self._relaunch()
            return
        try:
            self._keep_connection(connection)
        finally:
            self._lose(connection)

    def _connect(self) -> Connection | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            return Connection(self._socket_path, sock)
        except OSError:
            sock.close()
            return None

    def _keep_connection(self, connection: Connection) -> None:
        self._connection = connection
        while not self._closing and not connection.lost:
            if _readable(connection.link.sock.fileno(), TICK_S):
                settled = connection.hear()
                if settled:
                    # The reader may be the one who waits for them.
                    _wake(settled)
                    connection.nudge()
                with self._changed:
                    self._changed.notify_all()
            connection.check()
            core = connection.core
            if core is None:
                continue
            connection.flush()
            over = core.expire(time.monotonic_ns())
            if self._callers:
                over += connection.cancel_gone(dict(self._callers), select.poll())
            if over:
                _wake(over)
                connection.nudge()
            if core.under_way and self._reader.acquire(blocking=False):
                try:
                    while _readable(connection.reply, 0):
                        _wake(core.receive(os.read(connection.reply, 65536)))
                finally:
                    self._reader.release()
                    self._pass_on()

    def _lose(self, connection: Connection) -> None:
        connection.lost = True
        self._connection = None
        self._callers.clear()
        if connection.core is not None:
            connection.nudge()
        with self._reader:
            try:
                _wake(connection.hear_rest())
            finally:
                if connection.core is not None:
                    _wake(connection.core.lose())
                connection.close()
        self._pass_on()
        with self._changed:
            self._changed.notify_all()

    def _forked(self) -> None:
        """In a child of fork, where none of the parent's threads is there to unlock what it had locked."""
        connection, self._connection = self._connection, None
        self._closing = True
        self._reader = threading.Lock()
        self._changed = threading.Condition()
        if connection is not None:
            connection.forked()


def _wake(tasks: list[Task]) -> None:
    for task in tasks:
        if task.wakes:
            # A copy: whoever wakes takes itself off.
            for wake in list(task.wakes):
                wake()
        if task.pieces is not None and (heard := task.heard) is not None:
            try:
                heard()
            except Exception:
                # Every other task is still to be woken.
                log.exception("whoever was to hear of a stream failed")


def _readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))


_alive: weakref.WeakSet[ThreadClient] = weakref.WeakSet()


def _drop_in_child() -> None:
    for client in list(_alive):
        client._forked()


os.register_at_fork(after_in_child=_drop_in_child)
