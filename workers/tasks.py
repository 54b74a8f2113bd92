"""Tasks as a worker holds them, the clients they are for, and how tensors of many become one batch."""

from __future__ import annotations

import os

import numpy as np

from workers.arena import Arena, Spill
from workers.model import Array
from workers.records import CANCEL, CONTROL, FRAMES_PER_WRITE, SLOT_HEADER
from workers.tensors import Layout


class ClientView:
    """A client as a worker sees it, whom tasks are for: its arena, and the reply pipe its frames go to."""

    __slots__ = ("arena", "frames", "reply")

    def __init__(self, arena: Arena, reply: int) -> None:
        self.arena = arena
        self.reply = reply
        self.frames: list[bytes] = []

    def flush(self) -> None:
        for i in range(0, len(self.frames), FRAMES_PER_WRITE):
            self.arena.announce(self.reply, b"".join(self.frames[i : i + FRAMES_PER_WRITE]))
        self.frames.clear()

    def close(self) -> None:
        os.close(self.reply)
        self.arena.close()


class HeldTask:
    """A task that this worker holds, in an entry of its inbox. `arrays` is set where the inputs do not lie in the slot:
    a decoded body, or a spill. `at`: where the outcome goes, in bytes from the slot's start."""

    __slots__ = (
        "arrays",
        "at",
        "base",
        "charges",
        "client",
        "cls",
        "codec",
        "deadline_ns",
        "entry",
        "index",
        "layout",
        "seq",
        "slot",
        "spill",
    )

    def __init__(
        self, entry: int, client: ClientView, slot: int, seq: int, deadline_ns: int, charges: int, codec: int
    ) -> None:
        self.entry = entry
        self.client = client
        self.slot = slot
        self.seq = seq
        self.deadline_ns = deadline_ns
        self.charges = charges
        self.codec = codec
        arena = client.arena
        self.base = arena.bases[slot]
        self.cls = arena.cls[slot]
        self.index = slot - arena.firsts[self.cls]
        self.arrays: dict[str, Array] | None = None
        self.spill: Spill | None = None
        self.layout: Layout
        self.at = SLOT_HEADER

    @property
    def cancelled(self) -> bool:
        return self.client.arena.words[(self.base >> 3) + CONTROL] == (self.seq << 8 | CANCEL)

    @property
    def group(self) -> object:
        return self.layout.group

    @property
    def rows(self) -> int:
        return self.layout.rows


def parts_of(tasks: list[HeldTask]) -> list[list[HeldTask]]:
    """Tasks whose tensors lie alike, together: one client, one size of slot, one layout, in the slot itself."""
    if len(tasks) == 1:
        return [tasks]
    parts: dict[tuple[int, int, int], list[HeldTask]] = {}
    apart = []
    for task in tasks:
        if task.arrays is not None:
            apart.append([task])
        else:
            key = id(task.client), task.cls, id(task.layout)
            part = parts.get(key)
            if part is None:
                parts[key] = [task]
            else:
                part.append(task)
    return [*parts.values(), *apart]


def gather_inputs(parts: list[list[HeldTask]]) -> dict[str, Array]:
    """The batch's arrays: views of shared memory for a single task, else one copy."""
    pieces = [_piece(part) for part in parts]
    if len(pieces) == 1:
        batch = pieces[0]
    else:
        batch = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    for inputs in batch.values():
        inputs.flags.writeable = False
    return batch


def _piece(part: list[HeldTask]) -> dict[str, Array]:
    first = part[0]
    if first.arrays is not None:
        return {name: a.view() for name, a in first.arrays.items()}
    layout = first.layout
    slots = first.client.arena.class_views(first.cls, SLOT_HEADER, layout)
    if len(part) == 1:
        return {t.name: slot[first.index] for t, slot in zip(layout.tensors, slots, strict=True)}
    indexes = [task.index for task in part]
    rows = len(part) * layout.rows
    return {t.name: slot[indexes].reshape(rows, *t.shape[1:]) for t, slot in zip(layout.tensors, slots, strict=True)}
