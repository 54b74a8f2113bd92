"""The pool: the process that starts, watches and replaces compute processes and introduces clients to them.

One thread, one loop, never on the path of a request. `Pool.run` waits on: the listening socket, the sockets of
clients and workers, the end of every worker (a pidfd), the lifeline, and a tick. What happens to a model and its
replicas is in `workers.served`; here are the clients and the loop.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from workers import control
from workers.arena import CLOSED, Arena
from workers.config import PoolConfig
from workers.errors import PoolError
from workers.guardian import Guardian
from workers.records import FRAME, FRAMES_PER_WRITE, STATE, Record, SlotState
from workers.replica import Replica
from workers.served import Served
from workers.status import ModelStatus

log = logging.getLogger("headrace.pool")

TICK_S = 0.05
DRAIN_GRACE_S = 30.0


class CannotStart(PoolError):
    """The pool cannot be set up: no socket, no memory, no descriptors."""


class Client:
    """A web process, or whoever else submits tasks. `arena` is None until it has registered."""

    def __init__(self, arena_id: int, sock: socket.socket) -> None:
        self.arena_id = arena_id
        self.link = control.Link(sock)
        self.arena: Arena | None = None
        self.reply = -1
        self.spills: dict[int, int] = {}
        self.queues_closed = False
        self._endings: deque[bytes] = deque()

    def register(self, fds: list[int]) -> None:
        """Take the arena and the reply pipe's write end from `fds`."""
        if self.arena is not None or len(fds) != 2:
            raise ValueError("a client registers once, with two descriptors")
        arena = Arena(fds[0])
        fds.pop(0)
        self.arena, self.reply = arena, fds.pop()

    def announce(self, slot: int, word: int) -> None:
        """A final frame, written by the pool for a worker that cannot."""
        if self.arena is not None:
            self.arena.announce(self.reply, FRAME.pack(word, slot))

    def end_stream(self, slot: int, word: int) -> None:
        """As `announce`, but for a stream, whose slot does not tell how it ended: this frame must not get lost."""
        if self.arena is not None:
            self._endings.append(FRAME.pack(word, slot))

    def flush(self) -> None:
        self.link.flush()
        while self._endings:
            frames = list(itertools.islice(self._endings, FRAMES_PER_WRITE))
            try:
                os.write(self.reply, b"".join(frames))
            except BlockingIOError:
                return
            except BrokenPipeError:
                pass  # it is gone, and its link says so
            for _ in frames:
                self._endings.popleft()

    def close(self) -> None:
        self.link.close()
        for fd in self.spills.values():
            os.close(fd)
        self.spills.clear()
        if self.arena is not None:
            # Workers see at the next record that nobody waits any more.
            self.arena.words[CLOSED] = 1
            self.arena.close()
            os.close(self.reply)


class Pool:
    """`lifeline`: a pipe's read end; when its last writer is gone the pool ends. None: it runs until told."""

    def __init__(self, config: PoolConfig, socket_path: str, lifeline: int | None = None) -> None:
        self._config = config
        self._socket_path = socket_path
        self._lifeline = lifeline
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, Client] = {}
        self._next_arena = 1
        self._served: dict[str, Served] = {}
        self._running = True
        self._drain_until = 0.0
        self._deaf_to: socket.socket | None = None
        self._told: dict[str, ModelStatus] = {}

    def run(self) -> None:
        """Serve until the lifeline breaks, or a signal has led to a drain. On the main thread.

        `CannotStart` with the reason, if it does not come to that.
        """
        with contextlib.ExitStack() as ends:
            try:
                self._start(ends)
            except (OSError, PoolError) as error:
                raise CannotStart(str(error)) from error
            while self._running:
                self._turn()

    def _start(self, ends: contextlib.ExitStack) -> None:
        self._guardian = Guardian()
        ends.callback(self._guardian.close)
        ends.callback(self._end)
        for fd in self._catch_signals():
            ends.callback(os.close, fd)
        listener = self._listen()
        ends.callback(listener.close)
        self.watch(listener, lambda: self._accept(listener))
        if self._lifeline is not None:
            self.watch(self._lifeline, self._lose_lifeline)
        for model in self._config.models:
            self._served[model.name] = Served(model, self._config.arena.spill_limit, self)

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            # An earlier callback of this turn may have ended what this one is for.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        if self._deaf_to is not None:
            listener, self._deaf_to = self._deaf_to, None
            self.watch(listener, lambda: self._accept(listener))
        now = time.monotonic()
        for served in self._served.values():
            served.tick(now)
        self._guardian.watch_over()
        self._tell()
        for client in list(self._clients.values()):
            client.flush()
            if client.link.stuck:
                log.warning("a client does not read what it is told, and is dropped")
                self._drop(client)
        if self._drain_until:
            self._drain_on(now)

    # The loop's parts: what Served needs of it.

    def guard(self, group: int) -> None:
        self._guardian.add(group)

    def unguard(self, group: int) -> None:
        self._guardian.remove(group)

    def watch(self, fd: int | socket.socket, ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def unwatch(self, fd: int | socket.socket) -> None:
        self._selector.unregister(fd)

    def settle(self, record: Record, outcome: SlotState) -> None:
        """Answer a record that no worker holds."""
        arena = self.arena_of(record)
        if arena is None:
            return
        at = arena.bases[record.slot] >> 3
        if arena.words[at + STATE] >> 8 != record.seq:
            return
        word = record.seq << 8 | outcome
        arena.words[at + STATE] = word
        self.announce(record, word)

    def arena_of(self, record: Record) -> Arena | None:
        """Where a record's slot is; None if its client is gone, or has no such slot."""
        client = self._clients.get(record.arena)
        arena = client.arena if client is not None else None
        return arena if arena is not None and record.slot < len(arena.bases) else None

    def announce(self, record: Record, word: int) -> None:
        client = self._clients.get(record.arena)
        if client is not None:
            client.announce(record.slot, word)

    def end_stream(self, record: Record, outcome: SlotState) -> None:
        """Of a worker that has died. Whether the client has had the end from it already, and given the slot to another
        task, is not known: the frame is for this one only, and the slot is left alone."""
        client = self._clients.get(record.arena)
        if client is not None:
            client.end_stream(record.slot, record.seq << 8 | outcome)

    def hand_arena(self, replica: Replica, memory_id: int) -> None:
        """Answer a worker that met an arena, or a spill, for the first time."""
        if not self._find(replica, memory_id):
            # Its client may have told of it in a packet that is still unread.
            client = self._clients.get(memory_id >> 32 or memory_id)
            if client is not None:
                self._hear(client)
            if not self._find(replica, memory_id):
                replica.link.send(control.ArenaDead(memory_id))

    def _find(self, replica: Replica, memory_id: int) -> bool:
        if memory_id >> 32:
            owner = self._clients.get(memory_id >> 32)
            fd = owner.spills.get(memory_id) if owner is not None else None
            if fd is None:
                return False
            replica.link.send(control.ArenaIs(memory_id), [os.dup(fd)])
            return True
        client = self._clients.get(memory_id)
        if client is None or client.arena is None:
            return False
        reply = control.reopen(client.reply, os.O_WRONLY | os.O_NONBLOCK)
        replica.link.send(control.ArenaIs(memory_id), [os.dup(client.arena.fd), reply])
        return True

    def forward_spill(self, message: control.Spilled, fd: int) -> None:
        client = self._clients.get(message.arena)
        if client is None:
            os.close(fd)
        else:
            client.link.send(control.SpilledTo(message.slot, message.seq), [fd])

    # Clients.

    def _listen(self) -> socket.socket:
        Path(self._socket_path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mask = os.umask(0o177)
        try:
            listener.bind(self._socket_path)
        finally:
            os.umask(mask)
        listener.listen(128)
        listener.setblocking(False)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # It stays in the backlog, and the listener readable: look again at the next turn, not all the time.
                self.unwatch(listener)
                self._deaf_to = listener
            return
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0):
            log.warning("a process of user %d tried to connect, and was refused", uid)
            sock.close()
            return
        client = Client(self._next_arena, sock)
        self._next_arena += 1
        self._clients[client.arena_id] = client
        self.watch(sock, lambda: self._hear(client))
        arena = self._config.arena
        client.link.send(control.Welcome(client.arena_id, arena.slots, arena.spill_limit, time.monotonic_ns()))

    def _hear(self, client: Client) -> None:
        """Everything a client has said by now."""
        try:
            if client.link.hear(lambda message, fds: self._heed(client, message, fds)):
                return
        except control.NONSENSE as error:
            # One that speaks nonsense, or for which there are no descriptors left, is no reason to end.
            log.warning("a client cannot be heard, and is dropped: %s: %s", type(error).__name__, error)
        self._drop(client)

    def _heed(self, client: Client, message: control.Message, fds: list[int]) -> None:
        if isinstance(message, control.Register):
            client.register(fds)
            for served in self._served.values():
                client.link.send(control.Status(served.status()))
                client.link.send(control.Queue(served.name), [served.writer()])
            client.link.send(control.Settled())
            if self._drain_until:
                client.link.send(control.CloseQueues())
        elif isinstance(message, control.Spill):
            if message.spill in client.spills:
                raise ValueError(f"spill {message.spill} is told twice")
            client.spills[message.spill] = fds.pop()
        elif isinstance(message, control.DropSpill):
            fd = client.spills.pop(message.spill, -1)
            if fd >= 0:
                os.close(fd)
        elif isinstance(message, control.QueuesClosed):
            client.queues_closed = True

    def _drop(self, client: Client) -> None:
        """A client is gone: what it submitted is not run any more, its memory is given back."""
        del self._clients[client.arena_id]
        self.unwatch(client.link.sock)
        client.close()
        for served in self._served.values():
            served.drop_arena(client.arena_id)

    def _tell(self) -> None:
        """Whatever changed about a model, to every client."""
        for served in self._served.values():
            status = served.status()
            if self._told.get(served.name) == status:
                continue
            self._told[served.name] = status
            log.info("model %s is %s%s", status.name, status.state.value, f": {status.reason}" if status.reason else "")
            for client in self._clients.values():
                if client.arena is not None:
                    client.link.send(control.Status(status))

    # Ends.

    def _catch_signals(self) -> tuple[int, int]:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            # The loop is told by the pipe: a handler could come in the middle of anything.
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Ignored, as whoever started this may have left it, it would keep the workers' exit codes from us.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.watch(read, lambda: self._heed_signals(read))
        return read, write

    def _heed_signals(self, fd: int) -> None:
        for _ in os.read(fd, 4096):
            self._drain()

    def _lose_lifeline(self) -> None:
        log.info("the web server is gone; ending")
        self._running = False

    def _drain(self) -> None:
        """Take no more tasks, finish those that were taken, end. A second signal ends at once."""
        if self._drain_until:
            self._running = False
            return
        log.info("draining")
        self._drain_until = time.monotonic() + DRAIN_GRACE_S
        for served in self._served.values():
            served.drain()
        for client in self._clients.values():
            client.link.send(control.CloseQueues())

    def _drain_on(self, now: float) -> None:
        if all(client.queues_closed or client.arena is None for client in self._clients.values()):
            for served in self._served.values():
                served.close_queue()
        if all(served.drained for served in self._served.values()) or now > self._drain_until:
            self._running = False

    def _end(self) -> None:
        for served in self._served.values():
            served.end()
        for client in self._clients.values():
            client.flush()
            client.close()
        Path(self._socket_path).unlink(missing_ok=True)
        self._selector.close()
