"""The client's side of the protocol, without I/O: records out, frames in, completions and pieces for whoever waits.

Owns the slots of one arena and the tasks that hold them. A driver (threads: `workers.client`; gevent:
`service.hub`) writes the records it is handed to the queue, feeds in what it reads from the reply pipe, and wakes
the waiters of the tasks that come back settled, or with new pieces.

A slot goes back to the free ones only on its task's final frame, whoever has stopped waiting before: the worker
may still be writing. Methods may run in several threads at once, except that one thread at a time feeds frames.
There is no lock: every hand-over is a single pop from a dictionary or a deque, which the interpreter makes whole,
and who gets nothing from it was not the first. A task is by its sequence number in `_tasks` until its final frame,
in `_open` while somebody waits for that, then in `_settled` until its answer is released.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from workers.arena import CHANGED, OVERFLOW, Arena, NotEnoughMemory, Spill, copy_in, copy_out, no_pause, reserve
from workers.codecs import CODECS
from workers.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    ModelFailed,
    ModelNotFound,
    NotReady,
    Overloaded,
    PoolError,
    PoolLost,
    TooLarge,
    WorkerDied,
    from_code,
)
from workers.model import Array
from workers.modelview import ModelView
from workers.records import (
    CANCEL,
    CONTROL,
    CREDIT,
    ERROR_ROOM,
    INPUT,
    OUTPUT,
    PIECE,
    PIECE_COST,
    PIECE_PART,
    RECORD,
    SLOT_HEADER,
    STATE,
    WINDOW,
    FrameReader,
    SlotState,
)
from workers.slots import Slots
from workers.status import ModelStatus
from workers.tensors import Layout, Layouts, align

_QUEUED, _STREAMING, _DONE, _SPILLED, _FAILED = (
    int(SlotState.QUEUED),
    int(SlotState.STREAMING),
    int(SlotState.DONE),
    int(SlotState.SPILLED),
    int(SlotState.FAILED),
)
LOOK_NS = 1_000_000_000
"""How often all tasks are looked through for deadlines that have passed, at least."""
_TEXTS: dict[int, tuple[type[PoolError], str]] = {
    SlotState.CANCELLED: (Cancelled, "the task was cancelled"),
    SlotState.EXPIRED: (DeadlineExceeded, "no answer within the deadline"),
    SlotState.WORKER_DIED: (WorkerDied, "the worker died while it ran this task, and so did the next one"),
    SlotState.NOT_READY: (NotReady, "the model is not ready"),
    SlotState.DRAINING: (Draining, "the pool is draining"),
}


class Task:
    """One unit of work and the slot it holds. `outcome` is the slot's final state once it is known, `error` why
    nobody waits for it any more, or how it failed; each of `wakes` is called when either is there.

    `pieces`: of a stream, what has come and was not taken yet; None for any other task. `wakes` are called for new
    ones too, and so is `heard`. `consumed`: what the pieces that were taken cost."""

    __slots__ = (
        "base",
        "cls",
        "codec",
        "consumed",
        "deadline_ns",
        "error",
        "heard",
        "index",
        "model",
        "outcome",
        "parts",
        "pieces",
        "seq",
        "slot",
        "spill",
        "turn",
        "wakes",
    )
    heard: Callable[[], None] | None
    consumed: int
    parts: list[bytes]  # of a piece that is still coming
    turn: int  # of `receive`, when something last came

    def __init__(
        self, model: ModelView, slot: int, cls: int, index: int, base: int, seq: int, deadline_ns: int, codec: int
    ) -> None:
        self.model = model
        self.slot = slot
        self.cls = cls
        self.index = index
        self.base = base
        self.seq = seq
        self.deadline_ns = deadline_ns
        self.codec = codec
        self.outcome = 0
        self.error: PoolError | None = None
        self.spill: Spill | None = None
        self.wakes: list[Callable[[], object]] = []
        self.pieces: deque[bytes] | None = None


class ClientCore:
    """Of the tasks in the slots of `arena`, known to the pool as `arena_id`, for `models`."""

    def __init__(self, arena: Arena, arena_id: int, models: Sequence[ModelStatus], spill_limit: int) -> None:
        self.arena = arena
        self.arena_id = arena_id
        self.models: dict[str, ModelView] = {}
        self.dropped: deque[int] = deque()
        """Ids of input spills that are over with: the driver tells the pool."""
        self.trouble: Exception | None = None
        """Why this is not fit for use any more: something nobody foresaw; the driver makes the connection anew."""
        self._spill_limit = spill_limit
        self._layouts = Layouts()
        self._frames = FrameReader()
        self._seqs = itertools.count(1)
        self._spills = itertools.count(1)
        self._next_expiry = 0
        self._changes = itertools.count(1)
        self._turn = 0
        self._open: dict[int, Task] = {}
        self._tasks: dict[int, Task] = {}
        self._settled: dict[int, Task] = {}
        self._written: list[bytes] = [b""] * len(arena.bases)  # descriptor that lies at the start of each slot
        self._slots = Slots(arena, len(models))
        for status, private in zip(models, self._slots.privates, strict=True):
            self.models[status.name] = ModelView(status, private)

    def model(self, name: str) -> ModelView:
        view = self.models.get(name)
        if view is None:
            raise ModelNotFound(f"there is no model {name!r}")
        return view

    # What goes out.

    def submit(
        self, model: ModelView, inputs: Mapping[str, Array], deadline_ns: int, now_ns: int
    ) -> tuple[Task, bytes]:
        """Lease a slot, write the inputs; the task and the record to queue. `InvalidInput`, `TooLarge`,
        `Overloaded`."""
        layout = model.checks.layout(inputs)
        row_room = model.row_room
        room = layout.size if row_room is None else 256 + row_room * layout.rows
        task = self._lease(model, layout.size, room, deadline_ns, 0)
        self._write_inputs(task, layout, inputs)
        return task, self._record(task, now_ns, layout.rows)

    def submit_stream(
        self, model: ModelView, inputs: Mapping[str, Array], deadline_ns: int, now_ns: int
    ) -> tuple[Task, bytes]:
        """As `submit`, for a task of one row that is answered by pieces."""
        layout = model.stream_checks.layout(inputs)
        task = self._lease(model, layout.size, 0, deadline_ns, 0)
        self._write_inputs(task, layout, inputs)
        task.pieces = deque()
        task.parts = []
        task.consumed = task.turn = 0
        task.heard = None
        self.arena.words[(task.base >> 3) + CREDIT] = WINDOW
        return task, self._record(task, now_ns, 1, 1)

    def _write_inputs(self, task: Task, layout: Layout, inputs: Mapping[str, Array]) -> None:
        """If that fails, the slot is free again."""
        arena = self.arena
        try:
            if task.spill is None:
                base = task.base + SLOT_HEADER
                descriptor = layout.descriptor
                if self._written[task.slot] is not descriptor:
                    arena.view[base : base + len(descriptor)] = descriptor
                    arena.words[(task.base >> 3) + INPUT] = len(descriptor)
                    self._written[task.slot] = descriptor
                for tensor, rows in zip(layout.tensors, arena.class_views(task.cls, SLOT_HEADER, layout), strict=True):
                    rows[task.index] = inputs[tensor.name]
            else:
                self._spill_inputs(task, task.spill, layout, inputs)
        except BaseException:
            self._give_back(task)
            raise

    def submit_body(
        self,
        model: ModelView,
        body: bytes | memoryview,
        codec: str,
        deadline_ns: int,
        now_ns: int,
        pause: Callable[[], object] = no_pause,
    ) -> tuple[Task, bytes]:
        """As `submit`, for a raw body that the worker is to decode. `pause` is called now and then while memory is
        taken and the body copied; if it raises, nothing has happened."""
        size = len(body)
        task = self._lease(model, size, size, deadline_ns, CODECS[codec].wire_id, pause)
        self._written[task.slot] = b""  # also of a copy that is broken off
        try:
            if task.spill is None:
                copy_in(self.arena.view, task.base + SLOT_HEADER, body, pause)
            else:
                copy_in(task.spill.map, 0, body, pause)
        except BaseException:
            self._give_back(task)
            raise
        self.arena.words[(task.base >> 3) + INPUT] = size
        return task, self._record(task, now_ns, 1)

    def withdraw(self, task: Task) -> None:
        """The record never got into a queue."""
        self._open.pop(task.seq, None)
        if self._tasks.pop(task.seq, None) is not None:
            task.model.abandoned.discard(task.seq)
            self._give_back(task)

    def _lease(
        self,
        model: ModelView,
        size: int,
        room: int,
        deadline_ns: int,
        codec: int,
        pause: Callable[[], object] = no_pause,
    ) -> Task:
        if size > self._spill_limit:
            raise TooLarge(f"the inputs are {size} bytes, and at most {self._spill_limit} can be taken")
        arena = self.arena
        need = SLOT_HEADER + align(size) + ERROR_ROOM + room
        spill = False
        slot = -1
        for k, (slot_bytes, _, _) in enumerate(arena.classes):
            if need <= slot_bytes:
                slot = self._slots.take(model.private, k)
                if slot >= 0:
                    break
        if slot < 0:
            # No slot is free that holds it: a small one and a memory file do. A slot is needed all the same.
            spill = need > arena.classes[0][0]
            k = 0
            slot = self._slots.take(model.private, 0) if spill else -1
            if slot < 0:
                raise Overloaded("every slot is taken")
        seq = next(self._seqs)
        task = Task(model, slot, k, slot - arena.firsts[k], arena.bases[slot], seq, deadline_ns, codec)
        if spill:
            try:
                fd = reserve("headrace-spill", max(size, 1), pause)
                task.spill = Spill(self.arena_id << 32 | next(self._spills), fd)
            except (NotEnoughMemory, OSError) as error:
                self._slots.give_back(slot)
                raise Overloaded(f"the inputs cannot be stored: {error}") from None
            except BaseException:
                self._slots.give_back(slot)
                raise
        return task

    def _spill_inputs(self, task: Task, spill: Spill, layout: Layout, inputs: Mapping[str, Array]) -> None:
        spill.map[: len(layout.descriptor)] = layout.descriptor
        self.arena.words[(task.base >> 3) + INPUT] = len(layout.descriptor)
        self._written[task.slot] = b""
        for name, view in layout.views(spill.map, 0).items():
            view[...] = inputs[name]

    def _record(self, task: Task, now_ns: int, rows: int, stream: int = 0) -> bytes:
        seq = task.seq
        self.arena.words[task.base >> 3] = seq << 8 | _QUEUED
        self._tasks[seq] = task
        self._open[seq] = task
        if task.deadline_ns < self._next_expiry:
            self._next_expiry = task.deadline_ns
        spill = 0 if task.spill is None else task.spill.id
        return RECORD.pack(self.arena_id, seq, task.deadline_ns, now_ns, spill, task.slot, 0, task.codec, rows, stream)

    # What comes back.

    def receive(self, data: bytes) -> list[Task]:
        """The tasks that somebody waited for and that the frames in `data` settle, and the streams to which they bring
        pieces, each once. Unknown frames are no-ops, and one that cannot be heeded (`trouble`) keeps nobody from
        hearing of the others."""
        heard: list[Task] = []
        self._turn += 1
        tasks = self._tasks
        for word, slot, payload in self._frames.feed(data):
            task = tasks.get(word >> 8)
            if task is not None and task.slot == slot:
                kind = word & 0xFF
                try:
                    if kind >= PIECE:
                        self._add_piece(task, kind, payload, heard)
                    else:
                        self._finish(task, kind, heard)
                except Exception as error:
                    self.trouble = error
        if self.arena.words[OVERFLOW]:
            self.arena.words[OVERFLOW] = 0
            heard += self._scan()
        return heard

    def _add_piece(self, task: Task, kind: int, payload: bytes, heard: list[Task]) -> None:
        pieces = task.pieces
        if pieces is None or task.error is not None:
            return
        if kind == PIECE_PART:
            task.parts.append(payload)
            return
        if task.parts:
            payload = b"".join([*task.parts, payload])
            task.parts.clear()
        pieces.append(payload)
        if task.turn != self._turn:
            task.turn = self._turn
            heard.append(task)

    def _scan(self) -> list[Task]:
        """A frame was lost on a full pipe: look at the slots themselves."""
        settled: list[Task] = []
        for task in list(self._tasks.values()):
            word = self.arena.words[(task.base >> 3) + STATE]
            # Spilled outputs come over the control socket, which loses nothing.
            if word >> 8 == task.seq and word & 0xFF >= _DONE and word & 0xFF != _SPILLED:
                self._finish(task, word & 0xFF, settled)
        return settled

    def spilled(self, slot: int, seq: int, fd: int) -> list[Task]:
        """The outputs of a task came in a memory file, which is now ours."""
        task = self._tasks.get(seq)
        settled: list[Task] = []
        if task is None or task.slot != slot:
            os.close(fd)
            return settled
        try:
            outputs = Spill(0, fd)
        except OSError as error:
            # The task fails alone; its slot is free as after any final frame.
            abandoned = self.abandon(task, Overloaded(f"the outputs cannot be had: {error}"))
            self._finish(task, _SPILLED, settled)
            return [task] if abandoned else settled
        self._finish(task, _SPILLED, settled, outputs)
        return settled

    def _finish(self, task: Task, outcome: int, settled: list[Task], outputs: Spill | None = None) -> None:
        seq = task.seq
        if self._tasks.pop(seq, None) is None:
            # The other of its final frame and its memory file was just being heeded in another thread.
            if outputs is not None:
                outputs.close()
            return
        if outputs is not None:
            self._drop_spill(task)
            task.spill = outputs
        if outcome != _DONE:
            self._written[task.slot] = b""  # whatever has gone wrong may lie in what was there
        if self._open.pop(seq, None) is None:
            task.model.abandoned.discard(seq)
            self._give_back(task)
            return
        # In this order: who sees the outcome may release it at once.
        self._settled[seq] = task
        task.outcome = outcome
        if task.pieces is None or task.turn != self._turn:
            settled.append(task)

    def expire(self, now_ns: int) -> list[Task]:
        """The tasks whose deadline has passed; their slots stay leased until the final frame."""
        if now_ns < self._next_expiry:
            return []
        # From here on a task of another thread may bring it forward; should that be lost, a second is.
        self._next_expiry = now_ns + LOOK_NS
        waiting = list(self._open.values())
        self._next_expiry = min(
            [self._next_expiry, *[task.deadline_ns for task in waiting if task.deadline_ns > now_ns]]
        )
        late = [task for task in waiting if task.deadline_ns <= now_ns]
        return [task for task in late if self.abandon(task, DeadlineExceeded("no answer within the deadline"))]

    def lose(self) -> list[Task]:
        """The pool is gone, and with it whatever was under way."""
        return [task for task in list(self._open.values()) if self.abandon(task, PoolLost("the pool is gone"))]

    def abandon(self, task: Task, error: PoolError) -> bool:
        """Nobody waits for the task any more; true if somebody did until now. It is not run if it has not begun."""
        seq = task.seq
        # The number may be that of another task by now, if this one is from before the connection was made anew.
        if self._open.get(seq) is not task or self._open.pop(seq, None) is None:
            return False
        if task.pieces is None or self._state(task) == _QUEUED:  # a stream that was taken up is in no queue any more
            task.model.abandoned.add(seq)
        if seq not in self._tasks:
            # The thread that was heeding its final frame may have looked there before.
            task.model.abandoned.discard(seq)
        task.error = error
        try:
            self.arena.words[(task.base >> 3) + CONTROL] = seq << 8 | CANCEL
            if task.pieces is not None:
                self.arena.words[CHANGED] = next(self._changes)
        except ValueError:
            if self.arena.fd >= 0:
                raise
        return True

    def _state(self, task: Task) -> int:
        """What the slot says of a task under way; 0 without an arena."""
        try:
            word = self.arena.words[(task.base >> 3) + STATE]
        except ValueError:
            # Another thread may have closed the arena just now.
            return 0
        return word & 0xFF if word >> 8 == task.seq else 0

    def grant(self, task: Task) -> None:
        """The pieces of a stream that were taken so far are consumed: it may send as much again. Late, this changes
        nothing: whoever has the slot then may have that much as well."""
        if task.outcome or task.error:
            return
        try:
            self.arena.words[(task.base >> 3) + CREDIT] = WINDOW + task.consumed
            self.arena.words[CHANGED] = next(self._changes)
        except ValueError:
            if self.arena.fd >= 0:
                raise

    @property
    def leased(self) -> int:
        """Slots that are out: under way, or with an answer not yet taken."""
        return self._slots.out

    @property
    def under_way(self) -> int:
        """Tasks without a final frame, waited for or not."""
        return len(self._tasks)

    # What the waiter takes.

    def arrays(self, task: Task) -> dict[str, Array]:
        """The outputs of a settled task, as views: they are valid until `release`. Raises the task's error, and
        `RuntimeError` after the release."""
        self._raise_failure(task)
        try:
            layout, source, at = self._outputs(task)
            if source is self.arena.map:
                rows = self.arena.class_views(task.cls, at - task.base, layout)
                return {t.name: v[task.index] for t, v in zip(layout.tensors, rows, strict=True)}
            return layout.views(source, at)
        except ValueError:
            # Another thread may have closed the arena just now.
            self._raise_failure(task)
            raise

    def body(self, task: Task, pause: Callable[[], object] = no_pause) -> bytes:
        """The encoded answer of a task that was a raw body; `pause` is called now and then while it is copied."""
        self._raise_failure(task)
        try:
            if task.outcome == _SPILLED:
                spill = self._spill_of(task)
                return copy_out(spill.map, 0, len(spill.map), pause)
            word = self.arena.words[(task.base >> 3) + OUTPUT]
            return copy_out(self.arena.map, task.base + (word >> 32), word & 0xFFFFFFFF, pause)
        except ValueError:
            self._raise_failure(task)
            raise

    def failure(self, task: Task) -> PoolError | None:
        """How a stream that is settled or given up was cut short; None if it was not. Before the release."""
        if task.outcome == _DONE:
            return None
        if task.outcome == SlotState.WORKER_DIED and (task.turn or task.parts or self._state(task) == _STREAMING):
            return WorkerDied("the worker died while the stream was under way")
        if task.outcome in _TEXTS:
            # Whatever has become of the arena since.
            cls, text = _TEXTS[task.outcome]
            return cls(text)
        try:
            self._raise_failure(task)
        except PoolError as error:
            return error
        except ValueError:
            # Another thread may have closed the arena just now.
            return PoolLost("the pool is gone")
        except RuntimeError:
            # Another thread has released it just now, and knows.
            return None
        return None

    def take(self, task: Task) -> list[bytes]:
        """The pieces of a stream that have come, to be consumed by whoever calls, one at a time."""
        come = task.pieces
        pieces = []
        # One that closes the stream meanwhile takes them, too.
        with contextlib.suppress(IndexError):
            while come:
                piece = come.popleft()
                task.consumed += len(piece) + PIECE_COST
                pieces.append(piece)
        return pieces

    def release(self, task: Task) -> None:
        """The answer has been taken, or is not wanted: the slot is free again. A no-op for a task that is not settled
        or was released before, whichever thread did it."""
        if self._settled.pop(task.seq, None) is not None:
            self._give_back(task)

    def _outputs(self, task: Task) -> tuple[Layout, mmap.mmap, int]:
        word = self.arena.words[(task.base >> 3) + OUTPUT]
        if task.outcome == _SPILLED:
            source, at = self._spill_of(task).map, 0
        else:
            source, at = self.arena.map, task.base + (word >> 32)
        return self._layouts.parse(source[at : at + (word & 0xFFFFFFFF)]), source, at

    def _spill_of(self, task: Task) -> Spill:
        spill = task.spill
        if spill is None:
            raise ValueError("another thread has released the task just now")
        return spill

    def _raise_failure(self, task: Task) -> None:
        if task.error is not None:
            raise task.error
        if self.arena.fd < 0:
            raise PoolLost("the pool is gone, and the answer with it")
        if task.seq not in self._settled:
            raise RuntimeError("the answer has been taken already, or is still to come")
        outcome = task.outcome
        if outcome in (_DONE, _SPILLED):
            return
        if outcome == _FAILED:
            word = self.arena.words[(task.base >> 3) + OUTPUT]
            at = task.base + (word >> 32)
            code, _, text = bytes(self.arena.view[at : at + (word & 0xFFFFFFFF)]).decode().partition("\n")
            raise from_code(code, text)
        cls, text = _TEXTS.get(outcome, (ModelFailed, f"unknown outcome {outcome}"))
        raise cls(text)

    def _give_back(self, task: Task) -> None:
        self._drop_spill(task)
        self._slots.give_back(task.slot)

    def _drop_spill(self, task: Task) -> None:
        if task.spill is not None:
            if task.spill.id:
                self.dropped.append(task.spill.id)
            task.spill.close()
            task.spill = None

    def disown(self) -> None:
        """In a child of fork, which must not touch the memory: everything is over with."""
        for task in list(self._tasks.values()):
            task.error = task.error or PoolLost("the pool is the parent process's")
        self._open.clear()
        self._settled.clear()

    def close(self) -> None:
        """Let go of all memory; whoever still waits has been told by `lose`."""
        for task in list(self._tasks.values()):
            if task.spill is not None:
                task.spill.close()
        self.arena.close()
