"""A compute process: one model, loaded once, that takes records from its queue until the queue ends.

take → open → plan → run → finish: `Worker.serve` is that circle. Each task's outcome goes into its slot, then a
frame into the reply pipe of the client that waits, then the inbox entry is cleared; a death between any two of
these loses nothing, because whoever finds the entry can tell from the slot how far it had come.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import termios
import time
from array import array as c_array
from collections.abc import Mapping

import numpy as np

from workers import control
from workers.arena import CLOSED, OVERFLOW, Arena, NotEnoughMemory, reserve
from workers.batching import gather_until, plan
from workers.codecs import BY_WIRE_ID
from workers.core import ERROR_ROOM, Spill
from workers.errors import InvalidInput, InvalidOutput, ModelFailed, Overloaded, PoolError, Refused, code_of
from workers.inbox import BUSY_SINCE, ENTRIES, FINISHED, TURNS, Board, Inbox
from workers.model import Array, Model
from workers.records import (
    CANCEL,
    CONTROL,
    FRAME,
    FRAMES_PER_WRITE,
    INPUT,
    OUTPUT,
    QUEUED_WORD,
    RECORD,
    RECORD_SIZE,
    RECORD_WORDS,
    SLOT_HEADER,
    SlotState,
)
from workers.tensors import Layout, Layouts, OutputChecks, align, signature

log = logging.getLogger("headrace.worker")

LOOK_NS = 50_000_000
"""How often a worker that never runs dry looks at its control socket."""
HOLD_BACK_S = 0.001
_QUEUED, _RUNNING, _DONE, _SPILLED, _FAILED, _CANCELLED, _EXPIRED = (
    int(SlotState.QUEUED),
    int(SlotState.RUNNING),
    int(SlotState.DONE),
    int(SlotState.SPILLED),
    int(SlotState.FAILED),
    int(SlotState.CANCELLED),
    int(SlotState.EXPIRED),
)


class Drained(Exception):
    """Nothing more will come: the queue has no writer any more, or the pool says stop."""


class Peer:
    """The client side of tasks: its arena, and the reply pipe its frames go to."""

    __slots__ = ("arena", "frames", "reply")

    def __init__(self, arena: Arena, reply: int) -> None:
        self.arena = arena
        self.reply = reply
        self.frames: list[bytes] = []

    def flush(self) -> None:
        for i in range(0, len(self.frames), FRAMES_PER_WRITE):
            data = b"".join(self.frames[i : i + FRAMES_PER_WRITE])
            for _ in range(2):
                try:
                    os.write(self.reply, data)
                    break
                except BlockingIOError:
                    # The client will scan its slots. The mark goes up before the second try: if the pipe was
                    # emptied in between, that try gets through and wakes the client, which then sees the mark.
                    self.arena.words[OVERFLOW] = 1
                except BrokenPipeError:
                    break
        self.frames.clear()

    def close(self) -> None:
        os.close(self.reply)
        self.arena.close()


class Item:
    """A task that this worker holds. `arrays` is set where the inputs do not lie in the slot: a decoded body, or a
    spill. `at`: where the outcome goes, in bytes from the slot's start."""

    __slots__ = (
        "arrays",
        "at",
        "base",
        "charges",
        "cls",
        "codec",
        "entry",
        "index",
        "layout",
        "peer",
        "seq",
        "slot",
        "spill",
    )

    def __init__(self, entry: int, peer: Peer, slot: int, seq: int, charges: int, codec: int) -> None:
        self.entry = entry
        self.peer = peer
        self.slot = slot
        self.seq = seq
        self.charges = charges
        self.codec = codec
        arena = peer.arena
        self.base = arena.bases[slot]
        self.cls = arena.cls[slot]
        self.index = slot - arena.firsts[self.cls]
        self.arrays: dict[str, Array] | None = None
        self.spill: Spill | None = None
        self.layout: Layout
        self.at = SLOT_HEADER

    @property
    def group(self) -> object:
        return self.layout.group

    @property
    def rows(self) -> int:
        return self.layout.rows


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
        self._checks = OutputChecks(tuple(model.outputs))
        self._queue = queue
        self._inbox = inbox
        self._board = board
        self._link = link
        self._index = index
        self._max_batch = inbox.capacity
        # What is free of the inbox behind n records.
        self._room = [inbox.entries[n * RECORD_SIZE :] for n in range(inbox.capacity)]
        self._max_delay_ns = max_delay_ns
        self._spill_limit = spill_limit
        self._peers: dict[int, Peer] = {}
        self._dropped: list[int] = []
        self._layouts = Layouts()
        self._next_look = 0
        self._either = select.poll()
        self._either.register(queue, select.POLLIN)
        self._either.register(link, select.POLLIN)
        self._link_only = select.poll()
        self._link_only.register(link, select.POLLIN)

    def serve(self) -> None:
        """Work until drained."""
        try:
            while True:
                held = self._gather() if self._max_delay_ns else self._read(0)
                if held:
                    self._work(held)
                if held < self._max_batch:
                    # The queue is as good as empty: no need to find that out by a read that fails.
                    self._wait()
        except Drained:
            pass

    # Taking.

    def _read(self, held: int) -> int:
        """Read behind the `held` records in the inbox; how many came, 0 if none are waiting, -1 if the queue has
        ended and there are some to work on first."""
        try:
            size = os.readv(self._queue, (self._room[held],))
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
            oldest = self._inbox.words[ENTRIES // 8 + QUEUED_WORD]
            while (until := gather_until(oldest, held, self._max_batch, self._max_delay_ns)) > time.monotonic_ns():
                self._board.words[self._index] = until
                select.select([self._queue], [], [], (until - time.monotonic_ns()) / 1e9)
                came = self._read(held)
                if came < 0:
                    break
                held += came
        finally:
            self._board.words[self._index] = 0
        return held

    def _claim_gathering(self) -> bool:
        """Be the one that gathers, or may take a full batch at once. Two that claim together both see it, as the
        kernel orders each one's mark before its look at the queue; the one with the higher index steps back."""
        board, index = self._board, self._index
        for _ in range(2):
            now = time.monotonic_ns()
            if not board.busy_until(index, now):
                board.words[index] = now + self._max_delay_ns
                self._depth()
                other = board.first_busy(index, now)
                if other < 0:
                    return True
                board.words[index] = 0
                if other < index:
                    break
        if self._depth() >= self._max_batch:
            return True
        self._look(HOLD_BACK_S * 1000)
        return False

    def _depth(self) -> int:
        buffer = c_array("i", [0])
        fcntl.ioctl(self._queue, termios.FIONREAD, buffer)
        return buffer[0] // RECORD_SIZE

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
            raise Drained
        return heard

    def _heed(self, heard: tuple[control.Message, list[int]]) -> None:
        message, fds = heard
        for fd in fds:
            os.close(fd)
        if isinstance(message, control.Stop):
            raise Drained
        if isinstance(message, control.DropArena):
            self._dropped.append(message.arena)

    def _close_dropped(self) -> None:
        """Between two turns: within one, tasks of a client that has gone may be among those that are open."""
        while self._dropped:
            peer = self._peers.pop(self._dropped.pop(), None)
            if peer is not None:
                peer.close()

    # Opening.

    def _work(self, held: int) -> None:
        now = time.monotonic_ns()
        if now >= self._next_look:
            self._next_look = now + LOOK_NS
            self._look(0)
        items = []
        for entry in range(held):
            item = self._open(entry, now)
            if item is not None:
                items.append(item)
        for batch in plan(items, self._max_batch) if len(items) > 1 else (items,):
            if batch:
                self._run(batch)
        self._inbox.words[BUSY_SINCE] = 0
        self._inbox.words[TURNS] += 1
        self._close_dropped()

    def _open(self, entry: int, now: int) -> Item | None:
        """The task of an entry, if it is to be run; otherwise it is finished here and None."""
        arena_id, seq, deadline, _, spill, slot, charges, codec = RECORD.unpack_from(
            self._inbox.entries, entry * RECORD_SIZE
        )
        peer = self._peers.get(arena_id) or self._pull(arena_id)
        if peer is None or peer.arena.words[CLOSED]:
            self._inbox.clear(entry)
            return None
        item = Item(entry, peer, slot, seq, charges, codec)
        words = peer.arena.words
        at = item.base >> 3
        word = words[at]
        if word >> 8 != seq:
            self._inbox.clear(entry)
            return None
        if word & 0xFF >= _DONE:
            self._finish([item], word & 0xFF)
            return None
        if words[at + CONTROL] == (seq << 8 | CANCEL):
            self._finish([item], _CANCELLED)
            return None
        if deadline <= now:
            self._finish([item], _EXPIRED)
            return None
        try:
            self._find_inputs(item, words[at + INPUT], spill)
        except PoolError as error:
            self._fail(item, error)
            return None
        return item

    def _find_inputs(self, item: Item, size: int, spill: int) -> None:
        arena = item.peer.arena
        if spill:
            item.spill = self._pull_spill(spill)
            source, start = item.spill.map, 0
        else:
            source, start = arena.map, item.base + SLOT_HEADER
        if item.codec:
            item.at = align(SLOT_HEADER + (0 if spill else size))
            self._mark_running([item])
            body = memoryview(source)[start : start + size]
            item.arrays = BY_WIRE_ID[item.codec].decode(body, self._model.inputs)
            item.layout = self._layouts.of(signature(item.arrays))
            # Decoded, and not begun yet: should a mate's run end this process, this task is not charged for it.
            arena.words[item.base >> 3] = item.seq << 8 | _QUEUED
            return
        item.layout = self._layouts.parse(source[start : start + size])
        if spill:
            item.arrays = item.layout.views(source, 0)
        else:
            item.at = align(SLOT_HEADER + item.layout.size)

    def _pull(self, arena_id: int) -> Peer | None:
        """Ask the pool for an arena met for the first time; None if its client is gone."""
        fds = self._ask(arena_id)
        if not fds:
            return None
        peer = self._peers[arena_id] = Peer(Arena(fds[0]), fds[1])
        return peer

    def _pull_spill(self, spill: int) -> Spill:
        fds = self._ask(spill)
        if not fds:
            raise ModelFailed("the inputs are gone")
        return Spill(spill, fds[0])

    def _ask(self, memory_id: int) -> list[int]:
        control.send(self._link, control.NeedArena(memory_id))
        while True:
            message, fds = self._hear()
            if isinstance(message, control.ArenaIs | control.ArenaDead) and message.arena == memory_id:
                return fds
            self._heed((message, fds))

    # Running.

    def _mark_running(self, items: list[Item]) -> None:
        self._inbox.words[BUSY_SINCE] = time.monotonic_ns()
        for item in items:
            item.peer.arena.words[item.base >> 3] = item.seq << 8 | _RUNNING

    def _run(self, items: list[Item]) -> None:
        """Run a batch; if it fails its items are run singly, so that one bad item fails alone."""
        self._mark_running(items)
        parts = _parts(items)
        rows = sum(item.layout.rows for item in items)
        try:
            outputs = self._checks.check(self._model.predict(_gather_inputs(parts)), rows)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if len(items) > 1:
                for item in items:
                    item.peer.arena.words[item.base >> 3] = item.seq << 8 | _QUEUED
                for item in items:
                    self._run([item])
                return
            self._fail(items[0], self._as_pool_error(error))
            return
        if len(parts) == 1:
            self._answer(items, outputs)
        else:
            start = 0
            for part in parts:
                end = start + sum(item.layout.rows for item in part)
                self._answer(part, {name: array[start:end] for name, array in outputs.items()})
                start = end
        self._inbox.words[FINISHED] += len(items)

    def _as_pool_error(self, error: BaseException) -> PoolError:
        if isinstance(error, InvalidInput | Refused | InvalidOutput | Overloaded):
            return error
        if isinstance(error, ModelFailed):
            log.error("%s", error)
            return error
        log.error("the model failed", exc_info=error)
        return ModelFailed(_text_of(error))

    # Answering.

    def _answer(self, part: list[Item], outputs: Mapping[str, Array]) -> None:
        """Put the outputs of items of one layout, size of slot and client into their slots."""
        first = part[0]
        if first.codec:
            self._answer_body(first, outputs)
            return
        count, rows = len(part), first.layout.rows
        layout = self._layouts.of(tuple([(n, a.dtype, (rows, *a.shape[1:])) for n, a in outputs.items()]))
        arena = first.peer.arena
        at = first.at
        if at + layout.size > arena.sizes[first.slot]:
            for i, item in enumerate(part):
                self._spill(item, layout, {name: a[i * rows : (i + 1) * rows] for name, a in outputs.items()})
            return
        slots = arena.class_views(first.cls, at, layout)
        if count == 1:
            for tensor, slot in zip(layout.tensors, slots, strict=True):
                slot[first.index] = outputs[tensor.name]
        else:
            indexes = [item.index for item in part]
            for tensor, slot in zip(layout.tensors, slots, strict=True):
                slot[indexes] = outputs[tensor.name].reshape(count, *tensor.shape)
        descriptor = layout.descriptor
        length = len(descriptor)
        for item in part:
            start = item.base + at
            arena.view[start : start + length] = descriptor
            arena.words[(item.base >> 3) + OUTPUT] = at << 32 | length
        self._finish(part, _DONE)

    def _answer_body(self, item: Item, outputs: Mapping[str, Array]) -> None:
        try:
            body = BY_WIRE_ID[item.codec].encode(outputs, self._model.outputs)
        except PoolError as error:
            self._fail(item, error)
            return
        arena = item.peer.arena
        if item.at + len(body) <= arena.sizes[item.slot]:
            start = item.base + item.at
            arena.view[start : start + len(body)] = body
            arena.words[(item.base >> 3) + OUTPUT] = item.at << 32 | len(body)
            self._finish([item], _DONE)
        else:
            self._send_spill(item, body, len(body))

    def _spill(self, item: Item, layout: Layout, outputs: dict[str, Array]) -> None:
        self._send_spill(item, layout, len(layout.descriptor), outputs)

    def _send_spill(
        self, item: Item, content: Layout | bytes, length: int, outputs: dict[str, Array] | None = None
    ) -> None:
        """Outputs that outgrow the slot travel in a memory file, with their final frame, through the pool."""
        size = len(content) if isinstance(content, bytes) else content.size
        if size > self._spill_limit:
            self._fail(item, ModelFailed(f"the answer is {size} bytes, and at most {self._spill_limit} can be given"))
            return
        try:
            spill = Spill(0, reserve("headrace-spill", max(size, 1)))
        except NotEnoughMemory as error:
            self._fail(item, error)
            return
        if isinstance(content, bytes):
            spill.map[:size] = content
        else:
            spill.map[:length] = content.descriptor
            for name, view in content.views(spill.map, 0).items():
                view[...] = (outputs or {})[name]
        words = item.peer.arena.words
        words[(item.base >> 3) + OUTPUT] = length
        words[item.base >> 3] = item.seq << 8 | _SPILLED
        arena_id = self._inbox.words[ENTRIES // 8 + item.entry * RECORD_WORDS]
        control.send(self._link, control.Spilled(arena_id, item.slot, item.seq), [spill.fd])
        spill.close()
        self._let_go(item)

    def _fail(self, item: Item, error: PoolError) -> None:
        text = (str(error) or error.code).encode("utf-8", "replace")[: ERROR_ROOM // 2].decode("utf-8", "ignore")
        block = f"{code_of(error)}\n{text}".encode()
        arena = item.peer.arena
        start = item.base + item.at
        arena.view[start : start + len(block)] = block
        arena.words[(item.base >> 3) + OUTPUT] = item.at << 32 | len(block)
        self._finish([item], _FAILED)
        self._inbox.words[FINISHED] += 1

    def _finish(self, part: list[Item], outcome: int) -> None:
        """Outcome into the slots, then the frames, then the entries are cleared. All items of one client."""
        peer = part[0].peer
        words = peer.arena.words
        for item in part:
            word = words[item.base >> 3] = item.seq << 8 | outcome
            peer.frames.append(FRAME.pack(word, item.slot))
        peer.flush()
        for item in part:
            self._let_go(item)

    def _let_go(self, item: Item) -> None:
        self._inbox.clear(item.entry)
        item.arrays = None
        if item.spill is not None:
            item.spill.close()


def _parts(items: list[Item]) -> list[list[Item]]:
    """Items whose tensors lie alike, together: one client, one size of slot, one layout, in the slot itself."""
    if len(items) == 1:
        return [items]
    parts: dict[tuple[int, int, int], list[Item]] = {}
    apart = []
    for item in items:
        if item.arrays is not None:
            apart.append([item])
        else:
            key = id(item.peer), item.cls, id(item.layout)
            part = parts.get(key)
            if part is None:
                parts[key] = [item]
            else:
                part.append(item)
    return [*parts.values(), *apart]


def _gather_inputs(parts: list[list[Item]]) -> dict[str, Array]:
    """The batch's arrays: views of shared memory for a single task, else one copy."""
    pieces = [_piece(part) for part in parts]
    if len(pieces) == 1:
        batch = pieces[0]
    else:
        batch = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    for inputs in batch.values():
        inputs.flags.writeable = False
    return batch


def _piece(part: list[Item]) -> dict[str, Array]:
    first = part[0]
    if first.arrays is not None:
        return {name: a.view() for name, a in first.arrays.items()}
    layout = first.layout
    slots = first.peer.arena.class_views(first.cls, SLOT_HEADER, layout)
    if len(part) == 1:
        return {t.name: slot[first.index] for t, slot in zip(layout.tensors, slots, strict=True)}
    indexes = [item.index for item in part]
    rows = len(part) * layout.rows
    return {t.name: slot[indexes].reshape(rows, *t.shape[1:]) for t, slot in zip(layout.tensors, slots, strict=True)}


def _text_of(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__
