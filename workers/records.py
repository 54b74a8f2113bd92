"""The 64-byte record of a queue, the 16-byte frame of a reply pipe, and the words of a slot. No I/O.

A *record* stands for one task on its way to a worker. It is in exactly one place at any instant: a model's
queue (a kernel pipe), one worker's inbox (shared memory that `readv` fills), or answered. A *frame* tells the
client that a task has its outcome. Both name a slot and the sequence number the slot was leased under; whoever
finds another number there has met something stale and leaves it alone.

The state word of a slot holds sequence number and state together, so that one 8-byte store changes both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

RECORD = Struct("<QQQQQIHHI12x")
RECORD_SIZE = 64
RECORD_WORDS = RECORD_SIZE // 8
QUEUED_WORD, ROWS_WORD = 3, 6
"""Which words of a record hold when it was queued and, in the lower half, its rows."""
FRAME = Struct("<QI4x")
FRAME_SIZE = 16
RECORDS_PER_WRITE, FRAMES_PER_WRITE = 4096 // RECORD_SIZE, 4096 // FRAME_SIZE
"""A write of up to 4,096 bytes (PIPE_BUF) is atomic: it gets in whole or not at all, and those of several never mix."""

assert RECORD.size == RECORD_SIZE and FRAME.size == FRAME_SIZE

# Words of a slot, in units of 8 bytes from its start. Each has one writer at a time: `STATE` follows the record
# (client, then worker, then client; the pool for a worker it has reaped, and for records that no worker takes any
# more), `CONTROL` and `INPUT` are the
# client's, `OUTPUT` is written with the outcome.
STATE, CONTROL, INPUT, OUTPUT = 0, 1, 2, 3
SLOT_HEADER = 64
ERROR_ROOM = 1024
"""Bytes kept free in every slot behind the inputs, so that a failure's text always fits."""
CANCEL = 1


class SlotState(IntEnum):
    """The low byte of a state word; from `DONE` on it is an outcome."""

    QUEUED = 1
    RUNNING = 2
    DONE = 16
    SPILLED = 17  # done, and the outputs travel in a memory file of their own
    FAILED = 18  # code and text are in the slot
    CANCELLED = 19
    EXPIRED = 20
    WORKER_DIED = 21
    NOT_READY = 22
    DRAINING = 23


@dataclass(frozen=True, slots=True)
class Record:
    """`arena`, `spill`: ids given by the pool (`spill` 0: the input is in the slot). `seq`: of the slot's lease.
    Times are monotonic nanoseconds. `charges`: how many workers died running the task. `codec`: 0 for tensors,
    else the wire id of the codec of a raw body. `rows`: along the batch axis, 1 for a body, which nobody has looked
    into."""

    arena: int
    seq: int
    deadline_ns: int
    queued_ns: int
    spill: int
    slot: int
    charges: int
    codec: int
    rows: int

    def pack(self) -> bytes:
        return RECORD.pack(
            self.arena,
            self.seq,
            self.deadline_ns,
            self.queued_ns,
            self.spill,
            self.slot,
            self.charges,
            self.codec,
            self.rows,
        )

    @classmethod
    def unpack(cls, buffer: bytes | memoryview, offset: int = 0) -> Record:
        return cls(*RECORD.unpack_from(buffer, offset))


class FrameReader:
    """Cuts a byte stream into frames, whatever pieces it comes in."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, int]]:
        """The (state word, slot) of every frame completed by `data`."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        cut = len(data) % FRAME_SIZE
        if cut:
            self._rest = data[-cut:]
            data = data[:-cut]
        return list(FRAME.iter_unpack(data))
