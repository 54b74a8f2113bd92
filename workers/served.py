"""One model in the pool: its queue, its replicas, and what becomes of what they held.

The rules of death: a worker that has ended is reaped, then its inbox is gone through. A task that has its outcome
is announced again; one that was running is put back once, charged, and runs alone next time; one that had not
begun is put back as it was. A stream whose first piece has gone out is never run again. The first restart is at
once; only deaths before the warm-up, or without one finished task, make the next start wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from workers import control
from workers.arena import Arena, NotEnoughMemory
from workers.config import ModelConfig
from workers.inbox import Board
from workers.records import CANCEL, CONTROL, RECORD_SIZE, STATE, Record, SlotState
from workers.replica import Replica
from workers.status import ModelStatus, State

log = logging.getLogger("headrace.pool")

CRASH_LOOP = 4
"""Fruitless deaths in a row from which on a model is given out as crash-looped."""
LONGEST_BACKOFF_S = 60.0
STUCK_S = 1.0
"""How long an idle worker may leave records in the queue before it is taken for stopped."""
LATE_TICK_S = 0.5
GRACE_S = 1.0
"""After a late tick of the pool's own: how long nobody is killed for what was not done meanwhile."""
RECORDS_PER_TURN = 4096


class Surroundings(Protocol):
    """What a model needs of the pool around it."""

    def guard(self, group: int) -> None: ...
    def unguard(self, group: int) -> None: ...
    def watch(self, fd: int | socket.socket, ready: Callable[[], None]) -> None: ...
    def unwatch(self, fd: int | socket.socket) -> None: ...
    def settle(self, record: Record, outcome: SlotState) -> None: ...
    def announce(self, record: Record, word: int) -> None: ...
    def end_stream(self, record: Record, outcome: SlotState) -> None: ...
    def arena_of(self, record: Record) -> Arena | None: ...
    def hand_arena(self, replica: Replica, memory_id: int) -> None: ...
    def forward_spill(self, message: control.Spilled, fd: int) -> None: ...


class Place:
    """The place of one replica: who fills it, and the deaths it has seen. Times are monotonic seconds."""

    __slots__ = ("fruitless", "index", "next_start", "replica")

    def __init__(self, index: int) -> None:
        self.index = index
        self.replica: Replica | None = None
        self.next_start = 0.0
        self.fruitless = 0


def backoff_s(fruitless: int) -> float:
    """Seconds to wait before the start that follows the `fruitless`-th fruitless death in a row."""
    return 0.0 if fruitless < 2 else min(LONGEST_BACKOFF_S, 2.0 ** min(fruitless - 2, 16))


class Served:
    def __init__(self, config: ModelConfig, spill_limit: int, around: Surroundings) -> None:
        self.config = config
        self.name = config.name
        self._around = around
        self._spill_limit = spill_limit
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._max_queue = self._size_pipe()
        self._board = Board.create(config.replicas)
        self._places = [Place(i) for i in range(config.replicas)]
        self._specs: control.Loaded | None = None  # known once a replica has been ready
        self._weights = -1
        self._builder: Replica | None = None
        self._waiting_for_weights: list[Replica] = []
        self._refusal: control.LoadFailed | None = None
        self._reason = ""
        self._restarts = 0
        self._draining = False
        self._ending = False
        self._backlog: deque[Record] = deque()
        self._unanswered: list[tuple[Replica, int]] = []
        self._last_tick = time.monotonic()
        self._late_at = 0.0
        self._late_by = 0.0

    def _size_pipe(self) -> int:
        """Room for `max_queue` records and what the workers may put back; the limit that really holds."""
        records = self.config.max_queue + self.config.replicas * self.config.max_batch + 64
        wanted = max(65536, records * RECORD_SIZE)
        # What the system gives is read back below: beyond its limits it refuses, or quietly gives less.
        for size in (wanted, min(wanted, _largest_pipe())):
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, size)
                break
        held: int = fcntl.fcntl(self._write, fcntl.F_GETPIPE_SZ) // RECORD_SIZE
        if held < records:
            limit = max(1, held // 2)
            log.warning(
                "model %s: the system gives its queue room for %d records only; max_queue is %d",
                self.name,
                held,
                min(limit, self.config.max_queue),
            )
            return min(limit, self.config.max_queue)
        return self.config.max_queue

    # What others ask.

    @property
    def state(self) -> State:
        if self._draining:
            return State.DRAINING
        if self._refusal is not None:
            return State.REFUSED
        if self._ready_count():
            return State.READY
        if all(place.fruitless >= CRASH_LOOP for place in self._places):
            return State.CRASH_LOOPED
        return State.RESTARTING if self._specs is not None else State.LOADING

    def status(self) -> ModelStatus:
        refusal = self._refusal
        specs = self._specs
        return ModelStatus(
            self.name,
            self.state,
            refusal.reason if refusal is not None else self._reason,
            refusal.code if refusal is not None else "",
            self.config.replicas,
            self._ready_count(),
            self._restarts,
            self.config.timeout_s,
            self.config.max_batch,
            self._max_queue,
            specs.inputs if specs is not None else (),
            specs.outputs if specs is not None else (),
            specs is None or specs.predicts,
            specs is not None and specs.streams,
            self.config.stream_timeout_s,
        )

    def writer(self) -> int:
        """A write end of the queue for a client: non-blocking, with flags of its own."""
        return control.reopen(self._write, os.O_WRONLY | os.O_NONBLOCK)

    def drop_arena(self, arena_id: int) -> None:
        for replica in self._replicas():
            replica.link.send(control.DropArena(arena_id))

    @property
    def drained(self) -> bool:
        return self._draining and self._write < 0 and not self._replicas() and not self._backlog

    def _replicas(self) -> list[Replica]:
        return [place.replica for place in self._places if place.replica is not None]

    def _ready_count(self) -> int:
        return sum(replica.ready for replica in self._replicas())

    # Time passes.

    def tick(self, now: float) -> None:
        if now - self._last_tick > LATE_TICK_S:
            self._late_at, self._late_by = now, now - self._last_tick
        self._last_tick = now
        lenient = now < self._late_at + GRACE_S
        for place in self._places:
            if place.replica is not None:
                place.replica.link.flush()
                if lenient:
                    place.replica.excuse(now)
                else:
                    self._watch_over(place.replica, now)
            elif not self._draining and self._refusal is None and now >= place.next_start:
                self._start(place, now)
        if not lenient:
            self._find_stuck(now)
        self._retry_backlog()
        self._retry_unanswered()
        if self._nobody_comes():
            self._answer_queue()

    def _start(self, place: Place, now: float) -> None:
        try:
            replica = Replica(self.config, place.index, self._read, self._board, self._spill_limit)
        except (OSError, NotEnoughMemory) as error:
            # No process, no memory or no descriptors to be had: serve on with the others, try again later.
            self._reason = f"a worker cannot be started: {error}"
            place.fruitless += 1
            place.next_start = now + max(1.0, backoff_s(place.fruitless))
            return
        place.replica = replica
        self._around.guard(replica.pid)
        self._around.watch(replica.pidfd, lambda: self._bury(place))
        self._around.watch(replica.link.sock, lambda: self._hear(replica))

    def _watch_over(self, replica: Replica, now: float) -> None:
        """Kill what has exceeded its time."""
        if replica.killed:
            return
        if not replica.ready:
            if now - replica.started > self.config.load_timeout_s:
                self._reason = f"not loaded within {self.config.load_timeout_s:g} s"
                replica.kill()
            return
        since_s = replica.busy_since_ns / 1e9
        # What was running while the pool itself stood still may have stood still with it.
        grace_s = self._late_by if since_s < self._late_at else 0.0
        if since_s and now - since_s > self.config.timeout_s + grace_s:
            log.warning("%s[%d] is over its %g s and is killed", self.name, replica.index, self.config.timeout_s)
            replica.kill()

    def _find_stuck(self, now: float) -> None:
        """A ready worker that lets records lie, in the queue or in its inbox, has been stopped, and is replaced."""
        queued = not self._draining and control.queue_depth(self._read) > 0
        for replica in self._replicas():
            if replica.killed:
                continue
            idle_s = replica.idles(now, replica.ready and (queued or replica.inbox.occupied))
            if idle_s > STUCK_S + self.config.max_delay_ms / 1000:
                log.warning("%s[%d] does not take what is queued and is killed", self.name, replica.index)
                replica.kill()

    # Workers speak.

    def _hear(self, replica: Replica) -> None:
        """Everything a worker has said by now."""
        try:
            if replica.link.hear(lambda message, fds: self._heed(replica, message, fds)):
                return
        except control.NONSENSE as error:
            # One that cannot be understood, or for which there are no descriptors left, is no reason to end.
            log.error("%s[%d] cannot be heard and is killed: %s", self.name, replica.index, error)
            replica.kill()
        # It is ending; its pidfd says when it has.
        replica.silent = True
        self._around.unwatch(replica.link.sock)

    def _heed(self, replica: Replica, message: control.Message, fds: list[int]) -> None:
        if isinstance(message, control.NeedArena):
            self._unanswered.append((replica, message.memory))
            self._retry_unanswered()
        elif isinstance(message, control.Spilled):
            replica.forwarded.append((message.arena, message.slot, message.seq))
            self._around.forward_spill(message, fds.pop())
        elif isinstance(message, control.Loaded):
            replica.ready = True
            self._specs = message
            self._reason = ""
        elif isinstance(message, control.LoadFailed):
            replica.failed = message
        elif isinstance(message, control.NeedWeights):
            self._waiting_for_weights.append(replica)
            self._give_weights()
        elif isinstance(message, control.BuiltWeights):
            self._weights = fds.pop()
            self._builder = None
            self._waiting_for_weights.append(replica)
            self._give_weights()

    def _retry_unanswered(self) -> None:
        """Hand out the memory that workers have asked for. Without descriptors left they wait, and are asked for
        again at the next tick: a client must not be taken for dead because of that."""
        questions, self._unanswered = self._unanswered, []
        for replica, memory in questions:
            if replica.killed or replica not in self._replicas():
                continue
            try:
                self._around.hand_arena(replica, memory)
            except OSError as error:
                log.warning("%s[%d] must wait for an arena: %s", self.name, replica.index, error.strerror)
                self._unanswered.append((replica, memory))

    def _give_weights(self) -> None:
        """Weights to all who wait for them; if there are none, one of those is asked to make them."""
        if self._weights < 0:
            if self._builder is None and self._waiting_for_weights:
                self._builder = self._waiting_for_weights.pop(0)
                self._builder.link.send(control.BuildWeights())
            return
        for replica in self._waiting_for_weights:
            replica.link.send(control.Weights(), [os.dup(self._weights)])
        self._waiting_for_weights.clear()

    # Workers die.

    def _bury(self, place: Place) -> None:
        replica = place.replica
        assert replica is not None
        self._around.unwatch(replica.pidfd)
        self._around.unguard(replica.pid)
        how = replica.reap()
        # Outputs it sent off in memory files are answered tasks: hear of them before judging what it held.
        if not replica.silent:
            self._hear(replica)
        place.replica = None
        if replica in self._waiting_for_weights:
            self._waiting_for_weights.remove(replica)
        if replica is self._builder:
            self._builder = None
            self._give_weights()
        for record in replica.inbox.held():
            self._judge(record, replica)
        self._board.words[place.index] = 0
        self._count_death(place, replica, how)
        if not replica.silent:
            self._around.unwatch(replica.link.sock)
        replica.close()
        self._retry_backlog()

    def _judge(self, record: Record, replica: Replica) -> None:
        """What becomes of a task that a dead worker held."""
        arena = self._around.arena_of(record)
        if arena is None:
            return
        at = arena.bases[record.slot] >> 3
        word = arena.words[at + STATE]
        state = word & 0xFF
        if word >> 8 != record.seq:
            return
        if state == SlotState.STREAMING:
            self._around.end_stream(record, SlotState.DRAINING if self._ending else SlotState.WORKER_DIED)
            return
        if state == SlotState.SPILLED:
            if (record.arena, record.slot, record.seq) in replica.forwarded:
                return
        elif state >= SlotState.DONE:
            self._around.announce(record, word)
            return
        begun = state != SlotState.QUEUED
        if arena.words[at + CONTROL] == (record.seq << 8 | CANCEL):
            self._around.settle(record, SlotState.CANCELLED)
        elif record.deadline_ns <= time.monotonic_ns():
            self._around.settle(record, SlotState.EXPIRED)
        elif begun and record.charges:
            self._around.settle(record, SlotState.WORKER_DIED)
        elif self._write < 0:
            self._around.settle(record, SlotState.DRAINING)
        else:
            arena.words[at + STATE] = record.seq << 8 | SlotState.QUEUED
            self._backlog.append(replace(record, charges=record.charges + begun))

    def _count_death(self, place: Place, replica: Replica, how: str) -> None:
        if self._draining:
            return
        if replica.failed is not None and replica.failed.code and self._specs is None:
            self._refusal = replica.failed
            log.warning("model %s refuses: %s", self.name, replica.failed.reason)
            return
        now = time.monotonic()
        self._restarts += 1
        fruitful = replica.ready and (replica.productive or now - replica.started > LONGEST_BACKOFF_S)
        place.fruitless = 0 if fruitful else place.fruitless + 1
        place.next_start = now + backoff_s(place.fruitless)
        if replica.failed is not None:
            self._reason = replica.failed.reason
        elif self._reason == "" or replica.ready:
            self._reason = f"a worker {how}" + ("" if replica.ready else " while it was loading")
        log.warning(
            "%s[%d] (pid %d) %s; %d in a row without a task",
            self.name,
            place.index,
            replica.pid,
            how,
            place.fruitless,
        )

    # Records that no worker holds.

    def _retry_backlog(self) -> None:
        while self._backlog and self._write >= 0:
            try:
                os.write(self._write, self._backlog[0].pack())
            except BlockingIOError:
                return
            self._backlog.popleft()

    def _nobody_comes(self) -> bool:
        if self._draining:
            return self._write < 0 and not self._replicas()
        return self.state in (State.CRASH_LOOPED, State.REFUSED)

    def _answer_queue(self) -> None:
        """Be the reader of last resort."""
        outcome = SlotState.DRAINING if self._draining else SlotState.NOT_READY
        while self._backlog:
            self._around.settle(self._backlog.popleft(), outcome)
        try:
            data = os.read(self._read, RECORDS_PER_TURN * RECORD_SIZE)
        except BlockingIOError:
            return
        for offset in range(0, len(data), RECORD_SIZE):
            self._around.settle(Record.unpack(data, offset), outcome)

    # Ends.

    def drain(self) -> None:
        """Take no more; what is queued will be finished. Replicas that are still loading are not waited for."""
        self._draining = True
        for replica in self._replicas():
            if not replica.ready:
                replica.kill()

    def close_queue(self) -> None:
        """Once every client has closed its end too, the workers see the end of the queue, and leave."""
        self._retry_backlog()
        if self._write >= 0 and not self._backlog:
            os.close(self._write)
            self._write = -1

    def end(self) -> None:
        """End every replica, now; what they held, and what is queued, is answered."""
        self._draining = self._ending = True
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
        for replica in self._replicas():
            replica.kill()
        for place in self._places:
            if place.replica is not None:
                self._bury(place)
        self._answer_queue()
        os.close(self._read)
        self._board.close()
        if self._weights >= 0:
            os.close(self._weights)


def _largest_pipe() -> int:
    with open("/proc/sys/fs/pipe-max-size") as file:
        return int(file.read())
