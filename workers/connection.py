"""A client's connection to the pool, without waiting: the control socket, the queues, the reply pipe, the core.

Both drivers own one at a time and make a new one when the pool is lost. They call `hear` when the control socket
is readable, hand what they read from `reply` to `core.receive`, and wake whoever waits for the tasks that come
back. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from workers import control
from workers.arena import Arena, no_pause
from workers.core import ClientCore, Task
from workers.errors import Cancelled, Draining, Overloaded, PoolError, PoolLost
from workers.model import Array
from workers.modelview import ModelView
from workers.records import FRAME, RECORDS_PER_WRITE
from workers.status import ModelStatus

AT_ONCE_NS = 1_000_000
CLOCKS_APART_NS = 10_000_000_000
FOREVER_S = 9e9
REPLY_PIPE_BYTES = 1 << 20
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_POLLRDHUP = 0x2000


class Connection:
    """Connects on being made (`OSError` if nobody listens). `ready` once the pool has introduced itself, `lost`
    once it is gone."""

    def __init__(self, socket_path: str, sock: socket.socket) -> None:
        self._blinded: list[int] = []
        sock.setblocking(False)
        sock.connect(socket_path)
        self.link = control.Link(sock)
        self.ready = False
        self.lost = False
        self.core: ClientCore | None = None
        self.reply = -1
        self._reply_write = -1
        self._queues: dict[str, int] = {}
        self._waiting: defaultdict[str, list[tuple[Task, bytes]]] = defaultdict(list)  # to be queued together
        self._admitted: dict[str, int] = {}  # when a task of each model was last admitted that has not come yet
        self._welcome: control.Welcome | None = None
        self._arena: Arena | None = None
        self._statuses: list[ModelStatus] = []
        self._trouble: Exception | None = None

    # Submitting.

    def admit(self, name: str) -> ModelStatus:
        """The model's status, if it takes a task now; raises why not. Whoever was admitted and comes with the task at
        once is not asked again."""
        view = self._core().model(name)
        now_ns = time.monotonic_ns()
        self._admit(view, now_ns)
        self._admitted[name] = now_ns
        return view.status

    def _admit(self, view: ModelView, now_ns: int) -> None:
        if not view.admits(now_ns):
            queue = self._queues.get(name := view.status.name)
            if queue is None:
                raise Draining("the pool is draining")
            view.admit(control.queue_depth(queue) + len(self._waiting[name]), now_ns)

    def _admitted_model(self, core: ClientCore, name: str, now_ns: int) -> ModelView:
        view = core.model(name)
        if now_ns - self._admitted.pop(name, 0) > AT_ONCE_NS:
            self._admit(view, now_ns)
        return view

    def prepare(self, name: str, inputs: Mapping[str, Array], deadline: float | None) -> tuple[Task, bytes]:
        """A task with its inputs in shared memory, and the record for `enqueue`: register the waiter in between."""
        core = self._core()
        now = time.monotonic_ns()
        view = self._admitted_model(core, name, now)
        try:
            return core.submit(view, inputs, _deadline_ns(deadline, view.status.timeout_s, now), now)
        except ValueError:
            self._raise_if_lost()
            raise

    def prepare_body(
        self, name: str, body: bytes, codec: str, deadline: float | None, pause: Callable[[], object] = no_pause
    ) -> tuple[Task, bytes]:
        core = self._core()
        now = time.monotonic_ns()
        view = self._admitted_model(core, name, now)
        try:
            return core.submit_body(view, body, codec, _deadline_ns(deadline, view.status.timeout_s, now), now, pause)
        except ValueError:
            self._raise_if_lost()
            raise

    def prepare_stream(self, name: str, inputs: Mapping[str, Array], deadline: float | None) -> tuple[Task, bytes]:
        core = self._core()
        now = time.monotonic_ns()
        view = self._admitted_model(core, name, now)
        try:
            return core.submit_stream(view, inputs, _deadline_ns(deadline, view.status.stream_timeout_s, now), now)
        except ValueError:
            self._raise_if_lost()
            raise

    def enqueue(self, name: str, task: Task, record: bytes) -> None:
        """Into the model's queue. `Overloaded` if that is full; the task is then withdrawn."""
        core = self._core()
        try:
            if task.spill is not None:
                sent = self.link.send(control.Spill(task.spill.id), [os.dup(task.spill.fd)])
                if not sent:
                    # The pool is behind: a worker would ask it for inputs that it has not heard of.
                    raise BlockingIOError
            os.write(self._queues[name], record)
        except (OSError, KeyError) as error:
            core.withdraw(task)
            raise self._unqueued(name, error) from None
        if self.lost:
            # Whoever told the waiters of the loss may not have seen this one.
            core.abandon(task, PoolLost("the pool is gone"))
            self._raise_if_lost()

    def enqueue_soon(self, name: str, task: Task, record: bytes) -> bool:
        """As `enqueue`, for a task without a spill, by the next `enqueue_waiting`; whether it is the first to wait for
        that."""
        waiting = self._waiting[name]
        waiting.append((task, record))
        return len(waiting) == 1

    def enqueue_waiting(self, name: str) -> list[Task]:
        """Queue what waits for it, in as few writes as can be, which are also as few as the workers have to read. Those
        that could not be queued are withdrawn, and come back to have their waiters told: `error` says why."""
        waiting, self._waiting[name] = self._waiting[name], []
        refused: list[Task] = []
        if self.core is None or self.lost:
            return refused  # with the connection they have been given up
        for start in range(0, len(waiting), RECORDS_PER_WRITE):
            together = waiting[start : start + RECORDS_PER_WRITE]
            if len(together) > 1:
                with contextlib.suppress(OSError, KeyError):
                    os.write(self._queues[name], b"".join([record for _, record in together]))
                    continue
            # One by one each gets in, or its own error.
            for task, record in together:
                try:
                    os.write(self._queues[name], record)
                except (OSError, KeyError) as error:
                    self.core.withdraw(task)
                    if task.error is None:
                        task.error = self._unqueued(name, error)
                    refused.append(task)
        return refused

    def _unqueued(self, name: str, error: OSError | KeyError) -> PoolError:
        """Why a record did not get into the queue of the model."""
        if isinstance(error, BlockingIOError):
            return Overloaded(f"the queue of model {name!r} is full")
        if isinstance(error, OSError) and error.errno in _SCARCE:
            return Overloaded(f"the inputs cannot be handed over: {error.strerror}")
        if isinstance(error, OSError) or self.lost:
            # Nobody can read the queue: the pool has just died, which we may have yet to hear.
            return PoolLost("the pool is gone")
        return Draining("the pool is draining")

    def statuses(self) -> dict[str, ModelStatus]:
        return {name: view.status for name, view in self._core().models.items()}

    def _core(self) -> ClientCore:
        if self.core is None or not self.ready or self.lost:
            raise PoolLost("there is no pool")
        return self.core

    def _raise_if_lost(self) -> None:
        """The memory may have been let go of, and the queues closed, in the middle of what another thread did."""
        if self.lost:
            raise PoolLost("the pool is gone") from None

    # Hearing.

    def hear(self) -> list[Task]:
        """Heed everything the pool has said; the tasks that this settles. What cannot be heeded ends the connection:
        `check` raises it, once the waiters of those tasks are awake."""
        settled: list[Task] = []
        if not self.lost:
            try:
                if not self.link.hear(lambda message, fds: self._heed(message, fds, settled)):
                    self.lost = True
            except Exception as error:  # nonsense, or no descriptors or memory left
                self._trouble = error
                self.lost = True
        return settled

    def check(self) -> None:
        """Raise what has made the connection unusable."""
        trouble = self._trouble or (self.core.trouble if self.core is not None else None)
        if trouble is not None:
            raise trouble

    def _heed(self, message: control.Message, fds: list[int], settled: list[Task]) -> None:
        if isinstance(message, control.Welcome):
            self._register(message)
        elif isinstance(message, control.Status):
            self._learn(message.model)
        elif isinstance(message, control.Queue):
            self._queues[message.model] = fds.pop()
        elif isinstance(message, control.Settled):
            self._introduced()
        elif isinstance(message, control.SpilledTo) and self.core is not None:
            settled += self.core.spilled(message.slot, message.seq, fds.pop())
        elif isinstance(message, control.CloseQueues):
            self._close_queues()
            self.link.send(control.QueuesClosed())

    def _register(self, welcome: control.Welcome) -> None:
        apart = abs(time.monotonic_ns() - welcome.clock_ns)
        if apart > CLOCKS_APART_NS:
            raise PoolLost(f"the pool's clock is {apart / 1e9:.0f} s away: deadlines would mean nothing")
        self._welcome = welcome
        arena = self._arena = Arena.create(welcome.slots)
        self.reply, self._reply_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reply_write, False)
        # Room for many streams' pieces between two looks; if the system has no more to give, workers wait sooner.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._reply_write, fcntl.F_SETPIPE_SZ, REPLY_PIPE_BYTES)
        fds = [os.dup(arena.fd)]
        try:
            fds.append(control.reopen(self._reply_write, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            control.close_all(fds)
            raise
        self.link.send(control.Register(os.getpid()), fds)

    def _learn(self, status: ModelStatus) -> None:
        if self.core is None:
            self._statuses.append(status)
        else:
            self.core.models[status.name].update(status)

    def _introduced(self) -> None:
        assert self._welcome is not None and self._arena is not None
        self.core = ClientCore(self._arena, self._welcome.arena, self._statuses, self._welcome.spill_limit)
        self.ready = True

    # Keeping.

    def cancel_gone(self, callers: Mapping[Task, socket.socket], poll: select.poll) -> list[Task]:
        """Cancel the tasks whose caller has hung up, or has ended its side, which looks the same; those that somebody
        waited for until now. One system call, on a new `poll`, for all of them."""
        core = self.core
        if core is None:
            return []
        watched: dict[int, list[Task]] = {}
        for task, caller in callers.items():
            fd = caller.fileno()
            if fd >= 0:
                watched.setdefault(fd, []).append(task)
                poll.register(fd, _POLLRDHUP)
        gone = [task for fd, _ in poll.poll(0) for task in watched[fd]]
        return [task for task in gone if core.abandon(task, Cancelled("the client has gone"))]

    def hear_rest(self) -> list[Task]:
        """What was said last, before the pool was lost; the tasks it is for. Nobody else may be reading `reply`."""
        heard: list[Task] = []
        if self.core is not None and self.reply >= 0:
            os.set_blocking(self.reply, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    heard += self.core.receive(os.read(self.reply, REPLY_PIPE_BYTES))
        return heard

    def nudge(self) -> None:
        """Wake whoever is blocked in reading the reply pipe, by a frame that means nothing."""
        # If the pipe is full, nobody is blocked.
        with contextlib.suppress(OSError):
            os.write(self._reply_write, FRAME.pack(0, 0))

    def flush(self) -> None:
        """Send what still waits, and tell the pool which input spills are over with."""
        if self.core is not None:
            while self.core.dropped:
                self.link.send(control.DropSpill(self.core.dropped.popleft()))
        self.link.flush()

    def close(self) -> None:
        """Give everything back. Nobody may be reading `reply`."""
        self._let_go()
        self.link.close()

    def forked(self) -> None:
        """In a child of fork: the pool knows nothing of this process, and everything here is the parent's."""
        if self.core is not None:
            self.core.disown()
        self._let_go()
        self.link.forked()

    def _let_go(self) -> None:
        self.ready = False
        self.lost = True
        self._close_queues()
        if self.reply >= 0:
            self._blind(self._reply_write)
            os.close(self.reply)
            self.reply = -1
        if self.core is not None:
            self.core.close()
        elif self._arena is not None:
            self._arena.close()

    def _close_queues(self) -> None:
        for fd in self._queues.values():
            self._blind(fd)
        self._queues.clear()
        if self.core is not None:
            for view in self.core.models.values():
                view.look_again()

    def _blind(self, fd: int) -> None:
        """Close what another thread may be about to write to: the number stays ours, and cannot be written to, until
        nobody can have it in hand any more."""
        os.dup2(self.reply, fd, inheritable=False)
        self._blinded.append(fd)

    def __del__(self) -> None:
        for fd in self._blinded:
            os.close(fd)


def _deadline_ns(deadline: float | None, timeout_s: float, now_ns: int) -> int:
    return now_ns + int(timeout_s * 1e9) if deadline is None else int(min(max(deadline, 0.0), FOREVER_S) * 1e9)
