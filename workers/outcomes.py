"""How a task ends: its outcome into the slot, then a frame to the client, then the inbox entry is cleared.

In this order, so that a death between any two of these loses nothing: whoever finds the entry can tell from the
slot how far its task had come.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Mapping

from workers import control
from workers.arena import NotEnoughMemory, Spill, reserve
from workers.codecs import BY_WIRE_ID
from workers.errors import ModelFailed, Overloaded, PoolError, code_of
from workers.inbox import ENTRIES, FINISHED, Inbox
from workers.model import Array, Model
from workers.records import ERROR_ROOM, FRAME, OUTPUT, RECORD_WORDS, SlotState
from workers.tasks import HeldTask
from workers.tensors import Layout, Layouts

_DONE, _SPILLED, _FAILED = int(SlotState.DONE), int(SlotState.SPILLED), int(SlotState.FAILED)


class Outcomes:
    """Of the tasks in `inbox`. `link`: the control socket, over which outputs travel that outgrow their slot, up to
    `spill_limit` bytes."""

    def __init__(self, model: Model, inbox: Inbox, link: socket.socket, layouts: Layouts, spill_limit: int) -> None:
        self._model = model
        self._inbox = inbox
        self._link = link
        self._layouts = layouts
        self._spill_limit = spill_limit

    def answer(self, part: list[HeldTask], outputs: Mapping[str, Array]) -> None:
        """Put the outputs of tasks of one layout, size of slot and client into their slots."""
        first = part[0]
        if first.codec:
            self._answer_body(first, outputs)
            return
        count, rows = len(part), first.layout.rows
        layout = self._layouts.of(tuple([(n, a.dtype, (rows, *a.shape[1:])) for n, a in outputs.items()]))
        arena = first.client.arena
        at = first.at
        if at + layout.size > arena.sizes[first.slot]:
            for i, task in enumerate(part):
                self._spill_arrays(task, layout, {n: a[i * rows : (i + 1) * rows] for n, a in outputs.items()})
            return
        slots = arena.class_views(first.cls, at, layout)
        if count == 1:
            for tensor, slot in zip(layout.tensors, slots, strict=True):
                slot[first.index] = outputs[tensor.name]
        else:
            indexes = [task.index for task in part]
            for tensor, slot in zip(layout.tensors, slots, strict=True):
                slot[indexes] = outputs[tensor.name].reshape(count, *tensor.shape)
        descriptor = layout.descriptor
        length = len(descriptor)
        for task in part:
            start = task.base + at
            arena.view[start : start + length] = descriptor
            arena.words[(task.base >> 3) + OUTPUT] = at << 32 | length
        self.finish(part, _DONE)

    def _answer_body(self, task: HeldTask, outputs: Mapping[str, Array]) -> None:
        try:
            body = BY_WIRE_ID[task.codec].encode(outputs, self._model.outputs)
        except PoolError as error:
            self.fail(task, error)
            return
        arena = task.client.arena
        if task.at + len(body) <= arena.sizes[task.slot]:
            start = task.base + task.at
            arena.view[start : start + len(body)] = body
            arena.words[(task.base >> 3) + OUTPUT] = task.at << 32 | len(body)
            self.finish([task], _DONE)
        else:

            def fill(memory: mmap.mmap) -> None:
                memory[: len(body)] = body

            self._spill(task, len(body), len(body), fill)

    def _spill_arrays(self, task: HeldTask, layout: Layout, outputs: Mapping[str, Array]) -> None:
        def fill(memory: mmap.mmap) -> None:
            memory[: len(layout.descriptor)] = layout.descriptor
            for name, view in layout.views(memory, 0).items():
                view[...] = outputs[name]

        self._spill(task, layout.size, len(layout.descriptor), fill)

    def _spill(self, task: HeldTask, size: int, length: int, fill: Callable[[mmap.mmap], None]) -> None:
        """Outputs that outgrow the slot travel in a memory file, with their final frame, through the pool."""
        if size > self._spill_limit:
            self.fail(task, ModelFailed(f"the answer is {size} bytes, and at most {self._spill_limit} can be given"))
            return
        words = task.client.arena.words
        try:
            spill = Spill(0, reserve("headrace-spill", max(size, 1)))
            fill(spill.map)
            words[(task.base >> 3) + OUTPUT] = length
            words[task.base >> 3] = task.seq << 8 | _SPILLED
            arena_id = self._inbox.words[ENTRIES // 8 + task.entry * RECORD_WORDS]
            control.send(self._link, control.Spilled(arena_id, task.slot, task.seq), [spill.fd])
        except (NotEnoughMemory, OSError) as error:
            # Neither memory nor descriptors that are short are the fault of the tasks beside it.
            self.fail(task, Overloaded(f"the answer cannot be stored: {error}"))
            return
        spill.close()
        self.let_go(task)

    def fail(self, task: HeldTask, error: PoolError) -> None:
        self.write_failure(task, error)
        self.finish([task], _FAILED)
        self._inbox.words[FINISHED] += 1

    def write_failure(self, task: HeldTask, error: PoolError) -> None:
        """What a failed outcome refers to, into the slot."""
        text = (str(error) or error.code).encode("utf-8", "replace")[: ERROR_ROOM // 2].decode("utf-8", "ignore")
        block = f"{code_of(error)}\n{text}".encode()
        arena = task.client.arena
        start = task.base + task.at
        arena.view[start : start + len(block)] = block
        arena.words[(task.base >> 3) + OUTPUT] = task.at << 32 | len(block)

    def finish(self, part: list[HeldTask], outcome: int) -> None:
        """Outcome into the slots, then the frames, then the entries are cleared. All tasks of one client."""
        client = part[0].client
        words = client.arena.words
        for task in part:
            word = words[task.base >> 3] = task.seq << 8 | outcome
            client.frames.append(FRAME.pack(word, task.slot))
        client.flush()
        for task in part:
            self.let_go(task)

    def let_go(self, task: HeldTask) -> None:
        """The client has heard, or will from its pipe."""
        self._inbox.clear(task.entry)
        task.arrays = None
        if task.spill is not None:
            task.spill.close()
