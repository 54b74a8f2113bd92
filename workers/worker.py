"""A compute process: one model, loaded once, that takes records from its queue until the queue ends.

take → open → plan → run → finish: `Worker.serve` is that circle, and the way of a task ends in `workers.outcomes`.
A stream leaves it after `open`, for `workers.streams`; those that are live get a turn each time round.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time

from workers import control
from workers.arena import CLOSED, Arena, Spill
from workers.batching import gather_until, plan
from workers.codecs import BY_WIRE_ID
from workers.errors import InvalidInput, InvalidOutput, ModelFailed, Overloaded, PoolError, Refused
from workers.inbox import BUSY_SINCE, FINISHED, TURNS, Board, Inbox
from workers.model import Iterates, Model, Predicts, Steps
from workers.outcomes import Outcomes
from workers.records import INPUT, RECORD, RECORD_SIZE, SLOT_HEADER, SlotState
from workers.streams import Streams
from workers.tasks import ClientView, HeldTask, gather_inputs, parts_of
from workers.tensors import Layouts, OutputChecks, align, signature

log = logging.getLogger("headrace.worker")

LOOK_NS = 50_000_000
"""How often a worker that never runs dry looks at its control socket."""
HOLD_BACK_S = 0.001
JOIN_NS = 5_000_000
"""How long live streams may wait for others to join them. It is looked at after each."""
WARM_NS = 1_000_000
"""How long a replica that has just run a batch goes before the others: its caches still hold the weights."""
_QUEUED, _RUNNING, _DONE, _CANCELLED, _EXPIRED = (
    int(SlotState.QUEUED),
    int(SlotState.RUNNING),
    int(SlotState.DONE),
    int(SlotState.CANCELLED),
    int(SlotState.EXPIRED),
)


class Drained(Exception):
    """Nothing more will come: the queue has no writer any more."""


class PoolGone(Exception):
    """Nobody is there to work for."""


class Crippled(Exception):
    """This process can take no more descriptors. It ends, and what it holds is put back for a fresh one."""


class Worker:
    """`queue`: non-blocking read end. Times are in nanoseconds."""

    def __init__(
        self,
        model: Model,
        queue: int,
        inbox: Inbox,
        board: Board,
        link: socket.socket,
        index: int,
        max_delay_ns: int,
        spill_limit: int,
    ) -> None:
        self._model = model
        self._predicts = model if isinstance(model, Predicts) else None
        self._checks = OutputChecks(tuple(model.outputs))
        self._queue = queue
        self._inbox = inbox
        self._board = board
        self._link = link
        self._index = index
        self._max_batch = inbox.front
        # What is free of the inbox's front behind n records.
        front = inbox.entries[: inbox.front * RECORD_SIZE]
        self._room = [front[n * RECORD_SIZE :] for n in range(inbox.front)]
        self._max_delay_ns = max_delay_ns
        self._clients: dict[int, ClientView] = {}
        self._dropped: list[int] = []
        self._warm_until = 0
        self._layouts = Layouts()
        self._outcomes = Outcomes(model, inbox, link, self._layouts, spill_limit)
        self._streams: Streams | None = None
        if isinstance(model, Steps | Iterates):
            self._streams = Streams(model, inbox, self._outcomes, self._as_pool_error)
        self._next_look = 0
        self._either = select.poll()
        self._either.register(queue, select.POLLIN)
        self._either.register(link, select.POLLIN)
        self._link_only = select.poll()
        self._link_only.register(link, select.POLLIN)

    def serve(self) -> None:
        """Work until drained."""
        try:
            if self._streams is not None:
                self._serve_with(self._streams)
            while True:
                held = self._gather() if self._max_delay_ns else self._read(0)
                if held:
                    self._work(held)
                if held < self._max_batch:
                    # The queue is as good as empty: no need to find that out by a read that fails.
                    self._wait()
        except (Drained, PoolGone):
            pass

    def _serve_with(self, streams: Streams) -> None:
        """As `serve`: what is queued is taken between two turns of the streams, of which none is waited for."""
        polls = {taking: select.poll() for taking in (True, False)}
        polls[True].register(self._queue, select.POLLIN)
        for poll in polls.values():
            poll.register(self._link, select.POLLIN)
            if streams.threads is not None:
                poll.register(streams.threads.wake_fd, select.POLLIN)
        words = self._inbox.words
        ended = False
        held = opened = 0  # what was read last, and how many of these records had their turn
        while True:
            until_ns = time.monotonic_ns() + JOIN_NS
            try:
                while opened < held or (not ended and streams.free):
                    if opened == held:
                        held = opened = 0
                        held = self._take(streams)
                    if held:
                        opened = self._work(held, opened, until_ns)
                    if opened < held or held < self._max_batch or time.monotonic_ns() > until_ns:
                        break
            except Drained:
                ended = True
            streams.turn(time.monotonic_ns())
            words[BUSY_SINCE] = streams.rest_since_ns
            words[TURNS] += 1
            if ended and streams.none:
                raise Drained
            taking = not ended and streams.free > 0
            wait_ms = 0 if opened < held or (taking and held == self._max_batch) else streams.wait_ms()
            for fd, _ in polls[taking].poll(wait_ms):
                if streams.threads is not None and fd == streams.threads.wake_fd:
                    streams.threads.woken()
                elif fd != self._queue:
                    self._look(0)
            self._close_dropped()

    def _take(self, streams: Streams) -> int:
        """Read no more than there are places for, should all of it be streams."""
        if streams.free < self._max_batch:
            return self._read_into(self._room[0][: streams.free * RECORD_SIZE], 0)
        gathers = self._max_delay_ns and self._predicts is not None and streams.none
        return self._gather() if gathers else self._read(0)

    # Taking.

    def _read(self, held: int) -> int:
        """Read behind the `held` records in the inbox; how many came, 0 if none are waiting, -1 if the queue has
        ended and there are some to work on first."""
        return self._read_into(self._room[held], held)

    def _read_into(self, room: memoryview, held: int) -> int:
        try:
            size = os.readv(self._queue, (room,))
        except BlockingIOError:
            return 0
        if size == 0:
            if held:
                return -1
            raise Drained
        return size // RECORD_SIZE

    def _gather(self) -> int:
        """As `_read`, but wait for a batch to fill, up to the delay. One replica of a model at a time does so: two
        that both wait would split a batch. The others meanwhile take full batches only."""
        if not self._claim_gathering():
            return 0
        try:
            held = self._read(0)
            if not held:
                return 0
            rows, oldest = self._inbox.rows(0, held), self._inbox.queued_ns(0)
            while held < self._max_batch and not self._inbox.has_stream(held):
                wait_ns = gather_until(oldest, rows, self._max_batch, self._max_delay_ns) - time.monotonic_ns()
                if wait_ns <= 0:
                    break
                self._board.words[self._index] = time.monotonic_ns() + wait_ns
                select.select([self._queue], [], [], wait_ns / 1e9)
                came = self._read(held)
                if came < 0:
                    break
                rows += self._inbox.rows(held, came)
                held += came
        finally:
            # What is left of its precedence, if nothing came, runs out by itself.
            self._board.words[self._index] = self._warm_until
        return held

    def _claim_gathering(self) -> bool:
        """Be the one that gathers, or may take a full batch at once. Two that claim together both see it, as the
        kernel orders each one's mark before its look at the queue; the one with the higher index steps back."""
        board, index = self._board, self._index
        for _ in range(2):
            now = time.monotonic_ns()
            if not board.busy_until(index, now):
                board.words[index] = now + self._max_delay_ns
                control.queue_depth(self._queue)
                other = board.first_busy(index, now)
                if other < 0:
                    return True
                board.words[index] = self._warm_until = 0
                if other < index:
                    break
        if control.queue_depth(self._queue) >= self._max_batch:
            return True
        self._look(HOLD_BACK_S * 1000)
        return False

    def _wait(self) -> None:
        """Sleep until there is a record or a message."""
        for fd, _ in self._either.poll():
            if fd != self._queue:
                self._look(0)

    def _look(self, timeout_ms: float) -> None:
        while self._link_only.poll(timeout_ms):
            self._heed(self._hear())
            timeout_ms = 0
        self._close_dropped()

    def _hear(self) -> tuple[control.Message, list[int]]:
        heard = control.receive(self._link)
        if heard is None:
            raise PoolGone
        return heard

    def _heed(self, heard: tuple[control.Message, list[int]]) -> None:
        message, fds = heard
        for fd in fds:
            os.close(fd)
        if isinstance(message, control.DropArena):
            self._dropped.append(message.arena)

    def _close_dropped(self) -> None:
        """Between two turns: within one, tasks of a client that has gone may be among those that are open."""
        if not self._dropped:
            return
        dropped, self._dropped = self._dropped, []
        for arena_id in dropped:
            client = self._clients.get(arena_id)
            if client is None:
                continue
            if self._streams is not None and not self._streams.drop(client):
                self._dropped.append(arena_id)  # a model is still looking at its memory
                continue
            del self._clients[arena_id]
            client.close()

    # Opening.

    def _work(self, held: int, first: int = 0, until_ns: int = 0) -> int:
        """Of the inbox's records, open those from `first` on, and run them. If that begins streams it goes on until
        `until_ns` only; how far it came."""
        now = time.monotonic_ns()
        if now >= self._next_look:
            self._next_look = now + LOOK_NS
            self._look(0)
        tasks = []
        late = False
        for entry in range(first, held):
            task = self._open(entry, now)
            if task is not None:
                tasks.append(task)
            elif until_ns:
                # A stream that has begun may have taken its time.
                late = True
                now = time.monotonic_ns()
                if now > until_ns:
                    held = entry + 1
                    break
        if len(tasks) == 1 and not late:
            self._run(tasks)
        elif tasks:
            for batch in plan(tasks, self._max_batch):
                self._run_wanted(batch)
        self._inbox.words[BUSY_SINCE] = 0 if self._streams is None else self._streams.rest_since_ns
        self._inbox.words[TURNS] += 1
        self._close_dropped()
        return held

    def _open(self, entry: int, now: int) -> HeldTask | None:
        """The task of an entry, if it is to be run; otherwise it is finished here and None."""
        arena_id, seq, deadline, _, spill, slot, charges, codec, _, stream = RECORD.unpack_from(
            self._inbox.entries, entry * RECORD_SIZE
        )
        client = self._clients.get(arena_id) or self._pull(arena_id)
        if client is None or client.arena.words[CLOSED] or slot >= len(client.arena.bases):
            self._inbox.clear(entry)
            return None
        task = HeldTask(entry, client, slot, seq, deadline, charges, codec)
        words = client.arena.words
        at = task.base >> 3
        word = words[at]
        if word >> 8 != seq:
            self._inbox.clear(entry)
            return None
        if word & 0xFF >= _DONE:
            self._outcomes.finish([task], word & 0xFF)
            return None
        if not self._wanted(task, now):
            return None
        try:
            self._find_inputs(task, words[at + INPUT], spill)
        except PoolError as error:
            self._outcomes.fail(task, error)
            return None
        except OSError as error:
            # Mapping a spill takes memory and descriptors.
            self._outcomes.fail(task, Overloaded(f"the inputs cannot be read: {error}"))
            return None
        except control.NONSENSE as error:
            # No client of ours writes so. Every worker that took the task would end like this one.
            log.error("the inputs of a task cannot be read", exc_info=error)
            self._outcomes.fail(task, ModelFailed(f"the inputs cannot be read: {error}"))
            return None
        if stream or self._predicts is None:
            self._begin(task, stream)
            return None
        return task

    def _begin(self, task: HeldTask, stream: int) -> None:
        """A stream, if it is one and the model does that."""
        if stream and self._streams is not None:
            self._streams.admit(task)
        else:
            what = "stream" if stream else "predict"
            self._outcomes.fail(task, InvalidInput(f"the model does not {what}"))

    def _wanted(self, task: HeldTask, now: int) -> bool:
        """Whether somebody still waits for the task; if not it is finished here."""
        if task.cancelled:
            self._outcomes.finish([task], _CANCELLED)
        elif task.deadline_ns <= now:
            self._outcomes.finish([task], _EXPIRED)
        else:
            return True
        return False

    def _find_inputs(self, task: HeldTask, size: int, spill: int) -> None:
        arena = task.client.arena
        if spill:
            task.spill = self._pull_spill(spill)
            source, start = task.spill.map, 0
        else:
            source, start = arena.map, task.base + SLOT_HEADER
        if task.codec:
            task.at = align(SLOT_HEADER + (0 if spill else size))
            self._mark_running([task])
            body = memoryview(source)[start : start + size]
            task.arrays = BY_WIRE_ID[task.codec].decode(body, self._model.inputs)
            task.layout = self._layouts.of(signature(task.arrays))
            # Decoded, and not begun yet: should a mate's run end this process, this task is not charged for it.
            self._mark_queued([task])
            return
        task.layout = self._layouts.parse(source[start : start + size])
        if spill:
            task.arrays = task.layout.views(source, 0)
        else:
            task.at = align(SLOT_HEADER + task.layout.size)

    def _pull(self, arena_id: int) -> ClientView | None:
        """Ask the pool for an arena met for the first time; None if its client is gone."""
        fds = self._ask(arena_id, 2)
        if not fds:
            return None
        client = self._clients[arena_id] = ClientView(Arena(fds[0]), fds[1])
        return client

    def _pull_spill(self, spill: int) -> Spill:
        fds = self._ask(spill, 1)
        if not fds:
            raise ModelFailed("the inputs are gone")
        return Spill(spill, fds[0])

    def _ask(self, memory: int, count: int) -> list[int]:
        """The `count` descriptors of an arena or a spill; none if the pool has it no more."""
        control.send(self._link, control.NeedArena(memory))
        while True:
            message, fds = self._hear()
            if isinstance(message, control.ArenaDead) and message.memory == memory:
                return []
            if isinstance(message, control.ArenaIs) and message.memory == memory:
                if len(fds) != count:
                    raise Crippled(f"{count} descriptors were sent, and {len(fds)} could be received")
                return fds
            self._heed((message, fds))

    # Running.

    def _mark_running(self, tasks: list[HeldTask]) -> None:
        if self._streams is not None:
            self._streams.mark_busy()
        else:
            self._inbox.words[BUSY_SINCE] = time.monotonic_ns()
        for task in tasks:
            task.client.arena.words[task.base >> 3] = task.seq << 8 | _RUNNING

    def _mark_queued(self, tasks: list[HeldTask]) -> None:
        for task in tasks:
            task.client.arena.words[task.base >> 3] = task.seq << 8 | _QUEUED

    def _run_wanted(self, tasks: list[HeldTask]) -> None:
        """As `_run`, for tasks that were opened a while ago: other batches have been run since."""
        now = time.monotonic_ns()
        wanted = [task for task in tasks if self._wanted(task, now)]
        if wanted:
            self._run(wanted)

    def _run(self, tasks: list[HeldTask]) -> None:
        """Run a batch; if it fails its tasks are run singly, so that one bad one fails alone."""
        self._mark_running(tasks)
        parts = parts_of(tasks)
        rows = sum([task.layout.rows for task in tasks])
        try:
            assert self._predicts is not None
            outputs = self._checks.check(self._predicts.predict(gather_inputs(parts)), rows)
        except BaseException as error:
            if len(tasks) > 1:
                self._mark_queued(tasks)
                for task in tasks:
                    self._run_wanted([task])
                return
            self._outcomes.fail(tasks[0], self._as_pool_error(error))
            return
        if self._max_delay_ns:
            # Before the answers go out, for they bring the next tasks.
            self._warm_until = time.monotonic_ns() + WARM_NS
            self._board.words[self._index] = self._warm_until
        if len(parts) == 1:
            self._outcomes.answer(tasks, outputs)
        else:
            start = 0
            for part in parts:
                end = start + sum([task.layout.rows for task in part])
                self._outcomes.answer(part, {name: array[start:end] for name, array in outputs.items()})
                start = end
        self._inbox.words[FINISHED] += len(tasks)

    def _as_pool_error(self, error: BaseException) -> PoolError:
        if isinstance(error, InvalidInput | Refused | InvalidOutput | Overloaded):
            return error
        if isinstance(error, ModelFailed):
            log.error("%s", error)
            return error
        log.error("the model failed", exc_info=error)
        return ModelFailed(_text_of(error))


def _text_of(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__
